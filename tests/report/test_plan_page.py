# SPDX-License-Identifier: Apache-2.0
"""What the page of a plan holds, how large it gets, and what it needs; without a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape

import numpy as np
import pytest
from page_masks import random_mask, settings_of

from magi_attention.api import Mask, make_plan
from magi_attention.cli import main
from magi_attention.common.slices import areas, to_dense
from magi_attention.meta.predict.cost import stage_areas
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.tools.report.plan_data import Setting, page_data
from magi_attention.tools.report.plan_page import MOST_BYTES, MOST_NOTEBOOK_BYTES, notebook_view, plan_page

CODE_BYTES = 60_000  # of styles and scripts, at most


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)[1])


def slices_of(data: dict) -> np.ndarray:
    """(N, 5) slices of the page."""
    step, rows, k0, keys, kind = np.array(data["slices"]).reshape(-1, 5).T
    q0 = np.cumsum(step)
    return np.column_stack([q0, q0 + rows, k0, k0 + keys, kind])


def outer_references(page: str) -> list[str]:
    """What a browser would fetch."""
    return re.findall(r"https?:|//[\w.]+/|\bsrc=\S+|\bhref=\S+|@import\S*|url\(", page)


@pytest.mark.parametrize("seed", range(20))
def test_areas_of_stages_are_those_of_the_ranks(seed):
    check_stage_areas(settings_of(random_mask(seed, 300)))


@pytest.mark.parametrize("seed", range(10))
def test_areas_of_stages_where_queries_move(seed):
    planner_or_skip()
    check_stage_areas(settings_of(random_mask(seed, 300), query_moves="always"))


def check_stage_areas(settings: list[Setting]) -> None:
    for setting in settings:
        plan = setting.plan
        parts = [plan.rank(rank) for rank in range(plan.cp_size)]
        expected = [[part.host.area, *(stage.area for stage in part.stages)] for part in parts]
        for part, areas_of_rank in zip(parts, expected):
            areas_of_rank[-1] += part.queries.slices.area if part.queries else 0
        assert stage_areas(plan).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_page_holds_the_plans(seed):
    mask = random_mask(seed)
    settings = settings_of(mask)
    data = data_of(plan_page(settings, "a <lead>"))
    assert (to_dense(slices_of(data), mask.total_q, mask.total_k) == mask.to_dense()).all() and data["is_whole"]
    assert data["notes"] == [] and len(data["settings"]) == len(settings)
    shown = data["settings"][data["given"]]
    assert (shown["cp"], shown["name"]) == (settings[0].plan.cp_size, settings[0].degree)
    by_place = {(found["cp"], found["name"]): found for found in data["settings"]}
    for setting in settings:
        plan, found = setting.plan, by_place[setting.plan.cp_size, setting.degree]
        assert [plan.partitions[rank].count(chunk) for chunk, rank in enumerate(found["owners"])] == (
            [1] * plan.num_chunks
        )
        for stages, steps in zip(plan.stage_ranges, found["stages"]):
            assert [np.cumsum(flat).reshape(-1, 2).tolist() for flat in steps] == [r.tolist() for r in stages]
        assert [sum(row) for row in found["areas"]] == plan.areas.tolist()
        assert [sum(row) for row in found["sent"]] == plan.comm_matrix().sum(axis=1).tolist()
        assert [sum(row) for row in found["received"]] == plan.comm_matrix().sum(axis=0).tolist()


def test_overlap_degrees_of_the_sliders_are_those_of_the_planner(tmp_path):
    """The plan that a slider shows is the one that the command makes for it."""
    words = ["explain", "--docs", "300,1000,748", "--cp"]
    assert main([*words, "4", "--degree", "3", "--out", str(tmp_path / "a")]) == 0
    sliders = data_of((tmp_path / "a" / "report.html").read_text())["settings"]
    assert {(s["cp"], s["name"]) for s in sliders} == {(cp, str(d)) for cp in (1, 2, 4) for d in range(5)}
    assert main([*words, "2", "--degree", "2", "--out", str(tmp_path / "b")]) == 0
    alone = data_of((tmp_path / "b" / "report.html").read_text())
    wanted = alone["settings"][alone["given"]]
    assert wanted in sliders


def test_any_degree_and_number_of_ranks(tmp_path):
    words = ["explain", "--tokens", "4096", "--out", str(tmp_path)]
    for cp, degree, ranks in ((6, "7", {1, 2, 4, 6}), (1, "dynamic", {1}), (8, "dynamic", {1, 2, 4, 8})):
        assert main([*words, "--cp", str(cp), "--degree", degree]) == 0
        data = data_of((tmp_path / "report.html").read_text())
        assert {s["cp"] for s in data["settings"]} == ranks
        assert {s["name"] for s in data["settings"]} == {*"01234", degree}
        shown = data["settings"][data["given"]]
        assert (shown["cp"], shown["name"]) == (cp, degree)


def test_the_page_fetches_nothing():
    page = plan_page(settings_of(Mask.causal(64), (2,), (1,)), "")
    assert outer_references(page) == [] and "default-src 'none'" in page
    assert len(page) < CODE_BYTES
    assert outer_references('<img src=x> <a href="http://a.b/c">') != []


def test_text_cannot_leave_its_place():
    setting = Setting(make_plan(Mask.causal(64), 2), "</script><script>")
    page = plan_page([setting], "</p><script>")
    assert page.count("<script") == 2 and data_of(page)["settings"][0]["name"] == setting.degree


def test_many_slices_are_cut_to_the_largest():
    rng = np.random.default_rng(0)
    mask = Mask.varlen(np.concatenate([[0], np.cumsum(rng.integers(1, 40, 20_000))]), causal=True)
    setting = Setting(make_plan(mask, 4), "1")
    data = page_data([setting], 100_000)
    kept = slices_of(data)
    assert not data["is_whole"] and len(json.dumps(data, separators=(",", ":"))) < 110_000
    note = f"{len(kept):,} largest of 20,000 slices, with {areas(kept).sum() / mask.area:.1%} of the allowed pairs"
    assert note in data["notes"][0]
    smallest_kept = areas(kept).min()
    assert (areas(mask.slices.array) > smallest_kept).sum() <= len(kept)
    assert (np.diff(kept[:, 0]) >= 0).all()


def test_plans_that_do_not_fit_are_named():
    settings = settings_of(Mask.causal(4096), (8, 4, 2), range(4), chunk_size=16)
    sizes = len(json.dumps(page_data(settings, MOST_BYTES), separators=(",", ":")))
    data = page_data(settings, sizes // 2)
    kept = {(s["cp"], s["name"]) for s in data["settings"]}
    left_out = {(s.plan.cp_size, s.degree) for s in settings} - kept
    assert (8, "0") in kept and left_out and len(json.dumps(data, separators=(",", ":"))) < sizes * 0.6
    for cp, degree in left_out:
        assert f"{cp} ranks with degree {degree}" in data["notes"][0]


def test_a_page_in_a_notebook_is_small_for_any_plan():
    """It says what it lacks."""
    rng = np.random.default_rng(1)
    long = Mask.varlen(np.concatenate([[0], np.cumsum(rng.integers(1, 90, 30_000))]), causal=True)
    (small,) = settings_of(Mask.causal(512), (4,), (1,))
    (large,) = settings_of(long, (48,), (4,), chunk_size=8)
    for plan, lacks in ((small.plan, 0), (large.plan, 2)):
        shown = plan._repr_html_()
        assert len(shown) < (MOST_NOTEBOOK_BYTES + CODE_BYTES) * 1.3
        page = unescape(re.search(r'srcdoc="([^"]*)"></iframe>$', shown)[1])
        data = data_of(page)
        notes = [*data["notes"], *data["settings"][0]["notes"]]
        assert len(notes) >= lacks and all("small" in note for note in notes)
        assert outer_references(page) == [] and 'sandbox="allow-scripts' in shown
        assert data["settings"][0]["facts"][0][0] == f"{plan.total_tokens:,}"
    assert notebook_view(small.plan) == small.plan._repr_html_()


def test_the_page_needs_neither_torch_nor_matplotlib():
    code = "import sys, magi_attention.tools.report.plan_page; print({'torch', 'matplotlib'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
