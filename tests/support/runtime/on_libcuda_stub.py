"""Run by test_cuda_bindings.py with the stub as the driver library: one of everything."""
from __future__ import annotations

import sys

from tests.unit.runtime.test_driver import ADD
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.cuda import code as cuda_code
from tinygrad_nv.runtime.cuda import driver as cuda
from tinygrad_nv.runtime.driver import (
    Copy,
    Download,
    Fill,
    Launch,
    TensorMapSpec,
    Upload,
    Window,
    integer,
    pointer,
)

cuda_code.release = lambda: None  # PTX goes to the driver


def say(*words: object) -> None: print("#", *words, file=sys.stderr, flush=True)


say("missing", repr(cuda.missing()))
gpu = cuda.CUDADriver()
say(gpu.properties.name, gpu.properties.arch, gpu.properties.shared_limit)
address = gpu.alloc(4096)
module = gpu.load(ADD.encode())
add = module.function("add")
say(add.attributes.registers, add.attributes.max_threads, add.handle.sizes)
for wrong in (lambda: gpu.load(ADD.replace("add", "broken").encode()), lambda: module.function("nope")):
    try: wrong()
    except DriverError as error: say(error.found)
gpu.copy_in(address, memoryview(bytes(range(64))))
back = bytearray(4)
gpu.copy_out(memoryview(back), address)
say(back.hex())
args = (pointer(address), integer(5))
plain = Launch(add, (3, 2, 1), (64, 2, 1), args)
full = Launch(add, (2, 1, 1), (64, 1, 1), args, dynamic_smem=60000, cluster=(2, 1, 1), pdl=True,
              window=Window(address, 4096, 0.5))
gpu.submit(plain)
gpu.submit(full)
gpu.submit(Fill(address, 9, 30))
say(gpu.most_clusters(8))
say(gpu.tensor_map(TensorMapSpec("bf16", address, (128, 64), (256,), (64, 32), swizzle="128B"))[:2].hex())
start, end = gpu.event(), gpu.event()
gpu.record(start)
gpu.wait(start, gpu.stream())
gpu.record(end)
gpu.wait_for(end)
say(gpu.ms_between(start, end))
host = gpu.host(100)
graph = gpu.graph()
nodes = [graph.add(Fill(address, 1, 64))]
for work in (plain, full, Copy(address, address + 64, 32), Upload(address, host, 4, 8),
             Download(host, 8, address, 9)):
    nodes.append(graph.add(work, nodes))
ready = graph.instantiate()
other = Launch(add, (3, 2, 1), (64, 2, 1), (pointer(1), integer(5)))
for node, work in zip(nodes, (Fill(address, 2, 64), other, full, Copy(address, address, 33)), strict=False):
    ready.update(node, work)
ready.launch()
gpu.set_persisting_l2(4096)
say(gpu.memory(), gpu.slack_bytes())
gpu.pool.share(3)
gpu.submit(plain, gpu.external_stream(0x1234))
gpu.free(address)
gpu.close()
say("closed", len(gpu.live))
