# SPDX-License-Identifier: Apache-2.0
"""Kernels as wheel variants: uv, where it is, takes the wheel of the GPU it is told of out of our own index."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import check_wheel
import index
import matrix
import pytest
import variants

from magi_attention.native import abi, info
from magi_attention.testing.waiting import DEADLINE_S
from magi_attention.version import __version__ as V

ROOT = Path(__file__).resolve().parents[2]
DATA = matrix.load()
KERNELS = [w for w in matrix.wheels(DATA) if (w.kind, w.machine) == ("kernels", "x86_64")]
TAG = DATA["platforms"]["x86_64"]["tag"]
NAME = "magi_attention_kernels"


def stand_in(folder: Path, wheel: matrix.Wheel, distribution: str = "", tag: str = TAG) -> Path:
    """A wheel of kernels whose library is its record alone."""
    record = info.BuildInfo(
        f"ffa_{wheel.arch}", V, abi.ABI_VERSION, "nvcc 13.0.88", (wheel.target,), ("fwd",), "0123abc",
        distribution or wheel.name, "580",
    )  # fmt: skip
    files = {f"{NAME}/{wheel.arch}_{wheel.cuda}/libmagi_ffa_{wheel.arch}.so": json.dumps(asdict(record)).join(
        ("magi-build-info:", "\0"))}  # fmt: skip
    where = f"{wheel.file_name}-{V}.dist-info"
    files[f"{where}/METADATA"] = f"Metadata-Version: 2.4\nName: {wheel.name}\nVersion: {V}\n\nName: is text here.\n"
    files[f"{where}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n"
    whole = {"name": wheel.name, "purl": f"pkg:generic/{wheel.name}@{V}"}
    bom = {"serialNumber": "urn:uuid:e1d41597-0902-563b-9e61-f6ea73678c94", "metadata": {"component": whole}}
    files[f"{where}/sboms/{wheel.file_name}.cdx.json"] = json.dumps(bom)
    files[f"{where}/RECORD"] = ""
    path = folder / f"{wheel.file_name}-{V}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    """An index with every wheel of kernels as a variant, and beside it one for aarch64."""
    dist, out = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("index")
    for wheel in KERNELS:
        variants.make(stand_in(dist, wheel), dist, DATA)
    arm = matrix.find("magi-attention-kernels-sm90-cu13", DATA, machine="aarch64")
    variants.make(stand_in(dist, arm, tag=DATA["platforms"]["aarch64"]["tag"]), dist, DATA)
    index.write(dist, out)
    return out


def test_a_variant_is_the_wheel_under_the_common_name(tmp_path):
    wheel = KERNELS[0]
    source = stand_in(tmp_path, wheel)
    (tmp_path / "out").mkdir()
    path = variants.make(source, tmp_path / "out", DATA)
    assert path.name == f"{NAME}-{V}-py3-none-{TAG}-sm80_cu13.whl" and check_wheel.check(path) == []
    again = path.read_bytes()
    assert variants.make(source, path.parent, DATA).read_bytes() == again
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(source) as old:
        contents = {name: archive.read(name) for name in archive.namelist()}
        library = next(name for name in contents if name.endswith(".so"))
        assert contents[library] == old.read(library)
    where = f"{NAME}-{V}.dist-info"
    assert {name.partition("/")[0] for name in contents} == {NAME, where}
    assert contents[f"{where}/METADATA"].decode().splitlines()[1] == "Name: magi-attention-kernels"
    assert b"\nName: is text here." in contents[f"{where}/METADATA"]
    listed = {row[0]: row[1:] for row in csv.reader(contents[f"{where}/RECORD"].decode().splitlines())}
    assert set(listed) == set(contents)
    for name, body in contents.items():
        if not name.endswith("/RECORD"):
            digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
            assert listed[name] == [f"sha256={digest}", str(len(body))]
    bom = json.loads(contents[f"{where}/sboms/{NAME}.cdx.json"])
    assert bom["metadata"]["component"] == {
        "name": "magi-attention-kernels", "purl": f"pkg:generic/magi-attention-kernels@{V}",
    }  # fmt: skip
    assert bom["serialNumber"] != "urn:uuid:e1d41597-0902-563b-9e61-f6ea73678c94"


def test_what_is_refused(tmp_path):
    wheel = KERNELS[0]
    path = variants.make(stand_in(tmp_path, wheel, "magi-attention-kernels-sm90-cu13"), tmp_path, DATA)
    (found,) = check_wheel.check(path)
    assert f"is not the library of {wheel.name}" in found
    other = path.with_name(path.name.replace("sm80_cu13", "sm90_cu13"))
    path.rename(other)
    with pytest.raises(SystemExit, match="says nothing about its label sm90_cu13"):
        variants.problems(other, DATA)
    with pytest.raises(SystemExit, match="says nothing about its label"):
        index.write(tmp_path, tmp_path / "out")
    comm = tmp_path / f"magi_attention_comm_cu13-{V}-py3-none-{TAG}.whl"
    with pytest.raises(SystemExit, match="no kernels of a GPU family"):
        variants.make(comm, tmp_path, DATA)
    assert variants.label_of(comm) == ""


def test_the_page_of_the_index_has_what_each_runs_on(served):
    folder = served / "magi-attention-kernels"
    file = folder / f"{NAME}-{V}-variants.json"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    page = (folder / "index.html").read_text()
    assert f'<a href="{file.name}#sha256={digest}">{file.name}</a>' in page
    links = re.findall(r">([^<]+\.whl)<", page)
    content = json.loads(file.read_text())
    assert set(content["variants"]) == {variants.label_of(Path(name)) for name in links}
    assert sum("aarch64" in name for name in links) == 1
    for name in links:
        (one,) = variants.of_wheel(folder / name)["variants"].items()
        assert one == (variants.label_of(Path(name)), content["variants"][one[0]])
    assert content["default-priorities"]["namespace"] == list(content["providers"])
    # Wheels under their own names are on pages of their own, as ever.
    assert (served / "magi-attention-kernels-sm90-cu13" / "index.html").is_file()


def test_pip_passes_them_over(served, tmp_path):
    pip = [sys.executable, "-m", "pip", "--isolated", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    where = ["--index-url", served.as_uri(), "--dest", str(tmp_path), "--platform", TAG, "--only-binary", ":all:"]
    said = {}
    for name in ("magi-attention-kernels", "magi-attention-kernels-sm90-cu13"):
        done = subprocess.run([*pip, *where, name], capture_output=True, text=True, timeout=DEADLINE_S)
        if "No module named pip" in done.stderr:
            pytest.skip("This Python has no pip.")
        said[name] = done.returncode
    assert said == {"magi-attention-kernels": 1, "magi-attention-kernels-sm90-cu13": 0}


def uv() -> list[str]:
    """How to call uv, of a version that reads the format."""
    found = [sys.executable, "-m", "uv"] if find_spec("uv") else [path] if (path := shutil.which("uv")) else []
    if not found:
        pytest.skip("uv is not installed; pip install uv brings it.")
    said = subprocess.run([*found, "--version"], capture_output=True, text=True).stdout
    numbers = tuple(map(int, re.findall(r"\d+", said)[:3]))
    if numbers < (0, 13, 8):
        pytest.skip(f"This uv is {'.'.join(map(str, numbers))}; 0.13.8 is the first that was tried with variants.")
    return found


def installed(
    served: Path, folder: Path, gpu: str, driver: str, *words: str, machine: str = "x86_64"
) -> tuple[str, str]:
    """The kernels that uv installs for a GPU and a driver that it is told of; and what it said."""
    command = [*uv(), "pip", "install", "--no-config", "--no-deps", "--no-cache", "--python", sys.executable]
    where = ["--index-url", served.as_uri(), "--target", str(folder), "--python-platform", f"{machine}-manylinux_2_28"]
    told = {
        "NV_VARIANT_PROVIDER_FORCE_SM_ARCH": gpu, "NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION": driver,
    }  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "NV_", "PIP_"))}
    done = subprocess.run(
        [*command, *where, *words, f"magi-attention-kernels=={V}"], env={**kept, **told}, capture_output=True,
        text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    found = [path.name for path in (folder / NAME).glob("*_cu*")] if done.returncode == 0 else []
    return " ".join(found), done.stderr


FEATURE = ("--preview-features", "wheel-variants")


@pytest.mark.parametrize(
    ("gpu", "driver", "want"),
    [
        ("9.0", "13.0", "sm90_cu13"),
        ("9.0", "12.4", "sm90_cu12"),
        ("8.0", "13.2", "sm80_cu13"),
        ("8.9", "12.0", "sm80_cu12"),
        ("10.0", "13.0", "sm100_cu13"),
        ("10.3", "13.1", "sm100_cu13"),
        ("12.1", "13.0", "sm120_cu13"),
        ("7.5", "13.0", ""),
        ("10.0", "12.8", ""),
        ("9.0", "11.8", ""),
    ],
)
def test_uv_takes_the_kernels_of_the_gpu(served, tmp_path, gpu, driver, want):
    found, said = installed(served, tmp_path, gpu, driver, *FEATURE)
    assert found == want, said
    assert want or "No solution found" in said
    if want:
        assert (tmp_path / f"{NAME}-{V}.dist-info" / "variant.json").is_file()


def test_uv_takes_those_of_the_machine(served, tmp_path):
    assert installed(served, tmp_path / "arm", "9.0", "13.0", *FEATURE, machine="aarch64")[0] == "sm90_cu13"
    found, said = installed(served, tmp_path / "none", "8.0", "13.0", *FEATURE, machine="aarch64")
    assert found == "" and "No solution found" in said


def test_uv_takes_none_without_its_flag(served, tmp_path):
    """The format is a draft, so nobody gets a variant who did not ask for it."""
    found, said = installed(served, tmp_path, "9.0", "13.0")
    assert found == "" and "unsupported wheel variants" in said
