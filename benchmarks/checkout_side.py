# SPDX-License-Identifier: Apache-2.0
"""One side of ``checkouts.py``: a process that imports the package of one checkout and times what it is told.

Requests come over stdin, answers go to the file descriptor that stdout was; both are JSON, one a line. Only what
``magi_attention.api`` has is called, because a checkout may be of any commit with these functions. Timing is that of
the checkout that this file is in, for both sides.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TextIO

import sparse_cases
import torch
from case_options import DTYPES
from masks import make_case

import magi_attention
from magi_attention import api

ROWS_COMPARED = 64
_spec = spec_from_file_location("timing", Path(__file__).parents[1] / "magi_attention" / "benchmarking" / "timing.py")
assert _spec and _spec.loader
timing = module_from_spec(_spec)
sys.modules["timing"] = timing
_spec.loader.exec_module(timing)
Results = tuple[torch.Tensor, ...]
Call = Callable[[], Results]


def libraries() -> list[str]:
    """Files of kernels and planners that this process has mapped; none where the system does not tell."""
    maps = Path("/proc/self/maps")
    words = (line.split(maxsplit=5) for line in maps.read_text().splitlines()) if maps.exists() else ()
    paths = {parts[5] for parts in words if len(parts) == 6 and parts[5].startswith("/")}
    return sorted(path for path in paths if "magi" in Path(path).name)


def inputs_of(cell: Mapping[str, Any], device: torch.device) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, (T, H, D), normal; the same numbers on both sides."""
    generator = torch.Generator(device).manual_seed(cell["sample"])
    (heads_q, heads_kv), (dim, dim_v) = cell["heads"], cell["head_dims"]
    shapes = ((heads_q, dim), (heads_kv, dim), (heads_kv, dim_v), (heads_q, dim_v))
    drawn = [torch.randn(cell["seqlen"], *shape, generator=generator, device=device) for shape in shapes]
    return [x.to(DTYPES[cell["dtype"]]) for x in drawn]


def forward_of(cell: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Call, Results]:
    """The call of the cell's public function, which gives (out,), and what gradients are taken of."""
    deterministic = cell["deterministic"]
    if cell["function"] == "index_attn_func":
        case = sparse_cases.make_case(cell["mask"], cell["seqlen"], cell["sample"])
        lists, width = api.prepare_indices(case.indices.to(q.device), cell["seqlen"]), case.head_dim_v
        value = v if width is None else None
        options = {"head_dim_v": width, "deterministic": deterministic}
        leaves = (q, k) if value is None else (q, k, v)
        return lambda: (api.index_attn_func(q, k, value, lists, **options)[0],), leaves
    mask = mask_of(cell)
    if cell["function"] == "attend":
        plan, policy = api.make_plan(mask, 1), api.AttnPolicy(deterministic=True) if deterministic else None
        return lambda: (api.attend(q, k, v, plan, policy=policy)[0],), (q, k, v)
    table = torch.tensor(mask.slices.array, dtype=torch.int32, device=q.device)
    ranges = table[:, 0:2].contiguous(), table[:, 2:4].contiguous(), table[:, 4].contiguous()
    return lambda: (api.flex_flash_attn_func(q, k, v, *ranges, deterministic=deterministic)[0],), (q, k, v)


def mask_of(cell: Mapping[str, Any]) -> api.Mask:
    if cell["mask"][0] == "b":  # the block-sparse patterns
        return sparse_cases.make_case(cell["mask"], cell["seqlen"], cell["sample"]).mask
    return make_case(cell["mask"], cell["seqlen"], cell["sample"], cell["documents"], cell["window"]).mask


def call_of(cell: Mapping[str, Any], device: torch.device) -> Call:
    """What is timed: the forward, which gives (out,), or the gradients of one forward."""
    *tensors, dout = inputs_of(cell, device)
    if cell["direction"] == "forward":
        forward, _ = forward_of(cell, *tensors)
        return forward
    forward, leaves = forward_of(cell, *(x.requires_grad_() for x in tensors))
    (out,) = forward()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


class Side:
    """Answers requests. One cell is held at a time: ``open`` makes its tensors, ``time`` times, ``close`` ends it."""

    def __init__(self) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._call: Call | None = None

    def hello(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU"
        return {"package": str(magi_attention.__file__), "device": name}

    def open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Writes some rows of each result to the file ``rows``, float32."""
        self._call = call_of(request["cell"], self._device)
        results = self._call()
        places = [torch.linspace(0, len(x) - 1, min(len(x), ROWS_COMPARED)).long().to(x.device) for x in results]
        torch.save([x.detach()[at].float().cpu() for x, at in zip(results, places)], request["rows"])
        return {"libraries": libraries()}

    def time(self, request: Mapping[str, Any]) -> dict[str, Any]:
        failed: dict[str, str] = {}
        assert self._call is not None
        times = timing.interleaved_us(
            {"call": self._call}, request["repeats"], failed, timing.LONG_LEAD_CYCLES, self._device.type,
            request["warm_up"],
        )  # fmt: skip
        return {"reason": failed["call"]} if failed else timing.summary(times["call"])

    def close(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._call = None
        gc.collect()  # graphs of autograd may be in cycles
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return {}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Until ``requests`` end. What a request raises is its answer, as ``reason``."""
    side = Side()
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(side, request["do"])(request)
        except Exception as failure:  # a commit that lacks something is a finding
            answer = {"reason": timing.reason_of(failure)}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """The program of the process."""
    to_parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not be read as an answer
    serve(sys.stdin, to_parent)
