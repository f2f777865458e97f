"""Scripts of bench/: each is in the table of bench/README.md, and says what its options are.
upstream_tests.py on a folder of tests made up here, gguf_decode.py without llama.cpp, and kernels in the
tile language that benchmarks time, on the CPU and as PTX."""
from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tinygrad import Tensor, dtypes

from bench.cpu import gguf_decode as cpu_gguf
from bench.cpu.decode import BOX
from bench.cpu.gguf_writer import write
from bench.lib import kernels_language as kernels
from tinygrad_nv.models.gguf import elements, list_tensors
from tinygrad_nv.quant.gguf.file import open_file
from tinygrad_nv.tile.language.schedule import TileSchedule

BENCH = Path(__file__).parents[3] / "bench"
SCRIPTS = sorted(path for path in BENCH.glob("*/*.py") if 'if __name__ == "__main__"' in path.read_text())
SIDES = {"decode_side.py", "step_side.py"}     # processes of gpu/run.py
HELP = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    sys.argv, before, out = [path, "--help"], sys.path[:], io.StringIO()
    with contextlib.redirect_stdout(out):
        try: runpy.run_path(path, run_name="__main__")
        except SystemExit as end: assert not end.code, (path, end.code)
    assert out.getvalue().startswith("usage: " + path.rsplit("/", 1)[1]), path
    sys.path[:] = before
"""


def test_each_script_is_in_the_table():
    text = (BENCH / "README.md").read_text()
    assert [path for path in SCRIPTS if path.name not in SIDES
            and f"`{path.relative_to(BENCH).as_posix()}" not in text] == []


def test_each_script_says_what_its_options_are(tmp_path: Path):
    """In one process, from a folder that is not the checkout. llama.cpp's runs in a Python that has it."""
    paths = [str(path) for path in SCRIPTS if path.name != "gguf_peer.py"]
    done = subprocess.run([sys.executable, "-c", HELP, *paths], capture_output=True, text=True, check=False,
                          cwd=tmp_path)
    assert done.returncode == 0, done.stderr


SCRIPT = Path(__file__).parents[3] / "bench" / "interop" / "upstream_tests.py"
TESTS = '''
import os, time
from tinygrad_nv import enabled
from test.helpers import VALUE

def test_same(): assert VALUE == 1
def test_fails_anyway(): assert VALUE == 2
def test_differs(): assert not enabled(), "the hooks are on"
def test_hangs(): time.sleep(60 * enabled())
def test_ends_the_process(): enabled() and os._exit(7)
def test_after_it(): pass
'''
DIFFER = ("test_differs: failed: AssertionError: the hooks are on", "test_hangs: timeout: no end within 2 s",
          "test_ends_the_process: crashed: exit code 7")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which one file of tests has everything that can happen, and a tinygrad that must not be
    met."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "test" / "unit").mkdir(parents=True)
    for name in ("test", "test/unit"): (folder / name / "__init__.py").write_text("")
    (folder / "test" / "helpers.py").write_text("VALUE = 1\n")
    (folder / "test" / "unit" / "test_all.py").write_text(TESTS)
    (folder / "test" / "unit" / "test_good.py").write_text("def test_good(): pass\n")
    (folder / "tinygrad").mkdir()
    (folder / "tinygrad" / "__init__.py").write_text("raise RuntimeError('of the checkout')\n")
    return folder


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where calls note outcomes: later ones take what the first has run."""
    return tmp_path_factory.mktemp("logs")


def called(checkout: Path, logs: Path, *more: str, known: list[dict[str, Any]] | None = None
           ) -> subprocess.CompletedProcess[str]:
    """The script, as a user calls it."""
    listed = logs / "known.json"
    listed.write_text(json.dumps(known or []))
    command = [sys.executable, SCRIPT, checkout, "--logs", logs, "--known", listed, "--dry", *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def row(done: subprocess.CompletedProcess[str]) -> str:
    """The table's first row."""
    return " ".join(done.stdout.splitlines()[1].split())


@pytest.fixture(scope="module")
def first(checkout: Path, logs: Path) -> subprocess.CompletedProcess[str]:
    """The call that runs the tests."""
    return called(checkout, logs, "--only", "test_all", "--timeout", "2")


@pytest.mark.slow
def test_what_passes_plain_and_not_hooked_is_reported(first: subprocess.CompletedProcess[str]):
    done = first
    assert done.returncode == 1, done.stderr
    assert [word for word in DIFFER if word not in done.stdout] == [], done.stdout
    assert row(done) == "test/unit/test_all.py 2 of 6 5 of 6 0 3"
    assert "test_fails_anyway" not in done.stdout
    assert "1 files of the checkout's tinygrad" in done.stdout
    assert "hooked test/unit/test_all.py: 1 crashed, 2 failed, 2 passed, 1 timeout" in done.stderr


@pytest.mark.slow
def test_known_differences_are_no_failure_when_they_fail_in_the_known_words(
        first: subprocess.CompletedProcess[str], checkout: Path, logs: Path):
    tests = [f"test/unit/test_all.py::{name}"
             for name in ("test_differs", "test_hangs", "test_ends_the_process")]
    known = [{"reason": "known, since", "devices": ["CPU"], "says": "", "tests": tests}]
    done = called(checkout, logs, "--only", "test_all", "--resume", known=known)
    assert (done.returncode, done.stdout.splitlines()[2].split()[-2:]) == (0, ["3", "0"]), done.stderr
    assert "test_differs: failed: known, since" in done.stdout
    other = [{**known[0], "says": "exit code"}, {**known[0], "devices": ["EMU"]}]
    done = called(checkout, logs, "--only", "test_all", "--resume", known=other)
    assert (done.returncode, done.stdout.splitlines()[2].split()[-2:]) == (1, ["1", "2"]), done.stderr


@pytest.mark.slow
def test_quick_runs_plain_what_did_not_pass(checkout: Path, tmp_path: Path):
    done = called(checkout, tmp_path, "--only", "test_good", "--quick")
    assert done.returncode == 0, done.stderr
    assert row(done) == "test/unit/test_good.py 1 of 1 0 of 0 0 0"


@pytest.mark.slow
def test_where_nothing_passes_nothing_was_compared(checkout: Path, tmp_path: Path):
    (broken := checkout / "test" / "unit" / "test_broken.py").write_text("import no_such_module\n")
    try: done = called(checkout, tmp_path, "--only", "test_broken")
    finally: broken.unlink()
    assert done.returncode == 1
    assert "no test passes on either side" in done.stderr


def test_a_folder_without_tests(tmp_path: Path):
    done = called(tmp_path, tmp_path)
    assert done.returncode == 2
    assert "has no folder test; expected: a checkout of tinygrad 0.14.0" in done.stderr
    (tmp_path / "test").mkdir()
    done = called(tmp_path, tmp_path, "--only", "test_none")
    assert done.returncode == 2
    assert "no test file is called test_none" in done.stderr


def test_a_written_file_has_the_model(tmp_path: Path):
    """Rows of q and k are in Hugging Face's order again when they are read."""
    path = tmp_path / "box-f16.gguf"
    write(BOX, path, "float16")
    assert cpu_gguf.types_of(path) == {"F16": 29}
    weights, file = load_file(BOX / "model.safetensors"), open_file(path)
    found = {each.name: elements(file, each, 0, weights[each.name].size) for each in list_tensors(file)}
    assert found.keys() == weights.keys() - {"lm_head.weight"}
    for name, values in found.items():
        wanted = weights[name].astype(np.float32 if weights[name].ndim == 1 else np.float16)
        assert np.array_equal(values.reshape(wanted.shape), wanted), name


def test_rates():
    prompt = cpu_gguf.prompt_of("pp", 512)
    assert len(prompt) == 512
    assert cpu_gguf.rate("pp", prompt, 1, 0.5, 0.5) == 1024
    assert cpu_gguf.rate("tg", cpu_gguf.prompt_of("tg", 512), 129, 0.5, 1.5) == 128


class FakeWorker:
    """A worker whose repetitions have these rates, in turn."""
    rates: dict[str, Iterator[float]]
    asked: list[tuple[str, str]]

    def __init__(self, engine: str, path: Path, arguments: Namespace) -> None: self.engine = engine

    def once(self, mode: str) -> float:
        self.asked.append((self.engine, mode))
        return next(self.rates[self.engine])

    def ticks(self) -> int: return 0

    def end(self) -> None: self.asked.append((self.engine, "end"))


def test_pairs_in_turn_of_which_the_quiet_ones_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "some.gguf"
    write(BOX, path, "float16")
    monkeypatch.setattr(cpu_gguf, "Worker", FakeWorker)
    monkeypatch.setattr(cpu_gguf, "MODES", ("tg",))
    FakeWorker.asked = []
    FakeWorker.rates = {"tinygrad_nv": iter([1.0, 30.0, 50.0]), "llama.cpp": iter([9.0, 10.0, 10.0])}
    # ticks before and after each repetition: others take all of the first pair, and nothing later
    busy = iter([0, 10, 10, 20, *[20] * 8])
    whole = iter(range(0, 1000, 10))
    monkeypatch.setattr(cpu_gguf, "machine_ticks", lambda: (next(whole), next(busy)))
    found = cpu_gguf.compare(path, Namespace(repeat=2, cpu_time=False))
    assert found["runs"]["tg"] == {"tinygrad_nv": [30.0, 50.0], "llama.cpp": [10.0, 10.0]}
    assert found["ratio"] == {"tg": {"llama.cpp": 4.0}}
    assert (found["others"], found["types"]) == ({"tg": 0.0}, {"F16": 29})
    assert FakeWorker.asked == [("tinygrad_nv", "tg"), ("llama.cpp", "tg")] * 3 + [("tinygrad_nv", "end"),
                                                                               ("llama.cpp", "end")]


def test_an_answer_of_one_token_is_no_rate():
    """A model that stops early, as trained ones do, was a division by zero."""
    with pytest.raises(ValueError, match="an answer of 1 tokens, expected at least 2"):
        cpu_gguf.rate("tg", [0], 1, 0.5, 0.5)
    assert cpu_gguf.rate("pp", [0, 1], 1, 0.5, 0.5) == 4


@pytest.mark.parametrize(("script", "words"), [
    ("import sys; sys.stderr.write('no such type\\n'); sys.exit(3)", "code 3, and wrote:\n  no such type"),
    ("import os; os.kill(os.getpid(), 11)", "by SIGSEGV, and wrote nothing")])
def test_a_process_that_ends_early_is_named(script: str, words: str, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch):
    """Which one, how it ended, and what it wrote last."""
    monkeypatch.setattr(cpu_gguf, "__file__", str(program := tmp_path / "program.py"))
    program.write_text(script)
    arguments = Namespace(peer=sys.executable, dtype="auto", tokens=2, prompt=2, cpu_time=False)
    with pytest.raises(SystemExit) as ended: cpu_gguf.Worker("llama.cpp", Path("x.gguf"), arguments)
    assert str(ended.value).startswith("x.gguf: the process of llama.cpp ended ")
    assert words in str(ended.value)


SCHEDULE = TileSchedule(block=(16, 32), k=32, warps=4, stages=3)
GROUP = 32


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_norms() -> None:
    x, w, b = numbers(10, 96), numbers(96, seed=1), numbers(96, seed=2)
    rows, weight, bias = (torch.from_numpy(each).double() for each in (x, w, b))
    given = [Tensor(each) for each in (x, w, b)]
    rms, layer = (kernel.with_schedule(SCHEDULE) for kernel in (kernels.rms_norm, kernels.layer_norm))
    want = torch.nn.functional.rms_norm(rows, (96,), weight, 1e-5).numpy()
    np.testing.assert_allclose(rms(given[0], given[1], eps=1e-5).numpy(), want, atol=2e-6)
    want = torch.nn.functional.layer_norm(rows, (96,), weight, bias, 1e-5).numpy()
    np.testing.assert_allclose(layer(*given, eps=1e-5).numpy(), want, atol=2e-6)
    made = kernels.softmax.with_schedule(SCHEDULE)(given[0]).numpy()
    np.testing.assert_allclose(made, rows.softmax(1).numpy(), atol=1e-6)


def quantised(m: int, n: int, k: int) -> tuple[list[Tensor], np.ndarray[Any, Any]]:
    """x, words and scales; what they stand for, multiplied exactly: all are small integers."""
    random = np.random.default_rng(3)
    codes, x = random.integers(0, 16, (n, k)), random.integers(-3, 4, (m, k))
    scales = random.integers(1, 4, (k // GROUP, n))
    places = np.array([4 * (i // 2) + 16 * (i % 2) for i in range(8)], np.uint32)
    words = (codes.reshape(n, -1, 8).astype(np.uint32) << places).sum(2)
    given = [Tensor(x).cast(dtypes.float16), Tensor(words.astype(np.uint32).view(np.int32)),
             Tensor(scales).cast(dtypes.float16)]
    return [each.realize() for each in given], x @ ((codes - 8) * np.repeat(scales, GROUP, 0).T).T


@pytest.mark.parametrize("arch", ["", "sm_80", "sm_90a"])
def test_4_bit_weights(arch: str) -> None:
    given, want = quantised(20, 64, 128)
    assert np.abs(want).max() < 2048        # integers that float16 has
    plain, split = (kernel.with_schedule(SCHEDULE) for kernel in (kernels.w4a16, kernels.w4a16_split))
    for kernel, more in ((plain, {}), (split, {"split": 2})):
        if arch:
            checked = kernel.check(*given, arch=arch, group=GROUP, **more)
            assert not checked.findings, str(checked)
            made, = checked.outputs.values()
        else: made = kernel(*given, group=GROUP, **more).numpy()
        np.testing.assert_array_equal(made, want)


def test_matmul_with_a_transposed_matrix() -> None:
    a, b = numbers(40, 70).round(), numbers(30, 70, seed=1).round()
    made = kernels.matmul_nt.with_schedule(SCHEDULE)(Tensor(a), Tensor(b))
    np.testing.assert_array_equal(made.numpy(), a @ b.T)
