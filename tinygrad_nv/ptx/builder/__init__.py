"""Kernels written in Python, as readable PTX.

Protocol: `kb = Kernel("add", arch="sm_90a", threads=128)`, then parameters (`kb.param`, `kb.pointer`,
`kb.tensor_map`), registers (`kb.reg`), shared memory (`kb.shared`, `kb.mbarriers`) and instructions:
operators of `Value`, the methods of `hopper.py`, and `kb.emit(opcode, *operands)` for every row of `isa/`.
Control flow is structured: `with kb.if_(p)`, `kb.else_()`, `kb.loop(0, n) as i`, `kb.while_(condition)`.
`kb.ptx()` gives the text, `kb.dynamic_smem` the bytes of dynamic shared memory to launch it with.

Each instruction is checked against `isa/` when it is emitted. An error is a `PTXError` that names the
caller's file and line. Operands of `emit` are values, places, shared memory, Python numbers, lists (`{a,
b}`), `PairOperand`, `SINK` and labels.

Shared memory is static up to 48 KiB, else dynamic: one array at module scope.
"""
from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from tinygrad_nv.ptx.builder.core import PREFIXES, CodeBlock
from tinygrad_nv.ptx.builder.hopper import Hopper
from tinygrad_nv.ptx.builder.values import (
    SINK,
    Barriers,
    Label,
    MemoryOperand,
    PairOperand,
    Shared,
    SinkOperand,
    Value,
)

__all__ = ["SINK", "Barriers", "Kernel", "Label", "MemoryOperand", "PairOperand", "Shared", "Value"]


class Kernel(Hopper):
    """A kernel under construction, and its text."""

    def ptx(self) -> str:
        """The module's text."""
        version = f".version {self.version[0]}.{self.version[1]}"
        out = [version, f".target {self.arch}", ".address_size 64", ""]
        if self.dynamic_smem:
            align = max(16, *(tile.align for tile in self.tiles))
            out += [f".extern .shared .align {align} .b8 {self.name}_smem[];", ""]
        parameters = ",\n".join(f"    {text}" for text in self.parameters)
        out.append(f".visible .entry {self.name}(" + (f"\n{parameters})" if parameters else ")"))
        out += self._directives()
        out += ["{", *(f"    {line}" for line in self._declarations())]
        code = [*self._lines(self.head, 1), *self._lines(self.body, 1)]
        return "\n".join([*out, "", *code, "    ret;", "}", ""])

    def _directives(self) -> list[str]:
        out = [f".reqntid {', '.join(map(str, self.threads))}"]
        if self.min_ctas: out.append(f".minnctapersm {self.min_ctas}")
        if self.max_registers: out.append(f".maxnreg {self.max_registers}")
        if self.cluster: out.append(f".reqnctapercluster {', '.join(map(str, self.cluster))}")
        return out

    def _declarations(self) -> list[str]:
        out = [f".reg .{kind} %{PREFIXES[kind]}<{count}>;" for kind, count in self.registers.items()]
        out += [f".reg .{kind} %{name};" for name, kind in self.named.items()]
        if self.dynamic_smem:
            return out + [f"// {self.name}_smem+{t.start}: {t.name}[{t.nbytes}]" for t in self.tiles]
        return out + [f".shared .align {t.align} .b8 {t.name}[{t.nbytes}];" for t in self.tiles]

    def _lines(self, block: CodeBlock, depth: int) -> Iterator[str]:
        indent = "    " * depth
        for line in block.lines:
            if isinstance(line, tuple):
                opcode, operands = line
                listed = ", ".join([self._text(each, opcode) for each in operands])
                yield f"{indent}{opcode} {listed};" if listed else f"{indent}{opcode};"
            elif isinstance(line, str): yield indent + line
            else: yield from self._lines(line, depth + 1)

    def _text(self, value: Any, opcode: str) -> str:
        """An operand in PTX; floats by their bits."""
        if type(value) is Value: return f"!{value.name}" if value.negated else value.name
        if isinstance(value, float):
            if "f64" in opcode: return f"0d{struct.unpack('>Q', struct.pack('>d', value))[0]:016X}"
            return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"
        if isinstance(value, bool | int): return str(int(value))
        if isinstance(value, SinkOperand): return "_"
        if isinstance(value, Shared): return self._symbol(value, 0)
        if isinstance(value, Label): return f"[{value.name}]" if opcode.startswith("ld.param") else value.name
        if isinstance(value, list | tuple): return "{" + ", ".join(self._text(v, opcode) for v in value) + "}"
        if isinstance(value, PairOperand): return f"{self._text(value.first, opcode)}|{value.second}"
        if not isinstance(value, MemoryOperand): return str(value)
        if isinstance(value.base, Shared): return f"[{self._symbol(value.base, value.offset)}]"
        offset = f"+{value.offset}" if value.offset else ""
        places = ", ".join(self._text(each, opcode) for each in value.coordinates)
        return f"[{value.base}{offset}{f', {{{places}}}' if places else ''}]"

    def _symbol(self, tile: Shared, offset: int) -> str:
        name, at = (f"{self.name}_smem", tile.start + offset) if self.dynamic_smem else (tile.name, offset)
        return f"{name}+{at}" if at else name
