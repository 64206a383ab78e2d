# SPDX-License-Identifier: Apache-2.0
"""The programs of these tests lie beside the package, and what is right is said by the oracle of attention."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "benchmarks/sparse", "ci", "tests/functional")]
