# SPDX-License-Identifier: Apache-2.0
"""``flex_flash_attn_func``: attention on one device over a list of AttnSlices, with gradients."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.scalars import as_float, as_int
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional.calls.autocast import autocast_dtype, cast_operands
from magi_attention.functional.calls.inputs import check_devices, check_qkv
from magi_attention.functional.sparse.index_attn import attend_lists, index_attn_func
from magi_attention.kernels.ffa.custom_ops import WATCHED, call_flex_fwd, has_kernels, prepared_flex_fwd
from magi_attention.kernels.ffa.launch_cache import KnownCalls
from magi_attention.kernels.index_attn import prepare_indices
from magi_attention.kernels.reference.correction import check_sink
from magi_attention.kernels.types import as_scale

_INTEGERS = (torch.int32, torch.int64)
_LEGACY_NOTE = (
    "max_seqlen_q and max_seqlen_k after the ranges are the calling form of 1.0.x; pass neither. "
    "The second result is an AttnForwardMeta with lse (tokens, heads), not lse (heads, tokens)."
)


def _with_launch_cache(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, which also takes the calling forms of 1.0.x and of newer releases.

    The second call with the same operands is launched by native code, from the cache ``known_calls``. Under
    ``torch.compile`` there is no cache, so that the compiler sees one custom op.
    """
    signature = inspect.signature(func)
    known = KnownCalls(signature, AttnForwardMeta, prepared_flex_fwd, has_kernels, WATCHED, ignored=("max_seqlen_q",))

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("index_sparse_indices") is not None:
            return _index_sparse(signature, args, kwargs)
        if autocast_dtype(args[0] if args else kwargs.get("q")) is not None:
            args, kwargs = _cast_call(args, kwargs)
        if is_compiling():
            args, kwargs = _without_bounds(args, kwargs)
            return func(*args, **kwargs)
        result = known.find(*args, **kwargs)
        if result is None:
            args, kwargs = _without_bounds(args, kwargs)
            result = func(*args, **kwargs)
            known.remember(*args, **kwargs)
        return result

    call.known_calls = known  # type: ignore[attr-defined]
    return call


def _cast_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with q, k and v in the dtype of autocast; a call that lacks one is left for its own error."""
    given = {**kwargs, **dict(zip("qkv", args))}
    if not all(name in given for name in "qkv"):
        return args, kwargs
    cast = dict(zip("qkv", cast_operands(given["q"], given["k"], given["v"])))
    positional = tuple(cast[name] for name, _ in zip("qkv", args))
    return positional + args[3:], {name: cast.get(name, x) for name, x in kwargs.items()}


def _without_bounds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Translates ``(q, k, v, q_ranges, k_ranges, max_seqlen_q, max_seqlen_k, attn_type_map)`` of 1.0.x.

    It is told by an int in sixth place or by the keyword ``max_seqlen_k``. The bounds are dropped: they were
    hints. The result is always ``(out, AttnForwardMeta)``.
    """
    is_positional = len(args) > 5 and isinstance(args[5], int)
    if not is_positional and "max_seqlen_k" not in kwargs:
        return args, kwargs
    warnings.warn(_LEGACY_NOTE, DeprecationWarning, stacklevel=3)
    kwargs = {name: value for name, value in kwargs.items() if name != "max_seqlen_k"}
    if is_positional:
        has_k_bound = len(args) > 6 and isinstance(args[6], int)
        rest = args[7:] if has_k_bound else args[6:]
        if len(rest) > 1:
            raise ContractError("Pass all arguments after attn_type_map by keyword.")
        kwargs.pop("max_seqlen_q", None)
        args = args[:5] + rest
    return args, kwargs


def _index_sparse(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """``flex_flash_attn_func(q, k, v, index_sparse_indices=..., sparse_k_block_size=1)`` of releases after 1.1.x.

    It is ``index_attn_func`` with the lists (Tq, Hk, N) of rows or blocks of k. ``index_sparse`` and ``block_sparse``
    are hints, as ``index_attn`` and ``sparse_load`` under their newer names.
    """
    kwargs = {name: x for name, x in kwargs.items() if name not in ("index_sparse", "block_sparse")}
    indices = kwargs.pop("index_sparse_indices")
    block = as_int(kwargs.pop("sparse_k_block_size", 1), "sparse_k_block_size")
    given = signature.bind(*args, **kwargs).arguments
    clash = [n for n in ("q_ranges", "k_ranges", "attn_type_map", "index_attn_indices") if given.get(n) is not None]
    if clash:
        raise ContractError(f"index_sparse_indices and {' and '.join(clash)} exclude each other; give one of them.")
    options = {n: given[n] for n in inspect.signature(index_attn_func).parameters if n in given}
    if block != 1:
        indices = prepare_indices(indices.to(given["q"].device), given["k"].shape[0], k_block_size=block)
    return index_attn_func(indices=indices, **options)


@_with_launch_cache
def flex_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_ranges: torch.Tensor | None = None,
    k_ranges: torch.Tensor | None = None,
    attn_type_map: torch.Tensor | None = None,
    *,
    index_attn_indices: torch.Tensor | None = None,
    q_block_size: int = 1,
    k_block_size: int = 1,
    sink: torch.Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    disable_fwd_atomic_reduction: bool = False,
    disable_bwd_dkv_atomic_reduction: bool = False,
    ref_block_size: tuple[int, int] | None = None,
    max_seqlen_q: int | None = None,
    auto_range_merge: bool = False,
    swap_ab: bool = False,
    pack_gqa: bool = False,
    cat_gqa: bool = False,
    sparse_load: bool = False,
    index_attn: bool = False,
    swap_bwd_qk_loop: bool = False,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention over AttnSlices: query row i sees key row j if a slice allows the pair.

    Slices should be disjoint: a pair that two of them allow counts twice, on every device; backends ``fa4`` and
    ``cudnn_flex`` refuse such slices, and so does ``MAGI_ATTENTION_SANITY_CHECK=1`` everywhere. A row that sees
    nothing gives out 0, lse -inf and gradients 0. Inputs may have any strides. Under
    ``torch.compile(fullgraph=True)`` the call is one custom op. Under ``torch.autocast`` q, k and v take its dtype.

    Args:
        q: (Tq, Hq, D). k: (Tk, Hk, D). v: (Tk, Hk, Dv). One floating dtype, Hq a multiple of Hk.
        q_ranges, k_ranges: (N, 2) int32 or int64, half-open row ranges, on q's device or, for a backward that is
            faster from the first call on, on the CPU.
        attn_type_map: (N,) integer: 0 full, 1 causal, 2 inverse causal, 3 bi-causal; None: all full.
        index_attn_indices: in place of the ranges, int (Tq / n, n, max_topk) with any n: for row r of q,
            in flat order, the rows of k that it sees, padded with -1. k and v have one head then. It is
            ``index_attn_func`` of lists (Tq, 1, max_topk), which is the plain way to say it. Newer releases take that
            function's own lists as ``index_sparse_indices``, with ``sparse_k_block_size``; so does this one.
        q_block_size, k_block_size: must be 1, with indices.
        sink: (S, Hq) for ``sink_layout`` "sh", (Tq, S, Hq) for "ssh": extra logits in the softmax sum.
        softmax_scale: a number, default ``D ** -0.5``. A tensor of one element counts as its present value and is
            refused if it requires a gradient; to learn a scale, multiply q by it.
        softcap: a number; if positive, logits are ``softcap * tanh(scale * q.k / softcap)``.
        deterministic: bitwise repeatable results. On a GPU gradients then take up to 1.2 times as long, and 5 us more
            where the order of sums is not yet known: at the first call of a mask, and mostly in CUDA graphs.
        sm_margin: SMs that a GPU kernel leaves free.
        return_max_logits: also give the largest logit of each query head.
        disable_fwd_atomic_reduction, disable_bwd_dkv_atomic_reduction, ref_block_size, max_seqlen_q,
            auto_range_merge, swap_ab, pack_gqa, cat_gqa, sparse_load, index_attn, swap_bwd_qk_loop: hints
            about how to compute. They never change the result, and combinations that 1.1.x refused are
            refused.

    Returns:
        ``(out, meta)``: out (Tq, Hq, Dv) in q's dtype; ``meta.lse`` (Tq, Hq) and ``meta.max_logits`` (Hq,)
        or None, float32 (float64 for float64 inputs). lse is differentiable as out is, max_logits has no gradient.

    Raises:
        ContractError: shapes, dtypes, devices or flags do not fit together. In the backward: ranges that the host
            reads were changed since the forward, below a checkpoint or hooks of saved tensors.
        RangeError: a malformed range. The CUDA kernels plan on the GPU and leave such slices out without an error;
            with ``MAGI_ATTENTION_SANITY_CHECK=1`` they are refused there too.
        UnsupportedError: ``sparse_load`` without ``auto_range_merge``, ``disable_bwd_dkv_atomic_reduction``
            with ``swap_bwd_qk_loop`` (both RuntimeErrors), block sizes above 1, sink layout "shd".
        NoBackendError: the backend asked for by environment cannot run the problem.
    """
    if (
        sparse_load or disable_bwd_dkv_atomic_reduction or swap_bwd_qk_loop or cat_gqa or ref_block_size is not None
        or q_block_size != 1 or k_block_size != 1
    ):  # fmt: skip
        _check_flags(
            sparse_load=sparse_load, auto_range_merge=auto_range_merge or index_attn_indices is not None,
            disable_dkv=disable_bwd_dkv_atomic_reduction, swap_loop=swap_bwd_qk_loop, deterministic=deterministic,
            pack_gqa=pack_gqa, cat_gqa=cat_gqa, swap_ab=swap_ab, tile=ref_block_size,
            blocks=(q_block_size, k_block_size),
        )  # fmt: skip
    if index_attn_indices is not None or index_attn:
        check_call(q, k, v, q_ranges, k_ranges, attn_type_map, sink, sink_layout, index_attn_indices, index_attn)
        assert index_attn_indices is not None, "the flag alone is refused"
        lists = prepare_indices(index_attn_indices.flatten(0, 1)[:, None].to(q.device), k.shape[0])
        return attend_lists(
            q, k, v, lists, head_dim_v=v.shape[2], sink=sink, sink_layout=sink_layout, softmax_scale=softmax_scale,
            softcap=softcap, deterministic=deterministic, sm_margin=sm_margin, return_max_logits=return_max_logits,
        )  # fmt: skip
    # Numbers, because what is prepared would know a tensor by its identity.
    out, lse, max_logits = call_flex_fwd(
        q, k, v, q_ranges, k_ranges, attn_type_map, sink, sink_layout,
        None if softmax_scale is None else as_scale(softmax_scale), as_float(softcap, "softcap"), bool(deterministic),
        as_int(sm_margin, "sm_margin"), bool(return_max_logits), "", check_call,
    )  # fmt: skip
    return out, AttnForwardMeta(lse, max_logits if return_max_logits else None)


def check_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_ranges: torch.Tensor | None,
    k_ranges: torch.Tensor | None,
    attn_type_map: torch.Tensor | None,
    sink: torch.Tensor | None = None,
    sink_layout: str = "sh",
    indices: torch.Tensor | None = None,
    index_attn: bool = False,
) -> None:
    """Raises ``ContractError`` unless tensors and mask fit together; looks at layouts alone, at no value."""
    _check_kinds({"q": q, "k": k, "v": v}, q_ranges=q_ranges, k_ranges=k_ranges, attn_type_map=attn_type_map,
                 sink=sink, index_attn_indices=indices)  # fmt: skip
    if not isinstance(sink_layout, str):
        raise ContractError(f'Unknown sink layout {sink_layout!r}; use "sh" or "ssh".')
    check_qkv(q, k, v)
    if sink is not None:
        check_sink(sink, q.shape[0], q.shape[1], sink_layout)
        check_devices(q, sink=sink)
    _check_mask_devices(q, q_ranges=q_ranges, k_ranges=k_ranges, attn_type_map=attn_type_map, indices=indices)
    if (q_ranges is None) == (indices is None):
        raise ContractError("Give either q_ranges and k_ranges or index_attn_indices, exactly one of the two.")
    if indices is not None:
        if k_ranges is not None or attn_type_map is not None:
            raise ContractError("k_ranges and attn_type_map belong to q_ranges; drop them with index_attn_indices.")
        _check_indices(q, k, indices)
        return
    if index_attn:
        raise ContractError("index_attn needs index_attn_indices; pass them in place of the ranges.")
    if k_ranges is None:
        raise ContractError("k_ranges is missing; give one k range per q range.")
    _check_ranges(q_ranges, k_ranges, attn_type_map)  # type: ignore[arg-type]


def _check_kinds(needed: dict[str, object], **others: object) -> None:
    """Each is a tensor, and the others may be None."""
    for name, x in {**needed, **others}.items():
        if not isinstance(x, torch.Tensor) and (x is not None or name in needed):
            what = "None" if x is None else f"of type {type(x).__name__}"
            raise ContractError(f"{name} is {what}; give a tensor.")


def _check_mask_devices(q: torch.Tensor, **masks: torch.Tensor | None) -> None:
    """A mask is on q's device or on the CPU, all of it on the same."""
    devices = {x.device for x in masks.values() if x is not None}
    if len(devices) > 1 or any(device.type != "cpu" and device != q.device for device in devices):
        listing = ", ".join(f"{name} on {x.device}" for name, x in masks.items() if x is not None)
        raise ContractError(f"{listing}, q on {q.device}; move the mask to {q.device} or leave all of it on the CPU.")


def _check_indices(q: torch.Tensor, k: torch.Tensor, indices: torch.Tensor) -> None:
    fits = indices.dim() == 3 and indices.dtype in _INTEGERS and k.shape[1] == 1
    if not fits or indices.shape[0] * indices.shape[1] != q.shape[0]:
        raise ContractError(
            f"index_attn_indices {tuple(indices.shape)} {indices.dtype} with q {tuple(q.shape)} and k "
            f"{tuple(k.shape)}: give int32 (tokens, kv heads, max_topk) with tokens * kv heads rows of q, "
            "and k, v with one head."
        )


def _check_ranges(q_ranges: torch.Tensor, k_ranges: torch.Tensor, types: torch.Tensor | None) -> None:
    for name, x in (("q_ranges", q_ranges), ("k_ranges", k_ranges)):
        if x.dim() != 2 or x.shape[1] != 2 or x.dtype not in _INTEGERS:
            raise ContractError(f"{name} is {tuple(x.shape)} {x.dtype}; give int32 (N, 2).")
    num = q_ranges.shape[0]
    if k_ranges.shape[0] != num:
        raise ContractError(f"{num} q ranges but {k_ranges.shape[0]} k ranges; give one k range per q range.")
    if types is not None and (types.dim() != 1 or types.dtype not in _INTEGERS):
        raise ContractError(f"attn_type_map is {tuple(types.shape)} {types.dtype}; give int32 (N,).")
    if types is not None and types.shape[0] != num:
        raise ContractError(f"attn_type_map has {types.shape[0]} entries for {num} slices; give one for each.")


def _check_flags(
    *,
    sparse_load: bool,
    auto_range_merge: bool,
    disable_dkv: bool,
    swap_loop: bool,
    deterministic: bool,
    pack_gqa: bool,
    cat_gqa: bool,
    swap_ab: bool,
    tile: tuple[int, int] | None,
    blocks: tuple[int, int],
) -> None:
    if sparse_load and not auto_range_merge:
        raise UnsupportedError("sparse_load needs auto_range_merge=True; set both or neither.")
    if disable_dkv and swap_loop:
        raise UnsupportedError(
            "disable_bwd_dkv_atomic_reduction and swap_bwd_qk_loop exclude each other; drop one of them."
        )
    if swap_loop and deterministic:
        raise ContractError("swap_bwd_qk_loop and deterministic exclude each other; drop one of them.")
    if cat_gqa and (pack_gqa or swap_loop):
        raise ContractError("cat_gqa excludes pack_gqa and swap_bwd_qk_loop; drop one of them.")
    if blocks != (1, 1):
        raise UnsupportedError(f"q_block_size and k_block_size are {blocks}; only 1 is supported.")
    if tile is not None:
        m, n = tile
        ok = (m in (8, 16, 32, 64) and n == 64) if swap_ab else (m in (64, 128, 192) and 0 < n <= 256 and n % 16 == 0)
        if not ok:
            raise ContractError(
                f"ref_block_size {(m, n)} is no tile; use 64, 128 or 192 by a multiple of 16 up to 256, "
                "or with swap_ab 8, 16, 32 or 64 by 64."
            )
