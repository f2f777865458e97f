"""bench/report.py: what it makes of results, and that the pages say exactly that."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import report

TELEMETRY = {"sm_mhz": {"mean": 1755.0, "low": 1700.0, "high": 1980.0}, "watts": {"mean": 640.0}}


def product(ours: list[float], **others: list[float]) -> dict[str, Any]:
    return {"status": "measured", "work": 1e12, "nbytes": 1e9, "commit": "abc", "dirty": False,
            "seconds": {"ours": ours, **others}, "telemetry": TELEMETRY}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of a GPU that has some parts."""
    correct = {"status": "measured", "launches": 40, "same": 30, "close": 5, "open": 3, "order": 1,
               "disagrees": 1, "commit": "abc"}
    parts = {"correctness": {"test_a::test_it": correct,
                             "test_b::test_it": {"status": "hung", "why": "no answer", "commit": "abc"}},
             "gemm": {"1024³": product([0.002, 0.004], torch=[0.004, 0.002], Triton=[0.005, 0.005]),
                      "2048³": product([0.002, 0.002], torch=[0.001, 0.001]),
                      "Llama 8B o M=1": {"status": "not measured", "why": "out of time", "commit": "abc"}}}
    record = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580.1", "torch": "2.11", "triton": "3.6",
              "parts": parts}
    (tmp_path / "gpu_h100-80gb-hbm3.json").write_text(json.dumps(record))
    return tmp_path


def test_a_gpu_with_its_facts(folder: Path):
    said = report.performance(folder)
    for words in ("NVIDIA H100 80GB HBM3, driver 580.1, torch 2.11, Triton 3.6, commit abc", "1755 MHz",
                  "640 W"):
        assert words in " ".join(said.split()), words


def rows_of(folder: Path) -> str:
    """Returns what docs/hardware.md says of the rows."""
    record, = report.report_gpu.gpus(folder)
    return report.report_gpu.states(record, folder)


def test_parts_and_what_became_of_them(folder: Path):
    said = rows_of(folder)
    assert ("2 tests: 1 measured, 1 hung; 40 launches: 30 bit for bit, 5 within their bounds, 1 up to the "
            "order of warps, 3 in what PTX leaves open, **1 disagree**") in said
    assert "| matmuls | 3 rows: 2 measured, 1 not measured |" in said
    for about in ("attention, forward", "attention, backward", "decode attention over pages",
                  "whole decode steps", "memory-bound kernels"):
        assert f"| {about} | not measured |" in said


def test_windows_of_l2_of_the_same_gpu(folder: Path):
    assert f"| {report.report_gpu.L2} | not measured |" in rows_of(folder)
    (folder / "l2-h100-80gb-hbm3.json").write_text(json.dumps({"gains_bytes": [3 << 19, 40 << 20]}))
    assert f"| {report.report_gpu.L2} | gain from 1.5 to 40.0 MiB read again and again |" in rows_of(folder)


def test_products_by_kind(folder: Path):
    lines = report.performance(folder).splitlines()
    assert "| matmuls | tinygrad_nv, best row | times as fast as torch | times as fast as Triton |" in lines
    # medians: 3 ms of 3 ms, 2 ms of 1 ms; 5 ms of 3 ms
    assert "| cubes | 500 TFLOP/s, 500 GB/s | 0.75 (0.50 … 1.00) | 1.67 (1.67 … 1.67) |" in lines
    assert "| layers, M = 1 … 8 | not measured | not measured | not measured |" in lines


def test_attentions_by_kind():
    rows = {name: product([0.002, 0.002], cuDNN=[0.003, 0.003]) for name in
            ("d 64 causal 512 tokens, 32 heads x 32", "d 64 causal 1024 tokens, 32 heads x 16",
             "d 64 full 512 tokens, 32 heads x 32")}
    assert [len(names) for names in report.report_gpu.heads(rows).values()] == [2, 1]
    lines = report.report_gpu.kinds("attention", rows, report.report_gpu.GROUPS["attention"]).splitlines()
    assert lines[0] == "| attention, forward | tinygrad_nv, best row | times as fast as cuDNN |"
    assert "| d 64 causal | 500 TFLOP/s, 500 GB/s | 1.50 (1.50 … 1.50) |" in lines
    paged = {"batch 1, 512 tokens": {}, "batch 4, 512 tokens": {}, "batch 1, 2048 tokens": {}}
    assert list(map(len, report.report_gpu.lengths(paged).values())) == [2, 1]


def test_decoding_on_a_cpu():
    def run(rate: float, first: float) -> dict[str, float]:
        return {"ttft_s": first, "tokens_per_s": rate, "rss_peak": 2e8}
    runs = {"greedy": {"tinygrad_nv": [run(30, 0.01), run(50, 0.03)], "transformers": [run(10, 0.02)] * 2,
                       "llama.cpp": [run(20, 0.004)] * 2},
            "sampled": {"tinygrad_nv": [run(24, 0.01)] * 2, "transformers": [run(12, 0.02)] * 2}}
    results = [{"name": "box", "dtype": "float32", "runs": runs}]
    record = {"machine": "a CPU", "tokens": 64, "results": results}
    lines = report.report_cpu.decode(record).splitlines()
    assert "| box, float32, greedy | 40 | 10 | 20 | 4.00 (3.00 … 5.00) | 2.00 (1.50 … 2.50) |" in lines
    assert "| box, float32, sampled | 24 | 12 |  | 2.00 (2.00 … 2.00) |  |" in lines
    assert "| box, first token, ms | 20 | 20 | 4 |  |  |" in lines
    assert "| box, peak memory, MB | 200 | 200 | 200 |  |  |" in lines


def test_gguf_files_on_a_cpu():
    runs = {"tg": {"tinygrad_nv": [30.0, 50.0, 40.0], "llama.cpp": [20.0, 20.0, 40.0]},
            "pp": {"tinygrad_nv": [300.0], "llama.cpp": [200.0]}}
    results = [{"file": "random-q4_0.gguf", "runs": runs, "others": {"tg": 0.25, "pp": 0.0}}]
    lines = report.report_cpu.gguf({"machine": "a CPU", "tokens": 129, "prompt": 512,
                                    "results": results}).splitlines()
    assert "| random-q4_0, decode, 128 tokens | 40 | 20 | 1.50 (1.00 … 2.50) | 25% |" in lines
    assert "| random-q4_0, prefill, 512 tokens | 300 | 200 | 1.50 (1.50 … 1.50) | 0% |" in lines


def test_serving_beside_vllm(tmp_path: Path):
    def side(rate: float, ttft: float) -> dict[str, float]:
        return {"output_throughput": rate, "median_ttft_ms": ttft, "median_tpot_ms": 4.0, "p99_tpot_ms": 5.0}
    row = {"load": "random", "concurrency": 16, "rate": 0, "tinygrad_nv": side(800, 20),
           "vLLM": side(400, 40),
           "ratios": {"output_throughput": [1.9, 2.0, 2.2], "median_ttft_ms": [0.4, 0.5, 0.6]}}
    paced = {**row, "concurrency": 0, "rate": 2.5}
    servers = {"tinygrad_nv": {"start_s": 3, "memory_mb": 600}, "vLLM": {"start_s": 35, "memory_mb": 4400}}
    offline = {"latency": {"tinygrad_nv": [100.0, 300.0, 200.0], "vLLM": [100.0, 100.0, 50.0]}}
    models = {"qwen3-97m": {"rows": [row, paced], "servers": servers}, "small": {"offline": offline}}
    record = {"machine": "a CPU", "vllm": "0.32.0", "models": models}
    lines = report.report_vllm.section(record).splitlines()
    assert ("| qwen3-97m | 128 in, 64 out | 16 | 800 / 400 = 2.00 (1.90 … 2.20) | "
            "20 / 40 = 0.50 (0.40 … 0.60) | 4 / 4 = — | 5 / 5 = — |") in lines
    assert any(line.startswith("| qwen3-97m | 128 in, 64 out | 2.5 requests/s |") for line in lines)
    assert "| qwen3-97m | 3 | 35 | 600 | 4400 |" in lines
    assert "| small | latency | 200 | 100 | 3.00 (1.00 … 4.00) |" in lines
    (tmp_path / "against_vllm.json").write_text(json.dumps(record))
    assert ("| CPU: serve 16 clients, Qwen3 of 97M, bf16 | 800 tokens/s | 2.00 (1.90 … 2.20) | — | "
            "not measured | not measured |") in report.report_summary.table(tmp_path).splitlines()
    assert report.report_vllm.plot(record, tmp_path).stat().st_size > 5000


def test_kernels_on_a_cpu():
    def case(ratio: float, seconds: float) -> dict[str, Any]:
        return {"part": "gemv", "dtype": "float32", "bytes": 2e9, "flops": 1, "ratio": ratio,
                "seconds": {"ours": [seconds]}}
    record = {"machine": "a CPU", "torch": "2", "threads": 2, "isa": "avx2",
              "results": [case(1.0, 0.1), case(2.0, 0.2), case(1.5, 0.1)]}
    lines = report.report_cpu.kernels(record).splitlines()
    assert "| gemv, float32, 3 shapes | 10 … 20 GB/s | 1.50 (1.00 … 2.00) |" in lines


def test_serving_beside_transformers():
    rates = {"tinygrad_nv, server": [30.0, 40.0], "transformers, batches": [10.0, 20.0]}
    record = {"machine": "a box", "requests": 4, "input_len": 8, "output_len": 9, "model": "tales",
              "batch": 32, "dtype": "float32", "tokens_per_s": rates,
              "server": {"median_ttft_ms": [5.0, 7.0], "median_tpot_ms": [1.0, 2.0]}}
    said = report.report_cpu.serving(record)
    assert "6 ms with all requests at once, 1.5 ms for each token after it" in said
    assert said.splitlines()[-2:] == ["| tinygrad_nv, server | 35 |  |",
                                      "| transformers, batches | 15 | 2.50 (2.00 … 3.00) |"]


def test_decoding_beside_tinygrad():
    record = {"machine": "a CPU", "file": "a.gguf", "same_tokens": True,
              "tokens_per_s": {"tinygrad_nv": [300.0, 200.0, 310.0], "tinygrad": [10.0, 10.0, 10.0]}}
    said = report.report_cpu.tinygrad(record)
    assert "300 and 10.0 tokens/s, 30 times as fast (20 … 31)." in said
    assert "the texts differ" in report.report_cpu.tinygrad({**record, "same_tokens": False})


def test_six_rows_for_the_readme(tmp_path: Path):
    lines = report.report_summary.table(tmp_path).splitlines()[-6:]
    assert all(line.count("not measured") == 5 for line in lines)       # nothing has a result there
    row = {"status": "measured", "work": 4e12, "commit": "abc",
           "seconds": {"ours": [0.002, 0.004], "Triton": [0.004, 0.012], "torch": [0.003, 0.004]}}
    record = {"gpu": "NVIDIA H100", "parts": {"gemm": {"8192³": row}}}
    (tmp_path / "gpu_h100.json").write_text(json.dumps(record))
    lines = report.report_summary.table(tmp_path).splitlines()[-6:]
    assert lines[0] == ("| H100: matmul 8192³, bf16 | 1333 TFLOP/s | not measured | 2.50 (2.00 … 3.00) | "
                        "not measured | cuBLAS 1.25 (1.00 … 1.50) |")


def test_what_ran_where(folder: Path):
    record = json.loads((path := next(folder.glob("gpu_*.json"))).read_text())
    launched = {"status": "measured", "launches": 7, "commit": "abc"}
    record["parts"]["correctness"] = {"test_gemm_exact::test_it": launched, "test_sparse_matmul::test_it": {
        "status": "failed", "launches": 9, "commit": "abc"}}
    record["parts"]["gemm"]["fp8, block scales 1x1x1"] = {"status": "not measured", "commit": "abc"}
    path.write_text(json.dumps(record))
    found = report.report_status.status(folder)
    gpu, subjects = record["gpu"], found["subjects"]
    assert subjects["gemm"]["right"] == {gpu: {"launches": 7, "disagree": 0, "commits": ["abc"]}}
    assert subjects["gemm"]["timed"] == {gpu: {"rows": 2, "commits": ["abc"]}}
    assert [(subjects[key]["right"], subjects[key]["timed"]) for key in ("block_scales", "sparse")] ==\
        [({}, {})] * 2
    assert found["beside"]["Triton"] == {gpu: 1}
    assert found["beside"]["vLLM"] == {gpu: 0}


def test_without_results_nothing_is_measured(tmp_path: Path):
    said = report.performance(tmp_path)
    assert said.count("not measured") == 6 * 5 + 11
    assert "nothing has been measured yet" in said


def test_an_emulated_device_is_no_measurement(folder: Path):
    path = next(folder.glob("gpu_*.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "gpu": "emulated sm_90a"}))
    assert "nothing has been measured yet" in report.performance(folder)


def test_a_plot_for_those_beside_torch(folder: Path):
    record, = report.report_gpu.gpus(folder)
    path = report.report_gpu.plot(record, folder)
    assert path is not None
    assert path.name == "gpu_h100-80gb-hbm3_gemm.png"
    assert path.stat().st_size > 5000
    assert f"(../bench/results/{path.name})" in report.performance(folder)
    assert report.report_gpu.plot({**record, "parts": {}}, folder) is None


def test_the_pages_say_what_the_results_say():
    for path, text in report.pages(report.RESULTS, report.RESULTS.parents[1]).items():
        assert path.read_text() == text, f"{path.name}: run bench/report.py"


def test_the_command_writes_and_compares(folder: Path, tmp_path: Path):
    (tmp_path / "docs").mkdir()
    for name, marker in (("README.md", "measured"), ("docs/hardware.md", "rows"),
                         ("docs/timing.md", "hardware"), ("docs/status.md", "status")):
        begin, end = f"<!-- {marker}: {report.BY} -->", f"<!-- {marker}: end -->"
        (tmp_path / name).write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    line = [sys.executable, report.__file__, "--results", str(folder), "--root", str(tmp_path)]
    assert subprocess.run([*line, "--check"], check=False, capture_output=True).returncode == 1
    for said in ("written", "as it was"):
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        assert [each.partition(": ")[2] for each in done.stdout.splitlines()] == [said] * 6
    assert subprocess.run([*line, "--check"], check=False).returncode == 0
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text


def test_a_text_without_markers_is_refused():
    with pytest.raises(SystemExit, match="measured"): report.replace_section("nothing", "measured", "")
