// A message of a conversation as an element: text, reasoning, tool calls, how it ended, figures, actions.

import { copyButton, iconButton, make } from "./dom.js";
import { Markdown } from "./markdown.js";

const ENDS = {
  length: "Cut here: no more tokens were allowed. Raise “Max tokens” in the settings, or leave it empty.",
  stopped: "Stopped.",
  lost: "Incomplete: the answer broke off.",
  empty: "The answer is empty.",
};

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const duration = (ms) => ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000, 1)} s`;

// "40 tokens · 38.2 tokens/s · first after 85 ms"
function figures({ tokens, rate, first }) {
  const parts = [`${number(tokens)} ${tokens === 1 ? "token" : "tokens"}`];
  if (rate) parts.push(`${number(rate, rate < 100 ? 1 : 0)} tokens/s`);
  if (first !== null) parts.push(`first after ${duration(first)}`);
  return parts.join(" · ");
}

// What you said. `edit(view)` is called to change it.
export class UserView {
  constructor(message, edit) {
    this.message = message;
    this.text = make("div", { className: "text" }, message.content);
    this.tools = make("div", { className: "tools" }, copyButton("Copy message", () => message.content),
      iconButton("edit", "Edit message", () => edit(this)));
    this.element = make("li", { className: "user" }, make("h3", { className: "hidden" }, "You"),
      this.text, this.tools);
  }

  // Puts an editor in place of the text; `send(text)` when it is done.
  edit(send, text = this.message.content) {
    if (this.editor) return this.editor.querySelector("textarea").focus();
    const area = make("textarea", { value: text, rows: Math.min(12, text.split("\n").length + 1),
      aria: { label: "Edit your message" } });
    const close = () => { this.editor.replaceWith(this.text); this.editor = null; };
    const cancel = () => { close(); this.tools.lastElementChild.focus(); };
    const done = () => { if (area.value.trim()) { close(); send(area.value.trim()); } };
    this.editor = make("form", { className: "editor" }, area, make("div", { className: "row" },
      make("button", { type: "button", className: "plain", onclick: cancel }, "Cancel"),
      make("button", { type: "submit", className: "primary" }, "Send again")));
    this.editor.addEventListener("submit", (event) => { event.preventDefault(); done(); });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
    });
    this.text.replaceWith(this.editor);
    area.focus();
    area.setSelectionRange(text.length, text.length);
  }
}

// An answer, which may still grow. `retry(view)` is called to get another.
export class AnswerView {
  constructor(message, retry) {
    this.message = message;
    this.text = make("div", { className: "text markdown" });
    this.markdown = new Markdown(this.text);
    this.calls = make("div", { className: "calls" });
    this.end = make("p", { className: "end" });
    this.small = make("small");
    this.tools = make("div", { className: "tools" }, copyButton("Copy answer", () => message.content.trim()),
      iconButton("retry", "Answer again", () => retry(this), "quiet-button retry"), this.small);
    this.heading = make("h3", { className: "hidden" }, `${message.model ?? "Model"} answers`);
    this.element = make("li", { className: "assistant" },
      this.heading, this.text, this.calls, this.end, this.tools);
  }

  // Draws what the message has gained.
  update(running) {
    const { message } = this;
    this.element.classList.toggle("busy", running);
    this.element.classList.toggle("waiting", running && !message.content && !message.reasoning);
    if (message.reasoning) this.think(running && !message.content && !message.calls?.length);
    // leading blank is no part of an answer
    this.markdown.update(message.content.trimStart(), !running);
    if (message.calls?.length) this.calls.replaceChildren(...message.calls.map(call));
    this.end.textContent = running ? "" : ENDS[message.end] ?? "";
    if (message.figures?.tokens) {
      this.small.textContent = figures(message.figures);
      this.small.title = `after ${number(message.figures.prompt)} tokens of the conversation`;
    }
    return this;
  }

  // The reasoning, folded once it has ended unless it was opened or closed by hand.
  think(running) {
    if (!this.thinking) {
      this.thinking = make("details", { className: "thinking" }, make("summary"),
        make("div", { className: "text markdown" }));
      this.thoughts = new Markdown(this.thinking.lastElementChild);
      this.heading.after(this.thinking);
    }
    const { thought } = this.message;
    this.thinking.classList.toggle("now", running);
    this.thinking.firstElementChild.textContent = running ? "Thinking …"
      : thought !== undefined ? `Thought for ${duration(thought)}` : "Thought";
    this.thoughts.update(this.message.reasoning.trimStart(), !running);
  }
}

function call({ function: { name, arguments: given } }) {
  let shown = given;
  try { shown = JSON.stringify(JSON.parse(given), null, 2); } catch { /* still growing, or cut */ }
  const label = `Arguments of ${name}`;
  return make("figure", { className: "code call" },
    make("figcaption", {}, make("span", {}, "Calls ", make("b", {}, name)),
      copyButton("Copy arguments", () => shown)),
    make("pre", { tabIndex: 0, role: "group", aria: { label } }, make("code", {}, shown)));
}

// What went wrong, in its parts.
export function errorView({ found, expected, fix }, returned) {
  const parts = [["Found", found], ["Expected", expected], ["To fix", fix]].filter(([, text]) => text);
  const list = parts.length > 1
    ? make("dl", {}, ...parts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]))
    : make("p", {}, found);
  return make("li", { className: "error" }, make("h3", {}, "That did not work"), list,
    ...(returned ? [make("p", { className: "end" }, "Your message is back in its field.")] : []));
}
