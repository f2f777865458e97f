"""`generate --trace` and the ranges around an engine's steps: every kernel of an answer knows its layer."""
from __future__ import annotations

import json
import sys
import types
from pathlib import Path

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.runtime.observe import ranges

IDS = ("--prompt-ids", "5,6,7")
GREEDY = ("--temperature", 0, "--max-tokens", 3, "--ignore-eos")


def test_a_trace_of_an_answer(command, tiny: Path, tmp_path: Path):
    plain = command("generate", tiny, *IDS, *GREEDY, "--device", "CPU").succeeded()
    path = tmp_path / "trace.json"
    traced = command("generate", tiny, *IDS, *GREEDY, "--device", "CPU", "--trace", path).succeeded()
    assert traced.out == plain.out
    lines = [line.split() for line in traced.err.splitlines()]
    assert ["kernel", "template", "count", "measured", "us"] in [line[:5] for line in lines]
    assert f"trace: {path} (to look at: https://ui.perfetto.dev)" in traced.err
    kernels = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    layers = {event["args"]["layer"] for event in kernels}
    parts = {f"layers.{i}.{part}" for i in range(2) for part in ("attention", "feed_forward")}
    assert layers == {"embedding", "norm", "head", "sampler", *parts}
    total = next(int(line[1]) for line in lines if line[:1] == ["all"])
    assert total == len(kernels) > 3 * 20


def test_json_stays_alone_on_stdout(command, tiny: Path, tmp_path: Path):
    done = command("generate", tiny, *IDS, *GREEDY, "--json", "--trace", tmp_path / "t.json").succeeded()
    assert len(json.loads(done.out)["token_ids"]) == 3
    assert (tmp_path / "t.json").stat().st_size > 1000


def test_ranges_around_the_steps_of_an_engine(tiny: Path, monkeypatch):
    nvtx, seen, opened = types.ModuleType("nvtx"), [], []
    def push(message: str, domain: str) -> None:
        opened.append(message)
        seen.append(tuple(opened))
    vars(nvtx).update(push_range=push, pop_range=lambda domain: opened.pop())
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    monkeypatch.setenv("NV_NVTX", "1")
    ranges.enable_nvtx()
    try:
        llm = LLM(tiny, "float32", device="CPU")
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        for _ in range(2): llm.complete([5, 6, 7], params)
    finally: ranges.disable_nvtx()
    assert not opened
    prefill, decode = "step 0 + 1·8 tokens, 1 samples", "step 1 tokens, 1 samples"
    for step in (prefill, decode):
        captures = [i for i, each in enumerate(seen) if each[:2] == (step, "capture")]
        replays = [i for i, each in enumerate(seen) if len(each) == 2 and each[1].startswith("graph of ")
                   and each[0] == step]
        # the step's own capture, its first run, and then its sampler's capture, if it has a new one
        assert captures
        assert captures[0] < replays[0]
