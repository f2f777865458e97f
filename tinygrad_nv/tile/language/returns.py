"""Functions with one end: `return` in a branch, so that what follows can depend on the branch.

Protocol: `single_exit(body)` gives the statements of a function in which

    if test: A; return x            if test: A; RESULT = x
    B                        →      else: B; RESULT = y
    return y                        return RESULT

at any depth of branches, so that a condition that only the running kernel knows may decide. A body without
such a `return`, or with one after which a branch may go on as well, stays as it is; so do loops.
"""
from __future__ import annotations

import ast

RESULT = "the function's result"    # no name of a user's


def single_exit(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements, with one `return` at the end where a branch has one."""
    if not any(isinstance(each, ast.If) and _returns(each) for each in body): return body
    if (made := _tail(body)) is None: return body
    first = ast.copy_location(_set(None), body[0])
    last = ast.copy_location(ast.Return(ast.Name(RESULT, ast.Load())), body[-1])
    return [first, *made, last]


def _set(value: ast.expr | None) -> ast.stmt:
    return ast.Assign([ast.Name(RESULT, ast.Store())], value or ast.Constant(None))


def _returns(node: ast.stmt) -> bool:
    """Whether a branch returns, by itself or in branches of its own."""
    if isinstance(node, ast.Return): return True
    return isinstance(node, ast.If) and any(map(_returns, [*node.body, *node.orelse]))


def _ends(body: list[ast.stmt]) -> bool:
    """Whether statements return, whatever their conditions are."""
    if not body: return False
    last = body[-1]
    if isinstance(last, ast.If): return _ends(last.body) and _ends(last.orelse)
    return isinstance(last, ast.Return)


def _tail(body: list[ast.stmt]) -> list[ast.stmt] | None:
    """The statements with results set in the place of returns; None where that would write some twice."""
    for i, each in enumerate(body):
        if isinstance(each, ast.Return): return [*body[:i], ast.copy_location(_set(each.value), each)]
        if isinstance(each, ast.If) and _returns(each):
            rest = body[i + 1:]
            if rest and not _ends(each.body) and not _ends(each.orelse): return None
            then = _tail(each.body if _ends(each.body) else [*each.body, *rest])
            other = _tail(each.orelse if _ends(each.orelse) else [*each.orelse, *rest])
            if then is None or other is None: return None
            made = ast.copy_location(ast.If(each.test, then or [ast.Pass()], other), each)
            return [*body[:i], made]
    return body
