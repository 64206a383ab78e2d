# SPDX-License-Identifier: Apache-2.0
"""The options that the kernel benchmarks share: the same words mean the same cases."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import builds  # noqa: E402
import kernel  # noqa: E402
import masks  # noqa: E402
from case_options import add_case_options, cases_of  # noqa: E402

from magi_attention.common.mask import Mask  # noqa: E402


def parse(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_case_options(parser, ["full"], "4K", samples=3)
    return parser.parse_args(text.split())


def test_documents_are_drawn_unless_their_length_is_given():
    drawn = [case.documents for case in cases_of(parse(""), "varlen_causal", 3000)]
    assert drawn == [tuple(masks.sample_documents(3000, seed)) for seed in range(3)]
    (case,) = cases_of(parse("--documents 1K"), "varlen_full", 3000)
    assert case.documents == (1024, 1024, 952)
    assert [case.documents for case in cases_of(parse("--documents 1K"), "causal", 3000)] == [(3000,)]


@pytest.mark.parametrize("text, keys", (("", 1024), ("--window 100", 100)))
def test_the_window_is_that_of_mask_peers_and_predicate(text, keys):
    (case,) = cases_of(parse(text), "sliding_window_causal", 3000)
    assert case.window == keys and case.mask.area == Mask.sliding_window(3000, (keys - 1, 0)).area
    sees = case.predicate(lambda x: x)
    assert sees(0, 0, 2000, 2001 - keys) and not sees(0, 0, 2000, 2000 - keys)
    assert next(iter(cases_of(parse(text), "causal", 3000))).window is None


def test_builds_have_masks_of_their_own():
    (case,) = cases_of(parse("--window 100"), "sliding_window_causal", 300)
    area = case.mask.area
    again = builds.anew(case)
    assert again == case and again.mask is not case.mask and again.mask.area == area


@pytest.mark.parametrize("benchmark, more", ((kernel, []), (builds, ["x.so"])), ids=("kernel", "builds"))
def test_both_benchmarks_take_them(benchmark, more):
    options = benchmark.make_parser().parse_args(["--documents", "2K", "--window", "512", *more])
    assert (options.documents, options.window, options.heads) == (2048, 512, (64, 8))
