# SPDX-License-Identifier: Apache-2.0
"""`magi completion`: bash itself is asked; zsh and fish read the script where they are installed."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess

import pytest

from magi_attention.cli import completion, main, parser

ASK = """
ask() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _magi
    echo "${COMPREPLY[*]}"
}
"""


@pytest.fixture(scope="module")
def ask():
    """What bash offers for command lines, the last word of which is being typed."""
    if not shutil.which("bash"):
        pytest.skip("There is no bash.")

    def answers(lines: list[list[str]]) -> list[list[str]]:
        calls = "\n".join(f"ask {shlex.join(line)}" for line in lines)
        text = completion.script(parser(), "bash") + ASK + calls
        done = subprocess.run(["bash", "--norc"], input=text, capture_output=True, text=True)
        assert not done.stderr, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    return answers


def parsers(top: argparse.ArgumentParser, path: tuple[str, ...] = ()):
    """(path, parser) of every command, found in another way than the code does: through the help of argparse."""
    yield path, top
    for action in top._subparsers._group_actions if top._subparsers else ():
        for name, child in action.choices.items():
            yield from parsers(child, (*path, name))


def test_every_command_and_option_is_offered(ask):
    found = list(parsers(parser()))
    assert ("dev", "lint") in [path for path, _ in found]
    for (path, command), offered in zip(found, ask([["magi", *path, ""] for path, _ in found])):
        wanted = {name for name in command._option_string_actions if name.startswith("--")}
        if command._subparsers:
            wanted |= set(command._subparsers._group_actions[0].choices)
        assert wanted <= set(offered) and len(offered) == len(set(offered)), path


def test_values_of_options_and_what_is_no_option(ask):
    cases = {
        "magi run --device ''": "auto cpu cuda",
        "magi run --de": "--degree --device",
        "magi completion ''": "bash fish zsh --help",
        "magi run --data ''": "",  # files, which is what bash offers where a function offers nothing
        "magi run train.py -- ''": "",
        "magi test --suite g": "gpu",
        "magi dev te": "test",
        "./magi pro": "profile",
    }
    answers = ask([shlex.split(line) for line in cases])
    assert answers == [words.split() for words in cases.values()]


@pytest.mark.parametrize(("shell", "arguments"), [("bash", ["-n"]), ("zsh", ["-f", "-n"]), ("fish", ["-n"])])
def test_shells_can_read_it(shell, arguments, tmp_path, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for _, command in parsers(parser()):
        for name in command._option_string_actions:
            if name.startswith("--"):
                assert name in text or f"-l {name[2:]} " in text
    if not shutil.which(shell):
        pytest.skip(f"There is no {shell}.")
    file = tmp_path / "script"
    file.write_text(text)
    done = subprocess.run([shell, *arguments, str(file)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_description_with_quotes_is_one_word_of_fish():
    top = argparse.ArgumentParser(prog="magi")
    top.add_argument("--odd", help='it\'s a \\ and 100%% "odd"')
    line = completion.script(top, "fish").splitlines()[-1]
    assert line.endswith("-d 'it\\'s a \\\\ and 100% \"odd\"'")
