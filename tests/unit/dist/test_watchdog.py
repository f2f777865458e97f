"""The watchdog: what it says of ranks that are behind, differ or are lost, and that all end."""
from __future__ import annotations

import inspect
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.dist.dist_case import SOON_S, close, ended, opened, program, ranks_of, spawned
from tinygrad_nv.dist.launcher import Launch, launch
from tinygrad_nv.dist.processes import ENDED
from tinygrad_nv.dist.watchdog import VERDICT, Position, Progress, Watchdog, keys, pack, unpack, verdict
from tinygrad_nv.errors import DistError


def op(number: int, name: str = "all_reduce", tensor: str = "layers.3.down",
       shape: str = "[2, 8]") -> Position:
    return Position(number, f"{name} #{number} of {tensor} {shape}")


@pytest.mark.parametrize(("every", "ranks", "words"), [
    ([Progress(0, op(12)), Progress(1, op(11, tensor="layers.3.o")), Progress(2, op(12))], (1,),
     "rank 1 has not reached all_reduce #12 of layers.3.down [2, 8] in 5 s (it is in all_reduce "
     "#11 of layers.3.o [2, 8])"),
    ([Progress(0, op(2)), Progress(1, None, op(1, tensor="a"))], (1,),
     "rank 1 has not reached all_reduce #2 of layers.3.down [2, 8] in 5 s (it is behind all_reduce "
     "#1 of a [2, 8], in its own code)"),
    ([Progress(0), Progress(1, op(1))], (0,),
     "rank 0 has not reached all_reduce #1 of layers.3.down [2, 8] in "
     "5 s (it has not begun a collective)"),
    ([Progress(0, op(1)), Progress(1, silent="it sleeps")], (1,),
     "rank 1 has not reached all_reduce #1 of layers.3.down "
     "[2, 8] in 5 s (it sleeps)"),
    ([Progress(0, op(3)), Progress(1, op(3, "all_gather")), Progress(2, op(3))], (1,),
     "ranks differ: rank 1 is in all_gather #3 of layers.3.down [2, 8], but rank 0 in all_reduce #3 "
     "of layers.3.down [2, 8]"),
    ([Progress(0, op(3, shape="[4]")), Progress(1, op(3)), Progress(2, op(3))], (0,),
     "ranks differ: rank 0 is in all_reduce #3 of layers.3.down [4], but rank 1 in all_reduce #3 of"),
    ([Progress(0, op(3)), Progress(1, op(3, shape="[3]"))], (1,),
     "ranks differ: rank 1 is in all_reduce #3 of "
     "layers.3.down [3], but rank 0 in all_reduce #3 of layers.3.down [2, 8]"),
    ([Progress(0, op(3)), Progress(1, None, op(3))], (1,),
     "rank 1 has ended all_reduce #3 of layers.3.down [2, "
     "8], in which others still are"),
    ([Progress(0, op(3)), Progress(1, op(3))], (),
     "all ranks are in all_reduce #3 of layers.3.down [2, 8] for "
     "more than 5 s")])
def test_verdicts(every: list[Progress], ranks: tuple[int, ...], words: str):
    found = verdict(every, "all_reduce #12", 5.0)
    assert found.found.startswith(words), found.found
    assert found.ranks == ranks
    assert found.expected
    assert found.fix


def test_of_send_and_recv_all_ranks_are_listed():
    every = [Progress(0, op(3, "recv")), Progress(1, None, op(7)), Progress(2, other="send #1 of b")]
    assert verdict(every, "recv #3 of a", 5.0).found == (
        "recv #3 of a takes more than 5 s (rank 0: it is in recv #3 of layers.3.down [2, 8]; rank 1: it is "
        "behind all_reduce #7 of layers.3.down [2, 8], in its own code; rank 2: it is in send #1 of b)")


@dataclass(frozen=True)
class Call:
    number: int
    text: str
    started_s: float

    def __str__(self) -> str: return f"all_reduce #{self.number} of {self.text}"


class Calls:
    """A group, and the call that this rank is in."""

    def __init__(self, name: str = "all", members: tuple[int, ...] = (0, 1, 2)) -> None:
        self.name, self.members, self.calls, self.running = name, members, list[Call](), False
        self.error: DistError | None = None

    def begin(self, text: str) -> None:
        self.calls.append(Call(len(self.calls) + 1, text, time.monotonic()))
        self.running = True

    def end(self) -> None: self.running = False

    def current(self) -> Call | None: return self.calls[-1] if self.running else None

    def last(self) -> Call | None: return self.calls[-1] if self.calls and not self.running else None

    def failure(self) -> DistError | None: return self.error


def test_what_a_rank_is_at_is_packed_without_loss():
    first, second = Calls(), Calls("0-2", (0, 2))
    assert unpack(3, "all", pack([first, second])) == Progress(3)
    first.begin("a")
    assert unpack(3, "all", pack([first, second])) == Progress(3, Position(1, "all_reduce #1 of a"))
    assert unpack(3, "0-2", pack([first, second])) == Progress(3, other="all_reduce #1 of a of group all")
    first.end()
    assert unpack(3, "all", pack([first, second])) == Progress(3, None, Position(1, "all_reduce #1 of a"))
    assert unpack(3, "unknown", pack([])) == Progress(3)
    assert keys([first, second, Calls(), Calls()]) == ["all", "0-2", "all (1)", "all (2)"]


class Ended:
    """Stands for the end of a process."""

    def __init__(self) -> None: self.status, self.came = 0, threading.Event()

    def __call__(self, status: int) -> None:
        self.status = status
        self.came.set()


def test_a_rank_that_is_behind_ends_all(capsys: pytest.CaptureFixture[str]):
    stores, ends, records, drained = opened(ranks_of(3)), [Ended() for _ in range(3)], [], []
    for store, end in zip(stores, ends, strict=True):
        records.append(Calls())
        dog = Watchdog(store, records[-1:], 0.2, end)
        dog.before_end(lambda error, store=store: drained.append((store.ranks.rank, error.ranks)))
    for record in records: record.begin("a")
    for record in records: record.end()
    for record in records[::2]: record.begin("b")
    began = time.monotonic()
    assert all(end.came.wait(SOON_S) for end in ends)
    assert 0.15 < time.monotonic() - began < SOON_S
    assert [end.status for end in ends] == [ENDED] * 3
    assert sorted(drained) == [(rank, (1,)) for rank in range(3)]
    said = capsys.readouterr().err
    for rank in range(3):
        assert (f"tinygrad-nv: rank {rank} ends: rank 1 has not reached all_reduce #2 of b in 0.2 "
                "s (it is behind all_reduce #1 of a, in its own code)") in said
    close(stores)


def test_rank_0_waits_for_a_rank_that_asks_late_for_the_verdict():
    """Another rank has ended by then, and the store ends with rank 0."""
    stores, ends, drained = opened(ranks_of(3)), [Ended() for _ in range(3)], []
    get = stores[1].get

    def get_late(key: str, timeout_s: float) -> bytes:
        if key == VERDICT:
            while 2 not in stores[1].lost: time.sleep(0.01)
            time.sleep(0.2)
        return get(key, timeout_s)

    stores[1].get = get_late
    records = [Calls() for _ in range(3)]
    for store, record, end in zip(stores, records, ends, strict=True):
        dog = Watchdog(store, [record], 0.2, end)
        dog.before_end(lambda error, store=store: drained.append((store.ranks.rank, error.ranks)))
    for record in records[::2]: record.begin("a")
    assert all(end.came.wait(SOON_S) for end in ends)
    assert sorted(drained) == [(rank, (1,)) for rank in range(3)]
    close(stores)


def test_an_error_of_a_collective_ends_all():
    """As shared memory finds that ranks call different ones."""
    stores, ends, calls = opened(ranks_of(2)), [Ended(), Ended()], [Calls(), Calls()]
    for store, call, end in zip(stores, calls, ends, strict=True): Watchdog(store, [call], 60.0, end)
    calls[1].error = DistError("rank 1 calls this, rank 0 calls that")
    assert all(end.came.wait(SOON_S) for end in ends)
    with pytest.raises(DistError, match="rank 1 was lost: rank 1 calls this, rank 0 calls that"):
        stores[0].barrier("b")
    close(stores)


def test_a_rank_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]):
    """In good order, as a program that calls fewer collectives does; not at once, as one that called all."""
    monkeypatch.setattr("tinygrad_nv.dist.watchdog.LEFT_S", 1.5)
    monkeypatch.setattr("tinygrad_nv.dist.watchdog.LOOK_S", 0.05)
    stores, ends, calls = opened(ranks_of(3)), [Ended() for _ in range(3)], [Calls() for _ in range(3)]
    for store, call, end in zip(stores, calls, ends, strict=True): Watchdog(store, [call], 60.0, end)
    for call in calls: call.begin("a")
    time.sleep(1.6)
    stores[1].close()
    assert not ends[0].came.wait(0.2)
    assert all(end.came.wait(SOON_S) for end in ends[::2])
    assert "rank 1 ended while this rank was in all_reduce #1 of a\n" in capsys.readouterr().err
    close(stores)


def test_a_rank_ends_where_it_can_start_no_thread(monkeypatch: pytest.MonkeyPatch):
    """The program waits at its exit for this end, and would wait for ever."""
    store, end = opened(ranks_of(1))[0], Ended()
    dog = Watchdog(store, [Calls()], 60.0, end)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.endswith("(_drain)"): raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"): dog._end(DistError("a fault"))
    assert end.status == ENDED
    dog._wait_for_end()
    dog.close()
    close([store])


def test_collectives_in_time_and_time_between_them_are_no_fault():
    stores, ends = opened(ranks_of(2)), [Ended() for _ in range(2)]
    records = [Calls() for _ in stores]
    dogs = [Watchdog(store, [record], 1.5, end)
            for store, record, end in zip(stores, records, ends, strict=True)]
    for _ in range(3):
        for record in records: record.begin("a")
        time.sleep(0.6)
        for record in records: record.end()
    time.sleep(1.6)
    for dog in dogs: dog.close()
    close(stores)
    assert not any(end.came.is_set() for end in ends)


def test_no_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DIST_TIMEOUT", "0")
    store, end, record = opened(ranks_of(1))[0], Ended(), Calls()
    record.begin("a")
    dog = Watchdog(store, [record], exit=end)
    assert not end.came.wait(0.05)
    dog.close()
    monkeypatch.setenv("NV_DIST_TIMEOUT", "7")
    assert Watchdog(store, [], exit=end).timeout_s == 7
    store.close()


# **** processes ****

STEPS = f"""
from dataclasses import dataclass
from tinygrad_nv.dist import watchdog
from tinygrad_nv.errors import DistError
{inspect.getsource(Call)}
{inspect.getsource(Calls)}
store, calls = Store.open(ranks, 200), Calls(members=(0, 1))
watchdog.ANSWER_S = 1
watchdog.Watchdog(store, [calls], 1.5).before_end(lambda error: print("drained", flush=True))
def step(tensor):
    calls.begin(tensor)
    if (ranks.rank, tensor) == (0, "b"): store.set("begun", b"")
    try: store.barrier("step", 200)
    except Exception: time.sleep(300)    # a transport does not hear of lost ranks
    calls.end()
step("a")
"""


def faulty(folder: Path, text: str) -> list[tuple[int, str, str]]:
    """Two ranks of which rank 1 runs the text once the other is in its second step; both end, in time."""
    began = time.monotonic()
    text = f"if ranks.rank == 1:\n    store.get('begun', 60); {text}"
    path = program(folder, f"{STEPS}\n{text}\nstep('b')\nstep('c')")
    found = ended(spawned(path, 2))
    assert time.monotonic() - began < SOON_S
    return found


def test_a_rank_that_is_killed_ends_the_others_at_once(tmp_path: Path):
    (status, out, err), (killed, _, _) = faulty(tmp_path, "time.sleep(0.1); os.kill(os.getpid(), 9)")
    assert (status, killed) == (ENDED, -9)
    assert out == "drained\n"
    assert ("rank 0 ends: rank 1 was lost while this rank was in all_reduce #2 of b: its process "
            "ended without closing the store (process") in err


def test_an_exception_is_told(tmp_path: Path):
    (status, _, err), (failed, _, traceback) = faulty(tmp_path, "raise ValueError('no such layer')")
    assert (status, failed) == (ENDED, 1)
    assert "ValueError: no such layer" in traceback
    assert ("rank 1 was lost while this rank was in all_reduce #2 of b: it ended with ValueError: "
            "no such layer (process") in err


def test_a_rank_that_hangs_is_named_and_ends_with_the_others(tmp_path: Path):
    for status, out, err in faulty(tmp_path, "time.sleep(300)"):
        assert (status, out) == (ENDED, "drained\n")
        assert ("rank 1 has not reached all_reduce #2 of b in 1.5 s (it is behind all_reduce #1 of "
                "a, in its own code)") in err


def test_a_rank_that_asks_late_hears_the_verdict(tmp_path: Path):
    """The store ends with rank 0, and waits for the others."""
    late = ("get = store.get; store.get = lambda key, *more: "
            "(time.sleep(0.4 * (key == watchdog.VERDICT)), get(key, *more))[1]; time.sleep(300)")
    for rank, (status, _, err) in enumerate(faulty(tmp_path, late)):
        assert status == ENDED
        assert f"rank {rank} ends: rank 1 has not reached all_reduce #2 of b" in err


def test_another_shape_is_named(tmp_path: Path):
    text = "calls.begin('b5'); time.sleep(300)"
    for status, _, err in faulty(tmp_path, text):
        assert status == ENDED
        assert "ranks differ: rank 1 is in all_reduce #2 of b5, but rank 0 in all_reduce #2 of b" in err


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_named(stopped: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """SIGSTOP: the launcher kills it after the others."""
    stop = f"\nif ranks.rank == {stopped}: os.kill(os.getpid(), signal.SIGSTOP)\nstep('b')"
    began = time.monotonic()
    assert launch(Launch((str(program(tmp_path, STEPS + stop)),), 2, grace_s=0.3)) == ENDED
    assert time.monotonic() - began < SOON_S
    said = capsys.readouterr().err
    late = "rank 1 has not reached all_reduce #2 of b in 1.5 s (it does not answer in 1 s: stopped"
    if stopped: assert late in said
    else: assert "the store of rank 0 does not answer" in said
    assert "exited with status 75; the other ranks were ended" in said


def test_a_forked_process_does_not_hide_the_end_of_a_rank(tmp_path: Path):
    """As those of torch's loaders, which may outlive it."""
    fork = "if os.fork(): os.kill(os.getpid(), 9)\n    os.closerange(0, 3); time.sleep(60); os._exit(0)"
    path = program(tmp_path, f"{STEPS}\nif ranks.rank == int(sys.argv[1]):\n    {fork}\nstep('b')")
    for killed in range(2):
        began, processes = time.monotonic(), spawned(path, 2, str(killed))
        assert processes[1 - killed].wait(SOON_S) == ENDED
        assert time.monotonic() - began < SOON_S
        assert f"rank {killed} was lost" in ended(processes[1 - killed:2 - killed])[0][2]
        ended(processes)


def test_words_of_silence():
    stores = opened(ranks_of(2))
    dog = Watchdog(stores[0], [], 0.0)
    assert "does not answer" in dog._why_silent(1)
    stores[1].close()
    end = time.monotonic() + SOON_S
    while not stores[0].left and time.monotonic() < end: time.sleep(0.005)
    assert dog._why_silent(1) == "it has ended, and closed the store"
    dog.close()
    stores[0].close()
