# SPDX-License-Identifier: Apache-2.0
"""The published buffer manager of the native group collectives, which keep their memory themselves."""

from __future__ import annotations

from typing import Any, NoReturn

from magi_attention.errors import UnsupportedError

_NOT_HERE = (
    "Native collectives make the memory that they share at their first call and free it with the process group. "
    "Leave this call out; group_cast and group_reduce need no buffers."
)


class GrpCollBuffer:
    """A buffer of the native collectives; cannot be made (``UnsupportedError``)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(_NOT_HERE)


class GrpCollBufferMgr:
    """Keeps the buffers of the native collectives: there are none, so releasing is always fine."""

    def initialize(self, group: Any, config: Any = None, **overrides: Any) -> NoReturn:
        raise UnsupportedError(_NOT_HERE)

    def get_buffer(self, group: Any, name: Any = None) -> NoReturn:
        raise UnsupportedError(_NOT_HERE)

    def get_config(self, group: Any) -> NoReturn:
        self.check_initialized(group)

    def check_initialized(self, group: Any) -> NoReturn:
        raise RuntimeError(f"The buffers of this process group were never initialised. {_NOT_HERE}")

    def release_buffer(self, group: Any, name: Any = None) -> None:
        """Nothing to release."""

    def release_group(self, group: Any) -> None:
        """Nothing to release."""


grpcoll_buffer_mgr = GrpCollBufferMgr()
