# SPDX-License-Identifier: Apache-2.0
"""Which backend runs, why, and what is said when none does."""

from __future__ import annotations

import logging
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch

from magi_attention.errors import ContractError, NoBackendError
from magi_attention.kernels import AttnOptions, Backend, Problem, Registry, SdpaBackend, default_registry, registry


@dataclass(frozen=True)
class Picky:
    """A backend that refuses all problems, or none."""

    refusal: str | None
    name: str = "picky"

    def why_not(self, problem):
        return self.refusal

    def forward(self, *args, **kwargs):
        raise AssertionError("not called")

    backward = forward


def problem(dtype=torch.bfloat16, heads=(4, 2)) -> Problem:
    return Problem("cpu", dtype, *heads, 64, 64, AttnOptions(0.125))


def test_default_preference_falls_back_with_one_log_line(caplog):
    unique = Picky("It is Tuesday.", name="tuesday_only")  # the line is once per reason and process
    registry = default_registry().with_backend(unique)
    with caplog.at_level(logging.WARNING, logger="magi_attention.kernels"):
        for _ in range(3):
            backend, reason = registry.select(problem(), "tuesday_only", explicit=False)
            assert backend.name == "sdpa_ol" and "It is Tuesday." in reason
    assert [r.getMessage() for r in caplog.records] == [reason]


QUIET = "Attention runs on the CPU, by PyTorch's kernels ('sdpa_ol')."


def test_a_cpu_is_no_fallback_that_anyone_would_mend(caplog):
    registry._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="magi_attention.kernels"):
        for _ in range(3):
            _, reason = default_registry().select(problem(), "ffa")
    assert [r.getMessage() for r in caplog.records] == [QUIET] and "in place of 'ffa'" in reason


@pytest.mark.parametrize("name", ["sdpa", "sdpa_ol"])
def test_named_backend_runs(name):
    backend, reason = default_registry().select(problem(torch.float64), name, explicit=True)
    assert backend.name == name and isinstance(backend, Backend) and name in reason


def test_no_preference_takes_the_first():
    assert default_registry().select(problem())[0].name == "sdpa_ol"


def test_explicit_wish_that_cannot_run_lists_everyone():
    registry = Registry((Picky("No fun."), Picky("Sold out.", name="gone"), SdpaBackend()))
    for name in ("picky", "gone"):
        with pytest.raises(NoBackendError) as error:
            registry.select(problem(), name, explicit=True)
        text = str(error.value)
        assert f"'{name}' cannot run" in text
        assert "picky: No fun." in text and "gone: Sold out." in text and "sdpa: can run" in text


@pytest.mark.parametrize("bad", [problem(torch.int32), problem(heads=(5, 2))])
def test_nobody_can_run(bad):
    with pytest.raises(NoBackendError, match="No kernel backend can run"):
        default_registry().select(bad, "ffa", explicit=False)


def test_unknown_names():
    with pytest.raises(ContractError, match="Unknown kernel backend 'flash'"):
        default_registry().select(problem(), "flash")
    with pytest.raises(ContractError, match="No backend is called 'flash'"):
        default_registry().with_backend(Picky(None), before="flash")


def test_registration_gives_a_new_registry():
    registry = default_registry()
    mine = registry.with_backend(Picky(None, name="mine"), before="sdpa")
    assert [b.name for b in mine.backends] == ["ffa", "cudnn_flex", "fa4", "sdpa_ol", "mine", "sdpa"]
    assert mine.select(problem(), "mine", explicit=True)[0].name == "mine"
    assert registry is default_registry() and "mine" not in registry.names
    with pytest.raises(FrozenInstanceError):
        registry.backends = ()  # type: ignore[misc]


def test_all_published_names_are_known():
    from magi_attention.common.enum import MagiAttentionKernelBackend

    assert {b.value for b in MagiAttentionKernelBackend} <= set(default_registry().names)
