# SPDX-License-Identifier: Apache-2.0
"""Environment variables: typed getters by topic, one registry, one snapshot of all behaviour."""

from magi_attention.env import build, comm, general

__all__ = ["build", "comm", "general"]
