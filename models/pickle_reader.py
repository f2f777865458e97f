"""Reads the pickle of a state dict, and nothing else a pickle can be.

Protocol: `load(data, call, persistent)` returns the value of a pickle of protocol 2 to 5. `call(name, args)`
stands for a function by its name ("torch._utils._rebuild_tensor_v2"), `persistent(pid)` for a storage. Raises
`UnpicklingError`.

A pickle is a program for a stack machine. Python's own runs any of its instructions: a few bytes reserve
gigabytes for the memo, a tuple of itself twice over, 60 times, takes 2⁶⁰ steps to hash or to print, and BUILD
sets any attribute. Here keys are strings or integers, integers have 8 bytes, BUILD is ignored, and the number
of instructions is bounded: time and memory are.
"""
from __future__ import annotations

import collections
import struct
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

from tinygrad_nv.collection import pause

MAX_OPS = 2_000_000     # limit: instructions of data.pkl; torch.save writes about 30 for a tensor
MAX_NAME = 200          # characters of a function's name
U16, U32, U64, I32, F64 = (struct.Struct(each) for each in ("<H", "<I", "<Q", "<i", ">d"))
MARK = object()
CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
# instructions that push the next bytes as a number, and texts by the number of bytes of their length
NUMBERS = {ord("J"): I32, ord("M"): U16, ord("G"): F64}
TEXTS = {ord("X"): U32, 0x8d: U64}


class Name(str):
    """The name of a function or class, not a text."""


def load(data: bytes, call: Callable[[str, tuple[Any, ...]], Any], persistent: Callable[[Any], Any]) -> Any:
    """See above."""
    try:
        with pause(): return _Machine(data, call, persistent).run()
    except (IndexError, struct.error) as error: raise UnpicklingError("it ends early") from error


class _Machine:
    def __init__(self, data: bytes, call: Callable[[str, tuple[Any, ...]], Any],
                 persistent: Callable[[Any], Any]) -> None:
        self.data, self.call, self.persistent = data, call, persistent
        self.at, self.stack, self.memo = 0, list[Any](), dict[int, Any]()

    def run(self) -> Any:
        table, data, stack = INSTRUCTIONS, self.data, self.stack
        for _ in range(MAX_OPS):
            op = data[self.at]
            self.at += 1
            if op == STOP: return stack.pop()
            if (step := table.get(op)) is not None: step(self)
            elif op in CONSTANTS: stack.append(CONSTANTS[op])
            elif op in NUMBERS: stack.append(self.number(NUMBERS[op]))
            elif op in TEXTS: stack.append(self.text(self.number(TEXTS[op])))
            else: raise UnpicklingError(f"it has instruction {op:#04x}, which state dicts do not need")
        raise UnpicklingError(f"it has more than {MAX_OPS} instructions")

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > len(self.data) - self.at: raise UnpicklingError("it ends early")
        self.at += count
        return self.data[self.at - count:self.at]

    def number(self, kind: struct.Struct) -> Any: return kind.unpack(self.take(kind.size))[0]

    def byte(self) -> int: return self.take(1)[0]

    def text(self, count: int) -> str: return self.take(count).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        if (end := self.data.find(b"\n", self.at)) < 0: raise UnpicklingError("it ends early")
        found = self.take(end - self.at).decode("utf-8")
        self.at += 1
        return found

    def since_mark(self) -> list[Any]:
        """Takes what lies above the last mark."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is MARK:
                found = self.stack[at + 1:]
                del self.stack[at:]
                return found
        raise UnpicklingError("a mark is missing")

    def push(self, value: Any) -> None: self.stack.append(value)

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count: raise UnpicklingError("its stack is empty")
        self.stack[len(self.stack) - count:] = [tuple(self.stack[len(self.stack) - count:])]

    def short_int(self) -> None:
        if (count := self.byte()) > 8: raise UnpicklingError(f"it has an integer of {count} bytes")
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > MAX_NAME:
            raise UnpicklingError("it calls what has no name")
        self.push(Name(f"{module}.{name}"))

    def global_(self) -> None: self.name(self.line(), self.line())

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def reduce(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, Name) or not isinstance(args, tuple):
            raise UnpicklingError("it calls a value")
        self.push(collections.OrderedDict() if name == ORDERED and args == () else self.call(name, args))

    def build(self) -> None:
        self.stack.pop()
        if not isinstance(self.stack[-1], dict): raise UnpicklingError("it sets attributes")

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list): raise UnpicklingError("it appends to what is no list")
        self.stack[-1].extend(values)

    def set_items(self, items: list[Any]) -> None:
        if not isinstance(target := self.stack[-1], dict) or len(items) % 2:
            raise UnpicklingError("it sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):
                raise UnpicklingError(f"it has a key of type {type(key).__name__}")
            target[key] = value

    def last_two(self) -> list[Any]:
        """Takes a key and its value."""
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]

    def put(self, at: int) -> None: self.memo[at] = self.stack[-1]

    def get(self, at: int) -> None:
        if at not in self.memo: raise UnpicklingError(f"its memo lacks {at}")
        self.push(self.memo[at])

    def proto(self) -> None:
        if (found := self.byte()) > 5: raise UnpicklingError(f"it is of protocol {found}")


STOP, ORDERED = ord("."), "collections.OrderedDict"
INSTRUCTIONS: dict[int, Callable[[_Machine], object]] = {
    0x80: _Machine.proto, 0x95: lambda m: m.take(8),
    ord("("): lambda m: m.push(MARK), ord("0"): lambda m: m.stack.pop(), ord("1"): _Machine.since_mark,
    ord("2"): lambda m: m.push(m.stack[-1]), ord("K"): lambda m: m.push(m.byte()), 0x8a: _Machine.short_int,
    0x8c: lambda m: m.push(m.text(m.byte())), ord(")"): lambda m: m.push(()),
    ord("t"): lambda m: m.push(tuple(m.since_mark())), 0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2), 0x87: lambda m: m.tuple_of(3), ord("]"): lambda m: m.push([]),
    ord("l"): lambda m: m.push(m.since_mark()), ord("a"): lambda m: m.append([m.stack.pop()]),
    ord("e"): lambda m: m.append(m.since_mark()), ord("}"): lambda m: m.push({}),
    ord("s"): lambda m: m.set_items(m.last_two()), ord("u"): lambda m: m.set_items(m.since_mark()),
    ord("q"): lambda m: m.put(m.byte()), ord("r"): lambda m: m.put(m.number(U32)),
    0x94: lambda m: m.put(len(m.memo)), ord("h"): lambda m: m.get(m.byte()),
    ord("j"): lambda m: m.get(m.number(U32)), ord("c"): _Machine.global_, 0x93: _Machine.stack_global,
    ord("R"): _Machine.reduce, ord("b"): _Machine.build,
    ord("Q"): lambda m: m.push(m.persistent(m.stack.pop()))}
