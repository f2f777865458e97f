"""Programs that compute elements where they are: vectors, images, optimizers, random numbers."""
from __future__ import annotations

import numpy as np

from tests.support.language.programs.case import Case, call, fixed, integers, normal, uniform
from tinygrad_nv.language import *


@kernel(grid=lambda n, BLOCK: (cdiv(n, BLOCK),))
def vector_add(x: KTile["n", f32], y: KTile["n", f32], out: OTile["n", f32], *, BLOCK: int = 256):
    pid = tile.program_id(0)
    offsets = pid * BLOCK + tile.arange(0, BLOCK)
    mask = offsets < x.shape[0]
    a = tile.load(x, offsets, mask=mask)
    b = tile.load(y, offsets, mask=mask)
    tile.store(out, a + b, offsets, mask=mask)


@kernel(grid=lambda rows, cols: (rows, cdiv(cols, 64)))
def swiglu(gate: KTile["rows", "cols", bf16], up: KTile["rows", "cols", bf16],
           out: OTile["rows", "cols", bf16]):
    row, cols = tile.program_id(0), tile.block(tile.program_id(1) * 64, 64)
    g = gate[row, cols].to(f32)
    out[row, cols] = (g * tile.sigmoid(g) * up[row, cols].to(f32)).to(bf16)


@kernel(grid=lambda S: (S,))
def multiply_complex(x: KTile["S", "2*N", bf16], y: KTile["S", "2*N", bf16], out: OTile["S", "2*N", bf16],
                     swapped: OTile["S", "2*N", f32]):
    row, columns = tile.program_id(0), tile.block(0, x.shape[1])
    a, b = tile.deinterleave(x[row, columns].to(f32))
    c, d = tile.deinterleave(y[row, columns].to(f32))
    out[row, columns] = tile.interleave((a * c - b * d).to(bf16), (b * c + a * d).to(bf16))
    swapped[row, columns] = tile.interleave(b, a) + 1.0


def _multiply_complex(x, y):
    (a, b), (c, d) = ((z[:, ::2], z[:, 1::2]) for z in (x, y))
    pairs = np.stack([a * c - b * d, b * c + a * d], -1), np.stack([b, a], -1) + x.dtype.type(1)
    return tuple(each.reshape(x.shape) for each in pairs)


@kernel(grid=lambda n: (cdiv(n, 128),))
def dropout(x: KTile["n", f32], out: OTile["n", f32], *, n: int, p: float, seed: int):
    offsets = tile.program_id(0) * 128 + tile.arange(128)
    keep = tile.random(seed, offsets) >= p
    value = tile.where(keep, tile.load(x, offsets, mask=offsets < n) / (1 - p), 0.0)
    tile.store(out, value, offsets, mask=offsets < n)


@kernel(grid=lambda n: (cdiv(n, 4 * 32),))
def uniforms(seed: KTile[2, uint32], out: OTile["n", uint32], *, n: int):
    counter = tile.program_id(0) * 32 + tile.arange(32)
    words = tile.philox((seed[0], seed[1]), (counter, 0, 0, 0))
    for i, word in enumerate(words):
        tile.store(out, word, counter * 4 + i, mask=counter * 4 + i < n)


def philox(counter, key):
    """Philox4x32-10 of arrays: Random123's definition."""
    c, k = [np.asarray(each, np.uint64) for each in counter], [np.uint64(each) for each in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [b >> np.uint64(32) ^ c[1] ^ k[0], b & low, a >> np.uint64(32) ^ c[3] ^ k[1], a & low]
        k = [k[0] + np.uint64(0x9E3779B9) & low, k[1] + np.uint64(0xBB67AE85) & low]
    return [each.astype(np.uint32) for each in c]


def _dropout(x, p, seed):
    zero = np.zeros(x.shape, np.uint32)
    numbers = (philox((np.arange(x.size), zero, zero, zero), (seed, 0))[0] >> 8) * 2.0 ** -24
    return np.where(numbers >= p, x / x.dtype.type(1 - p), 0)


def _uniforms(seed, n):
    count = -(-n // 4)
    zero = np.zeros(count, np.uint32)
    return np.stack(philox((np.arange(count), zero, zero, zero), seed), 1).reshape(-1)[:n]


@kernel(grid=lambda S, H: (S, H))
def rotary(x: KTile["S", "H", "D", f32], cos: KTile["S", "D//2", f32], sin: KTile["S", "D//2", f32],
           out: OTile["S", "H", "D", f32]):
    pos, head = tile.program_id(0), tile.program_id(1)
    half = x.shape[2] // 2
    first, second = tile.block(0, half), tile.block(half, half)
    a, b = x[pos, head, first], x[pos, head, second]
    c, s = cos[pos, :], sin[pos, :]
    out[pos, head, first] = a * c - b * s
    out[pos, head, second] = b * c + a * s


def _rotary(x, cos, sin):
    a, b = np.split(x, 2, -1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


@kernel(grid=lambda n, BLOCK: (cdiv(n, BLOCK),))
def adam(grad: KTile["n", f32], step: KTile[1, int32], p: OTile["n", f32], m: OTile["n", f32],
         v: OTile["n", f32], *,
         lr: float, beta1: float, beta2: float, eps: float, BLOCK: int = 128):
    i = tile.block(tile.program_id(0) * BLOCK, BLOCK)
    g = grad[i]
    t = step[0].to(f32)
    m_new = beta1 * m[i] + (1 - beta1) * g
    v_new = beta2 * v[i] + (1 - beta2) * g * g
    m_hat = m_new / (1 - tile.exp(t * tile.log(beta1)))
    v_hat = v_new / (1 - tile.exp(t * tile.log(beta2)))
    p[i] -= lr * m_hat / (tile.sqrt(v_hat) + eps)
    m[i] = m_new
    v[i] = v_new


def _adam(g, step, p, m, v, lr, beta1, beta2, eps):
    t, kind = int(step[0]), g.dtype.type
    m, v = kind(beta1) * m + kind(1 - beta1) * g, kind(beta2) * v + kind(1 - beta2) * g * g
    change = m / kind(1 - beta1 ** t) / (np.sqrt(v / kind(1 - beta2 ** t)) + kind(eps))
    return p - kind(lr) * change, m, v


@kernel(grid=lambda rows: (rows,))
def quantise_rows(x: KTile["rows", "cols", f32], q: OTile["rows", "cols", int8], scale: OTile["rows", f32]):
    row = tile.program_id(0)
    values = x[row, :]
    largest = tile.max(tile.abs(values))
    s = tile.where(largest == 0.0, 1.0, largest / 127.0)
    q[row, :] = tile.clamp(tile.round(values / s), -127, 127).to(int8)
    scale[row] = s


def _quantise(x):
    largest = np.abs(x.astype(np.float32)).max(1)
    s = np.where(largest == 0, np.float32(1), largest / np.float32(127)).astype(np.float32)
    return np.clip(np.round(x.astype(np.float32) / s[:, None]), -127, 127).astype(np.int8), s


@kernel(grid=lambda rows, cols: (cdiv(rows, 8), cdiv(cols, 32)))
def dequantise_rows(q: KTile["rows", "cols", int8], scale: KTile["rows", f32],
                    out: OTile["rows", "cols", f16]):
    r, c = tile.block(tile.program_id(0) * 8, 8), tile.block(tile.program_id(1) * 32, 32)
    out[r, c] = q[r, c].to(f32) * scale[r][:, None]


@kernel(grid=lambda H, W: (H, cdiv(W, 32)))
def mandelbrot(out: OTile["H", "W", int32], *, H: int, W: int, limit: int):
    y, xs = tile.program_id(0), tile.program_id(1) * 32 + tile.arange(32)
    cr = xs.to(f32) * (3.0 / W) - 2.0
    ci = tile.full((32,), 1.0) * (y.to(f32) * (2.0 / H) - 1.0)
    zr = tile.zeros((32,), f32)
    zi = tile.zeros((32,), f32)
    count = tile.zeros((32,), int32)
    i = 0
    while (i < limit) & tile.any(zr * zr + zi * zi <= 4.0):
        inside = zr * zr + zi * zi <= 4.0
        zr, zi = tile.where(inside, zr * zr - zi * zi + cr, zr), tile.where(inside, 2.0 * zr * zi + ci, zi)
        count += inside.to(int32)
        i += 1
    tile.store(out, count, y, xs)


def _mandelbrot(H, W, limit):
    f = np.float32
    cr = np.broadcast_to(np.arange(W, dtype=f) * f(3.0 / W) - f(2), (H, W))
    ci = np.broadcast_to((np.arange(H, dtype=f) * f(2.0 / H) - f(1))[:, None], (H, W))
    zr, zi, count = np.zeros((H, W), f), np.zeros((H, W), f), np.zeros((H, W), np.int32)
    for _ in range(limit):
        inside = zr * zr + zi * zi <= 4
        zr, zi = np.where(inside, zr * zr - zi * zi + cr, zr), np.where(inside, 2 * zr * zi + ci, zi)
        count += inside
    return count


@kernel(grid=lambda H, W: (cdiv(H, 8), cdiv(W, 16)))
def game_of_life(cells: KTile["H", "W", uint8], out: OTile["H", "W", uint8]):
    H, W = cells.shape
    rows = (tile.program_id(0) * 8 + tile.arange(8))[:, None]
    cols = (tile.program_id(1) * 16 + tile.arange(16))[None, :]
    neighbours = tile.zeros((8, 16), int32)
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            if dy == 0 and dx == 0:
                continue
            neighbours += tile.load(cells, (rows + dy) % H, (cols + dx) % W).to(int32)
    alive = tile.load(cells, rows, cols) == 1
    born = (neighbours == 3) | (alive & (neighbours == 2))
    tile.store(out, born.to(uint8), rows, cols)


def _life(cells):
    shifts = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx]
    near = sum(np.roll(cells, shift, (0, 1)).astype(int) for shift in shifts)
    return ((near == 3) | ((cells == 1) & (near == 2))).astype(np.uint8)


@kernel(grid=lambda H, W, BM, BN: (cdiv(H, BM), cdiv(W, BN)))
def jacobi(x: KTile["H", "W", f32], f: KTile["H", "W", f32], out: OTile["H", "W", f32], *, BM: int, BN: int):
    r, c = tile.block(tile.program_id(0) * BM, BM), tile.block(tile.program_id(1) * BN, BN)
    out[r, c] = (x[r - 1, c] + x[r + 1, c] + x[r, c - 1] + x[r, c + 1] - f[r, c]) * 0.25


def _jacobi(x, f):
    p = np.pad(x, 1)
    return ((p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]) - f) * x.dtype.type(0.25)


@kernel(grid=lambda n: (cdiv(n, 32),))
def collatz(x: KTile["n", int32], out: OTile["n", int32], *, n: int):
    i = tile.program_id(0) * 32 + tile.arange(32)
    value = tile.load(x, i, mask=i < n, other=1)
    steps = tile.zeros((32,), int32)
    while tile.max(value) > 1:
        steps = steps + (value > 1).to(int32)
        value = tile.where(value > 1, tile.where(value % 2 == 0, value // 2, 3 * value + 1), value)
    tile.store(out, steps, i, mask=i < n)


def _collatz(x):
    def steps(n):
        count = 0
        while n > 1: n, count = (n // 2 if n % 2 == 0 else 3 * n + 1), count + 1
        return count
    return np.array([steps(int(n)) for n in x], np.int32)


@kernel(grid=lambda n: (cdiv(n, 64),))
def grey(image: KTile["n", 3, uint8], out: OTile["n", uint8]):
    pixels = tile.block(tile.program_id(0) * 64, 64)
    red, green, blue = image[pixels, 0], image[pixels, 1], image[pixels, 2]
    level = (red.to(int32) * 77 + green.to(int32) * 150 + blue.to(int32) * 29 + 128) >> 8
    out[pixels] = level.to(uint8)


@kernel(grid=lambda rows: (rows,))
def hadamard(x: KTile["rows", "n", f32], out: OTile["rows", "n", f32]):
    row, n = tile.program_id(0), x.shape[1]
    index = tile.arange(n)
    values, width = x[row, :], 1
    while width < n:
        other = tile.gather(values, index ^ width)
        values = tile.where((index & width) == 0, values + other, other - values)
        width *= 2
    out[row, :] = values


def _hadamard(x):
    h = np.ones((1, 1), x.dtype)
    while len(h) < x.shape[1]: h = np.block([[h, h], [h, -h]])
    return x @ h


@kernel(grid=lambda n: (cdiv(n, 50),))
def polynomial(x: KTile["n", f32], out: OTile["n", f32], *, factors: str):
    i = tile.block(tile.program_id(0) * 50, 50)
    values, total = x[i], tile.zeros((50,))
    for factor in [float(each) for each in factors.split(",")]:
        total = total * values + factor
    out[i] = total


@kernel(grid=lambda n: (cdiv(n, 128),))
def activations(x: KTile["n", f32], which: KTile[1, int32], out: OTile["n", f32]):
    i = tile.block(tile.program_id(0) * 128, 128)
    value = x[i]
    if which[0] == 0:
        y = tile.gelu(value)
    elif which[0] == 1:
        y = tile.silu(value)
    else:
        y = tile.where(value > 0.0, value, 0.01 * value)
    out[i] = y


def _activations(x, which):
    import torch
    wide = torch.from_numpy(x)
    fns = (torch.nn.functional.gelu, torch.nn.functional.silu, torch.nn.functional.leaky_relu)
    return fns[int(which[0])](wide).numpy()


FACTORS = "0.5,-1.25,2.0,1.0"
PROGRAMS = [
    *(Case(f"vector_add-{n}-{block}", call(vector_add, BLOCK=block), (normal(n), normal(n)), np.add)
      for n, block in ((1000, 256), (257, 100), (1, 64))),
    Case("swiglu-5x100", call(swiglu), (normal(5, 100, dtype=bf16), normal(5, 100, dtype=bf16)),
         lambda g, u: g / (1 + np.exp(-g)) * u),
    Case("dropout-300", call(dropout, p=0.3, seed=1234), (normal(300),), lambda x: _dropout(x, 0.3, 1234)),
    *(Case(f"philox-{n}-{seed[0]}", call(uniforms, n=n), (fixed(seed, uint32),), lambda s,
           n=n: _uniforms(s, n))
      for n, seed in ((1000, (0, 0)), (131, (77, 5)))),
    *(Case(f"rotary-{s}x{h}x{d}", call(rotary), (normal(s, h, d), normal(s, d // 2), normal(s, d // 2)),
           _rotary)
      for s, h, d in ((7, 3, 32), (3, 1, 20))),
    *(Case(f"multiply_complex-3x{n}", call(multiply_complex),
           (normal(3, 2 * n, dtype=bf16), normal(3, 2 * n, dtype=bf16)), _multiply_complex)
      for n in (1, 5, 8, 12, 16, 24, 64)),
    Case("adam-300", call(adam, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8),
         (normal(300), fixed([3]), normal(300), normal(300), uniform(300)),
         lambda *x: _adam(*x, 1e-2, 0.9, 0.99, 1e-8), c=16.0),
    Case("quantise_rows-9x100", call(quantise_rows), (normal(9, 100),), _quantise),
    Case("dequantise_rows-13x50", call(dequantise_rows),
         (integers(-127, 128, 13, 50, dtype=int8), uniform(13)),
         lambda q, s: q * s[:, None]),
    Case("mandelbrot-12x40", call(mandelbrot, limit=30), (fixed(np.zeros((12, 40))),),
         lambda x: _mandelbrot(12, 40, 30)),
    Case("game_of_life-19x37", call(game_of_life), (integers(0, 2, 19, 37, dtype=uint8),), _life),
    *(Case(f"jacobi-{h}x{w}-{bm}x{bn}", call(jacobi, BM=bm, BN=bn), (normal(h, w), normal(h, w)), _jacobi)
      for h, w, bm, bn in ((33, 50, 16, 32), (20, 23, 5, 7))),
    Case("collatz-70", call(collatz), (integers(1, 200, 70),), _collatz),
    Case("grey-150", call(grey), (integers(0, 256, 150, 3, dtype=uint8),),
         lambda x: ((x.astype(int) @ [77, 150, 29] + 128) >> 8).astype(np.uint8)),
    Case("hadamard-3x64", call(hadamard), (normal(3, 64),), _hadamard),
    Case("polynomial-120", call(polynomial, factors=FACTORS), (normal(120),),
         lambda x: np.polyval(np.array([float(each) for each in FACTORS.split(",")], x.dtype), x)),
    *(Case(f"activations-200-{i}", call(activations), (normal(200), fixed([i])), _activations, c=16.0)
      for i in range(3)),
]
