"""Status of hardware, from the results: what ran on which GPU at which commit, in docs/status.json, and its
table in docs/status.md.

A subject is right on a GPU where launches recorded from its tests ran there (parts "correctness" and "chains"
of bench/gpu/run.py), and timed there where a row was measured. tests/unit/test_claims.py holds the pages to
it."""
from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib import report_gpu
from bench.lib.report_cpu import Record, markdown

PARTS_OF_LAUNCHES = ("correctness", "chains")


@dataclass(frozen=True)
class Subject:
    """Subject of which a page may say something. `tests`: a pattern of the names of test files whose launches
    were recorded. `timed`: a part of bench/gpu/run.py, or part and a pattern of rows, or the part of a
    schedules file (`schedules:quant`)."""
    title: str
    page: str
    tests: str = "(?!)"
    timed: str = ""
    rows: str = ""
    arch: str = ""      # a pattern of the GPU's name
    isa: str = ""       # a pattern of the instruction set of a result on a CPU


SUBJECTS = {
    "cuda": Subject("driver, device, launches", "cuda.md", "test_(device|launch|cuda)", "smoke"),
    "graphs": Subject("CUDA graphs", "graphs.md", r"test_\w+_graphs$", "smoke"),
    "pdl": Subject("programmatic dependent launch", "gemm.md", "test_griddepcontrol"),
    "gemm": Subject("matmuls with epilogues", "gemm.md", "test_(matmul|gemm|epilogue|store|cuda_gemm)",
                    "gemm", "(?!.*block scales)"),
    "block_scales": Subject("FP8 matmuls with block scales", "gemm.md", "test_scaled", "gemm",
                            ".*block scales"),
    "attention": Subject("attention, forward", "attention.md",
                         "test_(flash_(?!backward)|attention_(?!gradients|training)|varlen|fp8_attention)",
                         "attention"),
    "backward": Subject("attention, backward", "attention.md",
                        "test_(flash_backward|attention_gradients|attention_training)", "backward"),
    "paged": Subject("decode attention over pages", "kvcache.md", "test_(decode|paged_attention)", "paged"),
    "latent": Subject("latent attention (MLA)", "attention.md", "test_latent", "latent"),
    "kv_append": Subject("appending to pages", "kvcache.md", "test_kv_append"),
    "norm": Subject("norms, softmax, gated activations, embeddings", "norm.md", "test_(norm|embedding)",
                    "memory"),
    "moe": Subject("mixtures of experts: grouped matmuls", "moe.md", "test_grouped", "moe"),
    "moe_gradients": Subject("gradients of grouped matmuls", "moe.md", "test_grouped_(outer|gradients)"),
    "router": Subject("mixtures of experts: router", "moe.md", "test_router"),
    "quant": Subject("matmuls with quantised weights", "quantisation.md", "test_quant_(?!grouped)",
                     "schedules:quant"),
    "quant_moe": Subject("experts with quantised weights", "moe.md", "test_quant_grouped"),
    "codes": Subject("codes written by kernels: quantize", "quantisation.md", "test_quantize"),
    "sparse": Subject("2:4 sparse matmuls", "quantisation.md", "test_sparse"),
    "sampling": Subject("sampling", "engine.md", "test_sampling"),
    "step": Subject("whole decode steps", "engine.md", timed="decode"),
    "all_reduce": Subject("all-reduce over peer memory, ranks as streams of one GPU", "distributed.md",
                          timed="all_reduce"),
    "tune": Subject("tuning by measured times", "gemm.md", "test_tune"),
    "conv": Subject("convolutions", "diffusion.md", "test_conv_", "conv"),
    "diffusion": Subject("Stable Diffusion", "diffusion.md", "test_diffusion"),
    "language": Subject("the tile language", "language.md", "test_language", "language"),
    "train": Subject("training beside matmuls and attention", "training.md", "test_optimizer", "train"),
    "train_step": Subject("whole training steps", "training.md", timed="step"),
    "lora": Subject("LoRA adapters", "lora.md", "test_lora"),
    "whisper": Subject("Whisper", "whisper.md", "test_whisper"),
    "several": Subject("several GPUs, NVLink", "distributed.md", "test_peer", "collectives"),
    "l2": Subject("L2 persistence", "cuda.md", "test_l2", "l2"),
    "multimem": Subject("multicast objects: multimem", "distributed.md", "test_multicast", "multimem"),
    "allocation": Subject("allocation by the driver", "memory.md", timed="allocation"),
    "sentinels": Subject("sentinels for NaN", "numerics.md", "test_sentinel"),
    "default_device": Subject("other tests with DEV=CUDA as the default device", "cuda.md", timed="default"),
    "sm_89": Subject("kernels for sm_89", "quantisation.md", "test_(gemm|matmul)", arch="L4|4090|Ada"),
    "amx": Subject("AMX and AVX-VNNI kernels (CPU)", "cpu.md", isa="amx|avx-vnni"),
}
PEERS = ("vLLM", "Triton", "tinygrad", "torch", "torch.compile", "cuDNN", "FlashAttention-2",
         "FlashAttention-3", "grouped_mm")


def launches(record: Record, subject: Subject) -> Record | None:
    """Counts the launches of a subject's tests on a GPU; None where there are none."""
    rows = [row for part in PARTS_OF_LAUNCHES for name, row in record["parts"].get(part, {}).items()
            if re.match(subject.tests, name.partition("::")[0])]
    ran = [row for row in rows if row.get("launches") and row["status"] in ("measured", "disagrees")]
    if not ran: return None
    return {"launches": sum(row["launches"] for row in ran),
            "disagree": sum(row.get("disagrees", 0) for row in ran), "commits": commits(ran)}


def find_times(record: Record, subject: Subject, folder: Path) -> Record | None:
    """Counts the measured rows of a subject on a GPU; None where there are none."""
    if not subject.timed: return None
    part, _, kind = subject.timed.partition(":")
    if part == "smoke": return None
    rows = [row for name, row in record["parts"].get(part, {}).items()
            if row.get("seconds", {}).get("ours") and re.match(subject.rows, name)]
    if rows: return {"rows": len(rows), "commits": commits(rows)}
    return count_rows(folder / f"{part}_{report_gpu.slug(record).removeprefix('gpu_')}.json", kind)


def count_rows(path: Path, kind: str) -> Record | None:
    """Counts the rows of a file that a part has to itself; None where there is no such file."""
    if not path.exists(): return None
    found: Record = json.loads(path.read_text())
    rows = found["schedules"].get(kind) if kind else found.get("rows", [found])
    return {"rows": len(rows), "commits": [found["commit"]] if "commit" in found else []} if rows else None


def on_cpus(folder: Path, isa: str) -> dict[str, Record]:
    """Counts the results of CPUs with an instruction set."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("cpu_*.json"))]
    return {each["machine"]: {"rows": len(each["results"]), "commits": commits([each])} for each in found
            if re.search(isa, each.get("isa", ""))}


def commits(rows: Iterable[Record]) -> list[str]:
    """Returns the commits at which rows were measured."""
    return sorted({row["commit"] for row in rows if row.get("commit")})


def smoke(record: Record) -> Record | None:
    """Counts the checks of the first part, which times nothing."""
    rows = [row for row in record["parts"].get("smoke", {}).values() if row["status"] == "measured"]
    return {"launches": len(rows), "disagree": 0, "commits": commits(rows)} if rows else None


def peers(record: Record, who: str) -> int:
    """Counts the rows that were measured beside a contender."""
    return sum(bool(row.get("seconds", {}).get(who)) for rows in record["parts"].values()
               for row in rows.values())


def status(folder: Path) -> dict[str, Any]:
    """Returns what ran where."""
    gpus = report_gpu.gpus(folder)
    made: dict[str, Any] = {
        "written by": "bench/report.py",
        "gpus": {each["gpu"]: {"driver": each["driver"], "commits": commits(
            row for rows in each["parts"].values() for row in rows.values())} for each in gpus},
        "beside": {who: {each["gpu"]: peers(each, who) for each in gpus} for who in PEERS}, "subjects": {}}
    for key, subject in SUBJECTS.items():
        mine = [each for each in gpus if re.search(subject.arch, each["gpu"])]
        right = {each["gpu"]: found for each in mine if (found := launches(each, subject) or (
            smoke(each) if subject.timed == "smoke" else None))}
        times = {each["gpu"]: found for each in mine if (found := find_times(each, subject, folder))}
        if subject.isa: times |= on_cpus(folder, subject.isa)
        made["subjects"][key] = {"title": subject.title, "page": subject.page, "right": right, "timed": times}
    return made


def table(found: dict[str, Any]) -> str:
    """Tabulates what ran where, a line a subject, those that ran first."""
    def right(each: Record) -> str:
        said = [f"{one['launches']} launches" + (f", {one['disagree']} disagree" if one["disagree"] else "")
                for one in each["right"].values()]
        return "; ".join(said) or "not compared"
    def times(each: Record) -> str:
        return "; ".join(f"{one['rows']} rows" for one in each["timed"].values()) or "not timed"
    subjects = sorted(found["subjects"].values(), key=lambda each: -bool(each["right"]) - bool(each["timed"]))
    names = ", ".join(f"{name} (driver {gpu['driver']}, commits {', '.join(gpu['commits'])})"
                      for name, gpu in found["gpus"].items()) or "no GPU"
    lines = [[f"[{each['title']}]({each['page']})", right(each), times(each)] for each in subjects]
    return (textwrap.fill(f"On {names}:", 118) + "\n\n"
            + markdown(["", "compared with the emulator", "timed"], lines))
