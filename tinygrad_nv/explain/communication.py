"""Predicted times of collectives among GPUs of one machine, by the model and the figures of dist/plan.

Protocol: `seconds(kind, nbytes, ranks, arch)`, None of a GPU without figures. `nbytes` are those of all
elements of all_reduce, broadcast, send and recv, those of one rank otherwise, as NCCL counts. A broadcast is
taken for an all-gather of as many bytes.
"""
from __future__ import annotations

from tinygrad_nv.dist.plan.cluster import PER_NODE, cluster
from tinygrad_nv.dist.plan.collectives import GroupSize, collective
from tinygrad_nv.dist.transports.library import count_bytes

GPUS = {"sm_80": "A100", "sm_90a": "H100"}  # which GPU an architecture is taken for
NAMES = {"broadcast": "all_gather", "recv": "send", "shift": "send"}


def seconds(kind: str, nbytes: int, ranks: int, arch: str, by_peers: bool = False) -> float | None:
    """Returns the seconds of a collective of this many bytes, by NCCL, or where it is faster by a kernel over
    peer memory."""
    if arch not in GPUS or ranks > PER_NODE: return None
    whole = max(count_bytes(kind, nbytes, ranks))
    machine = cluster(f"{ranks}x{GPUS[arch]}")
    return collective(NAMES.get(kind, kind), whole, GroupSize(ranks, ranks), machine, peer=by_peers).seconds
