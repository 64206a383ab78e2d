# SPDX-License-Identifier: Apache-2.0
"""Parameters of the launches of an exchange over nodes, prepared once: all that differs between calls is the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from magi_attention.comm.collectives.wire import RowPack
from magi_attention.comm.exchange.group import ExchangeGroup
from magi_attention.comm.exchange.tables import CastTables, ReduceTables, SumTable, Table
from magi_attention.common.two_level.transfers import RankTransfers
from magi_attention.native import abi
from magi_attention.native.comm import abi as comm_abi

NUM_CTAS = 16
CODES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16, torch.float32: abi.FP32}
P = TypeVar("P")


def rows_sent(part: RankTransfers) -> np.ndarray:
    """Rows of the cast's input that go anywhere, ascending."""
    is_sent = np.zeros(part.input_rows, bool)
    for put in part.send:
        is_sent[put.source_row : put.source_row + put.rows] = True
    return np.flatnonzero(is_sent)


class Launches:
    """Parameters of launches, prepared for the arena as it is now."""

    def __init__(self, group: ExchangeGroup, of_reduce: bool, num_ctas: int) -> None:
        self.group, self.arena, self.memory = group, group.arena, group.memory
        self.num_ctas = num_ctas
        self.epoch, self.credit = group.epoch(of_reduce), self.arena.credit(of_reduce, group.rank)
        self.held: list[torch.Tensor] = []  # tables that launches point to

    def is_current(self) -> bool:
        return self.group.arena is self.arena

    def put(self, puts: Table, credits: Table) -> comm_abi.CommPutParams:
        counts = len(puts), len(credits), self._ctas_for(puts)
        lists = self.upload(puts), self.upload(credits)
        return comm_abi.CommPutParams(comm_abi.COMM_VERSION, *counts, self.epoch, *lists, None)

    def wait(self, waits: Table) -> comm_abi.CommWaitParams:
        return comm_abi.CommWaitParams(comm_abi.COMM_VERSION, len(waits), self.epoch, self.upload(waits), None)

    def end(self, tables: CastTables | ReduceTables) -> comm_abi.CommEndParams:
        counts = len(tables.free_for), len(tables.counted)
        lists = self.upload(tables.free_for), self.upload(tables.counted)
        return comm_abi.CommEndParams(comm_abi.COMM_VERSION, *counts, self.epoch, *lists, self.credit, None)

    def sum(self, table: SumTable, pack: RowPack) -> comm_abi.CommSumParams:
        fields = len(table.blocks), self._ctas_for(table.blocks), pack.width, CODES[pack.dtype]
        lists = [self.upload(rows) for rows in table]
        return comm_abi.CommSumParams(comm_abi.COMM_VERSION, *fields, self.epoch, *lists, None)

    def _ctas_for(self, table: Table) -> int:
        """One for each row at most: others would only take multiprocessors from kernels beside them."""
        return min(self.num_ctas, max(len(table), 1))

    def upload(self, table: np.ndarray) -> int:
        self.held.append(torch.from_numpy(np.ascontiguousarray(table)).to(self.memory.device))
        return self.held[-1].data_ptr()

    def launch(self, verb: Callable[[P], None], params: P, stream: int) -> None:
        params.stream = stream  # type: ignore[attr-defined]
        verb(params)

    def rows(self, pack: RowPack, at: int, rows: int) -> torch.Tensor:
        """Rows of a region, (rows, width)."""
        size = rows * pack.width * pack.dtype.itemsize
        return self.memory[at : at + size].view(pack.dtype).view(rows, pack.width)

    def columns(self, pack: RowPack, at: int, rows: int) -> list[torch.Tensor]:
        """The same, each tensor of the pack a view of them."""
        return pack.columns(self.rows(pack, at, rows))
