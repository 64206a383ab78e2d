# SPDX-License-Identifier: Apache-2.0
"""The diagrams of docs/design: what ``make_design_pictures`` draws as boxes and arrows.

A diagram is (size in inches, boxes, arrows). A box is (x, y, width, height, colour, title, text), an arrow (from, to,
label).
"""

from __future__ import annotations

HOST, DEVICE, WIRE, PLAIN = "#dbe7f6", "#fbe6cf", "#d9efdd", "#f3f4f6"

OVERVIEW = (
    (8.6, 6.2),
    [
        (0.2, 5.3, 2.6, 0.7, HOST, "Mask", "slices; no torch"),
        (0.2, 4.0, 2.6, 0.9, HOST, "build_plan", "chunks, dispatch, stages\n(magi_attention/meta)"),
        (0.2, 2.7, 2.6, 0.9, HOST, "Plan", "a value: hashed, compared,\nthe same on all ranks"),
        (0.2, 0.2, 2.6, 1.2, HOST, "TilePlan", "tiles and segments of one\nkernel call (csrc/planner)"),
        (3.6, 5.3, 4.8, 0.7, HOST, "attend, calc_attn, flex_flash_attn_func", "magi_attention/api, functional"),
        (3.6, 4.0, 4.8, 0.9, HOST, "AttnRuntime", "one plan on one rank: checks, backend, mode"),
        (3.6, 2.7, 2.2, 0.9, WIRE, "StageComm", "staged: rows over\nthe process group"),
        (6.2, 2.7, 2.2, 0.9, WIRE, "FusedAttention", "fused: symmetric\nbuffers over NVLink"),
        (3.6, 1.55, 4.8, 0.75, HOST, "FfaBackend", "plan cache, parameter block, one C call"),
        (3.6, 0.2, 4.8, 0.9, DEVICE, "ffa_fwd, ffa_bwd", "work tiles on all SMs (csrc/ffa/sm90)"),
    ],
    [
        ((1.5, 5.3), (1.5, 4.9), ""),
        ((1.5, 4.0), (1.5, 3.6), ""),
        ((2.8, 3.3), (3.6, 4.3), "rank(r)"),
        ((6.0, 5.3), (6.0, 4.9), ""),
        ((4.7, 4.0), (4.7, 3.6), ""),
        ((7.3, 4.0), (7.3, 3.6), ""),
        ((4.7, 2.7), (4.7, 2.3), ""),
        ((7.3, 2.7), (7.3, 2.3), ""),
        ((6.0, 1.55), (6.0, 1.1), ""),
        ((1.5, 2.7), (1.5, 1.4), "slices"),
        ((2.8, 0.65), (3.6, 0.65), ""),
    ],
)

BACKWARD = (
    (9.2, 5.6),
    [
        (0.2, 4.0, 2.5, 1.4, DEVICE, "preprocess", "delta and offsets; clears\ndq_accum or finds\nsemaphore targets"),
        (
            3.3,
            4.0,
            3.0,
            1.4,
            DEVICE,
            "main: one work tile",
            "128 keys of one kv head;\nloops over m-blocks; dk, dv\nstay in registers",
        ),
        (6.9, 4.0, 2.1, 1.4, DEVICE, "combine", "only for splits:\nadds the parts\nof dk and dv"),
        (0.2, 2.3, 1.9, 0.8, PLAIN, "atomic", "adds as it comes"),
        (2.4, 2.3, 1.9, 0.8, PLAIN, "first writer", "stores, others add"),
        (4.6, 2.3, 1.9, 0.8, PLAIN, "deterministic", "adds in a fixed order"),
        (6.9, 2.3, 2.1, 0.8, PLAIN, "direct store", "one contribution only"),
        (0.2, 0.3, 4.1, 1.1, PLAIN, "dq_accum", "float32 in the workspace"),
        (4.9, 0.3, 1.9, 1.1, DEVICE, "postprocess", "scales, rounds"),
        (7.4, 0.3, 1.6, 1.1, PLAIN, "dq", "bf16 or fp16"),
    ],
    [
        ((2.7, 4.7), (3.3, 4.7), ""),
        ((6.3, 4.7), (6.9, 4.7), ""),
        ((4.0, 4.0), (1.2, 3.1), ""),
        ((4.5, 4.0), (3.4, 3.1), ""),
        ((5.1, 4.0), (5.5, 3.1), ""),
        ((5.6, 4.0), (7.9, 3.1), ""),
        ((1.1, 2.3), (1.1, 1.4), ""),
        ((3.3, 2.3), (3.3, 1.4), ""),
        ((5.2, 2.3), (4.0, 1.4), ""),
        ((4.3, 0.85), (4.9, 0.85), ""),
        ((6.8, 0.85), (7.4, 0.85), ""),
        ((8.2, 2.3), (8.2, 1.4), ""),
    ],
)

PORTABLE = (
    (9.2, 5.2),
    [
        (
            0.2, 4.2, 8.8, 0.7, HOST, "one parameter block, one tile plan",
            "FfaBackend takes the library of the GPU's family",
        ),  # fmt: skip
        (0.2, 2.6, 2.0, 1.1, DEVICE, "ffa_sm90", "9.0: wgmma, TMA,\nwarp roles"),
        (2.5, 2.6, 2.0, 1.1, DEVICE, "ffa_sm80", "8.0, 8.6, 8.9"),
        (4.8, 2.6, 2.0, 1.1, DEVICE, "ffa_sm100", "10.0, 10.3"),
        (7.0, 2.6, 2.0, 1.1, DEVICE, "ffa_sm120", "12.0, 12.1"),
        (2.5, 1.2, 6.5, 0.9, PLAIN, "csrc/ffa/portable", "one source: mma.sync, ldmatrix, cp.async"),
        (2.5, 0.1, 3.1, 0.7, PLAIN, "tiles for 163 KB", "8.0, 9.0, 10.x"),
        (5.9, 0.1, 3.1, 0.7, PLAIN, "tiles for 99 KB", "8.6, 8.9, 12.x"),
    ],
    [
        ((1.2, 4.2), (1.2, 3.7), ""),
        ((3.5, 4.2), (3.5, 3.7), ""),
        ((5.8, 4.2), (5.8, 3.7), ""),
        ((8.0, 4.2), (8.0, 3.7), ""),
        ((3.5, 2.6), (3.5, 2.1), ""),
        ((5.8, 2.6), (5.8, 2.1), ""),
        ((8.0, 2.6), (8.0, 2.1), ""),
        ((4.0, 1.2), (4.0, 0.8), ""),
        ((7.4, 1.2), (7.4, 0.8), ""),
    ],
)

FUSED = (
    (9.2, 4.4),
    [
        (0.2, 3.1, 1.3, 1.0, PLAIN, "rank 0", "backward, one\nstream"),
        (1.9, 3.1, 1.4, 1.0, DEVICE, "put", "K and V rows"),
        (3.6, 3.1, 2.0, 1.0, DEVICE, "attention", "waits for tiles of\n128 remote keys"),
        (5.9, 3.1, 1.4, 1.0, DEVICE, "postprocess", "rank barrier"),
        (7.6, 3.1, 1.4, 1.0, DEVICE, "reduce", "in rank order"),
        (0.2, 0.3, 1.3, 1.2, PLAIN, "rank 1", "symmetric\nbuffers"),
        (1.9, 0.3, 1.4, 1.2, WIRE, "keys", "K and V rows\nthat it reads"),
        (3.6, 0.3, 2.0, 1.2, WIRE, "grads", "partial dk and dv\nof its keys"),
        (5.9, 0.3, 3.1, 1.2, WIRE, "control words", "at the start of each buffer:\nsignals, credits, epoch"),
    ],
    [
        ((3.3, 3.6), (3.6, 3.6), ""),
        ((5.6, 3.6), (5.9, 3.6), ""),
        ((7.3, 3.6), (7.6, 3.6), ""),
        ((2.6, 3.1), (2.6, 1.5), "rows, then signals"),
        ((4.6, 3.1), (4.6, 1.5), "dk, dv"),
        ((6.8, 3.1), (7.0, 1.5), "signal"),
        ((8.3, 3.1), (8.3, 1.5), "credits"),
    ],
)


TWO_LEVELS = (
    (9.2, 5.4),
    [
        (0.2, 4.3, 1.6, 0.8, PLAIN, "node 0", "owner of a row"),
        (0.2, 2.7, 1.6, 0.9, HOST, "rank 0", "rows of K and V"),
        (0.2, 0.5, 1.6, 0.9, WIRE, "GRADS", "one sum of\neach far node"),
        (3.6, 4.3, 5.4, 0.8, PLAIN, "node 1", "three ranks that need the row"),
        (3.6, 2.7, 2.0, 0.9, WIRE, "HELD", "each far row once,\non the carrier"),
        (3.6, 0.5, 2.0, 0.9, WIRE, "TERMS", "on the carrier:\nadded in rank order"),
        (7.0, 3.1, 2.0, 0.8, WIRE, "OUT of rank 3", "the carrier itself"),
        (7.0, 2.1, 2.0, 0.8, WIRE, "OUT of rank 4", "dk, dv computed"),
        (7.0, 1.1, 2.0, 0.8, WIRE, "OUT of rank 5", "dk, dv computed"),
    ],
    [
        ((1.8, 3.15), (3.6, 3.15), "network, once"),
        ((5.6, 3.25), (7.0, 3.5), "forward"),
        ((5.6, 3.1), (7.0, 2.6), ""),
        ((5.6, 2.95), (7.0, 1.75), ""),
        ((7.0, 3.2), (5.6, 1.3), ""),
        ((7.0, 2.2), (5.6, 1.1), "terms"),
        ((7.0, 1.3), (5.6, 0.85), ""),
        ((3.6, 0.95), (1.8, 0.95), "network, one sum"),
    ],
)

RECURRENT = (
    (9.2, 4.4),
    [
        (0.2, 3.3, 1.9, 0.9, HOST, "rank 0, fragment 0", "document 0 begins"),
        (2.5, 3.3, 1.9, 0.9, WIRE, "rank 1, fragment 0", "inside document 0"),
        (4.8, 3.3, 1.9, 0.9, HOST, "rank 0, fragment 1", "document 0 ends,\ndocument 1 begins"),
        (7.1, 3.3, 1.9, 0.9, WIRE, "rank 1, fragment 1", "document 1 ends; pad"),
        (0.2, 1.7, 1.9, 0.9, PLAIN, "summary", "B"),
        (2.5, 1.7, 1.9, 0.9, PLAIN, "summary", "A, B"),
        (4.8, 1.7, 1.9, 0.9, PLAIN, "summary", "B of document 1"),
        (0.2, 0.1, 8.8, 0.9, DEVICE, "kernel for packed documents", "each segment from the state that came, zero at "
         "the beginning of a document"),
    ],
    [
        ((1.15, 3.3), (1.15, 2.6), ""),
        ((3.45, 3.3), (3.45, 2.6), ""),
        ((5.75, 3.3), (5.75, 2.6), ""),
        ((2.1, 2.0), (3.2, 1.0), "state of 0"),
        ((4.4, 2.0), (5.5, 1.0), "A S + B"),
        ((6.7, 2.0), (7.8, 1.0), "state of 1"),
    ],
)  # fmt: skip

INDEX_ATTENTION = (
    (9.2, 4.6),
    [
        (0.2, 3.3, 2.2, 1.0, HOST, "indices or blocks", "top-k keys of a query,\nor a block mask"),
        (3.0, 3.3, 2.2, 1.0, DEVICE, "prepare", "ascending, each once;\na bit for each entry"),
        (5.8, 3.3, 3.2, 1.0, PLAIN, "lists and key counts", "one list for a kv head and some queries"),
        (0.2, 1.7, 2.2, 1.0, PLAIN, "K, V", "rows anywhere,\nshared in L2"),
        (3.0, 1.7, 2.2, 1.0, DEVICE, "producer warpgroup", "cp.async, 16 bytes\nfor each lane"),
        (5.8, 1.7, 3.2, 1.0, DEVICE, "consumer warpgroups", "wgmma; 64 or 128 query rows\nthat share the list"),
        (3.0, 0.1, 2.2, 1.0, PLAIN, "out, lse; dq", "one tile writes them"),
        (5.8, 0.1, 3.2, 1.0, PLAIN, "dk, dv", "added in any order, or left in memory\nand added key by key"),
    ],
    [
        ((2.4, 3.8), (3.0, 3.8), ""),
        ((5.2, 3.8), (5.8, 3.8), ""),
        ((6.4, 3.3), (4.6, 2.7), ""),
        ((2.4, 2.2), (3.0, 2.2), ""),
        ((5.2, 2.2), (5.8, 2.2), "stages"),
        ((6.6, 1.7), (4.6, 1.1), ""),
        ((7.4, 1.7), (7.4, 1.1), ""),
    ],
)

INDEX_MLA = (
    (9.2, 4.6),
    [
        (0.2, 3.3, 2.6, 1.0, PLAIN, "even block", "64 gathered rows of 576:\nvalues 0-255, 256-511, the rest"),
        (0.2, 0.3, 2.6, 1.0, PLAIN, "odd block", "the other stage"),
        (3.4, 3.3, 2.4, 1.0, DEVICE, "warpgroup 0", "scores and P of even blocks"),
        (3.4, 0.3, 2.4, 1.0, DEVICE, "warpgroup 1", "scores and P of odd blocks"),
        (3.4, 1.8, 2.4, 1.0, PLAIN, "P and references", "over the columns\nthat are no values"),
        (6.6, 3.3, 2.4, 1.0, PLAIN, "out, columns 0-255", "in registers"),
        (6.6, 0.3, 2.4, 1.0, PLAIN, "out, columns 256-511", "in registers"),
    ],
    [
        ((2.8, 3.8), (3.4, 3.8), ""),
        ((2.8, 0.8), (3.4, 0.8), ""),
        ((4.2, 3.3), (4.2, 2.8), ""),
        ((4.2, 1.3), (4.2, 1.8), ""),
        ((5.2, 2.8), (5.2, 3.3), ""),
        ((5.2, 1.8), (5.2, 1.3), ""),
        ((5.8, 3.8), (6.6, 3.8), "P V"),
        ((5.8, 0.8), (6.6, 0.8), "P V"),
    ],
)

INDEXER = (
    (9.2, 3.4),
    [
        (0.2, 2.0, 2.5, 1.0, PLAIN, "queries of a tile", "256 heads in all,\nkept in shared memory"),
        (0.2, 0.3, 2.5, 1.0, PLAIN, "blocks of 128 keys", "those that a query\nof the tile sees"),
        (3.3, 1.15, 2.5, 1.0, DEVICE, "scores", "keys are rows, heads\ncolumns of a product"),
        (6.5, 2.0, 2.5, 1.0, PLAIN, "scores of some queries", "at most 256 MiB"),
        (6.5, 0.3, 2.5, 1.0, DEVICE, "best keys", "a radix select, then\none pass in order"),
    ],
    [
        ((2.7, 2.4), (3.3, 1.9), ""),
        ((2.7, 0.9), (3.3, 1.4), ""),
        ((5.8, 1.9), (6.5, 2.4), ""),
        ((7.75, 2.0), (7.75, 1.3), ""),
    ],
)

ROW_EXCHANGES = (
    (9.6, 4.9),
    [
        (0.2, 3.7, 1.8, 0.9, HOST, "plan", "which rows of a rank\ngo to whom"),
        (2.6, 3.7, 2.0, 0.9, PLAIN, "one launch?", "keys move, ffa on\nGPUs, no dropout"),
        (2.6, 1.9, 2.0, 0.9, PLAIN, "stages", "rows come before\nthe kernel reads them"),
        (2.6, 0.2, 2.0, 0.9, HOST, "group_cast", "published API, asked\nfor NVLink buffers"),
        (6.6, 4.0, 2.8, 0.7, WIRE, "one launch over NVLink", "inside attention"),
        (6.6, 3.0, 2.8, 0.7, WIRE, "one-sided over nodes", "beside attention, or in stages"),
        (6.6, 2.0, 2.8, 0.7, WIRE, "two-level all-to-all-v", "two calls of the library"),
        (6.6, 1.0, 2.8, 0.7, WIRE, "all-to-all-v", "NCCL or gloo"),
        (6.6, 0.1, 2.8, 0.7, WIRE, "buffers over NVLink", "put and copy or sum"),
    ],
    [
        ((2.0, 4.15), (2.6, 4.15), ""),
        ((3.6, 3.7), (3.6, 2.8), "no"),
        ((4.6, 4.3), (6.6, 4.35), "one host"),
        ((4.6, 4.0), (6.6, 3.45), "nodes"),
        ((4.6, 2.5), (6.6, 3.2), "nodes"),
        ((4.6, 2.35), (6.6, 2.35), "nodes, no network verbs"),
        ((4.6, 2.15), (6.6, 1.4), "by default"),
        ((4.6, 0.6), (6.6, 0.45), ""),
    ],
)
