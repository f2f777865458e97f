"""What decode kernels take: registers, shared memory, bytes of pages, passes of shared memory; and what is
refused."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import DType, dtypes

from bench.lib.specs import latent
from tests.support.tile.decode_case import SMALL, decode, launched, requests
from tinygrad_nv.errors import ScheduleError, SpecError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.tile.decode.schedules import Decode
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.decode.templates import FAMILY as DECODE
from tinygrad_nv.tile.expression import Constant, Load, Position, Sum
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

KV = [None, dtypes.int8, dtypes.fp8e4m3, pytest.param(dtypes.fp8e5m2, marks=pytest.mark.slow)]
SHAPES = [{"d": 128, "group": 4}, {"d": 64, "group": 8}, {"d": 96, "group": 1}, {"d": 256, "group": 4},
          {"d": 192, "d_v": 128, "group": 16}, {"d": 128, "group": 4, "s_q": 8},
          {"d": 128, "group": 8, "s_q": 8}, {"d": 256, "group": 8, "s_q": 8},
          {"d": 128, "group": 4, "window": 4096}]
LATENTS = [(16, 1), (128, 1), (128, 8)]     # query heads, rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_defaults_do_not_spill(arch: str, kv: DType | None, shape: dict):
    """Requests of up to 131072 tokens."""
    do_not_spill(decode(batch=4, heads=8, pages=8192, kv=kv, **shape), arch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("heads", "rows"), LATENTS)
def test_latents_do_not_spill(arch: str, heads: int, rows: int):
    do_not_spill(latent(4, heads, rows, pages=8192), arch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("shape", [{"d": 64, "group": 8, "window": 128, "sinks": True},
                                   {"d": 64, "group": 8, "s_q": 8, "sinks": True},
                                   {"d": 128, "group": 5, "window": 8192, "chunked": True}], ids=str)
def test_sinks_and_chunks_do_not_spill(arch: str, shape: dict):
    """gpt-oss and Llama 4."""
    do_not_spill(decode(batch=4, heads=8, pages=8192, **shape), arch)


def do_not_spill(spec: DecodeSpec, arch: str) -> None:
    schedule = DECODE.choose(spec, GPU(arch))
    assert schedule is not None
    for kernel in TABLE.build(spec, schedule, GPU(arch)).kernels:
        resources = assemble(kernel.ptx, arch).kernels[kernel.name]
        assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
        assert max(resources.shared_bytes, kernel.dynamic_smem) <= SMEM_BYTES[arch]
        early = [word in kernel.ptx for word in ("griddepcontrol.wait", "griddepcontrol.launch_dependents")]
        assert [kernel.pdl, *early] == [arch == "sm_90a"] * 3


@pytest.mark.parametrize(("dtype", "kv", "most"), [
    (dtypes.bfloat16, None, 20), (dtypes.bfloat16, dtypes.int8, 75), (dtypes.bfloat16, dtypes.fp8e4m3, 99),
    (dtypes.bfloat16, dtypes.fp8e5m2, 99), (dtypes.float16, dtypes.fp8e5m2, 43)])
def test_instructions_of_the_loop(dtype: DType, kv: DType | None, most: int):
    """PTX instructions of a warp for each 512 bytes of keys and values. An SM takes 14 bytes a cycle from
    memory and issues 4 instructions: 146 would keep up. (In SASS they are 18, 71 and 73.)"""
    spec = decode(batch=4, heads=8, group=4, d=128, pages=64, dtype=dtype, kv=kv)
    schedule = DECODE.choose(spec, GPU("sm_90a"))
    assert schedule is not None
    lines = TABLE.build(spec, schedule, GPU("sm_90a")).kernels[0].ptx.splitlines()
    # the loop over tiles ends where the next one is chosen; copies of the first tiles are before it
    start = max(i for i, line in enumerate(lines) if f"cp.async.wait_group {schedule.depth - 2}" in line)
    end = next(i for i, line in enumerate(lines) if i > start and line.strip().startswith("$endloop"))
    code = [line for line in lines[start:end] if line.strip().endswith(";")]
    assert len(code) <= most * sum("cp.async.cg" in line for line in code)


def page_bytes(stats: Stats) -> tuple[int, int]:
    """Bytes of copies, as asked for and in sectors."""
    sites = [site for site in stats.sites if site.opcode.startswith("cp.async.cg")]
    return stats.asynchronous_bytes, 32 * sum(site.sectors for site in sites)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("page_size", [8, 64])
@pytest.mark.parametrize(("shape", "arch"), [
    ({"d": 128, "group": 4}, "sm_90a"), ({"d": 64, "group": 8, "s_q": 8}, "sm_90a"),
    ({"d": 256, "group": 4}, "sm_80"), ({"d": 96, "group": 8, "s_q": 4}, "sm_80"),
    ({"d": 192, "d_v": 32, "group": 1}, "sm_90a"), ({"d": 128, "group": 4, "window": 500}, "sm_90a")],
    ids=str)
def test_pages_are_read_once_without_conflicts(kv: DType | None, page_size: int, shape: dict, arch: str):
    """Keys and values that rows see, whole sectors, and not a byte more; shared memory as fast as it goes;
    all the rest, the workspace among it, less than a third of that."""
    spec = decode(heads=2, pages=2048 // page_size, page_size=page_size, kv=kv, **shape)
    schedule = DECODE.choose(spec, GPU(arch))
    assert schedule is not None
    given = requests(spec, [1500])
    _, reports = launched(TABLE.build(spec, schedule, GPU(arch)), spec, given, arch)
    assert [report.findings for report in reports] == [[]] * len(reports)
    assert [report.stats.bank_conflicts for report in reports] == [{}] * len(reports)
    keys = 1500 if spec.window is None else spec.window + spec.s_q - 1
    ideal = keys * spec.heads * (spec.d + spec.d_v) * spec.k.dtype.itemsize
    assert page_bytes(reports[0].stats) == (ideal, ideal)
    assert sum(report.stats.l2_bytes for report in reports) <= 4 / 3 * ideal + 32 * 1024


# **** what is refused ****

def broken(schedule: Decode = SMALL, spec: DecodeSpec | None = None) -> str:
    """What is said."""
    with pytest.raises(ScheduleError) as error: TABLE.build(spec or decode(), schedule, GPU("sm_80"))
    return str(error.value)


@pytest.mark.parametrize(("schedule", "words"), [
    (SMALL.warps(3, 1), "3x1 warps are not 1, 2 or 4 along rows"),
    (SMALL.keys(96), "block_n=96 is not a power of 2, of 4 warps × 16 keys at least"),
    (SMALL.keys(32), "block_n=32 is not a power of 2, of 4 warps × 16 keys at least"),
    (SMALL.stages(1), "1 stages are not 2 to 8"), (SMALL.split(33), "33 splits, at most 32"),
    (SMALL.stages(8).keys(256), "8 stages × 65536 B, or"),
    (replace(SMALL, split_keys=0), "extents below 1")])
def test_impossible_schedules_are_refused_with_the_arithmetic(schedule: Decode, words: str):
    assert words in broken(schedule)


def test_what_no_schedule_can_do():
    spec = decode()
    for d, kv, unit in ((72, dtypes.bfloat16, 16), (48, dtypes.int8, 32)):
        assert TABLE.problems(decode(d=d, kv=kv), SMALL, GPU("sm_80")) == [
            f"{name}={d} is not a multiple of {unit}" for name in ("d", "d_v")]
    for words, change in (
            ("keys begin at multiples of 8 B, copies at multiples of 16", {"k": replace(spec.k, token=68)}),
            ("pages of values 4294967296 B apart, at most 2147483647",
             {"v": replace(spec.v, page=1 << 31)}),
            ("rows of q begin at multiples of 2 B, loads at multiples of 4",
             {"q": replace(spec.q, offset=1)}),
            ("rows of the result begin at multiples of 2 B", {"out": replace(spec.out, offset=1)}),
            ("65536 requests, at most 65535", {"batch": 65536})):
        assert words in broken(spec=replace(spec, **change))
        assert DECODE.choose(replace(spec, **change), GPU("sm_80")) is None
    assert TABLE.problems(spec, SMALL, GPU("sm_75")) == ["sm_75 is not sm_80, sm_89, sm_90a"]


@pytest.mark.parametrize(("change", "words"), [
    ({"s_q": 9}, "s_q=9"), ({"page_size": 48}, "pages of 48 tokens"), ({"d": 1040}, "heads of 1040 and 64"),
    ({"window": 0}, "window=0"), ({"pages": 0}, "pages=0"), ({"score": Sum(dtypes.int32)}, "scores of"),
    ({"score": Sum() + Load(0, dtypes.float32, 0, 1)}, "a score that reads memory"),
    ({"score": Sum(part=1)}, "in a score"),
    ({"score": Sum() * Position(3).cast(dtypes.float32)}, "in a score"),
    ({"k_scale": None}, "no k_scale with s8"), ({"score": Constant(1.0)}, "")])
def test_what_no_spec_states(change: dict, words: str):
    spec = decode(kv=dtypes.int8)
    if not words: assert replace(spec, **change).score == Constant(1.0)
    else:
        with pytest.raises(SpecError) as error: replace(spec, **change)
        assert words in str(error.value)


def test_dtypes_that_no_spec_has():
    for dtype, kv in ((dtypes.bfloat16, dtypes.float16), (dtypes.bfloat16, dtypes.uint8)):
        with pytest.raises(SpecError): decode(dtype=dtype, kv=kv)
    float32 = decode(dtype=dtypes.float32)  # a CPU has kernels of it
    schedule = DECODE.choose(decode(), GPU("sm_80"))
    assert any("f32" in words for words in TABLE.problems(float32, schedule, GPU("sm_80")))
    spec = decode()
    with pytest.raises(SpecError, match="k_scale with bf16"):
        replace(spec, k_scale=decode(kv=dtypes.int8).k_scale)


def test_a_spec_in_words():
    spec = decode(batch=4, heads=8, group=4, s_q=2, d=128, pages=64, kv=dtypes.int8, window=100)
    assert str(spec).startswith("decode 4x2x≤1024, 32 heads of 8, d 128, bf16 of s8, pages of 16, window 100")
