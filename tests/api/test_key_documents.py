# SPDX-License-Identifier: Apache-2.0
"""Labels and positions of documents by keys of the published API: as a plan's."""

from __future__ import annotations

import pytest
import torch

from magi_attention import api
from magi_attention.common.ranges import AttnRanges
from magi_attention.errors import ContractError, UnknownKeyError

CU = torch.tensor([0, 5, 12, 13, 30], dtype=torch.int32)


@pytest.fixture
def key(group):
    config = api.DistAttnConfig(api.DispatchConfig(chunk_size=4))
    return api.magi_attn_varlen_key(CU, CU, 2, 1, 8, 0, group, causal=True, dist_attn_config=config)


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_labels_and_positions_of_a_key(key, depth) -> None:
    plan = api.make_plan(api.Mask.varlen(CU, causal=True), 1)
    tokens = torch.arange(30).view(30, 1) + 100
    local = api.dispatch(tokens, key)
    got = api.get_labels(local.t(), key, CU, depth, dim=1).t()
    assert torch.equal(api.undispatch(got, key), plan.labels(tokens, depth))
    places = api.undispatch(api.get_position_ids(key, CU).cpu(), key)
    assert torch.equal(places, plan.positions(per_document=True))
    assert torch.equal(api.undispatch(api.get_position_ids(key).cpu(), key), torch.arange(30))


def test_documents_of_a_key_are_given(group) -> None:
    """Two keys over the same slices are one, whatever the documents, so a key does not know them."""
    whole = AttnRanges.from_ranges([[0, 30]])
    key = api.magi_attn_flex_key(whole, whole, "causal", 30, 30, 2, 1, 8, 0, group)
    one = api.get_labels(torch.arange(30), key, [0, 30])
    two = api.get_labels(torch.arange(30), key, [0, 4, 30])
    assert one[3] == 4 and two[3] == -100 and one[-1] == two[-1] == -100
    with pytest.raises(ContractError, match="end at 29"):
        api.get_labels(torch.arange(30), key, [0, 29])
    api.clear_cache()
    with pytest.raises(UnknownKeyError):
        api.get_labels(torch.arange(30), key, CU)
