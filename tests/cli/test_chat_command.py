"""Commands of `chat`, and Markdown as it is rendered."""
from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tinygrad_nv.cli import chat
from tinygrad_nv.cli.markdown import MarkdownStream, block_end

SHORT = ("--max-tokens", 4, "--temperature", 0, "--ignore-eos")


def talk(command, tiny: Path, *lines: str):
    return command("chat", tiny, *SHORT, stdin="".join(f"{line}\n" for line in lines)).succeeded()


def test_commands_go_to_stderr_and_answers_to_stdout(command, tiny: Path):
    done = talk(command, tiny, "/help", "/temperature", "/temperature 0.5", "/max-tokens 2", "/exit",
                "unheard")
    assert done.out == ""
    for name in chat.COMMANDS: assert name in done.err
    assert "temperature 0.0\ntemperature 0.5\nmax_tokens 2\n" in done.err


def test_a_conversation_is_saved_reset_and_loaded(command, tiny: Path, tmp_path: Path):
    file = tmp_path / "talk.json"
    done = talk(command, tiny, "/system Be kind.", "a fox", f"/save {file}", "/reset", "/system",
                f"/load {file}",
                f"/save {file}2", '/system ""', "/system")
    saved = json.loads(file.read_text())["messages"]
    assert [each["role"] for each in saved] == ["system", "user", "assistant"]
    assert [each["content"] for each in saved[:2]] == ["Be kind.", "a fox"]
    assert saved[2]["content"] in done.out
    assert Path(f"{file}2").read_text() == file.read_text()
    assert "a new conversation\nBe kind.\n3 messages\n" in done.err
    assert done.err.endswith("no system message\n")


def test_an_answer_is_tried_again(command, tiny: Path, tmp_path: Path):
    file = tmp_path / "talk.json"
    done = talk(command, tiny, "/retry", "a fox", "/seed 3", "/temperature 1", "/retry", "/seed",
                f"/save {file}")
    assert "there is no answer yet" in done.err
    assert "seed 4" in done.err
    assert len(json.loads(file.read_text())["messages"]) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("line", "words"), [
    ("/temp", "/temp is no command\n  expected: a command of /help, or // for a question with a slash\n"
              "  to fix:   did you mean /temperature?"),
    ("/temperature hot", "'hot' is no number"), ("/temperature -1", "temperature is -1"),
    ("/save", "no file is named"), ("/load /nowhere/x", "/nowhere/x")])
def test_a_command_that_is_refused_goes_on(command, tiny: Path, line: str, words: str):
    done = talk(command, tiny, line, "//slash")
    assert words in done.err
    assert done.out.strip()


@pytest.mark.parametrize("content", ["no json", "[]", '{"messages": [{"role": "robot", "content": "x"}]}'])
def test_what_is_no_conversation_is_not_loaded(command, tiny: Path, tmp_path: Path, content: str):
    (tmp_path / "x").write_text(content)
    assert "a file that /save has written" in talk(command, tiny, f"/load {tmp_path / 'x'}").err


def test_commands_are_completed():
    assert [chat.complete("/te", state) for state in (0, 1)] == ["/temperature", None]
    assert chat.complete("", 0) is None


def test_blocks_of_markdown():
    text = "# A\n\nb\nc\n\n```py\nx = 1\n\ny = 2\n```\n\nd"
    blocks = []
    while end := block_end(text):
        blocks.append(text[:end])
        text = text[end:]
    assert blocks == ["# A\n\n", "b\nc\n\n", "```py\nx = 1\n\ny = 2\n```\n\n"]
    assert text == "d"


def test_markdown_is_rendered_as_it_comes():
    out = io.StringIO()
    with MarkdownStream(Console(file=out, force_terminal=True, width=40)) as stream:
        for letter in "**bold** text\n\n- one\n- two\n\n`code`": stream.push(letter)
    shown = out.getvalue()
    assert "\x1b[1mbold\x1b[0m text" in shown
    assert "• " in shown.replace("\x1b[1;33m", "")
    assert "code" in shown.splitlines()[-1]


def test_names_that_others_use_for_commands(command, tiny: Path):
    done = talk(command, tiny, "/clear", "/?", "/quit", "unheard")
    assert done.err.startswith("a new conversation\n/help")
    assert done.out == ""
