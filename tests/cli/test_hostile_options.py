"""Options with numbers that cannot be, and files that are none: one message, exit code 2, within limits."""
from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tinygrad_nv.numerics.replay import record

LONG = "9" * 3000
HEAD = {"format": "tinygrad_nv run", "version": 1, "seed": 0, "versions": {}, "settings": {}, "inputs": "",
        "inputs_hash": ""}


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "-inf", "1e308", LONG, "9" * 5000, "", "x",
                                   "\udcff\udcfe", "1.5", "0x10", "٣", str((1 << 63) - 1)])
def test_sizes_of_the_cache_that_cannot_be(command: Any, tiny: Path, value: str) -> None:
    for option in ("--block-size", "--kv-cache-memory-bytes", "--num-gpu-blocks-override"):
        done = command("generate", tiny, "hi", "--max-tokens", "1", f"{option}={value}")
        assert done.code == 2, done
        assert len(done.err) < 1500
        assert "Traceback" not in done.err


def test_long_values_are_quoted_in_part(command: Any, tiny: Path) -> None:
    for words in (("generate", tiny, "hi", "--temperature", LONG * 3), ("generate", tiny, "hi", "--n", LONG),
                  ("generate", tiny, "hi", "--speculative", f"ngram:{LONG}"), ("serve", "--port", LONG * 2),
                  ("tune", LONG, "64", "64"), ("generate", "/" + "x" * 5000, "hi")):
        done = command(*words)
        assert done.code == 2, done
        assert max(map(len, done.err.split())) < 700, words


FILES: dict[str, bytes] = {"deep": b"[" * 100_000, "nan": b'{"format": NaN}', "digits": b"9" * 5000,
                           "utf8": b"\xff\xfe{}", "empty": b"", "list": b"[1]", "zeros": bytes(1000)}


@pytest.mark.parametrize("words", [("tune", "--merge"), ("tune", "--import"), ("replay",)])
def test_files_that_are_none(command: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    """None is waited for or read without an end."""
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "sparse").open("wb") as sparse: sparse.truncate(1 << 40)
    for name, data in FILES.items(): (tmp_path / name).write_bytes(data)
    for path in ("/dev/zero", tmp_path, tmp_path / "fifo", tmp_path / "sparse", tmp_path / "none",
                 *(tmp_path / name for name in FILES)):
        done = command(*words, path)
        assert (done.code, done.out) == (2, ""), (path, done)
        assert "Traceback" not in done.err
        assert len(done.err) < 2000, path


@pytest.mark.parametrize(("what", "words"), [
    ({"function": "os:mkdir", "arguments": ["made"]}, "--run-function"),
    ({"function": 5}, "--run-function"), ({"command": 5}, "a list of words"),
    ({"command": ["generate", "hi", "--trace", "made"]}, "generate --trace, which would write files"),
    ({"command": ["generate", "hi", "--record=made"]}, "generate --record, which would write files"),
    ({"command": ["generate", "hi", "--unknown"]}, "words that generate takes"),
    ({"command": []}, "one of generate")])
def test_a_log_runs_no_function_and_writes_no_file(command: Any, tmp_path: Path, what: dict[str, Any],
                                                   words: str) -> None:
    lines = {**HEAD, "what": {"directory": str(tmp_path)} | what}, {"end": 0, "result": ""}
    (tmp_path / "x.log").write_text("\n".join(map(json.dumps, lines)))
    before = {*os.listdir(), *os.listdir(tmp_path)}
    command("replay", tmp_path / "x.log").refused(words)
    assert {*os.listdir(), *os.listdir(tmp_path)} == before


def test_a_function_that_is_trusted(command: Any, tmp_path: Path) -> None:
    record(tmp_path / "x.log", math.prod, [2, 3])
    command("replay", tmp_path / "x.log").refused("is of the function 'math:prod'", "--run-function")
    done = command("replay", tmp_path / "x.log", "--run-function").succeeded()
    assert done.out.startswith("repeated bit for bit")
