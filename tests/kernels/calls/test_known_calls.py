# SPDX-License-Identifier: Apache-2.0
"""When a call of ``flex_flash_attn_func`` is known and when it is not, on a simulated kernel library."""

from __future__ import annotations

import gc
import inspect
import weakref

import numpy as np
import pytest
import torch
from ffa_simulator import close, inputs, tensors, truth
from known_case import KNOWN, Case
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.mask import Mask
from magi_attention.errors import ContractError, MagiError, UnsupportedError
from magi_attention.functional import flex_flash_attn as flex_module
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa import launch_cache
from magi_attention.kernels.ffa.plans import PlanShape
from magi_attention.kernels.tables import table_from_tensors
from magi_attention.native import abi


class Counted:
    def __init__(self, fn) -> None:
        self.fn, self.calls = fn, 0

    def __call__(self, *args):
        self.calls += 1
        return self.fn(*args)


def test_the_second_call_is_known_and_right(public, monkeypatch):
    _, simulator = public
    q, k, v = inputs(32, 32)
    ranges = tensors(Mask.varlen([0, 9, 32], causal=True).slices)
    want = truth(q, k, v, table_from_tensors(*ranges), AttnOptions(0.25, return_max_logits=True))
    monkeypatch.setattr(flex_module, "call_flex_fwd", counted := Counted(flex_module.call_flex_fwd))
    outs = []
    for _ in range(3):
        out, meta = flex_flash_attn_func(q, k, v, *ranges, return_max_logits=True)
        assert out.dtype == q.dtype and meta.max_logits.shape == (4,) and type(meta) is AttnForwardMeta
        close(out, want.out, 1e-2)
        close(meta.lse, want.lse, 1e-5)
        close(meta.max_logits, want.max_logits, 1e-5)
        outs.append(out)
    assert counted.calls == 1 and len(simulator.calls) == 3
    assert len({out.data_ptr() for out in outs}) == 3 and torch.equal(outs[0], outs[2])
    q2, k2, v2 = inputs(32, 32, seed=1)
    out, meta = flex_flash_attn_func(q2, k2, v2, *ranges, return_max_logits=True)
    close(out, truth(q2, k2, v2, table_from_tensors(*ranges), AttnOptions(0.25)).out, 1e-2)
    out, meta = flex_flash_attn_func(q, k, v, *ranges)
    assert meta == AttnForwardMeta(meta.lse, None) and counted.calls == 2
    with pytest.raises(ContractError, match="exclude each other"):
        flex_flash_attn_func(q, k, v, *ranges, swap_bwd_qk_loop=True, deterministic=True)


def test_every_edit_of_the_mask_is_noticed(public, monkeypatch):
    q, k, v = inputs(32, 32)
    ranges = tensors(Mask.varlen([0, 9, 32], causal=True).slices)
    monkeypatch.setattr(flex_module, "call_flex_fwd", counted := Counted(flex_module.call_flex_fwd))

    def run_and_check() -> int:
        before = counted.calls
        for _ in range(2):
            out, _ = flex_flash_attn_func(q, k, v, *ranges)
            close(out, truth(q, k, v, table_from_tensors(*ranges), AttnOptions(0.25)).out, 1e-2)
        return counted.calls - before

    assert run_and_check() == 1 and run_and_check() == 0
    for edit in (
        lambda: ranges.types.zero_(),
        lambda: ranges.q_ranges.__setitem__((0, 1), 8),
        lambda: ranges.k_ranges.set_(torch.tensor([[3, 8], [12, 20]], dtype=torch.int32)),
        lambda: setattr(ranges.q_ranges, "data", torch.tensor([[0, 7], [7, 30]], dtype=torch.int32)),
    ):
        edit()
        assert run_and_check() == 1, edit
    assert len(KNOWN) == 1, "a mask that was edited has no calls but those after"


def test_options_count_by_value(case):
    assert case.find(softcap=0.0, deterministic=False, sink=None, softmax_scale=None, ref_block_size=None) is not None
    assert case.find(max_seqlen_q=17) is not None and case.find(max_seqlen_q=18) is not None
    for change in (
        {"softmax_scale": 0.25}, {"softcap": 1.0}, {"softcap": 0}, {"deterministic": True}, {"deterministic": 0},
        {"sm_margin": 1}, {"return_max_logits": True}, {"sink_layout": "ssh"}, {"ref_block_size": (64, 64)},
        {"sparse_load": True}, {"index_attn": True}, {"q_block_size": 2}, {"no_such": 1}, {"max_seqlen_k": 3},
        {"index_attn_indices": case.mask.q_ranges}, {"q": None}, {"q_ranges": None}, {"softcap": [0.0]},
    ):  # fmt: skip
        assert case.find(**change) is None, change
    other = Case(case.simulator, softmax_scale=0.5, sink_layout="sh", ref_block_size=(64, 64))
    assert other.find(softmax_scale=float("0.5"), ref_block_size=tuple([64, 64])) is not None
    assert other.find(ref_block_size=(64, 64, 1)) is None and other.find(ref_block_size=(64, 64.0)) is None
    text = "".join(["s", "h"])  # equal, but another object
    assert other.find(sink_layout=text) is not None
    before = len(KNOWN)
    for _ in range(3):
        flex_flash_attn_func(case.q, case.k, case.v, *case.mask, softcap=0)
    assert len(KNOWN) == before + 1


def test_numbers_that_may_change_are_not_remembered(case):
    """A tensor is another number after an edit, and numpy's scalars are not compared here."""
    scale, before = torch.tensor(0.25), len(KNOWN)
    for factor in (1.0, 3.0):
        scale.mul_(factor)
        for given in (scale, scale.numpy(), np.float64(scale.item())):
            want = truth(case.q, case.k, case.v, table_from_tensors(*case.mask), AttnOptions(scale.item()))
            for _ in range(2):
                out, _ = flex_flash_attn_func(case.q, case.k, case.v, *case.mask, softmax_scale=given)
                close(out, want.out, 1e-2)
            assert case.find(softmax_scale=given) is None and case.find(softcap=given) is None
    assert len(KNOWN) == before


def test_how_arguments_are_passed(case):
    q, k, v, (a, b, c) = case.q, case.k, case.v, case.mask
    assert KNOWN.find(q, k, v, a, b, c) is not None and KNOWN.find(q, k, v, a, attn_type_map=c, k_ranges=b) is not None
    assert KNOWN.find(q, k, v, a, b, c, **{"".join(["so", "ftcap"]): 0.0}) is not None, "a name that is not interned"
    for args, kwargs in (
        ((), {}), ((q, k), {}), ((q, k, v, a, b, c, None), {}), ((q, k, v, a, b, c), {"q": q}),
        ((q, k, v, a, b, 9, 9, c), {}), ((q, k, v, a, b), {}), ((1, 2, 3, 4, 5, 6), {}), ((q, k, v, a, None, c), {}),
    ):  # fmt: skip
        assert KNOWN.find(*args, **kwargs) is None, (len(args), kwargs.keys())
    with pytest.raises(TypeError, match="multiple values"):
        flex_flash_attn_func(q, k, v, a, b, c, q=q)
    with pytest.raises(TypeError, match="no_such"):
        flex_flash_attn_func(q, k, v, a, b, c, no_such=1)
    with pytest.raises(TypeError):
        flex_flash_attn_func(q)
    with pytest.warns(DeprecationWarning) as caught:
        flex_flash_attn_func(q, k, v, a, b, 9, 9, c)
    assert caught[0].filename == __file__
    assert list(inspect.signature(flex_flash_attn_func).parameters)[:4] == ["q", "k", "v", "q_ranges"]
    assert flex_flash_attn_func.__name__ == "flex_flash_attn_func"
    assert "Slices should be" in flex_flash_attn_func.__doc__


class Subclass(torch.Tensor):
    pass


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    seen: list = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_tensors_that_are_not_known(case):
    q, k, v, mask = case.q, case.k, case.v, case.mask
    unaligned = torch.empty(q.numel() + 8, dtype=q.dtype)[1 : q.numel() + 1].view(q.shape)
    assert unaligned.data_ptr() % 16
    strided = torch.empty(32, 4, 32, dtype=q.dtype)[:, :, :16]
    for name, x in (
        ("q", q[:31]), ("q", q.half()), ("q", q.to("meta")), ("q", unaligned), ("q", strided), ("q", q[None]),
        ("q", q.as_subclass(Subclass)), ("q", q.to_sparse()), ("q", torch._neg_view(q)), ("q", q.shape),
        ("k", torch._efficientzerotensor(k.shape, dtype=k.dtype)), ("k", k.to_mkldnn()),
        ("k", k[:, :1]), ("v", v[:, :, :8]), ("v", v.transpose(0, 1)), ("q_ranges", mask.q_ranges.clone()),
        ("q_ranges", mask.q_ranges.as_subclass(Subclass)), ("k_ranges", mask.k_ranges.tolist()),
        ("attn_type_map", None), ("attn_type_map", mask.types.long()), ("sink", torch.zeros(1, 4)), ("sink", 1.0),
    ):  # fmt: skip
        assert case.find(**{name: x}) is None, (name, x if not torch.is_tensor(x) else tuple(x.shape))
    assert case.find(q=torch.nn.Parameter(q, requires_grad=False)) is not None
    with torch.inference_mode():
        assert case.find(q=q.clone(), k=k + 0) is not None, "inference tensors are fine but as a mask"


def test_gradients_modes_and_transforms(case):
    q, v, sink = case.q, case.v, torch.zeros(1, 4)
    wanted = q.clone().requires_grad_()
    assert case.find(q=wanted) is None and case.find(v=torch.nn.Parameter(v)) is None
    with torch.no_grad():
        assert case.find(q=wanted) is not None
        assert case.find(v=torch.nn.Parameter(v)) is not None
    with_sink = Case(case.simulator, sink=sink)
    assert with_sink.find() is not None and with_sink.find(sink=sink.clone().requires_grad_()) is None
    for mode in (DispatchMode(), FunctionMode(), torch.device("cpu")):
        with mode:
            assert case.find() is None, mode
    assert not FunctionMode.seen, "a mode is told of nothing by the search"
    with forward_ad.dual_level():
        assert case.find() is None
    found = []
    torch.jit.trace(lambda x: (found.append(case.find()), x + 1)[1], torch.zeros(2), check_trace=False)
    torch.func.vmap(lambda x: (found.append(case.find(q=x)), x)[1])(q[None])
    torch.func.grad(lambda x: (found.append(case.find()), x.sum())[1])(torch.zeros(2))
    assert found == [None, None, None]
    assert case.find() is not None


def test_device_stream_capture_and_environment(public, case, monkeypatch):
    runtime = public[0].runtime
    runtime.capturing = True
    assert case.find() is None
    flex_flash_attn_func(case.q, case.k, case.v, *case.mask, softmax_scale=0.125)
    assert len(KNOWN) == 1, "what a graph captures is not remembered"
    runtime.capturing = False
    assert case.find() is not None
    KNOWN.forget()
    # As builtin functions are: attributes of the runtime, which are looked up when a call is remembered.
    state = {"stream": 7, "device": -1}
    monkeypatch.setattr(runtime, "stream", lambda index: state["stream"], raising=False)
    monkeypatch.setattr(runtime, "current_device", lambda: state["device"], raising=False)
    again = Case(case.simulator)
    assert again.find() is not None
    state["stream"] = 8
    assert again.find() is None
    state.update(stream=7, device=1)
    assert again.find() is None
    state["device"] = -1
    assert again.find() is not None
    for name, value in (
        ("MAGI_ATTENTION_SANITY_CHECK", "1"), ("MAGI_ATTENTION_KERNEL_BACKEND", "sdpa"),
        ("MAGI_ATTENTION_FORCE_JIT_BUILD", "1"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert again.find() is None, name
            if name != "MAGI_ATTENTION_FORCE_JIT_BUILD":
                flex_flash_attn_func(again.q, again.k, again.v, *again.mask)
                assert again.find() is None, "neither the reference nor a checked call is remembered"
        assert again.find() is not None


def test_entries_go_with_their_tensors(public, monkeypatch):
    ffa, simulator = public
    q, k, v = inputs(32, 32)
    mask = tensors(Mask.causal(32).slices)
    for scale in (0.25, 0.5):
        flex_flash_attn_func(q, k, v, *mask, softmax_scale=scale)
    tile = ffa.library.tiles(abi.BF16, 4, 2, 16, 16).many
    died = weakref.ref(ffa._gpus.given.plans.find(mask, PlanShape(32, 32, tile, head_units=4 // tile.pack), 7))
    assert len(KNOWN) == 2
    ffa._gpus.given.plans._entries.clear()
    assert died() is not None, "the plan is held by the calls that use it"
    q_ranges = mask.q_ranges
    del mask
    gc.collect()
    assert len(KNOWN) == 0 and died() is None
    for cut in range(1, 20):  # ids and memory are used again, calls are not
        fresh = tensors(Mask.varlen([0, cut, 32]).slices)
        out, _ = flex_flash_attn_func(q, k, v, *fresh)
        close(out, truth(q, k, v, table_from_tensors(*fresh), AttnOptions(0.25)).out, 1e-2)
        assert len(KNOWN) == 1
    assert q_ranges is not None
    kept = tensors(Mask.causal(32).slices)
    monkeypatch.setattr(simulator, "forward_raw", lambda params: abi.OK)  # launches nothing
    for i in range(1030):
        flex_flash_attn_func(q[:16], k[:16], v[:16], kept[0][:0], kept[1][:0], None, sm_margin=i)
        assert len(KNOWN) <= 1024
    with torch.inference_mode():
        inference = tensors(Mask.full(32).slices)
        KNOWN.forget()
        for _ in range(2):
            flex_flash_attn_func(q, k, v, *inference)
        assert len(KNOWN) == 0


def test_failing_launches_and_preparations(public, monkeypatch):
    _, simulator = public
    case = Case(simulator)
    for status, kind in ((abi.INVALID_ARGUMENT, ContractError), (abi.UNSUPPORTED, UnsupportedError), (3, MagiError)):
        simulator.status = status
        for fresh in (False, True):  # known, and by the usual way
            with pytest.raises(kind, match="Attention forward: the simulator was told to fail."):
                flex_flash_attn_func(case.q, case.k, case.v, *case.mask, softcap=1.0 if fresh else 0.0)
    simulator.status = abi.OK
    assert case.find() is not None and len(KNOWN) == 1
    KNOWN.forget()
    known = launch_cache.KnownCalls(
        inspect.signature(flex_flash_attn_func), AttnForwardMeta, broken, lambda: True, (), ("max_seqlen_q",)
    )
    with pytest.raises(ZeroDivisionError):
        known.remember(case.q, case.k, case.v, *case.mask)
    assert len(known) == 0


def broken(**_):
    return 1 // 0


def test_sinks(public):
    _, simulator = public
    sink = torch.randn(2, 4)
    case = Case(simulator, sink=sink)
    got, meta = case.find()
    assert torch.equal(got, case.want[0]) and torch.equal(meta.lse, case.want[1].lse)
    assert simulator.calls[-1].sink == sink.data_ptr()
    want = truth(case.q, case.k, case.v, table_from_tensors(*case.mask), AttnOptions(0.25), sink)
    close(got, want.out, 1e-2)
    for other in (sink.double(), sink.t().contiguous().t(), sink[:1], sink.bfloat16(), sink[:0]):
        assert case.find(sink=other) is None
        flex_flash_attn_func(case.q, case.k, case.v, *case.mask, sink=other)
    assert case.find(sink=sink.clone()) is not None and len(KNOWN) == 2  # sink[:1] has joined


def test_compiled_and_index_calls(public):
    _, simulator = public
    q, k, v = inputs(32, 32)
    ranges = tensors(Mask.causal(32).slices)
    want = truth(q, k, v, Mask.causal(32).slices, AttnOptions(0.25))
    flex_flash_attn_func(q, k, v, *ranges)
    compiled = torch.compile(lambda *x: flex_flash_attn_func(*x)[0] * 2, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        close(compiled(q, k, v, *ranges), 2 * want.out, 2e-2)
    assert len(simulator.calls) == 3
    rows = torch.arange(32)[:, None]
    keys = torch.where(torch.arange(32)[None] <= rows, torch.arange(32)[None], -1).to(torch.int32)
    q1, k1, v1 = inputs(32, 32, heads=(4, 1))
    for _ in range(2):
        out, _ = flex_flash_attn_func(q1, k1, v1, index_attn_indices=keys[:, None])
        close(out, truth(q1, k1, v1, Mask.causal(32).slices, AttnOptions(0.25)).out, 1e-2)
    assert len(KNOWN) == 1
