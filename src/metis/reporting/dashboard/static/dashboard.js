"use strict";
// The page of the dashboard: it adds up the increments that the server sends, and draws what it has. No run, however
// long, makes it hold more than it does at first: see `Track` and `Run.add`.

const $ = (id) => document.getElementById(id);
const element = (name, content = "", classes = "") => {
  const made = document.createElement(name);
  made.textContent = content;
  if (classes) made.className = classes;
  return made;
};
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };

// --- numbers in words ----------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const number = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000 || Number.isInteger(value)) return whole.format(value);
  return size >= 10 ? value.toFixed(1) : String(Number(value.toPrecision(3)));
};
const bytes = (value) => {
  if (!value) return value === 0 ? "0 B" : "–";
  const power = Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${number(value / 1000 ** power)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
};
const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 1e4) return `${number(value)} s`;
  const minutes = Math.round(value / 60);
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
};
const percent = (share) => `${share >= 0.0995 || share === 0 ? Math.round(100 * share) : (100 * share).toFixed(1)} %`;
const metricText = (value) => (value === null ? "not a number" : value === undefined ? "–" : Math.abs(value) < 10 ? value.toFixed(3) : number(value));

// --- what is known -------------------------------------------------------------------------------

const KINDS = ["training", "transfer", "idle", "away"];
const MIXED = 4;
const MOST_SPANS = 120000, LEAST_OF_ONE = 64, MOST_OF_ONE = 4096, MOST_VERSIONS = 20000;
let COLUMNS = {}, STATES = [];
const OPEN_KIND = { training: 0, late: 0, idle: 2, "set aside": 2, away: 3, withdrawn: 3 };

/** What one learner did: spans without gaps, each with its end and its kind, or the seconds of each kind if merged. */
class Track {
  constructor() { this.ends = []; this.kinds = []; }

  add(flat, room) {
    for (let at = 1; at < flat.length; at += 2) {
      const kind = flat[at];
      this.ends.push(flat[at + 1]);
      if (kind === MIXED) { this.kinds.push(flat.slice(at + 2, at + 6)); at += 4; } else this.kinds.push(kind);
    }
    while (this.ends.length > room) this.merge(Math.floor(room / 4) * 2);
  }

  merge(count) {
    const ends = [], kinds = [];
    let start = 0;
    for (let at = 0; at < count; at += 2) {
      const shares = [0, 0, 0, 0];
      for (let one = at; one < at + 2; one++) {
        const kind = this.kinds[one];
        if (typeof kind === "number") shares[kind] += this.ends[one] - start;
        else for (let k = 0; k < 4; k++) shares[k] += kind[k];
        start = this.ends[one];
      }
      ends.push(start);
      kinds.push(shares);
    }
    this.ends.splice(0, count, ...ends);
    this.kinds.splice(0, count, ...kinds);
  }

  get end() { return this.ends.length ? this.ends[this.ends.length - 1] : 0; }

  /** The first span that ends after this moment. */
  find(moment) {
    let low = 0, high = this.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > moment) high = middle; else low = middle + 1;
    }
    return low;
  }
}

class Run {
  constructor(id, place) {
    this.id = id;
    this.place = place;
    this.colour = (place % 7) + 1;
    this.shown = place < 6;
    this.clear();
  }

  clear() {
    this.head = { label: this.id, metric: "metric", unit: "" };
    this.now = 0;
    this.names = [];
    this.rows = [];
    this.tracks = [];
    this.versions = []; // flat: version, moment
    this.history = []; // [moment, update requests, version, value]
    this.costs = []; // [moment, equation, active, idle charged, update requests]
    this.periods = []; // [moment, seconds]
    this.changes = []; // [moment, why the period changed]
    this.totals = null;
    this.problems = [];
    this.age = null;
    this.heard = performance.now();
    this.spansHeld = 0;
  }

  add(news) {
    if (news.reset) { this.clear(); this.place = news.place; this.real = news.real; }
    this.now = news.now ?? this.now;
    this.age = news.age;
    this.heard = performance.now();
    if (news.head) this.head = { ...news.head, unit: news.head.unit.replace(" ", "\u00a0") };
    if (news.names) {
      const [start, ...names] = news.names;
      names.forEach((name, at) => { this.names[start + at] = name; this.tracks[start + at] ??= new Track(); });
    }
    for (const row of news.rows ?? []) this.rows[row[0]] = row;
    if (news.spans) {
      const room = Math.min(MOST_OF_ONE, Math.max(LEAST_OF_ONE, Math.floor(MOST_SPANS / this.names.length)));
      for (const flat of news.spans) this.tracks[flat[0]].add(flat, room);
    }
    if (news.versions) {
      for (const value of news.versions) this.versions.push(value);
      if (this.versions.length > 2 * MOST_VERSIONS) {
        this.versions = this.versions.filter((_, at) => at >= MOST_VERSIONS || (at >> 1) % 2 === 0);
      }
    }
    for (const name of ["history", "costs", "periods"]) {
      if (news[name]) {
        const [start, ...points] = news[name];
        this[name].length = start;
        this[name].push(...points);
      }
    }
    if (news.changes) this.changes = news.changes;
    if (news.totals) this.totals = news.totals;
    if (news.problems) this.problems = news.problems;
  }

  get label() { return this.head.label; }
  get finished() { return this.totals?.finished ?? null; }

  state(index) { return STATES[this.rows[index]?.[COLUMNS.state] ?? 0]; }

  /** A value that grows evenly between two events, as it is now. */
  grown(row, name) { return row[COLUMNS[name]] + row[COLUMNS[`${name}_rate`]] * Math.max(0, this.now - row.now); }

  shares() {
    const t = this.totals;
    const all = t ? t.training + t.transfer + t.idle + t.away : 0;
    return all > 0 ? KINDS.map((kind) => t[kind] / all) : null;
  }

  summary() {
    const shares = this.shares();
    if (!shares) return "no learner has started";
    const said = [`training ${percent(shares[0])}`, `idle ${percent(shares[2])}`];
    if (shares[1] > 0.0005) said.push(`transfer ${percent(shares[1])}`);
    if (shares[3] > 0.0005) said.push(`away ${percent(shares[3])}`);
    return said.join(", ");
  }
}

const runs = new Map();
const ordered = () => [...runs.values()].sort((a, b) => a.place - b.place);
const shownRuns = () => ordered().filter((run) => run.shown);

// --- the stream ----------------------------------------------------------------------------------

let source = null;

function connection(kind, text) {
  $("connection").className = kind;
  put($("connection"), text);
}

function listen() {
  source = new EventSource("events");
  source.addEventListener("open", () => connection("live", "live"));
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
    connection("lost", "connection lost, trying again; this is the latest known state");
  });
  source.addEventListener("hello", (event) => {
    const hello = JSON.parse(event.data);
    COLUMNS = Object.fromEntries(hello.columns.map((name, at) => [name, at]));
    STATES = hello.states;
    for (const id of runs.keys()) if (!hello.runs.includes(id)) runs.delete(id);
    put($("title"), hello.title);
    document.title = `${hello.title} – Metis dashboard`;
    refresh("all");
  });
  source.addEventListener("news", (event) => {
    for (const news of JSON.parse(event.data).runs) {
      if (!runs.has(news.id)) runs.set(news.id, new Run(news.id, news.place ?? runs.size));
      const run = runs.get(news.id);
      run.add(news);
      for (const row of news.rows ?? []) row.now = run.now;
    }
    refresh("news");
  });
  source.addEventListener("end", () => {
    source.close();
    connection("", "the program has ended; this is the final state");
    refresh("news");
  });
}

// --- drawing, a little at a time -----------------------------------------------------------------
// Each part is a job; a frame does as many as fit into a few milliseconds, the next frame goes on. News is drawn at
// most four times a second, curves and table once; what a person does is drawn in the next frame.

const jobs = new Map(); // name: function
const waiting = new Map(); // name: timer
const doneAt = new Map();
let framing = false;

function work() {
  framing = false;
  const end = performance.now() + 8;
  for (const [name, job] of jobs) {
    jobs.delete(name);
    doneAt.set(name, performance.now());
    job();
    if (performance.now() > end) break;
  }
  if (jobs.size) frame();
}

function frame() {
  if (!framing) { framing = true; requestAnimationFrame(work); }
}

function soon(name, job, every = 0) {
  if (jobs.has(name)) return;
  const left = (doneAt.get(name) ?? -1e9) + every - performance.now();
  if (every === 0 || left <= 0) {
    clearTimeout(waiting.get(name));
    waiting.delete(name);
    jobs.set(name, job);
    frame();
  } else if (!waiting.has(name)) {
    waiting.set(name, setTimeout(() => { waiting.delete(name); jobs.set(name, job); frame(); }, left));
  }
}

function refresh(what) {
  const now = what !== "news";
  soon("problems", drawProblems, now ? 0 : 500);
  soon("cards", drawCards, now ? 0 : 500);
  soon("lanes", drawLanes, now ? 0 : 250);
  for (const chart of charts) soon(chart.id, () => chart.draw(), now ? 0 : 1000);
  soon("changes", drawChanges, now ? 0 : 1000);
  soon("table", drawTable, now ? 0 : 1000);
}

// --- problems ------------------------------------------------------------------------------------

let problemsShown = "";

function drawProblems() {
  const several = runs.size > 1;
  const lines = ordered().flatMap((run) => run.problems.map((problem) => ({ ...problem, run: run.label })));
  const weights = ["bad", "warn", "note"];
  lines.sort((a, b) => weights.indexOf(a.weight) - weights.indexOf(b.weight));
  const text = JSON.stringify([lines, several, runs.size]);
  if (text === problemsShown) return; // an unchanged region must not be read out again
  problemsShown = text;
  if (!lines.length) {
    const fine = element("p", runs.size ? "No problems." : "No run yet: waiting for the first event.", "fine");
    $("problems").replaceChildren(fine);
    return;
  }
  const list = element("ul");
  for (const line of lines) {
    const item = element("li", "", line.weight);
    if (several) item.append(element("b", `${line.run}: `));
    item.append(line.text);
    list.append(item);
  }
  $("problems").replaceChildren(list);
}

// --- cards ---------------------------------------------------------------------------------------

const cards = new Map();

function card(run) {
  const made = element("article", "", `card policy-${run.colour}`);
  const head = element("header");
  const title = element("h3");
  title.id = `run-${run.place}`;
  made.setAttribute("aria-labelledby", title.id);
  const show = element("label");
  const box = element("input");
  box.type = "checkbox";
  box.checked = run.shown;
  box.addEventListener("change", () => { runs.get(run.id).shown = box.checked; refresh("all"); });
  show.append(box, " show");
  head.append(title, show);
  const metric = element("p", "", "metric");
  const value = element("span"), name = element("small");
  metric.append(value, name);
  const state = element("p", "", "state");
  const list = element("dl");
  const fields = {};
  for (const key of ["time", "models", "requests", "idle", "bytes", "equation", "active", "idle_charged"]) {
    const group = element("div");
    const term = element("dt"), meaning = element("dd");
    group.append(term, meaning);
    list.append(group);
    fields[key] = [term, meaning];
  }
  made.append(head, metric, state, list);
  return { made, title, show, box, value, name, state, fields };
}

function drawCards() {
  const list = ordered();
  const held = list.map((run) => {
    if (!cards.has(run.id)) cards.set(run.id, card(run));
    return cards.get(run.id).made;
  });
  const place = $("runs");
  if (held.length && (place.children.length !== held.length || held.some((node, at) => place.children[at] !== node))) {
    place.replaceChildren(...held);
  }
  for (const run of list) {
    const view = cards.get(run.id), totals = run.totals;
    put(view.title, titleOf(run, list));
    view.show.hidden = list.length < 2;
    view.box.setAttribute("aria-label", `show ${view.title.textContent}`); // heard one after the other they must differ
    put(view.state, stateOf(run));
    const last = run.history[run.history.length - 1];
    put(view.value, last ? metricText(last[3]) : "–");
    put(view.name, run.head.target === null || run.head.target === undefined ? run.head.metric : `${run.head.metric}, target ${run.head.target}`);
    const shares = run.shares();
    const show = (key, term, value) => { put(view.fields[key][0], term); put(view.fields[key][1], value); };
    show("time", run.real ? "time" : "virtual time", seconds(run.now));
    show("models", "community models", number(totals?.version));
    show("requests", totals?.refused ? `update requests (${totals.refused} refused)` : "update requests", number(totals?.requests));
    show("idle", "learners idle", shares ? percent(shares[2]) : "–");
    show("bytes", "exchanged", run.head.model_bytes ? bytes(totals?.bytes) : "–");
    show("equation", `energy, equation (${run.head.unit})`, number(totals?.energy[0]));
    show("active", `energy, active (${run.head.unit})`, number(totals?.energy[1]));
    show("idle_charged", `energy, idle charged (${run.head.unit})`, number(totals?.energy[2]));
  }
}

/** The label of a run, and its folder where another has the same label. */
function titleOf(run, list) {
  return list.some((other) => other !== run && other.label === run.label) ? `${run.label} (${run.id})` : run.label;
}

function stateOf(run) {
  if (run.finished) return `ended: ${run.finished}`;
  if (!run.totals?.events) return "not started yet";
  const ago = run.age === null ? 0 : run.age + (performance.now() - run.heard) / 1000;
  return ago < 5 ? "running" : `running; last event ${ago < 90 ? `${Math.round(ago / 5) * 5} s` : `${Math.round(ago / 60)} min`} ago`;
}

// --- timeline ------------------------------------------------------------------------------------

const span = { mode: "whole", from: 0, to: 1, length: 1 }; // whole, follow or fixed
let rowScale = 1, scrolled = 0, chosen = null; // chosen: {run, index}
const lanes = new Map();
const TOP = 15, BOTTOM = 20;
let palette = null;

function colours() {
  if (palette) return palette;
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  palette = Object.fromEntries(["card", "ink", "muted", "grid", "edge", "hatch", "version", "accent", ...KINDS].map((name) => [name, read(name)]));
  palette.policy = [0, 1, 2, 3, 4, 5, 6, 7].map((k) => (k ? read(`policy-${k}`) : ""));
  palette.rgb = KINDS.map((kind) => {
    const value = parseInt(palette[kind].slice(1), 16);
    return [value >> 16, (value >> 8) & 255, value & 255];
  });
  // Where bars are too thin for hatching, idle takes the colour between its paper and its lines.
  const hatch = parseInt(palette.hatch.slice(1), 16);
  palette.rgb[2] = palette.rgb[2].map((part, k) => Math.round(0.72 * part + 0.28 * ((hatch >> (16 - 8 * k)) & 255)));
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.fillStyle = palette.idle;
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = palette.hatch;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) { pen.moveTo(shift - 1, 7); pen.lineTo(shift + 7, -1); }
  pen.stroke();
  palette.tile = tile;
  return palette;
}

function lane(run) {
  const figure = element("figure", "", "lane");
  const caption = element("figcaption");
  const title = element("span"), shares = element("span", "", "shares");
  caption.append(title, ": ", shares);
  const plot = element("div", "", "plot");
  plot.tabIndex = 0;
  plot.setAttribute("role", "application");
  plot.setAttribute("aria-describedby", "timeline-help");
  const canvas = element("canvas");
  plot.append(canvas);
  figure.append(caption, plot);
  const made = { figure, title, shares, plot, canvas, pen: canvas.getContext("2d"), id: run.id };
  listenToLane(made);
  return made;
}

function end() { return Math.max(1e-6, ...shownRuns().map((run) => run.now)); }

function settle() {
  const last = end();
  if (span.mode === "whole") { span.from = 0; span.to = last; span.length = last; }
  if (span.mode === "follow") { span.to = last; span.from = last - span.length; }
}

function zoom(factor, around = null) {
  settle();
  const last = end(), middle = around ?? (span.mode === "follow" ? span.to : (span.from + span.to) / 2);
  const length = Math.min(last * 1.05, Math.max(last * 1e-5, span.length * factor));
  if (factor > 1 && length >= last) { show("whole"); return; }
  span.from = middle - ((middle - span.from) * length) / span.length;
  span.length = length;
  if (span.mode !== "follow") span.mode = "fixed";
  span.from = Math.max(-0.02 * length, Math.min(span.from, last - 0.5 * length));
  span.to = span.from + length;
  show(span.mode);
}

function move(share) {
  settle();
  const last = end();
  span.from = Math.max(-0.02 * span.length, Math.min(span.from + share * span.length, last - 0.5 * span.length));
  span.to = span.from + span.length;
  show("fixed");
}

function show(mode) {
  span.mode = mode;
  settle();
  for (const button of document.querySelectorAll("[data-do=whole], [data-do=follow]")) {
    button.setAttribute("aria-pressed", String(button.dataset.do === mode));
  }
  soon("lanes", drawLanes);
}

function stretch(factor) {
  rowScale = Math.min(64, Math.max(1, rowScale * factor));
  soon("lanes", drawLanes);
}

function layout(run, height) {
  const natural = 18, rows = Math.max(1, run.names.length);
  const room = height - TOP - BOTTOM;
  const fit = Math.min(natural, room / rows);
  const row = Math.min(Math.max(fit, 22), fit * rowScale);
  const shown = Math.min(room, rows * row);
  const most = Math.max(0, rows * row - shown);
  return { row, shown, most, top: Math.min(most, scrolled * rows * row), height: shown + TOP + BOTTOM, squeezed: fit < 12 };
}

function drawLanes() {
  const list = shownRuns().filter((run) => run.names.length);
  settle();
  const held = list.map((run) => {
    if (!lanes.has(run.id)) lanes.set(run.id, lane(run));
    return lanes.get(run.id).figure;
  });
  const place = $("timelines");
  if (place.children.length !== held.length || held.some((node, at) => place.children[at] !== node)) place.replaceChildren(...held);
  place.dataset.from = span.from.toFixed(6);
  place.dataset.to = span.to.toFixed(6);
  put($("window"), list.length ? `showing ${seconds(Math.max(0, Number(span.from.toPrecision(4))))} to ${seconds(Number(span.to.toPrecision(4)))}` : "");
  const height = list.length === 1 ? 460 : list.length === 2 ? 280 : 220;
  let squeezed = false, shared = false;
  for (const run of list) {
    const view = lanes.get(run.id);
    put(view.title, run.label);
    put(view.shares, `${run.summary()} of the learners' time`);
    const at = (view.layout = layout(run, height));
    squeezed ||= at.squeezed;
    shared ||= at.row < 1;
    view.plot.setAttribute("aria-label", `Timeline of ${run.label}, ${run.names.length} learners: ${run.summary()}`);
    drawLane(run, view, at);
  }
  $("row-tools").hidden = !squeezed;
  $("between").hidden = !shared;
}

function drawLane(run, view, at) {
  const width = view.plot.clientWidth;
  if (!width) return;
  const ratio = Math.min(2, window.devicePixelRatio || 1);
  const { canvas, pen } = view;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(at.height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(at.height * ratio);
    canvas.style.height = `${at.height}px`;
  }
  const look = colours();
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, at.height);
  pen.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif";
  const named = at.row >= 11;
  let gutter = 46;
  if (named) {
    const first = Math.floor(at.top / at.row), last = Math.min(run.names.length, Math.ceil((at.top + at.shown) / at.row));
    for (let k = first; k < last; k++) gutter = Math.max(gutter, pen.measureText(run.names[k]).width + 12);
    gutter = Math.min(gutter, width * 0.3, 170);
  }
  const box = { left: gutter, width: width - gutter - 2, scale: (width - gutter - 2) / (span.to - span.from) };
  view.box = box;
  pen.save();
  pen.beginPath();
  pen.rect(box.left, TOP, box.width, at.shown);
  pen.clip();
  if (at.row >= 4) drawBars(run, pen, at, box, look); else drawDense(run, pen, at, box, look);
  pen.restore();
  drawNames(run, pen, at, box, look, named);
  drawVersions(run, pen, at, box, look);
  drawAxis(pen, at, box, look, run);
}

/** Seconds of each kind in the spans of one learner between two moments; calls draw(kind or shares, from, to). */
function eachSpan(run, index, draw) {
  const track = run.tracks[index], from = span.from, to = Math.min(span.to, run.now);
  let at = track.find(from), start = at > 0 ? track.ends[at - 1] : 0;
  for (; at < track.ends.length && start < to; at++) {
    draw(track.kinds[at], start, track.ends[at]);
    start = track.ends[at];
  }
  const open = OPEN_KIND[run.state(index)];
  if (open !== undefined && at === track.ends.length && run.now > track.end && track.end < to) draw(open, track.end, run.now);
}

function drawBars(run, pen, at, box, look) {
  const gap = at.row >= 10 ? 3 : at.row >= 6 ? 1 : 0, height = at.row - gap;
  const first = Math.floor(at.top / at.row), last = Math.min(run.names.length, Math.ceil((at.top + at.shown) / at.row));
  const pattern = pen.createPattern(look.tile, "repeat");
  const flat = look.rgb.map(([r, g, b]) => `rgb(${r} ${g} ${b})`);
  const paint = (kind) => { pen.fillStyle = kind === 2 ? (height >= 7 ? pattern : flat[2]) : look[KINDS[kind]]; };
  for (let index = first; index < last; index++) {
    const y = TOP + index * at.row - at.top + gap / 2;
    // What is narrower than a pixel is summed up by columns and drawn as shares, so that nothing is hidden.
    let column = -1;
    const sums = [0, 0, 0, 0];
    const stack = (x, wide, shares) => {
      const all = shares[0] + shares[1] + shares[2] + shares[3];
      let bottom = y + height;
      for (let kind = 0; kind < 4 && all > 0; kind++) {
        const part = (height * shares[kind]) / all;
        if (part <= 0) continue;
        paint(kind);
        pen.fillRect(x, bottom - part, wide, part);
        bottom -= part;
      }
    };
    const flush = () => {
      if (column >= 0) stack(column, 1, sums);
      column = -1;
      sums.fill(0);
    };
    eachSpan(run, index, (kind, start, end) => {
      const left = box.left + (Math.max(start, span.from) - span.from) * box.scale;
      const right = box.left + (Math.min(end, span.to) - span.from) * box.scale;
      if (right - left >= 1) {
        flush();
        if (typeof kind === "number") { paint(kind); pen.fillRect(left, y, right - left, height); } else stack(left, right - left, kind);
        return;
      }
      const here = Math.floor(left);
      if (here !== column) { flush(); column = here; }
      if (typeof kind === "number") sums[kind] += end - start;
      else for (let k = 0; k < 4; k++) sums[k] += kind[k];
    });
    flush();
    if (chosen && chosen.run === run.id && chosen.index === index) {
      pen.strokeStyle = look.accent;
      pen.lineWidth = 2;
      pen.strokeRect(box.left + 1, y, box.width - 2, height);
    }
  }
}

let shares = new Float32Array(0);
let drawing = null;

/** Hundreds of learners: one line of pixels is one learner or several, and its colour the mean of what they do. */
function drawDense(run, pen, at, box, look) {
  const wide = Math.max(1, Math.floor(box.width)), high = Math.max(1, Math.floor(at.shown));
  if (shares.length < wide * 4) shares = new Float32Array(wide * 4);
  if (!drawing || drawing.width !== wide || drawing.height !== high) drawing = new ImageData(wide, high);
  const pixels = drawing.data, scale = wide / (span.to - span.from), rgb = look.rgb;
  const add = (kind, start, end) => {
    let from = (Math.max(start, span.from) - span.from) * scale;
    const to = Math.min((end - span.from) * scale, wide);
    if (typeof kind !== "number") {
      // A merged span: each kind has its part of every column.
      const all = end - start;
      for (let column = Math.floor(from); column < to; column++) {
        const part = Math.min(to, column + 1) - Math.max(from, column);
        for (let k = 0; k < 4; k++) shares[4 * column + k] += (part * kind[k]) / all;
      }
      return;
    }
    let column = Math.floor(from);
    while (from < to) {
      const stop = Math.min(to, column + 1);
      shares[4 * column + kind] += stop - from;
      from = stop;
      column++;
    }
  };
  let done = -1;
  for (let line = 0; line < high; line++) {
    const first = Math.floor((at.top + line) / at.row);
    const last = Math.min(run.names.length, Math.max(first + 1, Math.floor((at.top + line + 1) / at.row)));
    const target = 4 * line * wide;
    if (first === done) { pixels.copyWithin(target, target - 4 * wide, target); continue; }
    done = first;
    shares.fill(0);
    for (let index = first; index < last; index++) eachSpan(run, index, add);
    for (let column = 0, source = 0, pixel = target; column < wide; column++, source += 4, pixel += 4) {
      const a = shares[source], b = shares[source + 1], c = shares[source + 2], d = shares[source + 3], all = a + b + c + d;
      if (all <= 0) { pixels[pixel + 3] = 0; continue; }
      pixels[pixel] = (a * rgb[0][0] + b * rgb[1][0] + c * rgb[2][0] + d * rgb[3][0]) / all;
      pixels[pixel + 1] = (a * rgb[0][1] + b * rgb[1][1] + c * rgb[2][1] + d * rgb[3][1]) / all;
      pixels[pixel + 2] = (a * rgb[0][2] + b * rgb[1][2] + c * rgb[2][2] + d * rgb[3][2]) / all;
      pixels[pixel + 3] = 255;
    }
  }
  densePage.width = wide;
  densePage.height = high;
  densePage.getContext("2d").putImageData(drawing, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(densePage, box.left, TOP, box.width, at.shown);
  if (chosen && chosen.run === run.id) {
    pen.strokeStyle = look.accent;
    pen.lineWidth = 2;
    pen.strokeRect(box.left + 1, TOP + chosen.index * at.row - at.top - 2, box.width - 2, Math.max(4, at.row + 4));
  }
}
const densePage = document.createElement("canvas");

function drawNames(run, pen, at, box, look, named) {
  pen.fillStyle = look.ink;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const first = Math.floor(at.top / at.row), last = Math.min(run.names.length, Math.ceil((at.top + at.shown) / at.row));
  if (!named) { // the numbers of some learners, so that one can tell how far down one is
    pen.fillStyle = look.muted;
    const step = Math.max(1, Math.ceil((40 / at.row) / 50) * 50);
    for (let k = Math.ceil(first / step) * step; k < last; k += step) {
      const y = TOP + k * at.row - at.top;
      if (y < TOP + at.shown - 4) pen.fillText(String(k + 1), box.left - 6, Math.max(y, TOP + 5));
    }
    return;
  }
  for (let k = first; k < last; k++) {
    const y = TOP + (k + 0.5) * at.row - at.top;
    if (y < TOP || y > TOP + at.shown) continue;
    let name = run.names[k];
    if (pen.measureText(name).width > box.left - 8) {
      while (name.length > 1 && pen.measureText(`${name}…`).width > box.left - 8) name = name.slice(0, -1);
      name += "…";
    }
    pen.fillText(name, box.left - 6, y);
  }
}

function drawVersions(run, pen, at, box, look) {
  const list = run.versions, inside = [];
  for (let k = 0; k < list.length; k += 2) {
    if (list[k + 1] >= span.from && list[k + 1] <= span.to) inside.push(k);
  }
  if (!inside.length) return;
  const room = box.width / inside.length;
  const dense = room < 5; // then lines would hide the bars: only marks above them
  pen.textAlign = "center";
  pen.textBaseline = "alphabetic";
  pen.font = "10.5px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif";
  let free = -1e9;
  for (const k of inside) {
    const x = Math.round(box.left + (list[k + 1] - span.from) * box.scale) + 0.5;
    if (dense) {
      pen.strokeStyle = look.muted;
      pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(x, TOP - 4); pen.lineTo(x, TOP); pen.stroke();
      continue;
    }
    pen.strokeStyle = look.card;
    pen.lineWidth = 3;
    pen.globalAlpha = 0.75;
    pen.beginPath(); pen.moveTo(x, TOP); pen.lineTo(x, TOP + at.shown); pen.stroke();
    pen.globalAlpha = 1;
    pen.strokeStyle = look.version;
    pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(x, TOP - 3); pen.lineTo(x, TOP + at.shown); pen.stroke();
    const label = String(list[k]);
    const half = pen.measureText(label).width / 2;
    if (x - half > free + 4 && x + half < box.left + box.width + 2) {
      pen.fillStyle = look.muted;
      pen.fillText(label, x, TOP - 5);
      free = x + half;
    }
  }
}

function niceStep(length, parts) {
  const rough = length / parts, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((k) => k * power).find((step) => step >= rough * 0.999);
}

function drawAxis(pen, at, box, look, run) {
  const y = TOP + at.shown;
  pen.strokeStyle = look.edge;
  pen.lineWidth = 1;
  pen.strokeRect(box.left - 0.5, TOP - 0.5, box.width + 1, at.shown + 1);
  pen.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif";
  pen.fillStyle = look.muted;
  pen.textBaseline = "top";
  pen.textAlign = "center";
  const step = niceStep(span.to - span.from, Math.max(2, box.width / 110));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  for (let k = Math.ceil(span.from / step); k * step <= span.to; k++) {
    const x = box.left + (k * step - span.from) * box.scale;
    pen.beginPath(); pen.moveTo(x, y); pen.lineTo(x, y + 4); pen.stroke();
    const text = k * step < 1e4 ? `${(k * step).toFixed(digits)} s` : seconds(k * step);
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(x, box.left + box.width - half), y + 6);
  }
  if (run.now < span.to && !run.finished) {
    const x = box.left + (run.now - span.from) * box.scale;
    if (x > box.left) { pen.beginPath(); pen.moveTo(x, TOP); pen.lineTo(x, y); pen.stroke(); }
  }
}

/** What a learner does at a moment, in words. */
function telling(run, index, moment) {
  const name = run.names[index];
  let said = "";
  const saved = { from: span.from, to: span.to };
  span.from = moment; span.to = moment + 1e-9 * Math.max(1, moment);
  eachSpan(run, index, (kind, start, end) => {
    if (said || end < moment) return;
    const from = Number(start.toPrecision(5)), to = Number(end.toPrecision(5));
    if (typeof kind === "number") said = `${name}: ${KINDS[kind]} from ${seconds(from)} to ${seconds(to)} (${seconds(end - start)})`;
    else {
      const parts = kind.map((value, k) => [value / (end - start), KINDS[k]]).filter(([share]) => share > 0.005);
      said = `${name}, ${seconds(from)} to ${seconds(to)}: ${parts.map(([share, word]) => `${word} ${percent(share)}`).join(", ")}`;
    }
  });
  Object.assign(span, saved);
  return said || `${name}: no data yet at ${seconds(moment)}`;
}

function choose(run, step) {
  const index = chosen && chosen.run === run.id ? chosen.index + step : step > 0 ? 0 : run.names.length - 1;
  chosen = { run: run.id, index: Math.max(0, Math.min(run.names.length - 1, index)) };
  const at = lanes.get(run.id).layout;
  const y = chosen.index * at.row;
  if (y < at.top) scrolled = y / (run.names.length * at.row);
  if (y + at.row > at.top + at.shown) scrolled = (y + at.row - at.shown) / (run.names.length * at.row);
  const row = run.rows[chosen.index];
  const since = row?.[COLUMNS.since];
  const now = run.finished ? "" : `${run.state(chosen.index)}${since === null || since === undefined ? "" : ` since ${seconds(since)}`}; `;
  let time = [0, 0, 0, 0];
  const saved = { from: span.from, to: span.to };
  span.from = 0; span.to = run.now;
  eachSpan(run, chosen.index, (kind, start, stop) => {
    if (typeof kind === "number") time[kind] += stop - start; else time = time.map((value, k) => value + kind[k]);
  });
  Object.assign(span, saved);
  const all = time.reduce((a, b) => a + b, 0) || 1;
  put($("news"), `${run.names[chosen.index]}: ${now}training ${percent(time[0] / all)}, idle ${percent(time[2] / all)}, transfer ${percent(time[1] / all)}, away ${percent(time[3] / all)} of its time`);
  soon("lanes", drawLanes);
}

const ACTIONS = {
  in: () => zoom(0.5),
  out: () => zoom(2),
  earlier: () => move(-0.25),
  later: () => move(0.25),
  whole: () => show("whole"),
  follow: () => show(span.mode === "follow" ? "fixed" : "follow"),
  taller: () => stretch(2),
  shorter: () => stretch(0.5),
};

function listenToLane(view) {
  const { plot } = view;
  const place = (event) => {
    const area = plot.getBoundingClientRect(), box = view.box, at = view.layout;
    const x = event.clientX - area.left, y = event.clientY - area.top;
    return { moment: span.from + (x - box.left) / box.scale, index: Math.floor((y - TOP + at.top) / at.row), inside: x >= box.left && y >= TOP && y < TOP + at.shown };
  };
  let held = null;
  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !view.box) return;
    settle();
    held = { x: event.clientX, y: event.clientY, from: span.from, scrolled, moved: false };
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    if (!view.box) return;
    if (held) {
      const dx = event.clientX - held.x, dy = event.clientY - held.y, at = view.layout;
      if (!held.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
      held.moved = true;
      plot.classList.add("held");
      $("tip").hidden = true;
      span.from = held.from;
      if (at.most > 0) scrolled = Math.max(0, Math.min(at.most, held.scrolled * (at.most + at.shown) - dy)) / (at.most + at.shown);
      move(-dx / (view.box.scale * span.length));
      return;
    }
    const run = runs.get(view.id), { moment, index, inside } = place(event);
    const tip = $("tip");
    if (!inside || index < 0 || index >= run.names.length || moment < 0 || moment > run.now) { tip.hidden = true; return; }
    put(tip, telling(run, index, moment));
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8)}px`;
  });
  const release = () => { held = null; plot.classList.remove("held"); };
  plot.addEventListener("pointerup", release);
  plot.addEventListener("pointercancel", release);
  plot.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  plot.addEventListener("dblclick", (event) => zoom(0.5, place(event).moment));
  plot.addEventListener("wheel", (event) => {
    if (!view.box) return;
    const run = runs.get(view.id), at = view.layout;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event).moment);
    } else if (event.shiftKey) {
      event.preventDefault();
      move(Math.sign(event.deltaY || event.deltaX) * 0.1);
    } else if (at.most > 0) {
      const whole = run.names.length * at.row, target = Math.max(0, Math.min(at.most, at.top + event.deltaY));
      if (target !== at.top) { event.preventDefault(); scrolled = target / whole; soon("lanes", drawLanes); }
    }
  }, { passive: false });
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const run = runs.get(view.id);
    const page = Math.max(1, Math.floor(view.layout.shown / view.layout.row));
    const keys = {
      "+": ACTIONS.in, "=": ACTIONS.in, "-": ACTIONS.out, _: ACTIONS.out, ArrowLeft: ACTIONS.earlier, ArrowRight: ACTIONS.later,
      ArrowUp: () => choose(run, -1), ArrowDown: () => choose(run, 1), PageUp: () => choose(run, -page), PageDown: () => choose(run, page),
      Home: ACTIONS.whole, 0: ACTIONS.whole, End: () => show("follow"), Escape: () => { chosen = null; put($("news"), ""); soon("lanes", drawLanes); },
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}

// --- curves --------------------------------------------------------------------------------------

class Chart {
  constructor(id, xLabel, points, text) {
    this.id = id;
    this.place = $(id);
    this.xLabel = xLabel;
    this.points = points; // of a run: [[x...], [y...]]
    this.text = text; // of a run: a description for readers who cannot see it
    this.key = "";
    this.place.setAttribute("role", "img");
    new ResizeObserver(() => {
      if (this.plot && this.place.clientWidth) this.plot.setSize({ width: this.place.clientWidth, height: 210 });
    }).observe(this.place);
  }

  draw() {
    const list = shownRuns().filter((run) => run.names.length);
    const tables = list.map((run) => this.points(run));
    const key = JSON.stringify([list.map((run) => [run.id, run.label, run.colour, run.head.target, run.head.metric]), document.documentElement.dataset.theme]);
    if (!list.length || !this.place.clientWidth) return;
    const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    if (key !== this.key) this.build(list, data, key);
    else this.plot.setData(data);
    this.place.setAttribute("aria-label", list.map((run) => this.text(run)).join("; "));
  }

  build(list, data, key) {
    this.key = key;
    this.plot?.destroy();
    const look = colours();
    const dashes = [[], [7, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 2], [12, 4]];
    const axis = (label, size) => ({
      stroke: look.muted, grid: { stroke: look.grid, width: 1 }, ticks: { stroke: look.grid, width: 1 }, label, labelSize: 18, labelGap: 0,
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", size,
      values: (_, ticks) => ticks.map((tick) => (Math.abs(tick) >= 1e4 ? compact.format(tick) : String(Number(tick.toPrecision(6))))),
    });
    const target = this.id.startsWith("metric") ? list[0].head.target : null;
    const options = {
      width: this.place.clientWidth,
      height: 210,
      scales: { x: { time: false }, y: { range: (_, low, high) => this.range(low, high, target) } },
      axes: [axis(this.xLabel, 34), axis(null, 56)],
      cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      legend: { show: true, live: true },
      series: [
        { label: this.xLabel, value: (_, value) => (value === null ? "" : number(value)) },
        ...list.map((run) => ({
          label: run.label, stroke: look.policy[run.colour], width: 2, dash: dashes[(run.colour - 1) % 7], spanGaps: true,
          points: { show: data[0].length < 40, size: 5 }, value: (_, value) => (value === null || value === undefined ? "" : number(value)),
        })),
      ],
      hooks: {
        draw: [(plot) => {
          if (target === null || target === undefined) return;
          const y = plot.valToPos(target, "y", true);
          const { ctx, bbox } = plot;
          if (y < bbox.top || y > bbox.top + bbox.height) return;
          ctx.save();
          ctx.strokeStyle = look.muted;
          ctx.setLineDash([4, 4]);
          ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
          ctx.restore();
        }],
      },
    };
    this.place.replaceChildren();
    this.plot = new uPlot(options, data, this.place);
  }

  range(low, high, target) {
    if (low === null || low === undefined || !Number.isFinite(low)) return [0, 1];
    if (target !== null && target !== undefined) { low = Math.min(low, target); high = Math.max(high, target); }
    if (low === high) { low -= 0.5 * Math.abs(low) || 0.5; high += 0.5 * Math.abs(high) || 0.5; }
    const pad = 0.05 * (high - low);
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  }
}

const metricPoints = (column) => (run) => {
  // Points at the same position would be drawn over each other; the last one counts.
  const xs = [], ys = [];
  for (const point of run.history) {
    if (xs.length && xs[xs.length - 1] === point[column]) { xs.pop(); ys.pop(); }
    xs.push(point[column]);
    ys.push(point[3]);
  }
  return [xs, ys];
};
const energyPoints = (kind) => (run) => {
  const xs = [0], ys = [0];
  for (const point of run.costs) {
    if (point[0] > xs[xs.length - 1]) { xs.push(point[0]); ys.push(point[1 + kind]); }
  }
  if (run.totals && run.now > xs[xs.length - 1]) { xs.push(run.now); ys.push(run.totals.energy[kind]); }
  return [xs, ys];
};
const metricWords = (run) => {
  const last = run.history[run.history.length - 1];
  return last ? `${run.label}: ${run.head.metric} ${metricText(last[3])} at ${seconds(last[0])} after ${number(last[1])} update requests` : `${run.label}: not evaluated yet`;
};
const energyWords = (kind) => (run) => `${run.label}: ${number(run.totals?.energy[kind])} ${run.head.unit} at ${seconds(run.now)}`;
const charts = [];

// --- periods -------------------------------------------------------------------------------------

const periodPoints = (run) => {
  // A period lasts until the next one begins: steps, with the end of each right before the next.
  const xs = [], ys = [];
  for (const [moment, length] of run.periods) {
    if (xs.length && moment > xs[xs.length - 1]) { xs.push(moment); ys.push(ys[ys.length - 1]); }
    xs.push(moment * (1 + 1e-9) + 1e-9);
    ys.push(length);
  }
  if (xs.length && run.now > xs[xs.length - 1]) { xs.push(run.now); ys.push(ys[ys.length - 1]); }
  return xs.length ? [xs, ys] : [[0], [null]];
};
const periodWords = (run) => {
  const last = run.periods[run.periods.length - 1];
  return last ? `${run.label}: periods of ${seconds(last[1])} since ${seconds(last[0])}` : `${run.label}: no periods`;
};
let changesShown = "";

function drawChanges() {
  const list = shownRuns().filter((run) => run.changes.length);
  const section = $("period-section"), appears = section.hidden && list.length > 0;
  section.hidden = list.length === 0;
  if (appears) charts.find((chart) => chart.id === "period-time").draw(); // it had no width before
  const text = JSON.stringify(list.map((run) => [run.label, run.changes]));
  if (text === changesShown) return;
  changesShown = text;
  const several = list.length > 1;
  $("period-changes").replaceChildren(...list.map((run) => {
    const part = element("div");
    if (several) part.append(element("h3", run.label));
    const lines = element("ul", "", "changes");
    for (const [moment, why] of [...run.changes].reverse()) lines.append(element("li", `${seconds(moment)}: ${why}`));
    part.append(lines);
    return part;
  }));
}

// --- table of learners ---------------------------------------------------------------------------

const ROW = 32; // pixels; as in the style sheet
const VIEW = [
  { key: "name", title: "Learner", text: true, value: (run, row) => run.names[row[0]] },
  { key: "state", title: "State", text: true, value: (run, row) => (run.finished && ["training", "late", "idle"].includes(STATES[row[COLUMNS.state]]) ? "done" : STATES[row[COLUMNS.state]]) },
  // Before what scrolls out of sight on a narrow page with long names.
  { key: "updates", title: "Updates", value: (run, row) => row[COLUMNS.updates], show: number },
  { key: "refused", title: "Refused", value: (run, row) => row[COLUMNS.refused], show: number },
  { key: "examples", title: "Examples", value: (run, row) => row[COLUMNS.examples], show: number },
  { key: "time_per_batch", title: "Time per batch", value: (run, row) => row[COLUMNS.time_per_batch], show: (value) => (value === null ? "–" : value < 1 ? `${number(1000 * value)} ms` : seconds(value)) },
  { key: "steps", title: "B_k (steps)", value: (run, row) => row[COLUMNS.steps] ?? row[COLUMNS.seconds], show: (value, run, row) => (row[COLUMNS.steps] === null && row[COLUMNS.seconds] !== null ? `what fits ${seconds(row[COLUMNS.seconds])}` : number(value)) },
  { key: "contribution", title: "Contribution", value: (run, row) => row[COLUMNS.contribution], show: number },
  { key: "seen", title: "Last seen", value: (run, row) => row[COLUMNS.seen], show: (value) => (value === null ? "–" : `at ${seconds(value)}`) },
  { key: "bytes", title: "Exchanged", value: (run, row) => row[COLUMNS.bytes], show: (value, run) => (run.head.model_bytes ? bytes(value) : "–") },
  { key: "energy", title: "Energy", value: (run, row) => run.grown(row, $("energy-kind").value), show: number },
];
// What is left of a site's privacy budget, and epsilon where a simulation knows it, short and in words; nothing for other sites.
function privacyOf(row) {
  const left = row[COLUMNS.steps_left], rounds = row[COLUMNS.rounds_left], epsilon = row[COLUMNS.epsilon];
  const short = [], words = [];
  if (epsilon !== null) { short.push(`ε ${number(epsilon)}`); words.push(`epsilon ${number(epsilon)} is spent`); }
  if (left === 0) { short.push("spent"); words.push("the privacy budget is spent"); }
  else if (left !== null && rounds === null) { short.push(`${number(left)} steps`); words.push(`${number(left)} private steps are left`); }
  else if (left !== null) { short.push(`${number(rounds)} rounds`); words.push(`the privacy budget lasts for ${number(rounds)} rounds`); }
  return [short.map((part) => ` · ${part}`).join(""), words.join("; ")];
}

const sorting = { key: null, up: true };
let tableRows = []; // of the chosen run, sorted and filtered
let tableRun = null;

function heading() {
  const cells = VIEW.map((column) => {
    const cell = element("th", "", column.text ? "text" : "");
    cell.scope = "col";
    cell.dataset.key = column.key;
    cell.setAttribute("aria-sort", "none");
    const button = element("button", column.title);
    button.type = "button";
    button.addEventListener("click", () => {
      if (sorting.key !== column.key) { sorting.key = column.key; sorting.up = column.text === true; } else sorting.up = !sorting.up;
      for (const other of cells) other.setAttribute("aria-sort", other !== cell ? "none" : sorting.up ? "ascending" : "descending");
      $("scroll").scrollTop = 0;
      soon("table", drawTable);
    });
    cell.append(button);
    return cell;
  });
  $("columns").replaceChildren(...cells);
}

function drawTable() {
  const list = ordered().filter((run) => run.names.length);
  const select = $("run");
  const options = list.map((run) => [run.id, titleOf(run, list)]);
  if (JSON.stringify(options) !== select.dataset.options) {
    select.dataset.options = JSON.stringify(options);
    const before = select.value;
    select.replaceChildren(...options.map(([id, text]) => { const made = element("option", text); made.value = id; return made; }));
    if (options.some(([id]) => id === before)) select.value = before;
  }
  $("pick-run").hidden = list.length < 2;
  tableRun = runs.get(select.value) ?? null;
  if (!tableRun) return;
  const wanted = $("find").value.trim().toLowerCase();
  tableRows = tableRun.rows.filter((row) => row && (!wanted || tableRun.names[row[0]].toLowerCase().includes(wanted) || VIEW[1].value(tableRun, row).includes(wanted)));
  const column = VIEW.find((one) => one.key === sorting.key);
  if (column) {
    const sign = sorting.up ? 1 : -1;
    const keyed = tableRows.map((row) => [column.value(tableRun, row), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1; // what is not known comes last
      if (b === null || b === undefined) return -1;
      return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    });
    tableRows = keyed.map(([, row]) => row);
  }
  $("table").setAttribute("aria-rowcount", String(tableRows.length + 1));
  put($("shown"), wanted ? `${tableRows.length} of ${tableRun.names.length} learners` : `${tableRun.names.length} learners`);
  put($("columns").children[8].firstChild, `Energy (${tableRun.head.unit})`);
  drawRows();
}

/** Only the rows that can be seen are there; two empty ones hold the place of the others. */
function drawRows() {
  const body = $("rows"), box = $("scroll");
  const visible = Math.ceil(box.clientHeight / ROW) + 12;
  const first = Math.max(0, Math.min(Math.floor(box.scrollTop / ROW) - 6, tableRows.length - visible));
  const last = Math.min(tableRows.length, first + visible);
  const wanted = last - first;
  if (!body.firstChild) {
    for (const _ of [0, 1]) {
      const space = element("tr", "", "space");
      space.setAttribute("aria-hidden", "true");
      space.append(element("td"));
      space.firstChild.colSpan = VIEW.length;
      body.append(space);
    }
  }
  const above = body.firstChild, below = body.lastChild;
  above.firstChild.style.height = `${first * ROW}px`;
  below.firstChild.style.height = `${(tableRows.length - last) * ROW}px`;
  above.hidden = first === 0;
  below.hidden = last === tableRows.length;
  while (body.children.length - 2 > wanted) below.previousSibling.remove();
  while (body.children.length - 2 < wanted) {
    const line = element("tr");
    for (const column of VIEW) {
      const cell = element(column.key === "name" ? "th" : "td", "", column.text ? "text" : "");
      if (column.key === "name") cell.scope = "row";
      if (column.key === "state") cell.append(element("span", "", "chip"));
      line.append(cell);
    }
    body.insertBefore(line, below);
  }
  for (let at = 0; at < wanted; at++) {
    const row = tableRows[first + at], line = body.children[at + 1];
    line.setAttribute("aria-rowindex", String(first + at + 2));
    VIEW.forEach((column, k) => {
      const value = column.value(tableRun, row), cell = line.children[k];
      const text = column.show ? column.show(value, tableRun, row) : value;
      if (column.key === "state") {
        const [short, words] = privacyOf(row);
        put(cell.firstChild, text + short);
        const look = `chip ${text === "set aside" ? "aside" : text}`;
        if (cell.firstChild.className !== look) cell.firstChild.className = look;
        if (cell.title !== words) cell.title = words;
        return;
      }
      put(cell, text);
      if (column.key === "name") cell.title = text;
      if (column.key === "refused") cell.className = value > 0 ? "refused" : "";
    });
  }
}

// --- theme ---------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const THEMES = ["system", "light", "dark"];
let theme = "system";
try { theme = THEMES.includes(localStorage.getItem("metis-theme")) ? localStorage.getItem("metis-theme") : "system"; } catch { /* no storage: the system's */ }

function dress() {
  document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  put($("theme"), `Theme: ${theme}`);
  palette = null;
  refresh("all");
}

// --- start ---------------------------------------------------------------------------------------

charts.push(
  new Chart("metric-time", "time (s)", metricPoints(0), metricWords),
  new Chart("metric-requests", "update requests", metricPoints(1), metricWords),
  new Chart("period-time", "time (s)", periodPoints, periodWords),
  ...[0, 1, 2].map((kind) => new Chart(`energy-${kind}`, "time (s)", energyPoints(kind), energyWords(kind))),
);
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.setItem("metis-theme", theme); } catch { /* then it is forgotten */ }
  dress();
});
dark.addEventListener("change", dress);
for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => ACTIONS[button.dataset.do]());
new ResizeObserver(() => soon("lanes", drawLanes)).observe($("timelines"));
heading();
$("run").addEventListener("change", () => { $("scroll").scrollTop = 0; soon("table", drawTable); });
$("find").addEventListener("input", () => { $("scroll").scrollTop = 0; soon("table", drawTable); });
$("energy-kind").addEventListener("change", () => soon("table", drawTable));
$("scroll").addEventListener("scroll", () => soon("rows", drawRows), { passive: true });
setInterval(() => { if (source?.readyState === EventSource.OPEN) soon("cards", drawCards); }, 5000);
dress();
listen();
