# SPDX-License-Identifier: Apache-2.0
"""Tests of the repository itself need a checkout. Beside an installed package, as in the image with tests, they are
left out, and the head of the report says so."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# checks, images, pages, the distribution beside the package, and how native sources are built
OF_A_CHECKOUT = ("ci", "docker", "docs", "extensions", "native")
collect_ignore = [] if (ROOT / "csrc").is_dir() else list(OF_A_CHECKOUT)


def pytest_report_header() -> str | None:
    if not collect_ignore:
        return None
    return f"no checkout: the tests of {', '.join(collect_ignore)} are left out, those that read csrc are skipped"


class FailedNames:
    """Says the name of a test when it fails, and why in a line; pytest itself tells at the very end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if not report.failed or terminal is None:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = str(crash.message if crash else report.longrepr or "").strip().splitlines()
        where = "" if report.when == "call" else f" ({report.when})"
        terminal.ensure_newline()
        terminal.write_line(f"FAILED {report.nodeid}{where}: {lines[0][:160] if lines else 'no words'}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of xdist has no terminal; the process that gives out tests has
        config.pluginmanager.register(FailedNames(config), "magi_failed_names")


def pytest_collection_finish() -> None:
    """Tests stay to the end, so that no collection of garbage has to look at them: a tenth of a worker's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def compile_folder() -> Path:
    """Where ``compiled_or_skip`` keeps libraries, for all processes and runs."""
    return ROOT / "build" / "tests"
