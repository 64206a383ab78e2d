# SPDX-License-Identifier: Apache-2.0
"""Eager calls of custom ops pass torch's dispatcher by, unless somebody looks on, and then they are the op itself."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from magi_attention.compat.functional.fa4 import ffa_fa4_func
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional import flex_flash_attn_func, index_attn_func
from magi_attention.functional.flex_flash_attn import check_call
from magi_attention.kernels.eager import eager_call, opaque_op
from magi_attention.kernels.ffa.custom_ops import call_flex_fwd, flex_fwd

RANGES = torch.tensor([[0, 5], [5, 11]], dtype=torch.int32)


class Seen(TorchDispatchMode):
    """Names of the ops that were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def leaves(seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shapes = (11, 4, 8), (11, 2, 8), (11, 2, 8), (2, 4)
    return [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in shapes]


def arguments(q, k, v, sink) -> tuple:
    return q, k, v, RANGES, RANGES, torch.tensor([1, 0]), sink, "sh", 0.3, 0.0, False, 0, True, ""


def eager(*of: torch.Tensor) -> tuple:
    return call_flex_fwd(*arguments(*of), check_call)


def as_op(*of: torch.Tensor) -> tuple:
    return flex_fwd(*arguments(*of), True)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_bits_as_the_op(seed):
    of = leaves(seed)
    found = []
    for call in (eager, as_op):
        out, lse, most = call(*of)
        assert not most.requires_grad
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), of)
        found.append((out, lse, most, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("wants_grad", (True, False))
def test_nothing_of_ours_is_dispatched(wants_grad, monkeypatch):
    def dispatched(*_):
        raise AssertionError("the op was called")

    monkeypatch.setattr(type(flex_fwd), "__call__", dispatched)
    of = leaves(0)
    with torch.set_grad_enabled(wants_grad):
        out = eager(*of)[0]
    assert out.requires_grad is wants_grad
    if wants_grad:
        out.sum().backward()
        assert all(x.grad is not None for x in of)


def test_a_mode_sees_ops():
    of = leaves(1)
    with Seen() as seen:
        eager(*of)[0].sum().backward()
    ours = [name for name in seen.names if name.startswith("magi_attention::flex")]
    assert ours == ["magi_attention::flex_fwd", "magi_attention::flex_bwd"]


def test_tensors_that_hold_nothing():
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x.detach()) for x in leaves(2)]
        mask = [mode.from_tensor(x) for x in (RANGES, RANGES)]
    assert flex_flash_attn_func(*fake[:3], *mask)[0].shape == (11, 4, 8)
    on_meta = [x.detach().to("meta") for x in leaves(2)]
    assert eager(*on_meta)[0].is_meta


@pytest.mark.parametrize("is_reentrant", (True, False))
def test_a_checkpoint(is_reentrant):
    of = leaves(4)
    f = lambda *x: eager(*x)[0]  # noqa: E731
    want = torch.autograd.grad(f(*of).square().sum(), of)
    checkpoint(f, *of, use_reentrant=is_reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(of, want))


class Block:
    """Attention over ranges that change: in place, or by new tensors."""

    def __init__(self, edits: bool) -> None:
        self.edits, self.end = edits, 11
        self.ranges = self.new_ranges()

    def new_ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([[0, 11]]), torch.tensor([[0, self.end]])

    def change(self) -> None:
        self.end = 4
        self.ranges[1][0, 1] = 4

    def __call__(self, q, k, v) -> torch.Tensor:
        return flex_flash_attn_func(q, k, v, *(self.ranges if self.edits else self.new_ranges()))[0]


def in_checkpoint(block: Block, *of: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, *of, use_reentrant=False)


def with_views_saved(block: Block, *of: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x):
        return block(*of)


def with_copies_saved(block: Block, *of: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        return block(*of)


def with_tensors_saved(block: Block, *of: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(*of)


CALLS = (
    (in_checkpoint, True, True), (in_checkpoint, False, True), (with_views_saved, True, True),
    (with_tensors_saved, True, True), (with_copies_saved, True, False),
)  # fmt: skip


@pytest.mark.parametrize("call, edits, is_refused", CALLS)
def test_a_mask_that_changes_before_the_backward(call, edits, is_refused):
    """Out of one mask and slices of another would give gradients of neither."""
    of = leaves(6)[:3]
    want = torch.autograd.grad(Block(edits)(*of).square().sum(), of)
    for changes in (False, True, False):
        block = Block(edits)
        loss = call(block, *of).square().sum()
        if changes:
            block.change()
        if changes and is_refused:
            with pytest.raises(ContractError, match="another mask"):
                torch.autograd.grad(loss, of)
        else:
            assert all(torch.equal(*pair) for pair in zip(torch.autograd.grad(loss, of), want))


def over_ranges(q, k, v) -> torch.Tensor:
    return flex_flash_attn_func(q, k, v, RANGES, RANGES)[0]


def over_lists(q, k, v) -> torch.Tensor:
    return index_attn_func(q, k, v, torch.zeros(11, 2, 1, dtype=torch.int32))[0]


@pytest.mark.parametrize("attention", (over_ranges, over_lists))
def test_tangents_are_refused_and_not_dropped(attention):
    q, k, v = (x.detach() for x in leaves(7)[:3])
    refused = lambda: pytest.raises(UnsupportedError, match="forward-mode")  # noqa: E731
    with refused():
        torch.func.jvp(attention, (q, k, v), (q, k, v))
    with refused():
        torch.func.jacfwd(attention, argnums=2)(q, k, v)
    with refused():
        torch.compile(lambda *of: torch.func.jvp(attention, of, of)[1], backend="eager")(q, k, v)
    want, out = attention(q, k, v), attention(q.requires_grad_(), k, v)
    with forward_ad.dual_level():
        with refused():
            attention(q, forward_ad.make_dual(k, k), v)
        with refused():
            torch.autograd.grad(out, q, forward_ad.make_dual(want, want))
        assert torch.equal(attention(q, k, v), want), "nothing here has a tangent"


def test_what_is_no_tensor_is_named():
    """Before and behind a call that passed, and where a mode looks on."""
    q, k, v = leaves(8)[:3]
    pairs = [[0, 11]]
    ranges = torch.tensor(pairs)
    sink = torch.zeros(1, 4)
    given = {"q": q, "k": k, "v": v, "q_ranges": ranges, "k_ranges": ranges, "attn_type_map": torch.tensor([1])}
    for look in (contextlib.nullcontext(), contextlib.nullcontext(), Seen()):
        with look:
            for name, x in (
                ("q", None), ("q", q.tolist()), ("k", None), ("v", v.detach().numpy()), ("q_ranges", pairs),
                ("k_ranges", ranges.numpy()), ("attn_type_map", [1]), ("sink", sink.tolist()),
            ):  # fmt: skip
                with pytest.raises(ContractError, match=f"^{name} is .*; give a tensor"):
                    flex_flash_attn_func(**{**given, name: x})
            with pytest.raises(ContractError, match="sink layout"):
                flex_flash_attn_func(**given, sink_layout=["sh"])
            with pytest.raises(ContractError, match=r"^q \(\), k"):
                ffa_fa4_func(**{**given, "q": q[0, 0, 0]})
            flex_flash_attn_func(**given, sink=sink)


def test_on_a_torch_with_other_names_calls_are_ops(monkeypatch):
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    call, of = eager_call(opaque_op("magi_attention::eager_probe", "(Tensor x) -> Tensor")(torch.neg)), leaves(5)
    seen = []
    monkeypatch.setattr(type(flex_fwd), "__call__", lambda self, *args: seen.append(self._name) or self.run(*args))
    assert torch.equal(call(of[0].detach()), -of[0]) and seen == ["eager_probe"]
