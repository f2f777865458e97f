"""Conversations: ids and masks of transformers where a template has marks; where not, the same answers.
Records to ids: TRL's rules, written out with transformers' tokenizer. Packing: TRL's documented results,
what must hold for any lengths, and best fit by search."""
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.train.data.encode import EncodeOptions, Encoder, encode_long
from tinygrad_nv.train.data.packing import Plan, alone, best_fit, pieces, wrap
from tinygrad_nv.train.data.records import record

ASSISTANT = "message['role'] == 'assistant'"
HEAD = "{% for message in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
# each marks the answer with its end-of-turn token
CHATML = (HEAD + "{{ '<|im_start|>' + message['role'] + '\\n' }}{% if " + ASSISTANT + " %}"
          "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
          "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}" + TAIL)
TRIMMED = CHATML.replace("{{ message['content'] + ", "{{ message['content'] | trim + ")
# the conversation ends with a token of its own, after the end-of-turn token and in place of it
CLOSED = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
RETURNED = CHATML.replace("+ '<|im_end|>' }}{% endgeneration",
                          "+ ('<|return|>' if loop.last else '<|im_end|>') }}{% endgeneration")
# reasoning is written in the last answer alone
REASONED = CHATML.replace("{% generation %}", "{% generation %}{% if loop.last %}{{ 'thought ' }}{% endif %}")
TEMPLATES = {"chatml": CHATML, "trimmed": TRIMMED, "closed": CLOSED, "returned": RETURNED,
             "reasoned": REASONED}


def conversation(*texts: str, system: bool = False) -> list[dict[str, Any]]:
    said = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    return [{"role": "system", "content": "be kind"}] * system + said


CHATS = [conversation("Hello", "The fox 😀 said  hé."),
         conversation("one", " two ", "three", "four", "five", "six"),
         conversation("a", "b", "c", "d", system=True), conversation("a", "b", "c"),
         conversation("user asks <|x|>", "ends in a newline\n", "b", "")]


def without_marks(template: str) -> str: return re.sub(r"\{% (end)?generation %\}", "", template)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_marked_answers_are_those_of_transformers(with_template, name: str, messages: list[dict[str, Any]]):
    ours, theirs = with_template(TEMPLATES[name])
    ((made,),) = Encoder(ours).encode([record({"messages": messages}, "here")])
    expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert made.ids.tolist() == expected["input_ids"]
    assert made.loss.astype(int).tolist() == expected["assistant_masks"]
    assert 0 < made.loss.sum() < len(made.loss)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_found_without_marks(with_template, name: str, messages: list[dict[str, Any]]):
    found = [Encoder(with_template(template)[0]).encode([record({"messages": messages}, "here")])[0][0]
             for template in (TEMPLATES[name], without_marks(TEMPLATES[name]))]
    assert np.array_equal(found[0].ids, found[1].ids)
    ours = with_template(TEMPLATES[name])[0]
    answers = [ours.decode(each.ids[each.loss], skip_special_tokens=False) for each in found]
    # what ends the conversation after the last answer is the answer's, too
    last = "\n<|eos|>" * (name == "closed" and messages[-1]["role"] == "assistant")
    assert answers[1] == answers[0] + last


def test_a_token_counts_that_has_a_character_of_the_answer(with_template):
    """The mark is in the middle of a token: both here and in transformers that token counts."""
    template = HEAD + "{{ 'Once upo' }}{% generation %}{{ 'n a time' }}{% endgeneration %}{% endfor %}"
    ours, theirs = with_template(template)
    messages = conversation("a")
    ((made,),) = Encoder(ours).encode([record({"messages": messages}, "here")])
    expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert made.loss.astype(int).tolist() == expected["assistant_masks"]
    text = ours.decode(made.ids[made.loss])
    assert text != "n a time"
    assert text.endswith("n a time")


def test_loss_on_all_of_a_conversation_if_asked(with_template):
    ours, theirs = with_template(CHATML)
    ((made,),) = Encoder(ours, EncodeOptions(assistant_only_loss=False)).encode(
        [record({"messages": CHATS[0]}, "here")])
    assert made.loss is None
    assert made.ids.tolist() == theirs.apply_chat_template(CHATS[0])["input_ids"]


@pytest.mark.parametrize("tools", [[{"type": "function"}], '[{"type": "function"}]'])
def test_tools_and_variables_reach_the_template(with_template, tools: Any):
    template = "{{ tools | tojson }}{{ mood }}" + CHATML
    ours, theirs = with_template(template)
    row = {"messages": CHATS[0], "tools": tools, "chat_template_kwargs": {"mood": "glad"}}
    ((made,),) = Encoder(ours).encode([record(row, "here")])
    expected = theirs.apply_chat_template(CHATS[0], tools=[{"type": "function"}], mood="glad")
    assert made.ids.tolist() == expected["input_ids"]


def test_completion_of_a_conversation(with_template):
    """Loss after the prompt with its generation prompt, as TRL; on the assistant's text alone if asked."""
    ours, theirs = with_template(CHATML)
    prompt, completion = CHATS[1][:3], CHATS[1][3:]
    row = record({"prompt": prompt, "completion": completion}, "here")
    ((made,),) = Encoder(ours).encode([row])
    assert made.ids.tolist() == theirs.apply_chat_template(CHATS[1])["input_ids"]
    before = theirs.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    assert made.loss.tolist() == [False] * len(before) + [True] * (len(made.ids) - len(before))
    assert made.agrees
    ((made,),) = Encoder(ours, EncodeOptions(assistant_only_loss=True)).encode([row])
    assert ours.decode(made.ids[made.loss], False) == "four<|im_end|>six<|im_end|>"


TEXTS = ["", "a fox", "a fox<|eos|>", "Once upon a time, a b😀r.\n\n", " " * 5]


def encoded(tokenizer: Tokenizer, row: dict[str, Any], **options: Any) -> list[Any]:
    return Encoder(tokenizer, EncodeOptions(**options)).encode([record(row, "here")])[0]


def test_a_text_ends_with_one_eos(with_template):
    ours, theirs = with_template("")
    rows = [record({"text": text}, "here") for text in TEXTS]
    for text, (made,) in zip(TEXTS, Encoder(ours).encode(rows), strict=True):
        assert made.ids.tolist() == theirs(text.removesuffix("<|eos|>") + "<|eos|>")["input_ids"]
        assert made.loss is None
        assert made.ids[0] == 0
        assert made.ids.tolist().count(1) == 1


@pytest.mark.parametrize("completion", ["lived.", " lived.<|eos|>", ""])
def test_loss_on_the_completion(with_template, completion: str):
    ours, theirs = with_template("")
    (made,) = encoded(ours, {"prompt": "a fox", "completion": completion})
    whole = "a fox" + completion.removesuffix("<|eos|>") + "<|eos|>"
    before = len(theirs("a fox")["input_ids"])
    assert made.ids.tolist() == theirs(whole)["input_ids"]
    assert made.loss.tolist() == [number >= before for number in range(len(made.ids))]
    (made,) = encoded(ours, {"prompt": "a fox", "completion": completion}, completion_only_loss=False)
    assert made.loss.all()


def test_a_prompt_whose_tokens_differ_is_counted(tokenizer: Tokenizer):
    assert encoded(tokenizer, {"prompt": "Once", "completion": " upon"})[0].agrees
    assert not encoded(tokenizer, {"prompt": "Onc", "completion": "e upon"})[0].agrees


def test_a_pair_is_two_completions(tokenizer: Tokenizer):
    chosen, rejected = encoded(tokenizer, {"prompt": "a fox", "chosen": " ran", "rejected": " sat"},
                               completion_only_loss=False)     # has no say
    for made, text in ((chosen, " ran"), (rejected, " sat")):
        (expected,) = encoded(tokenizer, {"prompt": "a fox", "completion": text})
        assert np.array_equal(made.ids, expected.ids)
        assert np.array_equal(made.loss, expected.loss)


def test_another_token_ends_documents(tokenizer: Tokenizer):
    (made,) = encoded(tokenizer, {"text": "a fox"}, eos_token="<|end|>")
    assert tokenizer.decode(made.ids, False) == "<|bos|>a fox<|end|>"


@pytest.mark.parametrize("text", ["a fox lived in a wood.\nThe end, \t he said.\n\n\n" * 40, "x" * 3000,
                                  "\n" * 500, "a\r\n  b\n c\n" * 300, "😀é\n" * 500, "no lines at all " * 90])
def test_a_long_text_has_the_ids_of_one_call(tokenizer: Tokenizer, text: str):
    assert encode_long(tokenizer, text, 100) == tokenizer.encode(text)


def test_a_long_text_that_cannot_be_cut_is_encoded_at_once():
    """SentencePiece's prefix stands before every text: pieces would have one each."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.train_from_iterator(["a fox lived\nin a wood " * 9], trainers.BpeTrainer(vocab_size=60,
                                                                                   show_progress=False))
    own, text = Tokenizer(backend, {}, None), "a fox lived\nin a wood\n" * 100
    assert encode_long(own, text, 100) == own.encode(text)
    pieces = [own.encode(line + "\n") for line in text.splitlines()]
    assert own.encode(text) != [token for piece in pieces for token in piece]


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


def tokens(plan: Plan, documents: list[list[int]]) -> list[list[list[int]]]:
    """The rows, each a list of segments."""
    return [[documents[plan.documents[piece]][plan.begins[piece]:plan.begins[piece] + plan.counts[piece]]
             for piece in plan.pieces(row)] for row in range(len(plan))]


def documents(lengths: list[int]) -> list[list[int]]:
    return [[1000 * number + token for token in range(length)] for number, length in enumerate(lengths)]


# the examples of TRL's `pack_dataset`
EXAMPLE = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]


@pytest.mark.parametrize(("split", "rows"), [
    (False, [[[1, 2, 3, 4]], [[8, 9, 10], [11]], [[6, 7]]]), (True, [[[1, 2, 3, 4]], [[8, 9, 10], [5]],
                                                                     [[6, 7], [11]]])])
def test_best_fit_is_that_of_trl(split: bool, rows: Any):
    plan = best_fit(pieces(np.array([len(each) for each in EXAMPLE]), 4, split), 4)
    assert tokens(plan, EXAMPLE) == rows
    assert plan.tokens.tolist() == [sum(map(len, row)) for row in rows]


def slow_best_fit(lengths: list[int], most: int) -> list[list[int]]:
    """Every row is looked at for every document; of equal rooms, the one that has had it longest."""
    rows: list[tuple[int, int, list[int]]] = []     # room, since when, documents
    for step, number in enumerate(sorted(range(len(lengths)), key=lambda number: -lengths[number])):
        fitting = [row for row in rows if row[0] >= lengths[number]]
        room, _, found = min(fitting, key=lambda row: row[:2], default=(most, 0, []))
        place = next((place for place, row in enumerate(rows) if row[2] is found), len(rows))
        rows[place:place + 1] = [(room - lengths[number], step, found)]
        found.append(number)
    return [row for _, _, row in rows]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_best_fit_is_that_of_a_search(lengths: list[int]):
    plan = best_fit(pieces(np.array(lengths), 20, False), 20)
    found = [[int(plan.documents[piece]) for piece in plan.pieces(row)] for row in range(len(plan))]
    assert found == slow_best_fit(lengths, 20)


@given(LENGTHS, st.integers(2, 30), st.sampled_from(["alone", "best_fit", "wrapped"]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_token_is_lost_or_doubled(lengths: list[int], most: int, how: str, split: bool):
    given_documents, counts = documents(lengths), np.array(lengths)
    order = np.random.default_rng(len(lengths)).permutation(len(lengths))
    made = pieces(counts, most, split)
    plan = {"alone": lambda: alone(made), "best_fit": lambda: best_fit(made, most),
            "wrapped": lambda: wrap(counts, order, most)}[how]()
    rows = tokens(plan, given_documents)
    found = sorted(token for row in rows for segment in row for token in segment)
    kept = [each if split or how == "wrapped" else each[:most] for each in given_documents]
    assert found == sorted(token for each in kept for token in each)
    assert all(0 < sum(map(len, row)) <= most for row in rows)
    # a segment is consecutive tokens of one document
    assert all(np.diff(segment).tolist() == [1] * (len(segment) - 1) for row in rows for segment in row)
    if how == "wrapped":
        assert [token for row in rows for segment in row for token in segment] == [
            token for number in order for token in given_documents[number]]
        assert all(sum(map(len, row)) == most for row in rows[:-1])


def test_a_row_of_wrapped_begins_where_the_one_before_ended():
    plan = wrap(np.array([3, 0, 6, 2]), np.array([2, 3, 1, 0]), 4)
    assert tokens(plan, documents([3, 0, 6, 2])) == [[[2000, 2001, 2002, 2003]], [[2004, 2005], [3000, 3001]],
                                                     [[0, 1, 2]]]


def test_packing_of_many_documents_is_quick():
    lengths = np.random.default_rng(0).integers(1, 2000, 20_000)
    plan = best_fit(pieces(lengths, 4096, False), 4096)
    assert plan.tokens.mean() > 0.99 * 4096
