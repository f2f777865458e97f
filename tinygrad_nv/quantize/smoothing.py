"""Scales of a layer's inputs, folded into what makes them: AWQ (arXiv 2306.00978) and SmoothQuant
(arXiv 2211.10438).

Protocol: W x = (W s) (x / s) for positive s of each input. `scaled(scheme, block, inputs)` chooses s for the
inputs of q, k and v and of gate and up, divides the norm before them by s, and multiplies the matrices'
columns. AWQ does so for o and down, too, where rows of v and up are divided. The block computes what it did.

    AWQ           s = m^α / w^(1 − α), α by the least error of the outputs, in steps of 5 %; m is the mean of
                  |x|, w that of |W| / its group's largest; or no scales
    SmoothQuant   s = a^α / b^(1 − α), a and b the largest of |x| and of |W|
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinygrad_nv.quantize.network import DOWN, GATE, UP, Block, K, Linear, O, Q, V
from tinygrad_nv.quantize.rounding import Keep, round_matrix
from tinygrad_nv.quantize.schemes import Scheme

STEPS = 20              # of α between 0 and 1
LEAST = 1e-4            # of a scale of AWQ
LEAST_INPUT = 1e-5      # of SmoothQuant, of |x| and of |W|


@dataclass(frozen=True)
class Inputs:
    """Statistics of a layer's inputs: the mean and the largest of |x|, [K], and some of them, [S, K]."""
    mean: np.ndarray
    largest: np.ndarray
    sample: np.ndarray


@dataclass(frozen=True)
class Change:
    """Factors of a matrix's columns."""
    block: Block
    scales: Mapping[str, np.ndarray]


def scale_block(scheme: Scheme, block: Block, inputs: Mapping[str, Inputs], chosen: Sequence[str],
           keep: Keep) -> Change:
    """The block with scales, where all layers that take part are among the `chosen`. `keep` rounds to the
    norms' dtype, and `inputs` are of the block as it was."""
    linears, norms, found = dict(block.linears), dict(block.norms), dict[str, np.ndarray]()
    offset, search = np.float32(block.config.norm_offset), _searches[scheme.method]
    pre_norms = block.config.names.attention_norm, block.config.names.feed_forward_norm
    for norm, names in zip(pre_norms, ((Q, K, V), (GATE, UP)), strict=True):
        if not norm or not set(names) <= set(chosen): continue
        s = search(scheme, [linears[name].weight for name in names], inputs[names[0]])
        if s is None: continue
        kept = keep((norms[norm] + offset) / s - offset)
        exact = np.where(kept + offset == 0, 1, (norms[norm] + offset) / (kept + offset)).astype(np.float32)
        norms[norm] = kept
        for name in names: linears[name], found[name] = _columns(linears[name], exact), exact
    if scheme.method == "awq":
        for before, after in ((V, O), (UP, DOWN)):
            if not {before, after} <= set(chosen): continue
            heads = (block.config.num_kv_heads, block.config.head_dim) if after == O else None
            s = search(scheme, [linears[after].weight], inputs[after], heads)
            if s is None: continue
            linears[before] = _rows(linears[before], s if heads is None else _first(s, heads))
            linears[after], found[after] = _columns(linears[after], s), s
    return Change(replace(block, linears=linears, norms=norms), found)


def _columns(linear: Linear, s: np.ndarray) -> Linear: return replace(linear, weight=linear.weight * s)


def _rows(linear: Linear, s: np.ndarray) -> Linear:
    return replace(linear, weight=linear.weight / s[:, None],
                   bias=None if linear.bias is None else linear.bias / s)


def _mean_over_heads(values: np.ndarray, heads: tuple[int, int] | None) -> np.ndarray:
    """The mean over the heads of queries that share one of values, for each of them."""
    if heads is None: return values
    grouped = values.reshape(heads[0], -1, heads[1])
    made: np.ndarray = np.broadcast_to(grouped.mean(1, keepdims=True), grouped.shape).reshape(-1)
    return made


def _first(values: np.ndarray, heads: tuple[int, int]) -> np.ndarray:
    """Returns, of such values, those of the heads of values."""
    made: np.ndarray = values.reshape(heads[0], -1, heads[1])[:, 0].reshape(-1)
    return made


def _awq(scheme: Scheme, matrices: Sequence[np.ndarray], inputs: Inputs,
         heads: tuple[int, int] | None = None) -> np.ndarray | None:
    """None where no scales do better than none."""
    w = np.concatenate(matrices)
    groups = np.abs(w).reshape(len(w), -1, scheme.group)
    share = groups / np.maximum(groups.max(-1, keepdims=True), np.float32(1e-12))
    mean, share = _mean_over_heads(inputs.mean, heads), _mean_over_heads(share.reshape(w.shape).mean(0),
                                                                         heads)
    plain, best = replace(scheme, observer="minmax"), None
    least = _outputs_error(plain, w, np.ones_like(mean), inputs.sample)
    for step in range(STEPS):
        s = np.maximum(mean ** (step / STEPS) / np.maximum(share, LEAST) ** (1 - step / STEPS), LEAST)
        s = (s / np.sqrt(s.max() * s.min())).astype(np.float32)
        if (error := _outputs_error(plain, w, s, inputs.sample)) < least: best, least = s, error
    return best


def _outputs_error(scheme: Scheme, w: np.ndarray, s: np.ndarray, x: np.ndarray) -> float:
    """Squared, of the outputs of what w with scales is rounded to."""
    made = round_matrix(scheme, w * s, lambda scales: scales).matrix / s
    return float(np.square(x @ (made - w).T, dtype=np.float32).sum(dtype=np.float64))


def _smoothquant(scheme: Scheme, matrices: Sequence[np.ndarray], inputs: Inputs,
                 heads: tuple[int, int] | None = None) -> np.ndarray | None:
    largest = np.max([np.abs(w).max(0) for w in matrices], 0)
    x, w = (np.maximum(each, LEAST_INPUT) for each in (inputs.largest, largest))
    made: np.ndarray = (x ** scheme.smoothing / w ** (1 - scheme.smoothing)).astype(np.float32)
    return made


_searches: dict[str, Callable[..., np.ndarray | None]] = {"awq": _awq, "smoothquant": _smoothquant}
