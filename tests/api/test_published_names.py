# SPDX-License-Identifier: Apache-2.0
"""Every import path and name of the published 1.1.x API resolves."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import magi_attention

SECTIONS = re.findall(r"\[(\S+)\]\n([^\[]+)", (Path(__file__).parent / "published_names.txt").read_text())


@pytest.mark.parametrize(("module", "names"), SECTIONS, ids=[module for module, _ in SECTIONS])
def test_published_import_paths(module, names) -> None:
    found = importlib.import_module(module)
    missing = [name for name in names.split() if not hasattr(found, name)]
    assert not missing


def test_the_list_is_whole() -> None:
    assert len(SECTIONS) >= 24 and sum(len(names.split()) for _, names in SECTIONS) >= 150


def test_version_is_what_clients_branch_on() -> None:
    assert magi_attention.__version__ == "1.1.1"
    assert magi_attention.comm.dsink_all_reduce_op() == "none"
