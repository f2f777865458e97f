"""The memory that GPUs of an all-reduce share, and the protocol by which they use it.

Every GPU has a workspace, one allocation that its peers can address, zero at first; nothing resets it later.
Channel b of it belongs to CTA b of every GPU's kernels, and channels have nothing to do with each other:

    a line of 128 bytes     arrivals of phase 0 [world], of phase 1 [world], the epoch: u32
    two halves              of `half_bytes` each, what peers read

A kernel does one or more rounds; so does every peer's, since all GPUs launch the same kernels in the same
order. CTA b of a round:

    e = epoch + 1           the channel's own count of rounds
    write x into half e mod 2
    phase 0: release e into arrivals[0][own rank] of all peers, wait until all own arrivals[0] are e or later
    read the peers' halves e mod 2; a two-shot writes its piece of the sums into its own half,
        has phase 1 in the same way, and reads the peers' pieces
    epoch = e

Proof. (1) What a peer reads in round e is written: writes to half e mod 2 come before the release of e at
system scope (behind a barrier of the CTA), and the peer has acquired that. (2) It is not written again
before it has been read: it is written next in round e + 2. Before that the CTA has passed phase 0 of round e
+ 1, in which every peer released e + 1 after all it read in round e (again behind a barrier). So no call
ends with a barrier, and a GPU may leave early: nothing is written that a slower peer may still read. (3) An
arrival is never lost: it only grows, by one a round, and a peer that waits for e finds e or e + 1 (not e +
2, which needs its own arrival of e + 1); arrivals are compared by the sign of their difference, so they may
wrap. (4) Replays of a graph are launches like any other: nothing of the protocol is in the arguments, epochs
are in memory. (5) Kernels of different sizes, one-shot or two-shot, may follow each other: rounds of a
channel count on, whatever the kernels do in them, as long as all GPUs launch the same ones in one order.

All CTAs of a kernel must run at once, on every GPU: `MOST_CHANNELS` is far below the number of SMs.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.all_reduce.spec import MOST_WORLD, VECTOR_BYTES

LINE_BYTES = 128            # of a channel's flags
PHASE_BYTES = 4 * MOST_WORLD
EPOCH = 2 * PHASE_BYTES     # in the line
MOST_CHANNELS = 64


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

    @property
    def nbytes(self) -> int:
        """Of one GPU."""
        return self.channels * (LINE_BYTES + 2 * self.half_bytes)

    @property
    def data(self) -> int:
        """Where the halves of channel 0 begin."""
        return self.channels * LINE_BYTES
