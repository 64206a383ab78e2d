# SPDX-License-Identifier: Apache-2.0
"""Attention beside a put: that of its own k and v, launched behind all checks; as far as the library gets without a
GPU, on which ``tests/gpu/test_one_launch_gpu.py`` runs it."""

from __future__ import annotations

import pytest

from magi_attention.errors import MagiError, UnsupportedError
from magi_attention.native import abi
from magi_attention.native.ffa import FfaLibrary

ROWS, HEADS, DIM = 128, 2, 64
FINE, ODD = 1 << 20, (1 << 20) + 8  # addresses that nobody gets to read; rows begin at multiples of 16 bytes


def library() -> FfaLibrary:
    try:
        return FfaLibrary.ahead()
    except UnsupportedError as error:
        pytest.skip(str(error))


def attention(kind: str, k: int, v: int, **fields: int) -> bytes:
    names = {"fwd": ("q", "k", "v", "out"), "bwd": ("q", "k", "v", "out", "dout")}[kind]
    made = {"fwd": abi.FfaFwdParams, "bwd": abi.FfaBwdParams}[kind]
    strides = {f"{x}_stride_token": HEADS * DIM for x in names} | {f"{x}_stride_head": DIM for x in names}
    only = {
        "fwd": {"out_dtype": abi.BF16, "pack": 1, "tile_tokens": 128},
        "bwd": {"grad_dtype": abi.BF16, "block_m": 64},
    }
    common = dict(
        version=abi.ABI_VERSION, dtype=abi.BF16, total_q=ROWS, total_k=3 * ROWS, heads_q=HEADS, heads_kv=HEADS,
        head_dim=DIM, head_dim_v=DIM, softmax_scale=0.125, q=FINE, k=k, v=v, out=FINE, lse=FINE, plan=FINE,
        workspace=FINE,
    )  # fmt: skip
    gradients = {"dout": FINE, "dq": FINE, "dk": FINE, "dv": FINE} if kind == "bwd" else {}
    return bytes(made(**{**common, **strides, **only[kind], **gradients, **fields}))


def put() -> bytes:
    p = abi.SymmPutParams(version=abi.ABI_VERSION, rank=0, world=2, num_tensors=2, num_ctas=1)
    p.buffer = abi.SymmBuffer(FINE, FINE)
    for t in range(2):
        p.row_bytes[t] = p.source_stride[t] = 2 * HEADS * DIM
    return bytes(p)


REMOTE = abi.FfaRemote(
    version=abi.ABI_VERSION, world=2, local_keys=ROWS, base=2 * ROWS, rows=ROWS, wire_dtype=abi.BF16, summed=FINE,
    senders=FINE, grads=abi.SymmBuffer(FINE, FINE),
)  # fmt: skip


@pytest.mark.parametrize("kind", ("fwd", "bwd"))
def test_the_push_gets_the_keys_of_the_call(kind: str) -> None:
    ffa = library()
    call = {"fwd": lambda *all: ffa.forward_remote_raw(*all, 0), "bwd": ffa.backward_remote_raw}[kind]

    def error(params: bytes, put_buffer: bytes | None) -> str:
        with pytest.raises(MagiError) as info:
            ffa.check(call(params, bytes(REMOTE), put_buffer), "Attention")
        return str(info.value)

    assert "Rows of tensor 0 " in error(attention(kind, ODD, FINE), put())
    assert "Rows of tensor 1 " in error(attention(kind, FINE, ODD), put())
    assert "Rows of tensor" not in error(attention(kind, ODD, ODD), None), "there is no put"
    assert "total_k" in error(attention(kind, ODD, FINE, total_k=ROWS), put()), (
        "nothing is sent before a call is checked"
    )
