"""A user's function, rewritten so that its statements can become loops and branches of a program.

Protocol: `rewritten(fn)` reads a function's source and gives a function of the same signature, globals and
lines, in which

    for x in items: BODY     → state = loop(items, body, names, state)      where names are what BODY assigns
    while test: BODY         → state = repeat(test, body, names, state)
    if test: A else: B       → state = branch(test, then, otherwise, names, state)
    f(…)                     → call(f)(…): functions of the user's are rewritten, too, when they are called

(control.py). A `return` in a branch is turned into a branch of what follows (returns.py). A loop or branch
that contains `return`, `break`, `continue`, `yield` or `del` otherwise stays Python's own; over what only the
running kernel knows it is an error that says so, as are statements whose effect would be one of building the
kernel: `try`, `global`, `nonlocal`, `with` of other objects than ours. A function whose source cannot be read
runs as it is: its loops must be Python's.
"""
from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Collection
from types import CellType, CodeType, FunctionType
from typing import Any, NoReturn

from tinygrad_nv.tile.language import control
from tinygrad_nv.tile.language.ir import Line
from tinygrad_nv.tile.language.returns import single_exit
from tinygrad_nv.tile.language.trace import current, fail, tracing

HELP = "_tile_"            # the name of this module's functions in a rewritten one
FUNCTION = f"{HELP}function"   # a rewritten one: a function that calls itself calls what its module has
OURS = ("tinygrad_nv.tile.", "tinygrad_nv.language", "tinygrad.", "numpy", "builtins")
LEAVES = {ast.Return: "return", ast.Break: "break", ast.Continue: "continue", ast.Yield: "yield",
          ast.YieldFrom: "yield from", ast.Delete: "del", ast.Await: "await"}
CHANGING = {"append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault",
            "sort", "update"}       # methods of lists and dicts
Scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp,
          ast.DictComp,
          ast.GeneratorExp)


class Helpers:
    """Functions that a rewritten function calls."""
    loop, repeat = staticmethod(control.loop), staticmethod(control.repeat)
    branch = staticmethod(control.branch)

    @staticmethod
    def get(name: str, read: Callable[[], Any]) -> Any:
        """A variable's value, if it has one."""
        try: return read()
        except NameError: return control.Undefined(name)

    @staticmethod
    def python(x: Any, statement: str, what: str) -> Any:
        """Returns what Python's own statement goes by. Raises for what only the running kernel knows."""
        if isinstance(x, control.Range) or control.is_dynamic(x):
            fail(f"`{statement}` in {what} that the running kernel decides", "a body that runs to its end",
                 "guard what follows with `if`, or give stores a mask")
        return x

    @staticmethod
    def enter(x: Any) -> Any:
        """Enters the context of a `with` statement."""
        if tracing() and not hasattr(type(x), "__tile_scope__"):
            fail(f"`with` of a {type(x).__name__}", "no effects but those of the running kernel",
                 "enter it where the kernel is called")
        return x

    @staticmethod
    def check_change(x: Any, name: str) -> Any:
        """An object of which an attribute is assigned."""
        if tracing() and len(current().regions) > 1:
            fail(f"attribute {name!r} of a {type(x).__name__} assigned in a loop or branch of the kernel",
                 "variables, and tuples, lists and dicts of them", f"assign it to a variable: {name} = …")
        return x

    @staticmethod
    def note_return(x: Any) -> Any:
        """Returns the result of a function; the trace keeps the line."""
        if tracing(): current().returned = current().line()
        return x

    @staticmethod
    def call(f: Any) -> Any:
        """Returns what is called instead of a function."""
        if not tracing(): return f
        inner = getattr(f, "__tile_function__", f)
        if not isinstance(inner, FunctionType) or is_library(inner.__module__ or ""): return inner
        current().files.add(inner.__code__.co_filename)
        return rewritten(inner)


def is_library(module: str) -> bool:
    """Whether a function of a module is none of the user's, nor of a family's program."""
    if module.startswith("tinygrad_nv.tile.") and module.endswith(".program"):
        return module == "tinygrad_nv.tile.language.program"
    return module.startswith(OURS) or module.partition(".")[0] in sys.stdlib_module_names


def _rewrite(code: CodeType, file: str) -> ast.FunctionDef | None:
    """A function that makes the rewritten one, whose free variables are its arguments."""
    if (made := _read(code, file)) is None: return None
    made.args.defaults, made.args.kw_defaults = [], [None] * len(made.args.kw_defaults)
    for each in ast.walk(made.args):
        if isinstance(each, ast.arg): each.annotation = None
    body = _Rewriter(made, file, {*code.co_varnames, *code.co_cellvars}).block(single_exit(made.body))
    return _function("_make", [HELP, *code.co_freevars], [_definition(FUNCTION, made.args, body, made)], made)


@functools.lru_cache(1024)
def _code(code: CodeType, file: str) -> CodeType | None:
    """A function's code, rewritten, with a free variable HELP. `file` is the code's, which code objects do
    not compare."""
    if (outer := _rewrite(code, file)) is None: return None
    found = compile(ast.fix_missing_locations(ast.Module([outer], [])), file, "exec")
    for inside in ("_make", FUNCTION):
        found = next(one for one in found.co_consts if isinstance(one, CodeType) and one.co_name == inside)
    return found.replace(co_name=code.co_name, co_qualname=code.co_qualname)


def _read(code: CodeType, file: str) -> ast.FunctionDef | None:
    """A function's statements, with their lines in the file; None where its source cannot be read."""
    _keep_command(file)
    try:
        lines, first = _source(code, file)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError): return None
    ast.increment_lineno(tree, first - 1)
    return made if isinstance(made := tree.body[0], ast.FunctionDef) else None


@functools.lru_cache(1024)
def returns_value(code: CodeType, file: str) -> bool:
    """Whether a function has a `return` of something; false where its source cannot be read."""
    def visit(node: ast.AST) -> bool:
        if isinstance(node, ast.Return): return node.value is not None
        return not isinstance(node, Scopes) and any(map(visit, ast.iter_child_nodes(node)))
    made = _read(code, file)
    return made is not None and any(map(visit, made.body))


def _source(code: CodeType, file: str) -> tuple[list[str], int]:
    """A function's lines, and the number of the first. inspect.getsourcelines asks each module that there is
    for its file first, which takes a tenth of a second."""
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if len(lines) < code.co_firstlineno: return inspect.getsourcelines(code)
    return inspect.getblock(lines[code.co_firstlineno - 1:]), code.co_firstlineno


def _keep_command(file: str) -> None:
    """Gives linecache the text of `python -c`, which Python keeps from 3.13 on only."""
    if file != "<string>" or file in linecache.cache or "-c" not in sys.orig_argv: return
    lines = sys.orig_argv[sys.orig_argv.index("-c") + 1].splitlines(keepends=True)
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)


def rewritten(fn: FunctionType) -> Callable[..., Any]:
    """The function, rewritten; itself where its source cannot be read."""
    if (code := _code(fn.__code__, fn.__code__.co_filename)) is None: return fn
    cells = {HELP: CellType(Helpers),
             **dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))}
    made = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__,
                        tuple(cells[each] for each in code.co_freevars))
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


def show_rewritten(fn: FunctionType) -> str:
    """The text of the function, rewritten."""
    if (outer := _rewrite(fn.__code__, fn.__code__.co_filename)) is None:
        return f"{fn.__name__} as it is: its source cannot be read"
    made, = outer.body
    return ast.unparse(ast.fix_missing_locations(made)).replace(FUNCTION, fn.__name__)


# **** statements ****

def _function(name: str, arguments: list[str], body: list[ast.stmt], at: ast.AST) -> ast.FunctionDef:
    given = ast.arguments(posonlyargs=[], args=[ast.arg(each) for each in arguments], kwonlyargs=[],
                          kw_defaults=[], defaults=[])
    return _definition(name, given, body, at)


def _definition(name: str, args: ast.arguments, body: list[ast.stmt], at: ast.AST) -> ast.FunctionDef:
    made = ast.FunctionDef(name=name, args=args, body=body, decorator_list=[])
    vars(made)["type_params"] = []      # from Python 3.12 on there has to be one
    return ast.copy_location(made, at)


def _locate(node: Any, at: ast.AST) -> Any:
    """A node on another's first line: Python reports a call that ends on a later line there."""
    ast.copy_location(node, at)
    node.end_lineno, node.end_col_offset = node.lineno, node.col_offset
    return node


def _help(name: str) -> ast.expr: return ast.Attribute(ast.Name(HELP, ast.Load()), name, ast.Load())


def _tuple(names: list[str], context: ast.expr_context | None = None) -> ast.expr:
    return ast.List([ast.Name(each, context or ast.Load()) for each in names], context or ast.Load())


def _find_assigned(body: list[ast.stmt], local: Collection[str]) -> list[str]:
    """Names that statements assign, in this scope, and `local` ones of lists and dicts that they change."""
    found: dict[str, None] = {}

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)): found.setdefault(node.name)
        if isinstance(node, Scopes):
            for each in ast.walk(node):
                if isinstance(each, ast.NamedExpr) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    found.setdefault(each.target.id)
            return
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load): found.setdefault(node.id)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            base = node.value
            while isinstance(base, ast.Subscript): base = base.value
            if isinstance(base, ast.Name) and base.id in local: found.setdefault(base.id)
        if isinstance(node, ast.Attribute) and node.attr in CHANGING and isinstance(node.value, ast.Name) \
                and node.value.id in local: found.setdefault(node.value.id)
        if isinstance(node, ast.alias): found.setdefault(node.asname or node.name.partition(".")[0])
        for child in ast.iter_child_nodes(node): visit(child)
    for each in body: visit(each)
    return [name for name in found if not name.startswith(HELP)]


def _leaves(body: list[ast.stmt]) -> str:
    """The statement with which others leave their body early; "" where none does."""
    def visit(node: ast.AST) -> str:
        if type(node) in LEAVES: return LEAVES[type(node)]
        if isinstance(node, Scopes): return ""
        return next(filter(None, map(visit, ast.iter_child_nodes(node))), "")
    return next(filter(None, map(visit, body)), "")


def _functions(node: ast.FunctionDef) -> dict[str, tuple[int, set[str]]]:
    """The functions that a function defines under names: the line, and names of variables around it."""
    found = {}
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef) and each is not node: found[each.name] = each.lineno, _free(each)
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Lambda):
            for name in each.targets:
                if isinstance(name, ast.Name): found[name.id] = each.lineno, _free(each.value)
    return found


def _free(function: ast.AST) -> set[str]:
    """Names of variables that a function does not make itself."""
    inside = list(ast.walk(function))
    names = [each for each in inside if isinstance(each, ast.Name)]
    own = {each.id for each in names if not isinstance(each.ctx, ast.Load)}
    return {each.id for each in names} - own - {each.arg for each in inside if isinstance(each, ast.arg)}


class _Rewriter(ast.NodeTransformer):
    """Rewrites the statements of one function."""

    def __init__(self, function: ast.FunctionDef, file: str, local: Collection[str]) -> None:
        self.count, self.file, self.functions, self.local = 0, file, _functions(function), local

    def _fail(self, node: Any, found: str, expected: str, fix: str) -> NoReturn:
        fail(found, expected, fix, Line(self.file, node.lineno))

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for each in body:
            found = self.visit(each)
            made += found if isinstance(found, list) else [found]
        return made

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST: return node   # rewritten when it is called
    def visit_Lambda(self, node: ast.Lambda) -> ast.AST: return self.generic_visit(node)
    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST: return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is not None:
            node.value = _locate(ast.Call(_help("note_return"), [self.visit(node.value)], []), node)
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        for each in node.items:
            entered = ast.Call(_help("enter"), [self.visit(each.context_expr)], [])
            each.context_expr = _locate(entered, node)
        node.body = self.block(node.body)
        return node

    def visit_Try(self, node: ast.Try) -> NoReturn:
        self._fail(node, "`try` in a kernel", "statements that cannot fail: a running kernel raises nothing",
                   "use `if` or tile.where")

    def visit_Global(self, node: ast.Global) -> NoReturn:
        self._fail(node, f"`global {', '.join(node.names)}` in a kernel", "variables of the function",
                   "store to an output, or return a value")

    def visit_Nonlocal(self, node: ast.Nonlocal) -> NoReturn:
        self._fail(node, f"`nonlocal {', '.join(node.names)}` in a kernel", "variables of the function",
                   "return the value, and assign it where the function is called")

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.value = self.visit(node.value)
        if not isinstance(node.ctx, ast.Load):
            given: list[ast.expr] = [node.value, ast.Constant(node.attr)]
            node.value = _locate(ast.Call(_help("check_change"), given, []), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("super", "locals", "globals",
                                                                "vars"): return node
        return ast.copy_location(ast.Call(ast.Call(_help("call"), [node.func], []), node.args,
                                          node.keywords), node)

    def visit_For(self, node: ast.For) -> Any:
        if leaves := "else" if node.orelse else _leaves(node.body):
            node.iter = self._python(node.iter, leaves, "a loop")
            node.body, node.orelse = self.block(node.body), self.block(node.orelse)
            return node
        self.count += 1
        body, item = f"{HELP}body{self.count}", f"{HELP}item{self.count}"
        names = _find_assigned([ast.Assign([node.target], ast.Constant(None)), *node.body], self.local)
        target = ast.Assign([node.target], ast.Name(item, ast.Load()))
        inner = _function(body, [item, *names], [target, *self.block(node.body), ast.Return(_tuple(names))],
                          node)
        return [inner, self._call("loop", [self.visit(node.iter), ast.Name(body, ast.Load())], names, node)]

    def visit_While(self, node: ast.While) -> Any:
        if leaves := "else" if node.orelse else _leaves(node.body):
            node.test = self._python(node.test, leaves, "a loop")
            node.body, node.orelse = self.block(node.body), self.block(node.orelse)
            return node
        self.count += 1
        body, test = f"{HELP}body{self.count}", f"{HELP}test{self.count}"
        names = _find_assigned([ast.Expr(node.test), *node.body], self.local)
        functions = [_function(test, names, [ast.Return(self.visit(node.test))], node),
                     _function(body, names, [*self.block(node.body), ast.Return(_tuple(names))], node)]
        given: list[ast.expr] = [ast.Name(test, ast.Load()), ast.Name(body, ast.Load())]
        return [*functions, self._call("repeat", given, names, node)]

    def visit_If(self, node: ast.If) -> Any:
        if leaves := _leaves(node.body) or _leaves(node.orelse):
            node.test = self._python(node.test, leaves, "a branch")
            node.body, node.orelse = self.block(node.body), self.block(node.orelse)
            return node
        self.count += 1
        then, other, test = (f"{HELP}{word}{self.count}" for word in ("then", "else", "test"))
        names = _find_assigned([*node.body, *node.orelse], self.local)
        functions = [_function(name, names, [*self.block(body), ast.Return(_tuple(names))], node)
                     for name, body in ((then, node.body), (other, node.orelse))]
        first = ast.copy_location(ast.Assign([ast.Name(test, ast.Store())], self.visit(node.test)), node)
        given: list[ast.expr] = [ast.Name(each, ast.Load()) for each in (test, then, other)]
        return [first, *functions, self._call("branch", given, names, node)]

    def _python(self, given: ast.expr, statement: str, what: str) -> ast.expr:
        """Returns what a statement that stays Python's own goes by."""
        words: list[ast.expr] = [ast.Constant(statement), ast.Constant(what)]
        made: ast.expr = _locate(ast.Call(_help("python"), [self.visit(given), *words], []), given)
        return made

    def _call(self, name: str, given: list[ast.expr], names: list[str], at: ast.stmt) -> ast.stmt:
        self._check_captured(names, at)
        state = ast.List([ast.Call(_help("get"), [ast.Constant(each), _lambda(each)], []) for each in names],
                         ast.Load())
        words = ast.List([ast.Constant(each) for each in names], ast.Load())
        call = _locate(ast.Call(_help(name), [*given, words, state], []), at)
        made: ast.stmt = ast.Assign([_tuple(names, ast.Store())], call) if names else ast.Expr(call)
        return ast.copy_location(made, at)

    def _check_captured(self, names: list[str], at: ast.stmt) -> None:
        """Raises for a call of a function that would see a variable as it was before the statement."""
        used = {one.id for one in ast.walk(at) if isinstance(one, ast.Name)}
        for function, (line, free) in self.functions.items():
            if function in used and line < at.lineno and (found := free & set(names)):
                name = min(found)
                self._fail(at, f"{function}(…) uses {name!r}, which this loop or branch changes",
                           "functions that use variables that stay",
                           f"give it to the function: def {function}(…, {name})")


def _lambda(name: str) -> ast.expr:
    none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(none, ast.Name(name, ast.Load()))
