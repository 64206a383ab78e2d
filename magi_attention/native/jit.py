# SPDX-License-Identifier: Apache-2.0
"""Compiles a kernel outside the manifest at first use, into a cache that versions of the sources do not share.

The cache lies in ``<base>/.cache/magi_attention/<abi version>-<hash>/`` with ``<base>`` from
``MAGI_ATTENTION_WORKSPACE_BASE`` or the home folder; the hash covers sources and flags, so a change of either
can never meet an old binary. Folders are made when something is compiled, not before.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
from functools import lru_cache
from pathlib import Path

from magi_attention.env import build as env
from magi_attention.errors import BuildError
from magi_attention.native import abi, build, loader, toolchain

_log = logging.getLogger("magi_attention.native")
MAX_HEAD_DIM = 256


def cache_folder(csrc: Path | None = None, arch: str = "sm90") -> Path:
    """Where the variants of these sources lie. Creates nothing."""
    csrc = toolchain.find_csrc() if csrc is None else csrc
    key = f"{abi.ABI_VERSION}-{toolchain.source_hash(csrc, toolchain.nvcc_flags(arch))}"
    return Path(env.workspace_base_dir()) / ".cache" / "magi_attention" / key


def variant_for(dtype: str, head_dim: int, head_dim_v: int, csrc: Path | None = None, kind: str = "fwd"):
    """The variant of ``kind`` "fwd" or "bwd" with the smallest tile that holds these head dims.

    Tiles of the forward have the next multiples of 64, those of the backward are the ones of the manifest.
    """
    if not (0 < head_dim <= MAX_HEAD_DIM and 0 < head_dim_v <= MAX_HEAD_DIM):
        raise BuildError(f"Head dims {head_dim} and {head_dim_v}: kernels exist up to {MAX_HEAD_DIM}.")
    csrc = toolchain.find_csrc() if csrc is None else csrc
    manifest = toolchain.load_manifest(csrc)
    if kind == "bwd":
        fits = [(d, dv) for d, dv in manifest.BWD_HEAD_DIMS if d >= head_dim and dv >= head_dim_v]
        return manifest.Variant("bwd", dtype, *min(fits, key=sum))
    tile, tile_v = (-(-n // 64) * 64 for n in (head_dim, head_dim_v))
    return manifest.Variant(kind, dtype, tile, tile_v)


def compile_variant(variant, csrc: Path | None = None, arch: str = "sm90") -> Path:
    """Folder with the library that holds ``variant`` alone, compiled unless the cache has it.

    It is a whole ``libmagi_ffa_<arch>.so`` with one entry in its table, so it is called like the one built
    ahead. Sources are copied into the cache first: what is compiled is what the hash stands for, even if the
    checkout changes meanwhile or is read-only.

    Raises:
        BuildError: no nvcc, no ninja, no sources, or they do not compile.
    """
    csrc = toolchain.find_csrc() if csrc is None else csrc
    folder = cache_folder(csrc, arch) / variant.stem
    library = folder / "lib" / toolchain.library_file(f"ffa_{arch}")
    if library.is_file() and not env.is_force_jit_build():
        return library.parent
    toolchain.require_nvcc()
    with build.locked(folder):
        if library.is_file() and not env.is_force_jit_build():
            return library.parent  # another process was faster
        _log.warning("Compiling attention kernel %s, which is not built ahead; it is kept in %s.", variant.stem, folder)
        sources = _snapshot(csrc, folder / "csrc")
        job = build.ffa_job(sources, arch, [variant])
        build.build(job, folder / "build", library, jobs=None)
        if not env.is_build_debug():
            shutil.rmtree(folder / "build", ignore_errors=True)
            shutil.rmtree(sources, ignore_errors=True)
    return library.parent


def _snapshot(csrc: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    for path in toolchain.source_files(csrc):
        copy = target / path.relative_to(csrc)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return target


def load_variant(
    dtype: str, head_dim: int, head_dim_v: int, arch: str = "sm90", kind: str = "fwd"
) -> ctypes.CDLL:
    """The library for these head dims ("bf16" or "fp16"), compiled at first use and then kept by the process.

    It has all entry points, but kernels of ``kind`` "fwd" or "bwd" only.

    Raises:
        BuildError: it cannot be compiled. UnsupportedError: it does not load.
    """
    variant = variant_for(dtype, head_dim, head_dim_v, kind=kind)
    if env.is_no_build_cache():
        return _load_variant.__wrapped__(variant, arch)
    return _load_variant(variant, arch)


@lru_cache(maxsize=64)
def _load_variant(variant, arch: str) -> ctypes.CDLL:
    return loader.load(f"ffa_{arch}", compile_variant(variant, arch=arch))


__all__ = ["cache_folder", "compile_variant", "load_variant", "variant_for"]
