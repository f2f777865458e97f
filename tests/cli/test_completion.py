"""Shell completions: every command and option, and what bash makes of the script."""
from __future__ import annotations

import shutil
import subprocess

import pytest

from tinygrad_nv.cli import completion, parser


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_there(command, shell: str):
    script = command("completion", shell).succeeded().out
    for path, _, each in completion._commands(parser()):
        assert not path or path[-1] in script
        for action in each._actions:
            for option in action.option_strings: assert option.lstrip("-") in script
    if program := shutil.which(shell):
        check = subprocess.run([program, "-n"], input=script, text=True, capture_output=True, check=False)
        assert (check.returncode, check.stderr) == (0, "")


@pytest.mark.parametrize(("typed", "found"), [
    ("gen", ["generate"]), ("run", ["run-batch"]), ("generate --presence", ["--presence-penalty"]),
    ("completion z", ["zsh"]), ("serve --metrics-prefix v", ["vllm"]), ("ptx ch", ["check"]),
    ("generate --temperature 1 --top-", ["--top-p", "--top-k"])])
def test_bash_completes(typed: str, found: list[str]):
    words = " ".join(f"'{word}'" for word in ("tinygrad-nv", *typed.split(" ")))
    script = completion.script(parser(), "bash") + f"""
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _tinygrad_nv
printf '%s\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == found
