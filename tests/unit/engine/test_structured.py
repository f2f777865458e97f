"""Whatever a model prefers, its output satisfies the constraint, with tokenizers of every kind; and
constraints that hold after the reasoning, with drafts too."""
from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tests.support.engine.structured_case import (
    KINDS,
    PERSON,
    SCHEMAS,
    allowed,
    grammars,
    holds,
    schema,
    text,
    tokenizer,
    written,
)
from tinygrad_nv.engine.structured_output.after_reasoning import AfterReasoning
from tinygrad_nv.engine.structured_output.grammar_check import GrammarChecker, compile_grammar
from tinygrad_nv.engine.structured_output.matcher import GrammarCompiler, GrammarMatcher, pack_mask
from tinygrad_nv.engine.structured_output.params import ReasoningTokens
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured
from tinygrad_nv.engine.text.token_bytes import token_bytes
from tinygrad_nv.errors import EngineError, RequestError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_have_the_schemas_form(kind: str, name: str) -> None:
    for seed in range(4):
        ids = written(grammars(kind).matcher(schema(name)), tokenizer(kind)[2], np.random.default_rng(seed))
        assert holds(json.loads(text(kind, ids)), SCHEMAS[name]), text(kind, ids)


def test_the_check_of_schemas_finds_what_is_wrong() -> None:
    right = {"name": "x", "age": 3, "tags": ["a"]}
    assert holds(right, PERSON)
    for wrong in ({"age": 151}, {"tags": ["b"]}, {"name": ""}, {"more": 1}, {"other": 1}, {"age": True}):
        assert not holds(right | wrong, PERSON)
    assert not holds({"name": "x", "age": 3}, PERSON)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regex", [r"[a-f]{3,9}-\d+", r"(ja|nein|ja, nein)?!", "(?i)hello [^a-z]{2,4}.",
                                   "a\nb+"])
def test_random_answers_match_the_regex(kind: str, regex: str) -> None:
    for seed in range(4):
        ids = written(grammars(kind).matcher(Structured(regex=regex)), tokenizer(kind)[2],
                      np.random.default_rng(seed), most=20)
        assert re.fullmatch(regex, text(kind, ids)), text(kind, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_is_reached_and_no_other_text(kind: str) -> None:
    choice = ["yes", "no", "yes and no", "</s>", "a/b\\", "é☃\n\t", " ", '"']
    rng = np.random.default_rng(0)
    matchers = (grammars(kind).matcher(Structured(choice=choice)) for _ in range(100))
    assert {text(kind, written(each, tokenizer(kind)[2], rng)) for each in matchers} == set(choice)


@pytest.mark.parametrize("grammar", ['start: "[" NUMBER ("," NUMBER)* "]"\nNUMBER: /[0-9]{1,3}/',
                                     'root ::= "[" number ("," number)* "]"\nnumber ::= [0-9] [0-9]? [0-9]?'])
def test_grammars_of_both_kinds(grammar: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        ids = written(grammars("tales").matcher(Structured(grammar=grammar)), 1, rng, most=30)
        assert re.fullmatch(r"\[\d{1,3}(,\d{1,3})*\]", text("tales", ids))


def test_a_list_of_lists_has_no_depth() -> None:
    nested = {"$defs": {"l": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/l"}}},
              "$ref": "#/$defs/l"}
    ids = written(grammars("tales").matcher(Structured(json=nested)), 1, np.random.default_rng(5))
    assert isinstance(json.loads(text("tales", ids)), list)


# **** masks ****

def test_a_mask_allows_exactly_what_may_follow() -> None:
    choice = ["abcdef", "abxy", "able to run", "b"]
    words = token_bytes(tokenizer("tales")[0].backend, 2048)
    rng = np.random.default_rng(2)
    for _ in range(20):
        matcher, so_far = grammars("tales").matcher(Structured(choice=choice)), b""
        while not matcher.is_finished:
            left = [each.encode()[len(so_far):] for each in choice if each.encode().startswith(so_far)]
            may = {i for i, word in enumerate(words) if word and any(each.startswith(word) for each in left)}
            now = allowed(matcher.mask())
            # where there is one way to go on, the tokenizer's own token is taken
            assert set(now) == may or (len(now) == 1 and now[0] in may and len({x[:1] for x in left}) == 1)
            token = int(rng.choice(now))
            so_far += words[token]
            matcher.accept(token)
        assert so_far.decode() in choice


def test_an_end_token_is_allowed_exactly_where_the_form_may_end() -> None:
    matcher, ends = grammars("tales").matcher(Structured(regex="[a-c]{2,4}")), []
    token = tokenizer("tales")[0].encode("a", special=False)[0]
    for _ in range(4):
        ends.append(1 in allowed(matcher.mask()))
        assert not matcher.is_finished
        matcher.accept(token)
    assert ends == [False, False, True, True]
    assert matcher.is_finished
    assert allowed(matcher.mask()) == [1]


def test_an_end_token_ends() -> None:
    matcher = grammars("tales").matcher(Structured(regex="a*"))
    assert 1 in allowed(matcher.mask())
    matcher.accept(1)
    assert matcher.is_finished


@pytest.mark.parametrize("spare", [0, 1, 40, 100])
def test_ids_without_a_token_are_never_allowed(spare: int) -> None:
    words, size, _ = tokenizer("tales")
    known = {i for i in range(size) if words.backend.id_to_token(i) is not None}
    matcher = grammars("tales", spare).matcher(Structured(regex=r"(.|\n)*"))
    assert matcher.mask().shape == (-(-(size + spare) // 32),)
    assert matcher.mask().dtype == np.uint32
    now = set(allowed(matcher.mask()))
    assert now <= known
    assert now & set(range(5)) == {1}           # of special tokens the end token alone
    assert len(known - now - set(range(5))) < 140     # bytes that start no character


def test_a_model_with_several_end_tokens_or_none() -> None:
    words, size, _ = tokenizer("tales")
    several, none = (GrammarCompiler(words, size, eos).matcher(Structured(regex="ab?"))
                     for eos in ([1, 3], []))
    token = words.encode("a", special=False)[0]
    for each in (several, none): each.accept(token)
    assert {1, 3} <= set(allowed(several.mask()))
    assert not {1, 3} & set(allowed(none.mask()))
    assert allowed(none.mask())
    none.accept(words.encode("b", special=False)[0])
    assert none.is_finished


@pytest.mark.parametrize("spare", [0, 2])
def test_without_an_end_token_a_complete_form_allows_nothing(spare: int) -> None:
    words, size, _ = tokenizer("tales")
    made = GrammarCompiler(words, size + spare, [])
    assert max(allowed(made.matcher(Structured(regex="a*")).mask())) < size     # although it may end here
    matcher = made.matcher(Structured(choice=["a"]))
    matcher.accept(allowed(matcher.mask())[0])
    assert allowed(matcher.mask()) == []
    assert matcher.is_finished


def test_pieces_that_are_not_written_in_characters_for_bytes() -> None:
    words = Backend(models.BPE(vocab={"a b": 0, "Ġb": 1, "☃": 2}, merges=[]))
    words.decoder = decoders.ByteLevel()
    assert token_bytes(words, 4) == [b"a b", b" b", "☃".encode(), b""]


def test_a_vocabulary_smaller_than_the_tokenizer() -> None:
    matcher = GrammarCompiler(tokenizer("tales")[0], 300, [1]).matcher(Structured(regex="[a-z ]{30}"))
    ids = written(matcher, 1, np.random.default_rng(0))
    assert max(ids) < 300
    assert len(text("tales", ids)) == 30


def test_what_a_mask_does_not_allow_is_not_accepted() -> None:
    matcher = grammars("tales").matcher(Structured(regex="a+"))
    before = matcher.mask().copy()
    for token in (2, tokenizer("tales")[0].encode("b", special=False)[0], 2048, -1):
        with pytest.raises(EngineError, match=f"token {token} was sampled"): matcher.accept(token)
    assert (matcher.mask() == before).all()


def test_packed() -> None: assert allowed(pack_mask([0, 31, 32, 63, 64], 65)) == [0, 31, 32, 63, 64]


# **** drafts ****

def test_masks_of_a_draft_are_those_of_its_tokens_one_by_one() -> None:
    rng = np.random.default_rng(3)
    for name in SCHEMAS:
        matcher = grammars("tales").matcher(schema(name))
        ids = written(matcher.copy(), 1, rng)
        at = 0
        while at < len(ids):
            draft = ids[at:at + 5]
            alone, expected = matcher.copy(), [matcher.mask()]
            for token in draft:
                alone.accept(token)
                expected.append(alone.mask())
            found = matcher.masks(draft)
            # the last mask shows that the output is complete
            assert len(found) == len(expected)
            assert all((a == b).all() for a, b in zip(found, expected, strict=True))
            assert (matcher.mask() == expected[0]).all()
            matcher.accept(ids[at])
            at += 1


def test_masks_end_where_a_draft_is_wrong() -> None:
    words = tokenizer("tales")[0]
    matcher = grammars("tales").matcher(Structured(regex="aab"))
    a, b = (words.encode(each, special=False)[0] for each in "ab")
    assert [len(matcher.masks(draft)) for draft in ([], [b], [a, b], [a, a, a], [a, a, b, b], [a, 9999])] == [
        1, 1, 2, 3, 4, 2]
    matcher.accept(a)       # it is where it was
    assert len(matcher.masks([a, b])) == 3


# **** many at once ****

def test_matchers_of_one_form_do_not_know_of_each_other() -> None:
    form = Structured(json=PERSON)
    first = grammars("tales").matcher(form)
    before = first.mask().copy()
    written(first, 1, np.random.default_rng(0))
    assert (grammars("tales").matcher(form).mask() == before).all()


def test_threads_that_ask_at_once() -> None:
    made = GrammarCompiler(tokenizer("tales")[0], 2048, [1])
    found: list[str] = []

    def ask(number: int) -> None:
        matcher = made.matcher(Structured(regex=f"a{{{number % 4 + 1}}}"))
        found.append(text("tales", written(matcher, 1, np.random.default_rng(number))))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    made.close()
    assert sorted(found) == sorted("a" * (i % 4 + 1) for i in range(16))


def test_equal_forms_are_equal() -> None:
    a, b = Structured(json=PERSON), Structured(json=json.dumps(PERSON))
    assert a == b
    assert hash(a) == hash(b)
    assert a != Structured(regex="a")
    assert Structured(json_object=True) == Structured(json={"type": "object"})


# **** grammars that take too long ****

BOMB = {"allOf": [{"type": "integer", "multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 101}]}


def test_a_form_over_its_time_is_ended_and_the_next_one_compiles() -> None:
    checker = GrammarChecker(0.5)
    with pytest.raises(TimeoutError): checker.check(Structured(json=BOMB).grammar_text)
    assert checker.check(Structured(regex="a").grammar_text) == ""
    assert "unclosed group" in checker.check(Structured(regex="(a").grammar_text)
    checker.close()


def test_a_process_that_died_is_started_again() -> None:
    checker = GrammarChecker()
    assert checker.check(Structured(regex="a").grammar_text) == ""
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    assert checker.check(Structured(regex="b").grammar_text) == ""
    checker.close()


def test_a_grammar_that_explodes_later_ends_its_answer_alone() -> None:
    compiler, late = grammars("tales"), Structured(regex="b(a{900}){900}")
    with pytest.raises(RequestError, match="the regex of the structured output cannot be compiled: lexer"):
        compiler.matcher(late)
    # as one that explodes after the texts that are tried
    matcher = GrammarMatcher(compile_grammar(compiler._tokenizer, late.grammar_text),
                             compiler._tokenizer_info.stop_ids, compiler.vocab)
    other = grammars("tales").matcher(Structured(regex="b+"))
    token = tokenizer("tales")[0].encode("b", special=False)[0]
    def go_on() -> None:
        for _ in range(3): matcher.accept(allowed(matcher.mask())[0])
    with pytest.raises(RequestError, match="structured output cannot be continued"): go_on()
    other.accept(token)


# **** after reasoning ****


START, STOP, MARK = 7, 9, 11    # of the vocabulary of "tales"
_, VOCAB, EOS = tokenizer("tales")
CHOICE = Structured(choice=["a fox", "two"])


def made(tokens: ReasoningTokens, constrained: bool = True) -> AfterReasoning:
    return AfterReasoning(tokens, grammars("tales").matcher(CHOICE) if constrained else None, VOCAB, [EOS])


def can_follow(mask: np.ndarray | None) -> list[int]:
    return [*range(VOCAB)] if mask is None else allowed(mask)


def said(matcher: AfterReasoning, seed: int, end: Sequence[int], after: int) -> tuple[list[int], list[int]]:
    """The reasoning and the answer of a model that likes every token, and its end after so many."""
    rng, ids, at = np.random.default_rng(seed), list[int](), -1
    while not matcher.is_finished:
        choice = can_follow(matcher.mask())
        wanted = end[len(ids) - after] if at < 0 and 0 <= len(ids) - after < len(end) else None
        token = wanted if wanted in choice else int(choice[rng.integers(len(choice))])
        assert token is not None
        matcher.accept(token)
        ids.append(token)
        if at < 0 and tuple(ids[-len(end):]) == tuple(end): at = len(ids)
        assert len(ids) < 100
    return ids[:max(at, 0)], ids[max(at, 0):]


@pytest.mark.parametrize("end", [(STOP,), (STOP, 100, MARK)])
def test_the_constraint_holds_after_the_reasoning(end: tuple[int, ...]):
    for seed in range(4):
        thought, answer = said(made(ReasoningTokens(None, end, True)), seed, end, 5 + seed)
        assert len(thought) >= 5
        assert EOS not in thought
        assert text("tales", answer) in ("a fox", "two")


def test_an_answer_may_begin_with_reasoning_or_without():
    tokens, grammar = ReasoningTokens(START, (STOP,), False), grammars("tales").matcher(CHOICE)
    assert can_follow(made(tokens).mask()) == sorted([*allowed(grammar.mask()), START])
    matcher = made(tokens)
    matcher.accept(START)
    assert len(can_follow(matcher.mask())) == VOCAB - 1     # all but the end token
    matcher.accept(3)
    matcher.accept(STOP)
    assert can_follow(matcher.mask()) == allowed(grammar.mask())
    # without: the first token is the constraint's
    matcher = made(tokens)
    first = allowed(grammar.mask())[0]
    for each in (matcher, grammar): each.accept(first)
    assert can_follow(matcher.mask()) == allowed(grammar.mask())
    assert made(ReasoningTokens(START, (STOP,), False, may_end=True)).mask() is not None


def test_an_answer_may_end_where_channels_have_calls():
    assert EOS in can_follow(made(ReasoningTokens(None, (STOP,), True, may_end=True)).mask())
    assert EOS not in can_follow(made(ReasoningTokens(None, (STOP,), True)).mask())


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_budget_ends_the_reasoning(budget: int):
    end = (STOP, 100, MARK)
    matcher = made(ReasoningTokens(None, end, True, budget=budget))
    for token in range(20, 20 + budget):
        assert len(can_follow(matcher.mask())) == VOCAB - 1
        matcher.accept(token)
    for token in end:
        assert can_follow(matcher.mask()) == [token]
        matcher.accept(token)
    assert can_follow(matcher.mask()) == allowed(grammars("tales").matcher(CHOICE).mask())
    # what the model has begun is completed
    matcher = made(ReasoningTokens(None, end, True, budget=2))
    for token in end[:2]: matcher.accept(token)
    assert can_follow(matcher.mask()) == [MARK]
    # without a constraint anything may follow
    free = made(ReasoningTokens(None, (STOP,), True, budget=0), constrained=False)
    free.accept(STOP)
    assert free.mask() is None
    assert not free.is_finished


@pytest.mark.parametrize("tokens", [
    ReasoningTokens(START, (STOP,), False), ReasoningTokens(None, (5, STOP), True),
    ReasoningTokens(None, (STOP,), True, budget=2)])
def test_masks_of_a_draft_are_those_after_its_tokens(tokens: ReasoningTokens):
    for seed in range(12):
        rng, matcher, draft = np.random.default_rng(seed), made(tokens), list[int]()
        steps = [matcher.mask()]
        while not matcher.is_finished and len(draft) < 7:
            choice = can_follow(matcher.mask())
            likely = [each for each in (START, 5, STOP) if each in choice]
            token = likely[seed % len(likely)] if likely and rng.random() < 0.6 else \
                int(choice[rng.integers(len(choice))])
            draft.append(token)
            matcher.accept(token)
            steps.append(matcher.mask())
        found = made(tokens).masks(draft)
        assert len(found) == len(steps)
        for one, other in zip(found, steps, strict=True): assert can_follow(one) == can_follow(other)
        # it ends at the first token that is not allowed
        for at, mask in enumerate(steps[:-1]):
            if bad := sorted({*range(VOCAB)} - {*can_follow(mask)})[:1]:
                assert len(made(tokens).masks([*draft[:at], *bad, *draft[at:]])) == at + 1
