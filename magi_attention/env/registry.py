# SPDX-License-Identifier: Apache-2.0
"""The environment variables: what there is, of which type, with which effect.

This is the only module that reads them. Values are read when asked for, never at import. A flag is on if
and only if it is exactly ``1``.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from magi_attention.errors import UnsupportedError

PREFIX = "MAGI_ATTENTION_"
_PLAIN_OFF = ("", "0")


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    ``kind`` is ``flag``, ``int``, ``choice``, ``level`` or ``text``. ``default`` is the parsed value when
    unset. ``has_effect`` is False for variables of the published software that this build accepts and
    ignores.
    """

    name: str
    kind: str
    default: object
    section: str
    doc: str
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    has_effect: bool = True

    def parse(self, text: str) -> object:
        """The typed value of ``text``; ``ValueError`` says what is allowed."""
        if self.kind == "flag":
            return text == "1"
        if self.kind == "int":
            return self._parse_int(text)
        if self.kind == "choice":
            value = text.strip().lower()
            if value not in self.choices:
                raise ValueError(f"{self.name}={text!r} is unknown; use one of {', '.join(self.choices)}.")
            return value
        if self.kind == "level":
            value = text.strip().upper()
            return value if value in self.choices else self.default
        return text

    def _parse_int(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{self.name}={text!r} is not an integer; give one such as 8.") from None
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.name}={value} is too small; give at least {self.minimum}.")
        return value


def _flag(name: str, section: str, doc: str, has_effect: bool = True) -> Variable:
    return Variable(PREFIX + name, "flag", False, section, doc, has_effect=has_effect)


def _choice(name: str, section: str, doc: str, default: str | None, choices: tuple[str, ...]) -> Variable:
    return Variable(PREFIX + name, "choice", default, section, doc, choices=choices)


def _text(name: str, section: str, doc: str, default: str = "", has_effect: bool = True) -> Variable:
    return Variable(name, "text", default, section, doc, has_effect=has_effect)


def _int(name: str, section: str, doc: str, default: int | None, minimum: int) -> Variable:
    return Variable(name, "int", default, section, doc, minimum=minimum)


GENERAL, COMMUNICATION = "general", "communication"
_G, _C, _J, _B, _T = GENERAL, COMMUNICATION, "kernels and JIT", "build", "tests and benchmarks"
_L = "launcher"
_NODE_TRANSPORTS = ("auto", "nvshmem", "gin", "all_to_all")
_LEVELS = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL")

_INDEX_FORWARDS, _INDEX_BACKWARDS = ("auto", "gather", "blocks"), ("auto", "queries", "keys")
_GENERAL = (
    Variable(PREFIX + "LOG_LEVEL", "level", "WARN", _G, "Level of the package logger; unknown is WARN.", _LEVELS),
    _flag("SANITY_CHECK", _G, "Expensive checks, such as overlapping slices of a kernel call, and indices on GPUs."),
    _choice("KERNEL_BACKEND", _G, "Kernel backend.", "ffa", ("ffa", "sdpa", "sdpa_ol", "fa4", "cudnn_flex")),
    _flag("SDPA_BACKEND", _G, "Earlier spelling of KERNEL_BACKEND=sdpa."),
    _flag("FA4_BACKEND", _G, "Earlier spelling of KERNEL_BACKEND=fa4."),
    _choice("INDEX_FORWARD", _G, "Forward of lists of blocks: how keys are brought.", "auto", _INDEX_FORWARDS),
    _choice("INDEX_BACKWARD", _G, "Backward of lists of blocks: what stays with a CTA.", "auto", _INDEX_BACKWARDS),
    _choice("PRECISION", _G, "Cast q, k, v to this and out back.", None, ("bf16", "fp16", "fp32", "fp64")),
    _flag("DETERMINISTIC_MODE", _G, "Bitwise repeatable kernels and reductions."),
    _flag("PROFILE_MODE", _G, "Named intervals of flex_flash_attn_func, for magi_attn_ext.elapsed_ms_event."),
    _flag("AUTO_RANGE_MERGE", _G, "Merge of equal q ranges; work lists here always merge.", has_effect=False),
    _flag("CATGQA", _G, "Backward owns a whole q-head group; it always does here.", has_effect=False),
    _flag("FLATTEN_HEAD_GROUPS", _G, "Head groups as separate tokens; needs QO_COMM."),
    _flag("BWD_HIDE_TAIL_REDUCE", _G, "Hide the last gradient reduce behind the host stage."),
    _int(PREFIX + "DIST_ATTN_RUNTIME_DICT_SIZE", _G, "Keys kept per process group.", 1000, 0),
    _int(PREFIX + "DIST_ATTN_RUNTIME_DICT_MIB", _G, "Memory of the tables of kept keys; 0: any.", 512, 0),
    _int(PREFIX + "MIN_CHUNKS_PER_RANK", _G, "Least chunks per rank; bounds the chunk size.", 8, 1),
    _int(PREFIX + "HEAD_CHUNKS", _G, "Parts of the kv heads that travel and are computed one after the other.", 1, 1),
    _text(PREFIX + "RATES_FILE", _G, "File of `magi tune`; .cache/magi_attention/rates.json beside kernels if unset."),
    _flag("CPP_BACKEND", _G, "Range classes in C++; they are Python here.", has_effect=False),
    _text(
        PREFIX + "ENABLE_REMOTE_DEBUG",
        _G,
        "false, true (rank 0), all, or a comma list of ranks; read by debugpy_listen().",
        "false",
    ),
    _int("CUDA_DEVICE_MAX_CONNECTIONS", _G, "CUDA's hardware queues; 1 prefetches stage by stage.", 8, 1),
)
_COMMUNICATION = (
    _flag("HIERARCHICAL_COMM", _C, "Rows cross the network once for each node."),
    _text(PREFIX + "NODE_SIZE", _C, "Ranks of a node, as 8, or of each, as 8,8,4: for dispatch, two levels."),
    _choice("NODE_TRANSPORT", _C, "By what HIERARCHICAL_COMM crosses.", "auto", _NODE_TRANSPORTS),
    _int(PREFIX + "FFA_FORWARD_SM_MARGIN", _C, "SMs left to communication in forward.", None, 0),
    _int(PREFIX + "FFA_BACKWARD_SM_MARGIN", _C, "SMs left to communication in backward.", None, 0),
    _flag("QO_COMM", _C, "Queries and outputs move too."),
    _flag("FORWARD_HIGH_PRECISION_REDUCE", _C, "Partial outputs travel in float32 (with QO_COMM)."),
    _flag("BACKWARD_HIGH_PRECISION_REDUCE", _C, "Partial gradients travel in float32."),
    _flag("NATIVE_GRPCOLL", _C, "1: one launch and collectives over NVLink; 0: neither; unset: the first if possible."),
    _choice("DSINK_ALL_REDUCE_OP", _C, "Reduction of the sink gradient.", "none", ("none", "sum", "avg")),
)
_KERNELS = (
    _flag("NO_BUILD_CACHE", _J, "Do not memoise loaded kernel modules: each call looks its kernel up."),
    _text(PREFIX + "WORKSPACE_BASE", _J, "Folder that holds .cache/magi_attention; home if unset."),
    _flag("FORCE_JIT_BUILD", _J, "Ignore kernels compiled ahead and cached ones."),
    _flag("PORTABLE_KERNELS", _J, "Run on a 9.0 GPU what GPUs without kernels of their own run, to compare."),
    _flag("BUILD_VERBOSE", _J, "Show compiler output."),
    _flag("BUILD_DEBUG", _J, "Debug symbols, keep intermediate files."),
    _int("NVCC_THREADS", _J, "nvcc --threads; 2 if unset when building ahead.", 4, 1),
    _int("MAX_JOBS", _J, "Compilations at a time.", None, 1),
    _text(PREFIX + "FFA_FA4_CACHE_DIR", _J, "Folder of compiled kernels of FlashAttention-4; in .cache if unset."),
)
_BUILD = (
    Variable(PREFIX + "PREBUILD_FFA", "flag", True, _B, "Compile the attention kernels when installing."),
    _int(PREFIX + "PREBUILD_FFA_JOBS", _B, "Compilations at a time; by cores and memory if unset.", None, 1),
    _flag("SKIP_CUDA_BUILD", _B, "Build no native code when installing."),
    _text(PREFIX + "BUILD_REVISION", _B, "Git revision that goes into built libraries; wheels have it."),
    _text("CUDA_HOME", _B, "CUDA toolkit to compile with, the folder that holds bin/nvcc."),
    _text("CXX", _B, "C++ compiler of the host libraries.", "c++"),
    _flag("SKIP_MAGI_ATTN_EXT_BUILD", _B, "Skip the C++ helpers.", has_effect=False),
    _flag("SKIP_MAGI_ATTN_COMM_BUILD", _B, "Skip the native collectives.", has_effect=False),
    _text(PREFIX + "BUILD_COMPUTE_CAPABILITY", _B, "GPUs to build for, such as 80,90; those of this machine if unset."),
    _flag("ALLOW_BUILD_WITH_CUDA12", _B, "Allow CUDA 12; it always is here.", has_effect=False),
    _flag("FORCE_CXX11_ABI", _B, "C++ ABI override; native code here is C.", has_effect=False),
    _flag("DISABLE_SM90_FEATURES", _B, "Collectives for older GPUs.", has_effect=False),
    _text(PREFIX + "HOME", _B, "Read by nobody.", has_effect=False),
)
_LAUNCH = (
    _int("LOCAL_WORLD_SIZE", _L, "Ranks of this process's node, which torchrun sets.", None, 1),
    _int("GROUP_RANK", _L, "Number of this process's node, which torchrun sets.", None, 0),
    _text("MAGI_HOME", _L, "Folder of the launcher's sessions, on every node; ~/.magi if unset."),
    _text("MAGI_SOURCES", _L, "Folder of examples/, tests/ and benchmarks/ where they are not beside the package."),
    _text("MAGI_RUN_FOLDER", _L, "Folder of a node's files, which the launcher sets for its ranks."),
)
_TESTS = (
    *(
        _text(PREFIX + f"TEST_{what}", _T, "Comma list of patterns; only matching cases run.")
        for what in (
            "WORLD_SIZE",
            "ATTN_CONFIG",
            "NUM_HEADS",
            "HEAD_DIM",
            "DTYPE",
            "BACKEND",
            "OVERLAP_CONFIG",
            "RANDOM_TYPE_MAPPING",
        )
    ),
    _flag("PARAMETERIZE_RUN_IN_MP", _T, "Distribute cases over processes instead of repeating them."),
    _flag("UNITEST_PROFILE_MODE", _T, "Profile run of the pipeline test.", has_effect=False),
    _text(PREFIX + "COPYRIGHT_TEST_YEAR", _T, "Year of the header check.", has_effect=False),
)

_ALL = (*_GENERAL, *_COMMUNICATION, *_KERNELS, *_BUILD, *_LAUNCH, *_TESTS)
VARIABLES: Mapping[str, Variable] = {v.name: v for v in _ALL}
# Names as CPython's environment keeps them.
_KEYS: Mapping[str, Any] = {name: getattr(os.environ, "encodekey", str)(name) for name in VARIABLES}


def get(name: str, environ: Mapping[str, str] | None = None):
    """Typed value of the registered variable ``name`` now; ``ValueError`` if it cannot be parsed."""
    variable = VARIABLES[name]
    text = _text_of(name) if environ is None else environ.get(name)
    return variable.default if text is None else variable.parse(text)


def _text_of(name: str) -> str | None:
    """``os.environ.get``, without the exception that it raises and catches for a variable that is not set: 2 us."""
    data = getattr(os.environ, "_data", None)
    if type(data) is not dict:
        return os.environ.get(name)
    value = data.get(_KEYS[name])
    return None if value is None else os.environ.decodevalue(value)


def is_set(name: str) -> bool:
    """Is the registered variable ``name`` present, whatever its value?"""
    return _text_of(VARIABLES[name].name) is not None


def raw_entries(names: tuple[str, ...]) -> tuple[dict, tuple[str | bytes, ...]]:
    """The dictionary behind ``os.environ``, and the keys of registered variables in it.

    For native code on the path of every layer, which notices a change by looking there, in 10 ns a name.

    Raises:
        UnsupportedError: this Python keeps its environment in another way.
    """
    data = getattr(os.environ, "_data", None)
    if type(data) is not dict:
        raise UnsupportedError("os.environ of this Python is no wrapper of a dictionary; use CPython.")
    return data, tuple(os.environ.encodekey(VARIABLES[name].name) for name in names)


def watch(*names: str) -> Callable[[], tuple[str | bytes | None, ...]]:
    """A function that gives registered variables as they are in the environment, to be compared with another time; on
    CPython in 0.1 us a name. None for those that are not set."""
    data: Mapping[Any, Any]
    try:
        data, keys = raw_entries(names)
    except UnsupportedError:
        data, keys = os.environ, tuple(VARIABLES[name].name for name in names)
    return lambda: tuple(map(data.get, keys))


def names_in(*sections: str) -> tuple[str, ...]:
    """The registered variables of these sections."""
    return tuple(v.name for v in _ALL if v.section in sections)


def check_unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """One warning for all unknown ``MAGI_ATTENTION_*`` names and for flags that are neither 0 nor 1.

    Returns the sentences, one per finding; the warning is a ``UserWarning``.
    """
    environ = os.environ if environ is None else environ
    findings = []
    for name in sorted(n for n in environ if n.startswith(PREFIX)):
        variable = VARIABLES.get(name)
        if variable is None:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else "`magi env` lists what there is."
            findings.append(f"{name} is no variable of this package; {hint}")
        elif variable.kind == "flag" and environ[name] not in (*_PLAIN_OFF, "1"):
            findings.append(f"{name}={environ[name]} is off; only 1 turns it on.")
    if findings:
        warnings.warn(" ".join(findings), UserWarning, stacklevel=2)
    return findings


def list_table(environ: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """One row of strings per variable, for printing.

    Keys: name, type, default, value (empty if unset, ``invalid: ...`` if it cannot be parsed), section,
    effect (``yes`` or ``none in this build``), doc.
    """
    environ = os.environ if environ is None else environ
    rows = []
    for name, variable in VARIABLES.items():
        value = ""
        if name in environ:
            try:
                value = _shown(variable.parse(environ[name]))
            except ValueError as error:
                value = f"invalid: {error}"
        rows.append(
            {
                "name": name,
                "type": "|".join(variable.choices) or variable.kind,
                "default": _shown(variable.default),
                "value": value,
                "section": variable.section,
                "effect": "yes" if variable.has_effect else "none in this build",
                "doc": variable.doc,
            }
        )
    return rows


def _shown(value: object) -> str:
    if value is None or value == "":
        return "-"
    return str(int(value)) if isinstance(value, bool) else str(value)
