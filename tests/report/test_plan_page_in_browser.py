# SPDX-License-Identifier: Apache-2.0
"""The scripts of the page, run by Chromium, against the plans and the dense mask."""

from __future__ import annotations

import json
import re
from html import escape, unescape

import numpy as np
import pytest
from page_browser import ask, needs_browser
from page_masks import random_mask, settings_of

from magi_attention.api import Mask
from magi_attention.common.intervals import Packing
from magi_attention.common.slices import to_dense
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.tools.report.plan_page import plan_page

pytestmark = needs_browser

# Everything that the page knows of each setting, for all tokens and pairs, and the pairs in windows.
KNOWLEDGE = """
const windows = %s.map((w) => PLAN.slices.reduce((sum, slice) => sum + pairsIn(slice, ...w), 0));
const tokens = [...Array(PLAN.tokens).keys()];
const settings = PLAN.settings.map((setting) => {
  openSetting(setting);
  const ranks = [...Array(setting.cp).keys()];
  return {
    cp: setting.cp, name: setting.name,
    places: tokens.map((t) => locate(setting, t)),
    stages: ranks.map((rank) => tokens.map((key) => stageOf(setting, rank, key))),
    receivers: tokens.map((key) => receiversOf(setting, key).map(({ rank, stage }) => [rank, stage])),
    transfers: ranks.map((rank) => tokens.map((key) => transferOf(setting, rank, key))),
    matrices: setting.received[0].map((_, stage) => [...rowsBetween(setting, stage)]),
    pairs: tokens.map((q) => tokens.map((k) => sliceAt(PLAN.slices, q, k))),
  };
});
return [settings, windows];
"""


@pytest.mark.parametrize("seed", range(3))
def test_the_page_knows_the_plans(seed, tmp_path):
    mask = random_mask(seed, 120)
    settings = {(s.plan.cp_size, s.degree): s.plan for s in settings_of(mask)}
    windows = np.sort(np.random.default_rng(seed).integers(-5, mask.total_q + 5, (200, 2, 2)), axis=2)
    windows = windows.reshape(-1, 4).tolist()
    found, counts = ask(tmp_path, plan_page(settings_of(mask), ""), KNOWLEDGE % json.dumps(windows))
    whole = mask.to_dense()
    assert counts == [int(whole[max(a, 0) : max(b, 0), max(c, 0) : max(d, 0)].sum()) for a, b, c, d in windows]
    assert len(found) == len(settings)
    for knows in found:
        plan = settings[knows["cp"], knows["name"]]
        dense = np.array(knows["pairs"]) >= 0
        assert (dense == whole).all()
        tokens = np.arange(mask.total_q)
        owner = plan.owner_of(tokens)
        assert [p["rank"] for p in knows["places"]] == owner.tolist()
        for place in knows["places"]:
            assert plan.position_array(place["rank"])[place["local"]] == place["position"]
        matrices = np.array(knows["matrices"], dtype=int).reshape(plan.num_stages, plan.cp_size, plan.cp_size)
        assert (matrices == [plan.comm_matrix(stage) for stage in range(plan.num_stages)]).all()
        for rank in range(plan.cp_size):
            check_rank(plan, rank, knows, dense)


@pytest.mark.parametrize("seed", range(2))
def test_the_page_knows_where_queries_go(seed, tmp_path):
    planner_or_skip()
    mask = random_mask(seed, 120)
    (setting,) = settings_of(mask, (4,), (1,), 4, query_moves="always")
    plan = setting.plan
    assert plan.assigned is not None
    script = """
    const tokens = [...Array(PLAN.tokens).keys()];
    const sentences = tokens.map((q) => tokens.map((k) => describe({ q, k }).map((line) => line.join(": "))));
    const ranks = tokens.map((q) => tokens.map((k) => computerOf(state.setting, q, k)));
    return [ranks, sentences];
    """
    ranks, sentences = ask(tmp_path, plan_page([setting], ""), script)
    expected = np.full((mask.total_q, mask.total_k), -1)
    for rank, slices in enumerate(plan.assigned):
        expected[to_dense(slices, mask.total_q, mask.total_k)] = rank
    assert (np.array(ranks) == expected).all() and ((expected >= 0) == mask.to_dense()).all()
    moved = (expected >= 0) & (expected != plan.owner_of(np.arange(mask.total_q))[:, None])
    assert moved.any()
    for q, k in np.argwhere(mask.to_dense()).tolist():
        line = f"sends the query to rank {expected[q, k]}"
        assert any(line in found for found in sentences[q][k]) == moved[q, k]
        assert any(found.startswith(f"Work: rank {expected[q, k]}") for found in sentences[q][k])


def check_rank(plan, rank: int, knows: dict, dense: np.ndarray) -> None:
    """Stages and transfers of one rank."""
    tokens = np.arange(plan.total_tokens)
    stage_of = knows["stages"][rank]
    assert [stage == -1 for stage in stage_of] == (plan.owner_of(tokens) == rank).tolist()
    mine = plan.owner_of(tokens) == rank
    areas = [dense[mine][:, [s == stage for s in stage_of]].sum() for stage in range(-1, plan.num_stages)]
    part = plan.rank(rank)
    assert areas == [part.host.area, *(stage.area for stage in part.stages)]
    for stage, ranges in enumerate(plan.stage_ranges[rank]):
        buffer = Packing(ranges).positions()
        keys = buffer[buffer < plan.total_tokens].tolist()
        assert [key for key in tokens.tolist() if stage_of[key] == stage] == keys
        assert [key for key in tokens.tolist() if [rank, stage] in knows["receivers"][key]] == keys
        for key in keys:
            move = knows["transfers"][rank][key]
            sent = plan.position_array(move["from"])[move["sent_row"] :][: move["end"] - move["start"]]
            received = buffer[move["received_row"] :][: move["end"] - move["start"]]
            assert move["start"] <= key < move["end"] and move["to"] == rank and move["stage"] == stage
            assert sent.tolist() == received.tolist() == list(range(move["start"], move["end"]))
    assert [t is None for t in knows["transfers"][rank]] == [s in (-1, None) for s in stage_of]


# The colour in the middle of every token, of a view in which a token is many pixels.
PICTURE = """
const wanted = %s;
return wanted.map(([mode, chosen]) => {
  Object.assign(state, { mode, chosen });
  view.paint();
  const { data, width } = view.image;
  const at = (token) => Math.floor((token + 0.5) * view.perToken);
  const tokens = [...Array(PLAN.tokens).keys()];
  const pixel = (q, k) => 4 * (at(q) * width + at(k));
  return tokens.map((q) => tokens.map((k) => [...data.slice(pixel(q, k), pixel(q, k) + 3)]));
});
"""


@pytest.mark.parametrize("query_moves", ["never", "always"])
def test_the_picture_shows_the_mask_and_its_owners(query_moves, tmp_path):
    planner_or_skip()
    mask = random_mask(0, 60)
    settings = settings_of(mask, (3,), (1,), 4, query_moves=query_moves)
    plan = settings[0].plan
    pictures = ask(tmp_path, plan_page(settings, ""), PICTURE % '[["rank", null], ["stage", null], ["rank", 1]]')
    by_rank, by_stage, chosen = (np.array(picture) for picture in pictures)
    dense = mask.to_dense()
    owner = np.broadcast_to(plan.owner_of(np.arange(mask.total_q))[:, None], dense.shape)
    stage, computer = np.full(dense.shape, -1), owner.copy()
    for rank, stages in enumerate(plan.stage_ranges):
        for index, ranges in enumerate(stages):
            received = np.isin(np.arange(mask.total_q), Packing(ranges).positions())
            stage[(owner == rank) & received] = index
    for rank, slices in enumerate(plan.assigned or ()):
        moved = to_dense(slices, *dense.shape) & (owner != rank)
        stage[moved] = 0
        computer[moved] = rank
    for picture, kinds in ((by_rank, computer), (by_stage, stage)):
        assert ((picture == 255).all(axis=2) == ~dense).all()
        colours = [{tuple(c) for c in picture[dense & (kinds == kind)]} for kind in np.unique(kinds[dense])]
        assert all(len(found) == 1 for found in colours) and len(set.union(*colours)) == len(colours)
    same = (chosen == by_rank).all(axis=2)
    assert (plan.assigned is not None and (computer != owner).any()) == (query_moves == "always")
    assert same[dense].tolist() == (computer == 1)[dense].tolist()


def test_thin_structures_stay_visible(tmp_path):
    """Single queries, a narrow window and one far pair, in a million tokens."""
    total = 1 << 20
    q = [[5000, 5001], [300_000, 300_001], [1_000_000, 1_000_002]]
    mask = Mask.from_slices(q, [[0, 4000], [200_000, 200_001], [0, 900_000]], "full", total, total)
    script = """
    view.paint();
    const { data, width } = view.image;
    const inked = new Set();
    for (let i = 0; i < data.length; i += 4)
      if (data[i] + data[i + 1] + data[i + 2] < 720) inked.add(Math.floor(i / 4 / width));
    return [[...inked], width];
    """
    rows, width = ask(tmp_path, plan_page(settings_of(mask, (4,), (1,)), ""), script)
    assert rows == [int(start * width / total) for start, _ in q]


EVENTS = """
const canvas = byId("mask");
const event = (kind, x, y, more = {}) => {
  const box = canvas.getBoundingClientRect();
  const place = { clientX: box.left + LEFT + x * view.side, clientY: box.top + TOP + y * view.side };
  const type = kind === "wheel" ? WheelEvent : PointerEvent;
  canvas.dispatchEvent(new type(kind, { ...place, pointerId: 1, bubbles: true, cancelable: true, ...more }));
};
const text = () => byId("pair").textContent;
const answers = {};
event("pointermove", 0.3, 0.75);
answers.hover = text();
event("pointermove", 0.75, 0.25);
answers.nothing = text();
event("wheel", 0.5, 0.5, { deltaY: -200 });
answers.wheel = [view.scale / view.fit, view.pairAt(LEFT + view.side / 2, TOP + view.side / 2)];
event("pointerdown", 0.5, 0.5);
event("pointermove", 0.4, 0.6);
event("pointerup", 0.4, 0.6);
answers.drag = view.pairAt(LEFT + 0.4 * view.side, TOP + 0.6 * view.side);
event("pointerdown", 0.4, 0.5, { pointerType: "touch" });
event("pointerdown", 0.6, 0.5, { pointerType: "touch", pointerId: 2 });
const before = view.scale;
event("pointermove", 0.8, 0.5, { pointerType: "touch", pointerId: 2 });
answers.pinch = view.scale / before;
event("pointerup", 0.8, 0.5, { pointerId: 2 });
event("pointerup", 0.8, 0.5);
byId("zoom-all").click();
answers.all = view.scale / view.fit;
event("pointerdown", 0.3, 0.75, { pointerType: "touch" });
answers.tap = text();
const move = (id, value) => {
  byId(id).value = value;
  byId(id).dispatchEvent(new Event("input"));
};
const shown = () => [state.setting.cp, state.setting.name, byId("facts").textContent];
move("ranks", 0);
answers.fewer = shown();
move("ranks", 2);
move("degree", 2);
answers.more = shown();
document.querySelector("#work rect").dispatchEvent(new Event("click", { bubbles: true }));
answers.bar = document.querySelector("#work").parentElement.querySelector(".tip").textContent;
answers.outside = performance.getEntriesByType("resource").map((entry) => entry.name);
return answers;
"""


def test_pointer_wheel_and_sliders(tmp_path):
    mask = Mask.varlen([0, 512, 4096], causal=True)
    settings = settings_of(mask, (4, 2, 1), (1, 0, 2))
    found = ask(tmp_path, plan_page(settings, ""), EVENTS)
    q, k = 3072, int(0.3 * 4096)
    receiver, sender = settings[0].plan.owner_of(np.array([q, k])).tolist()
    assert receiver != sender
    area = 3584 * 3585 // 2
    assert f"causal, queries [512, 4,096), keys [512, 4,096), {area:,} pairs" in found["hover"]
    for words in (f"token {q:,}", f"token {k:,}", f"rank {sender} sends keys", f"to rank {receiver} in stage 0"):
        assert words in found["hover"]
    assert found["tap"] == found["hover"] and "none: this query does not see this key" in found["nothing"]
    scale, middle = found["wheel"]
    assert 1.5 < scale < 2.5 and abs(middle["q"] - 2048) <= 8 and abs(middle["k"] - 2048) <= 8
    assert abs(found["drag"]["q"] - 2048) <= 8 and abs(found["drag"]["k"] - 2048) <= 8
    assert 1.9 < found["pinch"] < 2.1 and found["all"] == 1
    assert found["fewer"][:2] == [1, "1"] and found["more"][:2] == [4, "2"]
    assert "1ranks" in found["fewer"][2] and "4ranks" in found["more"][2]
    assert found["bar"].startswith("Rank 0, host: ") and found["outside"] == []


def test_narrow_windows_need_no_sideways_scrolling(tmp_path):
    page = plan_page(settings_of(Mask.causal(100_000), (8, 4), (1, 2)), "A causal mask of 100,000 tokens.")
    tell = "parent.heard(innerWidth, document.documentElement.scrollWidth);"
    inner = escape(page.replace("</body>", f"<script>{tell}</script></body>"), quote=True)
    frames = "".join(f'<iframe style="width:{w}px;border:0" srcdoc="{inner}"></iframe>' for w in (400, 1280))
    listener = """
    <script>
    const widths = [];
    function heard(...found) {
      widths.push(found);
      document.getElementById("answer").textContent = JSON.stringify({ found: widths });
    }
    </script>
    """
    outer = f"<html><body>{listener}{frames}</body></html>"
    assert sorted(ask(tmp_path, outer, "return null;")) == [[400, 400], [1280, 1280]]


@pytest.mark.parametrize(("limit", "lacks"), [(1 << 20, 0), (7_200, 1), (6_000, 2), (3_000, 3)])
def test_pages_without_details_work(limit, lacks, tmp_path):
    """Such as of a plan that is too large."""
    settings = settings_of(Mask.causal(16384), (16,), (4,), 64)
    script = """
    const answers = [];
    for (const button of document.querySelectorAll("[name=mode]")) {
      button.click();
      view.paint();
      view.point({ q: 9, k: 3 });
      tell(view.pointed);
      answers.push(byId("pair").textContent.slice(0, 12));
    }
    const click = new Event("click", { bubbles: true });
    for (const cell of document.querySelectorAll("#charts rect")) cell.dispatchEvent(click);
    return [answers, [...byId("notes").children].map((note) => note.textContent), byId("charts").hidden];
    """
    answers, notes, is_hidden = ask(tmp_path, plan_page(settings, "", limit), script)
    assert answers == ["Querytoken 9"] * 3 and is_hidden == (lacks == 3)
    assert len(notes) == lacks and all(note.startswith("To keep this file small, it does not say") for note in notes)


def test_a_notebook_shows_the_page(tmp_path):
    """Also without the details that were left out."""
    for settings in (settings_of(Mask.causal(512), (4,), (1,)), settings_of(Mask.causal(1 << 16), (32,), (3,), 8)):
        page = unescape(re.search(r'srcdoc="([^"]*)"', settings[0].plan._repr_html_())[1])
        script = "view.paint(); view.point({ q: 9, k: 3 }); tell(view.pointed); return byId('pair').textContent;"
        assert ask(tmp_path, page, script).startswith("Querytoken 9")
