"""Choices of tokens (spec.py): noise and the largest with it in one pass. For sm_80 and later.

    each CTA has a piece of a row, its threads every `THREADS`-th vector of it:
        wait for the kernel before; the kernel after may begin; the row's key and place
        y = x + noise, unless the row has no temperature or all of the vector are -inf
        best = max(best, y in the order of numbers; of NaN all bits), and its index, the first of equals
        of the CTA: (best, complement of the index), shuffles, then through shared memory
        the token, the key of a part, or the piece's best
    a second kernel, where rows are cut in pieces: the best of them, a warp for each row

Noise is of the multiplications and additions of Threefry, a logarithm that is exact to some units in the last
place where u is nearly 1 (lg2.approx is not), and lg2.approx. What threads exchange is a u64, of which the
first of equal logits is the largest, in whichever lane: pieces and threads do not matter.

`count` counts chosen tokens in place: each thread has a row, and adds one at its slot and token, where both
are in range.
"""
from __future__ import annotations

import math

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.kernel import Chain, Scratch, TileKernel
from tinygrad_nv.tile.sampling.spec import NUMBERS, ChoiceSpec, CountSpec, Number
from tinygrad_nv.tile.sampling.threshold_sift import order_bits
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

THREADS = 256
PIECE = 1 << 12         # elements of a piece at least
CTAS = 512              # four for each SM of an H100: chains of Threefry have latencies to hide
WIDE = 4                # elements of a vector, whose chains are beside each other
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA     # of Threefry's key schedule
COUNT_THREADS = 64


def pieces(spec: ChoiceSpec) -> int:
    """Into how many pieces a row is cut."""
    return min(-(-spec.size // PIECE), -(-CTAS // spec.rows))


def choice(spec: ChoiceSpec, schedule: Schedule, gpu: GPU) -> TileKernel | Chain:
    """The kernel of a choice, or both where rows are cut in pieces. Parameters in this order: out, int32
    [rows], or uint64 [rows]; logits; numbers and places, of a draw."""
    made, cut = first(spec, gpu.arch), pieces(spec)
    if cut == 1: return made
    return Chain(made, merge_choices(spec, gpu.arch), Scratch(dtypes.uint64, cut * spec.rows))


def first(spec: ChoiceSpec, arch: str) -> TileKernel:
    """The kernel of a choice, or of its pieces. Parameters in this order: out, [rows] of the choice, or
    uint64 [rows, pieces]; logits; numbers and places, of a draw."""
    kb = Kernel("choice", arch=arch, threads=THREADS)
    _write(kb, spec)
    return TileKernel(kb.name, kb.ptx(), (pieces(spec), spec.rows, 1), THREADS, pdl=kb.hopper)


def merge_choices(spec: ChoiceSpec, arch: str) -> TileKernel:
    """The second kernel. Parameters in this order: out, [rows] of the choice; what the first has found."""
    kb = Kernel("pieces", arch=arch, threads=32)
    out, found, cut = kb.pointer("out"), kb.pointer("found"), pieces(spec)
    _begin(kb)
    row, lane = kb.ctaid.x, kb.tid.x
    at = advance(kb, advance(kb, found, row, 8 * cut), lane, 8)
    each = kb.regs("u64", -(-cut // 32), 0)
    for i, piece in enumerate(each):
        inside = None if 32 * i + 32 <= cut else lane < cut - 32 * i
        kb.emit("ld.global.u64", piece, at.at(256 * i), guard=inside)
    best = each[0]
    for piece in each[1:]: kb.emit("max.u64", best, best, piece)
    made = _result_of(kb, spec, _largest(kb, best, 32))
    at = advance(kb, out, row, spec.result_dtype.itemsize)
    kb.emit(f"st.global.{made.kind}", at.at(), made, guard=lane == 0)
    return TileKernel(kb.name, kb.ptx(), (spec.rows, 1, 1), 32, pdl=kb.hopper)


def _begin(kb: Kernel) -> None:
    """Waits for the kernel before; the one after may begin."""
    if not kb.hopper: return
    kb.wait_for_previous_grid()
    kb.launch_dependents()


def _write(kb: Kernel, spec: ChoiceSpec) -> None:
    cut = pieces(spec)
    out, logits = kb.pointer("out"), kb.pointer("logits")
    noise = None
    if spec.draw: noise = _Noise(kb, kb.pointer("numbers"), kb.pointer("places"), (spec.first or 0) // 2)
    wide = WIDE if spec.size % WIDE == 0 else 1     # vectors are aligned and whole
    span = -(-spec.size // (cut * THREADS * wide)) * THREADS * wide
    row, start = kb.ctaid.y, kb.ctaid.x * span
    end = kb.reg("u32")
    kb.emit("min.u32", end, start + span, spec.size)
    _begin(kb)
    if noise is not None: noise.of_row(row)
    base = advance(kb, logits, row, 4 * spec.size)
    most, index = kb.reg("u32", 0), kb.reg("u32", 0xFFFFFFFF)   # no key is 0
    first, step = start + kb.tid.x * wide, THREADS * wide
    with kb.comment("this thread's elements"), kb.loop(first, end, step, kind="u32") as i:
        vector = kb.ld("global", "f32", advance(kb, base, i, 4).at(), wide)
        places = [i + e if e else i for e in range(wide)]
        if noise is not None:
            some = vector[0] != -math.inf
            for x in vector[1:]: some = some | (x != -math.inf)
            with kb.if_(noise.drawn & some):
                added = noise.of_vector(i, wide)
                for x, more in zip(vector, added, strict=True): x += more
        for x, place in zip(vector, places, strict=True):   # the first of equals: indices rise
            key = _key(kb, x)
            kb.emit("mov.u32", index, place, guard=key > most)
            kb.emit("max.u32", most, most, key)
    best = kb.reg("u64")
    kb.emit("mov.b64", best, [~index, most])
    warps = kb.shared("warps", 8 * (THREADS // 32))
    best = _largest(kb, best, 32)
    kb.emit("st.shared.u64", warps.address((kb.tid.x >> 5) * 8).at(), best, guard=kb.tid.x & 31 == 0)
    kb.sync()
    with kb.if_(kb.tid.x < 32):
        lanes = THREADS // 32
        best = kb.ld("shared", "u64", warps.address((kb.tid.x & (lanes - 1)) * 8).at())[0]
        best = _largest(kb, best, lanes)
        at, width = (row, spec.result_dtype.itemsize) if cut == 1 else (row * cut + kb.ctaid.x, 8)
        made = _result_of(kb, spec, best) if cut == 1 else best
        kb.emit(f"st.global.{made.kind}", advance(kb, out, at, width).at(), made, guard=kb.tid.x == 0)


def _key(kb: Kernel, y: Value) -> Value:
    """A u32 that is larger for a larger number; all bits of NaN."""
    plus, bits = kb.reg("f32"), kb.reg("b32")
    kb.emit("add.f32", plus, y, 0.0)  # -0 is as large as 0
    kb.emit("mov.b32", bits, plus)
    nan = kb.reg("pred")
    kb.emit("setp.nan.f32", nan, y, y)
    return kb.select(nan, 0xFFFFFFFF, order_bits(kb, bits), "u32")


def _result_of(kb: Kernel, spec: ChoiceSpec, best: Value) -> Value:
    """The token of the best, or its key in the whole row."""
    low, high = kb.regs("u32", 2)
    kb.emit("mov.b64", [low, high], best)
    nan = high == 0xFFFFFFFF
    if spec.first is None: return kb.select(nan, spec.size, ~low, "u32")
    key = kb.reg("u64")
    kb.emit("mov.b64", key, [kb.select(nan, 0xFFFFFFFF, low - spec.first, "u32"), high])
    return key


def _largest(kb: Kernel, value: Value, lanes: int) -> Value:
    """The largest u64 of so many lanes, in all of them."""
    while lanes > 1:
        lanes //= 2
        halves, others = kb.regs("b32", 2), kb.regs("b32", 2)
        kb.emit("mov.b64", halves, value)
        for half, other in zip(halves, others, strict=True):
            kb.emit("shfl.sync.bfly.b32", other, half, lanes, 31, -1)
        there, made = kb.regs("u64", 2)
        kb.emit("mov.b64", there, others)
        kb.emit("max.u64", made, value, there)
        value = made
    return value


class _Noise:
    """A row's noise, from its pair `start` of elements on."""

    def __init__(self, kb: Kernel, numbers: Value, places: Value, start: int) -> None:
        self.kb, self.numbers, self.places, self.start = kb, numbers, places, start

    def of_row(self, row: Value) -> None:
        """The key, the place, and whether there is noise at all."""
        kb = self.kb
        at = advance(kb, self.numbers, row, 4 * NUMBERS)
        self.drawn = kb.ld("global", "f32", at.at(4 * Number.temperature))[0] > 0.0
        words = [kb.ld("global", "f32", at.at(4 * (Number.seed + i)))[0].to("u32") for i in range(4)]
        low, high = (words[i] | (words[i + 1] << 16) for i in (0, 2))
        self.key = [high, low ^ high ^ PARITY, low]
        self.place = kb.ld("global", "u32", advance(kb, self.places, row, 4).at())[0]

    def of_vector(self, first: Value, wide: int) -> list[Value]:
        """Returns the noise of so many tokens. The first is even, or there is one."""
        if wide > 1: return [self.of(word) for pair in range(0, wide, 2) for word in self.words(first, pair)]
        low, high = self.words(first, 0)
        return [self.of(self.kb.select(first & 1 == 0, low, high, "u32"))]

    def words(self, first: Value, pair: int) -> tuple[Value, Value]:
        """Random bits of two tokens."""
        kb, index, ahead = self.kb, first >> 1, self.start + pair // 2
        a, b = (index + ahead if ahead else index) + self.key[2], self.place + self.key[0]
        for number in range(5):
            for bits in ROTATIONS[number % 2]:
                a, turned = a + b, kb.reg("b32")
                kb.emit("shf.l.wrap.b32", turned, b, b, bits)
                b = a ^ turned
            a, b = a + self.key[number % 3], b + self.key[(number + 1) % 3] + (number + 1)
        return a, b

    def of(self, word: Value) -> Value:
        """-log(-log u) of a token's u."""
        kb = self.kb
        uniform = ((word >> 9).to("f32") + 0.5) * 2.0 ** -23
        log, made = kb.regs("f32", 2)
        kb.emit("lg2.approx.f32", log, self.minus_log(uniform))
        kb.emit("mul.f32", made, log, -math.log(2))
        return made

    def minus_log(self, x: Value) -> Value:
        """-log of a number in (0, 1), by the series of the logarithm of (1 + s) / (1 - s): m lies in [3/4,
        3/2), so |s| < 1/5 and m - 1 is exact."""
        kb, bits, exponent = self.kb, self.kb.reg("s32"), self.kb.reg("s32")
        kb.emit("mov.b32", bits, x)
        kb.emit("sub.s32", exponent, bits, 0x3F400000)  # the bits of 3/4
        kb.emit("shr.s32", exponent, exponent, 23)
        m, scaled = kb.reg("f32"), exponent << 23
        kb.emit("sub.s32", scaled, bits, scaled)
        kb.emit("mov.b32", m, scaled)
        s, t, y = kb.reg("f32"), kb.reg("f32"), kb.reg("f32", 0.0)
        kb.emit("div.full.f32", s, m - 1.0, m + 1.0)
        kb.emit("mul.f32", t, s, s)
        for power in (9, 7, 5, 3, 1): kb.emit("fma.rn.f32", y, y, t, 2 / power)
        kb.emit("mul.f32", y, y, s)
        made = kb.reg("f32")
        kb.emit("fma.rn.f32", made, exponent.to("f32"), math.log(2), y)
        return -made


def count(spec: CountSpec, schedule: Schedule, gpu: GPU) -> TileKernel:
    """The kernel of counts. Parameters in this order: counts; slots of the rows; tokens."""
    kb = Kernel("count", arch=gpu.arch, threads=COUNT_THREADS)
    counts, slots, tokens = (kb.pointer(name) for name in ("counts", "slots", "tokens"))
    row = kb.ctaid.x * COUNT_THREADS + kb.tid.x
    if kb.hopper: kb.wait_for_previous_grid()
    with kb.if_(row < spec.rows):
        slot, token = (kb.ld("global", "u32", advance(kb, each, row, 4).at())[0] for each in (slots, tokens))
        if kb.hopper: kb.launch_dependents()
        with kb.if_((slot < spec.slots) & (token < spec.size)):
            at = advance(kb, advance(kb, counts, slot, 4 * spec.size), token, 4)
            kb.st("global", "f32", at.at(), kb.ld("global", "f32", at.at())[0] + 1.0)
    return TileKernel(kb.name, kb.ptx(), (-(-spec.rows // COUNT_THREADS), 1, 1), COUNT_THREADS,
                      pdl=kb.hopper)
