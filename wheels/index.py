# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of a package index (PEP 503) for a folder of wheels.

    python wheels/index.py DIST [--out DIR] [--url URL]
    ci/release_index [--repository OWNER/NAME] [--out DIR]     the wheels of all releases, by the program gh

The result is static files for any web server, or for `pip install --index-url file://...`: one page of projects, and
one page per project with a link for each file, its SHA-256 and the Pythons it asks for. The metadata of each wheel
lies beside it (PEP 658), so that an installer need not fetch wheels to resolve. Wheels are copied beside the pages, or
with --url linked to where they are, such as a release. Pages of equal wheels are equal. An index that is the only one a
pip line names cannot give a package of somebody else: the public index has one of our name. Where there are variants
(wheels/variants.py), NAME-VERSION-variants.json beside the page says what each runs on.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

import variants  # noqa: E402

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="pypi:repository-version" content="1.0">
<title>{title}</title>
</head>
<body>
{links}
</body>
</html>
"""


def normal(name: str) -> str:
    """The name of a project as it stands in addresses."""
    return re.sub(r"[-_.]+", "-", name).lower()


def metadata(wheel: Path) -> bytes:
    """The METADATA file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
                return archive.read(name)
    raise SystemExit(f"{wheel} has no METADATA, so it is no wheel; take it out of the folder.")


def page(title: str, links: list[tuple[str, str, dict[str, str]]]) -> str:
    """One page; a link is its text, its address and further attributes."""
    rows = []
    for text, address, attributes in links:
        more = "".join(f' {key}="{html.escape(value)}"' for key, value in attributes.items())
        rows.append(f'<a href="{html.escape(address)}"{more}>{html.escape(text)}</a><br>')
    return _PAGE.format(title=html.escape(title), links="\n".join(rows))


def write(dist: Path, out: Path, url: str = "") -> dict[str, list[str]]:
    """Writes the index of ``dist`` into ``out``; returns the files of each project."""
    return write_all([(dist, url)], out)


def write_all(places: list[tuple[Path, str]], out: Path) -> dict[str, list[str]]:
    """One index of several folders, each with the address where its wheels are, or "" to copy them."""
    projects: dict[str, list[str]] = {}
    pages: dict[str, list[tuple[str, str, dict[str, str]]]] = {}
    labelled: dict[tuple[str, str], list[Path]] = {}
    for wheel, url in ((wheel, url) for dist, url in places for wheel in sorted(dist.glob("*.whl"))):
        data = metadata(wheel)
        fields = email.message_from_bytes(data)
        project = normal(fields["Name"])
        folder = out / project
        folder.mkdir(parents=True, exist_ok=True)
        attributes = {"data-requires-python": fields["Requires-Python"]} if fields["Requires-Python"] else {}
        address = wheel.name
        if url:
            address = f"{url.rstrip('/')}/{wheel.name}"
        else:
            shutil.copyfile(wheel, folder / wheel.name)
            (folder / f"{wheel.name}.metadata").write_bytes(data)
            attributes["data-core-metadata"] = f"sha256={hashlib.sha256(data).hexdigest()}"
        address += f"#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}"
        pages.setdefault(project, []).append((wheel.name, address, attributes))
        projects.setdefault(project, []).append(wheel.name)
        if variants.label_of(wheel):
            labelled.setdefault((project, "-".join(wheel.name.split("-")[:2])), []).append(wheel)
    if not projects:
        where = ", ".join(str(dist) for dist, _ in places) or "any release"
        raise SystemExit(f"There is no wheel in {where}; build some with ci/build_wheels.")
    for (project, stem), wheels in labelled.items():
        text = variants.text(variants.of_index(wheels))
        (out / project / f"{stem}-variants.json").write_text(text)
        address = f"{stem}-variants.json#sha256={hashlib.sha256(text.encode()).hexdigest()}"
        pages[project].append((f"{stem}-variants.json", address, {}))
    for project, links in pages.items():
        (out / project / "index.html").write_text(page(f"Links for {project}", links))
    root = [(project, f"{project}/", {}) for project in sorted(projects)]
    (out / "index.html").write_text(page("Index", root))
    return projects


def run(command: list[str]) -> str:
    """Standard output of a program; its words and an exit where it fails or is not here."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is not here; it is the forge's program that reads releases.") from None
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def of_releases(repository: str, folder: Path) -> list[tuple[Path, str]]:
    """Downloads the wheels of every release that is out; returns their folders and where they are."""
    listed = run(["gh", "release", "list", "--repo", repository, "--limit", "1000", "--json", "tagName,isDraft"])
    server, places = os.environ.get("GITHUB_SERVER_URL", "https://github.com"), []
    for tag in sorted(row["tagName"] for row in json.loads(listed) if not row["isDraft"]):
        place = folder / tag
        run(["gh", "release", "download", tag, "--repo", repository, "--pattern", "*.whl", "--dir", str(place)])
        places.append((place, f"{server}/{repository}/releases/download/{tag}"))
    return places


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="wheels/index.py", description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path, nargs="?", help="folder of wheels")
    parser.add_argument("--repository", help="in place of a folder: all releases of OWNER/NAME")
    parser.add_argument("--out", type=Path, default=Path("index"), help="folder of the pages")
    parser.add_argument("--url", default="", help="where the wheels are, if not beside the pages")
    options = parser.parse_args(arguments)
    if (options.dist is None) == (options.repository is None):
        parser.error("name a folder of wheels, or a repository with releases.")
    with tempfile.TemporaryDirectory(prefix="magi_index_") as folder:
        places = [(options.dist, options.url)]
        if options.repository is not None:
            places = of_releases(options.repository, Path(folder))
        for project, files in write_all(places, options.out).items():
            print(f"{project}: {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
