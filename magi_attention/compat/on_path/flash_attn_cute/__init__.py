# SPDX-License-Identifier: Apache-2.0
"""Stands in for ``flash_attn_cute`` where a program looks for ``flash_attn_cute.ffa_fa3``.

Where the package itself is installed, this is that package: its code runs here and its modules come first, so that
only those that it lacks are taken from this folder.
"""

import sys as _sys
from pathlib import Path as _Path


def _installed() -> _Path | None:
    """The ``__init__.py`` of a package of this name further on in ``sys.path``."""
    here = _Path(__file__).resolve()
    for folder in _sys.path:
        file = _Path(folder or ".") / "flash_attn_cute" / "__init__.py"
        if file.is_file() and file.resolve() != here:
            return file.resolve()
    return None


if _file := _installed():
    __path__.insert(0, str(_file.parent))
    __file__ = str(_file)
    exec(compile(_file.read_text(encoding="utf-8"), __file__, "exec"))
