# SPDX-License-Identifier: Apache-2.0
"""Imports go one way: walks the syntax tree of every module and reports each import that breaks a rule.

    python ci/check_layers.py [package folder]

Module-level and lazy imports both count, and those under `if TYPE_CHECKING:` too, since they tie files
together just as much; only for the rule about torch are these as good as lazy ones. The rules are the tables
below. A file whose first lines hold `# compatibility alias` only re-exports names under an old path: it may
import anything, and nothing else inside may import it. The same goes for paths in the table of `compat`, which have
no file.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "magi_attention"
ALIAS_MARK = "# compatibility alias"

LEAVES = {"errors", "version"}
# layer -> layers that it may import besides itself
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "env": {"errors", "version"},
    "config": {"errors", "version", "env"},
    "common": {*LEAVES, "env", "config"},
    "meta": {*LEAVES, "env", "config", "common"},
    "native": {*LEAVES, "env", "config", "common"},
    "kernels": {*LEAVES, "env", "config", "common", "native"},
    "comm": {*LEAVES, "env", "config", "common", "native"},
    "functional": {*LEAVES, "env", "config", "common", "meta", "kernels", "comm"},
    "api": {*LEAVES, "env", "config", "common", "meta", "kernels", "comm", "functional"},
    "tools": set(),
    "tools.report": {*LEAVES, "env", "config", "common", "meta"},
    "tools.simulate": {*LEAVES, "config", "common", "meta"},
    "tools.launch": {*LEAVES, "env"},
    "tools.doctor": {*LEAVES, "env", "native"},
}
# Each package in it is a layer of its own, and no row of attention names one.
TOOLS = "tools"
# May import every layer.
ABOVE_ALL = {"__init__", "cli", "compat", "integrations", "testing", "benchmarking", "tools.profiling"}
# What exists for programs written for the published package. The package installs its table of paths; nothing else of
# ours may know of it, nor import one of these paths.
COMPAT = "compat"
COMPAT_IMPORTERS = {"__init__": {"compat.paths"}}
PUBLISHED_PATHS = "compat.paths"  # module whose dicts MODULES, FORMER and NAMES have the paths as keys
# Single modules that a layer may import although not their whole layer. Attention imports those of tools inside a
# function only.
MODULE_EXCEPTIONS = {
    # Configuration is held in members of these enumerations and in plain numbers.
    "config": {"common.enum", "common.scalars"},
    "env": {"common.enum"},
    "api": {"tools.report.plan_page"},  # what a notebook shows of a plan
    "tools.simulate": {"tools.report.pictures"},
    "meta": {"native.planner.pairs"},  # dispatch in the planner library, which knows neither a GPU nor a group
}
NO_MODULE_LEVEL_TORCH = {
    *("errors", "version", "env", "config", "common", "meta", "cli"),
    *("tools", "tools.report", "tools.simulate", "tools.launch", "tools.doctor"),
}
ENVIRON_READERS = {"env.registry"}


@dataclass(frozen=True)
class Import:
    source: str  # module relative to the package, e.g. "meta.plan"
    target: str  # "magi_attention.x.y" or the name of a foreign package
    line: int
    is_lazy: bool


def module_name(path: Path, root: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def imports_of(tree: ast.AST, source: str, is_package: bool) -> list[Import]:
    """All imports of one module; relative ones resolved."""
    found: list[Import] = []

    def visit(node: ast.AST, is_lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(source, alias.name, node.lineno, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PACKAGE] + ([] if source == "__init__" else source.split("."))
                drop = node.level - (1 if is_package else 0)
                base = ".".join(here[: len(here) - drop] + ([base] if base else []))
            # `from package.a import b`: b may be a module, so both forms are kept and resolved later.
            own = base.startswith(PACKAGE)
            targets = [f"{base}.{alias.name}" if own else base for alias in node.names]
            found.extend(Import(source, target, node.lineno, is_lazy) for target in targets)
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, is_lazy or is_function or is_for_types)

    visit(tree, False)
    return found


def resolve(target: str, modules: set[str]) -> str | None:
    """The module of this package that `target` names, or None for a foreign package."""
    if target != PACKAGE and not target.startswith(PACKAGE + "."):
        return None
    parts = target.split(".")[1:]
    while parts and ".".join(parts) not in modules:
        parts.pop()
    return ".".join(parts) or "__init__"


def reads_magi_environment(tree: ast.AST) -> list[int]:
    """Lines where `os.environ` or `os.getenv` meets a MAGI_ATTENTION_ name or is imported bare."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Call, ast.Subscript, ast.Compare)):
            text = ast.unparse(node)
            if "MAGI_ATTENTION_" in text and ("environ" in text or "getenv" in text):
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in ("environ", "getenv") for alias in node.names):
                lines.append(node.lineno)
    return sorted(set(lines))


def find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    """One cycle of the module graph as a path whose first and last entry are equal, or None."""
    state: dict[str, int] = {}
    path: list[str] = []

    def walk(node: str) -> list[str] | None:
        state[node] = 1
        path.append(node)
        for after in sorted(edges.get(node, ())):
            if state.get(after) == 1:
                return path[path.index(after) :] + [after]
            if after not in state and (cycle := walk(after)):
                return cycle
        path.pop()
        state[node] = 2
        return None

    for node in sorted(edges):
        if node not in state and (cycle := walk(node)):
            return cycle
    return None


def published_paths(text: str) -> set[str]:
    """Paths and names, relative to the package, that the table of published paths resolves."""
    paths: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            if node.target.id in ("MODULES", "FORMER"):
                paths.update(ast.literal_eval(node.value))
            elif node.target.id == "NAMES":
                for module, homes in ast.literal_eval(node.value).items():
                    paths.update(f"{module}.{name}" for names in homes.values() for name in names.split())
    return paths


def layer_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == TOOLS else 1])


def layer_problem(source: str, target: str, is_lazy: bool) -> str | None:
    """Why `source` may not import `target` (both relative to the package), or None."""
    here, there = layer_of(source), layer_of(target)
    if here == there:
        return None
    if there == COMPAT and target not in COMPAT_IMPORTERS.get(here, ()):
        return f"'{here}' may not import '{there}', which is for published clients; use what it is made of"
    if here in ABOVE_ALL:
        return None
    if here not in ALLOWED:
        return f"layer '{here}' has no row in ci/check_layers.py; add one"
    if there in ALLOWED[here]:
        return None
    if target in MODULE_EXCEPTIONS.get(here, ()):
        if is_lazy or not there.startswith(TOOLS) or here.startswith(TOOLS):
            return None
        return f"'{here}' may import '{target}' inside a function only"
    return f"'{here}' may not import '{there}'"


def check(root: Path) -> list[str]:
    """All broken rules under the package folder `root`, as `file:line: sentence`."""
    paths = {module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    modules = set(paths)
    problems: list[str] = []
    edges: dict[str, set[str]] = {}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    published = published_paths(texts[PUBLISHED_PATHS]) if PUBLISHED_PATHS in texts else set()
    aliases = {name for name, text in texts.items() if ALIAS_MARK in "\n".join(text.splitlines()[:3])}
    for name, path in paths.items():
        tree = ast.parse(texts[name], filename=str(path))
        where = path.relative_to(root.parent)
        if name not in ENVIRON_READERS:
            for line in reads_magi_environment(tree):
                problems.append(f"{where}:{line}: reads the environment; ask magi_attention.env instead")
        if name in aliases:
            continue
        for item in imports_of(tree, name, path.name == "__init__.py"):
            target = resolve(item.target, modules)
            if target is None:
                is_torch = item.target.split(".")[0] == "torch"
                if is_torch and not item.is_lazy and layer_of(name) in NO_MODULE_LEVEL_TORCH:
                    problems.append(f"{where}:{item.line}: imports torch outside a function")
                continue
            if any(
                f"{PACKAGE}.{path}" == item.target or item.target.startswith(f"{PACKAGE}.{path}.") for path in published
            ):
                problems.append(f"{where}:{item.line}: '{item.target}' is a published path; use its home")
            elif target in aliases:
                problems.append(f"{where}:{item.line}: '{target}' is a compatibility alias; use its home")
            elif reason := layer_problem(name, target, item.is_lazy):
                problems.append(f"{where}:{item.line}: {reason} ({target})")
            # A package's __init__ imports its modules and they may import siblings: no cycle at run time
            # unless a module asks the package itself for a name.
            if target != name:
                edges.setdefault(name, set()).add(target)
    if cycle := find_cycle(edges):
        problems.append("import cycle: " + " -> ".join(cycle))
    return problems


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / PACKAGE
    problems = check(root)
    for problem in problems:
        print(problem)
    print(f"layers: {len(problems)} problems in {len(list(root.rglob('*.py')))} files")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
