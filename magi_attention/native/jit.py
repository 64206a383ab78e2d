# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels that are not built ahead, at first use, into a cache that versions of the sources do not share.

The cache lies in ``<base>/.cache/magi_attention/<abi version>-<hash>/`` with ``<base>`` from
``MAGI_ATTENTION_WORKSPACE_BASE`` or the home folder; the hash covers sources and flags, so a change of either
can never meet an old binary. Folders are made when something is compiled, not before.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from functools import lru_cache
from pathlib import Path

from magi_attention.env import build as env
from magi_attention.errors import BuildError, UnsupportedError
from magi_attention.native import abi, build, families, loader, toolchain
from magi_attention.native.intact import why_damaged

_log = logging.getLogger("magi_attention.native")


def cache_folder(csrc: Path | None = None, arch: str = "sm90") -> Path:
    """Where the variants of these sources lie. Creates nothing."""
    csrc = toolchain.find_csrc() if csrc is None else csrc
    key = f"{abi.ABI_VERSION}-{toolchain.source_hash(csrc, toolchain.nvcc_flags(arch))}"
    return Path(env.workspace_base_dir()) / ".cache" / "magi_attention" / key


def variant_for(
    dtype: str, head_dim: int, head_dim_v: int, csrc: Path | None = None, kind: str = "fwd", arch: str = "sm90"
):
    """The variant of ``kind`` "fwd" or "bwd" with the smallest tile that holds these head dims on the family ``arch``.

    Raises:
        BuildError: there is none so large, or there are no sources.
    """
    csrc = toolchain.find_csrc() if csrc is None else csrc
    kernels = families.BY_NAME[arch].sources
    variant = toolchain.load_manifest(csrc).narrowest(kind, dtype, head_dim, head_dim_v, kernels)
    if variant is None or head_dim < 1 or head_dim_v < 1:
        raise BuildError(f"Head dims {head_dim} and {head_dim_v}: kernels exist up to 256.")
    return variant


def why_not(
    dtype: str, head_dim: int, head_dim_v: int, arch: str = "sm90", kind: str = "fwd", csrc: Path | None = None
) -> str | None:
    """None if ``load_variant`` finds its kernel in the cache or has what it takes to compile it, else a sentence.

    Compiles nothing and creates nothing.
    """
    try:
        csrc = toolchain.find_csrc() if csrc is None else csrc
        folder = cache_folder(csrc, arch) / variant_for(dtype, head_dim, head_dim_v, csrc, kind, arch).stem
        if not _is_usable(_library(folder, arch)):
            toolchain.require_nvcc()
            toolchain.require_ninja()
            _require_writable(folder)
    except BuildError as error:
        return str(error)
    return None


def compile_variant(variant, csrc: Path | None = None, arch: str = "sm90") -> Path:
    """Folder with the library that holds ``variant`` alone, compiled unless the cache has it.

    It is a whole ``libmagi_ffa_<arch>.so`` with one entry in its table, so it is called like the one built
    ahead. Sources are copied into the cache first: what is compiled is what the hash stands for, even if the
    checkout changes meanwhile or is read-only.

    Slow code is kept too, and said on stderr, as when the package is installed: the compiler may be another than ours.

    Raises:
        BuildError: no nvcc, no ninja, no sources, or they do not compile; or the cache cannot be written.
    """
    csrc = toolchain.find_csrc() if csrc is None else csrc
    folder = cache_folder(csrc, arch) / variant.stem
    library = _library(folder, arch)
    if _is_usable(library):
        return library.parent
    toolchain.require_nvcc()
    _require_writable(folder)
    with build.locked(folder):
        if _is_usable(library):
            return library.parent  # another process was faster
        _log.warning(
            "Compiling attention kernel %s with nvcc, which can take a minute; it is kept in %s.",
            variant.stem, folder,
        )  # fmt: skip
        sources = _snapshot(csrc, folder / "csrc")
        job = build.ffa_job(sources, arch, [variant], threads=env.nvcc_threads(), with_rows=False)
        built = build.build(job, folder / "build", library, guard=False)
        _log.info("Attention kernel %s was compiled in %.0f seconds.", variant.stem, built.seconds)
        if not env.is_build_debug():
            shutil.rmtree(folder / "build", ignore_errors=True)
            shutil.rmtree(sources, ignore_errors=True)
    return library.parent


def _library(folder: Path, arch: str) -> Path:
    return folder / "lib" / toolchain.library_file(families.BY_NAME[arch].library)


def _is_usable(library: Path) -> bool:
    """Is it there, and whole? What was cut off, by a full disk, say, is compiled again."""
    return not env.is_force_jit_build() and library.is_file() and why_damaged(library) is None


def _require_writable(folder: Path) -> None:
    there = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise BuildError(
            f"Compiled kernels are kept in {folder}, and {there} is no folder that can be written; set "
            "MAGI_ATTENTION_WORKSPACE_BASE to one that can."
        )


def _snapshot(csrc: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    for path in toolchain.source_files(csrc):
        copy = target / path.relative_to(csrc)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return target


def load_variant(dtype: str, head_dim: int, head_dim_v: int, arch: str = "sm90", kind: str = "fwd") -> ctypes.CDLL:
    """The library for these head dims ("bf16" or "fp16"), compiled at first use and then kept by the process.

    It has all entry points, but kernels of ``kind`` "fwd" or "bwd" only. With MAGI_ATTENTION_NO_BUILD_CACHE=1 the
    process keeps nothing: each call looks at the sources and loads what belongs to them.

    Raises:
        BuildError: it cannot be compiled. UnsupportedError: it does not load.
    """
    variant = variant_for(dtype, head_dim, head_dim_v, kind=kind, arch=arch)
    if env.is_no_build_cache():
        return _load_variant.__wrapped__(variant, arch)
    return _load_variant(variant, arch)


@lru_cache(maxsize=64)
def _load_variant(variant, arch: str) -> ctypes.CDLL:
    folder = compile_variant(variant, arch=arch)
    try:
        return loader.load(families.BY_NAME[arch].library, folder, is_kept=not env.is_no_build_cache())
    except UnsupportedError as error:
        again = f"It was compiled at first use; delete {folder} to have that done again."
        raise UnsupportedError(f"{error} {again}") from None
