"""Requests that go to several replicas, over cores that count."""
from __future__ import annotations

import os
import pickle
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.engine.core_case import CountingCore
from tinygrad_nv.engine.core import EngineStats
from tinygrad_nv.engine.executor import replicas
from tinygrad_nv.engine.executor.connections import Connections
from tinygrad_nv.engine.executor.followers import Followers
from tinygrad_nv.engine.executor.ranks import ParallelRanks
from tinygrad_nv.engine.executor.replica import Replica
from tinygrad_nv.engine.executor.replicas import RemoteEngine, Replicas, sum_stats
from tinygrad_nv.engine.outputs import EngineCoreOutput
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.engine.thread import EngineThread
from tinygrad_nv.errors import ConfigError, DistError, NVError, RequestError

STATS = EngineStats(1, 2, 0.25, 3, 4, 50, 10, 50, 60, 7, 0, 8, 5, (4, 1))


class Core(CountingCore):
    """With statistics."""
    resets = 0

    def stats(self) -> Any: return STATS

    def reset_prefix_cache(self) -> None: self.resets += 1


@dataclass
class Inbox:
    """Outputs by request and sequence, and what each ended with."""
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[tuple[str, int], str | NVError] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, outputs: list[EngineCoreOutput]) -> None:
        with self.changed:
            for each in outputs:
                at = each.request, each.index
                self.tokens[at] += each.tokens
                assert at not in self.ended, f"{at} gets {each} when it has ended"
                if each.finish_reason is not None: self.ended[at] = each.error or each.finish_reason
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        """Until so many sequences have ended."""
        with self.changed: assert self.changed.wait_for(lambda: len(self.ended) >= count, 10), self.ended

    def begun(self, *names: str) -> None:
        """Until requests have tokens."""
        def all_have() -> bool: return all(self.tokens[name, 0] for name in names)
        with self.changed: assert self.changed.wait_for(all_have, 10)


@dataclass
class Case:
    """Replicas over two cores, of which the second is behind a connection."""
    cores: list[Core]
    engines: Replicas
    far: Replica

    def requests(self, replica: int) -> int:
        """How many it has had."""
        return sum(call[0] == "add" for call in self.cores[replica].calls)


@pytest.fixture
def case() -> Iterator[Case]:
    near, far = Pipe()
    cores = [Core(step_s=0.001), Core(step_s=0.001)]
    world = SimpleNamespace(interrupt=None, rank=1, leave_peers=lambda: None)
    replica = Replica(cast(Any, world), Connections(far, {}, {}))
    replica.engine = EngineThread(cast(Any, cores[1]))
    replica.opened = cast(Any, SimpleNamespace(draft_model=None))
    serves = threading.Thread(target=replica.serve)
    serves.start()
    remote = RemoteEngine(1, near)
    yield Case(cores, made := Replicas(EngineThread(cast(Any, cores[0])), [remote]), replica)
    for each in cores: each.gate.set()
    made.close()
    remote.close()
    serves.join(10)
    assert not serves.is_alive()
    replica.close()     # of one whose connection has broken
    assert not [each for each in threading.enumerate() if each.name == "engine"]
    far.close()


def request(name: str, n: int = 1, tokens: int = 4, **more: Any) -> Request:
    return Request(name, [1, 2], SamplingParams(n=n, max_tokens=tokens, temperature=1.0, **more))


def test_all_replicas_have_work(case: Case) -> None:
    inbox = Inbox()
    for number in range(20): case.engines.submit(request(f"r{number}", n=2), inbox.put)
    inbox.wait(40)
    assert inbox.tokens == {(f"r{number}", index): [100 * index + at for at in range(4)]
                            for number in range(20) for index in range(2)}
    assert set(inbox.ended.values()) == {"length"}
    assert min(case.requests(0), case.requests(1)) >= 5
    assert case.engines._loads == [0, 0]
    case.engines.join(10)


def test_the_one_with_the_least_work(case: Case) -> None:
    """A sequence that waits counts as four that run, and all of a request are in one replica."""
    for each in case.cores: each.gate.clear()
    inbox = Inbox()
    for name, n in (("a", 3), ("b", 1), ("c", 1), ("d", 1), ("e", 1)):
        case.engines.submit(request(name, n, tokens=40), inbox.put)
    assert case.engines._loads == [16, 12]
    case.cores[1].gate.set()
    inbox.begun("b", "c", "d")
    assert case.engines._loads == [16, 3]
    for name in "fg": case.engines.submit(request(name, tokens=40), inbox.put)
    case.cores[0].gate.set()
    inbox.wait(9)
    assert (case.requests(0), case.requests(1)) == (2, 5)


def test_aborted_and_finished(case: Case) -> None:
    """A name may be used again at once: outputs of before do not come."""
    inbox, again = Inbox(), Inbox()
    for name in "ab": case.engines.submit(request(name, n=2, tokens=10 ** 6), inbox.put)
    inbox.begun("a", "b")
    for name in "ab":
        case.engines.abort(name)
        case.engines.submit(request(name, tokens=3), again.put)
    again.wait(2)
    assert dict(again.tokens) == {("a", 0): [0, 1, 2], ("b", 0): [0, 1, 2]}
    for name in "ab": case.engines.submit(request(name, n=2, tokens=10 ** 6), inbox.put)
    inbox.begun("a", "b")
    for name in "ab":
        for index in range(2): case.engines.finish(name, index, "###")
    case.engines.join(10)
    case.engines.others[0].ask("stats").result(10)
    case.far.engine.join(10)
    for each in case.cores: assert [call[0] for call in each.calls].count("finish") == 2
    assert case.engines._loads == [0, 0]
    case.engines.abort("a")     # unknown by now


def test_one_request_of_a_name(case: Case) -> None:
    case.engines.submit(request("a", tokens=10 ** 6), lambda outputs: None)
    with pytest.raises(RequestError, match="request 'a' is running"):
        case.engines.submit(request("a"), lambda outputs: None)


def test_a_core_that_refuses(case: Case) -> None:
    inbox, error = Inbox(), RequestError("too long")
    case.cores[1].refuse = error
    for name in "ab": case.engines.submit(request(name), inbox.put)
    inbox.wait(2)
    assert inbox.ended["a", 0] == "length"
    assert str(inbox.ended["b", 0]) == str(error)


@pytest.mark.parametrize("replica", [0, 1])
def test_an_engine_that_fails(case: Case, replica: int) -> None:
    """Its requests end with the error, and later ones raise it; the other replica ends its own."""
    for each in case.cores: each.gate.clear()
    inbox = Inbox()
    for name in "ab": case.engines.submit(request(name), inbox.put)
    case.cores[replica].crash = ValueError("boom")
    for each in case.cores: each.gate.set()
    inbox.wait(2)
    assert "boom" in str(inbox.ended["ab"[replica], 0])
    assert inbox.ended["ba"[replica], 0] == "length"
    assert case.engines.failure is not None
    with pytest.raises(NVError, match="boom"): case.engines.submit(request("c"), inbox.put)


def test_a_replica_that_is_gone(case: Case) -> None:
    inbox = Inbox()
    for each in case.cores: each.gate.clear()
    for name in "ab": case.engines.submit(request(name), inbox.put)
    with socket.socket(fileno=os.dup(case.far.front.fileno())) as ends: ends.shutdown(socket.SHUT_RDWR)
    with inbox.changed: assert inbox.changed.wait_for(lambda: ("b", 0) in inbox.ended, 10)
    assert isinstance(inbox.ended["b", 0], DistError)
    assert "rank 1 has ended" in str(case.engines.failure)
    assert case.engines.stats().running == 2      # as they were
    for each in case.cores: each.gate.set()
    inbox.wait(2)


def test_all_fail_together(case: Case) -> None:
    inbox = Inbox()
    for name in "ab": case.engines.submit(request(name, tokens=10 ** 6), inbox.put)
    case.engines.fail(error := DistError("ranks have parted"))
    inbox.wait(2)
    assert list(inbox.ended.values()) == [error, error]


def test_statistics(case: Case) -> None:
    assert case.engines.replica_stats() == [STATS, STATS]
    assert case.engines.stats() == sum_stats([STATS, STATS]) == EngineStats(
        2, 4, 0.25, 6, 8, 100, 20, 100, 120, 14, 0, 16, 10, (8, 2))
    assert case.engines.compilations() == 0
    assert case.engines.max_seqs == 128
    case.engines.reset_prefix_cache()
    assert [each.resets for each in case.cores] == [1, 1]


def test_statistics_of_a_replica_that_does_not_answer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before are shown at once, and it is asked no second time; then those that it answers."""
    monkeypatch.setattr(replicas, "STATS_S", 0.05)
    answers, remote = threading.Event(), case.engines.others[0]
    def late() -> EngineStats:
        assert answers.wait(10)
        return replace(STATS, running=5)
    monkeypatch.setattr(case.far.engine, "stats", late)
    began = time.monotonic()
    for _ in range(3): case.engines.refresh_stats()
    waited = time.monotonic() - began
    for _ in range(100):
        assert case.engines.stats().running == 2
        assert case.engines.compilations() == 0
    assert time.monotonic() - began < waited + 0.05 < 5
    assert (len(remote._answers), remote._outbox.qsize()) == (1, 0)
    asked = remote.ask_stats()
    answers.set()
    asked.result(10)
    assert [each.running for each in case.engines.replica_stats()] == [1, 5]


class Unreadable:
    """What a replica has no class for."""
    def __reduce__(self) -> Any: return getattr, (os, "Color")


@pytest.mark.parametrize(("value", "words"), [
    (Unreadable(), r"rank 1 cannot read the request: .*no attribute 'Color'"),
    (lambda: None, r"a request cannot be sent to rank 1: .*pickle")], ids=["read", "sent"])
def test_a_request_that_cannot_be_sent(case: Case, value: Any, words: str) -> None:
    """It alone ends with an error: those before and after are answered."""
    inbox = Inbox()
    for each in case.cores: each.gate.clear()
    for name in "ab": case.engines.submit(request(name), inbox.put)
    case.engines.submit(request("c"), inbox.put)
    bad = replace(request("bad", n=2), salt=value)
    if isinstance(value, Unreadable): case.engines.submit(bad, inbox.put)
    else:
        with pytest.raises(RequestError, match=words): case.engines.submit(bad, inbox.put)
        inbox.ended |= dict.fromkeys((("bad", 0), ("bad", 1)), RequestError(words))
    for each in case.cores: each.gate.set()
    inbox.wait(5)
    for name in "def": case.engines.submit(request(name), inbox.put)
    inbox.wait(8)
    for index in range(2):
        error = inbox.ended.pop(("bad", index))
        assert isinstance(error, RequestError)
        assert error.found == words or re.match(words, error.found)
    assert set(inbox.ended.values()) == {"length"}
    assert case.engines.failure is None
    assert case.engines._loads == [0, 0]
    assert min(case.requests(0), case.requests(1)) >= 2


def test_matchers_are_made_where_a_request_runs(case: Case) -> None:
    """Also of a request that is aborted before, which never runs, and of a grammar that fails there."""
    made = threading.Event()

    def of(params: SamplingParams) -> tuple[Any, ...]:
        assert made.wait(10)
        if params.max_tokens == 1: raise RequestError("no grammar")
        return ("matcher",)
    case.far._matchers = cast(Any, SimpleNamespace(of=of, close=lambda: None))
    inbox = Inbox()
    def masked(name: str, most: int) -> Request:
        params = SamplingParams(allowed_token_ids=[3], temperature=1.0, max_tokens=most)
        return Request(name, [1], params, matchers=(cast(Any, "of rank 0"),))
    case.cores[0].gate.clear()      # so that they take turns
    for number in range(6):
        near, far = f"near{number}", f"far{number}"
        case.engines.submit(request(near), inbox.put)
        case.engines.submit(masked(far, 1 if number == 0 else 3), inbox.put)
    case.cores[0].gate.set()
    case.engines.abort("far1")
    assert case.requests(1) == 0
    # abort has come there before the matchers are made
    case.engines.others[0].ask("stats").result(10)
    made.set()
    inbox.wait(11)
    assert str(inbox.ended["far0", 0]) == "no grammar"
    assert case.far._making == set()
    assert [inbox.tokens[f"far{number}", 0] for number in range(1, 6)] == [[], *[[0, 1, 2]] * 4]
    assert all(each.matchers == ("matcher",) for each, _ in case.cores[1].running.values())
    assert case.requests(1) == 4


@pytest.mark.parametrize(("own", "follower", "replica"), [(9, 7, 5), (9, 5, 7), (5, 9, 7)])
def test_pages_are_those_that_all_ranks_have_room_for(own: int, follower: int, replica: int) -> None:
    (near1, far1), (near2, far2) = Pipe(), Pipe()
    ranks = ParallelRanks(cast(Any, None), Followers({1: near1}), [RemoteEngine(2, near2)], None)

    def rank(end: Any, pages: int, numbered: int) -> None:
        message = end.recv()
        name, arguments = (message[1], pickle.loads(message[3])) if numbered else message
        assert (name, arguments) == ("pages", ("plan", "budget", "draft")[:2 + numbered])
        end.send((*message[:numbered], True, pages))
    for each in ((far1, follower, 0), (far2, replica, 1)): threading.Thread(target=rank, args=each).start()
    how: Any = SimpleNamespace(draft="draft")
    assert ranks.pages(lambda: own, cast(Any, "plan"), cast(Any, "budget"), how) == 5
    for end in (near1, far1, far2): end.close()


def test_an_error_of_a_replica_ends_what_rank_0_does() -> None:
    near, far = Pipe()
    ranks = ParallelRanks(cast(Any, None), Followers({}), [RemoteEngine(2, near)], None)
    def rank() -> None: far.send((far.recv()[0], False, ConfigError("no room")))
    threading.Thread(target=rank).start()
    progress, failed = ranks.check_ranks(lambda done, total: None), threading.Event()
    ranks.followers.interrupt = lambda why: failed.set()

    def load() -> None:
        progress(0, 2)
        assert failed.wait(10)
        progress(1, 2)
    with pytest.raises(ConfigError, match="rank 2: no room"), ranks.together("open"):
        ranks.followers.together(load, "open")
    far.close()
