// The server's endpoints: models, conversations (a stream), metrics and health.
// A failure is a `Failure`: what was found, what is expected, what to do, and the field it is about.

const LOST = "The connection to the server is lost";
const POLL_LIMIT_MS = 5000;     // a server that answers later is not reachable
const KEY = "tinygrad-nv:key";

export class Failure extends Error {
  // The server writes "found; expected: …; to fix: …", or "found, expected …".
  constructor(message, { status = 0, param = null, wait = 0 } = {}) {
    super(message);
    Object.assign(this, { status, param, wait });
    const [rest, fix = ""] = halves(message, "; to fix: ");
    const [found, expected = ""] = halves(rest, /; expected: |,\s+expected /);
    Object.assign(this, { found, expected, fix });
    if (!fix && wait) this.fix = `send it again in ${wait} s`;
  }
}

function halves(text, separator) {
  const at = typeof separator === "string" ? text.indexOf(separator) : text.search(separator);
  if (at < 0) return [text];
  const length = typeof separator === "string" ? separator.length : separator.exec(text)[0].length;
  return [text.slice(0, at), text.slice(at + length)];
}

// The key is kept until the tab is closed.
export function key() {
  try { return sessionStorage.getItem(KEY) ?? ""; } catch { return ""; }
}

export function keepKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

async function request(path, options = {}) {
  const given = key();
  const headers = { ...options.headers, ...(given ? { Authorization: `Bearer ${given}` } : {}) };
  let response;
  try { response = await fetch(path, { ...options, headers }); }
  catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(LOST);
  }
  if (response.ok) return response;
  const text = await response.text();
  let error = null;
  try { error = JSON.parse(text).error; } catch { /* not the server's: a proxy's */ }
  const wait = Number(response.headers.get("Retry-After")) || 0;
  throw new Failure(error?.message ?? `The answer's status is ${response.status}: ${text.slice(0, 200)}`,
    { status: response.status, param: error?.param ?? null, wait });
}

// [{id, parent, max_model_len, …}], the adapters' with a parent.
export async function models() { return (await (await request("v1/models")).json()).data; }

const soon = () => ({ signal: AbortSignal.timeout(POLL_LIMIT_MS) });

export async function metrics() { return (await request("metrics", soon())).text(); }

// Whether the server takes requests; throws where it cannot be reached.
export async function healthy() { return (await fetch("health", soon())).ok; }

// The chunks of an answer.
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", { method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let piece;
    try { piece = await reader.read(); }
    catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(LOST);
    }
    if (piece.done) throw new Failure(LOST);
    const events = (held + piece.value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.message, { param: chunk.error.param });
      yield chunk;
    }
  }
}
