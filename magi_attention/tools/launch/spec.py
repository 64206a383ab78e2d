# SPDX-License-Identifier: Apache-2.0
"""``LaunchSpec``: what is to be launched where, read from TOML and checked before anything is started."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from magi_attention.errors import LaunchError
from magi_attention.tools.launch.textfile import read_text
from magi_attention.tools.launch.toml import build, read_toml

ENGINES = ("local", "docker", "ssh", "slurm", "k8s")
K8S_TEMPLATES = ("jobset", "lws", "pytorchjob")
DEFAULT_PORT = 29500
HEAD = "MAGI_RUN_HEAD"  # the variable in which a job of Slurm keeps the address of node 0
RESERVED = ("MAGI_RUN_ID", "MAGI_RUN_FOLDER", "MAGI_RUN_TOKEN", HEAD)
# Durations of Slurm, here of Kubernetes, too: minutes, minutes:seconds, hours:minutes:seconds, each behind days-.
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_ENDLESS = ("UNLIMITED", "INFINITE")
# Also a DNS label with room for what engines add, because k8s makes host names of it.
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks meet: static, on node 0. Without ``address`` the engine's own answer is used: this machine
    (local), the container of node 0 (docker), the first host (ssh), the first host of the job (slurm), the DNS name
    of pod 0 (k8s). ``timeout_s`` is for all nodes to arrive."""

    address: str = ""
    port: int | None = None
    timeout_s: int = 120


@dataclass(frozen=True)
class Container:
    """The container of a node; without ``image`` there is none. ``gpus`` is all, none or a list such as 0,1.
    ``rdma`` adds the InfiniBand devices and the right to pin memory, ``nvshmem`` the right to pass memory handles
    between processes. ``network`` is the engine's choice if empty. ``flags`` are added as they are."""

    image: str = ""
    mounts: tuple[str, ...] = ()
    gpus: str = "all"
    shm_size: str = "16g"
    network: str = ""
    rdma: bool = False
    nvshmem: bool = False
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ssh:
    """``hosts`` or a ``hosts_file`` with one host a line; node k runs on host k, and a host may be named twice."""

    hosts: tuple[str, ...] = ()
    hosts_file: str = ""
    user: str = ""
    port: int | None = None
    identity_file: str = ""
    options: tuple[str, ...] = ()
    connect_timeout_s: int = 10


@dataclass(frozen=True)
class Slurm:
    """``gpus_per_node`` is passed as ``--gpus-per-node`` if not 0; without it there are as many as ranks.
    ``directives`` are further #SBATCH options, as they stand in a script."""

    partition: str = ""
    account: str = ""
    time: str = "01:00:00"
    gpus_per_node: int | None = None
    exclusive: bool = True
    directives: tuple[str, ...] = ()


@dataclass(frozen=True)
class K8s:
    """``gpus_per_node`` is 0 for none; without it there are as many as ranks. ``rdma_resource`` names the extended
    resource of the RDMA device plugin, such as rdma/ib. ``queue`` is a local queue of Kueue. ``time`` as for Slurm;
    no limit without it."""

    template: str = "jobset"
    namespace: str = "default"
    queue: str = ""
    time: str = ""
    gpus_per_node: int | None = None
    rdma_resource: str = ""
    max_restarts: int = 0
    host_network: bool = False


@dataclass(frozen=True)
class LaunchSpec:
    """One launch. ``command`` is a script and its arguments, or ``-m`` and a module; torchrun starts it on every
    rank. ``python`` and ``workdir`` are those of the nodes; empty means the engine's own. ``preflight`` has the
    doctor look at the nodes when a session is made, where the engine can reach them."""

    engine: str = "local"
    nodes: int = 1
    ranks_per_node: int = 1
    command: tuple[str, ...] = ()
    python: str = ""
    workdir: str = ""
    max_restarts: int = 0
    grace_s: int = 10
    preflight: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    rendezvous: Rendezvous = Rendezvous()
    container: Container = Container()
    ssh: Ssh = Ssh()
    slurm: Slurm = Slurm()
    k8s: K8s = K8s()

    @property
    def port(self) -> int:
        return self.rendezvous.port or DEFAULT_PORT

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def gpus_per_node(self, asked: int | None) -> int:
        """What a queue is asked for: ``asked``, or a GPU for each rank unless the containers are to have none."""
        if asked is not None:
            return asked
        return 0 if self.container.gpus == "none" else self.ranks_per_node


def seconds_of(time: str) -> int | None:
    """Seconds of a time limit as Slurm writes it; None for no limit, ``ValueError`` if it is none."""
    if time.upper() in _ENDLESS:
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        raise ValueError(time)
    days, first, second, third = (int(match[name] or 0) for name in ("days", "first", "second", "third"))
    if match["days"] is not None:  # days-hours:minutes:seconds
        return ((days * 24 + first) * 60 + second) * 60 + third
    if match["third"] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second


def read_spec(path: Path) -> LaunchSpec:
    """The spec of a TOML file, for ``check_spec`` once options are put over it. A ``hosts_file`` is relative to it
    and is read now.

    Raises:
        LaunchError: the file cannot be read, a key is unknown or a value has the wrong type.
    """
    return with_hosts(build(LaunchSpec, read_toml(path), str(path)), path.parent)


def with_hosts(spec: LaunchSpec, folder: Path) -> LaunchSpec:
    """``spec`` with the hosts of its hosts file in place of the file."""
    if not spec.ssh.hosts_file:
        return spec
    if spec.ssh.hosts:
        raise LaunchError("The spec has both ssh.hosts and ssh.hosts_file; keep one of them.")
    path = folder / spec.ssh.hosts_file
    lines = read_text(path, "The hosts file", LaunchError).splitlines()
    hosts = tuple(h for h in (line.split("#")[0].strip() for line in lines) if h)
    for host in hosts:
        if len(host.split()) != 1:
            raise LaunchError(f"{path} has the line {host!r}; give one host a line, with nothing behind it.")
    return dataclasses.replace(spec, ssh=dataclasses.replace(spec.ssh, hosts=hosts, hosts_file=""))


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise LaunchError(
            f"{name!r} is no name for a session; use up to 32 lower-case letters, digits and hyphens, with a letter "
            "or digit at both ends."
        )
    return name


def check_spec(spec: LaunchSpec) -> LaunchSpec:
    """``spec`` itself, if it makes sense.

    Raises:
        LaunchError: with the field to change.
    """
    if spec.engine not in ENGINES:
        raise LaunchError(f"engine is {spec.engine!r}; use one of {', '.join(ENGINES)}.")
    for name, value in (("nodes", spec.nodes), ("ranks_per_node", spec.ranks_per_node)):
        if value < 1:
            raise LaunchError(f"{name} is {value}; give at least 1.")
    counts = {"max_restarts": spec.max_restarts, "k8s.max_restarts": spec.k8s.max_restarts}
    counts |= {"slurm.gpus_per_node": spec.slurm.gpus_per_node, "k8s.gpus_per_node": spec.k8s.gpus_per_node}
    for name, value in counts.items():
        if value is not None and value < 0:
            raise LaunchError(f"{name} is {value}; give 0 for none.")
    if spec.rendezvous.timeout_s < 1 or spec.grace_s < 1:
        raise LaunchError("rendezvous.timeout_s and grace_s are seconds; give at least 1.")
    port = spec.rendezvous.port
    if port is not None and not 1024 <= port <= 65535:
        raise LaunchError(f"rendezvous.port is {port}; use one from 1024 to 65535.")
    _check_texts(spec)
    if any(character.isspace() for character in spec.rendezvous.address):
        raise LaunchError(f"rendezvous.address is {spec.rendezvous.address!r}; give one host name or IP address.")
    for name in spec.environment:
        if not _VARIABLE.fullmatch(name):
            raise LaunchError(f"environment has {name!r}, which is no name of a variable.")
        if name in RESERVED:
            raise LaunchError(f"environment has {name}, which the launcher sets itself; leave it out.")
    for mount in spec.container.mounts:
        if not 2 <= len(mount.split(":")) <= 3 or not mount.startswith("/"):
            raise LaunchError(f"container.mounts has {mount!r}; write /host/path:/container/path or .../path:ro.")
    _check_engine(spec)
    return spec


def _check_texts(spec: LaunchSpec) -> None:
    """No word may end before its end: a NUL ends an argument, a line break a line of a script or of a file."""
    for where, text in _texts(dataclasses.asdict(spec)):
        if "\0" in text:
            raise LaunchError(f"{where} has a NUL character, which no command line can hold; leave it out.")
        is_for_ranks = where.partition(".")[0] in ("command", "environment")  # these may have line breaks
        if not is_for_ranks and text.splitlines() not in ([], [text]):
            raise LaunchError(f"{where} is {text!r}; it must be one line.")


def _texts(value: object, where: str = "") -> Iterator[tuple[str, str]]:
    """(field, text) of all texts of a spec."""
    if isinstance(value, str):
        yield where or "the spec", value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{where}.{name}" if where else name)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner, where)


def _check_engine(spec: LaunchSpec) -> None:
    """What only one engine asks for."""
    if spec.engine in ("docker", "k8s") and not spec.container.image:
        raise LaunchError(f"engine {spec.engine} starts containers; name the image in container.image or --image.")
    if spec.engine == "local" and spec.container.image:
        raise LaunchError(
            "engine local starts processes without a container; use engine docker, or leave the image out."
        )
    if spec.engine == "k8s":
        _check_k8s(spec)
    elif spec.engine == "slurm":
        _check_slurm(spec)
    elif spec.engine == "ssh":
        _check_ssh(spec)


def _check_time(name: str, time: str) -> None:
    try:
        seconds_of(time)
    except ValueError:
        raise LaunchError(f"{name} is {time!r}; write it as 30 (minutes), 04:00:00, or 2-00 (days-hours).") from None


def _check_k8s(spec: LaunchSpec) -> None:
    if spec.k8s.template not in K8S_TEMPLATES:
        raise LaunchError(f"k8s.template is {spec.k8s.template!r}; use one of {', '.join(K8S_TEMPLATES)}.")
    if spec.k8s.time:
        _check_time("k8s.time", spec.k8s.time)
        if spec.k8s.template == "lws":
            raise LaunchError("k8s.time is set, and a LeaderWorkerSet runs until it is deleted; leave the time out.")


def _check_slurm(spec: LaunchSpec) -> None:
    _check_time("slurm.time", spec.slurm.time)
    for line in spec.slurm.directives:
        if not line.startswith("-"):
            raise LaunchError(f"slurm.directives has {line!r}; write an option of sbatch, such as --qos=high.")
    for mount in spec.container.mounts:
        if "," in mount:
            raise LaunchError(f"container.mounts has {mount!r}; Slurm reads the comma as the end of a mount.")


def _check_ssh(spec: LaunchSpec) -> None:
    if len(spec.ssh.hosts) < spec.nodes:
        raise LaunchError(
            f"engine ssh has {len(spec.ssh.hosts)} hosts for {spec.nodes} nodes; name them in ssh.hosts or with "
            "--hosts FILE, or lower nodes."
        )
    for host in spec.ssh.hosts:
        if host.startswith("-"):
            raise LaunchError(f"ssh.hosts has {host!r}, which ssh would read as an option; give a host name.")
    used, head = set(spec.ssh.hosts[: spec.nodes]), spec.rendezvous.address or spec.ssh.hosts[0]
    if len(used) > 1 and is_loopback(head):
        raise LaunchError(
            f"The ranks would meet at {head}, which is another machine on every host; set rendezvous.address to an "
            "address of the first host that all others reach."
        )


def is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")
