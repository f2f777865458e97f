"""Comments at the head of PTX: what is written is read back, what cannot be read is refused."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from attention_launch import submitted
from gemm_launch import Launcher

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime import clock, program
from tinygrad_nv.runtime.driver import TensorMapSpec
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.runtime.launch_text import Integer, Options, Zeroed, options, source
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.templates import build
from tinygrad_nv.tile.kernel import BackwardKernel, GemmKernel, MapArgument
from tinygrad_nv.tile.schedule import Schedule

PTX = ".version 8.7\n.target sm_90a\n"
MAP = ("// tensormap: pointer=1 dtype=bf16 dims=64,128 strides=256 box=64,8 swizzle=128B offset=0 dynamic=1 "
       "integer=0")


@st.composite
def map_arguments(draw: st.DrawFn) -> MapArgument:
    rank = draw(st.integers(1, 5))
    extents = st.lists(st.integers(1, 1 << 31), min_size=rank, max_size=rank).map(tuple)
    strides = st.lists(st.integers(0, 1 << 40), min_size=rank - 1, max_size=rank - 1).map(tuple)
    return MapArgument(draw(st.integers(0, 9)), draw(st.sampled_from(["u8", "bf16", "tf32"])), draw(extents),
                       draw(strides), draw(extents), draw(st.sampled_from(["none", "32B", "64B", "128B"])),
                       draw(st.integers(0, 1 << 40)), draw(st.integers(-1, rank - 1)),
                       draw(st.integers(-1, 3)))


@settings(deadline=None, max_examples=60)
@given(st.builds(Options, st.integers(0, 1 << 20), st.tuples(*[st.integers(1, 16)] * 3), st.booleans(),
                 st.lists(st.builds(Zeroed, st.integers(0, 9), st.integers(1, 4096)), max_size=2).map(tuple),
                 st.lists(map_arguments(), max_size=3).map(tuple),
                 st.lists(st.builds(Integer, st.integers(-99, 99), st.lists(st.integers(-9, 9), max_size=3)
                                    .map(tuple)), max_size=3).map(tuple)))
def test_what_is_written_is_read(made: Options): assert options(made.comment() + PTX) == made


def test_the_text_of_a_kernel():
    argument = MapArgument(1, "bf16", (64, 128), (256,), (64, 8), "128B", 0, 1, 0)
    kernel = GemmKernel("k", PTX, (1, 1, 1), 128, 98304, (2, 1, 1), (argument,), workspace_bytes=1024,
                        flags=16)
    assert source(kernel) == (f"// launch: dynamic_smem=98304 cluster=2,1,1 pdl=0\n"
                              f"// zero: pointer=2 bytes=64\n{MAP}\n{PTX}")
    assert options(source(kernel)) == Options(98304, (2, 1, 1), False, (Zeroed(2, 64),), (argument,))


def test_only_the_head_is_read():
    assert options(PTX + MAP + "\n// zero: pointer=2 bytes=x\n") == Options()
    assert options("// nothing of ours\n" + MAP + "\n//\n" + PTX).maps[0].box == (64, 8)


@pytest.mark.parametrize(("old", "new"), [
    ("pointer=1", "pointer=-1"), ("pointer=1", "pointer=x"), ("pointer=1", "pointer=1,2"), ("pointer=1 ", ""),
    ("dims=64,128", "dims=64,0"), ("dims=64,128", "dims=64"), ("dims=64,128", "dims="), ("strides=256", ""),
    ("strides=256", "strides=-256"), ("strides=256", "strides=256,512"), ("box=64,8", "box=64"),
    ("swizzle=128B", "swizzle=128"), ("offset=0", "offset=-16"), ("dynamic=1", "dynamic=2"),
    ("dynamic=1", "dynamic=-2"), ("dynamic=1", "dynamic=1 dynamic=0"), ("dtype=bf16", "dtype="),
    ("dynamic=1", "dynamic=1 l2=256B"), ("integer=0", "integer=-2"), ("integer=0", "")])
def test_a_tensor_map_that_cannot_be_read(old: str, new: str):
    line = MAP.replace(old, new)
    with pytest.raises(DriverError) as caught: options(f"{line}\n{PTX}")
    assert caught.value.found == f"tensormap options {' '.join(line.split()[2:])!r}"
    assert caught.value.expected.startswith("pointer=NUMBER dtype=NAME dims=")


@pytest.mark.parametrize("words", ["pointer=2", "bytes=4", "pointer=2 bytes=-4", "pointer=2 bytes=4 bytes=8"])
def test_flags_that_cannot_be_read(words: str):
    with pytest.raises(DriverError) as caught: options(f"// zero: {words}\n{PTX}")
    assert caught.value.found == f"zero options {words!r}"
    assert caught.value.expected == "pointer=NUMBER bytes=BYTES"


def test_integers_of_variables():
    """s_kv = start + 16, start; before a launch has values nothing is below 0."""
    text = "// integer: offset=16 factors=1,0\n// integer: offset=-3 factors=0,2\n" + PTX
    found = options(text).integers
    assert found == (Integer(16, (1, 0)), Integer(-3, (0, 2)))
    assert [each.of((5, 4)) for each in found] == [21, 5]
    assert [each.of((0, 0)) for each in found] == [16, 0]


@pytest.mark.parametrize("words", ["offset=1", "offset=1,2 factors=1", "offset=x factors=1", "factors=1"])
def test_an_integer_that_cannot_be_read(words: str):
    with pytest.raises(DriverError) as caught: options(f"// integer: {words}\n{PTX}")
    assert caught.value.found == f"integer options {words!r}"


def test_what_a_caller_wants_zeroed():
    kernel = BackwardKernel("k", PTX, (1, 1, 1), 128, 512, flags=3)
    zeroed = Zeroed(0, 4096), Zeroed(1, 12)
    assert options(source(kernel, zeroed=zeroed)) == Options(512, zeroed=zeroed)
    assert options(source(kernel)).zeroed == ()


class Asked(EmulatedDriver):
    """Keeps what tensor maps are made of."""

    def __init__(self) -> None:
        super().__init__("sm_90a")
        self.specs: list[TensorMapSpec] = []

    def tensor_map(self, spec: TensorMapSpec) -> bytes:
        self.specs.append(spec)
        return super().tensor_map(spec)


def test_whoever_launches_a_kernel_has_the_same_tensor_maps():
    """A program of a user's, the tuner, and both launchers of bench/gpu.py."""
    spec = dense(128, 64, 128)
    kernel = build(spec, Schedule().using("wgmma").block(128, 64).k(64), "sm_90a")
    gpu = Asked()
    at = [gpu.alloc(nbytes) for nbytes in (128 * 64 * 4, 128 * 128 * 4, 64 * 128 * 4)]

    def asked(make: object) -> list[TensorMapSpec]:
        gpu.specs = []
        make()  # type: ignore[operator]
        return gpu.specs

    users = asked(lambda: [program._encoded(gpu, m, at[m.pointer], 128) for m in kernel.maps])
    assert len(users) >= 2
    assert {each.l2_promotion for each in users} == {"128B"}
    assert asked(lambda: clock.arguments(gpu, kernel, spec, at)) == users
    memory = dict(zip(("out", "a", "b"), at, strict=True))
    assert asked(lambda: Launcher(gpu, kernel).bound(spec, memory)) == users
    assert asked(lambda: submitted(gpu, [kernel], at)) == users
