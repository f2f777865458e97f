"""How long steps take, so that the next one is scheduled no earlier than it has to be.

Protocol: `note_launch(tokens, began_s)` notes a step of so many tokens, whose scheduling began at `began_s`;
`note_end()`, the end of the oldest one. `spare_s()` is for how long the step that runs keeps the device busy,
less what scheduling and launching the next one take: what arrives meanwhile is in the next step. It would
else wait for that step, too: 5 ms beside one sequence of a 97M model on two cores, 25 beside a prompt.

The time of a step is the least of the last `KEPT` with as many tokens: a step that is scheduled too late
leaves the device idle. A step of a number that has not been seen is not waited for.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

KEPT = 4
MARGIN_S = 2e-3         # inputs of the next step are written meanwhile, on cores that this one keeps busy
MOST_SIZES = 512        # for which times are kept
IDLE_S = 1e-4           # to wait for less is not worth a wake-up


class StepTimes:
    """Times of the steps of one engine, by `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._under_way = deque[tuple[int, float]]()    # their tokens, and when they were launched
        self._ended_s = 0.0                             # when the device was free last
        self._steps: dict[int, deque[float]] = {}
        self._launches = deque[float](maxlen=KEPT)      # seconds to schedule and launch

    def note_launch(self, tokens: int, began_s: float) -> None:
        """Notes a step that was launched now."""
        now = self.clock()
        self._launches.append(now - began_s)
        self._under_way.append((tokens, now))

    def note_end(self) -> None:
        """Notes that the oldest step has ended now."""
        tokens, began = self._under_way.popleft()
        now = self.clock()
        taken, self._ended_s = now - max(began, self._ended_s), now
        if tokens not in self._steps and len(self._steps) >= MOST_SIZES: self._steps.clear()
        self._steps.setdefault(tokens, deque(maxlen=KEPT)).append(taken)

    def forget(self) -> None:
        """Drops the steps under way: they have failed."""
        self._under_way.clear()

    def spare_s(self) -> float:
        """Seconds until the next step has to be scheduled, 0 where one is under way behind the first."""
        if len(self._under_way) != 1 or not (times := self._steps.get(self._under_way[0][0])): return 0.0
        ends = max(self._under_way[0][1], self._ended_s) + min(times)
        spare = ends - self.clock() - 2 * max(self._launches) - MARGIN_S
        return spare if spare > IDLE_S else 0.0
