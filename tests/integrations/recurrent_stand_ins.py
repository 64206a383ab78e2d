# SPDX-License-Identifier: Apache-2.0
"""What kernels of flash-linear-attention and mamba_ssm compute, token by token, with their arguments and defaults."""

from __future__ import annotations

import torch
import torch.nn.functional as F

packed_calls: list[str] = []  # names of those that were given several documents at once


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, **_,
):  # fmt: skip
    """Also ``chunk_kda``, whose g has a column for each of k."""
    if cu_seqlens is not None and len(cu_seqlens) > 2:
        packed_calls.append("chunk_gated_delta_rule" if g.dim() == 3 else "chunk_kda")
        assert len(q) == 1 and cu_seqlens.dtype == torch.int64
    rows = v.shape[1]
    bounds = [0, rows] if cu_seqlens is None else cu_seqlens.tolist()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if q.shape[2] != v.shape[2]:
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    decay = (g if g.dim() == 4 else g[..., None]).exp()[..., None]
    if initial_state is None:
        initial_state = v.new_zeros((len(bounds) - 1, v.shape[2], q.shape[-1], v.shape[-1]))
    out, finals = [], []
    for begin, end, state in zip(bounds[:-1], bounds[1:], initial_state):
        for t in range(begin, end):
            state = decay[0, t] * state
            new = beta[0, t][:, None] * (v[0, t] - torch.einsum("hk,hkv->hv", k[0, t], state))
            state = state + torch.einsum("hk,hv->hkv", k[0, t], new)
            out.append(scale * torch.einsum("hk,hkv->hv", q[0, t], state))
        finals.append(state)
    return torch.stack(out)[None], torch.stack(finals) if output_final_state else None


def chunk_rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, cu_seqlens=None):
    """S = (Diag(exp(w)) + b a^T) S + k v^T, and out = S^T r: Peng et al. 2025, arXiv:2503.14456."""
    bounds, out, finals = cu_seqlens.tolist(), [], []
    for begin, end, state in zip(bounds[:-1], bounds[1:], initial_state):
        for t in range(begin, end):
            of_a = torch.einsum("hk,hkv->hv", a[0, t], state)
            state = w[0, t].exp()[..., None] * state + b[0, t][..., None] * of_a[:, None]
            state = state + torch.einsum("hk,hv->hkv", k[0, t], v[0, t])
            out.append(scale * torch.einsum("hk,hkv->hv", r[0, t], state))
        finals.append(state)
    return torch.stack(out)[None], torch.stack(finals) if output_final_state else None


def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    """S = Diag(exp(g)) S + k v^T: what RWKV-7 does without its a."""
    nothing, scale = torch.zeros_like(k), q.shape[-1] ** -0.5 if scale is None else scale
    return chunk_rwkv7(q, g, k, v, nothing, nothing, scale, initial_state, output_final_state, cu_seqlens)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, state_dtype=None,
):  # fmt: skip
    """The initial state is that of the document with number 0, as in ``ssd_state_passing`` of mamba_ssm 2."""
    if seq_idx is None:
        seq_idx = torch.zeros(x.shape[:2], dtype=torch.int32)
    elif int(seq_idx.max()):
        packed_calls.append("mamba_chunk_scan_combined")
    assert len(x) == 1 and seq_idx.dtype == torch.int32 and z is None
    step = dt if dt_bias is None else dt + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    heads, groups = x.shape[2], x.shape[2] // B.shape[2]
    state = x.new_zeros((heads, x.shape[3], B.shape[3])) if initial_states is None else initial_states[0]
    number, out = 0, []
    for t in range(x.shape[1]):
        if seq_idx[0, t] != number:
            state, number = torch.zeros_like(state), int(seq_idx[0, t])
        b, c = (m[0, t].repeat_interleave(groups, 0) for m in (B, C))
        state = (A * step[0, t]).exp()[:, None, None] * state
        state = state + torch.einsum("h,hp,hn->hpn", step[0, t], x[0, t], b)
        skip = 0 if D is None else D[:, None] * x[0, t]
        out.append(torch.einsum("hpn,hn->hp", state, c) + skip)
    out = torch.stack(out)[None]
    return (out, state[None]) if return_final_states else out


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, seq_idx=None, activation="silu", headdim=None,
    ngroups=1, norm_before_gate=True, state_dtype=None,
):  # fmt: skip
    """One document: the convolution, the scan and the gate of Mamba-2."""
    assert seq_idx is None and activation == "silu" and not norm_before_gate
    inner, (channels, width) = headdim * len(A), conv1d_weight.shape
    z, xbc, dt = zxbcdt.split([inner, channels, len(A)], dim=-1)
    padded = F.pad(xbc.mT, (width - 1, 0))
    xbc = F.silu(F.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=channels)).mT
    x, B, C = xbc.split([inner, *[(channels - inner) // 2] * 2], dim=-1)
    B, C = (part.unflatten(-1, (ngroups, -1)) for part in (B, C))
    out = mamba_chunk_scan_combined(
        x.unflatten(-1, (len(A), headdim)), dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, dt_softplus=True
    )
    return out.flatten(2) * F.silu(z)


class RMSNorm(torch.nn.Module):
    """The norm of ``mamba_ssm.ops.triton.layernorm_gated``, over groups of channels."""

    def __init__(self, hidden_size, eps, group_size, norm_before_gate, device, dtype) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x):
        groups = x.unflatten(-1, (-1, self.group_size))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight
