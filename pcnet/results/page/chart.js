"use strict";
// Time series on a canvas. Values that share a pixel column are drawn by their range.

const SHADES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b57b00", "#2f8fc4"],
  dark: ["#56b4e9", "#f0803c", "#3ec79c", "#e3a1c6", "#e6b800", "#9ecdf0"],
};
const BAND = 1.96; // standard deviations on either side: a 95 % interval
const GUTTER = 52; // pixels for the numbers on the axis
const FLOOR = 14; // and for the times below it

class Chart {
  // lines: {label, series, band, dots, colour}; band is the series of the standard deviation
  // gutter, floor: pixels for the axes; other: a run to compare with, drawn as thin lines
  constructor(flow, title, lines, onTime, { gutter = GUTTER, floor = FLOOR, other = null } = {}) {
    Object.assign(this, { gutter, floor, other });
    this.flow = flow;
    this.lines = lines;
    this.values = [];
    const key = element("div", { class: "key" });
    for (const line of lines) {
      for (const [what, series] of [["", line.series], ["± ", line.band], ["observed ", line.dots]]) {
        if (series == null) continue;
        const value = element("span", { class: "value", "data-series": series });
        const mark = element("i", what === "observed " ? { class: "dot" } : {});
        mark.style.background = line.colour;
        const first = what === "" || line.series == null;
        const name = first ? [mark, line.label ? `${line.label} ` : ""] : what === "observed " ? [mark] : [];
        key.append(element("span", {}, ...name, what === "observed " && line.series == null ? "" : what, value));
        this.values.push([series, value]);
      }
    }
    this.canvas = element("canvas");
    this.cursor = element("div", { class: "cursor" });
    this.plot = element("div", { class: "plot" }, this.canvas, this.cursor);
    this.element = element("figure", { class: "chart" }, element("h3", { text: title }), key, this.plot);
    const move = (event) => {
      const box = this.plot.getBoundingClientRect();
      const share = clamp((event.clientX - box.left - gutter) / (box.width - gutter), 0, 1);
      onTime(Math.round(this.from + share * (this.to - this.from)));
    };
    this.plot.addEventListener("pointerdown", (event) => { this.plot.setPointerCapture(event.pointerId); move(event); });
    this.plot.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
  }

  draw(from, to) {
    this.from = from;
    this.to = to;
    const ratio = window.devicePixelRatio || 1;
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const { gutter, floor } = this;
    const drawn = this.lines.map((line) => this.#columns(line, width - gutter));
    const beside = this.other == null ? [] : this.lines.map((line) => this.#columns({ ...line, band: null, dots: null }, width - gutter, this.other));
    const [low, high] = this.#limits([...drawn, ...beside]);
    const x = (column) => gutter + column;
    const y = (value) => 5 + (height - 10 - floor) * (high - value) / (high - low);
    this.#axis(pen, width, height, low, high, y);
    for (const line of beside) {
      if (!line.line) continue;
      pen.strokeStyle = line.colour;
      pen.setLineDash([3, 2]);
      pen.lineWidth = 1;
      pen.beginPath();
      for (const at of line.line) pen.lineTo(x(at.x), y((at.low + at.high) / 2));
      pen.stroke();
      pen.setLineDash([]);
    }
    for (const line of drawn) {
      if (line.band) {
        pen.globalAlpha = 0.22;
        pen.fillStyle = line.colour;
        pen.beginPath();
        line.band.forEach((at) => pen.lineTo(x(at.x), y(at.high)));
        [...line.band].reverse().forEach((at) => pen.lineTo(x(at.x), y(at.low)));
        pen.fill();
        pen.globalAlpha = 1;
      }
      if (line.dots) {
        pen.globalAlpha = 0.45;
        pen.fillStyle = line.colour;
        for (const at of line.dots) {
          pen.fillRect(x(at.x) - 1, y(at.high) - 1, 2, 2);
          if (at.low !== at.high) pen.fillRect(x(at.x) - 1, y(at.low) - 1, 2, 2);
        }
        pen.globalAlpha = 1;
      }
      if (line.line) {
        pen.strokeStyle = line.colour;
        pen.lineWidth = 1.4;
        pen.lineJoin = "round";
        pen.beginPath();
        for (const at of line.line) {
          pen.lineTo(x(at.x), y(at.low));
          if (at.low !== at.high) pen.lineTo(x(at.x), y(at.high));
        }
        pen.stroke();
      }
    }
  }

  #columns(line, width, flow = this.flow) {
    const { from, to } = this;
    const columns = (low, high) => toColumns(low, high, from, to, width);
    const own = (series) => series == null ? null : columns((i) => flow.low(series)[i], (i) => flow.high(series)[i]);
    let band = null;
    if (line.band != null) {
      const low = flow.low(line.series), high = flow.high(line.series), sd = flow.high(line.band);
      band = columns((i) => low[i] - BAND * sd[i], (i) => high[i] + BAND * sd[i]);
    }
    return { colour: line.colour, line: own(line.series), dots: own(line.dots), band };
  }

  #limits(drawn) {
    let low = Infinity, high = -Infinity;
    for (const line of drawn) {
      for (const at of [...(line.line || []), ...(line.dots || []), ...(line.band || [])]) {
        low = Math.min(low, at.low);
        high = Math.max(high, at.high);
      }
    }
    if (!(low <= high)) return [0, 1];
    const margin = high > low ? 0 : Math.abs(high) * 0.05 || 0.5;
    return [low - margin, high + margin];
  }

  #axis(pen, width, height, low, high, y) {
    pen.strokeStyle = colour("rule");
    pen.fillStyle = colour("faint");
    pen.font = "10.5px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const rule = (value, dash) => {
      pen.setLineDash(dash);
      pen.beginPath();
      pen.moveTo(this.gutter, Math.round(y(value)) + 0.5);
      pen.lineTo(width, Math.round(y(value)) + 0.5);
      pen.stroke();
    };
    if (low < 0 && high > 0) rule(0, [2, 3]);
    for (const value of [high, low]) {
      pen.fillText(format(Number(value.toPrecision(3))), this.gutter - 5, clamp(y(value), 6, height - 6));
      rule(value, []);
    }
    if (!this.floor) return;
    pen.setLineDash([]);
    for (const [share, text] of this.flow.marks(this.from, this.to, (width - this.gutter) / 90)) {
      const at = this.gutter + share * (width - this.gutter - 1);
      pen.textAlign = share < 0.03 ? "left" : share > 0.97 ? "right" : "center";
      pen.fillText(text, at, height - 6);
      pen.beginPath();
      pen.moveTo(Math.round(at) + 0.5, height - this.floor - 3);
      pen.lineTo(Math.round(at) + 0.5, height - this.floor);
      pen.stroke();
    }
  }

  show(frame) {
    const share = this.to > this.from ? (frame - this.from) / (this.to - this.from) : 0;
    this.cursor.style.left = `calc(${this.gutter}px + (100% - ${this.gutter}px) * ${share})`;
    for (const [series, value] of this.values) {
      const number = this.flow.at(series, frame);
      value.textContent = format(number);
      value.dataset.value = number;
    }
  }
}

// Frames from..to as at most `width` columns {x, low, high}; frames without a number are left out.
function toColumns(low, high, from, to, width) {
  const count = to - from + 1, columns = [];
  const scale = count > 1 ? (width - 1) / (count - 1) : 0;
  let open = null;
  for (let i = from; i <= to; i++) {
    const x = (i - from) * scale, lowest = low(i), highest = high(i);
    if (Number.isNaN(lowest) || Number.isNaN(highest)) continue;
    if (open && Math.floor(x) === Math.floor(open.x)) {
      open.low = Math.min(open.low, lowest);
      open.high = Math.max(open.high, highest);
    } else {
      open = { x, low: lowest, high: highest };
      columns.push(open);
    }
  }
  return columns;
}
