"""A cache of each device's renderer: tinygrad chooses it anew at each call, in 17 µs."""
from __future__ import annotations

import weakref

from tinygrad.device import Compiled, Device
from tinygrad.helpers import DEV, Target
from tinygrad.renderer import Renderer

_chosen: weakref.WeakKeyDictionary[Compiled, tuple[list[Target], Renderer]] = weakref.WeakKeyDictionary()


def renderer_of(name: str) -> Renderer:
    """`Device[name].renderer`. It depends on DEV; the rest of the environment tinygrad reads once."""
    device: Compiled = Device[name]
    asked = list(DEV.value)
    known = _chosen.get(device)
    if known is None or known[0] != asked: known = _chosen[device] = asked, device.renderer
    return known[1]
