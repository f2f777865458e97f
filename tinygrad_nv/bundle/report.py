"""Reports what a bundle has, as text, and what differs between two.

Protocol: `inspect(bundle)` and `differences(a, b)` are lines for a terminal. Differences are found by
hashes: of files and weights by part; of steps by what they launch, with the kernels that differ by name.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tinygrad_nv.bundle.container import Bundle
from tinygrad_nv.bundle.manifest import FIX, field, shorten
from tinygrad_nv.errors import BundleError
from tinygrad_nv.runtime.observe.memory_report import human
from tinygrad_nv.table import align_columns

KERNELS_SHOWN = 6


def inspect(bundle: Bundle, steps: bool = False) -> str:
    """Lists a bundle's contents; with `steps` a line for each step, with its hash."""
    parts = bundle.manifest.parts
    made, options = _table(bundle, "made_by"), _table(bundle, "options")
    lines = [("file", str(bundle.path)), ("kind", bundle.manifest.kind), ("hash", bundle.hash),
             ("signed by", bundle.signed_by or "-"),
             ("made by", " ".join(f"{name} {shorten(made[name])}" for name in ("tinygrad_nv", "tinygrad")
                                  if name in made)),
             *((shorten(name).replace("_", "-"), shorten(value)) for name, value in sorted(options.items())
               if value is not None)]
    sizes = Counter[str]()
    for each in parts: sizes[each.name.partition("/")[0]] += each.nbytes
    lines += [(f"{name}/" if any(each.name.startswith(f"{name}/") for each in parts) else name, human(size))
              for name, size in sizes.items()]
    if referred := [each for each in parts if each.ranges]:
        lines.append(("referred to", f"{human(sum(each.nbytes for each in referred))} in {bundle.weights}"))
    text = align_columns(lines)
    for name in _sets(bundle): text.append(_of_set(bundle, name, steps))
    return "\n".join(text)


def _table(bundle: Bundle, name: str) -> dict[str, Any]:
    found = bundle.manifest.about
    return field(found, name, dict, _file_name(bundle, "the manifest")) if name in found else {}


def _sets(bundle: Bundle) -> list[str]:
    found = bundle.manifest.about.get("sets", [])
    if isinstance(found, list) and all(isinstance(each, str) for each in found): return found
    raise BundleError(f"{_file_name(bundle, 'the manifest')} has sets = {shorten(found)}", "a list of names",
                      FIX)


def _set(bundle: Bundle, name: str) -> dict[str, Any]:
    found = bundle.json(part := f"{name}/set.json")
    if isinstance(found, dict): return found
    raise BundleError(f"{_file_name(bundle, part)} is {shorten(found)}", "a table", FIX)


def _steps(bundle: Bundle, name: str) -> dict[str, str]:
    """Hashes of the steps of a set."""
    what = _file_name(bundle, f"{name}/set.json")
    steps: dict[str, Any] = field(_set(bundle, name), "steps", dict, what)
    for step, each in steps.items():
        if not isinstance(each, list) or [type(one) for one in each] != [str, str]:
            raise BundleError(f"{what} has {shorten(each)} for {shorten(step)}",
                              "the name of a part, and a hash",
                              FIX)
    return {step: digest for step, (_, digest) in steps.items()}


def _programs(bundle: Bundle, name: str) -> list[dict[str, Any]]:
    """Programs of a set, whose names and notes are texts."""
    what = _file_name(bundle, f"{name}/programs.json")
    rows = bundle.json(f"{name}/programs.json")
    if not isinstance(rows, list): raise BundleError(f"{what} is {shorten(rows)}", "a list of programs", FIX)
    for number, row in enumerate(rows):
        field(row, "name", str, f"{what}: program {number}")
        note = row.get("note", ["", "", ""])
        if not isinstance(note, list) or [type(each) for each in note[:3]] != [str, str, str]:
            raise BundleError(f"{what}: program {number} has note = {shorten(note)}",
                              "a template, a reason, a schedule", FIX)
    return rows


def _file_name(bundle: Bundle, part: str) -> str: return f"{bundle.path}: {part}"


def _of_set(bundle: Bundle, name: str, steps: bool) -> str:
    found, rows = _steps(bundle, name), _programs(bundle, name)
    templates = Counter(row["note"][0] if "note" in row else "tinygrad" for row in rows)
    kinds = ", ".join(f"{count} {kind}" for kind, count in templates.most_common())
    lines = [f"{name}: {len(found)} steps, {len(rows)} kernels ({kinds})"]
    if steps: lines += align_columns([(f"  {step}", digest[:16]) for step, digest in found.items()])
    return "\n".join(lines)


def differences(a: Bundle, b: Bundle) -> list[str]:
    """Returns what differs, a line each; none between equal bundles."""
    lines = [*_fields("", a.manifest.about, b.manifest.about)]
    sets = set(_sets(a)) & set(_sets(b))
    ours, theirs = ({name: each.sha256 for name, each in one.parts.items()} for one in (a, b))
    plain = [name for name in dict.fromkeys([*ours, *theirs]) if name.partition("/")[0] not in sets]
    lines += _compare_fields("", {name: ours.get(name) for name in plain},
                             {name: theirs.get(name) for name in plain})
    for name in sorted(sets): lines += _of_sets(a, b, name)
    return lines


def _of_sets(a: Bundle, b: Bundle, name: str) -> Iterator[str]:
    one, other = (_set(each, name) for each in (a, b))
    yield from _fields(f"{name}: ", *({key: value for key, value in each.items() if key != "steps"}
                                      for each in (one, other)))
    yield from _compare_fields(f"{name}: ", *(_steps(each, name) for each in (a, b)))
    kernels = [Counter(_kernel(row) for row in _programs(each, name)) for each in (a, b)]
    for sign, found in (("-", kernels[0] - kernels[1]), ("+", kernels[1] - kernels[0])):
        listed = sorted(found)
        for each in listed[:KERNELS_SHOWN]: yield f"{name}: {sign} kernel {each}"
        if len(listed) > KERNELS_SHOWN: yield f"{name}: {sign} {len(listed) - KERNELS_SHOWN} other kernels"


def _kernel(row: Mapping[str, Any]) -> str:
    return f"{row['name']} {row['note'][2] if 'note' in row else ''}".strip()


def _fields(where: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Fields that differ; of tables, each entry."""
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name), other.get(name)
        if a == b: continue
        if isinstance(a, dict) and isinstance(b, dict): yield from _fields(f"{where}{name}.", a, b)
        else: yield f"{where}{name}: {shorten(a)} | {shorten(b)}"


def _compare_fields(where: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterable[str]:
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name), other.get(name)
        if a == b: continue
        what = "only in the first" if b is None else "only in the second" if a is None else "differs"
        yield f"{where}{name} {what}"
