# SPDX-License-Identifier: Apache-2.0
"""The indexer's loss over lists and its gradients by kernels on a Hopper GPU: the public function against float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from block_problems import BF16, DEVICE, FP16, NEEDS_HOPPER
from graph_capture import capture

from magi_attention.api import index_attn_func, indexer_kl, prepare_indices
from magi_attention.functional.sparse import indexer
from magi_attention.kernels.indexer import kl_hopper
from magi_attention.kernels.indexer.custom_ops import kl_bwd, kl_fwd
from magi_attention.testing.indexer_kl import KlProblem, random_kl

pytestmark = NEEDS_HOPPER
CASES = [  # queries, keys, index heads, index columns, query heads, kv heads, columns, entries
    (301, 3000, 64, 128, 64, 1, 576, 512),
    (45, 5000, 64, 128, 128, 1, 576, 2048),
    (33, 700, 64, 64, 16, 1, 128, 300),
    (150, 90, 5, 40, 100, 1, 192, 65),
    (600, 2000, 32, 128, 64, 1, 64, 1),
    (9, 4000, 48, 96, 128, 1, 320, 2049),
    (77, 900, 64, 128, 16, 16, 128, 200),
    (60, 800, 16, 64, 64, 8, 192, 150),
    (41, 500, 8, 128, 80, 4, 128, 129),
]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The passes that kernels ran."""
    found: list[str] = []

    def note(name: str) -> None:
        run = getattr(kl_hopper, name)
        monkeypatch.setattr(kl_hopper, name, lambda *args: found.append(name) or run(*args))

    note("forward")
    note("backward")
    return found


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def draw(case: tuple, dtype: torch.dtype = BF16) -> KlProblem:
    print(f"seed {sum(case)}")
    return random_kl(torch.Generator(DEVICE).manual_seed(sum(case)), dtype, *case)


def loss_of(of: KlProblem, *leaves: torch.Tensor, **options) -> torch.Tensor:
    return indexer_kl(*leaves, of.q, of.k, of.lse, of.lists, softmax_scale=of.scale, **options)


def run(of: KlProblem) -> tuple[torch.Tensor, ...]:
    """Divergences and gradients."""
    leaves = [
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        for x in (of.q_index, of.k_index, of.weights)
    ]
    divergence = loss_of(of, *leaves)
    divergence.backward(of.grad)
    return divergence.detach(), *(x.grad for x in leaves)


def equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other)]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_divergences_and_gradients(case, dtype, calls, monkeypatch):
    of = draw(case, dtype)
    found = run(of)
    of.check(*found)
    again = run(of)
    assert equal(found, again)[::3] == [True, True] and torch.equal(found[1], again[1]), "only dk_index may differ"
    monkeypatch.setattr(kl_hopper, "SHARES_BYTES", 100 * case[3] * case[7])  # of 25 queries
    with deterministic():
        ordered = [run(of) for _ in range(3)]
    of.check(*ordered[0])
    assert all(all(equal(ordered[0], other)) for other in ordered[1:])
    assert calls == ["forward", "backward"] * 5


def test_a_query_has_the_same_loss_wherever_it_is(calls):
    of = draw(CASES[0])
    whole = loss_of(of, of.q_index, of.k_index, of.weights)
    for begin, end in ((0, 7), (3, 300), (140, 141)):
        part = of.of_queries(slice(begin, end))
        assert torch.equal(loss_of(part, part.q_index, part.k_index, part.weights), whole[begin:end])
    assert len(calls) == 4


def test_views_whose_rows_are_apart(calls):
    of = draw(CASES[2])
    wide = {name: torch.cat((x, x.nan_to_num()), -1)[..., : x.shape[-1]] for name, x in vars(of).items()
            if name in ("q_index", "k_index", "q", "k")}  # fmt: skip
    of.check(*run(replace(of, **wide)))
    assert calls == ["forward", "backward"]


def test_what_stays_with_torch(calls, monkeypatch):
    of = draw(CASES[3])
    leaves = of.q_index, of.k_index, of.weights
    loss_of(of, *leaves, softcap=5.0)
    indexer_kl(*leaves, of.q, of.k.expand(-1, 50, -1), of.lse, of.lists)
    indexer_kl(*(x.float() for x in (*leaves, of.q, of.k)), of.lse, of.lists)
    monkeypatch.setenv("MAGI_ATTENTION_PORTABLE_KERNELS", "1")
    by_torch = run(of)
    assert calls == []
    of.check(*by_torch)


def test_the_op_says_what_it_returns(calls):
    of = draw(CASES[4])
    visible = indexer.make_visible(True, None, None, None, None)
    lists = prepare_indices(of.lists[:, None], len(of.k), deterministic=True)
    given = lists.rows[:, 0], lists.counts[:, 0], lists.readers, lists.reader_begins
    rest = of.q, of.k, of.lse, *given, *visible, of.scale, 0.0, 32, 512
    leaves = [x.nan_to_num() for x in (of.q_index, of.k_index, of.weights)]
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(kl_fwd, (*leaves, *rest), test_utils=tests)
    loss, *saved = kl_fwd(*leaves, *rest)
    assert saved[-1].shape == of.lists.shape
    with deterministic():
        torch.library.opcheck(kl_bwd, (torch.ones_like(loss), *saved, *leaves, *rest), test_utils=tests)
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(of, of.q_index, of.k_index, of.weights), run(of)[0])
    assert "backward" in calls


def test_in_a_graph():
    of = draw(CASES[0])
    leaves = of.q_index, of.k_index, of.weights
    graph, before, written = capture(lambda: loss_of(of, *leaves))
    written.fill_(-7)
    graph.replay()
    assert torch.equal(written, before)
    of.weights *= 2
    graph.replay()
    assert torch.equal(written, loss_of(of, *leaves)) and not torch.equal(written, before)


def test_attention_and_loss_keep_one_inversion(calls):
    """Over repeats, the same bits, and those of lists that are inverted by each backward."""
    of = draw(CASES[0])
    q, k, q_index, k_index, weights = (
        x.detach().nan_to_num().requires_grad_() for x in (of.q, of.k, of.q_index, of.k_index, of.weights)
    )
    lists = prepare_indices(of.lists[:, None], len(k))

    def step(indices) -> tuple[torch.Tensor, ...]:
        out = index_attn_func(q, k, None, lists, head_dim_v=512, softmax_scale=of.scale, deterministic=True)[0]
        loss = indexer_kl(q_index, k_index, weights, of.q, of.k, of.lse, indices, softmax_scale=of.scale)
        return torch.autograd.grad((out.float().sum(), (loss * of.grad).sum()), (q, k, q_index, k_index, weights))

    with deterministic():
        found = [step(lists) for _ in range(3)]
        assert lists.kept.made == 1
        raw = step(of.lists)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found.append(step(lists))
        torch.cuda.current_stream().wait_stream(side)
        assert lists.kept.made == 1
        lists.rows[3, 0, 0] = lists.rows[3, 0, 0]
        found.append(step(lists))
        assert lists.kept.made == 2
    assert all(all(equal(raw, other)) for other in found)
    assert calls == ["forward", "backward"] * 6


@pytest.mark.parametrize("in_order", [False, True])
def test_memory_is_the_targets(in_order):
    """Beside the targets, the lists and what a fixed order takes, nothing grows with queries times entries."""
    queries, entries = 4096, 2048
    of = draw((queries, 8000, 64, 128, 4, 1, 64, entries))
    with deterministic() if in_order else torch.enable_grad():
        run(of)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        run(of)
    pairs, rows = 4 * queries * entries, 8 * queries * 64 * 128
    inverted = 4 * pairs + kl_hopper.SHARES_BYTES + 40 * 2**24 if in_order else 0
    assert torch.cuda.max_memory_allocated() - start < 3 * pairs + rows + inverted
