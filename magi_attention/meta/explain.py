# SPDX-License-Identifier: Apache-2.0
"""A plan in numbers: what ``magi explain`` prints and ``plan.explain()`` returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.traffic import direct_rows, two_level_rows
from magi_attention.errors import ContractError
from magi_attention.meta.plan import Plan
from magi_attention.meta.predict import cost
from magi_attention.meta.predict.bounds import least_rows
from magi_attention.meta.recurrent.ways import RecurrentShape, explain_ways


def explain(plan: Plan, element_bytes: int = 2, recurrent: RecurrentShape | None = None) -> dict[str, Any]:
    """Plain numbers and lists, ready for JSON.

    Keys: ``tokens, padded_tokens, cp_size, chunk_size, num_chunks, degree, area, areas`` (per rank),
    ``imbalance`` (heaviest rank over the mean), ``least_rows`` (that must move in all, ``bounds.least_rows``),
    ``imbalance_contiguous`` (without dispatch), ``shard_sizes``, ``fragments`` (ranges of tokens of each rank),
    ``rows_sent, rows_received`` (per rank), ``stage_rows`` (per rank and stage), ``bytes_per_stage`` (all ranks),
    ``bytes_total``, ``ring_bytes`` and ``all_gather_bytes`` (what those move for the same K and V; they are equal,
    the all-gather only holds everything at once), ``row_bytes``. Where queries move: ``query_rows_sent,
    query_rows_received`` (per rank; as many outputs come back), ``query_row_bytes`` (a query and its output), which
    ``bytes_total`` has in it, and ``query_moves``, what was asked for, with ``do_queries_move``. With the shape of a
    ``recurrent`` layer, ``recurrent``: the ways to run it, by bytes, and which one it takes
    (``recurrent.ways.explain_ways``).
    """
    more = {} if recurrent is None else {"recurrent": explain_ways(plan, recurrent)}
    rows = cost.stage_rows(plan)
    matrix = plan.comm_matrix()
    per_row = cost.row_bytes(plan, element_bytes)
    area = int(plan.areas.sum())
    mean = area / plan.cp_size
    contiguous = cost.contiguous_areas(plan)
    queries, per_query = plan.query_matrix(), 2 * plan.num_heads_q * plan.head_dim * element_bytes
    return {
        "tokens": plan.total_tokens,
        "padded_tokens": plan.padded_tokens,
        "cp_size": plan.cp_size,
        "chunk_size": plan.chunk_size,
        "num_chunks": plan.num_chunks,
        "degree": plan.degree,
        "area": area,
        "areas": plan.areas.tolist(),
        "imbalance": plan.imbalance,
        "least_rows": least_rows(plan),
        "imbalance_contiguous": float(contiguous.max() / mean) if area else 1.0,
        "shard_sizes": list(plan.shard_sizes),
        "fragments": [len(plan.host_ranges(rank)) for rank in range(plan.cp_size)],
        "rows_sent": matrix.sum(axis=1).tolist(),
        "rows_received": matrix.sum(axis=0).tolist(),
        "stage_rows": rows.tolist(),
        "bytes_per_stage": [int(n) * per_row for n in rows.sum(axis=0)],
        "bytes_total": int(matrix.sum()) * per_row + int(queries.sum()) * per_query,
        "ring_bytes": cost.ring_rows(plan) * per_row,
        "all_gather_bytes": cost.ring_rows(plan) * per_row,
        "row_bytes": per_row,
        "query_moves": plan.query_moves,
        "do_queries_move": plan.assigned is not None,
        "query_rows_sent": queries.sum(axis=1).tolist(),
        "query_rows_received": queries.sum(axis=0).tolist(),
        "query_row_bytes": per_query,
        **more,
    }


def explain_links(plan: Plan, nodes: Nodes | None = None) -> dict[str, Any]:
    """Bytes of K and V, in 16 bits, that a forward moves between nodes and inside them, ready for JSON. ``nodes`` are
    those of the plan if none are given; ``ContractError`` where it has none either.

    Keys: ``nodes`` (ranks of each), and for the forms ``direct`` (each row straight to every rank that needs it) and
    ``two_levels`` (once to each node): ``network_bytes`` and ``node_bytes``, of all ranks, and
    ``busiest_network_bytes`` and ``busiest_node_bytes``, which one rank receives. Gradients come back the same way.
    """
    nodes = nodes or plan.nodes
    if nodes is None:
        raise ContractError("This plan does not know which ranks share a node; make it with DispatchConfig(nodes=8).")
    per_row, found = cost.row_bytes(plan, 2), {}
    stages = [[plan.cast_spec(rank, stage) for rank in range(plan.cp_size)] for stage in range(plan.num_stages)]
    for name, count in (("direct", direct_rows), ("two_levels", two_level_rows)):
        rows = [count(specs, nodes) for specs in stages]
        network, node = sum(r.network for r in rows), sum(r.node for r in rows)
        found[name] = {
            f"{prefix}{link}_bytes": int(total(received)) * per_row
            for link, received in (("network", network), ("node", node))
            for prefix, total in (("", np.sum), ("busiest_", np.max))
        }
    return {"nodes": [list(ranks) for ranks in nodes.members], **found}
