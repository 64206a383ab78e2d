# SPDX-License-Identifier: Apache-2.0
"""The example that pretrains a GPT of Megatron-Core: losses fall, and are those of one process. And the page's code."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core; ci/integrations installs it")

from starting import TORCHRUN  # noqa: E402

from magi_attention.testing.waiting import DEADLINE_S  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "docs"))
from pages import blocks, commands, setup  # noqa: E402

EXAMPLE = "examples/frameworks/megatron_pretrain.py"
PAGE = ROOT / "docs" / "frameworks" / "megatron.md"


def launch_lines() -> dict[int, str]:
    """Launch lines in the example's docstring, by the number of processes."""
    text = ast.get_docstring(ast.parse((ROOT / EXAMPLE).read_text()))
    return {int(n): line for line, n in re.findall(r"^ +(torchrun --nproc-per-node (\d+) .*)$", text, re.MULTILINE)}


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    alone = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **alone}


def run(processes: int, *options: str) -> subprocess.CompletedProcess:
    command = [*TORCHRUN, str(processes), *options]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)


def losses(done: subprocess.CompletedProcess) -> list[float]:
    assert done.returncode == 0, (done.stdout + done.stderr)[-40_000:]
    return [float(x) for x in re.findall(r"^step \d+  loss ([\d.]+)$", done.stdout, re.MULTILINE)]


@pytest.fixture(scope="module")
def one() -> list[float]:
    return losses(run(1, EXAMPLE))


def test_losses_fall(one):
    assert len(one) == 8 and one[-1] < 0.9 * one[0]


@pytest.mark.parametrize("cp_size", (2, pytest.param(1, marks=pytest.mark.nightly)))
def test_two_ranks_train_as_one_process(one, cp_size):
    words = shlex.split(launch_lines()[2])[3:]  # context-parallel without more
    np.testing.assert_allclose(losses(run(2, *words, *(() if cp_size == 2 else ("--cp-size", "1")))), one, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_replicas_of_ranks_train_as_one_process(one):
    np.testing.assert_allclose(losses(run(4, EXAMPLE, "--cp-size", "2")), one, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("processes", "options", "sentence"),
    [
        (1, ("--cp-size", "3"), "--cp-size is 3; give a divisor of the 1 ranks."),
        (2, ("--cp-size", "1", "--sequences", "3"), "--sequences is 3; give a multiple of the 2 replicas."),
    ],
    ids=str,
)
def test_wrong_sizes_are_sentences(processes, options, sentence):
    done = run(processes, EXAMPLE, *options)
    assert done.returncode and sentence in done.stderr


def test_the_page_has_the_launch_lines():
    lines = launch_lines()
    assert set(lines) == {2, 8} and set(lines.values()) <= set(commands(PAGE))


@pytest.mark.nightly
def test_the_code_of_the_page_runs_as_it_stands(tmp_path):
    (code,) = (block.text for block in blocks(PAGE) if block.language == "python")
    assert not setup(PAGE)
    file = tmp_path / "page.py"
    file.write_text(code + "assert losses.shape == (1, 12) and losses.isfinite().all()\n")
    done = subprocess.run([sys.executable, file], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
