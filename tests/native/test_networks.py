# SPDX-License-Identifier: Apache-2.0
"""The libraries over NVSHMEM and over NCCL's device API, as far as no GPU is needed: headers, both halves, and what is
said if one is amiss."""

from __future__ import annotations

from pathlib import Path

import pytest

from magi_attention.errors import BuildError, ContractError, UnsupportedError
from magi_attention.native import build, toolchain
from magi_attention.native.comm import gin, nvshmem

ROOT = Path(__file__).resolve().parents[2]
HALVES = [  # network, version that was built with, version that is loaded, and whether they go together
    *(("nvshmem", (3, 4, 5), loaded, fits) for loaded, fits in (
        ((3, 4, 5), True), ((3, 6, 1), True), ((3, 4, 4), False), ((3, 3, 20), False), ((4, 0, 0), False),
    )),
    *(("gin", (2, 30, 7), loaded, fits) for loaded, fits in (
        ((2, 30, 7), True), ((2, 30, 3), False), ((2, 32, 3), False), ((3, 30, 7), False),
    )),
    ("gin", (2, 30, 3), (2, 30, 7), True),
]  # fmt: skip


@pytest.mark.parametrize(("network", "built", "loaded", "fits"), HALVES)
def test_halves_that_go_together(network, built, loaded, fits):
    if network == "gin":
        reason, remedy = gin.why_unfit(built, loaded, Path("/x/libnccl.so.2")), "build --only gin"
    else:
        reason = nvshmem.why_unfit(built, loaded, Path("/x/libnvshmem_host.so.3"), "12")
        remedy = "`pip install 'nvidia-nvshmem-cu12>=3.4.5,<4'`"
    assert reason is None if fits else remedy in reason


MAPS = "7f00-7f01 r--p 00000000 00:1f 1 {}\n7f01-7f02 r-xp 00001000 00:1f 1 {}\n"


def test_the_nccl_that_runs_is_found():
    one, other = "/site/nvidia/nccl/lib/libnccl.so.2", "/usr/lib/libnccl.so.2.30.7"
    assert gin.loaded_nccl(MAPS.format(one, one)) == Path(one)
    with pytest.raises(UnsupportedError, match=f"Two NCCLs are loaded, {one} and {other}; unset"):
        gin.loaded_nccl(MAPS.format(one, other))
    with pytest.raises(UnsupportedError, match="No libnccl.so.2 is loaded"):
        gin.loaded_nccl(MAPS.format("/usr/lib/libc.so.6", "/x/libnccl.so.2.backup/other"))


def test_without_the_packages_the_sentences_name_them(monkeypatch):
    monkeypatch.setattr(toolchain, "_nvidia_package", lambda name: None)
    with pytest.raises(BuildError, match="pip install 'nvidia-nccl-cu13>=2.30'"):
        toolchain.require_nccl()
    with pytest.raises(BuildError, match="pip install nvidia-nvshmem-cu13"):
        toolchain.require_nvshmem()
    with pytest.raises(UnsupportedError, match="pip install nvidia-nvshmem-cu13"):
        nvshmem.Nvshmem()


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


def build_or_skip(name: str, tmp_path: Path) -> Path:
    try:
        for require in (toolchain.require_nvcc, toolchain.require_ninja, getattr(toolchain, f"require_{NEEDS[name]}")):
            require()
    except BuildError as error:
        pytest.skip(str(error))
    (built,) = build.build_all(name, lib=tmp_path / "lib", folder=tmp_path / "build", csrc=ROOT / "csrc")
    return built.path


NEEDS = {"gin": "nccl", "comm": "nvshmem"}


@pytest.mark.slow
def test_gin_compiles(tmp_path):
    assert build_or_skip("gin", tmp_path).is_file()


def test_both_halves_of_nvshmem_load_without_a_gpu(tmp_path):
    library = nvshmem.Nvshmem(build_or_skip("comm", tmp_path).parent)
    assert library.built[0] == library.loaded[0] == 3
    with pytest.raises(ContractError, match="has not joined; call magi_comm_join first"):
        library.alloc(64)
