"""Logs that cannot be repeated, and runs that cannot be recorded."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tinygrad import Tensor

from tinygrad_nv.errors import ReplayError
from tinygrad_nv.numerics.replay import record, replay
from tinygrad_nv.numerics.replay.recorder import record_kernels


def doubled(x: Tensor, by: float = 2.0) -> Tensor: return x * by


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of a run of one kernel."""
    record(tmp_path / "run.log", doubled, Tensor([1.0, 2.0]).realize())
    return tmp_path / "run.log"


def refused(log: Path, found: str, *words: str) -> None:
    with pytest.raises(ReplayError) as caught: replay(log)
    assert found in caught.value.found
    for word in words: assert word in str(caught.value)


def changed(log: Path, line: int, **fields: Any) -> None:
    lines = log.read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **fields})
    log.write_text("\n".join(lines) + "\n")


def test_no_file(tmp_path: Path):
    refused(tmp_path / "none.log", "No such file", "record one: tinygrad-nv generate --record LOG")


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\x00", b"hello\n", b"[1, 2]\n", b'{"format": "other"}\n',
                                  b"{}\n{}\n"])
def test_files_of_other_kinds(tmp_path: Path, text: bytes):
    (tmp_path / "other.log").write_bytes(text)
    refused(tmp_path / "other.log", "is no log of a run", '"format": "tinygrad_nv run"')


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_other_versions(log: Path, version: Any):
    changed(log, 0, version=version)
    refused(log, f"has version {version!r} of its format", "1 or earlier", "update this one")


def test_a_log_that_ends_early(log: Path):
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:-1]) + "\n")
    refused(log, "ends after 1 kernels, and the run did not", "record it again")
    log.write_text("\n".join([lines[0], lines[-1]]) + "\n")
    refused(log, "has 0 kernels and says 1")
    log.write_text(lines[0] + "\n" + lines[1][:40])
    refused(log, "line 2 is cut off")
    log.write_text(lines[0] + "\n3\n" + lines[2])
    refused(log, "line 2 is no object")


def test_lines_that_are_no_kernel(log: Path):
    changed(log, 1, variables=[])
    refused(log, "line 2 is no kernel")


def test_a_first_line_without_what_it_needs(log: Path):
    changed(log, 0, what=3)
    refused(log, "its first line has no what")


def test_arguments_that_are_not_there(log: Path):
    kept = log.with_name("run.log.safetensors")
    kept.write_bytes(kept.read_bytes()[:-4] + b"\x00\x00\x00\x00")
    refused(log, "run.log.safetensors is not what was recorded")
    kept.unlink()
    refused(log, "run.log.safetensors is not there", "move both files together")


@pytest.mark.parametrize(("name", "words"), [
    ("no_such_module:doubled", "which cannot be imported"), ("/no/such/file.py:doubled", "be imported"),
    ("json:no_such_name", "which has none"), ("json:", "which has none")])
def test_functions_that_are_not_there(log: Path, name: str, words: str):
    changed(log, 0, what={**json.loads(log.read_text().splitlines()[0])["what"], "function": name})
    refused(log, words, "call replay(path, fn)")
    assert replay(log, doubled).same


def test_a_command_line_is_for_the_command(log: Path):
    changed(log, 0, what={"command": ["generate", "x"]})
    refused(log, "is of a command line: generate x", f"tinygrad-nv replay {log}")


# **** recording ****

def test_functions_without_a_name(tmp_path: Path):
    def inside(x: Tensor) -> Tensor: return x
    for fn in (inside, lambda x: x):
        with pytest.raises(ReplayError, match="cannot be found again by its name"):
            record(tmp_path / "run.log", fn, Tensor([1.0]))


def test_arguments_that_are_no_json(tmp_path: Path):
    with pytest.raises(ReplayError, match="argument 2 is <object") as caught:
        record(tmp_path / "run.log", doubled, Tensor([1.0]), object())
    assert "Tensors, and what JSON can say" in str(caught.value)
    with pytest.raises(ReplayError, match="a keyword argument is"):
        record(tmp_path / "run.log", doubled, Tensor([1.0]), by={1, 2})


def test_arguments_that_are_too_large(tmp_path: Path):
    with pytest.raises(ReplayError, match="at most 1073741824, which are kept whole"):
        record(tmp_path / "run.log", doubled, Tensor.empty(1 << 14, 1 << 15))


def test_a_file_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(ReplayError, match="a file that can be written"):
        record(tmp_path / "none" / "run.log", doubled)


def test_one_recorder_at_a_time():
    with record_kernels(lambda run: None), pytest.raises(ReplayError, match="inside of one"), \
            record_kernels(lambda run: None): pass
