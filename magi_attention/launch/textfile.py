# SPDX-License-Identifier: Apache-2.0
"""Reading text files that a user names."""

from __future__ import annotations

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
