# SPDX-License-Identifier: Apache-2.0
"""What stands in a Markdown page: links, headings, fenced blocks. Entries of the log are no pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
LOG = ROOT / "docs" / "log"
OWN = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent != LOG or path.name == "README.md")
FRAMEWORKS = ROOT / "docs" / "frameworks"  # whose code needs their packages: tests/integrations runs it
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
OTHERS = [
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / folder / "README.md" for folder in ("docker", "extensions")),
]
PAGES = [README, *OWN, *OTHERS]
GPU_MARK = "<!-- runs on a GPU -->"  # of a page whose code needs one
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SETUP = re.compile(r"^<!-- before the code:\n(.*?)^-->$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Text between two fences. ``language`` is empty for commands; ``line`` is that of the first fence."""

    page: str
    line: int
    language: str
    text: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(name_of(page), text[: match.start()].count("\n") + 1, match[1], match[2])
        for match in _FENCE.finditer(text)
    ]


def setup(page: Path) -> str:
    """Python that runs before the first block of a page, from a comment that a reader does not see."""
    return "\n".join(_SETUP.findall(page.read_text(encoding="utf-8")))


def commands(page: Path) -> list[str]:
    """Lines of blocks without a language."""
    return [line.strip() for block in blocks(page) if not block.language for line in block.text.splitlines()]


def without_blocks(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Headings as GitHub names them in links."""
    headings = re.findall(r"^#+ +(.+)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Targets inside the repository, of text and of pictures."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_blocks(page))
    return [target for target in found if not re.match(r"[a-z]+:", target)]
