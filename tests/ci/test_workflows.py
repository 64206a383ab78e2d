# SPDX-License-Identifier: Apache-2.0
"""Workflows are thin and safe by ci/check_workflows.py, whose rules can fail; lanes are called, releases are signed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import check_workflows as cw
import lanes
import matrix
import publish
import pytest

ROOT = Path(__file__).resolve().parents[2]
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; pip install pyyaml brings it.")
TEXTS = {path.stem: path.read_text() for path in cw.FOLDER.glob("*.yml")}
DIGEST = "0123456789abcdef0123456789abcdef01234567"
GOOD = f"""
on:
  pull_request:
permissions:
  contents: read
concurrency:
  group: x
jobs:
  one:
    runs-on: ubuntu-24.04
    timeout-minutes: 5
    steps:
      - uses: actions/checkout@{DIGEST} # v1.2.3
        with:
          persist-credentials: false
      - run: ci/lane lint --dry-run
"""
OTHER = f"      - uses: actions/checkout@{DIGEST[::-1]} # v1.2.4\n        with:\n          persist-credentials: false\n"
SIGNS = "    permissions:\n      id-token: write\n    timeout-minutes: 5\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (f"@{DIGEST} # v1.2.3", "@v1", "can change under its name"),
        (f"@{DIGEST} # v1.2.3", f"@{DIGEST[:7]} # v1.2.3", "can change under its name"),
        (" # v1.2.3", "", "needs its version behind it"),
        (" # v1.2.3", " # latest", "needs its version behind it"),
        ("      - run", f"{OTHER}      - run", "pinned twice"),
        ("    steps:", "    steps:\n      - {uses: actions/cache@v4}", "must begin its line"),
        ("    steps:", "    steps:\n      - uses: ./.github/workflows/none.yml", "none.yml is not here"),
        ("pull_request:", "pull_request_target:", "Started by pull_request_target"),
        ("  pull_request:", "  workflow_run:", "Started by workflow_run"),
        ("          persist", "          token: ${{ secrets.TOKEN }}\n          persist", "Uses secrets"),
        ("permissions:\n  contents: read\n", "", "other rights"),
        ("  contents: read", "  contents: write", "other rights"),
        ("permissions:\n  contents: read", "permissions: write-all", "other rights"),
        ("concurrency:\n  group: x\n", "", "no concurrency group"),
        ("    timeout-minutes: 5\n", "", "no time limit"),
        ("ubuntu-24.04", "ubuntu-latest", "changes under its name"),
        ("ubuntu-24.04", "[self-hosted, h100]", "any pull request runs on a machine of ours"),
        ("          persist-credentials: false", "          fetch-depth: 0", "leaves a token behind"),
        ("          persist", "          ref: ${{ github.head_ref }}\n          persist", "other code than"),
        ("lint --dry-run", "${{ github.head_ref }}", "is a way in"),
        ("ci/lane lint --dry-run", "pip install numpy", "no script of ci/"),
        ("ci/lane lint --dry-run", "python3 setup.py", "no script of ci/"),
        ("ci/lane lint --dry-run", "ci/lane lint && curl x", "more than one command"),
        ("ci/lane lint --dry-run", "ci/lane $(x)", "more than one command"),
        ("run: ci/lane lint --dry-run", "run: |\n          ci/lane lint\n          pip list", "more than one command"),
        ("ci/lane lint --dry-run", "ci/no_such_script", "ci/no_such_script is not here"),
        ("    timeout-minutes: 5\n", SIGNS.replace("id-token", "packages"), "other events than a tag"),
        ("    timeout-minutes: 5\n", SIGNS.replace("id-token", "actions"), "beyond reading and signing"),
        ("    timeout-minutes: 5\n", SIGNS.replace("write", "admin"), "beyond reading and signing"),
    ],
)  # fmt: skip
def test_each_rule_can_fail(old, new, words):
    assert cw.problems(GOOD) == []
    assert GOOD.count(old) == 1
    (problem,) = cw.problems(GOOD.replace(old, new))
    assert words in problem


def of_a_tag(right: str, steps: str = "") -> str:
    """A workflow whose one job has a right and is started by a tag."""
    text = GOOD.replace("  pull_request:", "  push:")
    text = text.replace("    timeout-minutes: 5\n", SIGNS.replace("id-token", right))
    return text[: text.index("      - uses")] + steps if steps else text


@pytest.mark.parametrize("right", ["id-token", "contents", "pages", "attestations"])
def test_what_signs_or_writes_runs_no_code_of_ours(right):
    is_pushed = "    if: github.event_name == 'push'\n    steps:"
    found = cw.problems(of_a_tag(right).replace("    steps:", is_pushed))
    assert len(found) == 2 and "takes code of the repository" in found[0] and "only PUBLISHERS may" in found[1]
    for command in ('cosign sign --yes "${IMAGE}"', 'gh release create "${TAG}" dist/*.whl'):
        assert cw.problems(of_a_tag(right, f"      - run: {command}\n").replace("    steps:", is_pushed)) == []
    for command in ("gh release delete v1", "cosign", "gh api x"):
        (problem,) = cw.problems(of_a_tag(right, f"      - run: {command}\n").replace("    steps:", is_pushed))
        assert "only PUBLISHERS may" in problem


def test_signing_needs_a_tag():
    tagged = of_a_tag("id-token", '      - run: cosign sign --yes "${IMAGE}"\n')
    assert ["signs also in a rehearsal" in p for p in cw.problems(tagged)] == [True]
    assert cw.problems(tagged.replace(SIGNS, SIGNS + "    if: github.event_name == 'push'\n")) == []


def test_labels_open_our_machines():
    ours = GOOD.replace("ubuntu-24.04", "[self-hosted, h100]")
    ours = ours.replace("  pull_request:", "  pull_request: {types: [labeled]}")
    assert len(cw.problems(ours)) == 1
    labelled = ours.replace("    steps:", "    if: github.event.label.name == 'run-gpu'\n    steps:")
    assert cw.problems(labelled) == []


def test_every_step_of_a_lane_is_called_and_every_call_is_a_lane():
    called = re.findall(r"run: ci/lane (\S+)", "\n".join(TEXTS.values()))
    assert set(called) <= set(lanes.LANES) and len(called) == len(set(called))
    steps = {step for name in called for step in lanes.LANES[name].steps}
    assert [name for name, lane in lanes.LANES.items() if not steps.issuperset(lane.steps)] == []


def test_pythons_are_those_of_the_matrix():
    pythons = matrix.load()["pythons"]
    chosen = yaml.safe_load(TEXTS["ci"])["jobs"]["unit"]["strategy"]["matrix"]["python"]
    assert set(chosen) <= set(pythons) and (chosen[0], chosen[-1]) == (pythons[0], pythons[-1])


def test_what_is_published_was_checked_and_signed_first():
    release = yaml.safe_load(TEXTS["release"])
    jobs = release["jobs"]
    assert cw.triggers(release)["push"] == {"tags": ["v*"]}
    order = {name: job.get("needs") for name, job in jobs.items()}
    assert order == {
        "tag": None, "build": "tag", "attest": "build", "release": "attest", "index": "release", "pages": "index",
        "image": "attest", "sign-image": "image",
    }  # fmt: skip
    assert jobs["build"] == {"needs": "tag", "uses": "./.github/workflows/wheels.yml"}  # which gets no right to sign
    assert "workflow_call" in cw.triggers(yaml.safe_load(TEXTS["wheels"]))
    signed = jobs["attest"]["steps"][-1]
    assert signed["uses"].startswith("actions/attest-build-provenance@")
    assert signed["with"] == {"subject-path": "dist/*.whl"}
    artifact = yaml.safe_load(TEXTS["wheels"])["jobs"]["build"]["steps"][-1]["with"]["name"]
    assert artifact == "${{ matrix.wheel.kind }}-${{ matrix.wheel.name }}-${{ matrix.wheel.machine }}"
    # Every kind of wheel is signed, released and in the image; nothing goes to the public index.
    kinds = {wheel.kind for wheel in matrix.wheels(matrix.load())}
    for name in ("attest", "release", "image"):
        (download,) = (step for step in jobs[name]["steps"] if "download-artifact" in step.get("uses", ""))
        assert {k for k in kinds if k in re.split(r"[{},-]", download["with"]["pattern"])} == kinds
        assert download["with"]["path"] == "dist"
    assert jobs["release"]["steps"][-1]["run"].endswith(" dist/*.whl") and "pypi" not in TEXTS["release"].lower()
    rights = {name: {r for r, level in (job.get("permissions") or {}).items() if level == "write"}
              for name, job in jobs.items()}  # fmt: skip
    assert {name: right for name, right in rights.items() if right} == {
        "attest": {"id-token", "attestations"}, "release": {"contents"}, "pages": {"id-token", "pages"},
        "image": {"packages"}, "sign-image": {"id-token", "packages"},
    }  # fmt: skip
    # What is signed is what was pushed, by digest.
    assert set(jobs["image"]["outputs"]) == {"runtime", "test"}
    sign = jobs["sign-image"]["steps"][-1]
    assert sign["run"] == 'cosign sign --yes "${RUNTIME}" "${TEST}"'
    assert sign["env"] == {name.upper(): f"${{{{ needs.image.outputs.{name} }}}}" for name in ("runtime", "test")}


def verify_line() -> list[str]:
    """The words of `cosign verify` in SECURITY.md."""
    text = (ROOT / "SECURITY.md").read_text()
    (block,) = re.findall(r"^```\n(cosign verify .*?)^```$", text, re.MULTILINE | re.DOTALL)
    return shlex.split(block.replace("\\\n", " "))


def identity(repository: str, ref: str, workflow: str) -> str:
    """Who a job of GitHub is to Fulcio: the file of its workflow at the ref that started it."""
    return f"https://github.com/{repository}/.github/workflows/{workflow}.yml@{ref}"


def test_an_image_is_verified_as_it_is_signed(tmp_path):
    """The line of SECURITY.md asks for the identity, the registry and the tag that the release workflow gives."""
    words = verify_line()
    options = dict(zip(words[3::2], words[4::2]))
    assert words[:2] == ["cosign", "verify"] and len(words) == 3 + 2 * len(options)
    repository, version = "OWNER/REPOSITORY", "VERSION"
    (name,) = (name for name, text in TEXTS.items() if "cosign sign" in text)
    workflow = yaml.safe_load(TEXTS[name])
    jobs = workflow["jobs"]
    (signs,) = (job for job in jobs.values() if any("cosign" in step.get("run", "") for step in job.get("steps", [])))
    # The certificate names the workflow that a tag started; one that it calls would give its own name and no such tag.
    assert "workflow_call" not in cw.triggers(workflow) and signs["if"] == "github.event_name == 'push'"
    (pattern,) = cw.triggers(workflow)["push"]["tags"]
    tag = pattern.replace("*", version)
    assert options == {
        "--certificate-oidc-issuer": "https://token.actions.githubusercontent.com",
        "--certificate-identity": identity(repository, f"refs/tags/{tag}", name),
    }
    # Without a key, and so by the identity that this right gives.
    assert signs["permissions"]["id-token"] == "write" and "--key" not in TEXTS[name]
    # The image that was pushed: the name that the job gives to ci/publish_image, and the tag of docker/bake.hcl.
    (line,) = (step["run"] for step in jobs["image"]["steps"] if step.get("id") == "publish")
    image = re.fullmatch(r'ci/publish_image "(.+)"', line)[1].replace("${GITHUB_REPOSITORY}", repository)
    (tmp_path / "magi_attention-1.whl").touch()
    values = publish.variables(image, tmp_path)
    bake = (ROOT / "docker" / "bake.hcl").read_text()
    tags = re.findall(r'"\$\{REPOSITORY\}:(.+?)"', bake)
    assert "${VERSION}${SUFFIX}" in tags and words[2] == f"{values['REPOSITORY']}:{version}" and not values["SUFFIX"]


def test_a_wheel_is_verified_as_it_is_attested():
    (line,) = re.findall(r"^gh attestation verify (.+)$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    words = shlex.split(line)
    (name,) = (name for name, text in TEXTS.items() if "actions/attest-build-provenance@" in text)
    assert dict(zip(words[1::2], words[2::2])) == {
        "--repo": "OWNER/REPOSITORY", "--signer-workflow": f"OWNER/REPOSITORY/.github/workflows/{name}.yml",
    }  # fmt: skip
