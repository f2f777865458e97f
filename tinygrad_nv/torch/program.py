"""A graph of ATen that is called with torch's tensors: one capture for each set of shapes.

Protocol. `Program(plan, eager)` returns the plan's results. Its first call with new shapes captures the graph
(captured.py), further ones replay it. More sets of shapes than LIMIT, and graphs that tinygrad cannot
compile, are computed by torch, operator by operator (`eager`); the reason is logged and kept in `reasons`.
With NV_STRICT=1 a graph that does not compile raises.
"""
from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from tinygrad_nv import config
from tinygrad_nv.torch.captured import Captured, Plan

LIMIT = 32      # captures of a graph: each takes a second or more, and memory for its intermediates
log = logging.getLogger("tinygrad_nv.torch")
_lock = threading.RLock()   # one graph at a time is recorded, and has its addresses set


class Program:
    """A graph, its captures, and why torch computes it where it does."""

    def __init__(self, plan: Plan, eager: GraphModule) -> None:
        self.plan, self.eager = plan, eager
        self.captures: dict[Any, Captured] = {}
        self.reasons: list[str] = []
        self.last: Captured | None = None

    def __call__(self, *args: Any) -> list[Any]:
        with _lock:
            found = self.last if self.last is not None and self.last.fits(args) else self._find(args)
            if found is not None: return found(args)
        return self._by_torch(args)

    def _find(self, args: Sequence[Any]) -> Captured | None:
        """The capture for arguments, made if need be; None if torch has to compute them."""
        key = self.plan.key(args)
        if key not in self.captures:
            if len(self.captures) >= LIMIT: self._because(f"more than {LIMIT} sets of shapes")
            elif (made := self._capture(args)) is not None: self.captures[key] = made
        found = self.captures.get(key)
        if found is not None: self.last = found
        return found

    def _capture(self, args: Sequence[Any]) -> Captured | None:
        try: return Captured(self.plan, args)
        except Exception as error:
            if config.get("NV_STRICT"): raise
            self._because(" ".join(str(error).split()) or type(error).__name__)
            return None

    def _because(self, reason: str) -> None:
        if reason in self.reasons: return
        self.reasons.append(reason)
        log.warning("a graph of %d nodes is computed by torch: %s", len(self.eager.graph.nodes), reason)

    def _by_torch(self, args: Sequence[Any]) -> list[Any]:
        made = list(self.eager(*args))
        overwrite(args, made, self.plan.writes)
        return made


def overwrite(args: Sequence[Any], made: Sequence[Any], writes: Mapping[int, int]) -> None:
    """Writes results that torch computed, which have memory of their own, into arguments."""
    for k, argument in writes.items(): args[argument].copy_(made[k])
