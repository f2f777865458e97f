"""What is said where ranks cannot be started or cannot find each other. tests/unit/dist has what the ranks
themselves say: of ports, world sizes, and ranks that do not come, hang, differ or are lost."""
from __future__ import annotations

import socket

import pytest


@pytest.mark.parametrize(("words", "said"), [
    (("-n", "2"), ("no COMMAND", "tinygrad-nv launch -n 2 python train.py")),
    (("-n", "0", "true"), ("-n 0", "1 or more ranks")),
    (("-n", "2", "no-such-program"), ("'no-such-program' cannot be started: No such file", "in PATH")),
    (("-n", "2", "/"), ("'/' cannot be started: Permission denied",)),
    (("-n", "2", "--nodes", "2", "true"), ("--nodes 2 without --master-addr and --master-port",
                                           "the host with --node-rank 0")),
    (("-n", "2", "--nodes", "2", "--node-rank", "2", "true"), ("--node-rank 2 of --nodes 2", "0 to 1")),
    (("-n", "2", "--nodes", "0", "true"), ("--node-rank 0 of --nodes 0", "1 or more hosts")),
    (("-n", "2", "--master-port", "70000", "true"), ("--master-port 70000", "1 to 65535")),
    (("-n", "2", "--grace", "-1", "true"), ("--grace -1", "seconds, 0 or more")),
    (("-n", "2", "--log-dir", "/proc/none", "true"), ("the system refused", "/proc/none"))])
def test_launches_that_cannot_be(words: tuple[str, ...], said: tuple[str, ...], command):
    command("launch", *words).refused(*said)


def test_a_port_that_is_taken(command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command("launch", "-n", "2", "--master-port", port, "true").refused(
            f"port {port} of 127.0.0.1 is taken", "a free port for the store of rank 0",
            "choose another --master-port")


@pytest.mark.parametrize("text", ["abc", "8", ""])
def test_numbers_that_are_none(text: str, command):
    assert command("launch", "-n", text, "-n").code == 2
