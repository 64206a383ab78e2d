# SPDX-License-Identifier: Apache-2.0
"""Runs programs of transformers and TRL, as they are, with attn_implementation="magi" on one process and on two.

    ci/strangers --transformers PATH --trl PATH     PATH is a checkout, or a git directory without one
    ci/strangers --only "sft, packing"              one program; repeat it for more
    ci/strangers --trl PATH --page                  also writes the table into docs/frameworks/strangers.md

A program has passed if it ends with 0 on both, and if each loss it logs on two ranks is that on one to 1e-4. It is
refused if it ends with an error of magi_attention.errors. ci/strangers_start.py is all that is put between a program
and its library, and ci/strangers_cache.py makes what programs load by a hub's name. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from strangers_programs import PROGRAMS, Program

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "frameworks" / "strangers.md"
BEGIN, END = "<!-- strangers: begin -->", "<!-- strangers: end -->"
TOLERANCE = 1e-4
TIME_LIMIT_S = 240
# What of a git directory is unpacked.
PARTS = {
    "transformers": ("examples/pytorch/language-modeling", "examples/pytorch/multiple-choice", "tests/trainer",
                     "tests/__init__.py", "tests/fixtures", "pyproject.toml"),
    "trl": ("tests", "trl", "pyproject.toml"),
}  # fmt: skip
NOT_COLLECTED = (2, 4)  # what pytest ends with then
REFUSAL = re.compile(r"magi_attention\.errors\.\w+: (.+)")
NO_TEST = re.compile(r"^E +(?:ImportError|ModuleNotFoundError): (.+)$|^ERROR: (not found: .+)$", re.MULTILINE)
ERROR = re.compile(r"^(?:E +|\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """``state`` is passed, refused, failed or not run."""

    state: str
    why: str = ""
    losses: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    name: str
    source: str
    one: Outcome
    two: Outcome
    state: str
    why: str
    is_as_expected: bool


def without_paths(text: str) -> str:
    """An ImportError names a file of this machine in brackets."""
    return re.sub(r" \(/[^)]*\)", "", text)


def outcome(code: int | None, text: str, losses: list[dict[str, float]], is_test: bool) -> Outcome:
    """By the exit status, None if the time was over, and by what was said."""
    if code is None:
        return Outcome("failed", f"It had not ended after {TIME_LIMIT_S} s.")
    if code == 0:
        return Outcome("passed", losses=losses)
    if found := REFUSAL.search(text):
        return Outcome("refused", found[1].strip())
    if is_test and code in NOT_COLLECTED and (found := NO_TEST.search(text)):
        return Outcome("not run", f"It does not load with what is installed: {without_paths(found[1] or found[2])}.")
    errors = [line for line in ERROR.findall(text) if "ChildFailedError" not in line]
    return Outcome("failed", errors[-1].strip() if errors else f"It ended with {code} and named no error.")


def difference(one: list[dict[str, float]], two: list[dict[str, float]]) -> float:
    """The greatest between losses, relative; infinite if they are not the same ones."""
    if [list(x) for x in one] != [list(x) for x in two]:
        return float("inf")
    pairs = [(x[name], y[name]) for x, y in zip(one, two) for name in x]
    return max((abs(a - b) / max(abs(a), 1e-12) if a == a and b == b else float("inf") for a, b in pairs), default=0.0)


def judge(program: Program, one: Outcome, two: Outcome) -> Row:
    def row(state: str, why: str, is_as_expected: bool) -> Row:
        return Row(program.name, program.source, one, two, state, why, is_as_expected)

    if "not run" in (one.state, two.state):
        return row("not run", one.why or two.why, True)
    is_as_expected = (one.state, two.state) == program.expects
    if failed := next((x for x in (one, two) if x.state == "failed"), None):
        return row("failed", failed.why, is_as_expected)
    if refused := next((x for x in (one, two) if x.state == "refused"), None):
        return row("refused", refused.why, is_as_expected)
    if not one.losses:
        return row("failed", "It logged no loss, so that there is nothing to compare.", False)
    if (apart := difference(one.losses, two.losses)) > TOLERANCE:
        why = f"Losses of one and two ranks differ by {apart:.1g}. {program.known}".strip()
        return row("failed", why, bool(program.known))
    if program.known:
        return row("passed", f"Losses agree again; take out of ci/strangers_programs.py: {program.known}", False)
    count = sum(map(len, one.losses))
    return row("passed", f"{count} loss{'es' if count > 1 else ''} agree{'' if count > 1 else 's'}", is_as_expected)


# ---- where programs are --------------------------------------------------------------------------------------------


def is_git_directory(path: Path) -> bool:
    return (path / "HEAD").is_file() and (path / "objects").is_dir()


def git(path: Path, *arguments: str) -> str:
    command = ["git", "--git-dir", str(path if is_git_directory(path) else path / ".git"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def unpacked(name: str, path: Path, folder: Path) -> tuple[Path, str]:
    """The files of a repository, and which they are: the tag of the installed version, or else HEAD, of a git
    directory; those of a checkout stay where they are."""
    if not is_git_directory(path):
        known = git(path, "rev-parse", "--short=10", "HEAD") if (path / ".git").is_dir() else "without git"
        return path, f"a checkout ({known})"
    tag = f"v{version(name)}"
    revision = tag if tag in git(path, "tag").split() else "HEAD"
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".tar")
    parts = [part for part in PARTS[name] if git(path, "ls-tree", revision, part)]
    git(path, "archive", "--output", str(archive), revision, *parts)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder, f"{revision} ({git(path, 'rev-parse', '--short=10', revision)})"


def check_folders(options: argparse.Namespace) -> None:
    for name in ("transformers", "trl"):
        path = getattr(options, name)
        if path is not None and not path.is_dir():
            raise SystemExit(f"ci/strangers: {path} is not a folder; give a checkout or a git directory as --{name}.")


def places(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Source -> folder, and source -> which version that is."""
    if (spec := find_spec("trl")) is None:
        raise SystemExit("ci/strangers: this Python has no trl; ci/strangers, the script, installs it.")
    package = Path(spec.origin).parent
    found, versions = {"trl package": package}, {"trl package": f"TRL {version('trl')}"}
    for name in ("transformers", "trl"):
        if (path := getattr(options, name)) is not None:
            found[name], versions[name] = unpacked(name, path.resolve(), folder / name)
    return found, versions


# ---- runs ----------------------------------------------------------------------------------------------------------


def command_of(program: Program, place: Path, home: Path, processes: int) -> list[str]:
    start = [str(ROOT / "ci" / "strangers_start.py"), program.replaced, str(place / program.path)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    torchrun += ["--local-addr", "127.0.0.1"]
    return [sys.executable, *(torchrun if processes > 1 else []), *start,
            *(word.replace("{home}", str(home)) for word in program.arguments)]  # fmt: skip


def package_beside(program: Program, place: Path) -> str:
    """Tests of a repository import the package of that repository: they are of one version."""
    is_beside = "::" in program.path and (place / program.source / "__init__.py").is_file()
    return str(place) if is_beside else ""


def environment_of(home: Path, losses: Path, temporary: Path, first: str = "") -> dict[str, str]:
    path = os.pathsep.join(filter(None, [first, str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ, "PYTHONPATH": path, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "STRANGERS_LOSSES": str(losses),
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1",
        "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(temporary), "COLUMNS": "1000",
    }  # fmt: skip


def make_cache(home: Path, temporary: Path) -> None:
    command = [sys.executable, str(ROOT / "ci" / "strangers_cache.py"), str(home)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_of(home, home, temporary))
    if done.returncode:
        raise SystemExit(f"{done.stderr}\nci/strangers: the local cache could not be made; the reason is above.")


def run_one(program: Program, place: Path, home: Path, processes: int, keep: Path | None) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        losses = Path(folder) / "losses.jsonl"
        work, temporary = Path(folder) / "work", Path(folder) / "tmp"
        work.mkdir()
        temporary.mkdir()
        command = command_of(program, place, home, processes)
        environment = environment_of(home, losses, temporary, package_beside(program, place))
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            text, _ = process.communicate(timeout=TIME_LIMIT_S)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks then
            text, _ = process.communicate()
            code = None
        if keep is not None:
            (keep / f"{re.sub('[^a-zA-Z0-9]+', '-', program.name)}-{processes}.txt").write_text(text)
        logged = [json.loads(line) for line in losses.read_text().splitlines()] if losses.exists() else []
    return outcome(code, text, logged, "::" in program.path)


def run(program: Program, found: dict[str, Path], home: Path, keep: Path | None = None) -> Row:
    reason = program.reason
    if not reason and program.source not in found:
        reason = f"There is no repository of it; give its path as --{program.source}."
    if not reason and not (found[program.source] / program.path.partition("::")[0]).exists():
        reason = f"{program.path.partition('::')[0]} is not in the repository."
    if reason:
        return judge(program, Outcome("not run", reason), Outcome("not run", reason))
    one = run_one(program, found[program.source], home, 1, keep)
    two = one if one.state == "not run" else run_one(program, found[program.source], home, 2, keep)
    return judge(program, one, two)


# ---- tables --------------------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def table(rows: Sequence[Row]) -> str:
    lines = ["| program | from | cp 1 | cp 2 | result | why |", "|---|---|---|---|---|---|"]
    for row in rows:
        result = row.state if row.is_as_expected else f"**{row.state}, not expected**"
        cells = (row.name, row.source, row.one.state, row.two.state, result, cell(row.why))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page: str, made: str) -> str:
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"ci/strangers: the page has no {BEGIN} and {END}; put them where the table belongs.")
    return f"{head}{BEGIN}\n{made}\n{END}{tail}"


def summary(rows: Sequence[Row]) -> str:
    counts = {state: sum(row.state == state for row in rows) for state in ("passed", "refused", "failed", "not run")}
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def chosen(names: Sequence[str]) -> list[Program]:
    known = {program.name for program in PROGRAMS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"ci/strangers: there is no program {unknown[0]!r}; --list prints the names.")
    return [program for program in PROGRAMS if not names or program.name in names]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ci/strangers", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--transformers", type=Path, metavar="PATH", help="a repository of transformers")
    parser.add_argument("--trl", type=Path, metavar="PATH", help="a repository of TRL")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one program; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results, losses included")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write what each run said")
    parser.add_argument("--page", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    programs = chosen(options.only)
    if options.list:
        print("\n".join(program.name for program in programs))
        return 0
    check_folders(options)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        found, versions = places(options, Path(folder))
        home = Path(folder) / "home"
        make_cache(home, Path(folder))
        for program in programs:
            rows.append(run(program, found, home, options.keep))
            print(f"{rows[-1].name}: {rows[-1].state}. {rows[-1].why}", flush=True)
    print(table(rows))
    print(f"{summary(rows)}; {'; '.join(f'{name}: {which}' for name, which in versions.items())}")
    if options.json is not None:
        options.json.write_text(json.dumps({"versions": versions, "rows": [asdict(row) for row in rows]}, indent=1))
    if options.page:
        PAGE.write_text(with_table(PAGE.read_text(), f"\n{table(rows)}\n"))
    return 0 if all(row.is_as_expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
