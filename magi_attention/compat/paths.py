# SPDX-License-Identifier: Apache-2.0
"""Published module paths and names, former paths, and the finder that resolves them.

Paths below are relative to ``magi_attention``. ``MODULES`` gives a published path its module, which is then one module
with two names. ``FORMER`` does so for modules of ours that have moved, and for all that is in them. ``NAMES`` gives a
module of ours names that it has in the published package alone. All are looked up when a program asks; importing the
package costs one entry of ``sys.meta_path``. Once ``magi_attention.api`` is imported, all paths that the published
package imports with itself are in ``sys.modules``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_PACKAGE = "magi_attention"

MODULES: dict[str, str] = {
    "_version": "version",
    "api.functools": "api.keys.helpers",
    "api.magi_attn_interface": "api.keys.interface",
    "benchmarking.bench": "compat.benchmarking.bench",
    "benchmarking.image_grid": "compat.benchmarking.report",
    "benchmarking.report": "compat.benchmarking.report",
    "benchmarking.utils": "compat.benchmarking.bench",
    "comm.functional": "comm.collectives.gather",
    "comm.primitive": "compat.comm.primitive",
    "comm.primitive._all2all_v": "comm.collectives.gather",
    "comm.primitive._all_gather_v": "comm.collectives.gather",
    "comm.primitive._scatter_v": "comm.collectives.gather",
    "comm.primitive.grpcoll": "compat.comm.primitive",
    "comm.primitive.grpcoll._buffer": "compat.comm.grpcoll",
    "comm.primitive.grpcoll._config": "config.grpcoll",
    "comm.primitive.grpcoll._group_collective": "comm.collectives.group",
    "comm.primitive.grpcoll._mgr": "compat.comm.grpcoll",
    "comm.work": "comm.collectives.work",
    "common.attn_mask": "compat.values.attn_mask",
    "common.jit": "compat.values.jit",
    "common.protocols": "compat.values.protocols",
    "common.range_op": "kernels.rows.ops",
    "common.rectangle": "compat.values.rectangle",
    "common.rectangles": "compat.values.rectangles",
    "dist_attn_runtime_mgr": "compat.keys.runtime_mgr",
    "functional.dispatch": "compat.functional.dispatch",
    "functional.fa4": "compat.functional.fa4",
    "functional.roll": "compat.functional.dispatch",
    "functional.sdpa": "compat.functional.sdpa",
    "functional.sdpa_online": "compat.functional.sdpa",
    "functional.utils": "compat.functional.softmax",
    "magi_attn_comm": "compat.comm.native_comm",
    "magi_attn_ext": "compat.extension",
    "meta._make_attn_meta": "compat.metas.builders",
    "meta._make_dispatch_meta": "compat.metas.builders",
    "meta.algorithms": "compat.dynamic.algorithms",
    "meta.algorithms.base": "compat.dynamic.algorithms",
    "meta.algorithms.binary_greedy": "compat.dynamic.algorithms",
    "meta.algorithms.binary_greedy_parallel": "compat.dynamic.algorithms",
    "meta.algorithms.fast_snf": "compat.dynamic.algorithms",
    "meta.algorithms.grg": "compat.dynamic.algorithms",
    "meta.algorithms.ncq": "compat.dynamic.algorithms",
    "meta.algorithms.snf": "compat.dynamic.algorithms",
    "meta.collection": "compat.metas",
    "meta.collection.calc_meta": "compat.metas.calc_meta",
    "meta.collection.comm_meta": "compat.metas.comm_meta",
    "meta.collection.dispatch_meta": "api.keys.dispatch_meta",
    "meta.container": "compat.metas.buckets",
    "meta.container.bucket": "compat.metas.buckets",
    "meta.container.chunk": "compat.metas.buckets",
    "meta.container.rank_entry": "compat.metas.buckets",
    "meta.container.slice": "compat.metas.buckets",
    "meta.solver.dist_attn_solver": "compat.metas.builders",
    "meta.solver.dynamic_attn_solver": "compat.dynamic.solver",
    "meta.solver.dynamic_solver_vis": "compat.dynamic.pictures",
    "testing.dist_common": "compat.testing.dist_common",
    "testing.envvars": "compat.testing.envvars",
    "testing.flag_generator": "compat.testing.flag_generator",
    "testing.gt_dispatcher": "compat.testing.gt_dispatcher",
    "testing.params": "compat.testing.params",
    "testing.ref_attn": "compat.testing.ref_attn",
    "testing.utils": "compat.testing",
    "utils": "compat.utils",
    "utils._utils": "compat.utils",
    "utils.cost": "compat.utils.cost",
    "utils.debug": "compat.utils.debug",
    "utils.device": "compat.utils.device",
    "utils.dist": "compat.utils.dist",
    "utils.dtype": "compat.utils.dtypes",
    "utils.dtypes": "compat.utils.dtypes",
    "utils.matrix": "compat.utils.matrix",
    "utils.metaclass": "compat.names",
    "utils.nvtx": "compat.utils.nvtx",
    "utils.sequences": "compat.utils.sequences",
    "utils.sparse_utils": "compat.utils.sparse_utils",
}

# former path of a module or folder that our pages named -> where it is
FORMER: dict[str, str] = {
    "doctor": "tools.doctor",
    "launch": "tools.launch",
    "meta.cost": "meta.predict.cost",
    "meta.metas": "compat.metas.builders",
    "profiling": "tools.profiling",
    "report": "tools.report",
    "simulate": "tools.simulate",
}

# The published package imports all other paths of the table with itself; here the import of api does.
LATE = (
    "benchmarking.bench benchmarking.image_grid benchmarking.report benchmarking.utils common.protocols "
    "meta.solver.dynamic_solver_vis "
    "testing.dist_common testing.envvars testing.flag_generator testing.gt_dispatcher testing.params testing.ref_attn "
    "testing.utils utils.dtype"
).split()  # fmt: skip

# module -> where its names are -> these names
NAMES: dict[str, dict[str, str]] = {
    "api": {"compat.keys.legacy": "magi_attn_flex_dispatch magi_attn_varlen_dispatch"},
    "api.keys.interface": {"compat.keys.legacy": "magi_attn_flex_dispatch magi_attn_varlen_dispatch"},
    "benchmarking": {
        "compat.benchmarking.bench": "MemRecorder do_bench do_bench_flops do_bench_mem",
        "compat.benchmarking.report": "Benchmark Mark make_img_grid perf_report report_all_from_perf",
    },
    "comm.collectives.work": {"compat.names": "GeneralWorkItem"},
    "common": {"compat.values": "AttnMask AttnRectangle AttnRectangles jit"},
    "common.enum": {"compat.names": "OutMaybeWithLSE"},
    "common.mask": {"compat.values": "AttnMask"},
    "functional": {
        "compat.functional.dispatch": "dispatch_func undispatch_func roll_func roll_simple_func",
        "compat.functional.dist_attn": "dist_attn_func",
        "compat.functional.fa4": "ffa_fa4_func",
        "compat.functional.softmax": "correct_attn_fwd_result correct_attn_lse correct_attn_lse_with_sink "
        "correct_attn_out correct_attn_out_lse correct_attn_out_lse_with_sink correct_attn_out_with_sink",
    },
    "functional.dist_attn": {"compat.functional.dist_attn": "DistAttnRuntime dist_attn_func"},
    "functional.flex_flash_attn": {
        "compat.functional.flex_flash_attn": "FlexFlashAttnFunc maybe_contiguous maybe_profile_ffa_ctx merge_ranges "
        "profile_mode",
    },
    "meta": {
        "compat.metas.builders": "make_attn_meta_from_dispatch_meta make_bucket_per_rank_from_qk_ranges "
        "make_dispatch_meta_from_qk_ranges make_global_bucket_from_qk_ranges",
    },
    "meta.solver.dispatch_solver": {
        "config": "BSDispatchAlg BTPDispatchAlg DPDispatchAlg DispatchConfig LBDispatchAlg "
        "MinHeapDispatchAlg SequentialDispatchAlg",
    },
    "testing": {
        "compat.testing": "RUN_IN_MP",
        "compat.testing.dist_common": "DistTestBase with_comms with_run_in_mp",
        "compat.testing.envvars": "should_run_attn_config should_run_test_case should_run_world_size "
        "skip_if_world_size_filtered switch_envvar_context switch_envvar_decorator switch_envvars",
        "compat.testing.flag_generator": "FlagCombGenerator",
        "compat.testing.gt_dispatcher": "GroundTruthDispatcher",
        "compat.testing.params": "parameterize",
        "compat.testing.ref_attn": "ref_attn_func",
        "compat.utils.sequences": "str2seed",
        "testing.precision": "assert_close",
    },
}


def _home(name: str) -> str | None:
    """Where the module of a published or former path is; None: ``name`` is no such path."""
    for former, home in FORMER.items():
        if name == former or name.startswith(f"{former}."):
            return home + name[len(former) :]
    return MODULES.get(name)


def _has_children(name: str) -> bool:
    return any(path.startswith(f"{name}.") for path in MODULES)


class _AliasLoader(Loader):
    """Gives the published path the module that is at home elsewhere."""

    def __init__(self, path: str) -> None:
        self.path, self.home = path, f"{_PACKAGE}.{_home(path)}"
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the alias's there; `reload` goes by it
        if _has_children(self.path):
            _publish(module, self.path)  # for `from a.b import c`, which goes by the name of the module

    def get_code(self, fullname: str) -> Any:
        """For ``python -m``."""
        loader: Any = find_spec(self.home).loader  # type: ignore[union-attr]
        return loader.get_code(self.home)


class _NamesLoader(Loader):
    """Runs a module of ours, then makes its published names resolve."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # as if this loader had not been
        self._loader.exec_module(module)
        if _has_children(self._name) and not hasattr(module, "__path__"):
            module.__path__ = []
        _publish(module, self._name)
        if self._name == "api":
            for path in MODULES:
                if path not in LATE:
                    import_module(f"{_PACKAGE}.{path}")

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loader, attribute)


def _publish(module: ModuleType, path: str) -> None:
    """Gives ``module`` a ``__getattr__`` that knows, besides its own names, those that it has under ``path``.

    They are in its ``__all__``, too.
    """
    if "__all__" in module.__dict__:  # for `from a.b import *`
        words = " ".join(NAMES.get(path, {}).values()).split()
        module.__all__ = list(dict.fromkeys((*module.__all__, *words)))  # type: ignore[attr-defined]
    own = module.__dict__.get("__getattr__")
    if hasattr(own, "paths"):  # it has more than one path, or is loaded again
        if path not in own.paths:
            own.paths.append(path)
        return
    paths = [path]

    def __getattr__(attribute: str) -> Any:
        for known in paths:
            if f"{known}.{attribute}" in MODULES or f"{known}.{attribute}" in NAMES:
                return import_module(f"{_PACKAGE}.{known}.{attribute}")
            for home, words in NAMES.get(known, {}).items():
                if attribute in words.split():
                    value = getattr(import_module(f"{_PACKAGE}.{home}"), attribute)
                    setattr(module, attribute, value)
                    return value
        if own is not None:
            return own(attribute)
        raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")

    __getattr__.paths = paths  # type: ignore[attr-defined]
    module.__getattr__ = __getattr__  # type: ignore[attr-defined]


class PublishedPaths(MetaPathFinder):
    """Finds what the two tables name. First in ``sys.meta_path``, to see modules of ours before others load them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_PACKAGE}."):
            return None
        name = fullname[len(_PACKAGE) + 1 :]
        if name in MODULES:
            return ModuleSpec(fullname, _AliasLoader(name), is_package=_has_children(name))
        if (home := _home(name)) is not None:
            there = find_spec(f"{_PACKAGE}.{home}")
            if there is None:
                return None
            is_package = there.submodule_search_locations is not None
            return ModuleSpec(fullname, _AliasLoader(name), origin=there.origin, is_package=is_package)
        if name == "api" or name in NAMES or _has_children(name):
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _NamesLoader(spec.loader, name)
            return spec
        return None


def install() -> None:
    """Makes the paths importable. Doing so again replaces the finder, so that reloading is safe."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != PublishedPaths.__name__]
    sys.meta_path.insert(0, PublishedPaths())
