# SPDX-License-Identifier: Apache-2.0
"""Libraries that tests compile: once for all runs, again after a change of what goes into them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from magi_attention.testing.libraries import compiled_or_skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_a_library_is_compiled_again_only_after_a_change(tmp_path: Path) -> None:
    source, header = tmp_path / "answer.cpp", tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')

    def compiled(*flags: str):
        found = compiled_or_skip(tmp_path / "kept", [source], [tmp_path], *flags)
        return found.answer(), Path(found._name), Path(found._name).stat().st_ino

    header.write_text("#define ANSWER 1\n")
    first = compiled()
    assert first[0] == 1 and compiled() == first
    assert compiled("-DANSWER=1 ")[1] != first[1], "other flags"
    header.write_text("// A comment changes nothing.\n#define ANSWER 1\n")
    assert compiled() == first
    for answer in range(2, 8):
        header.write_text(f"#define ANSWER {answer}\n")
        assert compiled()[0] == answer
    assert not first[1].exists() and len(list((tmp_path / "kept").glob("*.so"))) < 8, "old versions go"
    header.write_text("no C++")
    with pytest.raises(AssertionError, match="answer.h"):
        compiled()
    assert not list((tmp_path / "kept").glob("*.part"))
