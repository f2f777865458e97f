"""What is said when a device has no more memory: what was asked, what is held, and advice that the figures
bear out. The pools here are of devices of 1 GiB; `others` bytes of one are in use by others."""
from __future__ import annotations

from pathlib import Path

import pytest
from tinygrad.helpers import Context

from tinygrad_nv import LLM, Device, Tensor, dtypes
from tinygrad_nv.engine.memory_planning import require_room
from tinygrad_nv.errors import OutOfMemoryError, RequestError
from tinygrad_nv.models.config import read_config
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.runtime.memory_pool import MemoryPool, label_allocations

MiB, GiB = 1 << 20, 1 << 30


class OneGiB(EmulatedDriver):
    """Memory that is only counted."""

    def __init__(self, others: int = 0) -> None:
        super().__init__(check=False)
        self.others, self.used, self.next, self.piece = others, dict[int, int](), 0, GiB

    def alloc(self, nbytes: int) -> int:
        if nbytes > min(self.memory()[0], self.piece): raise MemoryError("the driver has no such piece")
        self.next += 256
        self.used[self.next] = nbytes
        return self.next

    def free(self, address: int) -> None: del self.used[address]

    def memory(self) -> tuple[int, int]: return GiB - self.others - sum(self.used.values()), GiB


def pool(limit: int = GiB, others: int = 0, **held: int) -> MemoryPool:
    """A pool that holds so many bytes by label."""
    made = MemoryPool(OneGiB(others), name="GPU")
    made.total, made.limit = GiB, limit
    for label, nbytes in held.items():
        with label_allocations(label.replace("_", " ")): made.alloc(nbytes)
    return made


def refused(of: MemoryPool, nbytes: int, label: str = "tensors") -> OutOfMemoryError:
    with pytest.raises(OutOfMemoryError) as caught, label_allocations(label): of.alloc(nbytes)
    return caught.value


# **** the words ****

def test_all_of_it():
    error = refused(pool(900 * MiB, 24 * MiB, weights=600 * MiB, KV_cache=200 * MiB), 150 * MiB, "graphs")
    assert str(error) == """\
out of memory on GPU: 150.00 MiB for graphs asked, 100.00 MiB to be had
  held:     weights 600.00 MiB in 1, KV cache 200.00 MiB in 1
  limit:    900.00 MiB of 1.00 GiB (87.9%)
  outside:  24.00 MiB (other processes, the driver); free: 200.00 MiB
  expected: at most 100.00 MiB
  to fix:   raise --gpu-memory-utilization to 0.93"""
    assert (error.asked, error.label, error.exit_code) == (150 * MiB, "graphs", 2)
    assert error.report.of("weights").nbytes == 600 * MiB


def test_a_limit_is_not_raised_where_others_hold_the_rest():
    error = refused(pool(900 * MiB, 100 * MiB, weights=800 * MiB), 150 * MiB)
    assert "--gpu-memory-utilization" not in error.fix
    assert "end other processes" not in error.fix, "the limit stops this first"
    assert "100.00 MiB to be had" in error.found


def test_other_processes():
    error = refused(pool(others=500 * MiB, weights=400 * MiB), 200 * MiB)
    assert error.fix == ("end other processes on this GPU (nvidia-smi lists them): 500.00 MiB are held "
                         "outside this one")
    assert "124.00 MiB to be had" in error.found


def test_nothing_else_to_say():
    assert refused(pool(weights=900 * MiB, tensors=100 * MiB), 100 * MiB).fix == (
        "let go of tensors that are not needed: the largest allocation is 900.00 MiB of weights")


def test_more_than_there_is():
    error = refused(pool(), 3 * GiB)
    assert error.fix == "ask for less: the device has 1.00 GiB in all"
    assert "held:     nothing" in error.found


def test_memory_in_pieces():
    small = pool(weights=100 * MiB)
    small.driver.piece = 50 * MiB
    error = refused(small, 60 * MiB)
    assert "driver:   the driver has no such piece" in error.found
    assert error.fix == "free what is large and not needed: no piece of what is free may be so large"


def test_what_the_driver_keeps_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OneGiB, "slack_bytes", lambda self: 300 * MiB)
    assert "held:     weights 700.00 MiB in 1; kept by the driver 300.00 MiB" in refused(
        pool(weights=700 * MiB), 400 * MiB).found


def test_page_locked_memory():
    small = pool()
    small.driver.host = lambda nbytes: (_ for _ in ()).throw(MemoryError("no pages"))
    with pytest.raises(OutOfMemoryError) as caught, label_allocations("graphs"): small.host(2 * MiB)
    assert caught.value.found == "out of page-locked memory: 2.00 MiB asked for graphs (no pages)"
    assert caught.value.expected == "memory of the host that can be locked"
    assert caught.value.fix.endswith("raise what may be locked (ulimit -l)")


def test_code_and_graphs():
    small = pool(weights=1000 * MiB)
    def load() -> None: raise MemoryError("no room for code")
    with pytest.raises(OutOfMemoryError) as caught: small.retry_relieved(load, "kernel r_64")
    assert caught.value.found == """\
out of memory on GPU: none for kernel r_64, 24.00 MiB to be had
  held:     weights 1000.00 MiB in 1
  limit:    1.00 GiB of 1.00 GiB (100%)
  outside:  0 B (other processes, the driver); free: 24.00 MiB
  driver:   no room for code"""
    assert caught.value.expected == "free memory on the device"
    assert caught.value.fix == (
        "hold less (a smaller --gpu-memory-utilization): code and graphs need memory, too")


def test_a_tensor_that_is_too_large():
    with Context(DEV="EMU"), pytest.raises(MemoryError) as caught, label_allocations("pictures"):
        Tensor.empty(1 << 37, dtype=dtypes.uint8).uop.buffer.ensure_allocated()
    assert str(caught.value).startswith("out of memory on EMU: 128.00 GiB for pictures asked, ")


# **** a language model ****

@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> NVDevice:
    """A device of 1 GiB that LLM can ask for."""
    made = NVDevice("EMU:6", OneGiB())
    made.pool = pool()
    monkeypatch.setattr(type(Device), "__getitem__", lambda self, name: made)
    return made


def room(tiny: Path, device: NVDevice, limit: int, dtype: object = dtypes.float32, length: int = 200) -> str:
    """The advice where weights (439 KiB in float32) and cache (512 bytes a token) have `limit` bytes."""
    with pytest.raises(OutOfMemoryError) as caught:
        require_room("EMU:6", read_config(tiny), dtype, length, length, limit / GiB)
    assert "for weights, " in caught.value.found
    assert "for KV cache asked" in caught.value.found
    return caught.value.fix.removeprefix("raise --gpu-memory-utilization to 0.01; or ")


def test_a_cache_that_does_not_fit(tiny: Path, device: NVDevice):
    weights = read_config(tiny).parameters * 2
    token = 2 * 2 * 2 * 16 * 2
    assert room(tiny, device, weights + token * 150 + 8, dtypes.bfloat16) == (
        "lower --max-model-len by 50 tokens, to 150")
    require_room("EMU:6", read_config(tiny), dtypes.bfloat16, 150, 150, (weights + token * 150 + 8) / GiB)


def test_weights_that_do_not_fit(tiny: Path, device: NVDevice):
    weights = read_config(tiny).parameters * 2
    assert room(tiny, device, weights * 2) == "use --dtype bfloat16: 219.62 KiB of weights"
    device.pool.driver.others = GiB - 200 * 1024
    for dtype in (dtypes.float32, dtypes.float16):
        assert room(tiny, device, GiB, dtype) == (
            "end other processes on this GPU (nvidia-smi lists them): 1023.80 MiB are held outside this one; "
            "or use a smaller model, or a GPU with more than 200.00 KiB free")


def test_advice_for_a_cache_after_loading(tiny: Path, device: NVDevice):
    require_room("EMU:6", read_config(tiny), dtypes.bfloat16, 200, 200, 1.0)
    with label_allocations("KV cache"): device.pool.alloc(200 * 256)
    device.pool.limit = 200 * 256
    assert refused(device.pool, 1000, "activations").fix == (
        "raise --gpu-memory-utilization to 0.01; or lower --max-model-len by 4 tokens, to 196")


def test_nothing_is_loaded_before(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    from tinygrad_nv.models import weights
    monkeypatch.setattr(weights, "load", lambda *_: pytest.fail("weights are read"))
    before = Device["EMU"].pool.report()
    with pytest.raises(OutOfMemoryError, match="for weights, "):
        LLM(tiny, device="EMU", gpu_memory_utilization=1e-6)
    after = Device["EMU"].pool.report()
    assert after.largest == before.largest
    Device["EMU"].pool.use_at_most(1)


def test_the_command_line(command, tiny: Path):
    command("generate", tiny, "hello", "--device", "EMU", "--gpu-memory-utilization", 1e-6).refused(
        "out of memory on EMU: ", " for KV cache asked", "  held:     ", "  limit:    83.89 KiB of 80.00 GiB",
        "to fix:   raise --gpu-memory-utilization to 0.01\n")
    Device["EMU"].pool.use_at_most(1)


# **** --gpu-memory-utilization ****

@pytest.mark.parametrize("name", ["CPU", "EMU"])
@pytest.mark.parametrize("text", ["0", "-0.5", "1.01", "nan", "inf"])
def test_a_part_out_of_range(command, tiny: Path, text: str, name: str):
    command("generate", tiny, "hello", "--device", name, f"--gpu-memory-utilization={text}").refused(
        f"gpu_memory_utilization is {float(text)}",
        "expected: a part of the GPU's memory: above 0, at most 1",
        "to fix:   change --gpu-memory-utilization; 0.9 is the default")


def test_a_part_that_is_no_number(command, tiny: Path):
    command("generate", tiny, "hello", "--gpu-memory-utilization=much").refused(
        "argument --gpu-memory-utilization: invalid float value: 'much'")
    for value in ("0.5", True, None):
        with pytest.raises(RequestError, match=f"gpu_memory_utilization is {value}"):
            LLM(tiny, device="CPU", gpu_memory_utilization=value)


def test_on_a_cpu_it_has_no_effect(command, tiny: Path):
    command("generate", tiny, "hello", "--max-tokens", 1, "--gpu-memory-utilization", 1e-6).succeeded()


def test_of_a_product_it_has_no_effect(command):
    command("explain", "--gemm", "64x64x64", "--gpu-memory-utilization", 0.5).refused("with --gemm")
