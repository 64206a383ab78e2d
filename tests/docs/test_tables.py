# SPDX-License-Identifier: Apache-2.0
"""Tables of pages are those of the code, and the table of GPUs has each GPU that has kernels."""

from __future__ import annotations

import sys

import pytest
from pages import ROOT

from magi_attention.native.families import FAMILIES, GPU_ROWS, row_of, was_run

sys.path.insert(0, str(ROOT / "docs"))

import make_tables  # noqa: E402


@pytest.mark.parametrize("name", make_tables.tables())
def test_the_page_has_the_table_of_the_code(name):
    page = (ROOT / name).read_text(encoding="utf-8")
    assert make_tables.with_table(page, make_tables.tables()[name]) == page, "run python docs/make_tables.py"


def test_a_page_without_marks_is_refused():
    with pytest.raises(SystemExit, match="no marks"):
        make_tables.with_table("# A page", "| a |")


def test_every_gpu_with_kernels_has_one_row():
    listed = [c for row in GPU_ROWS for c in row.capabilities]
    assert sorted(listed) == sorted({c for family in FAMILIES for c in family.capabilities})
    assert was_run((9, 0)) and not was_run((8, 0)) and not was_run((7, 5))
    assert row_of((7, 5)) is None and row_of((12, 1)).install == "sm120"
