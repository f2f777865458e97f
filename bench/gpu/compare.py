"""Whether what ran is right: results are filled with NaN, the runs are made, and every set is compared.

Protocol: a workload names its `results` among a set's storages, and `unlike(one)` says how those of a set are
not what they must be, "" when they are. Comparisons take places of all of a result: `spread_numbers` gives
one of every few rows, so that each tile of rows, each half of it that a consumer warpgroup has, and each
warp's rows are among them.

A run is compared on as many sets as it says by `sets` (`Partly`), on all where it says nothing.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Run = Callable[[int], None]     # one run with the i-th set of inputs, into torch's current stream
Sets = Sequence[Any]
EMULATED_SETS, EMULATED_RUNS = 2, 3  # the last run writes a set that has been written before


@dataclass(frozen=True)
class Partly:
    """A run whose results are those of the first `sets` sets alone; of none, where it computes nothing."""
    run: Run
    sets: int

    def __call__(self, i: int) -> None: self.run(i)


def count_sets(run: Run, given: Sets) -> int:
    """On how many sets a run is compared."""
    return min(getattr(run, "sets", len(given)), len(given))


def spread_numbers(count: int, step: int) -> list[int]:
    """One of every `step` numbers below `count`, at another place in each step; the first and the last."""
    inside = (first + (11 * (first // step) + 5) % step for first in range(0, count, step))
    return sorted({0, count - 1, *(min(each, count - 1) for each in inside)})


def poison(workload: Any, given: Sets) -> None:
    """Fills the results with NaN: what a run does not write is found."""
    for one in given:
        for name in workload.results: one[name].fill_(float("nan"))


def differs(workload: Any, given: Sets) -> str:
    """How the results of the first set that is wrong are so; "" when all are right."""
    for number, one in enumerate(given):
        for name in workload.results:
            if bool(one[name].isnan().any()): return f"set {number}: elements of {name} were not written"
        if words := workload.unlike(one): return f"set {number}: {words}"
    return ""


def wrong(workload: Any, given: Sets, run: Run) -> str:
    """Runs once on each set, and compares."""
    some = given[:count_sets(run, given)]
    poison(workload, some)
    for i in range(len(some)): run(i)
    return differs(workload, some)


def check_on_emulator(workload: Any, driver: Any, bind: Callable[[Mapping[str, int]], Callable[[None], None]],
                      written: Sequence[str] = ("out",),
                      after: Callable[[Any], None] = lambda one: None) -> str:
    """Runs on an emulated driver: two sets in turns, as bursts have them, the first of them again. `bind`
    makes a launch on memory by name, `written` are the results that it writes, `after` does with a set what
    others do after the launch. "" when both sets are right then."""
    import torch
    given = workload.make_inputs("cpu")[:EMULATED_SETS]
    places: list[dict[str, int]] = []
    for one in given:
        for name in written: one[name].fill_(torch.nan)
        places.append({name: driver.alloc(tensor.nbytes) for name, tensor in one.items()})
        for name, tensor in one.items(): driver.copy_in(places[-1][name], memoryview(raw(tensor)))
    runs = [bind(place) for place in places]
    for i in range(EMULATED_RUNS): runs[i % len(runs)](None)
    for one, place in zip(given, places, strict=True):
        for name in written:
            data = bytearray(one[name].nbytes)
            driver.copy_out(memoryview(data), place[name])
            one[name] = torch.frombuffer(data, dtype=one[name].dtype).view(one[name].shape)
        after(one)
    return differs(workload, given)


def raw(tensor: Any) -> bytes:
    """The bytes of a tensor of the CPU's."""
    import torch
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
