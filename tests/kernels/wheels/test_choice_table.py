# SPDX-License-Identifier: Apache-2.0
"""Which backend runs what on which GPU: a table over faked compute capabilities, everything being installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magi_attention.errors import NoBackendError
from magi_attention.kernels import default_registry
from magi_attention.kernels.cudnn_flex import backend as cudnn_flex
from magi_attention.kernels.fa4 import backend as fa4
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import AttnOptions, Problem
from magi_attention.native.families import GPU_ROWS, family_of

PLAIN = Problem("cuda", torch.bfloat16, 8, 2, 128, 128, AttnOptions(0.1), needs_backward=True)
CASES = {
    "plain": {},
    "fp32": {"dtype": torch.float32},
    "softcap": {"options": AttnOptions(0.1, softcap=5.0)},
    "deterministic": {"options": AttnOptions(0.1, deterministic=True)},
    "softcap and deterministic": {"options": AttnOptions(0.1, softcap=5.0, deterministic=True)},
    "max logits": {"options": AttnOptions(0.1, return_max_logits=True)},
    "margin": {"options": AttnOptions(0.1, sm_margin=8)},
    "head dim 80": {"head_dim": 80, "head_dim_v": 80},
    "head dim 160": {"head_dim": 160, "head_dim_v": 160},
    "head dim 512": {"head_dim": 512, "head_dim_v": 512},
    "MLA": {"head_dim": 192, "num_heads_kv": 8},
}
OURS = {name: "ffa" for name in CASES} | {"fp32": "sdpa_ol", "head dim 512": "sdpa_ol"}
ON_BLACKWELL = {name: "cudnn_flex" for name in CASES} | {
    "fp32": "sdpa_ol", "softcap": "fa4", "softcap and deterministic": "ffa", "margin": "ffa", "head dim 160": "ffa",
    "head dim 512": "sdpa_ol",
}  # fmt: skip
# Compute capability -> backend of each case, if none is asked for.
TABLE = {c: OURS for row in GPU_ROWS for c in row.capabilities if c[0] != 10}
TABLE |= {(10, 0): ON_BLACKWELL, (10, 3): ON_BLACKWELL}
TABLE |= {(7, 5): dict.fromkeys(CASES, "sdpa_ol"), (11, 0): dict.fromkeys(CASES, "sdpa_ol")}


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch):
    """Each wheel is there, and kernels of ours for each GPU that has a family of them, up to head dim 256."""
    monkeypatch.setattr(fa4, "is_installed", lambda: True)
    monkeypatch.setattr(cudnn_flex, "_module", object)

    def why_not(self, p: Problem) -> str | None:
        fits = p.dtype in (torch.bfloat16, torch.float16) and max(p.head_dim, p.head_dim_v) <= 256
        return None if fits and family_of(p.capability) is not None else "No kernels."

    monkeypatch.setattr(FfaBackend, "why_not", why_not)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("capability", TABLE, ids=str)
def test_the_choice(capability, case):
    problem = replace(PLAIN, capability=capability, **CASES[case])
    backend, why = default_registry().select(problem, "ffa")
    assert backend.name == TABLE[capability][case] and why.endswith(".")
    assert default_registry().answers(problem)[backend.name] is None


@pytest.mark.parametrize("capability", TABLE, ids=str)
@pytest.mark.parametrize("name", ("fa4", "cudnn_flex"))
def test_a_wheel_that_is_asked_for_runs_where_it_can_and_is_refused_elsewhere(capability, name):
    problem = replace(PLAIN, capability=capability)
    if capability in ((9, 0), (10, 0), (10, 3)):
        assert default_registry().select(problem, name, explicit=True)[0].name == name
        return
    with pytest.raises(NoBackendError, match=f"'{name}' cannot run"):
        default_registry().select(problem, name, explicit=True)


def test_the_table_of_the_page_says_the_same():
    for row in GPU_ROWS:
        first = "cudnn_flex" if row.capabilities[0][0] == 10 else "ffa"
        assert f"`{first}`" in row.kernels and {TABLE[c]["plain"] for c in row.capabilities} == {first}
