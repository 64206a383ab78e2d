# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of FlashAttention-4 that the wheel for 10.0 and 10.3 brings, and copies their licences.

    PYTHONPATH=. python wheels/fa4_objects.py FOLDER [--jobs N]

Runs in an environment of wheels/fa4_tools.txt; no GPU is needed. FOLDER is that of the wheel in the namespace
magi_attention_kernels.
"""

from __future__ import annotations

import argparse
import os
import shutil
from importlib.metadata import files, version
from pathlib import Path

from magi_attention.kernels.fa4 import objects
from magi_attention.kernels.fa4.compile_jobs import compile_all
from magi_attention.kernels.fa4.precompile import SHIPPED, SHIPPED_SMS

# Whose code is compiled into the objects; wheels/kernels/setup.py asks for the version of each.
LICENSED = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")


def copy_licences(folder: Path) -> None:
    """The licence files of each package, as PACKAGE.NAME."""
    for package in LICENSED:
        found = [f for f in files(package) or [] if "dist-info" in str(f) and f.name.startswith(("LICENSE", "AUTHORS"))]
        if not found:
            raise SystemExit(f"{package} has no licence file beside it, so its code cannot be passed on.")
        for file in found:
            shutil.copyfile(file.locate(), folder / f"{package}.{file.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    into = objects.folder_in_wheel(options.folder)
    for num_sms in SHIPPED_SMS:
        for _ in compile_all(SHIPPED, (10, 0), num_sms, into.parent, options.jobs):
            pass
        print(f"fa4_objects: {len(SHIPPED)} kinds of calls for {num_sms} SMs", flush=True)
    copy_licences(into)


__all__ = ["LICENSED", "copy_licences", "version"]

if __name__ == "__main__":
    main()
