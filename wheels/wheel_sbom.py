# SPDX-License-Identifier: Apache-2.0
"""The SBOM of a wheel (PEP 770): CycloneDX JSON in .dist-info/sboms, written while the wheel is made.

It names the distribution with its git commit, each native library in it with a SHA-256, what of others was compiled or
linked into those, and, with scope "excluded", the tools that made them. What a library was built with is read from its
build record, so the file says what is there rather than what was meant.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel

from magi_attention.env import build as env
from magi_attention.native import info, toolchain

PROPERTY = "magi_attention:"  # before the names of our own properties
_GCC_LICENCE = "GPL-3.0-or-later WITH GCC-exception-3.1"
_NVIDIA_LICENCE = "NVIDIA Software License Agreement"


@dataclass(frozen=True)
class Part:
    """What of others is in a wheel, or with ``is_tool`` what made it. ``index``: "pypi" for a project of that index.

    ``licence`` is an SPDX expression or a name, empty where files in the wheel say it.
    """

    name: str
    version: str
    licence: str = ""
    index: str = "generic"
    is_tool: bool = False


class WheelWithSbom(bdist_wheel):
    """Writes the SBOM beside the metadata of a wheel; an editable install, which is no such thing, gets none."""

    bundled: Sequence[Part] = ()  # what a project knows of, beyond what the libraries tell
    _is_wheel = False

    def run(self) -> None:
        self._is_wheel = True
        super().run()

    def write_wheelfile(self, wheelfile_base: str, *rest, **named) -> None:
        super().write_wheelfile(wheelfile_base, *rest, **named)
        if not self._is_wheel:
            return
        root, name, version = Path(self.bdist_dir), self.distribution.get_name(), self.distribution.get_version()
        try:
            text = describe(root, name, version, self.bundled)
        except ImportError as error:
            remedy = "run `pip install cyclonedx-python-lib` and build again"
            print(f"{name}: the wheel has no SBOM, because {error}; {remedy}.", file=sys.stderr, flush=True)
            return
        file = Path(wheelfile_base, "sboms", f"{re.sub(r'[-_.]+', '_', name).lower()}.cdx.json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


# ---- what is in a wheel -------------------------------------------------------------------------------------


def parts_of(libraries: Sequence[Path]) -> list[Part]:
    """What the libraries were compiled from and with, besides our sources."""
    records = [record for record in map(info.read_info, libraries) if record is not None]
    if not records:
        return []
    found = [Part(*record.compiler.split(" ", 1), is_tool=True) for record in records]
    if any(holds_libstdcxx(library) for library in libraries):
        found.append(Part("libstdc++", _said([env.cxx(), "-dumpfullversion"]), _GCC_LICENCE))
    for record in records:
        if nvcc := re.match(r"nvcc (\d+\.\d+)", record.compiler):
            found.append(Part("cuda-cudart", nvcc[1], _NVIDIA_LICENCE))  # every such library is linked -cudart static
        if record.name == toolchain.HOST:
            found.append(Part("pybind11", pybind11_version(), "BSD-3-Clause", "pypi"))
    found.append(Part("ninja", _said([str(toolchain.find_ninja()), "--version"]), is_tool=True))
    found.append(Part("setuptools", metadata.version("setuptools"), index="pypi", is_tool=True))
    if Path(env.cxx()).name == "portable_cxx":
        found.append(Part("ziglang", metadata.version("ziglang"), index="pypi", is_tool=True))
    return sorted(set(found), key=lambda part: (part.is_tool, part.name, part.version))


def holds_libstdcxx(library: Path) -> bool:
    """Is libstdc++ inside? Either the file names the shared one, or what it uses of it is a part of the file."""
    data = library.read_bytes()
    return b"St9exception" in data and b"libstdc++.so." not in data


def pybind11_version() -> str:
    """The version of the headers that the host module is compiled with."""
    text = (toolchain.require_pybind11() / "pybind11" / "detail" / "common.h").read_text(encoding="utf-8")
    numbers = (re.search(rf"#define PYBIND11_VERSION_{part}\s+(\w+)", text) for part in ("MAJOR", "MINOR", "PATCH"))
    return ".".join(number[1] for number in numbers if number)


def _said(command: list[str]) -> str:
    """What a program says of its version; empty where it is gone since it built the libraries, or says nothing."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# ---- as CycloneDX -------------------------------------------------------------------------------------------


def describe(root: Path, name: str, version: str, bundled: Sequence[Part] = ()) -> str:
    """The SBOM of the files under ``root`` as JSON text; equal for equal files, tools and SOURCE_DATE_EPOCH.

    Raises:
        ImportError: cyclonedx-python-lib is not here.
    """
    from cyclonedx.contrib.this.builders import this_component
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import ComponentScope
    from cyclonedx.model.lifecycle import LifecyclePhase, PredefinedLifecycle
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output.json import JsonV1Dot6

    libraries = sorted(path for path in root.rglob("*.so") if path.is_file())
    whole = _distribution(name, version)
    components = [_library(path, path.relative_to(root).as_posix()) for path in libraries]
    components += [_component(part) for part in (*bundled, *parts_of(libraries))]
    told = BomMetaData(
        component=whole, tools=ToolRepository(components=[this_component()]), timestamp=_time(),
        lifecycles=[PredefinedLifecycle(phase=LifecyclePhase.BUILD)],
    )  # fmt: skip
    lines = [f"{c.bom_ref.value} {c.version} {[each.content for each in c.hashes]}" for c in (whole, *components)]
    serial = uuid.uuid5(uuid.NAMESPACE_OID, " ".join([env.build_revision(), *lines]))
    bom = Bom(components=components, metadata=told, serial_number=serial)
    bom.register_dependency(whole, [c for c in components if c.scope is not ComponentScope.EXCLUDED])
    return json.dumps(json.loads(JsonV1Dot6(bom).output_as_string()), indent=1) + "\n"


def _distribution(name: str, version: str):
    """Ours. Not as a project of the public index, which has another package of our name."""
    from cyclonedx.model.component import Commit, Component, ComponentType, Pedigree
    from packageurl import PackageURL

    revision = env.build_revision()
    commit = revision.removesuffix("-dirty")
    changed = "with changes that are in no commit" if revision != commit else None
    return Component(
        name=name, version=version, type=ComponentType.LIBRARY, bom_ref=name, licenses=[_licence("Apache-2.0")],
        purl=PackageURL("generic", None, name, version),
        pedigree=Pedigree(commits=[Commit(uid=commit)], notes=changed) if commit else None,
    )  # fmt: skip


def _library(path: Path, name: str):
    """One native library of ours, with what its record says."""
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.component import Component, ComponentType

    record = info.read_info(path)
    told = {} if record is None else {
        "compiler": record.compiler, "gpu_targets": ",".join(record.archs), "min_driver": record.min_driver,
        "revision": record.revision,
    }  # fmt: skip
    return Component(
        name=name, type=ComponentType.FILE, bom_ref=name, version=None if record is None else record.version,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(path.read_bytes()).hexdigest())],
        properties=[Property(name=PROPERTY + key, value=value) for key, value in told.items() if value],
    )  # fmt: skip


def _component(part: Part):
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from packageurl import PackageURL

    return Component(
        name=part.name, version=part.version or None, bom_ref=f"{part.name}@{part.version}",
        type=ComponentType.APPLICATION if part.is_tool else ComponentType.LIBRARY,
        scope=ComponentScope.EXCLUDED if part.is_tool else ComponentScope.REQUIRED,
        licenses=[_licence(part.licence)] if part.licence else None,
        purl=PackageURL(part.index, None, part.name, part.version or None),
    )  # fmt: skip


def _licence(text: str):
    from cyclonedx.contrib.license.factories import LicenseFactory

    return LicenseFactory().make_from_string(text)


def _time() -> datetime:
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    return datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(int(seconds), timezone.utc)
