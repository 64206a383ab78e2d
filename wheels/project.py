# SPDX-License-Identifier: Apache-2.0
"""What the projects of native wheels (wheels/kernels, wheels/comm) share: which CUDA, which tags, one library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]

import matrix  # noqa: E402
from wheel_sbom import Part, WheelWithSbom  # noqa: E402

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


class Wheel(WheelWithSbom):
    """For every Python of the platform, because the library inside has a C interface."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class Native(Distribution):
    """Has a library, but neither modules nor extensions that setuptools would know of."""

    def has_ext_modules(self) -> bool:
        return True

    def has_pure_modules(self) -> bool:
        return True


def library_command(
    name: str, folder: str, cuda: str, compile_into: Callable, add_to: Callable[[Path], None] | None = None
) -> type[build_py]:
    """The build command: ``compile_into(release, lib, objects)`` gives the libraries that go into ``folder``, and
    ``add_to`` puts further files there."""
    work = ROOT / "build" / "wheels" / name  # objects stay there, so that a build that was cut short goes on

    class BuildPy(build_py):
        def run(self) -> None:
            release = info.Release(env.build_revision(), name, MATRIX["cuda"][cuda]["min_driver"])
            package = Path(self.build_lib) / wheels.NAMESPACE / folder
            for built in compile_into(release, work / "lib", work):
                self.mkpath(str(package))
                self.copy_file(str(built.path), str(package / built.path.name))
                print(f"{built.path.name}: {len(built.units)} objects in {built.seconds:.0f} s.", file=sys.stderr)
            if add_to is not None:
                add_to(package)

    return BuildPy


def setup_native(
    here: Path, name: str, what: str, requires: list[str], command: type[build_py], bundled: list[Part]
) -> None:
    """Calls setuptools for the wheel ``name``; README and LICENSE lie in ``here``. ``bundled``: for the SBOM, what the
    libraries hold of others beside what their records tell."""
    work = ROOT / "build" / "wheels" / name
    work.mkdir(parents=True, exist_ok=True)
    setup(
        name=name,
        version=__version__,
        description=what,
        long_description=(here / "README.md").read_text(),
        long_description_content_type="text/markdown",
        license_expression="Apache-2.0",
        license_files=["LICENSE"],
        python_requires=f">={MATRIX['pythons'][0]}",
        install_requires=[f"magi_attention=={__version__}", *requires],
        packages=[],
        py_modules=[],
        cmdclass={"build_py": command, "bdist_wheel": type("Wheel", (Wheel,), {"bundled": bundled})},
        distclass=Native,
        # Nothing of another wheel built from this folder may be left in the way.
        options={"build": {"build_base": str(work / "setuptools")}, "egg_info": {"egg_base": str(work)}},
    )


__all__ = ["MATRIX", "ROOT", "Part", "build", "chosen_arch", "found_cuda", "library_command", "matrix", "setup_native"]
