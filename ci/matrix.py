#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads ci/matrix.json, the only place for CUDA versions, GPU families, images, Pythons, torch versions, size limits.

    python ci/matrix.py                          what is built, as a table; fails if the file is not as it should be
    python ci/matrix.py --json                   the same for a workflow: kernels first, the main package last
    python ci/matrix.py --output                 the same as the output `wheels` of a step of a workflow
    python ci/matrix.py --cibuildwheel NAME      environment variables of cibuildwheel for one of them
    python ci/matrix.py --image                  variables of docker/bake.hcl; fails without the digest of the base
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
_TABLES: dict[str, dict[str, type]] = {
    "torch": {"oldest": str, "development": str, "tested": list},
    "platform": {"tag": str, "glibc": str, "machine": str, "image": str},
    "image": {
        **{"base": str, "tag": str, "digest": str, "python": str, "torch": str, "cuda": str, "max_layers_mb": int},
        **{"stand_in": str, "stand_in_python": str},
    },
}
_ENTRIES: dict[str, dict[str, type]] = {
    "archs": {"target": str, "sources": str, "cuda": list, "gpus": str},
    "cuda": {"oldest_nvcc": str, "min_driver": str, "image": str, "nvshmem": str, "guard": bool},
    "packages": {"name": str, "max_mb": int},
}


@dataclass(frozen=True)
class Wheel:
    """One distribution. ``pythons`` are tags such as "cp310", or ("py3",).

    ``arch`` of kernels, ``cuda`` of them and of collectives, ``target``: of the GPU code inside, separated by commas.
    """

    kind: str
    name: str
    pythons: tuple[str, ...]
    max_mb: int
    arch: str = ""
    cuda: str = ""
    target: str = ""

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
    platform = data["platform"]
    if platform["tag"] != f"manylinux_{platform['glibc'].replace('.', '_')}_{platform['machine']}":
        found.append("platform.tag does not say its glibc and machine.")
    for arch, row in data["archs"].items():
        if not re.fullmatch(rf"{arch[:2]}_{arch[2:]}[af]?", row["target"]):
            found.append(f"archs.{arch}.target is {row['target']}, which is another family.")
        if not row["cuda"] or not set(row["cuda"]) <= set(data["cuda"]):
            found.append(f"archs.{arch}.cuda is {row['cuda']}; name some of {', '.join(data['cuda'])}.")
    for cuda, row in data["cuda"].items():
        if not re.fullmatch(r"cu\d+", cuda) or version(row["oldest_nvcc"])[0] != int(cuda[2:]):
            found.append(f"cuda.{cuda}.oldest_nvcc is {row['oldest_nvcc']}, which is another major version.")
        if f"_{cuda.replace('cu', 'cuda')}_" not in row["image"] or platform["tag"] not in row["image"]:
            found.append(f"cuda.{cuda}.image is not named by the platform and CUDA.")
    found += image_problems(data)
    if {name for name, row in data["packages"].items() if row["max_mb"] > 100}:
        found.append("A wheel over 100 MB is more than package indexes take.")
    return found


def image_problems(data: dict) -> list[str]:
    """What is wrong with the base of the images. An unknown digest is empty: good for trying, not for a release."""
    row, found = data["image"], []
    if not re.fullmatch(r"(sha256:[0-9a-f]{64})?", row["digest"]):
        found.append(f"image.digest is {row['digest']!r}; it is sha256: and 64 hex digits, or empty if unknown.")
    if not re.fullmatch(r"[\w.-]+", row["tag"]) or row["tag"] == "latest":
        found.append(f"image.tag is {row['tag']!r}; give the tag of one release.")
    if not {row["python"], row["stand_in_python"]} <= set(data["pythons"]):
        found.append("image.python and image.stand_in_python must be among pythons, or no wheel fits.")
    if row["cuda"] not in data["cuda"]:
        found.append(f"image.cuda is {row['cuda']}, for which no wheels are built.")
    if version(row["torch"]) < version(data["torch"]["oldest"]):
        found.append(f"image.torch is {row['torch']}, which is older than torch.oldest.")
    return found


def image_arguments(data: dict, base: str = "", root: Path = ROOT) -> dict[str, str]:
    """Build arguments of docker/Dockerfile and variables of docker/bake.hcl. ``base`` is another base to build on."""
    row = data["image"]
    name = base or f"{row['base']}:{row['tag']}"
    digest = "" if base else row["digest"]
    git = ["git", "-C", str(root), "log", "-1", "--format=%H %cI"]
    said = subprocess.run(git, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.split()
    revision, created = said or ("", "")
    return {
        "BASE_IMAGE": f"{name}@{digest}" if digest else name,
        "BASE_NAME": name,
        "BASE_DIGEST": digest,
        "CUDA": row["cuda"],
        "NVSHMEM": data["cuda"][row["cuda"]]["nvshmem"],
        "ARCHS": ",".join(archs(data, root)),
        "VERSION": package_version(root),
        "REVISION": revision,
        "CREATED": created,
    }


def version(text: str) -> tuple[int, ...]:
    """Numbers of a version such as 12.4."""
    return tuple(map(int, text.split(".")))


def archs(data: dict, root: Path = ROOT) -> list[str]:
    """GPU families that have sources here."""
    return [arch for arch, row in data["archs"].items() if (root / "csrc" / "ffa" / row["sources"]).is_dir()]


def wheels(data: dict, root: Path = ROOT) -> list[Wheel]:
    """Every distribution of this checkout, in the order of a release: the main package pins the others."""
    row = data["packages"]["kernels"]
    out = [
        Wheel(
            "kernels", row["name"].format(arch=arch, cuda=cuda), ("py3",), row["max_mb"], arch, cuda,
            data["archs"][arch]["target"],
        )
        for arch in archs(data, root)
        for cuda in data["archs"][arch]["cuda"]
    ]  # fmt: skip
    if (root / "wheels" / "comm").is_dir():
        row = data["packages"]["comm"]
        names = {cuda: row["name"].format(cuda=cuda) for cuda in data["cuda"]}
        # Attention runs beside transfers on the GPUs that have kernels of their own for it.
        beside = (row for row in data["archs"].values() if row["sources"] != "portable")
        plain = ",".join(row["target"].rstrip("af") for row in beside)
        out += [Wheel("comm", name, ("py3",), row["max_mb"], "", cuda, plain) for cuda, name in names.items()]
    row = data["packages"]["main"]
    tags = tuple(f"cp{python.replace('.', '')}" for python in data["pythons"])
    return [*out, Wheel("main", row["name"], tags, row["max_mb"])]


def find(name: str, data: dict, root: Path = ROOT) -> Wheel:
    """The distribution called ``name``, as in an index or as in a file name."""
    known = wheels(data, root)
    for wheel in known:
        if name in (wheel.name, wheel.file_name):
            return wheel
    raise SystemExit(f"No wheel is called {name}; ci/matrix.json has {', '.join(w.name for w in known)}.")


def cibuildwheel(wheel: Wheel, data: dict) -> dict[str, str]:
    """Environment of ``cibuildwheel <wheel.folder>``; what is the same for all stands in the pyproject.toml there."""
    platform = data["platform"]
    suffix = f"-manylinux_{platform['machine']}"
    if wheel.kind == "main":
        image, pythons = platform["image"], wheel.pythons
    else:  # one build for every Python, so any will do
        image, pythons = data["cuda"][wheel.cuda]["image"], (f"cp{data['pythons'][2].replace('.', '')}",)
    return {
        "CIBW_BUILD": " ".join(python + suffix for python in pythons),
        f"CIBW_MANYLINUX_{platform['machine'].upper()}_IMAGE": image,
        "CIBW_ARCHS": platform["machine"],
        "MAGI_WHEEL_ARCH": wheel.arch,
        "MAGI_WHEEL_CUDA": wheel.cuda,
        # The Python that wheels/kernels/pyproject.toml prepares, to compile kernels of FlashAttention-4.
        "MAGI_WHEEL_FA4": "/tmp/fa4/bin/python" if wheel.arch == "sm100" else "",
        "MAGI_WHEEL_NVSHMEM": data["cuda"][wheel.cuda]["nvshmem"] if wheel.kind == "comm" else "",
    }


def package_version(root: Path = ROOT) -> str:
    """Version of this checkout."""
    return re.search(r'__version__ = "(.+)"', (root / "magi_attention" / "version.py").read_text())[1]


def print_image(data: dict) -> int:
    """Prints what a release builds its images with; 1 and a sentence if the base is not known by its digest."""
    arguments = image_arguments(data)
    if not arguments["BASE_DIGEST"]:
        print(
            "image.digest in ci/matrix.json is empty, so a release would be built on whatever "
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
    parser.add_argument("--tag", metavar="REF", help="fail if this tag is not that of the version here")
    options = parser.parse_args(arguments)
    data = load()
    if wrong := problems(data):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if options.tag:
        return check_tag(options.tag)
    if options.image:
        return print_image(data)
    if options.cibuildwheel:
        for key, value in cibuildwheel(find(options.cibuildwheel, data), data).items():
            print(f"{key}={value}")
    elif options.json or options.output:
        text = json.dumps([{**asdict(w), "folder": w.folder} for w in wheels(data)])
        if options.json:
            print(text)
        elif not (file := os.environ.get("GITHUB_OUTPUT")):
            parser.error("--output is for a workflow, where GITHUB_OUTPUT is set; use --json here.")
        else:
            with open(file, "a", encoding="utf-8") as stream:
                stream.write(f"wheels={text}\n")
    else:
        for w in wheels(data):
            print(f"{w.name:36} {' '.join(w.pythons):36} {w.target:8} <= {w.max_mb} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
