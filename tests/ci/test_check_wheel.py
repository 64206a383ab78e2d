# SPDX-License-Identifier: Apache-2.0
"""Every rule of ci/check_wheel.py, by a good wheel and one that is doctored against the rule."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import check_wheel
import matrix
import pytest

from magi_attention.native import abi, build, info
from magi_attention.testing.waiting import DEADLINE_S
from magi_attention.version import __version__ as V

ROOT = Path(__file__).resolve().parents[2]
DATA = matrix.load()
TAG = DATA["platforms"]["x86_64"]["tag"]
KERNELS = matrix.find("magi-attention-kernels-sm90-cu13", DATA)
RECORD = info.BuildInfo(
    "ffa_sm90", V, abi.ABI_VERSION, "nvcc 13.0.88", ("sm_90a",), ("fwd",), "0123abc", KERNELS.name, "580"
)
SOURCE = """
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
extern "C" {
const char* magi_build_info(void) { static const char r[] = "magi-build-info:" RECORD; return r + 16; }
EXTRA
}
"""
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("g++") or not shutil.which("readelf"),
    reason="needs g++ and readelf to make libraries and to look into them",
)


def library(folder: Path, record: info.BuildInfo | None = RECORD, extra: str = "", flags: tuple = ()) -> bytes:
    """A small library with that record; ``extra`` is C source, ``flags`` go to the linker."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "nothing" if record is None else json.dumps(asdict(record))
    source = folder / "x.cpp"
    source.write_text(SOURCE.replace("RECORD", json.dumps(text)).replace("EXTRA", extra))
    command = ["g++", "-shared", "-fPIC", "-nostdlib", str(source), "-o", str(folder / "x.so"), *map(str, flags)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return (folder / "x.so").read_bytes()


def sbom(files: dict[str, bytes], name: str = KERNELS.name, version: str = V, parts: tuple = (), **change) -> dict:
    """An SBOM of these files, as CycloneDX has it; ``parts`` are (name, version)."""
    hashes = {n: hashlib.sha256(body).hexdigest() for n, body in files.items() if n.endswith(".so")}
    components = [{"type": "file", "name": n, "hashes": [{"content": h}]} for n, h in hashes.items()]
    parts = parts or (("cuda-cudart", "13.0"), ("nvcc", "13.0.88"), ("nvcc", "12.9.86"), ("pybind11", "3.1.0"))
    components += [{"type": "library", "name": n, "version": v} for n, v in (*parts, ("c++", "14"))]
    whole = {"name": name, "version": version, "pedigree": {"commits": [{"uid": "0123abc"}]}}
    return {"bomFormat": "CycloneDX", "metadata": {"component": whole}, "components": components, **change}


def wheel(
    folder: Path, files: dict[str, bytes], name: str = KERNELS.file_name, tags: str = f"py3-none-{TAG}",
    inside: str = "", pure: str = "false", requires: tuple = (f"magi_attention=={V}",), bom: dict | bytes | None = None,
) -> Path:  # fmt: skip
    """A wheel with these files and tags, and with an SBOM, a right one unless ``bom`` gives another."""
    path = folder / f"{name}-{V}-{tags}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in files.items():
            archive.writestr(file, data)
        head = f"Wheel-Version: 1.0\nRoot-Is-Purelib: {pure}\nTag: {inside or tags}\n"
        archive.writestr(f"{name}-{V}.dist-info/WHEEL", head)
        bom = sbom(files, name if name == "magi_attention" else name.replace("_", "-")) if bom is None else bom
        body = bom if isinstance(bom, bytes) else json.dumps(bom)
        archive.writestr(f"{name}-{V}.dist-info/sboms/{name}.cdx.json", body)
        lines = "".join(f"Requires-Dist: {r}\n" for r in requires)
        archive.writestr(f"{name}-{V}.dist-info/METADATA", f"Name: {name}\nVersion: {V}\n{lines}")
    return path


INSIDE = "magi_attention_kernels/sm90_cu13/libmagi_ffa_sm90.so"


@pytest.fixture
def targets(monkeypatch) -> set[str]:
    """What the libraries seem to hold of GPU code; the compiler here makes none."""
    have = {"sm_90a"}
    monkeypatch.setattr(check_wheel, "gpu_targets", lambda library: set(have))
    return have


def fake(folder: Path, name: str) -> Path:
    """An empty library of that name, to link against."""
    path = folder / name
    command = ["g++", "-shared", "-fPIC", "-nostdlib", "-x", "c++", "/dev/null", f"-Wl,-soname,{name}", "-o", str(path)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return path


def test_a_good_wheel_of_kernels(tmp_path, targets):
    path = wheel(tmp_path, {INSIDE: library(tmp_path)})
    assert check_wheel.check(path) == [] and check_wheel.load(path) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tags": f"cp311-cp311-{TAG}"}, ["is for cp311"]),
        ({"tags": f"py3-abi3-{TAG}"}, ["ABI tag abi3"]),
        ({"tags": "py3-none-linux_x86_64"}, ["has platform linux_x86_64"]),
        ({"inside": f"cp312-cp312-{TAG}"}, ["are not those of its name"]),
        ({"pure": "true"}, ["says that it is pure Python"]),
        ({"requires": ()}, [f"must ask for magi_attention=={V}"]),
        ({"requires": ("magi_attention>=1",)}, [f"must ask for magi_attention=={V}"]),
    ],
)
def test_doctored_names_and_tags(tmp_path, targets, change, words):
    found = check_wheel.check(wheel(tmp_path, {INSIDE: library(tmp_path)}, **change))
    assert len(found) == len(words) and all(w in f for w, f in zip(words, found)), found


def test_doctored_files(tmp_path, targets):
    good = library(tmp_path)
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE: good, "torch/lib.py": b""}))
    assert "would install torch" in found
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE.replace("sm90.so", "sm80.so"): good}))
    assert "holds libmagi_ffa_sm80.so; by its name it is libmagi_ffa_sm90.so" in found
    (found,) = check_wheel.check(wheel(tmp_path, {}))
    assert "holds no library" in found
    with pytest.raises(SystemExit, match="No wheel is called other"):
        check_wheel.check(wheel(tmp_path, {INSIDE: good}, name="other"))


def test_kernels_of_flash_attention_4():
    folder, blackwell = "magi_attention_kernels/sm100_cu13/flash_attn_4/r", replace(KERNELS, arch="sm100")
    names = [f"{folder}/{kind}-sm_100f-x.o" for kind in ("fwd", "bwd", "bwd_pre", "bwd_post")]
    names += [f"{folder}/{p}.LICENSE" for p in ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")]
    assert check_wheel.check_objects(blackwell, names) == [] == check_wheel.check_objects(KERNELS, [INSIDE])
    for wheel_, files, word in (
        (KERNELS, names, "only the wheel sm100"),
        (blackwell, [*names, "elsewhere/bwd-sm_100f-x.o"], "in one folder"),
        (blackwell, [n for n in names if "bwd_pre" not in n], "in both directions"),
        (blackwell, [*names, f"{folder}/bwd-sm_90a-x.o"], "for sm_100f"),
        (blackwell, names[:-1], "not its licence"),
    ):
        (found,) = check_wheel.check_objects(wheel_, files)
        assert word in found


def test_doctored_size(tmp_path, targets):
    data = {**DATA, "packages": {**DATA["packages"], "kernels": {**DATA["packages"]["kernels"], "max_mb": 0}}}
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE: library(tmp_path)}), data)
    assert "the limit is 0 MB" in found


@pytest.mark.parametrize("name", ["libtorch.so", "libcudart.so.13", "libc10.so"])
def test_doctored_dependencies(tmp_path, targets, name):
    flags = ("-Wl,--no-as-needed", fake(tmp_path, name))
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE: library(tmp_path, flags=flags)}))
    assert f"needs {name}" in found


@pytest.mark.parametrize(
    ("flag", "bad"),
    [("$ORIGIN", ""), ("/opt/cuda/lib", "/opt/cuda/lib"), ("$ORIGIN:/usr/lib", "/usr/lib"), ("$ORIGIN/../x", "../x")],
)
def test_doctored_search_paths(tmp_path, targets, flag, bad):
    found = check_wheel.check(wheel(tmp_path, {INSIDE: library(tmp_path, flags=(f"-Wl,-rpath,{flag}",))}))
    assert not found if not bad else ("searches" in found[0] and bad in found[0])


@pytest.mark.parametrize("name", ["helper", "PyInit__magi_host", "_Z3foov"])
def test_doctored_symbols(tmp_path, targets, name):
    body = library(tmp_path, extra=f"int {name}(void) {{ return 1; }}")
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE: body}))
    assert f"exports {name};" in found


def test_paths_of_the_machine_that_builds(tmp_path, targets):
    """A header that names its file puts its folder into the library, unless the builds' own flags map it."""
    package = tmp_path / "site-packages" / "nvshmem"
    package.mkdir(parents=True)
    (package / "api.h").write_text('extern "C" __attribute__((visibility("hidden"))) const char* where = __FILE__;')
    extra, include = '}\n#include "api.h"\nextern "C" {', f"-I{package}"
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE: library(tmp_path, extra=extra, flags=(include,))}))
    assert "api.h of the machine that built it" in found
    words = build._without_paths(tmp_path / "csrc", nvshmem=package)
    flags = [shlex.split(word)[0] for word in words if word != "-Xcompiler"]  # as the shell of nvcc reads them
    body = library(tmp_path, extra=extra, flags=(include, *flags))
    assert check_wheel.check(wheel(tmp_path, {INSIDE: body})) == [] and b"nvshmem/api.h" in body


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (b"-arch sm_90 -l nvshmem_device -L /home/me/nvshmem/lib,/usr/local/cuda/bin/../targets/x86_64-linux/lib", 1),
        (b"\0/home/me/cuda-13.0/targets/x86_64-linux/lib/stubs\0 -L /home/me/cuda/targets/x86_64-linux/lib", 0),
        (b"\0/dvs/p4/build/sw/rel/main/init_device.cu\0/usr/include/c++/12/vector.h\0", 0),
        (b"\0/work/magi/csrc/comm/nvshmem.cu\0", 1),
        (b"\0csrc/comm/nvshmem.cu\0 a/b.h x=/y.h https://example.org/a.h \0/sys/bus/pci/devices/\0", 0),
    ],
)
def test_what_counts_as_such_a_path(words, want):
    assert len(check_wheel.build_paths(words)) == want


def test_doctored_glibc(tmp_path, targets, monkeypatch):
    plain = check_wheel.run
    rows = "  0x0010:   Name: GLIBC_2.38  Flags: none  Version: 3\n  0x0020:   Name: GLIBC_2.9  Flags: none\n"
    monkeypatch.setattr(check_wheel, "run", lambda c: rows if "-VW" in c else plain(c))
    path = wheel(tmp_path, {INSIDE: library(tmp_path)})
    (found,) = check_wheel.check(path)
    assert "needs glibc 2.38, and the tag says 2.28" in found
    assert check_wheel.check(path, platform=r"(many)?linux_\w+") == []


@pytest.mark.parametrize("have", [set(), {"sm_90"}, {"sm_90a", "sm_100a"}, {"sm_90a", "ptx of sm_90"}])
def test_doctored_gpu_code(tmp_path, targets, have):
    targets.clear()
    targets.update(have)
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE: library(tmp_path)}))
    assert "and its name says ['sm_90a']" in found


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "has no build record"),
        (replace(RECORD, version="0.1"), "is of version 0.1"),
        (replace(RECORD, abi=99), "ABI 99"),
        (replace(RECORD, revision=""), "has no git revision"),
        (replace(RECORD, distribution="magi-other"), "was built for magi-other"),
        (replace(RECORD, compiler="nvcc 12.9.86"), "was compiled by nvcc 12.9.86"),
    ],
)
def test_doctored_records(tmp_path, targets, record, words):
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE: library(tmp_path, record)}))
    assert words in found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.1"}, f"of {KERNELS.name} 0.1, and it is {KERNELS.name} {V}"),
        ({"name": "magi_attention"}, f"of magi_attention {V}, and it is {KERNELS.name} {V}"),
        ({"bomFormat": "SPDX"}, "has an SBOM of"),
        ({"files": {INSIDE: b"other"}}, f"has another {INSIDE} than its SBOM says"),
        ({"files": {}}, f"has another {INSIDE} than its SBOM says"),
        ({"more": "x/y.so"}, "has another x/y.so than its SBOM says"),
        ({"parts": (("nvcc", "13.0.88"),)}, "without cuda-cudart 13, of which it holds code"),
        ({"parts": (("nvcc", "13.0.88"), ("cuda-cudart", "12.9"))}, "without cuda-cudart 13"),
        ({"parts": (("nvcc", "13.0.87"), ("cuda-cudart", "13.0"))}, "without nvcc 13.0.88, the compiler of ffa_sm90"),
        ({"commit": "fedcba9"}, "of another commit than ffa_sm90, which is of 0123abc"),
        ({"text": b"{}"}, "that is no CycloneDX JSON"),
        ({"text": b"\xff"}, "that is no CycloneDX JSON"),
    ],
)
def test_doctored_sboms(tmp_path, targets, change, words):
    files = {INSIDE: library(tmp_path)}
    text, commit, more = (change.pop(key, None) for key in ("text", "commit", "more"))
    told = {**change.pop("files", files), **({more: b""} if more else {})}
    bom = sbom(told, **change)
    if commit:
        bom["metadata"]["component"]["pedigree"]["commits"] = [{"uid": commit}]
    (found,) = check_wheel.check(wheel(tmp_path, files, bom=text or bom))
    assert words in found


def test_a_wheel_without_an_sbom(tmp_path, targets):
    path = wheel(tmp_path, {INSIDE: library(tmp_path)})
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "bare.whl", "w") as bare:
        for name in archive.namelist():
            if "/sboms/" not in name:
                bare.writestr(name, archive.read(name))
    (tmp_path / "bare.whl").rename(path)
    (found,) = check_wheel.check(path)
    assert f"has no sboms/{KERNELS.file_name}.cdx.json" in found


def test_what_an_sbom_has_to_name():
    held = check_wheel.held_of_others
    comm = matrix.find("magi-attention-comm-cu12", DATA)
    assert held(comm, [], DATA) == {"cuda-cudart": "12.", "nvidia-nvshmem-cu12": DATA["cuda"]["cu12"]["nvshmem"]}
    assert set(held(KERNELS, [INSIDE, "x.o"], DATA)) == {"cuda-cudart", *check_wheel.FA4_PACKAGES}
    assert set(held(matrix.find("magi_attention", DATA), [], DATA)) == {"pybind11"}


def main_wheel(folder: Path, python: str = "cp311", module: str = "cpython-311-x86_64-linux-gnu", **change) -> Path:
    record = replace(RECORD, name="planner", compiler="c++ 14", distribution="")
    host = library(folder / "host", record, change.pop("extra", "int PyInit__magi_host(void) { return 1; }"))
    files = {
        "magi_attention/lib/libmagi_planner.so": library(folder / "planner", record),
        f"magi_attention/lib/_magi_host.{module}.so": host,
    }
    pins = tuple(f"{n}=={V}; extra == 'x'" for n in matrix.names(DATA) if n != "magi_attention")
    kind = {"name": "magi_attention", "tags": f"{python}-{python}-{TAG}", "requires": pins, **change}
    return wheel(folder, files, **kind)


def test_the_main_wheel(tmp_path, targets):
    targets.clear()
    assert check_wheel.check(main_wheel(tmp_path)) == []
    (found,) = check_wheel.check(main_wheel(tmp_path, module="cpython-310-x86_64-linux-gnu"))
    assert "_magi_host.cpython-310" in found and "by its name it is _magi_host.cpython-311" in found
    found = check_wheel.check(main_wheel(tmp_path, python="cp39"))
    assert any("is for cp39" in f for f in found)
    found = check_wheel.check(main_wheel(tmp_path, requires=("magi-attention-kernels-sm90-cu13>=1",)))
    assert len(found) == len(matrix.names(DATA)) - 1 and all("must ask for magi-attention-" in f for f in found)
    targets.add("sm_90a")
    found = check_wheel.check(main_wheel(tmp_path))
    assert len(found) == 2 and all("its name says none" in f for f in found)


def for_arm(body: bytes) -> bytes:
    """The library with the machine number of aarch64 in its head."""
    return body[:18] + (183).to_bytes(2, "little") + body[20:]


def test_wheels_of_another_machine(tmp_path, targets, capsys):
    """They are held to the tag, loader and module names of their machine; nothing of them is opened here."""
    arm = DATA["platforms"]["aarch64"]["tag"]
    body = library(tmp_path)
    good = wheel(tmp_path, {INSIDE: for_arm(body)}, tags=f"py3-none-{arm}")
    assert check_wheel.check(good) == [] == check_wheel.load(good)
    assert "was not loaded, as it is for aarch64" in capsys.readouterr().out
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE: body}, tags=f"py3-none-{arm}"))
    assert "is for machine 62 of ELF, and aarch64 is 183" in found
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE: for_arm(body)}))
    assert "is for machine 183 of ELF, and x86_64 is 62" in found
    flags = ("-Wl,--no-as-needed", fake(tmp_path, "ld-linux-x86-64.so.2"))
    linked = library(tmp_path, flags=flags)
    assert check_wheel.check(wheel(tmp_path, {INSIDE: linked})) == []
    (found,) = check_wheel.check(wheel(tmp_path, {INSIDE: for_arm(linked)}, tags=f"py3-none-{arm}"))
    assert "needs ld-linux-x86-64.so.2" in found
    with pytest.raises(SystemExit, match="sm80-cu13 is built for x86_64, and not for aarch64"):
        check_wheel.check(wheel(tmp_path, {}, "magi_attention_kernels_sm80_cu13", f"py3-none-{arm}"))
    main = matrix.find("magi_attention", DATA, machine="aarch64")
    names = ["magi_attention/lib/libmagi_planner.so", "magi_attention/lib/_magi_host.cpython-311-{}-linux-gnu.so"]
    path = Path(f"magi_attention-{V}-cp311-cp311-{arm}.whl")
    assert check_wheel.check_files(path, main, [name.format("aarch64") for name in names]) == []
    assert len(check_wheel.check_files(path, main, [name.format("x86_64") for name in names])) == 1


def test_a_library_that_does_not_load(tmp_path, targets):
    path = wheel(tmp_path, {INSIDE: b"\x7fELF no library"})
    (found,) = check_wheel.load(path)
    assert "cannot be loaded" in found


def test_missing_tools_are_sentences(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(SystemExit, match="pip install nvidia-cuda-cuobjdump"):
        check_wheel.run(["cuobjdump", "--list-elf", "x"])


def test_command_line(tmp_path, targets, capsys):
    good, bad = wheel(tmp_path, {INSIDE: library(tmp_path)}), wheel(tmp_path, {}, tags="py3-none-linux_x86_64")
    assert check_wheel.main(["--load", str(good)]) == 0 and "good" in capsys.readouterr().out
    assert check_wheel.main([str(good), str(bad)]) == 1
    out = capsys.readouterr().out
    assert f"{good.name}: " in out and "holds no library" in out
    assert check_wheel.main(["--any-platform", str(bad)]) == 1
    assert "linux_x86_64, and" not in capsys.readouterr().out
