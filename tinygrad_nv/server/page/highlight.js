// Colours for code: comments, strings, numbers and keywords, by the lexical rules that languages share.
// Languages that are not known here have none. The text is cut, never changed.

const MAX = 20000;      // characters; longer code has no colours
const WORDS = new Set(`abstract alignas and as assert async await auto bool break case catch char class const
  constexpr continue def default defer del delete do double elif else enum except export extends extern false
  finally float fn for from func function global go goto if impl implements import in inline instanceof int
  interface is lambda let long loop match mod module mut namespace new nil not null nonlocal operator or package
  pass private protected pub public raise return self short signed sizeof static struct super switch template
  this throw trait true try type typedef typename typeof union unsafe unsigned use using var virtual void
  volatile while with yield None True False then fi done esac local`.split(/\s+/));
const SQL = new Set(`select from where and or not insert into update delete group order by having join left on as
  create table values limit null is in union all distinct case when then else end`.split(/\s+/));
// regular expressions of comments and strings
const HASH = String.raw`(?<!\S)#[^\n]*`;
const SLASH = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
const DASH = String.raw`--[^\n]*`;
const TRIPLE = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)`;
const DOUBLE = String.raw`"(?:\\.|[^"\\\n])*"?`;
const SINGLE = String.raw`'(?:\\.|[^'\\\n])*'?`;
const TICK = "`(?:\\\\.|[^`\\\\])*`?";
const LETTER = String.raw`'(?:\\.[^'\n]{0,8}|[^'\\\n])'`;
const FAMILIES = [
  ["python py python3 starlark", HASH, `${TRIPLE}|${DOUBLE}|${SINGLE}`],
  ["bash sh shell zsh yaml yml toml ruby rb r perl dockerfile makefile", HASH, `${DOUBLE}|${SINGLE}`],
  ["javascript js jsx typescript ts tsx json php", SLASH, `${DOUBLE}|${SINGLE}|${TICK}`],
  ["c cpp c++ cuda cu h java rust rs go swift kotlin scala csharp cs zig ptx", SLASH, `${DOUBLE}|${LETTER}`],
  ["sql", DASH, `${DOUBLE}|${SINGLE}`],
];
const KINDS = ["comment", "string", "number", "word"];
const PATTERNS = new Map(FAMILIES.flatMap(([names, comment, string]) => {
  const rest = String.raw`(?<![\w.])(\d[\w.]*)|([A-Za-z_]\w*)`;
  return names.split(" ").map((name) => [name, new RegExp(`(${comment})|(${string})|${rest}`, "g")]);
}));

// [[kind, text], …], where kind is null or one of `KINDS`.
export function highlight(text, language) {
  const pattern = PATTERNS.get(language.toLowerCase());
  if (!pattern || text.length > MAX) return [[null, text]];
  const out = [], sql = language.toLowerCase() === "sql";
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    const kind = KINDS[found.slice(1).findIndex((group) => group !== undefined)];
    if (kind === "word" && !(sql ? SQL.has(found[0].toLowerCase()) : WORDS.has(found[0]))) continue;
    if (found.index > at) out.push([null, text.slice(at, found.index)]);
    out.push([kind, found[0]]);
    at = found.index + found[0].length;
  }
  if (at < text.length) out.push([null, text.slice(at)]);
  return out;
}
