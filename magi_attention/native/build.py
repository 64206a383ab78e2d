# SPDX-License-Identifier: Apache-2.0
"""Compiles the native libraries into ``magi_attention/lib`` with ninja.

    python -m magi_attention.native.build [--only planner|ffa|host|comm] [--variant STEM ...] [--report FILE]

Incremental; one build at a time per build folder; a library is put in place whole or not at all, and only after
the guard found no register spill and no wgmma warning. Needs neither torch nor a GPU, so that ``setup.py`` can
call it from an isolated build environment.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from magi_attention.env import build as env
from magi_attention.errors import BuildError
from magi_attention.native import families, info, toolchain
from magi_attention.native.compile import ninja
from magi_attention.native.compile.ninja import Job
from magi_attention.native.compile.report import Unit, as_json, check_units, read_unit, table
from magi_attention.native.families import Family
from magi_attention.native.intact import sealed
from magi_attention.native.toolchain import COMM, FFA_SM90, GIN, HOST, LIB, PLANNER, library_file
from magi_attention.version import __version__

# Between the products of a step, not inside them: fewer bytes with smaller tiles, which are slower.
_PORTABLE_SPILLS = 256


@dataclass
class Built:
    """One library in place. ``seconds`` is the wall time of this call, near 0 if nothing changed."""

    name: str
    path: Path
    seconds: float
    units: list[Unit]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of ``folder``, which is made if missing; other processes wait, and say so."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another build in {folder}.", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(source: Path, target: Path) -> None:
    """Copies ``source`` to ``target`` with a seal, atomically, unless the bytes are there already."""
    data = sealed(source.read_bytes())
    if target.exists() and target.read_bytes() == data:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
        shutil.copymode(source, partial)
        os.replace(partial, target)  # processes that mapped the old file keep it
    finally:
        partial.unlink(missing_ok=True)


def planner_job(csrc: Path) -> Job:
    """The host library from ``csrc/planner/*.cpp``."""
    sources = sorted((csrc / "planner").rglob("*.cpp"))
    if not sources:
        raise BuildError(f"{csrc / 'planner'} holds no .cpp file; check out the repository again.")
    cxx = toolchain.require_cxx()
    link = [cxx, "-shared", *toolchain.strip_flags()]
    return Job(PLANNER, sources, [cxx, *toolchain.cxx_flags()], link, _include(csrc))


def ffa_job(
    csrc: Path, arch: str, variants: Sequence | None = None, threads: int | None = None, with_rows: bool = True
) -> Job:
    """The kernels of family ``arch``: attention, and on 9.0 exchanges over NVLink that it runs beside; generates the
    instances.
    ``variants`` defaults to the manifest.

    ``with_rows``: row kernels and the entries of index attention too, which libraries of single variants do without.

    ``threads`` of each nvcc, which change no byte of the result, default to NVCC_THREADS or 2.
    """
    nvcc = str(toolchain.require_nvcc())
    threads = env.nvcc_threads(2) if threads is None else threads
    manifest = toolchain.load_manifest(csrc)
    family = families.BY_NAME[arch]
    folder = csrc / "ffa" / family.sources
    variants = manifest.of_kernels(manifest.MANIFEST if variants is None else variants, family.sources)
    instances = manifest.write_instances(folder / "inst", variants, family.sources)
    symm = [] if family.is_portable else sorted((csrc / "comm" / "symm").glob("*.cu"))
    sources = [
        *sorted((csrc / "ffa" / "common").glob("*.cu")),
        *sorted(folder.glob("*.cu")),
        *sorted((csrc / "ffa" / "plan").glob("*.cu")),
    ]
    sources += [*symm, *instances]
    if with_rows:
        parts = csrc / "range_ops", folder / "index", folder / "indexer", folder / "indexer_kl"
        sources += [path for part in parts for path in sorted(part.glob("*.cu"))]
    flags = toolchain.nvcc_flags(arch)
    # Each object is whole: to link device code would only add an empty cubin, and not always one of this target.
    link = _nvcc_link(nvcc, "-nodlink")
    stems = tuple(sorted(v.stem for v in variants))
    return Job(
        family.library, sources, [nvcc, *flags, f"--threads={threads}"], link, [*_include(csrc), folder],
        (family.target,), stems, spills=_PORTABLE_SPILLS if family.is_portable else 0,
    )  # fmt: skip


def _nvcc_link(nvcc: str, *flags: str) -> list[str]:
    strip = [word for flag in toolchain.strip_flags() for word in ("-Xlinker", flag)]
    return [nvcc, "-shared", "-cudart", "static", *flags, *strip]


def gin_job(csrc: Path) -> Job:
    """The same transfers over NCCL's device API. NCCL is not linked in: the one that torch loads is used."""
    nvcc, nccl = str(toolchain.require_nvcc()), toolchain.require_nccl()
    target, code, plain = _exchange_flags()
    sources = _exchange_sources(csrc, "gin")
    link = _nvcc_link(nvcc, *code)
    compile_command = [nvcc, *plain, *code, *_without_paths(csrc, nccl=nccl), "-DMAGI_COMM_GIN"]
    include = [*_include(csrc), nccl / "include"]
    return Job(GIN, sources, compile_command, link, include, (target,), (), is_guarded=False)


def _exchange_flags() -> tuple[str, list[str], list[str]]:
    """Target, its flags and the other flags of nvcc, for the GPUs that run attention beside transfers."""
    target = toolchain.plain_target(families.SM90.name)
    code = [f"-gencode=arch={target.replace('sm', 'compute')},code={target}"]
    return target, code, [flag for flag in toolchain.nvcc_flags("sm90") if not flag.startswith("-gencode")]


def _without_paths(csrc: Path, **packages: Path) -> list[str]:
    """Flags by which messages of headers, which name their file, hold no folder of the machine that builds."""
    folders = {"csrc": csrc, **packages}
    # nvcc hands the word on to a shell, so it has quotes of its own for a folder with a space.
    return [w for name, folder in folders.items() for w in ("-Xcompiler", f'"-ffile-prefix-map={folder}={name}"')]


def _exchange_sources(csrc: Path, network: str) -> list[Path]:
    comm = csrc / "comm"
    parts = (comm / "networks" / network, comm / "exchange")
    return [csrc / "ffa" / "common" / "host.cu", *(path for part in parts for path in sorted(part.glob("*.cu")))]


def comm_job(csrc: Path) -> Job:
    """The transfers over NVSHMEM, for the GPUs that run attention beside them."""
    nvcc, nvshmem = str(toolchain.require_nvcc()), toolchain.require_nvshmem()
    target, code, plain = _exchange_flags()
    sources = _exchange_sources(csrc, "nvshmem")
    # -rdc: the device half of NVSHMEM is a library of device code, so here device code is linked.
    link = _nvcc_link(nvcc, *code)
    half = [str(nvshmem / "lib" / "libnvshmem_device.a")]  # by its path: -L would stand in the linked device code
    include = [*_include(csrc), nvshmem / "include"]
    compile_command = [nvcc, *plain, *code, *_without_paths(csrc, nvshmem=nvshmem), "-rdc=true"]
    return Job(COMM, sources, compile_command, link, include, (target,), (), half, is_guarded=False)


def host_job(csrc: Path) -> Job:
    """The Python module of prepared launches from ``csrc/python/*.cpp``, for the Python that runs this."""
    sources = sorted((csrc / "python").glob("*.cpp"))
    if not sources:
        raise BuildError(f"{csrc / 'python'} holds no .cpp file; check out the repository again.")
    cxx = toolchain.require_cxx()
    include = [*_include(csrc), toolchain.require_python_headers(), toolchain.require_pybind11()]
    # Small: without the names of templates and what of them nobody calls. A third slower with -Os.
    flags = [*toolchain.cxx_flags(), "-O2", "-ffunction-sections", "-fdata-sections"]
    is_darwin = sys.platform == "darwin"  # where the symbols of Python have to be asked for
    link = ["-undefined", "dynamic_lookup"] if is_darwin else ["-s", "-Wl,--gc-sections"]
    return Job(HOST, sources, [cxx, *flags], [cxx, "-shared", *link], include)


def _include(csrc: Path) -> list[Path]:
    return [csrc / "include", csrc]


def build(
    job: Job,
    folder: Path,
    target: Path,
    jobs: int | None = None,
    guard: bool = True,
    release: info.Release = info.NO_RELEASE,
) -> Built:
    """Compiles ``job`` in ``folder`` and installs the library as ``target``.

    Without ``guard`` slow code is installed too, and said on stderr: for development. ``release`` goes into its record.

    Raises:
        BuildError: the compiler failed (its output is in the text), or the guard did.
    """
    program = toolchain.require_ninja()
    started = time.monotonic()
    with locked(folder):
        objects = ninja.write(job, folder, _write_record(job, folder, release))
        ninja.run(program, folder, ["objects"], jobs)
        units = [read_unit(path) for path in objects]
        try:
            check_units(units if job.is_guarded else [], job.spills)
        except BuildError as error:
            if guard:
                raise BuildError(f"{error}\n{table(units)}") from None
            print(f"warning: {error}", file=sys.stderr, flush=True)
        ninja.run(program, folder, ["library"], jobs)
        install(folder / library_file(job.name), target)
    return Built(job.name, target, round(time.monotonic() - started, 2), units)


def _write_record(job: Job, folder: Path, release: info.Release) -> Path:
    """Writes the source of the build record where it differs; returns it."""
    path = folder / ("build_info.cu" if job.is_nvcc else "build_info.cpp")
    ninja.write_if_changed(path, info.source_text(job.name, __version__, job.archs, job.variants, release))
    return path


def chosen_families() -> list[Family]:
    """The GPU families whose kernels are built where nothing else is asked for: ``asked_families``, else Hopper.

    Raises:
        BuildError: as of ``asked_families``.
    """
    return asked_families() or [families.SM90]


def asked_families() -> list[Family]:
    """Those of MAGI_ATTENTION_BUILD_COMPUTE_CAPABILITY; else those of the GPUs that nvidia-smi lists, if any.

    Raises:
        BuildError: the variable names a GPU for which there are no kernels, or no GPU at all.
    """
    asked = env.build_compute_capability()
    names = re.split(r"[,\s]+", asked.strip()) if asked.strip() else _capabilities_here()
    found: dict[Family, None] = {}
    for name in names:
        digits = name.replace(".", "")
        family = families.family_of(families.capability_of(digits)) if digits.isdecimal() else None
        if family is not None:
            found[family] = None
        elif asked:
            raise BuildError(
                f"MAGI_ATTENTION_BUILD_COMPUTE_CAPABILITY is {asked!r}, and there are no kernels for {name!r}; give a "
                f"comma list out of {families.describe_capabilities()}, with or without the points."
            )
    return list(found)


def _capabilities_here() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return said.stdout.split() if said.returncode == 0 else []


def build_all(
    only: str | None = None,
    arch: str | None = None,
    variants: Sequence[str] = (),
    lib: Path = LIB,
    folder: Path | None = None,
    jobs: int | None = None,
    csrc: Path | None = None,
    guard: bool = True,
    release: info.Release = info.NO_RELEASE,
) -> list[Built]:
    """Builds ``"planner"``, ``"ffa"``, ``"host"`` or all three (None) into ``lib``; ``"comm"``, ``"gin"`` if asked for.

    ``arch`` is the name of a GPU family, by default ``chosen_families``.
    ``variants`` are stems; only those kernels go into the library, for development. ``folder`` keeps objects
    and defaults to ``build/native`` beside ``csrc``. ``release`` goes into the record of each.
    """
    csrc = toolchain.find_csrc() if csrc is None else csrc
    folder = csrc.parent / "build" / "native" if folder is None else folder
    built = []
    if only in (None, "planner"):
        built.append(build(planner_job(csrc), folder / PLANNER, lib / library_file(PLANNER), jobs, guard, release))
    if only in (None, "ffa"):
        # The lock also covers the generated instances, which two builds of one tree would share.
        names = [family.name for family in chosen_families()] if arch is None else [arch]
        for name in names:
            with locked(folder):
                job = ffa_job(csrc, name, _chosen(csrc, variants) if variants else None)
                built.append(build(job, folder / job.name, lib / library_file(job.name), jobs, guard, release))
    if only in (None, "host"):
        # Last, because it needs the most of the Python at hand; one folder for each Python that builds here.
        file = library_file(HOST)
        built.append(build(host_job(csrc), folder / file, lib / file, jobs, guard, release))
    if only in (COMM, GIN):
        job = comm_job(csrc) if only == COMM else gin_job(csrc)
        with locked(folder):
            built.append(build(job, folder / only, lib / library_file(only), jobs, guard, release))
    return built


def _chosen(csrc: Path, stems: Sequence[str]) -> list:
    known = {v.stem: v for v in toolchain.load_manifest(csrc).MANIFEST}
    for stem in stems:
        if stem not in known:
            raise BuildError(f"No variant is called {stem!r}; the manifest has {', '.join(known)}.")
    return [known[stem] for stem in stems]


def report(built: Sequence[Built]) -> dict:
    """Plain data: per library its path, bytes, seconds and units."""
    return {
        "libraries": [
            {
                "name": b.name,
                "path": str(b.path),
                "bytes": b.path.stat().st_size,
                "seconds": b.seconds,
                "units": as_json(b.units),
            }
            for b in built
        ]
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m magi_attention.native.build", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", choices=list(families.BY_NAME), help="GPU family, by default that of the GPUs here")
    parser.add_argument("--only", choices=("planner", "ffa", "host", "comm", "gin"), help="build one library")
    parser.add_argument("--variant", action="append", default=[], metavar="STEM", help="only these kernels")
    parser.add_argument("--jobs", type=int, help="compilations at a time")
    parser.add_argument("--no-guard", action="store_true", help="install slow code too, for development")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write registers, sizes and times as JSON")
    options = parser.parse_args(arguments)
    try:
        built = build_all(options.only, options.arch, options.variant, jobs=options.jobs, guard=not options.no_guard)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for b in built:
        print(f"{b.path} ({b.path.stat().st_size / 1024:.0f} KiB, {b.seconds:.1f} s)")
        print(table(b.units))
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(report(built), indent=1) + "\n")
    return 0


__all__ = ["FFA_SM90", "HOST", "PLANNER", "Built", "build", "build_all", "main", "report"]

if __name__ == "__main__":
    sys.exit(main())
