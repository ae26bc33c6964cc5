"use strict";
// Interaction: time, zoom, selection of nodes, filters, playback, live updates.

const SPEEDS = [5, 20, 60, 200, 1000]; // frames per second
const $ = (id) => document.getElementById(id);

let flow = new Flow(JSON.parse($("data").textContent));
const runs = flow.beside ? [flow, flow.other()] : [flow]; // this one, and the one beside it
if (flow.beside) runs.push(runs[0].minus(runs[1]));
const START = 10; // observations at the start, whose surprise is that of not knowing anything
const state = { run: 0, mode: "nodes", frame: flow.live ? flow.frames - 1 : 0, from: 0, to: flow.frames - 1, selected: null, playing: false, speed: 1, hidden: new Set(),
  level: "", hovered: null, following: flow.live };
let charts = [], strip = null, network = null, waiting = false;

// --- drawing ---------------------------------------------------------------------------------------------------------
// Redraw at most once per animation frame.
function update() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; render(); });
}

function render() {
  const { frame, from, to } = state;
  network.show(frame);
  $("slider").value = frame;
  $("now").textContent = flow.when(frame);
  $("now").dataset.frame = frame;
  $("slider").setAttribute("aria-valuetext", flow.when(frame));
  $("cursor").style.left = `${to > from ? 100 * (frame - from) / (to - from) : 0}%`;
  for (const chart of charts) chart.show(frame);
  if (strip) strip.show(frame);
  if (!state.playing) describe();
  if (state.selected == null) rank();
  if (state.hovered) tip(state.hovered.what, state.hovered.where);
}

// What happened at this time, in words.
function describe() {
  const { frame } = state, words = [], at = (series) => flow.at(series, frame);
  let [farthest, name, origin] = [0, "", null], seen = false;
  for (const node of flow.nodes) {
    node.deviations.forEach((series, i) => {
      const value = at(series);
      seen = seen || Number.isFinite(value);
      if (Math.abs(value) > Math.abs(farthest)) [farthest, name, origin] = [value, node.name + (node.deviations.length > 1 ? `[${i}]` : ""), node.name];
    });
  }
  if (state.run === 2) words.push("difference of both runs");
  else if (!seen && flow.nodes.some((node) => node.deviations.length)) words.push("nothing was observed");
  else if (Math.abs(farthest) < 1) words.push("every observation was as predicted, within 1 sd");
  else words.push(`${name} was ${Math.abs(farthest).toFixed(1)} sd ${farthest > 0 ? "higher" : "lower"} than predicted`);
  const above = new Set([origin]); // nodes that its errors reach
  for (const start of above) for (const link of flow.links) if (link.child === start) above.add(link.parent);
  const inner = flow.nodes.filter((node) => above.has(node.name) && node.role !== "sensory" && node.kind !== "precision" && flow.activity(node))
    .map((node) => [Math.abs(at(flow.activity(node).series)) || 0, node.name]).sort((a, b) => b[0] - a[0]);
  if (inner.length && inner[0][0] >= 0.05) words.push(`${inner[0][1]} took most of it (${inner[0][0].toFixed(1)} sd)`);
  const noises = flow.nodes.filter((node) => above.has(node.name) && node.rise != null).map((node) => [at(node.rise) || 0, node.name])
    .sort((a, b) => Math.abs(b[0]) - Math.abs(a[0]));
  if (noises.length && Math.abs(noises[0][0]) >= 0.02) words.push(`${noises[0][1]}: noise ${noises[0][0] > 0 ? "rose" : "fell"} by ${Math.abs(noises[0][0]).toFixed(2)} sd`);
  const text = `t = ${flow.clock(flow.tick(frame))}: ${words.join("; ")}.`;
  if ($("caption").textContent === text) return;
  $("caption").textContent = text;
  $("graph").setAttribute("aria-label", `The graph with its messages. ${text}`);
}

// Go to the largest surprise in the shown interval, of the selected node if it has one.
function peak(first = state.from) {
  const selected = state.selected == null ? null : flow.nodes[state.selected];
  let highest = -Infinity, frame = state.frame;
  for (const node of selected && selected.surprise != null ? [selected] : surprised()) {
    const high = flow.high(node.surprise);
    for (let i = first; i <= state.to; i++) if (high[i] > highest) [highest, frame] = [high[i], i];
  }
  go(frame);
}

function go(frame) {
  state.frame = clamp(frame, state.from, state.to);
  state.following = flow.live && state.frame === flow.frames - 1;
  update();
}

// --- the map of surprise over time -----------------------------------------------------------------------------------
function surprised() { return flow.nodes.filter((node) => node.surprise != null && visible(node)).sort((a, b) => b.level - a.level); }

// Rows of the map: nodes with their surprise or movement, or links with their messages; of both runs and their difference.
function mapRows() {
  let rows;
  if (state.mode === "nodes") {
    rows = flow.nodes.filter((node) => flow.activity(node) && visible(node)).sort((a, b) => (a.surprise == null) - (b.surprise == null) || b.level - a.level)
      .map((node) => ({ name: node.name, ...flow.activity(node) }));
  } else {
    const [way, full] = state.mode === "errors" ? ["up", "full_up"] : ["down", "full_down"], shown = new Set(flow.nodes.filter(visible).map((node) => node.name));
    rows = flow.links.filter((link) => shown.has(link.parent) && shown.has(link.child)).map((link) => ({
      name: way === "up" ? `${link.child} → ${link.parent}` : `${link.parent} → ${link.child}`, series: link[way], full: link[full],
      what: way === "up" ? "error" : "change of the prediction" }));
  }
  if (runs.length === 1) return rows.map((row) => ({ ...row, of: flow }));
  return rows.flatMap((row) => runs.map((of, i) => ({ ...row, of, name: i === 0 ? row.name : ["", "second run", "difference"][i] })));
}

function drawMap() {
  const nodes = mapRows(), { from, to } = state, paint = ramp();
  const map = $("map"), phone = window.innerWidth <= 760;
  map.style.height = `${clamp(nodes.length * (phone || runs.length > 1 ? 12 : 15), 40, phone ? 60 : runs.length > 1 ? 190 : 120)}px`;
  const width = Math.max(map.clientWidth, 1), canvas = $("heat");
  canvas.width = width;
  canvas.height = Math.max(nodes.length, 1);
  canvas.style.imageRendering = "pixelated";
  const pen = canvas.getContext("2d"), image = pen.createImageData(canvas.width, canvas.height);
  nodes.forEach((node, row) => {
    const high = node.of.high(node.series);
    for (let x = 0; x < width; x++) {
      const first = from + Math.floor(x / width * (to - from + 1));
      const last = Math.max(first, from + Math.ceil((x + 1) / width * (to - from + 1)) - 1);
      let highest = NaN;
      for (let i = first; i <= Math.min(last, to); i++) if (!(highest >= high[i])) highest = Number.isNaN(high[i]) ? highest : high[i];
      image.data.set([...paint(Math.abs(highest) / node.full), Number.isNaN(highest) ? 0 : 255], 4 * (row * width + x));
    }
  });
  pen.putImageData(image, 0, 0);
  const legible = map.clientHeight / nodes.length >= 11;
  $("rows").replaceChildren(...(legible ? nodes : []).map((node) => element("span", { text: node.name, title: node.name })));
  $("axis").replaceChildren(...flow.marks(from, to, map.clientWidth / 110).map(([share, text]) => {
    const mark = element("span", { text });
    mark.style.left = `${100 * share}%`;
    return mark;
  }));
}

// Observed against predicted: the sensory node with the greatest surprise in the run.
function drawStrip() {
  const seen = flow.nodes.filter((node) => node.role === "sensory" && node.panels.length && node.panels[0].lines.some((line) => line.dots != null));
  const most = (node) => node.surprise == null ? 0 : flow.high(node.surprise).reduce((a, b) => b > a ? b : a, 0);
  const node = seen.sort((a, b) => most(b) - most(a))[0];
  if (!node) return;
  const lines = node.panels[0].lines.slice(0, 3).map((line, i) => ({ label: node.panels[0].of > 1 ? `${node.name}[${i}] predicted` : `${node.name} predicted`,
    series: line.mean, dots: line.dots, colour: shades()[i] }));
  strip = new Chart(flow, "observed and predicted", lines, go, { gutter: 84, floor: 0, other: compared() });
  $("strip").replaceChildren(strip.element);
  strip.draw(state.from, state.to);
}

// The run that charts draw beside the shown one.
function compared() { return state.run === 0 && runs.length > 1 ? runs[1] : null; }

function show(run) {
  if (!runs[run]) return;
  state.run = run;
  flow = network.flow = runs[run];
  for (const button of $("runs").children) button.setAttribute("aria-pressed", String(Number(button.dataset.run) === run));
  drawStrip();
  drawMap();
  choose(state.selected);
}

function zoom(from, to) {
  state.from = clamp(Math.min(from, to), 0, flow.frames - 1);
  state.to = clamp(Math.max(from, to), 0, flow.frames - 1);
  const all = state.from === 0 && state.to === flow.frames - 1;
  $("whole").hidden = all;
  $("slider").min = state.from;
  $("slider").max = state.to;
  drawMap();
  if (strip) strip.draw(state.from, state.to);
  for (const chart of charts) chart.draw(state.from, state.to);
  go(state.frame);
}

function listenToMap() {
  const map = $("map"), mark = $("mark");
  const share = (event) => clamp((event.clientX - map.getBoundingClientRect().left) / map.clientWidth, 0, 1);
  const frameAt = (place) => Math.round(state.from + place * (state.to - state.from));
  let start = null;
  const cover = (a, b) => { mark.style.left = `${100 * Math.min(a, b)}%`; mark.style.width = `${100 * Math.abs(b - a)}%`; };
  map.addEventListener("pointerdown", (event) => { start = share(event); map.setPointerCapture(event.pointerId); });
  map.addEventListener("pointermove", (event) => {
    if (start != null) { cover(start, share(event)); return; }
    const rows = mapRows(), row = Math.floor((event.clientY - map.getBoundingClientRect().top) / map.clientHeight * rows.length);
    const node = rows[row], frame = frameAt(share(event));
    map.title = node ? `${node.name}: ${node.what} ${format(node.of.at(node.series, frame))}, ${flow.when(frame)}` : "";
  });
  map.addEventListener("pointerup", (event) => {
    if (start == null) return;
    const end = share(event);
    if (Math.abs(end - start) * map.clientWidth > 6) zoom(frameAt(start), frameAt(end));
    else go(frameAt(end));
    start = null;
    cover(0, 0);
  });
  map.addEventListener("pointercancel", () => { start = null; cover(0, 0); });
  map.addEventListener("dblclick", () => zoom(0, flow.frames - 1));
}

// --- the panel -------------------------------------------------------------------------------------------------------
function shades() { return SHADES[document.documentElement.dataset.theme]; }

function choose(selected) {
  state.selected = selected;
  network.select(selected);
  charts = [];
  if (selected == null) fillOverview();
  else fillNode(flow.nodes[selected]);
  for (const chart of charts) chart.draw(state.from, state.to);
  update();
}

function fillOverview() {
  const energy = new Chart(flow, "free energy (nats)", [{ label: "", series: flow.energy, colour: shades()[0] }], go, { other: compared() });
  charts = [energy];
  $("panel").replaceChildren(
    element("h2", { text: "Surprise by node" }),
    element("p", { text: "Precision-weighted error at this time; 1 is as large as expected. Select a node to see its traces." }),
    element("ol", { class: "ranking", id: "ranking" }),
    energy.element,
  );
}

function rank() {
  const list = $("ranking");
  if (!list) return;
  const order = surprised().map((node) => [flow.at(node.surprise, state.frame), node]).sort((a, b) => b[0] - a[0]);
  const top = Math.max(flow.max_surprise, ...order.map(([value]) => value || 0));
  while (list.children.length > order.length) list.lastChild.remove();
  while (list.children.length < order.length) {
    list.append(element("li", {}, element("button", { type: "button", onclick: (event) => choose(Number(event.currentTarget.dataset.node)) },
      element("span", { class: "name" }), element("span", { class: "bar" }), element("span", { class: "value" }))));
  }
  order.forEach(([value, node], i) => {
    const button = list.children[i].firstChild, [name, bar, number] = button.children;
    button.dataset.node = flow.nodes.indexOf(node);
    name.textContent = `${node.name} `; // read with the number after it
    bar.style.width = `${100 * (value || 0) / top}%`;
    number.textContent = format(value);
    button.setAttribute("aria-label", `${node.name} ${format(value)}: surprise`);
  });
}

function fillNode(node) {
  const shade = shades();
  const add = (title, lines) => charts.push(new Chart(flow, title, lines, go, { other: compared() }));
  if (node.surprise != null) add("surprise (1: as expected)", [{ label: "", series: node.surprise, colour: colour("up") }]);
  if (node.movement != null) add("moved by (sd of the belief)", [{ label: "", series: node.movement, colour: colour("up") }]);
  if (node.attention != null) add("attention (precision over its median)", [{ label: "", series: node.attention, colour: shade[2] }]);
  for (const panel of node.panels) {
    const left = panel.of > panel.lines.length ? ` (${panel.lines.length} of ${panel.of})` : "";
    add(panel.title + left, panel.lines.map((line, i) => ({
      label: panel.lines.length > 1 ? node.name.slice(0, 10) + "₀₁₂₃₄₅₆₇₈₉"[i + 1] : "", series: line.mean, band: line.sd, dots: line.dots,
      colour: shade[i % shade.length] })));
  }
  for (const link of flow.links) {
    if (link.parent !== node.name && link.child !== node.name) continue;
    const parent = link.parent === node.name, other = parent ? link.child : link.parent;
    const about = link.of == null ? "" : ` (mapping to ${link.of})`;
    add(`${parent ? "to" : "from"} ${other}: ${link.kind}${about}, rms`, [
      { label: parent ? "change of the prediction sent" : "change of the prediction received", series: link.down, colour: colour("down") },
      { label: parent ? "error received" : "error sent", series: link.up, colour: colour("up") },
    ]);
  }
  if (!node.why) add("share of the free energy (nats)", [{ label: "", series: node.share, colour: shade[0] }]);
  const facts = [node.kind, `level ${node.level}`, node.clock || "every observation", node.about].filter(Boolean);
  $("panel").replaceChildren(
    element("div", { class: "head" }, element("h2", { text: node.name }),
      element("button", { type: "button", "aria-label": "Close", text: "×", onclick: () => choose(null) })),
    element("p", { text: facts.join(" · ") }),
    ...charts.map((chart) => chart.element),
    ...(node.why ? [element("p", { class: "why", text: `Free energy: ${node.why}` })] : []),
  );
  $("panel").scrollTop = 0;
}

// --- hovering --------------------------------------------------------------------------------------------------------
function tip(what, where) {
  const box = $("tip");
  state.hovered = what && { what, where };
  box.hidden = !what;
  if (!what) return;
  const at = (series) => format(flow.at(series, state.frame));
  if (what.node) {
    const { node } = what;
    const own = node.surprise != null ? `surprise ${at(node.surprise)}` : node.movement != null ? `moved by ${at(node.movement)} sd` : "no prediction error";
    const attention = node.attention == null ? "" : `\nattention × ${at(node.attention)}`;
    const energy = node.why ? "" : `\nfree energy ${at(node.share)} nats`;
    box.textContent = `${node.name}\n${node.kind}, ${node.clock || "every observation"}\n${own}${attention}${energy}`;
  } else {
    const { link, way } = what, down = way === "down";
    const [sender, receiver] = down ? [link.parent, link.child] : [link.child, link.parent];
    const full = format(down ? link.full_down : link.full_up);
    box.textContent = `${sender} → ${receiver}\n${down ? "change of the prediction" : "error"} ${at(down ? link.down : link.up)} (rms; full width ${full})`;
  }
  const stage = $("stage"), top = $("graph").offsetTop;
  box.style.left = `${clamp(where.x + 14, 0, Math.max(0, stage.clientWidth - box.offsetWidth - 4))}px`;
  box.style.top = `${clamp(where.y + top + 14, 0, Math.max(0, stage.clientHeight - box.offsetHeight - 4))}px`;
}

// --- filters ---------------------------------------------------------------------------------------------------------
function visible(node) { return !state.hidden.has(node.kind) && (state.level === "" || node.level === Number(state.level)); }

function listFilters() {
  const kinds = [...new Set(flow.nodes.map((node) => node.kind))];
  $("kinds").replaceChildren(...kinds.map((kind) => element("button", {
    type: "button", "aria-pressed": "true", text: kind, "data-kind": kind,
    onclick: (event) => {
      if (!state.hidden.delete(kind)) state.hidden.add(kind);
      event.target.setAttribute("aria-pressed", String(!state.hidden.has(kind)));
      filter();
    } })));
  const levels = [...new Set(flow.nodes.map((node) => node.level))].sort((a, b) => a - b);
  $("level").replaceChildren(element("option", { value: "", text: "all" }),
    ...levels.map((level) => element("option", { value: level, text: level })));
  $("level").addEventListener("change", (event) => { state.level = event.target.value; filter(); });
}

function filter() {
  drawMap();
  network.filter(visible);
  update();
}

// --- playing ---------------------------------------------------------------------------------------------------------
function play(on) {
  state.playing = on;
  $("play").textContent = on ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", on ? "Pause" : "Play");
  if (!on) { update(); return; }
  if (state.frame >= state.to) state.frame = state.from;
  let last = performance.now(), pending = 0;
  const next = (now) => {
    if (!state.playing) return;
    pending += (now - last) / 1000 * SPEEDS[state.speed];
    last = now;
    const steps = Math.floor(pending);
    pending -= steps;
    if (steps) go(state.frame + steps);
    if (state.frame >= state.to) play(false);
    else requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
}

function setSpeed(i) {
  state.speed = clamp(i, 0, SPEEDS.length - 1);
  $("speed").value = state.speed;
}

// --- keys, light and dark --------------------------------------------------------------------------------------------
function help(open) {
  $("help").hidden = !open;
  $("keys").setAttribute("aria-expanded", String(open));
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  if (event.key === " " && event.target.tagName === "BUTTON") return;
  const step = event.shiftKey ? Math.max(1, Math.round((state.to - state.from) / 50)) : 1;
  const nodes = flow.nodes.map((node, i) => [node, i]).filter(([node]) => visible(node)).map(([, i]) => i);
  const selectNext = (by) => nodes.length && choose(nodes[(nodes.indexOf(state.selected) + by + nodes.length + (state.selected == null && by < 0)) % nodes.length]);
  const actions = {
    ArrowLeft: () => go(state.frame - step), ArrowRight: () => go(state.frame + step),
    Home: () => go(state.from), End: () => go(state.to), " ": () => play(!state.playing),
    "+": () => setSpeed(state.speed + 1), "=": () => setSpeed(state.speed + 1), "-": () => setSpeed(state.speed - 1),
    n: () => selectNext(1), p: () => selectNext(-1), d: toggleTheme, s: () => peak(), e: () => save("png"), r: () => show((state.run + 1) % runs.length),
    m: () => setMode({ nodes: "errors", errors: "predictions", predictions: "nodes" }[state.mode]), z: () => zoom(0, flow.frames - 1),
    "[": () => zoom(state.frame, state.to), "]": () => zoom(state.from, state.frame), "?": () => help($("help").hidden),
    Escape: () => { if (!$("help").hidden) help(false); else choose(null); },
  };
  const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function setTheme(theme) { document.documentElement.dataset.theme = theme; }

function toggleTheme() {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  network.restyle();
  drawStrip();
  drawMap();
  listShapes();
  choose(state.selected);
}

// --- following a running stream --------------------------------------------------------------------------------------
function replaceData(given) {
  const whole = state.from === 0 && state.to === flow.frames - 1;
  const dropped = given.observations - given.ticks - (flow.observations - flow.ticks); // the oldest are dropped
  flow = runs[0] = new Flow(given);
  network.flow = flow;
  if (strip) strip.flow = flow;
  const { following } = state;
  state.frame = clamp(following ? flow.frames - 1 : state.frame - dropped, 0, flow.frames - 1);
  for (const chart of charts) chart.flow = flow;
  if (whole) zoom(0, flow.frames - 1);
  else zoom(state.from - dropped, state.to - dropped);
  if (following) go(flow.frames - 1);
  about();
}

async function follow() {
  $("live").hidden = false;
  for (let failed = 0; failed < 3;) {
    const answer = await fetch("flow.json", { cache: "no-store" }).catch(() => null);
    failed = answer && answer.ok ? 0 : failed + 1;
    if (!failed) {
      const given = await answer.json();
      if (given.observations !== flow.observations) replaceData(given);
    }
    const share = flow.expected ? `, ${Math.floor(100 * flow.observations / flow.expected)} % of ${flow.expected.toLocaleString("en")}` : "";
    $("live").textContent = failed < 3 ? `● live${share}` : "the stream has ended; last state shown";
    await new Promise((done) => setTimeout(done, 700));
  }
}

// --- the map's mode, shapes, and files -------------------------------------------------------------------------------
function setMode(mode) {
  state.mode = $("mode").value = mode;
  drawMap();
}

function listShapes() {
  const kinds = [...new Set(flow.nodes.map((node) => node.kind))], look = `fill="${colour("node")}" stroke="${colour("faint")}"`;
  $("shapes").replaceChildren(...kinds.map((kind) => {
    const made = element("span");
    made.innerHTML = `<svg width="22" height="14" aria-hidden="true">${shape(kind in OUTLINES || kind === "categorical" ? kind : "state", 11, 7, 19, 11, look)}</svg>`;
    made.append(kind); // as text, whatever it is
    return made;
  }));
}

function download(name, content, kind) {
  const link = element("a", { href: URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type: kind })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 5000);
}

// Save what is shown as a picture, or all numbers as a table.
function save(kind) {
  const name = (flow.title.replace(/[^\w.-]+/g, "_").slice(0, 60) || "flow"), caption = $("caption").textContent;
  if (kind === "csv") download(`${name}.csv`, table(), "text/csv");
  else if (kind === "svg") download(`${name}.svg`, network.svg(caption), "image/svg+xml");
  else picture(caption).then((made) => download(`${name}.png`, made));
}

// One row for each frame: time, surprise or movement of nodes, sizes of messages.
function table() {
  const columns = [["free energy", flow.energy]];
  for (const node of flow.nodes) if (flow.activity(node)) columns.push([`${node.name} ${flow.activity(node).what}`, flow.activity(node).series]);
  for (const link of flow.links) columns.push([`${link.parent} to ${link.child} change of prediction`, link.down], [`${link.child} to ${link.parent} error`, link.up]);
  const quoted = (text) => `"${(/^[=+\-@]/.test(text) ? `'${text}` : text).replace(/"/g, '""')}"`;
  const lines = [["time", ...columns.map(([name]) => name)].map(quoted).join(",")];
  for (let i = 0; i < flow.frames; i++) {
    lines.push([flow.time(flow.tick(i)), ...columns.map(([, series]) => flow.at(series, i))].map((v) => Number.isFinite(v) ? Number(v.toPrecision(7)) : "").join(","));
  }
  return `${lines.join("\n")}\n`;
}

// The caption, the graph, and the charts below it on one canvas.
async function picture(caption) {
  const width = $("graph").clientWidth, made = document.createElement("canvas"), ratio = 2;
  const graph = new Image();
  graph.src = network.cy.png({ full: false, scale: ratio, bg: colour("paper") });
  await graph.decode();
  const height = $("graph").clientHeight, foot = [strip && strip.canvas, $("heat")].filter(Boolean);
  made.width = ratio * width;
  made.height = ratio * (30 + height + foot.length * 90);
  const pen = made.getContext("2d");
  pen.fillStyle = colour("paper");
  pen.fillRect(0, 0, made.width, made.height);
  pen.fillStyle = colour("line");
  pen.font = `${13 * ratio}px system-ui, sans-serif`;
  pen.fillText(caption, 8 * ratio, 20 * ratio);
  pen.drawImage(graph, 0, 30 * ratio);
  pen.imageSmoothingEnabled = false;
  foot.forEach((each, i) => pen.drawImage(each, 0, ratio * (30 + height + 90 * i), ratio * width, ratio * 84));
  return new Promise((done) => made.toBlob(done, "image/png"));
}

// --- start -----------------------------------------------------------------------------------------------------------
function about() {
  const bins = flow.bin_size === 1 ? "" : `, ranges of ${flow.bin_size}`;
  const kept = flow.ticks === flow.observations ? "" : `, ${flow.ticks.toLocaleString("en")} of them shown`;
  $("about").textContent = `${flow.nodes.length} nodes, ${flow.schedule}, ${flow.observations.toLocaleString("en")} observations${kept}${bins} · pcnet ${flow.version}`;
}

function initialise() {
  setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("title").textContent = flow.title;
  $("max-surprise").textContent = `${flow.max_surprise}+`;
  about();
  SPEEDS.forEach((speed, i) => $("speed").append(element("option", { value: i, text: `${speed}/s` })));
  setSpeed(1);
  listFilters();
  listenToMap();
  drawMap(); // its height determines the space for the graph
  network = new Network(flow, $("graph"), { onSelect: choose, onHover: tip });
  $("slider").addEventListener("input", (event) => go(Number(event.target.value)));
  $("play").addEventListener("click", () => play(!state.playing));
  $("speed").addEventListener("change", (event) => setSpeed(Number(event.target.value)));
  $("whole").addEventListener("click", () => zoom(0, flow.frames - 1));
  $("peak").addEventListener("click", () => peak());
  $("mode").addEventListener("change", (event) => setMode(event.target.value));
  $("export").addEventListener("change", (event) => { if (event.target.value) save(event.target.value); event.target.value = ""; });
  if (runs.length > 1) {
    $("runs").hidden = false;
    $("runs").replaceChildren(...["first run", "second run", "difference"].map((text, run) => element("button", {
      type: "button", text, "data-run": run, "aria-pressed": String(run === 0), onclick: () => show(run) })));
  }
  $("theme").addEventListener("click", toggleTheme);
  $("keys").addEventListener("click", () => help($("help").hidden));
  document.addEventListener("keydown", onKey);
  let timer = null;
  window.addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { network.place(); zoom(state.from, state.to); }, 100);
  });
  listShapes();
  drawStrip();
  network.place(); // the strip has changed the space for the graph
  choose(null);
  zoom(0, flow.frames - 1);
  if (flow.live) follow();
  else peak(flow.frames > 2 * START ? Math.ceil(START / flow.bin_size) : 0);
}

initialise();
