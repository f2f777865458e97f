"""Sampled tokens become text, however they are split; stop strings end it where they are found."""
from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.outputs import Delta, EngineCoreOutput
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.scheduler_output import Logprobs
from tinygrad_nv.engine.text.output_processor import OutputProcessor
from tinygrad_nv.engine.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(DEFAULT_MODEL)
EOS = 1
STORY = TOKENIZER.encode("Once upon a time, there was a small fox. He had a hat, and a naïve 猫.",
                         special=False)


def chosen(tokens: list[int], reason: str | None = None, index: int = 0, **more) -> EngineCoreOutput:
    return EngineCoreOutput("a", index, tuple(tokens), finish_reason=reason, **more)


def deltas(params: SamplingParams, steps: list[EngineCoreOutput],
           prompt: tuple[int, ...] = (0,)) -> list[Delta]:
    processor = OutputProcessor(TOKENIZER, prompt, params)
    return [delta for step in steps if (delta := processor.process(step)) is not None]


def text(made: list[Delta]) -> str: return "".join(delta.text for delta in made)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2047), min_size=1, max_size=40), st.lists(st.integers(0, 2047), max_size=9),
       st.data())
def test_text_is_that_of_all_tokens_together(tokens: list[int], prompt: list[int], data: st.DataObject):
    """Any tokens, special ones and halves of characters among them, several a step or none."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    parts = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    prompt = TOKENIZER.encode(TOKENIZER.decode(prompt), special=False)   # ends with a whole character
    made = deltas(SamplingParams(), [chosen(part) for part in parts] + [chosen([], "length")], tuple(prompt))
    said = TOKENIZER.decode([*prompt, *tokens]).removeprefix(TOKENIZER.decode(prompt))
    assert text(made) == said.rstrip("\ufffd"), "without a character that is cut"
    assert [token for delta in made for token in delta.tokens] == tokens
    assert [delta.finish_reason for delta in made] == [None] * len(parts) + ["length"]


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_its_sequence_and_drops_what_follows(step: int, include: bool):
    params = SamplingParams(stop=("fox. He", "hat"), include_stop_str_in_output=include)
    processor = OutputProcessor(TOKENIZER, (0,), params)
    made, told = [], None
    for at in range(0, len(STORY), step):
        delta = processor.process(chosen(STORY[at:at + step]))
        if told is not None: assert delta is None, "the core has not heard of the end yet"
        else: made.append(delta)
        told = told or delta.finish_reason
    assert text(made) == "Once upon a time, there was a small " + ("fox. He" if include else "")
    assert (made[-1].finish_reason, made[-1].stop_reason) == ("stop", "fox. He")
    tokens = [token for delta in made for token in delta.tokens]
    assert TOKENIZER.decode(tokens).endswith("fox. He"), "no token behind the one that completes it"
    assert processor.is_finished


def test_half_a_character_at_the_end_is_no_text():
    half = TOKENIZER.encode("猫", special=False)[:1]
    made = deltas(SamplingParams(stop=("\ufffd",)), [chosen(half), chosen([], "length")])
    assert (text(made), made[-1].finish_reason, made[-1].stop_reason) == ("", "length", None)


def test_what_may_become_a_stop_string_comes_when_it_does_not():
    steps = [chosen([token]) for token in STORY] + [chosen([], "length")]
    made = deltas(SamplingParams(stop=("fox!",)), steps)
    assert text(made) == TOKENIZER.decode(STORY)


def test_no_stop_string_is_met_before_min_tokens():
    once = TOKENIZER.encode("a a a a a a a a", special=False)
    made = deltas(SamplingParams(stop=(" a",), min_tokens=5), [chosen([token]) for token in once])
    assert (text(made), made[-1].finish_reason, sum(len(d.tokens) for d in made)) == ("a a a a a", "stop", 6)


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ends_a_sequence_has_no_text_unless_asked(include: bool):
    token = TOKENIZER.encode(" fox", special=False)[0]
    params = SamplingParams(stop_token_ids=(token,), include_stop_str_in_output=include)
    made = deltas(params, [chosen([STORY[0], token], "stop", stop_reason=token)])
    assert (text(made), made[-1].tokens) == ("Once" + " fox" * include, (STORY[0], token))
    assert (made[-1].finish_reason, made[-1].stop_reason) == ("stop", token)


def test_each_of_n_sequences_is_by_itself():
    processor = OutputProcessor(TOKENIZER, (0,), SamplingParams(n=2, stop=("small fox",)))
    texts = ["", ""]
    for at, token in enumerate(STORY):
        for index, mine in enumerate((token, STORY[-1 - at])):
            delta = processor.process(chosen([mine], index=index))
            if delta is not None: texts[index] += delta.text
    assert texts[0] == "Once upon a time, there was a "
    assert texts[1] == TOKENIZER.decode(STORY[::-1])
    assert list(processor.texts) == [1]


def test_logprobs_come_with_the_tokens_own_texts():
    told = Logprobs(-0.5, 2, ((STORY[1], -0.25), (EOS, -0.5)))
    first, = deltas(SamplingParams(logprobs=2), [chosen([STORY[1], EOS], "stop", logprobs=(told, told))])
    assert [each.text for each in first.logprobs] == [" upon", "<|eos|>"]
    assert first.logprobs[0].top == ((STORY[1], " upon", -0.25), (EOS, "<|eos|>", -0.5))
    assert (first.logprobs[0].logprob, first.logprobs[0].rank) == (-0.5, 2)


def test_without_a_tokenizer_there_are_tokens():
    made = OutputProcessor(None, (0,), SamplingParams(stop=("x",))).process(chosen([7, 8], "length"))
    assert (made.text, made.tokens, made.finish_reason) == ("", (7, 8), "length")


def test_tokens_without_text_take_no_room():
    """An answer that goes on past its end tokens costs each token the same."""
    processor = OutputProcessor(TOKENIZER, STORY[:6], SamplingParams())
    for _ in range(1000): processor.process(chosen([EOS]))
    assert len(processor.texts[0].detokenizer.ids) < 10
    before, after = TOKENIZER.decode(STORY[:6]), TOKENIZER.decode(STORY[:7])
    assert processor.process(chosen([STORY[6]])).text == after[len(before):]


@pytest.mark.parametrize("size", [1, 2, 9])
def test_log_probabilities_have_a_character_with_its_last_token(size: int):
    """As vLLM writes them: an echo of "a 🌍 é" has tokens "a", "", "", " 🌍", " é"."""
    ids = TOKENIZER.encode("so 猫 🦊", special=False)
    parts = [ids[at:at + size] for at in range(0, len(ids), size)]
    broken = TOKENIZER.encode("猫", special=False)[-1]      # the likeliest one, which completes nothing
    found = Logprobs(-1.0, 2, ((broken, -0.5),))
    steps = [chosen(part, logprobs=(found,) * len(part)) for part in parts]
    made = deltas(SamplingParams(logprobs=1), steps, ())
    texts = [each.text for delta in made for each in delta.logprobs]
    assert "".join(texts) == "so 猫 🦊"
    assert len(texts) > len([text for text in texts if text]), "some tokens are parts of characters"
    whole = [TOKENIZER.decode(ids[:end]).rstrip("\ufffd") for end in range(len(ids) + 1)]
    assert texts == [after.removeprefix(before) for before, after in pairwise(whole)]
    assert all("\ufffd" not in each.top[0][1] for delta in made for each in delta.logprobs)
    told = EngineCoreOutput("a", 0, (EOS,), finish_reason="stop", prompt_logprobs=(found,) * len(ids))
    [last] = deltas(SamplingParams(prompt_logprobs=1), [told], (5, *ids))
    assert [each.text for each in last.prompt_logprobs] == texts
