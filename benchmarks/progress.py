# SPDX-License-Identifier: Apache-2.0
"""How far a benchmark is: a bar on a terminal, a line a step elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Step = TypeVar("Step")


def steps(todo: Sequence[Step], text: Callable[[Step], str], shows: bool = True) -> Iterator[Step]:
    """Each of ``todo``, told while it runs. ``shows`` is for one rank of several."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shows and console.is_terminal)) as progress:
        task = progress.add_task("", total=len(todo))
        for number, step in enumerate(todo, 1):
            if shows and not console.is_terminal:
                print(f"[{number} of {len(todo)}] {text(step)}", flush=True)
            progress.update(task, description=text(step))
            yield step
            progress.advance(task)
