// The chat: one conversation, streamed, each reply in the colour of its blocks.

import { requestColour } from "./colours.js";
import { HttpError, streamChat } from "./api.js";
import { Pictures, thumbnail } from "./pictures.js";

const IDEAS = [
  "Tell me a story about a brave knight.",
  "Tell me a story about a clever fox.",
  "Tell me a story about a little girl who lost her kite.",
];
const MANY = 16;

export class Chat {
  // `colourOf(requestId)`: the number of a request's colour once the engine has shown it, or null.
  constructor(colourOf, onMark, onUnauthorized) {
    this.#colourOf = colourOf;
    this.#onMark = onMark;
    this.#onUnauthorized = onUnauthorized;
    this.#log = document.getElementById("messages");
    this.#prompt = document.getElementById("prompt");
    this.#send = document.getElementById("send");
    this.#welcome = document.getElementById("welcome");
    const note = document.getElementById("picture-note");
    this.#pictures = new Pictures((text) => {
      note.textContent = text;
      note.hidden = text === "";
    });
    this.#listen();
  }

  #colourOf;
  #onMark;
  #onUnauthorized;
  #log;
  #prompt;
  #send;
  #welcome;
  #pictures;
  #turns = [];
  #replies = [];
  #running = null;

  // Give replies the colours that their requests have on the map.
  paint() {
    for (const reply of this.#replies) {
      const colour = reply.requestId ? this.#colourOf(reply.requestId) : null;
      if (colour === null) continue;
      reply.colour = colour;
      reply.element.style.setProperty("--hue", requestColour(colour));
    }
  }

  #listen() {
    document.getElementById("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) this.#running.abort();
      else this.#ask();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#running) this.#ask();
    });
    document.getElementById("many").addEventListener("click", () => this.#askMany());
    document.getElementById("chat-clear").addEventListener("click", () => this.#clear());
    const ideas = document.getElementById("ideas");
    for (const idea of IDEAS) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = idea;
      button.addEventListener("click", () => {
        this.#prompt.value = idea;
        this.#ask();
      });
      ideas.append(button);
    }
  }

  #clear() {
    this.#running?.abort();
    this.#turns = [];
    this.#replies = [];
    this.#pictures.clear();
    this.#log.replaceChildren(this.#welcome);
    this.#prompt.focus();
  }

  #options() {
    const temperature = document.getElementById("temperature").value; // empty: as the model's files wish
    return {
      max_tokens: Number(document.getElementById("max-tokens").value) || 200,
      ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    };
  }

  async #ask() {
    const text = this.#prompt.value.trim();
    if ((!text && this.#pictures.isEmpty) || this.#pictures.isReading) return;
    this.#prompt.value = "";
    const urls = this.#pictures.take();
    const turn = { role: "user", content: contentOf(text, urls) };
    this.#say("user", text, urls);
    const reply = this.#reply();
    this.#running = new AbortController();
    this.#send.textContent = "Stop";
    try {
      const answer = await this.#stream(reply, [...this.#turns, turn], this.#running.signal);
      // pictures that were refused would be refused again with everything that follows
      if (answer || urls.length === 0) this.#turns.push(turn, { role: "assistant", content: answer });
    } finally {
      this.#running = null;
      this.#send.textContent = "Send";
    }
  }

  async #askMany() {
    if (this.#pictures.isReading) return;
    const text = this.#prompt.value.trim() || IDEAS[2];
    const urls = this.#pictures.take();
    this.#say("user", `${text}  ×${MANY}`, urls);
    const body = { ...this.#options(), messages: [{ role: "user", content: contentOf(text, urls) }] };
    const note = this.#reply();
    let numDone = 0;
    let numTokens = 0;
    const began = performance.now();
    const tell = () => { note.text.textContent = `${numDone} of ${MANY} answered, ${numTokens} tokens`; };
    tell();
    const one = async (seed) => {
      await streamChat({ ...body, seed }, {
        onStart() {},
        onEvent(chunk) { numTokens += chunk.usage?.completion_tokens ?? 0; },
      });
      numDone += 1;
      tell();
    };
    const ends = await Promise.allSettled(Array.from({ length: MANY }, (_, seed) => one(seed)));
    note.element.classList.remove("streaming");
    const failed = ends.find((end) => end.status === "rejected");
    const elapsed = (performance.now() - began) / 1000;
    note.meta.textContent = failed ? failed.reason.message : `${Math.round(numTokens / elapsed)} tokens/s together`;
  }

  async #stream(reply, messages, signal) {
    let answer = "";
    try {
      await streamChat({ ...this.#options(), messages }, {
        signal,
        onStart: (requestId) => { reply.requestId = requestId; },
        onEvent: (chunk) => {
          const piece = chunk.choices?.[0]?.delta?.content ?? "";
          answer += piece;
          reply.text.append(...marked(piece, chunk.choices?.[0]?.draft_runs ?? []));
          if (chunk.timings) reply.timings = chunk.timings;
          if (chunk.usage) reply.usage = chunk.usage;
          this.#follow();
        },
      });
      reply.meta.textContent = summary(reply);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      reply.meta.textContent = isStopped ? "stopped" : error.message;
      reply.meta.classList.toggle("error", !isStopped);
      if (error instanceof HttpError && error.status === 401) this.#onUnauthorized();
    }
    reply.element.classList.remove("streaming");
    this.#follow();
    return answer;
  }

  #say(role, text, urls = []) {
    this.#welcome.remove();
    const element = document.createElement("div");
    element.className = `message ${role}`;
    if (urls.length > 0) {
      const shown = document.createElement("div");
      shown.className = "thumbnails";
      shown.append(...urls.map((url, place) => thumbnail(url, `Picture ${place + 1}`)));
      element.append(shown);
    }
    element.append(text);
    this.#log.append(element);
    this.#follow(true);
  }

  #reply() {
    const element = document.createElement("div");
    element.className = "message reply streaming";
    const text = document.createElement("span");
    text.className = "text";
    const meta = document.createElement("span");
    meta.className = "meta";
    element.append(text, meta);
    const reply = { element, text, meta, requestId: "", colour: null, timings: null, usage: null };
    element.addEventListener("pointerenter", () => this.#onMark(reply.colour));
    element.addEventListener("pointerleave", () => this.#onMark(null));
    this.#log.append(element);
    this.#replies.push(reply);
    this.#follow(true);
    return reply;
  }

  // Stay at the end, unless the reader has gone up.
  #follow(isForced = false) {
    const log = this.#log;
    if (isForced || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
  }
}

// A text alone stays a string, which every model's template reads.
function contentOf(text, urls) {
  if (urls.length === 0) return text;
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// A piece of an answer, with its runs of accepted draft tokens marked. Runs count characters, as the server does.
function marked(piece, runs) {
  const characters = [...piece];
  const nodes = [];
  let place = 0;
  for (const [start, end] of runs) {
    const run = document.createElement("mark");
    run.className = "drafted";
    run.title = "drafted, and accepted in one step";
    run.append(characters.slice(start, end).join(""));
    nodes.push(characters.slice(place, start).join(""), run);
    place = end;
  }
  return [...nodes, characters.slice(place).join("")];
}

function summary({ usage, timings }) {
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  const numDrafted = usage?.completion_tokens_details?.accepted_prediction_tokens;
  if (numDrafted) parts.push(`${numDrafted} drafted`);
  if (timings?.tokens_per_second) parts.push(`${Math.round(timings.tokens_per_second)} tokens/s`);
  if (timings?.first_token_ms) parts.push(`first after ${Math.round(timings.first_token_ms)} ms`);
  if (timings?.cached_tokens) parts.push(`${timings.cached_tokens} of ${usage?.prompt_tokens ?? "?"} prompt tokens cached`);
  return parts.join(" · ");
}
