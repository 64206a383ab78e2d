# SPDX-License-Identifier: Apache-2.0
"""Builds one wheel of kernels, such as magi-attention-kernels-sm90-cu13, out of a checkout.

    MAGI_WHEEL_ARCH=sm90 pip wheel --no-deps wheels/kernels

The CUDA version is that of the nvcc which is found (CUDA_HOME, else PATH); MAGI_WHEEL_CUDA=cu13 makes sure of it. The
wheel is for every Python, because the library in it has a C interface.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]

import matrix  # noqa: E402

from magi_attention.env import build as env  # noqa: E402
from magi_attention.native import build, info, toolchain, wheels  # noqa: E402
from magi_attention.version import __version__  # noqa: E402

MATRIX = matrix.load()


def chosen_arch() -> str:
    """The GPU family asked for, or a sentence."""
    arch = os.environ.get("MAGI_WHEEL_ARCH", "")
    known = matrix.archs(MATRIX)
    if arch not in known:
        raise SystemExit(f"MAGI_WHEEL_ARCH is {arch!r}; set it to one with sources here: {', '.join(known)}.")
    return arch


def found_cuda() -> str:
    """The CUDA version of nvcc as in names, such as cu13, or a sentence."""
    nvcc = toolchain.require_nvcc()
    said = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    have = matrix.version(re.search(r"release (\d+\.\d+)", said)[1])
    cuda = f"cu{have[0]}"
    asked = os.environ.get("MAGI_WHEEL_CUDA") or cuda
    if cuda not in MATRIX["cuda"] or cuda != asked or have < matrix.version(MATRIX["cuda"][cuda]["oldest_nvcc"]):
        need = MATRIX["cuda"].get(asked, {"oldest_nvcc": "one of ci/matrix.json"})["oldest_nvcc"]
        raise SystemExit(
            f"{nvcc} is of CUDA {'.'.join(map(str, have))}, and {asked} needs {need} or newer of the same major "
            "version; name another toolkit in CUDA_HOME."
        )
    return cuda


ARCH, CUDA = chosen_arch(), found_cuda()
NAME = MATRIX["packages"]["kernels"]["name"].format(arch=ARCH, cuda=CUDA)
WORK = ROOT / "build" / "wheels" / NAME  # objects stay there, so that a build that was cut short goes on
WORK.mkdir(parents=True, exist_ok=True)


class BuildPy(build_py):
    """Compiles the library into magi_attention_kernels/<arch>_<cuda>; there is nothing else in the wheel."""

    def run(self) -> None:
        row = MATRIX["cuda"][CUDA]
        release = info.Release(env.build_revision(), NAME, row["min_driver"])
        package = Path(self.build_lib) / wheels.NAMESPACE / f"{ARCH}_{CUDA}"
        for built in build.build_all(
            "ffa", ARCH, lib=WORK / "lib", folder=WORK, csrc=ROOT / "csrc", guard=row["guard"], release=release
        ):
            self.mkpath(str(package))
            self.copy_file(str(built.path), str(package / built.path.name))
            print(f"{built.path.name}: {len(built.units)} objects in {built.seconds:.0f} s.", file=sys.stderr)


class Wheel(bdist_wheel):
    """For every Python of the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class Native(Distribution):
    """Has a library, but neither modules nor extensions that setuptools would know of."""

    def has_ext_modules(self) -> bool:
        return True

    def has_pure_modules(self) -> bool:
        return True


setup(
    name=NAME,
    version=__version__,
    description=f"CUDA kernels of magi_attention for {MATRIX['archs'][ARCH]['gpus']} (CUDA {CUDA[2:]})",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=f">={MATRIX['pythons'][0]}",
    install_requires=[f"magi_attention=={__version__}"],
    packages=[],
    py_modules=[],
    cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel},
    distclass=Native,
    # Nothing of another wheel built from this folder may be left in the way.
    options={"build": {"build_base": str(WORK / "setuptools")}, "egg_info": {"egg_base": str(WORK)}},
)
