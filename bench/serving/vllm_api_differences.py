"""Answers of `vllm.LLM` and of tinygrad_nv.LLM to the same calls: which differ, and why?

    python bench/serving/vllm_api_differences.py [--python OTHER/bin/python] [--model DIR] [--write]

Protocol: `vllm_api_calls.txt` has the calls, expressions of Python that name what `Namespace` has; a line
`field = value; value` stands for a request with each value of that field. `--python`, an interpreter that has
vLLM, answers them in a process of its own, this one with tinygrad_nv, both in float32 with the model in the
box. Without it the recorded answers of vLLM are compared (`bench/results/vllm_api.json`), which `--write`
replaces. `vllm_api_known.toml` lists the calls that differ, with reasons. Exits with 1 where another differs,
or where a listed one does not.

Answers are compared as JSON: all fields of a result, numbers within 1e-3. Of an error only that there is one.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CALLS, KNOWN = (Path(__file__).with_name(f"vllm_api_{name}") for name in ("calls.txt", "known.toml"))
RECORD = ROOT / "bench/results/vllm_api.json"
MODEL = ROOT / "models/tales"
OPTIONS = {"dtype": "float32", "max_model_len": 256, "seed": 0, "max_num_seqs": 8, "enforce_eager": True}
# where each side has what the calls name
PLACES = {"vllm": {"SamplingParams": "vllm", "RequestOutput": "vllm", "CompletionOutput": "vllm",
                   "PoolingParams": "vllm", "LoRARequest": "vllm.lora.request",
                   "RepetitionDetectionParams": "vllm.sampling_params",
                   "BeamSearchParams": "vllm.sampling_params", "RequestOutputKind": "vllm.sampling_params",
                   "StructuredOutputsParams": "vllm.sampling_params"},
          "tinygrad_nv": {"SamplingParams": "tinygrad_nv", "RequestOutput": "tinygrad_nv",
                          "CompletionOutput": "tinygrad_nv.engine.request_output",
                          "PoolingParams": "tinygrad_nv", "LoRARequest": "tinygrad_nv",
                          "BeamSearchParams": "tinygrad_nv",
                          "RepetitionDetectionParams": "tinygrad_nv.engine.sampling",
                          "RequestOutputKind": "tinygrad_nv.engine.sampling",
                          "StructuredOutputsParams": "tinygrad_nv"}}
TOLERANCE = 1e-3
DRAWN = ("n", "temperature", "top_p", "top_k", "min_p", "seed")     # fields of no effect on a greedy answer
MOST_TOKENS = 40        # token ids that a recorded answer shows of a longer list, half at each end

TALE, LONG = "Once upon a time", "The dog ran after the cat. "
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A girl had a red ball."}]
TEMPLATE = ("{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
            "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}")
NAMED = {"TALE": TALE, "LONG": LONG, "TALK": TALK, "TEMPLATE": TEMPLATE, "copy": copy, "json": json,
         "pickle": pickle, "GOING_ON": [*TALK, {"role": "assistant", "content": "The ball was"}],
         "TOOL": {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}},
         "SCHEMA": {"type": "object", "properties": {"age": {"type": "integer"}, "red": {"type": "boolean"}},
                    "required": ["age", "red"], "additionalProperties": False},
         "LARK": 'start: "yes" | "no"', "GBNF": 'root ::= "cat" | "dog"'}


class Namespace:
    """Values of the names in calls, with a model of a side."""

    def __init__(self, llm: Any, side: str) -> None:
        own = {name: getattr(import_module(place), name) for name, place in PLACES[side].items()}
        params, self.side, self.model = own["SamplingParams"], side, type(llm)

        def greedy(**given: Any) -> Any: return params(**{"temperature": 0, "max_tokens": 8, **given})

        def answer(**given: Any) -> Any: return llm.generate(TALE, greedy(**given), use_tqdm=False)

        def texts(**given: Any) -> Any:
            made = params(**{"max_tokens": 12, "temperature": 1.0, **given})
            return [each.text for each in llm.generate(TALE, made, use_tqdm=False)[0].outputs]

        def change(**given: Any) -> Any:
            made = params()
            for name, value in given.items(): setattr(made, name, value)
            return made

        def chat(talk: Any, **given: Any) -> Any:
            return llm.chat(talk, greedy(), **{"chat_template": TEMPLATE, **given})

        def first(given: Any) -> Any: return llm.generate(TALE, given, use_tqdm=False)[0].outputs[0]
        result = answer()[0]
        self.names = {
            **NAMED, **own, "llm": llm, "P": greedy, "S": own["StructuredOutputsParams"],
            "B": own["BeamSearchParams"], "R": own["RepetitionDetectionParams"],
            "answer": answer, "texts": texts, "changed": change, "chat": chat,
            "first": first, "accepts": lambda **given: len(texts(**given)), "takes": self.takes, "kind": kind,
            "logprobs": logprobs, "result": result, "FIRST": result.outputs[0].token_ids[3],
            "IDS": list(llm.get_tokenizer().encode(TALE))}

    def evaluate(self, call: str) -> Any:
        """Returns the answer to a call, as JSON."""
        try: return describe(eval(call, dict(self.names)))
        except Exception as error: return {"error": type(error).__name__}

    def takes(self, **given: Any) -> bool:
        """Whether the model's class knows an argument, and takes this value: what vLLM has as its default."""
        if self.side == "vllm": return True
        try: self.model("/no/such/directory", **given)
        except Exception as error: return type(error).__name__ != "ConfigError"
        return True


def kind(value: Any) -> str:
    """Returns the name of a value's type."""
    return type(value).__name__


def logprobs(found: Any) -> Any:
    """Returns log probabilities as lists: of each token, of each candidate its id, value, rank and text. Far
    ranks depend on rounding."""
    if found is None: return None
    return [None if not each else [[token, round(of.logprob, 4), min(of.rank, 99), of.decoded_token]
                                   for token, of in each.items()] for each in found]


def describe(value: Any) -> Any:
    """Returns a value as JSON: a result by its fields, another object by its type."""
    if value is None or isinstance(value, bool | int | str): return value
    if isinstance(value, float): return round(value, 4)
    if isinstance(value, Mapping): return {str(name): describe(each) for name, each in value.items()}
    if isinstance(value, set | frozenset): return sorted(map(describe, value))
    if isinstance(value, Sequence):
        if len(value) <= MOST_TOKENS or not isinstance(value[0], int): return [*map(describe, value)]
        half = MOST_TOKENS // 2
        return {"length": len(value), "first": [*value[:half]], "last": [*value[-half:]]}
    if hasattr(value, "prompt_token_ids") and hasattr(value, "outputs"):
        return _drop_none({"prompt": value.prompt, "ids": describe(value.prompt_token_ids),
                       "prompt_logprobs": logprobs(value.prompt_logprobs),
                       "outputs": [*map(_describe_output, value.outputs)]})
    if hasattr(value, "sequences"): return [*map(_describe_beam, value.sequences)]
    return f"<{kind(value)}>"


def _describe_output(output: Any) -> dict[str, Any]:
    return _drop_none({"text": output.text, "tokens": describe(output.token_ids),
                       "finish": output.finish_reason, "stop": output.stop_reason,
                       "logprobs": logprobs(output.logprobs), "sum": describe(output.cumulative_logprob)})


def _describe_beam(beam: Any) -> dict[str, Any]:
    return {"text": beam.text, "tokens": beam.tokens, "sum": describe(beam.cum_logprob)}


def _drop_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def agree(one: Any, two: Any) -> bool:
    """Whether two answers are the same."""
    if isinstance(one, dict) and isinstance(two, dict):
        if "error" in one or "error" in two: return "error" in one and "error" in two
        return one.keys() == two.keys() and all(agree(one[name], two[name]) for name in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(agree, one, two))
    if isinstance(one, float) or isinstance(two, float):
        return isinstance(one, int | float) and isinstance(two, int | float) and abs(one - two) < TOLERANCE
    return type(one) is type(two) and one == two


def read_calls(text: str) -> Iterator[str]:
    """The calls of a table."""
    area = ""
    for line in text.splitlines():
        if line.startswith("# "): area = line
        elif area != "# fields": yield line
        else:
            name, _, values = line.partition(" = ")
            for value in values.split("; "):
                yield f"{'accepts' if name in DRAWN else 'answer'}({name}={value})"


def vllm_arguments() -> Iterator[str]:
    """The arguments of vLLM's class with their defaults, as calls. Objects are left out."""
    from dataclasses import MISSING, fields
    own = signature(import_module("vllm").LLM).parameters
    found = {each.name: each.default for each in fields(import_module("vllm").EngineArgs)
             if not each.name.startswith("_")} | {name: each.default for name, each in own.items()}
    for name, value in sorted(found.items()):
        if name in ("model", "kwargs"): continue
        if value is MISSING: value = None
        if value is None or type(value) in (bool, int, float, str): yield f"takes({name}={value!r})"


def ask_vllm(python: str, model: Path) -> dict[str, Any]:
    """Returns vLLM's answers, of a process that is started again where a call ended it."""
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
           "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
    answers: dict[str, Any] = {}
    calls = [*read_calls(CALLS.read_text())]
    while (rest := [call for call in calls if call not in answers]) or not answers:
        command = [python, __file__, "--side", "vllm", "--model", str(model)]
        with subprocess.Popen(command, text=True, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(rest))
            process.stdin.close()
            before = len(answers)
            for line in process.stdout:
                if line.startswith('["'): answers |= dict([json.loads(line)])
        ended = next((call for call in calls if call not in answers), None)
        if ended is None: break
        if len(answers) > before: continue      # the engine broke after its last answer
        if not answers: raise SystemExit(f"{python} does not run vLLM")
        answers[ended] = {"error": "the process ended"}
    return answers


def answer_as_vllm(model: Path) -> None:
    """Answers the calls of standard input, a line each, and has vLLM's arguments; ends where the engine
    breaks."""
    calls, vllm = json.load(sys.stdin), import_module("vllm")
    print(json.dumps(["version", vllm.__version__]), flush=True)
    llm = vllm.LLM(str(model), **OPTIONS)
    names = Namespace(llm, "vllm")
    healthy = names.evaluate("answer()")
    for call in [*calls, *vllm_arguments()]:
        found = names.evaluate(call)
        print(json.dumps([call, found]), flush=True)
        if "error" not in str(found)[:8]: continue
        engine = llm.llm_engine
        engine.abort_request([*engine.output_processor.request_states], internal=True)
        if not agree(names.evaluate("answer()"), healthy): os._exit(1)


def answer_as_ours(model: Path, calls: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Answers calls with tinygrad_nv."""
    with import_module("tinygrad_nv").LLM(model, device="CPU", **OPTIONS) as llm:
        names = Namespace(llm, "tinygrad_nv")
        for call in calls: yield call, names.evaluate(call)


def read_differences() -> dict[str, str]:
    """Returns the calls that differ, with the reason."""
    return {call: each["why"] for each in tomllib.loads(KNOWN.read_text()).get("difference", ())
            for call in each["calls"]}


def main() -> None:
    """Prints the calls whose answers differ, or writes vLLM's answers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", help="an interpreter with vLLM")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--write", action="store_true", help="keep vLLM's answers")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side: return answer_as_vllm(given.model)
    sys.path.insert(0, str(ROOT))
    if given.python: theirs = ask_vllm(given.python, given.model)   # with its version
    else: theirs = json.loads(RECORD.read_text())["answers"]
    if given.write:
        version = theirs.pop("version")
        lines = ",\n".join(f"{json.dumps(call)}: {json.dumps(found)}" for call, found in theirs.items())
        RECORD.write_text(f'{{"vllm": {json.dumps(version)}, "answers": {{\n{lines}\n}}}}\n')
    theirs.pop("version", None)
    known, wrong = read_differences(), 0
    for call, ours in answer_as_ours(given.model, theirs):
        same = agree(theirs[call], ours)
        if same == (call not in known): continue
        wrong += 1
        print(f"{call}\n  vLLM: {json.dumps(theirs[call])[:300]}\n  ours: {json.dumps(ours)[:300]}",
              *(["  is listed as a difference, and is none"] if same else []), sep="\n")
    print(f"{len(theirs)} calls, {len(known)} known differences, {wrong} unexpected")
    sys.exit(wrong > 0)


if __name__ == "__main__": main()
