// Markdown as elements, while it streams: blocks that are finished are drawn once, the last one anew.
// Everything is made with createElement and text nodes, so that no text of a model becomes HTML.

import { blocks } from "./blocks.js";
import { copyButton, make } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline } from "./inline.js";

const LONG_CODE_LINES = 12;      // code of more lines is a region that screen readers list

export class Markdown {
  // Draws into `root`.
  constructor(root) {
    this.root = root;
    this.offset = 0;         // where the last block begins
    this.tail = null;        // the element of the last block, and what it shows
    this.code = null;
  }

  // The text so far, which only grows. `done`: nothing more comes.
  update(text, done = false) {
    const rest = text.slice(this.offset);
    const found = blocks(rest);
    if (!found.length) return;
    const last = found.pop();
    for (const block of found) this.put(draw(block, false));
    if (found.length) {
      this.offset += startOfLine(rest, last.from);
      this.tail = this.code = null;
    }
    if (!done && this.code && last.type === "code" && last.text.startsWith(this.code.data)) {
      // code grows in place: its selection and its scroll position stay
      this.code.appendData(last.text.slice(this.code.length));
      return;
    }
    this.put(draw(last, !done));
    this.tail = this.root.lastElementChild;
    this.code = !done && last.type === "code" ? this.tail.querySelector("code").firstChild : null;
  }

  put(element) {
    if (this.tail) this.tail.replaceWith(element);
    else this.root.append(element);
    this.tail = null;
  }
}

function startOfLine(text, line) {
  let at = 0;
  for (; line > 0; line--) at = text.indexOf("\n", at) + 1;
  return at;
}

function draw(block, open) {
  switch (block.type) {
    // below the headings of the page
    case "heading": return make(`h${Math.min(block.level + 2, 6)}`, {}, spans(block.text, open));
    case "code": return code(block, open);
    case "quote": return make("blockquote", {}, block.children.map((child) => draw(child, open)));
    case "table": return table(block);
    case "list": return list(block, open);
    case "rule": return make("hr");
    default: return make("p", {}, spans(block.text, open));
  }
}

function list(block, open) {
  const items = block.items.map((children, at) => {
    const last = open && at === block.items.length - 1;
    const drawn = children.map((child) => !block.loose && child.type === "paragraph"
      ? spans(child.text, last) : [draw(child, last)]);
    return task(make("li", {}, drawn.flat()));
  });
  const made = make(block.ordered ? "ol" : "ul", {}, items);
  if (block.ordered && block.number !== 1) made.start = block.number;
  return made;
}

// "[ ] …" and "[x] …" are boxes of a list of tasks.
function task(item) {
  item.normalize();
  const first = item.firstChild?.nodeName === "P" ? item.firstChild.firstChild : item.firstChild;
  const found = first?.nodeType === Node.TEXT_NODE && /^\[([ xX])\] /.exec(first.data);
  if (!found) return item;
  first.deleteData(0, found[0].length);
  first.before(make("input", { type: "checkbox", disabled: true, checked: found[1] !== " ",
    aria: { label: found[1] === " " ? "open" : "done" } }));
  item.className = "task";
  return item;
}

function table({ head, align, rows }) {
  const row = (name, cells) => make("tr", {}, cells.map((text, at) =>
    make(name, align[at] ? { className: `align-${align[at]}` } : {}, spans(text, false))));
  return make("div", { className: "table", tabIndex: 0, role: "region", aria: { label: "Table" } },
    make("table", {}, make("thead", {}, row("th", head)),
      make("tbody", {}, rows.map((cells) => row("td", cells)))));
}

// Code has colours once it is complete.
function code({ language, text }, open) {
  const parts = open ? [[null, text]] : highlight(text, language);
  const inside = make("code", {}, parts.map(([kind, part]) =>
    kind ? make("span", { className: kind }, part) : document.createTextNode(part)));
  const label = language.slice(0, 30) || "text";
  const role = text.split("\n", LONG_CODE_LINES + 1).length > LONG_CODE_LINES ? "region" : "group";
  return make("figure", { className: "code" },
    make("figcaption", {}, make("span", {}, label), copyButton("Copy code", () => inside.textContent)),
    make("pre", { tabIndex: 0, role, aria: { label: `Code: ${label}` } }, inside));
}

const spans = (text, open) => inline(text, open).map((node) => span(node, false));

function span(node, linked) {
  const inside = () => node.children.map((child) => span(child, linked || node.type === "link"));
  switch (node.type) {
    case "br": return make("br");
    case "code": return make("code", {}, node.text);
    case "em": case "strong": case "del": return make(node.type, {}, inside());
    case "link": {
      // links have no links in them
      if (linked) return make("span", {}, inside());
      return make("a", { href: node.href, target: "_blank", rel: "noopener noreferrer nofollow" }, inside());
    }
    default: return document.createTextNode(node.text);
  }
}
