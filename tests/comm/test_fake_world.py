# SPDX-License-Identifier: Apache-2.0

import pytest
import torch

from magi_attention.comm.transport.base import SingleTransport, Transport, Work
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError, PeerFailureError, PlanMismatchError


def collectives(t, device="cpu"):
    """Every operation of the protocol once; the results are checked here. Shared with the process tests."""
    with torch.device(device):
        return _collectives(t, device)


def _collectives(t, device):
    n, r = t.size, t.rank
    assert isinstance(t, Transport)
    out = torch.empty(n, 2, dtype=torch.int16)
    work = t.all_to_all_v(out, torch.full((n, 2), r, dtype=torch.int16), [1] * n, [1] * n, async_op=True)
    assert isinstance(work, Work)
    work.wait()
    if device == "cuda":
        torch.cuda.synchronize()
    assert work.is_completed()
    assert out[:, 0].tolist() == list(range(n))
    # rank r sends r + 1 rows to every rank
    out = torch.empty(n * (n + 1) // 2)
    t.all_to_all_v(out, torch.full((n * (r + 1),), float(r)), [s + 1 for s in range(n)], [r + 1] * n)
    assert out.tolist() == [float(s) for s in range(n) for _ in range(s + 1)]
    assert t.all_gather_object({"rank": r}) == [{"rank": s} for s in range(n)]
    sizes = list(range(n))
    rows = t.all_gather_v(torch.full((r, 1), r), sizes)
    assert rows[:, 0].tolist() == [s for s in range(n) for _ in range(s)]
    for dtype in (torch.bfloat16, torch.int16, torch.float64, torch.int64):
        x = torch.full((3, 2), r + 1, dtype=dtype)
        for op, want in (("sum", n * (n + 1) // 2), ("max", n), ("min", 1)):
            y = x.clone().t()
            t.all_reduce(y, op, async_op=True).wait()
            assert (y == want).all()
    y = torch.tensor([float(r)])
    t.all_reduce(y, "avg")
    assert y.item() == (n - 1) / 2
    sizes = [s % 2 for s in range(n)]
    part = t.reduce_scatter_v(torch.arange(sum(sizes) * 2.0).view(-1, 2).bfloat16() + r, sizes)
    want = torch.arange(sum(sizes) * 2.0).view(-1, 2) * n + n * (n - 1) / 2
    assert torch.equal(part.float(), want[sum(sizes[:r]) : sum(sizes[: r + 1])])
    t.barrier()
    return r


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_collective(size):
    assert FakeWorld(size).run(collectives) == list(range(size))


def test_single_transport_has_every_collective():
    assert collectives(SingleTransport()) == 0


def test_failure_ends_the_wait_of_all_others():
    seen = []

    def main(t):
        if t.rank == 2:
            raise KeyError("no such mask")
        try:
            t.barrier()
        except PeerFailureError as exc:
            seen.append(str(exc))
            raise

    with pytest.raises(KeyError, match="no such mask"):
        FakeWorld(4).run(main)
    assert len(seen) == 3 and all("rank 2 failed: KeyError" in text for text in seen)


def test_guard_reports_and_a_rank_may_go_on():
    def main(t):
        if t.rank == 1:
            with pytest.raises(ValueError), t.guard("the plan"):
                raise ValueError("too long")
        else:
            with pytest.raises(PeerFailureError, match="rank 1 failed: ValueError in the plan: too long"):
                t.barrier()
        return t.rank

    assert FakeWorld(3).run(main) == [0, 1, 2]


def test_different_operations_and_sizes_are_errors_on_every_rank():
    def kinds(t):
        with pytest.raises(PlanMismatchError, match="calls .* where another rank calls"):
            t.barrier() if t.rank else t.all_gather_object(1)

    FakeWorld(2).run(kinds)

    def sizes(t):
        x = torch.zeros(2 + t.rank)
        with pytest.raises(PlanMismatchError, match="Rank 0 sends 1 rows to rank 1, which expects 2"):
            t.all_to_all_v(torch.zeros(2 + 2 * t.rank), x, [1 + t.rank] * 2, [1, 1 + t.rank])

    FakeWorld(2).run(sizes)

    def dtypes(t):
        dtype = torch.float32 if t.rank else torch.float64
        with pytest.raises(PlanMismatchError, match="float64 to rank 1, which expects"):
            t.all_to_all_v(torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype), [1, 1], [1, 1])

    FakeWorld(2).run(dtypes)


def test_split_lists_are_checked():
    t = SingleTransport()
    with pytest.raises(ContractError, match="one row count per rank"):
        t.all_to_all_v(torch.zeros(2), torch.zeros(2), [1, 1], [2])
    with pytest.raises(ContractError, match="add up to the rows"):
        t.all_to_all_v(torch.zeros(2), torch.zeros(2), [1], [2])
    with pytest.raises(ContractError, match="must agree in dtype"):
        t.all_to_all_v(torch.zeros(2), torch.zeros(2, dtype=torch.int64), [2], [2])
    with pytest.raises(ContractError, match="median"):
        t.all_reduce(torch.zeros(1), "median")
