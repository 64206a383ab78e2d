# SPDX-License-Identifier: Apache-2.0
"""What a mask type, a range, a list of ranges, a rectangle and a list of rectangles must offer.

The protocols are runtime-checkable: ``isinstance(x, AttnRangeProtocol)`` tests that the members exist. What they take
and give, the classes of ours say. To type checkers a protocol is that class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable


def _protocol(name: str, doc: str, members: str) -> Any:
    body = {"__doc__": doc, "__module__": __name__, **dict.fromkeys(members.split(), lambda self: None)}
    return runtime_checkable(type(Protocol)(name, (Protocol,), body))  # type: ignore[arg-type]


_OF_LIST = (
    "from_ranges append extend clone is_valid check_valid is_empty size __len__ __getitem__ __setitem__ __iter__ "
)

if TYPE_CHECKING:
    from magi_attention.common.enum import AttnMaskType as AttnMaskTypeProtocol
    from magi_attention.common.range import AttnRange as AttnRangeProtocol
    from magi_attention.common.ranges import AttnRanges as AttnRangesProtocol
    from magi_attention.compat.values.rectangle import AttnRectangle as AttnRectangleProtocol
    from magi_attention.compat.values.rectangles import AttnRectangles as AttnRectanglesProtocol
else:
    AttnMaskTypeProtocol = _protocol(
        "AttnMaskTypeProtocol", "A mask type with an integer form.", "from_int_type to_int_type"
    )
    AttnRangeProtocol = _protocol(
        "AttnRangeProtocol", "A half-open interval ``[start, end)``.",
        "start end seqlen from_range to_naive_range clone offset truncate intersect intersect_size union union_size "
        "diff_by is_subrange_of is_overlap_with is_empty is_valid_close is_valid_open check_valid __len__",
    )  # fmt: skip
    AttnRangesProtocol = _protocol(
        "AttnRangesProtocol", "A list of intervals.",
        _OF_LIST + "from_cu_seqlens insert pop clear_empty sort merge merge_with_split_alignment chunk truncate "
        "is_sorted is_merged is_non_overlap is_cu_seqlens make_range_local make_ranges_local find_hole_ranges "
        "find_overlap_ranges intersect_size intersect_size_with union_size union_size_with to_tensor to_naive_ranges "
        "to_cu_seqlens total_seqlen max_seqlen points start end",
    )  # fmt: skip
    AttnRectangleProtocol = _protocol(
        "AttnRectangleProtocol", "A rectangle of pairs cut by a band of diagonals.",
        "q_range k_range d_range shrink_q_range shrink_k_range shrink_d_range get_valid_or_none is_valid check_valid "
        "cut_q cut_k get_rect_within_q_segment get_rect_within_k_segment intersection_q_id_on_left_boundary "
        "intersection_q_id_on_right_boundary is_full is_causal is_inv_causal is_bi_causal to_qk_range_mask_type area "
        "count_areas clone __len__",
    )  # fmt: skip
    AttnRectanglesProtocol = _protocol(
        "AttnRectanglesProtocol", "A list of rectangles.",
        _OF_LIST + "get_qo_ranges_union get_kv_ranges_union total_seqlen_qo total_seqlen_kv cut_q cut_k "
        "get_rects_within_q_segment get_rects_within_k_segment area",
    )  # fmt: skip
