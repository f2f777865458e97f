"""How a kernel is launched: what templates say of it, what cannot be, and the tensor maps it gets."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import dtypes

from bench.gpu.launch import GemmLauncher, make_launch
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime import clock, program
from tinygrad_nv.runtime.driver import TensorMapSpec
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.kernel import AttentionKernel, BackwardKernel, DecodeKernel, GemmKernel, Scratch
from tinygrad_nv.tile.launch import Integer, LaunchConfig, MapArgument, Zeroed
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

PTX = ".version 8.7\n.target sm_90a\n"
MAP = MapArgument(1, "bf16", (64, 128), (256,), (64, 8), "128B", 0, 1, 0)
DESCRIBED = ("// tensormap: pointer=1 dtype=bf16 dims=64,128 strides=256 box=64,8 swizzle=128B offset=0 "
             "dynamic=1 integer=0")


def test_the_launch_of_a_matmul():
    kernel = GemmKernel("k", PTX, (1, 1, 1), 128, 98304, (2, 1, 1), (MAP,), pdl=True, workspace_bytes=1024,
                        flags=16)
    assert kernel.launch == LaunchConfig(98304, (2, 1, 1), True, (Zeroed(2, 64),), (MAP,))
    assert replace(kernel, flags=0).launch == LaunchConfig(98304, (2, 1, 1), True, (), (MAP,))


def test_the_launch_of_a_backward_pass():
    """dq is zero before each launch, and so are the turns where there are any."""
    kernel = BackwardKernel("k", PTX, (1, 1, 1), 128, 512, dq_bytes=4096, flags=3)
    assert kernel.launch == LaunchConfig(512, zeroed=(Zeroed(0, 4096), Zeroed(1, 12)))
    assert replace(kernel, flags=0).launch == LaunchConfig(512, zeroed=(Zeroed(0, 4096),))


def test_integers_are_part_of_a_launch():
    """Of both kernels of a decode attention."""
    one, integers = AttentionKernel("k", PTX, (1, 1, 1), 128), (Integer(16, (1, 0)),)
    assert one.with_integers(integers).launch == LaunchConfig(integers=integers)
    both = DecodeKernel((one, one), 1024).with_integers(integers)
    assert {each.launch for each in both.kernels} == {LaunchConfig(integers=integers)}
    assert both.workspace_bytes == 1024


def test_what_a_call_needs_besides_its_arguments():
    matmul = GemmKernel("k", PTX, (1, 1, 1), 128, workspace_bytes=1022, flags=16)
    assert matmul.scratch == (Scratch(dtypes.float32, 256), Scratch(dtypes.uint32, 16))
    assert replace(matmul, flags=0).scratch == (Scratch(dtypes.float32, 256), Scratch(dtypes.uint32, 1))
    assert replace(matmul, workspace_bytes=0, flags=0).scratch == ()
    backward = BackwardKernel("k", PTX, (1, 1, 1), 128, dq_bytes=4096, flags=3)
    assert backward.scratch == (Scratch(dtypes.uint32, 3, at=1),)
    assert replace(backward, flags=0).scratch == ()
    assert DecodeKernel((), 8).scratch == (Scratch(dtypes.float32, 2),)
    assert DecodeKernel(()).scratch == ()


def test_what_a_reader_is_told():
    made = LaunchConfig(98304, (2, 1, 1), True, (Zeroed(2, 64),), (MAP,), (Integer(16, (1, 0)),))
    assert made.describe() == ("// launch: dynamic_smem=98304 cluster=2,1,1 pdl=1\n"
                               "// zero: pointer=2 bytes=64\n"
                               f"// integer: offset=16 factors=1,0\n{DESCRIBED}\n")
    assert LaunchConfig().describe() == "// launch: dynamic_smem=0 cluster=1,1,1 pdl=0\n"


@pytest.mark.parametrize("wrong", [{"pointer": -1}, {"offset_bytes": -16}, {"dynamic": 2}, {"dynamic": -2},
                                   {"integer": -2}], ids=str)
def test_a_tensor_map_that_names_nothing(wrong: dict[str, int]):
    with pytest.raises(DriverError, match="tensor map of pointer"): replace(MAP, **wrong)


@pytest.mark.parametrize("numbers", [(-1, 4), (2, -4)])
def test_memory_that_cannot_be_zeroed(numbers: tuple[int, int]):
    with pytest.raises(DriverError, match=r"-\d .*to be zeroed|of pointer -1 to be zeroed"): Zeroed(*numbers)


def test_integers_of_variables():
    """s_kv = start + 16, start; before a launch has values nothing is below 0."""
    integers = Integer(16, (1, 0)), Integer(-3, (0, 2))
    assert [each.of((5, 4)) for each in integers] == [21, 5]
    assert [each.of((0, 0)) for each in integers] == [16, 0]


class Asked(EmulatedDriver):
    """Keeps what tensor maps are made of."""

    def __init__(self) -> None:
        super().__init__("sm_90a")
        self.specs: list[TensorMapSpec] = []

    def tensor_map(self, spec: TensorMapSpec) -> bytes:
        self.specs.append(spec)
        return super().tensor_map(spec)


def test_every_way_to_launch_has_the_same_tensor_maps():
    """A program of a user's, the tuner, and both launchers of bench/gpu/run.py."""
    spec = dense(128, 64, 128)
    kernel = TABLE.build(spec, Wgmma().block(128, 64).k(64), GPU("sm_90a"))
    gpu = Asked()
    at = [gpu.alloc(nbytes) for nbytes in (128 * 64 * 4, 128 * 128 * 4, 64 * 128 * 4)]

    def asked(make: object) -> list[TensorMapSpec]:
        gpu.specs = []
        make()  # type: ignore[operator]
        return gpu.specs

    users = asked(lambda: [program._encode_map(gpu, m, at[m.pointer], 128) for m in kernel.maps])
    assert len(users) >= 2
    assert {each.l2_promotion for each in users} == {"128B"}
    assert asked(lambda: clock.arguments(gpu, kernel, (), at)) == users
    memory = dict(zip(("out", "a", "b"), at, strict=True))
    assert asked(lambda: GemmLauncher(gpu, kernel).bind_launch(spec, memory)) == users
    assert asked(lambda: make_launch(gpu, [kernel], at)) == users
