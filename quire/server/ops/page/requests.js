// The lists of who runs and who waits, and why. Rows are kept and updated, so that pointing at one is calm.

import { requestColour } from "./colours.js";

const MAX_SHOWN = 60;

// Without what only makes it unique; ids that the server made up are cut like a commit's.
export function shortName(name) {
  return name.replace(/\.[0-9a-f]+(#\d+)?$/, "$1").replace(/^(req_[0-9a-f]{8})[0-9a-f]{16}/, "$1");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 99.5 ? `${value.toFixed(value < 9.95 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

export class RequestList {
  constructor(element, nobody, onMark) {
    this.#element = element;
    this.#nobody = nobody;
    this.#onMark = onMark;
    element.addEventListener("pointerleave", () => onMark(null));
  }

  #element;
  #nobody;
  #onMark;
  #items = new Map();

  // `entries`: {name, colour, count, why, share}
  show(entries) {
    const shown = entries.slice(0, MAX_SHOWN);
    const names = new Set(shown.map((entry) => entry.name));
    for (const [name, item] of this.#items) {
      if (names.has(name)) continue;
      item.remove();
      this.#items.delete(name);
    }
    shown.forEach((entry, place) => {
      const item = this.#items.get(entry.name) ?? this.#make(entry);
      this.#fill(item, entry);
      if (this.#element.children[place] !== item) this.#element.insertBefore(item, this.#element.children[place] ?? null);
    });
    const rest = entries.length - shown.length;
    this.#note(rest > 0 ? `and ${rest} more` : shown.length ? "" : this.#nobody);
  }

  #note(text) {
    this.#element.querySelector(".nobody")?.remove();
    if (!text) return;
    const item = document.createElement("li");
    item.className = "nobody";
    item.textContent = text;
    this.#element.append(item);
  }

  #make(entry) {
    const item = document.createElement("li");
    item.tabIndex = 0;
    for (const [tag, name] of [["span", "chip"], ["span", "name"], ["span", "count"], ["span", "why"], ["span", "bar"]]) {
      const part = document.createElement(tag);
      part.className = name;
      item.append(part);
    }
    item.lastChild.append(document.createElement("i"));
    item.addEventListener("pointerenter", () => this.#onMark(entry.colour));
    item.addEventListener("focus", () => this.#onMark(entry.colour));
    item.addEventListener("blur", () => this.#onMark(null));
    this.#items.set(entry.name, item);
    return item;
  }

  #fill(item, entry) {
    const [chip, name, count, why, bar] = item.children;
    const hue = entry.colour === null ? "var(--cached)" : requestColour(entry.colour);
    chip.style.setProperty("--hue", hue);
    bar.style.setProperty("--hue", hue);
    name.textContent = shortName(entry.name);
    name.title = entry.name;
    count.textContent = entry.count;
    why.textContent = entry.why ?? "";
    why.hidden = !entry.why;
    bar.hidden = entry.share === undefined;
    bar.firstChild.style.width = `${100 * Math.min(1, entry.share ?? 0)}%`;
  }
}
