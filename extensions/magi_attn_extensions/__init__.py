# SPDX-License-Identifier: Apache-2.0
"""The published extensions of magi_attention, by their names: FlashAttention with sinks, and top-k attention.

``magi_attn_extensions.MSA`` has block-sparse attention over a context-parallel group; it is imported by its own name.
"""

from magi_attn_extensions import _found  # noqa: F401
from magi_attn_extensions._version import __version__
from magi_attn_extensions.dsa_interface import dsa_attn_func
from magi_attn_extensions.fa2_interface_with_sink import (
    fa2_func_with_sink,
    fa2_kvpacked_func_with_sink,
    fa2_qkvpacked_func_with_sink,
    fa2_varlen_func_with_sink,
    fa2_varlen_kvpacked_func_with_sink,
    fa2_varlen_qkvpacked_func_with_sink,
)
from magi_attn_extensions.fa3_interface_with_sink import (
    fa3_func_with_sink,
    fa3_qkvpacked_func_with_sink,
    fa3_varlen_func_with_sink,
)
from magi_attn_extensions.fa4_interface_with_sink import fa4_func_with_sink, fa4_varlen_func_with_sink

__all__ = [
    "__version__",
    "dsa_attn_func",
    "fa2_func_with_sink",
    "fa2_kvpacked_func_with_sink",
    "fa2_qkvpacked_func_with_sink",
    "fa2_varlen_func_with_sink",
    "fa2_varlen_kvpacked_func_with_sink",
    "fa2_varlen_qkvpacked_func_with_sink",
    "fa3_func_with_sink",
    "fa3_qkvpacked_func_with_sink",
    "fa3_varlen_func_with_sink",
    "fa4_func_with_sink",
    "fa4_varlen_func_with_sink",
]
