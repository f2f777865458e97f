"""The command line: completions of shells, Ctrl-C at any moment, doctor's advice, and that commands on one
device load nothing of dist/."""
from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tinygrad_nv.cli import completion, doctor, parser
from tinygrad_nv.cli.doctor_finding import CheckResult


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


SCRIPT = Path(sys.executable).with_name("tinygrad-nv")
COMMANDS = {"script": [str(SCRIPT)], "module": [sys.executable, "-m", "tinygrad_nv"]}
# a process says with a line that the package has begun: what is before that belongs to the interpreter
BEGIN = """
import signal, sys
own = signal.signal
def first(*arguments):
    signal.signal = own
    own(*arguments)
    sys.stderr.write("begun\\n")
signal.signal = first
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_while_it_starts(name: str, tmp_path: Path):
    """Five moments, from the first lines of the package on; after 1.5 s an answer can be whole."""
    (tmp_path / "sitecustomize.py").write_text(BEGIN)
    words = [*COMMANDS[name], "generate", "Once upon a time", "--max-tokens", "2000", "--ignore-eos"]
    environment = {**os.environ, "DEV": "CPU", "PYTHONPATH": str(tmp_path)}
    for seconds in (0, 0.05, 0.2, 0.4, 0.7):
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stderr is not None
        assert process.stderr.readline() == b"begun\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, (seconds, errors)
        assert b"Traceback" not in errors, (seconds, errors)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_while_a_text_is_executed(name: str, tmp_path: Path):
    """Dataclasses run texts by `exec`: CPython ended by the signal itself, -2, where one was interrupted."""
    (tmp_path / "sitecustomize.py").write_text("""
import argparse
def parse(*arguments): exec("import signal; signal.raise_signal(signal.SIGINT)")
argparse.ArgumentParser.parse_known_args = parse
""")
    environment = {**os.environ, "DEV": "CPU", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*COMMANDS[name], "doctor"], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"\n")


def test_a_program_that_imports_the_package_keeps_keyboard_interrupt():
    script = ("import os, signal, tinygrad_nv\n"
              "try: os.kill(os.getpid(), signal.SIGINT)\n"
              "except KeyboardInterrupt: print('caught')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "caught\n"


LOADED = "print(*sorted(name for name in sys.modules if name.startswith('tinygrad_nv.dist')))"
# names of a launcher's variables, with the standard library alone
NAMES = ["tinygrad_nv.dist", "tinygrad_nv.dist.ranks"]


@pytest.mark.parametrize(("words", "allowed"), [
    (["generate", "Once", "--max-tokens", "2"], []),
    (["train", "MODEL", "ids.npy", "--max-steps", "1", "--max-length", "32", "--save-strategy",
      "no", "--per-device-train-batch-size", "1", "--report-to", "none"], NAMES)], ids=["generate", "train"])
def test_no_module_of_dist_is_loaded(tiny: Path, tmp_path: Path, words: list[str],
                                     allowed: list[str]) -> None:
    np.save(tmp_path / "ids.npy", np.arange(3, 999, dtype=np.uint16) % 256 + 3)
    words = [str(tiny) if word == "MODEL" else word for word in words]
    program = f"import sys\nfrom tinygrad_nv.cli import main\nassert main({words}) == 0\n{LOADED}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == allowed


@pytest.mark.parametrize(("has_pip", "command"), [
    (True, f"{sys.executable} -m pip install nvidia-cuda-nvcc"),
    (False, f"UV_PYTHON={sys.executable} uv pip install nvidia-cuda-nvcc")])
def test_packages_go_to_this_python(monkeypatch: pytest.MonkeyPatch, has_pip: bool, command: str):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: (found("sys") if has_pip else None)
                        if name == "pip" else found(name))
    shown = doctor.table([CheckResult("ptxas", "missing", "not there", "pip install nvidia-cuda-nvcc")])
    assert shown.splitlines()[1].strip() == f"→ {command}"
