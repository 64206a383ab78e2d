# SPDX-License-Identifier: Apache-2.0
"""Getters of the variables of the launcher. Each reads the environment when called."""

from __future__ import annotations

from magi_attention.env import registry


def magi_home() -> str:
    """Folder that holds the sessions; ``~/.magi`` if unset. Nothing is created."""
    return registry.get("MAGI_HOME") or "~/.magi"


def is_magi_home_set() -> bool:
    return bool(registry.get("MAGI_HOME"))


def sources() -> str:
    """Folder that holds examples and tests, as in the images; empty where they are beside the package."""
    return registry.get("MAGI_SOURCES")


def run_folder() -> str:
    """Folder for files of this node in this run, empty outside the launcher."""
    return registry.get("MAGI_RUN_FOLDER")
