// The blocks of Markdown: text to a list of {type, …}. Types: paragraph, heading, code, quote, list, table,
// rule. `from` and `to` are the lines of a block. As in CommonMark with GitHub's tables, but: text that is
// indented is no code, "---" is a rule also below a paragraph, and a quote has ">" on each line. All but the
// last block of a text stay as they are when it grows. What is deeper than `DEPTH` is a paragraph.

const DEPTH = 12;

export function blocks(text) {
  return parse(text.split("\n").map((line) => line.replace(/\r$/, "")), 0);
}

function parse(lines, depth) {
  const out = [];
  if (depth > DEPTH) {
    const text = lines.join("\n").trim();
    return text ? [{ type: "paragraph", text, from: 0, to: lines.length }] : [];
  }
  for (let at = 0; at < lines.length;) {
    if (blank(lines[at])) { at++; continue; }
    const found = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? quote(lines, at, depth)
      ?? table(lines, at) ?? list(lines, at, depth) ?? paragraph(lines, at);
    found.from = at;
    at = found.to;
    out.push(found);
  }
  return out;
}

const blank = (line) => !line.trim();

// The columns in front of a line's text; a tab is four.
function indent(line) {
  let width = 0;
  for (const each of line) {
    if (each === " ") width++;
    else if (each === "\t") width += 4 - width % 4;
    else break;
  }
  return width;
}

// The line without its first `columns` columns of blank.
function outdent(line, columns) {
  let at = 0, width = 0;
  while (width < columns && at < line.length && (line[at] === " " || line[at] === "\t")) {
    width += line[at] === "\t" ? 4 - width % 4 : 1;
    at++;
  }
  return " ".repeat(Math.max(0, width - columns)) + line.slice(at);
}

const FENCE = /^\s*(`{3,}|~{3,})(.*)$/;

function fence(lines, at) {
  const found = FENCE.exec(lines[at]);
  if (!found || (found[1][0] === "`" && found[2].includes("`"))) return null;
  const width = indent(lines[at]), content = [];
  let to = at + 1, open = true;
  for (; to < lines.length && open; to++) {
    const end = FENCE.exec(lines[to]);
    if (end && end[1][0] === found[1][0] && end[1].length >= found[1].length && !end[2].trim()) open = false;
    else content.push(outdent(lines[to], width));
  }
  return { type: "code", language: found[2].trim().split(/\s/)[0], text: content.join("\n"), open, to };
}

function heading(lines, at) {
  const found = /^ {0,3}(#{1,6})(?:[ \t]|$)/.exec(lines[at]);
  if (!found) return null;
  let text = lines[at].slice(found[0].length).trim(), end = text.length;
  while (text[end - 1] === "#") end--;
  if (end === 0 || /[ \t]/.test(text[end - 1])) text = text.slice(0, end).trim();
  return { type: "heading", level: found[1].length, text, to: at + 1 };
}

function rule(lines, at) {
  const marks = lines[at].replace(/[ \t]/g, "");
  return /^(?:-{3,}|\*{3,}|_{3,})$/.test(marks) ? { type: "rule", to: at + 1 } : null;
}

const QUOTE = /^ {0,3}>/;

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const inside = [];
  let to = at;
  for (; to < lines.length && QUOTE.test(lines[to]); to++) inside.push(lines[to].replace(/^ {0,3}> ?/, ""));
  return { type: "quote", children: parse(inside, depth + 1), to };
}

// The cells of a table's row: "\|" and `|` within code do not end one.
function cells(line) {
  let text = line.trim();
  if (text.startsWith("|")) text = text.slice(1);
  const out = [];
  let cell = "", code = false;
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\" && text[at + 1] === "|") { cell += "|"; at++; continue; }
    if (text[at] === "`") code = !code && text.indexOf("`", at + 1) > 0;
    if (text[at] === "|" && !code) { out.push(cell.trim()); cell = ""; }
    else cell += text[at];
  }
  if (cell.trim() || !text.endsWith("|")) out.push(cell.trim());
  return out;
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length) return null;
  const second = lines[at + 1];
  if (!second.includes("-") || !/^[ \t|:-]+$/.test(second)) return null;
  const under = cells(second), head = cells(lines[at]);
  if (under.length !== head.length || !under.every((cell) => /^:?-+:?$/.test(cell))) return null;
  const align = under.map((cell) => !cell.endsWith(":") ? null : cell.startsWith(":") ? "center" : "right");
  const rows = [];
  let to = at + 2;
  for (; to < lines.length && lines[to].includes("|"); to++) {
    rows.push(cells(lines[to]).slice(0, head.length));
  }
  return { type: "table", head, align, rows, to };
}

const MARKER = /^([ \t]*)([-*+]|\d{1,9}[.)])([ \t]+|$)/;

function marker(line) {
  const found = MARKER.exec(line);
  if (!found || rule([line], 0)) return null;
  const start = indent(found[1]), ordered = found[2].length > 1;
  const gap = found[3].length > 4 || !found[3] ? 1 : found[3].length;
  return { start, content: start + found[2].length + gap, kind: found[2].at(-1), ordered,
    number: ordered ? parseInt(found[2], 10) : null, rest: line.slice(found[0].length) };
}

// An item has the lines that are indented as its text is, or a list that is indented less but more than the
// item's marker (as models often write one), and lines that go on with its paragraph.
function list(lines, at, depth) {
  const first = marker(lines[at]);
  if (!first) return null;
  const items = [];
  let to = at, loose = false;
  for (;;) {
    const mark = to < lines.length ? marker(lines[to]) : null;
    if (!mark || mark.kind !== first.kind || mark.start > first.start + 3) break;
    const inside = [mark.rest];
    let gap = false, end = ++to, fenced = FENCE.exec(mark.rest)?.[1];
    for (; to < lines.length; to++) {
      const line = lines[to], width = indent(line);
      if (blank(line)) { gap = true; inside.push(""); continue; }
      const nested = !fenced && width >= mark.start + 2 && marker(line);
      if (width < mark.content && !nested && (gap || fenced || marker(line) || begins(lines, to))) break;
      const content = outdent(line, nested && width < mark.content ? width : mark.content);
      const ticks = FENCE.exec(content);
      if (ticks && !fenced) fenced = ticks[1];
      else if (ticks && ticks[1].startsWith(fenced) && !ticks[2].trim()) fenced = null;
      inside.push(content);
      gap = false;
      end = to + 1;
    }
    const next = to < lines.length ? marker(lines[to]) : null;
    if (gap && next && next.kind === first.kind && next.start <= first.start + 3) loose = true;
    const children = parse(inside, depth + 1);
    if (children.filter((child) => child.type === "paragraph").length > 1) loose = true;
    items.push(children);
    if (!next) to = end;
  }
  return { type: "list", ordered: first.ordered, number: first.number, items, loose, to };
}

// Whether a line ends the paragraph in front of it.
function begins(lines, at) {
  const mark = marker(lines[at]);
  return Boolean(FENCE.test(lines[at]) || heading(lines, at) || rule(lines, at) || QUOTE.test(lines[at])
    || (mark && (!mark.ordered || (mark.rest && mark.number === 1))) || table(lines, at));
}

function paragraph(lines, at) {
  const text = [lines[at]];
  let to = at + 1;
  if (/^\s*={3,}\s*$/.test(lines[to] ?? "")) {
    return { type: "heading", level: 1, text: lines[at].trim(), to: to + 1 };
  }
  for (; to < lines.length && !blank(lines[to]) && !begins(lines, to); to++) text.push(lines[to]);
  return { type: "paragraph", text: text.map((line) => line.trimStart()).join("\n").trimEnd(), to };
}
