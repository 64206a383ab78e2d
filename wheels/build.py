# SPDX-License-Identifier: Apache-2.0
"""Builds the wheels of ci/matrix.json and checks them. Called as ci/build_wheels.

    ci/build_wheels [--only NAME] [--python 3.12 ...] [--cuda-home DIR ...] [--out DIR] [--twice] [--fa4]
                    [--record FILE]
    ci/build_wheels --machine aarch64 --cuda-home DIR
    ci/build_wheels --variants                  kernels under one name as well, by the GPU: wheels/variants.py
    ci/build_wheels --engine cibuildwheel [--dry-run]

Here, every wheel is built from a copy of the files that git knows, so that nothing left over gets into one. A wheel
whose sources, tools and compiler did not change is not built again; what was cut short goes on where it stopped.
Compilations run side by side as far as cores and memory allow (MAX_JOBS decides otherwise). Kernels are built once per
CUDA toolkit: the one found, and those of --cuda-home. Libraries are linked for the platform tag by wheels/portable_cxx;
--system-linker leaves that out, and the wheel then gets the tag that auditwheel grants. --twice builds everything a
second time, in another folder without what the first left, and compares. Collectives are built again in the same
folder: they hold linked device code, into which nvcc puts the path of the sources. In a manylinux image that is fixed.

With --record, kernel and comm wheels whose sources and nvcc are those of a committed record are left out, and the
record gets those that were built and found good.

With --machine aarch64 on an x86_64 machine, wheels of kernels and collectives are cross-compiled: the compiler is
that of Debian's package g++-aarch64-linux-gnu, and DIR is a toolkit that has targets/sbsa-linux, too. What comes out is
read, and not run. The main package has a module for one Python of that machine, so a runner of it builds that one.

With --fa4, as for a release, the wheel sm100 brings kernels of FlashAttention-4; their compiler is 1.5 GB to fetch.

On a runner, cibuildwheel does the same in a manylinux image. Builds of one commit have its time and revision inside.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci"), str(ROOT / "wheels")]

import matrix  # noqa: E402
import variants  # noqa: E402
from record import Record  # noqa: E402

from magi_attention.errors import BuildError  # noqa: E402
from magi_attention.native import toolchain  # noqa: E402
from magi_attention.native.build import locked  # noqa: E402

WORK = ROOT / "build" / "wheels"
TOOLS = ROOT / "wheels" / "tools.txt"
FA4_TOOLS = ROOT / "wheels" / "fa4_tools.txt"
HERE = platform.machine()


Job = tuple[matrix.Wheel, str, Path, "Path | None"]  # wheel, Python version, its interpreter, nvcc


def say(text: str) -> None:
    print(f"wheels: {text}", flush=True)


def run(command: list, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Standard output of a command; its last words and an exit where it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout


def find_python(version: str) -> Path | None:
    """An interpreter of that version: on PATH, else of pyenv, else one that uv knows."""
    patterns = Path.home() / ".pyenv" / "versions"
    places = [shutil.which(f"python{version}"), *sorted(map(str, patterns.glob(f"{version}.*/bin/python{version}")))]
    if shutil.which("uv"):
        found = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True)
        places.append(found.stdout.strip())
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for place in filter(None, places):
        said = subprocess.run([place, "-c", code], capture_output=True, text=True)
        if said.stdout.strip() == version:
            return Path(place)
    return None


def environment_of(python: Path, folder: Path, tools: Path = TOOLS) -> Path:
    """A virtual environment of ``python`` with what ``tools`` lists; made once. Returns its interpreter."""
    stamp, ready = folder / "tools.txt", folder / "bin" / "python"
    if not (stamp.exists() and stamp.read_text() == tools.read_text()):
        shutil.rmtree(folder, ignore_errors=True)
        say(f"preparing {folder.name}")
        run([python, "-m", "venv", folder])
        run([ready, "-m", "pip", "install", "--quiet", "-r", tools])
        shutil.copyfile(tools, stamp)
    return ready


def nvshmem_of(cuda: str, python: Path, machine: str = HERE) -> Path:
    """A folder with the nvidia-nvshmem package of that CUDA version alone: those of two share their place."""
    version = matrix.load()["cuda"][cuda]["nvshmem"]
    folder = WORK / f"nvshmem-{cuda}-{version}-{machine}"
    if not folder.is_dir():
        partial = folder.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", partial]
        if machine != HERE:
            pip += ["--only-binary", ":all:", "--platform", f"manylinux2014_{machine}"]
        run([*pip, f"nvidia-nvshmem-{cuda}=={version}"])
        partial.rename(folder)
    return folder


def sources() -> list[str]:
    """Files that git knows, changed ones included."""
    return sorted(name for name in run(["git", "ls-files", "-z"]).split("\0") if name and (ROOT / name).exists())


def source_key(names: list[str]) -> str:
    """16 hex digits over all that a wheel is made of."""
    digest = hashlib.sha256()
    for name in names:
        if name.startswith(("csrc/", "magi_attention/", "wheels/", "ci/matrix")) or "/" not in name:
            digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def export(names: list[str], target: Path) -> None:
    """Makes ``target`` a copy of the files; what is equal stays as it is, so that objects built there stay good."""
    for path in sorted(target.rglob("*"), reverse=True):
        relative = path.relative_to(target)
        if relative.parts[0] == "build" or relative.parts[-2:-1] == ("inst",):
            continue  # what builds leave behind
        if path.is_file() and relative.as_posix() not in names:
            path.unlink()
    for name in names:
        source, copy = ROOT / name, target / name
        if not (copy.exists() and copy.read_bytes() == source.read_bytes()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
            copy.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def revision() -> tuple[str, str]:
    """(git revision, with -dirty where tracked files differ; the commit's time in seconds)."""
    commit, seconds = run(["git", "log", "-1", "--format=%H %ct"]).split()
    dirty = "-dirty" if run(["git", "status", "--porcelain", "--untracked-files=no"]).strip() else ""
    return commit + dirty, seconds


def build_environment(python: Path, source: Path, is_portable: bool, machine: str = HERE) -> dict[str, str]:
    """What a build sees: the commit's time and name, and nothing of this machine that could end up inside. For another
    ``machine``, what makes compilers and tags those of it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAGI_", "PYTHON", "NVCC_", "_PYTHON"))}
    name, seconds = revision()
    out = {
        **kept,
        "PATH": f"{python.parent}{os.pathsep}{kept['PATH']}",
        "SOURCE_DATE_EPOCH": seconds,
        "MAGI_ATTENTION_BUILD_REVISION": name,
        "MAGI_ATTENTION_PREBUILD_FFA": "0",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LC_ALL": "C",
    }
    if is_portable:
        linker = source / "wheels" / "portable_cxx"
        out |= {"CXX": str(linker), "NVCC_CCBIN": str(linker)}  # a path may have a space
    if machine != HERE:
        target = matrix.load()["platforms"][machine]["cuda_target"]
        out |= {"MAGI_WHEEL_MACHINE": machine, "NVCC_APPEND_FLAGS": f"-target-dir {target}"}
        out |= {"_PYTHON_HOST_PLATFORM": f"linux-{machine}"}  # from which setuptools takes the tag
    return out


def toolkits(homes: list[str]) -> dict[str, Path]:
    """Toolkits by name such as cu13: the ones given, then the one found without being told."""
    try:
        nvccs = [Path(home, "bin", "nvcc") for home in homes] + [toolchain.require_nvcc()]
    except BuildError as error:
        say(str(error))
        nvccs = [Path(home, "bin", "nvcc") for home in homes]
    found: dict[str, Path] = {}
    for nvcc in nvccs:
        release = re.search(r"release (\d+)\.", run([nvcc, "--version"]))
        found.setdefault(f"cu{release[1]}", nvcc)
    return found


def retag(wheel: Path, python: Path, out: Path, environment: dict[str, str], machine: str = HERE) -> Path:
    """The wheel with its platform tag: that of the matrix, or what auditwheel grants, which is said."""
    tag, fresh = matrix.load()["platforms"][machine]["tag"], wheel.parent / "tagged"
    program = ["-m", "auditwheel"]
    if machine != HERE:  # it looks into libraries of any machine, and offers the tags of its own alone
        code = f"import platform; platform.machine = lambda: {machine!r}; from auditwheel.main import main; main()"
        program = ["-c", code]
    auditwheel = [str(word) for word in (python, *program, "repair", "--only-plat", "-w", fresh)]
    command = [*auditwheel, "--plat", tag, str(wheel)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        say(f"{wheel.name} is no {tag} wheel: {' '.join(last)}")
        run([*auditwheel, wheel], environment=environment)
    (made,) = fresh.glob("*.whl")
    return Path(shutil.move(str(made), str(out / made.name)))


def build_one(
    wheel: matrix.Wheel, python: Path, source: Path, out: Path, is_portable: bool, nvcc: Path | None, fa4: Path | None
) -> Path:
    """One wheel into ``out``. ``fa4``: a Python that compiles kernels of FlashAttention-4."""
    environment = build_environment(python, source, is_portable, wheel.machine)
    if fa4 is not None:
        environment |= {"MAGI_WHEEL_FA4": str(fa4)}
    if wheel.kind == "comm":
        environment |= {"PYTHONPATH": str(nvshmem_of(wheel.cuda, python, wheel.machine))}
    if nvcc is not None:
        environment |= {"MAGI_WHEEL_ARCH": wheel.arch, "MAGI_WHEEL_CUDA": wheel.cuda}
        environment |= {"CUDA_HOME": str(nvcc.parent.parent)}
    raw = source / "build" / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    shutil.rmtree(source / "build" / "lib", ignore_errors=True)
    for stale in (*source.glob("build/lib.*"), *source.glob("build/bdist.*"), source / "magi_attention" / "lib"):
        shutil.rmtree(stale, ignore_errors=True)
    pip = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "-w", raw, source / wheel.folder], source, environment)
    (made,) = raw.glob("*.whl")
    return retag(made, python, out, environment, wheel.machine)


def why_not_crossed(wheel: matrix.Wheel, nvcc: Path | None) -> str:
    """Why a wheel for another machine than this cannot be made here, as a sentence; empty if it can, or is for this."""
    if wheel.machine == HERE:
        return ""
    row = matrix.load()["platforms"][wheel.machine]
    if wheel.kind == "main":
        return f"its module is for one Python of {wheel.machine}; build it on such a machine."
    if not shutil.which(row["compiler"]):
        package = f"g++-{wheel.machine.replace('_', '-')}-linux-gnu"
        return f"there is no {row['compiler']}; on Debian and Ubuntu run `apt-get install {package}`."
    home = nvcc.parent.parent if nvcc else None
    if home and not (home / "targets" / row["cuda_target"] / "lib" / "libcudart_static.a").is_file():
        return (
            f"{home} has no targets/{row['cuda_target']} with include and lib/libcudart_static.a; install "
            "NVIDIA's cuda-cross packages, or put there what the pip package nvidia-cuda-runtime has for that machine."
        )
    return ""


def plan(options: argparse.Namespace) -> list[Job]:
    """Everything to build; says what cannot be."""
    data, out = matrix.load(), []
    homes = toolkits(options.cuda_home)
    wanted = options.python or data["pythons"]
    for wheel in matrix.wheels(data):
        if wheel.machine != options.machine or (options.only and wheel.name not in options.only):
            continue
        if reason := why_not_crossed(wheel, homes.get(wheel.cuda)):
            say(f"{wheel.name} is left out: {reason}")
            continue
        if wheel.cuda and wheel.cuda not in homes:
            say(f"{wheel.name} is left out: there is no nvcc of CUDA {wheel.cuda[2:]}; name a toolkit by --cuda-home.")
            continue
        nvcc_says = run([homes[wheel.cuda], "--version"]) if options.record and wheel.cuda else ""
        if nvcc_says and options.record.has(wheel.name, wheel.machine, nvcc_says):
            say(f"{wheel.name} is left out: {options.record.path} has these sources and this nvcc as built and good.")
            continue
        for version in wanted if wheel.kind == "main" else [f"{sys.version_info[0]}.{sys.version_info[1]}"]:
            interpreter = find_python(version)
            if interpreter is None:
                say(f"{wheel.name} for Python {version} is left out: there is no such Python here.")
                continue
            out.append((wheel, version, interpreter, homes.get(wheel.cuda)))
    return out


def build_here(
    options: argparse.Namespace, chosen: list[Job], source: Path, out: Path, is_fresh: bool = False
) -> list[Path]:
    """Builds what ``plan`` chose from a copy of the sources in ``source``; returns the wheels in ``out``."""
    names = sources()
    key = source_key(names)
    if is_fresh:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    export(names, source)
    state_file = out / "done.json"
    state = json.loads(state_file.read_text()) if state_file.exists() else {}
    made = []
    for wheel, version, interpreter, nvcc in chosen:
        started = time.monotonic()
        python = environment_of(interpreter, WORK / f"venv-{version}")
        name, nvcc_says = f"{wheel.name} {version} {wheel.machine}", run([nvcc, "--version"]) if nvcc else ""
        with_fa4 = options.fa4 and wheel.arch == "sm100"
        fa4 = environment_of(interpreter, WORK / f"venv-fa4-{version}", FA4_TOOLS) if with_fa4 else None
        text = f"{key} {revision()[0]} {options.system_linker} {TOOLS.read_text()} {nvcc_says} {with_fa4}"
        stamp = hashlib.sha256(text.encode()).hexdigest()[:16]
        known = state.get(name, {})
        path = out / known.get("file", "none")
        if known.get("stamp") != stamp or not path.is_file() or digest(path) != known["sha256"]:
            place = source
            if is_fresh and wheel.kind == "comm":
                place = WORK / "source"
                shutil.rmtree(place / "build" / "wheels" / wheel.name, ignore_errors=True)
            path = build_one(wheel, python, place, out, not options.system_linker, nvcc, fa4)
            for other in out.glob(f"{path.name.rsplit('-', 1)[0]}-*_{wheel.machine}.whl"):
                if other != path:
                    other.unlink()
            state[name] = {"stamp": stamp, "file": path.name, "sha256": digest(path)}
            state_file.write_text(json.dumps(state, indent=1) + "\n")
        say(f"{digest(path)}  {path.name}  {path.stat().st_size / 1e6:.2f} MB  {time.monotonic() - started:.0f} s")
        made.append(path)
    return made


def digest(path: Path) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def by_cibuildwheel(options: argparse.Namespace, out: Path) -> int:
    """Runs cibuildwheel for every wheel; needs docker or podman. With --dry-run prints the commands."""
    data = matrix.load()
    commit = run(["git", "log", "-1", "--format=%H %ct"]).split()
    for wheel in matrix.wheels(data):
        if wheel.machine != options.machine or (options.only and wheel.name not in options.only):
            continue
        settings = {k: v for k, v in matrix.cibuildwheel(wheel, data).items() if v}
        settings |= {"MAGI_ATTENTION_BUILD_REVISION": commit[0], "SOURCE_DATE_EPOCH": commit[1]}
        command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--output-dir", str(out), wheel.folder]
        print(" ".join([*(f"{k}='{v}'" for k, v in settings.items()), *command]), flush=True)
        if not options.dry_run:
            code = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}).returncode
            if code:
                return code
    return 0


def check_wheels(python: Path, wheels: list[Path], is_portable: bool) -> int:
    """Runs ci/check_wheel.py with the tools of the build."""
    relaxed = [] if is_portable else ["--any-platform"]
    command = [str(word) for word in (python, ROOT / "ci" / "check_wheel.py", "--load", *relaxed)]
    code = 0
    for wheel in wheels:
        # A library of collectives loads beside the NVSHMEM of its own CUDA version only.
        found = re.search(r"_comm_(cu\d+)-", wheel.name)
        place = {"PYTHONPATH": str(nvshmem_of(found[1], python))} if found else {}
        code |= subprocess.run([*command, str(wheel)], env={**os.environ, **place}).returncode
    return code


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ci/build_wheels", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("local", "cibuildwheel"), default="local", help="where to build")
    parser.add_argument("--only", action="append", metavar="NAME", help="this wheel only; may be repeated")
    parser.add_argument("--python", action="append", metavar="X.Y", help="the main package for this Python only")
    parser.add_argument("--cuda-home", action="append", default=[], metavar="DIR", help="a further CUDA toolkit")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels, dist by default")
    machines = list(matrix.load()["platforms"])
    parser.add_argument("--machine", default=HERE, choices=machines, help="of the wheels, this one by default")
    parser.add_argument("--system-linker", action="store_true", help="link for the glibc of this machine")
    parser.add_argument("--fa4", action="store_true", help="compile kernels of FlashAttention-4 into the wheel sm100")
    parser.add_argument("--record", type=Path, metavar="FILE", help="leave out what FILE says was built and good")
    parser.add_argument("--variants", action="store_true", help="add kernels as wheel variants, a draft format")
    parser.add_argument("--twice", action="store_true", help="build again in another folder and compare")
    parser.add_argument("--dry-run", action="store_true", help="with cibuildwheel: print the commands")
    options = parser.parse_args(arguments)
    if options.machine != HERE and options.system_linker:
        parser.error(f"the linker of this system links for {HERE}; leave --system-linker out.")
    os.umask(0o022)
    if options.engine == "cibuildwheel":
        return by_cibuildwheel(options, options.out)
    with locked(WORK):  # two builds would take each other's files away
        return build_and_check(options)


def build_and_check(options: argparse.Namespace) -> int:
    """What ``main`` gives for wheels that are built here."""
    before = revision(), source_key(sources())
    options.record = options.record and Record(options.record, ROOT, sources())
    chosen = plan(options)
    made = build_here(options, chosen, WORK / "source", options.out.resolve())
    if not made:
        say("nothing was built.")
        return 0 if options.record and options.record.used else 1
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    tools = environment_of(Path(sys.executable), WORK / f"venv-{here}")
    code = check_wheels(tools, made, not options.system_linker)
    for wheel, _, _, nvcc in chosen if options.record and code == 0 else ():
        if nvcc:
            options.record.add(wheel.name, wheel.machine, run([nvcc, "--version"]))
    if options.variants:
        for wheel in (path for path in made if "_kernels_" in path.name):
            variant = variants.make(wheel, wheel.parent, matrix.load())
            problems = variants.problems(variant, matrix.load())
            code = code or int(bool(problems))
            say("\n".join(problems) or f"{variant.name}, good")
    if options.twice:
        again = build_here(options, chosen, WORK / "again" / "source", WORK / "again" / "dist", is_fresh=True)
        if (revision(), source_key(sources())) != before:
            raise SystemExit("The checkout changed while wheels were built from it; leave it alone and run this again.")
        differ = [a.name for a, b in zip(made, again) if a.name != b.name or digest(a) != digest(b)]
        say(f"built twice: {len(made) - len(differ)} equal, {len(differ)} differ {' '.join(differ)}")
        code = code or int(bool(differ))
    return code


if __name__ == "__main__":
    sys.exit(main())
