"""Ctrl-C at any moment, also before the command line is imported: exit code 130, and no traceback."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
