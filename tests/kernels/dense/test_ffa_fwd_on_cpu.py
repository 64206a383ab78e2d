# SPDX-License-Identifier: Apache-2.0
"""The forward kernel for Hopper, as it is, on the CPU: random masks against dense attention in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forward_oracle import NEG_INF, Inputs, Result, assert_right, dense, make_inputs
from hopper_library import HopperOnCpu, random_dropout, random_problem

from magi_attention.common.mask import Mask
from magi_attention.common.slices import to_dense
from magi_attention.kernels import SdpaBackend
from magi_attention.kernels.dropout import Dropout
from magi_attention.kernels.ffa.plans import DEVICE_PLANS
from magi_attention.kernels.types import AttnOptions, Operands, Partial
from magi_attention.native import abi
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.testing import masks

pytestmark = pytest.mark.usefixtures("planner")

SOURCE = Path(__file__).with_name("ffa_fwd_on_cpu.cpp")
KINDS = (
    (torch.bfloat16, (64, 64)),
    (torch.float16, (128, 128)),
    (torch.bfloat16, (40, 56)),
    (torch.float16, (72, 120)),
    (torch.bfloat16, (96, 96)),
    (torch.bfloat16, (88, 72)),
)
HEADS = ((4, 2), (5, 1), (3, 3), (8, 1))


def random_inputs(seed: int, most: int = 420, **options) -> tuple[np.random.Generator, Inputs]:
    return random_problem(seed, most, KINDS, HEADS, **options)


def attend(hopper: HopperOnCpu, x: Inputs, with_max: bool = False) -> Result:
    options = AttnOptions(x.scale, x.softcap, x.sink_layout, return_max_logits=with_max)
    return Result(*hopper.backend.forward_final(Operands(x.q, x.k, x.v, x.slices, options, x.sink)))


@pytest.mark.parametrize("seed", range(24))
def test_random_masks(hopper, seed):
    rng, x = random_inputs(seed)
    hopper.use(int(rng.choice((1, 1, 2, 3))), seed)
    assert_right(x, attend(hopper, x, seed % 2 == 0), note=f"{seed=}")


@pytest.mark.parametrize("seed", range(4))
def test_softcap_and_sinks(hopper, seed):
    _, plain = random_inputs(seed, 200)
    rows, heads = plain.q.shape[:2]
    shape = (rows, 2, heads) if seed % 2 else (2, heads)
    _, x = random_inputs(seed, 200, softcap=5.0 * (seed % 3), sink_shape=shape)
    hopper.use(1, seed)
    assert_right(x, attend(hopper, x, seed > 1), note=f"{seed=}")


@pytest.mark.parametrize("seed", range(6))
def test_wide_heads(hopper, seed):
    """Blocks of 96 and of 80 keys, two and three warpgroups; masks begin and end anywhere."""
    rng = np.random.default_rng(seed)
    tq, tk = (int(n) for n in rng.integers(100, 420, 2))
    slices = masks.random_slices(rng, tq, tk, max_slices=5)
    dtype, dims = ((torch.float16, (192, 192)), (torch.bfloat16, (256, 232)), (torch.float16, (184, 128)))[seed % 3]
    x = make_inputs(seed, slices, tq, tk, HEADS[seed % 4], dims, dtype, "cpu")
    hopper.use(int(rng.choice((1, 2, 5))), seed)
    assert_right(x, attend(hopper, x, seed > 3), note=f"{seed=}")


@pytest.mark.parametrize("with_cap", (False, True))
@pytest.mark.parametrize("seed", range(6))
def test_small_key_blocks(hopper, seed, with_cap):
    """Key intervals of up to 64 keys: blocks of 64 are as many as those of 128, so all variants choose them."""
    rng = np.random.default_rng(seed)
    dtype, dims = (*KINDS[:2], KINDS[4], (torch.float16, (192, 192)), (torch.bfloat16, (256, 256)), KINDS[3])[seed]
    blocks = rng.random((4, 9)) < 0.6
    blocks[:, 1::2] = False  # gaps, which segments do not bridge
    mask = Mask.block_sparse(blocks, int(rng.integers(24, 80)), [int(rng.integers(30, 65)), 300] * 4 + [64])
    x = make_inputs(
        seed, mask.slices, mask.total_q, mask.total_k, HEADS[seed % 4], dims, dtype, "cpu", softcap=9.0 * with_cap
    )
    hopper.use(int(rng.choice((1, 2, 5))), seed)
    assert_right(x, attend(hopper, x), note=f"{seed=}")
    (kept,) = x.slices.cache.values(DEVICE_PLANS)
    counts = list(TilePlan(kept.plan.numpy()).header.num_key_blocks)
    assert counts[0] == counts[-1] > 0, f"{seed=}"


@pytest.mark.parametrize("seed", range(3))
def test_tiles_split_along_the_keys(hopper, seed):
    """More CTAs than tiles: each takes a part of the keys, and the last one joins them."""
    dtype, dims = KINDS[seed % 2]
    x = make_inputs(seed, [[0, 70, 0, 1300, 0], [70, 90, 600, 1100, 0]], 90, 1300, (2, 1), dims, dtype, "cpu")
    hopper.use((4, 9, 3)[seed], seed)
    assert_right(x, attend(hopper, x, True), note=f"{seed=}")


@pytest.mark.parametrize("seed", range(3))
def test_stages_in_float32(hopper, seed):
    """The pairs of a mask in two calls, of which the second adds to what the first left."""
    _, x = random_inputs(seed, 260)
    hopper.use(1, seed)
    slices, options = x.slices.array, AttnOptions(x.scale)
    whole = Partial(torch.zeros(*x.q.shape[:2], x.v.shape[2]), torch.full(x.q.shape[:2], NEG_INF), None)
    for part in (slices[::2], slices[1::2]):
        if len(part):
            whole = hopper.backend.forward(Operands(x.q, x.k, x.v, type(x.slices)(part), options), whole)
    assert_right(x, Result(whole.out, whole.lse, None), note=f"{seed=}")


@pytest.mark.parametrize("seed", range(4))
def test_what_unseen_rows_hold_does_not_matter(hopper, seed):
    _, x = random_inputs(seed, 300)
    want = dense(x, torch.float64)
    unseen = torch.from_numpy(~to_dense(x.slices.array, len(x.q), len(x.k)).any(0))
    x.k[unseen] = x.v[unseen] = float("nan")
    hopper.use(1, seed)
    got = attend(hopper, x)
    torch.testing.assert_close(got.out.double(), want.out, rtol=0.03, atol=0.03, msg=f"{seed=}")


@pytest.mark.parametrize("seed", range(2))
def test_dropout(hopper, seed):
    """Another seed is no new kind of call, and calls without dropout are not confused with them."""
    _, x = random_inputs(seed, 200)
    dropout = random_dropout(seed, 0.3, len(x.q), len(x.k))
    exact = [t.double() for t in (x.q, x.k, x.v)]
    other = replace(dropout, dropout=Dropout(0.3, seed + 1))
    for mask in (dropout, other, None, dropout):
        options = AttnOptions(x.scale, dropout_p=0.0 if mask is None else 0.3)
        want = SdpaBackend().forward(Operands(*exact, x.slices, options, dropout=mask))
        hopper.use(1, seed)
        out, lse, _ = hopper.backend.forward_final(Operands(x.q, x.k, x.v, x.slices, options, dropout=mask))
        torch.testing.assert_close(out.double(), want.out, rtol=0.03, atol=0.03, msg=f"{seed=}")
        torch.testing.assert_close(lse.double(), want.lse, rtol=3e-5, atol=3e-5, msg=f"{seed=}")


@pytest.mark.parametrize("way", ("plain", "softcap", "dropout", "max_logits"))
@pytest.mark.parametrize("is_few", (False, True))
def test_both_tiles(hopper, way, is_few):
    """With as many CTAs as make either tile the better one; some of them have work for more than one tile."""
    dims, heads = (128, 128), ((3, 3), (8, 1))[is_few == (way in ("plain", "dropout"))]
    x = make_inputs(7, [[0, 190, 0, 300, 1], [190, 420, 100, 500, 0]], 420, 500, heads, dims, torch.float16, "cpu")
    tiles = hopper.backend.library.tiles(abi.FP16, *heads, *dims)
    wanted = tiles.few if is_few else tiles.many
    hopper.use(next(n for n in range(2, 40) if tiles.of(420, heads[0], n) == wanted), 7)
    options = AttnOptions(
        x.scale, 7.0 if way == "softcap" else 0.0, return_max_logits=way == "max_logits",
        dropout_p=0.3 if way == "dropout" else 0.0,
    )  # fmt: skip
    dropout = random_dropout(7, 0.3, 420, 500) if way == "dropout" else None
    want = SdpaBackend().forward(Operands(x.q.double(), x.k.double(), x.v.double(), x.slices, options, dropout=dropout))
    got = hopper.backend.forward_final(Operands(x.q, x.k, x.v, x.slices, options, dropout=dropout))
    for name, one, other in zip(("out", "lse", "max_logits"), got, (want.out, want.lse, want.max_logits)):
        if other is not None:
            torch.testing.assert_close(one.double(), other.double(), rtol=0.03, atol=0.03, msg=name)
    (kept,) = x.slices.cache.values(DEVICE_PLANS)
    assert TilePlan(kept.plan.numpy()).header.tile_tokens == wanted.tokens


def test_which_kernels_there_are(hopper):
    has = hopper.backend.library.has
    held = [(d, dv) for d in (8, 136, 192, 200) for dv in (64, 192, 200) if has("fwd", abi.FP16, d, dv)]
    assert held == [(d, dv) for d in (8, 136, 192) for dv in (64, 192)]
    assert has("fwd", abi.BF16, 256, 256) and not has("fwd", abi.BF16, 264, 64) and not has("fwd", abi.BF16, 0, 64)
    assert not has("bwd", abi.BF16, 64, 64) and not has("fwd", abi.FP32, 64, 64)
