// The list of conversations: the latest first, with a menu for each.

import { $, download, iconButton, make, notice } from "./dom.js";
import { settings } from "./settings.js";
import { asJSON, asMarkdown, LIMIT, title } from "./store.js";

const DAY_MS = 86400000;

export class Side {
  // `open(conversation)` shows one, `removed(conversation)` and `restored` follow deletion and its undoing.
  constructor(store, { open, removed, renamed, restored }) {
    Object.assign(this, { store, open, removed, renamed, restored });
    $("menu-rename").addEventListener("click", () => this.act((each) => this.rename(each)));
    $("menu-markdown").addEventListener("click", () => this.act((each) => download(...asMarkdown(each))));
    $("menu-json").addEventListener("click", () => this.act((each) => download(...asJSON(each, settings()))));
    $("menu-delete").addEventListener("click", () => this.act((each) => this.remove(each)));
    $("menu").addEventListener("keydown", (event) => {
      const items = [...$("menu").children], step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      items.at((items.indexOf(document.activeElement) + step) % items.length).focus();
    });
  }

  draw(shown, running) {
    const today = new Date().setHours(0, 0, 0, 0), groups = new Map();
    for (const each of this.store.list()) {
      const name = each.updated >= today ? "Today"
        : each.updated >= today - 6 * DAY_MS ? "Last seven days" : "Older";
      groups.set(name, [...groups.get(name) ?? [], each]);
    }
    const item = (each) => this.item(each, each === shown, running(each));
    $("conversations").replaceChildren(...[...groups].map(([name, some]) =>
      make("section", {}, make("h3", {}, name), make("ul", {}, some.map(item)))));
    const count = this.store.all.size;
    $("storage").textContent = count
      ? `${count} kept in this browser · ${(this.store.used() / (1 << 20)).toFixed(1)} of ${LIMIT >> 20} MB`
      : "Conversations are kept in this browser only.";
  }

  item(conversation, shown, running) {
    const link = make("button", { type: "button", className: "conversation", title: conversation.title,
      onclick: () => this.open(conversation) }, conversation.title);
    if (shown) link.setAttribute("aria-current", "true");
    if (running) link.append(make("span", { className: "hidden" }, ", answering"));
    const more = iconButton("more", `Actions for ${conversation.title}`, () => this.menu(conversation, more));
    more.setAttribute("aria-haspopup", "true");
    return make("li", { data: { id: conversation.id }, className: running ? "running" : "" }, link, more);
  }

  menu(conversation, button) {
    this.of = conversation;
    const menu = $("menu"), place = button.getBoundingClientRect();
    menu.showPopover();
    menu.style.left = `${Math.max(8, Math.min(place.left, innerWidth - menu.offsetWidth - 8))}px`;
    menu.style.top = `${Math.max(8, Math.min(place.bottom + 4, innerHeight - menu.offsetHeight - 8))}px`;
    menu.firstElementChild.focus();
  }

  act(task) {
    $("menu").hidePopover();
    task(this.of);
  }

  rename(conversation) {
    const item = document.querySelector(`#conversations li[data-id="${CSS.escape(conversation.id)}"]`);
    const field = make("input", { value: conversation.title, maxLength: 120, aria: { label: "Title" } });
    let done = false;
    const end = (keep) => {
      if (done) return;
      done = true;
      const text = field.value.trim();
      if (keep && text !== conversation.title) {
        // an empty title is the first line again
        conversation.named = Boolean(text);
        conversation.title = text || title(conversation.messages[0]?.content ?? "");
      }
      this.renamed(conversation);
      document.querySelector(`#conversations li[data-id="${CSS.escape(conversation.id)}"] button`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.select();
  }

  remove(conversation) {
    this.store.remove(conversation.id);
    this.removed(conversation);
    notice(`“${conversation.title}” is deleted.`, "Undo", () => this.restored(conversation));
  }
}

