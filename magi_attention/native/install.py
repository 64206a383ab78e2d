# SPDX-License-Identifier: Apache-2.0
"""Lines of pip that install this package: for tables of pages and for remedies in errors.

The public index has another, empty package of our name (version 0.0.1), and anybody may register the names of our
kernels there. So no line lets pip look for ours in it: they come from ``dist``, where ci/build_wheels puts them, or
from the index of a release alone. What they need of others comes first, by a line of its own.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys

from magi_attention.version import __version__

MAIN = "magi_attention"
PLACEHOLDER = "0.0.1"  # version of the empty package on the public index
RELEASE_INDEX = ""  # address of the pages that wheels/index.py wrote for a release; empty until one is out

# What ours need of others, by extra; "" is always needed. A test holds it to pyproject.toml.
NEEDS = {
    "": ("torch>=2.9", "numpy", "rich", "tomli"),
    "report": ("matplotlib",),
    "cudnn-flex": ("nvidia-cudnn-frontend[cutedsl]>=1.32,<1.33",),
    "fa4": ("flash-attn-4[cu13]==4.0.0b36", "nvidia-cutlass-dsl[cu13]==4.8.1", "quack-kernels==0.6.5"),
}


def needs(*extras: str) -> str:
    """The line for what these extras need of others; extras that are all ours need nothing."""
    found = [package for extra in extras for package in NEEDS.get(extra, ())]
    return f"pip install {shlex.join(found)}"


def ours(name: str = MAIN, again: bool = False) -> str:
    """The line for one of our distributions, such as "magi_attention[sm90]", of this version.

    ``again``: it is installed already and broken, so its files are put there anew, and nothing else.
    """
    options = "--no-deps --force-reinstall " if again else ""
    return f"pip install {_source()} {options}{shlex.quote(f'{name}=={__version__}')}"


def table_line(extras: str) -> str:
    """The line for a page. Where ``dist`` holds what was just built, it names no version."""
    name = f"{MAIN}[{extras}]" if extras else MAIN
    return ours(name) if RELEASE_INDEX else f"pip install {_source()} {shlex.quote(name)}"


def warn_of_placeholder() -> None:
    """Names the empty package where it is installed beside this one; costs a look into each folder of the path."""
    info = f"{MAIN}-{PLACEHOLDER}.dist-info"
    folder = next((folder for folder in sys.path if os.path.isdir(os.path.join(folder, info))), None)
    if folder is not None:
        logging.getLogger(MAIN).warning(
            "%s %s in %s is an empty package of the public index, not this one, and is imported in place of this one "
            "where it comes first; run `pip uninstall %s`.", MAIN, PLACEHOLDER, folder, MAIN,
        )  # fmt: skip


def _source() -> str:
    return f"--index-url {RELEASE_INDEX}" if RELEASE_INDEX else "--no-index --find-links dist"
