"""A matmul at four levels, as text: spec, schedule, PTX and SASS; levels_cpu.py has C.

Protocol: a `ScheduledGemm` is spec, schedule and GPU; its kernel follows from these, so
`ScheduledGemm.kernel` is the text that runs, built again. `show(matmul, level)` is the text of a level:

    spec   extents, where the operands lie, and what happens to a sum before it is stored
    tile   schedule, tiles, grid, predicted time, shared memory, tensor maps, and the kernel in outline
    ptx    the kernel, with how it is launched in comments at its head
    sass   what ptxas makes of it, and what its main loop costs

`table` is a line for each of several matmuls. Nothing here needs a GPU; sass needs ptxas and a disassembler.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tinygrad_nv.errors import PTXError, RequestError
from tinygrad_nv.patterns.target import Chosen
from tinygrad_nv.ptx.assemble import Assembly, Resources, assemble, find_program
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.table import align_columns
from tinygrad_nv.tile.expression import Apply, Expression, loads, short, walk
from tinygrad_nv.tile.expression import show as written
from tinygrad_nv.tile.gemm.cost import CostModel, Prediction, predict
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.known_error import describe_error
from tinygrad_nv.tile.template import GPU

LEVELS = ("spec", "tile", "ptx", "sass", "c")
# how the builder declares shared memory: its own, or a part of what a launch gives
STATIC = re.compile(r"^\s*\.shared \.align \d+ \.b8 (\w+)\[(\d+)\];", re.MULTILINE)
DYNAMIC = re.compile(r"^\s*// \w+\+(\d+): (\w+)\[(\d+)\]$", re.MULTILINE)
MAP = re.compile(r"\.param \.align 64 \.b8 (\w+)\[128\]")
REMARK = re.compile(r"^( +)// (.*)$", re.MULTILINE)
WIDEST = 72   # characters of a matmul in a table
LONGEST = 60  # characters of an expression without a name


@dataclass(frozen=True)
class ScheduledGemm:
    """A matmul by a schedule on a GPU with `sm_count` multiprocessors, which has room for so many `clusters`
    at once (left out: as ptx/gpcs.py has it)."""
    spec: GemmSpec
    schedule: GemmSchedule
    arch: str
    sm_count: int
    clusters: Clusters = ()

    @property
    def choice(self) -> Chosen:
        """Spec and schedule that make the kernel."""
        return Chosen(self.spec, self.schedule, GPU(self.arch, self.sm_count, self.clusters))

    @property
    def kernel(self) -> GemmKernel:
        """The kernel. Raises `ScheduleError` for an impossible schedule."""
        return cast(GemmKernel, self.choice.build())

    @property
    def prediction(self) -> Prediction:
        """Prediction of the cost model."""
        return predict(self.spec, self.schedule, gpu_model_for(self.arch, self.sm_count))


def show(matmul: ScheduledGemm, level: str) -> str:
    """The matmul at a level. Raises `RequestError` for a level there is not, `ToolchainError` where sass
    lacks a program."""
    check(level)
    if level == "c":
        raise RequestError(f"C of {matmul.kernel.name} on {matmul.arch}", "a kernel for a CPU",
                           "--level ptx, or run with DEV=CPU")
    texts = {"spec": spec_text, "tile": tile_text, "ptx": ptx_text, "sass": sass_text}
    return texts[level](matmul)


def check(level: str) -> None:
    """Raises `RequestError` for a level there is not."""
    if level not in LEVELS:
        raise RequestError(f"level {level!r}", f"one of {', '.join(LEVELS)}", "choose one of these")


def shorten(text: str, most: int) -> str:
    """At most so many characters of a text; where some are left out, the last is …"""
    return text if len(text) <= most else f"{text[:most - 1]}…"


def table(matmuls: Sequence[tuple[str, ScheduledGemm]]) -> list[str]:
    """A line for each of several matmuls, each with the words before it. What the cost model predicts is
    `predicted`; of tuned ones `tuning_note` says how the database knows their time."""
    rows = [("", "schedule", "predicted", "bound", "registers", "shared", "matmul", "tuned")]
    for words, matmul in matmuls:
        prediction = matmul.prediction
        rows.append((words, str(matmul.schedule), seconds(prediction.seconds), prediction.bound,
                     _registers(matmul), nbytes(smem_bytes(matmul)),
                     shorten(str(matmul.spec), WIDEST), matmul.choice.tuning_note))
    return align_columns(with_tuned(rows), numbers=(2, 4, 5))


def with_tuned(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows of a table without their last column where nothing was tuned."""
    return [*rows] if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]


def resources(matmul: ScheduledGemm) -> Resources | None:
    """Registers and spills of the kernel; None without ptxas."""
    if find_program("ptxas") is None: return None
    return _assemble(matmul).kernels[matmul.kernel.name]


def _assemble(matmul: ScheduledGemm) -> Assembly: return assemble(matmul.kernel.ptx, matmul.arch)


def _registers(matmul: ScheduledGemm) -> str:
    try: found = resources(matmul)
    except PTXError: return "refused"
    return "-" if found is None else str(found.registers)


# **** spec ****

def spec_text(matmul: ScheduledGemm) -> str:
    """Returns what is computed."""
    return spec_of(matmul.spec)


def spec_of(spec: GemmSpec) -> str:
    """Returns what a matmul is, whatever computes it."""
    batch = f", batch {'x'.join(map(str, spec.batch))}" if spec.batch else ""
    rows = [("extents", f"m {'at most ' if spec.symbolic else ''}{spec.m}, n {spec.n}, k {spec.k}{batch}")]
    if spec.parts > 1: rows.append(("parts", f"{spec.parts} of b, {spec.part} elements apart"))
    rows += [("a", _operand(spec.a, "m")), ("b", _operand(spec.b, "n")), ("out", _result(spec.out))]
    cut = ", operands cut to 10 bits of mantissa (tf32)" if spec.tf32 else ""
    rows.append(("sums", f"{short(spec.accumulate)}{cut}"))
    rows.append(("work",
                 f"{_with_prefix(spec.flops, 1000, 'FLOP')}, at least {nbytes(least_bytes(spec))} moved"))
    for load in loads(spec.epilogue):
        strides = _strides([("m", load.m), ("n", load.n)], load.batch, load.offset)
        rows.append((f"x{load.parameter}", f"{short(load.dtype)}, {strides}"))
    steps = _steps(spec.epilogue)
    rows += [("epilogue" if i == 0 else "", line) for i, line in enumerate(steps)]
    return "\n".join([shorten(str(spec), 110), "", *align_columns(rows)])


def _operand(operand: Operand, rows: str) -> str:
    major = operand.major.replace("MN", rows.upper())
    strides = _strides([(rows, operand.mn), ("k", operand.k)], operand.batch, operand.offset)
    aligned_to = f"rows aligned to {operand.alignment_bytes} B"
    return f"{short(operand.dtype)}, {_major(major)}, {strides}; {aligned_to}"


def _result(result: Result) -> str:
    strides = _strides([("m", result.m), ("n", result.n)], result.batch, result.offset)
    return f"{short(result.dtype)}, {_major(result.major)}, {strides}"


def _major(axis: str) -> str: return f"{axis}-major" if axis else "no two elements side by side"


def _strides(axes: Sequence[tuple[str, int]], batch: Sequence[int], offset: int) -> str:
    words = ", ".join(f"{name} {stride}" for name, stride in axes)
    more = f", batch {' '.join(map(str, batch))}" if batch else ""
    return f"strides {words}{more}" + (f", offset {offset}" if offset else "")


def _steps(root: Expression) -> list[str]:
    """An epilogue as steps: what is used more than once, or is long, has a name and a line."""
    uses = Counter(arg for node in walk(root) if isinstance(node, Apply) for arg in node.args)
    names: dict[Expression, str] = {}
    lines = []
    for node in walk(root):
        if not isinstance(node, Apply) or node is root: continue
        text = written(node, names)
        if uses[node] < 2 and len(text) <= LONGEST: continue
        lines.append(f"t{len(names)} = {text}")
        names[node] = f"t{len(names)}"
    return [*lines, f"out = {written(root, names)}"]


def least_bytes(spec: GemmSpec) -> int:
    """Bytes of operands and result, each element once."""
    def matrices(strides: Sequence[int]) -> int:
        count = 1
        for extent, stride in zip(spec.batch, strides, strict=True): count *= extent if stride else 1
        return count
    return (spec.m * spec.k * matrices(spec.a.batch) * spec.a.dtype.itemsize
            + spec.n * spec.parts * spec.k * matrices(spec.b.batch) * spec.b.dtype.itemsize
            + spec.m * spec.n * spec.matrices * spec.out.dtype.itemsize)


# **** tile ****

def tile_text(matmul: ScheduledGemm) -> str:
    """How it is computed."""
    spec, s, kernel = matmul.spec, matmul.schedule, matmul.kernel
    gpu_model, prediction = gpu_model_for(matmul.arch, matmul.sm_count), matmul.prediction
    rate = _with_prefix(spec.flops / prediction.seconds, 1000, "FLOP/s")
    rows = [*_tiles(matmul), *_launch(kernel, prediction),
            ("predicted", f"{seconds(prediction.seconds)}, {rate}, bound: {prediction.bound}"),
            ("", ", ".join(f"{name} {seconds(part)}" for name, part in prediction.parts.items())),
            ("", describe_error(spec, "cost")),
            ("at best", f"{seconds(CostModel(spec, gpu_model).roofline(s))}, by peak rates alone"),
            *_memory(kernel)]
    found = resources(matmul)
    rows.append(("registers", "- (no ptxas)" if found is None else
                 f"{found.registers} a thread, {found.spill_store_bytes} bytes spilled"))
    rows += [("outline" if i == 0 else "", line) for i, line in enumerate(outline(kernel.ptx))]
    return "\n".join([f"{s} on {matmul.arch} ({gpu_model.name}, {gpu_model.sm_count} SMs)", "",
                      *align_columns(rows)])


def _tiles(matmul: ScheduledGemm) -> list[tuple[str, str]]:
    """Tiles of the result, steps along K, and the ring."""
    spec, s = matmul.spec, matmul.schedule
    tile, (along_m, along_n) = s.tile(spec), s.grid(spec)
    turned = " of the transposed result" if s.swap else ""
    rows = [("tiles", f"{along_m} x {along_n} of {tile.rows} x {tile.columns}"
                      f"{turned}" + (f", {spec.matrices} times" if spec.matrices > 1 else "")),
            ("steps", f"{-(-spec.k // s.block_k)} of {s.block_k} along k"
                      + (f", shared by {s.splits} CTAs" if s.splits > 1 else ""))]
    if not s.depth: return rows
    size = spec.a.dtype.itemsize
    a, b = (count * s.block_k * size for count in (tile.rows, tile.width))
    rows.append(("stages", f"{s.depth} of {nbytes(a + b)}: A {tile.rows} x {s.block_k} {nbytes(a)}, "
                           f"B {tile.width} x {s.block_k} {nbytes(b)}"))
    return rows


def _launch(kernel: GemmKernel, prediction: Prediction) -> list[tuple[str, str]]:
    cluster = "" if kernel.cluster == (1, 1, 1) else f", clusters of {_extents(kernel.cluster)}"
    most = "at most " if kernel.rows_of_cta else ""
    rows = [("grid", f"{most}{_extents(kernel.grid)} CTAs of {kernel.threads} threads{cluster}, "
                     f"{prediction.waves:.2f} waves")]
    if kernel.workspace_bytes:
        rows.append(("workspace", f"{nbytes(kernel.workspace_bytes)}, {kernel.flags} flags"))
    return rows


def _memory(kernel: GemmKernel) -> list[tuple[str, str]]:
    """Shared memory, and tensor maps."""
    rows = [("shared",
             f"{nbytes(_smem_bytes(kernel.ptx))}, {'dynamic' if kernel.dynamic_smem else 'static'}")]
    places = align_columns([(f"{start}", name, f"{size} B") for start, name,
                            size in map_shared_memory(kernel.ptx)],
                     numbers=(0, 2)) if map_shared_memory(kernel.ptx) else []
    rows += [("", f"  {line}") for line in places]
    names = MAP.findall(kernel.ptx)
    for i, (name, m) in enumerate(zip(names, kernel.maps, strict=True)):
        of = " of m" if m.dynamic >= 0 else ""
        strides = f", strides {_extents(m.strides)} B" if m.strides else ""
        at = f", from byte {m.offset_bytes}" if m.offset_bytes else ""
        words = f"{name}, pointer {m.pointer}: {m.dtype} {_extents(m.dims)}{of}{strides}{at}, "
        rows.append(("maps" if i == 0 else "", f"{words}box {_extents(m.box)}, swizzle {m.swizzle}"))
    return rows


def map_shared_memory(ptx: str) -> list[tuple[int, str, int]]:
    """Start, name and bytes of each piece of a kernel's shared memory."""
    if placed := DYNAMIC.findall(ptx): return [(int(start), name, int(size)) for start, name, size in placed]
    made, at = [], 0
    for name, size in STATIC.findall(ptx):
        made.append((at, name, int(size)))
        at += int(size)
    return made


def _smem_bytes(ptx: str) -> int: return max((start + size for start, _, size in map_shared_memory(ptx)),
                                             default=0)


def smem_bytes(matmul: ScheduledGemm) -> int:
    """Shared memory of a CTA."""
    return _smem_bytes(matmul.kernel.ptx)


def outline(ptx: str) -> list[str]:
    """The remarks of a kernel's text, indented as the code is. Of several in a row that differ in numbers
    alone, the first."""
    made: list[str] = []
    last = ""
    for indent, words in REMARK.findall(ptx):
        if re.match(r"\w+\+\d+: \w+\[\d+\]$", words): continue
        line = " " * ((len(indent) - 4) // 2) + words
        if (bare := re.sub(r"\d+", "", line)) == last: continue
        made.append(line)
        last = bare
    return made


# **** ptx, sass ****

def ptx_text(matmul: ScheduledGemm) -> str:
    """The kernel as it is given to a device, and how it is launched."""
    return matmul.kernel.launch.describe() + matmul.kernel.ptx


def sass_text(matmul: ScheduledGemm) -> str:
    """Returns what ptxas makes of the kernel. Raises `ToolchainError` without ptxas or a disassembler."""
    return sass_of(matmul.kernel.ptx, matmul.kernel.name, matmul.arch)


def sass_of(ptx: str, name: str, arch: str) -> str:
    """A kernel of PTX text in SASS."""
    made = assemble(ptx, arch)
    code = functions(disassemble(made.cubin))[name]
    used, main = made.kernels[name], main_loop(code)
    spilled = f"{used.spill_store_bytes} bytes spilled"
    head = [f"// {len(code)} instructions, {used.registers} registers, {spilled}"]
    if main is not None:
        head.append(f"// main loop: {len(main.instructions)} instructions, {main.tensor} on tensor cores")
    rows = [(f"/*{each.address:04x}*/", each.guard,
             f"{each.opcode}{each.modifiers} {each.operands}".rstrip() + ";") for each in code]
    return "\n".join([*head, *align_columns(rows)])


# **** figures ****

def _extents(extents: Sequence[int]) -> str: return "x".join(map(str, extents))


def seconds(value: float) -> str:
    """Three digits and a unit."""
    return f"{value * 1e6:.1f} µs" if value < 1e-3 else f"{value * 1e3:.2f} ms"


def nbytes(value: float) -> str:
    """Bytes in binary units."""
    return f"{value:.0f} B" if value < 1024 else _with_prefix(value, 1024, "iB").replace("k", "K")


def _with_prefix(value: float, base: int, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < base or prefix == "P": break
        value /= base
    text = f"{value:.1f}".removesuffix(".0")
    return f"{text} {prefix}{unit}"


def with_prefix(value: float, unit: str) -> str:
    """A figure in the thousands of a unit that suit it."""
    return _with_prefix(value, 1000, unit)
