# SPDX-License-Identifier: Apache-2.0
"""Which variables hold secrets, and texts without their values, for what people read or send to others."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping

LEFT_OUT = "(left out)"
# Parts of names, and words at the end of one of a name's parts: DB_PASS, DBPASS, MYSQL_PWD, SENTRY_DSN.
_PARTS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "KEY", "CREDENTIAL", "AUTH", "WEBHOOK")
_ENDINGS = ("PASS", "PWD", "DSN")
_WORDS = ("PAT",)  # as a whole part only, because PATH and COMPAT are no secrets
_FOLDERS = ("PWD", "OLDPWD")  # the shell's working folders
_ASSIGNMENT = re.compile(r"(?P<before>--env=|)(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
# user:password@ of any URL; of http also a user alone, which is a token as often as not
_LOGIN = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@:'\"]*:[^\s/'\"]*@|\b(https?://)[^\s/@:'\"]+@")
# Values that stand in many a text, so that it would be unreadable without them.
_PLAIN = re.compile(r"(?i)true|false|yes|no|on|off|none|null|auto|default|[-+.\d]*")
_SHORT = 8  # characters; a shorter value is only left out where it is a word of its own


def shown(name: str, value: str) -> str:
    """``value``, or words in its place if the name says that it is a secret, or in place of the login in a URL."""
    return LEFT_OUT if is_secret(name) else without_logins(value)


def is_secret(name: str) -> bool:
    """Does the name of a variable say that its value is a secret?"""
    upper = name.upper()
    if upper in _FOLDERS:
        return False
    parts = upper.split("_")
    return any(word in upper for word in _PARTS) or any(p in _WORDS or p.endswith(_ENDINGS) for p in parts)


def without_logins(text: str) -> str:
    return _LOGIN.sub(lambda match: f"{match[1] or match[2]}{LEFT_OUT}@", text)


def split(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(variables that anybody may see, those with secrets)."""
    hidden = {name: value for name, value in variables.items() if shown(name, value) != value}
    return {name: value for name, value in variables.items() if name not in hidden}, hidden


def shown_argument(word: str) -> str:
    """A word of a command line, ``NAME=VALUE`` without a secret value."""
    match = _ASSIGNMENT.fullmatch(word)
    if match is None:
        return without_logins(word)
    return f"{match['before']}{match['name']}={shown(match['name'], match['value'])}"


def hider(variables: Mapping[str, str]) -> Callable[[str], str]:
    """A function that leaves out of a text the secret values of ``variables``, as they are and as JSON or a shell
    quotes them, and the logins of all URLs."""
    replacements: dict[str, str] = {}
    for name, value in split(variables)[1].items():
        if not _PLAIN.fullmatch(value):
            for form in (value, json.dumps(value)[1:-1], shlex.quote(value)[1:-1] if "'" in value else value):
                replacements[form] = shown(name, value)
            # A log puts a prefix before each line of a key that has several.
            replacements |= {line: LEFT_OUT for line in value.splitlines() if _SHORT <= len(line) < len(value)}
    ordered = sorted(replacements, key=len, reverse=True)  # why: one value may be the beginning of another
    pattern = re.compile("|".join(map(_pattern, ordered))) if ordered else None

    def hide(text: str) -> str:
        text = pattern.sub(lambda match: replacements[match[0]], text) if pattern else text
        return without_logins(text)

    return hide


def _pattern(value: str) -> str:
    escaped = re.escape(value)
    return escaped if len(value) >= _SHORT else rf"(?<![A-Za-z0-9]){escaped}(?![A-Za-z0-9])"
