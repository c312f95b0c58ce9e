// Figures over time, computed from the engine's records: rates and percentiles by second, as the engine saw them.

const MAX_SECONDS = 120;
const RECENT_SECONDS = 10;
const MAX_SAMPLES = 4000; // of one second

export function percentile(values, share) {
  if (!values.length) return null;
  const ordered = values.slice().sort((a, b) => a - b);
  return ordered[Math.min(ordered.length - 1, Math.floor(ordered.length * share))];
}

function emptySecond(time) {
  return { time, tokens: 0, prompt: 0, firsts: [], gaps: [], hit: 0, asked: 0, running: 0, waiting: 0, used: 0, preempted: 0 };
}

export class Numbers {
  constructor() {
    this.seconds = [];
    this.now = 0;
    this.#streams = new Map(); // name -> {arrival, last}
    this.#names = new Map(); // row -> name
  }

  #streams;
  #names;

  reset() {
    this.seconds = [];
    this.#streams.clear();
    this.#names.clear();
  }

  take(records, inspection) {
    for (const record of records) this.#takeRecord(record);
    this.now = inspection.now_s;
    const second = this.#second(this.now);
    second.running = inspection.num_running;
    second.waiting = inspection.num_waiting;
  }

  noteUse(share) {
    this.#second(this.now).used = share;
  }

  // The last seconds, oldest first, with empty ones where nothing happened.
  series(count = 60) {
    const last = Math.floor(this.now);
    const known = new Map(this.seconds.map((each) => [each.time, each]));
    return Array.from({ length: count }, (_, place) => known.get(last - count + 1 + place) ?? emptySecond(last - count + 1 + place));
  }

  recent() {
    const from = Math.floor(this.now) - RECENT_SECONDS;
    return this.seconds.filter((each) => each.time >= from);
  }

  // Tokens a second over the last whole seconds; the one in progress would make it flicker.
  rate() {
    const last = Math.floor(this.now);
    const whole = this.seconds.filter((each) => each.time < last && each.time >= last - 3);
    return whole.reduce((sum, each) => sum + each.tokens, 0) / 3;
  }

  #takeRecord(record) {
    const time = record.began_s + record.elapsed_s;
    const second = this.#second(time);
    for (const [row, why] of record.removed) {
      const name = this.#names.get(row);
      this.#names.delete(row);
      if (why === "preempted") second.preempted += 1;
      else this.#streams.delete(name);
    }
    for (const entry of record.entered) this.#enter(entry, second);
    for (const row of record.decoded) this.#gain(row, time, second);
    for (const [row, , count, samples] of record.chunks) {
      second.prompt += count;
      if (samples) this.#gain(row, time, second);
    }
  }

  #enter(entry, second) {
    this.#names.set(entry.row, entry.name);
    if (this.#streams.has(entry.name)) return; // resumed: its clock goes on
    const isNew = entry.num_known_tokens === entry.num_prompt_tokens && !entry.name.includes("#");
    this.#streams.set(entry.name, { arrival: isNew ? entry.arrival_s : null, last: null });
    if (isNew) {
      second.asked += entry.num_prompt_tokens;
      second.hit += entry.num_hit_tokens;
    }
  }

  #gain(row, time, second) {
    second.tokens += 1;
    const stream = this.#streams.get(this.#names.get(row));
    if (!stream) return;
    if (stream.last !== null) {
      if (second.gaps.length < MAX_SAMPLES) second.gaps.push(time - stream.last);
    } else if (stream.arrival !== null) second.firsts.push(time - stream.arrival);
    stream.last = time;
  }

  #second(time) {
    const number = Math.floor(time);
    const last = this.seconds.at(-1);
    if (last && last.time >= number) return this.seconds.findLast((each) => each.time <= number) ?? this.seconds[0];
    const second = emptySecond(number);
    if (last) Object.assign(second, { running: last.running, waiting: last.waiting, used: last.used });
    this.seconds.push(second);
    if (this.seconds.length > MAX_SECONDS) this.seconds.shift();
    return second;
  }
}
