# SPDX-License-Identifier: Apache-2.0
"""What a kernel backend is asked and what it gives back.

Shapes used everywhere below (T tokens, H heads, D head dim of q and k, Dv head dim of v)::

    q (Tq, Hq, D)    k (Tk, Hk, D)    v (Tk, Hk, Dv)    Hq a multiple of Hk
    out (Tq, Hq, Dv) lse (Tq, Hq)     max_logits (Hq,)

*Accumulation dtype*: float64 for float64 inputs, float32 for all others. Everything in ``Partial`` and
``Grads`` has it; callers cast. ``lse`` is a natural logarithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from magi_attention.common.scalars import as_float
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.kernels.dropout import DropoutMask


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class AttnOptions:
    """Options of one attention call that do not depend on the tensors.

    Logits are ``s = softmax_scale * q.k``, and ``softcap * tanh(s / softcap)`` if ``softcap > 0``. The scale may be any
    finite number: with 0 all keys that a query sees weigh the same.
    ``sink_layout`` is ``"sh"`` for sinks (S, Hq) or ``"ssh"`` for (Tq, S, Hq). ``sm_margin`` (>= 0) is the
    number of SMs that a GPU kernel leaves free. ``deterministic`` asks for bitwise repeatable results. With
    ``dropout_p`` > 0 calls get a ``DropoutMask`` of that share.
    """

    softmax_scale: float
    softcap: float = 0.0
    sink_layout: str = "sh"
    deterministic: bool = False
    sm_margin: int = 0
    return_max_logits: bool = False
    dropout_p: float = 0.0

    @cached_property
    def is_plain(self) -> bool:
        """Do all weights come from bare logits, without softcap and dropout?"""
        return not self.softcap and not self.dropout_p

    def __post_init__(self) -> None:
        if self.sink_layout == "shd":
            raise UnsupportedError('Sink layout "shd" (sinks with values) is not implemented; use "sh" or "ssh".')
        if self.sink_layout not in ("sh", "ssh"):
            raise ContractError(f'Unknown sink layout {self.sink_layout!r}; use "sh" or "ssh".')
        if not math.isfinite(self.softmax_scale):
            raise ContractError(f"softmax_scale is {self.softmax_scale}; give a finite number.")
        if not 0 <= self.softcap < math.inf:
            raise ContractError(f"softcap is {self.softcap}; give 0 (off) or a positive finite number.")
        if not 0 <= self.dropout_p < 1:
            raise ContractError(f"dropout_p is {self.dropout_p}; give a share of at least 0 and below 1.")
        if self.sm_margin < 0:
            raise ContractError(f"sm_margin is {self.sm_margin}; give 0 or a positive number of SMs.")


def as_scale(softmax_scale: object) -> float:
    """A softmax scale, given as a number, as a float."""
    learn = "To learn a scale, multiply q by it and pass softmax_scale as a float."
    return as_float(softmax_scale, "softmax_scale", learn)


# Equal options are one object, by which backends recognise a call that they have prepared.
options_of = lru_cache(maxsize=512)(AttnOptions)


class RangeTensors(NamedTuple):
    """A mask as tensors on the device of q: (N, 2), (N, 2) and (N,) or None for all FULL; integers."""

    q_ranges: torch.Tensor
    k_ranges: torch.Tensor
    types: torch.Tensor | None


class Operands(NamedTuple):
    """What a forward reads: q, k and v as above, of any strides, and what is asked of them.

    ``mask``: every backend reads a ``SliceTable``, and only "ffa" reads ``RangeTensors``. Backends know a call again by
    the object ``options``. ``sink`` adds its mass once, so a staged computation gives it to one stage only.
    A named tuple, because one is made for each call: it takes a third of the time of a frozen dataclass.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: SliceTable | RangeTensors
    options: AttnOptions
    sink: torch.Tensor | None = None
    dropout: DropoutMask | None = None

    @property
    def slices(self) -> SliceTable:
        """The mask as a table; ``UnsupportedError`` for range tensors."""
        return _table(self.mask)


class BackwardOperands(NamedTuple):
    """What a backward reads: ``dout`` (Tq, Hq, Dv) and what the forward had.

    ``out`` and ``lse`` are the final ones of each row, over all stages and with the sink, so that ``exp(s - lse)`` is
    the final weight. ``delta`` (Tq, Hq) is ``sum_d out * dout`` if the caller has it, less the gradient of lse if there
    is one (``delta_with_dlse``); nobody reads the values of ``out`` then.
    """

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mask: SliceTable | RangeTensors
    options: AttnOptions
    sink: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    dropout: DropoutMask | None = None

    @property
    def slices(self) -> SliceTable:
        """The mask as a table; ``UnsupportedError`` for range tensors."""
        return _table(self.mask)


def _table(mask: SliceTable | RangeTensors) -> SliceTable:
    if not isinstance(mask, SliceTable):
        raise UnsupportedError("This backend reads no range tensors; give a SliceTable, or use backend ffa.")
    return mask


def check_dropout(x: Operands | BackwardOperands) -> None:
    """Raises ``ContractError`` unless options and mask say the same, and the mask fits the rows."""
    share = 0.0 if x.dropout is None else x.dropout.dropout.p
    if x.options.dropout_p != share:
        raise ContractError(f"dropout_p is {x.options.dropout_p} in the options and {share} in the call; give one.")
    if x.dropout is not None:
        x.dropout.check(x.q, x.k)


@dataclass
class Partial:
    """Result of attention over some of the keys; partial results merge by their ``lse``.

    ``max_logits`` is the maximum per query head, over all allowed pairs, of the logit that enters the
    softmax, that is with scale and softcap but without sinks; -inf where there is no pair; None if not asked.
    """

    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor | None = None


@dataclass
class Grads:
    """Gradients with the shapes of q, k, v and sink; ``dsink`` is None when no sink was given.

    ``delta`` (Tq, Hq) is the sum of out * dout over each row, less the gradient of lse, if the backend knows it and
    kept it: the next stage of the same backward need not compute it again.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None = None
    delta: torch.Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """What a backend needs to know to say whether it can run. ``capability`` is (major, minor) on CUDA."""

    device_type: str
    dtype: torch.dtype
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    options: AttnOptions
    has_sink: bool = False
    needs_backward: bool = False
    capability: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
        needs_backward: bool = False,
    ) -> Problem:
        """The problem posed by these tensors."""
        return cls(
            device_type=q.device.type,
            dtype=q.dtype,
            num_heads_q=q.shape[1],
            num_heads_kv=k.shape[1],
            head_dim=q.shape[2],
            head_dim_v=v.shape[2],
            options=options,
            has_sink=sink is not None,
            needs_backward=needs_backward,
            capability=torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None,
        )


@runtime_checkable
class Backend(Protocol):
    """One implementation of masked attention. Stateless."""

    @property
    def name(self) -> str: ...

    def why_not(self, problem: Problem) -> str | None:
        """None if the backend can run the problem, else a sentence."""
        ...

    def forward(self, x: Operands, init: Partial | None = None) -> Partial:
        """Attention of q over the pairs of the mask, of those that stay under the dropout.

        With ``init`` the new partial result is merged into its tensors in place and ``init`` is returned.
        """
        ...

    def backward(self, x: BackwardOperands, init: Grads | None = None) -> Grads:
        """Gradients of the pairs of the mask.

        With ``init`` the gradients are added to its tensors in place and ``init`` is returned; without, the result may
        carry the ``delta`` that was computed.
        """
        ...


# ``(out in q's dtype, lse, max_logits or None)``
Final = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@runtime_checkable
class FinalBackend(Backend, Protocol):
    """A backend that can round once, inside the kernel, what is not going to be merged with anything."""

    def forward_final(self, x: Operands) -> Final:
        """Out in q's dtype, lse, and max_logits or None."""
        ...

    def backward_final(self, x: BackwardOperands) -> Grads:
        """Gradients in the dtype of q, that of the sink in the accumulation dtype."""
        ...
