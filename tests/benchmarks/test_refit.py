# SPDX-License-Identifier: Apache-2.0
"""Fitted times of the schedule: known ones are found again, the header keeps the rest, counts are those of the plan."""

from __future__ import annotations

import heapq
import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import NamedTuple

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


def modelled(row: Row) -> Row:
    """The row with the time that it takes by the constants above."""
    overhead = 20.0
    if row.is_deterministic:
        step = WIDE if row.block_m == 80 else NARROW
        end, even = busy([step * n + SPLIT_TILE for n in row.steps], [0.0] * NUM_SMS)
        return replace(row, us=overhead + 0.25 * even + 0.75 * end + PART * row.partials + ROW * row.rows)
    free_at = [0.0] * (NUM_SMS - row.late) + [0.5 * row.late_blocks / row.late * STEP] * row.late
    times = [STEP * n + MASKED * m + LIST_TILE for n, m in zip(row.steps, row.masked)]
    return replace(row, us=overhead + busy(times, free_at)[0] + PARTIAL * row.partials)


def random_row(rng: np.random.Generator, is_deterministic: bool) -> Row:
    """A backward that takes as long as the constants above say."""
    count, rows = int(rng.integers(140, 420)), int(rng.integers(1, 9)) * 32768
    steps = np.sort(rng.integers(4, 500, count))[::-1].tolist()
    masked = [int(n * x) for n, x in zip(steps, rng.random(count) ** 2)]
    partials, block_m = int(rng.integers(0, 200)), int(rng.choice((64, 80))) if is_deterministic else 64
    late = (0, 0) if is_deterministic else (16, rows // 64)
    return modelled(Row(is_deterministic, block_m, NUM_SMS, steps, masked, partials, rows, 0.0, *late))


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


def test_what_is_measured_tells_all_times_apart(monkeypatch):
    """With times of the model in place of a GPU's, the masks and schedules that are measured give them back."""

    class Call(NamedTuple):
        listed: tuple[np.ndarray, int]

    def timed(case, heads, chosen, deterministic, repeats):
        plan = refit.plan_of(case)
        shape = WorkTileShape(heads[1], heads[0] // heads[1], NUM_SMS, NUM_SMS, list_block_m=64)
        listed = (with_schedule(plan.words, shape), len(plan.words))
        for schedule in chosen:
            row = refit.split_row(plan, schedule, heads, NUM_SMS) if deterministic else None
            yield Call(listed), modelled(row or refit.list_row(*listed, heads, NUM_SMS)).us

    monkeypatch.setattr(refit, "timed", timed)
    monkeypatch.setattr(refit.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    lists, splits = fit(list(refit.measured(1)))
    assert lists.constants | splits.constants == pytest.approx(WANTED, rel=1e-5)
    assert lists.rows == 2 * 20 and splits.rows == 3 * 4 * 6
