# SPDX-License-Identifier: Apache-2.0
"""What group_cast and group_reduce refuse, and what they say."""

import pytest
import torch

from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError, PlanMismatchError

X = torch.zeros(3, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(output=None), "output is None"),
        (dict(dst_indices="0"), "dst_indices is '0'"),
        (dict(dst_indices=[[0], [0]]), "1 input splits but 2 destination lists"),
        (dict(dst_indices=[[0, 0]]), "repeats a rank"),
        (dict(dst_indices=[[1]]), "leaves 0..0"),
        (dict(src_index=[0, 0]), "1 output splits but 2 source ranks"),
        (dict(src_index=[4]), "source rank"),
        (dict(input_split_sizes=[2], output_split_sizes=[2]), "add up to 2 but the input has 3 rows"),
        (dict(output=torch.zeros(4, 2)), "add up to 3 but the output has 4 rows"),
        (dict(output=torch.zeros(3, 5)), "does not fit output"),
        (dict(output=torch.zeros(3, 2, dtype=torch.int64)), "does not fit output"),
        (dict(cast_lse=True), "needs input_lse"),
        (dict(cast_lse=True, input_lse=torch.zeros(3, 1)), "does not fit data"),
        (dict(input=[X, X[:2]], output=[X, X]), "same number of rows"),
        (dict(input_split_sizes=[1.5]), "must hold integers"),
    ],
)
def test_cast_arguments_are_checked(change, message):
    good = dict(
        input=X,
        output=X.clone(),
        input_split_sizes=[3],
        output_split_sizes=[3],
        dst_indices=[[0]],
        src_index=[0],
        group=SingleTransport(),
    )
    group_cast(**good)
    with pytest.raises(ContractError, match=message) as info:
        group_cast(**{**good, **change})
    assert isinstance(info.value, AssertionError) and isinstance(info.value, ValueError)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(reduce_op="max"), "'max' is unknown"),
        (dict(reduce_op="lse"), "needs input_lse"),
        (dict(comm_dtype=torch.int32), "change the kind"),
        (dict(input=X.bool(), output=X.bool()), "not defined"),
        (dict(input=X.int(), output=X.int(), reduce_op="avg"), "not defined"),
        (dict(output=X.int()), "cannot be added"),
        (dict(output=None), "output is None"),
    ],
)
def test_reduce_arguments_are_checked(change, message):
    good = dict(
        input=X,
        output=X.clone(),
        input_split_sizes=[3],
        output_split_sizes=[3],
        dst_index=[0],
        src_indices=[[0]],
        group=SingleTransport(),
    )
    group_reduce(**good)
    with pytest.raises(ContractError, match=message):
        group_reduce(**{**good, **change})


def test_unknown_argument_warns_and_known_ones_do_not(recwarn):
    y = X.clone()
    known = dict(deterministic=True, native_buffer_name="x", split_alignment=1)
    group_cast(X, y, [3], [3], [[0]], [0], None, **known)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="colour"):
        group_cast(X, y, [3], [3], [[0]], [0], None, colour="red")


@pytest.mark.parametrize("by_env", [False, True])
def test_check_names_the_pair_on_every_rank(by_env, monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_SANITY_CHECK", str(int(by_env)))
    options = {} if by_env else {"check": True}

    def main(t):
        rows = 1 if t.rank == 2 else 0
        expects = 2 if t.rank == 0 else 0
        with pytest.raises(PlanMismatchError, match="Rank 2 sends 1 rows to rank 0, which expects 2"):
            group_cast(torch.zeros(rows), torch.zeros(expects), [rows], [expects], [[0]], [2], t, **options)
        return "raised"

    assert FakeWorld(3).run(main) == ["raised"] * 3


def test_check_compares_dtypes():
    def main(t):
        x = torch.zeros(2, 3, dtype=torch.float32 if t.rank else torch.float64)
        with pytest.raises(PlanMismatchError, match="Rank 0 calls with .*float64.* rank 1 with .*float32"):
            group_cast(x, x.clone(), [2], [2], [[t.rank]], [t.rank], t, check=True)

    FakeWorld(2).run(main)


def test_bad_arguments_of_one_rank_end_the_wait_of_the_others():
    def main(t):
        out = torch.zeros(1) if t.rank else None
        group_cast(torch.zeros(1), out, [1], [1], [[1 - t.rank]], [1 - t.rank], t).wait_post_process()

    with pytest.raises(ContractError, match="output is None"):
        FakeWorld(2).run(main)
