# SPDX-License-Identifier: Apache-2.0
"""Builds the images of docker/Dockerfile and looks into them. Called as ci/image.

    ci/image [--base IMAGE] [--dist DIR] [--docker CLIENT] [--report FILE] [--if-changed] [--within SECONDS]
    ci/image --lint

Without --base, one is made here with debootstrap, which wants root, and `docker import`: a Debian with a CPU build of
torch in place of NVIDIA's image, which is large and made for GPUs. On it both targets are built as they are, and
docker/look.py looks at them. A Docker daemon must run; none is started.

--if-changed is for CI: it leaves everything out, and says why, where no input changed since the last success, no daemon
answers, or less than what it takes is left of --within. In the last two cases build/image/left_out.txt says that images
were not tried and when they last were, for .ci/run to end with.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docker"), str(ROOT / "ci"), str(ROOT / "wheels"), str(ROOT)]

import matrix  # noqa: E402

import build  # noqa: E402

WORK = ROOT / "build" / "image"
DONE = WORK / "done.json"  # what the last success was of, and when
LEFT_OUT = WORK / "left_out.txt"  # that the latest call tried nothing, though there was something to try
NEEDS_S = 600  # seconds that two cores take with everything to be made
TAG = "magi_attention-ci"
PACKAGES = ("torch", "numpy", "rich")  # what of NVIDIA's image the stand-in has, too
# What an image is made of, and what is tried in it; a change in any of them calls for a new image. Tests hold the list
# to what docker/Dockerfile copies, and .github/workflows/image.yml to the list.
INPUTS = (
    *("benchmarks/", "ci/", "docker/", "examples/", "pyproject.toml", "tests/", "wheels/"),
    *("magi_attention/cli/", "magi_attention/tools/doctor/", "magi_attention/tools/launch/", "magi_attention/native/"),
)


def say(text: str) -> None:
    print(f"image: {text}", flush=True)


# ---- what there is ------------------------------------------------------------------------------------------


def inputs_key() -> str:
    """16 hex digits over all inputs."""
    digest = hashlib.sha256()
    for name in build.sources():
        if name.startswith(INPUTS):
            digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_client(asked: str | None) -> str:
    """A docker client that a daemon answers, of the daemon's own version if there is one; "" if there is none."""
    places = [str(Path(folder, "docker")) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    answering = ""
    for place in [asked] if asked else dict.fromkeys(places):
        if not shutil.which(place):
            continue
        command = [place, "version", "--format", "{{.Client.Version}} {{.Server.Version}}"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except subprocess.TimeoutExpired:
            continue
        versions = said.stdout.split()
        if said.returncode == 0 and len(versions) == 2:
            if versions[0] == versions[1]:
                return place
            answering = answering or place
    return answering


def tools() -> Path:
    """Folder of hadolint and shellcheck, installed once."""
    return build.environment_of(Path(sys.executable), WORK / "tools", ROOT / "docker" / "tools.txt").parent


def scripts() -> list[str]:
    """Every shell script that git knows, by its first line."""
    found = []
    for name in build.sources():
        with (ROOT / name).open("rb") as file:
            if re.match(rb"#!.*\b(ba|da)?sh\b", file.readline(200)):
                found.append(name)
    return found


def lint() -> None:
    """An exit with what hadolint and shellcheck find; nothing is ignored for all files."""
    folder = tools()
    build.run([folder / "hadolint", "--failure-threshold", "style", "--no-color", "docker/Dockerfile"])
    build.run([folder / "shellcheck", *scripts()])
    say(f"hadolint and shellcheck find nothing in docker/Dockerfile, {', '.join(scripts())}")


# ---- the base -----------------------------------------------------------------------------------------------


def fill(root: Path, row: dict) -> None:
    """A small Debian with Python, torch and what reads with it, in the folder ``root``."""
    for need in ("debootstrap", "tar"):
        if not shutil.which(need):
            raise SystemExit(f"{need} is not here; `apt-get install {need}`, or name a base with --base.")
    if os.geteuid() != 0:
        raise SystemExit("debootstrap makes files of root; run this as root, or name a base with --base.")
    include = "ca-certificates,python3,python3-pip"
    build.run(["debootstrap", "--variant=minbase", f"--include={include}", row["stand_in"], root])
    authorities = Path("/etc/ssl/certs/ca-certificates.crt")
    if authorities.is_file():  # so that pip in there trusts whom it trusts here
        shutil.copyfile(authorities, root / authorities.relative_to("/"))
    shutil.rmtree(root / "var/cache/apt/archives")
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    version = row["stand_in_python"]
    if not (root / f"usr/bin/python{version}").exists():
        raise SystemExit(f"{row['stand_in']} has no Python {version}; correct image.stand_in_python in ci/matrix.json.")
    target = root / f"usr/local/lib/python{version}/dist-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", target]
    pip += ["--python-version", version, "--only-binary=:all:", "-c", ROOT / "ci" / "constraints.txt"]
    build.run([*pip, *PACKAGES])


def make_base(docker: str, data: dict) -> str:
    """Tag of the stand-in for NVIDIA's image; made where it is not there."""
    row = data["image"]
    key = json.dumps(row) + (ROOT / "ci" / "constraints.txt").read_text() + inspect.getsource(fill)
    tag = f"{TAG}-base:{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if build.run([docker, "images", "--quiet", tag]).strip():
        return tag
    say(f"making {tag}")
    with tempfile.TemporaryDirectory(prefix="magi_base_") as folder:
        root = Path(folder, "root")
        fill(root, row)
        # NVIDIA's image has this variable, too: its Python belongs to the distribution.
        command = [docker, "import", "--change", "ENV PIP_BREAK_SYSTEM_PACKAGES=1", "-", tag]
        with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
            done = subprocess.run(command, stdin=tar.stdout, capture_output=True, text=True)
        if done.returncode or tar.returncode:
            raise SystemExit(f"docker import failed:\n{done.stderr[-2000:]}")
    return tag


# ---- the targets --------------------------------------------------------------------------------------------


def make_wheels(docker: str, base: str, dist: Path) -> None:
    """The wheels for the Python of the base; those that are there and good are not built again."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = build.run([docker, "run", "--rm", "--network", "none", base, "python", "-c", code]).strip()
    build.run([ROOT / "ci" / "build_wheels", "--python", version, "--out", dist], environment=own_environment())


def own_environment() -> dict[str, str]:
    """The environment with this interpreter for ci/, and BuildKit, without which there are no mounts."""
    return {**os.environ, "MAGI_PYTHON": sys.executable, "DOCKER_BUILDKIT": "1"}


def build_command(docker: str, target: str, arguments: dict[str, str]) -> list[str]:
    """``docker build`` of a target. The network of the host is enough for pip and apt and wants no bridge."""
    command = [docker, "build", "--network", "host", "--file", "docker/Dockerfile", "--target", target]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    return [*command, "--tag", f"{TAG}:{target}", "."]


def make_images(docker: str, base: str, dist: Path, data: dict) -> dict[str, str]:
    """Build arguments, once both targets are there."""
    arguments = {**matrix.image_arguments(data, base), "DIST": dist.relative_to(ROOT).as_posix()}
    for target in ("runtime", "test"):
        started = time.monotonic()
        build.run(build_command(docker, target, arguments), environment=own_environment())
        say(f"{target} built in {time.monotonic() - started:.0f} s")
    return arguments


def is_done(key: str) -> bool:
    """Were these very inputs tried with success?"""
    return DONE.exists() and json.loads(DONE.read_text()).get("key") == key


def last_success() -> str:
    """When images were last good on this machine, and of which commit."""
    row = json.loads(DONE.read_text()) if DONE.exists() else {}
    if "when" not in row:
        return "they never were on this machine" if not row else "they once were, of other inputs"
    return f"they last were on {row['when']}, of {row['revision']}, whose inputs were others"


def write_done(key: str) -> None:
    """Notes a success."""
    DONE.parent.mkdir(parents=True, exist_ok=True)
    row = {"key": key, "when": time.strftime("%Y-%m-%d %H:%M"), "revision": build.revision()[0][:18]}
    DONE.write_text(json.dumps(row) + "\n")
    LEFT_OUT.unlink(missing_ok=True)


def tell_left_out(reason: str) -> None:
    """Says in capitals that nothing was tried, here and in the file for the end of .ci/run."""
    words = f"IMAGES WERE NOT TRIED: {reason}; {last_success()}."
    LEFT_OUT.parent.mkdir(parents=True, exist_ok=True)
    LEFT_OUT.write_text(words + "\n")
    say(words)


def reason_to_leave_out(docker: str, within: float) -> str:
    """Why CI cannot try images here; "" if it can."""
    if not docker:
        return "no docker client finds a daemon"
    if within < NEEDS_S:
        return f"{within:.0f} s are left and it takes up to {NEEDS_S}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ci/image", description=__doc__.splitlines()[0])
    parser.add_argument("--base", help="build on this image; it must be here or can be pulled")
    parser.add_argument("--dist", type=Path, default=ROOT / "build" / "dist", help="of wheels: build/dist or dist")
    parser.add_argument("--docker", help="the client to use, such as /usr/bin/docker; a daemon's own by default")
    parser.add_argument("--lint", action="store_true", help="check the Dockerfile and the shell scripts, and end")
    parser.add_argument("--if-changed", action="store_true", help="do nothing where there is no need or no daemon")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="S", help="with --if-changed: time left")
    parser.add_argument("--report", type=Path, default=WORK / "report.json", help="write what was seen as JSON")
    options = parser.parse_args(arguments)
    if options.lint:
        lint()
        return 0
    started, key, docker = time.monotonic(), inputs_key(), find_client(options.docker)
    LEFT_OUT.unlink(missing_ok=True)
    if options.if_changed and is_done(key):
        say(f"left out: no input changed since the last success ({last_success().partition(', whose')[0]}).")
        return 0
    if options.if_changed and (reason := reason_to_leave_out(docker, options.within)):
        tell_left_out(reason)
        return 0
    if not docker:
        raise SystemExit("No docker client finds a daemon; start dockerd, or name the client with --docker.")
    import look  # after the checks above: it needs the package

    dist, data = options.dist.resolve(), matrix.load()
    if not any(dist == place or place in dist.parents for place in (ROOT / "build" / "dist", ROOT / "dist")):
        raise SystemExit(f"{dist} is not sent to the daemon; let --dist be dist or build/dist of this checkout.")
    lint()
    base = options.base or make_base(docker, data)
    make_wheels(docker, base, dist)
    made = make_images(docker, base, dist, data)
    seen = look.look(docker, base, TAG, made, data["image"]["max_layers_mb"])
    seen |= {"seconds": round(time.monotonic() - started), "key": key}
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(seen, indent=1) + "\n")
    write_done(key)
    say(f"all good in {seen['seconds']} s: {options.report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
