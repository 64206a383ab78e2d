# SPDX-License-Identifier: Apache-2.0
"""Native libraries and their sources for tests: where they cannot be had the test is skipped."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from magi_attention.errors import BuildError
from magi_attention.native import build, loader, toolchain
from magi_attention.testing.waiting import DEADLINE_S


def planner_or_skip() -> None:
    """Builds the planner library where it is missing or out of date; skips the test where there is no compiler."""
    _build_or_skip("planner", "planner library")
    loader._load.cache_clear()


def planner_if_possible() -> None:
    """Builds the planner library for tests that need it for nothing but speed: where it cannot be built they go on."""
    import pytest

    with contextlib.suppress(pytest.skip.Exception):
        planner_or_skip()


def host_or_skip() -> None:
    """The same for the Python module of prepared launches."""
    _build_or_skip("host", "host module")
    loader._load_host.cache_clear()


def csrc_or_skip() -> Path:
    """The folder of the native sources; skips the test where there is none, as beside an installed package."""
    import pytest

    try:
        return toolchain.find_csrc()
    except BuildError as error:
        pytest.skip(str(error))


def compiled_or_skip(
    folder: Path,
    sources: Sequence[Path],
    includes: Sequence[Path],
    *flags: str,
    prepare: Callable[[], object] | None = None,
) -> ctypes.CDLL:
    """C++ sources as a shared library in ``folder``, for the CPU; skips the test where there is no g++.

    The first process that asks compiles, after it has called ``prepare``, which may write sources; the others load what
    it made. So ``folder`` must be new in each run of the tests.

    Raises:
        AssertionError: the sources do not compile; its text is the compiler's.
    """
    import pytest

    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip(f"There is no g++ to compile {', '.join(s.name for s in sources)} with; install one.")
    path = folder / f"{sources[0].stem}.so"
    with build.locked(folder):
        if not path.exists():
            if prepare is not None:
                prepare()
            part = path.with_suffix(".part")
            paths = [*(f"-I{i}" for i in includes), *map(str, sources), "-o", str(part)]
            done = subprocess.run(
                [compiler, "-std=c++17", "-fPIC", "-shared", "-Wall", *flags, *paths],
                capture_output=True, text=True, timeout=DEADLINE_S,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            part.rename(path)
    return ctypes.CDLL(str(path))


def _build_or_skip(name: str, what: str) -> None:
    import pytest

    try:
        build.build_all(name)
    except BuildError as error:
        pytest.skip(f"The {what} cannot be built here: {error}")
