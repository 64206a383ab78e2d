# SPDX-License-Identifier: Apache-2.0
"""Gather, fill and reduce of row ranges, on any device.

``ranges`` is an integer tensor (n, 2) of half-open row ranges along ``dim``. On a GPU one CUDA kernel does each of
them (``range_kernels``); elsewhere, for float64 and wherever a gradient is recorded, they are torch operations on one
row index tensor. To know how many rows the ranges hold costs one host synchronisation on a GPU; pass ``total_size``
(the sum of the range sizes) or ``output`` to avoid it. The keywords ``cu_range_sizes`` and ``row_map`` of the 1.1.x
functions are accepted and not needed.
"""

from __future__ import annotations

import torch

from magi_attention.errors import ContractError
from magi_attention.kernels.rows import kernels as range_kernels

_NEG_INF = float("-inf")
_KNOWN_HINTS = {"cu_range_sizes", "row_map", "total_size"}


def _check_ranges(ranges: torch.Tensor, name: str) -> torch.Tensor:
    if ranges.numel() == 0:
        return ranges.reshape(0, 2).long()
    if ranges.dim() != 2 or ranges.shape[1] != 2 or ranges.is_floating_point():
        raise ContractError(f"{name} is {tuple(ranges.shape)} {ranges.dtype}; give an integer tensor (n, 2).")
    return ranges


def _check_hints(hints: dict[str, object]) -> int | None:
    unknown = sorted(set(hints) - _KNOWN_HINTS)
    if unknown:
        raise ContractError(f"Unknown keywords {unknown}; known ones are {sorted(_KNOWN_HINTS)}.")
    size = hints.get("total_size")
    return None if size is None else int(size)  # type: ignore[call-overload]


def _edited(x: torch.Tensor) -> torch.Tensor:
    """``x``, of which torch is told that a kernel wrote to it."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)
    return x


def _sizes(ranges: torch.Tensor) -> torch.Tensor:
    return (ranges[:, 1] - ranges[:, 0]).long()


def _count(ranges: torch.Tensor) -> int:
    """How many rows the ranges hold; waits for the device that they are on."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _rows_of(ranges: torch.Tensor, total_size: int | None) -> torch.Tensor:
    """All row ids of the ranges, in order, as one int64 tensor."""
    ranges = ranges.long()
    sizes = ranges[:, 1] - ranges[:, 0]
    if total_size is None:
        total_size = int(sizes.sum())
    before = torch.cumsum(sizes, 0) - sizes
    shift = torch.repeat_interleave(ranges[:, 0] - before, sizes, output_size=total_size)
    return shift + torch.arange(total_size, device=ranges.device)


def range_gather(
    input: torch.Tensor,
    ranges: torch.Tensor,
    dim: int = 0,
    output: torch.Tensor | None = None,
    **hints: object,
) -> torch.Tensor:
    """Rows ``input[start:end]`` of every range, concatenated along ``dim``; written into ``output`` if given.

    The result has the dtype of ``input`` and is differentiable unless ``output`` is given.
    """
    total_size = _check_hints(hints)
    ranges, dim = _check_ranges(ranges, "ranges"), dim % input.dim()
    if input.is_cuda and not (input.requires_grad and torch.is_grad_enabled()):
        if total_size is None:
            total_size = _count(ranges) if output is None else output.shape[dim]
        shape = (*input.shape[:dim], total_size, *input.shape[dim + 1 :])
        made = input.new_empty(shape) if output is None else output
        if range_kernels.gather(made, input, ranges, dim):
            return _edited(made)
    gathered = input.index_select(dim, _rows_of(ranges.to(input.device), total_size))
    if output is None:
        return gathered
    if output.shape != gathered.shape:
        raise ContractError(f"output is {tuple(output.shape)}; the ranges need {tuple(gathered.shape)}.")
    return output.copy_(gathered)


def range_fill_(input: torch.Tensor, ranges: torch.Tensor, val: float, dim: int = 0, **hints: object) -> torch.Tensor:
    """Sets the rows of all ranges along ``dim`` to ``val`` in place and returns ``input``."""
    total_size = _check_hints(hints)
    ranges = _check_ranges(ranges, "ranges")
    if input.is_cuda and not input.requires_grad:
        total_size = _count(ranges) if total_size is None else total_size
        if range_kernels.fill(input, ranges, total_size, val, dim % input.dim()):
            return _edited(input)
    return input.index_fill_(dim, _rows_of(ranges.to(input.device), total_size), val)


def range_reduce(
    input: torch.Tensor,
    output: torch.Tensor,
    input_ranges: torch.Tensor,
    output_ranges: torch.Tensor,
    dim: int = 0,
    deterministic: bool = False,
    reduce_op: str = "sum",
    reduce_dtype: torch.dtype | None = None,
    acc_reduce: bool = True,
    input_lse: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
    **hints: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Reduces ``input[input_ranges[i]]`` into ``output[output_ranges[i]]`` along ``dim``, in place.

    Several input rows may go to one output row. Rows of ``output`` in no range keep their value.

    Args:
        reduce_op: ``"sum"``; ``"avg"``, the mean of the contributions; or ``"lse"``, the merge of partial
            attention results: ``lse = log sum_i exp(lse_i)``, ``out = sum_i exp(lse_i - lse) out_i``.
        acc_reduce: True: the old row of ``output`` takes part, for "avg" as one more contribution.
            False: it is overwritten.
        deterministic: bitwise repeatable; contributions are added in the order of the ranges.
        reduce_dtype: dtype of the sums; default float64 if either side is float64, else float32.
        input_lse, output_lse: (rows, heads) for "lse", with tensors (rows, heads, ...) and ``dim`` 0;
            ``output_lse`` is updated too.

    Returns:
        ``output``, and for "lse" ``(output, output_lse)``.
    """
    total_size = _check_hints(hints)
    sources, targets = _check_ranges(input_ranges, "input_ranges"), _check_ranges(output_ranges, "output_ranges")
    if len(sources) != len(targets):
        raise ContractError(f"{len(sources)} input ranges, {len(targets)} output ranges; give as many of each.")
    if sources.device.type == targets.device.type == "cpu" and not torch.equal(_sizes(sources), _sizes(targets)):
        raise ContractError("An input range and its output range differ in size; make them equal.")
    if reduce_op not in ("sum", "avg", "lse"):
        raise ContractError(f"Unknown reduce_op {reduce_op!r}; use 'sum', 'avg' or 'lse'.")
    if reduce_dtype is None:
        wide = torch.float64 in (input.dtype, output.dtype)
        reduce_dtype = torch.float64 if wide else torch.float32
    if reduce_op == "lse" and (input_lse is None or output_lse is None or dim != 0):
        raise ContractError("reduce_op 'lse' needs input_lse, output_lse and dim 0; pass all three.")
    is_plain = not any(x is not None and x.requires_grad for x in (input, output, input_lse, output_lse))
    if input.is_cuda and reduce_dtype == torch.float32 and is_plain:
        lse = (input_lse, output_lse) if reduce_op == "lse" else ()
        if range_kernels.reduce(input, output, sources, targets, dim % input.dim(), reduce_op, acc_reduce, *lse):
            return (_edited(output), _edited(output_lse)) if lse and output_lse is not None else _edited(output)
    sources, targets = sources.to(input.device), targets.to(input.device)
    source_rows, target_rows = _rows_of(sources, total_size), _rows_of(targets, total_size)
    plan = _Scatter(target_rows, deterministic)
    values = input.movedim(dim, 0).index_select(0, source_rows).to(reduce_dtype)
    view = output.movedim(dim, 0)
    old = view.index_select(0, plan.touched).to(reduce_dtype)
    if reduce_op == "lse":
        assert input_lse is not None and output_lse is not None
        new, new_lse = _merge(plan, values, input_lse, old, output_lse, source_rows, acc_reduce)
        output_lse.index_copy_(0, plan.touched, new_lse.to(output_lse.dtype))
        view.index_copy_(0, plan.touched, new.to(output.dtype))
        return output, output_lse
    new = plan.add(old if acc_reduce else torch.zeros_like(old), values)
    if reduce_op == "avg":
        count = (plan.counts + int(acc_reduce)).to(reduce_dtype)
        new /= count.view(-1, *[1] * (new.dim() - 1))
    view.index_copy_(0, plan.touched, new.to(output.dtype))
    return output


class _Scatter:
    """Where contributions go: ``touched`` target rows (sorted, unique) and a slot among them per value."""

    def __init__(self, target_rows: torch.Tensor, deterministic: bool) -> None:
        self.touched, self.slots, self.counts = torch.unique(
            target_rows, sorted=True, return_inverse=True, return_counts=True
        )
        self._rounds: list[torch.Tensor] | None = self._split() if deterministic else None

    def _split(self) -> list[torch.Tensor]:
        # Round r holds the r-th contribution of every row, so no two of a round meet: no atomics race, and
        # the order is that of the ranges. There are as many rounds as the largest number of contributions.
        order = torch.argsort(self.slots, stable=True)
        starts = torch.cumsum(self.counts, 0) - self.counts
        turn = torch.arange(len(order), device=order.device) - starts[self.slots[order]]
        rounds = int(self.counts.max()) if len(self.counts) else 0
        return [order[turn == r] for r in range(rounds)]

    def add(self, base: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``base[slot] += value`` for all values; ``base`` is changed and returned."""
        if self._rounds is None:
            return base.index_add_(0, self.slots, values)
        for members in self._rounds:
            slots = self.slots[members]
            base[slots] = base[slots] + values[members]
        return base

    def max(self, base: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        index = self.slots.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
        return base.scatter_reduce(0, index, values, "amax", include_self=True)


def _merge(
    plan: _Scatter,
    values: torch.Tensor,
    input_lse: torch.Tensor,
    old: torch.Tensor,
    output_lse: torch.Tensor,
    source_rows: torch.Tensor,
    acc_reduce: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New rows and lse of the touched output rows."""
    wide = torch.float64 if torch.float64 in (values.dtype, input_lse.dtype) else torch.float32
    lse = input_lse.index_select(0, source_rows).to(wide)
    if acc_reduce:
        old_lse = output_lse.index_select(0, plan.touched).to(wide)
    else:
        old_lse = lse.new_full((len(plan.touched), *lse.shape[1:]), _NEG_INF)
    top = plan.max(old_lse, lse)
    finite_top = top.masked_fill(top == _NEG_INF, 0.0)
    mass = plan.add(torch.exp(old_lse - finite_top), torch.exp(lse - finite_top[plan.slots]))
    new_lse = finite_top + torch.log(mass)
    finite_lse = new_lse.masked_fill(new_lse == _NEG_INF, 0.0)
    new = plan.add(
        _weighted(old, torch.exp(old_lse - finite_lse)),
        _weighted(values, torch.exp(lse - finite_lse[plan.slots])),
    )
    return new, new_lse


def _weighted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    weight = weight.view(*weight.shape, *[1] * (x.dim() - weight.dim()))
    # A row of weight 0 may hold anything, NaN too.
    return torch.where(weight == 0, 0.0, x * weight.to(x.dtype))
