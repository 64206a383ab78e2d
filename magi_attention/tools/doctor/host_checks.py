# SPDX-License-Identifier: Apache-2.0
"""Checks of shared memory, limits, InfiniBand, rights, network and environment."""

from __future__ import annotations

import warnings

from magi_attention.env import registry, secrets
from magi_attention.tools.doctor.finding import ERROR, OK, SKIPPED, WARNING, Finding
from magi_attention.tools.doctor.gpu_checks import no_gpu
from magi_attention.tools.doctor.system import UNLIMITED, System

GIB = 2**30
SHM_BYTES, SHM_LEAST_BYTES = 8 * GIB, GIB
CAPABILITIES = {"NET_RAW": 13, "IPC_LOCK": 14, "SYS_RAWIO": 17, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_NICE": 23}
# Variables that make a run slow or different and are often left over; value -> what it does. * is any value.
_TROUBLE = {
    ("NCCL_P2P_DISABLE", "1"): "switches NVLink and peer access off",
    ("NCCL_SHM_DISABLE", "1"): "switches shared memory between processes off",
    ("NCCL_IB_DISABLE", "1"): "sends between nodes over sockets, not InfiniBand",
    ("NCCL_DEBUG", "TRACE"): "logs every call",
    ("NCCL_ALGO", "*"): "overrules NCCL's choice of algorithm",
    ("NCCL_PROTO", "*"): "overrules NCCL's choice of protocol",
    ("CUDA_LAUNCH_BLOCKING", "1"): "makes every kernel launch wait",
    ("NVIDIA_TF32_OVERRIDE", "*"): "changes the precision of float32 products",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "checks every collective",
}


def check_shared_memory(system: System) -> Finding:
    size = system.size_of("/dev/shm")
    if size is None:
        return Finding("shm", WARNING, "there is no /dev/shm, which NCCL and data loaders use", "--shm-size=16g")
    evidence = f"/dev/shm has {size / GIB:.2f} GiB"
    if size >= SHM_BYTES:
        return Finding("shm", OK, evidence)
    if len(system.gpus) < 2:
        return Finding("shm", OK, f"{evidence}; several GPUs would want {SHM_BYTES // GIB}")
    status = ERROR if size < SHM_LEAST_BYTES else WARNING
    remedy = "docker run --shm-size=16g; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    return Finding("shm", status, f"{evidence}, {SHM_BYTES // GIB} are wanted", remedy)


def ib_devices(system: System) -> list[str]:
    return [path.rsplit("/", 1)[1] for path in system.names("/sys/class/infiniband/*")]


def check_memlock(system: System) -> Finding:
    limit = system.memlock()
    if limit == UNLIMITED:
        return Finding("lock", OK, "pinned memory is unlimited")
    evidence = f"pinned memory is limited to {limit / 2**20:.0f} MiB"
    if has_capability(system, "IPC_LOCK"):
        return Finding("lock", OK, f"{evidence}, which IPC_LOCK lifts")
    if not ib_devices(system):
        return Finding("lock", OK, f"{evidence}; without RDMA devices that does not matter")
    return Finding("lock", ERROR, f"{evidence}, so RDMA cannot register buffers", "--ulimit memlock=-1")


def check_infiniband(system: System) -> Finding:
    devices = ib_devices(system)
    if not devices:
        return Finding("ib", SKIPPED, "no RDMA device in /sys/class/infiniband")
    ports, active = [], []
    for path in system.names("/sys/class/infiniband/*/ports/*"):
        name, port = path.split("/")[4], path.rsplit("/", 1)[1]
        state = (system.read(f"{path}/state") or "unknown").rpartition(": ")[2]
        layer = system.read(f"{path}/link_layer") or "unknown"
        ports.append(f"{name}/{port} {state} ({layer})")
        if state == "ACTIVE":
            active.append(f"{name}/{port} ({layer}{_roce_index(system, path) if layer == 'Ethernet' else ''})")
    if not active:
        return Finding(
            "ib", ERROR, f"no port is ACTIVE: {', '.join(ports)}", "ibstat on the host; cable or subnet manager"
        )
    nodes = system.names("/dev/infiniband/uverbs*")
    if not nodes:
        return Finding("ib", ERROR, f"{', '.join(active)}, but /dev/infiniband is empty", "--device=/dev/infiniband")
    if blocked := [node for node in nodes if not system.is_usable(node)]:
        return Finding("ib", ERROR, f"{blocked[0]} cannot be opened by this user", "--group-add with the group of it")
    return Finding("ib", OK, ", ".join(active))


def _roce_index(system: System, port: str) -> str:
    """The first GID index of RoCE v2, which NCCL_IB_GID_INDEX and NVSHMEM_IB_GID_INDEX may want."""
    for path in system.names(f"{port}/gid_attrs/types/*"):
        if system.read(path) == "RoCE v2":
            return f", RoCE v2 at GID index {path.rsplit('/', 1)[1]}"
    return ", no RoCE v2 GID"


def has_capability(system: System, name: str) -> bool:
    return bool(system.capabilities() >> CAPABILITIES[name] & 1)


def check_capabilities(system: System) -> Finding:
    """The first right that is missing for what this machine has."""
    have = [name for name in CAPABILITIES if has_capability(system, name)]
    evidence = f"effective: {', '.join(have) or 'none of ' + ', '.join(CAPABILITIES)}"
    if len(system.gpus) > 1 and system.can_pass_handles() is False:
        return Finding(
            "cap",
            WARNING,
            f"{evidence}; processes may not take handles from one another, which symmetric memory needs",
            "--cap-add=SYS_PTRACE",
        )
    if ib_devices(system) and "IPC_LOCK" not in have and system.memlock() != UNLIMITED:
        return Finding("cap", ERROR, f"{evidence}; RDMA needs pinned memory", "--cap-add=IPC_LOCK")
    return Finding("cap", OK, evidence)


def check_gpudirect(system: System) -> Finding:
    """May the network card read GPU memory?"""
    if reason := no_gpu(system):
        return Finding("gdr", SKIPPED, reason)
    if not ib_devices(system):
        return Finding("gdr", SKIPPED, "no RDMA device that could read GPU memory")
    has_peermem = bool(system.names("/sys/module/nvidia_peermem"))
    is_open = "Open Kernel Module" in (system.read("/proc/driver/nvidia/version") or "")
    gdrcopy = "gdrdrv is there" if system.names("/dev/gdrdrv") else "no gdrdrv, which is optional"
    if not has_peermem and not is_open:
        return Finding(
            "gdr",
            WARNING,
            "neither nvidia-peermem nor the open kernel driver's dma-buf, so rows pass through host memory",
            "modprobe nvidia-peermem (on the host)",
        )
    return Finding("gdr", OK, f"{'nvidia-peermem' if has_peermem else 'dma-buf'}; {gdrcopy}")


def _outward(system: System, interfaces: set[str]) -> str:
    """The interface of the default route, else the first by name. Others may be bridges, tunnels or containers'."""
    for line in (system.read("/proc/net/route") or "").splitlines():
        words = line.split()
        if len(words) > 1 and words[1] == "00000000" and words[0] in interfaces:
            return words[0]
    return min(interfaces)


def check_network(system: System) -> Finding:
    """This host's name leads to an address that others can reach, and the named interfaces exist."""
    interfaces = {path.rsplit("/", 1)[1] for path in system.names("/sys/class/net/*")} - {"lo", "bonding_masters"}
    mtus = ", ".join(f"{name} MTU {system.read(f'/sys/class/net/{name}/mtu')}" for name in sorted(interfaces))
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = system.environ.get(variable, "")
        names = [name.split(":")[0] for name in value.lstrip("=^").split(",") if name]
        wanted = [n for n in names if not any(i.startswith(n) for i in interfaces | {"lo"})]
        if wanted and not value.startswith("^"):
            remedy = f"export {variable}={_outward(system, interfaces)}" if interfaces else f"unset {variable}"
            return Finding("net", ERROR, f"{variable} names {wanted[0]}, there is {mtus or 'no interface'}", remedy)
    host = system.hostname()
    addresses = system.addresses(host)
    if not interfaces:
        return Finding("net", OK, f"{host}: no network besides loopback, so one node only")
    outward = _outward(system, interfaces)
    name = f"{host} is {', '.join(addresses)}" if addresses else f"{host} does not resolve"
    is_local = all(a.startswith("127.") or a == "::1" for a in addresses)
    if is_local and not system.environ.get("GLOO_SOCKET_IFNAME"):
        # No warning: most machines are the only node, and whether others reach this one is seen by --pairwise.
        name += (
            f", which is enough for one node (for several: export GLOO_SOCKET_IFNAME={outward}, and give the others "
            "this one's IP by --address)"
        )
    return Finding("net", OK, f"{name}; {mtus}")


def check_environment(system: System) -> Finding:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unknown = registry.check_unknown(system.environ)
    for row in registry.list_table(system.environ):
        if row["value"].startswith("invalid: "):
            return Finding("env", ERROR, row["value"].removeprefix("invalid: "), f"unset {row['name']}")
    if unknown:
        return Finding("env", WARNING, " ".join(unknown), f"unset {unknown[0].split()[0].partition('=')[0]}")
    for (name, value), effect in _TROUBLE.items():
        have = system.environ.get(name)
        if have is not None and (value == "*" or have.upper() == value):
            return Finding("env", WARNING, f"{name}={have} {effect}", f"unset {name}")
    prefixes = (registry.PREFIX, "NCCL_", "NVSHMEM_", "TORCH_NCCL_")
    known = [f"{n}={secrets.shown(n, v)}" for n, v in sorted(system.environ.items()) if n.startswith(prefixes)]
    return Finding("env", OK, ", ".join(known) or "no variable of MAGI_ATTENTION_, NCCL_ or NVSHMEM_ is set")
