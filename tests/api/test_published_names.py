# SPDX-License-Identifier: Apache-2.0
"""Every import path and name of the published 1.1.x API resolves, and takes the arguments that it took."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import magi_attention

HERE = Path(__file__).parent
SECTIONS = re.findall(r"\[(\S+)\]\n([^\[]+)", (HERE / "published_names.txt").read_text())
SIGNATURES = re.findall(r"^(\S+):(\S+)\((.*)\)$", (HERE / "published_signatures.txt").read_text(), re.M)


@pytest.mark.parametrize(("module", "names"), SECTIONS, ids=[module for module, _ in SECTIONS])
def test_published_import_paths(module, names) -> None:
    found = importlib.import_module(module)
    missing = [name for name in names.split() if not hasattr(found, name)]
    assert not missing


@pytest.mark.parametrize(("module", "name", "parameters"), SIGNATURES, ids=[f"{m}:{n}" for m, n, _ in SIGNATURES])
def test_published_parameters(module, name, parameters) -> None:
    """Names and order; after ``*`` come keywords. Ours may take more after them."""
    thing = importlib.import_module(f"magi_attention.{module}")
    for part in name.split("."):
        thing = getattr(thing, part)
    ours = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
    positional = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_position, _, by_keyword = (part.replace(",", " ").split() for part in parameters.partition("*"))
    assert positional[: len(by_position)] == by_position
    assert set(by_keyword) <= {p.name for p in ours if p.kind is not p.VAR_KEYWORD}
    more = [p for p in ours if p.name not in {*by_position, *by_keyword}]
    assert all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in more), more


@pytest.mark.parametrize("module", ("comm", "common", "magi_attn_ext", "testing"))
def test_a_package_has_what_it_exports_and_nothing_else(module) -> None:
    found = importlib.import_module(f"magi_attention.{module}")
    assert found.__all__ and all(hasattr(found, name) for name in found.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        found.nothing  # noqa: B018


def test_the_list_is_whole() -> None:
    assert len(SECTIONS) >= 24 and sum(len(names.split()) for _, names in SECTIONS) >= 150
    assert len(SIGNATURES) >= 40


def test_version_is_what_clients_branch_on() -> None:
    assert magi_attention.__version__ == "1.1.1"
    assert magi_attention.comm.dsink_all_reduce_op() == "none"
