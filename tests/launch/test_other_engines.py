# SPDX-License-Identifier: Apache-2.0
"""Engines ssh (over loopback, for real), slurm and docker (with stand-ins for the programs of the cluster)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, SCRIPT, stand_in, wait_for_end

from magi_attention.testing.waiting import wait_until
from magi_attention.tools.launch.service import free_port

# ---- ssh ------------------------------------------------------------------------------------------------


def sshd_program() -> str:
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if not found or not shutil.which("ssh") or not shutil.which("ssh-keygen"):
        pytest.skip("needs sshd, ssh and ssh-keygen (openssh-server, openssh-client)")
    return found


@pytest.fixture
def loopback(tmp_path):
    """The spec file of two hosts that are both 127.0.0.1, served by an sshd of our own with a throwaway key."""
    sshd = sshd_program()
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized_keys").write_bytes((folder / "key.pub").read_bytes())
    port = free_port()
    settings = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "authorized_keys",
        "PidFile": folder / "pid",
        "UsePAM": "no",
        "StrictModes": "no",
        "PasswordAuthentication": "no",
    }
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd of Debian wants to be
    log = (folder / "log").open("wb")
    server = subprocess.Popen([sshd, "-D", "-e", "-f", str(folder / "config")], stderr=log)
    (folder / "hosts.txt").write_text("127.0.0.1\n127.0.0.1  # the same machine\n")
    spec = f"""
engine = "ssh"
nodes = 2
ranks_per_node = 2
python = {json.dumps(sys.executable)}
workdir = {json.dumps(str(ROOT))}
[rendezvous]
port = {free_port()}
[ssh]
hosts_file = "hosts.txt"
port = {port}
identity_file = {json.dumps(str(folder / "key"))}
connect_timeout_s = 100
options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
"""
    (folder / "spec.toml").write_text(spec)
    try:
        wait_until(lambda: server.poll() is not None or _answers(port), "sshd answers")
        if server.poll() is not None:
            pytest.skip(f"sshd does not start here: {(folder / 'log').read_text().strip()}")
        yield folder / "spec.toml"
    finally:
        server.terminate()
        server.wait()
        log.close()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def test_ssh_over_loopback(magi, loopback):
    name = f"ssh-{os.getpid()}"
    assert magi("up", "--name", name, "--spec", str(loopback)).returncode == 0
    done = magi("run", "--session", name, SCRIPT, "--", "hello", "a b", "$HOME")
    assert done.returncode == 0, done.stderr + done.stdout
    for rank in range(4):
        assert f"[rank {rank}]: rank {rank} of 4 says hello ['a b', '$HOME']" in done.stdout
    launcher = magi.start("run", "--session", name, SCRIPT, "--", "wait")
    magi.wait_for(name, "says wait", 4, run=2)
    launcher.kill()
    launcher.wait()
    wait_for_end(name)
    assert magi.status(name)["runs"][1]["state"] == "lost"
    assert magi("down", name).returncode == 0


def test_ssh_hosts_that_do_not_answer(magi, loopback):
    hosts = loopback.parent / "more.txt"
    hosts.write_text("127.0.0.1\n127.0.0.2\n")  # the server listens at the first only
    done = magi("run", SCRIPT, "--spec", str(loopback), "--hosts", str(hosts), "--address", "127.0.0.1", "--", "hello")
    assert done.returncode == 2 and "another machine on every host" in done.stderr
    host = socket.gethostname()
    done = magi("run", SCRIPT, "--spec", str(loopback), "--hosts", str(hosts), "--address", host, "--", "hello")
    assert done.returncode == 2 and "127.0.0.2: reach it and find the package" in done.stderr
    assert "Connection refused" in done.stderr
    done = magi("up", "--spec", str(loopback), "--python", "/no/such/python")
    assert done.returncode == 2 and "/no/such/python" in done.stderr


# ---- slurm ----------------------------------------------------------------------------------------------

SBATCH = """
import os, subprocess, sys
if sys.argv[1] == "--version":
    print("slurm 24.05")
else:
    log = [l for l in open(sys.argv[2]) if "--output=" in l][0].split("=", 1)[1].strip()
    environment = {**os.environ, "SLURM_JOB_NODELIST": "node[0-1]"}
    subprocess.Popen(["bash", sys.argv[2]], env=environment, stdout=open(log, "wb"), stderr=subprocess.STDOUT)
    print("4711;cluster")
"""
SCONTROL = """
import sys
print("node0\\nnode1" if sys.argv[1] == "show" else "NodeName=node0 NodeAddr=127.0.0.1 NodeHostName=node0")
"""
SRUN = """
import os, subprocess, sys
words = sys.argv[1:]
command = words[[i for i, w in enumerate(words) if not w.startswith("--")][0]:]
nodes = int([w for w in words if w.startswith("--nodes=")][0].split("=")[1])
started = [subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(n)}) for n in range(nodes)]
sys.exit(max(p.wait() for p in started))
"""


@pytest.fixture
def slurm(magi, tmp_path):
    """Slurm of two hosts, both this machine: the rendered script is run as it is."""
    programs = tmp_path / "bin"
    stand_in(programs, "sbatch", SBATCH)
    stand_in(programs, "srun", SRUN)
    stand_in(programs, "scontrol", SCONTROL)
    stand_in(programs, "squeue", "")
    stand_in(programs, "scancel", "import sys; open(__file__ + '.log', 'a').write(' '.join(sys.argv[1:]) + '\\n')")
    magi.environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    return magi


def test_slurm_job_runs_as_rendered(slurm, tmp_path):
    words = ("--engine", "slurm", "--nodes", "2", "--ranks-per-node", "2", "--port", str(free_port()))
    words += ("--python", sys.executable, "--env", "GREETING=good day", "--env", "API_KEY=it's s3cr3t")
    done = slurm("run", SCRIPT, *words, "--name", "job", "--", "hello", "a b", "API_KEY")
    assert done.returncode == 0 and "4711" in done.stdout, done.stderr
    wait_until(lambda: (slurm.folder("job") / "exit_code").exists(), "the job has ended")
    assert "[rank 3]: rank 3 of 4 says hello ['a b', 'API_KEY'] good day" in slurm("logs", "job", "--rank", "3").stdout
    assert "[rank 0]: API_KEY is it's s3cr3t" in slurm.output("job")
    row = slurm.status("job")["runs"][0]
    assert (row["state"], row["queue"]) == ("done", "") and "001 done" in slurm("status").stdout
    assert "queue" not in slurm("status").stdout and "gone" not in slurm("status").stdout
    assert slurm("down", "job").returncode == 0
    assert "--name magi-job-001-" in (tmp_path / "bin" / "scancel.log").read_text()


def test_a_slurm_job_that_vanishes(slurm, tmp_path):
    stand_in(tmp_path / "bin", "sbatch", "print('4712')")
    assert slurm("run", SCRIPT, "--engine", "slurm", "--name", "lost", "--", "hello").returncode == 0
    assert slurm.status("lost")["runs"][0]["queue"] == "not in the queue"
    slurm.environment["COLUMNS"] = "200"
    assert "001 submitted, not in the queue" in slurm("status").stdout
    path = slurm.folder("lost") / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "started": 1.0}))
    row = slurm.status("lost")["runs"][0]
    assert row["state"] == "failed" and "left the queue without a result" in row["reason"]


def test_slurm_is_not_here(magi):
    magi.environment["PATH"] = "/nowhere"
    done = magi("up", "--engine", "slurm")
    assert done.returncode == 2 and "sbatch cannot be started" in done.stderr


# ---- docker ---------------------------------------------------------------------------------------------

DOCKER = """
import os, sys
words = sys.argv[1:]
open(__file__ + ".log", "a").write(" ".join(words) + "\\n")
if words[:2] == ["network", "rm"] or words[0] == "rm":
    sys.exit("Error response from daemon: No such container or network not found")
if words[0] == "run" and "me/wrong:1" in words:
    sys.exit("Unable to find image 'me/wrong:1' locally. pull access denied for me/wrong")
if "doctor" in words and "me/sick:1" in words:
    print("ERROR   shm    /dev/shm has 0.06 GiB")
    sys.exit(2)
if words[0] == "image":
    print('sha256:1234 ["me/magi@sha256:5678"]')
if words[0] == "run" and "--interactive" in words:
    command = words[words.index("me/magi:1") + 1:]
    command[command.index("--log-dir") + 1] = words[words.index("--mount") + 1].split(",")[1].split("=", 1)[1]
    command[command.index("--master-addr") + 1] = "127.0.0.1"
    given = [words[i + 1] for i, w in enumerate(words) if w == "--env"]
    environment = dict(w.split("=", 1) if "=" in w else (w, os.environ[w]) for w in given)
    kept = {n: v for n, v in os.environ.items() if n in ("PATH", "PYTHONPATH", "MAGI_HOME", "HOME")}
    os.execvpe(command[0], command, {**kept, **environment})
"""


@pytest.fixture
def docker(magi, tmp_path):
    """A docker that runs the command of a container without the container."""
    stand_in(tmp_path / "bin", "docker", DOCKER)
    magi.environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    magi.docker_log = tmp_path / "bin" / "docker.log"
    return magi


def test_docker_runs_its_argv(docker):
    name = f"dock-{os.getpid()}"
    words = ("--engine", "docker", "--image", "me/magi:1", "--python", sys.executable, "--nodes", "2")
    words += ("--port", str(free_port()), "--name", name, "--gpus", "none", "--env", "GREETING=good day")
    done = docker("run", SCRIPT, *words, "--env", "API_KEY=s3cr3ts3cr3t", "--", "hello", "API_KEY")
    assert done.returncode == 0 and "[rank 1]: rank 1 of 2 says hello" in done.stdout, done.stderr
    assert "good day" in done.stdout and "API_KEY is s3cr3ts3cr3t" in done.stdout
    facts = json.loads((docker.folder(name) / "run.json").read_text())
    assert facts["image"] == {"name": "me/magi:1", "digest": 'sha256:1234 ["me/magi@sha256:5678"]'}
    log = docker.docker_log.read_text()
    assert "s3cr3ts3cr3t" not in log + (docker.folder(name) / "run.json").read_text() and "--env API_KEY" in log
    assert f"network create --label com.magi.session={name} magi-{name}" in log
    assert f"network rm magi-{name}" in log, "a session of its own is taken down after the run"


def test_a_wrong_image(docker):
    done = docker("run", SCRIPT, "--engine", "docker", "--image", "me/wrong:1", "--name", "wrong", "--", "hello")
    assert done.returncode == 2 and "pull access denied for me/wrong" in done.stderr
    assert docker.status("wrong")["state"] == "down" and docker("down", "wrong").returncode == 0


def test_the_doctor_looks_before_a_session_is_made(docker):
    words = ("up", "--engine", "docker", "--image", "me/sick:1", "--name", "sick")
    done = docker(*words)
    assert done.returncode == 2 and "/dev/shm has 0.06 GiB" in done.stderr
    assert docker(*words, "--no-preflight").returncode == 0 and docker.status("sick")["state"] == "up"


def test_the_doctor_looks_at_this_machine(magi):
    magi.environment["MAGI_ATTENTION_PRECISION"] = "bf8"
    done = magi("up", "--name", "odd")
    assert (
        done.returncode == 2 and "'bf8' is unknown" in done.stderr and "unset MAGI_ATTENTION_PRECISION" in done.stderr
    )
