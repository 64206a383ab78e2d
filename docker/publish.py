# SPDX-License-Identifier: Apache-2.0
"""Builds the images of docker/bake.hcl on NVIDIA's image and pushes them. Called as ci/publish_image.

    ci/publish_image REGISTRY/NAME [--dist DIR] [--machine aarch64] [--dry-run]

Takes the wheels of --dist, and the values of ci/matrix.json; needs a login at the registry and a builder of the
docker-container driver, which makes attestations. Prints each image by its digest, which is what gets signed, and in a
workflow hands it on as an output. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "ci"))

import matrix  # noqa: E402

TARGETS = ("runtime", "test")


def variables(repository: str, dist: Path, machine: str = matrix.MACHINE) -> dict[str, str]:
    """What docker/bake.hcl asks of the environment."""
    values = matrix.bake_variables(matrix.load(), machine)
    if not values["BASE_DIGEST"]:
        raise SystemExit(f"image.digest.{machine} in ci/matrix.json is empty; a release names its base by digest.")
    if not list((ROOT / dist).glob("magi_attention-*.whl")):
        raise SystemExit(f"{dist} has no wheel of magi_attention; run ci/build_wheels, or name its folder in --dist.")
    server, name = os.environ.get("GITHUB_SERVER_URL", ""), os.environ.get("GITHUB_REPOSITORY", "")
    source = f"{server}/{name}" if server and name else ""
    # Registries take small letters only.
    return {**values, "REPOSITORY": repository.lower(), "SOURCE": source, "DIST": dist.as_posix()}


def digests(metadata: Path, repository: str) -> dict[str, str]:
    """NAME@sha256:... of each target, out of the file that bake writes."""
    said = json.loads(metadata.read_text())
    return {name: f"{repository.lower()}@{said[name]['containerimage.digest']}" for name in TARGETS}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ci/publish_image", description=__doc__.splitlines()[0])
    parser.add_argument("repository", help="such as ghcr.io/owner/name")
    parser.add_argument("--dist", type=Path, default=Path("dist"), help="folder of the wheels, in the checkout")
    parser.add_argument("--machine", default=matrix.MACHINE, help="of the images, x86_64 by default")
    parser.add_argument("--dry-run", action="store_true", help="print the command, and build nothing")
    options = parser.parse_args(arguments)
    values = variables(options.repository, options.dist, options.machine)
    with tempfile.TemporaryDirectory(prefix="magi_publish_") as folder:
        metadata = Path(folder, "metadata.json")
        command = ["docker", "buildx", "bake", "--file", "docker/bake.hcl", "--push", "--metadata-file", str(metadata)]
        print(shlex.join(["env", *(f"{key}={value}" for key, value in values.items()), *command]), flush=True)
        if options.dry_run:
            return 0
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **values}).returncode
        if code:
            return code
        made = digests(metadata, options.repository)
    for name, image in made.items():
        print(f"{name}={image}")
    if output := os.environ.get("GITHUB_OUTPUT"):
        with open(output, "a", encoding="utf-8") as file:
            file.writelines(f"{name}={image}\n" for name, image in made.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
