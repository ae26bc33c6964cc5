"use strict";
// The graph: nodes coloured by surprise, two arrows per link as wide as the messages.

const OUTLINES = {
  state: "ellipse", cause: "hexagon", sensory: "rectangle", input: "rhomboid", parameter: "round-rectangle",
  precision: "octagon",
};

const WIDTH = 92; // of a node

class Network {
  constructor(flow, container, { onSelect, onHover }) {
    this.flow = flow;
    this.container = container;
    this.cy = cytoscape({
      container, elements: this.#elements(), style: this.#style(), layout: { name: "preset" },
      minZoom: 0.15, maxZoom: 4, autoungrabify: true, boxSelectionEnabled: false,
    });
    const index = (node) => Number(node.id().slice(1));
    this.cy.on("tap", "node", (event) => onSelect(index(event.target)));
    this.cy.on("tap", (event) => { if (event.target === this.cy) { onSelect(null); onHover(null); } });
    this.cy.on("mouseover tap", "node, edge", (event) => onHover(this.#target(event.target), event.renderedPosition));
    this.cy.on("mousemove", "node, edge", (event) => onHover(this.#target(event.target), event.renderedPosition));
    this.cy.on("mouseout", "node, edge", () => onHover(null));
    this.place();
  }

  #elements() {
    const number = new Map(this.flow.nodes.map((node, i) => [node.name, `n${i}`]));
    const nodes = this.flow.nodes.map((node, i) => ({ data: { id: `n${i}`, kind: node.kind } }));
    const edges = this.flow.links.flatMap((link, i) => [
      { data: { id: `d${i}`, way: "down", source: number.get(link.parent), target: number.get(link.child) } },
      { data: { id: `u${i}`, way: "up", source: number.get(link.child), target: number.get(link.parent) } },
    ]);
    return [...nodes, ...edges];
  }

  #style() {
    const outlines = Object.entries(OUTLINES).map(([kind, shape]) => ({ selector: `node[kind="${kind}"]`, style: { shape } }));
    const line = colour("line");
    return [
      { selector: "node", style: {
        "background-color": colour("node"), "border-color": line, "border-width": 1.2, color: line,
        "font-family": "system-ui, sans-serif", "font-size": 12, "text-wrap": "wrap", "text-valign": "center",
        "text-max-width": 300, "line-height": 1.25, width: WIDTH, height: 42 } },
      ...outlines,
      { selector: "edge", style: {
        "curve-style": "straight", "target-arrow-shape": "triangle", "arrow-scale": 0.9,
        "line-cap": "butt", width: 1 } },
      { selector: 'edge[way="down"]', style: { "line-color": colour("down"), "target-arrow-color": colour("down") } },
      { selector: 'edge[way="up"]', style: { "line-color": colour("up"), "target-arrow-color": colour("up") } },
      { selector: "node.selected", style: { "border-width": 4, "border-color": colour("focus") } },
      { selector: ".off", style: { display: "none" } },
    ];
  }

  // Levels as rows, spread over the available space.
  place() {
    const nodes = this.flow.nodes;
    const columns = nodes.map((node) => node.column), rows = nodes.map((node) => node.row);
    const wide = Math.max(...columns) - Math.min(...columns) + 1, tall = Math.max(...rows) + 1;
    const { clientWidth: width, clientHeight: height } = this.container;
    const dense = height / tall < 62;
    const across = clamp(width / wide, 158, 260), up = clamp(height / tall, dense ? 39 : 78, 170);
    this.cy.resize();
    this.cy.batch(() => {
      nodes.forEach((node, i) => {
        const name = node.name.length > 20 ? `${node.name.slice(0, 19)}…` : node.name;
        const lines = dense || !node.clock ? name : `${name}\n${node.clock}`;
        this.cy.$id(`n${i}`).position({ x: node.column * across, y: -node.row * up })
          .style({ label: lines, height: dense ? 22 : 42, "font-size": clamp(1.75 * WIDTH / name.length, 8, dense ? 14 : 12) });
      });
    });
    this.wide = dense ? 5 : 8;
    this.#placeArrows(dense ? 22 : 42);
    this.cy.fit(this.cy.elements(":visible"), 18);
    if (this.cy.zoom() > 1.35) { this.cy.zoom(1.35); this.cy.center(this.cy.elements(":visible")); }
  }

  // Arrows from border to border, side by side, each to the right of its direction.
  #placeArrows(height) {
    const pairs = new Map(), half = { x: WIDTH / 2, y: height / 2 };
    const border = (kind, x, y) => kind === "state" ? 1 / Math.hypot(x / half.x, y / half.y)
      : 1 / Math.max(Math.abs(x) / half.x, Math.abs(y) / half.y);
    this.cy.edges().forEach((edge) => {
      const from = edge.source().position(), to = edge.target().position();
      const far = Math.hypot(to.x - from.x, to.y - from.y), x = (to.x - from.x) / far, y = (to.y - from.y) / far;
      const pair = `${edge.source().id()} ${edge.target().id()}`, before = pairs.get(pair) || 0;
      pairs.set(pair, before + 1);
      const aside = (this.wide / 2 + 1.5) * (2 * before + 1);
      const end = (kind, way) => `${way * x * border(kind, x, y) - y * aside}px ${way * y * border(kind, x, y) + x * aside}px`;
      edge.style({ "source-endpoint": end(edge.source().data("kind"), 1), "target-endpoint": end(edge.target().data("kind"), -1) });
    });
  }

  show(frame) {
    const { flow, cy } = this, paint = this.paint || (this.paint = ramp());
    cy.batch(() => {
      flow.nodes.forEach((node, i) => {
        const activity = flow.activity(node);
        if (!activity) return;
        const rgb = paint(Math.abs(flow.at(activity.series, frame)) / activity.full);
        const dark = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] < 128;
        const given = { "background-color": `rgb(${rgb})`, color: dark ? "#ffffff" : "#000000" };
        if (node.attention != null && !cy.$id(`n${i}`).hasClass("selected")) {
          given["border-width"] = clamp(2 * (1 + Math.log2(Math.max(flow.at(node.attention, frame), 1e-3))), 0.7, 7);
        }
        cy.$id(`n${i}`).style(given);
      });
      flow.links.forEach((link, i) => {
        for (const [id, series, full] of [[`d${i}`, link.down, link.full_down], [`u${i}`, link.up, link.full_up]]) {
          const share = clamp(Math.abs(flow.at(series, frame)) / full || 0, 0, 1);
          cy.$id(id).style({ width: 1 + (this.wide - 1) * share, opacity: 0.35 + 0.65 * share });
        }
      });
    });
  }

  select(selected) {
    this.cy.nodes().removeClass("selected");
    if (selected != null) this.cy.$id(`n${selected}`).removeStyle("border-width").addClass("selected");
  }

  filter(visible) {
    this.cy.batch(() => this.flow.nodes.forEach((node, i) => this.cy.$id(`n${i}`).toggleClass("off", !visible(node))));
    this.place();
  }

  // The drawing as SVG text, as it is on the screen.
  svg(caption) {
    const { cy, container } = this, escape = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
    const parts = [`<rect width="100%" height="100%" fill="${colour("paper")}"/>`];
    cy.edges(":visible").forEach((edge) => {
      const a = edge.renderedSourceEndpoint(), b = edge.renderedTargetEndpoint(), ink = edge.style("line-color");
      const width = edge.renderedStyle("width"), far = Math.hypot(b.x - a.x, b.y - a.y) || 1;
      const x = (b.x - a.x) / far, y = (b.y - a.y) / far, tip = 4 + parseFloat(width);
      parts.push(`<g opacity="${edge.style("opacity")}" stroke="${ink}" fill="${ink}"><line x1="${a.x}" y1="${a.y}" x2="${b.x - tip * x}" y2="${b.y - tip * y}" stroke-width="${width}"/>`
        + `<path stroke="none" d="M${b.x} ${b.y}L${b.x - tip * (x - 0.6 * y)} ${b.y - tip * (y + 0.6 * x)}L${b.x - tip * (x + 0.6 * y)} ${b.y - tip * (y - 0.6 * x)}Z"/></g>`);
    });
    cy.nodes(":visible").forEach((node) => {
      const { x, y } = node.renderedPosition(), w = node.renderedWidth(), h = node.renderedHeight(), size = parseFloat(node.renderedStyle("font-size"));
      const look = `fill="${node.style("background-color")}" stroke="${node.style("border-color")}" stroke-width="${node.renderedStyle("border-width")}"`;
      parts.push(shape(node.data("kind"), x, y, w, h, look));
      const lines = node.style("label").split("\n");
      lines.forEach((text, i) => parts.push(`<text x="${x}" y="${y + (i - (lines.length - 1) / 2) * 1.25 * size}" font-size="${size}" fill="${node.style("color")}" text-anchor="middle" dominant-baseline="central">${escape(text)}</text>`));
    });
    const { clientWidth: width, clientHeight: height } = container;
    parts.push(`<text x="8" y="${height + 18}" font-size="13" fill="${colour("line")}">${escape(caption)}</text>`);
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height + 28}" font-family="system-ui, sans-serif">${parts.join("\n")}</svg>`;
  }

  restyle() {
    this.paint = null;
    this.cy.style(this.#style());
    this.place();
  }

  #target(target) {
    const kind = target.id()[0], i = Number(target.id().slice(1));
    return kind === "n" ? { node: this.flow.nodes[i] } : { link: this.flow.links[i], way: kind === "d" ? "down" : "up" };
  }
}

// The outline of a kind of node as an element of SVG.
function shape(kind, x, y, w, h, look) {
  const points = (list) => `<polygon ${look} points="${list.map(([a, b]) => `${x + a * w / 2},${y + b * h / 2}`).join(" ")}"/>`;
  if (kind === "state" || kind === "categorical") return `<ellipse ${look} cx="${x}" cy="${y}" rx="${w / 2}" ry="${h / 2}"/>`;
  if (kind === "cause") return points([[-1, 0], [-0.5, -1], [0.5, -1], [1, 0], [0.5, 1], [-0.5, 1]]);
  if (kind === "precision") return points([[-1, -0.4], [-0.6, -1], [0.6, -1], [1, -0.4], [1, 0.4], [0.6, 1], [-0.6, 1], [-1, 0.4]]);
  if (kind === "input") return points([[-1, -1], [0.7, -1], [1, 1], [-0.7, 1]]);
  return `<rect ${look} x="${x - w / 2}" y="${y - h / 2}" width="${w}" height="${h}" rx="${kind === "parameter" ? h / 4 : 0}"/>`;
}
