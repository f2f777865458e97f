"""Values that models write as literals of Python or JSON, also mixed: {'a': True, "b": null}.

Protocol: `literal(text)` returns the value, made of what JSON has; a `ValueError` says that the text is none.
Lines may break inside quotes, as models break them.
"""
from __future__ import annotations

import ast
import json
import math
from typing import Any

WORDS = {"true": True, "false": False, "null": None}


def literal(text: str, bare: bool = False) -> Any:
    """See above. `bare`: words without quotes are texts."""
    text = text.strip()
    try: return json.loads(text, parse_constant=_no_constant, parse_float=_finite, strict=False)
    except (ValueError, RecursionError): pass
    try: return value_of(ast.parse(one_line(text), mode="eval").body, bare)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("no literal of Python or JSON") from error


def value_of(node: ast.expr, bare: bool = False) -> Any:
    """The value of a literal. Raises `ValueError` or `TypeError` for other expressions."""
    if isinstance(node, ast.Name):
        if not bare and node.id not in WORDS: raise ValueError(f"the name {node.id}")
        return WORDS.get(node.id, node.id)
    if isinstance(node, ast.List | ast.Tuple | ast.Set): return [value_of(each, bare) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [value_of(each, bare) for each in node.keys if each is not None]
        if len(keys) < len(node.keys) or not all(isinstance(key, str | int | float | None) for key in keys):
            raise ValueError("keys that no object has")
        return {_key(key): value_of(each, bare) for key, each in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    infinite = isinstance(value, float) and not math.isfinite(value)
    if infinite or not isinstance(value, str | int | float | None): raise ValueError("no value of JSON")
    return value


def _key(key: Any) -> str: return key if isinstance(key, str) else json.dumps(key)


def has_call(text: str) -> bool:
    """Whether a text is an expression of Python that calls something."""
    try: tree = ast.parse(one_line(text.strip()), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError): return False
    return any(isinstance(each, ast.Call) for each in ast.walk(tree))


def one_line(text: str) -> str:
    """A text of Python whose quotes hold no raw line ends: these are written as escapes."""
    out, quote, at = "", "", 0
    while at < len(text):
        sign = text[at]
        if quote and sign == "\\":
            follows = text[at + 1:at + 2]
            out += "\\\\\\n" if follows == "\n" else sign + follows     # no continued line, but both signs
            at += 2
            continue
        if quote:
            if text.startswith(quote, at): sign, quote = quote, ""
            else: sign = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}.get(sign, sign)
        elif sign in "\"'": sign = quote = opening(text, at)
        out += sign
        at += max(1, len(sign) if sign[:1] in "\"'" else 1)
    return out


def opening(text: str, at: int) -> str:
    """The quote that begins at a place: one sign, or three."""
    return text[at:at + 3] if text[at:at + 3] == text[at] * 3 else text[at]


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)): return value
    raise ValueError(f"{text} is no float of 64 bits")


def _no_constant(word: str) -> float: raise ValueError(f"{word} is not a JSON number")
