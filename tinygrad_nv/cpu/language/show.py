"""Texts of what the passes of a CPU have made. Values have the names of the program's text."""
from __future__ import annotations

from collections.abc import Mapping

from tinygrad_nv.cpu.kernel import header
from tinygrad_nv.cpu.language.grouping import Groups
from tinygrad_nv.cpu.language.text import Form
from tinygrad_nv.cpu.language.views import View
from tinygrad_nv.table import align_columns
from tinygrad_nv.tile.language.ir import Program, Value, name_values

HEADERS = ("vector.h", "gemm.h", "language/language.h")


def show_kernel(text: str) -> str:
    """Returns the C of a kernel, with the names of headers in the place of their text."""
    for name in HEADERS: text = text.replace(header(name).rstrip("\n"), f'#include "{name}"')
    return text


def show_stores(program: Program, grouped: Groups) -> str:
    """Returns the loops of stores, with what each writes."""
    names, rows = name_values(program), [("loop over", "writes")]
    for groups in grouped.values():
        for group in {id(each): each for each in groups.values()}.values():
            shape = group[0].operands[-1].shape
            rows.append(("x".join(map(str, shape)) or "one element",
                         ", ".join(f"{op.attributes['tensor']} = {names[op.operands[-1]]}" for op in group)))
    return "\n".join(align_columns(rows)) if len(rows) > 1 else "no stores of blocks"


def show_places(program: Program, places: Mapping[Value, Form]) -> str:
    """Returns where each value lies."""
    names, rows = name_values(program), [("value", "type", "where")]
    for value, name in names.items():
        if (form := places.get(value)) is not None: rows.append((name, str(value.type), _words(form)))
    return "\n".join(align_columns(rows))


def _words(form: Form) -> str:
    if isinstance(form, str): return f"variable {form}" if form.isidentifier() else "a number in the text"
    if isinstance(form, View): return f"array {form.base}, {'x'.join(map(str, form.shape)) or 'one element'}"
    return f"computed where it is used: {form.name}"
