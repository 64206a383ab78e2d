# SPDX-License-Identifier: Apache-2.0
"""Programs of several parts: the first word names a part, which is a module with a ``main`` and options of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module


def run_part(arguments: Sequence[str] | None, parts: Mapping[str, tuple[str, str]]) -> int | None:
    """What the part gives that ``arguments``, or the command line, begin with; None if they begin with none.

    ``parts``: word -> (module, what it measures).
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words or words[0] not in parts:
        return None
    found: int = import_module(parts[words[0]][0]).main(words[1:])
    return found


def told(parts: Mapping[str, tuple[str, str]]) -> str:
    """For the end of a program's help."""
    texts = "; ".join(f"{word}: {text}" for word, (_, text) in parts.items())
    return f"In place of these options a part may be named, which has its own --help. {texts}."
