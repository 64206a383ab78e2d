# SPDX-License-Identifier: Apache-2.0
"""Manifests against the schemas of Kubernetes, and of the controllers' own resources where they are given.

MAGI_TEST_CRDS names files or folders with CustomResourceDefinitions (YAML), separated by colons, such as those that the
projects JobSet, LeaderWorkerSet and training-operator publish. A field that a schema does not know is an error.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path

import pytest
from launch_cases import CASES, TARGET, spec_of

from magi_attention.tools.launch.engines import k8s

NAMES = [name for name, case in CASES.items() if case["engine"] == "k8s"]
VARIABLES = {"API_KEY": "s3cr3ts3cr3t", "NCCL_DEBUG": "INFO"}


def manifests(name: str) -> list[dict]:
    """What is applied for a run with everything that can be asked for."""
    spec = spec_of(name)
    more = {"queue": "long"} if spec.k8s.template == "lws" else {"queue": "long", "time": "04:00:00"}
    spec = dataclasses.replace(spec, environment=VARIABLES, k8s=dataclasses.replace(spec.k8s, **more))
    return [json.loads(file.text) for file in k8s.run(spec, dataclasses.replace(TARGET, token="t0k3n")).files]


def pod_templates(value):
    """Every pod template in a manifest."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for inner in value.values():
            yield from pod_templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pod_templates(inner)


@pytest.fixture(scope="module")
def validate():
    """Raises if an object of Kubernetes itself does not fit its schema."""
    package = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")
    return lambda data: package.validate(data, package.latest_version(), strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_kubernetes_itself_knows(name, validate):
    manifest, secret = manifests(name)
    validate(secret)
    templates = list(pod_templates(manifest))
    assert templates
    for template in templates:
        metadata = {**template.get("metadata", {}), "name": "x"}
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    for job in manifest["spec"].get("replicatedJobs", []):
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job["template"]["spec"]})


def test_a_pod_that_does_not_fit_is_found(validate):
    (template, *_) = pod_templates(manifests("jobset")[0])
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
    validate(pod)
    for change in ({"workinDir": "/x"}, {"ports": [{"containerPort": "29500"}]}, {"env": [{"value": "no name"}]}):
        broken = copy.deepcopy(pod)
        broken["spec"]["containers"][0].update(change)
        with pytest.raises(Exception, match="unexpected|not of type|required"):
            validate(broken)


# ---- custom resources -----------------------------------------------------------------------------------


def strict(schema):
    """A schema of a CustomResourceDefinition as JSON Schema, in which no other fields may stand."""
    if isinstance(schema, list):
        return [strict(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        found["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            found["additionalProperties"] = False
    return found


def validator(definition: dict, version: str):
    from jsonschema import Draft202012Validator

    (found,) = (v for v in definition["spec"]["versions"] if v["name"] == version)
    schema = strict(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # the server knows it, and the schema does not tell
    return Draft202012Validator(schema)


@pytest.fixture(scope="module")
def definitions() -> dict[tuple[str, str], dict]:
    """(group, kind) -> the CustomResourceDefinition."""
    given = os.environ.get("MAGI_TEST_CRDS", "")
    if not given:
        pytest.skip("MAGI_TEST_CRDS names no files with CustomResourceDefinitions")
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    pytest.importorskip("jsonschema", reason="needs jsonschema, which kubernetes-validate brings")
    loader, found = getattr(yaml, "CSafeLoader", yaml.SafeLoader), {}
    for path in map(Path, given.split(os.pathsep)):
        for file in sorted(path.glob("*.yaml")) if path.is_dir() else [path]:
            for document in yaml.load_all(file.read_text(), loader):
                if document and document.get("kind") == "CustomResourceDefinition":
                    found[document["spec"]["group"], document["spec"]["names"]["kind"]] = document
    assert found, f"MAGI_TEST_CRDS is {given}, and there is no CustomResourceDefinition in it"
    return found


@pytest.mark.parametrize("name", NAMES)
def test_custom_resources(name, definitions):
    manifest = manifests(name)[0]
    group, _, version = manifest["apiVersion"].partition("/")
    definition = definitions.get((group, manifest["kind"]))
    if definition is None:
        pytest.skip(f"MAGI_TEST_CRDS has no {manifest['kind']} of {group}")
    check = validator(definition, version)
    assert [error.message for error in check.iter_errors(manifest)] == []
    plural = definition["spec"]["names"]["plural"]
    assert k8s.RESOURCES[spec_of(name).k8s.template] == f"{plural}.{group}"
    broken = copy.deepcopy(manifest)
    next(pod_templates(broken))["spec"]["containers"][0]["workinDir"] = "/x"
    assert [error.message for error in check.iter_errors(broken)], "the check can fail"
