# SPDX-License-Identifier: Apache-2.0
"""A page in headless Chromium: run a script in it and get back what the script finds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from magi_attention.testing.waiting import DEADLINE_S

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium, and there is none on PATH")

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-extensions")
_ANSWER = re.compile(r'<pre id="answer">(.*?)</pre>', re.DOTALL)
# Synchronous, and before the page counts as loaded: what Chromium prints then has the answer.
_WRAPPER = """<script>{
  let answer;
  try {
    answer = { found: (() => { %s })() };
  } catch (error) {
    answer = { error: String(error && error.stack) };
  }
  const place = document.createElement("pre");
  place.id = "answer";
  place.textContent = JSON.stringify(answer);
  document.body.append(place);
}</script>"""


def start(folder: Path, page: str, width: int, *more: str) -> str:
    """What Chromium prints for the page with these further flags."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    command = [
        BROWSER,
        *_FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},1000",
        *more,
        file.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout


def ask(folder: Path, page: str, script: str, width: int = 1280) -> Any:
    """What ``script`` returns, the body of a function behind the page's own scripts. It runs before the first frame, so
    it calls ``view.paint()`` where it needs a picture. An error of the script fails the test."""
    printed = start(folder, page.replace("</body>", _WRAPPER % script + "</body>"), width, "--dump-dom")
    answer = _ANSWER.search(printed)
    assert answer is not None, f"the page gave no answer: {printed[:2000]}"
    found = json.loads(unescape(answer[1]))
    assert "error" not in found, found["error"]
    return found["found"]
