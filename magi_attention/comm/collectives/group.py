# SPDX-License-Identifier: Apache-2.0
"""Group cast and group reduce, over all-to-all-v or straight over NVLink.

*Cast*: every rank cuts its input rows into consecutive splits; split i goes to all ranks of
``dst_indices[i]``. Its output is cut into consecutive splits too; split j comes from rank ``src_index[j]``.
Splits of one source arrive in the order in which that source holds them.

*Reduce* is the transpose: every input split goes to one rank, and every output split is the sum (average,
lse-weighted combination) of what its sources send. With splits and index lists swapped it is the adjoint of
the cast. It adds in rank order, so it gives the same bits on every run.

With MAGI_ATTENTION_NATIVE_GRPCOLL=1, or ``native=True``, rows of CUDA tensors go from the senders' tensors into
memory of the receivers that all ranks of one NVLink domain share (``symm_collective``). What cannot, goes over
all-to-all-v, and the log says why once. In such a reduce, rows that a rank keeps for itself are rounded to
``comm_dtype`` like all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from magi_attention.comm.collectives import args as args_of
from magi_attention.comm.collectives.hierarchical import (
    HierarchicalLayout,
    gather_hierarchical_layout,
    start_hierarchical_cast,
    start_hierarchical_reduce,
)
from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.collectives.reduce import reduce_arrived
from magi_attention.comm.collectives.wire import start_cast, start_reduce
from magi_attention.comm.collectives.work import WorkWithPostProcessFn
from magi_attention.comm.symm.buffers import SymmGroup
from magi_attention.comm.symm.collective import (
    SymmExchange,
    is_wanted,
    start_symm_cast,
    start_symm_reduce,
    symm_group_for,
)
from magi_attention.comm.transport.base import AllToAll, Transport
from magi_attention.comm.transport.part import PartTransport
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.group_spec import GroupSpec
from magi_attention.errors import ContractError

Tensors = torch.Tensor | Sequence[torch.Tensor]
Group = dist.ProcessGroup | Transport | None
Layout = A2AVLayout | HierarchicalLayout


@torch.no_grad()
def group_cast(
    input: Tensors,
    output: Tensors,
    input_split_sizes: list[int] | torch.Tensor,
    output_split_sizes: list[int] | torch.Tensor,
    dst_indices: list[list[int]] | torch.Tensor,
    src_index: list[int] | torch.Tensor,
    group: Group,
    async_op: bool = False,
    cast_lse: bool = False,
    input_lse: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
    **kwargs: Any,
) -> WorkWithPostProcessFn:
    """Sends each input row to all ranks that need it.

    Args:
        input: (in_len, ...), or a list of tensors with in_len rows that travel in one message. Any dtype.
        output: (out_len, ...) of the same dtype(s), written; rows past the split sizes keep their content.
        input_split_sizes: rows per input split, sum in_len.
        output_split_sizes: rows per output split, sum out_len (as a tensor: at most out_len).
        dst_indices: per input split the distinct ranks that get it; as a tensor (splits, world), -1 padded.
        src_index: per output split the rank it comes from; as a tensor, padded with the world size.
        group: process group, ``Transport``, or None for the default group. Ranks above are group ranks.
        async_op: return while the rows travel; leave input and output alone until the wait.
        cast_lse: also cast ``input_lse`` to ``output_lse``, (len, heads) float32, beside (len, heads, dim).
        kwargs: ``layout``, an A2AVLayout or HierarchicalLayout in place of the four lists;
            ``check``, compare the arguments of all ranks first (default: MAGI_ATTENTION_SANITY_CHECK);
            ``intra_group``, the ranks of this rank's node, for the two-level form, where a row crosses the network
            once for each node (``inter_group`` may be given beside it and is not needed);
            ``native``, straight over NVLink or not (default: MAGI_ATTENTION_NATIVE_GRPCOLL). All ranks then compare
            their counts at the first call with a layout, and at every call with lists: keep layouts;
            ``config``, a GrpCollConfig, whose ``num_sms`` are the most SMs that it unpacks. Names may have the prefix
            ``a2av_``, ``hier_`` or ``native_``.

    Returns:
        A handle; ``wait_post_process()`` gives ``output``, or ``(output, output_lse)``.

    Raises:
        ContractError: arguments that do not fit together. PlanMismatchError: ranks disagree.
        PeerFailureError: another rank failed or did not arrive.
    """
    options = args_of.read_options("group_cast", kwargs)
    transport = as_transport(group)
    with transport.guard("group_cast"):
        inputs, outputs = args_of.as_tensors(input, "input"), args_of.as_tensors(output, "output")
        if cast_lse:
            in_lse = args_of.check_lse(inputs, input_lse, "input_lse", "cast_lse")
            out_lse = args_of.check_lse(outputs, output_lse, "output_lse", "cast_lse")
            inputs, outputs = [*inputs, in_lse], [*outputs, out_lse]
        args_of.check_pairing(inputs, outputs, same_dtype=True)
        layout = options["layout"]
        spec = None
        if layout is None:
            names = ("input_split_sizes", "output_split_sizes", "dst_indices", "src_index")
            spec = args_of.make_cast_spec(
                transport, input_split_sizes, output_split_sizes, dst_indices, src_index, names
            )
        layout = _prepare(transport, layout, spec, options, _signature("cast", inputs))
        tail = isinstance(output_split_sizes, torch.Tensor) or spec is None
        args_of.check_rows("input", layout.input_rows, inputs[0].shape[0], False)
        args_of.check_rows("output", layout.output_rows, outputs[0].shape[0], tail)
        buffers = _buffers(transport, layout, options, inputs, [[x.dtype for x in inputs]], "cast")
        if isinstance(layout, HierarchicalLayout):
            work, finish = start_hierarchical_cast(transport, _intra(options, layout), layout, inputs, outputs)
        elif buffers is not None:
            buffers.check("group_cast")
            exchange = SymmExchange.of(transport, layout, buffers, _signature("cast", inputs))
            work, finish = start_symm_cast(exchange, buffers, inputs, outputs, _num_sms(options), async_op)
        else:
            work, finish = start_cast(transport, layout, inputs, outputs)

    def post(*given: Any) -> Any:
        _check_given(given, output, output_lse)
        with transport.guard("group_cast"), torch.no_grad():
            finish()
        return (output, output_lse) if cast_lse else output

    return WorkWithPostProcessFn(work, post, async_op)


@torch.no_grad()
def group_reduce(
    input: Tensors,
    output: Tensors,
    input_split_sizes: list[int] | torch.Tensor,
    output_split_sizes: list[int] | torch.Tensor,
    dst_index: list[int] | torch.Tensor,
    src_indices: list[list[int]] | torch.Tensor,
    group: Group,
    async_op: bool = False,
    reduce_op: str = "sum",
    acc_reduce: bool = True,
    comm_dtype: torch.dtype | None = None,
    input_lse: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
    **kwargs: Any,
) -> WorkWithPostProcessFn:
    """Sends each input row to one rank, which reduces what arrives for each of its output rows.

    Args:
        input: (in_len, ...), or a list of tensors with in_len rows that travel in one message.
        output: (out_len, ...); floats are added in at least float32 and rounded to its dtype at the end.
        input_split_sizes: rows per input split, sum in_len (as a tensor: at most in_len).
        output_split_sizes: rows per output split, sum out_len.
        dst_index: per input split the rank that gets it; as a tensor, padded with the world size.
        src_indices: per output split the distinct ranks that contribute; as a tensor -1 padded.
        group, async_op: as for ``group_cast``.
        reduce_op: ``sum``; ``avg``, divided by the number of terms; ``lse``, partial attention results
            (len, heads, dim) weighted by exp(lse_i - lse) with lse = log sum exp(lse_i).
        acc_reduce: the prior content of ``output`` (and ``output_lse``) unpacks part; else it is overwritten,
            rows without a contribution by 0 (and -inf).
        comm_dtype: dtype on the wire, by default that of ``input``.
        input_lse, output_lse: (len, heads) float32 or float64, for ``lse``. They travel as they are.
        kwargs: as for ``group_cast``; ``layout`` is that of the cast of which this is the transpose.

    Returns:
        A handle; ``wait_post_process()`` gives ``output``, or ``(output, output_lse)`` for ``lse``.

    Raises:
        As ``group_cast``.
    """
    options = args_of.read_options("group_reduce", kwargs)
    transport = as_transport(group)
    with transport.guard("group_reduce"):
        inputs, outputs = args_of.as_tensors(input, "input"), args_of.as_tensors(output, "output")
        args_of.check_pairing(inputs, outputs, same_dtype=False)
        wire_dtypes = args_of.check_reduce(reduce_op, inputs, outputs, comm_dtype)
        is_lse = reduce_op == "lse"
        out_lse: torch.Tensor | None = None
        if is_lse:
            in_lse = args_of.check_lse(inputs, input_lse, "input_lse", "reduce_op='lse'")
            out_lse = args_of.check_lse(outputs, output_lse, "output_lse", "reduce_op='lse'")
            inputs, wire_dtypes = [*inputs, in_lse], [*wire_dtypes, in_lse.dtype]
        layout = options["layout"]
        spec = None
        if layout is None:
            names = ("output_split_sizes", "input_split_sizes", "src_indices", "dst_index")
            spec = args_of.make_cast_spec(
                transport, output_split_sizes, input_split_sizes, src_indices, dst_index, names
            )
        signature = (*_signature("reduce", inputs), reduce_op, str(comm_dtype))
        layout = _prepare(transport, layout, spec, options, signature)
        tail = isinstance(input_split_sizes, torch.Tensor) or spec is None
        args_of.check_rows("input", layout.output_rows, inputs[0].shape[0], tail)
        args_of.check_rows("output", layout.input_rows, outputs[0].shape[0], False)
        dtypes = [wire_dtypes, [y.dtype for y in outputs]]
        buffers = _buffers(transport, layout, options, inputs, dtypes, reduce_op)
        finish = None
        if isinstance(layout, HierarchicalLayout):
            intra = _intra(options, layout)
            work, parts = start_hierarchical_reduce(transport, intra, layout, inputs, wire_dtypes, reduce_op)
        elif buffers is not None:
            buffers.check("group_reduce")
            exchange = SymmExchange.of(transport, layout, buffers, signature)
            work, finish = start_symm_reduce(
                exchange, buffers, inputs, wire_dtypes[0], outputs, reduce_op, acc_reduce, _num_sms(options), async_op
            )
        else:
            work, parts = start_reduce(transport, layout, inputs, wire_dtypes)

    def post(*given: Any) -> Any:
        _check_given(given, output, output_lse)
        with transport.guard("group_reduce"), torch.no_grad():
            if finish is not None:
                finish()
            else:
                reduce_arrived(parts(), outputs, out_lse, reduce_op, acc_reduce)
        return (output, output_lse) if is_lse else output

    return WorkWithPostProcessFn(work, post, async_op)


def _prepare(
    transport: Transport, layout: Layout | None, spec: GroupSpec | None, options: dict, signature: tuple
) -> Layout:
    """The layout of this call; with checking on, the arguments of all ranks are compared first."""
    if layout is not None:
        if (layout.rank, layout.world) != (transport.rank, transport.size):
            raise ContractError(
                f"The layout is for rank {layout.rank} of {layout.world}, this is rank {transport.rank} of "
                f"{transport.size}; make one layout per rank."
            )
        if options["check"] and isinstance(layout, A2AVLayout):
            args_of.compare_ranks(transport, args_of.counts_of_layout(layout), signature)
        return layout
    if spec is None:
        raise ContractError("Pass splits and index lists, or a layout.")
    if args_of.is_check_on(options["check"]):
        args_of.compare_ranks(transport, args_of.counts_of_spec(spec), signature)
    if options["intra_group"] is not None:
        return gather_hierarchical_layout(transport, spec, _as_part(options["intra_group"]))
    if options["inter_group"] is not None:
        raise ContractError("inter_group alone says nothing of nodes; pass intra_group, the ranks of the own node.")
    return A2AVLayout.from_spec(spec)


def _buffers(
    transport: Transport, layout: Layout, options: dict, tensors: Sequence[torch.Tensor], dtypes: list, op: str
) -> SymmGroup | None:
    """The buffers to use, if they are wanted and fit; two levels come first."""
    if isinstance(layout, HierarchicalLayout) or not is_wanted(options["native"]):
        return None
    return symm_group_for(transport, tensors, dtypes, op)


def _num_sms(options: dict) -> int | None:
    return None if options["config"] is None else options["config"].num_sms


def _intra(options: dict, layout: HierarchicalLayout) -> AllToAll:
    if options["intra_group"] is None:
        raise ContractError("A hierarchical layout needs intra_group, the ranks of this rank's node; pass it.")
    intra, made_for = _as_part(options["intra_group"]), layout.forward
    if (intra.rank, intra.size) != (made_for.rank, made_for.world):
        raise ContractError(
            f"The layout is for rank {made_for.rank} of a node of {made_for.world}, intra_group has this process as "
            f"rank {intra.rank} of {intra.size}; pass the group of the layout's node."
        )
    return intra


def _as_part(group: Group | PartTransport) -> AllToAll:
    return group if isinstance(group, PartTransport) else as_transport(group)


def _signature(kind: str, inputs: Sequence[torch.Tensor]) -> tuple:
    return (kind, *[(str(x.dtype), tuple(x.shape[1:])) for x in inputs])


def _check_given(given: tuple, output: Tensors, output_lse: torch.Tensor | None) -> None:
    """``wait_post_process`` may be handed the buffers again, but no others."""
    for have, want in zip(given, (output, output_lse)):
        if have is not None and have is not want:
            raise ContractError(
                "wait_post_process got another tensor than the collective was started with; pass the same "
                "output, or nothing."
            )
