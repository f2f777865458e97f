// The page talks to the same endpoints as every other client: /v1/models, /v1/chat/completions (a stream), and
// once a second /metrics, whose last minute is drawn. Nothing is kept but the API key, until the tab is closed.
"use strict";

const $ = (id) => document.getElementById(id);
const SECONDS = 60;
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const LOST = "The connection to the server is lost.";
let messages = [];           // of the conversation that is shown
let running = null;          // the AbortController of an answer that is being written

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function show(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function settings() {
  const out = {};
  for (const name of NUMBERS) if ($(name).value !== "") out[name] = Number($(name).value);
  return out;
}

// **** a conversation ****

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw new Error(LOST);
}

async function ask(text) {
  const system = $("system").value.trim();
  const said = messages;     // "New conversation" begins another list, also in the middle of an answer
  said.push({ role: "user", content: text });
  const turn = show("user", text);
  const item = show("assistant busy", "");
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  let answer = "", tokens = 0, note = "", end = "";
  const begun = performance.now();
  let first = null;
  try {
    const body = { model: $("model").value, stream: true, stream_options: { include_usage: true }, ...settings(),
      messages: system ? [{ role: "system", content: system }, ...said] : said };
    const response = await fetch("v1/chat/completions",
      { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      const choice = chunk.choices[0];
      if (choice && choice.finish_reason === "length") end = " · cut: no more tokens were allowed";
      if (!choice || !choice.delta.content) continue;
      first = first ?? performance.now();
      answer += choice.delta.content;
      const list = $("messages"), low = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
      item.textContent = answer;
      if (low) list.scrollTop = list.scrollHeight;
    }
    const rate = tokens > 1 ? (tokens - 1) / (performance.now() - first) * 1000 : 0;
    if (first !== null) note = `${tokens} tokens · first after ${(first - begun).toFixed(0)} ms · ${rate.toFixed(1)} tokens/s${end}`;
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else if (said === messages) show("error", error instanceof TypeError ? LOST : error.message);
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    item.classList.remove("busy");
  }
  if (note) {
    const small = document.createElement("small");
    small.textContent = note;
    item.append(small);
  }
  if (answer) said.push({ role: "assistant", content: answer });
  else {
    // a turn without an answer is no part of the conversation; its words can be sent again
    said.pop();
    item.remove();
    turn.remove();
    if (said === messages && !$("text").value) $("text").value = text;
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
$("stop").addEventListener("click", () => { if (running) running.abort(); $("text").focus(); });
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  $("messages").replaceChildren();
  $("text").focus();
});

// **** the engine ****

const FIGURES = [
  { id: "running", label: "Running", value: (now) => now.num_requests_running, least: 4 },
  { id: "queued", label: "Queued", value: (now) => now.num_requests_waiting, least: 4 },
  { id: "kv", label: "KV cache in use", value: (now) => now.kv_cache_usage_perc * 100, least: 100, unit: " %" },
  { id: "rate", label: "Tokens/s", least: 10,     // of a server that was started anew, none at first
    value: (now, then) => then && now.generation_tokens_total >= then.generation_tokens_total ? (now.generation_tokens_total - then.generation_tokens_total) / (now.at - then.at) : 0 },
];

for (const figure of FIGURES) {
  figure.past = [];
  const box = document.createElement("div");
  box.className = "figure";
  box.innerHTML = `<span>${figure.label}</span><b id="${figure.id}">–</b>
    <svg viewBox="0 0 ${SECONDS} 36" preserveAspectRatio="none" role="img" aria-label="${figure.label}, the last minute">
    <path class="area"></path><path class="line"></path></svg>`;
  $("figures").append(box);
  figure.box = box;
}

function draw(figure) {
  const top = Math.max(figure.least, ...figure.past) * 1.05;
  const start = SECONDS - figure.past.length;
  const points = figure.past.map((value, i) => `${start + i + 1},${(34 - 32 * value / top).toFixed(2)}`);
  figure.box.querySelector(".line").setAttribute("d", `M${points.join("L")}`);
  figure.box.querySelector(".area").setAttribute("d", `M${start + 1},36L${points.join("L")}L${SECONDS},36Z`);
}

// "prefix:name{labels} value", of all models and without histograms
function parse(text) {
  const out = { at: performance.now() / 1000 };
  for (const [, name, value] of text.matchAll(/^\w+:(\w+)\{[^}]*\} (\S+)$/gm)) out[name] = Number(value);
  return out;
}

let then = null;
async function watch() {
  try {
    const response = await fetch("metrics");
    const now = parse(await response.text());
    for (const figure of FIGURES) {
      const value = figure.value(now, then);
      $(figure.id).textContent = value.toFixed(value < 10 && !Number.isInteger(value) ? 1 : 0) + (figure.unit ?? "");
      figure.past = [...figure.past, value].slice(-SECONDS);
      draw(figure);
    }
    then = now;
    const health = await fetch("health");
    if (health.ok && !locked && !$("model").length) await models();
    if (!locked) state(health.ok ? "ready" : "stopping", health.ok);
  } catch { state("not reachable", false); }
  setTimeout(watch, 1000);
}

function state(text, good) {
  // said once, not every second
  if ($("health").textContent !== text) $("health").textContent = text;
  $("health").className = `state ${good ? "good" : "bad"}`;
}

let locked = false;          // the server wants a key, and has not got the right one
async function models() {
  const response = await fetch("v1/models", { headers: headers() });
  locked = response.status === 401;
  if (locked) {
    $("key").focus();
    return state("wants an API key", false);
  }
  $("model").replaceChildren(...(await response.json()).data.map((model) => new Option(model.id)));
}

$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value); models(); });
models().catch(() => {});
watch();
