// The engine's states, made from its records: a keyframe now and then, and every step's changes between them.
//
// Applying a record to the state before it gives the state that the worker saw in that step. So any step that is still here
// can be shown again, exactly, with nothing asked of the server.

const MAX_RECORDS = 4096;
const KEYFRAME_EVERY = 64;

export class State {
  constructor(numBlocks) {
    this.step = 0;
    this.rows = new Map(); // row -> {name, colour, prompt, computed, blocks, isWriting}
    this.cached = new Uint8Array(numBlocks);
  }

  copy() {
    const twin = new State(0);
    twin.step = this.step;
    twin.cached = this.cached.slice();
    for (const [row, each] of this.rows) twin.rows.set(row, { ...each, blocks: each.blocks.slice() });
    return twin;
  }

  apply(record, colourOf) {
    this.step = record.step;
    for (const each of this.rows.values()) each.isWriting = false;
    for (const [row] of record.removed) this.rows.delete(row);
    for (const entry of record.entered) this.rows.set(entry.row, enteredRow(entry, colourOf));
    for (const [row, entry, block] of record.replaced) this.rows.get(row).blocks[entry] = block;
    for (const [row, blocks] of record.appended) this.rows.get(row).blocks.push(...blocks);
    for (const row of record.decoded) this.#compute(row, 1);
    for (const [row, start, count] of record.chunks) this.#compute(row, start + count - this.rows.get(row).computed);
    for (const block of record.published) this.cached[block >= 0 ? block : ~block] = block >= 0 ? 1 : 0;
  }

  numUsed() {
    const used = new Uint8Array(this.cached.length);
    for (const row of this.rows.values()) for (const block of row.blocks) if (block >= 0) used[block] = 1;
    return used.reduce((sum, each) => sum + each, 0);
  }

  without(rows) {
    const twin = this.copy();
    for (const row of rows) twin.rows.delete(row);
    return twin;
  }

  #compute(row, count) {
    const each = this.rows.get(row);
    each.computed += count;
    each.isWriting = true;
  }
}

function enteredRow(entry, colourOf) {
  return {
    name: entry.name, colour: colourOf(entry.name), prompt: entry.num_prompt_tokens, computed: entry.num_hit_tokens,
    blocks: entry.blocks.slice(), isWriting: true, known: entry.num_known_tokens,
  };
}

export class History {
  constructor() {
    this.engine = "";
    this.info = null; // the last inspection, without its steps
    this.records = [];
    this.live = new State(0);
    this.#keyframes = [];
    this.#colours = new Map();
  }

  #keyframes;
  #colours;
  #numNames = 0;

  get since() {
    return this.info ? this.info.last_step : -1;
  }

  get first() {
    return this.records.length ? this.records[0].step : this.live.step;
  }

  get last() {
    return this.live.step;
  }

  // Take in what the server says; returns the records that are new here.
  take(inspection) {
    this.info = inspection;
    if (inspection.base) this.#restart(inspection);
    for (const record of inspection.steps) {
      this.live.apply(record, (name) => this.colourOf(name));
      this.records.push(record);
      if (record.step - this.#keyframes.at(-1).step >= KEYFRAME_EVERY) this.#keyframes.push(this.live.copy());
    }
    while (this.records.length > MAX_RECORDS && this.#keyframes.length > 1) {
      this.#keyframes.shift();
      const start = this.#keyframes[0].step;
      this.records.splice(0, this.records.findIndex((record) => record.step > start));
    }
    return inspection.steps;
  }

  // What is there between two steps: rows that ended with the last one are gone already.
  now() {
    return this.info && this.info.gone_rows.length ? this.live.without(this.info.gone_rows) : this.live;
  }

  stateAt(step) {
    if (step >= this.live.step) return this.live;
    const frame = this.#keyframes.findLast((each) => each.step <= step) ?? this.#keyframes[0];
    const state = frame.copy();
    for (const record of this.#after(state.step)) {
      if (record.step > step) break;
      state.apply(record, (name) => this.colourOf(name));
    }
    return state;
  }

  recordAt(step) {
    const place = step - this.first;
    return this.records[place]?.step === step ? this.records[place] : this.records.find((record) => record.step === step);
  }

  // Requests get neighbouring numbers in order of appearance, which the map turns into distant hues.
  colourOf(name) {
    const request = name.replace(/#\d+$/, "");
    if (!this.#colours.has(request)) {
      this.#colours.set(request, this.#numNames);
      this.#numNames += 1;
      if (this.#colours.size > 50_000) this.#colours.delete(this.#colours.keys().next().value);
    }
    return this.#colours.get(request);
  }

  *#after(step) {
    let place = Math.max(0, Math.min(this.records.length, step - this.first + 1));
    while (place > 0 && this.records[place - 1].step > step) place -= 1;
    for (; place < this.records.length; place += 1) yield this.records[place];
  }

  #restart(inspection) {
    const { base, num_blocks: numBlocks } = inspection;
    this.engine = inspection.engine;
    this.records = [];
    this.live = new State(numBlocks);
    this.live.step = base.step;
    for (const row of base.rows) {
      this.live.rows.set(row.row, {
        name: row.name, colour: this.colourOf(row.name), prompt: row.num_prompt_tokens, computed: row.num_computed,
        blocks: row.blocks.slice(), isWriting: false, known: row.num_computed,
      });
    }
    for (const block of base.cached) this.live.cached[block] = 1;
    this.#keyframes = [this.live.copy()];
  }
}
