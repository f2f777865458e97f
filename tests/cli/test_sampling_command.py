"""Options of `generate`: sampling, several answers, log probabilities in JSON; --record LOG and `replay
LOG`; --trace and the ranges around an engine's steps."""
from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tinygrad_nv import config
from tinygrad_nv.cli import parse_arguments
from tinygrad_nv.cli.sampling_options import sampling_fields
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams
from tinygrad_nv.numerics.replay.log import read
from tinygrad_nv.runtime.observe import ranges


def test_every_option_is_a_field(tmp_path: Path):
    (tmp_path / "schema").write_text('{"type": "integer"}')
    line = ("--max-tokens 9 --min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --seed 3 "
            "--n 2 --repetition-penalty 1.1 --presence-penalty 0.3 --frequency-penalty -0.4 --logprobs 2 "
            "--prompt-logprobs 0 --truncate-prompt-tokens 5 --stop a --stop b --bad-words x "
            "--stop-token-ids 4,5 --allowed-token-ids 6 --logit-bias 11:-100,12:2.5 --ignore-eos "
            "--include-stop-str-in-output "
            f"--keep-special-tokens --json-schema {tmp_path / 'schema'}")
    found = sampling_fields(parse_arguments(["generate", *line.split(), "prompt"]))
    assert SamplingParams(**found) == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, n=2,
        repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=-0.4, logprobs=2, prompt_logprobs=0,
        truncate_prompt_tokens=5, stop=("a", "b"), bad_words=("x",), stop_token_ids=(4, 5),
        allowed_token_ids=(6,), logit_bias={11: -100.0, 12: 2.5}, ignore_eos=True,
        include_stop_str_in_output=True, skip_special_tokens=False,
        structured_outputs=StructuredOutputsParams(json={"type": "integer"}))
    assert sampling_fields(parse_arguments(["generate", "prompt"])) == {}


def test_several_answers_with_log_probabilities(command, tiny: Path):
    done = command("generate", tiny, "hello", "--n", 2, "--seed", 1, "--max-tokens", 3, "--ignore-eos",
                   "--temperature", 1, "--logprobs", 1, "--prompt-logprobs", 0, "--json").succeeded()
    made = json.loads(done.out)
    assert [each["index"] for each in made["outputs"]] == [0, 1]
    assert made["outputs"][0]["token_ids"] == made["token_ids"]
    assert [told[0]["id"] for told in made["logprobs"]] == made["token_ids"]
    assert made["prompt_logprobs"][0] is None
    assert len(made["prompt_logprobs"]) == len(made["prompt_token_ids"])
    text = command("generate", tiny, "hello", "--choice", "yes", "--choice", "no").succeeded()
    assert text.out in ("helloyes\n", "hellono\n")


def test_options_that_are_refused(command, tiny: Path, tmp_path: Path):
    command("generate", tiny, "hello", "--logprobs", 1).refused("--json, which has them")
    command("generate", tiny, "hello", "--logit-bias", "x").refused("write TOKEN:BIAS")
    command("generate", tiny, "hello", "--presence-penalty", 3).refused("presence_penalty is 3")
    command("generate", tiny, "hello", "--json-schema", tmp_path / "none").refused("cannot be read")
    command("generate", tiny, "hello", "--regex", "a", "--choice", "b").refused("regex and choice",
                                                                                 "leave one")


def test_an_answer_is_repeated_or_parts(command: Any, tiny: Path, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch):
    log, words = tmp_path / "run.log", ("--prompt-ids", "5,6,7", "--max-tokens", "4", "--device", "CPU")
    command("generate", tiny, *words, "--temperature", "1", "--record", log).succeeded()
    found = read(log)
    kept = found.header.what["command"]
    assert "--record" not in kept
    assert kept[:3] == ["generate", "--seed", str(found.header.seed)]
    assert len({run.layer for run in found.kernels}) > 4
    again = command("replay", log).succeeded()
    assert again.out == f"repeated bit for bit: {len(found.kernels)} kernels\n"

    # a kernel of another schedule
    monkeypatch.setenv("NV_DETERMINISTIC", "1")
    parted = command("replay", log)
    assert parted.code == 1
    first = next(run for run in found.kernels if run.kernel.startswith("gemv"))
    assert f"{first.kernel}, source {first.text}, results {first.written[0]}" in parted.out
    assert f"layer {first.layer}" in parted.out
    assert "NV_DETERMINISTIC: recorded with none, now 1" in parted.out
    told = json.loads(command("replay", "--json", log).out)
    assert told["same"] is False
    assert told["parted"]["before"]["kernel"] == first.kernel


def test_an_option_that_kernels_depend_on_is_repeated(command: Any, tiny: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DETERMINISTIC", "0")
    log = tmp_path / "run.log"
    command("generate", tiny, "--prompt-ids", "5,6,7", "--max-tokens", "2", "--device", "CPU",
            "--deterministic", "--record", log).succeeded()
    monkeypatch.setenv("NV_DETERMINISTIC", "0")     # another process
    assert command("replay", log).succeeded().out.startswith("repeated bit for bit")


def test_what_is_no_log(command: Any, tmp_path: Path):
    (tmp_path / "x.log").write_text("hello")
    command("replay", tmp_path / "x.log").refused("is no log of a run", "expected:", "to fix:")
    (tmp_path / "y.log").write_text(json.dumps(
        {"format": "tinygrad_nv run", "version": 1, "what": {"command": ["serve"]}, "seed": 0, "versions": {},
         "settings": {}, "inputs": "", "inputs_hash": ""}) + '\n{"end": 0, "result": ""}\n')
    command("replay", tmp_path / "y.log").refused("a log of tinygrad-nv serve", "one of generate")


def test_deterministic_is_a_setting_of_the_process(command: Any, tiny: Path,
                                                   monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DETERMINISTIC", "0")
    command("generate", tiny, "--prompt-ids", "5,6,7", "--max-tokens", "2").succeeded()
    assert config.get("NV_DETERMINISTIC") == 0
    command("generate", tiny, "--prompt-ids", "5,6,7", "--max-tokens", "2", "--deterministic").succeeded()
    assert config.get("NV_DETERMINISTIC") == 1


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
