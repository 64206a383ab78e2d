# SPDX-License-Identifier: Apache-2.0
"""What index attention launches, and what it prepares only once, with a library that writes its calls down."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from ffa_simulator import CpuRuntime

from magi_attention.kernels.index_attn import choice, ffa
from magi_attention.kernels.index_attn.choice import IndexBackends
from magi_attention.kernels.index_attn.prepare import lists_of_blocks, prepare_indices
from magi_attention.kernels.index_attn.reference import IndexReference
from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices
from magi_attention.kernels.types import options_of
from magi_attention.native.c_struct import divided
from magi_attention.native.index import abi
from magi_attention.native.index.calls import IndexLibrary

BF16 = torch.bfloat16
PARAMS = {
    "fwd": abi.IndexFwdParams, "fwd_blocks": abi.IndexFwdBlocksParams, "bwd": abi.IndexBwdParams,
    "bwd_keys": abi.IndexBwdKeysParams, "sum": abi.IndexSumParams,
}  # fmt: skip
ADDRESSES = ("q", "k", "v", "out", "dout", "lse", "delta", "lists", "key_counts", "counts", "k_starts")
WORKSPACE_BYTES = 384


class Library(IndexLibrary):
    """Kernels for head dims to 128 with values, and for 136 to 576 without."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ctypes.Structure]] = []
        self._bind()

    def _entry(self, name: str) -> Callable[..., int]:
        kind = name.removeprefix("magi_ffa_index_")

        def launch(params: bytes) -> int:
            assert len(params) == ctypes.sizeof(PARAMS[kind])
            self.calls.append((kind, PARAMS[kind].from_buffer_copy(params)))
            return 0

        def tell(params: bytes, need) -> int:
            need._obj.value = WORKSPACE_BYTES
            return 0

        return tell if kind == "bwd_keys_workspace" else launch

    def check(self, status: int, what: str) -> None:
        assert status == 0, what

    def has(self, dtype: int, head_dim: int, head_dim_v: int, has_v: bool = True) -> bool:
        return head_dim <= 128 if has_v else 128 < head_dim <= 576

    def tiles(self, heads_q: int, heads_kv: int, q_block: int, has_v: bool = True) -> int:
        return 1

    def take(self) -> list[tuple[str, dict[str, object]]]:
        """The launches since the last time: numbers, and of the addresses those of what the caller gave."""
        found = []
        for kind, p in self.calls:
            fields = {name: getattr(p, name) for name, *_ in p._fields_}
            begin = getattr(type(p), "readers" if kind == "sum" else "q").offset
            is_number = {name: getattr(type(p), name).offset < begin for name in fields}
            found.append((kind, {n: x for n, x in fields.items() if is_number[n] or n in ADDRESSES}))
        self.calls.clear()
        return found


def draw(tokens=8, keys=32, heads=(8, 2), dims=(64, 48), stride=0, block=0, bounds=False, dtype=BF16):
    """q, k, v (T, H, D), the last with ``stride`` more values between heads, and lists, with ``block`` those of a block
    mask of ``block`` queries and keys."""
    q, k = torch.zeros(tokens, heads[0], dims[0], dtype=dtype), torch.zeros(keys, heads[1], dims[0], dtype=dtype)
    v = torch.zeros(keys, heads[1], dims[1] + stride, dtype=dtype)[..., : dims[1]]
    if block:
        mask = torch.ones((heads[1], -(-tokens // block), -(-keys // block)), dtype=torch.bool)
        return q, k, v, lists_of_blocks(mask, block, block, keys)
    start = torch.zeros(tokens, dtype=torch.int64) if bounds else None
    return q, k, v, prepare_indices(torch.arange(4).expand(tokens, heads[1], 4), keys, k_start=start)


def run(backend: ffa.IndexFfa, operands: tuple, given: dict) -> None:
    """Forward and backward; ``given``: options, ``dout`` and ``lse`` of other dtypes, whether delta is given."""
    q, k, v, lists = operands
    options = options_of(given.get("scale", 0.2), 0.0, "sh", given.get("deterministic", False), given.get("margin", 0))
    width = given.get("width", 48)
    problem = IndexProblem.of_lists(q, k, v, options, lists, None, True, width)
    out, lse = backend.forward(problem, q, k, v, lists)
    dout = torch.zeros_like(out, dtype=given.get("dout", BF16))
    lse = lse.to(given.get("lse", torch.float32))
    delta = torch.zeros_like(lse) if given.get("delta") else None
    dq, dk, dv = backend.backward(problem, dout, q, k, v, out, lse, lists, delta)
    assert dq.shape == q.shape and dk.shape == k.shape and (dv is None) == (v is None)
    assert dv is None or dv.shape == v.shape


VARIANTS = [
    (draw(), {}), (draw(), {"scale": 0.3}), (draw(), {"margin": 5}), (draw(), {"deterministic": True}),
    (draw(), {"delta": True}), (draw(), {"dout": torch.float32}), (draw(), {"lse": torch.float64}),
    (draw(stride=16), {}), (draw(stride=3), {}), (draw(tokens=9), {}), (draw(keys=40), {}), (draw(bounds=True), {}),
    (draw(bounds=True), {"deterministic": True}), (draw(heads=(8, 1)), {}), (draw(dtype=torch.float16), {}),
    (draw(128, 256, block=64), {}), (draw(128, 192, block=64), {}), (draw(128, 256, block=64), {"deterministic": True}),
    ((*draw(dims=(192, 48))[:2], None, draw()[3]), {}), ((*draw(dims=(192, 48))[:2], None, draw()[3]), {"width": 128}),
    ((*draw()[:2], None, draw()[3]), {}), ((*draw()[:2], None, draw()[3]), {"deterministic": True}),
]  # fmt: skip


@pytest.fixture
def more_tiles(monkeypatch) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", "keys")  # where it can


def test_known_calls_are_told_apart(more_tiles, monkeypatch):
    """Calls in any order launch what each would have launched alone; from the second time on none is prepared."""

    def plain(launches: list[tuple[str, dict[str, object]]]) -> list[tuple[str, dict[str, object]]]:
        """Without addresses, which change with what is allocated."""
        return [(kind, {n: bool(x) if n in ADDRESSES else x for n, x in fields.items()}) for kind, fields in launches]

    alone = []
    for operands, given in VARIANTS:
        library = Library()
        run(ffa.IndexFfa(library, CpuRuntime()), operands, given)
        alone.append(plain(library.take()))
    assert len({str(launches) for launches in alone}) >= 17
    kinds = {tuple(kind for kind, _ in launches) for launches in alone}
    assert kinds == {
        ("fwd", "bwd"), ("fwd", "bwd", "sum", "sum"), ("fwd_blocks", "bwd_keys"), ("fwd_blocks", "bwd", "sum", "sum"),
    }  # fmt: skip
    library = Library()
    backend, gen = ffa.IndexFfa(library, CpuRuntime()), torch.Generator().manual_seed(4)
    first = torch.randperm(len(VARIANTS), generator=gen).tolist()
    later = torch.randint(0, len(VARIANTS), (60,), generator=gen).tolist()
    for at, number in enumerate([*first, *later]):
        if at == len(first):
            for name in ("prepare_forward", "prepare_backward"):
                monkeypatch.setattr(ffa, name, None)
        run(backend, *VARIANTS[number])
        assert plain(library.take()) == alone[number], f"variant {number}, call {at}"


def test_addresses_are_those_of_the_call():
    """In their fields; operands that the kernels cannot read are copied."""
    library = Library()
    backend = ffa.IndexFfa(library, CpuRuntime())
    for stride, is_copied in ((0, False), (16, False), (3, True)):
        for _ in range(2):
            q, k, v, lists = draw(stride=stride)
            run(backend, (q, k, v, lists), {})
            (_, forward), (_, backward) = library.take()
            for fields in (forward, backward):
                assert (fields["q"], fields["k"]) == (q.data_ptr(), k.data_ptr())
                assert (fields["v"] == v.data_ptr()) is not is_copied
                assert (fields["lists"], fields["key_counts"]) == (lists.rows.data_ptr(), lists.counts.data_ptr())
                assert not fields["k_starts"] and (fields["v_stride_head"] == v.stride(1)) is not is_copied
            assert forward["out"] == backward["out"] and forward["lse"] == backward["lse"]


@pytest.mark.parametrize("has_readers", [False, True])
def test_parts_of_a_deterministic_backward(has_readers, monkeypatch):
    """Ranges of lists follow one another; the first one writes the delta that later ones read."""
    monkeypatch.setattr("magi_attention.kernels.index_attn.launches.SHARES_BYTES", 3 * 4 * (64 + 48) * 2 * 4)
    library, (q, k, v, lists) = Library(), draw()
    lists = prepare_indices(lists.rows, 32, deterministic=has_readers)
    run(ffa.IndexFfa(library, CpuRuntime()), (q, k, v, lists), {"deterministic": True})
    _, *launches = library.take()
    assert [kind for kind, _ in launches] == ["bwd", "sum", "sum"] * 3
    ranges = [(x["list_begin"], x["list_end"]) for _, x in launches]
    assert ranges == [r for r in ((0, 3), (3, 6), (6, 8)) for _ in range(3)]
    assert [bool(x["out"]) for kind, x in launches if kind == "bwd"] == [True, False, False]
    assert [x["width"] for kind, x in launches if kind == "sum"] == [64, 48] * 3


def test_environment_counts_at_each_call(monkeypatch):
    library = Library()
    backend, operands = ffa.IndexFfa(library, CpuRuntime()), draw(128, 256, block=64)
    for forward, backward in (("gather", "queries"), ("blocks", "keys"), ("gather", "keys"), ("blocks", "queries")):
        monkeypatch.setenv("MAGI_ATTENTION_INDEX_FORWARD", forward)
        monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", backward)
        run(backend, operands, {})
        assert [kind for kind, _ in library.take()] == [
            "fwd_blocks" if forward == "blocks" else "fwd", "bwd_keys" if backward == "keys" else "bwd",
        ]  # fmt: skip


def test_backends_are_asked_once_for_each_problem_and_environment(monkeypatch):
    asked: list[IndexProblem] = []

    class Kernels(ffa.IndexFfa):
        def why_not(self, problem: IndexProblem) -> str | None:
            asked.append(problem)
            return None if problem.options.softcap == 0 else "It has no softcap."

    backends = IndexBackends((Kernels(Library(), CpuRuntime()), IndexReference()))

    def name(softcap: float, lists: PreparedIndices | None = None) -> str:
        q, k, v, made = draw()
        return backends.choose(IndexProblem.of_lists(q, k, v, options_of(0.2, softcap, "sh", False, 0), made)).name

    for _ in range(3):
        assert (name(0.0), name(1.0)) == ("ffa", "sdpa")
    assert len(asked) == 2
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "sdpa")
    assert name(0.0) == "sdpa"
    monkeypatch.delenv("MAGI_ATTENTION_KERNEL_BACKEND")
    assert name(0.0) == "ffa" and len(asked) == 2
    assert [b.name for b in choice.backends()] == ["ffa", "sdpa"]


def test_a_tail_has_values_of_eight_bytes():
    assert divided(abi.IndexFwdParams, "q")[0] == abi.IndexFwdParams.q.offset
    with pytest.raises(ValueError, match="IndexFwdParams has fields behind sm_margin that are not of 8 bytes"):
        divided(abi.IndexFwdParams, "sm_margin")
