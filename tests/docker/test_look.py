# SPDX-License-Identifier: Apache-2.0
"""What ``docker/look.py`` runs in an image must run there: beside an installed package, without a checkout."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docker"))
import look  # noqa: E402


@pytest.mark.parametrize("folder", look.TESTS)
def test_no_test_of_the_image_reads_the_native_sources(folder):
    files = sorted((ROOT / "tests" / folder).rglob("*.py"))
    assert files, f"docker/look.py runs tests/{folder}, which is empty"
    reads = [f.name for f in files if re.search(r"""["'/]csrc\b""", f.read_text())]
    assert not reads, f"{reads} of tests/{folder} read csrc, which images do not have; move them to tests/kernels"
