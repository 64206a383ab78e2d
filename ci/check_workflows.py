# SPDX-License-Identifier: Apache-2.0
"""Workflows only call scripts, and cannot be used to reach what they protect.

    python ci/check_workflows.py

An action is pinned by its commit, with the version in a comment. Foreign code gets no rights: no pull_request_target,
no secrets, permission to read and no more, but for jobs that sign and publish a tag. Of these, one that has an identity
or writes releases and pages runs no code of the repository. A machine of ours runs a pull request only when a label is
applied. Every job has a time limit. A step is one command of ci/ or ./magi; where none of these may be, of PUBLISHERS.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".github" / "workflows"
TRIGGERS = {"push", "pull_request", "schedule", "workflow_call", "workflow_dispatch"}
# All that a job may have beyond reading. What is pushed as a package is built by code of the repository.
SIGNING = {"id-token": "write", "attestations": "write", "contents": "write", "pages": "write", "packages": "write"}
WITH_OUR_CODE = {"packages": "write"}
PUBLISHERS = (["cosign", "sign"], ["gh", "release", "create"])


def triggers(workflow: dict) -> dict:
    """Event -> its filters. YAML 1.1 reads the key `on` as true."""
    events = workflow.get("on", workflow.get(True)) or {}
    if isinstance(events, str):
        return {events: {}}
    return {event: events[event] or {} for event in events} if isinstance(events, dict) else dict.fromkeys(events, {})


def uses_problems(text: str, pins: dict[str, str]) -> list[str]:
    """About the actions. ``pins`` collects `digest # version` by action, so that one action has one version."""
    found = []
    for reference, comment in re.findall(r"^\s*(?:- )?uses: *(\S+)(.*)$", text, re.MULTILINE):
        if reference.startswith("./"):
            if not (ROOT / reference).is_file():
                found.append(f"{reference} is not here; correct the path.")
            continue
        if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", reference):
            found.append(f"{reference} can change under its name; pin the commit of its version.")
        elif not re.fullmatch(r" # v\d+\.\d+\.\d+", comment):
            found.append(f"{reference} needs its version behind it, as in `# v1.2.3`.")
        else:
            action, _, digest = reference.partition("@")
            if pins.setdefault(action, digest + comment) != digest + comment:
                found.append(f"{action} is pinned twice, by different commits or versions; use one.")
    if len(re.findall(r"\buses:", text)) != len(re.findall(r"^\s*(?:- )?uses: *\S", text, re.MULTILINE)):
        found.append("`uses:` must begin its line, so that it can be checked.")
    return found


def step_problems(step: dict, where: str, is_trusted: bool = False) -> list[str]:
    """About one step. ``is_trusted``: of a job that has more rights than code of the repository may have."""
    found = []
    if is_trusted and str(step.get("uses", "")).startswith(("actions/checkout@", "./")):
        found.append(f"{where}: takes code of the repository into a job that signs or writes; split the job.")
    if str(step.get("uses", "")).startswith("actions/checkout@"):
        options = step.get("with") or {}
        if options.get("persist-credentials") is not False:
            found.append(f"{where}: checkout leaves a token behind; set persist-credentials: false.")
        if "ref" in options or "repository" in options:
            found.append(f"{where}: checkout takes other code than that of the event; leave ref and repository out.")
    if (run := step.get("run")) is None:
        return found
    if "${{" in run:
        found.append(f"{where}: an expression in a command is a way in; hand it over by env.")
    if re.search(r"[\n;|&<>`]|\$\(", run.strip()):
        return [*found, f"{where}: more than one command; move it into a script of ci/."]
    words = shlex.split(run)
    if is_trusted:
        if not any(words[: len(program)] == program for program in PUBLISHERS):
            found.append(f"{where}: {run.strip()!r} runs in a job that signs or writes; only PUBLISHERS may.")
        return found
    script = words[1] if words[0] == "python3" and len(words) > 1 else words[0]
    if script != "./magi" and not re.fullmatch(r"ci/[\w.]+", script):
        found.append(f"{where}: {run.strip()!r} is no script of ci/ and not ./magi; move it there.")
    elif not (ROOT / script).is_file():
        found.append(f"{where}: {script} is not here.")
    return found


def job_problems(name: str, job: dict, events: dict) -> list[str]:
    """About one job."""
    found = []
    extra = job.get("permissions") or {}
    if isinstance(extra, dict):
        extra = {right: level for right, level in extra.items() if level != "read"}
    is_known = isinstance(extra, dict) and extra.items() <= SIGNING.items()
    if not is_known:
        found.append(f"{name}: permissions go beyond reading and signing; take them away.")
    elif extra and set(events) - {"push", "workflow_dispatch"}:
        found.append(f"{name}: signs where other events than a tag start it; move it to the release workflow.")
    elif extra and job.get("if") != "github.event_name == 'push'":
        found.append(f"{name}: signs also in a rehearsal; set if: github.event_name == 'push'.")
    if "uses" in job:
        return found
    if not isinstance(job.get("timeout-minutes"), int):
        found.append(f"{name}: has no time limit; set timeout-minutes.")
    runner = job.get("runs-on", "")
    if "latest" in str(runner):
        found.append(f"{name}: runs on {runner}, which changes under its name; name a version.")
    if "self-hosted" in str(runner) and "pull_request" in events:
        if events["pull_request"].get("types") != ["labeled"] or "github.event.label.name ==" not in job.get("if", ""):
            found.append(f"{name}: any pull request runs on a machine of ours; set types: [labeled] and an if.")
    for number, step in enumerate(job.get("steps", []), 1):
        found += step_problems(step, f"{name}, step {number}", is_known and extra not in ({}, WITH_OUR_CODE))
    return found


def problems(text: str, pins: dict[str, str] | None = None) -> list[str]:
    """What is wrong with a workflow, as sentences."""
    try:
        import yaml
    except ImportError:
        raise SystemExit(f"{sys.executable} has no PyYAML; `pip install pyyaml` brings it.") from None
    workflow = yaml.safe_load(text)
    events = triggers(workflow)
    found = uses_problems(text, {} if pins is None else pins)
    if other := sorted(set(map(str, events)) - TRIGGERS):
        found.append(f"Started by {', '.join(other)}; only {', '.join(sorted(TRIGGERS))} are safe here.")
    if re.search(r"\bsecrets\b", text):
        found.append("Uses secrets; publish by trusted publishing, which needs none.")
    if workflow.get("permissions") != {"contents": "read"}:
        found.append("Begins with other rights than `permissions: contents: read`; set that.")
    if not isinstance(workflow.get("concurrency"), dict):
        found.append("Has no concurrency group; set one, so that runs of one change do not pile up.")
    for name, job in workflow["jobs"].items():
        found += job_problems(name, job, events)
    return found


def main() -> int:
    pins: dict[str, str] = {}
    files = sorted(FOLDER.glob("*.y*ml"))
    found = [f"{path.name}: {sentence}" for path in files for sentence in problems(path.read_text(), pins)]
    print("\n".join(found), end="\n" if found else "")
    print(f"workflows: {len(found)} problems in {len(files)} files")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main())
