# SPDX-License-Identifier: Apache-2.0
"""What the ranks get is what was given, whatever is in it: folders, arguments and variables through every shell."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import random
import subprocess

import pytest
from launch_cases import CASES, TARGET, spec_of

from magi_attention.errors import LaunchError
from magi_attention.tools.launch.engines import docker, engine_of, k8s, slurm, ssh
from magi_attention.tools.launch.spec import Container, K8s, LaunchSpec, Slurm, Ssh, check_spec

ODD = "a Z09'\"\\$(){}[]<>|&;*?!#~`%@^=+,:\t-/\n$$@HEAD@äß"
RECORDER = '#!/bin/sh\nprintf \'%s\\0\' "$@" > "$RECORD"; env -0 > "$RECORD.env"\n'


def odd_texts(count: int, without: str = "") -> list[str]:
    """Random texts of everything that a shell reads as something else; the seed is printed."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    letters = [c for c in ODD if c not in without]
    pieces = [*letters, "$(touch pwned)", "@HEAD@", "$$", "$(", "%j", "hetjob", "${HOME}", " -- "]
    return ["x" + "".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(count)]


def record(folder, argv, stdin=b"", **environment) -> tuple[list[str], dict[str, str]]:
    """Words and variables that reached a program in place of ssh, srun or docker."""
    path = folder / "record"
    variables = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(path), **environment}
    subprocess.run(argv, cwd=folder, env=variables, input=stdin, check=True, capture_output=True)
    found = (folder / "record.env").read_bytes().decode().split("\0")
    return path.read_bytes().decode().split("\0")[:-1], dict(line.split("=", 1) for line in found if "=" in line)


def program(folder, name: str, text: str = RECORDER) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def behind_dashes(words: list[str]) -> list[str]:
    return words[words.index("--", words.index("magi_attention.tools.launch.node")) + 1 :]


@pytest.mark.parametrize("text", ["my home", "it's", "a$(touch pwned)b", "50%", 'a"b', "x\\y", "#1", ""])
def test_a_job_of_slurm(text, tmp_path):
    """The script, run by bash: its folder, arguments and variables arrive as given, and nothing else is carried out."""
    text = text or odd_texts(1, without="/\n")[0]
    folder = tmp_path / text
    folder.mkdir()
    program(tmp_path, "srun")
    program(tmp_path, "scontrol", "#!/bin/sh\n[ $1 = show ] && echo n1 || echo NodeName=n1 NodeAddr=10.1.2.3 Port=1\n")
    command, values = ("train.py", "@HEAD@", text, *odd_texts(4)), odd_texts(2)
    variables = {"PLAIN": values[0], "API_KEY": values[1], "EMPTY": ""}
    spec = check_spec(LaunchSpec(engine="slurm", nodes=2, command=command, workdir=text, environment=variables))
    plan = slurm.run(spec, dataclasses.replace(TARGET, folder=str(folder)))
    for file in plan.files:
        with open(file.path, "w", newline="") as out:
            out.write(file.text)
    words, environment = record(tmp_path, ["bash", plan.files[0].path], SLURM_JOB_NODELIST="n[1-2]")
    assert behind_dashes(words) == list(command) and f"--chdir={text}" in words
    assert words[words.index("--log-dir") + 1] == str(folder)
    assert {name: environment[name] for name in variables} == variables
    assert (folder / "exit_code").read_text() == "0\n" and not list(tmp_path.rglob("pwned"))
    assert words[words.index("--master-addr-from") + 1] == "MAGI_RUN_HEAD"
    assert environment["MAGI_RUN_HEAD"] == "10.1.2.3" and len(environment["MAGI_RUN_TOKEN"]) == 32


@pytest.mark.parametrize(
    ("answer", "head"),
    [
        ("echo NodeName=n1 NodeAddr=n1.cluster NodeHostName=n1", "n1.cluster"),
        ("echo NodeName=n1 Arch=x86_64", "n1"),
        ("exit 1", "n1"),
    ],
)
def test_the_address_that_slurm_knows(answer, head, tmp_path):
    """A node's name in Slurm need not resolve; where Slurm tells no address the name has to do."""
    program(tmp_path, "srun")
    program(tmp_path, "scontrol", f'#!/bin/sh\nif [ "$1" = show ]; then echo n1; echo n2; else {answer}; fi\n')
    text = slurm.script(spec_of("slurm"), dataclasses.replace(TARGET, folder=str(tmp_path)))
    (tmp_path / "job.sbatch").write_text(text)
    assert record(tmp_path, ["bash", "job.sbatch"], SLURM_JOB_NODELIST="n[1-2]")[1]["MAGI_RUN_HEAD"] == head


@pytest.mark.parametrize(
    ("folder", "word"),
    [
        ("/a/b", "--output=/a/b/output.log"),
        ("/a b", '"--output=/a b/output.log"'),
        ("/50%j", "--output=/50%%j/output.log"),  # the daemon would fill in the job's number
        ("/it's #1", '"--output=/it\'s #1/output.log"'),
        ('/a"b', '"--output=/a\\"b/output.log"'),
        # with a backslash the daemon fills in nothing and takes one of two backslashes, and sbatch one of two before it
        ("/a\\b%j", '"--output=/a\\\\\\\\b%j/output.log"'),
    ],
)
def test_words_behind_sbatch(folder, word):
    """As Slurm 22.05 was seen to read them; ci/clusters tries it anew."""
    lines = slurm.script(spec_of("slurm"), dataclasses.replace(TARGET, folder=folder)).splitlines()
    assert f"#SBATCH {word}" in lines


def test_two_jobs_have_two_tokens(tmp_path):
    program(tmp_path, "srun")
    text = slurm.script(spec_of("slurm-bare"), dataclasses.replace(TARGET, folder=str(tmp_path)))
    (tmp_path / "job.sbatch").write_text(text)
    tokens = {record(tmp_path, ["bash", "job.sbatch"])[1]["MAGI_RUN_TOKEN"] for _ in range(2)}
    assert len(tokens) == 2 and not [token for token in tokens if token in text]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": "a\ntouch evil"}, "slurm.partition"),
        ({"account": "a\rb"}, "slurm.account"),
        ({"time": "1\n2"}, "slurm.time"),
        ({"time": "soon"}, "slurm.time is 'soon'; write it as"),
        ({"directives": ("--qos=a\ntouch evil",)}, "slurm.directives"),
        ({"directives": ("touch evil",)}, "write an option of sbatch"),
        ({"gpus_per_node": -1}, "slurm.gpus_per_node is -1"),
    ],
)
def test_lines_of_a_script_stay_lines(changes, words):
    with pytest.raises(LaunchError, match=words):
        check_spec(LaunchSpec(engine="slurm", command=("a.py",), slurm=Slurm(**changes)))


def test_no_line_break_or_nul_anywhere_else():
    for spec in (
        LaunchSpec(workdir="a\nb"),
        LaunchSpec(python="a\nb"),
        LaunchSpec(container=Container(image="a\nb")),
        LaunchSpec(container=Container(mounts=("/a\n:/b",))),
        LaunchSpec(ssh=Ssh(hosts=("a\nb",))),
        LaunchSpec(k8s=K8s(namespace="a\nb")),
        LaunchSpec(command=("a\0b",)),
        LaunchSpec(environment={"A": "b\0"}),
    ):
        with pytest.raises(LaunchError, match="must be one line|NUL character"):
            check_spec(spec)
    check_spec(LaunchSpec(command=("a.py", "b\nc"), environment={"A": "b\nc"}))


def test_mounts_that_slurm_cannot_express():
    spec = dataclasses.replace(spec_of("slurm"), command=("a.py",))
    with pytest.raises(LaunchError, match="has a comma or a colon"):
        slurm.run(spec, dataclasses.replace(TARGET, folder="/a,b"))
    with pytest.raises(LaunchError, match="reads the comma"):
        check_spec(dataclasses.replace(spec, container=Container(image="i", mounts=("/a,b:/c",))))


@pytest.mark.parametrize("has_image", [False, True])
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_host_of_ssh(has_image, shell, tmp_path):
    """sshd gives the line to the shell of the account, and the variables come by standard input."""
    folder = tmp_path / "it's $(touch pwned) a folder"
    folder.mkdir()
    values, command = odd_texts(3), ("a.py", *odd_texts(5))
    variables = {"PLAIN": values[0], "API_KEY": values[1], "MORE_KEYS": values[2] * 2000}
    container = Container(image="i") if has_image else Container()
    program(tmp_path, "docker")
    program(tmp_path, "python3")
    spec = LaunchSpec(
        engine="ssh", command=command, workdir=str(folder), environment=variables, ssh=Ssh(("h",)), container=container
    )
    target = dataclasses.replace(TARGET, token="t0k3n")
    (step,) = ssh.run(check_spec(spec), target).steps
    words, environment = record(tmp_path, [shell, "-c", step.argv[-1]], step.stdin)
    assert behind_dashes(words) == list(command) and not list(tmp_path.rglob("pwned"))
    for name, value in {**variables, "MAGI_RUN_TOKEN": "t0k3n"}.items():
        if has_image and name == "PLAIN":
            assert f"{name}={value}" in words
            continue
        assert environment[name] == value
        assert name in words if has_image else environment["PWD"] == str(folder)


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes documents it: $(NAME) is the value of a variable that there is, $$ is $, all else stays."""
    out, at = "", 0
    while at < len(text):
        if text.startswith("$$", at):
            out, at = out + "$", at + 2
        elif text.startswith("$(", at) and (end := text.find(")", at)) > 0:
            name = text[at + 2 : end]
            out, at = out + variables.get(name, f"$({name})"), end + 1
        else:
            out, at = out + text[at], at + 1
    return out


@pytest.mark.parametrize("template", ["jobset", "lws", "pytorchjob"])
def test_pods_of_kubernetes(template):
    command, values = ("a.py", "$$", "$(A)", "$$(A)", "$", "$(", *odd_texts(40)), odd_texts(2)
    variables = {"A": "wrong", "PLAIN": values[0], "DOLLARS": "$$(A)$$", "API_KEY": values[1]}
    spec = check_spec(
        dataclasses.replace(spec_of(template), command=command, environment=variables, k8s=K8s(template=template))
    )
    plan = k8s.run(spec, dataclasses.replace(TARGET, token="t0k3n"))
    found = json.loads(plan.files[0].text)
    held = json.loads(plan.files[1].text)
    assert held["stringData"] == {"API_KEY": values[1], "MAGI_RUN_TOKEN": "t0k3n"}  # these are not expanded
    containers = list(containers_of(found))
    assert containers
    for container in containers:
        words = [expanded(word, variables) for word in container["command"]]
        assert behind_dashes(words) == list(command)
        got = {e["name"]: expanded(e["value"], variables) for e in container["env"] if "value" in e}
        assert got == {**{n: variables[n] for n in ("A", "PLAIN", "DOLLARS")}, "MAGI_RUN_ID": TARGET.run_id}
        for entry in container["env"]:
            if "value" not in entry:
                of = entry["valueFrom"]["secretKeyRef"]
                assert of["name"] == held["metadata"]["name"] and of["key"] == entry["name"] in held["stringData"]


def containers_of(value):
    if isinstance(value, dict):
        yield from value.get("containers", [])
        for inner in value.values():
            yield from containers_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from containers_of(inner)


@pytest.mark.parametrize("folder", ["/a:b", "/a,b", '/a"b,c', "/a b"])
def test_a_mount_of_docker(folder):
    argv = docker.run(spec_of("docker-cpu"), dataclasses.replace(TARGET, folder=folder)).steps[0].argv
    (fields,) = csv.reader([argv[argv.index("--mount") + 1]])
    assert fields == ["type=bind", f"source={folder}", f"target={docker.LOGS}"]


@pytest.mark.parametrize("name", CASES)
def test_secrets_are_in_no_argv_and_no_text_that_is_shown(name):
    token, secret = "t0k3nt0k3n", "s3cr3ts3cr3t"
    environment = {"HF_TOKEN": secret, "HTTPS_PROXY": f"http://me:{secret}@proxy:1", "NCCL_DEBUG": "INFO"}
    spec = dataclasses.replace(spec_of(name), environment=environment)
    engine, target = engine_of(spec.engine), dataclasses.replace(TARGET, token=token)
    plans = [engine.up(spec, "s"), engine.run(spec, target), engine.down(spec, "s", [target])]
    for plan in plans:
        for step in plan.steps:
            assert not [word for word in step.argv if secret in word or token in word]
        for file in plan.files:
            assert file.is_secret or (secret not in file.text and token not in file.text)
        assert secret not in plan.text() and token not in plan.text()
    handed = [
        *(file.text for file in plans[1].files if file.is_secret),
        *(step.stdin.decode() + json.dumps(dict(step.environment)) for step in plans[1].steps),
    ]
    assert secret in "".join(handed), "the ranks do get it"
