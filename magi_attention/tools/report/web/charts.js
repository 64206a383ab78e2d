// SPDX-License-Identifier: Apache-2.0
// Charts of one setting as SVG text and, for who sends to whom, a canvas. What a shape stands for is in its data-tip.
"use strict";

let WIDTH = 640; // CSS pixels of a drawing; the page sets it
const SIDE = 52; // left of the plot
const FEW = 16; // ranks of the timeline

function rect(x, y, width, height, fill, tip, opacity = 1) {
  const place = `x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${Math.max(width, 0.3).toFixed(2)}"`;
  return `<rect ${place} height="${height.toFixed(2)}" fill="${fill}" opacity="${opacity}" data-tip="${tip}"/>`;
}

function label(x, y, text, anchor = "middle") {
  return `<text x="${x}" y="${y}" text-anchor="${anchor}">${text}</text>`;
}

function line(x0, y0, x1, y1, kind) {
  return `<line x1="${x0}" y1="${y0}" x2="${x1}" y2="${y1}" class="${kind}"/>`;
}

function drawing(height, parts) {
  return `<svg viewBox="0 0 ${WIDTH} ${height}" role="img">${parts.join("")}</svg>`;
}

function rankNames(count, y) {
  const step = Math.max(1, Math.ceil(count / 16));
  const wide = (WIDTH - SIDE) / count;
  const parts = [];
  for (let rank = 0; rank < count; rank += step) parts.push(label(SIDE + (rank + 0.5) * wide, y, rank));
  return parts;
}

function stageEntries(stages, first = HOST) {
  const names = [HOST, ...Array(stages).keys()].filter((stage) => stage >= first);
  return names.map((stage) => [css(stageColour(stage, stages)), stageName(stage)]);
}

// Entries are [colour, name].
function legend(entries) {
  return entries.map(([fill, name]) => `<span><i style="background:${fill}"></i>${name}</span>`).join("");
}

// Allowed pairs of each rank, stage by stage; marks show the split without balancing, the line is the mean.
function workChart(setting) {
  const [height, top, base] = [230, 14, 200];
  const totals = setting.areas.map((stages) => stages.reduce((a, b) => a + b, 0));
  const mean = totals.reduce((a, b) => a + b, 0) / setting.cp;
  const most = Math.max(...totals, ...setting.contiguous, 1);
  const y = (pairs) => base - (pairs / most) * (base - top);
  const wide = (WIDTH - SIDE) / setting.cp;
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    parts.push(line(SIDE, y(share * most), WIDTH, y(share * most), "grid"));
    parts.push(label(SIDE - 5, y(share * most) + 4, short(share * most), "end"));
  }
  setting.areas.forEach((stages, rank) => {
    let done = 0;
    stages.forEach((pairs, index) => {
      const stage = index - 1;
      const tip = `Rank ${rank}, ${stageName(stage)}: ${whole(pairs)} pairs. All of its stages: ${whole(totals[rank])}, ${(totals[rank] / (mean || 1)).toFixed(4)} of the mean.`;
      const x = SIDE + (rank + 0.1) * wide;
      const fill = css(stageColour(stage, stages.length - 1));
      if (pairs) parts.push(rect(x, y(done + pairs), 0.8 * wide, y(done) - y(done + pairs), fill, tip));
      done += pairs;
    });
    const before = y(setting.contiguous[rank]);
    parts.push(line(SIDE + rank * wide, before, SIDE + (rank + 1) * wide, before, "before"));
  });
  parts.push(line(SIDE, y(mean), WIDTH, y(mean), "mean"), ...rankNames(setting.cp, base + 16));
  return drawing(height, parts);
}

// Bytes of K and V: what a rank receives is above the line, what it sends below.
function trafficChart(setting) {
  const [height, middle, reach] = [260, 122, 108];
  const sum = (rows) => rows.reduce((a, b) => a + b, 0);
  const most = Math.max(...setting.received.map(sum), ...setting.sent.map(sum), 1);
  const wide = (WIDTH - SIDE) / setting.cp;
  const parts = [line(SIDE, middle, WIDTH, middle, "axis")];
  for (const sign of [-1, 1]) {
    const y = middle + sign * reach;
    parts.push(line(SIDE, y, WIDTH, y, "grid"), label(SIDE - 5, y + 4, bytes(most * setting.row_bytes), "end"));
  }
  parts.push(label(SIDE - 5, middle - 50, "receives", "end"), label(SIDE - 5, middle + 58, "sends", "end"));
  for (const [sign, word, table] of [[-1, "receives", setting.received], [1, "sends", setting.sent]]) {
    table.forEach((stages, rank) => {
      let done = 0;
      stages.forEach((rows, stage) => {
        const tall = (rows / most) * reach;
        const tip = `Rank ${rank} ${word} ${whole(rows)} rows, ${bytes(rows * setting.row_bytes)}, in stage ${stage}. All of its stages: ${bytes(sum(stages) * setting.row_bytes)}.`;
        const y = sign < 0 ? middle - done - tall : middle + done;
        if (rows) parts.push(rect(SIDE + (rank + 0.1) * wide, y, 0.8 * wide, tall, css(stageColour(stage, stages.length)), tip));
        done += tall;
      });
    });
  }
  return drawing(height, [...parts, ...rankNames(setting.cp, height - 6)]);
}

// Predicted or measured times. A rank has a lane for communication and, below it, one for computation. Predicted rows of a
// stage travel from the arrival of those before; measured ones have a start of their own, in `starts`.
function timeChart(setting, times) {
  const ends = times.map(({ arrive, compute }) => Math.max(...arrive, ...compute, 0));
  const ranks = [...ends.keys()].sort((a, b) => ends[b] - ends[a] || a - b).slice(0, FEW).sort((a, b) => a - b);
  const most = Math.max(...ends, 1e-9);
  const x = (at) => SIDE + (at / most) * (WIDTH - SIDE - 4);
  const stages = setting.received[0].length;
  const parts = [];
  ranks.forEach((rank, row) => {
    const y = 4 + row * 26;
    const { arrive, compute, starts } = times[rank];
    parts.push(label(SIDE - 5, y + 15, `rank ${rank}`, "end"));
    const bar = (start, end, stage, lane, what) => {
      if (end <= start) return;
      const fill = css(stageColour(setting.degree === 0 && lane ? HOST : stage, stages));
      const tip = `Rank ${rank} ${what} from ${time(start)} to ${time(end)}, for ${time(end - start)}.`;
      parts.push(rect(x(start), y + lane, x(end) - x(start), 10, fill, tip, lane ? 1 : 0.6));
    };
    arrive.forEach((end, stage) => bar(starts ? starts[stage] : stage ? arrive[stage - 1] : 0, end, stage, 0, `receives stage ${stage}`));
    for (let i = 0; i < compute.length; i += 2) {
      const what = setting.degree === 0 ? "computes everything" : `computes ${stageName(i / 2 - 1)}`;
      bar(compute[i], compute[i + 1], i / 2 - 1, 11, what);
    }
  });
  const height = 4 + ranks.length * 26 + 20;
  for (const share of WIDTH < 480 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]) {
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    parts.push(label(x(share * most), height - 5, time(share * most), anchor));
  }
  return drawing(height, parts);
}

// Who sends how many rows to whom, on a canvas: a row for each sender. Gives a function from a point to a sentence.
function paintMatrix(canvas, setting) {
  const stages = setting.received[0].length;
  const tables = [...Array(stages).keys()].map((stage) => rowsBetween(setting, stage));
  const rows = new Float64Array(setting.cp ** 2);
  for (const table of tables) table.forEach((count, i) => (rows[i] += count));
  const most = rows.reduce((a, b) => Math.max(a, b), 1);
  const cell = Math.max(1, Math.floor(480 / setting.cp));
  canvas.width = canvas.height = cell * setting.cp;
  const pen = canvas.getContext("2d");
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  rows.forEach((count, i) => {
    const [x, y] = [(i % setting.cp) * cell, Math.floor(i / setting.cp) * cell];
    const share = count / most;
    pen.fillStyle = count ? css(LAST_STAGE.map((part) => Math.round(235 + (part - 235) * share ** 0.7))) : "#fff";
    pen.fillRect(x, y, cell, cell);
    if (!count || setting.cp > 8) return;
    pen.fillStyle = share > 0.4 ? "#fff" : "#000";
    pen.font = "14px system-ui, sans-serif";
    pen.fillText(short(count), x + cell / 2, y + cell / 2);
  });
  return (across, down) => {
    const [to, from] = [across, down].map((share) => clamp(Math.floor(share * setting.cp), 0, setting.cp - 1));
    const at = from * setting.cp + to;
    const each = tables.map((table, stage) => `stage ${stage}: ${whole(table[at])}`).join(", ");
    return `Rank ${from} sends ${whole(rows[at])} rows, ${bytes(rows[at] * setting.row_bytes)}, to rank ${to} (${each}).`;
  };
}
