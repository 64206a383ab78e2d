# SPDX-License-Identifier: Apache-2.0
"""Predicted time of one attention layer, forward and backward, on the rank that takes longest."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from magi_attention.config.rates import MachineRates
from magi_attention.meta.plan import Plan
from magi_attention.meta.predict.cost import CostModel, row_bytes, stage_rows, timeline


class LayerTime(TypedDict):
    """One direction of one layer, seconds: when the last rank is done, and how long the rank that computes most
    computes; the rest of the time is ``exposed_s``. ``received_bytes``: of the rank that receives most."""

    seconds: float
    compute_s: float
    exposed_s: float
    received_bytes: int


def layer_times(plan: Plan, rates: MachineRates, element_bytes: int) -> tuple[LayerTime, LayerTime]:
    """``(forward, backward)``, stage by stage as ``timeline`` has them; in one launch less is exposed.

    The backward fetches keys and values again, and returns as many bytes of gradients. Those of the last stage travel
    when nothing is left to compute; others hide behind what is fetched and computed, which the model takes for granted.
    """
    return _direction(plan, rates, element_bytes, False), _direction(plan, rates, element_bytes, True)


def _direction(plan: Plan, rates: MachineRates, element_bytes: int, is_backward: bool) -> LayerTime:
    model = CostModel.for_plan(plan, rates, element_bytes, is_backward)
    rows, bars = stage_rows(plan), timeline(plan, model)
    # Outputs of queries that moved come back, and go with dout again; as wide as what was sent.
    queries = plan.query_matrix().sum(axis=0) * plan.num_heads_q / (2 * plan.num_heads_kv)
    ends, computes = np.zeros(plan.cp_size), np.zeros(plan.cp_size)
    for bar in bars:
        ends[bar["rank"]] = max(ends[bar["rank"]], bar["end"])
        if bar["lane"] == "compute":
            computes[bar["rank"]] += bar["end"] - bar["start"]
    back = queries + (rows[:, -1] if is_backward and plan.num_stages else 0)
    ends += np.where(back > 0, back * model.row_s + model.start_s, 0.0)
    received = (rows.sum(axis=1) * (2 if is_backward else 1) + 2 * queries) * row_bytes(plan, element_bytes)
    seconds, compute = float(ends.max()), float(computes.max())
    return {
        "seconds": seconds, "compute_s": compute, "exposed_s": seconds - compute,
        "received_bytes": int(received.max()),
    }  # fmt: skip
