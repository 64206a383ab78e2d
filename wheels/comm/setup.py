# SPDX-License-Identifier: Apache-2.0
"""Builds one wheel of native collectives, such as magi-attention-comm-cu13, out of a checkout.

    pip wheel --no-deps wheels/comm

The CUDA version is that of the nvcc which is found (CUDA_HOME, else PATH); MAGI_WHEEL_CUDA=cu13 makes sure of it. Needs
the package nvidia-nvshmem of that CUDA version where Python finds it.
"""

import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from project import MATRIX, ROOT, Part, build, found_cuda, library_command, setup_native  # noqa: E402

CUDA = found_cuda()
NAME = MATRIX["packages"]["comm"]["name"].format(cuda=CUDA)
VERSION = MATRIX["cuda"][CUDA]["nvshmem"]
NVSHMEM = f"nvidia-nvshmem-{CUDA}"
NEWER = int(VERSION.partition(".")[0]) + 1


def transfers(release, lib: Path, objects: Path) -> list:
    """Compiles the transfers over NVSHMEM."""
    return build.build_all("comm", lib=lib, folder=objects, csrc=ROOT / "csrc", release=release)


setup_native(
    HERE,
    NAME,
    f"Native collectives of magi_attention over NVSHMEM (CUDA {CUDA[2:]})",
    [f"{NVSHMEM}>={VERSION},<{NEWER}"],
    library_command(NAME, f"comm_{CUDA}", CUDA, transfers),
    # Its device half is linked in; the host half comes with the package.
    [Part(NVSHMEM, metadata.version(NVSHMEM), "NVIDIA Software License Agreement", "pypi")],
)
