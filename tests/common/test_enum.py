# SPDX-License-Identifier: Apache-2.0
"""Enumerations, also after their module was loaded anew, as notebooks with autoreload do."""

import importlib
import pickle
import typing

import pytest
import torch

from magi_attention import common, config
from magi_attention.common import enum as loaded
from magi_attention.common import protocols
from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable, type_code
from magi_attention.compat.metas.buckets import AttnSlice
from magi_attention.compat.metas.builders import make_global_bucket_from_qk_ranges, slice_table
from magi_attention.errors import ContractError
from magi_attention.kernels.tables import table_from_attn_arg

OLD = {name: getattr(loaded, name) for name in dir(loaded)}
ENUMS = sorted(n for n, c in OLD.items() if isinstance(c, type) and issubclass(c, OLD["ValueEnum"]) and len(c))


@pytest.fixture
def new():
    """The module loaded once more; its old classes come back afterwards."""
    yield importlib.reload(loaded)
    for name, value in OLD.items():
        setattr(loaded, name, value)


def test_every_enum_is_compared_by_value():
    kinds = [c for c in OLD.values() if isinstance(c, type) and issubclass(c, OLD["Enum"]) and len(c)]
    assert len(ENUMS) == len(kinds) == 10
    values = [member.value for kind in kinds for member in kind]
    assert all(isinstance(value, str) for value in values)


@pytest.mark.parametrize("name", ENUMS)
def test_members_of_both_copies_are_the_same(name, new):
    before, after = OLD[name], getattr(new, name)
    assert before is not after
    for a, b in zip(before, after, strict=True):
        assert a == b and b == a and hash(a) == hash(b) and {a: 1}[b] == 1 and a in [b]
        assert before.of(b) is a and after.of(a) is b and before.of(a.value) is a
        assert a not in [c for c in after if c.value != a.value] and a != a.value
        assert pickle.loads(pickle.dumps(b)) is b
    for kind in (before, after):
        with pytest.raises(ContractError, match=f"Unknown {name} 'nothing'; use one of"):
            kind.of("nothing")
    others = [getattr(new, other) for other in ENUMS if other != name]
    for other in others:
        for member in other:
            assert member not in list(before)
            with pytest.raises(ContractError, match="Unknown"):
                before.of(member)


def test_mask_types_of_a_reloaded_module(new):
    """Every argument that takes a mask type takes those of the new module, and gives what compares with them."""
    kinds = list(new.AttnMaskType)
    codes = [kind.to_int_type() for kind in kinds]
    assert [type_code(kind) for kind in kinds] == codes == [old.to_int_type() for old in OLD["AttnMaskType"]]
    q = common.AttnRanges.from_ranges([(i, i + 2) for i in range(0, 8, 2)])
    table = SliceTable.from_ranges(q, q, kinds)
    assert table.array[:, 4].tolist() == codes and slice_table(q, q, kinds) == table
    assert slice_table(q, q, new.AttnMaskType.CAUSAL) == SliceTable.from_ranges(q, q, "causal")
    assert Mask.from_slices(q, q, kinds).slices == table
    mask = common.AttnMask.from_ranges(q, q, kinds)
    assert mask.attn_mask_type == kinds and common.AttnMask.from_ranges(q, q, new.AttnMaskType.FULL).is_varlen_full()
    rects = common.AttnRectangles.from_ranges(q, q, kinds)
    single = [common.AttnRectangle(r, r, mask_type=kind) for r, kind in zip(q, kinds)]
    assert list(rects) == single and rects.area() == table.area
    assert [AttnSlice(mask_type=kind, q_range=r, k_range=r).area for r, kind in zip(q, kinds)] == [
        rect.area() for rect in single
    ]
    bucket = make_global_bucket_from_qk_ranges(q, q, kinds, 4, 2)
    assert [s.mask_type for s in bucket.attn_slices] == kinds

    class Argument:
        q_ranges = k_ranges = q
        attn_type_map = kinds

    assert table_from_attn_arg(Argument()) == table
    with pytest.raises(ContractError, match="Unknown"):
        SliceTable.from_ranges(q, q, new.AttnRole.QUERY)


def test_settings_of_a_reloaded_module(new):
    overlap = config.OverlapConfig(mode=new.AttnOverlapMode.DYNAMIC)
    assert overlap == config.OverlapConfig(mode="dynamic") and overlap.mode == new.AttnOverlapMode.DYNAMIC
    assert hash(overlap) == hash(config.OverlapConfig(mode="dynamic")) and overlap.degree is None
    assert config.MinHeapDispatchAlg().type == new.DispatchAlgType.MIN_HEAP
    assert config.UniformOverlapAlg().type == new.OverlapAlgType.UNIFORM


def test_published_names():
    names = {"GroupCastDefault", "GroupReduceDefault", "GroupCastQO", "GroupReduceQO"}
    assert {member.name for member in loaded.GrpCollBufferName} == names
    assert set(typing.get_args(loaded.OutMaybeWithLSE)) == {torch.Tensor, tuple[torch.Tensor, torch.Tensor]}
    assert loaded.AttnMaskType.of(2) is loaded.AttnMaskType.INVCAUSAL
    with pytest.raises(AttributeError, match="nothing"):
        loaded.nothing  # noqa: B018
    with pytest.raises(ContractError, match="7 is no mask type"):
        loaded.AttnMaskType.of(7)
    range_types, ranges_types = (typing.get_args(t) for t in (common.range.RangeType, common.ranges.RangesType))
    assert common.AttnRange in range_types and common.AttnRanges in ranges_types
    assert common.rectangles.NaiveRanges == common.ranges.NaiveRanges
    assert isinstance(loaded.AttnMaskType.FULL, protocols.AttnMaskTypeProtocol)
