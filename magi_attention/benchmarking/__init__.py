# SPDX-License-Identifier: Apache-2.0
"""Clocks, sweeps of collectives, and a tuner. The published names for timing and plots resolve here, too."""

__all__: list[str] = []
