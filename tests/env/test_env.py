# SPDX-License-Identifier: Apache-2.0
"""Environment variables: parsing, getters, the snapshot, and that one module reads them."""

import logging
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import magi_attention
from magi_attention import env
from magi_attention.api.policy import PolicyOfEnvironment, policy_from_flags
from magi_attention.common.enum import MagiAttentionKernelBackend as Backend
from magi_attention.common.enum import MagiAttentionPrecision as Precision
from magi_attention.env import registry
from magi_attention.env.snapshot import RuntimeFlags, check_flag_comb
from magi_attention.errors import ContractError

PACKAGE = Path(magi_attention.__file__).parent


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in registry.VARIABLES:
        monkeypatch.delenv(name, raising=False)


DEFAULTS = {
    "general": {
        "log_level": logging.WARNING,
        "kernel_backend": Backend.FFA,
        "precision": None,
        "dist_attn_runtime_dict_size": 1000,
        "min_chunks_per_rank": 8,
    },
    "comm": {
        "ffa_fwd_sm_margin_save_for_comm": 4,
        "ffa_bwd_sm_margin_save_for_comm": 4,
        "dsink_all_reduce_op": "none",
    },
    "build": {
        "workspace_base_dir": str(Path.home()),
        "nvcc_threads": 4,
        "max_jobs": None,
        "cuda_home": "",
        "cxx": "c++",
    },
}


@pytest.mark.parametrize(
    "module, getter, value", [(m, g, v) for m, table in DEFAULTS.items() for g, v in table.items()]
)
def test_defaults(module, getter, value):
    assert getattr(getattr(env, module), getter)() == value


FLAG_GETTERS = {
    "SANITY_CHECK": env.general.is_sanity_check_enable,
    "FLATTEN_HEAD_GROUPS": env.general.is_flatten_head_groups_enable,
    "DETERMINISTIC_MODE": env.general.is_deterministic_mode_enable,
    "PROFILE_MODE": env.general.is_profile_mode_enable,
    "AUTO_RANGE_MERGE": env.general.is_auto_range_merge_enable,
    "CATGQA": env.general.is_cat_gqa_enable,
    "BWD_HIDE_TAIL_REDUCE": env.general.dist_attn_backward_hide_tail_reduce,
    "CPP_BACKEND": env.general.is_cpp_backend_enable,
    "HIERARCHICAL_COMM": env.comm.is_hierarchical_comm_enable,
    "QO_COMM": env.comm.is_qo_comm_enable,
    "FORWARD_HIGH_PRECISION_REDUCE": env.comm.is_fwd_high_precision_reduce_enable,
    "BACKWARD_HIGH_PRECISION_REDUCE": env.comm.is_bwd_high_precision_reduce_enable,
    "NATIVE_GRPCOLL": env.comm.is_native_grpcoll_enable,
    "NO_BUILD_CACHE": env.build.is_no_build_cache,
    "FORCE_JIT_BUILD": env.build.is_force_jit_build,
    "BUILD_VERBOSE": env.build.is_build_verbose,
    "BUILD_DEBUG": env.build.is_build_debug,
    "PREBUILD_FFA": env.build.is_prebuild_ffa,
    "SKIP_CUDA_BUILD": env.build.is_skip_cuda_build,
}


@pytest.mark.parametrize("name", FLAG_GETTERS)
@pytest.mark.parametrize("text, on", [("1", True), ("0", False), ("", False), ("true", False), ("01", False)])
def test_a_flag_is_on_iff_it_is_1(monkeypatch, name, text, on):
    assert FLAG_GETTERS[name]() is (name == "PREBUILD_FFA"), "unless it is said"
    monkeypatch.setenv("MAGI_ATTENTION_" + name, text)
    assert FLAG_GETTERS[name]() is on


@pytest.mark.parametrize(
    "text, level",
    [
        ("debug", logging.DEBUG),
        ("Info", logging.INFO),
        ("WARN", logging.WARNING),
        ("WARNING", logging.WARNING),
        ("critical", logging.CRITICAL),
        ("loud", logging.WARNING),
    ],
)
def test_log_level(monkeypatch, text, level):
    monkeypatch.setenv("MAGI_ATTENTION_LOG_LEVEL", text)
    assert env.general.log_level() == level


@pytest.mark.parametrize(
    "name, getter",
    [
        ("MAGI_ATTENTION_KERNEL_BACKEND", env.general.kernel_backend),
        ("MAGI_ATTENTION_PRECISION", env.general.precision),
        ("MAGI_ATTENTION_DSINK_ALL_REDUCE_OP", env.comm.dsink_all_reduce_op),
        ("MAGI_ATTENTION_FFA_FORWARD_SM_MARGIN", env.comm.ffa_fwd_sm_margin_save_for_comm),
        ("MAGI_ATTENTION_MIN_CHUNKS_PER_RANK", env.general.min_chunks_per_rank),
        ("NVCC_THREADS", env.build.nvcc_threads),
    ],
)
def test_nonsense_is_a_value_error_that_names_the_variable(monkeypatch, name, getter):
    monkeypatch.setenv(name, "nonsense")
    with pytest.raises(ValueError, match=f"{name}.*nonsense"):
        getter()


def test_integers_have_a_minimum(monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_MIN_CHUNKS_PER_RANK", "0")
    with pytest.raises(ValueError, match="at least 1"):
        env.general.min_chunks_per_rank()


def test_backend_and_its_earlier_spellings(monkeypatch):
    assert not env.general.is_kernel_backend_explicit()
    monkeypatch.setenv("MAGI_ATTENTION_SDPA_BACKEND", "1")
    assert env.general.kernel_backend() is Backend.SDPA and env.general.is_kernel_backend_explicit()
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "sdpa_ol")
    with pytest.raises(AssertionError, match="SDPA_BACKEND"):
        env.general.kernel_backend()
    monkeypatch.setenv("MAGI_ATTENTION_SDPA_BACKEND", "0")
    assert env.general.kernel_backend() is Backend.SDPA_OL
    monkeypatch.delenv("MAGI_ATTENTION_KERNEL_BACKEND")
    monkeypatch.setenv("MAGI_ATTENTION_FA4_BACKEND", "1")
    assert env.general.kernel_backend() is Backend.FA4
    monkeypatch.setenv("MAGI_ATTENTION_SDPA_BACKEND", "1")
    with pytest.raises(AssertionError):
        env.general.kernel_backend()


def test_node_sizes_and_the_node_of_the_launcher(monkeypatch):
    assert env.comm.node_sizes() == () and env.comm.launcher_node() is None
    for text, sizes in (("8", (8,)), (" 8, 8,4", (8, 8, 4))):
        monkeypatch.setenv("MAGI_ATTENTION_NODE_SIZE", text)
        assert RuntimeFlags.from_env().node_sizes == sizes
    for text in ("0", "8,", "-1", "eight"):
        monkeypatch.setenv("MAGI_ATTENTION_NODE_SIZE", text)
        with pytest.raises(ValueError, match="MAGI_ATTENTION_NODE_SIZE"):
            env.comm.node_sizes()
    monkeypatch.setenv("GROUP_RANK", "2")
    assert env.comm.launcher_node() == 2


def test_sm_margins_follow_connections_and_native(monkeypatch):
    assert not env.general.is_cuda_device_max_connections_one()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert env.general.is_cuda_device_max_connections_one()
    assert env.comm.ffa_fwd_sm_margin_save_for_comm() == 0
    monkeypatch.setenv("MAGI_ATTENTION_FFA_BACKWARD_SM_MARGIN", "7")
    assert env.comm.ffa_bwd_sm_margin_save_for_comm() == 7
    monkeypatch.setenv("MAGI_ATTENTION_NATIVE_GRPCOLL", "1")
    assert env.comm.ffa_bwd_sm_margin_save_for_comm() == 0


def test_raw_entries_follow_every_change(monkeypatch):
    names = ("MAGI_ATTENTION_KERNEL_BACKEND", "MAGI_ATTENTION_SANITY_CHECK")
    entries, keys = registry.raw_entries(names)

    def texts():
        return tuple(map(entries.get, keys))

    seen = [texts()]
    assert seen[0] == (None, None)
    for name, text in ((names[0], "sdpa"), (names[1], "1"), (names[0], "ffa")):
        monkeypatch.setenv(name, text)
        assert texts() not in seen
        seen.append(texts())
    monkeypatch.delenv(names[0])
    monkeypatch.delenv(names[1])
    assert texts() == seen[0]
    with pytest.raises(KeyError):
        registry.raw_entries(("MAGI_ATTENTION_NO_SUCH",))


def test_unknown_names_give_one_warning_with_the_nearest():
    environ = {
        "MAGI_ATTENTION_DETERMINISTC_MODE": "1",
        "MAGI_ATTENTION_ZZZ": "1",
        "MAGI_ATTENTION_QO_COMM": "true",
        "MAGI_ATTENTION_CATGQA": "1",
        "OTHER": "x",
    }
    with pytest.warns(UserWarning) as caught:
        findings = registry.check_unknown(environ)
    assert len(caught) == 1 and len(findings) == 3
    text = str(caught[0].message)
    assert "did you mean MAGI_ATTENTION_DETERMINISTIC_MODE?" in text
    assert "MAGI_ATTENTION_ZZZ" in text and "only 1 turns it on" in text and "CATGQA" not in text


def test_no_warning_without_cause():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.check_unknown({"MAGI_ATTENTION_QO_COMM": "0", "PATH": ""}) == []


def test_table_lists_everything_once():
    rows = registry.list_table({"MAGI_ATTENTION_PRECISION": "bf8", "NVCC_THREADS": "3"})
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names) == len(registry.VARIABLES)
    by_name = {row["name"]: row for row in rows}
    assert by_name["MAGI_ATTENTION_PRECISION"]["value"].startswith("invalid")
    assert by_name["NVCC_THREADS"]["value"] == "3"
    assert by_name["MAGI_ATTENTION_QO_COMM"]["default"] == "0"
    assert all(isinstance(cell, str) and row["doc"] for row in rows for cell in row.values())


def test_flags_are_a_snapshot(monkeypatch):
    before = RuntimeFlags.from_env()
    monkeypatch.setenv("MAGI_ATTENTION_DETERMINISTIC_MODE", "1")
    monkeypatch.setenv("MAGI_ATTENTION_PRECISION", "fp16")
    monkeypatch.setenv("MAGI_ATTENTION_DSINK_ALL_REDUCE_OP", "sum")
    after = RuntimeFlags.from_env()
    assert not before.deterministic and after.deterministic and after.precision is Precision.FP16
    assert after.dsink_all_reduce_op == "sum" and before != after
    assert pickle.loads(pickle.dumps(after)) == after and hash(after) == hash(replace(after))


BASE = RuntimeFlags(kernel_backend=Backend.FFA)


@pytest.mark.parametrize(
    "change, config",
    [
        ({"deterministic": True, "kernel_backend": Backend.FA4}, {}),
        ({"hierarchical_comm": True, "qo_comm": True}, {}),
        ({"qo_comm": True, "kernel_backend": Backend.FA4}, {}),
        ({"qo_comm": True, "hide_tail_reduce": True}, {}),
        ({"qo_comm": True}, {"no_overlap": True}),
        ({"qo_comm": True, "flatten_head_groups": True}, {"uneven_shard": True}),
        ({"flatten_head_groups": True}, {}),
        ({"fwd_high_precision_reduce": True, "kernel_backend": Backend.FA4}, {}),
        ({"bwd_high_precision_reduce": True, "kernel_backend": Backend.FA4}, {}),
        ({"precision": Precision.FP32}, {}),
        ({"precision": Precision.FP64, "kernel_backend": Backend.FA4}, {}),
    ],
)
def test_illegal_combinations(change, config):
    with pytest.raises(ContractError, match=r"drop|set") as error:
        check_flag_comb(replace(BASE, **change), **config)
    assert isinstance(error.value, AssertionError)


def test_legal_combinations_pass():
    check_flag_comb(BASE, uneven_shard=True, no_overlap=True)
    check_flag_comb(replace(BASE, qo_comm=True, fwd_high_precision_reduce=True))
    check_flag_comb(replace(BASE, qo_comm=True, flatten_head_groups=True))
    check_flag_comb(replace(BASE, native_grpcoll=True, hierarchical_comm=True))
    check_flag_comb(replace(BASE, deterministic=True, hierarchical_comm=True, hide_tail_reduce=True))
    check_flag_comb(replace(BASE, kernel_backend=Backend.SDPA, precision=Precision.FP64, deterministic=True))
    check_flag_comb(replace(BASE, kernel_backend=Backend.FA4, precision=Precision.BF16))


def test_every_name_in_the_sources_is_registered():
    import re

    used = set()
    for path in PACKAGE.rglob("*.py"):
        used |= set(re.findall(r"\"(MAGI_ATTENTION_[A-Z0-9_]*[A-Z0-9])\"", path.read_text()))
    assert used and used <= set(registry.VARIABLES)


def test_one_launch_where_it_can_be_unless_something_is_said(monkeypatch):
    assert RuntimeFlags.from_env().stage_mode == "auto"
    for text, mode in (("1", "fused"), ("0", "staged")):
        monkeypatch.setenv("MAGI_ATTENTION_NATIVE_GRPCOLL", text)
        assert RuntimeFlags.from_env().stage_mode == mode
    check_flag_comb(replace(RuntimeFlags.from_env(), native_grpcoll=True, deterministic=True), uneven_shard=True)


@pytest.mark.parametrize("name", registry.names_in(registry.GENERAL, registry.COMMUNICATION, "kernels and JIT"))
def test_the_policy_follows_every_variable(name, monkeypatch):
    """Also one that is set, edited and taken away after the first call."""
    variable, ask = registry.VARIABLES[name], PolicyOfEnvironment()
    numbers, texts = ("3", "2"), ("4", "2,2")
    texts = {"flag": ("1", "0"), "int": numbers, "choice": variable.choices, "level": ("INFO",), "text": texts}
    before = ask()
    for text in texts[variable.kind]:
        monkeypatch.setenv(name, text)
        assert ask() == policy_from_flags(RuntimeFlags.from_env()), text
        assert ask() is ask()
    monkeypatch.delenv(name)
    assert ask() == before


def test_the_policy_of_an_environment_that_makes_no_sense(monkeypatch):
    ask = PolicyOfEnvironment()
    ask()
    monkeypatch.setenv("MAGI_ATTENTION_HEAD_CHUNKS", "none")
    for _ in range(2):
        with pytest.raises(ValueError, match="HEAD_CHUNKS"):
            ask()
