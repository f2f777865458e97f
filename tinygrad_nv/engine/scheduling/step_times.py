"""How long steps take, so that the next one is scheduled no earlier than it has to be.

Protocol: `note_launch(size, began_s)` notes a step of some size, whose scheduling began at `began_s`;
`note_end(at_s)`, when the device had ended the oldest one. `spare_s()` is for how long the step that runs
keeps the device busy, less what scheduling and launching the next one take: what arrives meanwhile is in the
next step. It would else wait for that step, too: 5 ms beside one sequence of a 97M model on two cores, 25
beside a prompt.

The time of a step is the least of the last `KEPT` of its size: a step that is scheduled too late leaves the
device idle. A size that was seen once is not waited for, since the first step may have been captured within.
Ends are the device's, not those that the host saw after it had waited: a wait that was too long is not taken
for a longer step.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

KEPT = 4
LEAST = 2               # steps of a size from which on its time is known
MARGIN_S = 2e-3         # inputs of the next step are written meanwhile, on cores that this one keeps busy
MOST_S = 0.05           # that are waited at a time, whatever steps took before
MOST_SIZES = 512        # for which times are kept
IDLE_S = 1e-4           # to wait for less is not worth a wake-up
Size = tuple[int, int]  # tokens and sequences of a step


class StepTimes:
    """Times of the steps of one engine, by `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._under_way = deque[tuple[Size, float]]()   # and when they were launched
        self._ended_s = 0.0                             # when the device was free last
        self._early = False     # the last step had no samples, and is said to have ended before it had
        self._steps: dict[Size, deque[float]] = {}
        self._launches = deque[float](maxlen=KEPT)      # seconds to schedule and launch

    def note_launch(self, size: Size, began_s: float) -> None:
        """Notes a step that was launched now."""
        now = self.clock()
        self._launches.append(now - began_s)
        self._under_way.append((size, now))

    def note_end(self, at_s: float) -> None:
        """Notes when the oldest step had ended."""
        size, launched = self._under_way.popleft()
        began, before = max(launched, self._ended_s), self._early
        self._ended_s, self._early = max(at_s, began), at_s - began < IDLE_S
        if before or self._early: return
        if size not in self._steps and len(self._steps) >= MOST_SIZES: self._steps.clear()
        self._steps.setdefault(size, deque(maxlen=KEPT)).append(at_s - began)

    def forget(self) -> None:
        """Drops the steps under way: they have failed."""
        self._under_way.clear()

    def spare_s(self) -> float:
        """Seconds until the next step has to be scheduled, 0 where one is under way behind the first."""
        if len(self._under_way) != 1 or self._early: return 0.0
        size, launched = self._under_way[0]
        if len(times := self._steps.get(size, ())) < LEAST: return 0.0
        ends = max(launched, self._ended_s) + min(times)
        spare = ends - self.clock() - 2 * max(self._launches) - MARGIN_S
        return min(spare, MOST_S) if spare > IDLE_S else 0.0
