// Conversations in the browser's storage: one entry each, so that tabs do not overwrite each other's.
// A conversation: {id, title, named, updated, messages}. A message: {role, content}; an answer may also have
// reasoning, calls, model, end, figures. Storage that is off, full or damaged costs nothing but the keeping.

const PREFIX = "tinygrad-nv:";
const TALK = `${PREFIX}conversation:`;
export const LIMIT = 4 << 20;      // characters in all; browsers allow about 5 million
const TITLE = 60;

export function read(name, fallback = null) {
  try { return JSON.parse(localStorage.getItem(PREFIX + name)) ?? fallback; } catch { return fallback; }
}

// Keeps a value; null removes it. Returns whether that was possible.
export function write(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch { return false; }
}

export class Conversations {
  constructor() {
    this.all = new Map();
    this.sizes = new Map();
    this.unsaved = new Set();
    try { for (const name of Object.keys(localStorage)) if (name.startsWith(TALK)) this.load(name); }
    catch { /* storage is off */ }
  }

  load(name) {
    const text = localStorage.getItem(name);
    const found = checked(text);
    if (!found || TALK + found.id !== name) return null;
    this.sizes.set(found.id, text.length);
    // the object that is shown stays the same
    const known = this.all.get(found.id);
    if (known) return Object.assign(known, found);
    this.all.set(found.id, found);
    return found;
  }

  // The latest first.
  list() { return [...this.all.values()].sort((one, other) => other.updated - one.updated); }

  // Characters in use.
  used() { return [...this.sizes.values()].reduce((sum, size) => sum + size, 0); }

  create() {
    const id = [...crypto.getRandomValues(new Uint32Array(3))].map((part) => part.toString(36)).join("");
    return { id, title: "", named: false, updated: Date.now(), messages: [] };
  }

  // Keeps a conversation. Returns what prevents it, in words, or null.
  save(conversation) {
    const { id } = conversation;
    if (!conversation.messages.length) return null;
    conversation.updated = Date.now();
    if (!conversation.named) conversation.title = title(conversation.messages[0].content);
    this.all.set(id, conversation);
    const text = JSON.stringify(conversation);
    const room = this.used() - (this.sizes.get(id) ?? 0) + text.length <= LIMIT;
    try {
      if (!room) throw new Error("full");
      localStorage.setItem(TALK + id, text);
      this.sizes.set(id, text.length);
      this.unsaved.delete(id);
      return null;
    } catch {
      const first = !this.unsaved.has(id);
      this.unsaved.add(id);
      return first ? this.problem() : null;
    }
  }

  problem() {
    const used = (this.used() / (1 << 20)).toFixed(1);
    const full = `full (${used} of ${LIMIT >> 20} MB) or off`;
    return `This conversation is not kept: the browser's storage is ${full}. Save it, or delete others.`;
  }

  remove(id) {
    this.all.delete(id);
    this.sizes.delete(id);
    this.unsaved.delete(id);
    try { localStorage.removeItem(TALK + id); } catch { /* storage is off */ }
  }

  // What another tab changed: returns the id, or null.
  changed(event) {
    if (!event.key?.startsWith(TALK)) return null;
    const id = event.key.slice(TALK.length);
    if (event.newValue === null) { this.all.delete(id); this.sizes.delete(id); }
    else this.load(event.key);
    return id;
  }
}

function checked(text) {
  let found;
  try { found = JSON.parse(text); } catch { return null; }
  const whole = typeof found?.id === "string" && typeof found.title === "string"
    && Number.isFinite(found.updated) && Array.isArray(found.messages) && found.messages.every((each) => typeof each?.content === "string"
      && (each.role === "user" || each.role === "assistant"));
  return whole ? found : null;
}

export function title(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  return line.length > TITLE ? `${line.slice(0, TITLE - 1).trimEnd()}…` : line || "Untitled";
}

// **** export ****

const filename = (conversation) =>
  conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";

// Messages as the API takes them, with the settings of the page.
export function asJSON(conversation, settings) {
  const { system, ...parameters } = settings;
  // what is undefined is left out
  const messages = conversation.messages.map(({ role, content, reasoning, calls }) =>
    ({ role, content, reasoning, tool_calls: calls }));
  const model = conversation.messages.findLast((each) => each.model)?.model;
  if (system) messages.unshift({ role: "system", content: system });
  const updated = new Date(conversation.updated).toISOString();
  const text = JSON.stringify({ title: conversation.title, updated, model, parameters, messages }, null, 2);
  return [`${filename(conversation)}.json`, "application/json", text];
}

export function asMarkdown(conversation) {
  const messages = conversation.messages.map(({ role, content, model }) =>
    `## ${role === "user" ? "You" : model ?? "Assistant"}\n\n${content.trim()}\n`);
  const text = `# ${conversation.title}\n\n${messages.join("\n")}`;
  return [`${filename(conversation)}.md`, "text/markdown", text];
}
