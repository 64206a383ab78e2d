# SPDX-License-Identifier: Apache-2.0
"""Specs: what a file may say, and the sentence for each mistake."""

from __future__ import annotations

import dataclasses
import json

import pytest
from launching import ROOT

from magi_attention.errors import LaunchError
from magi_attention.tools.launch.spec import LaunchSpec, check_name, check_spec, read_spec
from magi_attention.tools.launch.toml import build

GOOD = """
engine = "ssh"
nodes = 2
ranks_per_node = 8
command = ["train.py", "--steps", "10"]
[environment]
NCCL_DEBUG = "INFO"
[rendezvous]
port = 29400
[container]
image = "me/magi:1"
mounts = ["/data:/data:ro"]
rdma = true
[ssh]
hosts_file = "hosts.txt"
"""


def spec_file(tmp_path, text):
    path = tmp_path / "spec.toml"
    path.write_text(text)
    return path


def test_a_file_with_everything(tmp_path):
    (tmp_path / "hosts.txt").write_text("# the rack\nhost1  # first\n\nme@host2\n")
    spec = check_spec(read_spec(spec_file(tmp_path, GOOD)))
    assert spec.ssh.hosts == ("host1", "me@host2") and spec.ssh.hosts_file == ""
    assert spec.command == ("train.py", "--steps", "10") and spec.world_size == 16 and spec.port == 29400
    assert spec.container.rdma and spec.environment == {"NCCL_DEBUG": "INFO"} and spec.rendezvous.timeout_s == 120


def test_a_spec_survives_json():
    spec = LaunchSpec(nodes=3, command=("a", "b"), environment={"A": "1"})
    assert build(LaunchSpec, json.loads(json.dumps(dataclasses.asdict(spec))), "json") == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engin = 'local'", "'engin' is unknown; did you mean engine"),
        ("zzz = 1", "'zzz' is unknown; there are engine"),
        ("nodes = '2'", "nodes is '2'; give a whole number"),
        ("nodes = true", "give a whole number"),
        ("container = 'x'", "write it as a table"),
        ("[container]\nrdma = 1", "give true or false"),
        ("[container]\nimage = 1", "give a text in quotes"),
        ("command = 'a b'", "give a list of texts"),
        ("command = [1]", "give a list of texts"),
        ("[environment]\nA = 1", "numbers in quotes"),
        ("nodes = ", "is no TOML"),
        ("[ssh]\nhosts_file = 'none.txt'", "The hosts file cannot be read"),
        ("[ssh]\nhosts_file = 'a'\nhosts = ['b']", "keep one of them"),
    ],
)
def test_mistakes_in_a_file(tmp_path, text, words):
    with pytest.raises(LaunchError, match=words):
        read_spec(spec_file(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(LaunchError, match="cannot be read"):
        read_spec(tmp_path / "none.toml")
    (tmp_path / "hosts.txt").write_text("host1 slots=8\n")
    with pytest.raises(LaunchError, match="one host a line"):
        read_spec(spec_file(tmp_path, "[ssh]\nhosts_file = 'hosts.txt'"))


SSH = {"engine": "ssh", "nodes": 2, "ssh": {"hosts": ["a", "b"]}}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"engine": "mpi"}, "use one of local, docker"),
        ({"nodes": 0}, "nodes is 0; give at least 1"),
        ({"ranks_per_node": -1}, "ranks_per_node is -1"),
        ({"max_restarts": -1}, "give 0 for none"),
        ({"grace_s": 0}, "give at least 1"),
        ({"rendezvous": {"port": 80}}, "from 1024 to 65535"),
        ({"rendezvous": {"address": "a b"}}, "one host name or IP"),
        ({"environment": {"A-B": ""}}, "no name of a variable"),
        ({"environment": {"MAGI_RUN_ID": "x"}}, "which the launcher sets itself"),
        ({"container": {"mounts": ["data"]}, "engine": "slurm"}, "write /host/path"),
        ({"container": {"image": "x"}}, "use engine docker"),
        ({"engine": "docker"}, "name the image"),
        ({"engine": "k8s"}, "name the image"),
        ({"engine": "k8s", "container": {"image": "x"}, "k8s": {"template": "pod"}}, "one of jobset"),
        ({"engine": "ssh", "nodes": 2, "ssh": {"hosts": ["a"]}}, "1 hosts for 2 nodes"),
        ({"engine": "ssh", "ssh": {"hosts": ["-oProxyCommand=x"]}}, "read as an option"),
        ({**SSH, "rendezvous": {"address": "localhost"}}, "another machine on every host"),
        ({"engine": "ssh", "nodes": 2, "ssh": {"hosts": ["127.0.0.1", "b"]}}, "another machine on every host"),
    ],
)
def test_specs_that_make_no_sense(table, words):
    with pytest.raises(LaunchError, match=words):
        check_spec(build(LaunchSpec, table, "test"))


def test_one_host_twice_may_meet_at_loopback():
    check_spec(build(LaunchSpec, {"engine": "ssh", "nodes": 2, "ssh": {"hosts": ["127.0.0.1"] * 2}}, "test"))


def test_every_field_is_documented_by_its_use():
    """A spec of all defaults is a launch of one rank on this machine."""
    spec = check_spec(LaunchSpec())
    assert (spec.engine, spec.world_size, spec.preflight, spec.command) == ("local", 1, True, ())


def test_names():
    assert check_name("a") == "a" and check_name("my-run-3") == "my-run-3"
    for name in ("", "A", "a_b", "-a", "a-", "a/b", "..", "x" * 33):
        with pytest.raises(LaunchError, match="no name for a session"):
            check_name(name)


def test_the_example_names_real_fields():
    spec = read_spec(ROOT / "examples" / "launch.toml")
    for engine in ("docker", "slurm", "k8s"):
        check_spec(dataclasses.replace(spec, engine=engine))
    assert spec.slurm.directives == ("--qos=normal",) and spec.container.rdma and spec.rendezvous.timeout_s == 300
