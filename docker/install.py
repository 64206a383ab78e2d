# SPDX-License-Identifier: Apache-2.0
"""Installs the wheels into an image and leaves what is there as it is, torch above all. Runs while an image is built.

    install.py --wheels DIR --cuda cu13 --nvshmem 3.4.5 --constraints FILE    our wheels and what they lack
    install.py --constraints FILE --more NAME ...                             further packages
    install.py --fingerprint                                                  version and hash of torch, as JSON

Our wheels come with --no-deps. What they need is installed only where it is not there, with every package that is there
held at its version. Afterwards torch must have the same version and the same files. Standard library and pip.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path

NOTE = Path("/etc/magi-image")
EXTRAS = ("", "report")  # the pictures of `magi run` and `magi explain`


def plain(name: str) -> str:
    """A name of a distribution as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Version by name of all that can be imported now; pip itself runs in another process."""
    return {plain(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}


def fingerprint() -> dict[str, str]:
    """Version of torch and one hash over the names and bytes of all its files."""
    spec = util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The base image has no torch; build on one that has, such as NVIDIA's PyTorch image.")
    folder, digest = Path(next(iter(spec.submodule_search_locations))), hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return {"version": metadata.version("torch"), "sha256": digest.hexdigest()}


def our_wheels(folder: Path, cuda: str) -> dict[str, str]:
    """Version by name of our wheels for that CUDA and this machine, the main package first."""
    found = {}
    for path in sorted(folder.glob("magi_attention*.whl")):
        if not path.stem.endswith((platform.machine(), "any")):
            continue  # a release has those of every machine in one folder
        name, version = path.name.split("-")[:2]
        if name == "magi_attention" or name.endswith(f"_{cuda}"):
            found.setdefault(name, set()).add(version)
    kernels = [name for name in found if "_kernels_" in name]
    if "magi_attention" not in found or not kernels or f"magi_attention_comm_{cuda}" not in found:
        raise SystemExit(
            f"The wheels hold {', '.join(sorted(found)) or 'nothing of ours'}; an image needs magi_attention, kernels "
            f"and collectives for {cuda}. Run ci/build_wheels, and name its folder in the build argument DIST."
        )
    versions = {version for row in found.values() for version in row}
    if len(versions) > 1:
        raise SystemExit(f"The wheels are of versions {', '.join(sorted(versions))}; empty the folder and build anew.")
    return {name: versions.copy().pop() for name in sorted(found)}


def missing(names: list[str]) -> list[str]:
    """Requirements of the distributions that nothing installed meets; torch never is one."""
    from pip._vendor.packaging.requirements import Requirement  # pip is what installs, so it is there

    have, out = installed(), []
    for name in names:
        for text in metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in EXTRAS):
                continue
            version = have.get(plain(need.name))
            if version is None and plain(need.name) != "torch":
                out.append(str(need).partition(";")[0].strip())
            elif version is None or not need.specifier.contains(version, prereleases=True):
                raise SystemExit(f"{name} needs {need}, and the base has {version}; build on another base.")
    return out


def pip(*words: str) -> None:
    """pip install; what the base itself demands of it is left out, since every package there is held anyway."""
    environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *words]
    if subprocess.run([*command, "--root-user-action=ignore"], env=environment).returncode:
        raise SystemExit("pip could not install the packages; its words are above.")


def add(requirements: list[str], options: argparse.Namespace) -> None:
    """Installs packages beside those that are there, at the versions of the constraints."""
    have, lines = installed(), []
    for line in options.constraints.read_text().splitlines() if options.constraints else []:
        name = re.match(r"[\w.-]+(?===)", line)
        if name and plain(name[0]) not in have:
            lines.append(line)
    if options.nvshmem:
        lines.append(f"nvidia-nvshmem-{options.cuda}=={options.nvshmem}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join([*lines, *(f"{name}=={version}" for name, version in have.items())]) + "\n")
        file.flush()
        pip("--constraint", file.name, *requirements)


def install(options: argparse.Namespace) -> None:
    """What was asked for; an exit with a sentence if torch is not what it was."""
    before, held = fingerprint(), installed()
    if options.wheels:
        ours = our_wheels(options.wheels, options.cuda)
        wanted = [f"{name}=={version}" for name, version in ours.items()]
        pip("--no-deps", "--no-index", "--find-links", str(options.wheels), *wanted)
        if lacking := missing(list(ours)):
            add(lacking, options)
        parts = [f"{name.replace('_', '-')} {version}" for name, version in ours.items()]
        NOTE.write_text(f"{', '.join(parts)}, torch {before['version']}\n")
    if options.more:
        add(options.more, options)
    after, now = fingerprint(), installed()
    if after != before:
        raise SystemExit(f"torch was {before} and is {after} now; the image would run another torch than its base.")
    if changed := [f"{name} {version}" for name, version in held.items() if now.get(name) != version]:
        raise SystemExit(f"The base had {', '.join(changed)}, which the install changed or removed.")
    new = sorted(f"{name} {version}" for name, version in now.items() if name not in held)
    print(f"torch {after['version']} is unchanged, sha256 {after['sha256'][:16]}; new: {', '.join(new)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, metavar="DIR")
    parser.add_argument("--cuda", default="", help="which of the kernels and collectives, such as cu13")
    parser.add_argument("--nvshmem", default="", help="version of NVSHMEM's package, if none is there")
    parser.add_argument("--constraints", type=Path, metavar="FILE")
    parser.add_argument("--more", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--fingerprint", action="store_true")
    options = parser.parse_args()
    if options.fingerprint:
        print(json.dumps(fingerprint()))
    else:
        install(options)


if __name__ == "__main__":
    main()
