"""`tinygrad-nv plan`: what a model takes of GPUs that are not here, and how fast it would be.

Protocol: prints the best layout of what the options leave open, as a table or with --json as one object;
nothing is loaded but config.json, and nothing is measured. A layout that cannot be, or that does not fit,
exits with 2 and says why.
"""
from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinygrad_nv.cli.model_path import find_model as model_path
from tinygrad_nv.errors import PlanError

if TYPE_CHECKING:
    from tinygrad_nv.dist.plan.layout import Work
    from tinygrad_nv.dist.plan.search import Found

HELP = "memory and speed of a model over GPUs that are not here"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `plan`."""
    plan = commands.add_parser("plan", help=HELP, usage="%(prog)s [options] MODEL --gpus 8xH100")
    plan.add_argument("model", metavar="MODEL", help="a model directory (config.json is enough), a GGUF "
                      "file, a hub name, or a public architecture such as llama-3.1-70b")
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    plan.add_argument("--top", type=int, default=5, metavar="N", help="layouts to list (default 5)")
    cluster = plan.add_argument_group("GPUs")
    cluster.add_argument("--gpus", required=True, metavar="NxGPU", help="of a node, such as 8xH100 (H100, "
                         "H100-PCIe, H200, A100, L40S)")
    cluster.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes (default 1)")
    cluster.add_argument("--net", default="400G", metavar="RATE", help="of a GPU's adapter (default 400G)")
    cluster.add_argument("--power", type=float, metavar="W", help="power limit of a GPU, in watts")
    layout = plan.add_argument_group("layout", "what is left out is searched")
    for name, what in (("tp", "tensor-parallel ranks"), ("pp", "pipeline stages"),
                       ("dp", "data-parallel ranks"), ("ep", "ranks that experts are dealt to, whole")):
        layout.add_argument(f"--{name}", type=int, metavar="N", help=what)
    layout.add_argument("--sp", action=argparse.BooleanOptionalAction,
                        help="sequence parallel beside tensor parallel (default: in training)")
    work = plan.add_argument_group("work")
    work.add_argument("--batch", type=int, metavar="N", help="sequences at once, or in a step of training, "
                      "on all GPUs (default 32; of training 2 a GPU)")
    work.add_argument("--achieved", type=float, metavar="X", help="share of the kernels' modelled rates "
                      "that is reached (default: what published engines reach)")
    _add_inference(plan.add_argument_group("inference"))
    _add_training(plan.add_argument_group("training"))
    plan.set_defaults(run=run)


def _add_inference(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input-len", type=int, default=1024, metavar="N",
                       help="tokens of a prompt (default 1024)")
    group.add_argument("--output-len", type=int, default=128, metavar="N",
                       help="tokens of an answer (default 128)")
    group.add_argument("--quantization", "-q", metavar="TYPE",
                       help="of matrices: bf16, fp8, int8, int4 (default: what the configuration says)")
    group.add_argument("--kv-cache-dtype", default="bf16", metavar="TYPE", help="bf16 or fp8 (default bf16)")
    group.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="N",
                       help="tokens of a step (default 8192)")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="X", help="fraction of a GPU's memory "
                       "(default 0.9; of training 0.95)")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--train", action="store_true", help="plan training instead of inference")
    group.add_argument("--seq-len", type=int, default=8192, metavar="N",
                       help="tokens of a sequence (default 8192)")
    group.add_argument("--precision", default="bf16", metavar="TYPE",
                       help="of matmuls: bf16, fp8 (default bf16)")
    group.add_argument("--microbatch", type=int, metavar="N", help="sequences of a rank at a time")
    group.add_argument("--zero", type=int, metavar="N", help="0 to 3: what data-parallel ranks share out")
    group.add_argument("--recompute", metavar="WHAT", help="in the backward pass: none, selective, full")
    group.add_argument("--schedule", default="1f1b", metavar="NAME",
                       help="of the pipeline: 1f1b, gpipe, interleaved, zero-bubble (default 1f1b)")
    group.add_argument("--virtual", type=int, default=1, metavar="N", help="chunks of a stage, interleaved")
    group.add_argument("--overlap-tp", action="store_true", help="tensor-parallel collectives beside matmuls")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from tinygrad_nv.dist.plan import presets, report
    from tinygrad_nv.dist.plan.cluster import cluster
    from tinygrad_nv.dist.plan.planning import plan, require_room
    from tinygrad_nv.dist.plan.search import Choice, Found, search, variants
    config = presets.find(arguments.model, model_path(arguments.model))
    where = cluster(arguments.gpus, arguments.nodes, arguments.net)
    if arguments.power is not None: where = replace(where, device=where.device.with_power(arguments.power))
    if arguments.top < 1: raise PlanError(f"--top {arguments.top}", "1 or more")
    if arguments.quantization is None: arguments.quantization = presets.storage_of(config)
    work = _work(arguments, where.gpus)
    choice = Choice(*(getattr(arguments, name) for name in
                      ("tp", "pp", "dp", "ep", "sp", "zero", "recompute", "microbatch")))
    open_ = list(variants(config, where, work, choice))
    if len(open_) == 1:
        (layout, decided), = open_
        require_room(config, layout, where, decided)
        found = Found((plan(config, layout, where, decided),), ())
    else:
        found = search(config, where, work, choice)
        if not found.plans: raise _none(found, len(open_))
    if arguments.json: print(json.dumps(report.data(arguments.model, found, arguments.top)))
    else: print(report.text(arguments.model, found, arguments.top))
    return 0


def _work(arguments: argparse.Namespace, gpus: int) -> Work:
    from tinygrad_nv.dist.plan.layout import Inference, Training
    more: dict[str, Any] = {}
    for name, option in (("achieved", "achieved"), ("utilization", "gpu_memory_utilization")):
        value = getattr(arguments, option)
        if value is None: continue
        if not 0 < value <= 1:
            raise PlanError(f"--{option.replace('_', '-')} {value:g}", "more than 0, at most 1")
        more[name] = value
    if not arguments.train:
        batch = 32 if arguments.batch is None else arguments.batch
        return replace(Inference(batch, arguments.input_len, arguments.output_len, arguments.quantization,
                                 arguments.kv_cache_dtype,
                                 max_tokens=arguments.max_num_batched_tokens), **more)
    batch = 2 * gpus if arguments.batch is None else arguments.batch
    return replace(Training(batch, arguments.seq_len, precision=arguments.precision,
                            schedule=arguments.schedule, virtual=arguments.virtual,
                            overlap_tp=arguments.overlap_tp), **more)


def _none(found: Found, tried: int) -> PlanError:
    """No layout is possible: the nearest to it."""
    best = found.refused[0]
    if best.over:
        return PlanError(f"none of {tried} layouts fits; the nearest, {best.layout}, takes {best.why}",
                         "a layout that fits into every GPU",
                         "more GPUs, a smaller --batch, or --quantization fp8")
    return PlanError(f"none of {tried} layouts is possible: {best.layout}: {best.why}", "numbers that divide",
                     "leave --tp, --pp, --dp or --ep out")
