# SPDX-License-Identifier: Apache-2.0
"""Keys of other ranks: what is launched before what, with a simulated library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from ffa_simulator import inputs
from remote_case import PUSH, remote_backend, remote_keys

from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa.arrival import Pace
from magi_attention.kernels.ffa.peer_kv import TILE, FusedLaunch, RemoteKeys, RemoteMask, Result
from magi_attention.kernels.ffa.plans import PlanShape
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.native import abi
from magi_attention.native.ffa import FfaTile
from magi_attention.native.planner.schedule import WorkTileShape, check_schedule
from magi_attention.native.planner.tile_plan import TilePlan, transposed

pytestmark = pytest.mark.usefixtures("planner")


def launched(ready: FusedLaunch[Result]) -> Result:
    """What it gives, once it is launched."""
    with ready:
        ready.launch()
    return ready.result


def test_a_rank_that_reads_only_its_own() -> None:
    """Its plans are those without other ranks, but for the gap behind its keys."""
    rows, base = 300, 512
    slices = SliceTable(np.array([[0, rows, 0, rows, 1]]))
    mask = RemoteMask(slices, rows, base, np.zeros(0, dtype=np.int32), Pace(np.zeros(0)), 0)
    assert (mask.rows, mask.num_signals, mask.total_k) == (0, 0, base)
    for is_transposed in (False, True):
        shape = PlanShape(rows, base, FfaTile(TILE, 2, 1), is_transposed=is_transposed)
        words = mask.plan(shape, torch.device("cpu"))[0].numpy()
        of = transposed(slices, rows, base) if is_transposed else slices
        total = (base, rows) if is_transposed else (rows, base)
        plain = TilePlan.build(of, *total, TILE, 2)
        plan = TilePlan(words.copy())
        assert np.array_equal(plan.tiles, plain.tiles) and np.array_equal(plan.order, plain.order)
        assert np.array_equal(plan.records[:, :2], plain.records[:, :2])
        first = words[abi.TilePlanHeader.from_buffer(words).words_first_order :][: len(plan.tiles)]
        assert np.array_equal(np.sort(first), np.arange(len(plan.tiles)))  # every tile once


def test_documents_one_after_the_other() -> None:
    """Beside remote keys, too, each tile and head once; tiles in the same order, for kernels without work tiles."""
    rows, base = 1024, 1280
    ends = [(q, q + 256) for q in range(0, rows, 256)]
    slices = [[a, b, a, b, 1] for a, b in ends] + [[a, b, base + a, base + b, 0] for a, b in ends]
    arrivals, pace = np.zeros(rows // TILE, dtype=np.int32), Pace(np.array([1e-3]))
    mask = RemoteMask(SliceTable(np.array(slices)), rows, base, arrivals, pace, 8)
    schedule = WorkTileShape(3, 2, 132, 132, by_document=True)
    shape = PlanShape(rows, mask.total_k, FfaTile(TILE, 2, 1), is_transposed=True, schedule=schedule)
    plan = TilePlan(mask.plan(shape, torch.device("cpu")).plan.numpy().copy())
    check_schedule(plan.words, schedule, len(plan.words))
    seen = [int(plan.records[plan.tiles[t, 2], 1]) for t in plan.order if plan.tiles[t, 3]]  # where its queries end
    assert len(seen) == 16 and np.count_nonzero(np.diff(seen)) == 3, "tiles of a document follow one another"


def test_all_else_comes_before_the_push_and_the_kernel_that_starts_beside_it(monkeypatch) -> None:
    events: list[str] = []

    def launch(params: bytes, remote: bytes, put: bytes | None) -> None:
        assert put == PUSH
        events.append("kernel")

    ffa = remote_backend(launch)
    q, k, v = inputs(32, 32)
    dout = torch.randn(q.shape, dtype=torch.float64)  # has to be cast
    sink = torch.zeros(1, q.shape[1], dtype=torch.bfloat16)  # so has this
    for owner, name in ((torch, "zeros"), (torch, "full"), (torch.Tensor, "to")):
        made = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, name=name, made=made, **b: (events.append(name), made(*a, **b))[1])
    remote = remote_keys()
    x = Operands(q, k, v, remote.mask.slices, AttnOptions(0.25, return_max_logits=True), sink)
    out, lse, _ = launched(ffa.forward_fused(x, remote))
    assert "zeros" in events and "full" in events and events[-1] == "kernel" and events.count("kernel") == 1
    events.clear()
    options = AttnOptions(0.25)
    x = BackwardOperands(dout, q, k, v, torch.zeros_like(q), lse.zero_(), remote.mask.slices, options)
    launched(ffa.backward_fused(x, remote))
    at = events.index("kernel")
    assert "to" in events[:at] and events.count("kernel") == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_launches_of_the_caller_come_right_before_the_kernel(deterministic) -> None:
    """When what the kernel waits for is behind it, and all that it reads has been made; in deterministic mode behind
    the backward before, and with it the put."""

    def launch(params: bytes, remote: bytes, put: bytes | None) -> None:
        events.append(("kernel", put))
        if len(params) == ctypes.sizeof(abi.FfaBwdParams):
            assert (abi.FfaBwdParams.from_buffer_copy(params).dq_mode == abi.DQ_DETERMINISTIC) == deterministic

    ffa = remote_backend(launch)
    q, k, v = inputs(32, 32)
    events: list[object] = ffa.runtime.said
    remote = remote_keys(put=None)
    options = AttnOptions(0.25, deterministic=deterministic)
    x = Operands(q, k, v, remote.mask.slices, options)
    saved = BackwardOperands(q, q, k, v, torch.zeros_like(q), torch.zeros(q.shape[:2]), remote.mask.slices, options)
    for stream in (7, 8):
        ffa.runtime.current_stream = stream
        events.clear()
        for ready in (ffa.forward_fused(x, remote), ffa.backward_fused(saved, remote)):
            with ready:
                events.append("put")
                ready.launch()
        calls = ["put", ("kernel", None)]
        behind, end = ([("wait", 8)] if stream == 8 else [], [("record", stream)]) if deterministic else ([], [])
        assert events == [*calls, *behind, *calls, *end]


def test_a_launch_follows_what_was_launched_before_an_error() -> None:
    """The kernel did not start, and its turn is over: the next one on another stream waits."""
    ffa, keys = remote_backend(), remote_keys()
    q, k, v = inputs(32, 32)
    options = AttnOptions(0.25, deterministic=True)
    x = BackwardOperands(q, q, k, v, torch.zeros_like(q), torch.zeros(q.shape[:2]), keys.mask.slices, options)
    with pytest.raises(ValueError, match="no put"), ffa.backward_fused(x, keys):
        raise ValueError("no put")
    ffa.runtime.current_stream = 8
    with ffa.backward_fused(x, keys):
        pass
    assert ffa.runtime.said == [("record", 7), ("wait", 8), ("record", 8)]


def test_on_the_device_of_the_operands(monkeypatch) -> None:
    """Which is made the current one for the preparation, and again for the launch."""
    said, current = [], [3]
    ffa, keys = remote_backend(lambda *_: said.append("kernel")), remote_keys()
    q, k, v = inputs(32, 32)

    @contextmanager
    def on_device(index: int) -> Iterator[None]:
        said.append("enter")
        current.append(index)
        yield
        current.pop()
        said.append("exit")

    monkeypatch.setattr(ffa.runtime, "on_device", on_device, raising=False)
    monkeypatch.setattr(ffa.runtime, "current_device", lambda: current[-1])
    with ffa.forward_fused(Operands(q, k, v, keys.mask.slices, AttnOptions(0.25)), keys) as ready:
        ready.launch()
    assert said == ["enter", "exit", "enter", "kernel", "exit"] and ready.result[0].shape == q.shape


def test_known_calls_are_told_apart(monkeypatch) -> None:
    """Calls with the same k and v, in any order, launch what each would have launched first; from the second time on
    none is prepared."""
    seen: list[bytes] = []

    def launch(params: bytes, remote: bytes, put: bytes | None) -> None:
        assert put == PUSH
        seen.append(params)

    ffa = remote_backend(launch)
    q, k, v = inputs(32, 32)
    wide = torch.zeros(32, 4, 24, dtype=q.dtype)[..., :16]
    lse, out, odd = torch.zeros(32, 4), torch.zeros_like(q), torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    options = [
        AttnOptions(0.25),
        AttnOptions(0.5),
        AttnOptions(0.25, deterministic=True),
        AttnOptions(0.25, softcap=3.0),
    ]
    sinks = [torch.zeros(n, 4) for n in (1, 2)]
    variants = [(q, out, out, lse, o, None) for o in options]
    variants += [(q, out, out, lse, options[0], s) for s in sinks] + [(wide, out, out, lse, options[0], None)]
    variants += [(q, wide, out, lse, options[0], None), (q, out, wide, lse, options[0], None)]
    variants += [(q, out.double(), out, lse, options[0], None), (q, out, out.float(), lse, options[0], None)]
    variants += [(q, out, out, lse.double(), options[0], None), (odd, out, out, lse, options[0], None)]

    def call(of: tuple, forward: RemoteKeys, backward: RemoteKeys) -> list[bytes]:
        x, dout, result, logs, option, sink = of
        launched(ffa.forward_fused(Operands(x, k, v, forward.mask.slices, option, sink), forward))
        saved = BackwardOperands(dout, x, k, v, result, logs, backward.mask.slices, option, sink)
        launched(ffa.backward_fused(saved, backward))
        kinds = (abi.FfaFwdParams, abi.FfaBwdParams)
        for p in (kind.from_buffer_copy(params) for kind, params in zip(kinds, seen)):
            assert (p.k, p.v, p.stream) == (k.data_ptr(), v.data_ptr(), 7), "what the put sends"
        sizes = (abi.FFA_FWD_PREFIX_BYTES, abi.FFA_BWD_PREFIX_BYTES)
        prefixes = [params[:size] for params, size in zip(seen, sizes)]
        seen.clear()
        return prefixes

    alone = [call(of, remote_keys(), remote_keys()) for of in variants]
    assert len({tuple(prefixes) for prefixes in alone}) > len(options) + len(sinks)
    forward, backward = remote_keys(), remote_keys()
    rng = np.random.default_rng(3)
    first, later = rng.permutation(len(variants)), rng.integers(0, len(variants), 3 * len(variants))
    for i, n in enumerate([*first, *later]):
        if i == len(first):
            monkeypatch.setattr(ffa._forward, "_prepared", None)
            monkeypatch.setattr(ffa._backward, "_prepared", None)
        assert call(variants[n], forward, backward) == alone[n], f"variant {n}, call {i}"


@pytest.mark.parametrize("num_summed", (0, 1, 3))
@pytest.mark.parametrize("dims", ((16, 16), (24, 8)))
def test_sums_of_local_gradients(num_summed: int, dims: tuple[int, int]) -> None:
    """They lie in the workspace, behind what the kernels need there, with room for whole tiles."""
    seen: list[tuple[abi.FfaBwdParams, abi.FfaRemote]] = []
    kinds = abi.FfaBwdParams, abi.FfaRemote
    ffa = remote_backend(lambda *given: seen.append([kind.from_buffer_copy(x) for kind, x in zip(kinds, given)]))
    q, k, v = inputs(32, 32, dims=dims)
    out, lse = torch.zeros(32, 4, dims[1], dtype=q.dtype), torch.zeros(32, 4)
    keys = remote_keys(num_summed)
    x = BackwardOperands(out, q, k, v, out, lse, keys.mask.slices, AttnOptions(0.25))
    got = launched(ffa.backward_fused(x, keys))
    ((p, remote),) = seen
    assert (p.dq, p.dk, p.dv) == tuple(x.data_ptr() for x in (got.dq, got.dk, got.dv))
    assert all(x.dtype == q.dtype and x.shape == y.shape for x, y in ((got.dq, q), (got.dk, k), (got.dv, v)))
    assert (remote.dk_sums or 0, remote.dv_sums or 0) == (got.dk_sums, got.dv_sums)
    start, end = got.held.data_ptr(), got.held.data_ptr() + got.held.numel()
    sizes = [4 * num_summed * TILE * x[0].numel() for x in (k, v)]
    assert p.workspace == start and start + p.workspace_bytes <= got.dk_sums
    assert got.dk_sums + sizes[0] <= got.dv_sums and got.dv_sums + sizes[1] <= end
    assert not (got.dk_sums - start) % 16 and not (got.dv_sums - start) % 16


def test_a_rank_without_tokens_gets_a_sentence() -> None:
    """Others would wait for its put."""
    seen: list[tuple] = []
    ffa = remote_backend(lambda *given: seen.append(given))
    q, k, v = inputs(0, 32)
    keys = remote_keys()
    call = keys.mask.slices, AttnOptions(0.25)
    with pytest.raises(ContractError, match="has no tokens"):
        ffa.forward_fused(Operands(q, k, v, *call), keys)
    with pytest.raises(ContractError, match="has no tokens"):
        ffa.backward_fused(BackwardOperands(q, q, k, v, q, torch.zeros(0, 4), *call), keys)
    assert not seen
