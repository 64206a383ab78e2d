#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads ci/matrix.json, the only place for CUDA versions, GPU families, machines, images, Pythons, torch, size limits.

    python ci/matrix.py                          what is built, as a table; fails if the file is not as it should be
    python ci/matrix.py --json                   the same for a workflow: kernels first, the main package last
    python ci/matrix.py --output                 the same as the output `wheels` of a step of a workflow
    python ci/matrix.py --cibuildwheel NAME      environment variables of cibuildwheel for one of them
    python ci/matrix.py --image                  variables of docker/bake.hcl; fails without the digest of the base
    ... --machine aarch64                        the same two for another machine than x86_64
    python ci/matrix.py --platform               the platform tag of wheels that this machine takes
    python ci/matrix.py --tag refs/tags/v1.2.3   fails if a release of that tag would have another version, or no index

A GPU family is built as soon as csrc/ffa holds its folder. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_name("matrix.json")
MACHINE = "x86_64"  # where nothing else is asked for
_TABLES: dict[str, dict[str, type]] = {
    "torch": {"oldest": str, "development": str, "tested": list},
    "image": {
        **{"base": str, "tag": str, "digest": dict, "python": str, "torch": str, "cuda": str, "max_layers_mb": int},
        **{"stand_in": str, "stand_in_python": str},
    },
}
_ENTRIES: dict[str, dict[str, type]] = {
    "platforms": {
        **{"tag": str, "glibc": str, "image": str, "runner": str, "docker": str},
        **{"compiler": str, "cuda_target": str},
    },
    "archs": {"target": str, "sources": str, "cuda": dict, "gpus": str},
    "cuda": {"oldest_nvcc": str, "min_driver": str, "image": str, "nvshmem": str, "guard": bool},
    "packages": {"name": str, "max_mb": int},
}


@dataclass(frozen=True)
class Wheel:
    """One distribution for one machine. ``pythons`` are tags such as "cp310", or ("py3",).

    ``arch`` of kernels, ``cuda`` of them and of collectives, ``target``: of the GPU code inside, separated by commas.
    """

    kind: str
    name: str
    pythons: tuple[str, ...]
    max_mb: int
    arch: str = ""
    cuda: str = ""
    target: str = ""
    machine: str = MACHINE

    @property
    def file_name(self) -> str:
        """The name as it stands in file names."""
        return re.sub(r"[-_.]+", "_", self.name).lower()

    @property
    def folder(self) -> str:
        """Folder of the project to build, relative to the repository."""
        return "." if self.kind == "main" else f"wheels/{self.kind}"


def load(file: Path = FILE) -> dict:
    """The file as plain data."""
    return json.loads(file.read_text())


def problems(data: dict) -> list[str]:
    """What is wrong with the file, as sentences."""
    found = []
    expected = {"pythons", *_TABLES, *_ENTRIES}
    if set(data) != expected:
        return [f"The tables are {sorted(data)}; they must be {sorted(expected)}."]
    rows = [(name, data[name], fields) for name, fields in _TABLES.items()]
    rows += [(f"{name}.{key}", row, fields) for name, fields in _ENTRIES.items() for key, row in data[name].items()]
    for where, row, fields in rows:
        if {k: type(v) for k, v in row.items()} != fields:
            found.append(f"{where} must have {', '.join(f'{k} ({t.__name__})' for k, t in fields.items())}.")
    if found:
        return found
    if any(not re.fullmatch(r"3\.\d+", python) for python in data["pythons"]):
        found.append("pythons must be versions such as 3.10.")
    if version(data["torch"]["oldest"]) > version(data["torch"]["tested"][0]):
        found.append("torch.tested begins before torch.oldest.")
    machines = data["platforms"]
    for machine, platform in machines.items():
        if platform["tag"] != f"manylinux_{platform['glibc'].replace('.', '_')}_{machine}":
            found.append(f"platforms.{machine}.tag does not say its glibc and machine.")
    for arch, row in data["archs"].items():
        if not re.fullmatch(rf"{arch[:2]}_{arch[2:]}[af]?", row["target"]):
            found.append(f"archs.{arch}.target is {row['target']}, which is another family.")
        cudas = {cuda for listed in row["cuda"].values() for cuda in listed}
        if set(row["cuda"]) != set(machines) or not cudas or not cudas <= set(data["cuda"]):
            some = ", ".join(data["cuda"])
            found.append(f"archs.{arch}.cuda is {row['cuda']}; name some of {some} for each machine.")
    for cuda, row in data["cuda"].items():
        if not re.fullmatch(r"cu\d+", cuda) or version(row["oldest_nvcc"])[0] != int(cuda[2:]):
            found.append(f"cuda.{cuda}.oldest_nvcc is {row['oldest_nvcc']}, which is another major version.")
        names = [row["image"].replace("{machine}", machine) for machine in machines]
        if any(f"{p['tag']}_{cuda.replace('cu', 'cuda')}_" not in n for p, n in zip(machines.values(), names)):
            found.append(f"cuda.{cuda}.image is not named by the platform and CUDA.")
    found += image_problems(data)
    if {name for name, row in data["packages"].items() if row["max_mb"] > 100}:
        found.append("A wheel over 100 MB is more than package indexes take.")
    return found


def image_problems(data: dict) -> list[str]:
    """What is wrong with the base of the images. An unknown digest is empty: good for trying, not for a release."""
    row, found = data["image"], []
    for machine, digest in row["digest"].items():
        if not re.fullmatch(r"(sha256:[0-9a-f]{64})?", digest):
            found.append(f"image.digest.{machine} is {digest!r}; it is sha256: and 64 hex digits, or empty if unknown.")
    if set(row["digest"]) != set(data["platforms"]):
        found.append(f"image.digest is of {', '.join(row['digest'])}; give one, or an empty one, for each machine.")
    if not re.fullmatch(r"[\w.-]+", row["tag"]) or row["tag"] == "latest":
        found.append(f"image.tag is {row['tag']!r}; give the tag of one release.")
    if not {row["python"], row["stand_in_python"]} <= set(data["pythons"]):
        found.append("image.python and image.stand_in_python must be among pythons, or no wheel fits.")
    if row["cuda"] not in data["cuda"]:
        found.append(f"image.cuda is {row['cuda']}, for which no wheels are built.")
    if version(row["torch"]) < version(data["torch"]["oldest"]):
        found.append(f"image.torch is {row['torch']}, which is older than torch.oldest.")
    return found


def image_arguments(data: dict, base: str = "", root: Path = ROOT, machine: str = MACHINE) -> dict[str, str]:
    """Build arguments of docker/Dockerfile and variables of docker/bake.hcl. ``base`` is another base to build on."""
    row = data["image"]
    name = base or f"{row['base']}:{row['tag']}"
    digest = "" if base else row["digest"][machine]
    git = ["git", "-C", str(root), "log", "-1", "--format=%H %cI"]
    said = subprocess.run(git, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.split()
    revision, created = said or ("", "")
    return {
        "BASE_IMAGE": f"{name}@{digest}" if digest else name,
        "BASE_NAME": name,
        "BASE_DIGEST": digest,
        "CUDA": row["cuda"],
        "NVSHMEM": data["cuda"][row["cuda"]]["nvshmem"],
        "ARCHS": ",".join(archs(data, root, machine, row["cuda"])),
        "VERSION": package_version(root),
        "REVISION": revision,
        "CREATED": created,
    }


def bake_variables(data: dict, machine: str = MACHINE) -> dict[str, str]:
    """What docker/bake.hcl takes for the images of one machine. Those of another than ``MACHINE`` are tagged by it."""
    suffix = "" if machine == MACHINE else f"-{machine}"
    platform = data["platforms"][machine]["docker"]
    return {**image_arguments(data, machine=machine), "PLATFORM": platform, "SUFFIX": suffix}


def version(text: str) -> tuple[int, ...]:
    """Numbers of a version such as 12.4."""
    return tuple(map(int, text.split(".")))


def archs(data: dict, root: Path = ROOT, machine: str = "", cuda: str = "") -> list[str]:
    """GPU families that have sources here; those that are built for that machine and CUDA, if any are named."""
    here = [arch for arch, row in data["archs"].items() if (root / "csrc" / "ffa" / row["sources"]).is_dir()]
    return [a for a in here if not machine or cuda in data["archs"][a]["cuda"][machine]]


def wheels(data: dict, root: Path = ROOT) -> list[Wheel]:
    """Every distribution of this checkout, for each machine; in the order of a release: the main package pins the
    others."""
    row = data["packages"]["kernels"]
    out = [
        Wheel(
            "kernels", row["name"].format(arch=arch, cuda=cuda), ("py3",), row["max_mb"], arch, cuda,
            data["archs"][arch]["target"], machine,
        )
        for machine in data["platforms"]
        for arch in archs(data, root)
        for cuda in data["archs"][arch]["cuda"][machine]
    ]  # fmt: skip
    if (root / "wheels" / "comm").is_dir():
        row = data["packages"]["comm"]
        # Attention runs beside transfers on the GPUs that have kernels of their own for it.
        beside = [row for row in data["archs"].values() if row["sources"] != "portable"]
        plain = ",".join(row["target"].rstrip("af") for row in beside)
        out += [
            Wheel("comm", row["name"].format(cuda=cuda), ("py3",), row["max_mb"], "", cuda, plain, machine)
            for machine in data["platforms"]
            for cuda in data["cuda"]
            if any(cuda in one["cuda"][machine] for one in beside)
        ]
    row = data["packages"]["main"]
    tags = tuple(f"cp{python.replace('.', '')}" for python in data["pythons"])
    return [*out, *(Wheel("main", row["name"], tags, row["max_mb"], machine=machine) for machine in data["platforms"])]


def names(data: dict, root: Path = ROOT) -> list[str]:
    """The names of the distributions, each once, in the order of ``wheels``."""
    return list(dict.fromkeys(wheel.name for wheel in wheels(data, root)))


def find(name: str, data: dict, root: Path = ROOT, machine: str = MACHINE) -> Wheel:
    """The distribution called ``name``, as in an index or as in a file name, for ``machine``."""
    known = [wheel for wheel in wheels(data, root) if name in (wheel.name, wheel.file_name)]
    for wheel in known:
        if wheel.machine == machine:
            return wheel
    if known:
        raise SystemExit(f"{known[0].name} is built for {', '.join(w.machine for w in known)}, and not for {machine}.")
    raise SystemExit(f"No wheel is called {name}; ci/matrix.json has {', '.join(names(data, root))}.")


def cibuildwheel(wheel: Wheel, data: dict) -> dict[str, str]:
    """Environment of ``cibuildwheel <wheel.folder>``; what is the same for all stands in the pyproject.toml there."""
    platform = data["platforms"][wheel.machine]
    suffix = f"-manylinux_{wheel.machine}"
    if wheel.kind == "main":
        image, pythons = platform["image"], wheel.pythons
    else:  # one build for every Python, so any will do
        image = data["cuda"][wheel.cuda]["image"].replace("{machine}", wheel.machine)
        pythons = (f"cp{data['pythons'][2].replace('.', '')}",)
    return {
        "CIBW_BUILD": " ".join(python + suffix for python in pythons),
        f"CIBW_MANYLINUX_{wheel.machine.upper()}_IMAGE": image,
        "CIBW_ARCHS": wheel.machine,
        "MAGI_WHEEL_ARCH": wheel.arch,
        "MAGI_WHEEL_CUDA": wheel.cuda,
        # The Python that wheels/kernels/pyproject.toml prepares, to compile kernels of FlashAttention-4.
        "MAGI_WHEEL_FA4": "/tmp/fa4/bin/python" if wheel.arch == "sm100" else "",
        "MAGI_WHEEL_NVSHMEM": data["cuda"][wheel.cuda]["nvshmem"] if wheel.kind == "comm" else "",
    }


def package_version(root: Path = ROOT) -> str:
    """Version of this checkout."""
    return re.search(r'__version__ = "(.+)"', (root / "magi_attention" / "version.py").read_text())[1]


def print_image(data: dict, machine: str = MACHINE) -> int:
    """Prints what a release builds its images with; 1 and a sentence if the base is not known by its digest."""
    arguments = bake_variables(data, machine)
    if not arguments["BASE_DIGEST"]:
        print(
            f"image.digest.{machine} in ci/matrix.json is empty, so a release would be built on whatever "
            f"{arguments['BASE_NAME']} is that day; fill in what `docker buildx imagetools inspect` says of it.",
            file=sys.stderr,
        )
        return 1
    for key, value in arguments.items():
        print(f"{key}={value}")
    return 0


def check_tag(ref: str, root: Path = ROOT) -> int:
    """1 and a sentence if ``ref`` is a tag of another version, or pages and errors of a release would not name its
    index; branches pass, since they publish nothing."""
    have = package_version(root)
    text = (root / "magi_attention" / "native" / "install.py").read_text()
    if ref.startswith("refs/tags/") and not re.search(r'^RELEASE_INDEX = "https://', text, re.MULTILINE):
        print(
            "RELEASE_INDEX in magi_attention/native/install.py is empty, so errors and pages of the release would send "
            "people to a folder dist; fill in the address of the pages and run docs/make_tables.py.", file=sys.stderr,
        )  # fmt: skip
        return 1
    if ref.startswith("refs/tags/") and ref != f"refs/tags/v{have}":
        print(f"{ref} is not the tag of version {have}; correct magi_attention/version.py or the tag.", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the wheels as JSON")
    parser.add_argument("--output", action="store_true", help="append wheels=JSON to the file that GITHUB_OUTPUT names")
    parser.add_argument("--cibuildwheel", metavar="NAME", help="print NAME=value lines for this wheel")
    parser.add_argument("--image", action="store_true", help="print NAME=value lines for a release of the images")
    parser.add_argument("--machine", default=MACHINE, help="for which of those two are asked for, x86_64 by default")
    parser.add_argument("--platform", action="store_true", help="print the platform tag of wheels for this machine")
    parser.add_argument("--tag", metavar="REF", help="fail if this tag is not that of the version here")
    options = parser.parse_args(arguments)
    data = load()
    if wrong := problems(data):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if options.tag:
        return check_tag(options.tag)
    if options.platform:
        if (machine := os.uname().machine) not in data["platforms"]:
            parser.error(f"wheels for {machine} are not built; use {' or '.join(data['platforms'])}.")
        print(data["platforms"][machine]["tag"])
        return 0
    if options.image:
        return print_image(data, options.machine)
    if options.cibuildwheel:
        wheel = find(options.cibuildwheel, data, machine=options.machine)
        for key, value in cibuildwheel(wheel, data).items():
            print(f"{key}={value}")
    elif options.json or options.output:
        runners = {machine: row["runner"] for machine, row in data["platforms"].items()}
        text = json.dumps([{**asdict(w), "folder": w.folder, "runner": runners[w.machine]} for w in wheels(data)])
        if options.json:
            print(text)
        elif not (file := os.environ.get("GITHUB_OUTPUT")):
            parser.error("--output is for a workflow, where GITHUB_OUTPUT is set; use --json here.")
        else:
            with open(file, "a", encoding="utf-8") as stream:
                stream.write(f"wheels={text}\n")
    else:
        for w in wheels(data):
            print(f"{w.name:34} {w.machine:8} {' '.join(w.pythons):30} {w.target:8} <= {w.max_mb} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
