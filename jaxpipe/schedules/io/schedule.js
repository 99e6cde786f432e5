"use strict";
// Times and drawings of schedules. `simulate` below computes what jaxpipe.schedules.simulate does.
const data = JSON.parse(document.getElementById("data").textContent);
const ROW = 46, BAR = 28, GRAPH = 12, AXIS = 20, LEAST = 11, WIDEST = 16000;
const number = (x) => String(Number(x.toPrecision(6)));
const make = (parent, tag, text, kind) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  parent.appendChild(node);
  return node;
};
const costs = Object.fromEntries(Object.entries(data.costs).map(([op, cost]) => [op, cost.value]));

// The time of an action of a stage; a whole backward is I and W.
function cost(op, stage) {
  if (op === "B") return cost("I", stage) + cost("W", stage);
  const ratios = data.costs[op].ratios;
  return costs[op] * ratios[ratios.length > 1 ? stage : 0];
}
const length = (step, work) =>
  work * step.factor * step.actions.reduce((sum, [op, stage]) => sum + cost(op, stage), 0);

// Returns [start, end] of every step.
function simulate(schedule) {
  const now = new Array(schedule.ranks).fill(0), times = [];
  let tick = 0, start = 0;
  for (const step of schedule.steps) {
    let at = now[step.rank];
    if (step.tick !== null) {
      // All ranks begin a tick together, after the longest of the tick before.
      if (step.tick !== tick) { start = Math.max(start, ...now) + costs.T * (step.tick - tick); tick = step.tick; }
      at = Math.max(at, start);
    }
    for (const other of step.after) at = Math.max(at, times[other][1] + costs.T);
    now[step.rank] = at + length(step, schedule.work);
    times.push([at, now[step.rank]]);
  }
  return times;
}

// Returns [time, count] at every change of what a rank stores: from F to B, or to W.
function stored(schedule, times, rank) {
  const points = [[0, 0]];
  let count = 0;
  schedule.steps.forEach((step, i) => {
    if (step.rank !== rank) return;
    for (const [op] of step.actions) {
      if (op === "F") points.push([times[i][0], ++count * schedule.work]);
      else if (op !== "I") points.push([times[i][1], --count * schedule.work]);
    }
  });
  return points;
}

function figures(schedule, times) {
  const busy = new Array(schedule.ranks).fill(0);
  let makespan = 0;
  schedule.steps.forEach((step, i) => {
    busy[step.rank] += times[i][1] - times[i][0];
    makespan = Math.max(makespan, times[i][1]);
  });
  const peaks = busy.map((_, rank) => Math.max(...schedule.memory[rank].map(([, count]) => count)));
  return { makespan, bubble: makespan - Math.max(...busy), peaks };
}

function view(schedule) {
  const root = make(document.getElementById("schedules"), "section");
  make(root, "h2", schedule.name);
  make(root, "p", schedule.about, "about");
  const parts = { figures: make(root, "p", "", "figures"), chosen: null };
  parts.readout = make(root, "p", "", "readout");
  parts.readout.setAttribute("aria-live", "polite");
  const rows = make(root, "div", undefined, "rows");
  const names = make(rows, "div", undefined, "names");
  for (let rank = 0; rank < schedule.ranks; rank++) make(names, "div", `rank ${rank}`);
  parts.scroll = make(rows, "div", undefined, "scroll");
  parts.canvas = make(parts.scroll, "canvas");
  parts.canvas.tabIndex = 0;
  parts.canvas.setAttribute("role", "img");
  const at = (event) => {
    const box = parts.canvas.getBoundingClientRect();
    const time = (event.clientX - box.left) / parts.scale, y = event.clientY - box.top;
    const rank = Math.floor(y / ROW);
    return schedule.steps.findIndex((step, i) =>
      step.rank === rank && schedule.times[i][0] <= time && time < schedule.times[i][1]);
  };
  const choose = (i) => { if (i !== parts.chosen) { parts.chosen = i < 0 ? null : i; draw(schedule); } };
  parts.canvas.addEventListener("pointermove", (event) => choose(at(event)));
  parts.canvas.addEventListener("pointerdown", (event) => choose(at(event)));
  parts.canvas.addEventListener("pointerleave", () => choose(-1));
  parts.canvas.addEventListener("keydown", (event) => {
    const next = beside(schedule, parts.chosen, event.key);
    if (next === undefined) return;
    event.preventDefault();
    choose(next);
    const x = schedule.times[next][0] * parts.scale, scroll = parts.scroll;
    if (x < scroll.scrollLeft || x > scroll.scrollLeft + scroll.clientWidth - 40) scroll.scrollLeft = x - 40;
  });
  schedule.parts = parts;
}

// The step that an arrow key leads to: the one before or after, or that of the next rank at this time.
function beside(schedule, chosen, key) {
  const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (key === "Escape" && chosen !== null) return -1;
  if (!(key in ways)) return undefined;
  if (chosen === null) return 0;
  const [along, across] = ways[key], { rank } = schedule.steps[chosen];
  const of = (r) => schedule.steps.map((step, i) => i).filter((i) => schedule.steps[i].rank === r);
  if (along) {
    const row = of(rank);
    return row[row.indexOf(chosen) + along] ?? chosen;
  }
  const start = schedule.times[chosen][0];
  const near = (i) => Math.abs(schedule.times[i][0] - start);
  return of(rank + across).sort((a, b) => near(a) - near(b))[0] ?? chosen;
}

function round(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((k) => k * power).find((step) => step >= least * 0.999999);
}

function draw(schedule) {
  const { parts, steps, times } = schedule, { canvas } = parts;
  const height = schedule.ranks * ROW + AXIS, ratio = window.devicePixelRatio || 1;
  const width = schedule.width;
  parts.scale = (width - 4) / (schedule.end || 1);
  canvas.width = width * ratio; canvas.height = height * ratio;
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  const style = getComputedStyle(document.documentElement), pen = canvas.getContext("2d");
  const colour = (name) => style.getPropertyValue(`--${name}`);
  const font = (size) => `600 ${size}px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif`;
  pen.scale(ratio, ratio);
  pen.textAlign = "center"; pen.textBaseline = "middle";
  for (let rank = 0; rank < schedule.ranks; rank++) {
    pen.fillStyle = colour("lane");
    pen.fillRect(0, rank * ROW, width, BAR);
  }
  const step = round(Math.max(schedule.end, 1e-9) / Math.max(width / 110, 2));
  pen.font = font(11); pen.lineWidth = 0.7;
  for (let time = 0; time <= schedule.end * 1.000001; time += step) {
    const x = time * parts.scale + 0.5;
    pen.strokeStyle = colour("line");
    pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height - AXIS); pen.stroke();
    pen.fillStyle = colour("quiet"); pen.textAlign = time ? "center" : "left";
    if (x < width - 12) pen.fillText(number(time), x, height - AXIS / 2);
  }
  pen.textAlign = "center";
  const same = parts.chosen === null ? null : new Set(steps[parts.chosen].actions.map((a) => a[2]));
  steps.forEach((one, i) => box(pen, schedule, one, times[i], same, font, colour));
  for (let rank = 0; rank < schedule.ranks; rank++) graph(pen, schedule, rank, colour);
  if (parts.chosen !== null) outline(pen, schedule, colour);
  tell(schedule);
}

function box(pen, schedule, step, [start, end], same, font) {
  const scale = schedule.parts.scale, width = (end - start) * scale, part = BAR / step.actions.length;
  step.actions.forEach(([op, , microbatch, chunk, label], half) => {
    const [fill, ink] = data.ops[op].boxes[chunk], y = step.rank * ROW + half * part;
    pen.globalAlpha = same && !same.has(microbatch) ? 0.3 : 1;
    pen.fillStyle = fill;
    pen.fillRect(start * scale, y, Math.max(width - 0.8, 0.4), part - 0.6);
    const size = Math.min(11, (width - 1.5) / label.length / 0.64);
    if (size >= 6.5) {
      pen.fillStyle = ink; pen.font = font(size);
      pen.fillText(label, start * scale + width / 2, y + part / 2);
    }
  });
  pen.globalAlpha = 1;
}

function graph(pen, schedule, rank, colour) {
  const scale = schedule.parts.scale, y = (count) => rank * ROW + BAR + GRAPH + 3 - (count / schedule.peak) * GRAPH;
  pen.strokeStyle = colour("memory"); pen.lineWidth = 1.5;
  pen.beginPath();
  let last = 0;
  for (const [time, count] of schedule.memory[rank]) {
    pen.lineTo(time * scale, y(last)); pen.lineTo(time * scale, y(count));
    last = count;
  }
  pen.lineTo(schedule.end * scale, y(last));
  pen.stroke();
}

function outline(pen, schedule, colour) {
  const { parts, steps, times } = schedule, [start, end] = times[parts.chosen];
  pen.strokeStyle = colour("ink"); pen.lineWidth = 2;
  pen.strokeRect(start * parts.scale + 0.5, steps[parts.chosen].rank * ROW + 0.5, (end - start) * parts.scale - 1.5, BAR - 1.5);
}

function tell(schedule) {
  const { parts, steps, times, memory } = schedule;
  if (parts.chosen === null) { parts.readout.textContent = "Point at an action."; return; }
  const step = steps[parts.chosen], [start, end] = times[parts.chosen];
  const what = step.actions.map(([op, stage, microbatch]) =>
    `${data.ops[op].label}, stage ${stage}, microbatch ${microbatch}`).join("; ");
  const held = memory[step.rank].filter(([time]) => time <= start).pop()[1];
  const tick = step.tick === null ? "" : ` in tick ${step.tick}`;
  parts.readout.textContent = `rank ${step.rank}: ${step.text} (${what})${tick}, from ${number(start)} to ${number(end)}; ` +
    `the rank then stores ${number(held)} microbatch${held === 1 ? "" : "es"}`;
}

// All schedules have one axis of time.
function update() {
  for (const schedule of data.schedules) {
    schedule.times = simulate(schedule);
    schedule.memory = Array.from({ length: schedule.ranks }, (_, rank) => stored(schedule, schedule.times, rank));
    schedule.figures = figures(schedule, schedule.times);
  }
  const end = Math.max(...data.schedules.map((s) => s.figures.makespan));
  const lengths = data.schedules.flatMap((s) => s.times.map(([a, b]) => b - a)).filter((x) => x > 0);
  const shortest = lengths.sort((a, b) => a - b)[Math.floor(lengths.length / 10)] || 1;
  for (const schedule of data.schedules) {
    const { makespan, bubble, peaks } = schedule.figures, { parts } = schedule;
    const wanted = Math.min(WIDEST, (end / shortest) * LEAST);
    Object.assign(schedule, { end, peak: Math.max(1, ...data.schedules.flatMap((s) => s.figures.peaks)) });
    schedule.width = Math.max(parts.scroll.clientWidth, Math.round(wanted));
    parts.figures.replaceChildren();
    for (const [name, value] of [
      ["Makespan", number(makespan)],
      ["Bubble", `${number(bubble)} (${(makespan ? (100 * bubble) / makespan : 0).toFixed(1)}%)`],
      ["Microbatches stored by rank", peaks.map(number).join(" ")],
    ]) make(parts.figures, "span", `${name} `).appendChild(document.createElement("b")).textContent = value;
    parts.canvas.setAttribute("aria-label", `${schedule.name}: makespan ${number(makespan)}, bubble ${number(bubble)}`);
    draw(schedule);
  }
}

function controls() {
  const form = document.getElementById("controls"), inputs = {};
  const names = { F: "forward F", I: "input gradient I", W: "weight gradient W", T: "transfer" };
  const unit = Math.max(...Object.values(data.costs).map((c) => c.value)) || 1;
  for (const [op, name] of Object.entries(names)) {
    const label = make(form, "label", name), input = make(label, "input"), output = make(label, "output");
    Object.assign(input, { type: "range", min: op === "F" ? unit / 20 : 0, max: 3 * unit, step: unit / 20, value: costs[op] });
    input.id = op;
    const show = () => { output.textContent = number(costs[op]); };
    input.addEventListener("input", () => { costs[op] = Number(input.value); show(); update(); });
    inputs[op] = [input, show];
    show();
  }
  const reset = make(form, "button", "Reset");
  reset.type = "button";
  reset.addEventListener("click", () => {
    for (const [op, [input, show]] of Object.entries(inputs)) {
      costs[op] = data.costs[op].value; input.value = costs[op]; show();
    }
    update();
  });
  const legend = document.getElementById("legend");
  const used = new Set(data.schedules.flatMap((s) => s.steps.flatMap((step) => step.actions.map((a) => a[0]))));
  for (const [op, { label, boxes }] of Object.entries(data.ops)) {
    if (!used.has(op)) continue;
    const entry = make(legend, "span");
    make(entry, "i").style.background = boxes[0][0];
    entry.append(label);
  }
  const entry = make(legend, "span");
  make(entry, "i", undefined, "memory");
  entry.append("microbatches stored");
}

controls();
data.schedules.forEach(view);
update();
addEventListener("resize", update);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
