# SPDX-License-Identifier: Apache-2.0
"""Where chunks are too large to be shared out, the maker of a key says so, once, and what would do better."""

from __future__ import annotations

import logging
import re
from functools import partial

import pytest

from magi_attention.api import (
    AttnRanges,
    BSDispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    Mask,
    SequentialDispatchAlg,
    magi_attn_flex_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_plan,
)
from magi_attention.api.planning import balance_hint as advice
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.slices import SliceTable
from magi_attention.meta.planner import build_plan

HEADS = dict(num_heads_q=4, num_heads_kv=2, head_dim=8)
WORLD, TOTAL = 4, 4096  # chunks of 128
LONG, EVEN = [0, 600, *range(601, TOTAL, 5), TOTAL], [*range(0, TOTAL + 1, 64)]


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(advice, "_TOLD", set())
    monkeypatch.setattr(advice, "_TOLD_OF_OTHERS", set())


def key_of(transport, cuts, **dispatch):
    documents = AttnRanges.from_ranges([[a, b] for a, b in zip(cuts, cuts[1:])])
    config = DistAttnConfig(dispatch_config=DispatchConfig(**dispatch))
    return magi_attn_flex_key(
        documents, documents, "causal", TOTAL, TOTAL, **HEADS, pad_size=0, cp_group_or_mesh=transport,
        dist_attn_config=config,
    )  # fmt: skip


def warnings_of(caplog) -> list[str]:
    return [record.message for record in caplog.records if "heaviest of" in record.message]


def made(cuts, caplog, **dispatch) -> list[str]:
    """What all ranks say together while they make a key, and the chunk size of all keys."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="magi_attention.api"):
        sizes = FakeWorld(WORLD).run(lambda transport: key_of(transport, cuts, **dispatch).chunk_size)
    assert len(set(sizes)) == 1
    return warnings_of(caplog)


def test_one_rank_says_once_which_chunks_would_do_better(caplog):
    said = made(LONG, caplog)
    assert len(said) == 1 and f"of {WORLD} ranks" in said[0] and "chunks of 128 tokens" in said[0]
    now, size, then = re.search(r"has ([\d.]+) times .*chunk_size=(\d+)\) makes it ([\d.]+)\.", said[0]).groups()
    slices = SliceTable([[a, b, a, b, 1] for a, b in zip(LONG, LONG[1:])])
    plans = [
        build_plan(slices, TOTAL, WORLD, config=DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=chunk)))
        for chunk in (128, int(size))
    ]
    assert [f"{plan.imbalance:.2f}" for plan in plans] == [now, then] and float(then) < 1.05 < 1.2 < float(now)
    assert made([0, 590, *LONG[2:]], caplog) == []  # another mask of the same size: not again
    assert made(LONG, caplog, chunk_size=int(size)) == []


def test_nothing_is_said_of_a_fair_share(caplog):
    assert made(EVEN, caplog) == [] and made([0, TOTAL], caplog) == []


def test_nothing_is_said_where_no_chunk_does_better(caplog):
    """One token that sees everything is in one chunk, whatever its size."""
    cuts = [0, *range(1, TOTAL + 1)]
    assert made(cuts, caplog) == []
    slices = SliceTable([[0, 1, 0, TOTAL, 0]])
    plan = build_plan(slices, TOTAL, WORLD)
    build = partial(build_plan, slices, TOTAL, WORLD)
    assert plan.imbalance == WORLD and advice.advise_balance(plan, DistAttnConfig(), build) is None


def test_nothing_is_tried_where_a_trial_may_search_for_long():
    slices = SliceTable([[a, b, a, b, 1] for a, b in zip(LONG, LONG[1:])])
    config = DistAttnConfig(dispatch_config=DispatchConfig(alg=BSDispatchAlg()))
    plan = build_plan(slices, TOTAL, WORLD)
    assert plan.imbalance > 1.2 and advice.advise_balance(plan, config, None) is None and not advice._TOLD


def test_an_empty_mask_is_balanced():
    plan = build_plan(SliceTable([]), TOTAL, WORLD)
    assert plan.imbalance == 1.0 and advice.advise_balance(plan, DistAttnConfig(), None) is None


def test_a_mask_on_the_dispatch_of_another(caplog):
    """A window's ranks are contiguous; of a causal mask the last one has most."""
    window, causal = Mask.sliding_window(TOTAL, (255, 0)), Mask.causal(TOTAL)
    with caplog.at_level(logging.WARNING, logger="magi_attention.api"):
        plans = [make_plan(mask, WORLD, balance=None) for mask in (causal, window)]
        even = plans[0].with_mask(window)
        assert even.imbalance < 1.25 and not warnings_of(caplog)
        for _ in range(2):
            uneven = plans[1].with_mask(causal)
    (said,) = warnings_of(caplog)
    now, best = map(float, re.search(r"has ([\d.]+) times .* would make it ([\d.]+)\. Make", said).groups())
    assert abs(uneven.imbalance - now) <= 0.005 and abs(plans[0].imbalance - best) <= 0.05 and now > 1.5


def test_keys_after_dispatch_say_it_too(caplog):
    def rank(transport):
        all_of_it = AttnRanges.from_ranges([[0, TOTAL]])
        key = key_of(transport, [0, TOTAL], alg=SequentialDispatchAlg())
        return make_flex_key_for_new_mask_after_dispatch(all_of_it, all_of_it, ["causal"], key)

    with caplog.at_level(logging.WARNING, logger="magi_attention.api"):
        FakeWorld(WORLD).run(rank)
    assert [text for text in warnings_of(caplog) if "for another mask" in text]
