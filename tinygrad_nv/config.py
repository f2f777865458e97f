"""Every environment variable tinygrad_nv reads: one row each, with its default and what it means.

Protocol: `get(name)` reads the environment each time, so a test or a shell decides, and nothing is cached
here. Inside `with override(name, value):` the value is that, in this thread. A value that the row does not
allow is a `ConfigError` with the allowed ones; a name that has no row is a mistake of ours. tinygrad's own
variables (DEV, BEAM, JIT, CC, ...) stay tinygrad's.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from tinygrad_nv.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """One variable: its name, what it is when unset, the values it may have (of a `path`, any; of a `number`,
    any integer from 0 on), and what they mean."""
    name: str
    default: int | str
    allowed: tuple[int | str, ...]
    meaning: str
    path: bool = False
    number: bool = False


SETTINGS = (
    Setting("NV", 1, (0, 1),
            "0: importing tinygrad_nv changes no schedule, DEV=CUDA is tinygrad's own; 1: enable()"),
    Setting("NV_SPEC", 0, (0, 1), "1: the graph is verified after every rewrite (slower; on in CI)"),
    Setting("NV_GEMM", 1, (0, 1),
            "0: matmuls are left to tinygrad's own kernels; 1: templates take them"),
    Setting("NV_ATTENTION", 1, (0, 1),
            "0: attention is left to matmuls and tinygrad's own kernels; 1: templates take it"),
    Setting("NV_NORM", 1, (0, 1),
            "0: norms, softmax and argmax are left to tinygrad's own kernels; 1: templates take them"),
    Setting("NV_DETERMINISTIC", 0, (0, 1),
            "1: a row has the same bits in every run and in every batch: schedules are of one class, in "
            "which the order of sums does not depend on the batch; 0: the fastest, and dq is summed as it "
            "comes"),
    Setting("NV_TORCH_CHECK", 1, (0, 1),
            "1: indices out of range of a graph of torch.compile are an IndexError; 0: they are not checked"),
    Setting("NV_STRICT", 0, (0, 1),
            "1: a kernel of ours that does not build is an error (on in CI); 0: tinygrad's own runs in its "
            "place, and a warning says why"),
    Setting("NV_DEBUG", 0, (0, 1),
            "1: block tables, lengths and references of pages are checked each time they are used (slow)"),
    Setting("NV_PROGRAM_CACHE", 1, (0, 1),
            "0: make and compile every kernel afresh; 1: take it from the disk cache"),
    Setting("NV_CPU_GRAPH", 1, (0, 1),
            "0: launch captured CPU kernels one by one; 1: as a graph, on all cores (Linux)"),
    Setting("NV_CPU", 1, (0, 1),
            "0: the CPU runs tinygrad's own kernels; 1: templates in C take what they can (DEV=CPU)"),
    Setting("NV_CPU_ISA", "auto", ("auto", "portable", "avx2", "avx512", "amx"),
            "instructions of kernels for the CPU. auto: the best that processor and system permit; portable: "
            "vectors of 128 bits; avx2: of 256, FMA; avx512: of 512; amx: tiles, too"),
    Setting("NV_QUANT_ACTIVATIONS", "auto", ("auto", "float", "int8"),
            "activations times quantised matrices in tiles, on a CPU. auto: int8 in blocks of 32 for models "
            "in GGUF, not with --dtype float32; float: as they are; int8: everywhere but "
            "with NF4, FP4 and 8-bit floats"),
    Setting("NV_PDL", 1, (0, 1),
            "0: a kernel begins when the one before it has ended; 1: earlier, where both can (Hopper)"),
    Setting("NV_NVTX", 0, (0, 1),
            "1: NVTX ranges by layer and kernel around launches, for Nsight Systems (needs nvtx)"),
    Setting("EMU_ARCH", "sm_90a", ("sm_80", "sm_89", "sm_90a"),
            "the GPU that DEV=EMU emulates. sm_80: an A100; sm_89: an L40; sm_90a: an H100"),
    Setting("EMU_CHECK", 1, (0, 1),
            "0: DEV=EMU runs without race and initialisation checks; 1: what they find is an error"),
    Setting("EMU_STEP_LIMIT", 10**9, (10**9, 10**10, 10**11),
            "warp-instructions after which DEV=EMU ends a launch whose threads poll memory; if none does, 20 "
            "times as many. 10000000000: for minutes of work; 100000000000: for an hour"),
    Setting("NV_C_FLAGS", "", ("",),
            "flags of the C compiler behind those of the emulator, the timing model, the transports and "
            "`ptx run`, as -fsanitize=undefined is; unset: none", path=True),
    Setting("NV_CACHE_DIR", "", ("",),
            "where compiled kernels and what was tuned and measured are kept; unset: tinygrad_nv in "
            "XDG_CACHE_HOME or ~/.cache", path=True),
    Setting("NV_REPACK_CACHE", 48, (0, 48),
            "GB of the cache directory for quantised weights in the order of kernels, which a second load "
            "reads. 0: every load repacks", number=True),
    Setting("NV_SCHEDULES", "", ("",),
            "the file of tuned schedules; unset: tinygrad_nv/schedules.json in the cache directory, and "
            "those that come with the package",
            path=True),
    Setting("NV_TIMING_GPU", "", ("",),
            "the GPU that BEAM and `tinygrad-nv tune` model where there is none, such as h200; unset: "
            "the first of the architecture with as many SMs", path=True),
    Setting("NV_TEMPLATE_SECONDS", 3, (3,),
            "seconds of processor time that a chat template may take to be compiled, and to render a "
            "conversation", number=True),
    Setting("NV_TEMPLATE_CHARS", 32 << 20, (32 << 20,),
            "characters of the longest text that a chat template may make", number=True),
    Setting("NV_TRUST_TOKENIZER", 0, (0, 1),
            "1: steps and regular expressions of tokenizer.json are used untried and however they grow a "
            "text, for a file that you trust; 0: those that may take long are refused"),
    Setting("NV_API_KEY", "", ("",), "the key that `tinygrad-nv serve` wants to see; unset: none, or "
            "those of --api-key", path=True),
    Setting("NV_ONNX_NODES", 1 << 15, (1 << 15,),
            "nodes that an ONNX model may have, its functions inlined, and that one call may evaluate, its "
            "loops unrolled", number=True),
    Setting("NV_ONNX_GIB", 1, (1,),
            "GiB that one result of an ONNX node may have; 64 times the bytes of weights and inputs if that "
            "is more, and half of the free memory for pairs of their elements", number=True),
    Setting("NV_ALL_REDUCE", "auto", ("auto", "nccl", "one_shot", "two_shot"),
            "sums over GPUs. auto: kernels of tinygrad_nv where GPUs address each other's memory and the "
            "message is small, else NCCL; nccl: NCCL alone; one_shot: every GPU reads all messages, of every "
            "size; two_shot: every GPU sums a shard, of every size"),
    Setting("NV_DIST_TIMEOUT", 600, (600, 0),
            "seconds that a collective may take, in which a rank must come to it, before all ranks end with "
            "the name of the rank that is behind. 0: any time", number=True),
    Setting("NV_DIST_TOKEN", "", ("",), "the secret that ranks of one group have in common, which keeps "
            "other processes out; unset: made from MASTER_ADDR, MASTER_PORT and the number of the job",
            path=True),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_NONE: Mapping[str, int | str] = {}
_overridden: ContextVar[Mapping[str, int | str]] = ContextVar("nv_settings", default=_NONE)


def get(name: str) -> int | str:
    """The value of a setting now, of its default's type. Raises `ConfigError` for one that is not allowed."""
    if (overridden := _overridden.get()) and name in overridden: return overridden[name]
    setting = _BY_NAME[name]
    text = os.environ.get(name, "").strip()
    if not text: return setting.default
    if setting.path: return text
    if setting.number:
        if text.isdecimal(): return int(text)
        raise ConfigError(f"{name}={text}", f"an integer from 0 on ({setting.meaning})",
                          f"unset {name} for its default, {setting.default}")
    if text not in (allowed := [str(value) for value in setting.allowed]):
        raise ConfigError(f"{name}={text}", f"one of {', '.join(allowed)} ({setting.meaning})",
                          f"unset {name} for its default, {setting.default}")
    return type(setting.default)(text)


def keep(name: str, value: int | str) -> None:
    """Sets a setting for this process: all its threads, and the processes that it starts."""
    assert value in _BY_NAME[name].allowed
    os.environ[name] = str(value)


@contextlib.contextmanager
def override(name: str, value: int | str) -> Iterator[None]:
    """A setting's value inside the block, in this thread, whatever the environment says."""
    assert value in _BY_NAME[name].allowed
    token = _overridden.set({**_overridden.get(), name: value})
    try: yield
    finally: _overridden.reset(token)


def overridden(name: str) -> bool:
    """Whether a setting has its value from a block of this thread."""
    return name in _overridden.get()
