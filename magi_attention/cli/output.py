# SPDX-License-Identifier: Apache-2.0
"""Standard output that cannot be written: on a full disk, or once its reader is gone, as in `magi env | head -1`."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


def tell(text: str) -> None:
    """A line on standard error, where there is one."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def flush() -> None:
    """Writes what is left, while somebody can still say that it failed; ``OSError`` if it does."""
    if sys.stdout is not None:
        sys.stdout.flush()


def trouble(error: OSError) -> str | None:
    """A sentence if ``error`` came from output that has no name, which then gets nothing more; else None."""
    try:
        flush()  # what could not be written is still there
    except OSError as again:
        error = again
    else:  # without a buffer it is not
        if error.filename is not None or error.errno not in _OF_OUTPUT:
            return None
    _drop()
    if isinstance(error, BrokenPipeError):
        return "the reader of the output ended before it; what was left is lost."
    return f"the output cannot be written ({error.strerror}); free space, or send it elsewhere."


def flush_or_exit() -> None:
    """Exits with 1 and a sentence if the rest of a text, such as a help, cannot be written."""
    try:
        flush()
    except OSError as error:
        tell(f"magi: {trouble(error)}")
        sys.exit(1)


def _drop() -> None:
    """Standard output leads nowhere from now on, so that the interpreter can flush it when it ends."""
    if sys.stdout is None:
        return
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)
