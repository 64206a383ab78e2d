# SPDX-License-Identifier: Apache-2.0
"""One distributed attention over a random mask: its plan, what each rank does, and whether the results are right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from magi_attention import api
from magi_attention.comm.transport.base import DoneWork, Transport, TransportBase
from magi_attention.common.enum import AttnOverlapMode
from magi_attention.functional.dist_attn import run_backward, run_forward
from magi_attention.functional.runtime import AttnPolicy, AttnRuntime
from magi_attention.kernels import default_registry
from magi_attention.testing.masks import random_slices
from magi_attention.testing.ref_attn import ref_attn_func

NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")
HEADS, DIMS = (8, 2), (64, 32)


@dataclass(frozen=True)
class Case:
    """``degree`` None lets the cost model choose; with 0 everything is fetched first."""

    seed: int
    total: int = 900
    degree: int | None = 1
    dtype: torch.dtype = torch.bfloat16
    hide_tail: bool = False
    prefetch_all: bool = True
    high_precision: bool = False
    has_sink: bool = False
    deterministic: bool = True

    def mask(self) -> api.Mask:
        rng = np.random.default_rng(self.seed)
        if self.seed % 3 == 0:
            cuts = np.sort(rng.choice(np.arange(1, self.total), 3, replace=False))
            return api.Mask.varlen([0, *cuts.tolist(), self.total], causal=bool(rng.integers(2)))
        if self.seed % 3 == 1:
            return api.Mask.causal(self.total)
        rows = random_slices(rng, self.total, self.total, max_slices=12)
        return api.Mask.from_slices(rows[:, 0:2], rows[:, 2:4], rows[:, 4], self.total, self.total)

    def plan(self, world: int) -> api.Plan:
        mode = AttnOverlapMode.DYNAMIC if self.degree is None else AttnOverlapMode.STATIC
        overlap = api.OverlapConfig(mode=mode, degree=self.degree, min_chunk_size=32)
        config = api.DistAttnConfig(overlap_config=overlap)
        heads = {"num_heads_q": HEADS[0], "num_heads_kv": HEADS[1], "head_dim": DIMS[0]}
        return api.make_plan(self.mask(), world, config, **heads)

    def policy(self) -> AttnPolicy:
        return AttnPolicy(
            backend="ffa", is_backend_explicit=True, deterministic=self.deterministic, prefetch_all=self.prefetch_all,
            hide_tail_reduce=self.hide_tail, high_precision_reduce=self.high_precision, dsink_reduce="sum",
            fwd_sm_margin=4, bwd_sm_margin=4, stage_mode="staged",
        )  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        """Global q, k, v, dout and sink (or None), on the GPU, the same on every rank."""
        gen = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64).to(self.dtype).cuda()

        (hq, hk), (d, dv) = HEADS, DIMS
        shapes = {"q": (hq, d), "k": (hk, d), "v": (hk, dv), "dout": (hq, dv)}
        found = {name: draw(self.total, *shape) for name, shape in shapes.items()}
        return {**found, "sink": draw(2, hq).float() if self.has_sink else None}


def run_rank(transport: Transport, case: Case, world: int) -> dict[str, torch.Tensor | None]:
    """Local results of one rank, on the CPU, with ``rows``, their global positions.

    Without autograd, which runs the backward passes of all ranks that are threads one after another.
    """
    plan = case.plan(world)
    runtime = AttnRuntime(plan, transport, default_registry(), case.policy())
    rows = torch.from_numpy(plan.position_array(transport.rank))
    x = case.tensors()
    is_real = rows < case.total
    picked = rows.clamp(max=case.total - 1).cuda()
    q, k, v, dout = (x[name][picked] for name in ("q", "k", "v", "dout"))
    dout = dout * is_real.cuda()[:, None, None]
    call = runtime.call(q, k, v, x["sink"], None, 0.0, False, None, True)
    got = run_forward(call, q, k, v, x["sink"])
    grads = run_backward(call, dout, q, k, v, x["sink"], got.out, got.lse, got.tail)
    found = dict(zip(NAMES, (got.out, got.lse, *grads)))
    local = {n: None if t is None else t.cpu() if n == "dsink" else t.cpu()[is_real] for n, t in found.items()}
    return {**local, "rows": rows[is_real]}


def joined(parts: list[dict]) -> dict[str, torch.Tensor | None]:
    """The global results in the order of the sequence."""
    order = torch.argsort(torch.cat([p["rows"] for p in parts]))
    rows = {name: torch.cat([p[name] for p in parts])[order] for name in NAMES[:-1]}
    return {**rows, "dsink": parts[0]["dsink"]}


def reference(case: Case, exact: bool) -> dict[str, torch.Tensor | None]:
    """Dense attention with autograd: in float64, or in the dtype of the case."""
    x = case.tensors()
    leaves = {n: x[n].double() if exact else x[n].clone() for n in ("q", "k", "v")}
    sink = None if x["sink"] is None else x["sink"].double() if exact else x["sink"].clone()
    inputs = [t.requires_grad_() for t in (*leaves.values(), sink) if t is not None]
    dense = torch.from_numpy(case.mask().to_dense()).cuda()
    out, meta = ref_attn_func(*leaves.values(), dense, sink=sink, backend="torch", return_lse=True)
    grads = torch.autograd.grad(out, inputs, x["dout"].to(out.dtype))
    found = (t.detach().cpu() for t in (out, meta.lse, *grads))
    return {"dsink": None, **dict(zip(NAMES, found))}


def excess(case: Case, got: dict[str, torch.Tensor | None]) -> dict[str, float]:
    """Error against float64 over the error of the dense reference in the same dtype; 2 and less is right."""
    exact, plain = reference(case, True), reference(case, False)
    found = {}
    for name in NAMES:
        want = exact[name]
        if want is None:
            assert got[name] is None
            continue
        empty = want == -torch.inf
        assert torch.equal(got[name] == -torch.inf, empty), name
        errors = [(t[name].double() - want).masked_fill(empty, 0.0).abs().max() for t in (got, plain)]
        # lse and dsink are float32 in both; the rest has a rounding of its own at least.
        floor = 1e-5 if name == "lse" else torch.finfo(case.dtype).eps / 4
        found[name] = float(errors[0] / errors[1].clamp(min=floor))
    return found


class SilentTransport(TransportBase):
    """Rank 1 of 4 that never communicates: for what calls cost the host, and for captures, on one GPU."""

    rank, size, ranks, timeout_s = 1, 4, (0, 1, 2, 3), 60.0

    def all_to_all_v(self, output, input, output_splits, input_splits, async_op=False) -> DoneWork:
        return DoneWork()

    def all_reduce(self, tensor, op="sum", async_op=False) -> DoneWork:
        return DoneWork()

    def all_gather_object(self, obj) -> list:
        return [obj] * self.size

    def all_gather_v(self, x, sizes) -> torch.Tensor:
        return x.new_zeros((sum(sizes), *x.shape[1:]))

    def barrier(self) -> None:
        return None

    def report_failure(self, exc, stage) -> None:
        return None
