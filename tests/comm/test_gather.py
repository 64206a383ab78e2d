# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from magi_attention.comm.collectives.gather import (
    all2all_v,
    all_gather_fwd_reduce_scatter_bwd,
    all_gather_fwd_scatter_bwd,
    all_gather_v,
    scatter_fwd_all_gather_bwd,
    scatter_v,
)
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError

SIZES = [3, 0, 2, 1]
WHOLE = torch.arange(6 * 5 * 4, dtype=torch.float64).view(6, 5, 4)


def along(dim):
    """WHOLE with its dim of size 6 moved to ``dim``."""
    return WHOLE.movedim(0, dim)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_scatter_then_gather_is_the_identity(dim):
    def main(t):
        part = scatter_v(along(dim), t, dim, SIZES)
        assert part.shape[dim] == SIZES[t.rank] and part.is_contiguous()
        return all_gather_v(part, t, dim, SIZES)

    assert all(torch.equal(x, along(dim)) for x in FakeWorld(4).run(main))


def test_equal_sizes_need_no_list():
    def main(t):
        return all_gather_v(scatter_v(along(1), t, 1), t, 1)

    assert all(torch.equal(x, along(1)) for x in FakeWorld(3).run(main))


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("sizes", [SIZES, None])
def test_gradients(dim, sizes):
    sizes_or_even = sizes or [3, 3]
    weight = torch.rand(along(dim).shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def main(t):
        part = scatter_v(along(dim), t, dim, sizes).requires_grad_()
        own = scatter_v(weight, t, dim, sizes)
        (all_gather_fwd_scatter_bwd(part, t, dim, sizes) * weight).sum().backward()
        assert torch.equal(part.grad, own)  # every rank has the whole loss
        part.grad = None
        share = weight * (t.rank + 1)  # every rank has its share of the loss
        (all_gather_fwd_reduce_scatter_bwd(part, t, dim, sizes) * share).sum().backward()
        torch.testing.assert_close(part.grad, own * t.size * (t.size + 1) / 2, rtol=1e-14, atol=0)
        whole = along(dim).clone().requires_grad_()
        (scatter_fwd_all_gather_bwd(whole, t, dim, sizes) * own).sum().backward()
        assert torch.equal(whole.grad, weight)

    FakeWorld(len(sizes_or_even)).run(main)


def of_penalty(loss, leaf):
    """The gradient of a penalty on the gradient."""
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return torch.autograd.grad(grad.pow(3).sum(), leaf)[0]


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("sizes", [SIZES, None])
def test_gradients_of_gradients(dim, sizes):
    """Against one rank that holds everything: every rank adds the penalty of its part, or has the whole one."""
    world = 4 if sizes else 2
    x = along(dim) / 50
    leaf = x.clone().requires_grad_()
    whole = of_penalty(leaf.sin().sum(), leaf)
    leaf = x.clone().requires_grad_()
    of_shares = of_penalty(leaf.sin().sum() * world * (world + 1) / 2, leaf)

    def main(t):
        part = scatter_v(x, t, dim, sizes).requires_grad_()
        got = of_penalty(all_gather_fwd_scatter_bwd(part, t, dim, sizes).sin().sum(), part)
        torch.testing.assert_close(got, scatter_v(whole, t, dim, sizes))
        gathered = all_gather_fwd_reduce_scatter_bwd(part, t, dim, sizes)
        got = of_penalty(gathered.sin().sum() * (t.rank + 1), part)
        torch.testing.assert_close(got, scatter_v(of_shares, t, dim, sizes))
        everything = x.clone().requires_grad_()
        got = of_penalty(scatter_fwd_all_gather_bwd(everything, t, dim, sizes).sin().sum(), everything)
        torch.testing.assert_close(got, whole)

    FakeWorld(world).run(main)


def test_all2all_v():
    def main(t):
        out = torch.zeros(t.size, dtype=torch.int64)
        work = all2all_v(torch.arange(2) + 10 * t.rank, out, [1, 1], [1, 1], t, async_op=True)
        work.wait()
        assert work.is_completed()
        return out.tolist()

    assert FakeWorld(2).run(main) == [[0, 10], [1, 11]]


def test_sizes_are_checked():
    with pytest.raises(ContractError, match="pass split_sizes"):
        FakeWorld(4).run(lambda t: scatter_v(WHOLE, t))
    with pytest.raises(ContractError, match="add up to 5"):
        FakeWorld(2).run(lambda t: scatter_v(WHOLE, t, 0, [2, 3]))
    with pytest.raises(ContractError, match="one per rank"):
        FakeWorld(2).run(lambda t: all_gather_v(WHOLE, t, 0, [6]))
    with pytest.raises(ContractError, match="gives rank . size 5"):
        FakeWorld(2).run(lambda t: all_gather_v(WHOLE, t, 0, [5, 5]))
