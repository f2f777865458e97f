"""The server's end of the connection to a program: csrc/host.c is the other.

Protocol: a program's call is the number of the function, the thread, and its argument words, in registers and
on the stack. The server answers with orders, each of four words and some followed by bytes, until it gives
the result. `Wire` has a method for each order. Device memory is a file that both have; offset i is at BASE +
i.
"""
from __future__ import annotations

import array
import socket
import struct
from dataclasses import dataclass

BASE, SIZE = 0x2000_0000_0000, 1 << 40      # of device memory: addresses that no allocator of a host takes
REGISTERS, STACK = 6, 12
RESULT, READ, WRITE, IN, OUT, MAP, UNMAP, CALL = range(8)
_CALL, _ORDER, _HELLO, _WORD = struct.Struct(f"<{2 + REGISTERS + STACK}Q"), struct.Struct("<4Q"), \
    struct.Struct("<3Q"), struct.Struct("<Q")


class ProcessExited(Exception):
    """The program has ended."""


@dataclass(frozen=True)
class Call:
    """A call of the function with this number in names.txt."""
    function: int
    thread: int
    registers: tuple[int, ...]
    stack: tuple[int, ...]


class Wire:
    """A connection. Addresses are of the program; `offset`s are in the file of device memory."""

    def __init__(self, connection: socket.socket, file: int) -> None:
        self.socket = connection
        self.pid, self.trampolines, self.printf = _HELLO.unpack(self._receive(_HELLO.size))
        connection.sendmsg([_WORD.pack(BASE) + _WORD.pack(SIZE)],
                           [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))])

    def _receive(self, nbytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < nbytes:
            try: got = self.socket.recv(min(nbytes - len(parts), 1 << 20))
            except ConnectionError: got = b""
            if not got: raise ProcessExited
            parts += got
        return bytes(parts)

    def _send(self, order: int, a: int = 0, b: int = 0, n: int = 0, data: bytes = b"") -> None:
        try: self.socket.sendall(_ORDER.pack(order, a, b, n) + data)
        except ConnectionError: raise ProcessExited from None

    def _answer(self) -> int: return int(_WORD.unpack(self._receive(_WORD.size))[0])

    def call(self) -> Call:
        """The next."""
        function, thread, *words = _CALL.unpack(self._receive(_CALL.size))
        return Call(function, thread, tuple(words[:REGISTERS]), tuple(words[REGISTERS:]))

    def result(self, value: int) -> None:
        """Ends a call."""
        self._send(RESULT, value & (1 << 64) - 1)

    def read(self, address: int, nbytes: int) -> bytes:
        if not nbytes: return b""
        self._send(READ, address, 0, nbytes)
        return self._receive(nbytes)

    def write(self, address: int, data: bytes) -> None:
        if data: self._send(WRITE, address, 0, len(data), data)

    def copy_in(self, offset: int, address: int, nbytes: int) -> bool:
        """From the program to device memory. False where the address is bad."""
        self._send(IN, address, BASE + offset, nbytes)
        return not self._answer()

    def copy_out(self, address: int, offset: int, nbytes: int) -> bool:
        """From device memory to the program. False where the address is bad."""
        self._send(OUT, address, BASE + offset, nbytes)
        return not self._answer()

    def map(self, offset: int, nbytes: int, there: bool = True) -> bool:
        """Device memory appears in the program's memory, at its own address, or disappears again."""
        self._send(MAP if there else UNMAP, BASE + offset, 0, nbytes)
        return not self._answer()

    def run(self, function: int, first: int, second: int = 0) -> None:
        """The program runs one of its functions."""
        self._send(CALL, function, first, second)
        self._answer()

    def text(self, address: int) -> str:
        """A string that ends with a zero byte."""
        found = bytearray()
        while b"\0" not in found: found += self.read(address + len(found), 64 - (address + len(found)) % 64)
        return found.partition(b"\0")[0].decode(errors="replace")
