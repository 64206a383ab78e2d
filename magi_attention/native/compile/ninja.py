# SPDX-License-Identifier: Apache-2.0
"""``Job``: what becomes one library; and ninja, which compiles and links it in a folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from magi_attention.env import build as env
from magi_attention.errors import BuildError
from magi_attention.native import toolchain
from magi_attention.native.toolchain import library_file

_STEP = Path(__file__).with_name("step.py")
_VERSION_SCRIPT = "{ global: magi_*; PyInit_*; local: *; };\n"


@dataclass
class Job:
    """What becomes one library: objects by source file, and how to compile and link them.

    ``archs`` and ``variants`` are for its record, see ``native.info``; ``libraries`` come after the objects.
    ``spills``: bytes of register spills that are no fault of a kernel.
    Without ``is_guarded`` spills are no fault: calls into a library of device code save registers.
    """

    name: str
    sources: list[Path]
    compile: list[str]
    link: list[str]
    include: list[Path] = field(default_factory=list)
    archs: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    libraries: list[str] = field(default_factory=list)
    is_guarded: bool = True
    spills: int = 0

    @property
    def is_nvcc(self) -> bool:
        return Path(self.compile[0]).name == "nvcc"


def write(job: Job, folder: Path, record: Path) -> list[Path]:
    """Writes build.ninja where it differs; returns the object files, without that of the record."""
    script = folder / "exports.map"
    write_if_changed(script, _VERSION_SCRIPT)
    include = [f"-I{path}" for path in job.include]
    step = [sys.executable, str(_STEP)]
    # -MT: a compiler would name the temporary file as the target of the dependencies.
    depfile = ["-MMD", "-MT", "$out", "-MF", "$out.d"]
    compile_command = [*step, "$out", "--", *job.compile, *include, *depfile, "-c", "$in", "-o", "{out}"]
    export = [] if sys.platform == "darwin" else _export_flags(job.is_nvcc, script)
    link_command = [*step, "$out", "--", *job.link, *export, "$in", *job.libraries, "-o", "{out}"]
    sources = [*job.sources, record]
    names = _object_names(sources)
    lines = [
        "ninja_required_version = 1.5",
        "rule compile",
        f"  command = {_shell(compile_command)}",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        f"  command = {_shell(link_command)}",
        "  description = link $out",
    ]
    lines += [f"build {name}: compile {_escape(source)}" for source, name in zip(sources, names)]
    library = library_file(job.name)
    lines += [
        f"build {library}: link {' '.join(names)} | {script.name}",
        f"build objects: phony {' '.join(names)}",
        f"build library: phony {library}",
    ]
    write_if_changed(folder / "build.ninja", "\n".join(lines) + "\n")
    return [folder / name for name in names[:-1]]


def _object_names(sources: Sequence[Path]) -> list[str]:
    names = [f"{source.stem}.o" for source in sources]
    if len(set(names)) != len(names):
        raise BuildError(f"Two sources have one name among {sorted(names)}; rename one.")
    return names


def _export_flags(is_nvcc: bool, script: Path) -> list[str]:
    # By name alone, since ninja works in the folder: nvcc would split a path at its spaces.
    flag = f"--version-script={script.name}"
    return ["-Xlinker", flag] if is_nvcc else [f"-Wl,{flag}"]


def _shell(words: Sequence[str]) -> str:
    quoted = []
    for word in words:
        plain = word in ("$in", "$out", "$out.d")
        text = word if plain else word.replace("$", "$$")
        # {out} stays literal for step.py; everything else that a shell would read is quoted.
        is_safe = plain or all(c.isalnum() or c in "-_./=+,:@%{}" for c in word)
        quoted.append(text if is_safe else "'" + text.replace("'", "'\\''") + "'")
    return " ".join(quoted)


def _escape(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def run(ninja: Path, folder: Path, targets: list[str], jobs: int | None) -> None:
    """Has ninja make ``targets`` of ``folder``; ``BuildError`` with the compiler's words if one fails."""
    command = [str(ninja), "-C", str(folder), "-j", str(jobs or toolchain.num_jobs())]
    command += ["-v"] if env.is_build_verbose() else []
    # No reading of the terminal; ninja's own progress is one line per step when piped.
    done = subprocess.run([*command, *targets], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if env.is_build_verbose():
        print(done.stdout, flush=True)
    if done.returncode:
        remedy = "correct the sources or use another compiler"
        raise BuildError(f"Compilation failed in {folder}; {remedy}. The compiler said:\n{done.stdout}")
