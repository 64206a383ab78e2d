# SPDX-License-Identifier: Apache-2.0
"""Kernels of FlashAttention-4 as files: names, folders, what is compiled and what is found; with stand-ins for the
wheel, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fake_flash_attn_4  # noqa: E402

from magi_attention.errors import BuildError  # noqa: E402
from magi_attention.kernels.fa4 import compile_jobs, objects  # noqa: E402
from magi_attention.kernels.fa4.objects import KernelObjects, Target, names_of  # noqa: E402
from magi_attention.kernels.fa4.precompile import SHIPPED, Shape, environment_of, why_not  # noqa: E402
from magi_attention.testing.waiting import DEADLINE_S  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
B200, B300, H100 = Target("sm_100a", 148), Target("sm_103a", 148), Target("sm_90a", 132)
FAMILY = Target("sm_100f", 148)


class Kernel:
    def __init__(self, text: str) -> None:
        self.text = text

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        assert function_name == "func"
        Path(object_file_path).write_text(self.text)


def load(path: Path) -> str:
    text = path.read_text()
    if not text:
        raise RuntimeError("an empty object")
    return text


def table(own: Path, target: Target = H100, kind: str = "fwd", folders: tuple[Path, ...] = ()) -> KernelObjects:
    return KernelObjects(kind, load, lambda: list(folders), lambda: own, lambda: target)


def test_what_was_compiled_is_found_by_the_next_process(tmp_path):
    first, key = table(tmp_path / "new"), ("bf16", 128, 8)
    assert key not in first
    first[key] = Kernel("code")
    assert key in first and first[key].text == "code" and first.compiled == 1
    second = table(tmp_path / "new")
    assert key in second and second[key] == "code" and second.compiled == 0
    assert ("bf16", 128, 4) not in second
    assert [p.name[0] for p in (tmp_path / "new").iterdir()] == ["f"], "a file that was written in part stayed"


def test_each_target_has_kernels_of_its_own(tmp_path):
    targets = [H100, Target("sm_90a", 114), B200]
    for target in targets:
        assert (1,) not in table(tmp_path, target)
        table(tmp_path, target)[(1,)] = Kernel(str(target))
    for target in targets:
        found = table(tmp_path, target)
        assert (1,) in found and found[(1,)] == str(target)


def test_only_the_forward_depends_on_the_number_of_sms(tmp_path):
    table(tmp_path, H100, "bwd")[(1,)] = Kernel("any")
    assert (1,) in table(tmp_path, Target("sm_90a", 114), "bwd")
    assert names_of("fwd", (1,), H100) != names_of("fwd", (1,), Target("sm_90a", 114))


def test_kernels_of_the_family_serve_both_and_own_ones_only_one(tmp_path):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    table(shipped, FAMILY)[("bf16", 128, 100, True)] = Kernel("family")
    for target, arch in ((B200, 100), (B300, 103)):
        found = table(own, target, folders=(shipped,))
        assert ("bf16", 128, arch, True) in found and found[("bf16", 128, arch, True)] == "family"
    assert ("bf16", 128, 100, True) not in table(own, Target("sm_100a", 152), folders=(shipped,))
    assert ("bf16", 128, 100, True) not in table(own, Target("sm_90a", 148), folders=(shipped,))
    table(own, B300)[("other", 103)] = Kernel("of the B300")
    assert ("other", 100) not in table(own, B200), "a kernel for 10.3 alone was taken for 10.0"


def test_a_broken_object_is_compiled_again(tmp_path, caplog):
    table(tmp_path)[(1,)] = Kernel("")
    again = table(tmp_path)
    assert (1,) not in again and "does not load" in caplog.text
    again[(1,)] = Kernel("code")
    assert (1,) in table(tmp_path)


def test_force_jit_build_ignores_files(tmp_path, monkeypatch):
    table(tmp_path)[(1,)] = Kernel("code")
    monkeypatch.setenv("MAGI_ATTENTION_FORCE_JIT_BUILD", "1")
    assert (1,) not in table(tmp_path)


def test_a_folder_that_cannot_be_written_is_said_and_the_kernel_is_used(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    it = table(tmp_path / "file" / "below")
    it[(1,)] = Kernel("code")
    assert (1,) in it and "MAGI_ATTENTION_FFA_FA4_CACHE_DIR" in caplog.text


def test_a_key_without_a_lasting_name_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="without a name"):
        names_of("fwd", (object(),), H100)


def test_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "release", lambda: "r1")
    monkeypatch.setenv("MAGI_ATTENTION_FFA_FA4_CACHE_DIR", "/given")
    assert objects.own_folder() == Path("/given/r1")
    monkeypatch.delenv("MAGI_ATTENTION_FFA_FA4_CACHE_DIR")
    monkeypatch.setenv("MAGI_ATTENTION_WORKSPACE_BASE", "/base")
    assert objects.own_folder() == Path("/base/.cache/magi_attention/flash_attn_4/r1")
    here = objects.folder_in_wheel(tmp_path / "magi_attention_kernels" / "sm100_cu13")
    here.mkdir(parents=True)
    (here.parent / "r0").mkdir()
    assert objects.wheel_folders([str(tmp_path), str(tmp_path)]) == [here]


def test_what_is_shipped_has_kernels():
    assert len(set(SHIPPED)) == len(SHIPPED)
    for shape in SHIPPED:
        reason = why_not(shape, (10, 0), needs_backward=True)
        assert reason is None or "not installed" in reason, (shape, reason)


# ---- in processes of its own, beside a stand-in for the wheel --------------------------------------------------

SHAPES = [Shape(64, 64, 1, 1), Shape(128, 128, 8, 2)]


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    folder = fake_flash_attn_4.write(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def compiled(folder: Path, capability=(10, 0), num_sms: int = 148, shapes=SHAPES, jobs: int = 1) -> int:
    done = list(compile_jobs.compile_all(shapes, capability, num_sms, folder, jobs))
    assert sorted(map(str, (d.shape for d in done))) == sorted(map(str, shapes))
    return sum(d.compiled for d in done)


@pytest.mark.nightly
def test_kernels_are_compiled_ahead_once(wheel, tmp_path):
    # Forward and backward of each; before and behind the backward, one for each head dim.
    assert compiled(tmp_path / "out") == 2 * len(SHAPES) + 2 * 2
    assert compiled(tmp_path / "out") == 0 and compiled(tmp_path / "out", (10, 3)) == 0
    assert compiled(tmp_path / "out", num_sms=152) == len(SHAPES)  # the forward alone
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.startswith("9.9-dsl9.9-") and len(list(folder.iterdir())) == 3 * len(SHAPES) + 4
    assert {p.read_text().split()[-1] for p in folder.glob("fwd-sm_100f-152-*")} == {"152"}, "another GPU was asked"


@pytest.mark.nightly
def test_two_runs_at_once_do_not_disturb_each_other(wheel, tmp_path):
    out, failed = tmp_path / "out", []

    def run() -> None:
        try:
            compiled(out, jobs=2)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failed and compiled(out) == 0
    (folder,) = out.iterdir()
    assert all(p.stat().st_size for p in folder.iterdir()) and not list(folder.glob(".*"))


def test_a_compiler_that_fails_is_quoted(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FA4_FAILS", "1")
    with pytest.raises(BuildError, match="the compiler broke"):
        compiled(tmp_path / "out")


CALL = """
import torch
from magi_attention.kernels.fa4 import precompile, wheel
from torch._subclasses.fake_tensor import FakeTensorMode
made = wheel.load_wheel()
with FakeTensorMode():
    precompile._call(made, precompile.Shape(128, 128, 8), (10, 0))
from flash_attn.cute import interface
print(sum(getattr(interface, name).compile_cache.compiled for name in wheel.objects.KINDS.values()))
""".replace("wheel.objects", "__import__('magi_attention.kernels.fa4.objects', fromlist=['KINDS'])")


@pytest.mark.nightly
@pytest.mark.parametrize("arch, target", (("sm_100", "sm_100a"), ("sm_103", "sm_103a")))
def test_calls_find_what_a_wheel_brings(wheel, tmp_path, monkeypatch, arch, target):
    package = wheel / "magi_attention_kernels" / "sm100_cu13"
    compiled(package / "flash_attn_4", shapes=[Shape(128, 128, 8)])
    path = os.pathsep.join([str(wheel), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for num_sms, want in (("148", "0"), ("160", "1")):
        told = {"FLASH_ATTENTION_ARCH": arch, "CUTE_DSL_ARCH": target, "FLASH_ATTENTION_NUM_SMS": num_sms}
        own = {"MAGI_ATTENTION_FFA_FA4_CACHE_DIR": str(tmp_path / "own"), "PYTHONPATH": path}
        environment = {**os.environ, **told, **own}
        done = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True)
        assert done.stdout.split() == [want], done.stderr[-2000:]


def test_the_environment_names_the_family():
    assert environment_of((10, 3), 152) == environment_of((10, 0), 152)
    assert environment_of((9, 0), 132)["CUTE_DSL_ARCH"] == "sm_90a"
