# SPDX-License-Identifier: Apache-2.0
"""Which kernels a GPU runs, for capabilities that no machine here has."""

from __future__ import annotations

import pytest
import torch

from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.libraries import FfaLibraries
from magi_attention.kernels.reference.sdpa_online import SdpaOnlineBackend
from magi_attention.kernels.registry import Registry
from magi_attention.kernels.types import AttnOptions, Problem
from magi_attention.native import toolchain
from magi_attention.native.families import BY_LIBRARY, BY_NAME, FAMILIES, SM90, capability_of, family_of

TABLE = {
    (7, 5): (None, None),
    (8, 0): ("sm80", "sm80"),
    (8, 6): ("sm80", "sm80"),
    (8, 7): ("sm80", "sm80"),
    (8, 9): ("sm80", "sm80"),
    (9, 0): ("sm90", "portable_sm90"),
    (10, 0): ("sm100", "sm100"),
    (10, 3): ("sm100", "sm100"),
    (11, 0): (None, None),
    (12, 0): ("sm120", "sm120"),
    (12, 1): ("sm120", "sm120"),
}


@pytest.mark.parametrize("capability", TABLE, ids=str)
def test_each_gpu_has_the_kernels_that_it_can_run(capability):
    for portable, name in zip((False, True), TABLE[capability]):
        family = family_of(capability, portable)
        assert (family and family.name) == name
        if family is None:
            continue
        # Code of a major version runs on newer minor ones, and code with an "a" on one GPU alone.
        built_for = capability_of(family.target.replace("_", "").rstrip("a"))
        assert built_for[0] == capability[0] and built_for <= capability
        assert not family.target.endswith("a") or built_for == capability


def test_names_are_told_apart():
    assert len(BY_NAME) == len(BY_LIBRARY) == len(FAMILIES) and BY_NAME["sm90"] is SM90
    assert family_of(None) is None and capability_of("sm121") == (12, 1)
    for family in FAMILIES:
        assert (toolchain.find_csrc() / "ffa" / family.sources).is_dir()
        assert family.gencode in toolchain.nvcc_flags(family.name)


@pytest.mark.parametrize("capability", TABLE, ids=str)
def test_the_backend_asks_for_the_family_of_the_gpu(capability, monkeypatch):
    asked = []

    class Libraries:
        def __init__(self, family):
            self.family = family

        def why_not(self, *_):
            return None

    monkeypatch.setattr(FfaLibraries, "find", lambda family: asked.append(family.name) or Libraries(family))
    problem = Problem("cuda", torch.bfloat16, 8, 2, 128, 128, AttnOptions(0.1), capability=capability)
    for portable, name in zip((False, True), TABLE[capability]):
        chosen, why = Registry((FfaBackend(portable=portable), SdpaOnlineBackend())).select(problem)
        assert chosen.name == ("sdpa_ol" if name is None else "ffa") and why.endswith(".")
    assert asked == [name for name in TABLE[capability] if name is not None]
