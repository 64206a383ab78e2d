# SPDX-License-Identifier: Apache-2.0
"""A program that, as VeOmni does, looks for ``flash_attn_cute.ffa_fa3`` and then calls the FA4 entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The order of a client: first its check of kernels and flags, then the mask, then an autograd function of its own.
LOOK = """
from flash_attn_cute.ffa_fa3 import flash_attn_interface
from flash_attn_cute.ffa_fa3.flash_attn_config import CONFIG
import sys
assert "torch" not in sys.modules, "to look costs nothing"
assert all(callable(getattr(flash_attn_interface, f"_flash_attn_{way}")) for way in ("forward", "backward"))
flags = CONFIG.get("build_flags", {})
assert all(flags.get(f"FLASHATTENTION_DISABLE_{name}") is False for name in ("BACKWARD", "SM90", "ARBITRARY"))
bucket = next(d for d in (64, 96, 128, 192, 256) if 40 <= d and not flags.get(f"FLASHATTENTION_DISABLE_HDIM{d}", False))
assert bucket == 64 and not flags.get("FLASHATTENTION_DISABLE_FP16", False)
from flash_attn_cute import tile_size, utils
if not hasattr(utils, "get_tile_sizes_by_backend"):
    utils.get_tile_sizes_by_backend = tile_size.get_tile_sizes_by_backend
"""
CLIENT = (
    LOOK
    + """
import torch
from magi_attention.api import AttnForwardMeta, flex_flash_attn_func
from magi_attention.common.ranges import AttnRanges
from magi_attention.functional.fa4 import fa4_bwd, fa4_fwd
from magi_attention.meta.collection.calc_meta import FA4AttnArg

class Client(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, arg):
        out, lse = fa4_fwd(q=q, k=k, v=v, sink=None, attn_arg=arg, softmax_scale=0.2, softcap=3.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arg = arg
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, *_):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv, _ = fa4_bwd(do=dout, q=q, k=k, v=v, sink=None, o=out, lse=lse, attn_arg=ctx.arg, softmax_scale=0.2,
                                softcap=3.0, deterministic=False)
        return dq, dk, dv, None

torch.manual_seed(0)
q, k, v = (torch.randn(50, h, 40, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
q_ranges = torch.tensor([[0, 20], [20, 50]], dtype=torch.int32)
k_ranges, types = torch.tensor([[0, 20], [10, 50]], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
arg = FA4AttnArg(q_ranges=AttnRanges.from_ranges(q_ranges.tolist()), k_ranges=AttnRanges.from_ranges(k_ranges.tolist()),
                 attn_type_map=types.tolist(), seqlen_q=50, seqlen_k=50, headdim=bucket)
out, lse = Client.apply(q, k, v, arg)
meta = AttnForwardMeta(lse=lse, max_logits=None)
want, same = flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types, softmax_scale=0.2, softcap=3.0)
weight = torch.randn_like(out)
assert torch.allclose(out, want) and torch.allclose(meta.lse, same.lse)
for a, b in zip(torch.autograd.grad(out, (q, k, v), weight), torch.autograd.grad(want, (q, k, v), weight)):
    torch.testing.assert_close(a, b)
"""
)


def run(code: str, *folders: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT)))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def folder() -> Path:
    command = [sys.executable, "-m", "magi_attention.compat.on_path"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    return Path(done.stdout.strip())


def test_a_client_starts_and_computes(folder):
    done = run(CLIENT, folder)
    assert done.returncode == 0, done.stderr


def test_it_is_not_there_unasked():
    assert "ModuleNotFoundError" in run("import magi_attention, flash_attn_cute").stderr


def test_an_installed_flash_attn_cute_stays_what_it_is(folder, tmp_path):
    """Its names, its modules and its own ffa_fa3 come first; only what it lacks is added."""
    installed = tmp_path / "flash_attn_cute"
    installed.mkdir()
    (installed / "__init__.py").write_text("from flash_attn_cute.interface import call\n__version__ = '9'\n")
    (installed / "interface.py").write_text("def call():\n    return 5\n")
    (installed / "tile_size.py").write_text("def get_tile_sizes_by_backend():\n    return (64, 64)\n")
    (installed / "utils.py").write_text("")
    look = "import flash_attn_cute as f; assert f.call() == 5 and f.__version__ == '9' and 'magi' not in f.__file__\n"
    done = run(look + LOOK + "\nassert utils.get_tile_sizes_by_backend() == (64, 64)", folder, tmp_path)
    assert done.returncode == 0, done.stderr
    own = installed / "ffa_fa3"
    own.mkdir()
    (own / "__init__.py").write_text("mine = True\n")
    done = run("import flash_attn_cute.ffa_fa3 as f; assert f.mine", folder, tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_is_not_there_says_what_to_call(folder):
    code = (
        "from flash_attn_cute.ffa_fa3.flash_attn_interface import _flash_attn_forward, _flash_attn_backward\n"
        "from flash_attn_cute.utils import get_tile_sizes_by_backend\n"
        "for function in (_flash_attn_forward, _flash_attn_backward, get_tile_sizes_by_backend):\n"
        "    try:\n        function(1, q=2)\n    except NotImplementedError as error:\n        print(error)\n"
    )
    lines = run(code, folder).stdout.splitlines()
    assert len(lines) == 3 and "fa4_fwd" in lines[0] and "fa4_bwd" in lines[1] and "tiles" in lines[2]
