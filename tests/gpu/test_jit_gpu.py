# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled at first use on a Hopper GPU: the public function with a library that holds one variant, or none."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from backward_oracle import assert_grads, make_dout, truth
from forward_oracle import Inputs, Result, assert_right, make_inputs

from magi_attention.errors import BuildError, UnsupportedError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import Registry, SdpaBackend
from magi_attention.kernels.ffa import custom_ops
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import Grads
from magi_attention.native import build, jit, loader, toolchain
from magi_attention.native.ffa import FfaLibrary
from magi_attention.testing import masks

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0 (H100, H200)"),
]
KNOWN = flex_flash_attn_func.known_calls


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of this module's own. What the process keeps is dropped before and after."""
    try:
        toolchain.find_csrc()
        toolchain.require_nvcc()
        toolchain.require_ninja()
    except BuildError as error:
        pytest.skip(str(error))
    jit._load_variant.cache_clear()
    yield tmp_path_factory.mktemp("cache")
    jit._load_variant.cache_clear()


@pytest.fixture(scope="module")
def one_variant(tmp_path_factory, cache) -> FfaLibrary:
    """A library built ahead with the forward for bf16 and head dims to 64, and nothing else."""
    folder = tmp_path_factory.mktemp("ahead")
    csrc = shutil.copytree(toolchain.find_csrc(), folder / "csrc", ignore=shutil.ignore_patterns("inst"))
    build.build_all("ffa", variants=["fwd_bf16_d64_dv64"], lib=folder / "lib", csrc=csrc, guard=False)
    return FfaLibrary(loader.load("ffa_sm90", folder / "lib"))


@pytest.fixture(autouse=True)
def explicit_backend(monkeypatch, cache):
    """An explicit wish, so that no other backend takes over."""
    for name in (*custom_ops.WATCHED, "MAGI_ATTENTION_NO_BUILD_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "ffa")
    monkeypatch.setenv("MAGI_ATTENTION_WORKSPACE_BASE", str(cache))
    KNOWN.forget()
    yield
    KNOWN.forget()


def use(monkeypatch, backend: FfaBackend) -> None:
    registry = Registry((backend, SdpaBackend()))
    monkeypatch.setattr(custom_ops, "default_registry", lambda: registry)


def attend(x: Inputs) -> Result:
    with torch.no_grad():
        out, meta = flex_flash_attn_func(x.q, x.k, x.v, *x.ranges, softmax_scale=x.scale, return_max_logits=True)
    return Result(out, meta.lse, meta.max_logits)


def problem(dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Inputs:
    return make_inputs(0, masks.varlen([0, 100, 333], 1), 333, 333, (8, 2), dims, dtype, "cuda")


def stems(caplog) -> list[str]:
    """The kernels that the log says were compiled, in order; each line names the place too."""
    lines = [r.getMessage() for r in caplog.records if "Compiling attention kernel" in r.getMessage()]
    assert all(".cache/magi_attention" in line for line in lines)
    return [line.split("kernel ")[1].split()[0] for line in lines]


def test_another_head_dim_is_compiled_used_and_right(monkeypatch, caplog, one_variant):
    backend = FfaBackend(one_variant)
    use(monkeypatch, backend)
    small, wide = problem((64, 64)), problem((128, 128))
    with caplog.at_level(logging.WARNING, logger="magi_attention.native"):
        assert_right(small, attend(small))
        assert stems(caplog) == [], "the library built ahead holds this one"
        first = attend(wide)
        assert_right(wide, first)
        assert stems(caplog) == ["fwd_bf16_d128_dv128"]
        again = attend(wide)
        leaves = [x.detach().requires_grad_() for x in (wide.q, wide.k, wide.v)]
        out, _ = flex_flash_attn_func(*leaves, *wide.ranges, softmax_scale=wide.scale)
        dout = make_dout(wide)
        assert_grads(wide, Grads(*torch.autograd.grad(out, leaves, dout)), truth(wide, dout))
        assert stems(caplog) == ["fwd_bf16_d128_dv128", "bwd_bf16_d128_dv128"]
    assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)
    used = {call.library.forward_address for call in backend._forward._prepared.values()}
    assert len(used) == 2 and one_variant.forward_address in used
    with pytest.raises(UnsupportedError, match="No forward kernel"):  # the one built ahead could not have done it
        one_variant.prefix(dtype=0, heads_q=8, heads_kv=2, head_dim=128, head_dim_v=128, pack=4, tile_tokens=32,
                           softmax_scale=1.0)  # fmt: skip


def test_a_known_call_launches_the_compiled_kernel(monkeypatch, one_variant):
    try:
        loader.load_host()
    except UnsupportedError as error:
        pytest.skip(str(error))
    use(monkeypatch, FfaBackend(one_variant))
    x = problem((128, 128))
    q, k, v, ranges = x.q, x.k, x.v, x.ranges
    want, _ = flex_flash_attn_func(q, k, v, *ranges)
    for _ in range(3):
        got, meta = KNOWN.find(q, k, v, *ranges)
        assert torch.equal(got, want)
    assert_right(x, Result(got, meta.lse, None))


def test_nothing_is_built_ahead(monkeypatch, caplog, cache):
    def nothing(family):
        raise UnsupportedError("Nothing is built ahead here.")

    monkeypatch.setattr(FfaLibrary, "ahead", staticmethod(nothing))
    monkeypatch.setattr(FfaLibrary, "is_ahead", staticmethod(lambda family: False))
    use(monkeypatch, FfaBackend())
    x = problem((64, 64), torch.float16)
    with caplog.at_level(logging.WARNING, logger="magi_attention.native"):
        for _ in range(2):
            assert_right(x, attend(x))  # the mask is planned by what was compiled, too
    assert stems(caplog) == ["fwd_fp16_d64_dv64"]


@pytest.mark.parametrize("dims", [(128, 64), (192, 64), (256, 64), (256, 128), (64, 128), (256, 192)], ids=str)
def test_tiles_outside_the_manifest(monkeypatch, one_variant, dims):
    """Those of ``JIT_HEAD_DIMS``, and head dims that have no tile of their own."""
    use(monkeypatch, FfaBackend(one_variant))
    x = problem(dims)
    assert_right(x, attend(x))
