"""Running vLLM's own tests at this server: what they meet, and how its server is started in their place. What
upstream_tests.py does with the same code is in test_bench_scripts.py."""
from __future__ import annotations

import json
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from bench.interop import vllm_server_plugin, vllm_tests
from bench.interop.peer_tests import PYTEST, Run, compare, end_all, find_descendants, run_files

TESTS = '''
import os
from pathlib import Path
def test_same(): pass
def test_differs(): assert os.environ["SIDE"] == "theirs", "it is ours"
def test_of_words(): assert os.environ["SIDE"] == "theirs", "other words"
def test_fails(): assert False
'''


@pytest.mark.parametrize("judge_first", [False, True])
def test_what_passes_on_one_side_is_reported(tmp_path: Path, judge_first: bool):
    """With the judge first, the other side does not run what fails there."""
    (tmp_path / "test_all.py").write_text(TESTS)
    interop = Path(vllm_tests.__file__).parent

    def start(file: str, side: str) -> tuple[list[str], dict[str, str], Path]:
        paths = ":".join([str(interop), *sys.path[1:]])
        return [sys.executable, *PYTEST, file], {"SIDE": side, "PYTHONPATH": paths}, tmp_path

    known = [{"reason": "words", "tests": ["test_all.py::test_of_words"], "says": "other words"}]
    run = Run("ours", "theirs", tmp_path / "logs", 60, start, known, quick=judge_first,
              judge_first=judge_first)
    run_files(run, ["test_all.py"])
    text, record = compare(run, ["test_all.py"])
    assert (record["ours"], record["theirs"], record["differ"], record["known"]) == (1, 3, 1, 1), text
    assert (record["ours_run"], record["theirs_run"]) == (3 if judge_first else 4, 4)
    assert "test_all.py::test_differs: failed: AssertionError: it is ours" in text
    assert "test_all.py::test_of_words: failed: words" in text


def is_running(pid: int) -> bool:
    try: return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError: return False


def test_what_a_process_has_started_ends_with_it():
    inner = "import time; time.sleep(100)"
    text = (f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}], "
            "start_new_session=True); print(1, flush=True); time.sleep(100)")
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"1\n"
    [started] = find_descendants(child.pid)
    end_all(child)
    assert child.returncode == -9
    end = time.monotonic() + 10     # what is killed ends when it would run next
    while is_running(started) and time.monotonic() < end: time.sleep(0.01)
    assert not is_running(started)


def test_any_name_of_a_model_is_the_one_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text(json.dumps({"added": ["<gh_stars>", "<issue_closed>"]}))
    vllm_tests.write_variant(model, thinks := tmp_path / "thinks")
    vllm_tests.link_model(tmp_path / "hub", "org/name", thinks)
    found = Path(snapshot_download("org/name", cache_dir=tmp_path / "hub", local_files_only=True))
    assert json.loads((found / "tokenizer.json").read_text()) == {"added": ["<think>", "</tool_call>"]}
    assert json.loads((found / "config.json").read_text()) == {"max_position_embeddings": 40960}
    assert (model / "config.json").read_text() == "{}"
    assert "gh_stars" in (model / "tokenizer.json").read_text()     # of the model itself


def test_files_by_name(tmp_path: Path):
    for each in vllm_tests.FILES[:3]:
        (file := tmp_path / "tests" / "entrypoints" / f"{each}.py").parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    every = [f"tests/entrypoints/{each}.py" for each in vllm_tests.FILES[:3]]
    assert vllm_tests.find_files(tmp_path, ()) == every
    assert vllm_tests.find_files(tmp_path, ["test_chat", "test_none"]) == [every[1]]


def test_this_server_is_started_in_place_of_theirs(monkeypatch: pytest.MonkeyPatch):
    utils = types.ModuleType("tests.utils")
    started: list[tuple[list[str], dict[str, str]]] = []

    class RemoteOpenAIServer:
        def _start_server(self, *given: Any) -> None: raise AssertionError("theirs")

    utils.RemoteOpenAIServer = RemoteOpenAIServer       # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests.utils", utils)
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **more: started.append((command, env)))
    monkeypatch.delenv("SERVE", raising=False)
    vllm_server_plugin.pytest_sessionstart()
    with pytest.raises(AssertionError, match="theirs"): RemoteOpenAIServer()._start_server("m", [], None)
    monkeypatch.setenv("SERVE", json.dumps(["python", "serve"]))
    monkeypatch.setenv("SERVE_PYTHONPATH", "here")
    monkeypatch.setenv("LD_PRELOAD", "lib.so")
    vllm_server_plugin.pytest_sessionstart()
    RemoteOpenAIServer()._start_server("org/m", ["--port", "1"], {"A": "b"})
    command, env = started[0]
    assert command == ["python", "serve", "org/m", "--port", "1"]
    assert (env["PYTHONPATH"], env["A"], "LD_PRELOAD" in env) == ("here", "b", False)
