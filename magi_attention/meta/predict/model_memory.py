# SPDX-License-Identifier: Apache-2.0
"""Bytes of a training step of a decoder on one GPU, without its attention: parameters, activations, logits.

The arithmetic is that of a Llama-like block in eager PyTorch: ``x + o(attention(q, k, v))``, then
``x + down(silu(gate) * up)``, each behind an RMSNorm. Compiled blocks keep less. Experts are computed together: rows
are copied in the order of their experts, multiplied by grouped products, and added to their tokens with weights.
Routing is taken for even.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError
from magi_attention.meta.predict.model_shape import ModelShape

ACTIVATIONS = ("kept", "checkpointed", "offloaded")
LOSSES = ("checkpointed", "torch")
_LOSS_BYTES = 12  # a logit: its log-softmax and two gradients, all in float32
_FUSED_LOSS_BYTES = 4  # a logit in float32, in whose place its gradient is computed
_GATHERED_BLOCKS = 3  # parameters of the block that runs, those of the next, and the buffer in which these arrive
_STAGED_INPUTS = 2  # offloaded inputs of blocks that are on the GPU at a time


@dataclass(frozen=True)
class TrainingSetup:
    """How a model is trained.

    Args:
        shards: GPUs over which FSDP shards; by default those of the plan.
        element_bytes: of an activation and of a gathered parameter.
        parameter_bytes: of a sharded parameter, and of its gradient.
        optimizer_bytes: of the optimizer's states for one parameter; 8 for Adam in float32.
        activations: "kept"; "checkpointed", only inputs of blocks stay; "offloaded", these on the host.
        keeps_attention: checkpoints have out and lse, too, so that attention is not computed again.
        mlp_chunk: tokens whose MLP or experts are computed at a time, and again in the backward; None for all at once.
        logits_chunk: tokens whose logits are there at a time; None for all at once.
        loss: of such chunks: "checkpointed", or "torch", its linear_cross_entropy, which takes a third of that.
        expert_parallel: GPUs over which the experts of a block are spread, between which tokens travel.
        offloads_parameters: sharded parameters, gradients and optimizer states are on the host (CPUOffloadPolicy).
        accumulates_gradients: over several batches, so that they are there from the beginning.
        defers_reduction: FSDP reduces them once, behind the last of these batches; until then they are whole.
        is_one_launch: attention takes one launch over NVLink, with buffers that ranks share; else stage by stage.
        high_precision_reduce, head_chunks: as in ``AttnPolicy`` and ``attend``.
    """

    shards: int | None = None
    element_bytes: int = 2
    parameter_bytes: int = 4
    optimizer_bytes: int = 8
    activations: str = "checkpointed"
    keeps_attention: bool = False
    mlp_chunk: int | None = None
    logits_chunk: int | None = None
    loss: str = "checkpointed"
    expert_parallel: int = 1
    offloads_parameters: bool = False
    accumulates_gradients: bool = False
    defers_reduction: bool = False
    is_one_launch: bool = False
    high_precision_reduce: bool = False
    head_chunks: int = 1

    def __post_init__(self) -> None:
        if self.activations not in ACTIVATIONS:
            raise ContractError(f"activations is {self.activations!r}; give one of {', '.join(ACTIVATIONS)}.")
        if self.loss not in LOSSES:
            raise ContractError(f"loss is {self.loss!r}; give one of {', '.join(LOSSES)}.")
        if self.keeps_attention and self.activations == "kept":
            raise ContractError("keeps_attention is for checkpoints; activations='kept' has out and lse anyway.")
        if self.defers_reduction and not self.accumulates_gradients:
            raise ContractError("defers_reduction is for several batches a step; give accumulates_gradients, too.")
        for name in ("element_bytes", "parameter_bytes", "head_chunks", "expert_parallel"):
            object.__setattr__(self, name, as_int(getattr(self, name), name, at_least=1))
        for name in ("shards", "mlp_chunk", "logits_chunk"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_int(getattr(self, name), name, at_least=1))


@dataclass(frozen=True)
class MemoryUse:
    """Predicted bytes of one training step on ``rank``, the one that takes most, with ``tokens`` rows of its own.

    ``held``: what is there for the whole step, by name. ``moments``: what comes on top of it while the last block runs
    forward, at the loss, in the backward, and when the gradient of the embedding comes; only one of these at a time.
    ``activations`` (between forward and backward, of all layers) are part of the first three, and ``gradients`` of
    the backward, where these grow as those shrink. ``host``: bytes in host memory, by name. What CUDA, NCCL and the
    allocator take is not in it.
    """

    rank: int
    tokens: int
    held: dict[str, int]
    moments: dict[str, int]
    activations: int
    gradients: int
    host: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """On the GPU."""
        return sum(self.held.values()) + max(self.moments.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of attention in one layer on one rank.

    ``kept``: q, k, v, out and lse of local rows, from forward to backward, in each layer. ``buffers``: memory that
    ranks share over NVLink, one set for all layers and plans; 0 where attention goes stage by stage. ``forward`` and
    ``backward``: the most beside those that lives while a layer runs, gradients included. Of these, ``fetched`` are
    buffers in which keys and values travel in a forward, both those sent and those received.
    """

    kept: int
    buffers: int
    forward: int
    backward: int
    fetched: int


def step_memory(
    shape: ModelShape, setup: TrainingSetup, rank: int, rows: int, shards: int, attention: AttentionMemory
) -> MemoryUse:
    """A step on a rank with ``rows`` tokens, whose FSDP group has ``shards`` GPUs."""
    _check_experts(shape, setup, shards)
    sizes, layers = _Activations(shape, setup, rows, attention), shape.num_layers
    if shape.experts is not None:
        dense = _Activations(replace(shape, experts=None), setup, rows, attention)
    sharded = -(-shape.num_parameters // shards)
    states = {"parameters": sharded * setup.parameter_bytes, "optimizer": sharded * setup.optimizer_bytes}
    gradients = {"gradients": sharded * setup.parameter_bytes}
    gathered, reduced, root = _gathered(shape, setup, shards)
    on_gpu = {"gathered parameters": gathered, "attention buffers": attention.buffers}
    held, host = ({**states, **on_gpu}, {}) if not setup.offloads_parameters else (on_gpu, {**states, **gradients})
    saved = layers * sizes.saved
    if shape.experts is not None:
        saved += shape.experts.dense_layers * (dense.saved - sizes.saved)
    if setup.activations == "offloaded":
        host["activations"] = saved
        saved = min(_STAGED_INPUTS, layers) * sizes.saved

    # In the first block that runs backward all activations are there, and in the last one all gradients, but for those
    # outside the blocks: the embedding's come last, and the head's are whole until then where they are sharded.
    grown = 0 if setup.offloads_parameters else gradients["gradients"]
    before = grown if setup.accumulates_gradients else 0
    head = 0 if gathered else shape.vocabulary * shape.width * setup.parameter_bytes
    first = -(-shape.block_parameters() // shards) * setup.parameter_bytes + head
    of_root = shape.root_parameters * setup.parameter_bytes
    of_blocks = max(before, grown - of_root // shards + head)
    if setup.defers_reduction:
        elsewhere = shape.block_parameters() - shape.block_parameters(setup.expert_parallel)
        if shape.experts is not None:
            elsewhere *= layers - shape.experts.dense_layers
        before = (shape.num_parameters - elsewhere) * setup.parameter_bytes
    at_first = saved + (before or min(first, grown))
    at_last = of_blocks + (saved if setup.activations == "offloaded" else sizes.saved)
    if gathered:  # there is no next block any more to be gathered; two blocks earlier there is, and fewer gradients
        at_last -= min(setup.element_bytes * shards, setup.parameter_bytes) * 2 * shape.block_parameters() // shards
    moments = {
        "forward": before + saved + sizes.forward,
        "loss": before + saved + sizes.loss,
        "backward": max(at_first, at_last) + sizes.backward + reduced,
        # Less than nothing, where gathered blocks, which are not there any more, take more than all this.
        "embedding": max(max(before, grown) + rows * shape.width * setup.element_bytes + root, 0),
    }
    return MemoryUse(rank, rows, held, moments, saved, max(before, grown), host)


def _check_experts(shape: ModelShape, setup: TrainingSetup, shards: int) -> None:
    parallel, count = setup.expert_parallel, 1 if shape.experts is None else shape.experts.count
    if count % parallel or shards % parallel:
        raise ContractError(
            f"expert_parallel is {parallel}, with experts: {count}, and shards: {shards}; give a divisor of both, 1 "
            "for a dense model."
        )


def _gathered(shape: ModelShape, setup: TrainingSetup, shards: int) -> tuple[int, int, int]:
    """Bytes of parameters that FSDP gathers, and of whole gradients before they are sharded: while a block runs
    backward, and when those of the embedding come, without gathered blocks."""
    if shards == 1 and setup.parameter_bytes == setup.element_bytes:
        return 0, 0, 0  # nothing is sharded or cast
    block = shape.block_parameters(setup.expert_parallel)
    blocks = min(_GATHERED_BLOCKS, shape.num_layers) * block
    gathered = (blocks + shape.root_parameters) * setup.element_bytes
    # Gradients of a block in the dtype of the backward, and the copy that is reduced.
    reduced = block * (setup.element_bytes + setup.parameter_bytes)
    head = shape.vocabulary * shape.width * setup.element_bytes
    root = shape.root_parameters * (setup.element_bytes + setup.parameter_bytes) - blocks * setup.element_bytes
    return gathered, reduced + head, root


class _Activations:
    """Bytes of ``rows`` tokens: ``saved`` by a block from forward to backward, and what comes on top at a moment."""

    def __init__(self, shape: ModelShape, setup: TrainingSetup, rows: int, attention: AttentionMemory) -> None:
        e, c = setup.element_bytes, shape
        stream = rows * c.width * e
        heads_q, heads_kv = rows * c.num_heads_q * c.head_dim * e, rows * c.num_heads_kv * c.head_dim * e
        lse = attention.kept - 2 * heads_q - 2 * heads_kv
        unnormed = heads_q + heads_kv if c.has_qk_norm else 0
        is_kept, is_whole = setup.activations == "kept", setup.mlp_chunk is None
        mlp = _Mlp(shape, setup, rows if setup.mlp_chunk is None else min(setup.mlp_chunk, rows))
        # Both norms read and write the stream.
        before_mlp = 4 * stream + attention.kept + unnormed
        block = before_mlp + (mlp.saved if is_whole else 0)
        self.saved = block if is_kept else stream + (heads_q + lse if setup.keeps_attention else 0)

        # Beside what is saved: in a forward the temporaries of attention or of the MLP; in a backward the block once
        # more if it is recomputed, with gradients of the MLP or of attention's inputs and output.
        remade = 0 if is_kept else block - (self.saved if setup.keeps_attention else stream)
        in_mlp = mlp.forward + (mlp.saved if not is_kept or not is_whole else 0)
        self.forward = stream + max(attention.forward + (0 if is_kept else attention.kept), in_mlp)
        of_mlp = mlp.backward if is_whole else mlp.saved + mlp.backward + stream
        freed = 2 * stream + (mlp.saved if is_whole else 0)
        self.backward = remade + stream + max(of_mlp, stream + heads_q + attention.backward - freed)
        chunk = rows if setup.logits_chunk is None else min(setup.logits_chunk, rows)
        # The stream before the last norm, behind it, and its gradient.
        if setup.logits_chunk is None or setup.loss == "checkpointed":
            logits = chunk * c.vocabulary * max(_LOSS_BYTES, 3 * e)
        else:  # for the product with the head, the gradient is rounded
            logits = chunk * c.vocabulary * max(_FUSED_LOSS_BYTES + (e if e < 4 else 0), e)
        self.loss = logits + 3 * stream


class _Mlp:
    """Bytes of the MLP or the experts of a block for ``rows`` tokens: ``saved`` for its backward, and what comes on top
    in its forward and its backward."""

    def __init__(self, shape: ModelShape, setup: TrainingSetup, rows: int) -> None:
        e, x = setup.element_bytes, shape.experts
        if x is None:  # gate, up, silu(gate) and the product; gradients of the product, silu(gate) and up
            hidden = rows * shape.hidden * e
            self.saved, self.forward, self.backward = 4 * hidden, 0, 2 * hidden
            return
        hidden, shared = rows * x.per_token * x.hidden * e, rows * x.shared_hidden * e
        routed = rows * x.per_token * shape.width * e
        # Rows in the order of their experts, what these give, and that weighted, which index_add keeps; the weights of
        # all experts in float32, and places.
        self.saved = 4 * (hidden + shared) + 3 * routed + rows * (x.count * max(4, e) + x.per_token * 2 * 8)
        # Rows that travel to other ranks' experts, or come back.
        self.forward = routed if setup.expert_parallel > 1 else 0
        # The expert of all tokens comes first and is free then; then gradients of the weights and what is weighted.
        self.backward = max(2 * shared, max(2 * routed, 2 * hidden) + self.forward - 4 * shared)


def longest(fits: Callable[[int], bool], step: int, most: int) -> int:
    """The largest multiple of ``step`` up to ``most`` that ``fits``, 0 for none; what fits must fit below it, too."""
    low, high = 0, 1
    while high * step <= most and fits(high * step):
        low, high = high, 2 * high
    high = min(high, most // step + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step
