# SPDX-License-Identifier: Apache-2.0
"""Our own runtime in the context-parallel benchmark, through its public functions, one entry for each setting.

``VARIANTS`` is the one place that names settings: how rows travel and how stages run are environment variables, the
number of stages is ``OverlapConfig(degree=)``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from cp_kernel import Calls, PeerBase, Setting, State
from peers import Unfit

from magi_attention import api
from magi_attention.config import DispatchAlg
from magi_attention.env import registry
from magi_attention.meta.plan import Plan

STAGED = {"MAGI_ATTENTION_NATIVE_GRPCOLL": "0"}  # over the process group, a kernel for each stage
FUSED = {"MAGI_ATTENTION_NATIVE_GRPCOLL": "1"}  # one kernel, over NVLink or between nodes


def over_nodes(size: int, transport: str, stages: Mapping[str, str] = STAGED) -> dict[str, str]:
    """Nodes of ``size`` GPUs, though all are in one machine; rows in two levels."""
    names = {"HIERARCHICAL_COMM": "1", "NODE_SIZE": str(size), "NODE_TRANSPORT": transport}
    return {**stages, **{f"MAGI_ATTENTION_{name}": value for name, value in names.items()}}


@dataclass(frozen=True)
class Variant:
    """``degree`` stages of remote keys, 0 for one kernel call after everything has arrived."""

    degree: int
    environment: Mapping[str, str] = field(default_factory=dict)
    dispatch: DispatchAlg = field(default_factory=api.LocalityDispatchAlg)


# ``attend`` with a plan: who may move to whom.
QUERY_MOVES = {"attend_keys": "never", "attend_auto": "auto", "attend_moves": "always"}
VARIANTS = {
    "magi": Variant(1),  # what a user gets who sets nothing
    "magi_a2av_0": Variant(0, STAGED),
    "magi_a2av_1": Variant(1, STAGED),
    "magi_a2av_2": Variant(2, STAGED),
    "magi_fused": Variant(1, FUSED),
    # Each GPU is a node of its own, so that all rows cross nodes; or two GPUs are, or four.
    "magi_nodes": Variant(1, over_nodes(1, "nvshmem")),
    "magi_nodes_2": Variant(1, over_nodes(2, "nvshmem")),
    "magi_nodes_4": Variant(1, over_nodes(4, "nvshmem")),
    "magi_nodes_fused": Variant(1, over_nodes(1, "nvshmem", FUSED)),
    "magi_nodes_2_fused": Variant(1, over_nodes(2, "nvshmem", FUSED)),
    "magi_nodes_4_fused": Variant(1, over_nodes(4, "nvshmem", FUSED)),
    "magi_nodes_a2av": Variant(1, over_nodes(1, "all_to_all")),
    "magi_nodes_2_a2av": Variant(1, over_nodes(2, "all_to_all")),
}


class Magi(PeerBase):
    """``calc_attn`` with a key that was made before. The kernel alone is one call over all keys of the rank's plan."""

    uses_autograd = True

    def __init__(self, setting: Setting, name: str) -> None:
        variant = VARIANTS[name]
        unknown = sorted(set(variant.environment) - set(registry.VARIABLES))
        if unknown:  # it would be ignored, and another setting be timed under this name
            raise Unfit(f"This build has no variable {', '.join(unknown)}.")
        node = int(variant.environment.get("MAGI_ATTENTION_NODE_SIZE", 0))
        if node and setting.world <= node:
            raise Unfit(f"Nodes of {node} need more than {node} ranks; here are {setting.world}.")
        if variant.environment.get("MAGI_ATTENTION_NODE_TRANSPORT") == "nvshmem" and setting.device.type != "cuda":
            raise Unfit("NVSHMEM moves rows of GPUs only.")
        self._before = {name: os.environ.get(name) for name in variant.environment}
        # Until ``close``: a key remembers the environment it was made in, and what is started later reads it anew.
        os.environ.update(variant.environment)
        try:
            started = time.perf_counter()
            self._key, self._plan = _key_of(setting, variant)
            seconds = time.perf_counter() - started
            tokens = torch.arange(setting.case.seqlen, device=setting.device)
            positions = api.dispatch(tokens, self._key, pad_value=-1).cpu().numpy()
        except BaseException:
            self.close()
            raise
        super().__init__(setting, positions)
        areas = self._plan.areas
        self.details |= {
            "chunk_size": self._plan.chunk_size,
            "stages": self._plan.num_stages,
            "balance": float(areas.max() / max(areas.mean(), 1)),
            "rows_received_max": int(self._plan.comm_matrix().sum(0).max()),
            "key_ms": seconds * 1e3,
        }

    def forward(self, q, k, v) -> State:
        return State(api.calc_attn(q, k, v, self._key)[0])

    def kernel_calls(self, dout, q, k, v) -> tuple[Calls, Calls]:
        part = self._plan.rank(self.setting.rank)
        q, k, v = (x.detach() for x in (q, k, v))
        remote = sum(stage.recv_rows for stage in part.stages)
        keys, values = (torch.cat([x, x.new_zeros((remote, *x.shape[1:])).normal_()]) for x in (k, v))
        out, lse = self.kernel.final(q, keys, values, part.joined)
        forward = partial(self.kernel.final, q, keys, values, part.joined)
        return [forward], [partial(self.kernel.final_grads, dout, q, keys, values, out, lse, part.joined)]

    def close(self) -> None:
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        api.clear_cache()


class MagiPlan(PeerBase):
    """``attend`` with a plan that was made before; ``query_moves`` as in ``make_plan``."""

    uses_autograd = True

    def __init__(self, setting: Setting, query_moves: str) -> None:
        started = time.perf_counter()
        config = api.DistAttnConfig(dispatch_config=api.DispatchConfig(setting.chunk_size))
        heads = {"num_heads_q": setting.heads[0], "num_heads_kv": setting.heads[1], "head_dim": setting.head_dim}
        plan = api.make_plan(setting.case.mask, setting.world, config, **heads, query_moves=query_moves)
        seconds = time.perf_counter() - started
        positions = plan.position_array(setting.rank)
        super().__init__(setting, np.where(positions < plan.total_tokens, positions, -1))
        self._plan, told = plan, plan.explain()
        self.details |= {
            "chunk_size": plan.chunk_size,
            "stages": plan.num_stages,
            "balance": told["imbalance"],
            "do_queries_move": told["do_queries_move"],
            "bytes_total": told["bytes_total"],
            "key_ms": seconds * 1e3,
        }

    def forward(self, q, k, v) -> State:
        return State(api.attend(q, k, v, self._plan)[0])

    def kernel_calls(self, dout, q, k, v) -> None:
        """Not told: where queries move, several calls make one result."""


def _key_of(setting: Setting, variant: Variant) -> tuple[api.DistAttnRuntimeKey, Plan]:
    """A key, and its plan. Without a chunk size, chunks are as small as balance wants."""
    mask, (heads_q, heads_kv) = setting.case.mask, setting.heads
    overlap = api.OverlapConfig(degree=variant.degree)
    heads = {"num_heads_q": heads_q, "num_heads_kv": heads_kv, "head_dim": setting.head_dim}
    dispatch = api.DispatchConfig(setting.chunk_size, alg=variant.dispatch)
    plan = api.make_plan(mask, setting.world, api.DistAttnConfig(dispatch_config=dispatch))
    config = api.DistAttnConfig(replace(dispatch, chunk_size=plan.chunk_size), overlap)
    rows = mask.slices.array
    key = api.magi_attn_flex_key(
        api.AttnRanges.from_ranges(rows[:, 0:2].tolist()),
        api.AttnRanges.from_ranges(rows[:, 2:4].tolist()),
        [api.AttnMaskType.from_int_type(int(kind)) for kind in rows[:, 4]],
        mask.total_q,
        mask.total_k,
        **heads,
        pad_size=0,
        cp_group_or_mesh=dist.group.WORLD,
        dist_attn_config=config,
    )
    return key, api.dist_attn_runtime_dict_mgr.get(key).plan
