"""Budget of one rendering of a chat template: iterations of loops, processor time, characters and memory.

Protocol: `run_metered(run)` runs a compilation or a rendering; those inside of it share its budget.
`brief(run)` is for an event loop: what is rendered inside has a small budget, and `OutOfTime` says that it is
used up. Inside,
`count`, `charge` and `weigh` raise `TemplateLimit` before more is made than the limits allow, and a watchdog
thread ends the thread's Python code after NV_TEMPLATE_SECONDS of processor time, or a second later on a busy
machine. What is a single call into C is bounded by its operands
(template_sandbox.py), because nothing can end it.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from tinygrad_nv import config
from tinygrad_nv.errors import TokenizerError

MAX_STEPS = 10_000_000      # limit: iterations of a template's loops in one rendering
MAX_ITEMS = 2 << 20         # limit: entries of one list of a template
MAX_HELD = 1 << 20          # limit: entries of a template's list, and of all in it
MAX_DEPTH = 200             # limit: depth of lists that a template makes
MAX_GROWTH = 384 << 20      # limit: bytes by which the process may grow while a template renders
BRIEF_STEPS = 4000          # limit: iterations of loops of a template that an event loop waits for
BRIEF_CHARS = 4 << 20       # limit: characters of all texts and lists that an event loop waits for
BRIEF_SECONDS = 0.1         # limit: processor time of a rendering that an event loop waits for
CHECK_BYTES = 48 << 20      # characters made between two looks at the memory
SMALL = 4096                # characters of a text that is not counted, which an entry of a list may be
ITEM_CHARS = SMALL + 64     # characters as which an entry of a list counts
TICK_SECONDS = 0.1          # between two looks of the watchdog
LATE_SECONDS = 1            # after the budget, of time that passes: the client of a busy server waits, too
# processor time without which nothing is late: the machine was busy or asleep. Templates take some ms
LATE_SHARE = 0.1

CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, set, frozenset,
                                *map(type, ({}.keys(), {}.values(), {}.items())))


class TemplateLimit(TokenizerError):
    """A chat template used more than its budget."""


class OutOfTime(BaseException):
    """Raised in a thread by the watchdog, and inside of `brief`. Not an Exception, so that nothing on the way
    catches it."""


def over_limit(what: str, limit: str) -> TemplateLimit:
    """Returns the error of a template that does `what`."""
    return TemplateLimit(f"the chat template {what}", limit,
                         "use a template that only formats messages, or raise NV_TEMPLATE_SECONDS or "
                         "NV_TEMPLATE_CHARS")


def max_chars() -> int:
    """Characters of one text: NV_TEMPLATE_CHARS."""
    return int(config.get("NV_TEMPLATE_CHARS"))


@dataclass(eq=False)
class Meter:
    """Counters of what a rendering has used."""
    clock: Callable[[], float]
    seconds: float
    most: int
    steps: int = MAX_STEPS
    made: int = 0
    check_at: int = CHECK_BYTES
    resident: int = 0
    sent: bool = False
    brief: bool = False

    def __post_init__(self) -> None: self.began, self.began_at = self.clock(), time.monotonic()

    def is_over(self) -> bool:
        """Whether its time has passed."""
        used, passed = self.clock() - self.began, time.monotonic() - self.began_at
        return used >= self.seconds or (passed >= self.seconds + LATE_SECONDS and
                                        used >= self.seconds * LATE_SHARE)

    def charge(self, chars: int) -> None:
        """Counts a text that is to be made. Raises `TemplateLimit`."""
        self.made += chars
        if self.made < self.check_at: return
        if self.brief: raise OutOfTime
        self.check_at = self.made + CHECK_BYTES
        now = _resident_bytes()
        self.resident = self.resident or now
        if now - self.resident > MAX_GROWTH:
            raise over_limit("keeps too many texts", f"at most {MAX_GROWTH >> 20} MiB of memory")


T = TypeVar("T")
_state = threading.local()


def charge(chars: int) -> None:
    """Counts a text before it is made. Raises `TemplateLimit` for one that is too long."""
    if chars <= SMALL: return
    meter = getattr(_state, "meter", None)
    most = max_chars() if meter is None else meter.most
    if chars > most:
        raise over_limit(f"makes a text of {_words(chars)} characters", f"at most {most:,} characters")
    if meter is not None: meter.charge(chars)


def charge_items(count: int) -> None:
    """`charge` for a list."""
    if count > MAX_ITEMS:
        raise over_limit(f"makes a list of {_words(count)} entries", f"at most {MAX_ITEMS:,} entries")
    if (meter := getattr(_state, "meter", None)) is not None:
        meter.charge(ITEM_CHARS * count)


def count(steps: int) -> None:
    """Counts iterations of a loop. Raises `TemplateLimit`."""
    if (meter := getattr(_state, "meter", None)) is None: return
    meter.steps -= steps
    if meter.steps >= 0: return
    if meter.brief: raise OutOfTime
    raise over_limit("loops without end", f"at most {MAX_STEPS:,} iterations of all loops")


def limit_list(values: Iterable[Any]) -> list[Any]:
    """Returns the values as a list of at most MAX_ITEMS. Raises `TemplateLimit`."""
    made = list(islice(values, MAX_ITEMS + 1))
    charge_items(len(made))
    return made


def weigh(value: Any) -> int:
    """Characters and entries of a value and all in it, counted as often as they are written. Raises
    `TemplateLimit` where they are too many, or nested too deep."""
    most, total, entries, depth, level = max_chars() // 2, 0, 0, 0, [value]
    while level:
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str): total += len(each)
            elif isinstance(each, dict): inner += each.keys(); inner += each.values()  # noqa: E702
            elif isinstance(each, CONTAINERS): inner += list[Any](each)
            if total > most or entries + len(inner) > MAX_HELD:
                raise over_limit("makes a list that holds itself many times, or much text",
                               f"at most {most:,} characters and {MAX_HELD:,} entries")
        entries, depth, level = entries + len(level), depth + 1, inner
        if depth > MAX_DEPTH:
            raise over_limit("nests lists without end", f"at most {MAX_DEPTH} lists in each other")
    return total + entries


def require_bounded(values: Iterable[Any]) -> None:
    """`weigh` for those of the values that hold others: what is made of them holds them again."""
    if held := [each for each in values if isinstance(each, CONTAINERS)]: weigh(held)


def run_metered(run: Callable[[], T], used: float = 0) -> T:
    """Returns the result of a function, bounded while it runs. `used`: seconds of its budget that are gone.
    Raises `TemplateLimit`."""
    if getattr(_state, "meter", None) is not None: return run()
    seconds = int(config.get("NV_TEMPLATE_SECONDS"))
    try: return _watch(run, Meter(_own_clock(), seconds - used, max_chars()))
    except OutOfTime:
        raise over_limit(f"runs for more than {seconds} seconds",
                       f"at most {seconds} seconds of processor time") from None


def brief(run: Callable[[], T]) -> T:
    """Returns the result of a function that an event loop waits for. Raises `OutOfTime` where its templates
    take long: they may in another thread."""
    return _watch(run, Meter(_own_clock(), BRIEF_SECONDS, max_chars(), BRIEF_STEPS, check_at=BRIEF_CHARS,
                               brief=True))


def _watch(run: Callable[[], T], meter: Meter) -> T:
    me, _state.meter = threading.get_ident(), meter
    try:
        try:
            _watchdog.begin(me, meter)
            return run()
        finally: _watchdog.end(me, meter)
    except OutOfTime:
        _watchdog.end(me, meter)    # once more: the exception may have come while the first call ran
        raise
    finally: _state.meter = None


class _Watchdog:
    """A thread that raises OutOfTime in threads whose time has passed; it sleeps while none is watched."""

    def __init__(self) -> None:
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._watched: dict[int, Meter] = {}
        self._thread: threading.Thread | None = None

    def begin(self, thread: int, meter: Meter) -> None:
        with self._lock: self._watched[thread] = meter
        if not self._wake.is_set(): self._wake.set()
        if self._thread is None or not self._thread.is_alive():     # none lives on in a forked process
            self._thread = threading.Thread(target=self._run, name="template-watchdog", daemon=True)
            self._thread.start()

    def end(self, thread: int, meter: Meter) -> None:
        """After it nothing is raised."""
        with self._lock:
            if self._watched.get(thread) is meter: del self._watched[thread]
        if meter.sent: _receive(thread)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(TICK_SECONDS)
            with self._lock:
                for thread, meter in self._watched.items():
                    if not meter.is_over(): continue
                    meter.sent = True
                    _raise_in(thread, OutOfTime)
                if not self._watched: self._wake.clear()


_watchdog = _Watchdog()


def _own_clock() -> Callable[[], float]:
    """Processor time of this thread, where the system tells it to others; time, elsewhere."""
    if not hasattr(time, "pthread_getcpuclockid"): return time.monotonic
    return functools.partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _receive(thread: int) -> None:
    """Has this thread receive what may have been sent to it. (To take it back, as with NULL, leaves CPython
    3.11 looking for an exception for good, which is an endless loop once a function is traced.)"""
    with contextlib.suppress(OutOfTime):
        _raise_in(thread, OutOfTime)    # in place of one that is on its way
        while True: pass


def _resident_bytes() -> int:
    """Returns the resident bytes of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file: return int(file.read().split()[1]) << 12
    except OSError: return 0


def _words(number: int) -> str: return f"{number:,}" if number < 1 << 63 else "more than 2⁶³"
