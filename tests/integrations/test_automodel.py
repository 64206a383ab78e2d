# SPDX-License-Identifier: Apache-2.0
"""The released nemo-automodel calls this package as it calls the published one."""

from __future__ import annotations

import pytest

pytest.importorskip("nemo_automodel", reason="needs nemo-automodel; ci/integrations installs it")

from starting import launch  # noqa: E402


def test_its_own_integration_on_two_ranks(tmp_path):
    errors = launch(tmp_path, {}, 2, "use_automodel.py")["errors"]
    assert errors["hf"]["loss"] < 1e-4 and errors["hf"]["gradients"] < 2e-2
    assert errors["packed"]["out"] < 1e-2 and errors["tree"]["out"] < 1e-2
