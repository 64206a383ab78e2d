#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Says whether wheels keep the rules that let them run beside any torch, on any Python and any Linux of the platform.

    python ci/check_wheel.py [--load] [--any-platform] WHEEL ...

Per wheel: its name and tags are those of ci/matrix.json and fit the files in it; its size; each library is for the
machine of the tag, which may be another than this one, needs only what
every system has (no libtorch, no libcudart), searches only beside itself, exports only magi_* and the module's init,
asks no newer glibc than the tag says, holds GPU code of exactly its family, and has a record of this version. Its SBOM
names this version, its libraries as they are, and what they hold of others. --load also opens the libraries with a C
interface, which needs no GPU. Needs readelf, and cuobjdump for wheels of kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import email
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci"), str(ROOT / "wheels")]

import matrix  # noqa: E402
import variants  # noqa: E402

from magi_attention.errors import UnsupportedError  # noqa: E402
from magi_attention.native import abi, info  # noqa: E402
from magi_attention.native.comm import nvshmem  # noqa: E402
from magi_attention.native.wheels import NAMESPACE  # noqa: E402

NEEDED = {
    *("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6"),
}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of the file's head
FA4_PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")  # whose code its kernels hold
PARTS = {"kernels": (NAMESPACE,), "comm": (NAMESPACE,), "main": ("magi_attention",)}


def tool(name: str) -> str:
    """A program on PATH, else out of a package of this Python; or a sentence that says how to get it."""
    packaged = (p for folder in sys.path for p in Path(folder, "nvidia").glob(f"*/bin/{name}"))
    if found := shutil.which(name) or next(packaged, None):
        return str(found)
    source = {"readelf": "apt-get install binutils", "cuobjdump": "pip install nvidia-cuda-cuobjdump"}[name]
    raise SystemExit(f"{name} is needed to check a wheel, and there is none on PATH: run `{source}`.")


def run(command: list[str]) -> str:
    """What a tool prints."""
    words = [tool(command[0]), *command[1:]]
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


def gpu_targets(library: Path) -> set[str]:
    """What the GPU code inside was compiled for, such as {"sm_90a"}; PTX counts as "ptx of ..."."""
    if ".nv_fatbin" not in run(["readelf", "-SW", str(library)]):
        return set()
    machine, ptx = (run(["cuobjdump", option, str(library)]) for option in ("--list-elf", "--list-ptx"))
    forward = {f"ptx of {target}" for target in re.findall(r"\.(sm_\w+)\.ptx", ptx)}
    return forward | set(re.findall(r"\.(sm_\w+)\.cubin", machine))


def exported(library: Path) -> set[str]:
    """Names that the library offers to others."""
    rows = [line.split() for line in run(["readelf", "--dyn-syms", "-W", str(library)]).splitlines()]
    rows = [row for row in rows if len(row) >= 8 and row[4] in ("GLOBAL", "WEAK", "UNIQUE") and row[6] != "UND"]
    return {row[7].partition("@")[0] for row in rows if row[6] != "ABS"}


def build_paths(content: bytes) -> list[str]:
    """Absolute paths of the machine that built a library: of sources, and of folders given to the device linker.

    NVIDIA's own sources lie under /dvs, and the linker's folders in the toolkit say nothing about who built.
    """
    files = re.findall(rb"(?<![\w.$:/+-])(/(?:[\w.+~-]+/)+[\w.+-]+\.(?:cuh|cu|cpp|cc|hpp|h|inl))\b", content)
    files = [f for f in files if not f.startswith((b"/dvs/", b"/usr/"))]
    given = (path for words in re.findall(rb"-L (/[^\s\0]+)", content) for path in words.split(b","))
    folders = [p for p in given if not re.search(rb"/targets/[\w-]+/lib(/stubs)?$", p)]
    return sorted({path.decode(errors="replace") for path in (*files, *folders)})


def elf_machine(library: Path) -> int:
    """The number of the machine in the head of an ELF file, 0 if it is none."""
    head = library.read_bytes()[:20]
    return int.from_bytes(head[18:20], "little") if head[:4] == b"\x7fELF" and len(head) == 20 else 0


def check_library(library: Path, wheel: matrix.Wheel, glibc: str, release: str) -> list[str]:
    """What is wrong with one .so, as sentences without its name. ``glibc``: the newest that it may ask for."""
    found = []
    if (number := elf_machine(library)) != ELF_MACHINES[wheel.machine]:
        found.append(f"is for machine {number} of ELF, and {wheel.machine} is {ELF_MACHINES[wheel.machine]}")
    dynamic = run(["readelf", "-dW", str(library)])
    if extra := sorted(set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)) - NEEDED - {LOADERS[wheel.machine]}):
        found.append(f"needs {', '.join(extra)}, which a system may lack; link it statically or load it at run time")
    paths = [p for text in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic) for p in text.split(":")]
    if wrong := [p for p in paths if p not in ("$ORIGIN", "$ORIGIN/")]:
        found.append(f"searches {', '.join(wrong)}; only $ORIGIN is the same on every machine")
    modules = {"PyInit__magi_host"} if wheel.kind == "main" else set()
    if names := sorted(n for n in exported(library) - modules if not n.startswith("magi_")):
        found.append(f"exports {', '.join(names[:5])}; only magi_* may be seen by other libraries")
    asked = re.findall(r"GLIBC_(\d[\d.]*)", run(["readelf", "-VW", str(library)]))
    newest = max(map(matrix.version, asked), default=())
    if newest > matrix.version(glibc):
        found.append(f"needs glibc {'.'.join(map(str, newest))}, and the tag says {glibc}")
    if paths := build_paths(library.read_bytes()):
        found.append(f"holds {', '.join(paths[:3])} of the machine that built it; map or leave out such paths")
    wanted, have = set(filter(None, wheel.target.split(","))), gpu_targets(library)
    if have != wanted:
        found.append(f"has GPU code for {sorted(have) or 'none'}, and its name says {sorted(wanted) or 'none'}")
    return found + check_record(library, wheel, release)


def check_record(library: Path, wheel: matrix.Wheel, release: str) -> list[str]:
    """What is wrong with the build record of one .so."""
    record = info.read_info(library)
    if record is None:
        return ["has no build record; build it by magi_attention.native.build"]
    found = []
    if (record.version, record.abi) != (release, abi.ABI_VERSION):
        found.append(f"is of version {record.version}, ABI {record.abi}; expected {release}, ABI {abi.ABI_VERSION}")
    if not record.revision:
        found.append("has no git revision; set MAGI_ATTENTION_BUILD_REVISION while building")
    if wheel.kind != "main" and record.distribution != wheel.name:
        found.append(f"was built for {record.distribution or 'no wheel'}")
    if wheel.cuda and not re.match(rf"nvcc {wheel.cuda[2:]}\.", record.compiler):
        found.append(f"was compiled by {record.compiler}")
    return found


def check_tags(path: Path, wheel: matrix.Wheel, text: str, data: dict, platform: str | None) -> list[str]:
    """What is wrong with the tags in the file name and in the WHEEL file."""
    python, abi_tag, platforms = path.stem.split("-")[-3:]
    found = []
    if python not in wheel.pythons:
        found.append(f"is for {python}; {wheel.name} is built for {', '.join(wheel.pythons)}.")
    if abi_tag != ("none" if python == "py3" else python):
        found.append(f"has ABI tag {abi_tag}, which does not go with {python}.")
    wanted = data["platforms"][wheel.machine]["tag"] if platform is None else platform
    if not any(re.fullmatch(wanted, p) for p in platforms.split(".")):
        found.append(f"has platform {platforms}, and it must be {wanted}.")
    fields = email.message_from_string(text)
    inside = {tag.strip() for tag in fields.get_all("Tag", [])}
    if inside != {f"{python}-{abi_tag}-{p}" for p in platforms.split(".")}:
        found.append(f"has tags {sorted(inside)} inside, which are not those of its name.")
    if fields["Root-Is-Purelib"] != "false":
        found.append("says that it is pure Python, and it holds libraries.")
    return found


def check_files(path: Path, wheel: matrix.Wheel, names: list[str]) -> list[str]:
    """What is wrong with the list of files."""
    found = []
    top = {name.partition("/")[0] for name in names}
    strange = sorted(t for t in top if t not in PARTS[wheel.kind] and not t.endswith(".dist-info"))
    if strange:
        found.append(f"would install {', '.join(strange)}, which are not its own.")
    libraries = {Path(name).name for name in names if re.search(r"\.so(\.|$)", name)}
    if wheel.kind == "main":
        python = path.stem.split("-")[-3]
        wanted = {"libmagi_planner.so", f"_magi_host.cpython-{python[2:]}-{wheel.machine}-linux-gnu.so"}
    elif wheel.kind == "kernels":
        wanted = {f"libmagi_ffa_{wheel.arch}.so"}
    else:
        wanted = {"libmagi_comm.so"}
    found += check_objects(wheel, names)
    if libraries != wanted:
        have, need = ", ".join(sorted(libraries)) or "no library", ", ".join(sorted(wanted))
        found.append(f"holds {have}; by its name it is {need}.")
    return found


def check_objects(wheel: matrix.Wheel, names: list[str]) -> list[str]:
    """What is wrong with kernels of FlashAttention-4 among the files."""
    objects = [n for n in names if n.endswith(".o")]
    if not objects:
        return []
    found, folders = [], {n.rpartition("/")[0] for n in objects}
    if wheel.arch != "sm100" or len(folders) != 1 or "/flash_attn_4/" not in objects[0]:
        return [f"holds objects in {', '.join(sorted(folders))}; only the wheel sm100 has them, in one folder."]
    kinds = {Path(n).name.partition("-")[0] for n in objects}
    if kinds != {"fwd", "bwd", "bwd_pre", "bwd_post"} or any("-sm_100f-" not in n for n in objects):
        found.append(f"holds objects of {', '.join(sorted(kinds))}; all must be for sm_100f, in both directions.")
    for package in FA4_PACKAGES:
        if not any(n.startswith(f"{next(iter(folders))}/{package}.LICENSE") for n in names):
            found.append(f"holds kernels with code of {package}, but not its licence.")
    return found


def check_pins(wheel: matrix.Wheel, text: str, release: str, data: dict) -> list[str]:
    """What is wrong with the versions that it asks of the other wheels, in METADATA."""
    wanted = {"magi_attention"} if wheel.kind != "main" else set(matrix.names(data)) - {wheel.name}
    requirements = email.message_from_string(text).get_all("Requires-Dist", [])
    parsed = {re.split(r"[^\w.-]", r)[0].replace("_", "-"): r.replace(" ", "") for r in requirements}
    asked = {n: parsed.get(n.replace("_", "-"), "").partition(";")[0] for n in sorted(wanted)}
    bad = [n for n, text in asked.items() if not text.endswith(f"=={release}")]
    return [f"must ask for {name}=={release}, of the same release." for name in bad]


def held_of_others(wheel: matrix.Wheel, names: list[str], data: dict) -> dict[str, str]:
    """What the SBOM has to name, and how each version begins."""
    if wheel.kind == "main":
        return {"pybind11": ""}
    wanted = {"cuda-cudart": f"{wheel.cuda[2:]}."}
    if wheel.kind == "comm":
        wanted[f"nvidia-nvshmem-{wheel.cuda}"] = data["cuda"][wheel.cuda]["nvshmem"]
    return wanted | {package: "" for package in FA4_PACKAGES if any(name.endswith(".o") for name in names)}


def check_sbom(
    wheel: matrix.Wheel, contents: dict[str, bytes], records: list[info.BuildInfo], release: str, data: dict
) -> list[str]:
    """What is wrong with the SBOM. ``contents`` of the files by name; ``records`` of the libraries among them."""
    file = f"sboms/{wheel.file_name}.cdx.json"
    text = next((body for name, body in contents.items() if name.endswith(f".dist-info/{file}")), None)
    if text is None:
        return [f"has no {file} beside its metadata; build it where cyclonedx-python-lib is installed."]
    try:
        bom = json.loads(text)
        whole, components = bom["metadata"]["component"], bom["components"]
        of_files = {c["name"]: c["hashes"][0]["content"] for c in components if c["type"] == "file"}
        parts = {(c["name"], c.get("version", "")) for c in components}
        named, commits = (whole["name"], whole["version"]), whole.get("pedigree", {}).get("commits", [])
    except (ValueError, LookupError, TypeError):
        return [f"has a {file} that is no CycloneDX JSON of a wheel."]
    found = []
    if bom.get("bomFormat") != "CycloneDX" or named != (wheel.name, release):
        found.append(f"has an SBOM of {' '.join(map(str, named))}, and it is {wheel.name} {release}.")
    have = {n: hashlib.sha256(body).hexdigest() for n, body in contents.items() if re.search(r"\.so(\.|$)", n)}
    if wrong := sorted(n for n in have.keys() | of_files.keys() if have.get(n) != of_files.get(n)):
        found.append(f"has another {', '.join(wrong)} than its SBOM says.")
    for name, start in held_of_others(wheel, list(contents), data).items():
        if not any(part == name and version.startswith(start) for part, version in parts):
            found.append(f"has an SBOM without {name} {start}".rstrip(" .") + ", of which it holds code.")
    for record in records:
        if tuple(record.compiler.split(" ", 1)) not in parts:
            found.append(f"has an SBOM without {record.compiler}, the compiler of {record.name}.")
        if record.revision and [c.get("uid") for c in commits] != [record.revision.removesuffix("-dirty")]:
            found.append(f"has an SBOM of another commit than {record.name}, which is of {record.revision}.")
    return found


def machine_of(path: Path, data: dict) -> str:
    """The machine that the platform tag of a wheel ends with; that of the matrix where it names none."""
    tag = path.stem.rpartition("-")[2]
    return next((machine for machine in data["platforms"] if tag.endswith(f"_{machine}")), matrix.MACHINE)


def check(path: Path, data: dict | None = None, platform: str | None = None) -> list[str]:
    """Everything that is wrong with the wheel at ``path``. ``platform``: a pattern; the tag of the matrix if None."""
    data = matrix.load() if data is None else data
    if variants.label_of(path):  # a copy of a wheel that was held to the rest
        return variants.problems(path, data)
    wheel = matrix.find(path.name.split("-")[0], data, machine=machine_of(path, data))
    release = path.name.split("-")[1]
    found = []
    megabytes = path.stat().st_size / 1e6
    if megabytes > wheel.max_mb:
        found.append(f"is {megabytes:.1f} MB, and the limit is {wheel.max_mb} MB.")
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = [n for n in archive.namelist() if not n.endswith("/")]
        records = []
        texts = {Path(n).name: archive.read(n).decode() for n in names if n.endswith(("/WHEEL", "/METADATA"))}
        found += check_tags(path, wheel, texts.get("WHEEL", ""), data, platform)
        found += check_files(path, wheel, names)
        found += check_pins(wheel, texts.get("METADATA", ""), release, data)
        for name in names:
            if re.search(r"\.so(\.|$)", name):
                library = Path(archive.extract(name, folder))
                glibc = data["platforms"][wheel.machine]["glibc"] if platform is None else "99"
                found += [f"{name} {problem}." for problem in check_library(library, wheel, glibc, release)]
                records.append(info.read_info(library))
        contents = {name: archive.read(name) for name in names}
        found += check_sbom(wheel, contents, [r for r in records if r is not None], release, data)
    return [f"{path.name}: {problem}" for problem in found]


def load(path: Path) -> list[str]:
    """Opens each library with a C interface and asks it for its record; returns what went wrong. A library for another
    machine cannot be opened here, and is left to a runner of that machine."""
    found = []
    if (machine := machine_of(path, matrix.load())) != platform.machine():
        print(f"{path.name}: was not loaded, as it is for {machine}.")
        return []
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        for name in (n for n in archive.namelist() if re.search(r"/lib\w+\.so$", n)):
            library = Path(archive.extract(name, folder))
            try:
                if library.name == "libmagi_comm.so":  # which looks up its other half in the process
                    ctypes.CDLL(str(nvshmem.host_library()), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
                opened = ctypes.CDLL(str(library))
                opened.magi_build_info.restype = ctypes.c_char_p
                said = info.parse(opened.magi_build_info().decode())
            except (OSError, AttributeError, ValueError, UnsupportedError) as error:
                found.append(f"{path.name}: {name} cannot be loaded: {error}.")
                continue
            if said != info.read_info(library):
                found.append(f"{path.name}: {name} says another record than its file.")
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", action="store_true", help="open the libraries too")
    parser.add_argument("--any-platform", action="store_true", help="for wheels that are used on this machine only")
    parser.add_argument("wheels", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    failed = 0
    for path in options.wheels:
        found = check(path, platform=r"(many)?linux_\w+" if options.any_platform else None)
        found += load(path) if options.load else []
        failed += bool(found)
        print("\n".join(found) or f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, good")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
