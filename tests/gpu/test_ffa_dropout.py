# SPDX-License-Identifier: Apache-2.0
"""Attention dropout in the CUDA kernels, beside the torch backend in float64: the same pairs go, for every kernel, GPU
budget, head dim, layout and number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention.api import Mask, attend, make_plan
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.config import DistAttnConfig, OverlapConfig
from magi_attention.errors import UnsupportedError
from magi_attention.functional import AttnPolicy
from magi_attention.kernels.registry import default_registry
from magi_attention.native.families import family_of
from magi_attention.native.ffa import FfaLibrary
from magi_attention.testing.masks import random_slices

DEVICE, SEED = "cuda", 20_261_126


def _library(portable: bool) -> FfaLibrary | str:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    family = family_of(torch.cuda.get_device_capability(), portable=portable)
    try:
        return "there are no such kernels for this GPU" if family is None else FfaLibrary.ahead(family)
    except UnsupportedError as reason:
        return str(reason)


LIBRARIES = {portable: _library(portable) for portable in (False, True)}
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=("own", "portable", "portable, 99 KB"))
def kernels(request, monkeypatch):
    portable = request.param != "own"
    library = LIBRARIES[portable]
    if isinstance(library, str):
        pytest.skip(library)
    monkeypatch.setenv("MAGI_ATTENTION_PORTABLE_KERNELS", str(int(portable)))
    if portable:
        library.use_small_tiles(request.param == "portable, 99 KB")
    default_registry.cache_clear()
    yield request.param
    if portable:
        library.use_small_tiles(False)
    default_registry.cache_clear()


class Problem:
    """Inputs in 16 bits, and results of the torch backend for them in float64."""

    def __init__(self, seed, slices, total, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16, p=0.3, **options):
        gen = torch.Generator().manual_seed(seed)
        shapes = [(total, heads[0], dims[0]), (total, heads[1], dims[0]), (total, heads[1], dims[1]),
                  (total, heads[0], dims[1])]  # fmt: skip
        self.inputs = [torch.randn(*shape, generator=gen).to(dtype) for shape in shapes]
        self.sink = torch.randn(2, heads[0], generator=gen) if options.pop("has_sink", False) else None
        self.mask, self.p, self.options = Mask.from_slices(*_lists(slices), total, total), p, options
        exact = [x.to(DEVICE).double() for x in self.inputs]
        self.want = self.run(exact, AttnPolicy(backend="sdpa_ol", is_backend_explicit=True))

    def run(self, tensors, policy, plan=None, group=None):
        """out, lse, dq, dk, dv and dsink."""
        plan = make_plan(self.mask, 1) if plan is None else plan
        *qkv, dout = (plan.shard(x, group).detach().requires_grad_() for x in tensors)
        sink = None if self.sink is None else self.sink.detach().clone().to(qkv[0].device).requires_grad_()
        options = dict(self.options, sink=sink, policy=policy, dropout_p=self.p, dropout_seed=SEED)
        out, meta = attend(*qkv, plan, group, **options)
        with torch.autograd.set_multithreading_enabled(False):  # ranks that are threads wait for one another
            out.backward(dout.detach())
        found = [plan.gather(x.detach(), group) for x in (out, meta.lse, *(x.grad for x in qkv))]
        return found if sink is None else [*found, sink.grad]

    def check(self, got):
        names = ("out", "lse", "dq", "dk", "dv", *(("dsink",) if self.sink is not None else ()))
        for name, x, want in zip(names, got, self.want, strict=True):
            x, want = x.double().nan_to_num(neginf=0), want.nan_to_num(neginf=0)
            error = (x - want).norm() / want.norm().clamp_min(1e-6)
            assert error < 0.012, f"{name}: {error}"  # NaN is no less


def _lists(slices):
    array = np.asarray(slices)
    return array[:, :2].tolist(), array[:, 2:4].tolist(), array[:, 4].tolist()


def check(*args, deterministic=False, **kwargs):
    problem = Problem(*args, **kwargs)
    policy = AttnPolicy(backend="ffa", is_backend_explicit=True, deterministic=deterministic)
    problem.check(problem.run([x.to(DEVICE) for x in problem.inputs], policy))


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("dims", ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256)))
def test_head_dims(dims, deterministic):
    check(1, Mask.causal(517).slices.array, 517, dims=dims, deterministic=deterministic)


@pytest.mark.parametrize("heads", ((4, 4), (8, 1), (6, 2), (16, 2)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_heads_and_dtypes(heads, dtype):
    check(2, Mask.varlen([0, 100, 333, 700], causal=True).slices.array, 700, heads, (128, 128), dtype)


@pytest.mark.parametrize("seed", range(4))
def test_random_masks(seed):
    rng = np.random.default_rng(seed)
    total = int(rng.integers(1, 900))
    dims, p = ((64, 64), (128, 128))[seed % 2], (0.05, 0.6)[seed // 2]
    check(seed, random_slices(rng, total, total), total, dims=dims, p=p)


@pytest.mark.parametrize("deterministic", (False, True))
def test_with_softcap_and_sinks(deterministic):
    slices = Mask.causal(640).slices.array
    check(3, slices, 640, (8, 2), (128, 128), softcap=3.0, has_sink=True, deterministic=deterministic)


def test_tiles_that_are_cut_along_the_keys():
    """Few queries, many keys."""
    slices = np.array([[0, 128, 0, 6000, 0], [128, 6000, 128, 6000, 1]])[:1]
    check(4, slices, 6000, (2, 1), (128, 128), p=0.5)


@pytest.mark.parametrize("degree", (0, 1, 3))
def test_ranks_drop_what_one_rank_drops(degree):
    problem = Problem(5, Mask.varlen([0, 300, 1000], causal=True).slices.array, 1000, (8, 2), (128, 128))
    config = DistAttnConfig(overlap_config=OverlapConfig(degree=degree))
    plan = make_plan(problem.mask, 3, config)
    policy = AttnPolicy(backend="ffa", is_backend_explicit=True, high_precision_reduce=True)
    inputs = [x.to(DEVICE) for x in problem.inputs]
    for got in FakeWorld(3).run(lambda transport: problem.run(inputs, policy, plan, transport)):
        problem.check(got)
