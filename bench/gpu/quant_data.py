"""Random quantised matrices in torch: buffers as kernels take them ("fragments" of quant/types.py), the same
in rows, and what they stand for. tinygrad's own way to lay a matrix out would compile for each shape."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.quant.types import TILE, QType, Scale, buffers

MOST_E4M3 = 0x77        # codes up to 240, whose products with activations float32 sums


def torch_dtype(dtype: DType) -> Any:
    """Returns the dtype of a buffer."""
    import torch
    return {dtypes.float32: torch.float32, dtypes.float16: torch.float16, dtypes.bfloat16: torch.bfloat16,
            dtypes.fp8e4m3: torch.float8_e4m3fn, dtypes.int8: torch.int8}.get(dtype, torch.uint8)


def buffers_of(type: QType, n: int, k: int, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A random matrix: storages in fragments, flat; and in rows, codes as one byte each [n, k]. Elements are
    of the size of 1."""
    laid, rows = {}, {}
    for name, buffer in buffers(type, n, k).items():
        if name == "codes": rows[name] = codes(type, n, k, device)
        elif name == "high": raise ValueError(f"{type}: planes of codes")
        else: rows[name] = factors(type, name, buffer.shape, buffer.dtype, device)
        made = in_fragments(rows[name], type, k) if name == "codes" else in_tiles(rows[name], type, name, k)
        laid[name] = made.reshape(-1)
    return laid, rows


def codes(type: QType, n: int, k: int, device: str) -> Any:
    """Bytes [n, k]."""
    import torch
    made = torch.randint(0, 1 << type.bits, (n, k), device=device, dtype=torch.uint8)
    if type.element.dtype == dtypes.fp8e4m3: made = (made & 0x80) | (made & 0x7F).clamp(max=MOST_E4M3)
    return made


def factors(type: QType, name: str, shape: tuple[int, ...], dtype: DType, device: str) -> Any:
    """Scales, zero points, minima."""
    import torch
    whole = torch.randint(1, 1 << min(type.bits, 6), shape, device=device, dtype=torch.uint8)
    scale = type.outer if name.startswith("outer") else type.scale
    assert scale is not None
    if name == "zeros": return whole
    if scale.e8m0: return whole % 3 + 124
    if dtype == dtypes.uint8: return whole
    most = 1 / 8 if type.bits == 4 else 1 / 128 if type.element.dtype == dtypes.int8 else 1 / 256
    if type.outer is not None: most /= 16       # beside integer scales of up to 64
    return ((torch.rand(shape, device=device) + 0.5) * most).to(torch_dtype(dtype))


# **** layouts ****

def in_fragments(rows: Any, type: QType, k: int) -> Any:
    """Bytes of codes [n, k] in fragments [T, U, 32, bytes]."""
    import torch
    bits, unit = type.bits, type.unit
    padded = torch.nn.functional.pad(rows, (0, -k % unit, 0, -len(rows) % TILE))
    # row half, g, unit, 16 columns, column half, q, the column after
    split = padded.reshape(-1, 2, 8, padded.shape[1] // unit, unit // 16, 2, 4, 2)
    some = split.permute(0, 3, 2, 6, 4, 5, 1, 7).reshape(len(padded) // TILE, -1, 32, unit // 2 * bits // 16,
                                                         16 // bits, 2)
    words = torch.zeros(some.shape[:-2], dtype=torch.int32, device=rows.device)
    for field in range(16 // bits):
        for half in range(2): words |= some[..., field, half].int() << (field * bits + 16 * half)
    return words.contiguous().view(torch.uint8)


def in_tiles(rows: Any, type: QType, name: str, k: int) -> Any:
    """Factors of rows [n, blocks] in fragments [T, blocks, 16]."""
    import torch
    scale = blocks_of(type, name)
    more = scale.blocks(len(rows), replace(type, layout="fragments").pad_columns(k))[1] - rows.shape[1]
    raw = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
    padded = torch.nn.functional.pad(raw, (0, more, 0, -len(rows) % TILE))
    return padded.reshape(len(padded) // TILE, 2, 8, -1).permute(0, 3, 2, 1).contiguous().view(rows.dtype)


def blocks_of(type: QType, name: str) -> Scale:
    """Returns the blocks of a buffer."""
    scale = type.outer if name.startswith("outer") else type.scale
    assert scale is not None
    return scale


# **** numbers ****

def dequantise(type: QType, one: dict[str, Any], k: int) -> Any:
    """float32 [n, k] of the buffers "rows …"."""
    import torch
    held = one["rows codes"]
    if type.element.values:
        table = torch.tensor(type.element.values, device=held.device)
        values = table[held.int()]
    elif type.bits == 8: values = held.view(torch_dtype(type.element.dtype)).float()
    else: values = held.float()

    def spread(name: str) -> Any:
        scale, data = blocks_of(type, name), one[f"rows {name}"]
        wide = torch.exp2(data.float() - 127) if scale.e8m0 and name == "scales" else data.float()
        return wide.repeat_interleave(scale.columns or k, 1)[:, :k]
    values = values - type.shift
    if type.zeros: values = values - spread("zeros")
    outer = "rows outer" in one
    made = values * (spread("scales") * spread("outer") if outer else spread("scales"))
    if type.mins: made = made - (spread("mins") * spread("outer_mins") if outer else spread("mins"))
    return made
