"""Sampling options of `generate`: what they become, and several answers and log probabilities in JSON."""
from __future__ import annotations

import json
from pathlib import Path

from tinygrad_nv.cli import parse_arguments
from tinygrad_nv.cli.sampling_options import sampling_fields
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams


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
