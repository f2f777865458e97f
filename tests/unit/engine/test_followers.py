"""Ranks of an engine: the one that leads a replica, how they are started, and find each other; and steps
of one of several, captured and not run: which collectives they have, of how many bytes, and how many
rows."""
from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection
from queue import Queue
from typing import Any, cast

import numpy as np
import pytest
from tinygrad.uop.ops import UOp

from tests.support.engine.runner_case import LENGTH, PAGES, PLAIN, SIZE
from tinygrad_nv import Tensor, dtypes
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.dist.transports.library import KINDS
from tinygrad_nv.engine.executor import connections
from tinygrad_nv.engine.executor.followers import Followers
from tinygrad_nv.engine.executor.plan import device_of
from tinygrad_nv.engine.sampling import Filters
from tinygrad_nv.engine.worker.input_buffer import BatchShape
from tinygrad_nv.engine.worker.logit_rows import Rows
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.engine.worker.warm_up import FILTER_SETS, PART_FILTER_SETS, Job
from tinygrad_nv.errors import DistError, NVError, WeightError
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, VocabularyPart, local_config
from tinygrad_nv.runtime.note import note_of


@dataclass
class World:
    """Of ranks that are threads; `told` gets what each says."""
    rank: int = 0
    size: int = 2
    told: dict[int, Queue[bytes]] = field(default_factory=lambda: {rank: Queue() for rank in range(8)})

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.rank, self.size, self.rank, self.size, 0, "127.0.0.1", 1, "launch")

    def secret(self) -> bytes: return b"of the ranks"

    def exchange(self, name: str, own: bytes) -> list[bytes]:
        self.told[self.rank].put(own)
        found = []
        for rank in range(self.size):
            found.append(self.told[rank].get(timeout=10))
            self.told[rank].put(found[-1])
        return found


def test_other_processes_are_no_ranks() -> None:
    """Those that know no secret, and those that say nothing, which no rank waits for."""
    world, began = World(), time.monotonic()
    with ThreadPoolExecutor(1) as waits:
        world.told[1].put(b"")
        found = waits.submit(connections.connect, cast(Any, world), 2)
        host, port = world.told[0].get(timeout=10).decode().split()
        world.told[0].put(f"{host} {port}".encode())
        with socket.create_connection((host, int(port))):
            socket.create_connection((host, int(port))).close()
            with pytest.raises(AuthenticationError): Client((host, int(port)), authkey=b"another")
            with Client((host, int(port)), authkey=world.secret()) as rank:
                rank.send(1)
                own = found.result(timeout=10).followers[1]
                assert time.monotonic() - began < connections.HELLO_S
                own.send("open")
                assert rank.recv() == "open"
                own.close()


def test_ranks_of_replicas_meet() -> None:
    """Each with the rank that leads it, and those with rank 0."""
    worlds = [World(rank, 6) for rank in range(6)]
    for each in worlds: each.told = worlds[0].told
    with ThreadPoolExecutor(6) as ranks:
        found = [*ranks.map(lambda world: connections.connect(cast(Any, world), 3), worlds)]
    assert [(list(each.followers), list(each.leaders)) for each in found] == [
        ([1, 2], [3]), ([], []), ([], []), ([4, 5], []), ([], []), ([], [])]
    for leads, rank in ((0, 1), (0, 2), (0, 3), (3, 4), (3, 5)):
        every = found[leads].followers | found[leads].leaders
        every[rank].send(rank)
        assert (up := found[rank].up) is not None
        assert up.recv() == rank


@pytest.fixture
def two() -> tuple[Followers, list[Connection], list[DistError]]:
    """Followers 1 and 2, their ends, and what interrupted this rank."""
    (own1, first), (own2, second) = Pipe(), Pipe()
    interrupted: list[DistError] = []
    return Followers({1: own1, 2: own2}, interrupted.append), [first, second], interrupted


def answers(end: Connection, fine: bool, answer: object) -> Callable[[], None]:
    def run() -> None:
        assert end.recv() == ("open", (7,))
        end.send((fine, answer))
    return run


def test_what_ranks_do_together(two: tuple[Followers, list[Connection], list[DistError]]) -> None:
    followers, ends, _ = two
    for number, end in enumerate(ends): threading.Thread(target=answers(end, True, number)).start()
    assert followers.together(lambda: "own", "open", 7) == ("own", [0, 1])


@pytest.mark.parametrize("rank", [1, 2])
def test_an_error_of_another_rank_ends_what_this_one_waits_for(
        two: tuple[Followers, list[Connection], list[DistError]], rank: int) -> None:
    """At once, though the other one does not answer, and this rank waits for it, too."""
    followers, ends, interrupted = two
    error = WeightError("a tensor is missing", "all", "download it")
    threading.Thread(target=answers(ends[rank - 1], False, error)).start()
    waits = threading.Event()
    followers.interrupt = lambda why: (interrupted.append(why), waits.set())[0]

    def task() -> None:
        assert waits.wait(10)
        raise interrupted[0]
    with pytest.raises(WeightError, match=f"rank {rank}: a tensor is missing\n  expected: all"):
        followers.together(task, "open", 7)
    assert interrupted[0].found == f"rank {rank}: a tensor is missing"


def test_an_error_of_this_rank_waits_for_no_other(
        two: tuple[Followers, list[Connection], list[DistError]]) -> None:
    followers, _, interrupted = two
    def task() -> None: raise MemoryError("no room")
    with pytest.raises(MemoryError): followers.together(task, "open", 7)
    assert [each.found for each in interrupted] == ["it ended with MemoryError: no room"]
    with pytest.raises(DistError, match="no room"): followers.tell("launch")


def test_a_rank_that_is_gone(two: tuple[Followers, list[Connection], list[DistError]]) -> None:
    followers, ends, _ = two
    ends[1].close()
    with pytest.raises(NVError, match="rank 2 has ended in the midst of its work"):
        followers.together(lambda: None, "open", 7)


@pytest.mark.parametrize(("device", "local", "visible", "wanted"), [
    ("CUDA", 1, None, "CUDA:1"), ("CUDA:2", 1, "0,1,2,3", "CUDA:3"), ("CUDA", 1, "1", "CUDA"),
    ("CPU", 1, None, "CPU"), ("EMU", 1, None, "EMU")])
def test_ranks_of_a_host_have_a_gpu_each(device: str, local: int, visible: str | None, wanted: str) -> None:
    assert device_of(cast(Any, World(local, 4)), device, visible) == wanted


PROGRAM = """
import sys
from tinygrad_nv.engine.executor import connections
from tinygrad_nv.errors import DistError
connections.COMMAND = (sys.executable, "-c", "import sys; sys.exit('no such library')")
try: connections.open_ranks(2, 1)
except DistError as error: print(error.found.splitlines()[-1], error.ranks)
"""


def test_a_rank_that_ends_before_it_has_connected() -> None:
    """Opening the ranks ends with its words at once, and not when the store waits no longer."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=40,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "  | no such library (1,)\n"


VOCABULARY, PART, RANKS, SAMPLES = 1001, 504, 2, 16
GREEDY, DRAWN, APART, ORDERED, ALL = PART_FILTER_SETS
PAIRS = 8 * SAMPLES * RANKS
ROWS = 4 * PART * SAMPLES   # of each rank its share of the other's


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    """The second of two ranks, whose transport is not there."""
    whole = replace(PLAIN, vocab_size=VOCABULARY, num_layers=1, ropes=PLAIN.ropes[:1], windows=(None,))
    group = Group("0-1", (0, 1), 1, 1.0)
    model = Llama(local_config(whole, RANKS), dtypes.float32, "CPU", parallel=Parallel(group, whole))
    made = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=16, max_len=LENGTH, max_batched_tokens=16)
    yield made
    made.close()


def collectives(runner: ModelRunner, job: Job) -> list[tuple[str, int]]:
    """The kinds of a step's, and the bytes of their results."""
    runner.prepare(job)
    if isinstance(job, BatchShape): made = runner.steps[job][1]
    elif isinstance(job, Rows): made = runner.logit_rows.steps[job]     # type: ignore[union-attr]
    else: made = runner.samplers[job]
    calls = [call for each in made.jit.captured.linear.src for call in inner(each)]
    notes = [(note.template, call.src[1].buffer.nbytes) for call in calls if (note := note_of(call.src[0]))]
    return [each for each in notes if each[0] in KINDS]


def inner(call: UOp) -> list[UOp]:
    """The launches of a graph, or the one that it is."""
    graph = call.src[0]
    return list(graph.src[0].src) if graph.arg == "graph" else [call]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("filters", "found"), [
    (GREEDY, [PAIRS]), pytest.param(DRAWN, [PAIRS], marks=pytest.mark.slow),
    (APART, [PAIRS // 2, PAIRS])], ids=["greedy", "drawn", "apart"])
def test_what_a_sampler_gathers(runner: ModelRunner, filters: Filters, found: list[int]) -> None:
    """8 bytes a row and rank, 4 more for min-p."""
    assert collectives(runner, (SAMPLES, filters)) == [("all_gather", each) for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("filters", [ORDERED, pytest.param(ALL, marks=pytest.mark.slow)],
                         ids=["ordered", "all"])
def test_rows_are_shared_out_where_order_is_needed(runner: ModelRunner, filters: Filters) -> None:
    """Of one row all have all; processors may differ in what they make of it."""
    assert collectives(runner, (SAMPLES, filters)) == [("all_to_all", ROWS), ("all_gather", 4 * SAMPLES)]
    if filters == ORDERED: return
    assert collectives(runner, (1, filters)) == [("all_gather", 4 * PART * RANKS), ("broadcast", 4)]


def test_a_step_gathers_no_logits(runner: ModelRunner) -> None:
    shape = BatchShape.at_least(SAMPLES, 0, SAMPLES, True)
    assert collectives(runner, shape) == [("all_reduce", 4 * SAMPLES * PLAIN.hidden_size)] * 3


def test_rows_are_gathered_of_samples_that_ask(runner: ModelRunner) -> None:
    """The rank that answers no requests reads none."""
    assert not runner.output_buffer.answers
    assert collectives(runner, Rows(SAMPLES, 8)) == [("all_gather", 4 * PART * 8 * RANKS)]


def test_a_rank_has_its_part_of_memory(runner: ModelRunner) -> None:
    state, output = runner.sampler_state, runner.output_buffer
    assert output.logits(SAMPLES).shape == (SAMPLES, PART)
    assert state.counts.shape == state.bias.shape == (16, PART)
    # words that have tokens 504 … 1007
    assert runner.masks.tensors(SAMPLES)["masks"].shape == (SAMPLES, 32 - 15)


@pytest.mark.parametrize("rows", [PART, VOCABULARY - PART], ids=["padded", "quantised"])
def test_what_is_beyond_the_vocabulary_is_never_chosen(rows: int) -> None:
    """Of a matrix with rows of anything there, or without them; and of a rank that has no token."""
    group = Group("0-1", (0, 1), 1, 1.0)
    part = VocabularyPart(group, VOCABULARY, range(PART, 2 * PART))
    logits = np.arange(3 * rows, dtype=np.float32).reshape(1, 3, rows)
    found = part.pad_logits(Tensor(logits)).numpy()
    np.testing.assert_array_equal(found[..., :part.count], logits[..., :part.count])
    assert part.count == 497
    assert found.shape == (1, 3, PART)
    assert (found[..., 497:] == -np.inf).all()
    none = VocabularyPart(group, 500, range(PART, 2 * PART))
    assert (none.pad_logits(Tensor(logits[..., :rows])).numpy() == -np.inf).all()


def test_filters_that_need_no_order_have_a_sampler_of_their_own(runner: ModelRunner) -> None:
    assert [each.ordering for each in PART_FILTER_SETS] == [False, False, False, True, True]
    jobs = [job for some in runner.jobs for job in some]
    for shape in (job for job in jobs if isinstance(job, BatchShape)):
        assert all((shape.samples, each) in jobs for each in PART_FILTER_SETS)
        assert Rows(shape.samples, shape.samples) in jobs
    steps = copy(runner.sampler_steps)
    steps.steps = dict.fromkeys(((4, each) for each in PART_FILTER_SETS), cast(Any, None))
    for each in (Filters(draw=True, min_p=True), Filters(penalty=True, mask=True), Filters(bias=True)):
        assert steps.serving(each, 4) == APART
    assert steps.serving(Filters(draw=True, top_p=True), 4) == ORDERED
    assert steps.serving(Filters(draw=True, top_k=True, bias=True), 4) == ALL
    assert set(FILTER_SETS) < set(PART_FILTER_SETS)
