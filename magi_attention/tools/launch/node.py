# SPDX-License-Identifier: Apache-2.0
"""What an engine starts on every node: `python -m magi_attention.tools.launch.node ... -- script arguments`.

It meets the other nodes, starts torchrun, and sees to it that nothing outlives it: it ends what it started when it
is asked to, when its standard input closes (the launcher is gone, however it ended, or the connection is), and when
torchrun has ended. Standard library only. Exit codes: that of torchrun, 2 for a start that was refused, 130 when
stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from magi_attention.errors import LaunchError
from magi_attention.tools.launch import processes, rollcall
from magi_attention.tools.launch.failure import LINE_PREFIX

REFUSED, STOPPED = 2, 130
MINIMUM_FREE_BYTES = 16 * 2**20
_POLL_S = 0.1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m magi_attention.tools.launch.node", description=__doc__)
    top.add_argument("--run-id", required=True, help="marks the processes of the run")
    top.add_argument("--nodes", type=int, default=1)
    rank = top.add_mutually_exclusive_group()
    rank.add_argument("--node-rank", type=int, default=0)
    rank.add_argument("--node-rank-from", metavar="VARIABLE", help="environment variable that holds it")
    top.add_argument("--ranks-per-node", type=int, default=1)
    address = top.add_mutually_exclusive_group()
    address.add_argument("--master-addr", help="where node 0 is, as all nodes reach it")
    address.add_argument("--master-addr-from", metavar="VARIABLE", help="environment variable that holds it")
    top.add_argument("--master-port", type=int, default=29500)
    top.add_argument("--timeout", type=int, default=120, help="seconds for all nodes to arrive")
    top.add_argument("--resolve-timeout", type=int, default=10, help="seconds for the address of node 0 to resolve")
    top.add_argument("--grace", type=int, default=10, help="seconds from SIGTERM to SIGKILL")
    top.add_argument("--max-restarts", type=int, default=0)
    top.add_argument("--log-dir", help="folder of this run; its node<k>/ is made")
    top.add_argument("--watch-stdin", action="store_true", help="stop when standard input closes")
    top.add_argument("--sweep", action="store_true", help="only end what the run left on this machine")
    top.add_argument("command", nargs="*", help="script and arguments, or -m and a module")
    return top


def from_environment(variable: str, what: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise LaunchError(
            f"{variable} is not set, so this node does not know {what}; start it through the engine that sets it."
        )
    return value


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with what the environment holds filled in and checked. Nothing is guessed."""
    if args.node_rank_from:
        text = from_environment(args.node_rank_from, "its number")
        if not text.isdecimal():
            raise LaunchError(f"{args.node_rank_from} is {text!r}; it must be the number of this node.")
        args.node_rank = int(text)
    if args.master_addr_from:
        args.master_addr = from_environment(args.master_addr_from, "where node 0 is")
    if not 0 <= args.node_rank < args.nodes:
        raise LaunchError(f"The node number is {args.node_rank}; with {args.nodes} nodes it is 0 to {args.nodes - 1}.")
    if not args.command:
        raise LaunchError("There is no command; give a script, or -m and a module, behind --.")
    if not args.master_addr:
        if args.nodes > 1:
            raise LaunchError("Several nodes need --master-addr, the address of node 0.")
        args.master_addr = "127.0.0.1"  # one node: there is nobody else to find
    return args


def check_command(command: Sequence[str], has_same_python: bool = True) -> None:
    """``LaunchError`` if the script or module of a command is not here, so that no rank is started to find out.

    Modules are only looked for if the ranks have the Python of this process.
    """
    where = f"{os.getcwd()} on {socket.gethostname()}"
    if command[0] != "-m":
        if not os.path.exists(command[0]):
            raise LaunchError(f"There is no script {command[0]}, seen from {where}; correct its path.")
        return
    if len(command) < 2:
        raise LaunchError("-m has no module behind it; name one.")
    top = command[1].partition(".")[0]
    sys.path.insert(0, os.getcwd())  # where the ranks look first
    try:
        is_here = importlib.util.find_spec(top) is not None
    finally:
        sys.path.remove(os.getcwd())
    if has_same_python and not is_here:
        raise LaunchError(f"There is no module {top} for {sys.executable}, seen from {where}; correct its name.")


def prepare_folder(log_dir: str | None, node: int) -> Path | None:
    """The folder for torchrun's per-rank files, with room in it; None if none is wanted."""
    if not log_dir:
        return None
    folder = Path(log_dir).expanduser() / f"node{node}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # what ranks print may hold secrets
        (folder / ".probe").write_bytes(b"x" * 4096)
        (folder / ".probe").unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise LaunchError(
            f"Logs cannot be written to {folder} on {socket.gethostname()} ({error.strerror}); free space there, "
            "make it writable, or choose another place with MAGI_HOME."
        ) from None
    if free < MINIMUM_FREE_BYTES:
        raise LaunchError(
            f"The disk of {folder} on {socket.gethostname()} has {free / 2**20:.1f} MiB left; free at least "
            f"{MINIMUM_FREE_BYTES // 2**20} MiB, or choose another place with MAGI_HOME."
        )
    return folder


def versions() -> dict[str, str]:
    """Versions that all nodes must share."""
    from importlib.metadata import PackageNotFoundError, version

    from magi_attention.version import __version__

    try:
        torch = version("torch")
    except PackageNotFoundError:
        raise LaunchError(
            f"torch is not installed for {sys.executable} on {socket.gethostname()}; install it there, or name "
            "another interpreter in the spec's python."
        ) from None
    python = ".".join(platform.python_version_tuple()[:2])
    return {"magi_attention": __version__, "python": python, "torch": torch}


def torchrun_argv(args: argparse.Namespace, folder: Path | None) -> list[str]:
    """torchrun with static rendezvous; its output carries the rank in front of each line."""
    argv = [sys.executable, "-m", "magi_attention.tools.launch.torchrun"]
    argv += ["--nnodes", str(args.nodes), "--node-rank", str(args.node_rank)]
    argv += ["--nproc-per-node", str(args.ranks_per_node)]
    argv += ["--rdzv-backend", "static", "--rdzv-id", args.run_id]
    argv += ["--master-addr", args.master_addr, "--master-port", str(args.master_port)]
    argv += ["--rdzv-conf", f"timeout={args.timeout}", "--max-restarts", str(args.max_restarts)]
    if folder is not None:
        argv += ["--log-dir", str(folder), "--redirects", "3", "--tee", "3"]
    return argv + args.command


def rank_environment(args: argparse.Namespace, folder: Path | None) -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[3])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    paths = [package] + [p for p in [os.environ.get("PYTHONPATH")] if p]
    return {
        "OMP_NUM_THREADS": str(max(cores // args.ranks_per_node, 1)),
        **os.environ,
        processes.MARK: f"{args.run_id}/{args.node_rank}",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **({"MAGI_RUN_FOLDER": str(folder)} if folder else {}),
        **LINE_PREFIX,
    }


def link_rank_logs(folder: Path, args: argparse.Namespace) -> None:
    """``rank<k>.out`` and ``.err`` in ``folder`` point to the files of torchrun's latest attempt."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda p: int(p.name.rpartition("_")[2]))
    if not attempts:
        return
    for local in range(args.ranks_per_node):
        rank = args.node_rank * args.ranks_per_node + local
        for kind, stream in (("out", "stdout"), ("err", "stderr")):
            link, target = folder / f"rank{rank}.{kind}", attempts[-1] / str(local) / f"{stream}.log"
            if target.exists() and link.resolve() != target.resolve():
                link.unlink(missing_ok=True)
                link.symlink_to(target.relative_to(folder))


class Stopped(Exception):
    """A signal came while the nodes were still meeting."""


class NodeRunner:
    """Waits for torchrun, for a signal and for the end of standard input, whichever comes first."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.token = os.environ.pop(rollcall.TOKEN, "")  # the ranks have no use for it
        self.stopped = ""  # why, once it has to stop
        self.is_meeting = True
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        if args.watch_stdin:
            threading.Thread(target=self._watch_stdin, daemon=True).start()

    def _on_signal(self, number: int, frame: object) -> None:
        self.stopped = self.stopped or f"it got {signal.Signals(number).name}"
        if self.is_meeting:
            self.is_meeting = False
            raise Stopped

    def _watch_stdin(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        self.stopped = self.stopped or "standard input ended: the launcher asks for it, or is gone"
        os.kill(os.getpid(), signal.SIGTERM)

    def meet(self, facts: rollcall.NodeFacts) -> None:
        """Waits for the other nodes; with one node only sees that the port is free and that the address leads here."""
        args = self.args
        rollcall.find_address(args.master_addr, args.resolve_timeout)
        if args.nodes > 1:
            rollcall.meet(
                facts, args.master_addr, args.master_port, args.timeout, self.token, lambda text: say(args, text)
            )
        else:
            rollcall.see_own_port(args.master_addr, args.master_port)
        self.is_meeting = False

    def run(self, argv: list[str], folder: Path | None) -> int:
        processes.adopt_orphans()
        child = subprocess.Popen(
            argv,
            env=rank_environment(self.args, folder),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=processes.end_with_parent(),
        )
        while child.poll() is None and not self.stopped:
            time.sleep(_POLL_S)
            if folder is not None:
                link_rank_logs(folder, self.args)
        if self.stopped:
            say(self.args, f"stopping, because {self.stopped}")
            child.terminate()  # torchrun passes it on to its ranks
            try:
                child.wait(timeout=self.args.grace)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        processes.stop_marked(f"{self.args.run_id}/{self.args.node_rank}", 1)
        if self.stopped:
            return STOPPED
        return child.returncode if child.returncode >= 0 else 128 - child.returncode


def say(args: argparse.Namespace, text: str) -> None:
    """One line on standard output; nobody may be left to read it."""
    try:
        print(f"[node {args.node_rank}]: {text}", flush=True)
    except OSError:
        pass


def start(args: argparse.Namespace) -> int:
    args = resolve(args)
    check_command(args.command)
    folder = prepare_folder(args.log_dir, args.node_rank)
    found = versions()
    runner = NodeRunner(args)
    facts = rollcall.NodeFacts(
        args.run_id, args.node_rank, args.nodes, args.ranks_per_node, socket.gethostname(), found
    )
    listing = ", ".join(f"{name} {version}" for name, version in found.items())
    say(args, f"{facts.host}, {args.ranks_per_node} ranks, {listing}")
    runner.meet(facts)
    return runner.run(torchrun_argv(args, folder), folder)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.sweep:
        ended = processes.stop_marked(args.run_id, args.grace)
        print(f"{socket.gethostname()}: {len(ended)} processes of run {args.run_id} were ended.")
        return 0
    try:
        return start(args)
    except LaunchError as error:
        say(args, f"refused: {error}")
        return REFUSED
    except Stopped:
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
