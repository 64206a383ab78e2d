# SPDX-License-Identifier: Apache-2.0
"""What ``validate`` finds in configs and models that have one thing wrong each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from magi_attention.integrations.validate import Finding, validate

GOOD = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "_attn_implementation": "magi"}


class Mesh:
    """A DeviceMesh of 2 x 2 needs four processes; only its names and sizes are read."""

    mesh_dim_names = ("dp", "cp")

    def size(self, dim: int) -> int:
        return (2, 4)[dim]


class GatedDeltaNet(nn.Module):
    pass


def findings(model: nn.Module | None = None, mesh=None, **changes) -> list[Finding]:
    return validate(model or nn.Linear(4, 4), mesh or Mesh(), SimpleNamespace(**{**GOOD, **changes}))


def test_nothing_is_found_in_a_good_model():
    assert findings() == []
    assert validate(nn.Linear(4, 4)) == []
    assert findings(nn.Sequential(nn.Conv1d(4, 4, 1))) == []


@pytest.mark.parametrize(
    "changes, word",
    (
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention' mix"),
        ({"is_causal": False}, "not causal"),
        ({"_attn_implementation": "sdpa"}, "attn_implementation='magi'"),
        ({"num_key_value_heads": 3}, "no multiple of 3"),
    ),
)
def test_configs(changes, word):
    (found,) = findings(**changes)
    assert found.level == "error" and word in str(found) and str(found).endswith(".")


@pytest.mark.parametrize("layer", (GatedDeltaNet, lambda: nn.Conv1d(4, 4, 3), lambda: nn.LSTM(4, 4)))
def test_layers_that_mix_tokens(layer):
    model = nn.Sequential(nn.Linear(4, 4), layer())
    (found,) = findings(model)
    assert "mixes neighbouring tokens" in found.text and "first at 1" in found.text
    (alone,) = validate(model, None, SimpleNamespace(**GOOD))  # one rank holds them all, and documents are packed
    assert "leak into each other" in alone.text and "without packing" in alone.remedy


def test_meshes():
    mesh = Mesh()
    mesh.mesh_dim_names = ("dp", "tp")
    (found,) = findings(mesh=mesh)
    assert "none is 'cp'" in found.text
    assert validate(nn.Linear(4, 4), mesh, SimpleNamespace(**GOOD), cp_dim="tp") == []


def test_errors_come_first_and_settings_are_read(monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_FA4_BACKEND", "1")
    monkeypatch.setenv("MAGI_ATTENTION_DETERMINISTIC_MODE", "1")
    found = findings(router_aux_loss_coef=0.1, output_router_logits=True)
    assert [x.level for x in found] == ["error", "warning"] and "experts" in found[1].text


def test_a_gpu_without_kernels_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    (found,) = findings()
    assert found.level == "warning" and "sdpa" in found.text
