# SPDX-License-Identifier: Apache-2.0
"""Peers of the sparse benchmark that are wheels, on stand-ins that do what the wheels' docstrings say, by a matrix."""

import sys
from types import ModuleType

import pytest
import sparse_bench
import sparse_cases
import sparse_wheels
import torch
from kernel import Result, prepare
from peers import Unfit
from peers_backward import by_autograd
from sparse_check import SparseBackwardCheck, SparseForwardCheck

TOKENS = 256


def attention(q, k, v, sees):
    """(out, lse) of (T, H, D), with ``sees`` (H or 1, T, S)."""
    logits = (torch.einsum("thd,shd->hts", q, k.expand(-1, q.shape[1], -1)) * q.shape[2] ** -0.5).masked_fill(
        ~sees, float("-inf")
    )
    return torch.einsum("hts,shd->thd", logits.softmax(2), v.expand(-1, q.shape[1], -1)), logits.logsumexp(2)


def seen_blocks(index, nums, size, layout, **_):
    assert layout == "bshd" and index.dtype == nums.dtype == torch.int32
    sees = torch.zeros(*index.shape[1:3], TOKENS // size, dtype=torch.bool)
    for (head, row), count in zip(torch.cartesian_prod(*map(torch.arange, nums[0].shape)).tolist(), nums[0].flatten()):
        sees[head, row, index[0, head, row, :count].long()] = True
    return sees.repeat_interleave(size, 1).repeat_interleave(size, 2)


def block_forward(q, k, v, *, q2k_block_index, q2k_block_nums, sparse_block_size, layout):
    out, lse = attention(q[0], k[0], v[0], seen_blocks(q2k_block_index, q2k_block_nums, sparse_block_size, layout))
    return {"o_tensor": out[None], "lse_tensor": lse[None]}


def block_backward(dout, q, k, v, out, lse, **lists):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again = block_forward(*leaves, **lists)
    assert torch.equal(again["o_tensor"], out) and torch.equal(again["lse_tensor"], lse)
    grads = torch.autograd.grad(again["o_tensor"], leaves, dout)
    return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), grads))


def seen_keys(indices, keys):
    sees = torch.zeros(len(indices), keys + 1, dtype=torch.bool)
    return sees.scatter_(1, torch.where(indices < 0, keys, indices).long(), True)[None, :, :-1]


def sparse_backward(q, kv, out, dout, lse, attn_sink, topk_idxs):
    assert topk_idxs.dtype == torch.int32 and kv.dim() == 2 and (attn_sink == float("-inf")).all()
    leaves = [x.detach().requires_grad_() for x in (q, kv)]
    with torch.enable_grad():
        again, of = attention(leaves[0], leaves[1][:, None], leaves[1][:, None, :512], seen_keys(topk_idxs, len(kv)))
    torch.testing.assert_close(of.T, lse)
    dq, dkv = torch.autograd.grad(again, leaves, dout)
    return {"dq": dq, "dkv": dkv, "d_sink": None}


def sparse_forward(q, kv, indices, sm_scale, d_v):
    assert sm_scale == q.shape[2] ** -0.5 and indices.shape[:2] == (len(q), 1)
    out, lse = attention(q, kv, kv[..., :d_v], seen_keys(indices[:, 0], len(kv)))
    return out, None, lse


@pytest.fixture(autouse=True)
def wheels(monkeypatch):
    modules = {
        "cudnn.block_sparse_attention": dict(
            block_sparse_attention_forward=block_forward, block_sparse_attention_backward=block_backward
        ),
        "cudnn.deepseek_sparse_attention.sparse_attention_backward.api": dict(
            sparse_attention_backward_wrapper=sparse_backward
        ),
        "flash_mla": dict(flash_mla_sparse_fwd=sparse_forward),
    }
    for path, names in modules.items():
        parts = path.split(".")
        for depth in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)


@pytest.mark.parametrize(
    "peer, mask, directions",
    (
        (sparse_wheels._cudnn_bsa, "b64_random_0.5", (True, False)),
        (sparse_wheels._cudnn_bsa, "b128_window", (True, False)),
        (sparse_wheels._cudnn_dsa, "dsa_64", (False,)),
        (sparse_wheels._flash_mla, "dsa_64", (True,)),
    ),
)
def test_a_peer_is_right(peer, mask, directions):
    case = sparse_cases.make_case(mask, TOKENS)
    words = "--heads 2 2 --index-heads 2 --head-dim 16 --dtype fp32".split()
    *tensors, dout = sparse_bench.inputs_of(case, sparse_bench.make_parser().parse_args(words), "cpu", has_dout=True)
    for is_forward in (True, False):
        inputs = tensors if is_forward else [*tensors, dout]
        check = (SparseForwardCheck if is_forward else SparseBackwardCheck)(case, *inputs)
        result = Result(mask, TOKENS, "peer")
        made = {"peer": peer if is_forward else by_autograd(peer, is_both=False)}
        found = prepare(case, inputs, made, {"peer": result}, check)
        assert bool(found) is (is_forward in directions), result.reason
        assert not found or result.error < 1e-4


def test_what_a_peer_does_not_take():
    blocks, keys = (sparse_cases.make_case(m, TOKENS) for m in ("b16_window", "dsa_64"))
    q, k = torch.zeros(TOKENS, 4, 16), torch.zeros(TOKENS, 2, 16)
    for peer, v, case in (
        (sparse_wheels._cudnn_bsa, k, blocks), (sparse_wheels._cudnn_bsa, None, keys),
        (sparse_wheels._cudnn_dsa, k, blocks), (sparse_wheels._cudnn_dsa, None, keys),
        (sparse_wheels._flash_mla, k, blocks),
    ):  # fmt: skip
        with pytest.raises(Unfit):
            peer(q, k, v, case)
    with pytest.raises(Unfit, match="as many kv heads"):
        sparse_wheels._cudnn_bsa(q.requires_grad_(), k, k, sparse_cases.make_case("b64_window", TOKENS))
