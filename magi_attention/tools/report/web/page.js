// SPDX-License-Identifier: Apache-2.0
// The page itself: reads the data, answers the controls, fills texts and tables.
"use strict";

const byId = (id) => document.getElementById(id);
const PLAN = JSON.parse(byId("plan").textContent);
PLAN.slices = unpackSlices(PLAN.slices);
const state = { setting: null, mode: "rank", chosen: null, tellMatrix: null };

function element(tag, text, parent) {
  const made = document.createElement(tag);
  made.textContent = text;
  parent.append(made);
  return made;
}

// ---- settings -------------------------------------------------------------------------------------------

const rankCounts = [...new Set(PLAN.settings.map((s) => s.cp))].sort((a, b) => a - b);

function degreesOf(cp) {
  return PLAN.settings.filter((s) => s.cp === cp);
}

// The setting of the two sliders. Another number of ranks may lack the degree; then it gets its last one.
function settingOfSliders() {
  const cp = rankCounts[Number(byId("ranks").value)];
  const has = degreesOf(cp);
  const wanted = Number(byId("degree").value);
  return has.find((s) => s.name === degreeNames[wanted]) || has[has.length - 1];
}

const degreeNames = [...new Set(PLAN.settings.map((s) => s.name))];

function show(setting) {
  state.setting = openSetting(setting);
  byId("ranks").value = rankCounts.indexOf(setting.cp);
  byId("degree").value = degreeNames.indexOf(setting.name);
  byId("ranks-value").textContent = setting.cp;
  byId("degree-value").textContent = setting.name;
  if (state.chosen !== null && state.chosen >= setting.cp) state.chosen = null;
  byId("chosen").max = setting.cp - 1;
  byId("chosen").value = state.chosen === null ? "" : state.chosen;
  fillFacts([...(PLAN.run ? PLAN.run.facts : []), ...setting.facts]);
  fillTables(setting.tables);
  fillNotes(setting);
  drawCharts(setting);
  recolour();
  tell(view.pointed);
}

function fillFacts(facts) {
  byId("facts").replaceChildren();
  for (const [value, name, kind] of facts) {
    const item = element("li", "", byId("facts"));
    if (kind) item.className = kind;
    element("b", value, item);
    element("span", name, item);
  }
}

function fillTables(tables) {
  byId("tables").replaceChildren();
  for (const [title, rows, text] of tables) {
    const section = element("section", "", byId("tables"));
    element("h2", title, section);
    if (text) element("p", text, section);
    const scroll = element("div", "", section);
    scroll.className = "scroll";
    const table = element("table", "", scroll);
    rows.forEach((row, i) => {
      const line = element("tr", "", table);
      for (const cell of row) element(i ? "td" : "th", cell, line);
    });
  }
}

function fillNotes(setting) {
  byId("notes").replaceChildren();
  for (const note of [...PLAN.notes, ...setting.notes]) element("p", note, byId("notes"));
}

// ---- charts ---------------------------------------------------------------------------------------------

function drawCharts(setting) {
  byId("charts").hidden = !setting.areas;
  byId("traffic-charts").hidden = setting.cp === 1;
  if (!setting.areas) return;
  const stages = setting.received[0].length;
  drawRun(PLAN.run, setting);
  WIDTH = byId("work").clientWidth;
  byId("work").innerHTML = workChart(setting);
  byId("work-legend").innerHTML = legend([...stageEntries(stages), ["#000", "without balancing"]]);
  byId("time").innerHTML = timeChart(setting, setting.times);
  byId("time-text").textContent =
    `Upper bar: rows arrive. Lower bar: ${setting.degree ? "computation" : "one kernel call, when all rows are there"}. ` + PLAN.machine +
    (setting.cp > FEW ? ` Shown are the ${FEW} ranks that finish last.` : "");
  byId("traffic").innerHTML = trafficChart(setting);
  byId("traffic-legend").innerHTML = legend(stageEntries(stages, 0));
  byId("matrix-part").hidden = !setting.stages || !setting.owners;
  state.tellMatrix = byId("matrix-part").hidden ? null : paintMatrix(byId("matrix"), setting);
}

function listenToCharts() {
  for (const name of ["pointerover", "click"])
    document.querySelector("main").addEventListener(name, (event) => {
      const tip = event.target.dataset && event.target.dataset.tip;
      if (tip) event.target.closest("section").querySelector(".tip").textContent = tip;
    });
  for (const name of ["pointermove", "click"])
    byId("matrix").addEventListener(name, (event) => {
      const box = byId("matrix").getBoundingClientRect();
      const share = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
      byId("matrix-tip").textContent = state.tellMatrix(...share);
    });
}

// ---- the mask -------------------------------------------------------------------------------------------

const view = new MaskView(byId("mask"), PLAN, () => state);

function recolour() {
  const { setting, mode } = state;
  const stages = setting.areas ? setting.areas[0].length - 1 : 0;
  const ranks = setting.cp <= FEW ? [...Array(setting.cp).keys()] : [];
  const entries = {
    rank: ranks.map((rank) => [css(colour(rank, setting.cp)), `rank ${rank}`]),
    stage: stageEntries(stages),
    chunk: [],
  };
  byId("mask-legend").innerHTML = legend(entries[mode]);
  const texts = {
    rank: "Colour: the rank that computes the query.",
    chunk: `Colour: the chunk of the query, ${whole(setting.chunk)} tokens. Colours repeat or look alike; the panel has numbers.`,
    stage: "Colour: how the rank that computes gets to the key. Host: it holds the key. Stage: it receives the key, or the query, in that stage.",
  };
  byId("mode-text").textContent = texts[mode] + " The stripes above and on the left show who holds keys and queries.";
  view.draw();
}

function range(start, end) {
  return `[${whole(start)}, ${whole(end)})`;
}

// What is known about a pair, as [name, sentence].
function describe(pair) {
  const { setting } = state;
  const lines = [];
  const home = (name, position) => {
    if (!setting.owners) return lines.push([name, `token ${whole(position)}`]);
    const { rank, local, chunk } = locate(setting, position);
    return lines.push([name, `token ${whole(position)}, row ${whole(local)} of rank ${rank}, chunk ${whole(chunk)}`]);
  };
  home("Query", pair.q);
  home("Key", pair.k);
  const index = sliceAt(PLAN.slices, pair.q, pair.k);
  lines.push(["Slice", index < 0 ? NOWHERE : describeSlice(PLAN.slices[index])]);
  const isKnown = setting.owners && setting.stages && (!setting.do_queries_move || setting.computed);
  if (isKnown) lines.push(...describeWork(pair, index >= 0));
  return lines;
}

const NOWHERE = PLAN.is_whole ? "none: this query does not see this key" : "none of the slices in this file";

function describeSlice(slice) {
  const { setting } = state;
  const text = `${TYPES[slice.type]}, queries ${range(slice.q0, slice.q1)}, keys ${range(slice.k0, slice.k1)}, ${whole(areaOf(slice))} pairs`;
  if (!setting.owners || setting.do_queries_move || !view.pointed) return text;
  const rank = locate(setting, view.pointed.q).rank;
  let share = 0;
  for (let chunk = Math.floor(slice.q0 / setting.chunk); chunk * setting.chunk < slice.q1; chunk++)
    if (setting.owners[chunk] === rank)
      share += pairsIn(slice, chunk * setting.chunk, (chunk + 1) * setting.chunk, slice.k0, slice.k1);
  return `${text}; rank ${rank} computes ${whole(share)} of them`;
}

function describeWork({ q, k }, isAllowed) {
  const { setting } = state;
  const home = locate(setting, q).rank;
  const rank = isAllowed ? computerOf(setting, q, k) : home;
  const stage = stageOf(setting, rank, k);
  const lines = [];
  if (rank !== home)
    lines.push(["Moves", `rank ${home} sends the query to rank ${rank}, which sends back its part of the output`]);
  if (isAllowed) {
    const where = rank !== home ? "with the query that it received" : stage === HOST ? "from its own keys" : `in stage ${stage}`;
    lines.push(["Work", setting.degree === 0 ? `rank ${rank}, in one kernel call` : `rank ${rank}, ${where}`]);
  }
  const move = transferOf(setting, rank, k);
  if (move) {
    const count = move.end - move.start;
    lines.push(["Sent", `rank ${move.from} sends keys ${range(move.start, move.end)}, its rows ${range(move.sent_row, move.sent_row + count)}, to rank ${move.to} in stage ${move.stage}, as rows ${range(move.received_row, move.received_row + count)} of its buffer`]);
  }
  const others = receiversOf(setting, k).map(({ rank: to, stage: when }) => `${to} (stage ${when})`);
  const more = others.length > 12 ? ` and ${others.length - 12} more` : "";
  lines.push(["Key goes to", others.length ? `rank${others.length > 1 ? "s" : ""} ${others.slice(0, 12).join(", ")}${more}` : "no other rank"]);
  return lines;
}

function tell(pair) {
  const panel = byId("pair");
  panel.replaceChildren();
  if (!pair) element("p", "Point at the mask, or tap it, to see a pair of query and key.", panel);
  else
    for (const [name, sentence] of describe(pair)) {
      element("dt", name, panel);
      element("dd", sentence, panel);
    }
}

function tellView() {
  const size = Math.ceil(view.side / view.scale);
  const end = (start) => Math.min(Math.floor(start) + size, PLAN.tokens);
  byId("view").textContent = `In view: queries ${range(Math.floor(view.q), end(view.q))}, keys ${range(Math.floor(view.k), end(view.k))}, ${whole(view.pairsInView())} allowed pairs.`;
}

// ---- controls -------------------------------------------------------------------------------------------

function listenToControls() {
  byId("ranks").max = rankCounts.length - 1;
  byId("degree").max = degreeNames.length - 1;
  byId("sliders").hidden = PLAN.settings.length < 2;
  for (const id of ["ranks", "degree"]) byId(id).addEventListener("input", () => show(settingOfSliders()));
  for (const button of document.querySelectorAll("[name=mode]"))
    button.addEventListener("change", () => {
      state.mode = button.value;
      recolour();
    });
  byId("chosen").addEventListener("input", () => {
    const text = byId("chosen").value;
    state.chosen = text === "" ? null : clamp(Number(text), 0, state.setting.cp - 1);
    view.draw();
  });
  const zooms = { in: () => view.zoom(2), out: () => view.zoom(0.5), all: () => view.showAll() };
  for (const [id, zoom] of Object.entries(zooms))
    byId(`zoom-${id}`).addEventListener("click", zoom);
  byId("save").addEventListener("click", () => {
    const link = document.createElement("a");
    link.download = `mask-${state.mode}-${state.setting.cp}-ranks.png`;
    link.href = byId("mask").toDataURL("image/png");
    link.click();
  });
  window.addEventListener("resize", () => {
    view.resize();
    drawCharts(state.setting);
  });
}

view.drawn = tellView;
listen(view, tell);
listenToControls();
listenToCharts();
show(PLAN.settings[PLAN.given]);
