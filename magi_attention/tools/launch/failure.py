# SPDX-License-Identifier: Apache-2.0
"""What ranks and torchrun print, read for the first failure: which rank it was, how it ended, its last words."""

from __future__ import annotations

import re
import signal
from collections import defaultdict, deque
from collections.abc import Sequence

LINE_PREFIX = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}]: "}  # for torchrun's environment
_KEPT_LINES = 200  # of each rank; a traceback is shorter
_TOLD_FRAMES = 4  # lines before the one that names the error: two calls
_TOLD_LINES = 3  # of a rank that ended without a traceback
_OWN = re.compile(r"^\[rank (\d+)\]: ?(.*)$", re.DOTALL)
_PREFIX = re.compile(r"^\[(rank|node) \d+\]:")
_RANK = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)")
_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
# torchrun's log lines about the end of its ranks, behind which its traceback and its table follow
_ENDING = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic/.*\](.* closing signal | failed \(exitcode: )")
# what torch puts before every line of a traceback once the process is in a group
OF_TORCH = re.compile(r"^\[rank\d+\]:(?: |$)")
TRACEBACK = "Traceback (most recent call last)"


class FailureReport:
    """Takes the lines of one torchrun and of its ranks, the latter behind ``[rank k]: ``.

    ``rank`` is the first that failed, None as long as torchrun has named none, and ``ending`` how it ended.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self.ending = ""
        self._tails: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_KEPT_LINES))
        self._is_reporting = False  # torchrun is: what has no prefix is its own
        self._is_at_cause = False  # inside the part of its report on the first failure

    def take(self, line: str) -> bool:
        """Reads a line. True if it is torchrun's account of a failure, which ``summary`` tells in fewer words."""
        if match := _OWN.match(line):
            self._tails[int(match[1])].append(match[2])
            return False
        if _PREFIX.match(line):
            return False
        self._is_reporting = self._is_reporting or _ENDING.match(line) is not None
        if "Root Cause (first observed failure):" in line:
            self._is_at_cause, self.rank, self.ending = True, None, ""
        elif self._is_at_cause and (match := _RANK.match(line)):
            self.rank = int(match[1])
        elif self._is_at_cause and (match := _CODE.match(line)):
            self.ending = describe_code(int(match[1]))
            self._is_at_cause = False
        return self._is_reporting

    @property
    def sentence(self) -> str:
        """``rank 3 ended with exit code 7``; empty if no rank is known to have failed."""
        return "" if self.rank is None else f"rank {self.rank} ended with {self.ending}"

    def last_words(self) -> list[str]:
        """The end of the last traceback of the rank that failed, else its last lines; [] if it printed nothing."""
        if self.rank is None:
            return []
        return last_words([line.rstrip() for line in self._tails[self.rank]])


def last_words(lines: Sequence[str]) -> list[str]:
    """The end of the last traceback in ``lines``, or the last of them where there is none."""
    lines = [OF_TORCH.sub("", line) for line in lines]
    lines = [line for line in lines if line.strip(" ~^")]  # without the marks below code
    starts = [i for i, line in enumerate(lines) if TRACEBACK in line]
    starts = [i for i in starts if i == 0 or not lines[i - 1].startswith("Exception ignored")]
    if not starts:
        return lines[-_TOLD_LINES:]
    behind = lines[starts[-1] + 1 :]
    error = next((i for i, line in enumerate(behind) if not line.startswith(" ")), len(behind) - 1)
    return behind[max(error - _TOLD_FRAMES, 0) : error + 1]  # why no more: what follows may be anything


def describe_code(code: int) -> str:
    """``exit code 3`` or ``signal SIGKILL (9)``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name} ({-code})"
    except ValueError:
        return f"signal {-code}"
