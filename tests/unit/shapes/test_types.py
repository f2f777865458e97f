"""Annotations: what is in the brackets, how it prints, and that Tensor stays tinygrad's."""
from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass
from typing import Annotated, Any, Optional, get_args

import pytest
import tinygrad
from tinygrad import Tensor, dtypes

import tinygrad_nv
from tinygrad_nv.shapes import Dims, KTile, OTile, QTile, TensorType, Tile, TileType, parse, types

bf16 = dtypes.bfloat16


@dataclass(frozen=True)
class Policied:
    """A dtype with policies, as numerics has it."""
    dtype: Any
    policies: tuple[str, ...] = ()

    def __str__(self) -> str: return " @ ".join(["bf16", *self.policies])


def test_brackets_give_a_type():
    made = Tensor["B", "S", "3H*D_h", bf16]
    assert (made.kind, made.dtype, made.leading) == ("Tensor", bf16, False)
    assert made.dims == (parse("B"), parse("S"), parse("3H*D_h"))
    assert str(made) == 'Tensor["B", "S", "3H*D_h", bf16]'
    assert made.symbols == ("B", "S", "D_h", "H")


@pytest.mark.parametrize(("made", "printed"), [
    (Tensor["B", 8], 'Tensor["B", 8]'), (Tensor[..., "D"], 'Tensor[..., "D"]'),
    (Tensor["...", "D"], 'Tensor[..., "D"]'),
    (Tensor[bf16], "Tensor[bf16]"), (Tensor["B"], 'Tensor["B"]'),
    (KTile["B*H", "S", Policied(bf16, ("accum(f32)",))], 'KTile["B*H", "S", bf16 @ accum(f32)]'),
    (QTile["N", "K", dtypes.int8], 'QTile["N", "K", s8]'), (OTile["M"], 'OTile["M"]'),
    (Tile["M"], 'Tile["M"]')])
def test_a_type_prints_as_written(made: TensorType, printed: str):
    assert str(made) == repr(made) == printed


def test_policies_keep_their_dtype():
    made = Tensor["B", Policied(bf16)]
    assert made.element == bf16
    assert made.dtype == Policied(bf16)


def test_types_are_equal_by_what_they_say():
    assert Tensor["H*D", "2S"] == Tensor["D*H", "S*2"]
    assert hash(Tensor["B", bf16]) == hash(Tensor["B", bf16])
    assert Tensor["B", bf16] != Tensor["B"]
    assert KTile["B"] != Tensor["B"]
    assert Dims["B"] == Tensor["B"]


def test_types_are_frozen_and_can_be_copied():
    made = KTile["M", "N", bf16]
    with pytest.raises(FrozenInstanceError): made.kind = "Tile"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert isinstance(made, TileType)


def test_types_stand_in_other_annotations():
    made = Tensor["B"]
    assert get_args(Optional[made]) == get_args(made | None) == (made, type(None))  # noqa: UP045
    assert get_args(None | made) == (type(None), made)
    assert get_args(dict[str, made]) == (str, made)
    assert get_args(Annotated[Tensor, Dims["B"]])[1] == made


def test_tensor_is_tinygrads():
    assert Tensor is tinygrad.Tensor is tinygrad_nv.Tensor
    assert isinstance(Tensor([1]), Tensor)
    assert Tensor([1, 2, 3])[1].item() == 2     # of objects the brackets are tinygrad's


def test_brackets_stay_while_disabled():
    with tinygrad_nv.disabled(): assert str(Tensor["B"]) == 'Tensor["B"]'


def test_brackets_can_be_taken_back():
    script = ("import tinygrad_nv, tinygrad; from tinygrad_nv.shapes import types; types.unregister()\n"
              "print(hasattr(tinygrad.Tensor, '__class_getitem__')); types.register()\n"
              "print(tinygrad.Tensor['B'])")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={"PATH": "/usr/bin:/bin", "NV": "0"})
    assert done.stdout.split("\n")[:2] == ["False", 'Tensor["B"]']
    assert types.TensorType is TensorType
