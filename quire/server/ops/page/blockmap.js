// Every physical KV block as a cell. Only cells that changed are drawn again, so twenty thousand of them cost a step nothing.

import { fit } from "./canvas.js";
import { requestColour, variable } from "./colours.js";

const FREE = 0;
const CACHED = 1;
const OWNED = 2;
const SHARED = 3;
const MAX_CELL = 22;
const MIN_CELL = 4;
const ROOMY_CELL = 9; // from here on a cell shows how full its block is
const MARGIN = 4; // around the map, for the outlines of cells at its edge

export class BlockMap {
  constructor(canvas, marks, onPoint) {
    this.canvas = canvas;
    this.marks = marks;
    this.cell = 0;
    this.columns = 1;
    this.numBlocks = 0;
    this.blockSize = 16;
    this.numGroups = 1; // of layers: a row has a block of each for the same tokens
    this.selected = -1;
    this.marked = null; // colour number whose blocks are outlined
    this.#onPoint = onPoint;
    this.#listen();
    new ResizeObserver(() => this.redraw()).observe(canvas.parentElement);
  }

  #onPoint;
  #state = null;
  #drawn = new Int32Array(0);
  #kinds = new Uint8Array(0);
  #colours = new Int32Array(0);
  #refs = new Uint16Array(0);
  #filled = new Int16Array(0);
  #writing = new Uint8Array(0);
  #palette = new Map();

  resize(numBlocks, blockSize, numGroups) {
    this.numGroups = numGroups;
    if (numBlocks === this.numBlocks && blockSize === this.blockSize) return;
    this.numBlocks = numBlocks;
    this.blockSize = blockSize;
    this.#kinds = new Uint8Array(numBlocks);
    this.#colours = new Int32Array(numBlocks);
    this.#refs = new Uint16Array(numBlocks);
    this.#filled = new Int16Array(numBlocks);
    this.#writing = new Uint8Array(numBlocks);
    this.redraw();
  }

  show(state) {
    this.#state = state;
    this.#derive();
    this.#draw(false);
    this.#drawMarks();
  }

  redraw() {
    this.#palette.clear();
    this.#draw(true);
    this.#drawMarks();
  }

  mark(colour) {
    if (this.marked === colour) return;
    this.marked = colour;
    this.#drawMarks();
  }

  select(block) {
    this.selected = block;
    this.#drawMarks();
  }

  counts() {
    const counts = [0, 0, 0, 0];
    for (const kind of this.#kinds) counts[kind] += 1;
    return { free: counts[FREE], cached: counts[CACHED], owned: counts[OWNED], shared: counts[SHARED] };
  }

  // What is known of a block without asking: its kind, its owners' rows, and how full it is.
  describe(block) {
    const owners = [];
    for (const row of this.#state?.rows.values() ?? []) if (row.blocks.includes(block)) owners.push(row);
    return { kind: ["free", "cached", "in use", "shared"][this.#kinds[block]], owners, filled: this.#filled[block] };
  }

  #derive() {
    const { cached, rows } = this.#state;
    this.#refs.fill(0);
    this.#writing.fill(0);
    for (let block = 0; block < this.numBlocks; block += 1) this.#kinds[block] = cached[block] ? CACHED : FREE;
    for (const row of rows.values()) {
      const { blocks, computed, colour } = row;
      const last = Math.floor((computed - 1) / this.blockSize);
      for (let entry = 0; entry < blocks.length; entry += 1) {
        const block = blocks[entry];
        if (block < 0) continue; // behind a window, and given back
        const place = Math.floor(entry / this.numGroups);
        this.#refs[block] += 1;
        this.#kinds[block] = this.#refs[block] > 1 ? SHARED : OWNED;
        this.#colours[block] = colour;
        this.#filled[block] = Math.max(0, Math.min(this.blockSize, computed - place * this.blockSize));
        if (row.isWriting && place === last) this.#writing[block] = 1;
      }
    }
  }

  #layout() {
    const width = this.canvas.parentElement.clientWidth - 2 * MARGIN;
    const room = width * Math.min(480, Math.max(220, window.innerHeight * 0.4));
    const ideal = Math.floor(Math.sqrt(room / Math.max(1, this.numBlocks)));
    this.cell = Math.max(MIN_CELL, Math.min(MAX_CELL, ideal));
    this.canvas.dataset.cell = this.cell;
    this.columns = Math.max(1, Math.floor(width / this.cell));
    const height = Math.ceil(this.numBlocks / this.columns) * this.cell;
    return [width, Math.max(height, this.cell)];
  }

  #draw(isAll) {
    if (!this.numBlocks) return;
    const [width, height] = this.#layout();
    const wasFor = `${this.canvas.width} ${this.canvas.height}`;
    this.canvas.style.height = `${height}px`;
    const context = fit(this.canvas, width, height);
    if (isAll || wasFor !== `${this.canvas.width} ${this.canvas.height}` || this.#drawn.length !== this.numBlocks) {
      this.#drawn = new Int32Array(this.numBlocks).fill(-1);
      context.clearRect(0, 0, width, height);
    }
    for (let block = 0; block < this.numBlocks; block += 1) {
      const key = this.#key(block);
      if (this.#drawn[block] === key) continue;
      this.#drawn[block] = key;
      this.#drawCell(context, block);
    }
  }

  #key(block) {
    const kind = this.#kinds[block];
    if (kind < OWNED) return kind;
    const fill = this.cell >= ROOMY_CELL ? Math.ceil((8 * this.#filled[block]) / this.blockSize) : 8;
    const colour = kind === SHARED ? 0 : this.#colours[block] % 100_000;
    return (colour << 8) | (fill << 4) | (this.#writing[block] << 2) | kind;
  }

  #drawCell(context, block) {
    const { cell } = this;
    const gap = cell >= 14 ? 3 : cell >= 7 ? 2 : 1;
    const size = cell - gap;
    const x = (block % this.columns) * cell;
    const y = Math.floor(block / this.columns) * cell;
    const radius = cell >= 12 ? 3 : cell >= 7 ? 1.5 : 0;
    context.clearRect(x, y, cell, cell);
    const kind = this.#kinds[block];
    const paint = (style, top = 0) => {
      context.fillStyle = style;
      context.beginPath();
      if (radius) context.roundRect(x, y + top, size, size - top, radius);
      else context.rect(x, y + top, size, size - top);
      context.fill();
    };
    if (kind < OWNED) {
      paint(this.#variable(kind === CACHED ? "cached" : "free"));
      return;
    }
    const share = this.#filled[block] / this.blockSize;
    const colour = kind === SHARED ? this.#variable("shared") : this.#request(this.#colours[block], 1);
    if (cell >= ROOMY_CELL && share < 1) {
      paint(this.#variable("free"));
      paint(kind === SHARED ? colour : this.#request(this.#colours[block], 0.28));
      paint(colour, Math.min(size - 1, Math.round((1 - share) * size)));
    } else paint(colour);
    if (this.#writing[block] && kind === OWNED) {
      context.fillStyle = this.#variable("card");
      const dot = cell >= ROOMY_CELL ? 3 : 1.5;
      context.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
    }
  }

  #drawMarks() {
    if (!this.numBlocks) return;
    const [width, height] = this.#layout();
    this.marks.style.height = `${height + 2 * MARGIN}px`;
    const context = fit(this.marks, width + 2 * MARGIN, height + 2 * MARGIN);
    context.clearRect(0, 0, width + 2 * MARGIN, height + 2 * MARGIN);
    context.translate(MARGIN, MARGIN);
    const gap = this.cell >= 14 ? 3 : this.cell >= 7 ? 2 : 1;
    const box = (block, grow, thickness, style) => {
      const x = (block % this.columns) * this.cell - grow;
      const y = Math.floor(block / this.columns) * this.cell - grow;
      const size = this.cell - gap + 2 * grow;
      context.lineWidth = thickness;
      context.strokeStyle = style;
      context.strokeRect(x, y, size, size);
    };
    if (this.marked !== null && this.#state) {
      for (const row of this.#state.rows.values()) {
        if (row.colour !== this.marked) continue;
        for (const block of row.blocks) if (block >= 0) box(block, 1, 1.5, this.#variable("ink"));
      }
    }
    if (this.selected >= 0) box(this.selected, 2, 2, this.#variable("accent"));
  }

  #listen() {
    const at = (event) => {
      const bounds = this.canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - bounds.left) / this.cell);
      const line = Math.floor((event.clientY - bounds.top) / this.cell);
      const block = line * this.columns + column;
      return column < this.columns && block >= 0 && block < this.numBlocks ? block : -1;
    };
    this.canvas.addEventListener("pointermove", (event) => this.#point(at(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(at(event)));
    this.canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns };
      const from = Math.max(0, this.selected);
      const target = { Home: 0, End: this.numBlocks - 1 }[event.key] ?? (event.key in moves ? from + moves[event.key] : -1);
      if (target < 0 || target >= this.numBlocks) return;
      event.preventDefault();
      this.#point(this.selected < 0 ? 0 : target);
    });
  }

  #point(block) {
    if (block < 0 || block === this.selected) return;
    this.select(block);
    this.#onPoint(block);
  }

  #variable(name) {
    if (!this.#palette.has(name)) this.#palette.set(name, variable(name));
    return this.#palette.get(name);
  }

  #request(number, alpha) {
    const name = number * 2 + (alpha < 1);
    if (!this.#palette.has(name)) this.#palette.set(name, requestColour(number, alpha));
    return this.#palette.get(name);
  }
}
