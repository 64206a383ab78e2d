# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's GPTModel and HybridModel with our core_attention: against a dense mask, and over ranks against one
process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core; ci/integrations installs it")

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from starting import launch  # noqa: E402

from magi_attention.errors import ContractError, UnsupportedError  # noqa: E402
from magi_attention.integrations.megatron import CoreAttention  # noqa: E402

SCRIPT = "use_megatron.py"


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict:
    return launch(tmp_path_factory.mktemp("one"), {"tp": 1, "cp": 1}, 1, SCRIPT)


def compare(got: dict, want: dict, with_norms: bool = True) -> None:
    assert got.keys() == want.keys() and len(got) > 10
    for case in want.keys() - {"processes"}:
        a, b = got[case], want[case]
        assert abs(a["loss"] - b["loss"]) < 1e-5 * b["loss"], case
        for name, norm in b["norms"].items() if with_norms else ():
            assert abs(a["norms"][name] - norm) <= 1e-4 * norm + 1e-9, (case, name)


def test_one_process_is_as_a_dense_mask(one, tmp_path):
    compare(one, launch(tmp_path, {"tp": 1, "cp": 1, "dense": True}, 1, SCRIPT))


@pytest.mark.nightly
def test_context_parallel_ranks(one, tmp_path):
    got = launch(tmp_path, {"tp": 1, "cp": 2}, 2, SCRIPT)
    compare(got, one)
    for case in one.keys() - {"processes"}:
        assert np.allclose(got[case]["top"], one[case]["top"], rtol=1e-5)


@pytest.mark.nightly
def test_tensor_parallel_ranks(one, tmp_path):
    got = launch(tmp_path, {"tp": 2, "cp": 1}, 2, SCRIPT)
    compare(got, one, with_norms=False)  # parameters are halves there
    for case in one.keys() - {"processes"}:
        assert np.allclose(got[case]["top"], one[case]["top"][:2], rtol=1e-5)


def test_both(one, tmp_path):
    compare(launch(tmp_path, {"tp": 2, "cp": 2}, 4, SCRIPT), one, with_norms=False)


def make(**changes) -> CoreAttention:
    settings = {"attention_dropout": 0.0, **changes.pop("config", {})}
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    config = TransformerConfig(**sizes, use_cpu_initialization=True, **settings)

    class Groups:
        tp = type("Group", (), {"size": staticmethod(lambda: 1)})

    given = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self", **changes}
    return CoreAttention(config, pg_collection=Groups, **given)


def test_refusals_are_sentences():
    for changes, word in (
        ({"config": {"attention_dropout": 0.1}}, "attention_dropout"),
        ({"attention_type": "cross"}, "'cross'"),
        ({"k_channels": 24, "v_channels": 16}, "Multi-latent"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "mask of tensors"),
    ):
        with pytest.raises(UnsupportedError, match=word):
            make(**changes)
    q = torch.randn(8, 1, 4, 8)
    with pytest.raises(UnsupportedError, match="attention_bias"):
        make()(q, q, q, None, attention_bias=q)
    with pytest.raises(UnsupportedError, match="packed_seq_params"):
        make(attn_mask_type=AttnMaskType.no_mask)(q, q, q, torch.ones(1))
    for kind in (AttnMaskType.padding_causal, AttnMaskType.padding):
        with pytest.raises(UnsupportedError, match="reads it"):
            make()(q, q, q, torch.ones(1), attn_mask_type=kind)
    assert not torch.equal(make()(q, q, q, None), make()(q, q, q, None, attn_mask_type=AttnMaskType.no_mask))
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 6]))
    with pytest.raises(ContractError, match="cu_seqlens_q ends at 6, but the sequence has 1 x 8"):
        make()(q[:, 0], q[:, 0], q[:, 0], None, packed_seq_params=packed)


def test_batches_of_several_sequences():
    q = torch.randn(8, 3, 4, 8)
    core = make()
    out = core(q, q, q, None)
    assert torch.equal(out[:, 1:2], core(q[:, 1:2], q[:, 1:2], q[:, 1:2], None)) and out.shape == (8, 3, 32)
