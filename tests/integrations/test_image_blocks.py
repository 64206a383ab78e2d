# SPDX-License-Identifier: Apache-2.0
"""The masks of texts with images are those that transformers makes for Gemma 3."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers; ci/integrations installs it")

from transformers import Gemma3TextConfig  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import (  # noqa: E402
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)

from magi_attention.api import Mask  # noqa: E402


def image_ranges(token_type_ids: torch.Tensor) -> np.ndarray:
    """Runs of ones, as docs/image-blocks.md finds them."""
    is_image = np.append(token_type_ids.numpy() == 1, False)
    return np.flatnonzero(np.diff(is_image, prepend=False)).reshape(-1, 2)


@pytest.mark.parametrize("seed", range(8))
def test_gemma3(seed):
    rng = np.random.default_rng(seed)
    window = int(rng.integers(1, 12))
    types = torch.from_numpy(np.repeat(rng.integers(0, 2, 12), rng.integers(1, 9, 12)))
    total = len(types)
    config = Gemma3TextConfig(sliding_window=window, hidden_size=8, num_hidden_layers=2, attn_implementation="sdpa")
    theirs = create_masks_for_vision_model(
        config, torch.zeros(1, total, 8), None, None, torch.arange(total)[None],
        get_block_sequence_ids_for_mask(types[None]),
    )  # fmt: skip
    blocks = image_ranges(types)
    for kind, window_of_mask in (("full_attention", (-1, 0)), ("sliding_attention", (window - 1, 0))):
        ours = Mask.causal_with_blocks(total, blocks, window=window_of_mask).check().to_dense()
        assert np.array_equal(ours, theirs[kind][0, 0].numpy()), (seed, window, types.tolist())
