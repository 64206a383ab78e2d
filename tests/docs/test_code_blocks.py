# SPDX-License-Identifier: Apache-2.0
"""Python blocks of the README and of the pages run, on two ranks over gloo.

The blocks of a page share one namespace, in their order, and a folder to write to. What a reader would have, such as
tokens, is made by a comment of the page that begins with "before the code:". Pages that say so run on a GPU. The code
of the first page is a program, which its own command starts.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile

import pytest
import torch
from pages import FRAMEWORKS, GPU_MARK, OWN, README, ROOT, blocks, commands, name_of, setup

from magi_attention.cli.common import child_environment, torchrun
from magi_attention.testing.spawn import run_processes

HOME = ROOT / "docs" / "index.md"
WITH_CODE = [
    page for page in (README, *OWN)
    if page.parent != FRAMEWORKS and page != HOME and any(block.language == "python" for block in blocks(page))
]  # fmt: skip
ON_GPU = [page for page in WITH_CODE if GPU_MARK in page.read_text(encoding="utf-8")]


def run_pages(rank: int, world: int, names: list[str]) -> list[str]:
    """Pages whose blocks ran to their end; the first that does not raises, with the line of the page."""
    here = os.getcwd()
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                run_page(name)
            finally:
                os.chdir(here)
    return names


def run_page(name: str) -> None:
    page = ROOT / name
    space: dict = {"__name__": "page"}
    exec(compile(setup(page), f"{name}, before the code", "exec"), space)
    for block in blocks(page):
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, name, "exec"), space)


def test_there_is_code():
    assert README in WITH_CODE and len(WITH_CODE) >= 3


def test_code_blocks_run_on_two_ranks():
    names = [name_of(page) for page in WITH_CODE if page not in ON_GPU]
    assert run_processes(2, run_pages, names, timeout_s=600) == [names, names]


def test_the_first_page_has_a_program_that_runs_as_copied(tmp_path):
    (code,) = (block.text for block in blocks(HOME) if block.language == "python")
    (words,) = (shlex.split(line) for line in commands(HOME) if line.startswith("torchrun"))
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 11
    (tmp_path / words[-1]).write_text(code)
    command = [sys.executable, *torchrun(int(words[words.index("--nproc-per-node") + 1])), words[-1]]
    done = subprocess.run(command, cwd=tmp_path, env=child_environment(1), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"rank (\d): (\d+) of 4096 tokens, ([\d,]+) pairs", done.stdout))
    pairs = sum(n * (n + 1) // 2 for n in (3000, 200, 896))
    assert [rank for rank, _, _ in said] == ["0", "1"] and sum(int(rows) for _, rows, _ in said) == 4096
    assert sum(int(area.replace(",", "")) for _, _, area in said) == pairs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page", ON_GPU, ids=name_of)
def test_code_blocks_run_on_a_gpu(page):
    assert run_pages(0, 1, [name_of(page)])


def test_odd_sizes_run_on_three_ranks():
    """The page compares with one process by itself; no number in it divides by three."""
    names = ["docs/odd-sizes.md"]
    assert run_processes(3, run_pages, names) == [names] * 3


@pytest.mark.parametrize("page", [README, *OWN], ids=name_of)
def test_other_blocks_have_a_known_language(page):
    assert {block.language for block in blocks(page)} <= {"", "python", "json", "toml"}
