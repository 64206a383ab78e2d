# SPDX-License-Identifier: Apache-2.0
"""Several packs a step in the FSDP2 example: the steps of one process that has all packs at once."""

from __future__ import annotations

import random
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import profile

from magi_attention.testing.spawn import run_processes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "llama")]
import fsdp2_llama  # noqa: E402
from data import ahead, packed_batches  # noqa: E402
from model import Llama  # noqa: E402

SEQ_LEN, LONGEST, STEPS = 300, 90, 3
WORDS = [*f"--out none --dtype fp32 --seq-len {SEQ_LEN} --max-document {LONGEST} --data".split(), str(EXAMPLES)]


def steps(rank: int, world: int, seed: int, cp: int, words: list[str]) -> tuple[list[float], dict, int]:
    """Losses, whole gradients of the first step, and how often a step reduced them."""
    args = fsdp2_llama.make_parser(None).parse_args([*WORDS, "--seed", str(seed), *words])
    args.cp, args.device, args.attention, args.recompute = cp, "cpu", "magi", False
    begun = []

    class Noted(fsdp2_llama.Trainer):
        def plan(self, batch):
            begun.append(batch)
            return super().plan(batch)

    trainer = Noted(args, fsdp2_llama.Place.make("cpu", cp))
    with profile() as seen:
        losses = [trainer.step().item()]
    assert len(begun) == 2 * args.accumulate, "plans of the next step have been begun"
    reductions = sum(e.name == "c10d::_reduce_scatter_base_" for e in seen.events())
    gradients = {name: p.grad.full_tensor() for name, p in trainer.model.named_parameters()}
    return losses + [trainer.step().item() for _ in range(STEPS - 1)], gradients, reductions


def attention_of(borders: tuple[int, ...]):
    def attention(q, k, v):
        outs = []
        for begin, end in zip(borders, borders[1:]):
            one = (x[begin:end].transpose(0, 1) for x in (q, k, v))
            outs.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True).transpose(0, 1))
        return torch.cat(outs)

    return attention


def one_process(seed: int, groups: int, packs: int) -> tuple[list[float], dict]:
    """The mean over all labels of a step at once."""
    model = Llama(fsdp2_llama.CONFIGS["tiny"], seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    sources = [packed_batches(str(EXAMPLES), SEQ_LEN, seed + 1000 * i, LONGEST) for i in range(groups)]
    losses, gradients = [], {}
    for _ in range(STEPS):
        found = []
        for batch in (batch for source in sources for batch in islice(source, packs)):
            documents = [batch.tokens[a:b] for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:])]
            positions = torch.cat([torch.arange(len(x)) for x in documents])
            logits = model(batch.tokens, positions, attention_of(batch.cu_seqlens))
            labels = torch.cat([F.pad(x[1:], (0, 1), value=-100) for x in documents])
            found.append(F.cross_entropy(logits, labels, reduction="none")[labels >= 0])
        loss = torch.cat(found).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


@pytest.mark.parametrize(("cp", "packs", "words"), [(2, 3, []), (1, 2, []), (2, 2, ["--reduce-each-pack"])])
def test_packs_of_a_step_are_those_of_one_process(cp, packs, words):
    seed = random.randrange(1000)
    print(f"seed {seed}")
    wanted, gradients = one_process(seed, 2 // cp, packs)
    once = 1 + fsdp2_llama.CONFIGS["tiny"].num_layers  # each block, and the rest
    for losses, found, reductions in run_processes(2, steps, seed, cp, ["--accumulate", str(packs), *words]):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert reductions == (packs * once if words else once)
        for name, x in gradients.items():
            assert (found[name] - x).norm() <= 1e-5 * x.norm(), name


def test_items_ahead():
    begun = []
    items = (begun.append(i) or i for i in range(9))
    got = ahead(items, 3)
    assert begun == []
    assert next(got) == 0 and begun == [0, 1, 2, 3]
    assert list(got) == list(range(1, 9))
