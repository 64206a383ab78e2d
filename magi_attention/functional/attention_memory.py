# SPDX-License-Identifier: Apache-2.0
"""Bytes that the attention of one layer takes on one rank, counted in the buffers that ``dist_attn`` allocates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.meta.one_launch.fused_layout import FusedLayout
from magi_attention.meta.plan import Plan
from magi_attention.meta.predict.model_memory import AttentionMemory, MemoryUse, TrainingSetup, step_memory
from magi_attention.meta.predict.model_shape import ModelShape


@dataclass(frozen=True)
class HeadShape:
    """What a row of q, k and v is made of. ``element_bytes`` of q, k, v and out; lse and sums take 4 bytes at least."""

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    element_bytes: int = 2

    @property
    def sum_bytes(self) -> int:
        """Bytes of a number in the accumulation dtype."""
        return max(4, self.element_bytes)

    @property
    def q_row(self) -> int:
        """Numbers of a row of q."""
        return self.num_heads_q * self.head_dim

    @property
    def out_row(self) -> int:
        return self.num_heads_q * self.head_dim_v

    @property
    def kv_row(self) -> int:
        """Numbers of a row of k and one of v."""
        return self.num_heads_kv * (self.head_dim + self.head_dim_v)

    def chunk(self, chunks: int) -> HeadShape:
        """The heads of one of ``chunks`` parts. ``ContractError`` unless the kv heads divide."""
        if self.num_heads_kv % chunks:
            raise ContractError(
                f"head_chunks is {chunks}, no divisor of the {self.num_heads_kv} kv heads; give one of them."
            )
        return replace(self, num_heads_q=self.num_heads_q // chunks, num_heads_kv=self.num_heads_kv // chunks)

    @property
    def kept_row(self) -> int:
        """Bytes of a row of q, k, v, out and lse."""
        return (self.q_row + self.kv_row + self.out_row) * self.element_bytes + self.num_heads_q * self.sum_bytes


@dataclass(frozen=True)
class _Stage:
    """Rows of one stage. ``placed``: rows that are copied behind their arrival, because they do not arrive in order."""

    sent: int
    received: int
    placed: int

    @property
    def fetch_rows(self) -> int:
        return self.sent + self.received + self.placed

    @property
    def arrived(self) -> int:
        """Rows that are there when all has arrived."""
        return max(self.received, self.placed)

    @classmethod
    def of(cls, plan: Plan, rank: int, stage: int) -> _Stage:
        layout = A2AVLayout.from_spec(plan.cast_spec(rank, stage))
        is_in_place = layout.recv.start == 0 and layout.recv.count == layout.output_rows
        return cls(layout.send.count, layout.recv.count, 0 if is_in_place else layout.output_rows)


def attention_memory(
    plan: Plan,
    rank: int,
    heads: HeadShape,
    *,
    is_one_launch: bool = False,
    high_precision_reduce: bool = False,
    head_chunks: int = 1,
) -> AttentionMemory:
    """The bytes of ``rank``. ``is_one_launch``: the ranks share a host and attention takes one launch, whose buffers
    are those of the plan and its largest rank; else stage by stage, all fetches at once. ``head_chunks`` as in
    ``attend``. What kernels allocate inside is not counted. ``UnsupportedError`` for a plan whose queries move."""
    if plan.assigned is not None:
        raise UnsupportedError(
            "Queries move in this plan, whose memory is not predicted; make the plan with query_moves='never'."
        )
    rows, kept = plan.shard_sizes[rank], plan.shard_sizes[rank] * heads.kept_row
    part = heads.chunk(head_chunks)
    if is_one_launch and plan.cp_size > 1:
        buffers = _shared_buffers(plan, rank, part, high_precision_reduce)
        forward, backward, fetched = _forward(rows, [], part, False, False), _gradients(rows, part), 0
    else:
        stages = [] if plan.cp_size == 1 else [_Stage.of(plan, rank, s) for s in range(plan.num_stages)]
        is_blocking = plan.degree == 0 and plan.num_stages == 1
        wire = part.sum_bytes if high_precision_reduce else part.element_bytes
        fetched = sum(stage.fetch_rows for stage in stages) * part.kv_row * part.element_bytes
        travels = bool(stages) and not all(plan.stage_is_idle)
        buffers, forward = 0, _forward(rows, stages, part, is_blocking, travels and head_chunks > 1)
        # Chunks before and behind one, whose rows travel beside it: those of the first, the middle and the last chunk.
        others = {(travels and i > 0, travels and i + 1 < head_chunks) for i in range(min(head_chunks, 3))}
        backward = max(_backward(rows, stages, part, wire, is_blocking, *sides) for sides in others)
        backward = max(backward, _gradients(rows, part))
    if head_chunks == 1:
        forward -= rows * heads.out_row * heads.element_bytes  # which is counted in what is kept
    else:  # copies of out and lse of the chunk, and gradients of all heads
        copies = part.out_row * part.element_bytes + part.num_heads_q * part.sum_bytes
        backward += rows * (copies + (heads.q_row + heads.kv_row) * heads.element_bytes)
    return AttentionMemory(kept, buffers, forward, backward, fetched)


def _shared_buffers(plan: Plan, rank: int, heads: HeadShape, high_precision_reduce: bool) -> int:
    part = FusedLayout(plan).part(rank)
    wire = heads.sum_bytes if high_precision_reduce else heads.element_bytes
    return heads.kv_row * (part.buffer_rows * heads.element_bytes + part.grad_rows * wire)


def _forward(rows: int, stages: list[_Stage], heads: HeadShape, is_blocking: bool, has_next: bool) -> int:
    """Rows that travel, and partial outputs in the accumulation dtype, before out is there, and with it.

    ``has_next``: while the last kernel runs, the rows of another head chunk travel.
    """
    kv = heads.kv_row * heads.element_bytes
    out = rows * heads.out_row * heads.element_bytes
    if not stages:
        return out
    fetched = sum(stage.fetch_rows for stage in stages) * kv
    following = fetched if has_next else 0
    if is_blocking:
        (stage,) = stages
        return max(fetched, (rows + 2 * stage.arrived) * kv, (rows + stage.arrived) * kv + out + following)
    partial = rows * heads.out_row * heads.sum_bytes
    return partial + max(fetched, stages[-1].arrived * kv + out + following)


def _gradients(rows: int, heads: HeadShape) -> int:
    """dq, dk and dv of local rows as sums, and rounded."""
    numbers = rows * (heads.q_row + heads.kv_row)
    return numbers * (heads.sum_bytes + (heads.element_bytes if heads.element_bytes < heads.sum_bytes else 0))


def _backward(
    rows: int, stages: list[_Stage], heads: HeadShape, wire: int, is_blocking: bool, has_previous: bool, has_next: bool
) -> int:
    """Sums of local rows stay, and so do the gradients on their way, while one stage is computed and the next fetched.

    A gradient of a fetched row is a sum first, and then a row on the wire. Those of dk and dv of the head chunk before
    (``has_previous``) are there until the first kernel was launched, and the first rows of the next one
    (``has_next``) from the last kernel on.
    """
    kv, sums = heads.kv_row * heads.element_bytes, heads.kv_row * heads.sum_bytes
    own = rows * (heads.q_row + heads.kv_row + heads.num_heads_q) * heads.sum_bytes
    sent_back = sum(stage.received + stage.sent for stage in stages) * heads.kv_row * wire
    previous = rows * sums + sent_back if has_previous else 0
    most, returning = own + previous + (stages[0].fetch_rows * kv if stages else 0), 0
    for stage, following in zip(stages, [*stages[1:], stages[0] if has_next else None]):
        joined = rows if is_blocking else 0
        arriving = max(stage.fetch_rows, joined + 2 * stage.arrived if is_blocking else 0)
        ahead = 0 if following is None else following.fetch_rows
        # While rows arrive, and when their gradients leave.
        before = own + returning + arriving * kv
        returning += (stage.received + stage.sent) * heads.kv_row * wire
        beside = max(returning, previous) if is_blocking else returning
        after = own + beside + (joined + stage.arrived + ahead) * kv + stage.received * sums
        most = max(most, after, 0 if is_blocking else before)
    return most


def plan_memory(plan: Plan, shape: ModelShape, setup: TrainingSetup) -> MemoryUse:
    """``Plan.memory``: a training step on the rank that takes most."""
    heads = HeadShape(shape.num_heads_q, shape.num_heads_kv, shape.head_dim, shape.head_dim, setup.element_bytes)
    shards = setup.shards or plan.cp_size
    if shards % plan.cp_size:
        raise ContractError(
            f"shards is {shards}, no multiple of the {plan.cp_size} ranks of the plan; FSDP shards over whole groups."
        )
    uses = [
        step_memory(
            shape, setup, rank, rows, shards,
            attention_memory(
                plan, rank, heads, is_one_launch=setup.is_one_launch,
                high_precision_reduce=setup.high_precision_reduce, head_chunks=setup.head_chunks,
            ),
        )
        for rank, rows in enumerate(plan.shard_sizes)
    ]  # fmt: skip
    return max(uses, key=lambda use: (use.peak_bytes, -use.rank))
