# SPDX-License-Identifier: Apache-2.0
"""Requests to `magi explain` and its neighbours that would be ignored, end in a traceback or never end."""

from __future__ import annotations

import json
import os

import pytest

from magi_attention.cli import main

MASK = {"total": 8, "q_ranges": [[0, 4]], "k_ranges": [[0, 4]], "types": ["causal"]}


def refused(capsys, *arguments) -> str:
    """The one sentence with which a request is refused."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    error = captured.err.strip()
    assert captured.out == "" and "\n" not in error and error.startswith(f"magi {arguments[0]}: "), captured
    return error


@pytest.fixture
def mask_file(tmp_path):
    path = tmp_path / "mask.json"
    path.write_text(json.dumps(MASK))
    return str(path)


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        error = refused(capsys, "explain", "--tokens", "4096", "--cp", "2", "--out", str(out))
        assert str(out) in error and "choose another folder with --out" in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path, capsys):
    (tmp_path / "mine").mkdir(mode=0o500)
    assert "Permission denied" in refused(capsys, "explain", "--tokens", "4096", "--out", str(tmp_path / "mine"))


def test_a_file_in_the_way_of_a_picture(tmp_path, capsys):
    """What is found only while files are written is a sentence, too."""
    (tmp_path / "report.html").mkdir()
    assert main(["explain", "--tokens", "512", "--cp", "2", "--out", str(tmp_path)]) == 1
    assert f"{tmp_path / 'report.html'} cannot be used (Is a directory)" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    assert "choose another folder with --name" in refused(capsys, "run", "--name", "x", "--device", "cpu")


def test_links_of_nodes(capsys):
    arguments = ["explain", "--tokens", "65536", "--mask", "full", "--cp", "8", "--no-pictures", "--heads-kv", "1"]
    assert main([*arguments, "--node-size", "4", "--json"]) == 0
    links = json.loads(capsys.readouterr().out)["links"]
    shard = 65536 // 8 * 2 * 128 * 2  # bytes of K and V of a rank
    assert links["nodes"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert links["direct"]["network_bytes"] == 8 * 4 * shard and links["direct"]["node_bytes"] == 8 * 3 * shard
    assert links["two_levels"]["network_bytes"] == 8 * shard and links["two_levels"]["node_bytes"] == 8 * 6 * shard
    assert links["two_levels"]["busiest_network_bytes"] == shard
    assert main([*arguments, "--node-size", "5,3"]) == 0
    out = capsys.readouterr().out
    assert "2 nodes of 5, 3 ranks" in out and "MAGI_ATTENTION_NODE_TRANSPORT=auto rows go once to each node" in out
    for sizes in ("0", "4,x", "4,2"):
        assert f"--node-size {sizes}" in refused(capsys, *arguments, "--node-size", sizes)


def test_a_dispatch_that_knows_nodes(capsys):
    """Bytes between nodes beside those of the dispatch that does not know them, where it is another one."""
    lengths = "300,2000,500,900,1200,700,400," * 4 + "1000"
    arguments = ["explain", "--docs", lengths, "--cp", "16", "--no-pictures", "--node-size", "8"]
    assert main([*arguments, "--json"]) == 0
    links = json.loads(capsys.readouterr().out)["links"]
    for form in ("direct", "two_levels"):
        assert links[form]["network_bytes"] < links["without_nodes"][form]["network_bytes"]
    assert main(arguments) == 0
    assert "dispatch without nodes" in " ".join(capsys.readouterr().out.split())


OWNERS = {"window": "sliding-window", "global-prefix": "sliding-window", "block": "block-causal", "prefix": "prefix-lm"}


@pytest.mark.parametrize("option", OWNERS)
@pytest.mark.parametrize("mask", [None, "causal", "full", "sliding-window", "block-causal", "prefix-lm"])
def test_options_of_another_mask(option, mask, capsys):
    words = ["explain", "--docs", "64,64", "--cp", "2", "--no-pictures", f"--{option}", "8"]
    words += ["--mask", mask] if mask else []
    words += ["--window", "8"] if mask == "sliding-window" and option != "window" else []
    if mask == OWNERS[option]:
        assert main(words) == 0
    else:
        error = refused(capsys, *words)
        assert f"--{option} is for --mask {OWNERS[option]}, and the mask is {mask or 'causal'};" in error


@pytest.mark.parametrize(
    "words",
    [("--docs", "4,4"), ("--tokens", "8"), ("--doc-file", "x"), ("--mask", "causal"), ("--window", "4")],
)
def test_a_mask_file_and_what_it_holds_already(words, mask_file, capsys):
    error = refused(capsys, "explain", "--mask-file", mask_file, *words)
    assert f"{words[0]} and --mask-file exclude each other" in error


def test_two_options_for_one_thing(tmp_path, capsys):
    (tmp_path / "docs.txt").write_text("4 4")
    lengths = str(tmp_path / "docs.txt")
    assert "keep one of them" in refused(capsys, "explain", "--docs", "4,4", "--doc-file", lengths)
    words = ("--tokens", "64", "--out", str(tmp_path), "--no-pictures")
    assert "--no-pictures makes none" in refused(capsys, "explain", *words)
    assert "--name is for a new session" not in refused(capsys, "run", "a.py", "--session", "none", "--name", "x")


def test_options_that_need_another(capsys):
    assert "name the session with --session" in refused(capsys, "collect-env", "--run", "3")
    assert "name the session with --session" in refused(capsys, "collect-env", "--output", "x.tar.gz")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"total": 8.5}, "total is 8.5 (float)"),
        ({"total": "8"}, "total is '8'"),
        ({"q_ranges": [[0, 4.5]]}, "q_ranges holds floats, such as 4.5"),
        ({"k_ranges": [[0, 4.0]]}, "k_ranges holds floats"),
        ({"k_ranges": [[0, 2**70]]}, "beyond 64 bits"),
        ({"k_ranges": [[0, 9]]}, "beyond the 8 k tokens"),
        ({"type": "causal"}, "unknown key 'type'"),
    ],
)
def test_mask_files_whose_numbers_or_keys_are_wrong(change, words, tmp_path, capsys):
    path = tmp_path / "mask.json"
    path.write_text(json.dumps({**MASK, **change}))
    error = refused(capsys, "explain", "--mask-file", str(path), "--cp", "2")
    assert words in error and str(path) in error, error


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "--mask-file", "{}"),
        ("explain", "--doc-file", "{}"),
        ("run", "--spec", "{}", "a.py"),
        ("run", "a.py", "--engine", "ssh", "--hosts", "{}"),
    ],
)
def test_files_that_are_no_text(words, tmp_path, capsys):
    path = tmp_path / "binary"
    path.write_bytes(b"\x93NUMPY\xff\xfe")
    error = refused(capsys, *(word.format(path) for word in words))
    assert f"{path} is no text: byte 0 is no UTF-8" in error and "codec" not in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tokens", str(2**32)), "9,223,372,039,002,259,456 (query, key) pairs"),
        (("--tokens", str(2**31), "--mask", "full"), "can be counted"),
        (("--tokens", str(2**70)), "beyond 64 bits"),
        (("--tokens", str(2**63 - 1), "--mask", "sliding-window", "--window", "1"), "fewer than 2**60"),
        (("--tokens", str(2**60 - 1), "--mask", "sliding-window", "--window", "9"), "can be counted"),
    ],
)
def test_more_than_can_be_counted(words, told, capsys):
    assert told in refused(capsys, "explain", "--cp", "8", "--no-pictures", *words)


def test_long_sequences_that_can_be_counted(capsys):
    for words in ((str(2**33), "--mask", "sliding-window", "--window", "1000"), (str(3_037_000_499),)):
        assert main(["explain", "--cp", "8", "--no-pictures", "--tokens", *words]) == 0
        assert f"{int(words[0]):,}" in capsys.readouterr().out
