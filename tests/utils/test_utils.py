# SPDX-License-Identifier: Apache-2.0
"""Helper functions of magi_attention.utils."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from magi_attention import utils
from magi_attention.common import AttnRanges, slices
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.testing import masks
from magi_attention.utils import debug, nvtx


def test_lists():
    assert utils.flatten_nested_list([()]) == utils.flatten_nested_list(()) == []
    assert utils.flatten_nested_list((1, [2, (3, [])], "45", {6})) == [1, 2, 3, "45", {6}]
    perm = [2, 0, 3, 1]
    inverse = utils.perm_idxs2unperm_idxs(perm)
    assert [inverse[i] for i in perm] == [0, 1, 2, 3] and utils.perm_idxs2unperm_idxs([]) == []
    assert utils.wrap_to_list(3, 2) == [3, 3] and utils.wrap_to_list((1, 2), 5) == [1, 2]
    assert utils.wrap_to_list([4], 3) == [4, 4, 4]
    assert utils.transpose_matrix([[1, 2, 3], [4, 5, 6]]) == [[1, 4], [2, 5], [3, 6]]
    assert utils.seqlens2cu_seqlens([3, 4]) == [0, 3, 7] and utils.cu_seqlens2seqlens([0, 3, 7]) == [3, 4]
    assert [utils.ceil_div(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    with pytest.raises(ContractError):
        utils.transpose_matrix([[1], [1, 2]])


@pytest.mark.parametrize("seed", range(20))
def test_flattening_keeps_the_order_of_the_leaves(seed):
    rng = random.Random(seed)
    leaves = []

    def nest(depth):
        if depth == 0 or rng.random() < 0.3:
            leaves.append(len(leaves))
            return leaves[-1]
        return rng.choice([list, tuple])(nest(depth - 1) for _ in range(rng.randrange(4)))

    tree = [nest(5) for _ in range(6)]
    assert utils.flatten_nested_list(tree) == leaves


def test_predicates_take_a_value_or_the_first_element():
    for check in (utils.is_list_value_all, utils.is_list_value_any):
        with pytest.raises(AssertionError, match="leave val=1 out"):
            check([1, 2], val=1, just_same=True)
        assert check([], val=1, just_same=True, allow_empty=True) and not check([], val=1, just_same=True)
    with pytest.raises(AssertionError, match="leave _type="):
        utils.is_list_type_all([1, 2], _type=int, just_same=True)
    with pytest.raises(AssertionError, match="needs a _type"):
        utils.is_list_type_all([1, 2])
    assert utils.is_list_type_all([1, "2"], (int, str)) and not utils.is_list_type_all([1, "2", 3.0], (int, str))
    assert not utils.is_list_type_all([], int, just_same=True) and utils.is_list_type_all([], allow_empty=True)


def test_predicates():
    assert utils.is_list_value_all([1, 1], 1) and not utils.is_list_value_all([1, 2], 1)
    assert utils.is_list_value_all([2, 2], just_same=True) and not utils.is_list_value_all([], 1)
    assert utils.is_list_value_all([], 1, allow_empty=True)
    assert utils.is_list_value_any([1, 2], 2) and not utils.is_list_value_any([1, 2], 3)
    assert utils.is_list_type_all([1, 2], int) and not utils.is_list_type_all([1, "2"], just_same=True)


def test_argsort():
    values = [3, -1, 2, -1]
    assert utils.argmin(values) == 1 and utils.argmax(values) == 0
    assert utils.argsort(values) == [1, 3, 2, 0] and utils.argmax(values, key=lambda x: -x) == 1


@pytest.mark.parametrize("n", [1, 2, 12, 36, 97, 360])
def test_factors(n):
    factors = utils.get_factors(n)
    assert factors == [i for i in range(1, n + 1) if n % i == 0]
    assert utils.find_factors_in_range(factors, 2, 20, 3) == [f for f in factors if 2 <= f <= 20 and f % 3 == 0]


def test_factors_of_nothing():
    with pytest.raises(ContractError):
        utils.get_factors(0)


def test_str2seed_is_the_same_in_every_process():
    code = "from magi_attention.utils.sequences import str2seed; print(str2seed('case'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) == utils.str2seed("case") != utils.str2seed("case2") and int(out) < 2**32


def test_missing_dependency():
    with pytest.raises(ImportError, match="pip install some-package"):
        utils.missing_dependency("func", "some-package")(1, a=2)


def test_cost_factors():
    assert utils.get_calc_cost_factor(8, 64, 1e12, 0.5) == pytest.approx(4 * 8 * 64 / 1e12 / 0.5 * 1e6)
    forward = utils.get_calc_cost_factor(8, 64, 1e12, 0.5)
    assert utils.get_calc_cost_factor(8, 64, 1e12, 0.5, is_fwd=False) == pytest.approx(2.5 * forward)
    assert utils.get_comm_cost_factor(2, 64, 1e9, 0.6, 0.5, 1) == pytest.approx(2 * 2 * 64 / 1e9 / 0.5 / 0.6)
    assert utils.get_a2a_corr_factor(8) == 7 / 8


def test_dtypes():
    half = torch.zeros(2, dtype=torch.float16)
    assert utils.fp_dtype_bits(torch.bfloat16) == 16 and utils.fp_dtype_bits(torch.float64) == 64
    assert not utils.is_fp_dtype_at_least(half, torch.float32)
    assert utils.to_higher_fp_dtype(half, torch.float32).dtype == torch.float32
    assert utils.to_higher_fp_dtype(half.double(), torch.float32).dtype == torch.float64
    assert utils.max_fp_dtype(torch.bfloat16, torch.float32, torch.float16) == torch.float32
    with pytest.raises(ContractError):
        utils.fp_dtype_bits(torch.int32)


def test_devices():
    if torch.cuda.is_available():
        assert utils.get_num_sms() > 0
        assert [utils.is_ampere(), utils.is_hopper(), utils.is_blackwell()].count(True) <= 1
    else:
        assert not (utils.is_ampere() or utils.is_hopper() or utils.is_blackwell())
        with pytest.raises(UnsupportedError, match="SMs"):
            utils.get_num_sms()


def test_sync_rng_restores_every_generator():
    utils.set_random_seed(7)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    utils.set_random_seed(7)
    with utils.sync_rng(3):
        inside = random.random(), np.random.rand(), torch.rand(1).item()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    with utils.sync_rng(3):
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == inside != expected


@pytest.mark.parametrize("kind", range(4))
def test_slice_mask(kind):
    for sq, sk in ((5, 2), (2, 5), (3, 3)):
        dense = utils.make_slice_mask_from_ffa_attn_type(sq, sk, kind, device="cpu")
        for i in range(sq):
            for j in range(sk):
                allowed = (not kind & 1 or j <= i + sk - sq) and (not kind & 2 or j >= i)
                assert bool(dense[i, j]) == allowed
    assert utils.make_slice_mask_from_ffa_attn_type(2, 2).device.type in ("cpu", "cuda")


def test_mask_of_overlapping_rectangles_loses_nothing():
    rng = np.random.default_rng(0)
    for _ in range(20):
        s = masks.random_slices(rng, 20, 24, diagonal_split=0.8)
        dense = slices.to_dense(s, 20, 24)
        q, k = AttnRanges.from_array(s[:, :2]), AttnRanges.from_array(s[:, 2:4])
        made = utils.make_attn_mask_from_ffa_args(q, k, s[:, 4].tolist(), 20, 24, device="cpu")
        assert (made.numpy() == dense).all() and made.dtype == torch.bool
        again = utils.make_attn_mask_from_ffa_args(q.to_tensor(), k.to_tensor(), torch.tensor(s[:, 4]), 20, 24, "cpu")
        assert (again == made).all()


def test_pad_and_pack():
    packed = utils.pad_and_pack_tensors([torch.tensor([1, 2]), torch.tensor([3])], 3, -1)
    assert packed.tolist() == [[1, 2, -1], [3, -1, -1]] and packed.dtype == torch.int32
    with pytest.raises(ContractError):
        utils.pad_and_pack_tensors([torch.tensor([1, 2])], 1)


def test_matrices(tmp_path):
    assert utils.repr_matrix(np.array([[1, 20], [3, 4]])) == " 1 20\n 3  4"
    pytest.importorskip("matplotlib").use("Agg")
    offsets = utils.vis_cute_layout((2, 3), (3, 1), save_path=str(tmp_path / "layout.png"))
    assert offsets.tolist() == [[0, 1, 2], [3, 4, 5]]
    utils.vis_matrix(torch.eye(3), "eye", str(tmp_path / "eye.png"))
    utils.vis_attn_mask(torch.eye(3).bool(), str(tmp_path / "mask.png"))
    from magi_attention.common import AttnMask

    AttnMask.from_mask(np.tri(3, dtype=int)).visualize(str(tmp_path / "attn.png"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["attn.png", "eye.png", "layout.png", "mask.png"]
    with pytest.raises(ContractError):
        utils.repr_matrix(np.zeros(3))


def test_printing(capsys, tmp_path):
    utils.rprint_rank("hello", rank=0)
    utils.rprint_rank("nobody", rank=1)
    utils.write_rank("hello", str(tmp_path / "log"), rank=0)
    out = capsys.readouterr().out
    assert "hello" in out and "rank 0" in out and "nobody" not in out and "hello" in (tmp_path / "log").read_text()


def test_nvtx_without_cuda_changes_nothing():
    @nvtx.instrument_nvtx
    def double(x):
        """Doc."""
        return 2 * x

    with nvtx.add_nvtx_event("outer"):
        assert double(4) == 8
    assert double.__doc__ == "Doc." and double.__name__ == "double"
    for i in range(4):
        nvtx.switch_profile(i, 1, 3, profile_ranks=[1])


def test_which_ranks_are_debugged(monkeypatch):
    assert not debug.is_debugged(0, "false") and debug.is_debugged(0, "true") and not debug.is_debugged(1, "true")
    assert debug.is_debugged(5, "all") and debug.is_debugged(3, "0,3") and not debug.is_debugged(1, "0,3")
    with pytest.raises(ContractError, match="0,3"):
        debug.is_debugged(0, "some")
    monkeypatch.setenv("MAGI_ATTENTION_ENABLE_REMOTE_DEBUG", "2")
    assert debug.is_debugged(2)
    assert debug.debugpy_listen() is None  # rank 0 is not named and returns at once


def test_process_groups(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        world, other = dist.group.WORLD, dist.new_group([0])
        assert utils.is_same_process_group(world, other) and utils.is_same_process_group(None, None)
        assert not utils.is_same_process_group(world, None)
        mesh = dist.init_device_mesh("cpu", (1, 1))
        assert utils.is_same_device_mesh(mesh, dist.init_device_mesh("cpu", (1, 1)))
        assert not utils.is_same_device_mesh(mesh, dist.init_device_mesh("cpu", (1,)))
        assert not utils.is_same_device_mesh(mesh, None)
    finally:
        utils.clearup_dist_env()
    assert not dist.is_initialized()
    utils.clearup_dist_env()


def test_setup_dist_env(monkeypatch):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    result = utils.setup_dist_env("gloo", base_seed=5, seed_bias=lambda rank: rank + 1)
    try:
        assert result[:5] == (0, 0, 1, 1, 1) and result[6:] == (0, 6)
        drawn = torch.rand(1)
        torch.manual_seed(6)
        assert drawn == torch.rand(1)
    finally:
        utils.clearup_dist_env()
