"""Descriptors of collectives as memory that steps on disk use (step_store.py).

Protocol: a step that was kept names the descriptors that it calls collectives with. `Named` has those of this
process by the same names, and makes them when they are asked for.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from tinygrad import Tensor
from tinygrad.device import Buffer

from tinygrad_nv.dist.group import DESCRIPTOR, Group


class Named(dict[str, Buffer]):
    """Buffers by name, and the descriptors of groups."""

    def __init__(self, buffers: Mapping[str, Buffer], groups: Sequence[Group]) -> None:
        super().__init__(buffers)
        self.groups = {each.name: each for each in groups}
        for group in groups:
            for name, tensor in group.descriptors_by_name().items(): self[name] = _buffer(tensor)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or str(name).split("/")[:2][0] == DESCRIPTOR

    def __missing__(self, name: str) -> Buffer:
        words = name.split("/")
        if words[0] != DESCRIPTOR or words[1] not in self.groups: raise KeyError(name)
        self[name] = made = _buffer(self.groups[words[1]].descriptor_of(name))
        return made


def _buffer(tensor: Tensor) -> Buffer: return cast(Buffer, tensor.uop.buffer)
