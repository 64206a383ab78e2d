# SPDX-License-Identifier: Apache-2.0
"""Writes packages into a folder that are called like flash-attn-4 and its compiler, and whose kernels are text files.

They keep the parts that ``kernels.fa4`` relies on: who asks which table for what, and how an object is written and
loaded. What differs between calls of one kernel and of another is as in the real ones.
"""

from __future__ import annotations

from pathlib import Path

INTERFACE = """
import os
import torch
from flash_attn.cute.tile_scheduler import HardwareInfo  # noqa: F401

class Kernel:
    def __init__(self, key):
        from flash_attn.cute import tile_scheduler
        self.text = f"{key} {tile_scheduler.HardwareInfo().get_max_active_clusters(1)}"
    def export_to_c(self, object_file_path, function_name):
        if os.environ.get("FAKE_FA4_FAILS"):
            raise SystemExit("the compiler broke")
        with open(object_file_path, "w") as file:
            file.write(self.text)

def ask(function, *key):
    if key not in function.compile_cache:
        function.compile_cache[key] = Kernel(key)

ARCH = int(os.environ["FLASH_ATTENTION_ARCH"][3:])

def _flash_attn_fwd(q, k, v, *, softmax_scale, softcap, pack_gqa, return_lse, mask_mod, aux_tensors,
                    block_sparse_tensors):
    assert not pack_gqa and return_lse and block_sparse_tensors.block_size
    group = q.shape[2] // k.shape[2]
    ask(_flash_attn_fwd, q.dtype, q.shape[3], v.shape[3], group, mask_mod.__cute_hash__, softcap, ARCH)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    return out, torch.empty(1, q.shape[2], q.shape[1], device=q.device), None, None, None

def _flash_attn_bwd(q, k, v, out, dout, lse, *, softmax_scale, softcap, mask_mod, aux_tensors, block_sparse_tensors):
    ask(_bwd_preprocess, q.dtype, q.shape[3])
    ask(_flash_attn_bwd, q.dtype, q.shape[3], q.shape[2] // k.shape[2], mask_mod.__cute_hash__, ARCH)
    ask(_bwd_postprocess_convert, q.dtype, q.shape[3], ARCH)
    return q, k, v

def _bwd_preprocess(): ...
def _bwd_postprocess_convert(): ...
"""

FILES = {
    "flash_attn/__init__.py": "",
    "flash_attn/cute/__init__.py": "",
    "flash_attn/cute/interface.py": INTERFACE,
    "flash_attn/cute/utils.py": "def scalar_to_ssa(a, dtype): return a\n",
    "flash_attn/cute/block_sparsity.py": "from collections import namedtuple\nBlockSparseTensorsTorch = namedtuple("
    "'B', 'mask_block_cnt mask_block_idx full_block_cnt full_block_idx block_size')\n",
    "flash_attn/cute/tile_scheduler.py": "class HardwareInfo:\n    def get_max_active_clusters(self, n): return -1\n",
    "cutlass/__init__.py": "Int32, range_constexpr, const_expr = int, range, lambda x: x\n",
    "cutlass/utils.py": "class HardwareInfo: ...\n",
    "cutlass/cute.py": """
class runtime:
    @staticmethod
    def load_module(path, enable_tvm_ffi):
        class Module:
            func = open(path).read()
        if not Module.func:
            raise RuntimeError("no object")
        return Module

def jit(function):
    return function
""",
}


def write(folder: Path, version: str = "9.9") -> Path:
    """The folder, to be put on the path."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("flash_attn_4", "nvidia_cutlass_dsl"):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder
