# SPDX-License-Identifier: Apache-2.0
"""Libraries out of wheels of their own: their records, which one is taken, and what a misfit is told."""

from __future__ import annotations

import dataclasses
import json

import pytest

from magi_attention.errors import BuildError, UnsupportedError
from magi_attention.native import abi, build, info, loader, toolchain, wheels
from magi_attention.version import __version__

FILE = "libmagi_ffa_sm90.so"
GOOD = info.BuildInfo(
    "ffa_sm90", __version__, abi.ABI_VERSION, "nvcc 13.0.88", ("sm_90a",), ("fwd_bf16_d64_dv64",), "0123abc",
    "magi-attention-kernels-sm90-cu13", "580.65.06",
)  # fmt: skip


def put(site, record: info.BuildInfo | None, folder: str = "sm90_cu13"):
    """A file that is no library but has a record, where a wheel would put it."""
    path = site / wheels.NAMESPACE / folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = b"" if record is None else json.dumps(dataclasses.asdict(record)).encode() + b"\0"
    path.write_bytes(b"\x7fELF..magi-build-info:no record\0...magi-build-info:" + text + b"more")
    return path


def test_record_of_a_file(tmp_path):
    assert info.read_info(put(tmp_path, GOOD)) == GOOD
    assert info.read_info(put(tmp_path, None)) is None
    (tmp_path / "empty").write_bytes(b"")
    assert info.read_info(tmp_path / "empty") is None
    with pytest.raises(ValueError, match="name, version and abi"):
        info.parse("[]")
    assert info.parse('{"name": "x", "version": "1", "abi": 2, "later": 3}') == info.BuildInfo("x", "1", 2)


def test_record_of_a_built_library(tmp_path, tree):
    """What the compiler put in is what was told, quotes and all; the library and the file say the same."""
    release = info.Release('rev "1"', "magi-attention-x", "1.2")
    try:
        job = build.planner_job(tree)
        job = dataclasses.replace(job, archs=("sm_1", "sm_2"))
        built = build.build(job, tmp_path / "build", tmp_path / toolchain.library_file("planner"), release=release)
    except BuildError as error:
        pytest.skip(f"The planner library cannot be built here: {error}")
    record = info.read_info(built.path)
    assert record == loader.build_info(loader.load("planner", tmp_path))
    compiler = record.compiler
    assert compiler.startswith("c++ ") and record == info.BuildInfo(
        "planner", __version__, abi.ABI_VERSION, compiler, ("sm_1", "sm_2"), (), *dataclasses.astuple(release)
    )


def test_the_newest_cuda_that_the_driver_runs_is_taken(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"  # two folders on sys.path share the namespace
    path = [str(first), str(second)]
    assert wheels.choose(FILE, path, ()) is None
    older = put(first, dataclasses.replace(GOOD, distribution="magi-attention-kernels-sm90-cu12", min_driver="525.60"),
                "sm90_cu12")  # fmt: skip
    newer = put(second, GOOD)
    assert wheels.libraries(FILE, path) == [newer, older]
    assert wheels.choose(FILE, path, ()) == newer
    assert wheels.choose(FILE, path, (580, 65, 6)) == newer
    assert wheels.choose(FILE, path, (570, 1)) == older
    with pytest.raises(UnsupportedError, match=r"needs an NVIDIA driver of 580\.65\.06.*this is 510\.47.*cu12==1"):
        wheels.choose(FILE, path, (510, 47))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "no record of a wheel; build and install"),
        (dataclasses.replace(GOOD, distribution=""), "no record of a wheel"),
        (
            dataclasses.replace(GOOD, version="0.9", abi=1),
            rf"version 0\.9 \(ABI 1\).*{__version__} \(ABI {abi.ABI_VERSION}\); run "
            rf"`pip install --no-index --find-links dist magi-attention-kernels-sm90-cu13=={__version__}`",
        ),
        (dataclasses.replace(GOOD, abi=99), "ABI 99.*pip install"),
    ],
)
def test_a_misfit_is_refused_with_the_line_that_mends_it(tmp_path, monkeypatch, record, words):
    put(tmp_path, record)
    monkeypatch.setattr(loader, "LIB", tmp_path / "no libraries built here")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsupportedError, match=words):
        loader.find("ffa_sm90")
    assert "install" in loader.why_absent("ffa_sm90")


def test_what_is_built_in_the_package_goes_first(tmp_path, monkeypatch):
    wheel, own = put(tmp_path, GOOD), tmp_path / "lib" / FILE
    monkeypatch.setattr(loader, "LIB", own.parent)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert loader.find("ffa_sm90") == wheel
    own.parent.mkdir()
    own.write_bytes(b"x")
    assert loader.find("ffa_sm90") == own


def test_without_any_the_sentence_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "LIB", tmp_path)
    monkeypatch.setattr(wheels, "libraries", lambda *_: [])
    line = f"pip install --no-index --find-links dist 'magi_attention[sm90]=={__version__}'"
    assert line in loader.why_absent("ffa_sm90")


def test_driver_version(tmp_path):
    file = tmp_path / "version"
    assert wheels.driver_version(file) == ()
    for text in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:15:30 UTC 2025\nGCC version:  gcc 12",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
    ):
        file.write_text(text)
        assert wheels.driver_version(file) == (580, 65, 6)
    file.write_text("something else")
    assert wheels.driver_version(file) == ()
