"""The memory that GPUs of an all-reduce share, and the protocol by which they use it.

Every GPU has a workspace, one allocation that its peers can address. Its lines are zero at first, and nothing
resets them later. Channel b of it belongs to CTA b of every GPU's kernels, and channels have nothing to do
with each other:

    a line of 128 bytes     arrivals of phase 0 [world], of phase 1 [world], an epoch of each phase: u32
    two halves              of `half_bytes` each, what peers read

A kernel does one or more rounds; so does every peer's, since all GPUs launch the same kernels in the same
order. CTA b of a round:

    e = epoch of phase 0 + 1        the channel's own count of rounds
    write x into half e mod 2
    phase 0: release e into arrivals[0][own rank] of all peers, wait until all own arrivals[0] are e or later
    read the peers' halves e mod 2; a two-shot writes its shard of the sums into its own half, has phase 1 in
        the same way, with a count of its own, and reads the peers' shards: a reduce-scatter, an all-gather
    the epochs

Proof. (1) What a peer reads in round e is written: writes to half e mod 2 come before the release of e at
system scope (behind a barrier of the CTA), and the peer has acquired that. (2) It is not written again
before it has been read: it is written next in round e + 2. Before that the CTA has passed phase 0 of round e
+ 1, in which every peer released e + 1 after all it read in round e (again behind a barrier). So no call
ends with a barrier, and a GPU may leave early: nothing is written that a slower peer may still read. (3) An
arrival is never lost, and never stale: that of a phase grows by one each time that its peer comes to the
phase, which the peer's own epoch of the phase counts, and so is at most one behind when it is waited for. A
peer that waits for e of phase 0 finds e − 1, e or e + 1 (not e + 2, which needs its own arrival of e + 1);
of phase 1 it finds e − 1 or e, as the next phase 1 is behind another phase 0. Arrivals are compared by the
sign of their difference, so they may wrap. (4) Replays of a graph are launches like any other: nothing of
the protocol is in the arguments, epochs are in memory. (5) Kernels of different sizes, one-shot or two-shot,
may follow each other: rounds of a channel count on, whatever the kernels do in them, as long as all GPUs
launch the same ones in one order. Phase 1 has its own epoch for that: were it that of phase 0, arrivals of
phase 1 would be so much behind after 2³¹ rounds of one-shots that they passed for later ones.

All CTAs of a kernel must run at once, on every GPU: `MOST_CHANNELS` is far below the number of SMs.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.all_reduce.spec import MOST_WORLD, VECTOR_BYTES

LINE_BYTES = 128            # of a channel's flags
PHASE_BYTES = 4 * MOST_WORLD
EPOCH = 2 * PHASE_BYTES     # of phase 0 in the line, that of phase 1 behind it
MOST_CHANNELS = 64
MOST_BYTES = 1 << 32        # of a workspace: offsets in it are u32


@dataclass(frozen=True)
class Workspace:
    """The layout: the same for all kernels that share one. 64 channels of 2 × 64 KiB are 8 MiB. Raises
    `SpecError` for what cannot be."""
    channels: int = 64
    half_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        if not 1 <= self.channels <= MOST_CHANNELS:
            raise SpecError(f"{self.channels} channels", f"1 to {MOST_CHANNELS}")
        if self.half_bytes < VECTOR_BYTES or self.half_bytes % VECTOR_BYTES:
            raise SpecError(f"halves of {self.half_bytes} bytes", f"a multiple of {VECTOR_BYTES}")
        if self.nbytes > MOST_BYTES:
            raise SpecError(f"{self.channels} channels of 2 x {self.half_bytes} bytes",
                            f"{MOST_BYTES} bytes in all at most")

    @property
    def nbytes(self) -> int:
        """Bytes of one GPU."""
        return self.channels * (LINE_BYTES + 2 * self.half_bytes)

    @property
    def data(self) -> int:
        """Offset at which the halves of channel 0 begin."""
        return self.channels * LINE_BYTES
