# SPDX-License-Identifier: Apache-2.0
"""The long-context example on CPUs: bounded memory changes no loss, on one rank and on two; what is kept; resuming."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from magi_attention.api import Mask, make_plan
from magi_attention.kernels.instruments import FORWARD_RANGE
from magi_attention.testing.spawn import run_processes
from magi_attention.testing.waiting import DEADLINE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "llama"), str(EXAMPLES.parent / "tests" / "functional")]
import fsdp2_llama  # noqa: E402
import long_context  # noqa: E402
from live_bytes import LiveBytes  # noqa: E402
from loss_in_chunks import make_loss  # noqa: E402
from offload import OffloadedInputs  # noqa: E402

SMALL = ("--device", "cpu", "--dtype", "fp32", "--seq-len", "1024", "--max-document", "300", "--steps", "4")
CHUNKS = ("--mlp-chunk", "100", "--logits-chunk", "64", "--head-chunks", "2", "--keeps-attention")


def run(script: str, out: Path, ranks: int, *options: str) -> tuple[list[float], str]:
    """Losses, and what was printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(EXAMPLES / script), *SMALL, "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((out / "curve.json").read_text())["losses"], done.stdout


@pytest.mark.nightly
def test_losses_are_those_of_the_plain_program(tmp_path):
    plain, _ = run("fsdp2_llama.py", tmp_path / "plain", 1)
    assert len(plain) == 4 and plain[0] > plain[2]
    cases = (1, CHUNKS), (2, CHUNKS), (2, ("--activations", "checkpointed")), (1, ("--loss", "checkpointed"))
    for ranks, options in cases:
        found, printed = run("long_context.py", tmp_path / f"{ranks}{options[1]}", ranks, *options)
        assert found == pytest.approx(plain, rel=1e-5)
        assert re.search(rf"{1024 // ranks:,} tokens a rank: predicted \d+\.\d+ GB on the GPU", printed)


@pytest.mark.nightly
def test_resuming_gives_the_same_bits(tmp_path):
    straight, _ = run("long_context.py", tmp_path, 2, *CHUNKS, "--save-every", "2")
    resumed, _ = run("long_context.py", tmp_path / "again", 2, *CHUNKS, "--resume", str(tmp_path / "step-2"))
    assert straight[2:] == resumed


@pytest.mark.nightly
def test_one_sequence_is_the_same_on_two_ranks(tmp_path):
    options = ("--one-sequence", "--layers", "3", "--head-chunks", "2")
    alone, _ = run("long_context.py", tmp_path / "alone", 1, *options)
    shared, _ = run("long_context.py", tmp_path / "shared", 2, *options)
    assert alone == pytest.approx(shared, rel=1e-5)


@pytest.mark.parametrize("name", ["torch", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_those_of_all_logits_in_float64(name, dtype):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    if name == "torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip(f"torch {torch.__version__} has no linear_cross_entropy")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(700, 32, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(150, 32, generator=generator) * 0.2).to(dtype).requires_grad_()
    is_none = torch.rand(700, generator=generator) < 0.2
    labels = torch.randint(0, 150, (700,), generator=generator).masked_fill(is_none, -100)
    loss_sum, about = make_loss(name, 64)
    assert "64 tokens" in about
    loss = loss_sum(rows, weight, labels)
    loss.backward()
    exact = [x.detach().double().requires_grad_() for x in (rows, weight)]
    truth = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")
    truth.backward()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    assert loss.dtype == torch.float32 and abs(loss.item() / truth.item() - 1) < tolerance
    for x, y in zip((rows, weight), exact):
        assert (x.grad.double() - y.grad).norm() < 20 * tolerance * y.grad.norm()


def test_losses_that_are_not_here_are_refused(monkeypatch):
    with pytest.raises(SystemExit, match="pip install liger-kernel"):
        make_loss("liger", 64)
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(SystemExit, match="install torch 2.13 or later, or give --loss checkpointed"):
        make_loss("torch", 64)
    assert "checkpointed, 64 tokens at a time, because torch" in make_loss(None, 64)[1]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_offloaded_inputs_give_the_same_bits(layers):
    """Two forwards before two backwards, as several batches before one step of the optimizer have it."""
    torch.manual_seed(layers)
    blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(layers))
    inputs = [torch.randn(5, 8) for _ in range(2)]

    def gradients(around):
        blocks.zero_grad()
        losses = []
        for x in inputs:
            with around():
                for block in blocks:
                    x = checkpoint(block, x, use_reentrant=False)
            losses.append(x.square().sum())
        for loss in losses:
            loss.backward()
        return [p.grad.clone() for p in blocks.parameters()]

    kept, offloaded = gradients(nullcontext), gradients(lambda: OffloadedInputs(torch.device("cpu")))
    assert all(torch.equal(a, b) for a, b in zip(kept, offloaded))


class NotedInputs(OffloadedInputs):
    last: Callable[[], OffloadedInputs | None] = staticmethod(lambda: None)

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        NotedInputs.last = weakref.ref(self)


def keeping(rank: int, world: int, seed: int) -> list[tuple]:
    """By way of keeping: a step's bits, how often attention ran forward, and bytes kept and predicted."""
    gc.disable()  # what a step keeps goes with its graph
    torch.manual_seed(seed)
    tokens = torch.randint(0, 256, (600,))
    plan = make_plan(Mask.from_lengths([200, 1, 399], causal=True), world)
    local, group = plan.shard(tokens), dist.group.WORLD
    labels, positions = plan.labels(local), plan.positions(group, torch.device("cpu"), per_document=True)
    found, long_context.OffloadedInputs = [], NotedInputs
    for activations in ("checkpointed", "offloaded"):
        for keeps in ([], ["--keeps-attention"]):
            words = f"--out none --dtype fp32 --layers 3 --mlp-chunk 100 --activations {activations}".split()
            args = long_context.make_long_parser(None).parse_args([*words, *keeps])
            args.cp, args.device = world, "cpu"
            model = long_context.LongLlama(args)
            model.draw_weights(seed)
            with profile() as seen, LiveBytes() as live:
                loss = model(local, positions, labels, plan, group)
                offloaded = NotedInputs.last()
                held = offloaded.host_bytes if offloaded else live.now
                assert (activations == "offloaded") == (offloaded is not None)
                loss.backward()
            ran = sum(e.name == FORWARD_RANGE for e in seen.events())
            use = plan.memory(*long_context.shape_and_setup(args))
            bits = [loss.detach(), *(p.grad for p in model.parameters())]
            del loss, offloaded
            assert NotedInputs.last() is None
            found.append((bits, ran, held, use.host["activations"] if use.host else use.activations))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_that_keep_attention(world):
    """The same bits, without its second forward, and as many bytes more as are predicted."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    for found in run_processes(world, keeping, seed):
        for (bits, twice, held, predicted), (same, once, held_more, predicted_more) in zip(found[::2], found[1::2]):
            assert all(torch.equal(a, b) for a, b in zip(bits, same, strict=True))
            assert (twice, once) == (6, 3)
            assert held_more - held == pytest.approx(predicted_more - predicted, rel=0.1)
        for _, _, held, predicted in found[2:]:
            assert held == pytest.approx(predicted, rel=0.1), "in host memory"


def operations(rank: int, world: int) -> list[int]:
    """Operations of a step, by tokens of an MLP at a time."""
    tokens, found = torch.randint(0, 256, (600,)), []
    plan, group = make_plan(Mask.causal(600), world), dist.group.WORLD
    for chunk in (600, 300, 50):
        words = f"--out none --dtype fp32 --layers 2 --loss checkpointed --keeps-attention --mlp-chunk {chunk}".split()
        args = long_context.make_long_parser(None).parse_args(words)
        args.cp, args.device = world, "cpu"
        model = long_context.LongLlama(args)
        model.draw_weights(0)
        with FlopCounterMode(display=False) as counter:
            model(tokens, torch.arange(600), plan.labels(tokens), plan, group).backward()
        found.append(counter.get_total_flops())
        assert not long_context.LongBlock.gives_inputs_alone
    return found


def test_more_chunks_of_the_mlp_are_no_more_operations():
    """A block that is computed again gives chunks their inputs, and leaves what they make of them out."""
    (found,) = run_processes(1, operations)
    assert found[0] > 0 and found == found[:1] * 3


def compiled_steps(rank: int, world: int, options: list[str]) -> tuple[list[float], int, int, dict]:
    """Losses, calls of attention forward in the last step, graphs, and why there are several for a block."""
    torch._dynamo.reset()
    args = long_context.make_long_parser(None).parse_args([*SMALL, *CHUNKS, "--out", "none", *options])
    args.cp, args.attention, args.recompute = world, "magi", True
    trainer = long_context.LongTrainer(args, fsdp2_llama.Place.make("cpu", world))
    losses = [trainer.step().item() for _ in range(2)]
    with profile() as seen:
        losses.append(trainer.step().item())
    counters = torch._dynamo.utils.counters
    ran = sum(e.name == FORWARD_RANGE for e in seen.events())
    return losses, ran, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.skipif(" " in sys.prefix, reason="torch.compile does not quote Python's path, which has a space")
def test_compiled_blocks_in_checkpoints():
    plain = run_processes(2, compiled_steps, [])
    for options in ([], ["--activations", "checkpointed"]):
        compiled = run_processes(2, compiled_steps, ["--compile", *options])
        for (wanted, once, none, _), (losses, ran, graphs, breaks) in zip(plain, compiled):
            assert losses == pytest.approx(wanted, rel=1e-5)
            assert ran == once == 2, "once for each layer"
            assert none == 0 < graphs and not breaks


@pytest.mark.parametrize("name", ["seq-len", "accumulate", "mlp-chunk", "layers"])
def test_counts_begin_with_one(name, capsys):
    with pytest.raises(SystemExit):
        long_context.make_long_parser(None).parse_args(["--out", "none", f"--{name}", "0"])
    assert f"--{name}: it is 0; give 1 or more." in capsys.readouterr().err


def test_out_of_memory_names_what_to_switch_on(monkeypatch):
    def step(self):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(long_context.Trainer, "step", step)
    trainer = object.__new__(long_context.LongTrainer)
    options = {"activations": "checkpointed", "mlp_chunk": 8192, "logits_chunk": 256, "head_chunks": 1}
    trainer.args = argparse.Namespace(**options, keeps_attention=True, accumulate=2, reduce_each_pack=False)
    with pytest.raises(SystemExit) as error:
        trainer.step()
    said = str(error.value)
    assert "--activations offloaded" in said and "--mlp-chunk 2048" in said and "--head-chunks 4" in said
    assert "no --keeps-attention" in said and "--reduce-each-pack" in said
    assert "--logits-chunk" not in said and "CUDA out of memory" in said
