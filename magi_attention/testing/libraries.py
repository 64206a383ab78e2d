# SPDX-License-Identifier: Apache-2.0
"""Native libraries and their sources for tests: where they cannot be had the test is skipped."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from magi_attention.errors import BuildError
from magi_attention.native import build, loader, toolchain
from magi_attention.testing.waiting import DEADLINE_S

_KEPT_VERSIONS = 4  # of a library that tests compile, for those who go back and forth between branches


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

    ``prepare`` may write sources. The library is kept under the hash of the preprocessed text, the flags and the
    compiler, so that it is compiled once for all processes, and again only after a change of what goes into it.

    Raises:
        AssertionError: the sources do not compile; its text is the compiler's.
    """
    import pytest

    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip(f"There is no g++ to compile {', '.join(s.name for s in sources)} with; install one.")
    command = [compiler, "-std=c++17", "-fPIC", "-shared", "-Wall", *flags, *(f"-I{i}" for i in includes)]
    command += map(str, sources)
    with build.locked(folder):
        if prepare is not None:
            prepare()
        inputs = (_output([compiler, "--version"]), " ".join(command), _output([*command, "-E", "-P"]))
        name, key = sources[0].stem, hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
        path = folder / f"{name}-{key}.so"
        if not path.exists():
            part = path.with_suffix(".part")
            _output([*command, "-o", str(part)])
            part.rename(path)
        path.touch()
        newest_first = sorted(folder.glob(f"{name}-*.so"), key=lambda x: x.stat().st_mtime, reverse=True)
        for old in newest_first[_KEPT_VERSIONS:]:
            old.unlink()
        return ctypes.CDLL(str(path))


def _output(command: Sequence[str]) -> str:
    """What a compiler prints; AssertionError with its complaints if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _build_or_skip(name: str, what: str) -> None:
    import pytest

    try:
        build.build_all(name)
    except BuildError as error:
        pytest.skip(f"The {what} cannot be built here: {error}")
