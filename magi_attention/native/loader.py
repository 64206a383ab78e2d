# SPDX-License-Identifier: Apache-2.0
"""Finds, loads and version-checks the native libraries. Nothing is loaded before somebody asks."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from magi_attention.errors import ContractError, MagiError, UnsupportedError
from magi_attention.native import abi, families, info, install, wheels
from magi_attention.native.comm import abi as comm_abi
from magi_attention.native.intact import why_damaged
from magi_attention.native.toolchain import COMM, GIN, HOST, HOST_MODULE, LIB, PLANNER, library_file


def _more(family: families.Family) -> abi.Functions:
    return abi.PORTABLE_FUNCTIONS if family.is_portable else abi.REMOTE_FUNCTIONS


_FUNCTIONS = {
    PLANNER: abi.PLANNER_FUNCTIONS,
    COMM: comm_abi.COMM_FUNCTIONS,
    GIN: comm_abi.GIN_FUNCTIONS,
    **{f.library: {**abi.FFA_FUNCTIONS, **_more(f)} for f in families.FAMILIES},
}
_BUILD = "python -m magi_attention.native.build"


def load(name: str, folder: Path | None = None, is_kept: bool = True) -> ctypes.CDLL:
    """The library ``"planner"`` or ``"ffa_sm90"`` of ``folder``, by default that of this installation (``find``).

    With ``is_kept`` one object for each is remembered.

    Functions have their argument types set. Loading touches no GPU: the CUDA runtime inside starts at the first
    launch.

    Raises:
        UnsupportedError: it is not there, does not load, or has another ABI version; the text says what to do.
    """
    return (_load if is_kept else _load.__wrapped__)(name, _home(name) if folder is None else folder)


def find(name: str) -> Path | None:
    """The library ``name`` built into this package, else that of a wheel of its own; None if there is neither.

    Raises:
        UnsupportedError: there are wheels with it, and none fits; the text has the pip line that mends it.
    """
    path = LIB / library_file(name)
    return path if path.is_file() else wheels.choose(path.name)


def _home(name: str) -> Path:
    path = find(name)
    return path.parent if path else LIB


@lru_cache(maxsize=64)
def _load(name: str, folder: Path) -> ctypes.CDLL:
    path = folder / library_file(name)
    remedy = _remedy(name.partition("_")[0])
    if not path.is_file():
        extra = {PLANNER: "", COMM: "nvshmem", GIN: ""}.get(name, name.rpartition("_")[2])
        wheel = f"run `{install.ours(f'{install.MAIN}[{extra}]')}`, or " if extra and folder == LIB else ""
        raise UnsupportedError(f"{path.name} is not built for this installation (no {path}); {wheel}{remedy}.")
    _refuse_damaged(path, remedy)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be loaded ({error}); {remedy}, on this machine.") from None
    try:
        for function, (result, arguments) in {**abi.COMMON_FUNCTIONS, **_FUNCTIONS[name]}.items():
            entry = getattr(library, function)
            entry.restype, entry.argtypes = result, arguments
    except AttributeError:
        raise UnsupportedError(f"{path} has no function {function}, so it is of another version; {remedy}.") from None
    version = library.magi_abi_version()
    if version != abi.ABI_VERSION:
        raise UnsupportedError(
            f"{path} has ABI version {version}, this package needs {abi.ABI_VERSION}; {remedy} to replace it."
        )
    return library


def _refuse_damaged(path: Path, remedy: str) -> None:
    if damage := why_damaged(path):
        raise UnsupportedError(
            f"{path} {damage}, as after a full disk or a loss of power; install what it belongs to again (for this "
            f"package `{install.ours(again=True)}`), or {remedy}."
        )


def build_info(library: ctypes.CDLL) -> info.BuildInfo:
    """What a loaded library was built from and with; ``info.read_info`` reads the same from a file."""
    return info.parse(library.magi_build_info().decode())


def _remedy(what: str) -> str:
    return f"run `{_BUILD} --only {what}` in a checkout of the repository"


def load_host(folder: Path | None = None) -> ModuleType:
    """The Python module ``_magi_host`` of ``folder``, by default that of the package.

    Raises:
        UnsupportedError: it is not there, does not load, or is of another version; the text says what to do.
    """
    return _load_host(LIB if folder is None else folder)


@lru_cache(maxsize=4)
def _load_host(folder: Path) -> ModuleType:
    path, remedy = folder / library_file(HOST), _remedy("host")
    if not path.is_file():
        raise UnsupportedError(f"{path.name} is not built for this installation (no {path}); {remedy}.")
    _refuse_damaged(path, remedy)
    spec = importlib.util.spec_from_file_location(HOST_MODULE, path)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UnsupportedError(f"{path} cannot be loaded ({error}); {remedy}, on this machine.") from None
    have = (getattr(module, "abi_version", None), getattr(module, "host_version", None))
    need = (abi.ABI_VERSION, abi.HOST_VERSION)
    if have != need:
        raise UnsupportedError(f"{path} has versions {have}, this package needs {need}; {remedy} to replace it.")
    return module


def why_absent(name: str, folder: Path | None = None) -> str | None:
    """None if the library loads, else the sentence of the error."""
    try:
        load(name, folder)
    except UnsupportedError as error:
        return str(error)
    return None


def check(library: ctypes.CDLL, status: int, what: str) -> None:
    """Turns a status into an exception with the library's own sentence.

    Raises:
        ContractError: invalid argument. UnsupportedError: no variant for it. MagiError: CUDA failed, or a buffer
            was too small.
    """
    if status == abi.OK:
        return
    reason = (library.magi_last_error() or b"").decode(errors="replace") or f"status {status}"
    kind = {abi.INVALID_ARGUMENT: ContractError, abi.UNSUPPORTED: UnsupportedError}.get(status, MagiError)
    raise kind(f"{what}: {reason}")
