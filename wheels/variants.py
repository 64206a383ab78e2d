# SPDX-License-Identifier: Apache-2.0
"""Kernels of every GPU family under one name, of which an installer takes the wheel by the GPU: wheel variants.

    ci/build_wheels --variants                  every wheel of kernels once more, as a variant beside it
    python wheels/variants.py WHEEL ... [--out DIR]

A variant is a copy of a checked wheel: another name, a label behind the tags, and dist-info/variant.json, which says
by `sm_arch` and the CUDA version of the driver where it runs. wheels/index.py adds what an index has to say of all
variants. The format is that of drafts (PEP 825, and PEP 850 for who asks the GPU) as uv 0.13.8 reads them, with
`--preview-features wheel-variants`; pip passes such files over.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
import tempfile
import uuid
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]

import matrix  # noqa: E402

from magi_attention.native import info  # noqa: E402

SCHEMA = "https://variants-schema.wheelnext.dev/peps/850/v0.2.0.json"
NAMESPACE = "nvidia"
# Whose code tells the properties of a GPU. uv has its own copy of it, and so installs nothing for that.
PROVIDER = {
    "requires": ["nvidia-variant-provider>=0.0.1,<1"],
    "plugin-api": "nvidia_variant_provider.plugin:NvidiaVariantPlugin",
}


def common_name(data: dict) -> str:
    """The one name of all kernels."""
    return data["packages"]["kernels"]["name"].partition("-{")[0]


def label(wheel: matrix.Wheel) -> str:
    """What stands behind the tags."""
    return f"{wheel.arch}_{wheel.cuda}"


def properties(wheel: matrix.Wheel) -> dict:
    """Where the wheel runs. Code for sm_80 runs on all of 8.x, which the provider knows; the driver must be of the
    major version of CUDA at least."""
    real = re.fullmatch(r"sm_(\d+)[af]?", wheel.target)[1]
    return {NAMESPACE: {"cuda_version_lower_bound": [f"{wheel.cuda[2:]}.0"], "sm_arch": [f"{real}_real"]}}


def metadata(variants: dict[str, dict]) -> dict:
    """The content of variant.json for one label, or of an index for all of a version."""
    return {
        "$schema": SCHEMA,
        "default-priorities": {"namespace": [NAMESPACE]},
        "providers": {NAMESPACE: PROVIDER},
        "variants": variants,
    }


def text(content: dict) -> str:
    """As the file has it."""
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def label_of(path: Path) -> str:
    """The label in a file name, empty if it is no variant. No wheel of ours has a build tag."""
    words = path.stem.split("-")
    return words[5] if len(words) == 6 else ""


def make(path: Path, out: Path, data: dict) -> Path:
    """Writes the variant of the wheel of kernels at ``path`` into ``out``."""
    wheel = matrix.find(path.name.split("-")[0], data)
    if wheel.kind != "kernels":
        raise SystemExit(f"{path.name} holds no kernels of a GPU family, so there is nothing to choose by.")
    name, version = common_name(data), path.name.split("-")[1]
    file = re.sub(r"[-_.]+", "_", name).lower()
    old, new = f"{wheel.file_name}-{version}.dist-info", f"{file}-{version}.dist-info"
    target = out / f"{file}-{path.stem.split('-', 1)[1]}-{label(wheel)}.whl"
    with zipfile.ZipFile(path) as source:
        entries = [(item, source.read(item)) for item in source.infolist() if not item.filename.endswith("/RECORD")]
    last, record = entries[-1][0], []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for item, body in entries:
            item.filename = item.filename.replace(old, new)
            if item.filename == f"{new}/METADATA":
                body = re.sub(rb"(?m)^Name: .*$", f"Name: {name}".encode(), body, count=1)
            if item.filename == f"{new}/sboms/{wheel.file_name}.cdx.json":
                item.filename = f"{new}/sboms/{file}.cdx.json"
                body = renamed(body, name, label(wheel))
            _add(archive, item, item.filename, body, record)
        _add(archive, last, f"{new}/variant.json", text(metadata({label(wheel): properties(wheel)})).encode(), record)
        _add(archive, last, f"{new}/RECORD", "".join([*record, f"{new}/RECORD,,\n"]).encode(), record)
    return target


def renamed(body: bytes, name: str, of: str) -> bytes:
    """The SBOM for another name, with a serial number of its own."""
    bom = json.loads(body)
    whole = bom["metadata"]["component"]
    whole["purl"] = whole["purl"].replace(whole["name"], name)
    whole["name"] = name
    bom["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, f"{bom['serialNumber']} {of}").urn
    return (json.dumps(bom, indent=1) + "\n").encode()


def _add(archive: zipfile.ZipFile, like: zipfile.ZipInfo, name: str, body: bytes, record: list[str]) -> None:
    """Adds a file with the time and rights of another, and its line of RECORD."""
    item = zipfile.ZipInfo(name, like.date_time)
    item.external_attr, item.compress_type = like.external_attr, zipfile.ZIP_DEFLATED
    archive.writestr(item, body)
    digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
    record.append(f"{name},sha256={digest},{len(body)}\n")


def of_wheel(path: Path) -> dict:
    """variant.json of the variant at ``path``; a sentence if it has none for its label."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"[^/]+\.dist-info/variant\.json", name):
                content = json.loads(archive.read(name))
                if list(content.get("variants", ())) == [label_of(path)]:
                    return content
    remedy = "make it again by ci/build_wheels --variants"
    raise SystemExit(f"{path} says nothing about its label {label_of(path)}; {remedy}.")


def of_index(paths: list[Path]) -> dict:
    """What an index says of all variants of one version."""
    return metadata({label_of(path): of_wheel(path)["variants"][label_of(path)] for path in sorted(paths)})


def problems(path: Path, data: dict) -> list[str]:
    """What is wrong with a variant beside its label: the library inside is not what its properties say."""
    known = {label(w): w for w in matrix.wheels(data) if w.kind == "kernels"}
    wheel = known.get(label_of(path))
    if wheel is None or of_wheel(path) != metadata({label(wheel): properties(wheel)}):
        return [f"{path.name}: has other properties than ci/matrix.json gives {label_of(path)}."]
    found = []
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        for name in (n for n in archive.namelist() if n.endswith(".so")):
            record = info.read_info(Path(archive.extract(name, folder)))
            if record is None or record.distribution != wheel.name or record.archs != (wheel.target,):
                found.append(f"{path.name}: {name} is not the library of {wheel.name}.")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="wheels/variants.py", description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, help="wheels of kernels")
    parser.add_argument("--out", type=Path, help="folder of the variants, that of each wheel by default")
    options = parser.parse_args(arguments)
    data, found = matrix.load(), []
    for path in options.wheels:
        made = make(path, options.out or path.parent, data)
        found += problems(made, data)
        print(made.name)
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
