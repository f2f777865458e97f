"""Chat templates, held to transformers: which one is taken, what it gets as contents, tojson. Sampling
defaults, held to vLLM: its get_diff_sampling_param takes these fields of generation_config.json."""
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tinygrad_nv import cli
from tinygrad_nv.cli import vllm_options
from tinygrad_nv.engine.generation_config import GenerationConfig
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.text.templates import templates_in_metadata
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.engine.vllm_arguments import from_vllm
from tinygrad_nv.errors import ConfigError, ModelError, RequestError, TokenizerError
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.protocol import completion

TOOLS = [{"type": "function", "function": {"name": "wetter", "description": "Grüße <b>", "parameters": {
    "type": "object", "properties": {"ort": {"type": "string"}}}}}]
TURNS = [("system", "be kind"), ("user", "first word"), ("assistant", "an answer"), ("user", "last word")]


@pytest.fixture(scope="module")
def vocabulary() -> str:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({each: i for i, each in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    return backend.to_str()


def directory(path: Path, vocabulary: str, **config: Any) -> Path:
    (path / "tokenizer.json").write_text(vocabulary)
    (path / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "!", "eos_token": '"', **config}))
    return path


def turns(parts: bool, roles: tuple[str, ...] = ("system", "user", "assistant")) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": text}] if parts else text}
            for role, text in TURNS if role in roles]


def theirs(path: Path, messages: list[dict[str, Any]], **more: Any) -> str:
    loaded = transformers.AutoTokenizer.from_pretrained(path)
    return loaded.apply_chat_template(messages, tokenize=False, **more)


def ours(path: Path, messages: list[dict[str, Any]], tools: Any = (), **more: Any) -> str:
    return Tokenizer.load(path).render(messages, tools, add_generation_prompt=False, **more)


@pytest.mark.parametrize("options", ["", "ensure_ascii=true", "ensure_ascii=False, indent=2", "false, 4",
                                     "separators=(',', ':'), sort_keys=true"])
def test_tojson_is_that_of_transformers(tmp_path: Path, vocabulary: str, options: str):
    path = directory(tmp_path, vocabulary, chat_template="{{ tools | tojson(" + options + ") }}")
    assert ours(path, turns(False), TOOLS) == theirs(path, turns(False), tools=TOOLS)


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WITH_TOOLS = "{{ tools | length }} <tool_call> " + PLAIN


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("kind", ["list", "directory", "both", "json"])
def test_the_template_of_a_conversation_is_chosen_as_transformers_does(
        tmp_path: Path, vocabulary: str, kind: str, tools: Any):
    named = [{"name": "rag", "template": "rag"}, {"name": "tool_use", "template": WITH_TOOLS},
             {"name": "default", "template": PLAIN}]
    path = directory(tmp_path, vocabulary, **({"chat_template": named} if kind in ("list", "both") else {}))
    if kind in ("directory", "both"):
        (path / "chat_template.jinja").write_text("jinja " + PLAIN)
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "tool_use.jinja").write_text("jinja " + WITH_TOOLS)
    if kind == "json":  # a processor's, which transformers' tokenizers do not read
        (path / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
        assert ours(path, turns(False), tools or ()) == "".join(f"{r}: {text}\n" for r, text in TURNS)
        return
    assert ours(path, turns(False), tools or ()) == theirs(path, turns(False), tools=tools)
    if kind == "list":
        assert ours(path, turns(False), chat_template="rag") == "rag"
        assert Tokenizer.load(path).chat_template(bool(tools)) == (WITH_TOOLS if tools else PLAIN)


def test_templates_without_a_default_are_named(tmp_path: Path, vocabulary: str):
    named = [{"name": "tool_use", "template": WITH_TOOLS}, {"name": "rag", "template": "rag"}]
    path = directory(tmp_path, vocabulary, chat_template=named)
    with pytest.raises(TokenizerError, match="rag, tool_use, and none is the default"):
        ours(path, turns(False))
    assert ours(path, turns(False), TOOLS).startswith("1 <tool_call> system")


def test_templates_in_the_metadata_of_gguf():
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b",
                "tokenizer.chat_templates": ["tool_use"]}
    assert templates_in_metadata(metadata) == {"default": "a", "tool_use": "b"}


LOOP = "{% for p in X %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}\n"
TURN = "{% for m in messages %}{{ m.role }}: "
PARTS = {
    "loop": TURN + LOOP.replace("X", "m['content']") + "{% endfor %}",
    "filter": TURN + "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p['text'] + ' ' }}"
              "{% endfor %}{% endfor %}",
    "first": TURN + "{{ m.content[0].text }}\n{% endfor %}",
    "map": TURN + "{{ m.content | map(attribute='text') | join }}\n{% endfor %}",
    "renamed": TURN + "{% set c = m.content %}" + LOOP.replace("X", "c") + "{% endfor %}",
    "macro": "{% macro show(them) %}" + LOOP.replace("X", "them") + "{% endmacro %}" + TURN +
             "{{ show(m.content) }}{% endfor %}",
    "sliced": "{{ messages[0].content[0]['text'] }}{% set rest = messages[1:] %}{% for m in rest | reverse %}"
              + LOOP.replace("X", "m.content | list") + "{% endfor %}",
    "strict": TURN + "{% if m.content is string %}{{ raise_exception('parts') }}{% endif %}" +
              LOOP.replace("X", "m.content") + "{% endfor %}"}


@pytest.mark.parametrize("name", PARTS)
def test_a_template_that_reads_parts_gets_them(tmp_path: Path, vocabulary: str, name: str):
    path = directory(tmp_path, vocabulary, chat_template=PARTS[name])
    want = theirs(path, turns(True))
    assert all(text in want for _, text in TURNS)
    for parts in (True, False): assert ours(path, turns(parts)) == want, parts


def test_each_role_gets_what_the_template_reads(tmp_path: Path, vocabulary: str):
    """The kind of Llama 3.2 Vision, whose system message is a text; and one that reads both forms."""
    mixed = "{{ '<' + messages[0].content | trim + '>' }}{% for m in messages[1:] %}" \
        "{% if m.role == 'user' %}" + LOOP.replace("X", "m.content") + \
        "{% else %}{{ m.content + '!' }}{% endif %}{% endfor %}"
    path = directory(tmp_path, vocabulary, chat_template=mixed)
    for parts in (True, False):
        assert ours(path, turns(parts)) == "<be kind>first wordan answer!last word", parts
    both = PARTS["strict"].replace("{{ raise_exception('parts') }}", "text {{ m.content }}")
    several = [{"role": "user", "content": [{"type": "text", "text": "a"},
                                            {"type": "input_text", "text": "b"}]}]
    path = directory(tmp_path, vocabulary, chat_template=both)
    assert ours(path, [{"role": "user", "content": "a"}]) == "user: text a"
    assert ours(path, several) == "user: ab"
    assert ours(path, several, chat_template=PLAIN) == "user: a\nb\n"
    assert ours(path, several, content_format="string") == "user: text a\nb"
    assert ours(path, [{"role": "user", "content": "a"}], content_format="openai") == "user: a"
    with pytest.raises(RequestError, match="chat_template_content_format is 'list'"):
        ours(path, several, content_format="list")


def test_a_tool_result_and_an_empty_call_are_parts_too(tmp_path: Path, vocabulary: str):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [*turns(False, ("user",))[:1], {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "21 °C", "tool_call_id": "1"}]
    path = directory(tmp_path, vocabulary, chat_template=PARTS["first"])
    assert ours(path, messages) == "user: first word\nassistant: \ntool: 21 °C\n"


def test_a_message_of_parts_goes_on(tmp_path: Path, vocabulary: str):
    path = directory(tmp_path, vocabulary, chat_template=PARTS["loop"] + "end")
    last = [*turns(True)[:2], {"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    want = theirs(path, last, continue_final_message=True)
    assert Tokenizer.load(path).render(last, continue_final_message=True) == want
    last[-1]["content"] = "so"
    assert Tokenizer.load(path).render(last, continue_final_message=True) == want


# **** generation_config.json ****


MODEL: Any = SimpleNamespace(eos_token_ids=(7,))
FIELDS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}


def read(directory: Path, source: Any = None, changes: Any = None, **file: Any) -> GenerationConfig:
    if file: (directory / "generation_config.json").write_text(json.dumps(file))
    return GenerationConfig.read(directory, MODEL, source, changes)


def test_defaults(tmp_path: Path):
    plain = GenerationConfig(SamplingParams(max_tokens=256), (7,))
    assert plain.defaults.temperature == 1.0
    assert read(tmp_path) == read(tmp_path / "model.gguf") == plain
    for do_sample in ({}, {"do_sample": False}, {"do_sample": None}):
        assert read(tmp_path, bos_token_id=1, **do_sample) == plain
    own = GenerationConfig(SamplingParams(max_tokens=50, **FIELDS), (1, 2), 50)
    assert read(tmp_path, **FIELDS, eos_token_id=[1, 2], max_new_tokens=50, do_sample=False) == own
    assert read(tmp_path, "auto") == own
    # the end tokens are the model's
    assert read(tmp_path, "vllm") == GenerationConfig(plain.defaults, (1, 2))


def test_another_file_and_changes(tmp_path: Path):
    (other := tmp_path / "other").mkdir()
    read(other, temperature=0.5, top_k=3)
    read(tmp_path, **FIELDS)
    assert read(tmp_path, str(other)).defaults == SamplingParams(max_tokens=256, temperature=0.5, top_k=3)
    changed = {"temperature": 0.0, "max_new_tokens": 9, "do_sample": False}
    assert read(tmp_path, other, changed) == GenerationConfig(
        SamplingParams(max_tokens=9, temperature=0.0, top_k=3), (7,), 9)
    assert read(tmp_path, "vllm", changed).defaults == SamplingParams(max_tokens=9, temperature=0.0)


@pytest.mark.parametrize(("source", "changes", "words"), [
    ("nowhere", None, "generation_config is 'nowhere'"),
    (5, None, "generation_config is '5'"), (None, "x", "override_generation_config is 'x'"),
    (None, {"temprature": 1}, "override_generation_config has 'temprature'"),
    (None, {"temperature": -1}, "override_generation_config: temperature is -1"),
    (None, {"max_new_tokens": 0}, "override_generation_config: max_new_tokens is 0"),
    (None, {"top_k": "5"}, "override_generation_config: top_k is '5'")])
def test_arguments_that_are_wrong(tmp_path: Path, source: Any, changes: Any, words: str):
    with pytest.raises((ConfigError, ModelError)) as error: read(tmp_path, source, changes)
    assert words in str(error.value)


def test_options_of_serve_are_arguments_of_llm():
    words = ["serve", "--generation-config", "vllm", "--override_generation_config", '{"temperature": 0.5}']
    given = cli.parser().parse_args(vllm_options.normal(words)).vllm
    assert given == {"generation_config": "vllm", "override_generation_config": {"temperature": 0.5}}
    assert from_vllm(given, frozenset()) == given


def test_the_limit_is_of_all_answers():
    limits = RequestLimits(output_tokens=9)
    for asked, wanted in ({}, 9), ({"max_tokens": 5}, 5), ({"max_tokens": 50}, 9):
        made = completion({"prompt": "a", **asked}, SamplingParams(), limits)
        assert made.params.max_tokens == wanted
