# SPDX-License-Identifier: Apache-2.0
"""Where warps wait: the busiest loop of a profile, and what is refused."""

from __future__ import annotations

import pytest
import stalls

HEADER = '"Address","Source","# Samples","Instructions Executed","stall_barrier","stall_wait","stall_wait (Not Issued)"'
# A loop of 100 rounds with a part that one round in ten takes, and one that each takes three times; another warp last.
ROWS = (
    ("MOV R0, R1", 5, 1, 0, 5),
    ("HGMMA.64x80x16 R0", 30, 100, 20, 10),
    ("FADD R2, R3, R4", 2, 99, 0, 2),
    ("FSEL R2, R3, R4", 7, 10, 0, 7),
    ("LDS R5", 1, 300, 0, 1),
    ("BRA 0x10", 60, 100, 60, "N/A"),
    ("SYNCS.ARRIVE", 40, 30, 0, 40),
)


@pytest.fixture
def profile(tmp_path):
    lines = [f'"0x{i}","{t}","{s}","{e}","{b}","{w}","7",' for i, (t, s, e, b, w) in enumerate(ROWS)]
    second = ['"Kernel Name","another"', HEADER, '"0x0","NOP","900","900","900","0","0",']
    path = tmp_path / "run.csv"
    path.write_text("\n".join(['"Kernel Name","void kernel()",', HEADER + ",", *lines, *second]) + "\n")
    return path


def test_busiest_loop(profile, capsys):
    loop = stalls.busiest_loop(stalls.read(profile))
    assert [x.number for x in loop] == [1, 2, 3, 4, 5]
    assert stalls.main([str(profile), "--least", "5", "--mark", ""]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading == "3 instructions in each round, 100 samples; most for barrier 80%, wait 20%"
    assert [line.split()[0] for line in lines] == ["1", "3", "5"]
    assert lines[0].split()[1:7] == ["30.0%", "30.00%", "barrier", "67%,", "wait", "33%"]
    assert "0.10 times a round: FSEL" in lines[1] and lines[2].split()[1:3] == ["100.0%", "60.00%"]


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "has no line with"),
        ('"ID","Kernel Name"\n"0","x"\n', "--page source --csv"),
        (HEADER + '\n"0x0","NOP","0","0","0","0","0"\n', "has no samples"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, text, sentence):
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(SystemExit):
        stalls.main([str(path)])
    assert sentence in capsys.readouterr().err
    with pytest.raises(SystemExit):
        stalls.main([str(tmp_path / "nowhere.csv")])
    assert "nowhere.csv" in capsys.readouterr().err
