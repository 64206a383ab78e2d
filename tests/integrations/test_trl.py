# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer with packing over two ranks, which TRL itself refuses, against one process."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="needs trl; ci/integrations installs it")

from starting import assert_same_steps, launch, launch_both  # noqa: E402


@pytest.mark.parametrize(
    "arguments",
    (
        pytest.param({}, marks=pytest.mark.nightly),
        {"gradient_checkpointing": False, "gradient_accumulation_steps": 2},
    ),
)
def test_packed_documents(tmp_path, arguments):
    settings = {"model": "llama", "arguments": {"max_steps": 10, **arguments}}
    one, two = launch_both(tmp_path, settings, script="train_trl.py")
    assert one["documents"] > 2, "nothing was packed"
    assert_same_steps(one, two, 10)
    for x, y in zip(one["log"], two["log"]):
        for name in ("mean_token_accuracy", "entropy"):
            assert abs(x.get(name, 0) - y.get(name, 0)) < 1e-5


def test_the_page_runs(tmp_path):
    assert launch(tmp_path, {"page": "docs/frameworks/huggingface.md"}, 2, "run_page.py")["blocks"] == 3
