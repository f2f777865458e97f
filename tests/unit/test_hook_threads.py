"""Every thread can compile: tinygrad's cache on disk has a connection for each."""
from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tinygrad import helpers

from tinygrad_nv import Tensor, hooks


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "CACHEDB", str(tmp_path / "cache.db"))
    monkeypatch.setattr(helpers, "_db_connection", None)
    monkeypatch.setattr(helpers, "_db_tables", set())


def in_thread(fn: Callable[[], Any]) -> Any:
    """What fn returns or raises in a thread of its own."""
    found: list[Any] = []
    def run() -> None:
        try: found.append(fn())
        except BaseException as error: found.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException): raise found[0]
    return found[0]


def test_another_thread_compiles_after_the_main_one():
    size = 1237  # of no kernel before
    assert (Tensor.ones(size).contiguous() + 1).sum().item() == 2 * size
    assert in_thread(lambda: (Tensor.ones(size + 2).contiguous() * 3).sum().item()) == 3 * (size + 2)
    assert (Tensor.ones(size + 4).contiguous() - 1).sum().item() == 0


def test_threads_see_what_others_put_there():
    helpers.diskcache_put("between", "main", 1)
    assert in_thread(lambda: helpers.diskcache_get("between", "main")) == 1
    in_thread(lambda: helpers.diskcache_put("between", "other", 2))
    assert helpers.diskcache_get("between", "other") == 2


def test_threads_write_at_the_same_time():
    def write(k: int) -> None:
        for i in range(20): helpers.diskcache_put("beside", f"{k} {i}", k * i)
    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert all(helpers.diskcache_get("beside", f"{k} {i}") == k * i for k in range(4) for i in range(20))


def test_put_back_tinygrad_has_one_connection_for_the_thread_that_opened_it():
    helpers.diskcache_put("own", "key", 1)
    hooks.remove_threads()
    try:
        with pytest.raises(sqlite3.ProgrammingError):
            in_thread(lambda: helpers.diskcache_get("own", "key"))
    finally: hooks.install_threads()
    assert in_thread(lambda: helpers.diskcache_get("own", "key")) == 1
