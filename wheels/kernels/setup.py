# SPDX-License-Identifier: Apache-2.0
"""Builds one wheel of kernels, such as magi-attention-kernels-sm90-cu13, out of a checkout.

    MAGI_WHEEL_ARCH=sm90 pip wheel --no-deps wheels/kernels

The CUDA version is that of the nvcc which is found (CUDA_HOME, else PATH); MAGI_WHEEL_CUDA=cu13 makes sure of it.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from project import MATRIX, ROOT, build, chosen_arch, found_cuda, library_command, setup_native  # noqa: E402

ARCH, CUDA = chosen_arch(), found_cuda()
NAME = MATRIX["packages"]["kernels"]["name"].format(arch=ARCH, cuda=CUDA)


def kernels(release, lib: Path, objects: Path) -> list:
    """Compiles the whole manifest; slow code fails, unless the matrix allows it for this CUDA."""
    guard = MATRIX["cuda"][CUDA]["guard"]
    return build.build_all("ffa", ARCH, (), lib, objects, csrc=ROOT / "csrc", guard=guard, release=release)


setup_native(
    HERE,
    NAME,
    f"CUDA kernels of magi_attention for {MATRIX['archs'][ARCH]['gpus']} (CUDA {CUDA[2:]})",
    [],
    library_command(NAME, f"{ARCH}_{CUDA}", CUDA, kernels),
)
