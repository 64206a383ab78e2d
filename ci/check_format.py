# SPDX-License-Identifier: Apache-2.0
"""Holds C++ and CUDA to .clang-format; `--fix` formats the files in place.

    python ci/check_format.py [--fix]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS, SUFFIXES = ("csrc", "tests"), {".cu", ".cuh", ".h", ".cpp"}


def sources() -> list[Path]:
    """All but what a build generates."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    return [path for path in found if "inst" not in path.relative_to(ROOT).parts]


def program() -> str:
    """The clang-format of this Python's environment, whose version ci/constraints.txt says."""
    beside = Path(sys.executable).with_name("clang-format")
    found = str(beside) if beside.exists() else shutil.which("clang-format")
    if found is None:
        raise SystemExit("ci/check_format.py: there is no clang-format; install the extra `dev`.")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fix", action="store_true", help="format the files in place")
    mode = ["-i"] if parser.parse_args().fix else ["--dry-run", "--Werror"]
    files = sources()
    done = subprocess.run([program(), *mode, *map(str, files)], cwd=ROOT)
    if done.returncode:
        print("format: run `python ci/check_format.py --fix`", file=sys.stderr)
        return 1
    print(f"format: {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
