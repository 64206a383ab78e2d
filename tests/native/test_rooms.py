# SPDX-License-Identifier: Apache-2.0
"""Includes of ``csrc`` go one way between its rooms: what kernels of all of them share is in ``csrc/device``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from magi_attention.native import toolchain

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# room -> beginnings of what its files include between quotes
ROOMS = {
    "include/magi": ("magi/",),
    "device": ("device/",),
    "comm/symm": ("comm/symm/", "device/", "ffa/common/host.h", "magi/"),
    "comm/networks": ("comm/exchange/verbs.cuh", "comm/networks/", "device/", "magi/"),
    "comm/exchange": ("comm/", "device/", "ffa/common/host.h", "magi/"),
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_includes_what_lies_below_it(room) -> None:
    files = [path for path in toolchain.source_files(CSRC) if path.is_relative_to(CSRC / room)]
    assert files
    for path in files:
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            assert name.startswith(ROOMS[room]), f"{path.relative_to(CSRC)} includes {name}"


@pytest.mark.parametrize(("library", "file"), [("nccl", "gin"), ("nvshmem", "nvshmem")])
def test_only_one_file_includes_a_network(library, file) -> None:
    pattern = rf"#include [<\"]{library}"
    found = [p.relative_to(CSRC).as_posix() for p in toolchain.source_files(CSRC) if re.search(pattern, p.read_text())]
    assert found == [f"comm/networks/{file}/verbs.cuh"]
