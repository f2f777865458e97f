"""mypy's plugin: `Tensor["B", "S", bf16 @ accum(f32)]` is a Tensor to it, and a tile is of any type.

    [tool.mypy]
    plugins = ["tinygrad_nv.shapes.mypy_plugin"]

mypy would take texts in brackets for names of types, and calls and operators for mistakes. So the brackets of
annotations with texts or numbers in them are taken away as soon as a file is parsed. What they say is checked
when the function is called, and by `tinygrad-nv shapes`.
"""
from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mypy.nodes import AssignmentStmt, Block, Decorator, FuncDef, MypyFile
from mypy.plugin import AnalyzeTypeContext, Plugin, ReportConfigContext
from mypy.types import AnyType, CallableType, RawExpressionType, Type, TypeOfAny, UnboundType, UnionType

TILES = ("Tile", "KTile", "QTile", "OTile")
NAMES = {"Tensor", "KVCache", *TILES}
FULL_NAMES = {f"tinygrad_nv.shapes.types.{name}" for name in TILES}


class Shapes(Plugin):
    """Takes brackets with dimensions away, and answers for tiles."""

    def get_additional_deps(self, file: MypyFile) -> list[tuple[int, str, int]]:
        """mypy calls this with each file that it has parsed."""
        _strip_statements(file.defs)
        return []

    def report_config_data(self, ctx: ReportConfigContext) -> Any:
        """Never the same for a file with dimensions: of one that mypy keeps, only parts are read again, and
        not by the function above."""
        return time.time_ns() if ctx.is_check and _has_dimensions(ctx.path) else ""

    def get_type_analyze_hook(self, fullname: str) -> Callable[[AnalyzeTypeContext], Type] | None:
        """A tile is used by functions over tiles alone."""
        return _any if fullname in FULL_NAMES else None


def _has_dimensions(path: str) -> bool:
    """Whether a file has annotations with texts in brackets."""
    try: text = Path(path).read_text(errors="replace")
    except OSError: return False
    return re.search(rf"\b(?:{'|'.join(sorted(NAMES))})\[\s*[\"']", text) is not None


def _strip_statements(statements: Iterable[object]) -> None:
    """Annotations of functions and variables in statements and their blocks."""
    for each in statements:
        if isinstance(each, FuncDef):
            for one in (each.type, each.unanalyzed_type):
                if isinstance(one, CallableType): _strip([*one.arg_types, one.ret_type])
        if isinstance(each, AssignmentStmt):
            _strip([one for one in (each.type, each.unanalyzed_type) if one is not None])
        if isinstance(each, Decorator): _strip_statements([each.func])
        for name in ("body", "defs", "else_body", "finally_body", "handlers"):
            _strip_blocks(getattr(each, name, None))


def _strip_blocks(given: object) -> None:
    """A statement's block, or its blocks."""
    if isinstance(given, Block): _strip_statements(given.body)
    elif isinstance(given, list):
        for each in given: _strip_blocks(each)


def _strip(types: Iterable[Type]) -> None:
    for each in types:
        if isinstance(each, UnionType): _strip(each.items)
        if not isinstance(each, UnboundType): continue
        if each.name.rpartition(".")[2] in NAMES and any(map(_is_word, each.args)): each.args = ()
        else: _strip(each.args)


def _is_word(given: Type) -> bool:
    """Whether it is a text or a number."""
    return isinstance(given, RawExpressionType) or getattr(given, "original_str_expr", None) is not None


def _any(context: AnalyzeTypeContext) -> Type: return AnyType(TypeOfAny.explicit)


def plugin(version: str) -> type[Plugin]:
    """Returns the plugin, as mypy asks for it."""
    return Shapes
