# SPDX-License-Identifier: Apache-2.0
"""The package index that wheels/index.py writes: what pip reads from it."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import index
import pytest
from small_wheels import write_wheel

from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


def put(folder: Path, name: str, requires: str = ">=3.10") -> Path:
    return write_wheel(folder, name, "1.0", metadata=f"Requires-Python: {requires}\n" if requires else "")


def test_pages(tmp_path):
    wheel = put(tmp_path, "Magi_Index_Test")
    put(tmp_path, "other", requires="")
    found = index.write(tmp_path, tmp_path / "out")
    assert found == {"magi-index-test": [wheel.name], "other": ["other-1.0-py3-none-any.whl"]}
    root = (tmp_path / "out" / "index.html").read_text()
    assert re.findall(r'href="([^"]+)"', root) == ["magi-index-test/", "other/"]
    text = (tmp_path / "out" / "magi-index-test" / "index.html").read_text()
    assert f'href="{wheel.name}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}"' in text
    assert 'data-requires-python="&gt;=3.10"' in text
    beside = (tmp_path / "out" / "magi-index-test" / f"{wheel.name}.metadata").read_bytes()
    assert f'data-core-metadata="sha256={hashlib.sha256(beside).hexdigest()}"' in text
    before = text
    index.write(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "magi-index-test" / "index.html").read_text() == before


def test_wheels_that_lie_elsewhere(tmp_path):
    wheel = put(tmp_path, "other")
    index.write(tmp_path, tmp_path / "out", "https://example.org/releases/")
    text = (tmp_path / "out" / "other" / "index.html").read_text()
    assert f'href="https://example.org/releases/{wheel.name}#sha256=' in text
    assert not list((tmp_path / "out").rglob("*.whl"))


def test_what_is_no_wheel(tmp_path):
    with pytest.raises(SystemExit, match="no wheel in"):
        index.write(tmp_path, tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "x-1-py3-none-any.whl", "w"):
        pass
    with pytest.raises(SystemExit, match="has no METADATA"):
        index.write(tmp_path, tmp_path / "out")


def test_pip_installs_from_it(tmp_path):
    put(tmp_path, "Magi_Index_Test")
    assert index.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-deps"]
    place = ["--target", str(tmp_path / "site"), "--index-url", (tmp_path / "out").as_uri()]
    command = [*pip, *place, "magi-index-test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env={"PATH": "/usr/bin:/bin"})
    if "No module named pip" in done.stderr:
        pytest.skip("This Python has no pip.")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "Magi_Index_Test-1.0.dist-info").is_dir()


GH = """import json, pathlib, shutil, sys
words, home = sys.argv[1:], pathlib.Path(__file__).parent
if words[:2] == ["release", "list"]:
    print(json.dumps([{"tagName": tag, "isDraft": tag == "v3"} for tag in ("v2", "v1", "v3")]))
else:
    assert words[:2] == ["release", "download"] and words[words.index("--repo") + 1] == "some/name", words
    out = pathlib.Path(words[words.index("--dir") + 1])
    out.mkdir(parents=True)
    for wheel in (home / words[2]).glob(words[words.index("--pattern") + 1]):
        shutil.copy(wheel, out)
"""


def test_the_index_of_all_releases(tmp_path):
    """Old versions stay, each linked to its release; a draft is left out. gh is a stand-in."""
    home = tmp_path / "bin"
    for tag, name in (("v1", "first"), ("v2", "second"), ("v3", "draft")):
        (home / tag).mkdir(parents=True)
        put(home / tag, name)
    (home / "gh.py").write_text(GH)
    words = shlex.join([sys.executable, str(home / "gh.py")])  # a path with a space cannot stand behind #!
    (home / "gh").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (home / "gh").chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GITHUB_")}
    own = {"PATH": f"{home}{os.pathsep}{kept['PATH']}", "GITHUB_REPOSITORY": "some/name", "MAGI_PYTHON": sys.executable}
    command = [str(ROOT / "ci" / "release_index"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env={**kept, **own}, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["first", "index.html", "second"]
    for tag, name in (("v1", "first"), ("v2", "second")):
        text = (tmp_path / "out" / name / "index.html").read_text()
        assert f'href="https://github.com/some/name/releases/download/{tag}/{name}-1.0-py3-none-any.whl#sha256=' in text
    del own["GITHUB_REPOSITORY"]
    done = subprocess.run(command, env={**kept, **own}, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode != 0 and "OWNER/NAME" in done.stderr
