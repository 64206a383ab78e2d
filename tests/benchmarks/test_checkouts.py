# SPDX-License-Identifier: Apache-2.0
"""Two checkouts beside each other: tiny shapes on the CPU, by two real processes, and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path

import builds
import checkouts
import pytest
import torch
from checkouts import Cell, Measured

ROOT = Path(__file__).resolve().parents[2]
TINY = "--seqlens 64 --heads 4 2 --head-dim 8 --dtype fp32 --repeats 3 --rounds 2 --warm-up 0".split()
# Another commit: one function is slow, one is wrong, and one is not there.
ANOTHER = """
import time as _time
_flex, _attend = flex_flash_attn_func, attend


def flex_flash_attn_func(*arguments, **options):
    _time.sleep(0.05)
    return _flex(*arguments, **options)


def attend(*arguments, **options):
    out, meta = _attend(*arguments, **options)
    return out * 1.5, meta


del index_attn_func
"""


needs_checkout = pytest.mark.skipif(
    not (ROOT / "magi_attention" / "api").is_dir(), reason="the package is installed and not in a checkout"
)


@pytest.fixture
def another(tmp_path):
    """A checkout with ``ANOTHER`` behind the package's own ``api``."""
    package, api = ROOT / "magi_attention", tmp_path / "another" / "magi_attention" / "api"
    api.mkdir(parents=True)
    for folder, to, left_out in ((package, api.parent, "api"), (package / "api", api, "__init__.py")):
        for path in folder.iterdir():
            if path.name != left_out:
                (to / path.name).symlink_to(path)
    (api / "__init__.py").write_text((package / "api" / "__init__.py").read_text() + ANOTHER)
    return api.parents[1]


@needs_checkout
@pytest.mark.nightly
def test_the_same_checkout_twice(tmp_path, capfd):
    """Everything is timed on both sides and gives the same. Its speed is not asserted: others use this machine."""
    out = tmp_path / "out"
    masks = ["--masks", "varlen_causal,b16_window,index_8", "--limit", "1000", "--out", str(out)]
    assert builds.main([str(ROOT), str(ROOT), *masks, *TINY]) == 0
    told = capfd.readouterr().out
    assert "15 of 15 cells were timed" in told and "None takes over" in told
    assert [line.split(", ")[0] for line in told.splitlines() if f", {ROOT}: " in line] == ["old", "new"]
    rows = json.loads(out.with_suffix(".json").read_text())["cells_compared"]
    modes = {("forward", False), ("backward", False), ("backward", True)}
    pairs = {(mask, f) for mask in ("varlen_causal", "b16_window") for f in ("flex_flash_attn_func", "attend")}
    pairs |= {("index_8", "index_attn_func")}
    cells = [row["cell"] for row in rows]
    assert {(c["mask"], c["function"], c["direction"], c["deterministic"]) for c in cells} == {
        (*pair, *mode) for pair in pairs for mode in modes
    }
    for row in rows:
        assert row["error"] == 0 and not row["reason"]
        assert [len(us) for us in row["us"].values()] == [2, 2] and min(map(min, row["us"].values())) > 0
        assert row["ratio"] == pytest.approx(sum(row["us"]["new"]) / sum(row["us"]["old"]))


@needs_checkout
def test_each_process_runs_its_own_checkout(another, capfd):
    asked = ["--direction", "forward", "--masks", "full,index_8", "--limit", "2", *TINY]
    assert builds.main([str(ROOT), str(another), *asked]) == 1
    lines = capfd.readouterr().out.splitlines()
    slow, wrong, lacking = (next(text for text in lines if f" {f} forward" in text) for f in checkouts.FUNCTIONS)
    assert float(slow.split()[2]) > 3 and "FAILS" in slow
    assert "results differ by 0.5" in wrong
    assert "new: AttributeError" in lacking and "index_attn_func" in lacking
    assert any(text.startswith("3 fail") for text in lines)


def test_every_cell_of_the_committed_records():
    options = builds.make_parser().parse_args(["."])
    options.directions = checkouts.DIRECTIONS
    cells = {(c.function, c.direction, c.mask, c.seqlen, c.heads, c.head_dims, c.deterministic)
             for c in checkouts.cells_of(options)}  # fmt: skip
    looked_at = 0
    for name in ("kernel_forward_h100", "kernel_backward_h100", "ffa_backward_h100_long", "portable_backward_d64_h100",
                 "sparse_h100"):  # fmt: skip
        data = json.loads((checkouts.RECORDS / f"{name}.json").read_text())
        all_settings = data["settings"] if isinstance(data["settings"], list) else [data["settings"]]
        for row in data["results"]:
            settings = next(s for s in all_settings if row["mask"] in s["masks"])
            dims = settings["head_dim"], settings.get("head_dim_v", settings["head_dim"])
            functions = ["index_attn_func"] if row["mask"][:3] in ("ind", "dsa") else ["flex_flash_attn_func", "attend"]
            for function in functions:
                for deterministic in (False, True)[: 1 + (row["direction"] == "backward")]:
                    shape = row["mask"], row["seqlen"], tuple(settings["heads"]), dims, deterministic
                    assert (function, row["direction"], *shape) in cells
                    looked_at += 1
    assert looked_at > 500


CELL = Cell("attend", "forward", "full", 64, (4, 2), (8, 8), "bf16")


class Scripted:
    """A side that answers with times of its own and notes when it was asked."""

    def __init__(self, name: str, times: list[float], asked: list[str], rows: torch.Tensor) -> None:
        self.name, self.libraries, self._times, self._asked, self._rows = name, set(), times, asked, rows

    def ask(self, what: str, **request) -> dict:
        if what == "open":
            torch.save([self._rows], request["rows"])
        if what == "time":
            self._asked.append(self.name)
            return {"median_us": self._times.pop(0)}
        return {}


def measured(
    tmp_path, old: list[float], new: list[float], rows: torch.Tensor | None = None
) -> tuple[Measured, list[str]]:
    """What is found of sides with such times, and who was asked for a time when."""
    asked: list[str] = []
    first = torch.ones(3)
    sides = [Scripted("old", old, asked, first), Scripted("new", new, asked, first if rows is None else rows)]
    options = builds.make_parser().parse_args([".", "--rounds", "3", "--limit", "0.01"])
    return checkouts.measure(CELL, sides, options, tmp_path), asked


def test_turns_alternate_and_the_mean_counts(tmp_path):
    found, asked = measured(tmp_path, [10.0, 12.0, 14.0], [12.0, 12.0, 12.0])
    assert asked == ["old", "new", "new", "old", "old", "new"]
    assert found.ratio == 1 and found.fault(0.01) is None


def test_what_is_beyond_the_limit_is_measured_again_and_all_rounds_count(tmp_path):
    found, asked = measured(tmp_path, [10.0] * 6, [10.3] * 3 + [9.7] * 3)
    assert len(asked) == 12 and found.ratio == pytest.approx(1) and found.fault(0.01) is None
    found, asked = measured(tmp_path, [10.0] * 6, [10.2] * 6)
    assert len(asked) == 12 and found.fault(0.01) == "+2.00%" and found.fault(0.03) is None
    found, asked = measured(tmp_path, [10.0] * 3, [9.0] * 3)
    assert len(asked) == 6 and found.fault(0.01) is None


@pytest.mark.parametrize("rows", (torch.tensor([1.0, 1.0, 1.1]), torch.tensor([1.0, float("nan"), 1.0])))
def test_other_results_fail_whatever_their_time(tmp_path, rows):
    found, asked = measured(tmp_path, [10.0] * 3, [5.0] * 3, rows)
    assert len(asked) == 6 and "results differ" in found.fault(0.01)
    assert "1 fail" in checkouts.summary([found], 0.01)


@pytest.mark.parametrize(
    ("who", "is_fault", "words"),
    [(("old",), False, "old: no kernel"), (("new",), True, "new: no kernel"),
     (("old", "new"), False, "neither side runs it")],
)  # fmt: skip
def test_what_the_old_side_does_not_run_is_no_fault(who, is_fault, words):
    found = Measured(CELL, reason=dict.fromkeys(who, "no kernel"))
    assert (found.fault(0.01) is not None) == is_fault and words in checkouts.line(found, 0.01)
