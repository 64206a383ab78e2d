# SPDX-License-Identifier: Apache-2.0
"""What the compiler said about each kernel: registers, shared memory, spills; and the guard that reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from magi_attention.errors import BuildError

# C7508..C7520: wgmma serialised or slowed down; C7602: setmaxnreg ignored. Each costs far more than it looks.
_FATAL = re.compile(r"\b(C75(?:0[89]|1\d|20)|C7602)\b")
_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")


@dataclass
class KernelUse:
    """Resources of one kernel as ptxas gives them. Bytes; ``smem_bytes`` is the static part only."""

    entry: str
    registers: int = 0
    smem_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0


@dataclass
class Unit:
    """One compiled object."""

    name: str
    seconds: float
    bytes: int
    kernels: list[KernelUse] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def parse_log(log: str) -> tuple[list[KernelUse], list[str]]:
    """Kernels and fatal warnings in the output of ``nvcc -Xptxas -v``."""
    kernels: list[KernelUse] = []
    warnings: list[str] = []
    is_kernel = False
    for line in log.splitlines():
        if _FATAL.search(line) and line.strip() not in warnings:
            warnings.append(line.strip())
        if found := _ENTRY.search(line):
            kernels.append(KernelUse(found[1]))
            is_kernel = True
        elif "Function properties for" in line and kernels:
            # Device functions that are not inlined have their own lines; their spills count for the last kernel.
            is_kernel = kernels[-1].entry in line
        elif (found := _STACK.search(line)) and kernels:
            if is_kernel:
                kernels[-1].stack_bytes = int(found[1])
            kernels[-1].spill_bytes += int(found[2]) + int(found[3])
        elif (found := _USED.search(line)) and kernels:
            kernels[-1].registers = int(found[1])
            if smem := _SMEM.search(line):
                kernels[-1].smem_bytes = int(smem[1])
    return kernels, warnings


def read_unit(output: Path) -> Unit:
    """The unit behind an object that ``step.py`` made."""
    report = json.loads(Path(f"{output}.json").read_text())
    kernels, warnings = parse_log(report["log"])
    return Unit(output.stem, report["seconds"], report["bytes"], kernels, warnings)


def check_units(units: Sequence[Unit], spills: int = 0) -> None:
    """Raises ``BuildError`` that names every kernel with more than ``spills`` bytes of them, and every warning that
    makes wgmma slow."""
    faults = []
    for unit in units:
        faults += [
            f"  {unit.name}: {k.spill_bytes} bytes of register spills in {k.entry}"
            for k in unit.kernels
            if k.spill_bytes > spills
        ]
        faults += [f"  {unit.name}: {line}" for line in unit.warnings]
    if faults:
        listing = "\n".join(faults)
        raise BuildError(
            "Compiled, but slow code is not installed; lower the register use or restore the order of wgmma "
            f"and its operands:\n{listing}"
        )


def table(units: Sequence[Unit]) -> str:
    """One line per kernel, or per object without one."""
    header = ("unit", "kernel", "registers", "smem", "stack", "spills", "seconds", "KiB")
    rows = [header]
    for unit in units:
        size = (f"{unit.seconds:.1f}", f"{unit.bytes / 1024:.0f}")
        if not unit.kernels:
            rows.append((unit.name, "-", "-", "-", "-", "-", *size))
        for i, k in enumerate(unit.kernels):
            numbers = (str(k.registers), str(k.smem_bytes), str(k.stack_bytes), str(k.spill_bytes))
            rows.append((unit.name if i == 0 else "", short_name(k.entry), *numbers, *(size if i == 0 else ("", ""))))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def short_name(entry: str) -> str:
    """The identifiers of a mangled name without their lengths, at most 40 characters."""
    parts, rest = [], entry
    while match := re.search(r"(\d+)([A-Za-z_])", rest):
        length, start = int(match[1]), match.start(2)
        if length > len(rest) - start:
            break
        parts.append(rest[start : start + length])
        rest = rest[start + length :]
        if not rest[:1].isdigit():
            break
    return ("::".join(parts) or entry)[:40]


def as_json(units: Sequence[Unit]) -> list[dict]:
    """The units as plain data for the report file."""
    return [asdict(unit) for unit in units]
