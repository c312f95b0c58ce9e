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

// Steps that fit into the strip, newest at the right edge.
export function stepsThatFit(canvas) {
  return Math.max(1, Math.floor(canvas.clientWidth / BAR));
}

export function drawSteps(canvas, records, selected) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width) return;
  const context = fit(canvas, width, height);
  context.clearRect(0, 0, width, height);
  const colours = { decode: variable("decode"), prefill: variable("prefill"), preempted: variable("preempted") };
  const most = Math.max(8, ...records.map((record) => record.num_tokens));
  const scale = (count) => (Math.log1p(count) / Math.log1p(most)) * (height - 10); // prompts are hundreds, decodes are few
  records.forEach((record, place) => {
    const x = width - (records.length - place) * BAR;
    const whole = scale(record.num_tokens);
    const decoded = record.num_tokens ? whole * (record.decoded.length / record.num_tokens) : 0;
    const least = record.decoded.length ? Math.max(decoded, 2) : 0;
    context.fillStyle = colours.prefill;
    context.fillRect(x, height - whole, BAR - 1, whole - least);
    context.fillStyle = colours.decode;
    context.fillRect(x, height - least, BAR - 1, least);
    if (record.removed.some(([, why]) => why === "preempted")) {
      context.fillStyle = colours.preempted;
      context.beginPath();
      context.arc(x + (BAR - 1) / 2, 4, 2.2, 0, 7);
      context.fill();
    }
    if (record.step === selected) {
      context.fillStyle = variable("ink");
      context.fillRect(x - 0.5, 0, BAR, height);
    }
  });
}
