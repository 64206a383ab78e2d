# SPDX-License-Identifier: Apache-2.0
"""Prints the folder for ``PYTHONPATH``."""

from magi_attention.compat.on_path import FOLDER

if __name__ == "__main__":
    print(FOLDER)
