# SPDX-License-Identifier: Apache-2.0
"""Communication: transports, group cast and group reduce, gathers. Importing this loads nothing heavy."""

from __future__ import annotations

import importlib

_HOMES = {
    "as_transport": "torch_transport",
    "TorchTransport": "torch_transport",
    "Transport": "transport",
    "SingleTransport": "transport",
    "FakeWorld": "fake",
    "A2AVLayout": "layout",
    "HierarchicalLayout": "hierarchical",
    "group_cast": "group_collective",
    "group_reduce": "group_collective",
    "WorkWithPostProcessFn": "work",
}
_MODULES = ("work", "gather")

__all__ = ["dsink_all_reduce_op", *_HOMES]


def dsink_all_reduce_op() -> str:
    """Old name of ``magi_attention.env.comm.dsink_all_reduce_op``."""
    from magi_attention.env import comm

    return comm.dsink_all_reduce_op()


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
