# SPDX-License-Identifier: Apache-2.0
"""Pictures show the present plans, records and diagrams, and the table of the benchmarks is of the same record."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict

import pytest
from pages import ROOT

from magi_attention.testing.libraries import planner_or_skip

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")
sys.path.insert(0, str(ROOT / "docs"))

import make_pictures  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 150_000


@pytest.fixture(autouse=True, scope="module")
def planner() -> None:
    """The tile plans in the figures are real ones."""
    planner_or_skip()


@pytest.mark.parametrize("name", sorted(path.name for path in PICTURES.glob("*.png")))
def test_committed_pictures_are_of_the_present_inputs(name):
    assert (PICTURES / name).stat().st_size < MOST_BYTES
    with Image.open(PICTURES / name) as picture:
        text = picture.text["Description"]
    assert text == make_pictures.descriptions()[name], f"{name} is old: run `python docs/make_pictures.py`"


@pytest.mark.nightly
def test_drawn_twice_they_are_the_same_bytes(tmp_path, monkeypatch):
    digests = []
    for folder in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["make_pictures.py", "--out", str(tmp_path / folder)])
        make_pictures.main()
        files = sorted((tmp_path / folder).iterdir())
        digests.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
    assert digests[0] == digests[1] and set(digests[0]) == set(make_pictures.descriptions())


def test_every_figure_of_the_records_is_a_bar():
    """But of the two forms of cudnn.flex_attention the faster, and none of what the page does not compare."""
    records = make_pictures.read_records()
    for axis, (direction, record) in zip(make_pictures.kernel_speed(records).axes, records.items()):
        drawn = sorted(bar.get_height() for bar in axis.patches)
        rows = {(r["mask"], r["seqlen"], r["name"]): r["tflops"] for r in record["results"] if r["tflops"]}
        wanted = []
        for (mask, seqlen, name), speed in rows.items():
            if name == "cudnn_flex":
                wanted.append(max(speed, rows.get((mask, seqlen, "cudnn_flex_thd"), 0)))
            elif name in ("magi", "magi_attend", "fa4", "cudnn", "flex"):
                wanted.append(speed)
        assert drawn == sorted(wanted) and record["settings"]["direction"] == direction


def test_the_table_of_the_page_is_of_the_records():
    """Speed over the fastest peer, smallest and largest over lengths."""
    cells: dict[tuple, dict] = defaultdict(dict)
    for direction, path in make_pictures.RECORDS.items():
        for row in json.loads(path.read_text())["results"]:
            if row["tflops"] and row["name"] not in ("magi_host", "magi_det", "magi_fa4", "magi_cudnn_flex"):
                cells[row["mask"], direction, row["seqlen"]][row["name"]] = row["tflops"]
    ratios: dict[tuple, list] = defaultdict(list)
    for (mask, direction, _), speeds in cells.items():
        best = max(speed for name, speed in speeds.items() if not name.startswith("magi"))
        for form in ("magi_attend", "magi"):
            ratios[mask, direction, form].append(speeds[form] / best)
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    columns = [(direction, form) for direction in ("forward", "backward") for form in ("magi_attend", "magi")]
    for mask, title in make_pictures.TITLES.items():
        shown = [f"{min(r):.2f} to {max(r):.2f}" for column in columns if (r := ratios[(mask, *column)])]
        assert f"| {' | '.join([title.replace(chr(10), ' '), *shown])} |" in page
