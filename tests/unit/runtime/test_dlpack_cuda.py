"""Memory of a GPU, shared through DLPack, on the fake driver library: numpy's part never reads there."""
from __future__ import annotations

import subprocess
import sys

from tests.support import with_root

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
