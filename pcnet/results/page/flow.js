"use strict";
// The data of the page: series over frames. A frame is one observation, or the range of a bin of observations.

class Flow {
  constructor(given) {
    Object.assign(this, given);
    this.frames = Math.ceil(given.ticks / given.bin_size);
    this.block = new Float32Array(unpack(given.numbers));
    this.times = given.times && new Float64Array(unpack(given.times)); // null if they are regular
  }

  // Minimum and maximum of each frame; equal if a frame is one observation.
  low(series) {
    const at = (this.bin_size === 1 ? series : 2 * series) * this.frames;
    return this.block.subarray(at, at + this.frames);
  }

  high(series) {
    const at = (this.bin_size === 1 ? series : 2 * series + 1) * this.frames;
    return this.block.subarray(at, at + this.frames);
  }

  // The value at a frame; of a bin the extreme that is farther from 0.
  at(series, frame) {
    const low = this.low(series)[frame], high = this.high(series)[frame];
    return Math.abs(low) > Math.abs(high) ? low : high;
  }

  // What a node does: its surprise or, without an error of its own, the movement of its belief, each with its scale.
  activity(node) {
    if (node.surprise != null) return { series: node.surprise, full: this.max_surprise, what: "surprise" };
    if (node.movement != null) return { series: node.movement, full: this.max_movement, what: "moved by (sd)" };
    return null;
  }

  // Another run with the same series, and what this run has more than it.
  other() { return Object.assign(Object.create(Flow.prototype), this, { block: new Float32Array(unpack(this.beside)) }); }

  minus(other) {
    const block = this.block.map((value, i) => value - other.block[i]);
    return Object.assign(Object.create(Flow.prototype), this, { block });
  }

  tick(frame) { return frame * this.bin_size; }

  lastTick(frame) { return Math.min(this.tick(frame) + this.bin_size, this.ticks) - 1; }

  time(tick) { return this.times ? this.times[tick] : this.start + tick * this.step; }

  // A time as text, with the digits that the sampling interval needs.
  clock(tick) { return this.time(tick).toFixed(Math.max(0, Math.ceil(-Math.log10(this.step)))); }

  // Round times between two frames, as [share of the way, text].
  marks(from, to, count) {
    const first = this.time(this.tick(from)), last = this.time(this.lastTick(to)), span = last - first;
    if (!(span > 0)) return [[0, this.clock(this.tick(from))]];
    const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), found = [];
    for (let t = Math.ceil(first / step - 1e-9) * step; t <= last + 1e-9 * span; t += step) {
      let share = (t - first) / span;
      if (this.times) { // uneven times: by their place among the frames
        let tick = this.tick(from);
        while (tick < this.lastTick(to) && this.times[tick] < t) tick++;
        share = (tick - this.tick(from)) / Math.max(1, this.lastTick(to) - this.tick(from));
      }
      found.push([share, t.toFixed(digits).replace("-", "−")]);
    }
    return found;
  }

  when(frame) {
    const digits = Math.max(0, Math.ceil(-Math.log10(this.step)));
    const first = `t = ${this.time(this.tick(frame)).toFixed(digits)}`;
    if (this.bin_size === 1) return `${first} · ${this.tick(frame) + 1} of ${this.ticks}`;
    return `${first} to ${this.time(this.lastTick(frame)).toFixed(digits)} · range of ${this.bin_size}`;
  }
}

function unpack(packed) {
  const text = atob(packed), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes.buffer;
}

// A number with four digits.
function format(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace(/-/g, "−");
}

function clamp(value, low, high) { return Math.min(Math.max(value, low), high); }

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

// Colour map from 0 (background) to 1 (strong).
function ramp() {
  const stops = [0, 1, 2, 3].map((i) => {
    const hex = colour(`ramp${i}`);
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  });
  return (value) => {
    const place = clamp(Number.isFinite(value) ? value : 0, 0, 1) * 3, i = Math.min(Math.floor(place), 2);
    return stops[i].map((from, c) => Math.round(from + (stops[i + 1][c] - from) * (place - i)));
  };
}

// Creates an element with attributes and text; text is never parsed as markup.
function element(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
