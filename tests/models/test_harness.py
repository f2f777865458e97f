"""lm-evaluation-harness: its requests, and the harness itself with a local task, against transformers.

The quick tests send the requests of its `local-completions` and `local-chat-completions`, and read the
answers as those do. The slow ones run the harness (`pip install 'tinygrad-nv[harness]'`).
"""
from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.server.serve_case import Live, live, llm_service
from tinygrad_nv import LLM, SamplingParams
from tinygrad_nv.cli import DEFAULT_MODEL

# contexts and the continuations to choose from; the answer is the number of one
QUESTIONS = (("Once upon a time there was a little", (" fox", " engine", " seventeen"), 0),
             ("The girl found a key in the", (" yes", " wood", " slowly", " I"), 1),
             ("Tom was very happy. He said:", (" \"Thank you!\"", " river"), 0),
             ("The bird", (" sang in the tree", " tree the in sang"), 0))
LONG = "One day a bear went to the river, and the old tree was there. " * 3
# of a token's log probability in float32: 4 times what transformers in float32 differs by (measured: 5.5e-6,
# this package's 4.3e-6)
NOISE = 2e-5


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Steps of 32 tokens: long prompts are cut."""
    with LLM(DEFAULT_MODEL, device="CPU", max_model_len=160, max_num_seqs=8, max_num_batched_tokens=32,
             num_pages=40) as made: yield made


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Live]:
    with live(llm_service(llm, tokenizer_info=True)) as running: yield running


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any: return AutoTokenizer.from_pretrained(DEFAULT_MODEL)


def pairs(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens of contexts and of continuations, split as the harness splits them."""
    def encode(text: str) -> list[int]: return tokenizer(text, add_special_tokens=False).input_ids
    asked = [(context, choice) for context, choices, _ in QUESTIONS for choice in choices]
    asked += [(LONG.strip(), " The fox ran."), (tokenizer.bos_token, "Once upon a time")]
    return [(own := encode(context), encode(context + choice)[len(own):]) for context, choice in asked]


def expected(theirs: torch.nn.Module, context: Sequence[int],
             continuation: Sequence[int]) -> tuple[float, bool]:
    """The log probability of a continuation, in float64, and whether each token is the likeliest."""
    ids = [*context, *continuation]
    with torch.no_grad(): found = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    rows = found[len(context) - 1:-1]
    values = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    return float(values.sum()), bool((rows.argmax(-1) == torch.tensor(continuation)).all())


def loglikelihoods(server: Live, asked: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """As `local-completions` asks, and reads: it leaves out the token that is generated."""
    answer = server.post({"model": "tales", "prompt": [context + rest for context, rest in asked],
                          "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True})
    assert answer.status_code == 200, answer.text
    out = []
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    for (context, _), choice in zip(asked, choices, strict=True):
        found = choice["logprobs"]
        values, tops = (found[key][len(context):-1] for key in ("token_logprobs", "top_logprobs"))
        out.append((sum(values), all(value == max(top.values())
                                     for value, top in zip(values, tops, strict=True))))
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [1, 5])
def test_loglikelihoods_are_transformers(server: Live, theirs: torch.nn.Module, tokenizer: Any, size: int):
    asked = pairs(tokenizer)
    found = [each for at in range(0, len(asked), size)
             for each in loglikelihoods(server, asked[at:at + size])]
    for (context, rest), (value, greedy) in zip(asked, found, strict=True):
        wanted, likeliest = expected(theirs, context, rest)
        assert abs(value - wanted) <= NOISE * len(rest), (value, wanted)
        assert greedy == likeliest
    assert {greedy for _, greedy in found} == {True, False}


@pytest.mark.slow
def test_generations_end_where_the_harness_says(server: Live, llm: LLM):
    """generate_until: `stop` are its strings and the end token's text."""
    [whole] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40))
    stop = whole.text[20:24]
    fields = {"model": "tales", "max_tokens": 40, "temperature": 0, "stop": [stop, "<|eos|>"], "seed": 1234}
    cut = whole.text[:whole.text.index(stop)]
    made = server.post({**fields, "prompt": ["Once upon a time"] * 2}).json()["choices"]
    assert [each["text"] for each in sorted(made, key=lambda each: each["index"])] == [cut] * 2
    messages = [{"role": "user", "content": "Once upon a time"}]
    made = server.post({**fields, "messages": messages}, "/v1/chat/completions").json()["choices"]
    [own] = llm.chat([messages], SamplingParams(temperature=0, max_tokens=40, stop=[stop, "<|eos|>"]))
    assert made[0]["message"]["content"] == own.text


def test_the_tokenizer_is_the_servers(server: Live, tokenizer: Any):
    """What the harness asks where it has no tokenizer of its own."""
    info = server.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert info["chat_template"] == tokenizer.chat_template
    assert info["model_max_length"] == 160
    text = "Once upon a time"
    ids = server.post({"prompt": text, "add_special_tokens": False}, "/tokenize").json()["tokens"]
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    assert server.post({"tokens": ids}, "/detokenize").json()["prompt"] == text


# **** the harness itself ****

CHOICE = """
task: tales_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
target_delimiter: ""
doc_to_target: answer
metric_list: [{metric: acc}]
"""
UNTIL = """
task: tales_until
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 24, temperature: 0}
metric_list: [{metric: exact_match}]
"""


OWN_TOKENIZER = f"tokenizer={DEFAULT_MODEL},tokenizer_backend=huggingface"


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The package, and the folder of the tasks."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed: pip install 'tinygrad-nv[harness]'")
    folder = tmp_path_factory.mktemp("tasks")
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    import lm_eval
    lines = [json.dumps({"context": context, "choices": [*choices], "answer": answer})
             for context, choices, answer in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    for name, text in (("choice", CHOICE), ("until", UNTIL)):
        (folder / f"{name}.yaml").write_text(text % (folder / "questions.jsonl"))
    return lm_eval, folder


def evaluated(harness: tuple[Any, Path], model: str, task: str, **more: Any) -> list[Any]:
    """The responses of each question, as the harness has them, in order."""
    lm_eval, folder = harness
    from lm_eval.tasks import TaskManager
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    made = lm_eval.simple_evaluate(model=model, tasks=[task], task_manager=manager, log_samples=True,
                                   bootstrap_iters=0, **more)
    return sorted(made["samples"][task], key=lambda each: each["doc_id"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [OWN_TOKENIZER, f"{OWN_TOKENIZER},num_concurrent=4",
                                     "tokenizer_backend=remote"])
def test_the_harness_measures_a_task(harness: Any, server: Live, theirs: torch.nn.Module, tokenizer: Any,
                                     options: str):
    found = evaluated(harness, "local-completions", "tales_choice", batch_size=2,
                      model_args=f"model=tales,base_url={server.url}/v1/completions,max_length=160,{options}")
    asked = iter(pairs(tokenizer))
    right = []
    for sample, (_, choices, answer) in zip(found, QUESTIONS, strict=True):
        wanted = [expected(theirs, *next(asked)) for _ in choices]
        for (value, greedy), (own, likeliest) in zip(sample["filtered_resps"], wanted, strict=True):
            assert float(value) == pytest.approx(own, abs=1e-4)
            assert str(greedy) == str(likeliest)
        right.append(max(range(len(choices)), key=lambda at: wanted[at][0]) == answer)
        assert sample["acc"] == right[-1]
    assert any(right)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "path"), [("local-completions", "completions"),
                                             ("local-chat-completions", "chat/completions")])
def test_the_harness_reads_generations(harness: Any, server: Live, llm: LLM, tokenizer: Any, model: str,
                                       path: str):
    chat = model == "local-chat-completions"
    found = evaluated(harness, model, "tales_until", apply_chat_template=chat,
                      model_args=f"model=tales,base_url={server.url}/v1/{path},max_length=160,"
                                 + ("eos_string=<|eos|>" if chat else OWN_TOKENIZER))
    params = SamplingParams(temperature=0, max_tokens=24, stop=[".", "<|eos|>"])
    for sample, (context, _, _) in zip(found, QUESTIONS, strict=True):
        if chat: [own] = llm.chat([[{"role": "user", "content": context}]], params)
        else: [own] = llm.generate([tokenizer(context, add_special_tokens=False).input_ids], params)
        assert sample["resps"] == [[own.text]]
