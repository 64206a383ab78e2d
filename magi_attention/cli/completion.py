# SPDX-License-Identifier: Apache-2.0
"""`magi completion bash | zsh | fish`: a script that completes the command line, made from its parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

HOW = {
    "bash": 'eval "$(magi completion bash)"   in ~/.bashrc',
    "zsh": 'eval "$(magi completion zsh)"   in ~/.zshrc, behind compinit',
    "fish": "magi completion fish > ~/.config/fish/completions/magi.fish",
}
PROGRAMS = ("magi", "./magi")


@dataclass
class Word:
    """An option or a subcommand. ``values`` are the words that may follow the option, if they are known."""

    name: str
    text: str
    takes_value: bool = False
    values: tuple[str, ...] = ()


@dataclass
class Command:
    """What may stand behind ``path``, such as "dev test"; that of the program itself is empty."""

    path: str
    commands: list[Word] = field(default_factory=list)
    options: list[Word] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)  # known values of arguments without an option


def add_completion(commands: argparse._SubParsersAction, top: argparse.ArgumentParser) -> None:
    """``top`` is the parser whose commands these are, and which the script is made from."""
    parser = commands.add_parser("completion", help="print a script that completes this command in a shell")
    parser.set_defaults(function=command_completion, top=top)
    parser.add_argument("shell", choices=sorted(HOW))


def command_completion(args: argparse.Namespace) -> int:
    print(script(args.top, args.shell), end="")
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The whole script for that shell."""
    return {"bash": bash, "zsh": zsh, "fish": fish}[shell](list(commands_of(parser)))


def commands_of(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Command]:
    """The parser as data, then its subparsers, depth first."""
    found, below = Command(path), []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            found.commands += [Word(name, texts.get(name, "")) for name in action.choices]
            below += [(f"{path} {name}".strip(), child) for name, child in action.choices.items()]
        elif action.option_strings:
            values = tuple(map(str, action.choices or ()))
            names = [name for name in action.option_strings if name.startswith("--")] or action.option_strings
            takes_value = action.nargs != 0
            found.options += [Word(name, _text(action), takes_value, values) for name in names]
        elif action.choices:
            found.arguments += map(str, action.choices)
    yield found
    for name, child in below:
        yield from commands_of(child, name)


def _text(action: argparse.Action) -> str:
    return "" if action.help in (None, argparse.SUPPRESS) else str(action.help).replace("%%", "%")


def _words(command: Command) -> str:
    return " ".join([*(w.name for w in command.commands), *command.arguments, *(o.name for o in command.options)])


def _cases(commands: list[Command]) -> tuple[str, str, str]:
    """Patterns of paths, cases of values behind an option, cases of words behind a path; the same in bash and zsh."""
    paths = "|".join(f'"{c.path}"' for c in commands if c.path)
    options: dict[str, list[str]] = {}  # words that may follow -> where
    for command in commands:
        for option in command.options:
            if option.takes_value:
                options.setdefault(" ".join(option.values), []).append(f'"{command.path} {option.name}"')
    values = [f'{"|".join(places)}) list="{found}" ;;' for found, places in options.items()]
    words = [f'"{c.path}") list="{_words(c)}" ;;' for c in commands]
    return paths, "\n        ".join(values), "\n            ".join(words)


_BASH = """\
# Completion of magi for bash: {how}
_magi() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} place="" list="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD - 1}}"; do
        [[ $word == -- ]] && return  # behind it are words of a script: files
        case "${{place:+$place }}$word" in {paths}) place="${{place:+$place }}$word" ;; esac
    done
    case "$place $previous" in
        {values}
        *) case "$place" in
            {words}
        esac ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$list" -- "$current")
}}
complete -o default -F _magi {programs}
"""

_ZSH = """\
#compdef magi
# Completion of magi for zsh: {how}
_magi() {{
    local place="" list="" word
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        [[ $word == -- ]] && {{ _files; return }}  # behind it are words of a script
        case "${{place:+$place }}$word" in {paths}) place="${{place:+$place }}$word" ;; esac
    done
    case "$place ${{words[CURRENT-1]}}" in
        {values}
        *) case "$place" in
            {words}
        esac ;;
    esac
    compadd -- ${{=list}} || _files
}}
compdef _magi {programs}
"""


def bash(commands: list[Command]) -> str:
    return _filled(_BASH, "bash", commands)


def zsh(commands: list[Command]) -> str:
    return _filled(_ZSH, "zsh", commands)


def _filled(template: str, shell: str, commands: list[Command]) -> str:
    paths, values, words = _cases(commands)
    return template.format(how=HOW[shell], paths=paths, values=values, words=words, programs=" ".join(PROGRAMS))


def fish(commands: list[Command]) -> str:
    lines = [f"# Completion of magi for fish: {HOW['fish']}"]
    for command in commands:
        first, *rest = command.path.split() or [""]
        seen = [f"__fish_seen_subcommand_from {word}" for word in (first, *rest) if word]
        # `dev test` is no `test`: fish only knows which words are there.
        others = {c.path.split()[0] for c in commands if not rest and first and first in c.path.split()[1:]}
        others.update(word.name for word in command.commands)
        if others:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(sorted(others))}")
        where = f"complete -c magi -n {_quoted('; and '.join(seen))}"
        lines += [f"{where} -f -a {w.name} -d {_quoted(w.text)}" for w in command.commands]
        lines += [f"{where} -f -a {name}" for name in command.arguments]
        for option in command.options:
            value = f" -x -a {_quoted(' '.join(option.values))}" if option.values else " -r" * option.takes_value
            lines.append(f"{where} -l {option.name.removeprefix('--')}{value} -d {_quoted(option.text)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + re.sub(r"(['\\])", r"\\\1", text) + "'"
