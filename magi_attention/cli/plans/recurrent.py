# SPDX-License-Identifier: Apache-2.0
"""`magi explain --recurrent`: which way a recurrent layer takes over a plan, and what each one moves."""

from __future__ import annotations

from typing import Any

from magi_attention.cli.common import UsageError, show_table

_WORDS = {
    "states": "states of fragments",
    "contiguous": "consecutive shards",
    "heads": "all tokens of a part of the heads",
}


def recurrent_shape(text: str | None) -> Any:
    """``RecurrentShape`` of "gated_delta:32x128x128"; None without a text."""
    from magi_attention.api import RecurrentShape
    from magi_attention.errors import ContractError

    if text is None:
        return None
    layer, _, sizes = text.partition(":")
    numbers = sizes.split("x")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise UsageError(f"--recurrent {text} has no three sizes; give LAYER:HEADSxKEYxVALUE, gated_delta:32x128x128.")
    try:
        return RecurrentShape(*map(int, numbers), layer)
    except ContractError as error:
        raise UsageError(f"--recurrent {text}: {error}") from error


def show_recurrent(found: dict[str, Any], text: str, elsewhere: dict[int, dict[str, Any]]) -> None:
    """A table of ``recurrent`` of ``plan.explain``, and sentences about the choice, and that for other ranks."""
    from magi_attention.tools.report.describe import readable_bytes

    rows = []
    for way, words in _WORDS.items():
        numbers = found[way]
        if numbers is None:
            rows.append([way, words, "-", "-", "-", "-"])
            continue
        sizes = [readable_bytes(numbers[key]) for key in ("bytes", "busiest_bytes")]
        back = readable_bytes(numbers["backward"]["busiest_bytes"])
        rows.append([way, words, str(numbers["exchanges"]), *sizes, back])
    head = ["way", "what moves", "exchanges", "all ranks", "busiest rank receives", "in a backward"]
    show_table(f"Recurrent layer {text}, forward", [head, *rows])
    if found["heads"] is None:
        print("Heads do not divide by the ranks.")
    print(f'run_recurrent takes "{found["way"]}". {found["why"]}')
    if elsewhere:
        print("".join(f"With {n} ranks: {other['why']}\n" for n, other in elsewhere.items()), end="")
    print()
