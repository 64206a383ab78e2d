# SPDX-License-Identifier: Apache-2.0
"""Every check of the doctor on machines that are made up: healthy ones, broken ones and ones without GPUs."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest

from magi_attention.tools.doctor import gpu_checks, group_checks, host_checks, library_checks, registry
from magi_attention.tools.doctor.finding import ERROR, OK, SKIPPED, WARNING
from magi_attention.tools.doctor.system import UNLIMITED, System, parse_gpus
from magi_attention.version import __version__

SMI = "{index}, NVIDIA H100 80GB HBM3, {cap}, {driver}, {mig}, {persistence}, {ecc}, {throttle}\n"


def smi(count=2, **changes):
    values = {"cap": "9.0", "driver": "580.65.06", "mig": "Disabled", "persistence": "Enabled", "ecc": "0"}
    values.update({"throttle": "0x0000000000000004", **changes})
    return "".join(SMI.format(index=i, **values) for i in range(count))


class Machine(System):
    """A machine of files, commands and packages. By default one with two H100s in good order."""

    def __init__(self, gpus=None, **changes):
        self.gpus = parse_gpus(smi() if gpus is None else gpus)
        self.cuda = "13.0"
        self.files = {}
        self.commands = {}
        self.variables = {}
        self.installed = {"torch": "2.11.0"}
        self.ours = []
        self.pins = []
        self.native = {"planner": (True, None), "ffa_sm90": (True, None)}
        self.capability_bits, self.halves = 0, ("device half 3.4.5, host half 3.4.5", None)
        self.shm, self.pinned, self.passes, self.blocked = 64 * 2**30, UNLIMITED, True, set()
        self.host, self.host_addresses, self.loaded = "node7", ["10.0.0.7"], []
        self.has_devices = bool(self.gpus)
        for name, value in changes.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def read(self, path):
        return self.files.get(path)

    def names(self, pattern):
        folders = {str(p) for f in self.files for p in Path(f).parents} | set(self.files)
        return sorted(f for f in folders if fnmatch.fnmatch(f, pattern) and f.count("/") == pattern.count("/"))

    def run(self, argv, timeout_s=10):
        return next((text for words, text in self.commands.items() if words in " ".join(argv)), None)

    environ = property(lambda self: self.variables)

    def size_of(self, folder):
        return self.shm

    def memlock(self):
        return self.pinned

    def is_usable(self, path):
        return path not in self.blocked

    def hostname(self):
        return self.host

    def addresses(self, host):
        return self.host_addresses

    def version(self, package):
        return self.installed.get(package)

    def copies(self, package):
        return self.ours

    def requirements(self, package):
        return self.pins

    def packages(self, prefix):
        return {name: version for name, version in self.installed.items() if name.startswith(prefix)}

    def package_folder(self, module):
        return Path("/site") / module

    def has_nvidia_device(self):
        return self.has_devices

    def torch_cuda(self):
        return self.cuda

    def loaded_libraries(self):
        return self.loaded

    def native_libraries(self):
        return self.native

    def nvshmem_halves(self):
        return self.halves

    def capabilities(self):
        return self.capability_bits

    def can_pass_handles(self):
        return self.passes


IB = {
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
    "/dev/infiniband/uverbs0": "",
}
NET = {"/sys/class/net/eth0/mtu": "9000"}
ROUTES = "Iface\tDestination\tGateway\ndocker0\t000011AC\t00000000\nens5\t00000000\t0100000A\n"
BRIDGED = {"/sys/class/net/docker0/mtu": "1500", "/sys/class/net/ens5/mtu": "9000", "/proc/net/route": ROUTES}
ROCE = {
    **IB,
    "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet",
    "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0": "IB/RoCE v1",
    "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/3": "RoCE v2",
}
PEERS = "\t\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n\nLegend:\n  X = Self\n"
FABRIC = "    Fabric\n        State                             : Completed\n"
CPU = {"gpus": ""}

# check, what is different about the machine, status, words of evidence, words of the remedy
CASES = [
    (gpu_checks.check_torch, {}, OK, "torch 2.11.0, for CUDA 13.0", ""),
    (gpu_checks.check_torch, {**CPU, "cuda": None}, OK, "CPU build", ""),
    (gpu_checks.check_torch, {"cuda": None}, ERROR, "a CPU build, but there are 2 GPUs", "pip install"),
    (gpu_checks.check_torch, {"installed": {}}, ERROR, "not installed", "pip install"),
    (gpu_checks.check_torch, {"installed": {"torch": "2.8.1"}}, ERROR, "2.9 or newer", "--upgrade torch"),
    (gpu_checks.check_driver, {}, OK, "driver 580.65.06", ""),
    (gpu_checks.check_driver, CPU, SKIPPED, "no NVIDIA GPU", ""),
    (gpu_checks.check_driver, {**CPU, "has_devices": True}, ERROR, "nvidia-smi fails", "--gpus all"),
    (gpu_checks.check_driver, {"gpus": smi(driver="570.10")}, ERROR, "needs 580", "update the driver to 580"),
    (gpu_checks.check_driver, {"gpus": smi(driver="570.10"), "cuda": "12.8"}, OK, "needs 525", ""),
    (gpu_checks.check_gpus, {}, OK, "2 x NVIDIA H100 80GB HBM3 (sm90)", ""),
    (gpu_checks.check_gpus, CPU, SKIPPED, "no NVIDIA GPU", ""),
    (gpu_checks.check_gpus, {"gpus": smi(ecc="3")}, ERROR, "GPU 0: 3", "nvidia-smi --gpu-reset"),
    (gpu_checks.check_gpus, {"gpus": smi(cap="7.5")}, WARNING, "8.0, 8.6, 8.7, 8.9, 9.0, 10.0", "sdpa_ol"),
    (gpu_checks.check_gpus,
     {"gpus": smi(cap="8.9"), "native": {"planner": (True, None), "ffa_sm80": (False, "not built")}}, WARNING,
     "kernels for sm89 are not installed",
     "'magi_attention[sm80]==1.1.1', or in a checkout python -m magi_attention.native.build --arch sm80"),
    (gpu_checks.check_gpus, {"native": {"ffa_sm90": (False, "not built")}}, WARNING,
     "kernels for sm90 are not installed", "--find-links dist 'magi_attention[sm90]=="),
    (gpu_checks.check_gpus, {"gpus": smi(mig="Enabled")}, WARNING, "MIG is on for GPU 0, 1", "nvidia-smi -mig 0"),
    (gpu_checks.check_gpus, {"gpus": smi(1) + smi(1).replace("H100 80GB HBM3", "H200")}, WARNING, "several kinds",
     "CUDA_VISIBLE_DEVICES"),
    (gpu_checks.check_clocks, {}, OK, "no slowdown", ""),
    (gpu_checks.check_clocks, CPU, SKIPPED, "no NVIDIA GPU", ""),
    (gpu_checks.check_clocks, {"gpus": smi(throttle="0x48")}, WARNING, "hardware slowdown, hardware thermal", "-d"),
    (gpu_checks.check_clocks, {"gpus": smi(persistence="Disabled")}, WARNING, "persistence", "nvidia-smi -pm 1"),
    (gpu_checks.check_peers, {"commands": {"-p2p": PEERS, "-q": FABRIC}}, OK, "all 2 pairs of 2 GPUs", ""),
    (gpu_checks.check_peers, {"gpus": smi(1)}, SKIPPED, "one GPU has no peers", ""),
    (gpu_checks.check_peers, {"commands": {"-p2p": PEERS.replace("OK", "NS")}}, WARNING,
     "no peer access for 2 of 2 pairs (0-1 NS", "ACS"),
    (gpu_checks.check_peers, {"commands": {"-p2p": PEERS, "-q": FABRIC.replace("Completed", "In Progress")}}, ERROR,
     "'In Progress'", "nvidia-fabricmanager"),
    (gpu_checks.check_peers, {}, WARNING, "tells nothing", "nvidia-smi topo"),
    (library_checks.check_package, {}, OK, f"magi_attention {__version__}, not installed", ""),
    (library_checks.check_package, {"ours": [(__version__, "/site", False)]}, OK, f"magi_attention {__version__}", ""),
    (library_checks.check_package, {"ours": [(__version__, "/site", False), ("0.0.1", "/user", True)]}, ERROR,
     "magi_attention 0.0.1 in /user is the empty package",
     f"pip uninstall --yes magi_attention; pip install --no-index --find-links dist magi_attention=={__version__}"),
    (library_checks.check_package, {"ours": [("0.0.2", "/site", True)]}, ERROR, "0.0.2 in /site", "pip uninstall"),
    (library_checks.check_package, {"ours": [("1.0.5", "/site", False)]}, WARNING, "1.0.5 is installed", "--no-index"),
    (library_checks.check_abi, {}, OK, "planner, ffa_sm90 load", ""),
    (library_checks.check_abi, {"native": {"planner": (False, "no")}}, OK, "planner not built", ""),
    (library_checks.check_abi,
     {"native": {"planner": (True, "libmagi_planner.so has ABI version 2, this package needs 3")}}, ERROR,
     "ABI version 2",
     f"pip install --no-index --find-links dist --no-deps --force-reinstall magi_attention=={__version__}"),
    (library_checks.check_abi, {"installed": {"magi-attention-kernels-sm90-cu13": "0.1"}}, ERROR,
     "magi-attention-kernels-sm90-cu13 is 0.1",
     f"pip install --no-index --find-links dist magi-attention-kernels-sm90-cu13=={__version__}"),
    (library_checks.check_pins,
     {"pins": ['nvidia-nccl-cu13==2.27.7; platform_system == "Linux"'], "installed": {"nvidia-nccl-cu13": "2.27.7"}},
     OK, "nvidia-nccl-cu13 2.27.7", ""),
    (library_checks.check_pins, {"pins": ["numpy"]}, SKIPPED, "pins no NCCL", ""),
    (library_checks.check_pins, {"pins": ["nvidia-nccl-cu13==2.27.7"], "installed": {"nvidia-nccl-cu13": "2.20"}},
     WARNING, "is 2.20, torch wants 2.27.7", "pip install 'nvidia-nccl-cu13==2.27.7'"),
    (library_checks.check_pins, {"pins": ["nvidia-nvshmem-cu13==3.4.5"]}, WARNING, "is not installed", "pip install"),
    (library_checks.check_loaded, {"loaded": ["/site/nvidia/nccl/lib/libnccl.so.2"]}, OK, "libnccl.so.2", ""),
    (library_checks.check_loaded, {"loaded": ["/lib/libc.so.6"]}, SKIPPED, "no CUDA library", ""),
    (library_checks.check_loaded, {"loaded": None}, ERROR, "imports torch fails", "import torch"),
    (library_checks.check_loaded, {"loaded": ["/site/nvidia/nccl/lib/libnccl.so.2", "/usr/lib/libnccl.so.2"]}, ERROR,
     "two copies of libnccl", "unset LD_LIBRARY_PATH"),
    (library_checks.check_loaded, {"loaded": ["/usr/lib/libnccl.so.2"], "installed": {"nvidia-nccl-cu13": "2"}},
     WARNING, "outside of torch's packages: /usr/lib/libnccl.so.2", "unset LD_LIBRARY_PATH"),
    (library_checks.check_loaded, {"loaded": ["/usr/lib/libnccl.so.2"]}, OK, "libnccl.so.2", ""),
    (library_checks.check_nvshmem, {}, SKIPPED, "no NVSHMEM here", ""),
    (library_checks.check_nvshmem, {"variables": {"MAGI_ATTENTION_NODE_TRANSPORT": "nvshmem"}}, ERROR,
     "MAGI_ATTENTION_NODE_TRANSPORT=nvshmem, and there is no NVSHMEM here",
     "pip install nvidia-nvshmem-cu13; pip install --no-index --find-links dist 'magi_attention[nvshmem]=="),
    (library_checks.check_nvshmem, {"installed": {"nvidia-nvshmem-cu13": "3.4.5", "magi-attention-comm-cu13": "1.1.1"}},
     OK, "nvidia-nvshmem-cu13 3.4.5; magi-attention-comm-cu13 1.1.1 (device half 3.4.5, host half 3.4.5)", ""),
    (
        library_checks.check_nvshmem,
        {
            "installed": {"nvidia-nvshmem-cu13": "3.3.20", "magi-attention-comm-cu13": "1.1.1"},
            "halves": ("", "NVSHMEM's host half is 3.3.20, and libmagi_comm.so was compiled with 3.4.5"),
        },
        ERROR,
        "host half is 3.3.20",
        "pip install --upgrade nvidia-nvshmem-cu13",
    ),
    (library_checks.check_nvshmem, {"installed": {"magi-attention-comm-cu13": "1.1.1"}}, ERROR,
     "needs NVSHMEM's host library", "pip install nvidia-nvshmem-cu13"),
    (library_checks.check_nvshmem, {"installed": {"nvidia-nvshmem-cu12": "3.4.5"}}, WARNING,
     "but torch is for CUDA 13.0", "pip install nvidia-nvshmem-cu13"),
    (
        library_checks.check_nvshmem,
        {
            "installed": {"nvidia-nvshmem-cu13": "3.4.5"},
            "variables": {"LD_LIBRARY_PATH": "/opt/nvshmem/lib"},
            "files": {
                "/opt/nvshmem/lib/libnvshmem_host.so.3": "",
                "/site/nvidia/nvshmem/lib/libnvshmem_host.so.3": "",
            },
        },
        WARNING,
        "halves of two versions",
        "unset LD_LIBRARY_PATH",
    ),
    (host_checks.check_shared_memory, {}, OK, "64.00 GiB", ""),
    (host_checks.check_shared_memory, {"shm": 64 * 2**20}, ERROR, "0.06 GiB, 8 are wanted", "--shm-size=16g"),
    (host_checks.check_shared_memory, {"shm": 4 * 2**30}, WARNING, "4.00 GiB", "--shm-size=16g"),
    (host_checks.check_shared_memory, {**CPU, "shm": 64 * 2**20}, OK, "several GPUs would want 8", ""),
    (host_checks.check_shared_memory, {"shm": None}, WARNING, "no /dev/shm", "--shm-size=16g"),
    (host_checks.check_memlock, {}, OK, "unlimited", ""),
    (host_checks.check_memlock, {"pinned": 2**23}, OK, "8 MiB; without RDMA", ""),
    (host_checks.check_memlock, {"pinned": 2**23, "files": IB}, ERROR, "8 MiB", "--ulimit memlock=-1"),
    (host_checks.check_memlock, {"pinned": 2**23, "files": IB, "capability_bits": 1 << 14}, OK, "IPC_LOCK lifts", ""),
    (host_checks.check_infiniband, {}, SKIPPED, "no RDMA device", ""),
    (host_checks.check_infiniband, {"files": IB}, OK, "mlx5_0/1 (InfiniBand)", ""),
    (host_checks.check_infiniband, {"files": ROCE}, OK, "RoCE v2 at GID index 3", ""),
    (host_checks.check_infiniband, {"files": {**IB, "/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN"}}, ERROR,
     "no port is ACTIVE: mlx5_0/1 DOWN", "ibstat"),
    (host_checks.check_infiniband, {"files": {k: v for k, v in IB.items() if k.startswith("/sys")}}, ERROR,
     "/dev/infiniband is empty", "--device=/dev/infiniband"),
    (host_checks.check_infiniband, {"files": IB, "blocked": {"/dev/infiniband/uverbs0"}}, ERROR,
     "uverbs0 cannot be opened", "--group-add"),
    (host_checks.check_capabilities, {"capability_bits": 1 << 19}, OK, "effective: SYS_PTRACE", ""),
    (host_checks.check_capabilities, {"passes": False}, WARNING, "take handles", "--cap-add=SYS_PTRACE"),
    (host_checks.check_capabilities, {"passes": False, **CPU}, OK, "none of", ""),
    (host_checks.check_capabilities, {"files": IB, "pinned": 1}, ERROR, "RDMA needs", "--cap-add=IPC_LOCK"),
    (host_checks.check_gpudirect, CPU, SKIPPED, "no NVIDIA GPU", ""),
    (host_checks.check_gpudirect, {}, SKIPPED, "no RDMA device", ""),
    (host_checks.check_gpudirect, {"files": IB}, WARNING, "host memory", "modprobe nvidia-peermem"),
    (host_checks.check_gpudirect, {"files": {**IB, "/sys/module/nvidia_peermem/refcnt": "0"}}, OK,
     "nvidia-peermem; no gdrdrv", ""),
    (host_checks.check_gpudirect,
     {"files": {**IB, "/proc/driver/nvidia/version": "NVIDIA UNIX Open Kernel Module", "/dev/gdrdrv": ""}}, OK,
     "dma-buf; gdrdrv is there", ""),
    (host_checks.check_network, {"files": NET}, OK, "node7 is 10.0.0.7; eth0 MTU 9000", ""),
    (host_checks.check_network, {}, OK, "one node only", ""),
    (host_checks.check_network, {"files": NET, "host_addresses": []}, OK, "does not resolve", ""),
    (host_checks.check_network, {"files": NET, "host_addresses": ["127.0.1.1"]}, OK, "one node (for several: ", ""),
    (host_checks.check_network, {"files": BRIDGED, "host_addresses": ["127.0.1.1"]}, OK, "IFNAME=ens5", ""),
    (host_checks.check_network,
     {"files": NET, "host_addresses": ["127.0.1.1"], "variables": {"GLOO_SOCKET_IFNAME": "eth0"}}, OK, "127.0.1.1", ""),
    (host_checks.check_network, {"files": NET, "variables": {"NCCL_SOCKET_IFNAME": "=ib0"}}, ERROR,
     "NCCL_SOCKET_IFNAME names ib0", "export NCCL_SOCKET_IFNAME=eth0"),
    (host_checks.check_network, {"files": NET, "variables": {"NCCL_SOCKET_IFNAME": "^docker0"}}, OK, "10.0.0.7", ""),
    (host_checks.check_environment, {}, OK, "no variable", ""),
    (host_checks.check_environment, {"variables": {"NCCL_DEBUG": "INFO"}}, OK, "NCCL_DEBUG=INFO", ""),
    (host_checks.check_environment, {"variables": {"MAGI_ATTENTION_SANITY_CHEK": "1"}}, WARNING,
     "did you mean MAGI_ATTENTION_SANITY_CHECK", "unset MAGI_ATTENTION_SANITY_CHEK"),
    (host_checks.check_environment, {"variables": {"MAGI_ATTENTION_PRECISION": "bf8"}}, ERROR, "'bf8' is unknown",
     "unset MAGI_ATTENTION_PRECISION"),
    (host_checks.check_environment, {"variables": {"NCCL_P2P_DISABLE": "1"}}, WARNING, "NVLink", "unset NCCL_P2P"),
    (host_checks.check_environment, {"variables": {"NCCL_P2P_DISABLE": "0"}}, OK, "NCCL_P2P_DISABLE=0", ""),
    (group_checks.check_bandwidth, CPU, SKIPPED, "no NVIDIA GPU", ""),
    (group_checks.check_bandwidth, {"gpus": smi(1)}, SKIPPED, "nobody to talk to", ""),
    (group_checks.check_bandwidth, {}, ERROR, "failed or took more", "magi doctor --pairwise"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "changes", "status", "evidence", "remedy"), CASES)
def test_checks(check, changes, status, evidence, remedy):
    found = check(Machine(**changes))
    assert (found.status, evidence in found.evidence, remedy in found.remedy) == (status, True, True), found


def test_every_check_is_tried_good_and_bad():
    for check in registry.CHECKS:
        statuses = {status for look, _, status, _, _ in CASES if look is check.look}
        if check.look is group_checks.check_bandwidth:
            statuses.add(OK)  # below, with numbers
        assert OK in statuses and statuses & {WARNING, ERROR}, check.id
        found = check.look(Machine())
        assert found.check == check.id


def test_gpus_of_nvidia_smi():
    first, second = parse_gpus(smi(mig="[N/A]", ecc="[N/A]") + "garbage\n")
    assert (first.index, second.index, first.arch, first.is_mig, first.ecc_errors) == (0, 1, "sm90", False, 0)
    assert first.throttle == 4 and first.is_persistent and first.driver == "580.65.06"
    assert parse_gpus("") == [] and parse_gpus("NVIDIA-SMI has failed") == []
