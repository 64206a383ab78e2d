# SPDX-License-Identifier: Apache-2.0
"""Finds libraries that come in wheels of their own, such as ``magi-attention-kernels-sm90-cu13``.

Such a wheel puts one folder into ``magi_attention_kernels``, which no package owns, named by GPU family and CUDA
version: ``magi_attention_kernels/sm90_cu13/libmagi_ffa_sm90.so``. To look there costs a directory listing, and no code
of the wheel runs. Which of two to take, and whether it fits this package, is read from the records of the libraries.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from magi_attention.errors import UnsupportedError
from magi_attention.native import abi, install
from magi_attention.native.info import BuildInfo, read_info
from magi_attention.version import __version__

NAMESPACE = "magi_attention_kernels"
_DRIVER = Path("/proc/driver/nvidia/version")


def libraries(file: str, path: Sequence[str] | None = None) -> list[Path]:
    """Every installed ``file``, that of the newest CUDA first. ``path`` stands for ``sys.path``."""
    places = dict.fromkeys(Path(entry, NAMESPACE) for entry in (sys.path if path is None else path))
    found = [library for place in places for library in sorted(place.glob(f"*/{file}"))]
    return sorted(found, key=lambda p: -_cuda_major(p.parent.name))  # stable: then in the order of the path


def _cuda_major(folder: str) -> int:
    named = re.fullmatch(r"\w+_cu(\d+)", folder)
    return int(named[1]) if named else 0


def driver_version(file: Path = _DRIVER) -> tuple[int, ...]:
    """Version of the NVIDIA driver of this machine, such as (580, 65, 6); empty without one."""
    try:
        numbers = re.search(r"Kernel Module\b.*?(\d+(?:\.\d+)+)", file.read_text())
    except OSError:
        return ()
    return tuple(map(int, numbers[1].split("."))) if numbers else ()


def choose(file: str, path: Sequence[str] | None = None, driver: tuple[int, ...] | None = None) -> Path | None:
    """The installed ``file`` that fits this package and the driver best; None if there is none at all.

    Without a driver any will do, because nothing is launched.

    Raises:
        UnsupportedError: there are some, and none fits; the text has the pip line that mends it.
    """
    driver = driver_version() if driver is None else driver
    reasons = []
    for library in libraries(file, path):
        reason = why_unfit(library, read_info(library), driver)
        if reason is None:
            return library
        reasons.append(reason)
    if reasons:
        raise UnsupportedError(" ".join(reasons))
    return None


def why_unfit(library: Path, record: BuildInfo | None, driver: tuple[int, ...] = ()) -> str | None:
    """Why a library out of a wheel is not used, as a sentence with the remedy; None if it fits."""
    if record is None or not record.distribution:
        return f"{library} has no record of a wheel; build and install its wheel again."
    if (record.version, record.abi) != (__version__, abi.ABI_VERSION):
        return (
            f"{library} is of version {record.version} (ABI {record.abi}), and magi_attention is {__version__} (ABI "
            f"{abi.ABI_VERSION}); run `{install.ours(record.distribution)}`."
        )
    least = tuple(map(int, record.min_driver.split("."))) if record.min_driver else ()
    if driver and driver < least:
        have, need = ".".join(map(str, driver)), record.min_driver
        older = re.sub(r"cu\d+$", "cu12", record.distribution)
        instead = f", or run `{install.ours(older)}`" if older != record.distribution else ""
        return f"{library} needs an NVIDIA driver of {need} or newer, and this is {have}; update the driver{instead}."
    return None
