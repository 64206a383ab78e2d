# SPDX-License-Identifier: Apache-2.0
"""The page of records and the comparison with a baseline, on made-up records; the page itself in headless Chromium."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
import report
from result_files import load

from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH; apt install chromium")
MASKS, SIZES = ["causal", "varlen_causal"], [4096, 32768]
SPEEDS = {"magi": 700.0, "magi_attend": 710.0, "fa4": 650.0, "flex": 400.0}
ENVIRONMENT = {"gpu": "NVIDIA H100", "torch": "2.11", "cuda": "13.0", "commit": "abc123", "time": "2026-01-01"}


def record(spread: float = 0.01, **environment) -> dict:
    """A file as benchmarks/kernel.py writes it; ``spread`` is the noise of each time."""
    rows = [
        {
            "mask": mask, "seqlen": size, "name": name, "tflops": speed, "direction": "forward", "reason": None,
            "median_us": 1e6 / speed, "p10_us": (1 - spread) * 1e6 / speed, "p90_us": (1 + spread) * 1e6 / speed,
        }
        for mask in MASKS for size in SIZES for name, speed in SPEEDS.items()
    ]  # fmt: skip
    settings = {
        "masks": MASKS, "seqlens": SIZES, "heads": [64, 8], "head_dim": 128, "dtype": "bf16", "samples": 1,
    }  # fmt: skip
    missing = {"FlashAttention-3": 'pip install "<a&b>"'}
    return {"environment": ENVIRONMENT | environment, "settings": settings, "results": rows, "missing": missing}


def slowed(data: dict, factor: float, mask: str = "causal", size: int = 4096) -> dict:
    out = copy.deepcopy(data)
    for row in out["results"]:
        if (row["mask"], row["seqlen"], row["name"]) == (mask, size, "magi"):
            row["tflops"] /= factor
            for key in ("median_us", "p10_us", "p90_us"):
                row[key] *= factor
    return out


def write(path: Path, data: dict) -> str:
    path.write_text(json.dumps(data))
    return str(path)


@pytest.fixture
def judge(tmp_path, capsys):
    """(exit code, what was printed, the baseline of the page) of ``now`` beside ``before``."""

    def run(now: dict, before: dict, *options: str):
        files = [write(tmp_path / "now.json", now), "--baseline", write(tmp_path / "before.json", before)]
        code = report.main([*files, "--out", str(tmp_path / "page.html"), *options])
        told = capsys.readouterr()
        return code, told.out + told.err, data_in(tmp_path / "page.html")["baseline"]

    return run


def data_in(page: Path) -> dict:
    text = page.read_text()
    # Without a network: nothing is loaded from anywhere.
    assert not re.search(r"""(src|href)\s*=|https?://[^"\\]*\.(js|css)|@import|url\(""", text.split("<script id=")[0])
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])


# ---- the baseline -------------------------------------------------------------------------------------------


def test_a_planted_regression_is_found(judge):
    code, told, baseline = judge(slowed(record(), 1.2), record(), "--fail-above", "1.05")
    sentence = "1 cell takes more than 1.05 times as long as the baseline, beyond noise: forward causal 4K (1.20)."
    assert code == 1 and sentence in " ".join(told.split())
    (bad,) = [row for row in baseline["rows"] if row["bad"]]
    assert bad["ratio"] == pytest.approx(1.2) and bad["cell"] == "forward causal 4K" and len(baseline["rows"]) == 4
    assert sentence in baseline["notes"]


@pytest.mark.parametrize(
    ("factor", "spread", "code"), [(1.2, 0.2, 0), (1.03, 0.001, 0), (1.06, 0.001, 1), (0.8, 0.0, 0)]
)
def test_noise_and_the_limit(judge, factor, spread, code):
    got, told, baseline = judge(slowed(record(spread), factor), record(spread), "--fail-above", "1.05")
    assert got == code and ("No cell takes more than" in told) == (code == 0)
    # Ours and the peers, in both records.
    assert baseline["rows"][0]["noise"] == pytest.approx(2 * spread)


def test_without_a_limit_it_only_reports(judge):
    code, _, baseline = judge(slowed(record(), 2.0), record())
    assert code == 0 and [row["verdict"] for row in baseline["rows"]] == ["slower", "same", "same", "same"]


def test_a_cell_that_fails_now_is_told(judge):
    now = record()
    now["results"][0] |= {"tflops": 0.0, "reason": "RuntimeError: no kernel"}
    code, told, _ = judge(now, record(), "--fail-above", "1.05")
    assert code == 1 and "forward causal 4K (missing; RuntimeError: no kernel)" in " ".join(told.split())


def test_only_what_both_have_is_compared(judge):
    part = record()
    part["results"] = [row for row in part["results"] if row["seqlen"] == 4096]
    code, told, baseline = judge(part, record(), "--fail-above", "1.05")
    assert code == 0 and len(baseline["rows"]) == 2 and "2 cells of the baseline were not measured." in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"environment": {"gpu": "NVIDIA H200"}}, "The baseline is of NVIDIA H200 and this is NVIDIA H100"),
        ({"environment": {"cpu": "another"}}, None),  # it does not count beside a GPU
        ({"settings": record()["settings"] | {"head_dim": 64}}, "No cell of the baseline was measured."),
    ],
)
def test_what_cannot_be_compared_is_said(judge, change, words):
    code, told, _ = judge(record(), {**record(), **change} if "settings" in change else record(**change["environment"]))
    assert code == (2 if words else 0) and (words is None or words in " ".join(told.split()))


def test_cpus_are_told_apart(judge):
    """Times of two CPUs are not compared, ratios to peers on the same torch are."""
    now, before = record(gpu=None, cpu="a, 2 cores"), record(gpu=None, cpu="b, 2 cores")
    code, told, baseline = judge(now, before)
    assert code == 0 and "The CPU was b, 2 cores and is a, 2 cores" in " ".join(told.split())
    assert {row["measure"] for row in baseline["rows"]} == {"ratio"}


@pytest.mark.parametrize("name", ["ffa_forward_h100", "context_parallel_h100x2", "group_collectives_h100x2"])
def test_stored_records_are_baselines_of_themselves(tmp_path, name):
    file = str(ROOT / "benchmarks" / "results" / f"{name}.json")
    out = tmp_path / "page.html"
    assert report.main([file, "--baseline", file, "--fail-above", "1.0001", "--out", str(out)]) == 0
    data = data_in(out)
    assert [row["ratio"] for row in data["baseline"]["rows"]] == pytest.approx([1.0] * len(data["baseline"]["rows"]))
    assert not data["notice"]
    assert len(data["cells"]) == len(load(Path(file)).results)


# ---- the page -----------------------------------------------------------------------------------------------


def test_the_page_holds_the_record(tmp_path, capsys):
    report.main([write(tmp_path / "a.json", record()), "--out", str(tmp_path / "page.html")])
    data = data_in(tmp_path / "page.html")
    assert "NVIDIA H100" in data["lead"] and "commit abc123" in data["lead"] and data["unit"] == "TFLOP/s"
    assert data["missing"] == record()["missing"] and "Not installed: FlashAttention-3" in capsys.readouterr().out
    assert [(n["name"], n["role"]) for n in data["names"]] == [
        ("magi", "ours"), ("magi_attend", "variant"), ("fa4", "peer"), ("flex", "peer"),
    ]  # fmt: skip
    assert data["cells"][0]["values"]["fa4"]["shown"] == 650.0
    assert data["cells"][0]["values"]["fa4"]["noise"] == pytest.approx(0.01)


def test_a_cpu_record_says_so(tmp_path, capsys):
    report.main([write(tmp_path / "a.json", record(gpu=None)), "--out", str(tmp_path / "page.html")])
    assert "say nothing about GPUs" in data_in(tmp_path / "page.html")["notice"]
    assert "say nothing about GPUs" in capsys.readouterr().out


def dom_of(page: Path, script: str = "") -> str:
    """The page as Chromium has it after ``script``."""
    changed = page.with_name("changed.html")
    changed.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    line = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", changed.as_uri()]
    home = page.parent / "profile"
    done = subprocess.run([*line, f"--user-data-dir={home}"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return unescape(done.stdout.split("<script id=")[0])


@needs_chromium
def test_chromium_draws_filters_and_hovers(tmp_path):
    before = write(tmp_path / "before.json", slowed(record(), 0.5))
    files = [write(tmp_path / "a.json", record()), "--baseline", before, "--fail-above", "1.05"]
    assert report.main([*files, "--out", str(tmp_path / "page.html")]) == 1
    whole = dom_of(tmp_path / "page.html")
    assert whole.count('class="card"') == 4 and whole.count('class="fill"') == 4 * len(SPEEDS)
    assert "1.08×" in whole and 'pip install "<a&b>"' in whole and "above 1.05" in whole
    choose = (
        "const s = document.querySelector('[data-key=mask]'); s.value = 'varlen causal'; s.onchange();"
        "document.querySelector('.legend button:last-child').click();"
        "document.querySelectorAll('.bar')[2].dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: 9}));"
    )
    part = dom_of(tmp_path / "page.html", choose)
    assert part.count('class="card"') == 2 and part.count('class="fill"') == 2 * (len(SPEEDS) - 1)
    bubble = part.split('id="tip"')[1]
    assert "FlashAttention-4: varlen causal, 4K" in bubble and "650 TFLOP/s" in bubble
    assert "repeats spread by ± 1.0%" in bubble and "flex_flash_attn_func is 1.08× as fast" in bubble
