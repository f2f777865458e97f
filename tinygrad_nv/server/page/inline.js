// The inline part of Markdown: text to a tree of {type, …}. Types: text, code, br, em, strong, del, link.
// Every step takes time in proportion to the text, and the tree is at most `DEPTH` deep, whatever the text.
// Raw HTML is text. Links go to http, https and mailto; others stay the text that they are.

const DEPTH = 16;
const MAX_TARGET = 2000;      // characters of a link's target
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };
const SPECIAL = /[\\`*_~[\]<&\n!h]/g;
const SPACE = /\s/;
const PUNCTUATION = /[\p{P}\p{S}]/u;

// The address of a link, or null for one that is not followed.
function address(target) {
  if (target.length > MAX_TARGET || !URL.canParse(target)) return null;
  const url = new URL(target);
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

// `open`: the text still grows, so that emphasis and code that nothing ends yet reach to its end.
export function inline(text, open = false) {
  const list = new Nodes(2 * text.length);
  const brackets = [];
  const runs = text.includes("`") ? backticks(text) : new Map();
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const plain = SPECIAL.exec(text)?.index ?? text.length;
    if (plain > at) list.text(text.slice(at, plain));
    at = plain;
    if (at < text.length) at = special(text, at, list, brackets, runs, open);
  }
  emphasis(list, list.first, open);
  return list.tree();
}

// Takes what begins at a special character; returns where it ends.
function special(text, at, list, brackets, runs, open) {
  const mark = text[at];
  if (mark === "\\") return escape(text, at, list);
  if (mark === "\n") { list.trimEnd(); list.push({ type: "br" }); return skip(text, at + 1, " "); }
  if (mark === "`") return code(text, at, list, runs, open);
  if (mark === "*" || mark === "_" || mark === "~") return delimiters(text, at, list);
  if (mark === "[") { brackets.push(list.push({ type: "text", text: "[" })); return at + 1; }
  if (mark === "!" && text[at + 1] === "[") {
    // an image is not loaded from elsewhere: it becomes a link
    brackets.push(list.push({ type: "text", text: "![" }));
    return at + 2;
  }
  if (mark === "]") return closing(text, at, list, brackets);
  if (mark === "<") return angle(text, at, list);
  if (mark === "&") return entity(text, at, list);
  if (mark === "h") return bare(text, at, list);
  list.text(mark);
  return at + 1;
}

function skip(text, at, characters) {
  while (at < text.length && characters.includes(text[at])) at++;
  return at;
}

function escape(text, at, list) {
  const next = text[at + 1];
  if (next === "\n") { list.push({ type: "br" }); return at + 2; }
  if (next && /[!-/:-@[-`{-~]/.test(next)) { list.text(next); return at + 2; }
  list.text("\\");
  return at + 1;
}

// The runs of backticks: length to the places where they begin, in order.
function backticks(text) {
  const runs = new Map();
  for (const run of text.matchAll(/`+/g)) {
    if (!runs.has(run[0].length)) runs.set(run[0].length, { places: [], next: 0 });
    runs.get(run[0].length).places.push(run.index);
  }
  return runs;
}

function code(text, at, list, runs, open) {
  const length = skip(text, at, "`") - at, same = runs.get(length);
  let end = -1;
  if (same) {
    while (same.places[same.next] < at + length) same.next++;
    end = same.places[same.next] ?? -1;
  }
  if (end < 0 && !(open && at + length < text.length)) { list.text("`".repeat(length)); return at + length; }
  const stop = end < 0 ? text.length : end;
  let inside = text.slice(at + length, stop).replaceAll("\n", " ");
  if (inside.startsWith(" ") && inside.endsWith(" ") && inside.trim()) inside = inside.slice(1, -1);
  list.push({ type: "code", text: inside });
  return end < 0 ? text.length : end + length;
}

// A run of * _ or ~ that may open or close emphasis, by CommonMark's rules of flanking.
function delimiters(text, at, list) {
  const mark = text[at], end = skip(text, at, mark), count = end - at;
  const before = text[at - 1] ?? " ", after = text[end] ?? " ";
  const edge = (each) => SPACE.test(each) || PUNCTUATION.test(each);
  const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || edge(before));
  const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || edge(after));
  const opens = mark === "_" ? left && (!right || PUNCTUATION.test(before)) : left;
  const closes = mark === "_" ? right && (!left || PUNCTUATION.test(after)) : right;
  if (mark === "~" && count !== 2) list.text(text.slice(at, end));
  else list.push({ type: "text", text: text.slice(at, end), mark, count, length: count, opens, closes });
  return end;
}

// "]": a link if "(target)" follows and a "[" is open.
function closing(text, at, list, brackets) {
  const opener = brackets.pop();
  const target = opener && text[at + 1] === "(" ? destination(text, at + 2, list) : null;
  const href = target && address(target.text);
  if (!href) { list.text("]"); return at + 1; }
  emphasis(list, opener.next, false);
  const children = list.cut(opener.next);
  opener.text = "";
  // links have no links in them
  brackets.length = 0;
  list.push({ type: "link", href, children: children.length ? children : [{ type: "text", text: href }],
    depth: 1 + deepest(children) });
  return target.end;
}

function destination(text, at, list) {
  at = skip(text, at, " \n");
  const limit = Math.min(text.length, at + Math.min(list.budget, MAX_TARGET) + 1);
  let end = at, deep = 0;
  if (text[at] === "<") {
    end = at + 1;
    while (end < limit && text[end] !== ">" && text[end] !== "\n") end++;
    list.budget -= end - at;
    if (text[end] !== ">") return null;
    const found = text.slice(at + 1, end);
    return titled(text, end + 1, found);
  }
  for (; end < limit && !SPACE.test(text[end]); end++) {
    if (text[end] === "(") deep++;
    else if (text[end] === ")" && deep-- === 0) break;
  }
  list.budget -= end - at;
  return titled(text, end, text.slice(at, end));
}

// After the target: a title, which is left out, and ")".
function titled(text, at, found) {
  at = skip(text, at, " \n");
  const quote = text[at];
  if (quote === '"' || quote === "'") {
    const end = text.slice(at + 1, at + 1 + MAX_TARGET).indexOf(quote);
    if (end < 0) return null;
    at = skip(text, at + end + 2, " \n");
  }
  return text[at] === ")" ? { text: found, end: at + 1 } : null;
}

// <https:…>, and the <br> of tables; all other HTML is text.
function angle(text, at, list) {
  const piece = text.slice(at, at + MAX_TARGET), found = /^<([a-z]+:[^\s<>]*)>/i.exec(piece);
  const href = found && address(found[1]);
  if (href) { list.push(link(href, found[1])); return at + found[0].length; }
  const line = /^<br ?\/?>/i.exec(piece);
  if (line) { list.push({ type: "br" }); return at + line[0].length; }
  list.text("<");
  return at + 1;
}

function entity(text, at, list) {
  const found = /^&(#?\w{2,5});/.exec(text.slice(at, at + 8));
  const known = found && Object.hasOwn(ENTITIES, found[1]) ? ENTITIES[found[1]] : null;
  list.text(known ?? "&");
  return at + (known ? found[0].length : 1);
}

function bare(text, at, list) {
  const piece = /\w/.test(text[at - 1] ?? "") ? "" : text.slice(at, at + MAX_TARGET);
  const found = /^https?:\/\/[^\s<>"`*[\]]+/.exec(piece);
  if (!found) { list.text("h"); return at + 1; }
  let shown = found[0].replace(/[.,;:!?'_~]{1,9}$/, "");
  while (shown.endsWith(")") && count(shown, ")") > count(shown, "(")) shown = shown.slice(0, -1);
  shown = shown.replace(/[.,]{1,9}$/, "");
  const href = address(shown);
  if (!href) { list.text("h"); return at + 1; }
  list.push(link(href, shown));
  return at + shown.length;
}

const count = (text, mark) => text.split(mark).length - 1;
const link = (href, text) => ({ type: "link", href, children: [{ type: "text", text }], depth: 1 });

// Pairs delimiters from `from` on, as CommonMark does: each closer takes the nearest opener of its kind.
function emphasis(list, from, open) {
  const openers = { "*": [], _: [], "~": [] };
  for (let node = from; node; node = node.next) {
    if (!node.mark) continue;
    const before = openers[node.mark];
    while (node.closes && node.count && before.length && pairs(before[before.length - 1], node)) {
      const opener = before[before.length - 1];
      const used = node.mark === "~" ? 2 : opener.count >= 2 && node.count >= 2 ? 2 : 1;
      // nothing that overlaps: openers in between stay text
      for (const other of Object.values(openers)) {
        while (other.length && other[other.length - 1].place > opener.place) other.pop();
      }
      const wrapped = list.wrap(opener, node, used, node.mark);
      if (!opener.count || !wrapped) before.pop();
      // what is outside of a node that is too deep would be deeper
      if (wrapped === null) for (const other of Object.values(openers)) other.length = 0;
    }
    if (node.opens && node.count) { node.place = list.places++; before.push(node); }
  }
  if (!open) return;
  // the last "**" that is open, of a text that grows
  const last = openers["*"].findLast((node) => node.count >= 2);
  if (last && last.next) list.wrap(last, null, 2, "*");
  const end = list.last;
  if (end && end.mark && end.count === end.text.length && !end.closes && !end.opens) end.text = "";
}

// CommonMark's rule of three: "**a*b" has no emphasis that its first star opens.
function pairs(opener, closer) {
  return !(opener.closes || closer.opens) || (opener.length + closer.length) % 3 !== 0
    || (opener.length % 3 === 0 && closer.length % 3 === 0);
}

const deepest = (nodes) => nodes.reduce((most, node) => Math.max(most, node.depth ?? 0), 0);

// Puts a node at the end of a list; texts that follow each other become one.
function gather(out, node) {
  const last = out.at(-1);
  if (node.type !== "text") out.push(node);
  else if (last?.type === "text") last.text += node.text;
  else if (node.text) out.push(node);
}

// A doubly linked list of nodes: pieces of it are wrapped without moving the others.
class Nodes {
  first = null;
  last = null;
  places = 0;

  // `budget`: characters that may be read as targets of links; where those are links, each is read once
  constructor(budget) { this.budget = budget; }

  push(node) {
    node.prev = this.last;
    node.next = null;
    if (this.last) this.last.next = node; else this.first = node;
    this.last = node;
    return node;
  }

  text(text) {
    if (this.last && this.last.type === "text" && this.last.plain) this.last.text += text;
    else this.push({ type: "text", text, plain: true });
  }

  trimEnd() { if (this.last && this.last.plain) this.last.text = this.last.text.replace(/ {1,99}$/, ""); }

  // Removes `node` and all behind it.
  cut(node) {
    const out = [];
    if (!node) return out;
    this.last = node.prev;
    if (this.last) this.last.next = null; else this.first = null;
    for (let each = node; each; each = each.next) gather(out, each);
    return out;
  }

  // Puts what is between two delimiters (`closer` null: to the end) into one node, which is returned; false
  // where nothing is between them, null where the node would be too deep.
  wrap(opener, closer, used, mark) {
    const children = [];
    for (let node = opener.next; node !== closer; node = node.next) gather(children, node);
    if (!children.length) return false;
    const depth = 1 + deepest(children);
    if (depth > DEPTH) return null;
    const type = mark === "~" ? "del" : used === 2 ? "strong" : "em";
    const node = { type, children, depth, prev: opener, next: closer };
    opener.next = node;
    if (closer) closer.prev = node; else this.last = node;
    for (const each of closer ? [opener, closer] : [opener]) {
      each.count -= used;
      each.text = each.text.slice(used);
    }
    return node;
  }

  tree() { return this.cut(this.first); }
}
