// SPDX-License-Identifier: Apache-2.0
// The mask on a canvas. Each pixel row asks the slices for their keys, so a picture costs the same for any number of
// tokens, and a magnified triangle shows its tokens.
"use strict";

const STRIP = 7; // CSS pixels of the stripes that show who owns keys (above) and queries (left)
const LEFT = 56;
const TOP = 36;
const MOST_ZOOM = 48; // CSS pixels of a token
const FAINTEST = 0.35; // ink of a slice that is much thinner than a pixel

// Ticks of thousands and millions are named so.
function tickName(token, step) {
  const [unit, suffix] = [[1e9, "G"], [1e6, "M"], [1e3, "K"], [1, ""]].find(([size]) => step % size === 0);
  return whole(token / unit) + (token ? suffix : "");
}

class MaskView {
  // `plan` has tokens and slices; `ask()` gives {setting, mode, chosen}: what to colour by, and the one rank to show.
  // `drawn` may be set to a function that hears of each new picture.
  constructor(canvas, plan, ask) {
    Object.assign(this, { canvas, plan, ask, pointed: null });
    this.resize();
    this.showAll();
  }

  resize() {
    const width = this.canvas.clientWidth;
    this.side = Math.max(width - LEFT - 6, 50);
    this.canvas.style.height = `${this.side + TOP + 6}px`;
    this.dots = Math.min(window.devicePixelRatio || 1, 2);
    this.canvas.width = Math.round(width * this.dots);
    this.canvas.height = Math.round((this.side + TOP + 6) * this.dots);
    if (this.scale) this.move(0, 0);
  }

  get fit() {
    return this.side / this.plan.tokens;
  }

  showAll() {
    this.scale = this.fit; // CSS pixels of a token
    this.q = this.k = 0;
    this.draw();
  }

  zoom(factor, x = this.side / 2, y = this.side / 2) {
    const scale = clamp(this.scale * factor, this.fit, Math.max(MOST_ZOOM, this.fit));
    this.k += x / this.scale - x / scale;
    this.q += y / this.scale - y / scale;
    this.scale = scale;
    this.move(0, 0);
  }

  move(dx, dy) {
    this.scale = clamp(this.scale, this.fit, Math.max(MOST_ZOOM, this.fit));
    const room = Math.max(this.plan.tokens - this.side / this.scale, 0);
    this.k = clamp(this.k - dx / this.scale, 0, room);
    this.q = clamp(this.q - dy / this.scale, 0, room);
    this.draw();
  }

  // The pair under a point of the canvas, or null beside the mask.
  pairAt(x, y) {
    const k = Math.floor(this.k + (x - LEFT) / this.scale);
    const q = Math.floor(this.q + (y - TOP) / this.scale);
    const isInside = x >= LEFT && y >= TOP && x < LEFT + this.side && y < TOP + this.side;
    return isInside && k < this.plan.tokens && q < this.plan.tokens ? { q, k } : null;
  }

  // Allowed pairs that are in view.
  pairsInView() {
    const size = Math.ceil(this.side / this.scale);
    const [q, k] = [Math.floor(this.q), Math.floor(this.k)];
    return this.plan.slices.reduce((sum, slice) => sum + pairsIn(slice, q, q + size, k, k + size), 0);
  }

  // ---- drawing ------------------------------------------------------------------------------------------

  draw() {
    if (this.isWaiting) return; // one picture for all events of a frame
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.paint();
    });
  }

  paint() {
    const pen = this.canvas.getContext("2d");
    const size = Math.round(this.side * this.dots);
    this.image = pen.createImageData(size, size);
    this.image.data.fill(255);
    this.perToken = this.scale * this.dots; // device pixels
    this.asked = this.ask();
    this.columns = new Map();
    const { setting } = this.asked;
    if (setting.do_queries_move && setting.computed)
      setting.computed.forEach((slices, rank) => slices.forEach((slice) => this.paintSlice(slice, size, rank)));
    else for (const slice of this.plan.slices) this.paintSlice(slice, size, null);
    this.paintFrame(pen);
    if (this.drawn) this.drawn();
  }

  // `rank` computes the slice; null is the owner of each query.
  paintSlice(slice, size, rank) {
    const top = (slice.q0 - this.q) * this.perToken;
    const bottom = (slice.q1 - this.q) * this.perToken;
    const isOutside = (slice.k1 - this.k) * this.perToken <= 0 || (slice.k0 - this.k) * this.perToken >= size;
    if (bottom <= 0 || top >= size || isOutside) return;
    const first = Math.ceil(Math.max(top, 0) - 0.5); // rows whose middle lies in the slice
    const last = Math.ceil(Math.min(bottom, size) - 0.5);
    if (first >= last) {
      const q = Math.floor((slice.q0 + slice.q1) / 2);
      const row = clamp(Math.floor((top + bottom) / 2), 0, size - 1);
      this.paintRow(slice, row, q, rank, Math.max(bottom - top, FAINTEST));
    }
    for (let row = first; row < last; row++) {
      const q = clamp(Math.floor(this.q + (row + 0.5) / this.perToken), slice.q0, slice.q1 - 1);
      this.paintRow(slice, row, q, rank, 1);
    }
  }

  paintRow(slice, row, q, rank, ink) {
    const size = this.image.width;
    const start = Math.max((firstKey(slice, q) - this.k) * this.perToken, 0);
    const end = Math.min((endKey(slice, q) - this.k) * this.perToken, size);
    if (end <= start) return;
    const paint = this.colourOfRow(q, rank);
    const thin = Math.max(end - start, FAINTEST);
    for (let x = Math.floor(start); x < Math.min(Math.ceil(end), size); x++) {
      const covered = thin < 1 ? thin : Math.min(end, x + 1) - Math.max(start, x);
      this.blend(4 * (row * size + x), typeof paint === "function" ? paint(x) : paint, ink * covered);
    }
  }

  blend(at, rgb, ink) {
    const { data } = this.image;
    for (let i = 0; i < 3; i++) data[at + i] += (rgb[i] - data[at + i]) * ink;
  }

  // The colour of a query's row, or a function of the column where it depends on the key.
  colourOfRow(q, computer) {
    const { setting, mode, chosen } = this.asked;
    if (!setting.owners || (setting.do_queries_move && computer === null)) return UNKNOWN;
    const chunk = Math.floor(q / setting.chunk);
    const owner = setting.owners[chunk];
    const rank = computer === null ? owner : computer;
    if (chosen !== null && rank !== chosen) return NOT_CHOSEN;
    if (mode === "rank") return colour(rank, setting.cp);
    if (mode === "chunk") return colour(chunk, setting.owners.length);
    if (rank !== owner) return stageColour(0, setting.stages[0].length); // the query is received
    return this.stageColumns(rank);
  }

  stageColumns(rank) {
    const { setting } = this.asked;
    if (!setting.stages) return UNKNOWN;
    if (!this.columns.has(rank)) this.columns.set(rank, new Array(this.image.width));
    const known = this.columns.get(rank);
    return (x) => {
      if (known[x] === undefined) {
        const key = clamp(Math.floor(this.k + (x + 0.5) / this.perToken), 0, this.plan.tokens - 1);
        const stage = stageOf(setting, rank, key);
        known[x] = stage === null ? UNKNOWN : stageColour(stage, setting.stages[0].length);
      }
      return known[x];
    };
  }

  paintFrame(pen) {
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.putImageData(this.image, Math.round(LEFT * this.dots), Math.round(TOP * this.dots));
    pen.setTransform(this.dots, 0, 0, this.dots, 0, 0);
    if (this.asked.setting.owners) this.paintOwners(pen);
    this.paintGrid(pen);
    pen.strokeStyle = "#8c959f";
    pen.strokeRect(LEFT - 0.5, TOP - 0.5, this.side + 1, this.side + 1);
    this.paintTicks(pen);
    if (this.pointed) this.paintCross(pen);
  }

  // One stripe for keys and one for queries, in the colours of their owners.
  paintOwners(pen) {
    const { setting } = this.asked;
    for (let at = 0; at < this.side; at++) {
      for (const isKey of [true, false]) {
        const token = Math.floor((isKey ? this.k : this.q) + (at + 0.5) / this.scale);
        pen.fillStyle = css(colour(setting.owners[Math.floor(token / setting.chunk)], setting.cp));
        if (isKey) pen.fillRect(LEFT + at, TOP - STRIP - 1, 1, STRIP);
        else pen.fillRect(LEFT - STRIP - 1, TOP + at, STRIP, 1);
      }
    }
  }

  // Lines between chunks, or between tokens, once they are far enough apart.
  paintGrid(pen) {
    const { chunk } = this.asked.setting;
    for (const [step, least, style] of [[1, 14, "rgba(0,0,0,.12)"], [chunk, 28, "rgba(0,0,0,.3)"]]) {
      if (step * this.scale < least) continue;
      pen.strokeStyle = style;
      pen.beginPath();
      for (const isKey of [true, false]) {
        const origin = isKey ? this.k : this.q;
        for (let token = Math.ceil(origin / step) * step; ; token += step) {
          const at = (token - origin) * this.scale;
          if (at >= this.side) break;
          pen.moveTo(isKey ? LEFT + at : LEFT, isKey ? TOP : TOP + at);
          pen.lineTo(isKey ? LEFT + at : LEFT + this.side, isKey ? TOP + this.side : TOP + at);
        }
      }
      pen.stroke();
    }
  }

  paintTicks(pen) {
    const rough = 90 / this.scale;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max([1, 2, 5, 10].find((n) => n * power >= rough) * power, 1);
    pen.fillStyle = "#57606a";
    pen.font = "11px system-ui, sans-serif";
    for (const isKey of [true, false]) {
      const origin = isKey ? this.k : this.q;
      pen.textAlign = isKey ? "center" : "right";
      for (let token = Math.ceil(origin / step) * step; ; token += step) {
        const at = (token - origin) * this.scale;
        if (at > this.side - 14) break;
        const text = tickName(token, step);
        if (isKey) pen.fillText(text, LEFT + Math.max(at, 4), TOP - STRIP - 6);
        else pen.fillText(text, LEFT - STRIP - 5, TOP + Math.max(at, 2) + 4);
      }
    }
    pen.textAlign = "right";
    pen.fillText("key →", LEFT + this.side, 10);
    pen.textAlign = "left";
    pen.fillText("query ↓", 2, 10);
  }

  // A cross at the pair that is pointed at, and the outline of its slice.
  paintCross(pen) {
    const place = ({ q, k }) => [LEFT + (k - this.k) * this.scale, TOP + (q - this.q) * this.scale];
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, this.side, this.side);
    pen.clip();
    const [x, y] = place({ q: this.pointed.q + 0.5, k: this.pointed.k + 0.5 });
    pen.strokeStyle = "rgba(0,0,0,.45)";
    pen.beginPath();
    pen.moveTo(LEFT, y);
    pen.lineTo(LEFT + this.side, y);
    pen.moveTo(x, TOP);
    pen.lineTo(x, TOP + this.side);
    pen.stroke();
    const slice = this.plan.slices[sliceAt(this.plan.slices, this.pointed.q, this.pointed.k)];
    if (slice) {
      // Only what is near: a canvas counts in 32 bits, and a slice may be millions of pixels long.
      const size = this.side / this.scale;
      const top = Math.max(slice.q0, Math.floor(this.q) - 1);
      const bottom = Math.min(slice.q1, Math.ceil(this.q + size) + 1) - 1;
      const near = (k) => clamp(k, this.k - size, this.k + 2 * size);
      const [first, last] = [top, bottom].map((q) => [near(firstKey(slice, q)), near(endKey(slice, q))]);
      const corners = [[first[0], top], [first[1], top], [last[1], bottom], [last[1], bottom + 1]];
      corners.push([last[0], bottom + 1], [first[0], top + 1]); // around the steps of the diagonals
      pen.strokeStyle = "#000";
      pen.lineWidth = 1.5;
      pen.beginPath();
      corners.forEach(([k, q], i) => pen[i ? "lineTo" : "moveTo"](...place({ q, k })));
      pen.closePath();
      pen.stroke();
    }
    pen.restore();
  }

  point(pair) {
    this.pointed = pair;
    if (this.image && !this.isWaiting) this.paintFrame(this.canvas.getContext("2d"));
  }
}

// Wheel, drag, pinch, tap and keys. `tell(pair)` hears which pair is pointed at; null is none.
function listen(view, tell) {
  const { canvas } = view;
  const fingers = new Map();
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const point = (x, y) => {
    view.point(view.pairAt(x, y));
    tell(view.pointed);
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [x, y] = place(event);
    view.zoom(Math.exp(-clamp(event.deltaY, -200, 200) / 300), x - LEFT, y - TOP);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, place(event));
    point(...place(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    const before = fingers.get(event.pointerId);
    if (!before) {
      point(x, y);
      return;
    }
    fingers.set(event.pointerId, [x, y]);
    if (fingers.size === 1) view.move(x - before[0], y - before[1]);
    else pinch(event.pointerId, before, [x, y]);
  });
  // Two fingers: the mask stays under both.
  function pinch(id, before, after) {
    const other = [...fingers].find(([key]) => key !== id)[1];
    const distance = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]);
    view.move((after[0] - before[0]) / 2, (after[1] - before[1]) / 2);
    const middle = [(after[0] + other[0]) / 2, (after[1] + other[1]) / 2];
    view.zoom(distance(after) / Math.max(distance(before), 1), middle[0] - LEFT, middle[1] - TOP);
  }
  for (const name of ["pointerup", "pointercancel"])
    canvas.addEventListener(name, (event) => fingers.delete(event.pointerId));
  canvas.addEventListener("keydown", (event) => {
    const step = view.side / 8;
    const moves = { ArrowLeft: [step, 0], ArrowRight: [-step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
    if (moves[event.key]) view.move(...moves[event.key]);
    else if (event.key === "+" || event.key === "=") view.zoom(1.5);
    else if (event.key === "-") view.zoom(1 / 1.5);
    else if (event.key === "0") view.showAll();
    else return;
    event.preventDefault();
  });
}
