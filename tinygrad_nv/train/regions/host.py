"""Values of a GPU that are on the host in between, copied beside kernels.

Protocol: three calls, which the host executes between kernels, and a stream of copies beside theirs:

    offload(value, held)              a token: `value` is being copied to page-locked memory of the host. So
                                      are those of `held` (values and their tokens) before it: kernels go on
                                      when they are there, so that their memory can be used again
    prefetch(token, value, gradient)  memory into which it is being copied back, once `gradient` is there; a
                                      value that no call has held by then is held by this
    await_prefetch(place, gradient)   the same memory, when it is back; kernels wait no sooner than another
                                      gradient is there

Page-locked memory is kept for the next value of its size.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tinygrad import Device, dtypes
from tinygrad.device import Buffer
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.runtime.driven import DrivenDevice
from tinygrad_nv.runtime.driver import Download, Event, HostMemory, Upload

OFFLOAD, PREFETCH, PREFETCHED = "offload", "prefetch", "prefetched"


def moves(device: object) -> bool:
    """Whether values of a device can be on the host in between: of GPUs of tinygrad_nv."""
    return isinstance(device, str) and isinstance(Device[device], DrivenDevice)


# **** in the graph ****

def offload(value: UOp, held: Sequence[UOp]) -> UOp:
    """A token of a value, contiguous, int32 (1,)."""
    token = UOp.invalids(1, dtype=dtypes.int32, device=value.device)
    return _call(OFFLOAD, token, value, *held)


def prefetch(token: UOp, value: UOp, gradient: UOp, held: Sequence[UOp] = ()) -> UOp:
    """Memory of the value's shape and dtype, after `gradient`, contiguous."""
    place = UOp.invalids(*value.shape, dtype=value.dtype, device=value.device)
    return _call(PREFETCH, place, token, gradient, *held)


def await_prefetch(place: UOp, gradient: UOp) -> UOp:
    """Returns the value that `prefetch` gave, after another gradient, contiguous."""
    return _call(PREFETCHED, place, gradient)


def _call(name: str, out: UOp, *given: UOp) -> UOp:
    if not hooks.has_custom_function(OFFLOAD): _register()
    return out.after(UOp(Ops.CUSTOM_FUNCTION, arg=name).call(out, *given))


def _register() -> None:
    hooks.add_custom_function(OFFLOAD, _execute, lambda call: ((0,), _after(call, 1)))
    hooks.add_custom_function(PREFETCH, _execute, lambda call: ((0,), _after(call, 1)))
    hooks.add_custom_function(PREFETCHED, _execute, lambda call: ((0,), _after(call, 0)))


def _after(call: UOp, first: int) -> tuple[int, ...]:
    return tuple(range(first, len(realize.get_call_arg_uops(call))))


# **** executed ****

class _Copies:
    """The copies of a device. `there` has by a token's address where its value is, and when; `under_way` by a
    place's address when it has its value."""

    def __init__(self, device: DrivenDevice) -> None:
        self.device, self.driver, self.stream = device, device.driver, device.driver.stream()
        self.free = defaultdict[int, list[HostMemory]](list)
        self.there = dict[int, tuple[HostMemory, int, Event]]()
        self.under_way = dict[int, Event]()

    def _behind_kernels(self) -> None:
        """Makes copies from now on wait for all kernels until now."""
        now = self.driver.event()
        self.driver.record(now)
        self.driver.wait(now, self.stream)

    def _mark(self) -> Event:
        """All copies until now."""
        now = self.driver.event()
        self.driver.record(now, self.stream)
        return now

    def offload(self, token: Buffer, value: Buffer, *held: Buffer) -> None:
        """Copies a value to the host; kernels wait for those that are held."""
        for each in held:
            if (before := self.there.get(each._buf)) is not None: self.driver.wait(before[2])
        if (lost := self.there.pop(token._buf, None)) is not None: self.free[lost[1]].append(lost[0])
        kept, nbytes = self.free[value.nbytes], value.nbytes
        memory = kept.pop() if kept else self.device.pool.host(nbytes)
        self._behind_kernels()
        self.driver.submit(Download(memory, 0, value._buf, nbytes), self.stream)
        self.there[token._buf] = memory, nbytes, self._mark()

    def prefetch(self, place: Buffer, token: Buffer, *_: Buffer) -> None:
        """Copies a value back. Its memory on the host is free for copies that follow."""
        memory, nbytes, there = self.there.pop(token._buf)
        self.driver.wait(there)
        self._behind_kernels()
        self.driver.submit(Upload(place._buf, memory, 0, nbytes), self.stream)
        self.free[nbytes].append(memory)
        self.under_way[place._buf] = self._mark()

    def await_prefetch(self, place: Buffer, *_: Buffer) -> None:
        """Kernels wait for a value."""
        self.driver.wait(self.under_way.pop(place._buf))


_copies = dict[str, _Copies]()


def _execute(ctx: realize.ExecContext, call: UOp, ast: UOp) -> list[float | None]:
    given = [each.buffer.ensure_allocated() for each in realize.resolve_params(call, ctx.input_uops)]
    name = given[0].device
    if name not in _copies:
        device = Device[name]
        assert isinstance(device, DrivenDevice)
        _copies[name] = _Copies(device)
    own = _copies[name]
    {OFFLOAD: own.offload, PREFETCH: own.prefetch, PREFETCHED: own.await_prefetch}[ast.arg](*given)
    return []
