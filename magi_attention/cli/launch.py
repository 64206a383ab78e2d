# SPDX-License-Identifier: Apache-2.0
"""`magi up | run SCRIPT | status | logs | down | render`: the launcher's verbs on the command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import sys
import time
from pathlib import Path

from magi_attention.cli.common import UsageError, show_table
from magi_attention.errors import LaunchError
from magi_attention.tools.launch import logs, service, session
from magi_attention.tools.launch.engines import engine_of
from magi_attention.tools.launch.plan import LaunchPlan, RenderedFile, Target
from magi_attention.tools.launch.spec import ENGINES, K8S_TEMPLATES, LaunchSpec, check_spec, read_spec, with_hosts

RENDERED = ("local", "docker", "ssh", "slurm", *K8S_TEMPLATES)
# option -> field of the spec; in a dotted one the table comes first
_FIELDS = {
    "engine": "engine",
    "nodes": "nodes",
    "ranks_per_node": "ranks_per_node",
    "python": "python",
    "workdir": "workdir",
    "max_restarts": "max_restarts",
    "grace": "grace_s",
    "image": "container.image",
    "gpus": "container.gpus",
    "port": "rendezvous.port",
    "address": "rendezvous.address",
    "timeout": "rendezvous.timeout_s",
    "hosts": "ssh.hosts_file",
    "template": "k8s.template",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "namespace": "k8s.namespace",
    "queue": "k8s.queue",
}
_OF_QUEUES = ("time", "gpus_per_node")  # both slurm and k8s have these fields


def add_spec_options(parser: argparse.ArgumentParser) -> None:
    """Where and how: a spec file, and options that win over it."""
    group = parser.add_argument_group("where to launch")
    group.add_argument("--spec", type=Path, help="TOML file; the options below win over it")
    group.add_argument("--engine", choices=ENGINES)
    group.add_argument("--nodes", type=int)
    group.add_argument("--ranks-per-node", type=int)
    group.add_argument("--image", help="container image, best with its digest")
    group.add_argument("--gpus", help="GPUs of a container: all, none, or a list such as 0,1")
    group.add_argument("--mount", action="append", default=[], metavar="SRC:DST[:ro]")
    group.add_argument("--hosts", help="file with one host a line, for engine ssh")
    group.add_argument("--address", help="where the ranks meet: the address of node 0 as all nodes reach it")
    group.add_argument("--port", type=int, help="port of the rendezvous; a free one for engine local")
    group.add_argument("--timeout", type=int, help="seconds for all nodes to arrive")
    group.add_argument("--no-preflight", action="store_true", help="no doctor on the nodes when the session is made")
    group.add_argument("--grace", type=int, help="seconds that ranks get to stop before they are killed")
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="for the ranks; without a value the one here"
    )
    group.add_argument("--python", help="interpreter on the nodes")
    group.add_argument("--workdir", help="working folder on the nodes")
    group.add_argument("--max-restarts", type=int, help="by torchrun, of all ranks; 0 without it")
    group = parser.add_argument_group("for a queue")
    group.add_argument("--time", help="limit of a run: minutes, hours:minutes:seconds, or days-hours")
    group.add_argument("--gpus-per-node", type=int, help="as many as ranks without it; 0 for none")
    group.add_argument("--partition", help="of Slurm")
    group.add_argument("--account", help="of Slurm, which the run is charged to")
    group.add_argument("--namespace", help="of Kubernetes")
    group.add_argument("--queue", help="of Kueue on Kubernetes")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")


def launch_options_given(args: argparse.Namespace) -> list[str]:
    """Names of the launcher's options that the user gave."""
    given = [name for name in (*_FIELDS, *_OF_QUEUES, "spec", "session") if getattr(args, name, None) is not None]
    given += [name for name in ("mount", "env", "no_preflight") if getattr(args, name, None)]
    return [f"--{name.replace('_', '-')}" for name in given]


def spec_from(args: argparse.Namespace) -> LaunchSpec:
    """The spec of --spec with the options put over it."""
    spec = read_spec(args.spec) if args.spec else LaunchSpec()
    engine = args.engine or spec.engine
    for option, name in {**_FIELDS, **{name: f"{engine}.{name}" for name in _OF_QUEUES}}.items():
        value = getattr(args, option, None)
        if value is None:
            continue
        table, _, key = name.rpartition(".")
        if (table in ("slurm", "k8s") or option in _OF_QUEUES) and (table != engine or engine not in ("slurm", "k8s")):
            belongs = "slurm or k8s" if option in _OF_QUEUES else table
            raise UsageError(
                f"--{option.replace('_', '-')} is for engine {belongs}, and the engine is {engine}; leave it out, or "
                "choose another --engine."
            )
        if option == "hosts":
            spec = dataclasses.replace(spec, ssh=dataclasses.replace(spec.ssh, hosts=()))
        if table:
            inner = dataclasses.replace(getattr(spec, table), **{key: value})
            spec = dataclasses.replace(spec, **{table: inner})
        else:
            spec = dataclasses.replace(spec, **{key: value})
    if args.mount:
        container = dataclasses.replace(spec.container, mounts=(*spec.container.mounts, *args.mount))
        spec = dataclasses.replace(spec, container=container)
    if args.no_preflight:
        spec = dataclasses.replace(spec, preflight=False)
    pairs = dict(spec.environment)
    for word in args.env:
        name, equals, value = word.partition("=")
        if not equals and name not in os.environ:
            raise UsageError(f"--env is {word!r}; write NAME=VALUE, or the name alone of a variable that is set here.")
        pairs[name] = value if equals else os.environ[name]
    return check_spec(with_hosts(dataclasses.replace(spec, environment=pairs), Path.cwd()))


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # why: nobody may be left to read it, and the run goes on
        print(f"magi: {text}", file=sys.stderr, flush=True)


def new_name(args: argparse.Namespace, stem: str) -> str:
    if getattr(args, "name", None):
        return args.name
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in stem.lower()).strip("-") or "run"
    return f"{plain[:15].strip('-')}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(1)}"


# ---- the verbs ------------------------------------------------------------------------------------------


def command_up(args: argparse.Namespace) -> int:
    spec, name = spec_from(args), args.name or "default"
    plan = service.plan_up(spec, name)
    if args.dry_run:
        print(plan.text(), end="")
        return 0
    made = service.up(spec, name, say)
    print(f"Session {name} is up: {spec.engine}, {spec.nodes} nodes x {spec.ranks_per_node} ranks.")
    print(f"  magi run --session {name} SCRIPT -- ARGUMENTS\n  magi down {name}\nIts files: {made.folder}")
    return 0


def launch(args: argparse.Namespace, command: list[str], stem: str) -> int:
    """Runs ``command`` on every rank, in the session of --session or in one that is made for it."""
    if args.session:
        return _launch_in(session.read_session(args.session), args, command)
    spec, name = spec_from(args), new_name(args, stem)
    full = service.with_command(spec, command)  # a wrong request is told before anything is made
    if args.dry_run:
        print(service.plan_up(spec, name).text(), end="")
        made = session.Session(name, session.sessions_folder() / name, spec)
        return _launch_in(made, args, command)
    session.check_name(name)
    service.check_here(full)
    made = service.up(spec, name, say, is_implicit=True)
    try:
        return _launch_in(made, args, command)
    finally:
        if not engine_of(spec.engine).IS_QUEUE:
            service.down(made, lambda text: None)


def _launch_in(made: session.Session, args: argparse.Namespace, command: list[str]) -> int:
    if made.state != session.UP:
        raise UsageError(f"Session {made.name} is down; `magi up --name {made.name}` with its options starts it anew.")
    if args.session and (given := [o for o in launch_options_given(args) if o != "--session"]):
        raise UsageError(f"{', '.join(given)} cannot change session {made.name}; give them to `magi up`.")
    if args.session and getattr(args, "name", None):
        raise UsageError(f"--name is for a new session, and --session {made.name} runs in that one; drop one of them.")
    if args.dry_run:
        print(service.plan_run(made, command).text(), end="")
        return 0
    current, outcome = service.run(made, command, say)
    if current.state == session.SUBMITTED:
        print(f"{outcome.reason}\n  magi status {made.name}\n  magi logs {made.name}")
        return 0
    if outcome.is_stopped:
        say(f"stopped; nothing is left running. `magi logs {made.name}` shows what it printed.")
    elif outcome.exit_code:
        say(f"run {current.target.run} of {made.name} failed: {outcome.reason}")
        for line in outcome.last_words:
            print(f"  {line}", file=sys.stderr)
    log = current.folder / "output.log"
    say(f"the whole log, with torchrun's report: {log}" if outcome.exit_code else f"logs: {current.folder}")
    if outcome.output_error:
        raise outcome.output_error
    return 130 if outcome.is_stopped else 1 if outcome.exit_code else 0


def command_status(args: argparse.Namespace) -> int:
    sessions = [session.read_session(args.name)] if args.name else session.list_sessions()
    if args.dry_run:
        for made in sessions:
            engine = engine_of(made.spec.engine)
            steps = [engine.status(made.spec, r.target) for r in session.read_runs(made)] if engine.IS_QUEUE else []
            print(LaunchPlan(f"status: reads {made.folder}", tuple(steps)).text(), end="")
        return 0
    found = [service.describe(made, service.refresh(made)) for made in sessions]
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    if not found:
        print(f"There are no sessions in {session.sessions_folder()}.")
    rows = [["session", "state", "engine", "nodes x ranks", "runs", "last run"]]
    for row in found:
        last = row["runs"][-1] if row["runs"] else None
        text = ", ".join(filter(None, (f"{last['run']} {last['state']}", last["queue"]))) if last else "none"
        shape = f"{row['nodes']} x {row['ranks_per_node']}"
        rows.append([row["session"], row["state"], row["engine"], shape, str(len(row["runs"])), text])
    if found:
        show_table("Sessions", rows)
    for row in found:
        for run in row["runs"] if args.name else row["runs"][-1:]:
            if run["reason"]:
                print(f"{row['session']} run {run['run']}: {run['reason']}\n  {run['folder']}")
    return 0


def command_logs(args: argparse.Namespace) -> int:
    made = session.read_session(args.name)
    current, engine = session.find_run(made, args.run), engine_of(made.spec.engine)
    step = engine.logs(made.spec, current.target, args.follow) if engine.IS_QUEUE else None
    path = current.folder / "output.log"
    selection = logs.make_selection(args.rank, args.node, made.spec, args.grep)
    if args.dry_run:
        print(LaunchPlan(f"logs: reads {path}" if step is None else "logs", (step,) if step else ()).text(), end="")
        return 0
    if step is not None:
        lines = logs.lines_of(step)
    else:

        def is_running() -> bool:
            state = session.find_run(made, current.target.run).state
            return state in (session.RUNNING, session.SUBMITTED)

        lines = logs.read_lines(path, is_running if args.follow else None)
    for line in logs.select(lines, selection):
        print(line, flush=args.follow)
    return 0


def command_down(args: argparse.Namespace) -> int:
    if bool(args.name) == args.all:
        raise UsageError("Say which session to take down, or --all; `magi status` lists them.")
    if args.name and not (session.sessions_folder() / args.name / "session.json").exists():
        print(f"There is no session {args.name} in {session.sessions_folder()}; nothing to do.")
        return 0
    for made in session.list_sessions() if args.all else [session.read_session(args.name)]:
        if args.dry_run:
            print(service.plan_down(made, session.read_runs(made)).text(), end="")
            continue
        service.down(made, say, args.remove)
        print(f"Session {made.name} is {'removed' if args.remove else f'down; its files stay in {made.folder}'}.")
    return 0


def command_render(args: argparse.Namespace, command: list[str]) -> int:
    args.engine, args.template = args.target, None
    if args.target in K8S_TEMPLATES:
        args.engine, args.template = "k8s", args.target
    spec = spec_from(args)
    spec = dataclasses.replace(spec, command=tuple(command) or spec.command)
    if not spec.command:
        raise LaunchError("There is nothing to run; put command into the spec, or a script and -- ARGUMENTS here.")
    name = session.check_name(args.name or "job")
    folder = str(args.output or session.sessions_folder() / name / "runs" / "001")
    plan = engine_of(spec.engine).run(spec, Target(name, "001", f"{name}-001", folder, folder))
    if args.dry_run or not args.output:
        for file in plan.files:
            if file.is_secret and not args.dry_run:
                say(f"secret variables are not shown; it takes them from {file.path}, which --output FOLDER writes.")
        print(plan.files[0].text if plan.files and not args.dry_run else plan.text(), end="")
        return 0
    commands = RenderedFile(str(args.output / "commands.txt"), plan.text())
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{args.output} cannot be made ({error.strerror}).") from None
    service.write_files((*plan.files, commands))
    for file in (*plan.files, commands):
        print(file.path)
    return 0
