# SPDX-License-Identifier: Apache-2.0
"""The SBOM that a build of a wheel writes, held to the schema of CycloneDX and to ci/check_wheel.py."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import check_wheel
import matrix
import pytest

from magi_attention.native import info, toolchain
from magi_attention.testing.waiting import DEADLINE_S
from magi_attention.version import __version__

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed; it writes the SBOM of a wheel.")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "sboms/magi_attention.cdx.json"
# In a process of its own: setuptools cannot be imported into one that has imported distutils of the standard library.
DESCRIBE = f"""import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "wheels")!r}]
import wheel_sbom
parts = [wheel_sbom.Part(*word.split("=")) for word in sys.argv[4:]]
print(wheel_sbom.describe(Path(sys.argv[1]), sys.argv[2], sys.argv[3], parts), end="")
"""


def problems(text: str) -> list[str]:
    """What the validator of CycloneDX's own library finds, unknown fields included."""
    pytest.importorskip("jsonschema", reason="jsonschema is not installed; the validator uses it.")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    found = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return [] if found is None else [str(found)]


def describe(folder: Path, name: str, *parts: str, **environment: str) -> str:
    """The text for the files in ``folder``."""
    command = [sys.executable, "-c", DESCRIBE, str(folder), name, __version__, *parts]
    environment = {"SOURCE_DATE_EPOCH": "1790000000", "MAGI_ATTENTION_BUILD_REVISION": COMMIT, **environment}
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=DEADLINE_S
    )
    if "No module named 'setuptools'" in done.stderr:
        pytest.skip("This Python has no setuptools.")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_that_is_built_here(tmp_path):
    """With the libraries of this checkout: the file is valid, and says what is in this wheel."""
    if not toolchain.built_libraries() or int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs libraries in magi_attention/lib, and setuptools 77")
    copy = tmp_path / "checkout"
    for name in ("magi_attention", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "inst"))
    (copy / "wheels").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "wheels/wheel_sbom.py"):
        shutil.copy(ROOT / name, copy / name)
    environment = {
        "MAGI_ATTENTION_SKIP_CUDA_BUILD": "1", "MAGI_ATTENTION_PREBUILD_FFA": "0",
        "MAGI_ATTENTION_BUILD_REVISION": COMMIT,
    }  # fmt: skip
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path / "dist")]
    done = subprocess.run(
        command, cwd=copy, env={**os.environ, **environment}, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
        (file,) = (name for name in contents if "/sboms/" in name)
        text = contents[file].decode()
        libraries = {name: hashlib.sha256(body).hexdigest() for name, body in contents.items() if name.endswith(".so")}
        archive.extractall(tmp_path / "files")
    assert file.endswith(f".dist-info/{NAME}") and problems(text) == []
    bom = json.loads(text)
    whole = bom["metadata"]["component"]
    assert (whole["name"], whole["version"]) == ("magi_attention", __version__)
    assert whole["pedigree"]["commits"] == [{"uid": COMMIT}]
    files = {c["name"]: c["hashes"][0]["content"] for c in bom["components"] if c["type"] == "file"}
    assert files == libraries
    records = [info.read_info(tmp_path / "files" / name) for name in libraries]
    tools = {(c["name"], c["version"]) for c in bom["components"] if c.get("scope") == "excluded"}
    assert {tuple(record.compiler.split(" ", 1)) for record in records} < tools
    data = matrix.load()
    found = check_wheel.check_sbom(matrix.find("magi_attention", data), contents, records, __version__, data)
    found = [problem for problem in found if "of another commit" not in problem]  # left over from development
    has_host = any("_magi_host" in name for name in libraries)  # whose headers a machine may lack
    assert found == ([] if has_host else ["has an SBOM without pybind11, of which it holds code."])


def test_what_an_sbom_of_other_parts_says(tmp_path):
    name = "magi-attention-comm-cu13"
    text = describe(tmp_path, name, "nvidia-nvshmem-cu13=3.4.5=NVIDIA Software License Agreement=pypi")
    assert problems(text) == [] and problems(text.replace('"bomFormat"', '"bombFormat"')) != []
    bom = json.loads(text)
    (part,) = bom["components"]
    assert part["purl"] == "pkg:pypi/nvidia-nvshmem-cu13@3.4.5" and part["scope"] == "required"
    assert bom["metadata"]["timestamp"].startswith("2026-09-21T")
    # The public index has a package of our name that is somebody else's.
    assert bom["metadata"]["component"]["purl"].startswith("pkg:generic/")


def test_equal_builds_write_equal_text(tmp_path):
    text = describe(tmp_path, "magi_attention", "x=1")
    assert text == describe(tmp_path, "magi_attention", "x=1", PYTHONHASHSEED="7")
    serials = {json.loads(text)["serialNumber"]}
    serials.add(json.loads(describe(tmp_path, "magi_attention", "x=2"))["serialNumber"])
    changed = describe(tmp_path, "magi_attention", "x=1", MAGI_ATTENTION_BUILD_REVISION=f"{COMMIT}-dirty")
    serials.add(json.loads(changed)["serialNumber"])
    assert len(serials) == 3
    pedigree = json.loads(changed)["metadata"]["component"]["pedigree"]
    assert pedigree["commits"] == [{"uid": COMMIT}] and "no commit" in pedigree["notes"]
    assert "pedigree" not in describe(tmp_path, "magi_attention", MAGI_ATTENTION_BUILD_REVISION="")
