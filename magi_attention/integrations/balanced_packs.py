# SPDX-License-Identifier: Apache-2.0
"""Packs of documents for data-parallel groups, with equal work in every step, and a context-parallel size for each.

``BalancedPackSampler`` gives ``Pack`` after ``Pack`` to a rank, and ``PackedDataset`` makes the batch of one:

    sampler = BalancedPackSampler(lengths, 32768, ranks=world, rank=rank, cp_sizes=(1, 2, 4), shape=shape)
    dataset = PackedDataset(documents, PackingCollator())
    loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=4)

It needs no process group. All ranks compute the same packs from the same lengths and seed, and nothing is sent.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from magi_attention.api import Mask, ModelShape
from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError
from magi_attention.integrations.packing import PackingCollator

Step = tuple[int, list[list[int]]]  # context-parallel size, and the documents of each group


@dataclass(frozen=True)
class Pack:
    """What a rank computes in a step: part ``cp_rank`` out of ``cp_size`` of the documents ``indices``, packed.

    Its group are the ``cp_size`` ranks that follow one another from a multiple of ``cp_size`` on. ``work`` is that of
    one rank, in pairs of a query and a key.
    """

    indices: tuple[int, ...]
    cp_size: int
    cp_rank: int
    work: float


class BalancedPackSampler(Sampler[Pack]):
    """For rank ``rank`` out of ``ranks``: one pack for each step of an epoch, about equally heavy for all ranks.

    The documents of some steps, in an order drawn anew each epoch, are dealt out together: a document goes to the
    smallest context-parallel size whose ranks have room for it, heavy ones first, each to the lightest pack. Packs
    that are about as heavy make a step. Where too few documents are left for a whole step of a size, they go to the
    next larger one, and at the end of the epoch those of the largest are ``left_out``.

    Args:
        lengths: tokens of each document.
        tokens_per_rank: a pack over s ranks has at most s times as many.
        ranks, rank: of the mesh without tensor and pipeline parallelism: data parallel times context parallel.
        cp_sizes: numbers of ranks that may share a pack; each divides the next, and the last one divides ``ranks``.
        shape: of the model, for the work of a token beside its attention; without it attention alone is balanced.
        mask_of: the mask of a document of so many tokens, whose allowed pairs the planner counts.
        seed: of the order, the same on all ranks.
        steps_dealt: for about so many steps documents are dealt out together. More are better balanced.

    Raises:
        ContractError: for sizes that do not divide, and a document that no pack has room for.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        tokens_per_rank: int,
        *,
        ranks: int,
        rank: int,
        cp_sizes: Sequence[int] = (1,),
        shape: ModelShape | None = None,
        mask_of: Callable[[int], Mask] = Mask.causal,
        seed: int = 0,
        steps_dealt: int = 64,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.tokens_per_rank = as_int(tokens_per_rank, "tokens_per_rank", at_least=1)
        self.ranks, self.rank = as_int(ranks, "ranks", at_least=1), as_int(rank, "rank", at_least=0)
        self.cp_sizes = tuple(as_int(size, "cp_sizes", at_least=1) for size in cp_sizes)
        self.seed, self.steps_dealt = as_int(seed, "seed"), as_int(steps_dealt, "steps_dealt", at_least=1)
        self.epoch, self.left_out = 0, ()
        self._done = 0  # steps of this epoch that have been given
        self._check()
        self.works = _works(self.lengths, mask_of, 0.0 if shape is None else shape.pairs_per_token)

    def _check(self) -> None:
        sizes = self.cp_sizes
        if not sizes or any(b % a or a == b for a, b in zip(sizes, (*sizes[1:], 2 * sizes[-1]))):
            raise ContractError(f"cp_sizes are {list(sizes)}; each has to divide the next larger one, as in (1, 2, 4).")
        if self.ranks % sizes[-1] or self.rank >= self.ranks:
            raise ContractError(
                f"ranks is {self.ranks} and rank {self.rank}; ranks count from 0, and {sizes[-1]} of them form a group."
            )
        if self.lengths.ndim != 1 or not len(self.lengths) or self.lengths.min() < 1:
            raise ContractError("lengths has to be a list of the tokens of each document, 1 or more; leave others out.")
        most, room = int(self.lengths.max()), sizes[-1] * self.tokens_per_rank
        if most > room:
            raise ContractError(
                f"A document has {most:,} tokens, and {sizes[-1]} ranks have room for {room:,}; cut it, raise "
                "tokens_per_rank, or allow a larger size in cp_sizes."
            )

    def set_epoch(self, epoch: int) -> None:
        """Begins another epoch, with an order of its own."""
        self.epoch, self._done = as_int(epoch, "epoch", at_least=0), 0

    def state_dict(self, done: int | None = None) -> dict[str, Any]:
        """Where this epoch stands. ``done``: steps that were trained, where workers of a loader have taken packs ahead;
        without it, those that were given."""
        return {"epoch": self.epoch, "done": self._done if done is None else done, "digest": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on behind the steps that were done. ``ContractError`` for the state of other documents or settings."""
        if state["digest"] != self._digest:
            raise ContractError(
                "This state is of a sampler with other documents or settings, whose steps are not the same; give it to "
                "one with the same lengths, tokens_per_rank, ranks, cp_sizes, mask, shape and seed."
            )
        self.epoch, self._done = state["epoch"], state["done"]

    @property
    def _digest(self) -> str:
        settings = repr((self.tokens_per_rank, self.ranks, self.cp_sizes, self.seed, self.steps_dealt))
        digest = hashlib.blake2b(settings.encode(), digest_size=16)
        digest.update(self.lengths.tobytes())
        digest.update(self.works.tobytes())
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Pack]:
        """The packs that are left of this epoch. Behind the last one the next epoch begins."""
        for number, (size, groups) in enumerate(self.steps()):
            if number >= self._done:
                self._done = number + 1
                mine = groups[self.rank // size]
                yield Pack(tuple(mine), size, self.rank % size, float(self.works[mine].sum()) / size)
        self.set_epoch(self.epoch + 1)

    def steps(self) -> Iterator[Step]:
        """The steps of this epoch as all ranks take them; ``left_out`` is known behind the last one."""
        draw = random.Random(f"{self.seed} {self.epoch}")
        order = list(range(len(self.lengths)))
        draw.shuffle(order)
        enough, tokens, waiting = self.steps_dealt * self.ranks * self.tokens_per_rank, 0, []
        for at, document in enumerate(order):
            waiting.append(document)
            tokens += int(self.lengths[document])
            if tokens >= enough or at == len(order) - 1:
                steps, waiting = self._deal(waiting)
                draw.shuffle(steps)
                yield from steps
                tokens = int(self.lengths[waiting].sum())
        self.left_out = tuple(waiting)

    def _deal(self, documents: list[int]) -> tuple[list[Step], list[int]]:
        """Steps of these documents, and those that are left."""
        steps: list[Step] = []
        rest: list[int] = []
        smaller = 0
        for size in self.cp_sizes:
            room, groups = size * self.tokens_per_rank, self.ranks // size
            mine = rest + [i for i in documents if smaller < self.lengths[i] <= room]
            smaller = room
            packs, rest = self._packs(mine, room, groups)
            packs.sort(key=lambda pack: float(self.works[pack].sum()))
            steps += [(size, packs[i : i + groups]) for i in range(0, len(packs), groups)]
        return steps, rest

    def _packs(self, documents: list[int], room: int, groups: int) -> tuple[list[list[int]], list[int]]:
        """Packs, a multiple of ``groups``, none empty; and documents that are too few for more of them."""
        heaviest_first = sorted(documents, key=lambda i: (-self.works[i], i))
        rounds = -(-int(self.lengths[documents].sum()) // (room * groups)) if documents else 0
        while rounds * groups <= len(documents):
            packs = self._filled(heaviest_first, room, rounds * groups)
            if packs is not None:
                return packs, []
            rounds += 1
        # Too few for so many packs: whole rounds of the heaviest, one in each pack; the others wait.
        rounds = len(documents) // groups
        packs = [[i] for i in heaviest_first[: rounds * groups]]
        return packs, heaviest_first[rounds * groups :]

    def _filled(self, documents: list[int], room: int, count: int) -> list[list[int]] | None:
        """Each document in the lightest of ``count`` packs with room; None if a document or a pack is left over."""
        packs: list[list[int]] = [[] for _ in range(count)]
        left = [room] * count
        lightest = [(0.0, i) for i in range(count)]
        for document in documents:
            full, length = [], int(self.lengths[document])
            while lightest and left[lightest[0][1]] < length:
                full.append(heapq.heappop(lightest))
            if not lightest:
                return None
            work, pack = lightest[0]
            packs[pack].append(document)
            left[pack] -= length
            heapq.heapreplace(lightest, (work + float(self.works[document]), pack))
            for entry in full:
                heapq.heappush(lightest, entry)
        return packs if all(packs) else None


class PackedDataset(Dataset[dict[str, Any]]):
    """The batch of a ``Pack``: its documents, out of ``dataset``, as ``collator`` packs them for the pack's rank.

    A batch has ``cp_size`` beside what the collator gives. Calls of attention need the group of that size:
    ``batch["magi_plans"].in_group(groups[batch["cp_size"]])``, with ``groups`` from ``dist.new_subgroups(size)``.
    """

    def __init__(self, dataset: Any, collator: PackingCollator) -> None:
        self.dataset, self.collator = dataset, collator

    def __getitem__(self, pack: Pack) -> dict[str, Any]:
        collator = replace(self.collator, cp_size=pack.cp_size, cp_rank=pack.cp_rank)
        return {**collator([self.dataset[i] for i in pack.indices]), "cp_size": pack.cp_size}


def _works(lengths: np.ndarray, mask_of: Callable[[int], Mask], pairs_per_token: float) -> np.ndarray:
    """float64 (documents,): allowed pairs of each, and what its tokens take besides."""
    unique, which = np.unique(lengths, return_inverse=True)
    pairs = np.array([mask_of(int(n)).area for n in unique], dtype=np.float64)
    return (pairs + pairs_per_token * unique)[which]


__all__ = ["BalancedPackSampler", "Pack", "PackedDataset"]
