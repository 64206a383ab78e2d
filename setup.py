# SPDX-License-Identifier: Apache-2.0
"""Builds the native libraries while the package is installed; all metadata lives in pyproject.toml.

The work is done by ``magi_attention.native.build``, which needs neither torch nor a GPU. Without a compiler the
package installs all the same, as pure Python, and one line says what was left out and why; with one, sources that do
not compile fail the installation. Attention kernels are compiled for the GPUs of this machine; without one they are
left to their first use on a GPU. pip shows with -v what is said here. Switches:
MAGI_ATTENTION_BUILD_COMPUTE_CAPABILITY=90 compiles kernels for Hopper whatever GPU is here,
MAGI_ATTENTION_PREBUILD_FFA=0 none, MAGI_ATTENTION_SKIP_CUDA_BUILD=1 builds nothing.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build as build_command
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
DOWNLOADS = (
    "pip downloads what is missing of torch, numpy, rich and tomli, and for the build of cyclonedx-python-lib, ninja "
    "and pybind11. torch with CUDA is 2.7 GB; `pip install torch --index-url https://download.pytorch.org/whl/cpu` "
    "first takes its CPU build, 0.2 GB."
)
sys.path.insert(0, str(ROOT))  # an isolated build starts without the source folder
sys.path.append(str(ROOT / "wheels"))

from wheel_sbom import WheelWithSbom  # noqa: E402

from magi_attention.env import build as env  # noqa: E402
from magi_attention.errors import BuildError  # noqa: E402
from magi_attention.native import build, info, toolchain  # noqa: E402


def say(text: str) -> None:
    print(f"magi_attention: {text}", file=sys.stderr, flush=True)


def can_compile() -> bool:
    has_compiler = toolchain.find_nvcc() is not None or shutil.which(env.cxx()) is not None
    return has_compiler and not env.is_skip_cuda_build()


def build_native() -> None:
    """Puts what can be built into magi_attention/lib. A missing tool is no error; sources that fail to compile are."""
    if env.is_skip_cuda_build():
        say("native libraries were not built, because MAGI_ATTENTION_SKIP_CUDA_BUILD=1.")
        return
    wanted = [
        ("planner", (toolchain.require_cxx,)),
        ("host", (toolchain.require_cxx, toolchain.require_pybind11, toolchain.require_python_headers)),
    ]
    if not env.is_prebuild_ffa():
        say("attention kernels were not built, because MAGI_ATTENTION_PREBUILD_FFA=0.")
    elif toolchain.find_nvcc() is None or _families():
        wanted.append(("ffa", (toolchain.require_nvcc,)))
    else:
        say(
            "attention kernels were not built, because no GPU that has some is here. On a GPU each is compiled when a "
            "call first needs it, by nvcc and ninja. MAGI_ATTENTION_BUILD_COMPUTE_CAPABILITY=90 builds Hopper's now."
        )
    for name, requirements in wanted:
        try:
            for require in (*requirements, toolchain.require_ninja):
                require()
        except BuildError as error:
            say(f"{name} library was not built. {error}")
            continue
        try:
            # No guard: with another compiler than ours, slow kernels are better than none. It prints a warning.
            for built in build.build_all(name, guard=False, release=info.Release(env.build_revision())):
                say(f"built {built.path.name}, {len(built.units)} objects in {built.seconds:.0f} s.")
        except BuildError as error:
            say(str(error))  # with all that the compiler said; the reason at the end is what pip shows last
            raise CompileError(_why_failed(name)) from None


def _families() -> list:
    try:
        return build.asked_families()
    except BuildError as error:
        raise CompileError(str(error)) from None


def _why_failed(name: str) -> str:
    if name == "ffa":
        remedy = (
            f"use another CUDA toolkit than that of {toolchain.find_nvcc()}, by CUDA_HOME, or set "
            "MAGI_ATTENTION_PREBUILD_FFA=0 to install without the attention kernels."
        )
    else:
        remedy = (
            f"name another C++17 compiler than {shutil.which(env.cxx())} in CXX, or set "
            "MAGI_ATTENTION_SKIP_CUDA_BUILD=1 to install as pure Python."
        )
    return f"the {name} library does not compile, for the reason above, so nothing was installed; {remedy}"


class BuildNative(Command):
    """A step of its own before ``build_py``, because in an editable install errors of that one are mere warnings.

    It has outputs in no wheel; ``build_py`` puts the libraries there.
    """

    description = "compile the native libraries into magi_attention/lib"
    user_options: list = []
    editable_mode = False

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        if self.editable_mode:
            say(DOWNLOADS)
        build_native()

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build_command):
    sub_commands = [("build_native", None), *build_command.sub_commands]


class BuildPy(build_py):
    """A wheel also gets the libraries that ``build_native`` made and, for kernels compiled at run time, the sources."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # the package is used where it lies, and so are its lib and csrc
        package = Path(self.build_lib) / "magi_attention"
        for library in toolchain.built_libraries():
            if library.name.startswith("libmagi_ffa_") and not env.is_prebuild_ffa():
                continue  # left over from a development build; it comes in a wheel of its own
            self.mkpath(str(package / "lib"))
            shutil.copy2(library, package / "lib" / library.name)
        csrc = ROOT / "csrc"
        for source in toolchain.source_files(csrc):
            target = package / "csrc" / source.relative_to(csrc)
            self.mkpath(str(target.parent))
            shutil.copy2(source, target)


class Wheel(WheelWithSbom):
    """One wheel for every Python of the platform, unless it holds the host module, which is built for one.

    The other libraries have a C interface and no Python in them.
    """

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        has_host = any(Path(self.bdist_dir).glob(f"**/{toolchain.HOST_MODULE}*"))
        return (python, abi, platform) if self.root_is_pure or has_host else ("py3", "none", platform)


class MaybeNative(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(toolchain.built_libraries()) or can_compile()


def tools_to_fetch() -> list[str]:
    """What pip shall bring into the build, only where there is something to compile and they are not there yet."""
    if not can_compile():
        return []
    found = {"ninja": toolchain.find_ninja(), "pybind11": toolchain.find_pybind11()}
    return [name for name, path in found.items() if path is None]


setup(
    cmdclass={"build": Build, "build_native": BuildNative, "build_py": BuildPy, "bdist_wheel": Wheel},
    distclass=MaybeNative,
    setup_requires=tools_to_fetch(),
)
