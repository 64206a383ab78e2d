# SPDX-License-Identifier: Apache-2.0
"""Reading text files that a user names, and writing files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path


def read_text(path: Path, what: str, error: type[Exception]) -> str:
    """The UTF-8 text of a file; ``error`` with the file's name if it cannot be read or is no text.

    ``what`` begins the sentence, such as "The mask file".
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as reason:
        raise error(f"{what} cannot be read: {reason}.") from None
    except UnicodeDecodeError as reason:
        raise error(f"{what} {path} is no text: byte {reason.start} is no UTF-8. Give a text file.") from None


def open_private(path: str | Path) -> int:
    """A descriptor of the file, emptied, for its owner alone from its first byte on; ``OSError`` as ``open`` has it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)  # one that was there keeps its mode otherwise
    return descriptor


def write_private(path: str | Path, text: str) -> None:
    with open(open_private(path), "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(text)
