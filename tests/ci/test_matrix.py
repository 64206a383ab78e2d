# SPDX-License-Identifier: Apache-2.0
"""ci/matrix.json is well formed, and what must repeat one of its values repeats it rightly."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.native import families
from magi_attention.version import __version__

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))

import matrix  # noqa: E402

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib; newer ones run this.")
DATA = matrix.load()


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_file_is_as_it_should_be():
    assert matrix.problems(DATA) == []


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("extra",), {}, "they must be"),
        (("pythons", 0), "3.10.1", "versions such as 3.10"),
        (("archs", "sm90", "target"), "sm_100f", "another family"),
        (("archs", "sm90", "cuda", "x86_64"), ["cu11"], "archs.sm90.cuda is"),
        (("archs", "sm90", "cuda", "riscv64"), ["cu13"], "for each machine"),
        (("archs", "sm120", "cuda", "x86_64"), [], "name some of"),
        (("archs", "sm90"), {"target": "sm_90a"}, "archs.sm90 must have"),
        (("cuda", "cu13", "oldest_nvcc"), "12.9", "another major version"),
        (("cuda", "cu12", "image"), "quay.io/x/manylinux_2_28_{machine}_cuda13_1", "not named by the platform"),
        (("cuda", "cu12", "image"), "quay.io/x/manylinux_2_28_x86_64_cuda12_9", "not named by the platform"),
        (("cuda", "cu12", "guard"), 1, "cuda.cu12 must have"),
        (("platforms", "aarch64", "glibc"), "2.34", "platforms.aarch64.tag does not say its glibc"),
        (("platforms", "aarch64", "tag"), "manylinux_2_28_x86_64", "platforms.aarch64.tag does not say"),
        (("packages", "kernels", "max_mb"), 400, "more than package indexes take"),
        (("torch", "oldest"), "2.10", "begins before"),
        (("image", "digest", "x86_64"), "sha256:12", "64 hex digits"),
        (("image", "digest"), {"x86_64": ""}, "for each machine"),
        (("image", "tag"), "latest", "of one release"),
        (("image", "python"), "3.9", "among pythons"),
        (("image", "cuda"), "cu11", "no wheels"),
        (("image", "torch"), "2.8", "older than"),
    ],
)
def test_the_validator_can_fail(path, value, words):
    data = copy.deepcopy(DATA)
    row = data
    for key in path[:-1]:
        row = row[key]
    row[path[-1]] = value
    problems = matrix.problems(data)  # a tag that is wrong makes the images' names wrong, too
    assert words in problems[0] and (len(problems) == 1 or path[0] == "platforms")


def test_the_project_agrees(project):
    assert project["project"]["requires-python"] == f">={DATA['pythons'][0]}"
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["project"]["classifiers"]))
    assert named == DATA["pythons"]
    assert f"torch>={DATA['torch']['oldest']}" in project["project"]["dependencies"]
    assert project["tool"]["ruff"]["target-version"] == f"py{DATA['pythons'][0].replace('.', '')}"


def test_extras_pin_the_kernels_that_exist(project):
    extras = project["project"]["optional-dependencies"]
    newest = next(iter(DATA["cuda"]))
    wanted = {}
    for wheel in (w for w in matrix.wheels(DATA) if w.kind != "main"):
        name = wheel.arch or "nvshmem"
        wanted[name if wheel.cuda == newest else f"{name}-{wheel.cuda}"] = [f"{wheel.name}=={__version__}"]
    assert {name: value for name, value in extras.items() if name.startswith(("sm", "nvshmem"))} == wanted


def test_the_compiler_flags_agree():
    for arch in matrix.archs(DATA):
        family, row = families.BY_NAME[arch], DATA["archs"][arch]
        assert (family.target, family.sources) == (row["target"], row["sources"])
    constraints = (ROOT / "ci" / "constraints.txt").read_text()
    torch = re.search(r"^torch==([\d.]+)", constraints, re.MULTILINE)[1]
    assert torch == DATA["torch"]["development"] and torch in DATA["torch"]["tested"]
    assert f"torch=={torch}" in (ROOT / "docs" / "first-run.md").read_text()


def test_nothing_else_names_images_or_limits():
    """An image, a digest or a driver version stands in ci/matrix.json alone."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("This is no git checkout.")
    values = {row["tag"] for row in DATA["platforms"].values()} | {row["image"] for row in DATA["cuda"].values()}
    values |= {row["min_driver"] for row in DATA["cuda"].values()}
    values |= {DATA["image"]["base"], DATA["image"]["tag"], *filter(None, DATA["image"]["digest"].values())}
    for name in listed.stdout.split():
        path = ROOT / name
        if name in ("ci/matrix.json",) or name.startswith("tests/") or not path.is_file() or path.suffix == ".png":
            continue
        text = path.read_text(errors="replace")
        assert not [value for value in values if value in text], name
        # a name in the file may change: scripts ask matrix.py
        assert path.suffix == ".py" or not re.search(r"""open\(["'][^"']*matrix\.json""", text), name


def test_a_release_wants_the_digest_of_the_base(capsys):
    """Trying needs none: whoever names another base knows what it is."""
    unknown = copy.deepcopy(DATA)
    unknown["image"]["digest"]["x86_64"] = ""
    assert matrix.problems(unknown) == [] and matrix.print_image(unknown) == 1
    assert "imagetools inspect" in capsys.readouterr().err
    known = copy.deepcopy(DATA)
    known["image"]["digest"] |= {"x86_64": "sha256:" + "0" * 64, "aarch64": "sha256:" + "1" * 64}
    assert matrix.print_image(known) == 0
    printed = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    digest = known["image"]["digest"]["x86_64"]
    assert printed["BASE_IMAGE"] == f"{DATA['image']['base']}:{DATA['image']['tag']}@{digest}"
    assert printed == matrix.bake_variables(known) and printed["VERSION"] == __version__
    assert (printed["PLATFORM"], printed["SUFFIX"]) == ("linux/amd64", "")
    assert matrix.image_arguments(known, "mine:1")["BASE_IMAGE"] == "mine:1"
    other = matrix.bake_variables(known, "aarch64")
    assert other["BASE_IMAGE"].endswith("1" * 64) and other["ARCHS"] == "sm90,sm100"
    assert (other["PLATFORM"], other["SUFFIX"]) == ("linux/arm64", "-aarch64")


def test_cibuildwheel_settings():
    main = matrix.cibuildwheel(matrix.find("magi_attention", DATA), DATA)
    assert main["CIBW_BUILD"].split()[0] == "cp310-manylinux_x86_64" and len(main["CIBW_BUILD"].split()) == 5
    kernels = matrix.cibuildwheel(matrix.find("magi-attention-kernels-sm90-cu12", DATA), DATA)
    assert "cuda12" in kernels["CIBW_MANYLINUX_X86_64_IMAGE"] and kernels["MAGI_WHEEL_ARCH"] == "sm90"
    assert len(kernels["CIBW_BUILD"].split()) == 1
    other = matrix.cibuildwheel(matrix.find("magi-attention-kernels-sm90-cu13", DATA, machine="aarch64"), DATA)
    assert "manylinux_2_28_aarch64_cuda13" in other["CIBW_MANYLINUX_AARCH64_IMAGE"] and other["CIBW_ARCHS"] == "aarch64"
    assert other["CIBW_BUILD"] == "cp312-manylinux_aarch64" and not any("X86" in key for key in other)
    with_fa4 = [w.name for w in matrix.wheels(DATA) if matrix.cibuildwheel(w, DATA)["MAGI_WHEEL_FA4"]]
    assert with_fa4 == ["magi-attention-kernels-sm100-cu13"] * 2
    printed = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "matrix.py"), "--cibuildwheel", "magi_attention"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert dict(line.split("=", 1) for line in printed.splitlines()) == main
