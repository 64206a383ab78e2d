# SPDX-License-Identifier: Apache-2.0
"""The two entry points that programs look for, and that ``magi_attention.functional.fa4`` does not call here."""

from typing import Any, NoReturn

from magi_attention.errors import UnsupportedError


def _flash_attn_forward(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError("The kernels of ffa_fa3 are not here; call magi_attention.functional.fa4.fa4_fwd.")


def _flash_attn_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError("The kernels of ffa_fa3 are not here; call magi_attention.functional.fa4.fa4_bwd.")
