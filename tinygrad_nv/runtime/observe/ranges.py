"""The layer and the operation of each kernel, and NVTX ranges for profilers.

Protocol. `with layer("layers.3"):` names what is built inside, and nests: with `layer("attention")` in it,
`layers.3.attention`. Nothing is kept of that, and nothing costs anything, unless layers are tracked: inside
`track_layers()`, inside a timeline, or from the import on with NV_NVTX=1. Then `origin(call)` says of a
scheduled call in which layer it was built, and by which Tensor method (`op`); both are "" where that is not
known. What was built or captured before tracking began is not known. Gradients belong to the layer of what
they are of.

tinygrad notes the method that made a node of the tensor graph (all_metadata), and forgets it as soon as the
graph is rewritten. Tracking adds the layer to the note, and carries notes along: each rewrite knows what it
put in the place of what. A kernel has the note of its REDUCE that is nearest to its result, or, without one,
of its last computation. What is fused into one kernel may thus come from two layers, and counts for one.
Schedules are made anew while layers are tracked, since a schedule from the cache says nothing of this graph;
kernels, and their keys in the caches of programs, are those that they are without.

NV_NVTX=1: a range for each call that is executed, such as `layers.3.attention · gemm_wgmma`, one for a graph
that is launched, and one for each `span`, such as a decode step. Needs the package nvtx.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from tinygrad import Tensor
from tinygrad import tensor as tensors
from tinygrad.dtype import dtypes
from tinygrad.engine import realize
from tinygrad.helpers import SCACHE, Metadata, ansistrip
from tinygrad.schedule import _unwrap_src
from tinygrad.uop import ops
from tinygrad.uop.ops import GroupOp, KernelInfo, Ops, UOp, all_metadata

from tinygrad_nv import config, hooks
from tinygrad_nv.errors import ConfigError

Notes = tuple[Metadata, ...]
_NOTHING = nullcontext()
# what a kernel's own computation ends at, and what is no computation
_EDGE = {Ops.AFTER, Ops.BUFFER, Ops.PARAM}
_STORAGE = {*_EDGE, Ops.MSELECT, Ops.MSTACK}
_VIEWS = {*GroupOp.Movement, Ops.CONTIGUOUS_BACKWARD, Ops.DETACH}
_COMPUTED = {*GroupOp.ALU, Ops.REDUCE, Ops.CAST}
_PASSIVE = {*GroupOp.Movement, Ops.CONTIGUOUS, Ops.STORE, Ops.END, Ops.INDEX, Ops.CAST, Ops.NOOP, Ops.CONST}


@dataclass(frozen=True)
class Origin:
    """Origin of a kernel."""
    layer: str = ""
    op: str = ""


_UNKNOWN = Origin()


@dataclass(frozen=True)
class LayerMetadata(Metadata):
    """tinygrad's note of a node, with the layer."""
    layer: str = ""

    def __hash__(self) -> int: return hash((self.name, self.layer))

    def __reduce__(self) -> tuple[type[Metadata], tuple[str, bool]]:
        """Pickled as tinygrad's own note: constants share theirs with every graph, and a pickled weight must
        not need this package."""
        return Metadata, (self.name, self.backward)


@dataclass
class _Session:
    """One schedule in the making: notes of its nodes, and of its kernels."""
    notes: WeakKeyDictionary[UOp, Notes] = field(default_factory=WeakKeyDictionary)
    calls: dict[UOp, Notes] = field(default_factory=dict)


# **** layers ****

_scope = ""
_depth = 0                          # how often tracking is on
_session: _Session | None = None


def layer(name: str) -> AbstractContextManager[None]:
    """Names what is built inside."""
    return _enter_scope(name) if _depth else _NOTHING


@contextlib.contextmanager
def _enter_scope(name: str) -> Iterator[None]:
    global _scope
    before, _scope = _scope, f"{_scope}.{name}" if _scope else name
    tensors._METADATA.set(None)
    try: yield
    finally: _scope = before


def tracking() -> bool:
    """Whether layers are tracked."""
    return _depth > 0


def origin(call: UOp) -> Origin:
    """Returns where a call of a schedule comes from."""
    return call.tag if isinstance(call.tag, Origin) else _UNKNOWN


@contextlib.contextmanager
def track_layers() -> Iterator[None]:
    """Tracks layers inside the block."""
    start()
    try: yield
    finally: stop()


def start() -> None:
    """Tracks layers until `stop`; each `start` needs its own."""
    global _depth
    _depth += 1
    if _depth > 1: return
    _kept.update(scache=SCACHE.value, metadata=tensors._METADATA, context=ops.RewriteContext,
                 linear=Tensor.linear_with_vars)
    SCACHE.value = 0
    # a Tensor method that raises leaves its name there, and tinygrad then notes no other
    tensors._METADATA = _Noting(None)
    ops.RewriteContext = _Carrying
    Tensor.linear_with_vars = _linear_with_vars


def stop() -> None:
    """Undoes one `start`."""
    global _depth
    _depth -= 1
    if _depth: return
    SCACHE.value = _kept["scache"]
    tensors._METADATA, ops.RewriteContext = _kept["metadata"], _kept["context"]
    Tensor.linear_with_vars = _kept["linear"]


_kept: dict[str, Any] = {}          # tinygrad's own, while ours are in their place


def note_call(nodes: Sequence[UOp], name: str) -> None:
    """Notes nodes that no Tensor method makes, a call and its results: where they are made, under a name."""
    if not _depth or not _scope: return
    for node in nodes: all_metadata.setdefault(node, (LayerMetadata(name, False, _scope),))


class _Noting(tensors._ContextVar):
    """tensor._METADATA: the method that runs, with the layer it runs in."""

    def set(self, x: Any) -> Any:
        if type(x) is Metadata and _scope: x = LayerMetadata(x.name, x.backward, _scope)
        return super().set(x)


class _Carrying(ops.RewriteContext):
    """Rewrites, and carries notes along."""

    def walk_rewrite(self, root: UOp) -> UOp:
        with _rewriting(self, root): made = super().walk_rewrite(root)
        return _tag_origins(made) if root.op is made.op is Ops.LINEAR else made

    def unified_rewrite(self, root: UOp) -> UOp:
        with _rewriting(self, root): made = super().unified_rewrite(root)
        return _tag_origins(made) if root.op is made.op is Ops.LINEAR else made


_inside: list[list[tuple[UOp, Mapping[UOp, UOp]]]] = []  # of each rewrite that runs: what its rules rewrote


@contextlib.contextmanager
def _rewriting(context: ops.RewriteContext, root: UOp) -> Iterator[None]:
    """Around a rewrite. A value that a rule rewrites (to other ranges) may be on its way, without notes until
    the whole is done: what it became tells, and then what was made of it is known too."""
    _inside.append([])
    try: yield
    finally: inside = _inside.pop()
    if isinstance(root.arg, KernelInfo) or root.dtype in dtypes.weaks: return  # code generation, and indices
    if _inside and root.dtype != dtypes.void and not _notes(root):
        _inside[-1].append((root, context.replace))
        return
    carry(context.replace)
    # rules also rewrite values with placeholders in them, which are of no layer
    if later := [replaced for value, replaced in inside if value in context.replace]:
        for each in (*later, context.replace): carry(each)


def _linear_with_vars(*tensors: Tensor) -> tuple[UOp, dict[str, int]]:
    with scheduling([tensor.uop for tensor in tensors]):
        made: tuple[UOp, dict[str, int]] = _kept["linear"](*tensors)
        return made


@contextlib.contextmanager
def scheduling(wanted: Sequence[UOp]) -> Iterator[None]:
    """Around the scheduling of some values. The bodies of calls are the same nodes in equal layers, so notes
    of one schedule are none of the next."""
    global _session
    before, _session = _session, _Session() if _depth else None
    try:
        if _session is not None: _seed(_session, wanted)
        yield
    finally: _session = before


def _seed(session: _Session, wanted: Sequence[UOp]) -> None:
    """tinygrad notes the last node that a method makes. The others were made for the first that uses them;
    and a view of what is computed gets the note of that, as views vanish."""
    used: dict[UOp, Notes] = {}
    nodes = [*UOp.sink(*wanted).toposort()]
    for node in reversed(nodes):
        if not (notes := all_metadata.get(node)):
            if (notes := used.get(node)) is None: continue
            session.notes[node] = notes
        used.update(dict.fromkeys(node.src, notes))
    computed: dict[UOp, Notes] = {}
    for node in nodes:
        if node.op in _COMPUTED: computed[node] = session.notes.get(node) or all_metadata.get(node, ())
        elif node.op in _VIEWS and (notes := computed.get(node.src[0])):
            session.notes[node] = computed[node] = notes


def carry(replaced: Mapping[UOp, UOp]) -> None:
    """Carries notes from nodes to what took their places."""
    if not _depth: return
    found: dict[UOp, Notes] = {}
    vanished: dict[UOp, Notes] = {}  # what a node that vanished into its source had: for want of a better
    for old, new in replaced.items():
        kernel = new.op is Ops.CALL and old.op in (Ops.END, Ops.STORE)
        if not (notes := _principal(old) if kernel else _notes(old)):
            if old.op is new.op and (back := found.get(new) or _notes(new)): found[old] = back
        elif old.op is new.op or kernel: found[new] = notes
        elif new.op not in _EDGE:
            (vanished if old.op in _PASSIVE else found).setdefault(new, _notes(new) or notes)
    for node, notes in {**vanished, **found}.items(): _note(node, notes)


def carry_region(region: frozenset[UOp], result: UOp) -> None:
    """Gives a kernel of ours the notes of what it computes; `result` is its storage after its call."""
    if not _depth: return
    while result.op in GroupOp.Movement: result = result.src[0]
    noted = [notes for node in sorted(region, key=lambda node: node.op is not Ops.REDUCE)
             if (notes := _notes(node))]
    if result.op is not Ops.AFTER or not noted: return
    for node in result.src[1:]:
        _note(node, noted[0])
        for copy in node.src:
            if copy.op is Ops.CONTIGUOUS and not _notes(copy): _note(copy, noted[0])


def _notes(node: UOp) -> Notes:
    if _session is not None and (notes := _session.calls.get(node) or _session.notes.get(node)): return notes
    return all_metadata.get(node) or ()


def _note(node: UOp, notes: Notes) -> None:
    if _session is None: all_metadata.setdefault(node, notes)
    elif node.op is not Ops.CALL: _session.notes[node] = notes
    else:
        _session.calls[node] = notes
        sources = [_unwrap_src(s) for s in node.src[1:] if not s.is_bound_var]
        # the call as create_schedule will make it, which is no rewrite
        if node.src[0].op in (Ops.SINK, Ops.PROGRAM) and all(s.op in _STORAGE for s in sources):
            _session.calls[node.src[0].call(*(s.buf_uop for s in sources))] = notes


def _tag_origins(linear: UOp) -> UOp:
    """A schedule whose calls say where they come from. They keep that through all that tinygrad does with
    them; and two calls that the memory planner gives the same places stay two."""
    if _session is None: return linear
    calls = []
    for call in linear.src:
        if call.tag is None and (notes := _session.calls.get(call)):
            call = call.replace(tag=Origin(getattr(notes[-1], "layer", ""), str(notes[-1])))
        calls.append(call)
    return linear.replace(src=tuple(calls))


def _principal(store: UOp) -> Notes:
    """Returns the notes of a kernel that is about to be cut out. What a rule made beside what it put in a
    node's place is of the node that uses it."""
    used: dict[UOp, Notes] = {}
    computed: Notes = ()
    for node in reversed(store.toposort(gate=lambda node: node.op not in _EDGE)):
        if node.dtype in dtypes.weaks: continue  # an index, the same node in many kernels
        if not (notes := _notes(node) or used.get(node, ())): continue
        if node.op is Ops.REDUCE: return notes
        if node.op not in _PASSIVE: computed = computed or notes
        used.update(dict.fromkeys(node.src, notes))
    return computed or next(iter(used.values()), ())


# **** NVTX ****

_nvtx: Any = None


def span(name: str) -> AbstractContextManager[None]:
    """An NVTX range around the block, with NV_NVTX=1."""
    return _NOTHING if _nvtx is None else _range(name)


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    _nvtx.push_range(name, domain="tinygrad_nv")
    try: yield
    finally: _nvtx.pop_range(domain="tinygrad_nv")


def enable_nvtx() -> None:
    """Does what NV_NVTX=1 asks for. Raises `ConfigError` where there is no nvtx."""
    global _nvtx
    if not config.get("NV_NVTX") or _nvtx is not None: return
    try:
        import nvtx
    except ImportError as error:
        raise ConfigError("NV_NVTX=1 without the package nvtx", "nvtx, which makes the ranges",
                          "pip install nvtx, or unset NV_NVTX") from error
    _nvtx = nvtx
    start()
    hooks.add_execute("nvtx", _execute)


def disable_nvtx() -> None:
    """Undoes `enable_nvtx`."""
    global _nvtx
    if _nvtx is None: return
    hooks.remove_execute("nvtx")
    stop()
    _nvtx = None


def _execute(call: UOp, ctx: realize.ExecContext, run: hooks.Run) -> hooks.Seconds:
    with _range(title(call)): return run(call, ctx)


def title(call: UOp) -> str:
    """A call in one line: its layer and its kernel, or how many kernels a graph has and the layer around
    them."""
    body = call.src[0]
    if body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph":
        from tinygrad_nv.runtime.observe.chrome import common
        inside, name = body.src[0].src, f"graph of {len(body.src[0].src)} kernels"
        where = common([origin(each).layer for each in inside])
    else:
        name = " ".join(ansistrip(realize.get_call_name(call, realize.get_call_arg_uops(call))).split())
        where = origin(call).layer
    return f"{where} · {name}" if where else name
