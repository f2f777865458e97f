"""Sparse tensors of compressed-tensors 0.3 to 0.14 are read with their zeros: whole and in parts, and what
does not fit is refused."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import WeightError
from tinygrad_nv.models.checkpoint import TensorEntry, open_checkpoint, read_array
from tinygrad_nv.runtime.memory import allocate

NAME = "model.layers.0.mlp.down_proj"
Tensors = dict[str, torch.Tensor]


def matrix(kept: float, seed: int = 0) -> torch.Tensor:
    """bfloat16 [7, 100], with columns that end within a byte of the mask; of 0.5 two of four are kept."""
    random = torch.Generator().manual_seed(seed)
    w, drawn = torch.randn(7, 100, generator=random), torch.rand(7, 25, 4, generator=random)
    if kept == 0.5: mask = torch.zeros(7, 25, 4).scatter(2, drawn.topk(2, 2).indices, 1).reshape(7, 100)
    else: mask = (drawn.reshape(7, 100) < kept).float()
    return torch.where(mask > 0, w, 0).to(torch.bfloat16)


def stored(w: torch.Tensor, rows: bool = False) -> Tensors:
    """As the package stored it, of 2:4 sparse ones, or with `rows` of others."""
    kept = (w != 0).numpy()
    made = {"compressed": w[w != 0] if rows else w[w != 0].reshape(len(w), -1),
            "bitmask": torch.from_numpy(np.packbits(kept, axis=1, bitorder="little")),
            "shape": torch.tensor([[extent] for extent in w.shape])}
    if rows: made["row_offsets"] = torch.tensor([0, *kept.sum(1).cumsum()[:-1].tolist()])
    return {f"{NAME}.{name}": one.contiguous() for name, one in made.items()}


def entry(folder: Path, tensors: Mapping[str, torch.Tensor]) -> TensorEntry:
    save_file(dict(tensors), folder / "model.safetensors")
    entries = open_checkpoint(folder).entries
    assert list(entries) == [f"{NAME}.weight"]
    return entries[f"{NAME}.weight"]


@pytest.mark.parametrize(("kept", "rows"), [(0.5, False), (0.3, True), (0.0, True), (1.0, True)])
def test_a_tensor_is_read_whole_and_in_parts(tmp_path: Path, kept: float, rows: bool):
    w = matrix(kept)
    found = entry(tmp_path, stored(w, rows))
    assert (found.shape, found.dtype) == ((7, 100), "bfloat16")
    np.testing.assert_array_equal(read_array(found), w.view(torch.uint16).numpy())
    for begin, end in ((0, 700), (0, 1), (99, 101), (250, 617), (699, 700)):
        into = Tensor.empty(end - begin, dtype=dtypes.float32, device="CPU")
        allocate(into)
        open_checkpoint(tmp_path).read_into(found, begin, end, into, 0)
        np.testing.assert_array_equal(into.numpy(), w.float().flatten()[begin:end].numpy())


def test_what_does_not_fit_is_refused(tmp_path: Path):
    def refused(words: str, **changed: torch.Tensor | None) -> None:
        tensors = stored(matrix(0.5)) | {f"{NAME}.{name}": one for name, one in changed.items()}
        with pytest.raises(WeightError, match=words):
            read_array(entry(tmp_path, {name: one for name, one in tensors.items() if one is not None}))
    good = stored(matrix(0.5))
    refused("and no .*compressed", compressed=None)
    refused("and no .*shape", shape=None)
    refused(r"is of shape \[7, 96\]", shape=torch.tensor([[7], [96]]))
    refused(r"is of shape \[7\]", shape=torch.tensor([7]))
    mask = good[f"{NAME}.bitmask"].clone()
    mask[3, 2] ^= 1
    refused("its bitmask keeps", bitmask=mask)
    whole = stored(matrix(0.3), rows=True)
    offsets = whole[f"{NAME}.row_offsets"] + 1000
    with pytest.raises(WeightError, match="row_offsets: rows 0 to 7"):
        read_array(entry(tmp_path, whole | {f"{NAME}.row_offsets": offsets}))
