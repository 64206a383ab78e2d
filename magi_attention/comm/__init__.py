# SPDX-License-Identifier: Apache-2.0
"""Communication: transports, group cast and group reduce, gathers. Importing this loads nothing heavy."""

from __future__ import annotations

import importlib

_HOMES = {
    "as_transport": "transport.torch",
    "TorchTransport": "transport.torch",
    "Transport": "transport.base",
    "SingleTransport": "transport.base",
    "FakeWorld": "transport.fake",
    "A2AVLayout": "collectives.layout",
    "HierarchicalLayout": "collectives.hierarchical",
    "group_cast": "collectives.group",
    "group_reduce": "collectives.group",
    "WorkWithPostProcessFn": "collectives.work",
}
_MODULES = ("collectives.work", "collectives.gather")

__all__ = ["dsink_all_reduce_op", *_HOMES]


def dsink_all_reduce_op() -> str:
    """Old name of ``magi_attention.env.comm.dsink_all_reduce_op``."""
    from magi_attention.env import comm

    return comm.dsink_all_reduce_op()


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    for module in _MODULES:  # published as modules of this package
        if module.endswith(f".{name}"):
            return importlib.import_module(f"{__name__}.{module}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
