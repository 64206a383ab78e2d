# SPDX-License-Identifier: Apache-2.0
"""The library over NVSHMEM, as far as no GPU is needed: header, both halves, and what is said if one is amiss."""

from __future__ import annotations

from pathlib import Path

import pytest

from magi_attention.errors import BuildError, ContractError, UnsupportedError
from magi_attention.native import build, toolchain
from magi_attention.native.comm import nvshmem

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("built", "loaded", "fits"),
    [
        ((3, 4, 5), (3, 4, 5), True),
        ((3, 4, 5), (3, 6, 1), True),
        ((3, 4, 5), (3, 4, 4), False),
        ((3, 4, 5), (3, 3, 20), False),
        ((3, 4, 5), (4, 0, 0), False),
    ],
)
def test_halves_that_go_together(built, loaded, fits):
    reason = nvshmem.why_unfit(built, loaded, Path("/x/libnvshmem_host.so.3"), "12")
    assert (reason is None) == fits
    assert fits or "`pip install 'nvidia-nvshmem-cu12>=3.4.5,<4'`" in reason


def test_without_the_package_the_sentence_names_it(monkeypatch, tmp_path):
    monkeypatch.setattr(nvshmem, "find_nvshmem", lambda: None)
    with pytest.raises(UnsupportedError, match="pip install nvidia-nvshmem-cu13"):
        nvshmem.Nvshmem()
    monkeypatch.setattr(toolchain, "find_nvshmem", lambda: None)
    with pytest.raises(BuildError, match="pip install nvidia-nvshmem-cu13"):
        toolchain.require_nvshmem()


def test_both_halves_load_without_a_gpu(tmp_path):
    try:
        for require in (toolchain.require_nvcc, toolchain.require_ninja, toolchain.require_nvshmem):
            require()
    except BuildError as error:
        pytest.skip(str(error))
    (built,) = build.build_all("comm", lib=tmp_path / "lib", folder=tmp_path / "build", csrc=ROOT / "csrc")
    library = nvshmem.Nvshmem(built.path.parent)
    assert library.built[0] == library.loaded[0] == 3
    with pytest.raises(ContractError, match="has not joined; call magi_comm_join first"):
        library.alloc(64)
