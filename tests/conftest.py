"""Fixtures for every test: tiny random models on disk, and the command line called in this process."""
from __future__ import annotations

import gc
import io
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("NV_STRICT", "1")  # a kernel that does not build is a failure here, not a warning
os.environ.setdefault("NV_REPACK_CACHE", "0")  # models of tests are loaded once; tests of the cache set it
# threads of BLAS that share cores with other tests spin while they wait for each other: 222 s against 32
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# a compile worker of tinygrad's, which takes 0.5 s of a core to start, is replaced after 16 kernels otherwise
os.environ.setdefault("BEAM_MAX_TASKS_PER_CHILD", "4096")

import pytest
from tinygrad.helpers import DEV

from tests.support import ROOT, sampling
from tests.support.durations import Durations, pick_shard, read_durations

gc.disable()    # until tests are collected, which stay: collections would look at them again and again
# a shell that starts the tests in the background has SIGINT ignored, by everything they start too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)

VOCAB = 300
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
                         "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
                         # wide enough that greedy answers do not repeat one token from the start
                         "initializer_range": 0.2}
TEXTS = ("Once upon a time there was a little fox who lived in a wood. ",
         "One day the fox met a small bear, and they played until the sun went down. ") * 8


@dataclass(frozen=True)
class Outcome:
    """What a command line came to."""
    code: int
    out: str
    err: str

    def refused(self, *words: str, code: int = 2) -> None:
        """An explained error: nothing on stdout, no traceback, and all of `words` in the message."""
        assert self.code == code, self
        assert self.out == "", self.out
        assert "Traceback" not in self.err, self.err
        assert [word for word in words if word not in self.err] == [], self.err

    def succeeded(self) -> Outcome:
        """No error at all."""
        assert self.code == 0, self.err
        assert "Traceback" not in self.err, self.err
        return self


Command = Callable[..., Outcome]
MakeModel = Callable[..., Path]
Spoil = Callable[..., Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what chooses tests, and writes how long they took."""
    parser.addoption("--sample-seed", metavar="SEED", help="draw cases of sweeps as this commit does")
    parser.addoption("--shuffle", metavar="SEED", help="run files, and the tests of each, in a random order")
    parser.addoption("--shard", metavar="I/N", help="run part I of N of the files, as long as each other")
    parser.addoption("--store-durations", action="store_true", help="write tests/durations.json")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Sets the seed before workers are started, which take the options of this process."""
    config.option.sample_seed = config.option.sample_seed or sampling.commit_seed(ROOT)
    config.pluginmanager.register(Durations(config), "durations")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what does not run of sweeps as slow, and deselects other shards."""
    sampling.mark_slow(items, config.option.sample_seed, sampling.read_always())
    if part := config.option.shard:
        mine = pick_shard((item.nodeid.partition("::")[0] for item in items), part, read_durations())
        others = [item for item in items if item.nodeid.partition("::")[0] not in mine]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.nodeid.partition("::")[0] in mine]
    if seed := config.option.shuffle: items[:] = sampling.shuffle(items, seed)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Names the seed; lists drawn cases that failed, and has them run each time from now on."""
    terminalreporter.line(f"cases of sweeps drawn by --sample-seed {config.option.sample_seed}")
    failed = [report.nodeid for report in terminalreporter.getreports("failed") if report.when == "call"
              and sampling.DRAWN in dict(report.user_properties)]
    if not failed: return
    terminalreporter.section("drawn cases that failed, for tests/always.txt")
    for case in failed: terminalreporter.line(case)
    if not os.environ.get("CI"): sampling.add_always(failed)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests that were found stay until the end: collections of garbage, which tests of memory ask for after
    every allocation, need not look at them."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Libraries that look for leaks as the process ends find what they expect. Where nothing ran they have
    nothing to find, and looking takes 3 s."""
    if not session.config.option.collectonly: gc.unfreeze()


def use_one_thread() -> None:
    """Sets torch's threads, where it is loaded: operands are small, and tests run beside each other; more
    threads wait for each other longer than they work."""
    if torch := sys.modules.get("torch"): torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What modules before have left stays until the end, too: collections, which tests and captured steps
    ask for, take seconds where they look at all that thousands of tests have left in caches."""
    gc.collect()
    gc.freeze()
    use_one_thread()


@pytest.fixture(autouse=True)
def cache_directory() -> Iterator[None]:
    """A test whose cache directory cannot be written leaves the others theirs."""
    before = os.environ.get("NV_CACHE_DIR")
    yield
    if before is None: os.environ.pop("NV_CACHE_DIR", None)
    else: os.environ["NV_CACHE_DIR"] = before


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """`tinygrad-nv` with these arguments, in this process; `stdin` is what it can read."""
    from tinygrad_nv import cli
    device = DEV.value

    def run(*arguments: object, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        try: code = cli.main([os.fspath(a) if isinstance(a, Path) else str(a) for a in arguments])
        except SystemExit as end: code = int(end.code or 0)
        return Outcome(code, *capsys.readouterr())

    loggers = [logging.getLogger(name) for name in ("tinygrad_nv.server", "uvicorn", "opentelemetry")]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    yield run
    DEV.value = device
    for each, (handlers, propagates, level) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagates
        each.setLevel(level)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """`make_model(cls_name, **config)`: a directory that transformers wrote for a random model of the class,
    with a tokenizer of `VOCAB` tokens. Equal arguments give the same directory: do not write into it.
    """
    import torch
    import transformers

    from tinygrad_nv.models.tales import tokenizer as tales
    use_one_thread()
    made: dict[str, Path] = {}

    def make(cls_name: str = "LlamaForCausalLM", **config: Any) -> Path:
        key = json.dumps([cls_name, config], sort_keys=True)
        if key not in made:
            torch.manual_seed(0)
            cls = getattr(transformers, cls_name)
            made[key] = tmp_path_factory.mktemp(cls_name)
            cls(cls.config_class(**{**SIZES, **config})).save_pretrained(made[key])
            tales.save(tales.train_tokenizer(TEXTS, VOCAB), made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny(make_model: MakeModel) -> Path:
    """The model that most tests share, so that its kernels are compiled once."""
    return make_model()


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of `tiny` that a test may damage."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def spoil(copy: Path) -> Spoil:
    """`spoil("config.json", key=value)`: changes keys of a JSON file of the copy; `...` removes the key."""
    def change(file: str = "config.json", **changes: Any) -> Path:
        path = copy / file
        data = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
        path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
        return copy

    return change
