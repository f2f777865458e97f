"""The store: values, waiting, what is said of ranks that do not come, differ or are lost."""
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.support.dist.dist_case import SOON_S, close, free_port, opened, ranks_of, together
from tinygrad_nv.dist import rendezvous
from tinygrad_nv.dist.frames import HEADER, MAGIC, BadFrame, Frame, Kind, name_ranks, take, unpack_list
from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.dist.rendezvous import ports
from tinygrad_nv.dist.store import Store
from tinygrad_nv.dist.store_server import HELLO_S, Server
from tinygrad_nv.errors import DistError, DistTimeout


@pytest.fixture
def stores():
    made = opened(ranks_of(3))
    assert all(isinstance(store, Store) for store in made), made
    yield made
    close(made)


def lose(store: Store) -> None:
    """What the death of its process does."""
    store._socket.shutdown(socket.SHUT_RDWR)


def test_values(stores):
    first, second, third = stores
    first.set("a", b"\0\1" * 3)
    assert second.get("a", 1) == third.get("a", 1) == b"\0\1" * 3
    assert [store.add("n", 5) for store in stores] == [5, 10, 15]
    assert first.add("n", -16) == -1
    big = bytes(3 << 20)
    third.set("big", big)
    assert first.get("big", 5) == big
    with pytest.raises(DistError, match="'a' has 6 bytes"): first.add("a", 1)
    assert first.get("a", 1) == b"\0\1" * 3


def test_get_waits_until_a_rank_sets(stores):
    waits = threading.Timer(0.05, stores[2].set, ("late", b"x"))
    waits.start()
    assert together([lambda store=store: store.get("late", 5) for store in stores]) == [b"x"] * 3
    waits.join()
    with pytest.raises(DistTimeout, match=r"no rank set 'never' in 0\.02 s"): stores[1].get("never", 0.02)


def test_all_gather_is_by_rank_and_a_name_may_be_used_again(stores):
    for turn in (b"x", b"y"):
        values = [(store, turn * store.ranks.rank) for store in stores]
        calls = [lambda store=store, value=value: store.all_gather("g", value, 5) for store, value in values]
        assert together(calls) == [[b"", turn, turn * 2]] * 3


def test_a_barrier_waits_for_all_and_says_who_is_missing(stores):
    began = time.monotonic()
    found = together([lambda store=store: store.barrier("b", 0.05) for store in stores[:1]])
    assert time.monotonic() - began < SOON_S
    assert isinstance(found[0], DistTimeout)
    assert found[0].ranks == (1, 2)
    assert "ranks 1 and 2 of 3 did not come to 'b' in 0.05 s (all are connected)" in str(found[0])


def test_a_lost_rank_is_told_to_all_at_once(stores):
    seen = {0: threading.Event(), 2: threading.Event()}
    told = []
    for rank, event in seen.items():
        stores[rank].watch(lambda lost, why, rank=rank, event=event: (told.append((rank, lost, why)),
                                                                      event.set()))
    threading.Timer(0.05, lose, (stores[1],)).start()
    began = time.monotonic()
    found = together([lambda: stores[0].barrier("b", 200), lambda: stores[2].get("k", 200)])
    assert time.monotonic() - began < SOON_S
    for error in found:
        assert isinstance(error, DistError)
        assert error.ranks == (1,)
        assert "rank 1 was lost: its process ended without closing the store (process" in str(error)
    assert all(event.wait(SOON_S) for event in seen.values())
    assert sorted(each[:2] for each in told) == [(0, 1), (2, 1)]
    with pytest.raises(DistError, match="rank 1 was lost"): stores[0].barrier("after", 200)
    stores[0].set("still", b"works")
    assert stores[2].get("still", 1) == b"works"
    late = threading.Event()
    stores[0].watch(lambda *_: late.set())
    assert late.wait(SOON_S), "a rank that was lost before"


def test_an_abort_has_its_reason(stores):
    stores[2].abort("out of memory in layers.3")
    with pytest.raises(DistError, match=r"rank 2 was lost: out of memory in layers.3 \(process"):
        stores[1].barrier("b", 200)


def test_the_loss_of_rank_0_is_told(stores):
    told = threading.Event()
    stores[1].watch(lambda rank, why: rank == 0 and told.set())
    threading.Timer(0.05, lambda: [lose_peer(stores[0].server, rank) for rank in (1, 2)]).start()
    with pytest.raises(DistError, match="rank 0 was lost: its process ended"): stores[1].get("k", 200)
    assert told.wait(SOON_S)


def lose_peer(server, rank):
    server.of_rank[rank].socket.shutdown(socket.SHUT_RDWR)


def test_a_rank_that_left_is_not_lost_but_missed(stores):
    told = []
    stores[0].watch(lambda *what: told.append(what))
    stores[1].close()
    with pytest.raises(DistError, match="rank 1 closed the store before 'b'"): stores[0].barrier("b", 200)
    with pytest.raises(DistError, match="rank 1 closed the store before 'b'"): stores[2].barrier("b", 200)
    with pytest.raises(DistError, match="the store is closed"): stores[1].set("a", b"")
    assert told == []
    assert stores[0].left == {1}


def test_an_exception_inside_with_is_the_reason():
    first, second = opened(ranks_of(2))
    def fails():
        with second: raise ValueError("what went wrong")
    with pytest.raises(ValueError, match="what went wrong"): fails()
    with pytest.raises(DistError, match="rank 1 was lost: it ended with ValueError: what went wrong"):
        first.barrier("b", 200)
    first.close()


def test_alone_there_is_a_store_too():
    with Store.open(Ranks.from_environment({}), 5) as store:
        store.set("a", b"b")
        assert store.all_gather("g", store.get("a"), 1) == [b"b"]


# **** rendezvous ****

def test_ranks_that_never_come_are_named():
    began = time.monotonic()
    found = opened(ranks_of(4)[::2], 1.5)
    assert time.monotonic() - began < SOON_S
    assert all(isinstance(each, DistError) for each in found), found
    words = [str(each) for each in found]
    assert all("ranks 1 and 3 of 4 did not come to 'rendezvous' in 1." in each for each in words), words
    assert all("(ranks 1 and 3 never connected)" in each for each in words), words


def test_a_rank_0_that_never_comes_is_named():
    rank = ranks_of(2)[1]
    with pytest.raises(DistTimeout) as caught: Store.open(rank, 0.1)
    assert caught.value.ranks == (0,)
    for words in ("rank 1 did not reach the store of rank 0 at 127.0.0.1", str(rank.master_port), "0.1 s",
                  "Connection refused"):
        assert words in str(caught.value)


def test_two_ranks_of_one_number():
    ranks = ranks_of(3)
    found = opened([ranks[0], ranks[1], ranks[1]])
    for error in found:
        assert isinstance(error, DistError), found
        assert "two processes say that they are rank 1: process" in str(error)
        assert error.ranks == (1,)


def test_a_slow_rank_hears_why_its_group_ended(monkeypatch: pytest.MonkeyPatch):
    """It asks for the first time when rank 0 has ended, which is not the cause."""
    begin = Store.barrier
    def wait_for_rank_0(store: Store, *given: object) -> None:
        end = time.monotonic() + SOON_S
        while store.ranks.rank and 0 not in store.lost and time.monotonic() < end: time.sleep(0.001)
        begin(store, *given)
    monkeypatch.setattr(Store, "barrier", wait_for_rank_0)
    ranks = ranks_of(3)
    for error in opened([ranks[0], ranks[1], ranks[1]]):
        assert isinstance(error, DistError), error
        assert "two processes say that they are rank 1: process" in str(error)
        assert error.ranks == (1,)


def test_another_world_size():
    first, second = ranks_of(2)
    found = opened([first, replace(second, world_size=3, local_world_size=3)])
    for error in found:
        assert isinstance(error, DistError), found
        assert "has WORLD_SIZE=3, rank 0 has 2" in str(error)
        assert error.ranks == (1,)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rank = ranks_of(2, taken.getsockname()[1])[0]
        with pytest.raises(DistError) as caught: Store.open(rank, 5)
    assert f"rank 0: port {rank.master_port} of 127.0.0.1 is taken" in str(caught.value)
    assert "set MASTER_PORT to another port" in caught.value.fix


def test_addresses_that_cannot_be():
    rank = Ranks(0, 2, 0, 1, 0, "203.0.113.77", free_port(), "launch")     # of no host
    with pytest.raises(DistError, match=r"MASTER_ADDR=203\.0\.113\.77 is no address of this host"):
        Store.open(rank)
    with pytest.raises(DistError, match=r"MASTER_ADDR=127\.0\.0\.1 is 127\.0\.0\.1, which other hosts"):
        Store.open(replace(rank, master_addr="127.0.0.1"))


# **** torchrun's ports ****

def test_ports_under_torchrun():
    rank = replace(ranks_of(2, 29500)[0], launcher="torchrun")
    found = ports(rank)
    assert len(set(found)) == 8
    assert 29500 not in found
    assert all(10000 <= port < 32768 for port in found)
    assert ports(replace(rank, launcher="srun")) == (29500,)


def test_groups_on_one_host_pass_ports_that_others_have(monkeypatch):
    """The first port is a silent program's, the second one of another group's."""
    own = [free_port() for _ in range(3)]
    monkeypatch.setattr(rendezvous, "ports", lambda ranks: tuple(own))
    monkeypatch.setattr(rendezvous, "TRY_S", 0.5)
    with socket.create_server(("127.0.0.1", own[0])):
        group = [replace(each, launcher="torchrun") for each in ranks_of(2, 29500)]
        other = [replace(each, master_port=29501) for each in group]
        stores, others = opened(group), opened(other)
        assert all(isinstance(store, Store) for store in stores + others)
        assert [each[0].server.listener.getsockname()[1] for each in (stores, others)] == own[1:]
        stores[0].set("a", b"1")
        with pytest.raises(DistTimeout): others[1].get("a", 0.02)
        close(stores + others)


# **** strangers ****

def test_a_process_without_the_token_is_refused(monkeypatch):
    first, second = ranks_of(2)
    tokens = {0: "own", 1: "other"}
    monkeypatch.setattr("tinygrad_nv.dist.store.token_of", lambda ranks: tokens[ranks.rank])
    found = opened([first, second], 1.5)
    assert isinstance(found[0], DistTimeout)
    assert isinstance(found[1], DistTimeout)
    assert "another group's store has this port" in str(found[1])


def test_a_store_without_the_token_is_not_believed():
    """It greets, and welcomes whatever it is told, until no rank has come for a while."""
    with socket.create_server(("127.0.0.1", 0)) as false:
        false.settimeout(2)

        def serve():
            with suppress(TimeoutError):
                while True:
                    with false.accept()[0] as connection:
                        connection.sendall(Frame(Kind.GREETING, 0, "", MAGIC + bytes(32)).pack())
                        connection.recv(1 << 16)
                        connection.sendall(Frame(Kind.WELCOME, 0, "", bytes(32)).pack())

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(DistTimeout, match="the port is another program's"):
            Store.open(ranks_of(2, false.getsockname()[1])[1], 1.5)
        thread.join()


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 16), b"", b"\2" + b"\xff" * 10,
                                  HEADER.pack(Kind.HELLO, 0, 0, 1 << 20)])
def test_what_a_stranger_sends_harms_none(stores, text: bytes):
    with socket.create_connection(stores[0].server.listener.getsockname(), HELLO_S / 2) as stranger:
        stranger.sendall(text)
        if text: assert take_all(stranger).find(MAGIC) > 0
    stores[0].set("a", b"1")
    assert stores[1].get("a", 1) == b"1"
    assert stores[1].lost == {}


def test_all_are_told_before_a_rank_that_ends_is_answered(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 exits with the answer, and the store with it."""
    told, tell = [], Server._tell_loss
    monkeypatch.setattr(Server, "_tell_loss",
                        lambda *args: (time.sleep(0.1), tell(*args), told.append(args[2]))[1])
    stores = opened(ranks_of(2))
    stores[0].abort("it is tired")
    assert told == [0]
    close(stores)


def take_all(connection: socket.socket) -> bytes:
    """Until the other side closes."""
    out = bytearray()
    try:
        while data := connection.recv(1 << 16): out += data
    except ConnectionResetError: pass
    return bytes(out)


def test_frames():
    frame = Frame(Kind.SET, 7, "schlüssel", b"\0" * 5)
    received = bytearray(frame.pack() * 2)
    assert [take(received), take(received), take(received)] == [frame, frame, None]
    assert take(bytearray(frame.pack()[:-1])) is None
    for wrong in (b"\x63" + frame.pack()[1:], Frame(Kind.SET, 0, "", bytes(9)).pack()):
        with pytest.raises(BadFrame): take(bytearray(wrong), 8)
    with pytest.raises(BadFrame): take(bytearray(frame.pack().replace("ü".encode(), b"\xff\xff")))
    assert unpack_list(b"") == []


def test_names_of_ranks():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks((1, 2, 5)) == "ranks 1, 2 and 5"
    assert name_ranks(list(range(12))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
