# SPDX-License-Identifier: Apache-2.0
"""The long-context example on GPUs: checkpoints in host memory and attention that is kept give the same bits as plain
checkpoints, also where copies are late and where ranks share the sequence, and the peak of memory goes down as
predicted."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from places import places
from torch.profiler import profile

from magi_attention.api import Mask, make_plan
from magi_attention.kernels.instruments import FORWARD_RANGE
from magi_attention.testing.spawn import run_processes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "llama")]
import fsdp2_llama  # noqa: E402
import long_context  # noqa: E402
from model import ModelConfig  # noqa: E402
from offload import OffloadedInputs  # noqa: E402

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
LAYERS, TOKENS = 8, 1 << 14
CONFIG = ModelConfig(width=512, num_layers=LAYERS, num_heads_q=8, num_heads_kv=2, head_dim=64, hidden=1024)
WAYS = [(activations, keeps) for activations in ("checkpointed", "offloaded") for keeps in (False, True)]


class LateCopies(OffloadedInputs):
    """The stream of the copies sleeps before each, so what does not wait for it has other bits."""

    @contextmanager
    def _beside(self) -> Iterator[None]:
        with super()._beside():
            if self._stream is not None:
                torch.cuda._sleep(5_000_000)
            yield


def make(way: tuple[str, bool], words: list[str]) -> tuple[long_context.LongLlama, object]:
    fsdp2_llama.CONFIGS["tiny"] = CONFIG
    activations, keeps = way
    sizes = f"--out none --mlp-chunk 2048 --logits-chunk 1024 --loss checkpointed --activations {activations}".split()
    args = long_context.make_long_parser(None).parse_args([*sizes, *words, *(["--keeps-attention"] if keeps else [])])
    args.cp, args.device = dist.get_world_size(), DEVICE
    model = long_context.LongLlama(args).to(DEVICE, torch.bfloat16)
    model.draw_weights(0)
    for block in model.blocks:
        if args.compile:
            block.compile(fullgraph=True)
    return model, args


def step(model: long_context.LongLlama, seed: int) -> list[torch.Tensor]:
    """The loss and the gradients, of documents by ``seed``."""
    ends = sorted(random.Random(seed).sample(range(1, TOKENS), 5))
    mask, group = Mask.varlen([0, *ends, TOKENS], causal=True), dist.group.WORLD
    plan = make_plan(mask, dist.get_world_size())
    tokens = plan.shard(torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(seed)).to(DEVICE))
    model.zero_grad()
    positions = plan.positions(group, torch.device(DEVICE), per_document=True)
    loss = model(tokens, positions, plan.labels(tokens), plan, group)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def same_bits(rank: int, world: int, seed: int, words: list[str]) -> None:
    os.environ["MAGI_ATTENTION_DETERMINISTIC_MODE"] = "1"
    seeds = range(seed, seed + 3)  # steps that follow one another reuse memory
    plain, _ = make(WAYS[0], words)
    wanted = [step(plain, s) for s in seeds]
    assert all(torch.equal(a, b) for a, b in zip(step(plain, seed), wanted[0])), "plain checkpoints repeat their bits"
    for inputs in (OffloadedInputs, LateCopies):
        long_context.OffloadedInputs = inputs
        for way in WAYS[1:]:
            model, _ = make(way, words)
            found = [step(model, s) for s in seeds]
            for number, (a, b) in enumerate(zip(found, wanted)):
                assert all(torch.equal(x, y) for x, y in zip(a, b)), (inputs.__name__, way, number)
            with profile() as seen:
                step(model, seed)
            ran = sum(e.name == FORWARD_RANGE and e.device_type.name == "CPU" for e in seen.events())
            assert ran == (LAYERS if way[1] else 2 * LAYERS)


@pytest.mark.parametrize("words", [[], ["--compile"]], ids=["eager", "compiled"])
def test_the_same_bits_as_plain_checkpoints(words):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    run_processes(1, same_bits, seed, words, backend="nccl", timeout_s=400.0)


@pytest.mark.parametrize(("world", "backend"), places(2, 4))
def test_the_same_bits_on_several_ranks(world, backend):
    """In one launch over NVLink where there is one, as by default."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    run_processes(world, same_bits, seed, [], backend=backend, timeout_s=400.0)


def peaks(rank: int, world: int, seed: int) -> list[tuple[int, int]]:
    """By way: the most bytes on the GPU during a step, and what is predicted of them."""
    found = []
    for way in WAYS:
        model, args = make(way, [])
        step(model, seed)  # buffers of kernels and tables of plans
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(model, seed)
        shape, setup = long_context.shape_and_setup(args)
        # The model is whole and in bf16, there is no optimizer, and gradients of the step before are let go.
        setup = replace(setup, parameter_bytes=2, optimizer_bytes=0, is_one_launch=False)
        use = make_plan(Mask.causal(TOKENS), 1).memory(shape, setup)
        found.append((torch.cuda.max_memory_allocated(), use.peak_bytes))
        del model
        torch.cuda.empty_cache()
    return found


def test_the_peak_goes_down_as_predicted():
    (found,) = run_processes(1, peaks, random.randrange(10**6), backend="nccl", timeout_s=200.0)
    for way, numbers in zip(WAYS, found):
        print(way, *(f"{x / 1e6:.1f} MB" for x in numbers))
    (inputs, of_inputs), (kept, of_kept), (host, of_host), (both, of_both) = found
    assert kept - inputs == pytest.approx(of_kept - of_inputs, rel=0.15), "out and lse of all layers"
    assert inputs - host >= 0.8 * (of_inputs - of_host) > 0
    assert kept - both >= 0.8 * (of_kept - of_both) > 0
