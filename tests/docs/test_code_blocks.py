# SPDX-License-Identifier: Apache-2.0
"""Python blocks of the README and of the pages run, on two ranks over gloo.

The blocks of a page share one namespace, in their order, and a folder to write to. What a reader would have, such as
tokens, is made by a comment of the page that begins with "before the code:". Pages that say so run on a GPU.
"""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from pages import FRAMEWORKS, GPU_MARK, OWN, README, ROOT, blocks, name_of, setup

from magi_attention.testing.spawn import run_processes

WITH_CODE = [
    page for page in (README, *OWN)
    if page.parent != FRAMEWORKS and any(block.language == "python" for block in blocks(page))
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
