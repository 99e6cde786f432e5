"use strict";
// Draws the curves: every chart shows the same steps, and what the pointer is at is said in all.
// On a page of several runs every series is of one run, and `data.axes` has what may be the x axis.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const MARGIN = { left: 54, right: 14, top: 8, bottom: 22 };
  const COLOURS = 4;
  const DASHES = ["", "7 3", "2 3"];
  let axis = data.axes ? data.axes[0] : { name: "step", first: data.first, last: Math.max(data.last, data.first + 1) };
  let whole = [axis.first, axis.last];
  let view = whole;
  let smoothing = 0;
  let cursor = null;

  const element = (name, attributes, parent, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const words = (number) => {
    const size = Math.abs(number);
    if (number === 0) return "0";
    if (size >= 1e9) return +(number / 1e9).toPrecision(4) + "G";
    if (size >= 1e6) return +(number / 1e6).toPrecision(4) + "M";
    if (size >= 1e4) return +(number / 1e3).toPrecision(4) + "k";
    if (size < 1e-3) return number.toExponential(2).replace(".00e", "e").replace("e", "e");
    return String(+number.toPrecision(4));
  };

  // Round numbers between two ends; on a logarithmic scale powers of ten, and some between.
  const ticks = (low, high, most) => {
    const raw = (high - low) / most || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
    return found;
  };
  const logTicks = (low, high) => {
    const decades = Math.log10(high / low);
    const factors = decades < 1.2 ? [1, 1.5, 2, 3, 4, 5, 7] : decades < 3 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / 6));
    const found = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++) {
      if (p % every === 0) for (const k of factors) if (k * 10 ** p >= low && k * 10 ** p <= high) found.push(k * 10 ** p);
    }
    return found.length > 1 ? found : [low, high];
  };

  // Exponential moving average, corrected for its beginning as in Adam.
  const smoothed = (values) => {
    if (!smoothing) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return +(sum / weight).toPrecision(6);
    });
  };
  const axisWords = (value) => axis.name === "step" ? `step ${value.toLocaleString("en")}` : `${words(value)} ${axis.unit}`;

  // The index of the step that is nearest.
  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= wanted) low = middle; else high = middle;
    }
    return Math.abs(steps[high] - wanted) < Math.abs(steps[low] - wanted) ? high : low;
  };

  class Chart {
    constructor(figure) {
      this.spec = data.charts[+figure.dataset.chart];
      this.svg = figure.querySelector("svg");
      this.readout = figure.querySelector(".readout");
      this.log = false;
      this.series = this.spec.series.map((s, i) => {
        const look = s.run ?? i;
        return { ...s, colour: `var(--c${look % COLOURS})`, dash: DASHES[Math.floor(look / COLOURS) % DASHES.length], raw: s.mean, at: s.steps };
      });
      this.arrange();
      figure.querySelector(".csv")?.addEventListener("click", () => download([this]));
      const button = figure.querySelector(".log");
      if (button) button.addEventListener("click", () => {
        this.log = !this.log;
        button.setAttribute("aria-pressed", this.log);
        this.draw();
      });
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    // Takes the x axis and the smoothing that are chosen.
    arrange() {
      for (const s of this.series) {
        s.steps = data.steps[data.axes ? s.x[axis.name] : s.at];
        s.mean = smoothed(s.raw);
      }
      const last = (s) => s.steps[s.steps.length - 1];
      this.first = data.axes ? this.series.reduce((a, b) => (last(b) > last(a) ? b : a)) : this.series[0];
    }

    listen() {
      let pressed = null;
      this.svg.addEventListener("pointermove", (event) => {
        point(this.stepAt(event));
        if (pressed !== null) this.choose(pressed, this.stepAt(event));
      });
      this.svg.addEventListener("pointerleave", () => { if (pressed === null) point(null); });
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.pointerType !== "mouse" || event.button) return;
        pressed = this.stepAt(event);
        this.svg.setPointerCapture(event.pointerId);
      });
      this.svg.addEventListener("pointerup", (event) => {
        if (pressed === null) return;
        const ends = [pressed, this.stepAt(event)].sort((a, b) => a - b);
        pressed = null;
        if (ends[1] - ends[0] > (view[1] - view[0]) / 50) look(ends); else this.draw();
      });
      this.svg.addEventListener("dblclick", () => look(whole));
      this.svg.addEventListener("keydown", (event) => {
        const steps = this.first.steps;
        const at = cursor === null ? steps.length - 1 : nearest(steps, cursor);
        const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
        if (event.key === "Escape") { look(whole); point(null); return; }
        const next = event.key === "Home" ? 0 : event.key === "End" ? steps.length - 1 : at + move;
        if (Number.isNaN(next)) return;
        event.preventDefault();
        point(steps[Math.min(steps.length - 1, Math.max(0, next))]);
      });
      this.svg.addEventListener("blur", () => point(null));
    }

    stepAt(event) {
      const box = this.svg.getBoundingClientRect();
      const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
      return view[0] + Math.min(1, Math.max(0, share)) * (view[1] - view[0]);
    }

    // The values that are drawn between the ends of the view; outliers of a linear scale are cut.
    range() {
      const lows = [], highs = [];
      for (const s of this.series) for (let i = 0; i < s.steps.length; i++) {
        if (s.mean[i] === null || s.steps[i] < view[0] || s.steps[i] > view[1]) continue;
        lows.push(s.low ? s.low[i] : s.mean[i]);
        highs.push(s.high ? s.high[i] : s.mean[i]);
      }
      this.beyond = null;
      if (!lows.length) return [0, 1];
      const sorted = highs.slice().sort((a, b) => a - b);
      let low = lows.reduce((a, b) => Math.min(a, b)), high = sorted[sorted.length - 1];
      if (this.log) {
        const positive = lows.filter((v) => v > 0).reduce((a, b) => Math.min(a, b), Infinity);
        low = positive === Infinity ? 1e-3 : positive;
        return high > low ? [low / 1.05, high * 1.05] : [low / 2, low * 2];
      }
      // The first step of a start may compile: of few steps it is the one beyond the others.
      const most = sorted.length - (this.spec.from_zero ? 2 : 1);
      const usual = sorted[Math.min(most, Math.floor(0.97 * (sorted.length - 1)))];
      if (sorted.length >= (this.spec.from_zero ? 3 : 20) && low >= 0 && high > 3 * usual && usual > 0) {
        this.beyond = high;
        high = 1.3 * usual;
      }
      if (this.spec.from_zero && low >= 0) low = 0;
      const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      return [low === 0 ? 0 : low - room, high + room];
    }

    draw() {
      const width = this.svg.clientWidth, height = this.svg.clientHeight;
      if (!width || !height) return;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.replaceChildren();
      const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
      const [low, high] = this.range();
      const scale = this.log ? Math.log10 : (v) => v;
      const [bottomValue, topValue] = [scale(low), scale(high)];
      this.x = (step) => MARGIN.left + ((step - view[0]) / (view[1] - view[0])) * (right - MARGIN.left);
      this.y = (value) => {
        if (this.log && value <= 0) return bottom;
        const share = (scale(value) - bottomValue) / (topValue - bottomValue);
        return bottom - Math.min(1, Math.max(0, share)) * (bottom - MARGIN.top);
      };
      for (const value of this.log ? logTicks(low, high) : ticks(low, high, height > 250 ? 6 : 4)) {
        const y = this.y(value).toFixed(1);
        element("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y }, this.svg);
        element("text", { x: MARGIN.left - 7, y: +y + 4, "text-anchor": "end" }, this.svg, words(value));
      }
      for (const step of ticks(view[0], view[1], Math.max(2, width / 110))) {
        if (axis.name === "step" && !Number.isInteger(step)) continue;
        const x = this.x(step);
        element("text", { x: x.toFixed(1), y: height - 5, "text-anchor": x > right - 16 ? "end" : "middle" }, this.svg, axis.name === "step" ? step.toLocaleString("en") : words(step));
      }
      element("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }, this.svg);
      this.marks(bottom);
      for (const s of this.series) this.curve(s);
      if (this.beyond !== null) {
        element("text", { class: "beyond", x: right, y: MARGIN.top + 10, "text-anchor": "end" }, this.svg, `up to ${words(this.beyond)}, beyond the scale`);
      }
      this.over = element("g", { "pointer-events": "none" }, this.svg);
      this.point();
    }

    marks(bottom) {
      const shown = (steps) => steps.filter((step) => step >= view[0] && step <= view[1]);
      for (const step of shown(data.marks.restarts)) {
        const x = this.x(step).toFixed(1);
        element("line", { class: "restart", x1: x, x2: x, y1: MARGIN.top, y2: bottom }, this.svg);
      }
      for (const step of shown(data.marks.checkpoints)) {
        const x = this.x(step);
        element("path", { class: "checkpoint", d: `M${x} ${bottom - 7}l4 7h-8z` }, this.svg);
      }
      for (const step of shown(data.marks.bad)) {
        element("text", { class: "bad", x: this.x(step), y: MARGIN.top + 9, "text-anchor": "middle" }, this.svg, "✕");
      }
    }

    curve(s) {
      let line = "", band = "", start = null;
      const at = (i, values) => `${this.x(s.steps[i]).toFixed(1)} ${this.y(values[i]).toFixed(1)}`;
      for (let i = 0; i <= s.steps.length; i++) {
        const inside = i < s.steps.length && s.mean[i] !== null
          && (i + 1 >= s.steps.length || s.steps[i + 1] >= view[0]) && (i === 0 || s.steps[i - 1] <= view[1]);
        if (inside && start === null) start = i;
        if (inside) line += `${i === start ? "M" : "L"}${at(i, s.mean)}`;
        if (!inside && start !== null) {
          if (i === start + 1) line += "h.01";
          if (s.low) {
            for (let k = start; k < i; k++) band += `${k === start ? "M" : "L"}${at(k, s.high)}`;
            for (let k = i - 1; k >= start; k--) band += `L${at(k, s.low)}`;
            band += "Z";
          }
          start = null;
        }
      }
      // What lies beyond the steps in view is drawn and cut off.
      const clip = `clip${data.charts.indexOf(this.spec)}`;
      if (!this.svg.querySelector("clipPath")) {
        const path = element("clipPath", { id: clip }, this.svg);
        element("rect", { x: MARGIN.left - 2, y: 0, width: Math.max(0, this.svg.clientWidth - MARGIN.left - MARGIN.right + 4), height: this.svg.clientHeight }, path);
      }
      const cut = { "clip-path": `url(#${clip})` };
      if (band) element("path", { class: "band", d: band, fill: s.colour, ...cut }, this.svg);
      element("path", { class: "line", d: line, stroke: s.colour, "stroke-dasharray": s.dash, ...cut }, this.svg);
      if (s.steps.length <= 40) for (let i = 0; i < s.steps.length; i++) {
        if (s.mean[i] === null || s.steps[i] < view[0] || s.steps[i] > view[1]) continue;
        element("circle", { cx: this.x(s.steps[i]), cy: this.y(s.mean[i]), r: 2.4, fill: s.colour }, this.svg);
      }
    }

    choose(from, to) {
      this.over.querySelector(".chosen")?.remove();
      const [a, b] = [this.x(Math.min(from, to)), this.x(Math.max(from, to))];
      element("rect", { class: "chosen", x: a, width: b - a, y: MARGIN.top, height: this.svg.clientHeight - MARGIN.top - MARGIN.bottom }, this.over);
    }

    // Says the values at the cursor, or the last ones.
    point() {
      if (!this.over) return;
      this.over.querySelectorAll(":not(.chosen)").forEach((old) => old.remove());
      const first = this.first;
      const at = cursor === null ? first.steps.length - 1 : nearest(first.steps, cursor);
      const where = data.axes && cursor === null ? "at the end" : axisWords(first.steps[at]);
      this.readout.replaceChildren(document.createTextNode(`${where} `));
      for (const s of this.series) {
        const i = nearest(s.steps, first.steps[at]);
        const value = s.mean[i];
        const past = first.steps[at] - s.steps[s.steps.length - 1];
        if (data.axes && cursor !== null && past > (view[1] - view[0]) / 100) {
          this.say(s, "ended", i);
          continue;
        }
        this.say(s, value === null ? "not a number" : words(value), i);
        if (cursor !== null && value !== null && s.steps[i] >= view[0] && s.steps[i] <= view[1]) {
          element("circle", { cx: this.x(s.steps[i]), cy: this.y(value), r: 3.6, fill: s.colour }, this.over);
        }
      }
      for (const other of this.spec.also ?? []) {
        if (other.mean[at] !== null) this.readout.append(` · ${words(other.mean[at])} ${other.unit}`);
      }
      if (cursor === null) return;
      const x = this.x(Math.min(view[1], Math.max(view[0], first.steps[at])));
      element("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: this.svg.clientHeight - MARGIN.bottom }, this.over);
    }

    say(s, text, i) {
      const [swatch, bold] = [document.createElement("i"), document.createElement("b")];
      swatch.style.background = s.colour;
      bold.textContent = text;
      const range = s.low && s.mean[i] !== null ? ` (${words(s.low[i])} to ${words(s.high[i])})` : "";
      const name = this.series.length > 1 || data.axes ? `${s.name} ` : "";
      this.readout.append(" ", swatch, name, bold, range);
    }
  }

  const charts = [...document.querySelectorAll(".chart")].map((figure) => new Chart(figure));
  const all = document.getElementById("all");
  const point = (step) => {
    cursor = step;
    for (const chart of charts) chart.point();
  };
  const look = (ends) => {
    view = ends;
    all.hidden = ends === whole;
    for (const chart of charts) chart.draw();
  };
  all.addEventListener("click", () => look(whole));

  // Of several runs only: the x axis, smoothing and CSV.
  const field = (text) => /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  const table = (drawn) => {
    const lines = [["run", "metric", ...data.axes.map((a) => a.column), "value"].join(",")];
    for (const chart of drawn) for (const s of chart.series) for (let i = 0; i < s.raw.length; i++) {
      const at = data.axes.map((a) => data.steps[s.x[a.name]][i]);
      lines.push([field(s.name), chart.spec.metric, ...at, s.raw[i] ?? "nan"].join(","));
    }
    return lines.join("\n") + "\n";
  };
  const download = (drawn) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([table(drawn)], { type: "text/csv" }));
    link.download = drawn.length === 1 ? `${drawn[0].spec.metric}.csv` : "comparison.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  };
  document.getElementById("csv")?.addEventListener("click", () => download(charts));
  const redraw = () => {
    for (const chart of charts) chart.arrange();
    point(null);
    look(view);
  };
  document.getElementById("axis")?.addEventListener("change", (event) => {
    axis = data.axes.find((a) => a.name === event.target.value);
    view = whole = [axis.first, axis.last];
    redraw();
  });
  document.getElementById("smoothing")?.addEventListener("input", (event) => {
    smoothing = +event.target.value;
    document.getElementById("smoothed").textContent = smoothing.toFixed(2);
    redraw();
  });
})();
