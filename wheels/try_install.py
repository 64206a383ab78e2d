# SPDX-License-Identifier: Apache-2.0
"""Installs built wheels into empty environments and uses them there. Called as ci/check_install.

    ci/check_install [--dist DIR] [--python 3.12 ...] [--torch 2.13.0 ...] [--extra sm90] [--report FILE]
    ci/check_install --here [--dist DIR] [--extra sm90]

For each Python and each torch: a new virtual environment, torch, then the wheels of --dist by their extra. What follows
runs in another folder with nothing on PATH but that environment, so there is no compiler, no nvcc and no checkout: the
native libraries are loaded, two gloo ranks compute one attention, which is compared with that of PyTorch, `magi doctor
--static` finds no error, `magi explain` plans a mask, and on a Hopper GPU FFA runs forward and backward, compared with
float64, without a process started for it. Fails where one of these does, or takes longer than --limit seconds. Pythons
that are not here are named and left out. Torch comes from the index of pip's configuration; `uv` installs it faster if
on PATH. With --here nothing is fetched: the environment sees the torch of the Python that MAGI_PYTHON names.
"""

from __future__ import annotations

import argparse
import email
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "wheels")]

import matrix  # noqa: E402

import build  # noqa: E402

LOADS = """
import json, sys, magi_attention
from magi_attention.native import info, loader
import torch
planner, host = loader.load("planner"), loader.load_host()
path = loader.find("ffa_sm90")
record = info.read_info(path)
assert loader.build_info(loader.load("ffa_sm90")) == record
assert all(str(place).startswith(sys.prefix) for place in (magi_attention.__file__, path)), (magi_attention, path)
print(json.dumps({"magi": magi_attention.__version__, "torch": torch.__version__, "kernels": record.distribution,
                  "compiler": record.compiler, "revision": record.revision[:12], "variants": len(record.variants)}))
"""
TWO_RANKS = """
import multiprocessing, tempfile, torch, torch.distributed as dist
from magi_attention.api import Mask, attend, make_plan
def rank(r, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=r, world_size=2)
    mask = Mask.varlen([0, 137, 600, 1000], causal=True)
    plan = make_plan(mask, 2, num_heads_q=4, num_heads_kv=2, head_dim=16)
    torch.manual_seed(0)
    full = [torch.randn(1000, heads, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    out, _ = attend(*(plan.shard(x) for x in full), plan)
    out = plan.gather(out)
    q, k, v = (x.transpose(0, 1)[None] for x in full)
    dense = torch.from_numpy(mask.to_dense())
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    error = (out - want[0].transpose(0, 1)).abs().max().item()
    assert error < 1e-12, error
    if r == 0:
        print(f"two ranks, largest error {error:.1e}")
    dist.destroy_process_group()
with tempfile.TemporaryDirectory() as folder:
    ranks = [multiprocessing.get_context("fork").Process(target=rank, args=(r, folder + "/store")) for r in range(2)]
    [r.start() for r in ranks]
    [r.join() for r in ranks]
    assert [r.exitcode for r in ranks] == [0, 0]
"""
ON_A_GPU = """
import os, sys, torch
started = []
kinds = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system")
sys.addaudithook(lambda event, details: started.append((event, details)) if event in kinds else None)
if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
    print("left out, torch sees no GPU that these kernels are for")
    raise SystemExit
os.environ["MAGI_ATTENTION_KERNEL_BACKEND"] = "ffa"  # a wish, so that no other one takes over
from magi_attention.api import Mask, flex_flash_attn_func
mask = Mask.varlen([0, 137, 600, 1000], causal=True)
dense, ranges = torch.from_numpy(mask.to_dense()).cuda(), mask.slices.tensors("cuda")
worst = 0.0
for dtype, dim in ((torch.bfloat16, 128), (torch.float16, 64)):
    torch.manual_seed(0)
    leaves = [torch.randn(1000, h, dim, device="cuda", dtype=dtype, requires_grad=True) for h in (8, 2, 2)]
    dout = torch.randn(1000, 8, dim, device="cuda", dtype=dtype)
    out, _ = flex_flash_attn_func(*leaves, *ranges)
    got = [out, *torch.autograd.grad(out, leaves, dout)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = (x.transpose(0, 1)[None] for x in exact)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = sdpa(q, k, v, attn_mask=dense, enable_gqa=True)[0].transpose(0, 1)
    want = [out, *torch.autograd.grad(out, exact, dout.double())]
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want)]
    assert max(errors) < 5e-3, (dtype, errors)
    worst = max(worst, *errors)
assert not started, started
print(f"forward and backward on {torch.cuda.get_device_name()}, largest relative error {worst:.1e}")
"""
DOCTOR = ["doctor", "--static"]
EXPLAIN = ["explain", "--docs", "30000,2000,66000,33072", "--cp", "256", "--no-pictures"]


def needs(dist: Path) -> list[str]:
    """What the main package demands of others, as its wheel says. These alone come from an index, never ours."""
    wheels = sorted(dist.glob("magi_attention-*.whl"))
    if not wheels:
        raise SystemExit(f"{dist} has no wheel of magi_attention; run ci/build_wheels, or name its folder in --dist.")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist", [])
    return [need for need in said if "extra ==" not in need]


def make(python: Path, folder: Path, torch: str, dist: Path) -> list:
    """An environment with that torch, and what the wheels in ``dist`` need of others; returns its pip."""
    build.run([python, "-m", "venv", folder])
    own = folder / "bin" / "python"
    uv = shutil.which("uv")
    install = [uv, "pip", "install", "--python", own] if uv else [own, "-m", "pip", "install"]
    links = [word for place in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", place)]
    build.run([*install, "--quiet", *links, f"torch=={torch}", *needs(dist)])
    return [own, "-m", "pip"]


def make_here(folder: Path) -> list:
    """An environment that sees the packages beside the torch of this Python, and no others; returns its pip."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{sys.executable} has no torch; name in MAGI_PYTHON the Python that has one.")
    build.run([sys.executable, "-m", "venv", "--without-pip", folder])
    own = folder / "bin" / "python"
    site = Path(build.run([own, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (site / "here.pth").write_text(str(Path(spec.submodule_search_locations[0]).parent) + "\n")
    return [sys.executable, "-m", "pip", "--python", own]


def install(pip: list, dist: Path, extra: str) -> float:
    """The wheels by their extra, from ``dist`` alone; returns the seconds that it took."""
    started = time.monotonic()
    name = f"magi_attention[{extra}]" if extra else "magi_attention"
    build.run([*pip, "install", "--quiet", "--no-index", "--find-links", dist, name])
    return time.monotonic() - started


def use(folder: Path, command: list[str], home: Path) -> tuple[float, str]:
    """Runs a command of the environment with nothing else around; seconds and its last line."""
    environment = {"PATH": str(folder / "bin"), "HOME": str(home), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_HOME": str(home)}  # no nvcc, also where /usr/local/cuda has one
    if drivers := os.environ.get("LD_LIBRARY_PATH"):
        environment |= {"LD_LIBRARY_PATH": drivers}  # where some machines have those of the GPU
    started = time.monotonic()
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:2])} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return time.monotonic() - started, done.stdout.strip().splitlines()[-1]


def try_one(version: str, torch: str, options: argparse.Namespace) -> dict:
    """One Python with one torch; what was seen, as plain data."""
    interpreter = build.find_python(version)
    if interpreter is None:
        return {"python": version, "torch": torch, "left_out": "there is no such Python here"}
    with tempfile.TemporaryDirectory(prefix="magi_install_") as place:
        folder = Path(place, "venv")
        try:
            pip = make(interpreter, folder, torch, options.dist.resolve())
        except SystemExit as error:
            if "No matching distribution" in str(error) or "No solution found" in str(error):
                return {"python": version, "torch": torch, "left_out": "the index has no such torch for it"}
            raise
        return {"python": version, "torch": torch} | seen(folder, pip, options)


def try_here(options: argparse.Namespace) -> dict:
    """This Python with its torch; what was seen, as plain data."""
    with tempfile.TemporaryDirectory(prefix="magi_install_") as place:
        folder = Path(place, "venv")
        pip = make_here(folder)
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return {"python": version, "torch": metadata.version("torch")} | seen(folder, pip, options)


def seen(folder: Path, pip: list, options: argparse.Namespace) -> dict:
    """What the wheels did in an environment, with the seconds of each step."""
    row: dict = {"install_s": install(pip, options.dist.resolve(), options.extra)}
    home = folder.parent / "home"
    home.mkdir()
    python, magi = str(folder / "bin" / "python"), str(folder / "bin" / "magi")
    loads = LOADS if options.extra else LOADS.split("path =")[0] + "print('{}')"
    row["load_s"], text = use(folder, [python, "-c", loads], home)
    row |= {"seen": json.loads(text)}
    row["two_ranks_s"], row["two_ranks"] = use(folder, [python, "-c", TWO_RANKS], home)
    row["doctor_s"], row["doctor"] = use(folder, [magi, *DOCTOR], home)
    row["explain_s"], _ = use(folder, [magi, *EXPLAIN], home)
    if options.extra:
        row["ffa_s"], row["ffa"] = use(folder, [python, "-c", ON_A_GPU], home)
    row["too_slow"] = [k for k in row if k.endswith("_s") and row[k] > options.limit]
    return {k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}


def main(arguments: list[str] | None = None) -> int:
    data = matrix.load()
    parser = argparse.ArgumentParser(prog="ci/check_install", description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels, dist by default")
    parser.add_argument("--python", action="append", metavar="X.Y", help="instead of all of ci/matrix.json")
    parser.add_argument("--torch", action="append", metavar="X.Y.Z", help="instead of that of ci/constraints.txt")
    parser.add_argument("--here", action="store_true", help="only beside the torch of this Python; nothing is fetched")
    parser.add_argument("--extra", default="sm90", help="extra to install by; empty for none")
    parser.add_argument("--limit", type=float, default=60, metavar="S", help="seconds that a step may take")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what was seen as JSON")
    options = parser.parse_args(arguments)
    torches = options.torch or [data["torch"]["development"]]
    pairs = [(version, torch) for version in options.python or data["pythons"] for torch in torches]
    rows = []
    for row in [try_here(options)] if options.here else (try_one(*pair, options) for pair in pairs):
        rows.append(row)
        print(json.dumps(row), flush=True)
    failed = sum(bool(row.get("too_slow")) for row in rows)
    if options.report:
        options.report.write_text(json.dumps(rows, indent=1) + "\n")
    tried = [row for row in rows if "left_out" not in row]
    print(f"installs: {len(tried)} tried, {failed} too slow, {len(rows) - len(tried)} left out")
    return 1 if failed or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
