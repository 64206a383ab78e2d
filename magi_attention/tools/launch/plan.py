# SPDX-License-Identifier: Apache-2.0
"""``LaunchPlan``: every command and file of a verb, as a value. Nothing computes argv anywhere else."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from magi_attention.env import secrets


@dataclass(frozen=True)
class Step:
    """One command. ``environment`` is added to that of the launcher. A failure whose output has ``tolerated`` in it
    counts as success, as when what is to be removed is gone already. ``exports`` are variables that ``argv`` takes
    from its standard input, as ``export_script`` writes them: what stands in argv, every user of the machine can read.
    """

    label: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    tolerated: str = ""
    exports: Mapping[str, str] = field(default_factory=dict)

    @property
    def stdin(self) -> bytes:
        """What the command gets on its standard input first."""
        return export_script(self.exports).encode("utf-8", "surrogateescape")

    def text(self) -> str:
        """The command with the variables before it, those with secrets without their values."""
        shown = {name: secrets.shown(name, value) for name, value in sorted(self.environment.items())}
        words = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
        return " ".join([*words, shlex.join(self.argv)])


def export_script(variables: Mapping[str, str]) -> str:
    """Lines for a POSIX shell that set ``variables``, whatever is in their values."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables.items()))


@dataclass(frozen=True)
class RenderedFile:
    """A file that is written before the steps run, for its owner alone; ``path`` as the steps name it. One that is
    secret is never shown."""

    path: str
    text: str
    is_secret: bool = False


@dataclass(frozen=True)
class LaunchPlan:
    """``steps`` of a run are one per node, which a ``Supervisor`` runs together; others ``run_steps`` runs in turn."""

    title: str
    steps: tuple[Step, ...] = ()
    files: tuple[RenderedFile, ...] = ()
    remark: str = ""

    def text(self) -> str:
        """What ``--dry-run`` prints."""
        lines = [f"# {self.title}"]
        if self.remark:
            lines.append(f"# {self.remark}")
        for file in self.files:
            text = f"# {secrets.LEFT_OUT}" if file.is_secret else file.text.rstrip("\n")
            lines += [f"# file {file.path}", text, "# end of file"]
        for step in self.steps:
            lines += [f"# {step.label}", step.text()]
            shown = {name: secrets.shown(name, value) for name, value in step.exports.items()}
            lines += [f"# its standard input: {line}" for line in export_script(shown).splitlines()]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Target:
    """One run of a session. ``run_id`` marks its processes and containers; ``folder`` is where the launcher keeps
    its files and ``node_folder`` where the nodes write theirs, which is the same path where they share a disk.
    ``token`` is known to the nodes of this run alone; it stands in no record, and is empty where a job finds its own.
    """

    session: str
    run: str
    run_id: str
    folder: str
    node_folder: str
    token: str = field(default="", repr=False)
