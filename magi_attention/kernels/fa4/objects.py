# SPDX-License-Identifier: Apache-2.0
"""Kernels of FlashAttention-4 as object files: those that a wheel of ours brings, and those compiled on this machine.

FlashAttention-4 asks a table for a kernel before it compiles one. ``KernelObjects`` is such a table. It looks into the
folders of our wheels, then into a folder of its own, where it also keeps what had to be compiled. An object has one
name: the function, the target, the number of SMs for the forward, whose grid it is compiled for, and a hash of what
FlashAttention-4 tells its kernels apart by. Folders are named by the versions of the compiler, so objects of others are
never met. A file is put in place whole, so processes may write beside one another.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from magi_attention.env import build as env
from magi_attention.native.wheels import NAMESPACE

_log = logging.getLogger("magi_attention.kernels")
_FOLDER, _ENTRY = "flash_attn_4", "func"
# What a kernel is compiled for by itself, and the target whose kernels it runs as well, with the number that
# FlashAttention-4 writes for its GPU.
_FAMILY = {"sm_100a": ("sm_100f", 100), "sm_103a": ("sm_100f", 100)}
_NUMBERS = {"sm_103a": 103}
KINDS = {
    "fwd": "_flash_attn_fwd",
    "bwd": "_flash_attn_bwd",
    "bwd_pre": "_bwd_preprocess",
    "bwd_post": "_bwd_postprocess_convert",
}  # fmt: skip

Key = tuple[Hashable, ...]


class Target(NamedTuple):
    """What kernels are compiled for: a target of the compiler, such as sm_90a, and the number of SMs."""

    arch: str
    num_sms: int


def target_here() -> Target:
    """That of the current GPU, or the one that FlashAttention-4 and its compiler are told by the environment."""
    arch, sms = os.environ.get("CUTE_DSL_ARCH"), os.environ.get("FLASH_ATTENTION_NUM_SMS")
    if arch and sms:
        return Target(arch, int(sms))
    major, minor = torch.cuda.get_device_capability()
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Target(arch or f"sm_{major}{minor}a", int(sms or device.multi_processor_count))


@lru_cache(maxsize=1)
def release() -> str:
    """The folder's name: versions that an object is made by and for, and the processor of the host."""
    made_by = f"{version('flash-attn-4')}-dsl{version('nvidia-cutlass-dsl')}"
    return f"{made_by}-{platform.machine()}"


def own_folder() -> Path:
    """Where kernels compiled on this machine are kept: MAGI_ATTENTION_FFA_FA4_CACHE_DIR, or the cache of kernels."""
    given = env.fa4_cache_dir()
    return (Path(given) if given else Path(env.workspace_base_dir(), ".cache", "magi_attention", _FOLDER)) / release()


def wheel_folders(path: Sequence[str] | None = None) -> list[Path]:
    """The folders of objects in wheels of ours; ``path`` stands for ``sys.path``."""
    places = dict.fromkeys(Path(entry, NAMESPACE) for entry in (sys.path if path is None else path))
    return [folder for place in places for folder in sorted(place.glob(f"*/{_FOLDER}/{release()}"))]


def folder_in_wheel(package: Path) -> Path:
    """Where ``wheel_folders`` finds objects in the folder of a wheel."""
    return package / _FOLDER / release()


def names_of(kind: str, key: Key, target: Target) -> list[str]:
    """The names under which an object serves ``target``, the best one first."""
    found = [_name(kind, key, target)]
    if target.arch in _FAMILY:
        arch, number = _FAMILY[target.arch]
        own = _NUMBERS.get(target.arch)
        found.append(_name(kind, tuple(number if part == own else part for part in key), Target(arch, target.num_sms)))
    return found


def _name(kind: str, key: Key, target: Target) -> str:
    text = repr(key)
    assert " at 0x" not in text, f"FlashAttention-4 tells kernels apart by an object without a name: {text}"
    sms = f"-{target.num_sms}" if kind == "fwd" else ""
    return f"{kind}-{target.arch}{sms}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.o"


class KernelObjects:
    """The table of one function of FlashAttention-4. ``compiled`` counts the kernels that had to be compiled."""

    def __init__(self, kind: str, load: Callable[[Path], Any], folders: Callable[[], list[Path]] = wheel_folders,
                 own: Callable[[], Path] = own_folder, target: Callable[[], Target] = target_here) -> None:  # fmt: skip
        self.kind, self.compiled = kind, 0
        self._load, self._folders, self._own, self._target = load, folders, own, target
        self._functions: dict[tuple[Key, Target], Any] = {}

    def __contains__(self, key: Key) -> bool:
        at = (key, self._target())
        if at in self._functions:
            return True
        found = None if env.is_force_jit_build() else self._find(*at)
        if found is None:
            _log.info("Compiling a kernel of FlashAttention-4 (%s for %s), which takes seconds.", self.kind, at[1].arch)
            return False
        self._functions[at] = found
        return True

    def __getitem__(self, key: Key) -> Any:
        return self._functions[key, self._target()]

    def __setitem__(self, key: Key, function: Any) -> None:
        target = self._target()
        self.compiled += 1
        self._functions[key, target] = function
        folder = self._own()
        path = folder / _name(self.kind, key, target)
        part = folder / f".{path.stem}.{os.getpid()}.o"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            function.export_to_c(object_file_path=str(part), function_name=_ENTRY)
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            _say_once(f"Kernels of FlashAttention-4 cannot be kept in {folder} ({error}); name another folder in "
                      "MAGI_ATTENTION_FFA_FA4_CACHE_DIR.")  # fmt: skip

    def clear(self) -> None:
        """Forgets the kernels of this process; files stay."""
        self._functions.clear()

    def _find(self, key: Key, target: Target) -> Any:
        for folder in (*self._folders(), self._own()):
            for name in names_of(self.kind, key, target):
                path = folder / name
                if path.is_file():
                    try:
                        return self._load(path)
                    except Exception as error:  # whatever a foreign loader raises, the kernel can be compiled
                        _say_once(f"{path} does not load ({error}); its kernel is compiled again.")
        return None


@lru_cache(maxsize=256)
def _say_once(text: str) -> None:
    # The memo is what makes it once per process; it holds no result.
    _log.warning(text)


def install(interface: Any) -> None:
    """Puts the tables in place in ``flash_attn.cute.interface``."""
    import cutlass.cute as cute

    def load(path: Path) -> Any:
        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), _ENTRY)

    for kind, function in KINDS.items():
        getattr(interface, function).compile_cache = KernelObjects(kind, load)


__all__ = ["KINDS", "KernelObjects", "Target", "folder_in_wheel", "install", "names_of", "own_folder", "release",
           "target_here", "wheel_folders"]  # fmt: skip
