"""A fake of cuda.bindings.driver over the emulator: CUDADriver and DEV=CUDA run on it without a GPU.

Protocol: `with installed(arch="sm_90a", gpus=1) as fake:` makes `cuda_api.bindings()` this fake. Structs and
enums are the real ones, read through their C layouts (cuda_structs.py); every function CUDADriver calls is
here, and another one is an AssertionError. Work goes to an EmulatedDriver for each GPU, stream by stream and
node by node, so a missing event or edge is found as it is there.

The fake is strict: `complaints` has unknown or destroyed handles, a wrong current context, memory used before
its allocation was waited for, memory freed before work that was issued earlier is done; `installed` raises
them at its end. `left()` counts what lives. `fail(name, status)` lets the next call of a function fail;
`calls` counts them. A kernel out of bounds loses the context, as on a GPU; the emulator's words are in
`findings`. Its other findings are raised as they are.
"""
from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cuda.bindings.driver as cu
import pytest

from tests.support.runtime import cuda_fake_code, cuda_fake_order, cuda_fake_shared
from tests.support.runtime.cuda_fake_parts import Device, FakeGraph, FakeNode, FakeStream, Pool
from tests.support.runtime.cuda_structs import AccessDesc, PoolProps, read
from tinygrad_nv.errors import KernelError, NVError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.runtime.cuda import api as cuda_api
from tinygrad_nv.runtime.cuda import code as cuda_code
from tinygrad_nv.runtime.driver import Copy, Download, Fill, Upload, Work

S = cu.CUresult
A = cu.CUdevice_attribute
OK = (S.CUDA_SUCCESS,)
OUTSIDE = ("cuInit", "cuD", "cuGet", "cuCtxGetCurrent", "cuCtxSetCurrent")   # what a lost context still does


def named(module: ModuleType) -> dict[str, Any]:
    """The functions of a part of the fake by the names cuda.bindings has for them."""
    return {"cu" + "".join(word.title() for word in name.split("_")): value
            for name, value in vars(module).items()
            if name[0] != "_" and getattr(value, "__module__", "") == module.__name__}


FUNCTIONS = {**named(cuda_fake_code), **named(cuda_fake_order), **named(cuda_fake_shared)}


class Fake:
    """What `bindings()` gives: functions here, everything else of cuda.bindings.driver."""

    def __init__(self, arch: str, gpus: int, check: bool, version: tuple[int, int]) -> None:
        self.version, self.count = version, gpus
        self.devices = [Device(i, arch, check) for i in range(gpus)]
        self.current = threading.local()
        self.handles: dict[int, Any] = {}
        self.dead: dict[int, str] = {}
        self.numbers = itertools.count(0x7000_0000, 16)
        self.calls: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.encoders: dict[str, Any] = {}
        self.findings: list[str] = []
        self.failures: defaultdict[str, list[tuple[Any, bytes]]] = defaultdict(list)
        self.absent: set[str] = set()
        self.sources: dict[bytes, str] = {}
        self.clusters: dict[int, int] = {}
        self.peers = True
        self.shareable: dict[int, Device] = {}      # memory of cuMemAlloc
        self.opened: dict[int, tuple[int, int]] = {}    # whose memory, and where, by the address here
        self.capturing: set[int] = set()
        self.captures: dict[int, FakeGraph] = {}    # of streams that CUDA captures: what libraries put there
        self.capture_mode = threading.local()

    def __getattr__(self, name: str) -> Any:
        real = getattr(cu, name)    # an AttributeError where cuda.bindings has no such thing
        if callable(real) and not isinstance(real, type):
            if (function := getattr(type(self), f"_{name}", FUNCTIONS.get(name))) is None:
                raise AssertionError(f"the fake has no {name}")
            return lambda *args: self._called(name, function, *args)
        return real

    def _called(self, name: str, function: Any, *args: Any) -> Any:
        self.calls[name] += 1
        if name in self.absent: raise RuntimeError(f'Function "{name}" not found')
        if self.failures[name]:
            status, log = self.failures[name].pop(0)
            if log: args[3][0][:len(log)] = log
            return padded(name, (status,))
        device = getattr(self.current, "device", None)
        if device is not None and device.lost and not name.startswith(OUTSIDE):
            return padded(name, (S.CUDA_ERROR_ILLEGAL_ADDRESS,))
        try: return padded(name, function(self, *args))
        except AssertionError as error:
            self.complaints.append(f"{name}: {error}")
            raise
        except KernelError as error:
            if "out-of-bounds" not in str(error): raise
            self.findings.append(str(error))
            self.here().lost = True
            return padded(name, (S.CUDA_ERROR_ILLEGAL_ADDRESS,))

    # for tests

    def fail(self, name: str, status: str, log: bytes = b"", times: int = 1) -> None:
        """The next calls of a function return a status; `log` goes to the first buffer of its options."""
        self.failures[name] += [(getattr(S, status), log)] * times

    def left(self) -> dict[str, int]:
        """What lives: handles, memory, references to contexts."""
        found = Counter(type(each).__name__ for each in self.handles.values())
        for device in self.devices:
            found["memory"] += len(device.memory)
            found["context"] += device.references
        return {kind: count for kind, count in found.items() if count}

    # handles

    def make(self, kind: Any, thing: Any) -> Any:
        self.handles[number := next(self.numbers)] = thing
        return kind(number)

    def get(self, handle: Any, kind: type) -> Any:
        number = int(handle)
        assert number not in self.dead, f"{self.dead[number]} {number:#x} is used after it was destroyed"
        found = self.handles.get(number)
        assert isinstance(found, kind), f"{number:#x} is no {kind.__name__}"
        return found

    def drop(self, handle: Any, kind: type) -> Any:
        found = self.get(handle, kind)
        del self.handles[int(handle)]
        self.dead[int(handle)] = kind.__name__
        return found

    def here(self) -> Device:
        """The device whose context is current."""
        device = getattr(self.current, "device", None)
        assert device is not None, "no context is current"
        assert device.references > 0, "the current context was released"
        return device

    def queue(self, handle: Any) -> FakeStream:
        """A stream of the current context."""
        if int(handle) in (0, 1, 2): return self.here().default()
        stream: FakeStream = self.get(handle, FakeStream)
        assert stream.device is self.here(), "a stream of another context"
        return stream

    # device and context

    def _cuInit(self, flags: int) -> Any:
        assert flags == 0
        return OK if self.count else (S.CUDA_ERROR_NO_DEVICE,)

    def _cuDriverGetVersion(self) -> Any: return (*OK, self.version[0] * 1000 + self.version[1] * 10)

    def _cuGetErrorString(self, status: Any) -> Any: return (*OK, f"words for {int(status)}".encode())

    def _cuDeviceGetCount(self) -> Any: return (*OK, self.count)

    def _cuDeviceGet(self, ordinal: int) -> Any:
        if ordinal >= self.count: return (S.CUDA_ERROR_INVALID_DEVICE,)
        return (*OK, cu.CUdevice(ordinal))

    def _device(self, device: Any) -> Device: return self.devices[int(device)]

    def _cuDeviceGetName(self, length: int, device: Any) -> Any:
        name = self._device(device).emu.properties.name.encode()
        return (*OK, name + bytes(length - len(name)))

    def _cuDeviceTotalMem(self, device: Any) -> Any:
        return (*OK, self._device(device).emu.properties.memory_bytes)

    def _cuDeviceGetAttribute(self, which: Any, device: Any) -> Any:
        d = self._device(device)
        p, name = d.emu.properties, which.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        return (*OK, {
            "COMPUTE_CAPABILITY_MAJOR": d.capability[0], "COMPUTE_CAPABILITY_MINOR": d.capability[1],
            "MULTIPROCESSOR_COUNT": p.sm_count, "MAX_SHARED_MEMORY_PER_BLOCK": p.shared_static_limit,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": p.shared_limit,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": p.shared_of_sm, "L2_CACHE_SIZE": p.l2_bytes,
            "MAX_THREADS_PER_MULTIPROCESSOR": p.threads_of_sm, "MAX_THREADS_PER_BLOCK": p.threads_of_cta,
            "WARP_SIZE": p.warp_size, "MAX_PERSISTING_L2_CACHE_SIZE": p.persisting_l2_limit,
            "MAX_ACCESS_POLICY_WINDOW_SIZE": p.window_limit}[name])

    def _cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        (found := self._device(device)).references += 1
        return (*OK, cu.CUcontext(found.context))

    def _cuDevicePrimaryCtxRelease(self, device: Any) -> Any:
        found = self._device(device)
        assert found.references > 0, "the context is released twice"
        found.references -= 1
        return OK

    def _cuCtxGetCurrent(self) -> Any:
        device = getattr(self.current, "device", None)
        return (*OK, cu.CUcontext(device.context if device else 0))

    def _cuCtxSetCurrent(self, context: Any) -> Any:
        self.current.device = next((d for d in self.devices if d.context == int(context)), None)
        assert self.current.device or not int(context), "no such context"
        return OK

    def _cuCtxSynchronize(self) -> Any:
        (device := self.here()).finish()
        return (S.CUDA_ERROR_ILLEGAL_ADDRESS,) if device.lost else OK

    def _cuCtxSetLimit(self, limit: Any, value: int) -> Any:
        assert limit == cu.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
        self.here().emu.set_persisting_l2(value)
        self.here().persisting = value
        return OK

    def _cuCtxResetPersistingL2Cache(self) -> Any:
        self.here().resets += 1
        return OK

    def _cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> Any:
        assert int(device) != int(peer)
        return (*OK, int(self.peers))

    def _cuCtxEnablePeerAccess(self, context: Any, flags: int) -> Any:
        assert flags == 0
        device, peer = self.here(), next(d for d in self.devices if d.context == int(context))
        assert device is not peer
        if peer in device.reached: return (S.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)
        device.reached.append(peer)
        return OK

    # memory

    def _cuMemPoolCreate(self, props: Any) -> Any:
        given = read(PoolProps, props)
        assert (given.allocType, given.handleTypes, given.location.type) == (1, 0, 1), "pool properties"
        return (*OK, self.make(cu.CUmemoryPool, Pool(self.devices[given.location.id])))

    def _cuMemPoolDestroy(self, pool: Any) -> Any:
        assert not self.drop(pool, Pool).held, "a pool is destroyed with memory in use"
        return OK

    def _cuMemPoolSetAttribute(self, pool: Any, which: Any, value: Any) -> Any:
        self.get(pool, Pool).attributes[which.name] = int(value)
        return OK

    def _cuMemPoolGetAttribute(self, pool: Any, which: Any) -> Any:
        made = self.get(pool, Pool)
        return (*OK, cu.cuuint64_t(made.reserved if "RESERVED" in which.name else made.used))

    def _cuMemPoolTrimTo(self, pool: Any, keep: int) -> Any:
        made = self.get(pool, Pool)
        made.reserved = made.used
        return OK

    def _cuMemPoolSetAccess(self, pool: Any, access: list[Any], count: int) -> Any:
        assert len(access) == count == 1
        given = read(AccessDesc, access[0])
        assert (given.location.type, given.flags) == (1, 3), "access of a pool"
        (made := self.get(pool, Pool)).shared.append(given.location.id)
        assert made.device.ordinal != given.location.id
        return OK

    def _cuMemAllocFromPoolAsync(self, nbytes: int, pool: Any, stream: Any) -> Any:
        made, queue = self.get(pool, Pool), self.queue(stream)
        assert made.attributes.get("CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES") == 0
        try: address = queue.device.alloc(nbytes, queue)
        except MemoryError: return (S.CUDA_ERROR_OUT_OF_MEMORY,)
        made.held += 1
        made.reserved = max(made.reserved, made.used)
        queue.device.pools[address] = made
        return (*OK, cu.CUdeviceptr(address))

    def _cuMemFreeAsync(self, address: Any, stream: Any) -> Any:
        (queue := self.queue(stream)).device.free(int(address), queue)
        return OK

    def _cuMemGetInfo(self) -> Any:
        here = self.here()
        pools = [each for each in self.handles.values() if isinstance(each, Pool) and each.device is here]
        free, total = here.emu.memory()
        return (*OK, free - sum(pool.reserved - pool.used for pool in pools), total)

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        assert flags == cu.CU_MEMHOSTALLOC_PORTABLE
        return (*OK, self.here().host(nbytes))

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before = getattr(self.capture_mode, "now", cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        self.capture_mode.now = mode
        return (*OK, before)

    def ends_captures(self) -> bool:
        """Whether a call that waits or frees ends the captures of this thread."""
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        return bool(self.capturing) and getattr(self.capture_mode, "now", None) != relaxed

    def _cuMemFreeHost(self, address: Any) -> Any:
        assert not self.ends_captures(), "freed while a stream is captured"
        assert self.here().pinned.pop(int(address), None) is not None, "no page-locked memory is there"
        return OK

    # work

    def put(self, work: Work, stream: Any) -> Any:
        if (recorded := self.captures.get(int(stream))) is not None:
            recorded.nodes.append(FakeNode(recorded, work))
            return OK
        queue = self.queue(stream)
        if queue.device.lost: return (S.CUDA_ERROR_ILLEGAL_ADDRESS,)
        try: queue.submit(work)
        except KernelError: raise
        except NVError as error:
            self.findings.append(str(error))
            return (S.CUDA_ERROR_INVALID_VALUE,)
        return OK

    def _cuMemsetD8Async(self, target: Any, value: int, nbytes: int, stream: Any) -> Any:
        return self.put(Fill(int(target), value, nbytes), stream)

    def _cuMemcpyDtoDAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> Any:
        return self.put(Copy(int(target), int(source), nbytes), stream)

    def _cuMemcpyHtoDAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> Any:
        memory, offset = self.here().at(source, nbytes)
        return self.put(Upload(int(target), memory, offset, nbytes), stream)

    def _cuMemcpyDtoHAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> Any:
        if isinstance(target, int):
            memory, offset = self.here().at(target, nbytes)
            return self.put(Download(memory, offset, int(source), nbytes), stream)
        (queue := self.queue(stream)).device.emu.copy_out(memoryview(target)[:nbytes], int(source), queue.emu)
        return OK

    def _cuMemcpyPeerAsync(self, target: Any, to: Any, source: Any, context: Any, nbytes: int,
                           stream: Any) -> Any:
        queue = self.queue(stream)
        assert int(to) == queue.device.context
        other = next(d for d in self.devices if d.context == int(context))
        assert any(each.device is other for each in queue.seen), "nothing of the other device is waited for"
        queue.device.emu.copy_peer(Copy(int(target), int(source), nbytes), other.emu, queue.emu)
        queue.issued += 1
        return OK


@functools.cache
def results(name: str) -> int:
    """How many things a function of cuda.bindings returns beside its status: its documentation names each."""
    said = getattr(cu, name).__doc__.partition("Returns\n")[2].partition("See Also")[0]
    return sum(" : " in line for line in said.splitlines())


def padded(name: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """An answer as cuda.bindings give it: None for each result of a call that failed."""
    count = results(name)
    assert len(answer) == (1 if answer[0] else 1 + count), f"{name} answers {answer}"
    return (*answer, *[None] * (1 + count - len(answer)))


@contextmanager
def installed(arch: str = "sm_90a", gpus: int = 1, check: bool = True, version: tuple[int, int] = (13, 0),
              ptxas: bool = False) -> Iterator[Fake]:
    """The fake in place of cuda.bindings: `gpus` GPUs of `arch`, a driver for CUDA `version`. PTX goes to the
    driver's compiler, or with `ptxas` through ptxas, whose cubins the fake knows by the text they came
    from."""
    fake = Fake(arch, gpus, check, version)

    def assembled(text: str, target: str) -> Any:
        made = assemble(text, target)
        fake.sources[made.cubin] = text
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_api, "bindings", lambda: fake)
        patch.setattr(cuda_code, "assemble", assembled)
        if not ptxas: patch.setattr(cuda_code, "release", lambda: None)
        yield fake
    assert fake.complaints == []
