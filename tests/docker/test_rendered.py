# SPDX-License-Identifier: Apache-2.0
"""docker/ as it is written: it agrees with ci/matrix.json, the launcher and the doctor. Needs no docker."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from magi_attention.testing.waiting import DEADLINE_S
from magi_attention.tools.launch.engines.node_command import DOCTOR, container_flags
from magi_attention.tools.launch.spec import Container

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
    variables = set(matrix.bake_variables(matrix.load())) | {"DIST", "SOURCE", "REPOSITORY"}
    assert set(re.findall(r'^variable "(\w+)"', bake, re.MULTILINE)) == variables
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
    wanted = {*"title description licenses version revision created source base.name base.digest".split()}
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


def is_sent(name: str) -> bool:
    """Does the ignore file let a path of the checkout through? The last line that fits it or a folder above decides."""
    places, is_out = [name, *map(str, PurePosixPath(name).parents)][:-1], False
    for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.lstrip("!")
        if not line or line.startswith("#"):
            continue
        if pattern.startswith("**/"):
            fits = any(fnmatch.fnmatch(PurePosixPath(place).name, pattern[3:]) for place in places)
        else:
            fits = any(place.count("/") == pattern.count("/") and fnmatch.fnmatch(place, pattern) for place in places)
        is_out = not line.startswith("!") if fits else is_out
    return not is_out


def copied(stage: str) -> dict[str, str]:
    """Source in the checkout -> place in the image, of the COPY lines of a stage."""
    found = {}
    for line in re.findall(r"^COPY (.+)$", stages()[stage], re.MULTILINE):
        *sources, target = (word for word in line.split() if not word.startswith("--"))
        for source in sources:
            found[source] = target + (PurePosixPath(source).name if target.endswith("/") else "")
    return found


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    return [name for name in listed if name and (ROOT / name).is_file()] or pytest.skip("needs a checkout with git")


def files_in(*names: str) -> dict[str, str]:
    """File of the checkout -> place below /workspace/magi, of the folder that these stages fill."""
    found = {}
    for source, target in (pair for name in names for pair in copied(name).items()):
        for file in filter(is_sent, tracked()):
            if file == source or file.startswith(f"{source}/"):
                found[file] = (target + file[len(source) :]).removeprefix("/workspace/magi/")
    return found


def test_what_is_sent_is_what_is_copied():
    """The ignore file lets through every path that the Dockerfile takes from the checkout, and not the package."""
    sources = [*copied("runtime"), *copied("test"), *re.findall(r"bind,source=([^,]+)", DOCKERFILE)]
    files = tracked()
    for source in sources:
        assert any(is_sent(f) for f in files if f == source or f.startswith(f"{source}/")), source
    assert not any(is_sent(f) for f in files if f.startswith(("magi_attention/", "csrc/", "docs/", ".git")))
    assert is_sent("dist/a.whl") and is_sent("build/dist/a.whl") and not is_sent("build/wheels/x")
    assert not is_sent("tests/__pycache__/a.pyc")


def test_folders_are_in_the_image_whole():
    """All that git knows of them, pictures of results apart: pages, subfolders and records, too."""
    names = ("benchmarks", "examples", "tests", "ci")
    want = {n for n in tracked() if n.startswith(tuple(f"{name}/" for name in names))}
    lacking = want - set(files_in("runtime", "test"))
    assert all(n.startswith("benchmarks/results/") and n.endswith(".png") for n in lacking), sorted(lacking)


@pytest.mark.nightly
def test_magi_bench_runs_on_what_the_runtime_image_has(tmp_path):
    for source, target in files_in("runtime").items():
        if target.startswith(("benchmarks/", "examples/", "ci/")):
            (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / source, tmp_path / target)
    command = [sys.executable, "-m", "magi_attention.cli", *look.BENCH[1:], "--heads", "2,1", "--head-dim", "16"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MAGI_SOURCES": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert look.last_line(done.stdout, "Page:") and list(tmp_path.rglob("*.html"))


def test_what_is_copied_calls_for_a_new_image():
    """In CI, by the inputs of ci/image, and in the workflow, by its paths."""
    sources = [*copied("runtime"), *copied("test"), *re.findall(r"bind,source=([^,]+)", DOCKERFILE)]
    for source in sources:
        assert f"{source}/".startswith(image.INPUTS) or source in image.INPUTS, source
    text = (ROOT / ".github" / "workflows" / "image.yml").read_text()
    paths = set(re.findall(r'^      - "(.+)"$', text.partition("paths:")[2].partition("pull_request")[0], re.MULTILINE))
    assert paths == {".github/workflows/image.yml", *(f"{n}**" if n.endswith("/") else n for n in image.INPUTS)}


def test_ci_leaves_it_out_for_a_reason():
    need = image.NEEDS_S
    assert image.reason_to_leave_out("docker", need + 1) == ""
    assert "daemon" in image.reason_to_leave_out("", need + 1)
    assert f"takes up to {need}" in image.reason_to_leave_out("docker", need - 1)


def test_what_was_not_tried_is_said_loudly(tmp_path, monkeypatch, capsys):
    """Also when images were last good, and no more once they are."""
    monkeypatch.setattr(image, "DONE", tmp_path / "work" / "done.json")
    monkeypatch.setattr(image, "LEFT_OUT", tmp_path / "work" / "left_out.txt")
    monkeypatch.setattr(image, "find_client", lambda asked: "")
    monkeypatch.setattr(image, "inputs_key", lambda: "key")
    assert image.main(["--if-changed"]) == 0
    said = image.LEFT_OUT.read_text()
    assert said.startswith("IMAGES WERE NOT TRIED: no docker client finds a daemon; they never were")
    assert said in capsys.readouterr().out
    image.write_done("other")
    assert not image.LEFT_OUT.exists()
    assert image.main(["--if-changed"]) == 0
    assert re.search(r"they last were on \d{4}-\d\d-\d\d \d\d:\d\d, of [0-9a-f]{12}", image.LEFT_OUT.read_text())
    image.write_done("key")
    assert image.main(["--if-changed"]) == 0 and not image.LEFT_OUT.exists()
    assert "no input changed" in capsys.readouterr().out
    assert "build/image/left_out.txt" in (ROOT / ".ci" / "run").read_text()


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
