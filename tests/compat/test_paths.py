# SPDX-License-Identifier: Apache-2.0
"""Published module paths are importable in every way that Python has, and cost nothing until then."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import magi_attention
from magi_attention.compat import paths

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _moved(former: str) -> list[tuple[str, str]]:
    """Former paths and homes of a module and all that is in it."""
    home = paths.FORMER[former]
    folder = ROOT / "magi_attention" / home.replace(".", "/")
    inside = (file.relative_to(folder).with_suffix("").parts for file in sorted(folder.rglob("*.py")))
    ends = ["".join(f".{part}" for part in parts if part != "__init__") for parts in inside] or [""]
    return [(former + end, home + end) for end in ends]


@pytest.mark.parametrize(
    ("path", "home"), [*paths.MODULES.items(), *(pair for former in paths.FORMER for pair in _moved(former))]
)
def test_a_published_or_former_path_is_the_module_that_is_at_home_elsewhere(path, home) -> None:
    name, home = f"magi_attention.{path}", f"magi_attention.{home}"
    assert importlib.util.find_spec(name) is not None
    module = importlib.import_module(name)
    assert module is importlib.import_module(home) is sys.modules[name]
    assert module.__name__ == module.__spec__.name == home
    parent, _, last = name.rpartition(".")
    space: dict = {}
    exec(f"import {name} as a\nfrom {parent} import {last} as b\nimport {name}\nc = {name}", space)
    assert space["a"] is space["b"] is space["c"] is module


def test_no_package_exports_a_name_that_a_module_in_it_has() -> None:
    """The import of the module, by whatever path, would put it in the place of what the package exports."""
    hidden = []
    for file in sorted((ROOT / "magi_attention").rglob("__init__.py")):
        name = ".".join(file.parent.relative_to(ROOT).parts)
        modules = {path.stem for path in file.parent.glob("*.py")} | {p.parent.name for p in file.parent.glob("*/*.py")}
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        words = {alias.asname or alias.name for node in imports if node.module != name for alias in node.names}
        hidden += [f"{name}.{word}" for word in sorted(modules & words)]
    assert hidden == []


def test_what_a_moved_folder_lacks_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="magi_attention.launch.no_such_module"):
        importlib.import_module("magi_attention.launch.no_such_module")
    assert importlib.util.find_spec("magi_attention.simulate.no_such_module") is None


def test_python_m() -> None:
    """The program sees the file it is in, as under its own path: a launcher starts it from a folder of its own."""
    said = []
    for module in ("magi_attention.launch.node", "magi_attention.tools.launch.node"):
        code = f"import runpy, sys; sys.argv[1:] = []; print(runpy.run_module({module!r})['__file__'])"
        said += [python("-c", code), python("-m", module, "--help")]
    assert said[:2] == said[2:] and said[0].strip().endswith("tools/launch/node.py")
    python("-c", "import runpy; runpy.run_module('magi_attention._version', run_name='__main__')")
    python("-m", "magi_attention.functional.dispatch")


@pytest.mark.parametrize("module", paths.NAMES)
def test_published_names_of_modules_of_ours(module) -> None:
    ours = importlib.import_module(f"magi_attention.{module}")
    for home, words in paths.NAMES[module].items():
        for word in words.split():
            assert getattr(ours, word) is getattr(importlib.import_module(f"magi_attention.{home}"), word)
    with pytest.raises(AttributeError, match="no_such_name"):
        ours.no_such_name  # noqa: B018
    with pytest.raises(ImportError):
        exec(f"from magi_attention.{module} import no_such_name")


def test_tables_name_what_exists_once() -> None:
    for path in (*paths.MODULES, *paths.FORMER):
        file = ROOT / "magi_attention" / path.replace(".", "/")
        assert not file.with_suffix(".py").exists() and not (file / "__init__.py").exists(), f"{path} has a file, too"
    for module, homes in paths.NAMES.items():
        assert importlib.util.find_spec(f"magi_attention.{module}") is not None
        words = " ".join(homes.values()).split()
        assert len(words) == len(set(words))
        source = Path(importlib.import_module(f"magi_attention.{module}").__file__).read_text()
        assert "compat" not in source


@pytest.mark.parametrize("how", ["magi_attention.functional.dispatch", "magi_attention.compat.functional.dispatch"])
def test_reload(how) -> None:
    module = importlib.import_module(how)
    before = module.dispatch_func
    assert importlib.reload(module) is module and module.dispatch_func is not before
    assert sys.modules["magi_attention.functional.dispatch"] is sys.modules["magi_attention.compat.functional.dispatch"]


def test_reload_of_a_module_with_published_names() -> None:
    functional = importlib.import_module("magi_attention.functional")
    for _ in range(3):
        assert importlib.reload(functional).dispatch_func is not None
    assert functional.dispatch.__name__ == "magi_attention.compat.functional.dispatch"
    assert functional.__spec__.loader is functional.__loader__
    assert type(functional.__loader__).__module__ != paths.__name__, "tools that read source find the usual loader"


def test_pickles_that_name_published_paths() -> None:
    wanted = importlib.import_module("magi_attention.magi_attn_ext").AttnRangeWithRank({1, 3}, 1, 5)
    text = pickle.dumps(wanted, protocol=0)
    old = text.replace(b"magi_attention.compat.extension", b"magi_attention.magi_attn_ext")
    assert old != text and pickle.loads(old) == pickle.loads(text) == wanted


def test_a_bare_import_loads_none_of_it() -> None:
    code = (
        "import sys, magi_attention; print([m for m in sys.modules if m.startswith('magi_attention.compat.')]);"
        "print('torch' in sys.modules);"
        "import magi_attention.functional; print([m for m in sys.modules if m.startswith('magi_attention.compat.')])"
    )
    table = "['magi_attention.compat.paths']"
    assert python("-c", code).split("\n")[:3] == [table, "False", table]


# What the published 1.1.1 imports with itself, as far as it is here.
EAGER = """
comm comm.functional comm.primitive comm.primitive._all2all_v comm.primitive._all_gather_v comm.primitive._scatter_v
comm.primitive.grpcoll comm.primitive.grpcoll._buffer comm.primitive.grpcoll._config comm.primitive.grpcoll._mgr
comm.primitive.grpcoll._group_collective comm.work common common.enum common.forward_meta common.jit common.mask
common.range common.range_op common.ranges config dist_attn_runtime_mgr env env.build env.comm env.general functional
functional.dispatch functional.dist_attn functional.fa4 functional.flex_flash_attn functional.roll functional.sdpa
functional.sdpa_online functional.utils magi_attn_comm magi_attn_ext meta meta._make_attn_meta meta._make_dispatch_meta
meta.algorithms meta.algorithms.base meta.algorithms.binary_greedy meta.algorithms.binary_greedy_parallel
meta.algorithms.fast_snf meta.algorithms.grg meta.algorithms.ncq meta.algorithms.snf meta.collection
meta.collection.calc_meta meta.collection.comm_meta meta.collection.dispatch_meta meta.container meta.container.bucket
meta.container.chunk meta.container.rank_entry meta.container.slice meta.solver meta.solver.dispatch_solver
meta.solver.dist_attn_solver meta.solver.dynamic_attn_solver meta.solver.overlap_solver utils utils._utils utils.debug
utils.metaclass utils.nvtx utils.sparse_utils
""".split()


@pytest.mark.parametrize("first", ["magi_attention", "magi_attention.api"])
def test_what_the_published_package_imports_with_itself(first) -> None:
    """Programs name such modules by attributes alone. Once api is imported they are in ``sys.modules``, too."""
    code = (
        f"import functools, sys, {first}\n"
        f"absent = [p for p in {EAGER} if 'magi_attention.' + p not in sys.modules]\n"
        f"assert not absent or {first != 'magi_attention.api'}, absent\n"
        f"for path in {EAGER}:\n"
        "    module = functools.reduce(getattr, path.split('.'), magi_attention)\n"
        "    assert module is sys.modules['magi_attention.' + path], path\n"
    )
    python("-c", code)


def test_threads_that_import_the_same_path_at_once() -> None:
    """What the module imports is there: threads that import a package and a module of it for the first time may
    deadlock in any package, which Python tells as an error."""
    code = (
        "import threading, importlib, sys\n"
        "import magi_attention.functional.flex_flash_attn, magi_attention.compat.functional.backend_call\n"
        "a, b = 'magi_attention.functional', 'magi_attention.compat.functional'\n"
        "assert f'{b}.fa4' not in sys.modules\n"
        "names = [f'{a}.fa4', f'{b}.fa4', a] * 3\n"
        "got = []\n"
        "threads = [threading.Thread(target=lambda n=n: got.append(importlib.import_module(n))) for n in names]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert len(got) == len(names) and len({id(m) for m in got}) == 2\n"
    )
    python("-c", code)


def test_installing_again_leaves_one_finder() -> None:
    paths.install()
    importlib.reload(paths).install()
    assert [type(f).__name__ for f in sys.meta_path].count("PublishedPaths") == 1
    assert magi_attention.git_version == magi_attention.__version__


def test_other_packages_are_none_of_its_business() -> None:
    finder = paths.PublishedPaths()
    for name in ("magi_attention", "magi_attention_extensions.functional", "torch.functional.dispatch"):
        assert finder.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("magi_attention.functional.no_such_module")


def test_a_star_import_brings_published_names() -> None:
    space: dict = {}
    exec("from magi_attention.common import *", space)
    exec("from magi_attention.api import *", space)
    assert space["AttnRectangle"].__name__ == "AttnRectangle" and space["magi_attn_flex_dispatch"].__doc__
    common = importlib.import_module("magi_attention.common")
    for _ in range(2):
        common = importlib.reload(common)
        assert len(set(common.__all__)) == len(common.__all__) and {"AttnMask", "AttnRange"} <= set(common.__all__)
