# SPDX-License-Identifier: Apache-2.0
"""The rules of the repository can fail; that it keeps them is seen to by the lane lint, which `.ci/run` starts."""

from __future__ import annotations

from pathlib import Path

import check_layers
import check_sizes
import pytest

ROOT = Path(__file__).resolve().parents[2]


def package(tmp_path: Path, **files: str) -> Path:
    root = tmp_path / "magi_attention"
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"common__a": "import magi_attention.meta.b", "meta__b": ""}, "'common' may not import 'meta'"),
        (
            {"kernels__a": "def f():\n    from magi_attention.comm import b", "comm__b": ""},
            "'kernels' may not",
        ),
        (
            {"meta__a": "from ..functional import b", "functional__b": ""},
            "'meta' may not import 'functional'",
        ),
        ({"meta__a": "import torch"}, "imports torch outside a function"),
        ({"common__a": "from torch import nn"}, "imports torch outside a function"),
        ({"meta__a": "from . import b", "meta__b": "from .a import x"}, "import cycle"),
        ({"comm__a": "import os\nx = os.environ.get('MAGI_ATTENTION_X')"}, "reads the environment"),
        ({"comm__a": "import os\nx = os.environ['MAGI_ATTENTION_X']"}, "reads the environment"),
        ({"comm__a": "from os import environ"}, "reads the environment"),
        (
            {"functional__a": "from magi_attention.compat import b", "compat__b": ""},
            "'functional' may not import 'compat'",
        ),
        ({"testing__a": "import magi_attention.compat.b", "compat__b": ""}, "'testing' may not import 'compat'"),
        (
            {"cli__a": "import magi_attention.old.x", "compat__paths": "MODULES: dict = {'old.x': 'meta.x'}"},
            "'magi_attention.old.x' is a published path",
        ),
        (
            {
                "api__a": "from magi_attention.functional import old",
                "functional": "",
                "compat__paths": "NAMES: dict = {'functional': {'compat.x': 'old older'}}",
            },
            "'magi_attention.functional.old' is a published path",
        ),
        ({"kernels__a": "import magi_attention.tools.x.b", "tools__x__b": ""}, "'kernels' may not import 'tools.x'"),
        (
            {"api__a": "import magi_attention.tools.report.plan_page", "tools__report__plan_page": ""},
            "inside a function only",
        ),
        (
            {"tools__launch__a": "import magi_attention.tools.doctor.b", "tools__doctor__b": ""},
            "'tools.launch' may not import 'tools.doctor'",
        ),
        ({"tools__simulate__a": "import torch"}, "imports torch outside a function"),
        (
            {"cli__a": "import magi_attention.old.x", "compat__paths": "FORMER: dict = {'old': 'tools.old'}"},
            "'magi_attention.old.x' is a published path",
        ),
        ({"new__a": "from magi_attention.common import b", "common__b": ""}, "has no row"),
        (
            {
                "old": "# compatibility alias\nfrom magi_attention.api.a import x",
                "api__a": "x = 1\nimport magi_attention.old",
            },
            "compatibility alias",
        ),
    ],
)
def test_layer_rules_can_fail(tmp_path, files, words):
    problems = check_layers.check(package(tmp_path, **files))
    assert len(problems) == 1 and words in problems[0], problems


def test_what_layers_allow(tmp_path):
    root = package(
        tmp_path,
        common__enum="",
        config="from magi_attention.common.enum import X",
        meta__a="def f():\n    import torch\n    return torch",
        meta__b="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        env__registry="import os\nx = os.environ.get('MAGI_ATTENTION_X')",
        api__b="def f():\n    from magi_attention.tools.report import plan_page",
        tools__report__plan_page="",
        functional__b="from magi_attention.meta.a import f\nimport torch",
        old="# compatibility alias\nfrom magi_attention.functional.b import f",
        compat__paths="from magi_attention.functional.b import f",
        __init__="from magi_attention.compat import paths",
    )
    assert check_layers.check(root) == []


def test_size_limits_can_fail(tmp_path):
    folder = tmp_path / "magi_attention"
    folder.mkdir()
    (folder / "long_file.py").write_text("x = 1\n" * 601)
    (folder / "long_function.py").write_text("def f():\n" + "    x = 1\n" * 120)
    (folder / "soft.py").write_text("def f():\n" + "    x = 1\n" * 61)
    failures, notes = check_sizes.check(tmp_path)
    assert [f.split(":")[0] for f in failures] == [
        "magi_attention/long_file.py",
        "magi_attention/long_function.py",
    ]
    assert len(notes) == 1 and notes[0].startswith("magi_attention/soft.py::f")
    waivers = {"magi_attention/long_file.py": "a table", "magi_attention/gone.py": "split long ago"}
    failures, _ = check_sizes.check(tmp_path, waivers)
    assert len(failures) == 2 and "gone.py" in failures[1]


def test_helpers_of_tests_have_names_of_their_own():
    """pytest puts each folder of tests on the path, so of two files with one name an import finds the first alone."""
    tests = Path(__file__).resolve().parents[1]
    folders: dict[str, list[str]] = {}
    for file in tests.rglob("*.py"):
        if file.name not in ("conftest.py", "__init__.py"):
            folders.setdefault(file.name, []).append(str(file.parent.relative_to(tests)))
    assert len(folders) > 100
    assert not {name: found for name, found in folders.items() if len(found) > 1}
