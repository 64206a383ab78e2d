// SPDX-License-Identifier: Apache-2.0
// What a page has of a training run: losses, how far they are from those of one process, measured times.
"use strict";

const LOSS_COLOURS = [[31, 35, 40], [176, 184, 192]]; // no colours of ranks or stages

// Points [x, y] as a line; the tips stand at the points.
function curve(points, fill, tips, dashes = "") {
  const path = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  const parts = [`<polyline points="${path}" fill="none" stroke="${fill}" stroke-width="2" stroke-dasharray="${dashes}"/>`];
  points.forEach(([x, y], i) => parts.push(`<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="3" fill="${fill}" data-tip="${tips[i]}"/>`));
  return parts.join("");
}

function stepNames(count, y, x) {
  const step = Math.max(1, Math.ceil(count / 8));
  const parts = [];
  for (let i = 0; i < count; i += step) parts.push(label(x(i), y, i + 1));
  return parts;
}

function stepPlaces(count) {
  return (i) => SIDE + 8 + (count > 1 ? i / (count - 1) : 0.5) * (WIDTH - SIDE - 20);
}

// Losses of every step; the second run is dashed, so that one sees that it lies on the first.
function lossChart(curves) {
  const [height, top, base] = [230, 12, 200];
  const all = curves.flatMap(([, values]) => values.filter(Number.isFinite));
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const x = stepPlaces(curves[0][1].length);
  const y = (loss) => base - ((loss - low) / (high - low || 1)) * (base - top);
  const parts = [low, (low + high) / 2, high].flatMap((loss) => [
    line(SIDE, y(loss), WIDTH, y(loss), "grid"), label(SIDE - 5, y(loss) + 4, loss.toFixed(3), "end")]);
  curves.forEach(([name, values], i) => {
    const seen = [...values.keys()].filter((at) => Number.isFinite(values[at]));
    const tips = seen.map((at) => `${name}, step ${at + 1}: ${values[at]}`);
    parts.push(curve(seen.map((at) => [x(at), y(values[at])]), css(LOSS_COLOURS[i]), tips, i ? "6 5" : ""));
  });
  return drawing(height, [...parts, ...stepNames(curves[0][1].length, base + 18, x)]);
}

// Relative differences on a logarithmic scale, and the limit. None at all lies on the floor.
function differenceChart(values, limit) {
  const [height, top, base, floor] = [170, 12, 140, -9];
  const ceiling = Math.ceil(Math.log10(Math.max(limit, ...values.filter(Number.isFinite), 1e-9))) + 1;
  const x = stepPlaces(values.length);
  const y = (value) => base - ((clamp(Math.log10(Math.max(value, 1e-30)), floor, ceiling) - floor) / (ceiling - floor)) * (base - top);
  const parts = [];
  for (let power = floor; power <= ceiling; power += 2)
    parts.push(line(SIDE, y(10 ** power), WIDTH, y(10 ** power), "grid"), label(SIDE - 5, y(10 ** power) + 4, `1e${power}`, "end"));
  parts.push(line(SIDE, y(limit), WIDTH, y(limit), "limit"));
  const seen = [...values.keys()].filter((at) => Number.isFinite(values[at]));
  const tips = seen.map((at) => `step ${at + 1}: ${values[at].toExponential(2)}`);
  parts.push(curve(seen.map((at) => [x(at), y(values[at])]), css(LOSS_COLOURS[0]), tips));
  return drawing(height, [...parts, ...stepNames(values.length, base + 18, x)]);
}

function drawRun(run, setting) {
  byId("run").hidden = byId("measured-part").hidden = !run;
  if (!run) return;
  WIDTH = byId("loss").clientWidth;
  byId("loss-text").textContent = run.text;
  byId("loss").innerHTML = lossChart(run.curves);
  byId("loss-legend").innerHTML = legend(run.curves.map(([name], i) => [css(LOSS_COLOURS[i]), name]));
  byId("difference-part").hidden = !run.differences;
  if (run.differences) byId("difference").innerHTML = differenceChart(run.differences, run.limit);
  byId("measured").innerHTML = timeChart(setting, run.times);
  byId("measured-legend").innerHTML = legend(stageEntries(setting.received[0].length));
}
