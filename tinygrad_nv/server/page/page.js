// The page talks to the same endpoints as every other client: /v1/models, /v1/chat/completions (a stream),
// /metrics and /health, once a second while they are seen. This file puts the others together, and has the
// composer, the two panels that fold away, the theme, the key and the keyboard. Read in this order: dom.js,
// api.js, store.js, settings.js; blocks.js and inline.js, which read Markdown, highlight.js and
// markdown.js, which draw it; message.js, talk.js, side.js, plots.js. theme.js comes before all of them.

import { healthy, keepKey, key, metrics, models } from "./api.js";
import { $, notice } from "./dom.js";
import { number } from "./message.js";
import { Plots, seen } from "./plots.js";
import { chosen, offer, setUp } from "./settings.js";
import { Side } from "./side.js";
import { Conversations, read, write } from "./store.js";
import { Talk } from "./talk.js";

const POLL_MS = 1000;
const DRAFT_MS = 300;
const store = new Conversations();
const wide = matchMedia("(min-width: 1180px)");

// **** conversations ****

const talk = new Talk({
  changed(conversation) {
    // one that was deleted while it was answered stays deleted
    if (conversation.deleted) return;
    const problem = store.save(conversation);
    if (problem) notice(problem);
    if (!conversation.messages.length) store.remove(conversation.id);
    draw();
  },
  refused(failure) { if (failure.status === 401) askKey(true); },
});
const side = new Side(store, {
  open(conversation) {
    show(conversation);
    if (wide.matches) return;
    fold("side", false);
    $("log").focus();
  },
  renamed(conversation) { const problem = store.save(conversation); if (problem) notice(problem); draw(); },
  removed(conversation) {
    talk.stop(conversation);
    conversation.deleted = true;
    if (conversation === talk.conversation) show(store.list()[0] ?? store.create());
    else draw();
  },
  restored(conversation) { delete conversation.deleted; store.save(conversation); show(conversation); },
});

function draw() {
  side.draw(talk.conversation, (each) => talk.runs.has(each.id));
  document.title = talk.conversation.title ? `${talk.conversation.title} · tinygrad-nv` : "tinygrad-nv";
}

function show(conversation) {
  keepDraft();
  talk.show(conversation);
  write("shown", store.all.has(conversation.id) ? conversation.id : null);
  const draft = read(draftName());
  $("text").value = typeof draft === "string" ? draft : "";
  grow();
  draw();
}

function begin() {
  show(store.create());
  fold("side", wide.matches && isOpen("side"));
  $("text").focus();
}

$("clear").addEventListener("click", begin);
$("side-new").addEventListener("click", begin);
addEventListener("storage", (event) => {
  const id = store.changed(event);
  if (!id) return;
  if (id === talk.conversation.id && store.all.has(id) && !talk.running) talk.redraw();
  draw();
});
addEventListener("pagehide", () => {
  keepDraft();
  for (const id of talk.runs.keys()) if (store.all.has(id)) store.save(store.all.get(id));
});

// **** the composer ****

let drafting = 0;
const draftName = () => `draft:${store.all.has(talk.conversation.id) ? talk.conversation.id : "new"}`;

function keepDraft() {
  clearTimeout(drafting);
  if (talk.conversation) write(draftName(), $("text").value.trim() ? $("text").value : null);
}

function grow() {
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
  $("send").disabled = !text.value.trim();
}

$("text").addEventListener("input", () => {
  grow();
  clearTimeout(drafting);
  drafting = setTimeout(keepDraft, DRAFT_MS);
});
addEventListener("resize", grow);
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || talk.running) return;
  $("text").value = "";
  keepDraft();
  grow();
  talk.send(text);
  write("shown", talk.conversation.id);
});
$("stop").addEventListener("click", () => { talk.stop(); $("text").focus(); });

// **** the keyboard ****

$("text").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("form").requestSubmit(); }
  if (event.key === "ArrowUp" && !$("text").value && talk.editLast()) event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if ($("key-dialog").open || $("menu").matches(":popover-open") || event.defaultPrevented) return;
  if (event.key === "Escape") {
    if (!wide.matches && (isOpen("side") || isOpen("panel"))) closeDrawers();
    else talk.stop();
  }
  const typing = /^(?:INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName);
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    closeDrawers();
    $("text").focus();
  }
});

// **** panels: columns of a wide window, drawers of a narrow one ****

const isOpen = (name) => document.body.classList.contains(`${name}-open`);

function fold(name, open) {
  document.body.classList.toggle(`${name}-open`, open);
  $(`${name}-toggle`).setAttribute("aria-expanded", open);
  $(name).inert = !open;
  const drawer = !wide.matches && (isOpen("side") || isOpen("panel"));
  $("centre").inert = drawer;
  $("veil").hidden = !drawer;
}

function toggle(name) {
  const open = !isOpen(name);
  if (open && !wide.matches) fold(name === "side" ? "panel" : "side", false);
  fold(name, open);
  if (wide.matches) write(`${name}-folded`, open ? null : true);
  else if (open) $(name).querySelector("button, input, select").focus();
}

function closeDrawers() {
  if (wide.matches) return;
  for (const name of ["side", "panel"]) {
    if (!isOpen(name)) continue;
    fold(name, false);
    $(`${name}-toggle`).focus();
  }
}

function arrange() {
  for (const name of ["side", "panel"]) fold(name, wide.matches && !read(`${name}-folded`));
}

for (const name of ["side", "panel"]) {
  $(`${name}-toggle`).addEventListener("click", () => toggle(name));
  $(`${name}-close`).addEventListener("click", () => toggle(name));
}
$("veil").addEventListener("click", closeDrawers);
wide.addEventListener("change", arrange);

// **** the theme ****

for (const choice of document.querySelectorAll("input[name=theme]")) {
  choice.checked = choice.value === (document.documentElement.dataset.theme ?? "auto");
  choice.addEventListener("change", () => {
    if (choice.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice.value;
    // theme.js reads the bare word
    try { localStorage.setItem("tinygrad-nv:theme", choice.value); } catch { /* for this visit alone */ }
  });
}

// **** the server ****

let locked = false;          // it wants a key, and has not got the right one

function askKey(again) {
  locked = true;
  state("wants an API key", false);
  $("key-wrong").hidden = !again || !key();
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key").focus();
}

$("key-dialog").addEventListener("close", () => {
  keepKey($("key").value.trim());
  $("key").value = "";
  learn();
});
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

function state(text, good) {
  // said once, not every second
  if ($("health").textContent !== text) $("health").textContent = text;
  $("health").className = good ? "good" : "bad";
}

async function learn() {
  try {
    offer(await models());
    locked = false;
    greet();
  } catch (failure) { if (failure.status === 401) askKey(true); }
}

function greet() {
  const card = chosen();
  $("greeting").textContent = card ? card.id : "tinygrad-nv";
  $("context").textContent = card?.max_model_len
    ? `A conversation may have ${number(card.max_model_len)} tokens.` : "";
}

const plots = new Plots($("figures"));
async function watch() {
  if (document.visibilityState === "visible") {
    try {
      if (seen()) plots.add(await metrics());
      else plots.restart();
      const good = await healthy();
      if (good && !locked && !$("model").length) await learn();
      if (!locked) state(good ? "ready" : "stopping", good);
    } catch { state("not reachable", false); }
  } else plots.restart();
  setTimeout(watch, POLL_MS);
}

arrange();
setUp(greet);
show(store.all.get(read("shown")) ?? store.create());
learn();
watch();
if (matchMedia("(hover: hover)").matches) $("text").focus();
