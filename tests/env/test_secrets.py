# SPDX-License-Identifier: Apache-2.0
"""Which variables are secret, and texts without their values."""

from __future__ import annotations

import json
import random
import shlex
import string

import pytest

from magi_attention.env import secrets

SECRET = ("HF_TOKEN", "GITHUB_PAT", "DB_PASS", "DBPASS", "SSH_PASSPHRASE", "SENTRY_DSN", "MYSQL_PWD", "SLACK_WEBHOOK")
SECRET += ("SLACK_WEBHOOK_URL", "aws_secret_access_key", "WANDB_API_KEY", "PGPASSWORD", "HTTP_AUTH", "A_CREDENTIAL")
PLAIN = ("PATH", "PYTHONPATH", "PWD", "OLDPWD", "COMPAT", "NCCL_DEBUG", "PASSES", "XPWDX", "LD_LIBRARY_PATH", "PATTERN")


def test_names():
    assert [name for name in SECRET if not secrets.is_secret(name)] == []
    assert [name for name in PLAIN if secrets.is_secret(name)] == []
    assert secrets.shown("HF_TOKEN", "abc") == secrets.LEFT_OUT and secrets.shown("PWD", "/home/me") == "/home/me"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://u:pw@proxy:1", "http://(left out)@proxy:1"),
        ("postgres://me:p%40ss:x@db/name?a=b@c", "postgres://(left out)@db/name?a=b@c"),
        ("https://ghp_1234@github.com/a/b", "https://(left out)@github.com/a/b"),
        ("a https://u:p@b/c https://d http://e:f@g", "a https://(left out)@b/c https://d http://(left out)@g"),
        ("redis://:word@host", "redis://(left out)@host"),
        ("ssh://git@host/a:b", "ssh://git@host/a:b"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("me@host.org and c:\\d", "me@host.org and c:\\d"),
    ],
)
def test_logins_of_urls(value, shown):
    assert secrets.shown("PIP_INDEX_URL", value) == shown
    assert secrets.hider({})(f"x {value} y") == f"x {shown} y"


def test_words_of_a_command_line():
    words = ["--env", "DB_PASS=abc", "--env=HF_TOKEN=x", "A=INFO", "--proxy=http://a:b@c", "--steps", "3"]
    shown = ["--env", "DB_PASS=(left out)", "--env=HF_TOKEN=(left out)", "A=INFO", "--proxy=http://(left out)@c"]
    assert [secrets.shown_argument(word) for word in words] == [*shown, "--steps", "3"]


def test_no_value_is_left_in_a_text():
    """Random values with every quote and line break, in texts that hold them as they are, as JSON and for a shell."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        values = ["".join(draw.choices(string.printable + "äß", k=draw.randint(4, 40))) for _ in range(3)]
        variables = {f"V{i}_TOKEN": value for i, value in enumerate(values)}
        forms = [form for v in values for form in (f" {v} ", json.dumps({"a": v}), f"export A={shlex.quote(v)}\n")]
        draw.shuffle(forms)
        text = secrets.hider(variables)("before\n" + "\n".join(forms) + "\nbehind")
        plain = [v for v in values if v.strip("-+.0123456789")]
        assert not [v for v in plain if len(v) >= 8 and v in text], (values, text)
        assert text.startswith("before\n") and text.endswith("\nbehind") and secrets.LEFT_OUT in text


def test_short_values_are_left_out_as_words_only():
    hide = secrets.hider({"DB_PASS": "hunter", "TOKENIZERS_PARALLELISM": "false", "KEY_COUNT": "3"})
    assert hide("hunter, hunters, 3 and false") == "(left out), hunters, 3 and false"


def test_lines_of_a_key_in_a_log():
    key = "-----BEGIN KEY-----\nMIIEabcdefgh\nijklmnopqrst\n-----END KEY-----"
    hide = secrets.hider({"DEPLOY_KEY": key})
    log = "".join(f"[rank 0]: {line}\n" for line in key.splitlines())
    assert "MIIE" not in hide(log) and "ijkl" not in hide(log)
