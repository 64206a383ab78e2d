# SPDX-License-Identifier: Apache-2.0
"""Programs of examples/frameworks, started by the lines that their first words give: losses fall, and are those of one
process. And torchtitan's page: its file of configs and its command, as a reader types them."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from magi_attention.testing.spawn import run_program
from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
sys.path.insert(0, str(ROOT / "tests" / "docs"))
from pages import blocks, commands  # noqa: E402

TITAN = "torchtitan_configs.py"
# torchtitan 0.3.0 is for torch 2.14; with 2.13 its default backend does not start on several ranks.
FOR_OLD_TORCH = () if hasattr(dist, "set_timeout") else ("--parallelism.spmd_backend", "full_dtensor")
_LOSS = re.compile(r"(?:round (\d+) +)?step:? +(\d+)\b.*?loss:? +(-?[\d.]+)")
_COLOR = re.compile(r"\x1b\[[\d;]*m")


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))


def lines(name: str) -> list[str]:
    """The lines of its docstring that start the example."""
    return re.findall(r"^ +(torchrun .*)$", docstring(name).replace("\\\n", ""), re.MULTILINE)


def line(name: str, processes: int) -> str:
    """Such a line, of two processes, for ``processes``."""
    return next(x for x in lines(name) if "--nproc-per-node 2 " in x).replace("node 2 ", f"node {processes} ")


def start(command: str, folder: Path, *options: str, path: Path = ROOT) -> tuple[list[float], str]:
    """The loss of each step, and all that the processes said, of a command of torchrun that is given in ``folder``.
    ``path`` comes first in PYTHONPATH."""
    words = shlex.split(command)
    assert words[0] == "torchrun"
    places = [str(path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    alone = {
        "PYTHONPATH": os.pathsep.join(filter(None, places)), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1", "PET_STANDALONE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words[1:], *options],
        cwd=folder, env={**os.environ, **alone}, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    said = _COLOR.sub("", done.stdout + done.stderr)
    assert done.returncode == 0, said[-40_000:]
    return losses_in(said), said


def losses_in(said: str) -> list[float]:
    steps = {match.groups()[:2]: float(match[3]) for match in _LOSS.finditer(said)}  # each rank may say it
    return list(steps.values())


@pytest.mark.parametrize("name", sorted(x.name for x in EXAMPLES.glob("*.py") if x.name != "torchtitan_on_cpu.py"))
def test_examples_are_short_and_say_how_to_start(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 150
    assert line(name, 2) and any("--nproc-per-node 8 " in x for x in lines(name))


def start_all(name: str, cp_sizes: list[str], *options: str) -> list[list[float]]:
    """Losses of the example in one process, and in two of which each of ``cp_sizes`` share a sequence; side by side."""
    given = [line(name, 1), *(f"{line(name, 2)} --cp-size {cp_size}" for cp_size in cp_sizes)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda command: start(command, ROOT, *options)[0], given))


@pytest.mark.nightly
def test_dit_video():
    """The other mask computes something else, so the option reaches the plan."""
    one, two = start_all("dit_video.py", ["2"])
    assert len(one) == 8 and one[-1] < 0.5 * one[0]
    np.testing.assert_allclose(two, one, rtol=1e-5)
    other, _ = start(line("dit_video.py", 1), ROOT, "--block-frames", "1")
    assert abs(other[0] - one[0]) > 1e-5


def in_forks(command: str, *options: str) -> list[float]:
    """The losses of a line of torchrun, whose ranks are forks."""
    launcher, option, processes, program, *rest = shlex.split(command)
    assert (launcher, option) == ("torchrun", "--nproc-per-node")
    return losses_in(run_program(int(processes), ROOT / program, *rest, *options)[0])


def test_hybrid_stack():
    one, two = (in_forks(line("hybrid_stack.py", processes)) for processes in (1, 2))
    assert len(one) == 8 and one[-1] < 0.5 * one[0]
    for losses in (two, in_forks(line("hybrid_stack.py", 2), "--way", "heads")):
        np.testing.assert_allclose(losses, one, rtol=1e-5)


@pytest.mark.nightly
def test_grpo_log_probs():
    pytest.importorskip("transformers", reason="needs transformers; ci/integrations installs it")
    one, two = start_all("grpo_log_probs.py", ["2"])
    assert len(one) == 8
    for losses in (one[:4], one[4:]):  # before the first step of a round the policy is the old one
        assert abs(losses[0]) < 1e-5 and losses == sorted(losses, reverse=True) and losses[-1] < -0.05
    np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5)


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("trl_sft.py", "hf_hybrid.py")]


@pytest.mark.parametrize("name", ["hf_trainer.py", *NIGHTLY])
def test_trainers(name):
    pytest.importorskip("trl", reason="needs transformers and trl; ci/integrations installs them")
    if name == "hf_hybrid.py":
        pytest.importorskip("transformers", minversion="5.24", reason="its layers call functions that may know plans")
    one, two = start_all(name, ["2"])
    assert len(one) == 8 + (name == "hf_trainer.py") and one[7] < 0.8 * one[0]
    np.testing.assert_allclose(two, one, rtol=1e-5)


def test_the_page_of_transformers_shows_the_loop():
    """``test_trl`` runs the page."""
    page = ROOT / "docs" / "frameworks" / "huggingface.md"
    program = (EXAMPLES / "hf_loop.py").read_text()
    assert any(block.text.startswith("import argparse") and program.endswith(block.text) for block in blocks(page))


@pytest.mark.nightly
def test_wrong_sizes_are_sentences():
    with pytest.raises(AssertionError, match="--packs is 3; give a multiple of the 2 replicas."):
        start(line("dit_video.py", 2), ROOT, "--cp-size", "1", "--packs", "3")


def check_titan(losses: list[float], said: str, steps: int) -> None:
    assert "Applied MagiSelectiveAC" in said and "'cp'" in said
    assert len(losses) == steps and losses[-1] < 0.9 * losses[0]


@pytest.mark.nightly
def test_torchtitan_configs_on_cpus(tmp_path):
    pytest.importorskip("torchtitan", reason="needs torchtitan; ci/integrations installs it")
    options = ("--training.steps", "4", "--dump_folder", str(tmp_path), *FOR_OLD_TORCH)
    check_titan(*start(line(TITAN, 2), EXAMPLES, *options), 4)


@pytest.mark.nightly
def test_the_page_of_torchtitan(tmp_path):
    """The command is the page's own. torchtitan is told of CPUs where the interpreter starts."""
    pytest.importorskip("torchtitan", reason="needs torchtitan; ci/integrations installs it")
    page = ROOT / "docs" / "frameworks" / "torchtitan.md"
    (configs,) = (block.text for block in blocks(page) if block.language == "python")
    assert (EXAMPLES / TITAN).read_text().endswith(configs), "the page and the example differ"
    here, told = tmp_path / "here", tmp_path / "told"
    here.mkdir()
    told.mkdir()
    (here / "my_configs.py").write_text(configs)
    (told / "torchtitan_on_cpu.py").write_text((EXAMPLES / "torchtitan_on_cpu.py").read_text())
    (told / "sitecustomize.py").write_text("import torchtitan_on_cpu\n\ntorchtitan_on_cpu.know_cpus()\n")
    (command,) = (x for x in commands(page) if "-m torchtitan.train" in x)
    check_titan(*start(command, here, *FOR_OLD_TORCH, path=told), 10)
