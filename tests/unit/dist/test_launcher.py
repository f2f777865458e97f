"""Local ranks: their variables and output, and that all end when one fails, is killed or hangs, or when the
launcher is told to end, or is killed itself."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.dist.dist_case import HEAD, MARK, SOON_S, await_none, program
from tinygrad_nv.dist.launcher import Launch, launch
from tinygrad_nv.dist.launcher import program as command_of
from tinygrad_nv.dist.processes import ENDED, Failure
from tinygrad_nv.errors import DistError

LAUNCHER = f"""{HEAD.replace("ranks = Ranks.from_environment()", "")}
from tinygrad_nv.dist.launcher import Launch, launch, start_local
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """No process of the test is left behind when it has ended."""
    name = uuid.uuid4().hex
    monkeypatch.setenv(MARK, name)
    yield name
    assert await_none(name, SOON_S) == []


def launched(folder: Path, text: str, ranks: int = 2, quiet: bool = False, grace_s: float = 2.0) -> int:
    return launch(Launch((str(program(folder, text)),), ranks, quiet=quiet, grace_s=grace_s))


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_ranks_find_each_other_and_their_lines_are_told_apart(mark: str, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]):
    text = """
with Store.open(ranks, 200) as store:
    said = store.all_gather("x", bytes([ranks.rank + 65]))
    print(b"".join(said).decode(), ranks.launcher, ranks.local_rank, ranks.local_world_size, sep="\\n")
    print("to stderr", file=sys.stderr)
    print("no end of line", end="")
"""
    assert launched(tmp_path, text, 2) == 0
    out, err = capsys.readouterr()
    assert lines(out) == sorted(f"[rank {rank}] {line}" for rank in range(2)
                                for line in ("AB", "launch", str(rank), "2", "no end of line"))
    assert lines(err) == ["[rank 0] to stderr", "[rank 1] to stderr"]


def test_prefixes_are_aligned_and_quiet_shows_rank_0(mark: str, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]):
    """Ranks 8 and 9 of 12: of the fifth of six hosts."""
    text = "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT"
    assert launch(Launch(("sh", "-c", text), 2, 6, 4, "gpu0", 29500, log_dir=tmp_path / "logs")) == 0
    assert lines(capsys.readouterr().out) == ["[rank  8] 8 0 4 12 gpu0:29500",
                                              "[rank  9] 9 1 4 12 gpu0:29500"]
    assert (tmp_path / "logs" / "rank-9.log").read_text() == "9 1 4 12 gpu0:29500\n"
    assert launched(tmp_path, "print(ranks.rank)", quiet=True) == 0
    assert capsys.readouterr().out == "[rank 0] 0\n"


def test_each_rank_has_its_cores(mark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                 monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NUM_CPU_THREADS", raising=False)
    every = sorted(os.sched_getaffinity(0))
    text = "print(sorted(os.sched_getaffinity(0)), os.environ['NUM_CPU_THREADS'], sep=';')"
    assert launched(tmp_path, text, len(every)) == 0
    found = [re.sub(r"^\[rank +\d+\] ", "", line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(found) == sorted(f"[{core}];1" for core in every)
    assert sorted(os.sched_getaffinity(0)) == every
    monkeypatch.setenv("NUM_CPU_THREADS", "7")
    assert launched(tmp_path, text, 1) == 0
    assert capsys.readouterr().out == f"[rank 0] {every};7\n"


def test_the_first_failure_ends_all(mark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = """
print("about to fail" if ranks.rank == 1 else "waits", flush=True)
if ranks.rank == 1: time.sleep(0.1); sys.exit(3)
time.sleep(300)
"""
    began = time.monotonic()
    assert launched(tmp_path, text, 3) == 3
    assert time.monotonic() - began < SOON_S
    err = capsys.readouterr().err
    assert re.search(r"tinygrad-nv launch: rank 1 \(process \d+\) exited with status 3; the other ranks were "
                     r"ended\n  its last lines:\n  \| about to fail\n", err), err


def test_a_rank_that_is_killed_before_rendezvous(mark: str, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]):
    began = time.monotonic()
    assert launched(tmp_path, "if ranks.rank == 1: os.kill(os.getpid(), 9)\nStore.open(ranks, 200)", 3) == 137
    assert time.monotonic() - began < SOON_S
    assert "rank 1 (process" in (err := capsys.readouterr().err)
    assert "was killed by SIGKILL; the other ranks were ended" in err


def test_the_cause_is_named_where_others_end_before_it(mark: str, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch):
    """Rank 0 hears of the failure and ends at once; rank 1 takes longer to end."""
    text = f"""
store = Store.open(ranks, 200)
if ranks.rank == 1:
    store.abort("it fails")
    time.sleep(0.3)
    os._exit(9)
store.watch(lambda *_: os._exit({ENDED}))
time.sleep(300)
"""
    monkeypatch.setattr("tinygrad_nv.dist.processes.CAUSE_S", SOON_S)
    assert launched(tmp_path, text, 2) == 9
    monkeypatch.setattr("tinygrad_nv.dist.processes.CAUSE_S", 0.5)
    assert "rank 1 (process" in capsys.readouterr().err
    assert launched(tmp_path, f"sys.exit({ENDED} if ranks.rank else time.sleep(300))") == ENDED


def test_a_rank_that_ignores_signals_is_killed(mark: str, tmp_path: Path):
    text = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
store = Store.open(ranks, 200)
if ranks.rank == 1: sys.exit(4)
time.sleep(300)
"""
    began = time.monotonic()
    assert launched(tmp_path, text, grace_s=0.3) == 4
    assert 0.3 <= time.monotonic() - began < SOON_S


def test_what_a_rank_has_started_ends_with_it(mark: str):
    """A shell that leaves a process behind."""
    began = time.monotonic()
    assert launch(Launch(("sh", "-c", "sleep 300 & exit 0"), 2)) == 0
    assert time.monotonic() - began < SOON_S


def test_a_program_that_is_not_there(mark: str):
    with pytest.raises(DistError, match="'no-such-program' cannot be started: No such file"):
        launch(Launch(("no-such-program",), 2))


@pytest.mark.parametrize(("number", "handled", "code"), [
    (signal.SIGINT, "lambda *_: (print('got it', flush=True), sys.exit(130))", 130),
    (signal.SIGTERM, "lambda *_: (print('got it', flush=True), sys.exit(0))", 0),
    (signal.SIGTERM, "signal.SIG_IGN", 143)])
def test_signals_are_passed_on(number: int, handled: str, code: int, mark: str, tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]):
    """Ctrl-C reaches the launcher alone: ranks are in groups of their own."""
    text = f"""
for number in (2, 15): signal.signal(number, {handled})
with Store.open(ranks, 200) as store:
    store.barrier("ready")
    if ranks.rank == 0: os.kill(os.getppid(), {int(number)})
    time.sleep(300)
"""
    before = signal.getsignal(number)
    began = time.monotonic()
    assert launched(tmp_path, text, grace_s=0.3) == code
    assert time.monotonic() - began < SOON_S
    assert signal.getsignal(number) == before
    assert capsys.readouterr().out.count("got it") == (0 if handled == "signal.SIG_IGN" else 2)


@pytest.mark.parametrize("how", ["launcher", "rank 0"])
def test_a_launcher_that_is_killed_leaves_no_process(how: str, mark: str, tmp_path: Path):
    """Neither the ranks, which ignore SIGTERM, nor what they have started."""
    path = program(tmp_path, """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "300"])
print("started", flush=True)
time.sleep(300)
""")
    starts = {"launcher": f"launch(Launch(({str(path)!r},), 2, grace_s=0.3))",
              "rank 0": f"start_local(3, [{str(path)!r}], grace_s=0.3)\ntime.sleep(300)"}
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER + starts[how])
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    assert process.stdout is not None
    for _ in range(2): assert b"started" in process.stdout.readline()
    process.kill()
    process.wait()
    began = time.monotonic()
    assert await_none(mark, SOON_S) == []
    assert time.monotonic() - began < SOON_S
    process.stdout.close()


# **** ranks of a process that is rank 0 ****

def local(folder: Path, rank: str, own: str) -> subprocess.CompletedProcess[str]:
    path, script = program(folder, rank), folder / "own.py"
    script.write_text(f"{LAUNCHER}\nPATH = {str(path)!r}\n{own}")
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200,
                          check=False)


def test_a_process_starts_its_own_ranks(mark: str, tmp_path: Path):
    own = """
before = dict(os.environ)
own = start_local(3, [PATH])
assert own.ranks == Ranks.from_environment()
with Store.open(own.ranks, 200) as store: print(store.all_gather("x", b"0"))
assert own.poll() is None
assert own.close() is None
os.environ.pop("NUM_CPU_THREADS", None)
assert dict(os.environ) == before
"""
    done = local(tmp_path, """
with Store.open(ranks, 200) as store: store.all_gather("x", b"%d" % ranks.rank)
print("done")
""", own)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[b'0', b'1', b'2']\n"
    assert lines(done.stderr) == ["[rank 1] done", "[rank 2] done"]


def test_a_rank_that_ends_is_told_to_the_process(mark: str, tmp_path: Path):
    own = """
import threading
came = threading.Event()
def failed(failure):
    print(failure.rank, failure.status, failure.how, failure.last, flush=True)
    came.set()
own = start_local(3, [PATH], on_failure=failed)
assert came.wait(60)
assert own.poll().rank == 2
assert own.close(0).exit_code == 5
"""
    done = local(tmp_path, "print('bye')\nif ranks.rank == 2: sys.exit(5)\ntime.sleep(300)", own)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 5 exited with status 5 ('bye',)\n"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_rank_that_ends_before_it_has_met_the_others(mark: str, when: str, tmp_path: Path):
    """Rank 0 ends at once, with the last lines of that rank, whether it waits for the others yet or not."""
    pause = {"before": (0, 2), "meanwhile": (0.7, 0)}[when]
    own = f"""
from tinygrad_nv.errors import DistError
own = start_local(3, [PATH])
time.sleep({pause[1]})
began = time.monotonic()
try: Store.open(own.ranks, 200, own.watch)
except DistError as error: print(error.found.replace(str(own.poll().pid), "N"), error.ranks)
assert time.monotonic() - began < {SOON_S}
own.close(0)
"""
    rank = f"if ranks.rank == 2:\n    time.sleep({pause[0]})\n    sys.exit('no such library')\ntime.sleep(99)"
    done = local(tmp_path, rank, own)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("rank 2 was lost: process N exited with status 1; its last lines:\n"
                           "  | no such library (2,)\n")


def test_close_ends_ranks_that_do_not(mark: str, tmp_path: Path):
    began = time.monotonic()
    done = local(tmp_path, "time.sleep(300)", "start_local(2, [PATH]).close(0.1)")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < SOON_S


def test_words_for_statuses():
    said = {status: Failure(1, 7, status, ()) for status in (3, -9, -64)}
    assert {status: (each.exit_code, str(each)) for status, each in said.items()} == {
        3: (3, "rank 1 (process 7) exited with status 3"),
        -9: (137, "rank 1 (process 7) was killed by SIGKILL"),
        -64: (192, f"rank 1 (process 7) was killed by {signal.Signals(64).name}")}


def test_a_file_of_python_runs_with_this_python():
    assert command_of(["train.py", "-x"]) == (sys.executable, "train.py", "-x")
    assert command_of(["echo", "train.py"]) == ("echo", "train.py")


def test_no_thread_is_left(mark: str, tmp_path: Path):
    before = set(threading.enumerate())
    assert launched(tmp_path, "print(ranks.rank)") == 0
    left = set(threading.enumerate()) - before
    for thread in left: thread.join(SOON_S)
    assert not [thread.name for thread in left if thread.is_alive()]
