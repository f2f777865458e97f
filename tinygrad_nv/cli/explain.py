"""`tinygrad-nv explain`: the kernels of a model's step, or of one matmul, at several levels.

Protocol: without --level a table, and a line for each matmul with schedule, predicted time and registers.
With a level (spec, tile, ptx, sass, c) the text of each distinct kernel of this package, or of the one
selected by --kernel; with --pass what the passes of the tile language make of those that are programs.
`--gemm [BATCHx]MxNxK` explains one matmul, `--program FILE.py:KERNEL` one kernel with @kernel, for a GPU that
need not be present, or with `--arch cpu` for this processor. An option without effect is an error.
"""
from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from tinygrad_nv.cli.engine_options import add_model_options
from tinygrad_nv.errors import RequestError, ScheduleError
from tinygrad_nv.explain.levels import LEVELS
from tinygrad_nv.ptx.assemble import ARCHITECTURES
from tinygrad_nv.tile.gemm.dense import MAJORS, RESULTS, TYPES, WORDS
from tinygrad_nv.tile.gemm.spec import GemmSpec

OF_MODELS = ("kernel", "prefill", "max_model_len", "gpu_memory_utilization", "device")
OF_MATMULS = {"majors": "NT", "epilogue": "", "out": ""}
OF_TARGETS = {"arch": "sm_90a", "sm_count": 0}
CPU = "cpu"
SHORT = {"auto": "bf16", "bfloat16": "bf16", "float16": "f16", "float32": "f32"}
Find = Callable[[str | None, bool], Path]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], directory: str,
                find: Find) -> None:
    """Adds `explain`. `find` gives the directory of a model's name."""
    explain = commands.add_parser("explain", help="the kernels of a model's step, or of a matmul")
    explain.add_argument("model", nargs="?", metavar="MODEL", help=directory)
    explain.add_argument("--level", choices=LEVELS, help="print each kernel of ours at this level")
    explain.add_argument("--pass", dest="of_pass", metavar="NAME|all",
                         help="print what this pass makes of each kernel that is a program")
    explain.add_argument("--kernel", metavar="N|NAME", help="only this kernel")
    explain.add_argument("--hash", action="store_true",
                         help="hashes of each kernel's graph and schedule, and of the step; of a bundle "
                         "those of all its steps")
    explain.add_argument("--prefill", type=int, metavar="N",
                         help="of a step that takes N tokens of a prompt (default: a decode step)")
    add_model_options(explain)
    matmul = explain.add_argument_group("one matmul")
    matmul.add_argument("--gemm", type=_extents, metavar="[BATCHx]MxNxK",
                        help="explain this matmul instead of a model; --dtype is then one of "
                        f"{', '.join(TYPES)} (default bf16)")
    matmul.add_argument("--majors", metavar="XY",
                        help=f"{', '.join(MAJORS[:-1])} or {MAJORS[-1]} as in BLAS (default NT: x @ w.T)")
    matmul.add_argument("--epilogue", metavar="WORD+…", help=f"epilogue operations: {', '.join(WORDS)}")
    matmul.add_argument("--out", metavar="TYPE",
                        help=f"of the result: {', '.join(RESULTS)} (default: as the operands; bf16 for fp8, "
                        "s32 for bytes)")
    program = explain.add_argument_group("one kernel of a file")
    program.add_argument("--program", metavar="FILE.py:KERNEL",
                         help="explain this kernel with @kernel: its passes, or --pass one of them")
    program.add_argument("--set", action="append", dest="given", metavar="NAME=VALUE",
                         help="the size of a dimension of it, or the value of an argument (repeated)")
    target = explain.add_argument_group("the target of --gemm and --program")
    target.add_argument("--arch", choices=(*ARCHITECTURES, CPU),
                        help="the GPU's architecture (default sm_90a), or cpu")
    target.add_argument("--sm-count", type=int, metavar="N",
                        help="multiprocessors of the GPU (default: those of H100, A100 or L40S)")
    explain.set_defaults(run=lambda arguments: run(arguments, find))


def _extents(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+){2,5}", text):
        message = f"{text!r} is not [BATCHx]MxNxK; write 4096x4096x4096 or 32x128x128x64"
        raise argparse.ArgumentTypeError(message)
    return tuple(map(int, text.split("x")))


def run(arguments: argparse.Namespace, find: Find) -> int:
    """Prints the explanation."""
    _check(arguments)
    for name, value in {**OF_MATMULS, **OF_TARGETS}.items():
        if getattr(arguments, name) is None: setattr(arguments, name, value)
    print(_gemm(arguments) if arguments.gemm else _program(arguments) if arguments.program
          else _model(arguments, find))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises `RequestError` for an option without effect."""
    one = "--gemm" if arguments.gemm else "--program" if arguments.program else ""
    if arguments.gemm and arguments.program:
        raise RequestError("--gemm and --program", "one of them", "leave one out")
    if one and arguments.model is not None:
        raise RequestError(f"a model ({arguments.model}) and {one}", "one of them", "leave one out")
    if one and (words := _list_given(arguments, OF_MODELS)):
        kind = "matmul" if arguments.gemm else "kernel"
        raise RequestError(f"{words} with {one}", f"options of one {kind}", "leave it out")
    of_others = OF_MATMULS if one == "--program" else () if one else (*OF_MATMULS, *OF_TARGETS)
    if words := _list_given(arguments, of_others):
        raise RequestError(f"{words} without --gemm", "one matmul", "add --gemm 4096x4096x4096")
    if arguments.given and not arguments.program:
        raise RequestError("--set without --program", "a kernel of a file", "add --program FILE.py:KERNEL")
    if arguments.level is not None and (arguments.of_pass or arguments.program):
        raise RequestError("--level with " + ("--pass" if arguments.of_pass else "--program"),
                           "--pass of a program, or --level of others", "leave one out")
    if arguments.of_pass and arguments.gemm:
        raise RequestError("--pass with --gemm", "a program of the tile language",
                           f"--level {'|'.join(LEVELS)}")
    if arguments.hash and (one or arguments.level is not None or arguments.of_pass):
        raise RequestError("--hash with --gemm or --level", "--hash of a model", "leave one out")
    if arguments.kernel is not None and arguments.level is None and not arguments.of_pass:
        raise RequestError("--kernel without --level", f"--level {'|'.join(LEVELS)}, or --pass",
                           "choose a level to show")


def _list_given(arguments: argparse.Namespace, names: Iterable[str]) -> str:
    """Lists the given options among `names`."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None)


def _gemm(arguments: argparse.Namespace) -> str:
    from tinygrad_nv.explain import levels
    from tinygrad_nv.tile.choose import choose
    from tinygrad_nv.tile.gemm.dense import dense
    from tinygrad_nv.tile.gemm.templates import refusal
    from tinygrad_nv.tile.gpu import gpu_model_for
    from tinygrad_nv.tile.template import GPU
    if arguments.sm_count < 0:
        raise RequestError(f"--sm-count {arguments.sm_count}", "how many multiprocessors the GPU has")
    *batch, m, n, k = arguments.gemm
    spec = dense(m, n, k, SHORT.get(arguments.dtype, arguments.dtype), arguments.out, arguments.majors,
                 tuple(batch), arguments.epilogue)
    if arguments.arch == CPU: return _on_cpu(spec, arguments)
    gpu_model = gpu_model_for(arguments.arch, arguments.sm_count)
    schedule = choose(spec, gpu := GPU(arguments.arch, gpu_model.sm_count))
    if schedule is None:
        raise ScheduleError(f"no template takes {spec} on {arguments.arch}: {refusal(spec, gpu)}",
                            "a matmul that one of them supports",
                            "allow tf32 (--dtype tf32)" if arguments.dtype in ("f32", "float32") else
                            "change what the reasons name")
    matmul = levels.ScheduledGemm(spec, schedule, arguments.arch, gpu_model.sm_count)
    if arguments.level is None: return "\n".join(levels.table([(matmul.kernel.name, matmul)]))
    return levels.show(matmul, arguments.level).rstrip()


def _on_cpu(spec: GemmSpec, arguments: argparse.Namespace) -> str:
    from tinygrad_nv.cpu.gemm.templates import choose
    from tinygrad_nv.cpu.target import host
    from tinygrad_nv.explain import levels_cpu
    from tinygrad_nv.tile.templates import TABLE
    if arguments.sm_count:
        raise RequestError("--sm-count with --arch cpu", "an option of GPUs", "leave it out")
    here = host()
    if (schedule := choose(spec, here)) is None:
        raise ScheduleError(f"no template takes {spec} on {here.isa}: {TABLE.why_not(spec, here)}",
                            "a matmul that one of them supports", "change what the reasons name")
    found = levels_cpu.CPUMatmul(spec, schedule, here)
    if arguments.level is None: return "\n".join(levels_cpu.table([(found.kernel.name, found)]))
    text = levels_cpu.show(found, arguments.level).rstrip()
    return levels_cpu.legible(text) if arguments.level == "c" else text


def _program(arguments: argparse.Namespace) -> str:
    from tinygrad_nv.cli.shapes import parse_setting
    from tinygrad_nv.explain.annotated import make_arguments, read_kernel
    from tinygrad_nv.language.passes import check, list_passes, show_passes
    if arguments.of_pass: check(arguments.of_pass, (CPU if arguments.arch == CPU else "gpu",))
    kernel = read_kernel(arguments.program)
    given = make_arguments(kernel, dict(map(parse_setting, arguments.given or [])))
    build = kernel.build_for(arguments.arch, arguments.sm_count, **given)
    return show_passes(build, arguments.of_pass) if arguments.of_pass else list_passes(build)


def _model(arguments: argparse.Namespace, find: Find) -> str:
    from tinygrad_nv.bundle.container import is_bundle
    if is_bundle(path := find(arguments.model, arguments.download)): return _bundle(path, arguments)
    from tinygrad import Tensor, dtypes

    from tinygrad_nv import explain
    from tinygrad_nv.cli import console
    from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
    from tinygrad_nv.explain.hashes import hash_table
    from tinygrad_nv.models.paged import PagedBatch, SequenceGroup
    from tinygrad_nv.tile.sequences import COLUMNS
    if arguments.of_pass:
        from tinygrad_nv.language.passes import check
        check(arguments.of_pass)
    llm = console.load(path, arguments)
    taken = 1 if arguments.prefill is None else arguments.prefill
    if not 1 <= taken <= llm.length:
        raise RequestError(f"--prefill {taken}", f"1 to {llm.length} tokens", "take fewer")
    rows = 1 if arguments.prefill is None else GROUP
    def make_input(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=dtypes.int32,
                                                               device=llm.model.device)
    count = -(-taken // rows)
    states = make_input(count, len(COLUMNS)) if llm.config.has_states else None
    group = SequenceGroup(rows, make_input(count, llm.runner.entries), make_input(count), states)
    batch = [PagedBatch((group,), llm.model.rope_tables)] * len(llm.runner.groups.windows)
    wanted = None if arguments.prefill is None else make_input(1)
    lowering = explain(llm.model.step_paged(make_input(group.num_tokens), batch, llm.runner.cache, wanted))
    if arguments.hash: return hash_table(lowering.kernels)
    if arguments.of_pass: return lowering.passes(arguments.of_pass, arguments.kernel)
    return str(lowering) if arguments.level is None else lowering.show(arguments.level, arguments.kernel)


def _bundle(path: Path, arguments: argparse.Namespace) -> str:
    """The steps of a bundle, which has no graphs to be explained: their hashes."""
    from tinygrad_nv.bundle.container import open_bundle
    from tinygrad_nv.bundle.report import inspect
    if not arguments.hash:
        raise RequestError(f"{path} is a bundle: its kernels are compiled", "a model directory, or --hash",
                           "look at the bundle: tinygrad-nv bundle inspect")
    return inspect(open_bundle(path, arguments.require_signed, arguments.weights), steps=True)
