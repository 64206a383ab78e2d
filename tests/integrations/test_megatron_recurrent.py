# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets and Mamba layers of Megatron-Core's HybridModel: packed documents on one, two and three ranks,
beside each document alone through Megatron's own layers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core; ci/integrations installs it")

from starting import launch  # noqa: E402

SCRIPT = "use_megatron_recurrent.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    settings = {"own": True, "deterministic": False}
    return launch(tmp_path_factory.mktemp("alone"), settings, 1, SCRIPT)


@pytest.mark.parametrize(
    ("ranks", "is_deterministic"),
    [
        (1, False),
        (2, False),
        pytest.param(3, False, marks=pytest.mark.nightly),
        pytest.param(2, True, marks=pytest.mark.nightly),
    ],
)
def test_packed_documents_are_as_alone(alone, tmp_path, ranks: int, is_deterministic: bool) -> None:
    """Heads do not divide by two ranks. In the deterministic mode the recurrence is Megatron's own, in chunks."""
    assert len(alone["found"]) == 1 and "use_magi of magi_attention.integrations.megatron" in alone["found"][0]
    assert_as_alone(alone, launch(tmp_path, {"own": False, "deterministic": is_deterministic}, ranks, SCRIPT))


@pytest.mark.nightly
def test_with_tensor_parallel_ranks(tmp_path) -> None:
    """Two, with two context-parallel ranks each. Gradients are summed over all four."""
    settings = {"tp": 2, "deterministic": False}
    alone = launch(tmp_path / "alone", {**settings, "own": True}, 2, SCRIPT)
    assert_as_alone(alone, launch(tmp_path, {**settings, "own": False}, 4, SCRIPT))


def assert_as_alone(alone: dict, got: dict) -> None:
    assert not got["found"]
    assert abs(got["loss"] - alone["loss"]) <= 1e-5 * alone["loss"] and got["grads"].keys() == alone["grads"].keys()
    for name, values in alone["grads"].items():
        want, found = torch.tensor(values), torch.tensor(got["grads"][name])
        assert (found - want).norm() <= 1e-5 * want.norm() and want.norm() > 0, name
