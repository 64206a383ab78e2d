# SPDX-License-Identifier: Apache-2.0
"""`magi up`, `run`, `status`, `logs` and `down` with the daemons of a cluster, where tests have stand-ins for them.

    ci/clusters                 all of them
    ci/clusters slurm           one of them
    ci/clusters --keep          leaves the folder with configuration and logs

Everything lies in a folder of its own and listens at 127.0.0.1. Slurm has two nodes whose names do not resolve.
Containers of docker have an empty image and see this machine's programs. What is checked prints a line; exit code 1 if
a line says no. Where dockerd does not start, a line says that docker was not tried.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "tests/launch/rank_script.py"
TRAIN = "examples/llama/train.py"
PATIENCE_S = 180  # for whatever is waited for; a machine may be busy
SECRET = "it's s3cr3ts3cr3t"
ODD = 'it\'s $(touch pwned) 50%j "q" a\\b #1'  # name of a folder
SLURM = """\
ClusterName=magi
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName=first NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=second NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=first,second Default=YES MaxTime=INFINITE State=UP
"""


class Failed(Exception):
    """What is told in place of a check's name."""


class NotHere(Exception):
    """Why something cannot be tried on this machine."""


class Checks:
    """Counts what was seen to be right, and prints it."""

    def __init__(self) -> None:
        self.num_failed = self.num_passed = 0

    def __call__(self, is_right: bool, what: str, evidence: object = "") -> None:
        self.num_passed += bool(is_right)
        self.num_failed += not is_right
        print(f"{'ok  ' if is_right else 'NO  '} {what}" + (f": {evidence}" if not is_right else ""), flush=True)


def wait_for(what: str, is_there: Callable[[], object]) -> object:
    """What ``is_there`` returns once it is true; ``Failed`` after ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_there()):
        if time.monotonic() > deadline:
            raise Failed(f"{what} did not come within {PATIENCE_S} s")
        time.sleep(0.5)
    return found


def output_of(*argv: str, **environment: str) -> str:
    return subprocess.run(argv, env={**os.environ, **environment}, capture_output=True, text=True).stdout.strip()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


@contextlib.contextmanager
def daemon(*argv: str, log: Path, **environment: str) -> Iterator[subprocess.Popen]:
    """A daemon in the foreground, ended with this block."""
    with log.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Magi:
    """The command line with a home of its own."""

    def __init__(self, home: Path, **environment: str):
        home.mkdir(parents=True)
        self.home = home
        self.environment = {**os.environ, "MAGI_HOME": str(home), "PYTHONPATH": str(ROOT), **environment}

    def __call__(self, *words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self._argv(*words), env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT
        )

    def start(self, *words: str) -> subprocess.Popen:
        null = subprocess.DEVNULL
        return subprocess.Popen(self._argv(*words), env=self.environment, stdout=null, stderr=null, cwd=ROOT)

    def _argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "magi_attention.cli", *words]

    def last_run(self, name: str) -> dict:
        return json.loads(self("status", name, "--json").stdout)[0]["runs"][-1]

    def end_of(self, name: str) -> dict:
        """The last run once it is neither queued nor running."""
        rows: list[dict] = []

        def is_over() -> bool:
            rows[:] = [self.last_run(name)]
            return rows[0]["state"] not in ("submitted", "running")

        wait_for(f"the end of the run of {name}", is_over)
        return rows[0]

    def log(self, name: str) -> str:
        return self("logs", name).stdout


def words_of_all_processes() -> str:
    """Every command line of the machine, as any of its users sees them."""
    texts = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            texts.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(texts)


def try_session(magi: Magi, check: Checks, name: str, *options: str) -> None:
    """What every engine must do, in a session of two nodes."""
    out = magi.home / "out"
    common = ("--nodes", "2", "--python", sys.executable, "--workdir", str(ROOT), "--port", str(free_ports(1)[0]))
    variables = ("--env", f"API_KEY={SECRET}", "--env", f"PYTHONPATH={ROOT}", "--env", "OMP_NUM_THREADS=1")
    done = magi("up", "--name", name, *common, *variables, *options)
    check(done.returncode == 0, f"{name}: up", done.stderr)

    done = magi("run", "--session", name, SCRIPT, "--", "hello", "@HEAD@", "$(touch pwned)", "it's", "API_KEY")
    row, log = magi.end_of(name), magi.log(name)
    check((row["state"], row["exit_code"]) == ("done", 0), f"{name}: two ranks run", (row, done.stderr, log))
    words = "says hello ['@HEAD@', '$(touch pwned)', \"it's\", 'API_KEY']"
    check(all(f"rank {rank} of 2 {words}" in log for rank in range(2)), f"{name}: arguments arrive as given", log)
    check(f"[rank 1]: API_KEY is {SECRET}" in log, f"{name}: a secret variable arrives", log)
    check(not list(ROOT.glob("pwned")), f"{name}: nothing of an argument is carried out")
    only = magi("logs", name, "--rank", "1", "--grep", "stderr").stdout
    check(only == "[rank 1]: rank 1 on stderr\n", f"{name}: logs of one rank", only)

    words = ("--out", str(out), "--steps", "2", "--seq-len", "256", "--max-document", "128", "--device", "cpu")
    done = magi("run", "--session", name, TRAIN, "--", *words)
    row = magi.end_of(name)
    check(row["state"] == "done", f"{name}: training with attention over two nodes", (row, done.stderr, magi.log(name)))
    losses = json.loads((out / "losses.json").read_text()) if (out / "losses.json").exists() else {}
    check(losses.get("world") == 2 and len(losses.get("losses", ())) == 2, f"{name}: it has two losses", losses)

    magi("run", "--session", name, SCRIPT, "--", "crash", "1")
    row, log = magi.end_of(name), magi.log(name)
    check(row["state"] == "failed" and "exitcode  : 7" in log, f"{name}: a rank that fails fails the run", (row, log))

    waiting = magi.start("run", "--session", name, SCRIPT, "--", "wait", "API_KEY")
    wait_for("ranks that wait", lambda: magi.log(name).count("says wait") == 2)
    seen = words_of_all_processes()
    check("launch.node" in seen and "s3cr3t" not in seen, f"{name}: no command line has a secret")
    done = magi("down", name)
    waiting.wait(PATIENCE_S)
    check(done.returncode == 0 and magi.last_run(name)["state"] == "stopped", f"{name}: down", done.stderr)
    script = str(Path(SCRIPT).name)
    wait_for("the end of the ranks", lambda: f"{script} wait" not in words_of_all_processes())
    check(True, f"{name}: down leaves no rank running")


# ---- Slurm ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def slurm_of_two_nodes(folder: Path) -> Iterator[dict[str, str]]:
    """The variable by which its commands find it."""
    folder.mkdir()
    for name in ("state", "spool-first", "spool-second"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    configuration, host = folder / "slurm.conf", socket.gethostname().partition(".")[0]
    configuration.write_text(SLURM.format(folder=folder, host=host, user=getpass.getuser(), ports=free_ports(3)))
    variables = {"SLURM_CONF": str(configuration)}
    munge = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "socket", "pid-file")]
    munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"]
    with contextlib.ExitStack() as stack:

        def start(*argv: str, name: str = "") -> None:
            stack.enter_context(daemon(*argv, log=folder / f"{name or argv[0]}.out", **variables))

        start("munged", "--foreground", "--force", *munge)
        wait_for("munged", (folder / "munge.socket").exists)
        start("slurmctld", "-D")
        for node in ("first", "second"):
            start("slurmd", "-D", "-N", node, name=f"slurmd-{node}")
        asked = ("sinfo", "--noheader", "--format", "%D %t")
        try:
            wait_for("Slurm with two idle nodes", lambda: output_of(*asked, **variables) == "2 idle")
        except Failed as error:
            logs = "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in folder.glob("*.log"))
            raise Failed(f"{error}\n{logs}") from None
        yield variables


def try_slurm(folder: Path, check: Checks) -> None:
    with slurm_of_two_nodes(folder / "slurm") as variables:
        print(f"     {output_of('sinfo', '--version', **variables)}")
        for name in ("first", "second"):
            with contextlib.suppress(socket.gaierror):
                raise Failed(f"the node's name {name} resolves to {socket.gethostbyname(name)} here")
        magi = Magi(folder / ODD / "home", **variables)
        try_session(magi, check, "slurm", "--engine", "slurm", "--gpus-per-node", "0")
        wait_for("an empty queue", lambda: not output_of("squeue", "--noheader", **variables))
        check(True, "slurm: down leaves no job in the queue")
        check(not list(folder.rglob("pwned")), "slurm: nothing of a folder's name is carried out")
        for words, sentence in (
            (("--partition", "nowhere", "--gpus-per-node", "0"), "invalid partition specified: nowhere"),
            ((), "Invalid generic resource (gres) specification"),
        ):
            done = magi("run", SCRIPT, "--engine", "slurm", *words, "--", "hello")
            told = done.returncode == 2 and done.stderr.splitlines()[-1].startswith("magi run: submit: `sbatch")
            check(told and sentence in done.stderr, f"slurm: a job that is refused says {sentence!r}", done.stderr)


# ---- sshd -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sshd_at_loopback(folder: Path) -> Iterator[Path]:
    """A spec for two hosts that are both 127.0.0.1, with a key of its own."""
    folder.mkdir(mode=0o700)
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    (port,) = free_ports(1)
    settings = {"ListenAddress": f"127.0.0.1:{port}", "HostKey": folder / "host_key", "UsePAM": "no"}
    settings |= {"AuthorizedKeysFile": folder / "authorized_keys", "PidFile": folder / "pid", "StrictModes": "no"}
    settings |= {"PasswordAuthentication": "no", "PermitRootLogin": "prohibit-password"}
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where Debian's wants to be
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    lines = [
        'engine = "ssh"', "[ssh]", 'hosts = ["127.0.0.1", "127.0.0.1"]', f"port = {port}",
        f"identity_file = {json.dumps(str(folder / 'key'))}", f"options = {json.dumps(options)}",
    ]  # fmt: skip
    (folder / "spec.toml").write_text("\n".join(lines) + "\n")
    with daemon(shutil.which("sshd"), "-D", "-e", "-f", str(folder / "config"), log=folder / "sshd.log"):

        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                return connection.recv(4) == b"SSH-"
            return False

        wait_for("sshd", answers)
        yield folder / "spec.toml"


def try_ssh(folder: Path, check: Checks) -> None:
    with sshd_at_loopback(folder / "ssh") as spec:
        magi = Magi(folder / "ssh home")
        try_session(magi, check, "ssh", "--spec", str(spec))
        done = magi("run", SCRIPT, "--spec", str(spec), "--python", "/no/such/python", "--", "hello")
        told = done.returncode == 2 and "127.0.0.1: reach it and find the package" in done.stderr
        check(told and "/no/such/python" in done.stderr, "ssh: a Python that is not there is named", done.stderr)


# ---- docker ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def dockerd_with_an_image(folder: Path) -> Iterator[dict[str, str]]:
    """The variable by which docker finds its daemon, which has the image ``empty``."""
    folder.mkdir()
    variables = {"DOCKER_HOST": f"unix://{folder}/docker.sock"}
    own = [f"--{name}={folder}/{name}" for name in ("data-root", "exec-root", "pidfile")]
    argv = [shutil.which("dockerd") or "", *own, f"--host={variables['DOCKER_HOST']}", "--storage-driver=vfs"]
    if not argv[0]:
        raise NotHere("dockerd is not installed")
    with daemon(*argv, log=folder / "dockerd.log") as process:

        def is_decided() -> bool:
            return process.poll() is not None or bool(output_of("docker", "info", "--format", "{{.ID}}", **variables))

        wait_for("dockerd", is_decided)
        if process.poll() is not None:
            last = (folder / "dockerd.log").read_text(errors="replace").strip().rpartition("\n")[2]
            raise NotHere(f"dockerd does not start here: {last}")
        with tarfile.open(folder / "empty.tar", "w"):
            pass
        output_of("docker", "import", str(folder / "empty.tar"), "empty", **variables)
        yield variables


def try_docker(folder: Path, check: Checks) -> None:
    # The shortest name: a socket's path has at most 107 characters, and that of containerd is longer than ours.
    with dockerd_with_an_image(folder / "d") as variables:
        print(f"     docker {output_of('docker', 'version', '--format', '{{.Server.Version}}', **variables)}")
        magi = Magi(folder / "a, home", **variables)
        paths = {"/usr", "/bin", "/lib", "/lib64", sys.prefix, sys.base_prefix, str(ROOT)}
        mounts = [word for path in sorted(paths) if Path(path).exists() for word in ("--mount", f"{path}:{path}:ro")]
        mounts += ["--mount", f"{magi.home}:{magi.home}"]
        try_session(magi, check, "docker", "--engine", "docker", "--image", "empty", "--gpus", "none", *mounts)
        left = output_of("docker", "ps", "--all", "--quiet", **variables)
        left += output_of("docker", "network", "ls", "--quiet", "--filter", "name=magi", **variables)
        check(left == "", "docker: down leaves no container and no network", left)
        done = magi("run", SCRIPT, "--engine", "docker", "--image", "no/such:image", "--gpus", "none", "--", "hello")
        check(
            done.returncode == 2 and "no/such" in done.stderr,
            "docker: an image that is not there is named",
            done.stderr,
        )


ENGINES = {"slurm": try_slurm, "ssh": try_ssh, "docker": try_docker}


def main() -> int:
    parser = argparse.ArgumentParser(prog="ci/clusters", description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"{', '.join(ENGINES)}; all without it")
    parser.add_argument("--keep", action="store_true", help="leave the folder of the daemons")
    options = parser.parse_args()
    if unknown := set(options.engines) - set(ENGINES):
        parser.error(f"{', '.join(sorted(unknown))} is no engine; there are {', '.join(ENGINES)}")
    os.environ["PATH"] += os.pathsep + "/usr/sbin"
    check, folder = Checks(), Path(tempfile.mkdtemp(prefix="magi-clusters-"))
    folder.chmod(0o755)
    try:
        for name in options.engines or ENGINES:
            try:
                ENGINES[name](folder, check)
            except NotHere as reason:
                print(f"     {name} was not tried: {reason}")
            except (Failed, OSError, subprocess.SubprocessError) as error:
                check(False, name, error)
    finally:
        if options.keep:
            print(f"     the folder: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{check.num_passed} passed, {check.num_failed} failed")
    return 1 if check.num_failed or not check.num_passed else 0


if __name__ == "__main__":
    sys.exit(main())
