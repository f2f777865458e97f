"""What a launch has besides grid, block and arguments, as comments at the head of PTX text.

Protocol: tinygrad carries a kernel's text and nothing else of ours, so what it has no place for stands in
comments before the first directive, one line for each thing:

    // launch: dynamic_smem=98304 cluster=2,1,1 pdl=1
    // zero: pointer=2 bytes=64
    // integer: offset=16 factors=1,0
    // tensormap: pointer=1 dtype=u8 dims=64,128 strides=64 box=64,8 swizzle=128B offset=0 dynamic=1 integer=0

`zero`: so many bytes at the beginning of a pointer parameter's buffer are zero before every launch. Each
`integer`, where there are any, is an integer argument of the kernel: an offset and multiples of the launch's
variables, all of them u32; without such lines the variables are the arguments. Each
`tensormap` is made for each launch over the buffer of a pointer parameter, and is an argument after pointers
and integers, in the order of the lines; the extent of its dimension `dynamic` (-1 for none) is the integer
argument of number `integer` (-1: the last). Pointers count the kernel's pointer parameters from 0, integers
the others.

`options` reads what `Options.comment` writes. `source` is a kernel's text with its comments. `map_spec` is
what the driver is asked for where a kernel has a tensor map: launches that are timed have the maps of all
others.
"""
from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driver import Swizzle, TensorMapSpec, Triple
from tinygrad_nv.tile.kernel import GemmKernel, MapArgument, TileKernel

LINE = re.compile(r"^// (launch|zero|integer|tensormap):(.*)$", re.MULTILINE)
SWIZZLES = ("none", "32B", "64B", "128B")
# the words of each kind of line, all of which there must be; of launch any may be left out
EXPECTED = {"launch": "dynamic_smem=BYTES cluster=X,Y,Z pdl=0|1", "zero": "pointer=NUMBER bytes=BYTES",
            "integer": "offset=NUMBER factors=NUMBER,…",
            "tensormap": "pointer=NUMBER dtype=NAME dims=D,… strides=BYTES,… box=D,… "
                         "swizzle=none|32B|64B|128B offset=BYTES dynamic=DIMENSION integer=NUMBER"}
KEYS = {kind: [word.partition("=")[0] for word in words.split()] for kind, words in EXPECTED.items()}
NUMBERS = re.compile(r"-?\d+(,-?\d+)*|")
MOST_DIMENSIONS = 5
FLAGS = 2  # the pointer parameter of a kernel's flags: out, workspace, flags


@dataclass(frozen=True)
class Zeroed:
    """Bytes at the beginning of a pointer parameter's buffer that are zero before every launch."""
    pointer: int
    nbytes: int


@dataclass(frozen=True)
class Integer:
    """An integer argument of a kernel: `offset + Σ factors · variables of the launch`."""
    offset: int
    factors: tuple[int, ...]

    def of(self, values: Sequence[int]) -> int:
        """Its value. Before variables have values they are 0, and what would be negative is 0 too."""
        return max(0, self.offset + sum(f * v for f, v in zip(self.factors, values, strict=True)))


@dataclass(frozen=True)
class Options:
    """Bytes of dynamic shared memory, CTAs of a cluster, whether a launch may begin early, what is zero
    before it, its tensor maps, and its integers where these are not the launch's variables."""
    dynamic_smem: int = 0
    cluster: Triple = (1, 1, 1)
    pdl: bool = False
    zeroed: tuple[Zeroed, ...] = ()
    maps: tuple[MapArgument, ...] = ()
    integers: tuple[Integer, ...] = ()

    def comment(self) -> str:
        """The lines that `options` reads."""
        lines = [f"// launch: dynamic_smem={self.dynamic_smem} cluster={_listed(self.cluster)} "
                 f"pdl={int(self.pdl)}"]
        lines += [f"// zero: pointer={each.pointer} bytes={each.nbytes}" for each in self.zeroed]
        lines += [f"// integer: offset={i.offset} factors={_listed(i.factors)}" for i in self.integers]
        lines += [f"// tensormap: pointer={m.pointer} dtype={m.dtype} dims={_listed(m.dims)} "
                  f"strides={_listed(m.strides)} box={_listed(m.box)} swizzle={m.swizzle} "
                  f"offset={m.offset_bytes} dynamic={m.dynamic} integer={m.integer}" for m in self.maps]
        return "\n".join(lines) + "\n"


@functools.lru_cache(1024)
def source(kernel: TileKernel, integers: tuple[Integer, ...] = (), zeroed: tuple[Zeroed, ...] = ()) -> str:
    """A kernel's PTX with the comments that say how it is launched; of equal kernels one and the same. A
    product's flags are zeroed, whatever else is."""
    if isinstance(kernel, GemmKernel) and kernel.flags:
        assert kernel.workspace_bytes, "flags come after a workspace"
        zeroed = (*zeroed, Zeroed(FLAGS, 4 * kernel.flags))
    made = Options(kernel.dynamic_smem, kernel.cluster, kernel.pdl, zeroed, kernel.maps, integers)
    return made.comment() + kernel.ptx


def map_spec(argument: MapArgument, address: int, rows: int = 0) -> TensorMapSpec:
    """A kernel's tensor map over the buffer that begins at `address`, with `rows` in its dynamic dimension.

    L2 promotion is 128 bytes: a row of a box is at most so wide (the widest swizzle), and so is a line of L2.
    With less, the sectors of a line may come from memory by several requests; with 256 L2 fetches the columns
    of the next step before they are asked for. CUTLASS takes 128, DeepGEMM 256, fast.cu none. Not measured.
    """
    dims = tuple(rows if i == argument.dynamic else extent for i, extent in enumerate(argument.dims))
    return TensorMapSpec(argument.dtype, address + argument.offset_bytes, dims, argument.strides,
                         argument.box, swizzle=cast(Swizzle, argument.swizzle or "none"), l2_promotion="128B")


def options(text: str) -> Options:
    """What the comments at the head of PTX text say. Raises `DriverError` for words it cannot read."""
    head = text.partition("\n.")[0]
    lines = LINE.findall(head)
    launch = _pairs("launch", " ".join(words for kind, words in lines if kind == "launch"))
    cluster = launch.numbers("cluster", "1,1,1")
    pdl = launch.numbers("pdl", "0")
    if len(cluster) != 3 or len(pdl) != 1 or pdl[0] not in (0, 1) or min(cluster) < 0: launch.refuse()
    x, y, z = cluster
    return Options(launch.number("dynamic_smem", "0"), (x, y, z), bool(pdl[0]),
                   tuple(_zeroed(words) for kind, words in lines if kind == "zero"),
                   tuple(_map(words) for kind, words in lines if kind == "tensormap"),
                   tuple(_integer(words) for kind, words in lines if kind == "integer"))


def _zeroed(words: str) -> Zeroed:
    pairs = _pairs("zero", words)
    return Zeroed(pairs.number("pointer"), pairs.number("bytes"))


def _integer(words: str) -> Integer:
    pairs = _pairs("integer", words)
    if len(offset := pairs.numbers("offset")) != 1: pairs.refuse()
    return Integer(offset[0], pairs.numbers("factors"))


def _map(words: str) -> MapArgument:
    pairs = _pairs("tensormap", words)
    dims, strides, box = (pairs.numbers(name) for name in ("dims", "strides", "box"))
    rank, dynamic, integer = len(dims), pairs.numbers("dynamic"), pairs.numbers("integer")
    if not (1 <= rank <= MOST_DIMENSIONS and len(strides) == rank - 1 and len(box) == rank): pairs.refuse()
    if min(*dims, *box) < 1 or min(0, 0, *strides) < 0: pairs.refuse()
    if len(dynamic) != 1 or not -1 <= dynamic[0] < rank: pairs.refuse()
    if len(integer) != 1 or integer[0] < -1: pairs.refuse()
    if pairs.words["swizzle"] not in SWIZZLES or not pairs.words["dtype"]: pairs.refuse()
    return MapArgument(pairs.number("pointer"), pairs.words["dtype"], dims, strides, box,
                       pairs.words["swizzle"], pairs.number("offset"), dynamic[0], integer[0])


def _listed(numbers: tuple[int, ...]) -> str: return ",".join(map(str, numbers))


def _pairs(kind: str, text: str) -> _Pairs:
    words = text.split()
    pairs = _Pairs(kind, " ".join(words), dict(word.partition("=")[::2] for word in words))
    known = set(KEYS[kind])
    given = set(pairs.words)
    if len(given) < len(words) or given - known or (kind != "launch" and given != known): pairs.refuse()
    return pairs


@dataclass(frozen=True)
class _Pairs:
    """The words of a line, by their keys."""
    kind: str
    text: str
    words: dict[str, Any]

    def numbers(self, key: str, default: str = "") -> tuple[int, ...]:
        text = self.words.get(key, default)
        if not NUMBERS.fullmatch(text): self.refuse()
        return tuple(map(int, text.split(","))) if text else ()

    def number(self, key: str, default: str = "") -> int:
        """A number that is not negative."""
        found = self.numbers(key, default)
        if len(found) != 1 or found[0] < 0: self.refuse()
        return found[0]

    def refuse(self) -> NoReturn:
        raise DriverError(f"{self.kind} options {self.text!r}", EXPECTED[self.kind],
                          "correct the comment at the head of the PTX")
