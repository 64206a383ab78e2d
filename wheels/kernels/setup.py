# SPDX-License-Identifier: Apache-2.0
"""Builds one wheel of kernels, such as magi-attention-kernels-sm90-cu13, out of a checkout.

    MAGI_WHEEL_ARCH=sm90 pip wheel --no-deps wheels/kernels

The CUDA version is that of the nvcc which is found (CUDA_HOME, else PATH); MAGI_WHEEL_CUDA=cu13 makes sure of it.
MAGI_WHEEL_FA4 names a Python with wheels/fa4_tools.txt; the wheel sm100 then brings kernels of FlashAttention-4, too.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from project import MATRIX, ROOT, Part, build, chosen_arch, found_cuda, library_command, setup_native  # noqa: E402

ARCH, CUDA = chosen_arch(), found_cuda()
NAME = MATRIX["packages"]["kernels"]["name"].format(arch=ARCH, cuda=CUDA)


def kernels(release, lib: Path, objects: Path) -> list:
    """Compiles the whole manifest; slow code fails, unless the matrix allows it for this CUDA."""
    guard = MATRIX["cuda"][CUDA]["guard"]
    return build.build_all("ffa", ARCH, (), lib, objects, csrc=ROOT / "csrc", guard=guard, release=release)


def fa4_objects(package: Path) -> None:
    """Kernels of FlashAttention-4 for 10.0 and 10.3, compiled by the Python of MAGI_WHEEL_FA4."""
    command = [os.environ["MAGI_WHEEL_FA4"], ROOT / "wheels" / "fa4_objects.py", package]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def fa4_parts() -> list[Part]:
    """Whose code those kernels hold, in the versions that the same Python has."""
    code = "import fa4_objects as f; print(*(f'{name}={f.version(name)}' for name in f.LICENSED))"
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "wheels")))}
    command = [os.environ["MAGI_WHEEL_FA4"], "-c", code]
    said = subprocess.run(command, env={**os.environ, **path}, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [Part(*word.split("="), index="pypi") for word in said.split()]


WITH_FA4 = ARCH == "sm100" and bool(os.environ.get("MAGI_WHEEL_FA4"))
setup_native(
    HERE,
    NAME,
    f"CUDA kernels of magi_attention for {MATRIX['archs'][ARCH]['gpus']} (CUDA {CUDA[2:]})",
    [],
    library_command(NAME, f"{ARCH}_{CUDA}", CUDA, kernels, fa4_objects if WITH_FA4 else None),
    fa4_parts() if WITH_FA4 else [],
)
