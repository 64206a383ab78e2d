# SPDX-License-Identifier: Apache-2.0
"""Did a model's attention go through the plan? A module that calls other attention sees the tokens of its own rank only
(or, on one rank, all packed documents), and nothing in shapes or losses would show it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from magi_attention.errors import ContractError

_IS_ATTENTION = re.compile("Attention|Attn")
_MAX_LISTED = 4


class PlanMark:
    """Identifies a plan or a key, whose ``_mark`` it is, without a reference to it."""


class _LastCall:
    """Which plan or key the last call of ``attend`` or ``calc_attn`` had: its mark."""

    plan: Any = None


_LAST = _LastCall()


def note_call(mark: Any) -> None:
    """Says that attention is called with the plan, or the key, of ``mark``. An attribute is written and none read, so
    that ``torch.compile`` makes neither a guard nor a graph break of it."""
    _LAST.plan = mark


class _Use:
    """What a module did in the present ``with`` block. ``plan``: of its own last call, calls of modules in it apart."""

    def __init__(self) -> None:
        self.ran = False
        self.plan: Any = None
        self.outer: Any = None


def _begin(module: nn.Module, args: Any) -> None:
    use: Any = module._attention_use
    use.ran, use.outer = True, _LAST.plan
    _LAST.plan = None


def _end(module: nn.Module, args: Any, output: Any) -> None:
    use: Any = module._attention_use
    if _LAST.plan is not None:
        use.plan = _LAST.plan
    _LAST.plan = use.outer


class AttentionCheck:
    """Checks, forward by forward, that every attention module of ``model`` that ran called ``attend`` (``calc_attn``).

        check = AttentionCheck(model)
        with check(plan):
            loss = model(...)

    An attention module is one whose class name has "Attention" or "Attn" in it, and that holds no other such module;
    calls by the attention modules around it count as its own. ``modules`` names them instead. ``exclude`` are prefixes
    of names, in ``model.named_modules()``, of parts that are not meant: a vision tower, cross-attention.

    Layers may run several times, be shared, be skipped or be computed anew; the model may be compiled. It costs two
    hooks for each attention module, some microseconds. ``ContractError`` if there is no attention module.
    """

    def __init__(
        self, model: nn.Module, *, modules: Iterable[nn.Module] | None = None, exclude: Iterable[str] = ()
    ) -> None:
        skipped = tuple(exclude)
        named = {
            name: module
            for name, module in model.named_modules()
            if not any(name == skip or name.startswith(f"{skip}.") for skip in skipped)
        }
        if modules is None:
            watched = {n: m for n, m in named.items() if _IS_ATTENTION.search(type(m).__name__)}
        else:
            wanted = {id(module) for module in modules}
            watched = {n: m for n, m in named.items() if id(m) in wanted}
        self._watched: dict[str, Any] = watched
        if not watched:
            raise ContractError(
                f"{type(model).__name__} has no module with 'Attention' or 'Attn' in the name of its class; name those "
                "that call attention, by modules=."
            )
        for module in self._watched.values():
            if not hasattr(module, "_attention_use"):
                module._attention_use = _Use()
                module.register_forward_pre_hook(_begin)
                module.register_forward_hook(_end)
        self._around = {name: self._modules_around(name) for name in self._innermost()}

    def _innermost(self) -> list[str]:
        return [n for n in self._watched if not any(other != n and _is_in(other, n) for other in self._watched)]

    def _modules_around(self, name: str) -> list[Any]:
        """The module itself and the attention modules that it is in."""
        return [module for other, module in self._watched.items() if _is_in(name, other)]

    @contextmanager
    def __call__(self, *plans: Any) -> Iterator[list[Any]]:
        """Checks the forwards in the ``with`` block, which are of batches that have ``plans`` (or keys); what is added
        to the list that it gives counts, too, as where batches are divided inside. With none, any plan will do.

        Raises:
            ContractError: an attention module ran without a call, or with the plan of another batch; or none ran.
        """
        self._forget()
        known = list(plans)
        yield known
        self._judge(known)

    def _forget(self) -> None:
        _LAST.plan = None
        for module in self._watched.values():
            module._attention_use = _Use()

    def _judge(self, plans: list[Any]) -> None:
        ran = [name for name in self._around if self._watched[name]._attention_use.ran]
        if not ran:
            raise ContractError(
                f"No attention module ran, of {_listed(self._watched)}; put the forward of the model into the block."
            )
        used = {name: [m._attention_use.plan for m in self._around[name]] for name in ran}
        self._forget()
        missed = [name for name in ran if all(plan is None for plan in used[name])]
        if missed:
            raise ContractError(
                f"{self._described(missed)} ran without attention by a plan: tokens saw those of their own rank alone, "
                "or other documents. Use a model whose attention can be replaced (for transformers: "
                "attn_implementation='magi' on every model, and back after generate); for what is not "
                "self-attention over the sequence, give AttentionCheck exclude=."
            )
        marks = [plan._mark for plan in plans]
        others = [name for name in ran if not any(mark is mine for mark in used[name] for mine in marks)]
        if plans and others:
            raise ContractError(
                f"{self._described(others)} called attention with a plan that is not of this batch; hand the plans of "
                "the batch to every layer."
            )

    def _described(self, names: list[str]) -> str:
        kinds = sorted({type(self._watched[name]).__name__ for name in names})
        return f"{_listed(names)} ({', '.join(kinds)})"


def _is_in(name: str, other: str) -> bool:
    return other == "" or name == other or name.startswith(f"{other}.")


def _listed(names: Iterable[str]) -> str:
    names = [name or "the model" for name in names]
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
