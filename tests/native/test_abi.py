# SPDX-License-Identifier: Apache-2.0
"""The mirrors agree with what a C compiler makes of the headers: sizes, offsets, constants, exported names."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from magi_attention.native import abi
from magi_attention.native.c_struct import fields
from magi_attention.native.comm import abi as comm_abi
from magi_attention.native.index import abi as index_abi
from magi_attention.native.planner import abi as schedule_abi
from magi_attention.testing.waiting import DEADLINE_S

INCLUDE = Path(__file__).resolve().parents[2] / "csrc" / "include"


def c_name(mirror: type) -> str:
    """IndexFwdParams: ``magi_ffa_index_fwd_params``."""
    family = "ffa_" if mirror.__module__ == index_abi.__name__ else ""
    if mirror is schedule_abi.WorkListHeader:
        return "magi_work_list"
    return f"magi_{family}" + re.sub("(?<!^)([A-Z])", r"_\1", mirror.__name__).lower()


MIRRORS = [x for m in (abi, schedule_abi, index_abi) for x in vars(m).values() if hasattr(x, "_fields_")]
STRUCTS = {c_name(x): x for x in MIRRORS if x is not abi.SegmentGroup}  # which has no name in C
CONSTANTS = {
    f"MAGI_{name}": getattr(schedule_abi if name in ("TRAVERSAL_WRAP", "LIST_SPLITS") else abi, name)
    for name in """
        SYMM_WORD_BYTES SYMM_TENSORS SYMM_SIGNALS_PER_RANK SYMM_REDUCE_ROWS SYMM_FAILED_SIGNAL ABI_VERSION
        TRAVERSAL_WRAP LIST_SPLITS OK INVALID_ARGUMENT UNSUPPORTED CUDA_ERROR CAPACITY BF16 FP16 FP32 ROW_PARTS
        ROW_RANGES RAW ROWS_ALL ROWS_INT32 RANGES_INT32 RANGES_INT64 FWD BWD
    """.split()
}

# ---- parameters of the row kernels, which are packed without a mirror
LIST, PART = abi.ROW_LIST.size, abi.ROW_PART.size
# (struct, field) -> where the packed parts put it
COPY, FILL, REDUCE, MERGE = (s.size for s in (abi.ROW_COPY, abi.ROW_FILL, abi.ROW_REDUCE, abi.ROW_MERGE))
LSE = abi.ROW_MERGE_LSE.size
ROW_OFFSETS = {
    ("magi_row_copy_params", "in_rows"): COPY,
    ("magi_row_copy_params", "out_rows"): COPY + LIST,
    ("magi_row_copy_params", "stream"): COPY + 2 * LIST,
    ("magi_row_copy_params", "part"): COPY + 2 * LIST + 8,
    ("magi_row_fill_params", "rows"): FILL,
    ("magi_row_fill_params", "out"): FILL + LIST,
    ("magi_row_fill_params", "stream"): FILL + LIST + 8,
    ("magi_row_reduce_params", "rows"): REDUCE - 24,
    ("magi_row_reduce_params", "stream"): REDUCE,
    ("magi_row_reduce_params", "part"): REDUCE + 8,
    ("magi_row_merge_params", "rows"): MERGE - 24,
    ("magi_row_merge_params", "stream"): MERGE,
    ("magi_row_merge_params", "in_lse"): MERGE + 8,
    ("magi_row_merge_params", "part"): MERGE + 8 + LSE,
}
ROW_SIZES = {
    "magi_row_list": LIST,
    "magi_row_part": PART,
    "magi_row_copy_params": COPY + 2 * LIST + 8 + abi.ROW_PARTS * PART,
    "magi_row_fill_params": FILL + LIST + 16,
    "magi_row_reduce_params": REDUCE + 8 + abi.ROW_PARTS * PART,
    "magi_row_merge_params": MERGE + 8 + LSE + PART,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, int]:
    """What the C compiler says: ``struct``, ``struct.field`` and constants."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("There is no C compiler.")
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "magi/symm.h"']
    lines += ['#include "magi/schedule.h"', '#include "magi/index.h"', '#include "magi/rows.h"', "int main(void) {"]
    for name, mirror in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in mirror._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    lines += [f'printf("{name} %zu\\n", sizeof({name}));' for name in ROW_SIZES]
    lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for name, field in ROW_OFFSETS]
    lines += [f'printf("{name} %d\\n", (int)({name}));' for name in CONSTANTS]
    lines.append("return 0; }")
    folder = tmp_path_factory.mktemp("abi")
    source, probe = folder / "probe.c", folder / "probe"
    source.write_text("\n".join(lines))
    command = [compiler, "-std=c11", f"-I{INCLUDE}", str(source), "-o", str(probe)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    out = subprocess.run([str(probe)], capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    return {name: int(value) for name, value in (line.split() for line in out.splitlines())}


@pytest.mark.parametrize("name", STRUCTS)
def test_structs(measured, name):
    mirror = STRUCTS[name]
    assert ctypes.sizeof(mirror) == measured[name]
    for field, *_ in mirror._fields_:
        assert getattr(mirror, field).offset == measured[f"{name}.{field}"], field
    # No field of the header is left out: the fields cover the struct but for padding at its end.
    last = mirror._fields_[-1][0]
    assert ctypes.sizeof(mirror) - getattr(mirror, last).offset - getattr(mirror, last).size < 8


def test_constants(measured):
    assert {name: measured[name] for name in CONSTANTS} == CONSTANTS
    assert ctypes.sizeof(abi.TileSegment) == 4 * abi.SEGMENT_WORDS


def test_rows_are_packed_as_c_lays_them_out(measured):
    assert {name: measured[name] for name in ROW_SIZES} == ROW_SIZES
    assert {key: measured[".".join(key)] for key in ROW_OFFSETS} == ROW_OFFSETS


LIBRARIES = {  # headers, what is bound, and functions of another header that a library has, too
    "kernels and planner": (
        ("abi.h", "symm.h", "schedule.h", "index.h"),
        {
            **abi.PLANNER_FUNCTIONS, **abi.FFA_FUNCTIONS, **abi.REMOTE_FUNCTIONS, **abi.PORTABLE_FUNCTIONS,
            **abi.COMMON_FUNCTIONS, **index_abi.FUNCTIONS,
        },
        set(),
    ),
    "NVSHMEM": (("comm.h",), comm_abi.COMM_FUNCTIONS, set()),
    "GIN": (("gin.h",), comm_abi.GIN_FUNCTIONS, {f"magi_comm_{x}" for x in ("put", "relay", "wait", "sum", "end")}),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_function_of_the_headers_is_bound_with_as_many_arguments(name):
    headers, bound, others = LIBRARIES[name]
    text = re.sub(r"/\*.*?\*/", "", "".join((INCLUDE / "magi" / h).read_text() for h in headers), flags=re.DOTALL)
    declared = dict(re.findall(r"MAGI_EXPORT [\w\s*]*?\b(magi_\w+)\(([^)]*)\)", text))
    assert set(declared) | others == set(bound)
    for function, arguments in declared.items():
        count = 0 if arguments.strip() == "void" else arguments.count(",") + 1
        assert len(bound[function][1]) == count, function


def test_text_of_a_struct():
    class Inner(ctypes.Structure):
        _fields_ = fields("int32 a b")

    class Outer(ctypes.Structure):
        _fields_ = fields("""
            float x
            Inner[2] pairs
            void* at
        """, Inner=Inner)  # fmt: skip

    assert [name for name, _ in Outer._fields_] == ["x", "pairs", "at"]
    assert (ctypes.sizeof(Inner), Outer.pairs.offset, Outer.pairs.size, Outer.at.offset) == (8, 4, 16, 24)
    with pytest.raises(KeyError, match="int16"):
        fields("int16 a")
