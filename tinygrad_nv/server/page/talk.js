// The conversation that is shown, and the answers that are being written, also of conversations that are
// not. A turn without an answer is no part of the conversation: its words go back to where they were typed.
// `end` of an answer is "lost" until it has ended otherwise, also where the page is left in the middle.

import { chat, Failure } from "./api.js";
import { $, announce, notice } from "./dom.js";
import { AnswerView, errorView, UserView } from "./message.js";
import { blame, settings } from "./settings.js";

const NEAR = 80;             // pixels from the end at which the view follows the text
const FRAME_MS = 16;
const SHARE = 4;             // times the time of a drawing pass before the next: long answers are drawn less
const SHORTEST_S = 0.02;     // from the first token to the last; less gives no rate
const SPOKEN = 1500;         // characters of an answer that are announced

export class Talk {
  // `changed(conversation)` after each change to be kept, `refused(failure)` for errors the page acts on.
  constructor({ changed, refused }) {
    Object.assign(this, { changed, refused });
    this.runs = new Map();       // id of a conversation: its answer that is being written
    this.views = [];
    const log = $("log");
    log.addEventListener("scroll", () => {
      this.follow = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
      $("latest").hidden = this.follow;
    }, { passive: true });
    $("latest").addEventListener("click", () => this.toEnd());
  }

  get running() { return this.runs.get(this.conversation.id) ?? null; }

  show(conversation) {
    this.conversation = conversation;
    this.redraw();
    this.toEnd();
  }

  redraw() {
    const { messages } = this.conversation, run = this.running;
    this.views = messages.map((message) => this.view(message));
    for (const view of this.views) view.update?.(run?.message === view.message);
    $("messages").replaceChildren(...this.views.map((view) => view.element));
    $("empty").hidden = messages.length > 0;
    this.buttons();
  }

  view(message) {
    return message.role === "user" ? new UserView(message, (view) => this.edit(view))
      : new AnswerView(message, () => this.retry());
  }

  toEnd() {
    this.follow = true;
    $("latest").hidden = true;
    $("log").scrollTop = $("log").scrollHeight;
  }

  buttons() {
    const run = this.running;
    $("send").hidden = Boolean(run);
    $("stop").hidden = !run;
    $("messages").classList.toggle("running", Boolean(run));
  }

  // **** what a person asks for ****

  // Sends a message; false while an answer is being written.
  send(text) {
    if (this.running) return false;
    const before = this.conversation.messages;
    this.answer([...before, { role: "user", content: text }], before, (shown) => {
      if (!shown) return;
      const written = $("text").value.trim();
      $("text").value = written ? `${text}\n\n${written}` : text;
      $("text").dispatchEvent(new Event("input"));
    });
    return true;
  }

  // Another answer in place of the last one.
  retry() {
    const before = this.conversation.messages;
    if (this.running || !before.length) return;
    const last = before.findLastIndex((message) => message.role === "user");
    this.answer(before.slice(0, last + 1), before, null);
  }

  // A message in other words; what came after it is left out.
  edit(view) {
    if (this.running) return;
    const before = this.conversation.messages, at = before.indexOf(view.message);
    view.edit((text) => this.resend(before, at, text));
  }

  resend(before, at, text) {
    const { conversation } = this;
    if (this.running) return;
    this.answer([...before.slice(0, at), { role: "user", content: text }], before, (shown) => {
      // the old words are there again, with the new ones in their editor
      if (shown) this.views[at].edit((again) => this.resend(before, at, again), text);
    });
    if (at + 2 < before.length) {
      notice("Later messages were left out.", "Undo", () => {
        this.stop(conversation);
        conversation.messages = before;
        this.changed(conversation);
        if (this.conversation === conversation) this.show(conversation);
      });
    }
  }

  editLast() {
    const view = this.views.findLast((each) => each instanceof UserView);
    if (view) this.edit(view);
    return Boolean(view);
  }

  stop(conversation = this.conversation) { this.runs.get(conversation.id)?.controller.abort(); }

  // **** an answer ****

  // Gets an answer to `messages`. Without one the conversation is as `before`, and `failed(shown)` is called.
  async answer(messages, before, failed) {
    const { conversation } = this;
    const { system, ...parameters } = settings();
    const message = { role: "assistant", content: "", model: $("model").value, end: "lost" };
    const run = { controller: new AbortController(), message, begun: performance.now(), first: null };
    this.runs.set(conversation.id, run);
    conversation.messages = [...messages, message];
    this.changed(conversation);
    this.show(conversation);
    const body = { model: message.model, stream: true, ...parameters,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages.map(sent)] };
    let failure = null;
    try { for await (const chunk of chat(body, run.controller.signal)) this.take(run, chunk, conversation); }
    catch (error) {
      if (error.name === "AbortError") message.end = "stopped";
      else {
        failure = error instanceof Failure ? error : new Failure(`The page failed: ${error.message}`);
      }
    }
    clearTimeout(run.timer);
    if (this.runs.get(conversation.id) === run) this.runs.delete(conversation.id);
    if (conversation.messages.at(-1) === message) this.finish(conversation, message, before, failure, failed);
    this.buttons();
  }

  // An answer has ended, or there is none.
  finish(conversation, message, before, failure, failed) {
    const shown = this.conversation === conversation;
    const some = message.content.trim() || message.reasoning || message.calls;
    if (!some && !message.end) message.end = "empty";
    const kept = some || message.end === "empty" || message.end === "length";
    if (kept) {
      if (shown) this.draw(message, false);
    } else {
      conversation.messages = before;
      if (shown) this.redraw();
      failed?.(shown);
    }
    this.changed(conversation);
    if (failure) {
      if (shown) {
        $("messages").append(errorView(failure, !kept && failed));
        $("empty").hidden = true;
      }
      else notice(`${conversation.title || "A conversation"}: ${failure.message}`);
      announce(`That did not work. ${failure.message}`);
      blame(failure.param);
      this.refused(failure);
    } else if (kept && shown) {
      const word = message.end === "stopped" ? "Stopped" : "Answer";
      announce(`${word}: ${message.content.trim().slice(0, SPOKEN)}`);
    }
    if (shown && this.follow) this.toEnd();
  }

  // A chunk of the stream.
  take(run, chunk, conversation) {
    const { message } = run, now = performance.now();
    const [choice] = chunk.choices;
    const delta = choice?.delta ?? {};
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (run.first === null && (delta.content || thought || delta.tool_calls)) run.first = now;
    if (thought) message.reasoning = (message.reasoning ?? "") + thought;
    if (delta.content) {
      // 0 where both came at once
      if (message.reasoning) message.thought ??= now - run.first;
      message.content += delta.content;
    }
    for (const call of delta.tool_calls ?? []) {
      const calls = message.calls ??= [];
      if (call.id) calls[call.index] = { id: call.id, type: "function", function: { ...call.function } };
      else calls[call.index].function.arguments += call.function.arguments;
    }
    if (choice?.finish_reason) message.end = choice.finish_reason === "length" ? "length" : undefined;
    if (chunk.usage && run.first !== null) {
      const tokens = chunk.usage.completion_tokens;
      // the last chunk tells the usage alone: its time is none of a token
      if (choice) run.last = now;
      const seconds = (run.last - run.first) / 1000;
      const rate = seconds > SHORTEST_S ? (tokens - 1) / seconds : 0;
      message.figures = { tokens, rate, first: run.first - run.begun, prompt: chunk.usage.prompt_tokens };
    }
    this.schedule(run, conversation);
  }

  schedule(run, conversation) {
    run.gained = true;
    run.timer ??= setTimeout(() => {
      run.gained = false;
      const begun = performance.now();
      if (this.conversation === conversation) this.draw(run.message, true);
      run.timer = setTimeout(() => {
        run.timer = null;
        if (run.gained) this.schedule(run, conversation);
      }, Math.max(FRAME_MS, SHARE * (performance.now() - begun)));
    }, 0);
  }

  draw(message, running) {
    this.views.find((view) => view.message === message)?.update(running);
    if (this.follow) $("log").scrollTop = $("log").scrollHeight;
  }
}

// A message as the server takes it.
function sent({ role, content, calls }) {
  const whole = calls?.length && calls.every(({ function: { arguments: given } }) => {
    try { return typeof JSON.parse(given) === "object"; } catch { return false; }
  });
  return { role, content, ...(whole ? { tool_calls: calls } : {}) };
}

