# SPDX-License-Identifier: Apache-2.0
"""Fitted times of the schedule: known ones are found again, the header keeps the rest, counts are those of the plan."""

from __future__ import annotations

import heapq
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

refit = pytest.importorskip("refit")
from masks import make_case  # noqa: E402
from schedule_fit import Row, constants_of, fit, source_of, with_constants  # noqa: E402

from magi_attention.native.planner.schedule import NONE, BwdSchedule, Split, WorkTileShape, with_schedule  # noqa: E402

STEP, MASKED, LIST_TILE, PARTIAL = 2.1, 0.31, 5.7, 0.23  # microseconds of work lists
WIDE, NARROW, SPLIT_TILE, PART, ROW = 2.6, 2.2, 5.2, 0.33, 0.0008  # and of tile splits
NUM_SMS = 132


def busy(times: list[float], free_at: list[float]) -> tuple[float, float]:
    """When the last work tile ends, and what an SM does on average."""
    even = (sum(times) + sum(free_at)) / len(free_at)
    free_at = sorted(free_at)
    for time in times:
        heapq.heapreplace(free_at, free_at[0] + time)
    return max(free_at), even


def random_row(rng: np.random.Generator, is_deterministic: bool) -> Row:
    """A backward that takes as long as the constants above say."""
    count, rows = int(rng.integers(140, 420)), int(rng.integers(1, 9)) * 32768
    steps = np.sort(rng.integers(4, 500, count))[::-1].tolist()
    masked = [int(n * x) for n, x in zip(steps, rng.random(count) ** 2)]
    partials, overhead = int(rng.integers(0, 200)), 20.0
    if is_deterministic:
        block_m = int(rng.choice((64, 80)))
        step = WIDE if block_m == 80 else NARROW
        end, even = busy([step * n + SPLIT_TILE for n in steps], [0.0] * NUM_SMS)
        us = overhead + 0.25 * even + 0.75 * end + PART * partials + ROW * rows
        return Row(True, block_m, NUM_SMS, steps, [0] * count, partials, rows, us)
    late, late_blocks = 16, rows // 64
    free_at = [0.0] * (NUM_SMS - late) + [0.5 * late_blocks / late * STEP] * late
    times = [STEP * n + MASKED * m + LIST_TILE for n, m in zip(steps, masked)]
    us = overhead + busy(times, free_at)[0] + PARTIAL * partials
    return Row(False, 64, NUM_SMS, steps, masked, partials, rows, us, late, late_blocks)


def random_rows(seed: int, noise: float = 0.0) -> list[Row]:
    rng = np.random.default_rng(seed)
    made = [random_row(rng, i % 2 == 1) for i in range(160)]
    return [replace(row, us=row.us * (1 + noise * rng.standard_normal())) for row in made]


WANTED = {
    "kMaskedStepTime": 8 * (STEP + MASKED) / STEP, "kWorkTileTime": 8 * LIST_TILE / STEP,
    "kPartialTime": 8 * PARTIAL / STEP, "kNarrowStep": NARROW / WIDE, "kTileSplitBeginAndEnd": SPLIT_TILE / WIDE,
    "kPart": PART / WIDE, "kRows": WIDE / ROW,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_known_times_are_found_again(seed):
    """Exactly without noise; with noise of 0.3% the step, of which there are most, within 2%."""
    lists, splits = fit(random_rows(seed))
    assert lists.constants | splits.constants == pytest.approx(WANTED, rel=1e-6), seed
    assert max(lists.error, splits.error) < 1e-9 and lists.rows == splits.rows == 80
    lists, splits = fit(random_rows(seed, 0.003))
    found = lists.constants | splits.constants
    assert found["kNarrowStep"] == pytest.approx(WANTED["kNarrowStep"], rel=0.02), seed
    assert found["kMaskedStepTime"] == pytest.approx(WANTED["kMaskedStepTime"], rel=0.02), seed
    assert 0.001 < lists.error < 0.01


def test_rows_that_say_too_little_are_refused(tmp_path, capsys):
    rows = random_rows(0)
    with pytest.raises(ValueError, match="measure masks that differ"):
        fit([replace(row, partials=0) for row in rows])
    with pytest.raises(ValueError, match="measure more rows"):
        fit([replace(row, us=1e4 - row.us) for row in rows])
    file = tmp_path / "few.json"
    file.write_text(json.dumps({"environment": {"gpu": "a GPU", "time": "now"}, "results": [asdict(rows[0])]}))
    assert refit.main([str(file)]) == 1 and "measure masks" in capsys.readouterr().err


def test_the_header_says_what_was_fitted_and_keeps_the_rest(tmp_path):
    """The one of the tree is as the script writes it."""
    text, rows, header = refit.HEADER.read_text(), tmp_path / "rows.json", tmp_path / "header.h"
    assert with_constants(text, constants_of(text), source_of(text)) == text
    header.write_text(text)
    results = [asdict(row) for row in random_rows(3)]
    rows.write_text(json.dumps({"environment": {"gpu": "Some GPU", "time": "2026-01-02"}, "results": results}))
    assert refit.main([str(rows), "--header", str(header)]) == 0
    made = header.read_text()
    assert constants_of(made) == pytest.approx(WANTED, rel=0.25)  # those of work lists are whole eighths
    assert source_of(made)[0] == "From rows.json: Some GPU, 2026-01-02."
    assert with_constants(made, constants_of(text), source_of(text)) == text
    with pytest.raises(ValueError, match="has no part"):
        constants_of("constexpr double kPart = 1;")


@pytest.mark.parametrize("name", ("full", "varlen_full", "varlen_causal", "varlen_block_causal"))
def test_rows_count_what_the_plan_has(name):
    """Steps of all parts together are those of whole tiles; masked ones are none where all is seen."""
    case, heads = make_case(name, 4096, 1), (64, 8)
    plan = refit.plan_of(case)
    words = with_schedule(plan.words, WorkTileShape(8, 8, NUM_SMS, NUM_SMS, list_block_m=64))
    row = refit.list_row(words, len(plan.words), heads, NUM_SMS)
    steps = sum(refit.steps_of(plan, tile, 64)[0] for tile in range(32))
    assert sum(row.steps) == 64 * steps and row.late == 16 and row.late_blocks == 64 * 64
    assert (sum(row.masked) == 0) == (name == "full") and all(m <= n for m, n in zip(row.masked, row.steps))
    for split in (NONE, Split(1, 4, 4)):
        made = refit.split_row(plan, BwdSchedule(80, 0, split=split), heads, NUM_SMS)
        assert sum(made.steps) == 64 * sum(refit.steps_of(plan, tile, 80)[0] for tile in range(32))
        assert len(made.steps) == 8 * (32 + 3 * (split.end - split.begin)) and made.partials in (0, 96)
