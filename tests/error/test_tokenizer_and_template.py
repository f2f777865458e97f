"""Tokenizers and chat templates that are missing, damaged or hostile."""
from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''|attr('__cla' ~ 'ss__') }}{{ (''|attr('__class__')).mro() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__['os'].system('true') }}",
    "{{ raise_exception.__globals__['datetime'].sys.modules['os'].system('true') }}",
    "{{ strftime_now.__closure__[0].cell_contents }}",
    "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}{{ ('{0.__class__.__mro__}'|attr('format'))('') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
]
FAILURES = [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ (''|attr('__class__')|attr('__mro__'))[1] }}", "has no attribute '__mro__'"),
    ("{% if %}", "Expected an expression"),
    ("{% for m in messages %}", "Unexpected end of template"),
    ("{{ messages[7]['content'] }}", "has no element 7"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{% include 'x' %}", "no loader"),
    ("{{ 'a' + 1 }}", "can only concatenate str"),
    ("{{ range(10 ** 9) }}", "Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
    ("{{ undefined_function() }}", "'undefined_function' is undefined"),
]
JSON = "expected: a JSON object"


def write_template(directory: Path, text: str) -> Path:
    (directory / "chat_template.jinja").write_text(text)
    return directory


def test_no_tokenizer(command, copy: Path):
    (copy / "tokenizer.json").unlink()
    command("generate", copy, "hello").refused(
        f"{copy} has no tokenizer.json", "expected: a fast tokenizer saved by transformers",
        "to fix:   download tokenizer.json, or pass token ids instead of text")
    command("chat", copy).refused(f"{copy} has no tokenizer.json")


def test_token_ids_do_without_a_tokenizer(command, copy: Path, tiny: Path):
    request = ("--prompt-ids", "5,6,7", "--max-tokens", 4, "--temperature", 0, "--json")
    whole = command("generate", tiny, *request).succeeded()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"): (copy / name).unlink()
    bare = command("generate", copy, *request).succeeded()
    assert '"text": ""' in bare.out
    assert bare.out.partition('"text"')[0] == whole.out.partition('"text"')[0]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"model": {"type": "BPE"', b"\xff\xfe"])
def test_a_damaged_tokenizer(command, copy: Path, content: bytes):
    (copy / "tokenizer.json").write_bytes(content)
    command("generate", copy, "hello").refused(
        f"{copy / 'tokenizer.json'} cannot be read: ", "expected: a tokenizer.json of the tokenizers library",
        "to fix:   download the file again")


@pytest.mark.parametrize(("content", "found"), [
    ("{", "is not JSON: Expecting"), ("[]", "holds a list"), ("[" * 200_000, "is not JSON: maximum rec")],
    ids=["cut", "list", "deep"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_companion_of_the_tokenizer(command, copy: Path, file: str, content: str, found: str):
    (copy / file).write_text(content)
    command("generate", copy, "hello").refused(f"{copy / file} {found}", JSON, "download the file again")


def test_a_tokenizer_of_a_larger_vocabulary(command, spoil, copy: Path):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    rows = {"model.embed_tokens.weight": 290, "lm_head.weight": 290}
    save_file({name: tensor[:rows.get(name)] for name, tensor in tensors.items()}, path)
    command("generate", spoil(vocab_size=290), "Once upon a time").refused(
        " is not in the vocabulary", "expected: 0 to 289", "to fix:   use ids of this model's tokenizer")


def test_chat_without_a_template(command, spoil):
    command("chat", spoil("tokenizer_config.json", chat_template=...)).refused(
        "the model has no chat template",
        "expected: chat_template.jinja, or chat_template in tokenizer_config.json",
        "to fix:   use `generate` with a plain prompt")


def test_a_template_that_is_not_text(command, copy: Path):
    (copy / "chat_template.jinja").write_bytes(b"\xff")
    command("chat", copy).refused(f"{copy / 'chat_template.jinja'} cannot be read: ",
                                  "expected: a readable UTF-8 text file", "to fix:   download the file again")


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(command, copy: Path, text: str):
    command("chat", write_template(copy, text)).refused(
        "the chat template tried to leave its sandbox: ", "unsafe",
        "expected: a template that only formats messages", "treat its files as hostile")


@pytest.mark.parametrize(("text", "found"), FAILURES)
def test_a_template_that_fails(command, copy: Path, text: str, found: str):
    command("chat", write_template(copy, text)).refused(
        "the chat template failed: ", found, "expected: a template for messages with role and content",
        "to fix:   check chat_template.jinja or tokenizer_config.json")


def test_a_template_that_writes_nothing(command, copy: Path):
    command("chat", write_template(copy, "{# nothing #}")).refused(
        "the prompt has no tokens", "expected: at least one token id")


def test_a_template_writes_only_into_the_prompt(command, copy: Path, tmp_path: Path):
    """The helpers of transformers' templates are there, and no way to a file."""
    template = ("{{ messages | tojson }}{{ strftime_now('%Y') }}{% generation %}x{% endgeneration %}"
                "{{ cycler is defined and (open is not defined) and (os is not defined) }}")
    command("chat", write_template(copy, template), "--max-tokens", 1).succeeded()
