// SPDX-License-Identifier: Apache-2.0
// What the plan says: who owns, computes, sends and receives what. Nothing here draws.
"use strict";

const TYPES = ["full", "causal", "inverse causal", "bi-causal"];
const CAUSAL = 1;
const INVERSE = 2;
const HOST = -1; // the stage of keys that the rank holds itself

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

// Sum of clamp(first + slope * i, low, high) over i = 0 .. count - 1, for slope 0 or 1 and whole numbers.
function sumOfClamped(first, slope, count, low, high) {
  if (slope === 0) return count * clamp(first, low, high);
  const below = clamp(low - first, 0, count);
  const above = clamp(count - (high - first), 0, count - below);
  const between = count - below - above;
  return below * low + above * high + between * (first + below) + (between * (between - 1)) / 2;
}

// Slices come as [step of q0, rows, k0, keys, type, ...], sorted by q0.
function unpackSlices(flat) {
  const slices = [];
  let q0 = 0;
  for (let i = 0; i < flat.length; i += 5) {
    q0 += flat[i];
    slices.push({ q0, q1: q0 + flat[i + 1], k0: flat[i + 2], k1: flat[i + 2] + flat[i + 3], type: flat[i + 4] });
  }
  return slices;
}

// First key that query q of a slice sees, and the end of its keys. q may lie anywhere in [q0, q1).
function firstKey(slice, q) {
  return slice.type & INVERSE ? slice.k0 + (q - slice.q0) : slice.k0;
}
function endKey(slice, q) {
  return slice.type & CAUSAL ? slice.k1 - (slice.q1 - 1 - q) : slice.k1;
}

// Allowed pairs of a slice with queries in [qa, qb) and keys in [ka, kb).
function pairsIn(slice, qa, qb, ka, kb) {
  const start = Math.max(qa, slice.q0);
  const count = Math.min(qb, slice.q1) - start;
  if (count <= 0 || kb <= ka) return 0;
  const ends = sumOfClamped(endKey(slice, start), slice.type & CAUSAL ? 1 : 0, count, ka, kb);
  return ends - sumOfClamped(firstKey(slice, start), slice.type & INVERSE ? 1 : 0, count, ka, kb);
}

function areaOf(slice) {
  return pairsIn(slice, slice.q0, slice.q1, slice.k0, slice.k1);
}

// Index of the slice that allows the pair, or -1.
function sliceAt(slices, q, k) {
  return slices.findIndex((s) => q >= s.q0 && q < s.q1 && k >= firstKey(s, q) && k < endKey(s, q));
}

// Ranges come as differences of start, end, start, end, ... `offsets` counts the rows of the ranges before.
function unpackRanges(steps) {
  const ranges = { starts: [], ends: [], offsets: [], rows: 0 };
  let position = 0;
  for (let i = 0; i < steps.length; i += 2) {
    ranges.starts.push((position += steps[i]));
    ranges.ends.push((position += steps[i + 1]));
    ranges.offsets.push(ranges.rows);
    ranges.rows += steps[i + 1];
  }
  return ranges;
}

// Index of the range that holds the position, or -1.
function rangeAt(ranges, position) {
  let low = 0;
  let high = ranges.starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ranges.ends[middle] <= position) low = middle + 1;
    else high = middle;
  }
  return low < ranges.starts.length && ranges.starts[low] <= position ? low : -1;
}

// Makes a setting of the file ready for questions. A file that had to be kept small may lack `owners` or `stages`.
function openSetting(setting) {
  if (setting.isOpen) return setting;
  setting.isOpen = true;
  if (setting.assigned) setting.computed = setting.assigned.map(unpackSlices);
  if (setting.stages) setting.received_ranges = setting.stages.map((stages) => stages.map(unpackRanges));
  if (!setting.owners) return setting;
  const rows = new Array(setting.cp).fill(0);
  setting.local_starts = setting.owners.map((rank, chunk) => {
    const start = rows[rank];
    rows[rank] += Math.min(setting.chunk, setting.padded - chunk * setting.chunk);
    return start;
  });
  return setting;
}

// Where a token lives: its chunk, its rank and its row among the rows of that rank.
function locate(setting, position) {
  const chunk = Math.floor(position / setting.chunk);
  const local = setting.local_starts[chunk] + position - chunk * setting.chunk;
  return { position, chunk, rank: setting.owners[chunk], local };
}

// The rank that computes an allowed pair: that of the query, unless queries move. Needs `owners` and `assigned`.
function computerOf(setting, q, k) {
  if (!setting.do_queries_move) return locate(setting, q).rank;
  return setting.computed.findIndex((slices) => sliceAt(slices, q, k) >= 0);
}

// The stage in which a rank gets to a key: HOST, a number, or null if the rank has no use for the key.
function stageOf(setting, rank, key) {
  if (setting.owners[Math.floor(key / setting.chunk)] === rank) return HOST;
  const stage = setting.received_ranges[rank].findIndex((ranges) => rangeAt(ranges, key) >= 0);
  return stage < 0 ? null : stage;
}

// Everybody who receives a key: [{rank, stage}], by rank.
function receiversOf(setting, key) {
  const found = [];
  setting.received_ranges.forEach((stages, rank) =>
    stages.forEach((ranges, stage) => {
      if (rangeAt(ranges, key) >= 0) found.push({ rank, stage });
    }),
  );
  return found;
}

// The run of rows around a key that travels to `rank` in one piece, or null if nothing travels.
function transferOf(setting, rank, key) {
  const stage = stageOf(setting, rank, key);
  if (stage === null || stage === HOST) return null;
  const ranges = setting.received_ranges[rank][stage];
  const index = rangeAt(ranges, key);
  const home = locate(setting, key);
  let first = home.chunk;
  let last = home.chunk;
  while (first > 0 && setting.owners[first - 1] === home.rank) first--;
  while (last + 1 < setting.owners.length && setting.owners[last + 1] === home.rank) last++;
  const start = Math.max(ranges.starts[index], first * setting.chunk);
  const end = Math.min(ranges.ends[index], (last + 1) * setting.chunk);
  return {
    stage,
    start,
    end,
    from: home.rank,
    to: rank,
    sent_row: locate(setting, start).local,
    received_row: ranges.offsets[index] + start - ranges.starts[index],
  };
}

// Rows from every rank to every rank in one stage: a flat array, sender times cp plus receiver.
function rowsBetween(setting, stage) {
  const rows = new Float64Array(setting.cp * setting.cp);
  setting.received_ranges.forEach((stages, rank) => {
    const ranges = stages[stage];
    ranges.starts.forEach((start, i) => {
      for (let at = start; at < ranges.ends[i]; ) {
        const chunk = Math.floor(at / setting.chunk);
        const next = Math.min(ranges.ends[i], (chunk + 1) * setting.chunk);
        rows[setting.owners[chunk] * setting.cp + rank] += next - at;
        at = next;
      }
    });
  });
  return rows;
}

// ---- numbers as text ------------------------------------------------------------------------------------

function whole(number) {
  return Math.round(number).toLocaleString("en-US");
}

function short(number) {
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"]])
    if (Math.abs(number) >= limit) return Number((number / limit).toPrecision(3)) + suffix;
  return String(Number(number.toPrecision(3)));
}

function bytes(number) {
  for (const [power, suffix] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]])
    if (number >= 2 ** power) return `${Number((number / 2 ** power).toPrecision(3))} ${suffix}`;
  return `${number} B`;
}

function time(microseconds) {
  if (microseconds >= 1e6) return `${(microseconds / 1e6).toFixed(2)} s`;
  if (microseconds === 0) return "0";
  return microseconds >= 1e3 ? `${(microseconds / 1e3).toFixed(2)} ms` : `${microseconds.toFixed(1)} µs`;
}

function stageName(stage) {
  return stage === HOST ? "host" : `stage ${stage}`;
}
