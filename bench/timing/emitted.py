"""Texts that templates emit, and whether two commits emit the same but for names and comments.

    python bench/timing/emitted.py --write FILE.json        every kernel of emitted_cases.py
    python bench/timing/emitted.py --compare A.json B.json  exit code 1 where any differ

Before a change, write one file; after it, another; compare. No compiler, GPU or particular CPU is needed, and
neither the environment, nor tuned schedules, nor BEAM matters. Of each case the file has its schedule, the
facts of its launches, and the normalised text with its SHA-256. A difference says which of these differ:

    schedule    another default, or another wording of the same (`--leave-out schedule`)
    launch      grid, threads, shared memory, cluster, tensor maps, workspace, flags, PDL, parts
    text        the PTX or C; up to 12 lines of a unified diff show where first

Normalised text has no comments, no declarations of registers, and numbers in the place of names, counted by
first appearance: of PTX registers (by type), labels, parameters, shared memory and the entry; of C whatever
the text declares, scope by scope. What a header declares keeps its name in the kernels (`--renamed OLD=NEW`
where that changed) and is one case for each header.
"""
from __future__ import annotations

import argparse
import base64
import difflib
import hashlib
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import tinygrad_nv
from bench.lib.measure import each
from bench.timing.emitted_cases import Case, cases, emit
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.errors import NVError
from tinygrad_nv.tile.kernel import BackwardKernel, GemmKernel, TileKernel

WHAT = ("schedule", "launch", "text")
LINES = 12      # of a diff
ENTRY = "entry"
Record = dict[str, Any]

# **** PTX ****

# what declares a name, and what it is called then: lines without their indentation
DECLARED = ((re.compile(r"\.visible \.entry (?P<name>\w+)"), ENTRY),
            (re.compile(r"\.param .*?(?P<name>[\w$]+)(?:\[\d+\])?[,)]*$"), "param"),
            (re.compile(r"(?:\.extern )?\.shared .*?(?P<name>[\w$]+)\[\d*\];$"), "shared"),
            (re.compile(r"(?P<name>[\w$]+):$"), "$label"))
REGISTERS = re.compile(r"\.reg \.(\w+) (%[\w$]+)(?:<(\d+)>)?;$")
NAME = re.compile(r"(?<![\w.$%])[%$]?[A-Za-z_][\w$]*(?![\w$.])")  # no part of an opcode


def ptx_text(text: str) -> str:
    """PTX without comments and declarations of registers, with numbers in the place of names."""
    lines = [line for line in map(str.strip, _strip_comments(text).splitlines()) if line]
    kinds: dict[str, str] = {}
    for line in lines:
        if found := REGISTERS.match(line):
            kind, name, many = found.groups()
            for each_name in [f"{name}{i}" for i in range(int(many))] if many else [name]:
                kinds[each_name] = f"%{kind}_"
        for pattern, called in DECLARED:
            if found := pattern.match(line): kinds[found["name"]] = called
    numbers: Counter[str] = Counter()
    made: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        name = found[0]
        if name not in kinds: return name
        if name not in made:
            made[name] = f"{kinds[name]}{numbers[kinds[name]]}"
            numbers[kinds[name]] += 1
        return made[name]
    return "\n".join(NAME.sub(number, line) for line in lines if not REGISTERS.match(line)) + "\n"


def _strip_comments(text: str) -> str:
    strings_or_comments = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    return strings_or_comments.sub(lambda found: found[0] if found[0][0] == '"' else " ", text)


# **** C ****

TOKEN = re.compile(r'#(?:\\\n|[^\n])*|"(?:\\.|[^"\\])*"|0[xX][\da-fA-F.]+(?:[pP][+-]?\d+)?\w*|'
                   r"\.?\d[\w.]*(?:(?<=[eE])[+-]\w+)?|[A-Za-z_]\w*|"
                   r"->|\+\+|--|&&|\|\||(?:<<|>>|[-+*/%&|^!<>=])=|<<|>>|\S")
WORD = re.compile(r"[A-Za-z_]")
WITH_ARGUMENTS = {"__attribute__", "__typeof__", "VECTOR"}
QUALIFIERS = {"const", "static", "inline", "extern", "restrict", "volatile", "typedef", "INLINE", "NOINLINE",
              "__attribute__"}
TYPES = {"void", "char", "short", "int", "long", "float", "double", "unsigned", "signed", "__typeof__",
         "VECTOR", "u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "vf", "vi", "vu", "vh", "vsh", "vb",
         "vsb", "vf4", "vhalf", "v4", "v8", "v16", "vf_u", "vi_u", "vh_u", "vsh_u", "vb_u", "vsb_u"}


def c_text(text: str) -> str:
    """C without comments, a statement a line, with numbers in the place of what it declares."""
    return _C(TOKEN.findall(_strip_comments(text))).text()


class _C:
    """Tokens of C, read from first to last. What is not understood as a declaration keeps its name."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens, self.at = tokens, 0
        self.out: list[str] = []
        self.members: dict[str, str] = {}
        self.scopes: list[dict[str, str]] = [{}]
        self.types, self.locals = set(TYPES), 0
        self.begins = True      # a statement

    def text(self) -> str:
        """The whole."""
        while self.at < len(self.tokens): self._step()
        return re.sub(r" *\n *", "\n", " ".join(self.out)).strip() + "\n"

    @property
    def now(self) -> str: return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _put(self) -> None:
        """The token as it is, or the number of its name."""
        token = self.now
        if WORD.match(token):
            if self.at and self.tokens[self.at - 1] in (".", "->"): token = self.members.get(token, token)
            else: token = next((s[token] for s in reversed(self.scopes) if token in s), token)
        self.out.append(f"{token}\n" if token[0] in ";{}#" else token)
        self.at += 1

    def _step(self) -> None:
        """A declaration, or a token."""
        if self.begins and self._declaration(): return
        token = self.now
        if token == "{": self.scopes.append({})
        if token == "}" and len(self.scopes) > 1: self.scopes.pop()
        self._put()
        if token == "for": self._put()      # its (
        if token[0] != "#": self.begins = token in (";", "{", "}", "for")

    def _declaration(self, parameter: bool = False) -> bool:
        """Reads a declaration with its declarators, if one begins here."""
        if not (end := self._type_end()): return False
        defines = "typedef" in self.tokens[self.at:end]
        self._put_until(end)
        if self.now == "{": self._struct()
        while True:
            self._put_until(self._after(self.at, QUALIFIERS | {"*"}))
            if WORD.match(self.now): self._declare(defines)
            if self.now == "(" and len(self.scopes) == 1: return self._function()
            self._rest()
            if self.now != "," or parameter: break
            self._put()
        if self.now == ";": self._put()
        self.begins = True
        return True

    def _type_end(self) -> int:
        """Offset at which the declarators after qualifiers and a type begin; 0 where there is no type."""
        first = self._after(self.at, QUALIFIERS)
        if self.tokens[first:first + 1] in (["struct"], ["union"]): return first + 1
        end = self._after(first, self.types)
        after = self._after(end, QUALIFIERS)
        named = after < len(self.tokens) and (self.tokens[after] == "*" or WORD.match(self.tokens[after]))
        return end if named and end > first else 0

    def _after(self, at: int, words: Container[str]) -> int:
        """Behind these words, and their arguments."""
        while at < len(self.tokens) and self.tokens[at] in words:
            at = self._closing(at + 1) + 1 if self.tokens[at] in WITH_ARGUMENTS else at + 1
        return at

    def _put_until(self, end: int) -> None:
        while self.at < end: self._put()

    def _struct(self) -> None:
        self.scopes.append(self.members)
        self._put()
        self.begins = True
        while self.now != "}": self._step()
        self.scopes.pop()
        self._put()

    def _declare(self, defines: bool) -> None:
        """A name of the innermost scope."""
        scope, name = self.scopes[-1], self.now
        if scope is self.members: scope.setdefault(name, f"m{len(scope)}")
        elif len(self.scopes) == 1: scope.setdefault(name, f"g{len(scope)}")
        else:
            scope[name] = f"v{self.locals}"
            self.locals += 1
        if defines: self.types.add(name)
        self._put()

    def _function(self) -> bool:
        """Parameters; with a body they are in its scope."""
        self.scopes.append({})
        self.locals = 0
        self._put()
        while self.now != ")":
            if not self._declaration(parameter=True) or self.now == ",": self._put()
        self._put()
        if self.now == "{": self._put()     # its } ends the scope
        else: self.scopes.pop()
        self.begins = True
        return True

    def _rest(self) -> None:
        """Skips the rest of a declarator: extents, attributes, the value."""
        depth = 0
        while self.now and (depth or self.now not in (",", ";", ")")):
            depth += (self.now in ("(", "[", "{")) - (self.now in (")", "]", "}"))
            self._put()

    def _closing(self, at: int) -> int:
        """Offset at which the parenthesis that opens at a token closes."""
        depth = 0
        while at < len(self.tokens):
            depth += (self.tokens[at] == "(") - (self.tokens[at] == ")")
            if not depth: return at
            at += 1
        return at


# **** a file ****

def make_records(made: Iterable[Case]) -> dict[str, Record]:
    """A record of every case, and of the headers that kernels for the CPU begin with."""
    headers = {path.name: path.read_text() for path in sorted(Path(tinygrad_nv.__file__).parent.rglob("*.h"))}
    out: dict[str, Record] = {}
    used: set[str] = set()
    for case in made:
        try: found = emit(case)
        except (NVError, LookupError) as error:
            out[case.name] = record(case.family, "none", f"none: {type(error).__name__}", [], "")
            continue
        texts = []
        for kernel in found.kernels:
            if not isinstance(kernel, CPUKernel): texts.append(ptx_text(kernel.ptx))
            else:
                names, own = _without(kernel.source, headers)
                used.update(names)
                texts.append("".join(f"include {name}\n" for name in names) + c_text(own))
        launches = [launch(kernel) | {"shared_workspace_bytes": found.workspace_bytes}
                    for kernel in found.kernels]
        kind = "C" if isinstance(found.kernels[0], CPUKernel) else "PTX"
        out[case.name] = record(case.family, kind, str(found.schedule), launches, "----\n".join(texts))
    for name in sorted(used): out[f"header: {name}"] = record("header", "C", "", [], c_text(headers[name]))
    return out


def _without(source: str, headers: Mapping[str, str]) -> tuple[list[str], str]:
    """The headers in a text, and the text without them."""
    names = [name for name, text in headers.items() if text in source]
    for name in names: source = source.replace(headers[name], "\n")
    return names, source


def launch(kernel: TileKernel | CPUKernel) -> Record:
    """How a kernel is launched."""
    if isinstance(kernel, CPUKernel):
        return {"parts": kernel.parts, "workspace_bytes": kernel.workspace_bytes}
    flags = kernel.flags if isinstance(kernel, GemmKernel | BackwardKernel) else 0
    workspace = kernel.workspace_bytes if isinstance(kernel, GemmKernel) else 0
    made = {"grid": kernel.grid, "threads": kernel.threads, "dynamic_smem": kernel.dynamic_smem,
            "cluster": kernel.cluster, "rows_of_cta": kernel.rows_of_cta, "ctas_of_rows": kernel.ctas_of_rows,
            "pdl": kernel.pdl, "workspace_bytes": workspace, "flags": flags,
            "maps": [asdict(one) for one in kernel.maps]}
    plain: Record = json.loads(json.dumps(made))  # tuples become lists, as in a file
    return plain


def record(family: str, kind: str, schedule: str, launches: list[Record], text: str) -> Record:
    """Returns the file's record of a case."""
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return {"family": family, "kind": kind, "schedule": schedule, "launch": launches,
            "sha256": hashlib.sha256(text.encode()).hexdigest(), "text": packed}


def text_of(one: Record) -> str:
    """The normalised text."""
    return zlib.decompress(base64.b64decode(one["text"])).decode()


# **** two files ****

def compare(a: Mapping[str, Record], b: Mapping[str, Record], renamed: Mapping[str, str] | None = None,
            left_out: Sequence[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """Every case of both that differs, and what about it."""
    for name in [name for name in a if name in b]:
        one, other = a[name], b[name]
        found = [what for what in WHAT[:2] if one[what] != other[what]]
        if one["sha256"] != other["sha256"] and _rename(text_of(one), renamed or {}) != text_of(other):
            found.append("text")
        if found := [what for what in found if what not in left_out]: yield name, found


def _rename(text: str, renamed: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda found: renamed.get(found[0], found[0]), text)


def describe(one: Record, other: Record, found: Sequence[str], renamed: Mapping[str, str]) -> Iterator[str]:
    """Lines that tell a case's difference."""
    if "schedule" in found: yield f"schedule: {one['schedule']} -> {other['schedule']}"
    if "launch" in found:
        if len(one["launch"]) != len(other["launch"]):
            yield f"launch: {len(one['launch'])} kernels -> {len(other['launch'])}"
        for x, y in zip(one["launch"], other["launch"], strict=False):
            yield from (f"launch: {key} {x.get(key)} -> {y.get(key)}" for key in {**x, **y}
                        if x.get(key) != y.get(key))
    if "text" in found:
        lines = (_rename(text_of(one), renamed).splitlines(), text_of(other).splitlines())
        yield from list(difflib.unified_diff(*lines, lineterm="", n=2))[2:2 + LINES]


def report(a: Mapping[str, Record], b: Mapping[str, Record], renamed: Mapping[str, str],
           left_out: Sequence[str], most: int) -> bool:
    """Prints what differs, whether anything does."""
    alone = [(label, [name for name in one if name not in other])
             for label, one, other in (("first", a, b), ("second", b, a))]
    for label, names in alone:
        for name in names: print(f"in the {label} alone: {name}")
    differ = list(compare(a, b, renamed, left_out))
    for number, (name, found) in enumerate(differ):
        print(f"{name}: {', '.join(found)}")
        if number < most:
            for line in describe(a[name], b[name], found, renamed): print(f"    {line}")
    counts = Counter(what for _, found in differ for what in found)
    words = ", ".join(f"{what} {counts[what]}" for what in WHAT if counts[what])
    equal, words = len(a.keys() & b.keys()) - len(differ), f" ({words})" if words else ""
    print(f"{equal} equal, {len(differ)} differ{words}, "
          f"{len(alone[0][1])} in the first alone, {len(alone[1][1])} in the second alone")
    return bool(differ or alone[0][1] or alone[1][1])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"))
    parser.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW",
                        help="names of headers, since A")
    parser.add_argument("--leave-out", nargs="*", default=[], choices=WHAT)
    parser.add_argument("--show", type=int, default=40, metavar="N", help="differences shown, not only named")
    given = parser.parse_args()
    if given.compare:
        a, b = (json.loads(path.read_text()) for path in given.compare)
        return int(report(a, b, dict(pair.split("=") for pair in given.renamed), given.leave_out, given.show))
    if not given.write: parser.error("--write FILE or --compare A B")
    made = make_records(each(list(cases())))
    given.write.write_text(json.dumps(made, indent=1))
    families = Counter(one["family"] for one in made.values())
    print(", ".join(f"{family} {many}" for family, many in families.items()))
    missing = [name for name, one in made.items() if one["kind"] == "none"]
    print(f"{len(made)} cases{''.join(f', no kernel: {name}' for name in missing)}", file=sys.stderr)
    return 0


if __name__ == "__main__": sys.exit(main())
