# SPDX-License-Identifier: Apache-2.0
"""``System``: everything that the checks look at, in one place, so that tests can put another machine there."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

UNLIMITED = -1
_PIDFD_GETFD = 438
_GPU_FIELDS = ("index", "name", "compute_cap", "driver_version", "mig.mode.current", "persistence_mode")
_GPU_FIELDS += ("ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active")
_LOADED = (
    "import torch\n"
    "torch.cuda.is_available() and torch.cuda.nccl.version()\n"
    "print('\\n'.join({l.split()[-1] for l in open('/proc/self/maps') if '.so' in l and '/' in l}))"
)


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi. ``arch`` such as sm90; ``throttle`` is the bit mask of reasons."""

    index: int
    name: str
    arch: str
    driver: str
    is_mig: bool
    is_persistent: bool
    ecc_errors: int
    throttle: int


class System:
    """This machine. Lookups that fail give None or nothing; what that means is for the check to say."""

    def read(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, pattern: str) -> list[str]:
        """Paths that match, sorted."""
        return sorted(glob.glob(pattern))

    def run(self, argv: Sequence[str], timeout_s: float = 10) -> str | None:
        """Standard output of a command; None if it fails or is not there."""
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    @property
    def environ(self) -> Mapping[str, str]:
        return os.environ

    def size_of(self, folder: str) -> int | None:
        """Bytes of the file system of a folder."""
        try:
            found = os.statvfs(folder)
        except OSError:
            return None
        return found.f_frsize * found.f_blocks

    def memlock(self) -> int:
        """Bytes that a process may pin, or ``UNLIMITED``."""
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return UNLIMITED if limit == resource.RLIM_INFINITY else limit

    def is_usable(self, path: str) -> bool:
        return os.access(path, os.R_OK | os.W_OK)

    def hostname(self) -> str:
        return socket.gethostname()

    def addresses(self, host: str) -> list[str]:
        """What a name resolves to."""
        try:
            return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
        except OSError:
            return []

    def version(self, package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def copies(self, package: str) -> list[tuple[str, str, bool]]:
        """(version, folder, is it empty) of each installed distribution of that name, the one that counts first.

        Empty: it brings the package's ``__init__.py`` and no other module. Editable ones bring none and are not.
        """
        found = []
        for distribution in metadata.distributions(name=package):
            modules = {str(f) for f in distribution.files or () if str(f).endswith(".py")}
            is_empty = modules == {f"{package}/__init__.py"}
            found.append((distribution.version, str(distribution.locate_file("")), is_empty))
        return found

    def requirements(self, package: str) -> list[str]:
        """Its Requires-Dist lines."""
        try:
            return metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            return []

    def packages(self, prefix: str) -> dict[str, str]:
        """Versions of the installed distributions whose name starts so."""
        found = {}
        for distribution in metadata.distributions():
            name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
            if name.startswith(prefix):
                found[name] = distribution.version
        return found

    def package_folder(self, module: str) -> Path | None:
        """Folder of an importable package, without importing it."""
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return None
        places = list(spec.submodule_search_locations or ()) if spec else []
        return Path(places[0]) if places else None

    @cached_property
    def gpus(self) -> list[Gpu]:
        """The GPUs as nvidia-smi tells them."""
        argv = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
        return parse_gpus(self.run(argv) or "")

    def has_nvidia_device(self) -> bool:
        return bool(self.names("/dev/nvidia[0-9]*"))

    def torch_cuda(self) -> str | None:
        """CUDA version that torch was built with, read from its files; None for a CPU build or without torch."""
        folder = self.package_folder("torch")
        text = self.read(str(folder / "version.py")) if folder else None
        match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text or "", re.MULTILINE)
        return match[1] if match else None

    def loaded_libraries(self) -> list[str] | None:
        """Shared objects of a process that has imported torch; a process of its own looks. None if that fails."""
        text = self.run([sys.executable, "-c", _LOADED], 60)
        return None if text is None else sorted(text.split())

    def native_libraries(self) -> dict[str, tuple[bool, str | None]]:
        """name -> (is its file there, why it does not load or None) of this package's libraries: the planner, the
        kernels of the GPUs here, and those of Hopper everywhere."""
        from magi_attention.native import families, loader, toolchain, wheels

        of_gpus = (families.family_of(families.capability_of(g.arch)) for g in self.gpus)
        kernels = {families.SM90.library, *(family.library for family in of_gpus if family is not None)}
        found = {}
        for name in (toolchain.PLANNER, *sorted(kernels)):
            file = toolchain.library_file(name)
            is_there = (toolchain.LIB / file).is_file() or bool(wheels.libraries(file))
            found[name] = (is_there, loader.why_absent(name))
        return found

    def nvshmem_halves(self) -> tuple[str, str | None]:
        """The versions of NVSHMEM, "device half 3.4.5, host half 3.4.5", and None; else "" and why it is not used."""
        from magi_attention.errors import UnsupportedError
        from magi_attention.native.comm.nvshmem import Nvshmem

        try:
            library = Nvshmem()
        except UnsupportedError as error:
            return "", str(error)
        built, loaded = (".".join(map(str, half)) for half in (library.built, library.loaded))
        return f"device half {built}, host half {loaded}", None

    def capabilities(self) -> int:
        """Effective capabilities of this process as a bit mask."""
        match = re.search(r"^CapEff:\s*([0-9a-f]+)$", self.read("/proc/self/status") or "", re.MULTILINE)
        return int(match[1], 16) if match else 0

    def can_pass_handles(self) -> bool | None:
        """May a process take an open file from a sibling, as CUDA's memory handles travel? None if the kernel has
        no such call."""
        if not hasattr(os, "pidfd_open"):
            return None
        child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        try:
            pidfd = os.pidfd_open(child.pid)
            got = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, 0, 0)
            os.close(pidfd)
            if got >= 0:
                os.close(got)
            return got >= 0
        except OSError:
            return False
        finally:
            child.kill()
            child.communicate()


def parse_gpus(text: str) -> list[Gpu]:
    """GPUs of the CSV that nvidia-smi prints for ``_GPU_FIELDS``; what it cannot tell is [N/A]."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(_GPU_FIELDS) or not words[0].isdecimal():
            continue
        index, name, capability, driver, mig, persistence, ecc, throttle = words
        found.append(
            Gpu(
                int(index),
                name,
                f"sm{capability.replace('.', '')}",
                driver,
                mig == "Enabled",
                persistence == "Enabled",
                int(ecc) if ecc.isdecimal() else 0,
                int(throttle, 16) if throttle.startswith("0x") else 0,
            )
        )
    return found
