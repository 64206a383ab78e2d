# SPDX-License-Identifier: Apache-2.0
"""The palettes of pages and pictures, one for each meaning, as red, green and blue from 0 to 255.

Ranks (and chunks) have no order: eight colours, then any number of hues. Stages follow one another: shades of one hue,
with the host beside them in a grey. ``web/colours.js`` gets the same values.
"""

from __future__ import annotations

import colorsys
import json

# That of Okabe and Ito, which people with any common colour blindness can tell apart; grey is our eighth.
EIGHT = (
    (0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0),
    (86, 180, 233), (204, 121, 167), (200, 190, 40), (110, 118, 128),
)  # fmt: skip
GOLDEN = 0.618034  # steps of a turn that spread any number of hues
SATURATION, LIGHTS = 0.6, (0.42, 0.62, 0.52)  # lightnesses in turn
HOST = (78, 88, 100)
FIRST_STAGE, LAST_STAGE = (190, 164, 224), (88, 38, 140)


def rank_colour(rank: int, count: int) -> tuple[int, int, int]:
    """The colour of one of ``count`` ranks."""
    if count <= len(EIGHT):
        return EIGHT[rank]
    hls = colorsys.hls_to_rgb(rank * GOLDEN % 1, LIGHTS[rank % len(LIGHTS)], SATURATION)
    red, green, blue = (int(255 * part + 0.5) for part in hls)
    return red, green, blue


def as_script() -> str:
    """The constants as JavaScript."""
    names = ("EIGHT", "GOLDEN", "SATURATION", "LIGHTS", "FIRST_STAGE", "LAST_STAGE")
    lines = [f"const {name} = {json.dumps(globals()[name])};" for name in names]
    return "\n".join([*lines, f"const HOST_COLOUR = {json.dumps(HOST)};"])
