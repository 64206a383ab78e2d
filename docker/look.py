# SPDX-License-Identifier: Apache-2.0
"""What ci/image looks at in the images that it has built. Each look fails with a sentence, or returns what was seen."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import build
from magi_attention.tools.launch.engines.node_command import container_flags
from magi_attention.tools.launch.spec import Container

USER = "65532"
# The rights that the launcher gives a container without GPUs.
RIGHTS = (*container_flags(Container(gpus="none")), "--network", "host")
LABEL = "org.opencontainers.image."
FLAGSHIP = ["magi", "run", "--name", "look", "--ranks", "2", "--steps", "3", "--seq-len", "1024"]
BENCH = ["magi", "bench", "kernel", "--name", "look", "--masks", "causal", "--sizes", "128", "--repeats", "2"]
# Two nodes as two containers, started by the launcher out here; both use the network of the host.
NODES = """engine = "docker"
nodes = 2
ranks_per_node = 2
command = ["examples/llama/train.py", "--out", "/tmp/nodes", "--steps", "2", "--seq-len", "1024"]
container = {{ image = "{image}", gpus = "none", network = "host" }}
rendezvous = {{ port = {port} }}
"""
# The parts of the CPU suite that show that package, torch, gloo and the tools of the image work together in there.
TESTS = ("api", "benchmarks", "cli", "comm", "doctor", "functional", "launch", "multinode")
BROKEN = "MAGI_ATTENTION_PRECISION=nonsense"  # a value that the doctor calls an error


def say(text: str) -> None:
    print(f"image: {text}", flush=True)


def inspect(docker: str, what: str) -> dict:
    return json.loads(build.run([docker, "inspect", what]))[0]


def inside(docker: str, image: str, command: list[str], *flags: str) -> str:
    """Output of a command in a container with the launcher's rights."""
    return build.run([docker, "run", "--rm", "--init", *RIGHTS, *flags, image, *command])


def want(is_so: bool, sentence: str) -> None:
    if not is_so:
        raise SystemExit(sentence)


def look_at_torch(docker: str, base: str, image: str) -> dict:
    """torch of the image is that of the base, file by file; install.py said so while it built, here it is seen anew."""
    script = Path(__file__).with_name("install.py").resolve()
    flags = ["--rm", "--network", "none", "--entrypoint", "python", "--volume", f"{script}:/install.py:ro"]
    prints = [
        json.loads(build.run([docker, "run", *flags, place, "/install.py", "--fingerprint"])) for place in (base, image)
    ]
    want(prints[0] == prints[1], f"torch of the base is {prints[0]}, of {image} {prints[1]}; docker/install.py let it.")
    return prints[1]


def look_at_layers(docker: str, base: str, image: str, limit_mb: int) -> float:
    """MB of the layers that are ours."""
    below, above = inspect(docker, base), inspect(docker, image)
    layers = [row["RootFS"]["Layers"] for row in (below, above)]
    want(layers[1][: len(layers[0])] == layers[0], f"{image} does not stand on the layers of {base}; build it anew.")
    ours = (above["Size"] - below["Size"]) / 1e6
    want(ours <= limit_mb, f"Our layers of {image} have {ours:.0f} MB, over the {limit_mb}; see `docker history`.")
    return round(ours, 1)


def look_at_config(docker: str, image: str, arguments: dict[str, str]) -> dict:
    """User, labels, entry point and health check as an image holds them."""
    config = inspect(docker, image)["Config"]
    user = config["User"] or "root"
    want(user.split(":")[0] == USER, f"{image} starts as {user}; let its last USER be {USER}.")
    fields = {"version": "VERSION", "revision": "REVISION", "created": "CREATED", "base.name": "BASE_NAME"}
    for label, name in fields.items():
        have = config["Labels"].get(LABEL + label)
        want(have == arguments[name], f"{image} has the label {LABEL}{label} {have!r}; it must be {arguments[name]!r}.")
    want(config["Entrypoint"] == ["magi-entrypoint"], f"{image} has the entry point {config['Entrypoint']}, not ours.")
    return {"user": config["User"], "labels": config["Labels"], "healthcheck": config["Healthcheck"]["Test"]}


@contextmanager
def started(docker: str, image: str, *flags: str) -> Iterator[str]:
    """Id of a container that sleeps, whose health is asked for every two seconds; removed in the end."""
    # A start period of 0 seconds would mean that of the image.
    health = ["--health-interval", "2s", "--health-retries", "1", "--health-start-period", "1s"]
    command = [docker, "run", "--detach", "--init", *RIGHTS, *health, *flags, image, "sleep", "600"]
    name = build.run(command).strip()
    try:
        yield name
    finally:
        subprocess.run([docker, "rm", "--force", name], capture_output=True)


def health_of(docker: str, name: str, seconds: float = 90) -> tuple[str, str]:
    """(status, words of the last probe) once there is one that is not `starting`."""
    end = time.monotonic() + seconds
    while True:
        health = inspect(docker, name)["State"]["Health"]
        if health["Status"] != "starting" or time.monotonic() > end:
            return health["Status"], (health["Log"] or [{"Output": ""}])[-1]["Output"].strip()
        time.sleep(1)


def look_at_health(docker: str, image: str) -> dict:
    """The health check passes as it is, and does not where the doctor finds an error."""
    with started(docker, image) as name:
        good, words = health_of(docker, name)
        want(good == "healthy", f"{image} is {good} with the rights of the launcher; the doctor said: {words}")
        uid = build.run([docker, "exec", name, "id", "-u"]).strip()
        want(uid == USER, f"{image} runs as {uid}, not {USER}.")
    with started(docker, image, "--env", BROKEN) as name:
        bad, words = health_of(docker, name)
        want(bad == "unhealthy", f"{image} is {bad} with {BROKEN}; the health check sees nothing: {words}")
    return {"as it is": good, f"with {BROKEN}": f"{bad}: {words}"}


def last_line(text: str, words: str) -> str:
    """The last line that has ``words``."""
    found = [line.strip() for line in text.splitlines() if words in line]
    want(bool(found), f"No line of the output has {words!r}:\n{text[-3000:]}")
    return found[-1]


def run_two_nodes(docker: str, image: str) -> str:
    """Output of a run over two containers of two ranks each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="magi_nodes_") as folder:
        spec = Path(folder, "two.toml")
        spec.write_text(NODES.format(image=image, port=port))
        path = os.pathsep.join([str(Path(docker).parent), os.environ["PATH"]])  # the launcher calls plain docker
        environment = {**os.environ, "PATH": path, "MAGI_HOME": folder}
        command = [sys.executable, "-m", "magi_attention.cli", "run", "--spec", spec]
        return build.run(command, environment=environment)


def look_at_runs(docker: str, image: str) -> dict:
    """The flagship, two nodes, the doctor, and a plan as a user that the image does not know."""
    doctor = json.loads(inside(docker, image, ["magi", "doctor", "--json"]))
    bench = inside(docker, image, BENCH)
    stranger = inside(docker, image, ["magi", "explain", "--docs", "3000,200", "--cp", "4"], "--user", "12345:12345")
    return {
        "magi run": last_line(inside(docker, image, FLAGSHIP), "Largest relative loss difference"),
        "two nodes": last_line(run_two_nodes(docker, image), "4 ranks: step 2/2"),
        "magi bench": last_line(bench, "Page:"),
        "magi explain as 12345": stranger.strip().splitlines()[-1],
        "magi doctor": doctor,
    }


def look(docker: str, base: str, tag: str, arguments: dict[str, str], limit_mb: int) -> dict:
    """All looks at both targets; what was seen, as plain data."""
    seen = {"base": base, "torch": look_at_torch(docker, base, f"{tag}:test")}
    for target in ("runtime", "test"):
        image = f"{tag}:{target}"
        config = look_at_config(docker, image, arguments)
        seen[target] = {"layers_mb": look_at_layers(docker, base, image, limit_mb), **config}
        say(f"{target}: our layers {seen[target]['layers_mb']} of {limit_mb} MB, user {config['user']}, labels good")
    seen["health"] = look_at_health(docker, f"{tag}:runtime")
    say(f"health: {seen['health']}")
    seen["runs"] = look_at_runs(docker, f"{tag}:runtime")
    say(f"magi run: {seen['runs']['magi run']}")
    folders = [f"tests/{name}" for name in TESTS]
    command = ["magi", "test", "--suite", "cpu", *folders, "-q", "-p", "no:cacheprovider"]
    seen["tests"] = last_line(inside(docker, f"{tag}:test", command), " passed")
    say(f"magi test: {seen['tests']}")
    return seen
