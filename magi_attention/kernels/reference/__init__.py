# SPDX-License-Identifier: Apache-2.0
"""Attention in PyTorch, on any device."""
