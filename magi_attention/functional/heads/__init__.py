# SPDX-License-Identifier: Apache-2.0
"""Heads in parts: groups with ranks of their own, and chunks one after the other."""
