# SPDX-License-Identifier: Apache-2.0
"""docker/ as it is written: it agrees with ci/matrix.json, the launcher and the doctor. Needs no docker."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.launch.engines.node_command import DOCTOR, container_flags
from magi_attention.launch.spec import Container

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
sys.path[:0] = [str(DOCKER), str(ROOT / "ci"), str(ROOT / "wheels")]

import image  # noqa: E402
import look  # noqa: E402
import matrix  # noqa: E402

DOCKERFILE = (DOCKER / "Dockerfile").read_text()
ARGUMENTS = matrix.image_arguments(matrix.load())
EVERYTHING = container_flags(Container(image="any", rdma=True, nvshmem=True))


def pairs(flags: list[str]) -> set[str]:
    """``--a b`` as one word, as people write it."""
    return {f"{name} {value}" for name, value in zip(flags[::2], flags[1::2])}


def stages() -> dict[str, str]:
    """Text of each stage by name."""
    parts = re.split(r"^FROM \S+ AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def test_stages_and_users():
    assert list(stages()) == ["wheels", "runtime", "test"]
    for name in ("runtime", "test"):
        users = re.findall(r"^USER (\S+)", stages()[name], re.MULTILINE)
        assert users[0] == "0" and users[-1] == "65532:65532", name
    assert "USER" not in stages()["wheels"]


def test_the_health_check_is_the_launchers():
    command = json.loads(re.search(r"HEALTHCHECK [^\[]*CMD (\[.*?\])", DOCKERFILE, re.DOTALL)[1])
    assert command == ["magi", *DOCTOR[2:]]  # without -m and the module, whose script magi is


def test_the_arguments_reach_the_build():
    """Every value of ci/matrix.json is an argument of the Dockerfile and a variable of the bake file, and back."""
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert declared == set(ARGUMENTS) | {"DIST", "SOURCE", "RDMA_PACKAGES"}
    bake = (DOCKER / "bake.hcl").read_text()
    assert set(re.findall(r'^variable "(\w+)"', bake, re.MULTILINE)) == set(ARGUMENTS) | {
        "DIST",
        "SOURCE",
        "REPOSITORY",
    }
    passed = re.search(r"args = \{(.*?)\}", bake, re.DOTALL)[1]
    assert dict(re.findall(r"(\w+)\s*= (\w+)", passed)) == {n: n for n in {*ARGUMENTS, "DIST", "SOURCE"}}
    assert re.findall(r'^target "(\w+)"', bake, re.MULTILINE) == ["_common", "runtime", "test"]
    attested = json.loads(re.search(r"attest\s*= (\[.*\])", bake)[1])
    assert attested == ["type=provenance,mode=max", "type=sbom"]
    command = image.build_command("docker", "test", ARGUMENTS)
    assert [f"{n}={v}" for n, v in ARGUMENTS.items()] == [
        w for w in command if command[command.index(w) - 1] == "--build-arg"
    ]


def test_labels():
    labels = dict(re.findall(r'(org\.opencontainers\.image\.[\w.]+|com\.magi\.\w+)="([^"]*)"', stages()["runtime"]))
    wanted = {
        "title",
        "description",
        "licenses",
        "version",
        "revision",
        "created",
        "source",
        "base.name",
        "base.digest",
    }
    assert {name.partition("image.")[2] for name in labels if name.startswith("org")} == wanted
    assert labels["org.opencontainers.image.base.digest"] == "${BASE_DIGEST}"
    assert labels["com.magi.cuda_archs"] == "${ARCHS}"


def test_the_table_is_what_the_launcher_gives():
    table = (DOCKER / "README.md").read_text().partition("instead of `--privileged`")[2].partition("some sites add")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")
    ]
    assert {row[0].strip("`") for row in rows} == {p.replace("stack ", "stack=") for p in pairs(EVERYTHING)}
    assert all(len(row) == 4 and row[1] for row in rows)  # each has a reason
    # What depends on a field of the spec is said to depend on that one.
    for field in ("rdma", "nvshmem"):
        without = pairs(container_flags(Container(image="any", **{"rdma": True, "nvshmem": True, field: False})))
        assert {row[0].strip("`") for row in rows if row[3] == f"`{field}`"} == pairs(EVERYTHING) - without


def test_compose_gives_the_same_rights():
    text = (DOCKER / "compose.yaml").read_text()
    services = text.partition("services:\n")[2].partition("\nvolumes:")[0]
    node, more = re.split(r"^  multinode:\n", re.sub(r"^ *#.*\n", "", services, flags=re.MULTILINE), flags=re.MULTILINE)
    flags = {f"--shm-size {re.search(r'shm_size: (.*)', node)[1]}"}
    flags |= {
        f"--ulimit {name}={value}" for name, value in re.findall(r"^      (stack|memlock): (\S+)", node, re.MULTILINE)
    }
    flags |= {"--gpus all"} if re.search(r"count: all\n\s+capabilities: \[gpu\]", node) else set()
    assert flags == pairs(container_flags(Container(image="any")))
    flags |= {f"--device {name}" for name in re.findall(r"- (/dev/\S+)", more)}
    flags |= {f"--cap-add {name}" for name in re.findall(r"- ([A-Z_]+)$", more, re.MULTILINE)}
    assert flags == pairs(EVERYTHING) and "extends: node" in more
    assert "privileged" not in services


def test_what_is_sent_is_what_is_copied():
    """The ignore file lets through every path that the Dockerfile takes from the checkout, and not the package."""
    sent = re.findall(r"^!(\S+)", (DOCKER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    copied = re.findall(r"^COPY (?:--\S+ )?(\S+) ", DOCKERFILE, re.MULTILINE) + re.findall(
        r"bind,source=([^,]+)", DOCKERFILE
    )
    assert {path.split("/")[0] for path in copied} - {"${DIST}"} <= set(sent) and "dist" in sent
    assert "magi_attention" not in sent


def test_ci_leaves_it_out_for_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(image, "DONE", tmp_path / "done.json")
    need = image.NEEDS_S
    assert image.reason_to_leave_out("docker", "key", need + 1) == ""
    assert "daemon" in image.reason_to_leave_out("", "key", need + 1)
    assert f"takes up to {need}" in image.reason_to_leave_out("docker", "key", need - 1)
    image.DONE.write_text('{"key": "key"}')
    assert "no input changed" in image.reason_to_leave_out("docker", "key", need + 1)
    assert image.reason_to_leave_out("docker", "another", need + 1) == ""


def tool(name: str) -> str:
    """hadolint or shellcheck: on PATH, or that of an earlier ci/image."""
    own = image.WORK / "tools" / "bin" / name
    return shutil.which(name) or (str(own) if own.exists() else "")


@pytest.mark.parametrize("name", ["hadolint", "shellcheck"])
def test_lint(name):
    if not tool(name):
        pytest.skip(f"{name} is not here; `ci/image --lint` brings it.")
    if not (ROOT / ".git").exists():
        pytest.skip("This is no git checkout.")
    files = ["docker/Dockerfile"] if name == "hadolint" else image.scripts()
    done = subprocess.run([tool(name), *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout


def test_every_shell_script_is_checked():
    if not (ROOT / ".git").exists():
        pytest.skip("This is no git checkout.")
    found = image.scripts()
    assert {".ci/run", "ci/image", "docker/entrypoint"} <= set(found) and "docker/image.py" not in found


@pytest.mark.parametrize("folder", look.TESTS)
def test_no_test_of_the_image_reads_the_native_sources(folder):
    """They run beside an installed package, without a checkout."""
    files = sorted((ROOT / "tests" / folder).rglob("*.py"))
    assert files, f"docker/look.py runs tests/{folder}, which is empty"
    reads = [f.name for f in files if re.search(r"""["'/]csrc\b""", f.read_text())]
    assert not reads, f"{reads} of tests/{folder} read csrc, which images do not have; move them to tests/kernels"
