"""Memory shared with torch and numpy, both ways: the same addresses, values, and lifetimes in every
order. Memory of a GPU, shared through DLPack, on the fake driver library: numpy's part never reads there."""
from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad.helpers import mv_address

from tests.support import with_root
from tinygrad_nv import Context, Tensor, TinyJit, dtypes, hooks
from tinygrad_nv.errors import DLPackError

SHARED: Any = {dtypes.bool: torch.bool, dtypes.int8: torch.int8, dtypes.uint8: torch.uint8,
               dtypes.int16: torch.int16, dtypes.uint16: torch.uint16, dtypes.int32: torch.int32,
               dtypes.uint32: torch.uint32,
               dtypes.int64: torch.int64, dtypes.uint64: torch.uint64, dtypes.float16: torch.float16,
               dtypes.bfloat16: torch.bfloat16, dtypes.float32: torch.float32, dtypes.float64: torch.float64,
               dtypes.fp8e4m3: torch.float8_e4m3fn, dtypes.fp8e5m2: torch.float8_e5m2,
               dtypes.fp8e4m3fnuz: torch.float8_e4m3fnuz, dtypes.fp8e5m2fnuz: torch.float8_e5m2fnuz}
COUNTED = torch.arange(32, dtype=torch.float32).reshape(4, 8)
VIEWS = {"dense": COUNTED, "transposed": COUNTED.T, "columns": COUNTED[:, :4], "rows": COUNTED[1::2],
         "steps": COUNTED[:, ::2],
         "column": COUNTED[:, 4], "expanded": COUNTED.expand(3, 4, 8),
         "permuted": COUNTED.reshape(2, 2, 8).permute(2, 0, 1),
         "number": COUNTED[1, 2], "ones": COUNTED.reshape(1, 4, 1, 8),
         "empty": COUNTED[:, :0], "moved": COUNTED[:, 1:3],
         "overlapping": COUNTED.flatten().as_strided((4, 3), (2, 1)),
         "uneven": COUNTED.flatten().as_strided((3, 3), (5, 2))}


def address(tensor: Tensor) -> int: return int(tensor.uop.base.buffer.ensure_allocated()._buf.va_addr)


def stored(*numbers: float) -> Tensor: return Tensor(list(numbers), device="CPU").realize()


@pytest.mark.parametrize("dtype", SHARED, ids=str)
def test_every_dtype_is_shared_both_ways(dtype: Any):
    theirs = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1]).to(SHARED[dtype])
    made = Tensor(theirs)
    assert made.dtype == dtype
    assert address(made) == theirs.data_ptr()
    back = torch.from_dlpack(made)
    assert back.dtype == theirs.dtype
    assert back.data_ptr() == theirs.data_ptr()
    theirs.view(torch.uint8)[0] = theirs.view(torch.uint8)[-1]
    assert back.view(torch.uint8).tolist() == theirs.view(torch.uint8).tolist()


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_torch(name: str):
    view = VIEWS[name]
    made = Tensor(view)
    assert made.shape == tuple(view.shape)
    np.testing.assert_array_equal(made.numpy(), view.numpy())
    np.testing.assert_array_equal((made * 2 + 1).numpy(), (view * 2 + 1).numpy())
    np.testing.assert_array_equal(torch.from_dlpack(made).numpy(), view.numpy())


@pytest.mark.parametrize("name", ["dense", "transposed", "columns", "rows", "steps", "column",
                                  "permuted", "expanded"])
def test_views_of_torch_are_not_copied(name: str):
    base = COUNTED.clone()
    view = base.as_strided(VIEWS[name].shape, VIEWS[name].stride(), VIEWS[name].storage_offset())
    made = Tensor.from_dlpack(view, copy=False)
    base += 100
    np.testing.assert_array_equal(made.numpy(), view.numpy())


def test_views_of_tinygrad_keep_their_strides():
    made = Tensor(COUNTED.clone())
    for view, strides in ((made.T, (1, 8)), (made[1:, 2:5], (8, 1)), (made[:, 3], (8,)),
                          (made.expand(2, 4, 8), (0, 8, 1))):
        shared = torch.from_dlpack(view)
        assert shared.stride() == strides
        np.testing.assert_array_equal(shared.numpy(), view.numpy())
    shared = torch.from_dlpack(made[2:])
    shared[0, 0] = -5
    assert made[2, 0].item() == -5
    assert torch.from_dlpack(made.flip(1))[0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert torch.from_dlpack(made.pad(((1, 0), (0, 0)))).tolist()[0] == [0] * 8


def test_what_is_computed_is_realized_once_and_shared():
    made = stored(1, 2, 3) + 1
    shared, again = torch.from_dlpack(made), np.from_dlpack(made)
    shared[1] = 70
    assert made.tolist() == again.tolist() == [2, 70, 4]
    assert torch.from_dlpack(Tensor(3)).item() == 3
    assert torch.from_dlpack(Tensor.full((2, 2), 4.0)).tolist() == [[4, 4], [4, 4]]
    assert torch.from_dlpack(Tensor.empty(0, 3, dtype=dtypes.bfloat16)).shape == (0, 3)


def test_writes_of_tinygrad_are_seen():
    theirs = torch.zeros(4)
    made = Tensor(theirs)
    made.assign(made + 5).realize()
    assert theirs.tolist() == [5] * 4


def test_a_copy_is_asked_for_or_refused():
    theirs = torch.zeros(4)
    copied = Tensor.from_dlpack(theirs, copy=True)
    shared = torch.from_dlpack(made := stored(0, 0), copy=True)
    theirs += 1
    shared += 1
    assert copied.tolist() == [0] * 4
    assert made.tolist() == [0, 0]
    for data in (np.ones(6)[::-1], np.ones(9, np.float32)[1:], COUNTED.flatten().as_strided((4, 3), (2, 1))):
        assert Tensor.from_dlpack(data).shape == tuple(data.shape)
        with pytest.raises(DLPackError, match="which cannot be shared"): Tensor.from_dlpack(data, copy=False)


def test_read_only_memory_is_copied():
    data = np.arange(8, dtype=np.float32)
    data.flags.writeable = False
    made = Tensor.from_dlpack(data)
    made.assign(made + 1).realize()
    assert data.tolist() == list(range(8))


def test_numpy():
    made = stored(1, 2, 3, 4).reshape(2, 2)
    shared = np.asarray(made)
    shared[0, 1] = 9
    assert made.tolist() == [[1, 9], [3, 4]]
    assert np.asarray(made, dtype=np.float64).dtype == np.float64
    copied = np.array(made)
    copied[0, 0] = 5
    assert made.tolist() == [[1, 9], [3, 4]]
    assert np.asarray(made.cast(dtypes.bfloat16)).dtype == np.float32
    assert (np.stack([made, made])[1] == shared).all()
    with pytest.raises(ValueError, match="copy=None"): np.asarray(made.cast(dtypes.bfloat16), copy=False)


def test_the_device_is_tinygrads_rule():
    theirs = torch.ones(4)
    with Context(DEV="EMU"):
        assert Tensor(theirs).device == "EMU"
        assert Tensor.from_dlpack(theirs).device == "CPU"
        assert Tensor(theirs).tolist() == [1] * 4
    assert Tensor(theirs, device="EMU", dtype=dtypes.half).dtype == dtypes.half
    assert np.asarray(Tensor(theirs, device="EMU")).tolist() == [1] * 4


def test_inputs_of_a_jit():
    add = TinyJit(lambda x, y: (x + y).realize())
    for i in range(4):
        assert add(Tensor(torch.full((8,), float(i))), Tensor(torch.ones(8))).tolist() == [i + 1] * 8


# **** lifetimes ****

class Producer:
    """Memory of numpy's, and what says whether it lives."""

    def __init__(self) -> None:
        self.array = np.arange(64, dtype=np.float32).repeat(1024)
        self.gone = weakref.ref(self)

    def __dlpack__(self, **asked: Any) -> object: return _kept(self).__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]: return 1, 0


class Kept:
    def __init__(self, owner: Producer) -> None:
        self.owner, self.__array_interface__ = owner, owner.array.__array_interface__


def _kept(owner: Producer) -> Any: return np.asarray(Kept(owner))


def test_torchs_memory_lives_as_long_as_the_tensor():
    producer = Producer()
    gone = producer.gone
    made = Tensor.from_dlpack(producer)
    view, later = made[64:128].contiguous(), made * 2
    del producer, made
    gc.collect()
    assert gone() is not None
    assert view.tolist() == [0] * 64
    assert later.numpy()[-1] == 126
    del view, later
    gc.collect()
    assert gone() is None


def test_a_tensors_memory_lives_as_long_as_torchs():
    before = Tensor.ones(1 << 20).contiguous().realize()
    holder = weakref.ref(before.uop.base.buffer)
    shared = torch.from_dlpack(before)
    inner = shared[1000:1010]
    del before, shared
    gc.collect()
    assert holder() is not None
    others = [Tensor.full((1 << 20,), 7.0).contiguous().realize() for _ in range(3)]
    assert inner.tolist() == [1] * 10
    del inner
    gc.collect()
    assert holder() is None
    del others


def test_a_capsule_that_is_never_taken_gives_memory_back():
    made = stored(1, 2, 3)
    holder, capsule = weakref.ref(made.uop.base.buffer), made.__dlpack__()
    del made
    gc.collect()
    assert holder() is not None
    del capsule
    gc.collect()
    assert holder() is None


def test_memory_passes_through_both_and_back():
    producer = Producer()
    gone, made = producer.gone, Tensor.from_dlpack(producer)
    shared = Tensor(torch.from_dlpack(made))
    del producer, made
    gc.collect()
    assert shared.numpy()[-1] == 63
    assert gone() is not None
    del shared
    gc.collect()
    assert gone() is None


def test_nothing_is_read_beyond_a_view():
    """The buffer of a view with gaps ends with a whole step, here in a page that may not be read."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start, libc = mv_address(memory), ctypes.CDLL(None, use_errno=True)
    whole = np.frombuffer(memory, np.float32, page // 4)
    whole[:] = np.arange(page // 4)
    view = whole[page // 4 - 28:].reshape(7, 4)[:, :4]
    gaps = np.lib.stride_tricks.as_strided(whole[page // 4 - 52:], (7, 4), (32, 4))
    assert libc.mprotect(ctypes.c_void_p(start + page), page, 0) == 0
    try:
        for data in (gaps, view):
            made = Tensor.from_dlpack(data, copy=False)
            np.testing.assert_array_equal((made + 1).numpy(), data + 1)
            np.testing.assert_array_equal(made.contiguous().numpy(), data)
            np.testing.assert_array_equal(made.to("EMU").numpy(), data)
            np.testing.assert_allclose((made @ made.T).numpy(), data @ data.T)
            np.testing.assert_allclose(made.sum(0).numpy(), data.sum(0))
            del made
    finally: libc.mprotect(ctypes.c_void_p(start + page), page, mmap.PROT_READ | mmap.PROT_WRITE)


def test_while_disabled_the_tensor_is_tinygrads():
    with hooks.disabled():
        assert not hasattr(Tensor, "__dlpack__")
        with pytest.raises(RuntimeError, match="can't create Tensor"): Tensor(torch.ones(2))
    assert Tensor(torch.ones(2)).tolist() == [1, 1]


SCRIPT = """
import gc
import numpy as np
from tests.support.runtime.cuda_fake import installed
from tinygrad_nv import Device, Tensor, dtypes, hooks
from tinygrad_nv.dlpack.capsule import describe
from tinygrad_nv.errors import DLPackError
from tinygrad_nv.runtime.cuda import device as cuda_device

cuda_device.has_library = lambda: True

class Torch:
    '''A GPU's tensor as torch gives it: it notes the stream that it was asked for.'''
    streams = []
    def __init__(self, tensor, number=0): self.tensor, self.number = tensor, number
    def __dlpack_device__(self): return 2, self.number
    def __dlpack__(self, stream=None, max_version=None):
        self.streams.append(stream)
        return self.tensor.__dlpack__(max_version=max_version)

with installed() as fake:
    x = Tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], device="CUDA").realize()
    address = int(x.uop.base.buffer._buf)
    assert x.__dlpack_device__() == (2, 0)
    waited = fake.calls["cuCtxSynchronize"]
    seen = describe(x.T.__dlpack__(stream=7, max_version=(1, 0)))
    assert fake.calls["cuCtxSynchronize"] > waited
    assert (seen.address, seen.device, seen.shape, seen.strides) == (address, (2, 0), (4, 2), (1, 4)), seen
    assert describe(x.cast(dtypes.bfloat16).__dlpack__()).dtype == dtypes.bfloat16
    back = Tensor(Torch(x))
    assert back.device == "CUDA" and int(back.uop.base.buffer._buf) == address
    assert Torch.streams == [int(Device["CUDA"].driver.streams[0].handle)]
    y = Tensor.from_dlpack(Torch(x[1:]))
    assert (y + back).tolist() == [[6, 8, 10, 12], [10, 12, 14, 16]]
    assert describe(Tensor.from_dlpack(Torch(x.T)).__dlpack__()).address == address
    # the memory lives as long as what was made of it, and is freed once
    frees = fake.calls["cuMemFreeAsync"]
    del x, y, seen; gc.collect()
    assert back.tolist()[1][3] == 8
    waited, frees = fake.calls["cuCtxSynchronize"], fake.calls["cuMemFreeAsync"]
    del back; gc.collect()
    assert fake.calls["cuCtxSynchronize"] > waited
    assert fake.calls["cuMemFreeAsync"] == frees + 1
    z = Tensor([1.0, 2.0, 3.0], device="CUDA").realize()
    assert np.from_dlpack(z, device="cpu").tolist() == np.asarray(z).tolist() == [1, 2, 3]
    assert Tensor.from_dlpack(Torch(z), copy=True).tolist() == [1, 2, 3]
    for refused in (lambda: Tensor.from_dlpack(Torch(z[1:])),
                    lambda: Tensor.from_dlpack(Torch(z, 1)),
                    lambda: z.__dlpack__(dl_device=(1, 0), copy=False)):
        try: refused()
        except DLPackError as error: print(str(error).splitlines()[0])
    del z; gc.collect()
    hooks.remove_device("CUDA")
"""


def test_a_gpus_memory_is_shared():
    kept = {name: value for name, value in with_root().items() if name not in ("DEV", "NV")}
    kept["DEV"] = "CUDA:PTX"    # which needs no compiler of CUDA C
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=kept, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    misaligned, absent, elsewhere = done.stdout.splitlines()
    assert "not a multiple of 16 bytes on CUDA" in misaligned
    assert absent.startswith("a tensor on GPU 1: ")
    assert elsewhere == "a Tensor on CUDA, asked for elsewhere"
