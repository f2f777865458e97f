"""Regular expressions of files and clients: what is refused, in words, and that nothing waits for long."""
from __future__ import annotations

import time

import pytest

from tinygrad_nv.errors import ModelError, RequestError
from tinygrad_nv.models.peft import pattern_of, targets_of
from tinygrad_nv.quant.readers.compressed_tensors import CompressedTensorsReader
from tinygrad_nv.quantize.directory import _matches as is_ignored
from tinygrad_nv.regexes import MAX_PATTERNS, compile_pattern
from tinygrad_nv.server.parsers.schema_values import find

ENDLESS = ("(a|aa)+$", r"(?:(a|aa)+)\1x", "(x+x+)+y")


@pytest.mark.parametrize("text", ENDLESS)
def test_a_match_that_backtracks_ends_on_time(text: str) -> None:
    pattern, begin = compile_pattern(text, f"file {text}", RequestError, seconds=0.2), time.process_time()
    with pytest.raises(RequestError) as error: pattern.search("a" * 60 + "c" + "x" * 3000 + "c")
    assert error.value.found == f"file {text}: matching the regular expression {text!r} takes more than 0.2 s"
    assert time.process_time() - begin < 2


def test_patterns_of_one_file_share_their_time() -> None:
    begin = time.process_time()
    for number in range(20):
        with pytest.raises(ModelError, match=r"one\.json"):
            compile_pattern(f"({'a' * (number + 1)}|a|aa)+$", "one.json", seconds=0.2).match("a" * 60 + "b")
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(("text", "words"), [
    ("a" * 70_000, "has 70,000 characters"), ("|".join(map(str, range(10**6))), "characters"),
    ("a{1000}{1000}{1000}", "repeats too often"), ("((a?){100000000})", "repeats too often"),
    ("(", r"'\(' is no regular expression: missing \)"), ("*", "no regular expression"),
    ("(" * 20_000 + ")" * 20_000, "no regular expression"), ("(?R)", "no regular expression")])
def test_a_pattern_that_is_too_large_is_refused(text: str, words: str) -> None:
    with pytest.raises(ModelError, match="adapter.json.*" + words): compile_pattern(text, "adapter.json")


def test_honest_patterns_match_as_those_of_re() -> None:
    peft = compile_pattern(r"^(?!.*vision)(?!.*lm_head).*\.(q_proj|k_proj)$", "adapter")
    assert peft.match("model.layers.1.self_attn.q_proj")
    assert not peft.match("vision.layers.1.q_proj")
    assert [*targets_of(r".*\.layers\.[01]\..*q_proj", {"model.layers.0.a.q_proj": 1,
                                                      "model.layers.2.a.q_proj": 1})
            ] == ["model.layers.0.a.q_proj"]
    assert [*targets_of(["q_proj", "mlp.up"], {"a.q_proj": 1, "aq_proj": 1, "x.mlp.up": 1, "mlp.up": 1,
                                             "up": 1})
            ] == ["a.q_proj", "x.mlp.up", "mlp.up"]
    assert pattern_of({"k_proj": 1, r"layers\.1\..*q_proj": 2}, "model.layers.1.attn.q_proj") == \
        r"layers\.1\..*q_proj"


def test_every_place_that_reads_patterns_is_bounded() -> None:
    layer = "a" * 60 + "b"
    with pytest.raises(ModelError, match=r"ignore of quantization_config.*takes more than"):
        CompressedTensorsReader({}, ("re:(a|aa)+$",), "places.json").group(layer)
    with pytest.raises(ModelError, match=r"target_modules.*takes more than"):
        list(targets_of("(a|aa|aaa)+$", {layer: 1}))
    with pytest.raises(ModelError, match=r"ignored layers.*repeats too often"):
        is_ignored(layer + ".weight", ["re:a{9999999}"])
    with pytest.raises(ModelError, match=f"has {MAX_PATTERNS + 1:,} regular expressions"):
        CompressedTensorsReader({}, tuple(f"re:{n}" for n in range(MAX_PATTERNS + 1))).group("x")
    schema = {"patternProperties": {"(a|aa)+$": {"type": "string"}}, "additionalProperties": {"type": "null"}}
    assert find(schema, layer, schema) == {"type": "null"}
