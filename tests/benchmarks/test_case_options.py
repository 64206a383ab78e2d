# SPDX-License-Identifier: Apache-2.0
"""The options that the kernel benchmarks share: the same words mean the same cases."""

from __future__ import annotations

import argparse

import masks
import pytest
from case_options import add_case_options, cases_of

from magi_attention.common.mask import Mask


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
