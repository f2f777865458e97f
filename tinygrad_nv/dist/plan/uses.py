"""Collectives of a step, as a plan lists them.

Protocol: a `Use` is one collective: how often a rank calls it in a step, how long all calls take, and how
much of that time no kernel runs beside it (exposed). `beside` is the time of kernels and collectives that run
at once: while a collective runs, kernels have the SMs that it leaves them.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad_nv.dist.plan.cluster import Device, figures
from tinygrad_nv.dist.plan.collectives import Collective


@dataclass(frozen=True)
class Use:
    """`count` calls in a step, for `purpose`; `exposed_s` of their seconds are not hidden. `hidden_by`: what
    runs beside them, "" for nothing."""
    purpose: str
    collective: Collective
    count: float
    exposed_s: float
    hidden_by: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of all calls."""
        return self.count * self.collective.seconds

    def plus(self, more: Use) -> Use:
        """Returns the use with as many calls of the same collective more."""
        return replace(self, count=self.count + more.count, exposed_s=self.exposed_s + more.exposed_s)

    def times(self, count: float) -> Use:
        """So often."""
        return replace(self, count=self.count * count, exposed_s=self.exposed_s * count)


def expose(purpose: str, collective: Collective, count: float) -> Use:
    """Returns a use that nothing runs beside."""
    return Use(purpose, collective, count, count * collective.seconds)


def beside(device: Device, kernels_s: float, collectives_s: float) -> float:
    """Seconds of both."""
    taken = figures()["nccl"]["sms"] / device.model.sm_count
    return max(collectives_s, kernels_s + collectives_s * taken)
