# SPDX-License-Identifier: Apache-2.0
"""Labels and positions of packed documents: against documents taken one by one, over random packings and ranks."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, make_plan
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError

IGNORE = -100


def cumulative(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def expected_labels(documents: list[torch.Tensor], depth: int, ignore: int) -> torch.Tensor:
    """Each document alone: its tokens from ``depth`` on, and nothing after its end."""
    parts = []
    for document in documents:
        kept = document[depth:]
        parts += [kept, torch.full((len(document) - len(kept), *document.shape[1:]), ignore).to(document.dtype)]
    return torch.cat(parts)


packings = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) > 0)
worlds = st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 5), st.booleans())


def make(mask: Mask, world):
    cp, chunk, uneven = world
    return make_plan(mask, min(cp, mask.total_q), DistAttnConfig(DispatchConfig(chunk, uneven)))


@settings(max_examples=100, deadline=None, print_blob=True)
@given(
    lengths=packings,
    world=worlds,
    depth=st.integers(1, 14),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.float64]),
    ignore=st.sampled_from([-100, -1, 0]),
    is_explicit=st.booleans(),
    dim=st.sampled_from([0, 1, -1]),
)
def test_labels_never_leave_a_document(lengths, world, depth, dtype, ignore, is_explicit, dim) -> None:
    cu, total = cumulative(lengths), sum(lengths)
    plan = make(Mask.causal(total) if is_explicit else Mask.varlen(cu, causal=True), world)
    tokens = torch.arange(1, 2 * total + 1).view(total, 2).to(dtype)
    want = expected_labels(list(tokens.split(lengths)), depth, ignore)

    def rank(transport):
        local = plan.shard(tokens.movedim(0, dim), transport, pad_value=77, dim=dim)
        known = torch.tensor(cu, dtype=torch.int32) if is_explicit else None
        got = plan.labels(local, depth, ignore, transport, dim, cu_seqlens=known)
        is_pad = torch.from_numpy(plan.position_array(transport.rank)) >= total
        assert got.dtype == dtype and (got.movedim(dim, 0)[is_pad] == ignore).all()
        return plan.gather(got, transport, dim=dim).movedim(dim, 0)

    for got in FakeWorld(plan.cp_size).run(rank):
        assert torch.equal(got, want)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(lengths=packings, world=worlds)
def test_positions_restart_in_every_document(lengths, world) -> None:
    cu, total = cumulative(lengths), sum(lengths)
    plan = make(Mask.varlen(cu), world)
    want = torch.cat([torch.arange(n) for n in lengths])

    def rank(transport):
        ids = plan.positions(transport, per_document=True)
        assert torch.equal(ids, plan.positions(transport.rank, per_document=True))
        is_pad = torch.from_numpy(plan.position_array(transport.rank)) >= total
        assert (ids[is_pad] == want[-1]).all()
        whole = plan.positions(transport, per_document=True, cu_seqlens=[0, total])
        assert torch.equal(whole, plan.positions(transport))
        mrope = torch.stack([want, want * 2, want * 3])
        assert torch.equal(plan.gather(plan.shard(mrope, transport, dim=1), transport, dim=1), mrope)
        return plan.gather(ids, transport)

    for got in FakeWorld(plan.cp_size).run(rank):
        assert torch.equal(got, want)


MASKS_OF_DOCUMENTS = {
    "varlen": lambda cu: Mask.varlen(cu, causal=True),
    "varlen window": lambda cu: Mask.varlen(cu, window=(3, 0), global_prefix=1),
    "block causal": lambda cu: Mask.block_causal(cu, 2),
    "prefix lm": lambda cu: Mask.prefix_lm(cu, 0),
    "slices": lambda cu: Mask.from_slices([[0, cu[-1]]], [[0, cu[-1]]], "causal", cu_seqlens=cu),
    "dense": lambda cu: Mask.from_dense(torch.ones(cu[-1], cu[-1]).tril().bool(), cu_seqlens=cu),
    "batched": lambda cu: Mask.batched([Mask.varlen(cu), Mask.causal(4)]),
}


@pytest.mark.parametrize("kind", MASKS_OF_DOCUMENTS)
def test_masks_that_know_their_documents(kind) -> None:
    cu = [0, 4, 4, 9, 20]
    mask = MASKS_OF_DOCUMENTS[kind](cu)
    assert mask.cu_seqlens == ((0, 4, 9, 20, 24) if kind == "batched" else (0, 4, 9, 20))
    plan = make_plan(mask, 3)
    assert plan.pad_size or kind == "batched"
    assert plan.cu_seqlens == mask.cu_seqlens == pickle.loads(pickle.dumps(plan)).cu_seqlens


@pytest.mark.parametrize(
    "mask", [Mask.full(9), Mask.causal(9), Mask.sliding_window(9, (2, 0)), Mask.block_causal(9, 2)]
)
def test_a_mask_of_a_length_is_one_document(mask) -> None:
    assert mask.cu_seqlens == (0, 9)


UNKNOWN = {
    "slices": Mask.from_slices([[0, 9]], [[0, 9]]),
    "dense": Mask.from_dense(torch.ones(9, 9).bool()),
    "tree": Mask.prefix_tree([3, 3, 3], [-1, 0, 0]),
    "shared question": Mask.shared_question([0, 3, 6, 9]),
    "batched": Mask.batched([Mask.causal(4), Mask.from_slices([[0, 5]], [[0, 5]])]),
    "two sequences": Mask.varlen([0, 4, 9], [0, 5, 9]),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_documents_are_a_sentence_and_never_a_guess(kind) -> None:
    plan = make_plan(UNKNOWN[kind], 1)
    assert plan.cu_seqlens is None
    for ask in (plan.labels, lambda x, **more: plan.positions(per_document=True, **more)):
        with pytest.raises(ContractError, match="does not know its documents.*cu_seqlens="):
            ask(torch.arange(9))
    assert plan.labels(torch.arange(9), cu_seqlens=[0, 4, 9]).tolist() == [1, 2, 3, IGNORE, 5, 6, 7, 8, IGNORE]


def test_documents_are_part_of_a_plan() -> None:
    slices = ([[0, 9]], [[0, 9]], "causal")
    one, two = (Mask.from_slices(*slices, cu_seqlens=cu) for cu in ([0, 9], [0, 4, 9]))
    unknown = Mask.from_slices(*slices)
    assert len({one, two, unknown}) == 3 and one == Mask.from_slices(*slices, cu_seqlens=[0, 0, 9, 9])
    plans = [make_plan(mask, 2) for mask in (one, two, unknown)]
    assert len({plan.fingerprint for plan in plans}) == 3
    assert plans[0] == make_plan(Mask.from_slices(*slices, cu_seqlens=torch.tensor([0, 9])), 2)
    assert plans[1] == pickle.loads(pickle.dumps(plans[1]))
    assert {plan.partitions for plan in plans} == {plans[0].partitions}


def test_another_mask_over_the_same_tokens() -> None:
    plan = make_plan(Mask.varlen([0, 4, 9], causal=True), 2)
    unknown = plan.with_mask(Mask.from_slices([[0, 9]], [[0, 9]]))
    assert unknown.cu_seqlens == (0, 4, 9)
    assert plan.with_mask(Mask.varlen([0, 2, 9])).cu_seqlens == (0, 2, 9)
    assert plan.with_mask(Mask.causal(9)).cu_seqlens == (0, 9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(depth=0), "depth is 0"),
        (dict(depth=1.0), "depth is 1.0"),
        (dict(cu_seqlens=[0, 10]), "end at 10, but the sequence has 9 tokens"),
        (dict(cu_seqlens=[0, 8]), "end at 8, but the sequence has 9 tokens"),
        (dict(cu_seqlens=[4, 9]), "starts at 4"),
        (dict(ignore_index=0.5), "ignore_index is 0.5"),
        (dict(dim=1), "along dim 1"),
    ],
)
def test_wrong_calls_are_sentences(options, words) -> None:
    plan = make_plan(Mask.causal(9), 1)
    with pytest.raises(ContractError, match=words):
        plan.labels(torch.arange(9), **options)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_tokens_that_cannot_hold_the_mark(dtype) -> None:
    plan = make_plan(Mask.causal(9), 1)
    with pytest.raises(ContractError, match=r"tokens.long\(\)"):
        plan.labels(torch.ones(9, dtype=dtype))
    if dtype == torch.uint8:
        assert plan.labels(torch.ones(9, dtype=dtype), ignore_index=255).tolist() == [1] * 8 + [255]


def test_documents_of_positions_that_do_not_ask_for_them() -> None:
    with pytest.raises(ContractError, match="per_document=True"):
        make_plan(Mask.causal(9), 1).positions(cu_seqlens=[0, 9])


def test_documents_must_fit_the_mask() -> None:
    with pytest.raises(ContractError, match="end at 8"):
        Mask.from_slices([[0, 9]], [[0, 9]], cu_seqlens=[0, 8])
    with pytest.raises(ContractError, match="one sequence"):
        Mask.from_slices([[0, 9]], [[0, 12]], total_k=12, cu_seqlens=[0, 9])
    assert replace(Mask.causal(9), cu_seqlens=[0, 3, 9]).cu_seqlens == (0, 3, 9)
