// Small charts: a line with its area for a figure over the last minute, and a bar for every step.

import { fit } from "./canvas.js";
import { variable } from "./colours.js";

const BAR = 4; // pixels from one step's bar to the next

export function drawLine(canvas, values, band = null) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  const context = fit(canvas, width, height);
  context.clearRect(0, 0, width, height);
  const accent = variable("accent");
  const top = Math.max(...values.map((value) => value ?? 0), ...(band ?? []).map((value) => value ?? 0), 1e-9);
  const at = (value, place) => [(place / (values.length - 1)) * width, height - 2 - (value / top) * (height - 8)];
  if (band) trace(context, band, at, () => stroke(context, accent, 1, 0.35));
  trace(context, values, at, (first, last) => {
    stroke(context, accent, 1.6, 0.9);
    context.lineTo(last[0], height);
    context.lineTo(first[0], height);
    context.globalAlpha = 0.1;
    context.fillStyle = accent;
    context.fill();
    context.globalAlpha = 1;
  });
}

// Runs of known values as paths; `finish` draws each.
function trace(context, values, at, finish) {
  let first = null;
  let last = null;
  values.forEach((value, place) => {
    if (value === null) return;
    const point = at(value, place);
    if (first === null) {
      context.beginPath();
      context.moveTo(...point);
      first = point;
    } else context.lineTo(...point);
    last = point;
  });
  if (first !== null) finish(first, last);
}

function stroke(context, style, thickness, alpha) {
  context.strokeStyle = style;
  context.lineWidth = thickness;
  context.lineJoin = "round";
  context.globalAlpha = alpha;
  context.stroke();
  context.globalAlpha = 1;
}

// Steps that share a bar: a power of two, and bars begin at its multiples, so that they stand still as steps come.
function stepsPerBar(count, width) {
  let steps = 1;
  while (count / steps > width / BAR) steps *= 2;
  return steps;
}

function bars(records, steps) {
  const made = [];
  for (const record of records) {
    const number = Math.floor(record.step / steps);
    if (made.at(-1)?.number !== number) made.push({ number, tokens: 0, decoded: 0, count: 0, preempted: false });
    const bar = made.at(-1);
    bar.tokens += record.num_tokens;
    bar.decoded += record.decoded.length;
    bar.count += 1;
    bar.preempted ||= record.removed.some(([, why]) => why === "preempted");
  }
  return made;
}

// A bar for each step, or for a few, from the first to the last that the slider reaches; `inset`: of the slider's thumb.
export function drawSteps(canvas, records, selected, inset = 8) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width) return;
  const context = fit(canvas, width, height);
  context.clearRect(0, 0, width, height);
  if (!records.length) return;
  const colours = { decode: variable("decode"), prefill: variable("prefill"), preempted: variable("preempted") };
  const first = records[0].step;
  const span = Math.max(1, records.at(-1).step - first);
  const room = width - 2 * inset;
  const at = (step) => inset + (Math.max(0, step - first) / span) * room;
  const steps = stepsPerBar(span + 1, room);
  const thick = Math.max(1, Math.min(6, (room / span) * steps - 1));
  const made = bars(records, steps);
  const most = Math.max(8, ...made.map((bar) => bar.tokens / bar.count));
  const scale = (tokens) => (Math.log1p(tokens) / Math.log1p(most)) * (height - 12); // prompts are hundreds, decodes are few
  for (const bar of made) {
    const x = at(bar.number * steps) - thick / 2;
    const whole = scale(bar.tokens / bar.count);
    const decoded = bar.decoded ? Math.max(2, whole * (bar.decoded / bar.tokens)) : 0;
    context.fillStyle = colours.prefill;
    context.fillRect(x, height - whole, thick, whole - decoded);
    context.fillStyle = colours.decode;
    context.fillRect(x, height - decoded, thick, decoded);
    if (bar.preempted) {
      context.fillStyle = colours.preempted;
      context.beginPath();
      context.arc(x + thick / 2, 4, 2.2, 0, 7);
      context.fill();
    }
  }
  if (selected !== null) {
    context.fillStyle = variable("ink");
    context.fillRect(at(selected) - 1, 0, 2, height);
  }
}
