# SPDX-License-Identifier: Apache-2.0
"""``nvtx``: named ranges on a profiler's timeline."""

__all__ = ["nvtx"]
