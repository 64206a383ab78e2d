# SPDX-License-Identifier: Apache-2.0
"""The schedule of a backward: asked of the planner library (``csrc/planner/schedule``) and kept with the mask."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.peer_kv import RemoteKeys
from magi_attention.kernels.types import AttnOptions, RangeTensors
from magi_attention.native import abi
from magi_attention.native.planner import abi as schedule_abi
from magi_attention.native.planner.schedule import BwdSchedule, choose, outline
from magi_attention.native.planner.tile_plan import TilePlan

_TILE = 128  # keys
_CAUSAL, _FULL = AttnMaskType.CAUSAL.to_int_type(), AttnMaskType.FULL.to_int_type()
UNKNOWN = BwdSchedule(64, 0)  # right for any mask, and without a schedule of the host
_MAX_SHAPES = 1024


class RecentSchedules:
    """The schedule of the last backward of each shape whose mask the host knew.

    The host learns of range tensors on a GPU when the GPU gets to them. Where each training step has a mask of its own,
    all layers may be launched by then. Masks of one run are alike, so such calls take the schedule of the last mask
    that the host knew, but for what it has to make for each mask.
    """

    def __init__(self) -> None:
        self._schedules: dict[tuple[object, ...], BwdSchedule] = {}

    def best(
        self, schedule: BwdSchedule, q_shape: tuple[int, ...], v_shape: tuple[int, ...], options: AttnOptions
    ) -> BwdSchedule:
        """``schedule`` as ``select_schedule`` gives it; a better one if the host does not know the mask.

        With ``deterministic`` always ``schedule``: the bits must not depend on what the host knows.
        """
        if options.deterministic:
            return schedule
        key = q_shape, v_shape, options.is_plain
        found = self._schedules.get(key)
        if schedule is UNKNOWN:
            return schedule if found is None else found._replace(by_document=False)
        if found is not schedule:
            if len(self._schedules) >= _MAX_SHAPES:
                self._schedules.clear()
            self._schedules[key] = schedule
        return schedule


SCHEDULES: Kind[tuple[object, ...], BwdSchedule] = Kind("schedule of a backward")
_OUTLINES: Kind[tuple[int, int], NDArray[np.int32]] = Kind("outline of a tile plan")


def select_schedule(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], mask: SliceTable | RangeTensors | RemoteKeys,
    options: AttnOptions, num_sms: int,
) -> BwdSchedule:  # fmt: skip
    """``q_shape`` (Tq, Hq, D), ``v_shape`` (Tk, Hk, Dv); ``num_sms``: SMs of the device. Kept with the
    slices, which never change.

    Nothing is known of range tensors on a GPU: those get ``UNKNOWN``.
    """
    slices: SliceTable | RangeTensors
    if isinstance(mask, RemoteKeys):
        is_remote, slices, keys = True, mask.mask.slices, mask.mask.total_k
    else:
        is_remote, slices, keys = False, mask, v_shape[0]
    if not isinstance(slices, SliceTable):
        return UNKNOWN
    return schedule_of(q_shape, v_shape, slices, keys, is_remote, options, num_sms)


def schedule_of(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], slices: SliceTable, keys: int, is_remote: bool,
    options: AttnOptions, num_sms: int,
) -> BwdSchedule:  # fmt: skip
    """As ``select_schedule``, of ``slices`` over so many ``keys``, of which some arrive if ``is_remote``."""
    key = (q_shape, v_shape, keys, is_remote, options.deterministic, options.is_plain, num_sms)
    kept = slices.cache.find(SCHEDULES, key)
    if kept is None:
        kept = slices.cache.get(SCHEDULES, key, partial(_choose, slices, *key))
    return kept


def _choose(
    slices: SliceTable, q_shape: tuple[int, ...], v_shape: tuple[int, ...], keys: int, is_remote: bool,
    is_deterministic: bool, is_plain: bool, num_sms: int,
) -> BwdSchedule:  # fmt: skip
    if not q_shape[0] or not keys:
        return BwdSchedule(64, 0)
    types = slices.array[:, 4]
    problem = schedule_abi.ScheduleProblem(
        kind=abi.BWD, total_q=q_shape[0], total_k=keys, local_k=v_shape[0], heads_q=q_shape[1], heads_kv=v_shape[1],
        head_dim=q_shape[2], head_dim_v=v_shape[2], num_sms=num_sms, num_ctas=num_sms, tail_parts=1,
        is_deterministic=is_deterministic, is_plain=is_plain, is_remote=is_remote,
        has_diagonal=bool((types != _FULL).any()), is_all_causal=bool((types == _CAUSAL).all()), area=slices.area,
    )  # fmt: skip

    def make() -> NDArray[np.int32]:
        # Held for the launch that follows, whose plan it mostly is.
        return outline(TilePlan.of_table(slices, q_shape[0], keys, _TILE, 2, is_transposed=True, is_kept=True))

    return choose(slices.cache.get(_OUTLINES, (q_shape[0], keys), make), problem)


__all__ = ["SCHEDULES", "UNKNOWN", "BwdSchedule", "RecentSchedules", "schedule_of", "select_schedule"]
