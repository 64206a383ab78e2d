# SPDX-License-Identifier: Apache-2.0
"""Attention by FlashAttention-4, the wheel flash-attn-4."""
