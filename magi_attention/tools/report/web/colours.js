// SPDX-License-Identifier: Apache-2.0
// Colours of ranks, chunks and stages as [red, green, blue]; report/colours.py has the values.
"use strict";

const NOT_CHOSEN = [222, 226, 230];
const UNKNOWN = [160, 166, 172];

function fromHsl(hue, saturation, light) {
  const strength = saturation * Math.min(light, 1 - light);
  return [0, 8, 4].map((shift) => {
    const k = (shift + hue * 12) % 12;
    return Math.round(255 * (light - strength * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  });
}

function colour(index, count) {
  if (count <= EIGHT.length) return EIGHT[index];
  return fromHsl((index * GOLDEN) % 1, SATURATION, LIGHTS[index % LIGHTS.length]);
}

// Shades from the first stage to the last; a single one has the shade between.
function stageColour(stage, stages) {
  if (stage < 0) return HOST_COLOUR;
  const share = stages > 1 ? stage / (stages - 1) : 0.5;
  return FIRST_STAGE.map((part, i) => Math.round(part + (LAST_STAGE[i] - part) * share));
}

function css(rgb) {
  return `rgb(${rgb.join(",")})`;
}
