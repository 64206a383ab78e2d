# SPDX-License-Identifier: Apache-2.0
"""Is a native library whole? A file that was cut off, or has holes, ends the process by a signal when it is loaded.

The build ends each library with a *seal*: ``magi-seal`` and the CRC of all bytes before it. The loader of the system
does not read behind the sections of a library, so it does not mind. Who strips a library takes the seal away; then its
own table of sections still says how long the file has to be.
"""

from __future__ import annotations

import mmap
import struct
import sys
import zlib
from pathlib import Path

_MARK = b"magi-seal"
_SEAL_BYTES = len(_MARK) + 4
_HEADER = struct.Struct("<4sBB10xHHIQQQIHHHHHH")  # Elf64_Ehdr


def sealed(data: bytes) -> bytes:
    """The bytes of a library, with a seal at their end."""
    return data + _MARK + struct.pack("<I", zlib.crc32(data))


def why_damaged(path: Path) -> str | None:
    """None if the file is whole, as far as can be told, else what is wrong with it, as "is empty"."""
    with open(path, "rb") as file:
        if not path.stat().st_size:
            return "is empty"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            if data[:4] != b"\x7fELF":
                return "is no library" if sys.platform == "linux" else None
            if data[-_SEAL_BYTES:-4] == _MARK:
                (checksum,) = struct.unpack("<I", data[-4:])
                return None if zlib.crc32(view[:-_SEAL_BYTES]) == checksum else "is damaged: its checksum differs"
            return "is cut off" if len(data) < _size_told(data) else None


def _size_told(data: mmap.mmap) -> int:
    """Bytes up to the end of the table of sections, which linkers put last."""
    if len(data) < _HEADER.size:
        return _HEADER.size
    *_, start, _flags, _header, _program_size, _num_programs, size, num, _names = _HEADER.unpack_from(data)
    return start + size * num
