# SPDX-License-Identifier: Apache-2.0
"""The import path of the published native group collectives. Only what needs no native code is here.

``Config`` is the launch configuration, ``EventHandle`` a CUDA event. A ``Buffer`` cannot be made: the group
collectives of ``magi_attention.comm`` keep the memory that they share.
"""

from __future__ import annotations

from typing import Any

from magi_attention.config.grpcoll import GrpCollKernelConfig as Config
from magi_attention.errors import UnsupportedError

__all__ = ["Buffer", "Config", "EventHandle"]


class Buffer:
    """Registered memory of the native collectives; making one raises ``UnsupportedError``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "Native group collectives keep their own memory and need no Buffer; call group_cast and group_reduce of "
            "magi_attention.comm, with MAGI_ATTENTION_NATIVE_GRPCOLL=1."
        )


class EventHandle:
    """A CUDA event recorded on the current stream when made; ``UnsupportedError`` without CUDA."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError("An EventHandle needs a CUDA device; run on a GPU machine.")
        self._event = torch.cuda.Event()
        self._event.record()

    def current_stream_wait(self) -> None:
        """Work queued on the current stream from now on waits for the event."""
        self._event.wait()
