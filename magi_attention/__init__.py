# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention for training on very long sequences with irregular masks.

Start with ``magi_attention.api``: ``Mask -> make_plan -> plan.shard -> attend``, or the published key functions.
Importing needs no GPU, no compiler and no writable home, and touches none of them.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from magi_attention.compat import paths
from magi_attention.env import general, registry
from magi_attention.native import install
from magi_attention.version import __version__

logging.getLogger("magi_attention").setLevel(general.log_level())
registry.check_unknown()
paths.install()  # of programs written for the published package
install.warn_of_placeholder()
git_version = __version__

# Resolved on first use, so that `import magi_attention` costs little and `magi_attention.config` alone needs no torch.
_MODULES = ("api", "comm", "config", "env", "functional", "magi_attn_comm", "magi_attn_ext")
_ALSO_PUBLISHED = ("common", "dist_attn_runtime_mgr", "meta", "utils")  # not named by `from magi_attention import *`
_NAMES = {
    "DistAttnConfig": "magi_attention.config",
    "Mask": "magi_attention.api",
    "Plan": "magi_attention.api",
    "attend": "magi_attention.api",
    "init_dist_attn_runtime_key": "magi_attention.api",
    "init_dist_attn_runtime_mgr": "magi_attention.api",
    "make_plan": "magi_attention.api",
}

__all__ = ["__version__", "git_version", *_MODULES, *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _ALSO_PUBLISHED:
        return import_module(f"magi_attention.{name}")
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'magi_attention' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
