"""Conversations: ids and masks of transformers where a template has marks; where not, the same answers."""
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.train.data.encode import EncodeOptions, Encoder
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
