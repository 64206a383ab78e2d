# SPDX-License-Identifier: Apache-2.0
"""``FlagCombGenerator``: which combination of flags a test case runs with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, count, islice, product
from typing import Any, Literal, TypeAlias

from magi_attention.errors import ContractError

Comb = dict[str, Any]
FlagCombStrategy: TypeAlias = Literal["constant", "sequential", "random", "heuristic"]
STRATEGIES = ("constant", "sequential", "random", "heuristic")


class FlagCombGenerator:
    """Iterates over combinations of flags, as dictionaries from flag to value.

    Args:
        flags: names.
        options: values of a flag, ``(False, True)`` where absent; the default is tried first.
        defaults: default value of a flag; the first option where absent.
        groups: flags that are likely to interact; ``heuristic`` tries their pairs.
        strategy: ``constant`` gives the defaults; ``sequential`` all combinations in order; ``random``
            draws; ``heuristic`` gives the defaults, all non-defaults, each flag alone off its default, pairs
            inside groups, and then draws.
        cycle_times: -1 never ends. Else the finite list of the strategy (for random: as many draws as there
            are combinations; for heuristic: without the draws) is gone through so many times.
        seed: of the private generator.
    """

    def __init__(
        self,
        flags: Sequence[str],
        options: Mapping[str, Sequence[Any]] | None = None,
        defaults: Mapping[str, Any] | None = None,
        groups: Sequence[Sequence[str]] = (),
        strategy: str = "heuristic",
        cycle_times: int = -1,
        seed: int = 42,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ContractError(f"strategy={strategy!r} is unknown; use one of {', '.join(STRATEGIES)}.")
        self.flags = list(dict.fromkeys(flags))
        self.options = {f: list((options or {}).get(f, (False, True))) for f in self.flags}
        self.defaults = {f: (defaults or {}).get(f, self.options[f][0]) for f in self.flags}
        for flag, value in self.defaults.items():
            if value not in self.options[flag]:
                raise ContractError(f"Default {value!r} of {flag} is none of {self.options[flag]}; add it.")
            self.options[flag] = [value, *self._others(flag)]
        unknown = sorted({f for group in groups for f in group} - set(self.flags))
        if unknown:
            raise ContractError(f"Groups name {', '.join(unknown)}, which are no flags; list them in flags.")
        self.groups, self.strategy, self.cycle_times = [list(g) for g in groups], strategy, cycle_times
        self._random = random.Random(seed)
        self._deferred: list[Comb] = []
        self._covered: list[Comb] = []
        self._stream = self._make_stream()

    # ---- iteration --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Comb]:
        return self.iter()

    def __reversed__(self) -> Iterator[Comb]:
        return self.iter(reverse=True)

    def iter(self, reverse: bool = False) -> Iterator[Comb]:
        """All combinations from the beginning, by themselves: ``next(generator)`` goes on where it was.

        Backwards every pass is reversed; that of draws which never end cannot be.
        """
        if reverse and self.strategy == "heuristic" and self.cycle_times < 0:
            raise ContractError("Draws that never end have no reverse order; give cycle_times.")
        return self._walk(self._make_stream(reverse))

    def _walk(self, stream: Iterator[Comb]) -> Iterator[Comb]:
        for comb in stream:
            self._mark(comb)
            yield dict(comb)

    @property
    def num_flags(self) -> int:
        return len(self.flags)

    @property
    def num_combs(self) -> int:
        """How many different combinations there are."""
        return math.prod(len(values) for values in self.options.values())

    def __next__(self) -> Comb:
        comb = next(self._stream)
        self._mark(comb)
        return dict(comb)

    def _mark(self, comb: Comb) -> None:
        if comb not in self._covered:
            self._covered.append(dict(comb))

    def _make_stream(self, reverse: bool = False) -> Iterator[Comb]:
        if self.strategy == "heuristic" and self.cycle_times < 0:
            yield from self._heuristic()
            while True:
                yield self._draw()
        for _ in count() if self.cycle_times < 0 else range(self.cycle_times):
            combs = list(self._pass()) if reverse else self._pass()
            yield from reversed(combs) if isinstance(combs, list) else combs

    def _pass(self) -> Iterator[Comb]:
        if self.strategy == "constant":
            yield dict(self.defaults)
        elif self.strategy == "heuristic":
            yield from self._heuristic()
        elif self.strategy == "sequential":
            yield from self._all()
        else:
            yield from (self._draw() for _ in self._all())

    def _all(self) -> Iterator[Comb]:
        for values in product(*(self.options[f] for f in self.flags)):
            yield dict(zip(self.flags, values))

    def _draw(self) -> Comb:
        return {f: self._random.choice(self.options[f]) for f in self.flags}

    def _others(self, flag: str) -> list[Any]:
        return [value for value in self.options[flag] if value != self.defaults[flag]]

    def _heuristic(self) -> Iterator[Comb]:
        seen: list[Comb] = []
        for comb in self._heuristic_with_repeats():
            if comb not in seen:
                seen.append(comb)
                yield comb

    def _heuristic_with_repeats(self) -> Iterator[Comb]:
        base = dict(self.defaults)
        yield base
        yield {f: (self._others(f) or [base[f]])[0] for f in self.flags}
        for flag in self.flags:
            for value in self._others(flag):
                yield {**base, flag: value}
        for group in self.groups:
            for a, b in combinations(group, 2):
                for value_a, value_b in product(self._others(a), self._others(b)):
                    yield {**base, a: value_a, b: value_b}

    # ---- with a condition -------------------------------------------------------------------------

    def get_next_valid_comb(self, test_config: Any, is_valid_fn: Callable[[Comb, Any], bool]) -> Comb:
        """The next combination with ``is_valid_fn(comb, test_config)``.

        Combinations that are invalid here are kept and offered first to later configs.

        Raises:
            RuntimeError: no combination at all is valid, or the generator has ended.
        """
        for comb in self._deferred:
            if is_valid_fn(comb, test_config):
                self._deferred.remove(comb)
                self._mark(comb)
                return dict(comb)
        # More draws than there are combinations mean that the stream only repeats invalid ones.
        limit = 2 * len(list(islice(self._all(), 4096))) + len(self.flags) ** 2 + 2
        for comb in islice(self._stream, limit):
            if is_valid_fn(comb, test_config):
                self._mark(comb)
                return dict(comb)
            if comb not in self._deferred:
                self._deferred.append(comb)
        if self.cycle_times < 0:
            for comb in self._all():
                if is_valid_fn(comb, test_config):
                    self._mark(comb)
                    return dict(comb)
        raise RuntimeError(f"No combination of {self.flags} is valid for {test_config!r}; relax the condition.")

    def is_comb_covered(self, comb: Comb) -> bool:
        """Has this combination been handed out?"""
        return comb in self._covered

    # ---- helpers ----------------------------------------------------------------------------------

    @staticmethod
    def sync_group(flag_comb: Comb, group: Any) -> Comb:
        """The combination of the group's first rank, on all of its ranks (collective)."""
        import torch.distributed as dist

        box = [flag_comb]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        return box[0]

    @staticmethod
    def to_test_case(flag_comb: Comb) -> str:
        """``flag=value`` pairs, for messages."""
        return ", ".join(f"{flag}={value}" for flag, value in flag_comb.items())
