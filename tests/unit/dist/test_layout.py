"""What a layout says of tensors, and layouts that cannot be; a mesh over devices of one process."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.dist.mesh import current, mesh
from tinygrad_nv.dist.mesh.layout import LayoutRules, check_layout, placement
from tinygrad_nv.errors import DistError

SIZES = {"dp": 2, "tp": 4}
LAYOUT: LayoutRules = {"d_model": "shard", "batch": "shard", "params": "replicate",
                       "params.head": ("dp", "tp"), "rows": ("tp", "dp")}
RULES = check_layout(LAYOUT, SIZES)


def test_rules() -> None:
    assert RULES == {"d_model": ("tp",), "batch": ("dp",), "params": (), "params.head": ("dp", "tp"),
                     "rows": ("tp", "dp")}
    x = placement("x", (6, 5, 8), dtypes.float16, ("batch", "position", "d_model"), RULES, SIZES)
    assert (x.cuts, x.local_shape, x.local_bytes) == ((("dp",), (), ("tp",)), (3, 5, 2), 60)
    # a tensor's name goes before those of its dimensions, the longest prefix first
    norm = placement("params.norm", (8,), dtypes.float32, ("d_model",), RULES, SIZES)
    head = placement("params.head.weight", (16, 8), dtypes.float32, ("vocab", "d_model"), RULES, SIZES)
    assert (norm.local_shape, head.local_shape, head.ways) == ((8,), (2, 8), (8, 1))
    assert placement("paramsx", (8,), dtypes.float32, ("d_model",), RULES, SIZES).local_shape == (2,)
    assert placement("", (), dtypes.float32, (), RULES, SIZES).local_shape == ()


@pytest.mark.parametrize(("shape", "dims", "words"), [
    ((6, 10), ("batch", "d_model"), "q of shape (6, 10): axis tp of 4 cuts d_model of 10"),
    ((16, 8), ("rows", "d_model"), "q of shape (16, 8): axis tp cuts both rows and d_model"),
    ((9, 8), ("rows", "position"), "axis tp x dp of 8 cuts rows of 9"),
    ((6, 8), ("batch",), "q of shape (6, 8) with the dimensions batch")])
def test_tensors_that_cannot_be_cut(shape: tuple[int, ...], dims: tuple[str, ...], words: str) -> None:
    with pytest.raises(DistError) as error: placement("q", shape, dtypes.float32, dims, RULES, SIZES)
    assert words in str(error.value)


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(DistError, match="layout of hidden: \"shard\", in a mesh of dp=2, tp=4"):
        check_layout({"hidden": "shard"}, SIZES)
    with pytest.raises(DistError, match=r"(?s)layout of experts: .shard.*of the axes ep.*experts.: .dp."):
        check_layout({"experts": "shard"}, SIZES)
    with pytest.raises(DistError, match="layout of batch: axis pp"): check_layout({"batch": "pp"}, SIZES)
    with pytest.raises(DistError, match="a mesh of dp=3"): mesh(axes={"dp": 3})
    with pytest.raises(DistError, match="no mesh"): current()


def test_devices_of_one_process() -> None:
    devices = ("CPU:0", "CPU:1")
    with mesh(devices, axes={"dp": 2}, layout={"batch": "shard"}) as m:
        x = np.arange(12, dtype=np.float32).reshape(4, 3)
        placed = m.place(Tensor(x), ("batch", "d_model"), "x")
        assert placed.device == ("CPU", "CPU:1")
        assert placed.uop.axis == 0
        assert np.array_equal((placed * 2).sum(0).to("CPU").numpy(), x.sum(0) * 2)
        assert m.place(Tensor(x), ("position", "d_model"), "w").uop.axis is None
        assert [line.split() for line in m.describe().splitlines()[2:]] == [
            ["tensor", "dtype", "whole", "a", "device", "cut", "bytes", "a", "device"],
            ["x", "float", "4x3", "2x3", "batch", "by", "dp", "24", "B"],
            ["w", "float", "4x3", "4x3", "replicated", "48", "B"], ["all", "72", "B"]]
        with pytest.raises(DistError, match="a group of devices of one process"): m.group("dp")
        assert current() is m
    with mesh(devices, axes={"dp": 1, "tp": 2}, layout={"a": "dp", "b": "tp"}) as m, pytest.raises(
            DistError, match=r"q of shape .2, 2., cut by dp, tp over devices of one process"):
        m.place(Tensor(x[:2, :2]), ("a", "b"), "q")
