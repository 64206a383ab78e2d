# SPDX-License-Identifier: Apache-2.0
"""Top-level packages that programs ask for before they use the published package; not importable by default.

``export PYTHONPATH=$(python -m magi_attention.compat.on_path)${PYTHONPATH:+:$PYTHONPATH}`` makes them so. Today that is
``flash_attn_cute``: on Hopper, VeOmni looks there for kernels and their build flags before it calls
``magi_attention.functional.fa4``, which needs none of it here.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
