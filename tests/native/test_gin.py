# SPDX-License-Identifier: Apache-2.0
"""The library over NCCL's device API, as far as no GPU is needed: header, both halves, what is said without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from magi_attention.errors import BuildError, UnsupportedError
from magi_attention.native import build, toolchain
from magi_attention.native.comm import gin

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("built", "loaded", "fits"),
    [
        ((2, 30, 7), (2, 30, 7), True),
        ((2, 30, 3), (2, 30, 7), True),
        ((2, 30, 7), (2, 30, 3), False),
        ((2, 30, 7), (2, 32, 3), False),
        ((2, 30, 7), (3, 30, 7), False),
    ],
)
def test_halves_that_go_together(built, loaded, fits):
    reason = gin.why_unfit(built, loaded, Path("/x/libnccl.so.2"))
    assert (reason is None) == fits
    assert fits or "build --only gin" in reason


MAPS = "7f00-7f01 r--p 00000000 00:1f 1 {}\n7f01-7f02 r-xp 00001000 00:1f 1 {}\n"


def test_the_nccl_that_runs_is_found():
    one, other = "/site/nvidia/nccl/lib/libnccl.so.2", "/usr/lib/libnccl.so.2.30.7"
    assert gin.loaded_nccl(MAPS.format(one, one)) == Path(one)
    with pytest.raises(UnsupportedError, match=f"Two NCCLs are loaded, {one} and {other}; unset"):
        gin.loaded_nccl(MAPS.format(one, other))
    with pytest.raises(UnsupportedError, match="No libnccl.so.2 is loaded"):
        gin.loaded_nccl(MAPS.format("/usr/lib/libc.so.6", "/x/libnccl.so.2.backup/other"))


def test_without_the_package_the_sentence_names_it(monkeypatch):
    monkeypatch.setattr(toolchain, "_nvidia_package", lambda name: None)
    with pytest.raises(BuildError, match="pip install 'nvidia-nccl-cu13>=2.30'"):
        toolchain.require_nccl()


@pytest.mark.parametrize(("version", "fits"), [("2.28.9", False), ("2.30.0", True), ("3.0.1", True)])
def test_an_nccl_that_is_too_old_is_refused_before_anything_is_compiled(version, fits, tmp_path, monkeypatch):
    include = tmp_path / "include"
    include.mkdir()
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    (include / "nccl.h").write_text("".join(f"#define NCCL_{name} {value}\n" for name, value in parts))
    (include / "nccl_device.h").touch()
    monkeypatch.setattr(toolchain, "_nvidia_package", lambda name: tmp_path)
    if fits:
        assert toolchain.require_nccl() == tmp_path
        return
    with pytest.raises(BuildError, match=rf"need NCCL 2.30 or newer, and {tmp_path} has {version}: run `pip install"):
        toolchain.require_nccl()


@pytest.mark.slow
def test_it_compiles(tmp_path):
    try:
        for require in (toolchain.require_nvcc, toolchain.require_ninja, toolchain.require_nccl):
            require()
    except BuildError as error:
        pytest.skip(str(error))
    (built,) = build.build_all("gin", lib=tmp_path / "lib", folder=tmp_path / "build", csrc=ROOT / "csrc")
    assert built.path.is_file()
