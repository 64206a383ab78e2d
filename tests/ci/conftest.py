# SPDX-License-Identifier: Apache-2.0
"""The programs of these tests lie beside the package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("ci", "wheels", "docker", "benchmarks")]
