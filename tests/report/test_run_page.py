# SPDX-License-Identifier: Apache-2.0
"""The page of a training run: the page of its last plan, with losses and measured times above it; and the palettes."""

from __future__ import annotations

import json
import random

import pytest
from page_browser import ask, needs_browser

from magi_attention.api import Mask, make_plan
from magi_attention.tools.report.colours import rank_colour
from magi_attention.tools.report.run import measured_times, read_run, write_page

HEADS = dict(num_heads_q=4, num_heads_kv=2, head_dim=16)
PARALLEL = {
    "world": 2, "device": "cpu", "parameters": 1_000_000, "tokens_per_second": 10.0, "seconds": 3.0,
    "losses": [3.0, 2.5, 2.0], "arguments": {"seq_len": 512, "data": None},
}  # fmt: skip
EVENTS = [
    {"rank": 0, "lane": "comm", "stage": 0, "start": 5.0, "end": 5.002},
    {"rank": 0, "lane": "compute", "stage": -1, "start": 5.001, "end": 5.0015},
    {"rank": 1, "lane": "compute", "stage": 0, "start": 5.003, "end": 5.004},
]


def page_of(folder, replay: list[float] | None) -> tuple[str, bool]:
    plan = make_plan(Mask.from_lengths([300, 212], causal=True), 2, **HEADS)
    (folder / "losses.json").write_text(json.dumps(PARALLEL))
    (folder / "trace.json").write_text(json.dumps(EVENTS))
    if replay is not None:
        (folder / "replay.json").write_text(json.dumps({**PARALLEL, "losses": replay}))
    result = read_run(folder)
    return write_page(folder, result, plan).read_text(), result.is_equal


def test_measured_times_start_with_the_first_event():
    plan = make_plan(Mask.causal(512), 2, **HEADS)
    assert measured_times(plan, EVENTS) == [
        {"starts": [0.0], "arrive": [2000.0], "compute": [1000.0, 1500.0, 0.0, 0.0]},
        {"starts": [0.0], "arrive": [0.0], "compute": [0.0, 0.0, 3000.0, 4000.0]},
    ]


@needs_browser
@pytest.mark.parametrize(
    ("replay", "kind", "curves"),
    [([3.0, 2.5, 2.0], "good", 3), ([3.0, 2.5, 2.1], "bad", 3), ([3.0, float("nan"), 2.0], "bad", 3), (None, None, 1)],
)
def test_losses_and_times_are_drawn(replay, kind, curves, tmp_path):
    script = """
    const tips = (id) => [...byId(id).querySelectorAll("[data-tip]")].map((shape) => shape.dataset.tip);
    const fact = document.querySelector("#facts .good, #facts .bad");
    const lines = document.querySelectorAll("#run polyline");
    const hidden = byId("difference-part").hidden;
    return [document.title, fact && fact.className, lines.length, hidden, tips("loss"), tips("measured"),
            document.documentElement.scrollWidth];
    """
    page, is_equal = page_of(tmp_path, replay)
    title, said, lines, is_hidden, losses, times, width = ask(tmp_path, page, script, width=500)
    assert title == f"Run {tmp_path.name}" and said == kind and is_equal == (kind != "bad") and width <= 500
    assert lines == curves and is_hidden == (replay is None)
    assert "2 ranks, step 2: 2.5" in losses
    assert times == [
        "Rank 0 receives stage 0 from 0 to 2.00 ms, for 2.00 ms.",
        "Rank 0 computes host from 1.00 ms to 1.50 ms, for 500.0 µs.",
        "Rank 1 computes stage 0 from 3.00 ms to 4.00 ms, for 1.00 ms.",
    ]


@needs_browser
def test_pictures_and_pages_have_one_palette_for_ranks_and_another_for_stages(tmp_path):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    counts = [1, 8, 9, *random.Random(seed).sample(range(10, 300), 4)]
    script = f"""
    const ranks = {counts}.map((count) => [...Array(count).keys()].map((rank) => colour(rank, count)));
    return [ranks, [...Array(5).keys()].map((stage) => stageColour(stage - 1, 4))];
    """
    ranks, stages = ask(tmp_path, page_of(tmp_path, None)[0], script)
    for count, found in zip(counts, ranks):
        for rank, rgb in enumerate(found):
            assert max(abs(a - b) for a, b in zip(rgb, rank_colour(rank, count))) <= 1  # by rounding
    of_stages, of_ranks = {tuple(rgb) for rgb in stages}, {tuple(rgb) for rgb in ranks[1]}
    assert len(of_stages) == 5 and not of_stages & of_ranks
