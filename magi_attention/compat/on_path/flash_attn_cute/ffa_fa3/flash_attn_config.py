# SPDX-License-Identifier: Apache-2.0
"""What the backend behind ``magi_attention.functional.fa4`` computes on Hopper, as build flags of FlashAttention-3."""

_HEAD_DIMS = (64, 96, 128, 192, 256)
_PRESENT = ("BACKWARD", "SM90", "ARBITRARY", "FP16", "SOFTCAP", "VARLEN", *(f"HDIM{d}" for d in _HEAD_DIMS))
_ABSENT = ("FP8", "PAGEDKV", "APPENDKV", "SPLIT")

CONFIG = {
    "build_flags": {
        **{f"FLASHATTENTION_DISABLE_{name}": False for name in _PRESENT},
        **{f"FLASHATTENTION_DISABLE_{name}": True for name in _ABSENT},
    }
}
