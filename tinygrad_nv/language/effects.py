"""Effects: places of tensors, and when they move: `device`, `prefetch`, `offload`, `donate`.

Protocol. Each says something that is kept, or raises `EffectError`; `kernel.explain` and the kernel's note
show it.

    with device(gpu): …          tensors are made there, and kernels of the tile language take none from
    elsewhere.
                                 `gpu` is CUDA where there is one, EMU where DEV says so, else the CPU
    with prefetch(x, into=…):    of a Tensor, or of an object with Tensors K and V
        "smem"   kernels in the block load x in a loop, at least two stages ahead; on a CPU, whose caches load
                 ahead by themselves, it is packed a block at a time
        "l2"     launches in the block keep x in L2 (runtime/l2.py): on GPUs that set L2 aside
        "hbm"    x is copied from the host to the block's device, while what was launched before still runs
    offload(x)                   a copy in the host's memory
    donate(x)                    as an argument for an output: the kernel writes into x's memory, and x is not
                                 to be read any more

`overlap="compute"` is what copies do; `overlap=None` waits for them.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinygrad import Context, Device, Tensor

from tinygrad_nv.errors import EffectError
from tinygrad_nv.patterns.target import GPUS, kind_of, takes
from tinygrad_nv.tile.language.ir import Program, Region
from tinygrad_nv.tile.language.schedule import TileSchedule

PLACES = ("smem", "l2", "hbm")
STAGES = 2      # that a load into shared memory is ahead
_here = threading.local()


@dataclass(frozen=True, eq=False)
class Constraint:
    """Tensors that are to be in shared memory ahead, or kept in L2."""
    tensors: list[Tensor]
    place: str


@dataclass(frozen=True)
class Donated:
    """A Tensor whose memory a kernel may write."""
    tensor: Tensor


class _GPU:
    """The GPU of this process, or what stands for one."""

    def __str__(self) -> str:
        default = Device.DEFAULT
        if kind_of(default) in GPUS: return default
        opened = [name for name in Device._opened_devices if kind_of(name) == "CUDA"]
        return opened[0] if opened else default

    def __repr__(self) -> str: return f"gpu ({self})"


gpu = _GPU()


def constraints() -> list[Constraint]:
    """Returns the constraints of the blocks that this thread is in."""
    made: list[Constraint] = getattr(_here, "constraints", [])
    return made


def follow(old: Tensor, new: Tensor) -> None:
    """Asks what is asked of a tensor of the one that takes its place in a cache, too."""
    for each in constraints():
        if any(one.uop.base is old.uop.base for one in each.tensors): each.tensors.append(new)


def block_device() -> str | None:
    """The device of the innermost block."""
    made: str | None = getattr(_here, "device", None)
    return made


@contextlib.contextmanager
def device(where: Any) -> Iterator[str]:
    """Tensors that are made inside the block are on a device, by name or `gpu`; kernels take none from
    elsewhere.
    Raises `EffectError` for a device that takes no kernels of ours."""
    name = Device.canonicalize(str(where))
    if not takes(name):
        raise EffectError(f"device({where!r})", "a device with kernels of ours: CPU, EMU, CUDA, or gpu")
    before = block_device()
    _here.device = name
    try:
        with Context(DEV=name): yield name
    finally: _here.device = before


@contextlib.contextmanager
def prefetch(obj: Any, into: str = "smem", overlap: str | None = "compute") -> Iterator[Any]:
    """Has tensors nearer before they are needed (the module says what each place means). Raises `EffectError`
    where a place cannot be had."""
    tensors = tensors_of(obj)
    if into not in PLACES: raise EffectError(f"prefetch(into={into!r})", f"one of {', '.join(PLACES)}")
    if overlap not in ("compute", None):
        raise EffectError(f"prefetch(overlap={overlap!r})", '"compute" or None')
    if into == "hbm":
        _copy_to_block(tensors, wait=overlap is None)
        yield obj
        return
    own = Constraint(list(tensors), into)
    with _keep_in_l2(tensors) if into == "l2" else contextlib.nullcontext():
        _here.constraints = [*constraints(), own]
        try: yield obj
        finally: _here.constraints = [each for each in constraints() if each is not own]


def tensors_of(obj: Any) -> tuple[Tensor, ...]:
    """The Tensors of an object: itself, its K and V, or those in a tuple or dict."""
    if isinstance(obj, Tensor): return obj,
    if isinstance(obj, dict): return tuple(one for each in obj.values() for one in tensors_of(each))
    if isinstance(obj, (tuple, list)): return tuple(one for each in obj for one in tensors_of(each))
    found = tuple(each for each in (getattr(obj, "K", None), getattr(obj, "V", None))
                  if isinstance(each, Tensor))
    if not found:
        raise EffectError(f"a {type(obj).__name__} to be moved", "Tensors, or an object with K and V")
    return found


@contextlib.contextmanager
def _keep_in_l2(tensors: tuple[Tensor, ...]) -> Iterator[None]:
    from tinygrad_nv.runtime import l2
    places = {str(each.device) for each in tensors}
    if len(places) != 1 or kind_of(name := places.pop()) not in GPUS:
        raise EffectError(f'prefetch(into="l2") of tensors on {tensors[0].device}',
                          "tensors on one GPU: CUDA or EMU", 'into="smem" is what a CPU does by itself')
    opened: Any = Device[name]
    made = l2.plan(opened.driver.properties, [l2.tensor_range(each) for each in tensors])
    with l2.persisting(opened, made): yield


def _copy_to_block(tensors: tuple[Tensor, ...], wait: bool) -> None:
    """To the block's device, in place."""
    name = block_device() or Device.DEFAULT
    for each in tensors:
        if each.device != name: each.replace(each.to(name))
    Tensor.realize(*tensors)
    if wait: Device[name].synchronize()


def offload(x: Tensor) -> Tensor:
    """A copy in the host's memory."""
    made: Tensor = x.to("CPU")
    return made


def donate(x: Tensor) -> Donated:
    """x for an output of a kernel, which writes into its memory."""
    if not isinstance(x, Tensor): raise EffectError(f"donate of a {type(x).__name__}", "a Tensor")
    return Donated(x)


def check_effects(program: Program, schedule: TileSchedule, tensors: dict[str, Tensor]) -> str:
    """Checks a call against the blocks that it is in; returns words for its note. Raises `EffectError`."""
    name = block_device()
    for key, each in tensors.items():
        if name is not None and each.device != name:
            raise EffectError(f"kernel {program.name} in device({name}): {key} is on {each.device}",
                              f"tensors on {name}", f"move it: {key}.to({name!r})")
    words = []
    for constraint in constraints():
        for key, each in tensors.items():
            if not any(each.uop.base is one.uop.base for one in constraint.tensors): continue
            words.append(f"{key} is kept in L2" if constraint.place == "l2"
                         else _check_prefetch(program, schedule, key, each))
    return "; ".join(words)


def _check_prefetch(program: Program, schedule: TileSchedule, key: str, tensor: Tensor) -> str:
    if not _in_loop(program.body, key, False):
        raise EffectError(f'prefetch({key}, into="smem"): kernel {program.name} does not load it in a loop',
                          "loads in a loop of tile.range_n, range_k or range",
                          "what is loaded once cannot be loaded ahead")
    if kind_of(str(tensor.device)) not in GPUS:
        return f"{key} is packed a block at a time (a CPU has no smem)"
    if schedule.depth < STAGES:
        raise EffectError(f'prefetch({key}, into="smem"): {program.name} has a schedule of 1 stage',
                          f"{STAGES} stages at least", f"{program.name}.schedule(stages={STAGES})")
    return f"{key} comes to smem {schedule.depth} stages ahead"


def _in_loop(region: Region, key: str, inside: bool) -> bool:
    for op in region.ops:
        if inside and op.name in ("load", "load_block") and op.attributes["tensor"] == key: return True
        if any(_in_loop(each, key, inside or op.name in ("for", "while")) for each in op.regions): return True
    return False
