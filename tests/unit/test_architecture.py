"""Arrows point down: who may import whom, and no circle of files.

An import is eager (when its module is loaded), lazy (inside a function) or for types alone (TYPE_CHECKING).
All of them count. `import a.b` runs the files of the packages above, too; that is not counted: a package's
`__init__` may name what lies inside.
"""
from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("tinygrad_nv", "models")
KINDS = ("eager", "lazy", "typing")

# from the bottom up; of one row, none imports another. tile and cpu make kernels and runtime runs them, so it
# knows what a kernel is; the CPU's schedules are found by running, so cpu knows runtime. hooks is how all
# above reach into tinygrad.
LAYERS = ("errors table interrupt collection progress version lazy_import", "files",
          "config option_file private regexes",
          "cache", "toolchain", "ptx", "quant", "tile", "hooks",
          "runtime", "cpu", "host patterns", "dist", "functional corrected elementary dlpack shapes",
          "kvcache graphs numerics bundle",
          "models", "engine", "server benchmarks quantize plan", "train", "transforms", "torch jax",
          "language onnx", "stdlib", "explain", "registration", "tinygrad_nv", "cli")
RANKS = {group: rank for rank, row in enumerate(LAYERS) for group in row.split()}
# files that make a group without a folder of their own, and a folder in another that is one
GROUPS = {"__main__": "cli", "dist.plan*": "plan"}

# what a group may import of tinygrad; the others nothing
EVERYTHING, NUMBERS = ("*",), ("tinygrad.dtype", "tinygrad.helpers")
USERS = ("tinygrad", *NUMBERS, "tinygrad.nn", "tinygrad.nn.*")
TINYGRAD = {**dict.fromkeys(("hooks", "runtime", "patterns", "dist", "dlpack", "transforms", "language",
                             "bundle", "torch", "onnx"), EVERYTHING),
            **dict.fromkeys(("tile", "cpu"), NUMBERS),
            **dict.fromkeys(("functional", "corrected", "elementary", "shapes", "kvcache", "numerics",
                             "quant", "models", "engine", "train", "server", "explain", "registration",
                             "cli", "plan", "stdlib", "jax"), USERS)}
# files that see more of it, and why
INSIDE = {"tinygrad_nv/tile/*reference.py": "what a spec computes is said in plain tinygrad",
          "tinygrad_nv/graphs/*": "a step is captured as TinyJit does it, with its schedule and buffers",
          "tinygrad_nv/engine/bundled/*": "steps are programs and memory",
          "tinygrad_nv/engine/worker/*": "steps are replayed, and inputs written, without a Tensor a step",
          "tinygrad_nv/train/regions/*": "a region is a function node whose gradient is put over other nodes",
          "tinygrad_nv/train/plan/*": "a step is scheduled as TinyJit captures it, without running",
          "tinygrad_nv/numerics/replay/recorder.py": "what kernels read and wrote is hashed",
          "tinygrad_nv/numerics/verify/*": "what kernels wrote is looked at, and graphs, without running",
          "tinygrad_nv/explain/*": "explain() schedules as realize would, without running"}
# modules that `from tinygrad import` can name
MODULES = ("codegen", "device", "engine", "helpers", "renderer", "runtime", "schedule", "tensor", "uop")


@dataclass(frozen=True)
class Import:
    """`file` is relative to the root; `target` is a module, `names` the file of one that is ours."""
    file: str
    line: int
    kind: str
    source: str
    target: str
    names: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line} ({self.kind}) imports {self.names or self.target}"


def modules(root: Path, tops: Iterable[str] = TOPS) -> dict[str, str]:
    """Files by the names of their modules."""
    found = {}
    for path in (path for top in tops for path in sorted((root / top).rglob("*.py"))):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = str(path.relative_to(root))
    return found


def imports(root: Path, tops: Iterable[str] = TOPS) -> list[Import]:
    """All imports of the files below the root, each name of a `from` by itself."""
    files, found = modules(root, tops), []
    for source, file in files.items():
        for node, kind in _statements(ast.parse((root / file).read_text()), "eager"):
            for target in _targets(node, source, Path(file).name == "__init__.py", files):
                found.append(Import(file, node.lineno, kind, source, target, files.get(target, "")))
    return found


def _statements(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom): yield child, kind
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for inside in child.body: yield from _statements(ast.Module([inside], []), "typing")
            for inside in child.orelse: yield from _statements(ast.Module([inside], []), kind)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _statements(child, "lazy" if kind == "eager" else kind)
        else: yield from _statements(child, kind)


def _targets(node: ast.Import | ast.ImportFrom, source: str, package: bool,
             files: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (_checkout(alias.name) for alias in node.names)
        return
    above = source.split(".")[:(None if package else -1)] if node.level else []
    if node.level > 1: above = above[:1 - node.level]
    base = _checkout(".".join([*above, *([node.module] if node.module else [])]))
    for alias in node.names:
        name = f"{base}.{alias.name}"
        yield name if name in files or (base == "tinygrad" and alias.name in MODULES) else base


def _checkout(module: str) -> str:
    """Names what tinygrad_nv.models, a link, leads to."""
    return module.removeprefix("tinygrad_nv.") if fnmatch(module, "tinygrad_nv.models*") else module


# **** circles ****

def circles(found: Iterable[Import], kinds: Iterable[str] = KINDS) -> list[list[str]]:
    """The circles of files, each as the imports that close it."""
    edges: dict[str, dict[str, Import]] = defaultdict(dict)
    for one in found:
        if one.kind in kinds and one.names and one.source != one.target: edges[one.source][one.target] = one
    reach = {source: _reached(source, edges) for source in edges}
    out, seen = [], set[str]()
    for source in edges:
        if source in seen or source not in reach[source]: continue
        circle = {other for other in reach[source] if source in reach.get(other, ())}
        seen |= circle
        out.append([edges[a][b].place for a in sorted(circle) for b in sorted(edges[a]) if b in circle])
    return out


def _reached(source: str, edges: dict[str, dict[str, Import]]) -> set[str]:
    seen: set[str] = set()
    left = [source]
    while left:
        new = edges.get(left.pop(), {}).keys() - seen
        seen |= new
        left += new
    return seen


# **** layers ****

def group(module: str) -> str:
    """The group of a module: its folder, or that of files that have none."""
    parts = module.split(".")
    inside = parts[1:] if parts[0] == "tinygrad_nv" and len(parts) > 1 else parts
    return next((group for pattern, group in GROUPS.items() if fnmatch(".".join(inside), pattern)), inside[0])


def upward(found: Iterable[Import]) -> list[str]:
    """Imports of a group that is not below the importer's."""
    return [f"{one.place}, but {group(one.target)} is not below {group(one.source)}" for one in found
            if one.names and group(one.source) != group(one.target)
            and RANKS[group(one.target)] >= RANKS[group(one.source)]]


def beyond(found: Iterable[Import]) -> list[str]:
    """Imports of tinygrad that a group may not have."""
    return [one.place for one in found if one.target.split(".")[0] == "tinygrad"
            and not any(fnmatch(one.file, pattern) for pattern in INSIDE)
            and not any(fnmatch(one.target, pattern) for pattern in TINYGRAD.get(group(one.source), ()))]


# **** targets ****

# what differs from target to target: patterns choose, build and call kernels without asking which it is
OF_TARGETS = {"GPU", "CPU", "CPUSchedule", "CPUKernel", "TileKernel"}


def asked(tree: ast.AST) -> Iterator[int]:
    """Lines that ask which target there is: of the type of a target, schedule or kernel, or of its kind."""
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            parts = list(node.args[1:])
        if isinstance(node, ast.Compare): parts = [node.left, *node.comparators]
        if isinstance(node, ast.MatchClass): parts = [node.cls]
        named = {leaf.id for part in parts for leaf in ast.walk(part) if isinstance(leaf, ast.Name)}
        kinds = [part for part in parts if isinstance(part, ast.Attribute) and part.attr == "kind"]
        if named & OF_TARGETS or kinds: yield node.lineno


# **** this checkout ****

@pytest.fixture(scope="module")
def every() -> list[Import]: return imports(ROOT)


def test_every_kind_of_import_is_seen(every: list[Import]):
    count = Counter(one.kind for one in every if one.names)
    assert all(count[kind] > 5 for kind in KINDS), count
    assert {group(one.source) for one in every} <= RANKS.keys(), "a file of no layer"


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[:2], KINDS], ids="+".join)
def test_no_circle_of_files(every: list[Import], kinds: tuple[str, ...]):
    found = circles(every, kinds)
    assert not found, "\n\n".join("\n".join(circle) for circle in found)


def test_arrows_point_down(every: list[Import]):
    found = upward(every)
    assert not found, "\n".join(found)


def test_what_each_layer_sees_of_tinygrad(every: list[Import]):
    found = beyond(every)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("pattern", INSIDE)
def test_an_exception_is_one(every: list[Import], pattern: str):
    mine = [one for one in every if fnmatch(one.file, pattern) and one.target.startswith("tinygrad.")]
    assert any(not any(fnmatch(one.target, each) for each in USERS) for one in mine), f"{pattern} needs none"


def test_what_tests_share_is_in_their_support():
    folder = ROOT / "tests"
    names = {path.name for path in folder.rglob("*.py") if folder / "support" not in path.parents}
    assert {name for name in names if not name.startswith("test_")} == {"conftest.py", "__init__.py"}
    assert len(names) > 400


def test_patterns_do_not_ask_which_target_they_have():
    files = sorted((ROOT / "tinygrad_nv" / "patterns").rglob("*.py"))
    assert len(files) > 40
    found = [f"{file}:{line}" for file in files for line in asked(ast.parse(file.read_text()))]
    assert not found, "\n".join(found)


# **** pairs: with what is wrong, and without ****

def planted(root: Path, **texts: str) -> list[Import]:
    """The imports of a package of these files; `__` in a name is a folder."""
    for name, text in texts.items():
        path = root / "tinygrad_nv" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return imports(root)


FORTH, BACK = "from tinygrad_nv.tile.b import f\n", "from tinygrad_nv.tile import a\n"
LAZY = f"def g():\n    {BACK}"
TYPING = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {BACK}"


@pytest.mark.parametrize(("back", "kind", "line"), [
    (BACK, "eager", 1), (LAZY, "lazy", 2), (TYPING, "typing", 3), ("from .a import g\n", "eager", 1),
    ("import tinygrad_nv.tile.a as a\n", "eager", 1)])
def test_a_circle_is_found(tmp_path: Path, back: str, kind: str, line: int):
    found = planted(tmp_path, tile__a=FORTH, tile__b=back)
    assert circles(found) == [["tinygrad_nv/tile/a.py:1 (eager) imports tinygrad_nv/tile/b.py",
                               f"tinygrad_nv/tile/b.py:{line} ({kind}) imports tinygrad_nv/tile/a.py"]]
    assert bool(circles(found, ("eager",))) is (kind == "eager")
    assert circles(planted(tmp_path, tile__b="")) == []


@pytest.mark.parametrize("source", ["tile__a", "ptx__emulator__a", "hooks__a", "explain__a", "kvcache__a"])
def test_an_arrow_upward_is_found(tmp_path: Path, source: str):
    text = "\n\ndef f():\n    from tinygrad_nv.cli import b\n"
    found = upward(planted(tmp_path, **{source: text}, cli__b=""))
    place = f"tinygrad_nv/{source.replace('__', '/')}.py:4 (lazy) imports tinygrad_nv/cli/b.py"
    assert [one.partition(", but ")[0] for one in found] == [place]
    assert upward(planted(tmp_path, **{source: "from tinygrad_nv import errors\n"}, errors="")) == []


def test_groups_of_one_row_do_not_import_each_other(tmp_path: Path):
    found = upward(planted(tmp_path, graphs__a="from tinygrad_nv.kvcache.b import f\n", kvcache__b=""))
    assert [one.partition(", but ")[2] for one in found] == ["kvcache is not below graphs"]


@pytest.mark.parametrize(("source", "text", "wrong"), [
    ("tile__a", "from tinygrad.uop.ops import UOp\n", True), ("ptx__a", "import tinygrad\n", True),
    ("tile__a", "from tinygrad.dtype import dtypes\n", False),
    ("kvcache__a", "from tinygrad import tensor\n", True),
    ("kvcache__a", "from tinygrad import Tensor\n", False),
    ("patterns__a", "from tinygrad import tensor\n", False),
    ("engine__worker__a", "from tinygrad.uop.ops import UOp\n", False),
    ("engine__core", "from tinygrad.uop.ops import UOp\n", True)])
def test_an_import_of_tinygrads_internals_is_found(tmp_path: Path, source: str, text: str, wrong: bool):
    found = [one.partition(" (")[0] for one in beyond(planted(tmp_path, **{source: text}))]
    assert found == [f"tinygrad_nv/{source.replace('__', '/')}.py:1"] * wrong


@pytest.mark.parametrize(("text", "wrong"), [
    ("isinstance(target, CPU)", True), ("isinstance(x, (GPU, int))", True), ("type(target) is GPU", True),
    ("target.kind == 'gpu'", True), ("isinstance(how.schedule, CPUSchedule | None)", True),
    ("match target:\n    case CPU(): pass", True), ("isinstance(x, UOp)", False),
    ("choose(spec, target)", False), ("target_of(x.device) is None", False)])
def test_a_question_for_the_target_is_found(text: str, wrong: bool):
    assert bool(list(asked(ast.parse(text)))) is wrong


# **** code that data can name ****

# modules that read data which names code to run, and the files that may import one, with the reason
RUNS_DATA = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib",
             "multiprocessing.connection", "multiprocessing.reduction")
UNPICKLES = {"allow_pickle": "True", "weights_only": "False"}   # arguments of numpy.load and torch.load
MAY_RUN = {"tinygrad_nv/engine/worker/step_process.py": "a pipe that the fork inherits, not a file",
           "tinygrad_nv/hooks/threads.py": "tinygrad's database, of which unsealed values are absent",
           **dict.fromkeys((f"tinygrad_nv/engine/executor/{name}.py" for name in (
               "connections", "follower", "followers", "replica", "replicas")),
               "sockets of ranks of this user; both ends have shown that they know a secret of this run")}


def pickles(root: Path, tops: Iterable[str] = TOPS) -> list[str]:
    """Files that import a module of RUNS_DATA, or have numpy or torch unpickle."""
    found = set()
    for module, file in (files := modules(root, tops)).items():
        text = (root / file).read_text()
        if not any(word in text for word in (*RUNS_DATA, *UNPICKLES)): continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and {each.name for each in node.names} <= {"UnpicklingError"}:
                continue
            if isinstance(node, ast.Import | ast.ImportFrom) and any(
                    f"{target}.".startswith(f"{each}.") for each in RUNS_DATA
                    for target in _targets(node, module, False, files)): found.add(file)
            if isinstance(node, ast.keyword) and node.arg in UNPICKLES \
                    and ast.unparse(node.value) == UNPICKLES[node.arg]: found.add(file)
    return sorted(found)


def test_no_file_is_unpickled(tmp_path: Path):
    assert pickles(ROOT) == sorted(MAY_RUN)
    (tmp_path / "a").mkdir()
    for number, text in enumerate(("def f():\n    import pickle", "from joblib.a import load",
                                   "np.load(x, allow_pickle=True)", "torch.load(x, weights_only=False)",
                                   "np.load(x, allow_pickle=False)")):
        (tmp_path / "a" / f"{number}.py").write_text(text)
    assert pickles(tmp_path, ("a",)) == [f"a/{number}.py" for number in range(4)]
