"""Plans as text, and as plain data for JSON.

Protocol: `text(name, found)` shows the best plan, its memory, its step and its collectives, then other
layouts and why others do not fit. All times and rates are modelled, and the text says so.
"""
from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tinygrad_nv.dist.plan.layout import Training, Work
from tinygrad_nv.dist.plan.planning import Plan
from tinygrad_nv.dist.plan.search import Found
from tinygrad_nv.runtime.observe.memory_report import human
from tinygrad_nv.table import align_columns

NUMBERS = (1, 2, 3, 4)


def milliseconds(seconds: float) -> str:
    """With three digits or more."""
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"


def setting(work: Work) -> str:
    """Returns, of training, the settings that are chosen beside the layout."""
    if not isinstance(work, Training): return ""
    said = [f"ZeRO {work.zero}"] * bool(work.zero)
    return ", ".join([*said, f"recompute {work.recompute}", f"microbatch {work.microbatch}"])


def text(name: str, found: Found, top: int = 5) -> str:
    """The best plan, and a table of the first `top`."""
    lines = single(name, found.plans[0])
    if len(found.plans) + len(found.refused) > 1: lines += ["", *_layouts(found, top)]
    return "\n".join(lines)


def single(name: str, made: Plan) -> list[str]:
    """One plan."""
    work, chosen = made.work, setting(made.work)
    what = f"{work.batch} sequences of {work.seq_len} tokens a step, {work.precision}" \
        if isinstance(work, Training) else \
        f"{work.batch} sequences of {work.input_len} + {work.output_len} tokens, {work.quantization}"
    lines = [f"{name} on {made.cluster}", f"{made.layout}{', ' * bool(chosen)}{chosen}; {what}",
             "all times are modelled, not measured", "", *_memory(made), "", *_step(made)]
    if made.uses: lines += ["", *_uses(made)]
    return [*lines, "", *_rates(made)]


def _memory(made: Plan) -> list[str]:
    held = made.memory
    rows = [("memory of a GPU", ""), *((name, human(size)) for name, size in held.parts),
            ("all", human(held.total)), ("fits", human(held.limit))]
    return align_columns(rows, (1,))


def _step(made: Plan) -> list[str]:
    times, count = made.kernels, made.microbatches
    rows = [("a step" if isinstance(made.work, Training) else "a decode step", "ms", "share")]
    def row(name: str, seconds: float) -> None:
        if seconds: rows.append((name, milliseconds(seconds), f"{seconds / made.step_s:.0%}"))
    row("matmuls", times.matmul * count)
    row("attention", times.attention * count)
    row("other kernels", times.other * count)
    row("collectives, exposed", made.exposed_s)
    row("AdamW", made.optimizer_s)
    row("pipeline bubble", made.bubble * made.step_s)
    rows.append(("all", milliseconds(made.step_s), ""))
    return align_columns(rows, (1, 2))


def _uses(made: Plan) -> list[str]:
    rows = [("collective", "calls", "bytes", "us", "exposed ms", "algorithm", "of", "beside")]
    for use in made.uses:
        one = use.collective
        rows.append((one.kind.replace("_", "-"), f"{use.count:g}", human(int(one.nbytes)),
                     f"{one.seconds * 1e6:.1f}", milliseconds(use.exposed_s), one.algorithm, use.purpose,
                     use.hidden_by or "-"))
    return align_columns(rows, NUMBERS)


def _rates(made: Plan) -> list[str]:
    rows = [("tokens/s", f"{made.tokens_per_s:,.0f}"), ("tokens/s of a GPU", f"{made.per_gpu:,.0f}")]
    if isinstance(made.work, Training): rows.append(("MFU", f"{made.mfu:.1%}"))
    else:
        rows += [("first token, ms", milliseconds(made.first_token_s)),
                 ("a token, ms", milliseconds(made.step_s)),
                 ("share of HBM bandwidth", f"{made.bandwidth:.0%}")]
    return align_columns(rows, (1,))


def _layouts(found: Found, top: int) -> list[str]:
    trains = isinstance(found.plans[0].work, Training)
    rows = [("layouts, the best first", "tokens/s", "a step, ms", "memory", "MFU" if trains else "HBM", "")]
    for made in found.plans[:top]:
        rows.append((str(made.layout), f"{made.tokens_per_s:,.0f}", milliseconds(made.step_s),
                     human(made.memory.total), f"{made.mfu if trains else made.bandwidth:.0%}",
                     setting(made.work)))
    lines = align_columns(rows, NUMBERS)
    if not found.refused: return lines
    refused = [(str(each.layout), each.why, setting(each.work)) for each in found.refused[:top]]
    left = len(found.refused) - len(refused)
    return [*lines, "", *align_columns([("not possible", "", ""), *refused]),
            *[f"and {left} more"] * bool(left)]


# **** plain data ****

def data(name: str, found: Found, top: int = 5) -> dict[str, Any]:
    """For JSON."""
    return {"model": name, "modelled": True, "plan": of_plan(found.plans[0]),
            "layouts": [of_plan(each) for each in found.plans[:top]],
            "refused": [{"layout": asdict(each.layout), "why": each.why, "over_bytes": each.over}
                        for each in found.refused]}


def of_plan(made: Plan) -> dict[str, Any]:
    """One plan."""
    cluster = {"gpu": made.cluster.device.name, "gpus": made.cluster.gpus, "nodes": made.cluster.nodes,
               "link": made.cluster.device.link.name, "net": made.cluster.net.name}
    uses = [{"purpose": use.purpose, "kind": use.collective.kind, "calls": use.count,
             "bytes": use.collective.nbytes, "algorithm": use.collective.algorithm,
             "alpha_s": use.collective.alpha_s, "wire_bytes": use.collective.wire_bytes,
             "bytes_per_s": use.collective.bytes_per_s, "seconds": use.seconds, "exposed_s": use.exposed_s,
             "beside": use.hidden_by} for use in made.uses]
    return {"layout": asdict(made.layout), "work": asdict(made.work), "cluster": cluster,
            "memory": {"parts": dict(made.memory.parts), "total": made.memory.total,
                       "limit": made.memory.limit, "fits": made.memory.fits},
            "kernels_s": asdict(made.kernels), "collectives": uses, "step_s": made.step_s,
            "tokens_per_s": made.tokens_per_s, "tokens_per_s_of_a_gpu": made.per_gpu, "mfu": made.mfu,
            "bandwidth_share": made.bandwidth, "first_token_s": made.first_token_s, "bubble": made.bubble,
            "optimizer_s": made.optimizer_s, "microbatches": made.microbatches}
