# SPDX-License-Identifier: Apache-2.0
"""``LaunchPlan``: every command and file of a verb, as a value. Nothing computes argv anywhere else."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One command. ``environment`` is added to that of the launcher. A failure whose output has ``tolerated`` in it
    counts as success, as when what is to be removed is gone already."""

    label: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    tolerated: str = ""

    def text(self) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*words, shlex.join(self.argv)])


@dataclass(frozen=True)
class RenderedFile:
    """A file that is written before the steps run; ``path`` as the steps name it."""

    path: str
    text: str


@dataclass(frozen=True)
class LaunchPlan:
    """``steps`` run together, one per node, if ``is_concurrent``, else one after another."""

    title: str
    steps: tuple[Step, ...] = ()
    files: tuple[RenderedFile, ...] = ()
    is_concurrent: bool = False
    remark: str = ""

    def text(self) -> str:
        """What ``--dry-run`` prints."""
        lines = [f"# {self.title}"]
        if self.remark:
            lines.append(f"# {self.remark}")
        for file in self.files:
            lines += [f"# file {file.path}", file.text.rstrip("\n"), "# end of file"]
        for step in self.steps:
            lines += [f"# {step.label}", step.text()]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Target:
    """One run of a session. ``run_id`` marks its processes and containers; ``folder`` is where the launcher keeps
    its files and ``node_folder`` where the nodes write theirs, which is the same path where they share a disk."""

    session: str
    run: str
    run_id: str
    folder: str
    node_folder: str
