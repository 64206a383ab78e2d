// SPDX-License-Identifier: Apache-2.0
// Colours of ranks, chunks and stages as [red, green, blue].
"use strict";

// The palette of Okabe and Ito, which people with any common colour blindness can tell apart; grey is our eighth.
const EIGHT = [
  [0, 114, 178], [230, 159, 0], [0, 158, 115], [213, 94, 0],
  [86, 180, 233], [204, 121, 167], [200, 190, 40], [110, 118, 128],
];
const NOT_CHOSEN = [222, 226, 230];
const UNKNOWN = [160, 166, 172];

function fromHsl(hue, saturation, light) {
  const strength = saturation * Math.min(light, 1 - light);
  return [0, 8, 4].map((shift) => {
    const k = (shift + hue * 12) % 12;
    return Math.round(255 * (light - strength * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  });
}

// Eight colours that were chosen, or any number of hues by steps of the golden ratio, at three lightnesses in turn.
function colour(index, count) {
  if (count <= EIGHT.length) return EIGHT[index];
  return fromHsl((index * 0.618034) % 1, 0.6, [0.42, 0.62, 0.52][index % 3]);
}

function stageColour(stage, stages) {
  return colour(stage + 1, stages + 1);
}

function css(rgb) {
  return `rgb(${rgb.join(",")})`;
}
