// The page: asks the engine for its last steps a few times a second, and shows them; the slider goes back through them.

import { getJson, hasKey, HttpError, setKey } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { drawLine, drawSteps } from "./charts.js";
import { Chat } from "./chat.js";
import { applyTheme, initialTheme, requestColour, toggleTheme } from "./colours.js";
import { History } from "./history.js";
import { Numbers, percentile } from "./numbers.js";
import { RequestList, seconds, shortName } from "./requests.js";

const POLL_MS = 250;
const MAX_PAUSE_MS = 5000;
const LOOK_DELAY_MS = 90; // a pointer that passes over blocks asks for none of them

const byId = (id) => document.getElementById(id);
const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

applyTheme(initialTheme());

const history = new History();
const numbers = new Numbers();
let selected = null; // the step that is looked at; null: live
let server = null; // the last answer
let canSeeTexts = false;
let replica = 0; // of several engines, the one that is shown

const mark = (colour) => map.mark(colour);
const map = new BlockMap(byId("block-map"), byId("block-marks"), (block) => lookInto(block));
const running = new RequestList(byId("running"), "Nobody.", mark);
const waiting = new RequestList(byId("waiting"), "Nobody waits.", mark);
const chat = new Chat(colourOfRequest, mark, askForKey);
const tiles = makeTiles();

function colourOfRequest(requestId) {
  for (const row of history.live.rows.values()) if (row.name.startsWith(requestId)) return row.colour;
  return null;
}

// -- asking ----------------------------------------------------------------------------------------------------------

let pause = POLL_MS;

async function poll() {
  if (!document.hidden && !byId("key-dialog").open) {
    try {
      take(await getJson(`inspect/steps?engine=${history.engine}&since=${history.since}&replica=${replica}`));
      pause = POLL_MS;
    } catch (error) {
      if (error instanceof HttpError && error.status === 401) askForKey();
      else showState("unreachable", error instanceof HttpError ? error.message : "the server cannot be reached");
      pause = Math.min(MAX_PAUSE_MS, pause * 1.6);
    }
  }
  setTimeout(poll, pause);
}

function take(answer) {
  server = answer;
  canSeeTexts = answer.is_admin;
  byId("model").textContent = answer.model;
  byId("key-button").hidden = !hasKey();
  showState(answer.state, stateText(answer));
  showReplicas(answer.replicas);
  const { inspection } = answer;
  if (!inspection) return;
  if (inspection.base) numbers.reset();
  const records = history.take(inspection);
  numbers.take(records, inspection);
  map.resize(inspection.num_blocks, inspection.block_size, inspection.num_groups);
  if (selected !== null && selected < history.first) selected = history.first;
  render();
}

function showReplicas(states) {
  const choice = byId("replica");
  choice.hidden = states.length === 0;
  while (choice.options.length < states.length) choice.add(new Option());
  states.forEach((state, number) => {
    const text = `replica ${number + 1}${state === "ready" ? "" : `: ${state}`}`;
    if (choice.options[number].text !== text) choice.options[number].text = text;
  });
}

byId("replica").addEventListener("change", (event) => {
  replica = event.target.selectedIndex;
  selected = null;
});

function stateText(answer) {
  if (answer.state !== "ready") return answer.reason || answer.state;
  if (answer.step_age_s > 2) return `ready · the step in progress takes ${answer.step_age_s.toFixed(0)} s so far`;
  const restarts = answer.num_restarts ? ` · ${plural(answer.num_restarts, "restart")} survived` : "";
  return answer.inspection ? `ready${restarts}` : "busy: the engine answers after its step";
}

function showState(state, text) {
  byId("state").dataset.state = state;
  if (byId("state-text").textContent !== text) byId("state-text").textContent = text;
}

// -- showing ---------------------------------------------------------------------------------------------------------

function render() {
  const state = selected === null ? history.now() : history.stateAt(selected);
  map.show(state);
  const counts = map.counts();
  const { inspection } = server;
  numbers.noteUse(history.now().numUsed() / inspection.num_blocks);
  byId("map-caption").textContent =
    `${plural(inspection.num_blocks, "block")} of ${inspection.block_size} tokens · ` +
    `${counts.owned + counts.shared} in use, ${counts.shared} of them shared · ${counts.cached} cached · ${counts.free} free`;
  showSteps(state);
  showTiles();
  showRequests(state);
  showTotals(inspection);
  chat.paint();
  if (map.selected >= 0) showDetail(map.selected);
}

function showSteps(state) {
  const slider = byId("step-slider");
  slider.min = history.first;
  slider.max = history.last;
  slider.value = selected ?? history.last;
  byId("live").setAttribute("aria-pressed", String(selected === null));
  const shown = selected ?? history.last;
  const record = history.recordAt(shown);
  byId("step-caption").textContent = record ? stepText(record, state) : "no step yet";
  slider.setAttribute("aria-valuetext", byId("step-caption").textContent);
  drawSteps(byId("step-strip"), history.records, selected);
}

function stepText(record, state) {
  const expected = record.predicted_s ? ` (predicted ${seconds(record.predicted_s)})` : "";
  const parts = [`step ${record.step.toLocaleString("en")}`, seconds(record.elapsed_s) + expected];
  if (record.decoded.length) parts.push(`${record.decoded.length} decoded`);
  const prompt = record.num_tokens - record.decoded.length;
  if (prompt) parts.push(`${plural(prompt, "prompt token")} in ${plural(record.chunks.length, "piece")}`);
  const preempted = record.removed.filter(([, why]) => why === "preempted").length;
  if (preempted) parts.push(`${preempted} preempted`);
  if (record.copies.length) parts.push(plural(record.copies.length, "block copy", "block copies"));
  if (record.num_waiting) parts.push(`${record.num_waiting} waiting${record.waits_for ? `: ${record.waits_for}` : ""}`);
  if (selected !== null) parts.push(`${state.rows.size} rows`);
  return parts.join(" · ");
}

function makeTiles() {
  const names = {
    rate: "Tokens per second", first: "Time to first token", gap: "Between tokens",
    requests: "Requests", used: "KV blocks in use", hits: "Prompt from cache",
  };
  const made = {};
  for (const [id, name] of Object.entries(names)) {
    const tile = document.createElement("div");
    tile.className = "tile";
    tile.id = `tile-${id}`;
    const parts = ["name", "value", "side"].map((part) => {
      const element = document.createElement("p");
      element.className = part;
      tile.append(element);
      return element;
    });
    parts[0].textContent = name;
    const canvas = document.createElement("canvas");
    canvas.setAttribute("aria-hidden", "true");
    tile.append(canvas);
    byId("tiles").append(tile);
    made[id] = { value: parts[1], side: parts[2], canvas };
  }
  return made;
}

function fillTile(tile, value, side) {
  const [number, unit = ""] = Array.isArray(value) ? value : value.split(" ");
  tile.value.replaceChildren(number);
  if (unit) {
    const small = document.createElement("span");
    small.className = "unit";
    small.textContent = unit;
    tile.value.append(small);
  }
  tile.side.textContent = side;
}

// Nothing where all experts are in memory, or there are none.
function expertLine(inspection) {
  const hits = inspection.num_expert_hits;
  const asked = hits + inspection.num_expert_misses;
  if (!asked) return "";
  const read = (inspection.expert_bytes_read / 2 ** 30).toFixed(1);
  const guessed = inspection.num_experts_forecast;
  const foreseen = guessed ? ` Of ${guessed} that were foreseen ${((100 * inspection.num_experts_foreseen) / guessed).toFixed(0)} % were needed.` : "";
  return ` ${((100 * hits) / asked).toFixed(1)} % of chosen experts were in memory; ${read} GiB read, steps waited ${inspection.expert_wait_s.toFixed(1)} s.${foreseen}`;
}

// Nothing where nothing is kept beyond the last use.
function tierLine(inspection) {
  const { num_stored_kv_blocks: stored, num_restored_kv_blocks: restored, num_faulty_kv_blocks: faulty, num_kept_kv_blocks: kept } = inspection;
  const tiers = stored || restored ? ` Tiers below the pool: ${plural(stored, "place")} stored, ${restored.toLocaleString("en")} restored, ${faulty.toLocaleString("en")} faulty.` : "";
  return tiers + (kept ? ` ${plural(kept, "block")} kept for a time.` : "");
}

function showTiles() {
  const series = numbers.series();
  const recent = numbers.recent();
  const firsts = recent.flatMap((each) => each.firsts);
  const gaps = recent.flatMap((each) => each.gaps);
  const asked = recent.reduce((sum, each) => sum + each.asked, 0);
  const hit = recent.reduce((sum, each) => sum + each.hit, 0);
  const { inspection } = server;
  const most = Math.max(...series.map((each) => each.tokens));
  fillTile(tiles.rate, Math.round(numbers.rate()).toLocaleString("en"), `peak ${most.toLocaleString("en")} of late`);
  fillTile(tiles.first, seconds(percentile(firsts, 0.5)), firsts.length ? `p95 ${seconds(percentile(firsts, 0.95))}` : "nobody came of late");
  fillTile(tiles.gap, seconds(percentile(gaps, 0.5)), gaps.length ? `p95 ${seconds(percentile(gaps, 0.95))}` : "nobody decodes");
  fillTile(tiles.requests, [String(inspection.num_running), "running"], `${inspection.num_waiting} waiting`);
  const used = series.at(-1).used;
  fillTile(tiles.used, [`${(100 * used).toFixed(used < 0.1 ? 1 : 0)}`, "%"], `${(100 * inspection.waste).toFixed(1)} % unfilled`);
  fillTile(tiles.hits, asked ? [`${Math.round((100 * hit) / asked)}`, "%"] : "–", asked ? `${hit.toLocaleString("en")} of ${plural(asked, "token")}` : "no prompt of late");
  const whole = series.slice(0, -1); // the second in progress is not one yet
  drawLine(tiles.rate.canvas, whole.map((each) => each.tokens));
  drawLine(tiles.first.canvas, whole.map((each) => percentile(each.firsts, 0.5)), whole.map((each) => percentile(each.firsts, 0.95)));
  drawLine(tiles.gap.canvas, whole.map((each) => percentile(each.gaps, 0.5)), whole.map((each) => percentile(each.gaps, 0.95)));
  drawLine(tiles.requests.canvas, whole.map((each) => each.running), whole.map((each) => each.waiting));
  drawLine(tiles.used.canvas, whole.map((each) => each.used));
  drawLine(tiles.hits.canvas, whole.map((each) => (each.asked ? each.hit / each.asked : null)));
}

function showRequests(state) {
  if (selected !== null) {
    const rows = [...state.rows.values()];
    running.show(rows.map((row) => pastEntry(row)));
    const record = history.recordAt(selected);
    byId("running-caption").textContent = `${rows.length} in step ${selected.toLocaleString("en")}`;
    byId("waiting-caption").textContent = record ? `${record.num_waiting} in step ${selected.toLocaleString("en")}` : "";
    waiting.show(record?.waits_for ? [{ name: "the first", colour: null, count: "", why: record.waits_for }] : []);
    return;
  }
  const { requests, num_running: numRunning, num_waiting: numWaiting } = server.inspection;
  const entries = requests.map((each) => ({ ...liveEntry(each), isRunning: each.row >= 0 }));
  running.show(entries.filter((each) => each.isRunning));
  waiting.show(entries.filter((each) => !each.isRunning));
  byId("running-caption").textContent = numRunning ? `${numRunning} of at most ${server.inspection.max_num_seqs}` : "";
  byId("waiting-caption").textContent = numWaiting ? String(numWaiting) : "";
}

function liveEntry(each) {
  const tags = [];
  if (each.tenant && each.tenant !== "default") tags.push(each.tenant);
  if (each.num_hit_tokens) tags.push(`${each.num_hit_tokens} cached`);
  if (each.num_preemptions) tags.push(plural(each.num_preemptions, "preemption"));
  tags.push(`${each.num_prompt_tokens} + ${each.num_output_tokens}`, seconds(each.age_s));
  return {
    name: each.name, colour: history.colourOf(each.name), count: tags.join(" · "), why: each.waits_for,
    share: each.row >= 0 ? each.num_output_tokens / each.max_tokens : undefined,
  };
}

function pastEntry(row) {
  const output = Math.max(0, row.computed - row.prompt);
  const count = row.computed < row.prompt ? `${row.computed} of ${row.prompt} prompt tokens` : `${row.prompt} + ${output}`;
  return { name: row.name, colour: row.colour, count, share: row.computed < row.prompt ? row.computed / row.prompt : undefined };
}

function showTotals(inspection) {
  byId("totals").textContent =
    `Since the engine began: ${plural(inspection.last_step, "step")}, ${plural(inspection.num_preemptions, "preemption")}, ` +
    `${plural(inspection.num_copies, "block")} copied on write, ${inspection.num_merges.toLocaleString("en")} merged with identical ones, ` +
    `${inspection.num_evictions.toLocaleString("en")} evicted.` + expertLine(inspection) + tierLine(inspection);
}

// -- one block -------------------------------------------------------------------------------------------------------

let lookTimer = 0;
let shownContent = null; // {block, step, ...} of the last answer

function lookInto(block) {
  showDetail(block);
  clearTimeout(lookTimer);
  lookTimer = setTimeout(() => fetchContent(block), LOOK_DELAY_MS);
}

async function fetchContent(block) {
  if (!canSeeTexts || map.describe(block).kind === "free") return;
  try {
    shownContent = await getJson(`inspect/blocks/${block}?step=${selected ?? history.last}&replica=${replica}`);
  } catch {
    shownContent = null; // gone meanwhile: what is known without asking is shown already
  }
  if (map.selected === block) showDetail(block);
}

function showDetail(block) {
  const { kind, owners, filled } = map.describe(block);
  const head = byId("detail-head");
  const number = document.createElement("b");
  number.textContent = `Block ${block.toLocaleString("en")}`;
  head.replaceChildren();
  if (owners.length) head.append(chip(owners.length > 1 ? null : owners[0].colour));
  head.append(number, ` · ${detailText(kind, owners, filled)}`);
  const text = byId("detail-text");
  const content = shownContent?.block === block && kind !== "free" ? shownContent : null;
  if (content?.origin) head.append(originText(content));
  const pieces = content ? content.texts ?? content.token_ids.map((id) => ` ${id}`) : [];
  if (text.textContent !== pieces.join("") || text.childElementCount !== pieces.length) {
    text.replaceChildren(...pieces.map((piece) => token(piece)));
  }
  if (!canSeeTexts && kind !== "free") text.textContent = "Texts are shown to admin keys only.";
}

function originText({ origin, is_stored: isStored, is_kept: isKept }) {
  const from = origin === "restored" ? "restored from a tier" : "computed here";
  return ` · ${from}${isStored ? ", stored in a tier" : ""}${isKept ? ", kept for a time" : ""}`;
}

function detailText(kind, owners, filled) {
  if (kind === "free") return "free";
  if (kind === "cached") return "cached: nobody uses it, and whoever has the same prefix will find it";
  const names = owners.slice(0, 3).map((owner) => shortName(owner.name)).join(", ");
  const others = owners.length > 3 ? ` and ${owners.length - 3} more` : "";
  return `${plural(owners.length, "reference")}: ${names}${others} · ${filled} of ${map.blockSize} slots filled`;
}

function chip(colour) {
  const element = document.createElement("span");
  element.className = "chip";
  element.style.setProperty("--hue", colour === null ? "var(--shared)" : requestColour(colour));
  return element;
}

function token(piece) {
  const element = document.createElement("span");
  element.className = "token";
  element.textContent = piece.replaceAll("\n", "⏎");
  return element;
}

// -- controls --------------------------------------------------------------------------------------------------------

function look(step) {
  selected = step === null || step >= history.last ? null : Math.max(history.first, step);
  shownContent = null;
  if (server?.inspection) render();
  if (map.selected >= 0) lookInto(map.selected);
}

byId("step-slider").addEventListener("input", (event) => look(Number(event.target.value)));
byId("live").addEventListener("click", () => look(selected === null ? history.last - 1 : null));
byId("theme-button").addEventListener("click", () => {
  toggleTheme();
  map.redraw();
  if (server?.inspection) render();
});

function askForKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key-error").textContent = hasKey() ? "This key is not valid here." : "";
  dialog.showModal();
}

byId("key-button").addEventListener("click", askForKey);
byId("key-form").addEventListener("submit", () => {
  const value = byId("key").value.trim();
  byId("key").value = "";
  if (value) setKey(value);
  pause = POLL_MS;
});

new ResizeObserver(() => server?.inspection && render()).observe(byId("step-strip"));
poll();
