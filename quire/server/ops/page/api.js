// The server as this page sees it: the key, JSON questions, and chats that stream. The key lives in this tab only.

const KEY_NAME = "quire-key";
let key = sessionStorage.getItem(KEY_NAME) ?? "";

export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function hasKey() {
  return key !== "";
}

export function setKey(value) {
  key = value;
  sessionStorage.setItem(KEY_NAME, value);
}

function headers(more = {}) {
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

async function failure(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not one of ours: a proxy's page, say */ }
  return new HttpError(response.status, message);
}

export async function getJson(path, timeoutMs = 8000) {
  const response = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(timeoutMs), cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Streams a chat. `onStart(requestId)` is called with the head, `onEvent` with each chunk.
export async function streamChat(body, { onStart, onEvent, signal }) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, timings: true, draft_runs: true }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  onStart(response.headers.get("x-request-id") ?? "");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new HttpError(0, chunk.error.message);
      onEvent(chunk);
    }
  }
}
