"""DEV=EMU, checks on: attention of few rows over many keys, as graphs have it, divided along the keys."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tinygrad.dtype import DType

from tests.support.patterns.attention_graph_case import (
    BF16,
    DEVICES,
    F16,
    F32,
    HIDDEN,
    close,
    made,
    near,
    normal,
    of,
    scaled,
    seen,
    stored,
    use,
)
from tinygrad_nv import LLM, Device, SamplingParams, Tensor, TinyJit, Variable, explain
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.models.dense import DenseKVCache
from tinygrad_nv.tile.decode.spec import DecodeSpec

BOTH = pytest.mark.parametrize("gpu", DEVICES, indirect=True)
CAPACITY = 1100  # two splits of 1024 keys with 64 elements at most


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    device = use(monkeypatch, getattr(request, "param", "sm_80"))
    yield device
    Device[device].synchronize()


def step(q: Tensor, cache: Tensor, start: object, window: int | None = None) -> Tensor:
    """Rows at start, start + 1, … over a cache [2, B, H_kv, capacity, D], as models/llama.py has it."""
    batch, heads, rows, d = q.shape
    end, kv = start + rows, cache.shape[2]
    k, v = cache[0, :, :, :end], cache[1, :, :, :end]
    x = q.reshape(batch, kv, heads // kv, rows, d).matmul(k.unsqueeze(2).transpose(-1, -2), dtype=F32) * 0.125
    if rows > 1 or window is not None:
        r, c = Tensor.arange(rows).reshape(rows, 1) + start, Tensor.arange(end).reshape(1, end)
        x = (c <= r if window is None else (c <= r) & (c > r - window)).where(x, -float("inf"))
    return (x.softmax(-1).cast(v.dtype) @ v.unsqueeze(2)).reshape(batch, heads, rows, d)


def filled(gpu: str, batch: int = 1, keys: int = CAPACITY) -> tuple[torch.Tensor, torch.Tensor, Tensor]:
    """k, v and their cache, in which nothing else is written."""
    k, v = made(b=batch, kv=2, keys=keys)[1:]
    cache = Tensor.empty(2, batch, 2, CAPACITY, 64, dtype=BF16, device=gpu).contiguous()
    cache[:, :, :, :keys].assign(stored(torch.stack([k, v]))).realize()
    return k, v, cache


def divided(y: Tensor) -> DecodeSpec:
    """The spec of the one attention, which a second kernel finishes where there may be several splits."""
    first, *more = [kernel for kernel in explain(y).kernels if kernel.template]
    assert isinstance(first.spec, DecodeSpec)
    assert first.template == "decode"
    several = not first.spec.window
    assert [(kernel.template, kernel.spec) for kernel in more] == [("combine", None)] * several
    return first.spec


# **** steps ****

@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize(("rows", "heads", "window"), [(1, 8, None), (1, 4, 200), (3, 4, None), (8, 2, 300)])
def test_a_captured_step_serves_every_length(gpu: str, rows: int, heads: int, window: int | None):
    """1, and around edges of splits; what is behind the last key has not been written."""
    k, v, cache = filled(gpu, keys=1030 + rows)
    start = Variable("start", 0, 1030).bind(5)
    spec = divided(step(stored(normal(1, heads, rows, 64)), cache, start, window))
    assert (spec.heads, spec.rows, spec.length, spec.window) == (2, rows * heads // 2, "argument", window)

    @TinyJit
    def run(q: Tensor, start: object) -> Tensor: return step(q, cache, start, window).realize()
    for i, end in enumerate((rows, 512, 511, 513, 1024, 1023, 1025, rows + 1)):
        q, start = normal(1, heads, rows, 64, seed=i), max(end - rows, 0)
        y = run(stored(q), Variable("start", 0, 1030).bind(start))
        sees = seen(rows, start + rows, lambda r, c, start=start: (c <= r + start) & (
            c > r + start - (window or CAPACITY)))
        close(torch.tensor(y.float().numpy()).double(), (q, k[:, :, :start + rows], v[:, :, :start + rows]),
              sees, BF16)


def test_windows_are_those_of_the_mask(gpu: str):
    """Of any number of rows: how many keys each sees, its own among them."""
    _, _, cache = filled(gpu)
    for rows, window in ((1, 200), (8, 300)):
        start = Variable("start", 0, 1030).bind(900)
        assert divided(step(stored(normal(1, 2, rows, 64)), cache, start, window)).window == window


@pytest.mark.slow
def test_bits_do_not_depend_on_the_batch(gpu: str):
    """Each of three requests alone, the room for keys another, the length a number."""
    _, _, cache = filled(gpu, batch=3)
    q, start = normal(3, 4, 2, 64), Variable("start", 0, 1030).bind(1030)
    whole = step(stored(q), cache, start).numpy()
    for b in range(3):
        mine = cache[:, b:b + 1].contiguous().realize()
        short = mine[:, :, :, :1032].contiguous().realize()
        for one, at in ((mine, start), (mine, 1030), (short, 1030)):
            alone = step(stored(q[b:b + 1]), one, at)
            assert isinstance(divided(alone), DecodeSpec)
            assert (alone.numpy() == whole[b:b + 1]).all()


def test_bits_do_not_depend_on_other_rows(gpu: str):
    """The first row, whatever the others are."""
    _, _, cache = filled(gpu)
    q = normal(1, 4, 3, 64)
    first = step(stored(q), cache, 700).numpy()[:, :, 0]
    q[:, :, 1:] *= 3
    assert (step(stored(q), cache, 700).numpy()[:, :, 0] == first).all()


@pytest.mark.slow
def test_llama_says_the_same_as_on_a_cpu():
    """The model in the box in bfloat16, where no tokens are a rounding apart: one attention for each layer
    and token, besides the combining."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    models = [LLM(DEFAULT_MODEL, "bfloat16", max_model_len=160, device=device) for device in ("CPU", "EMU")]
    told = [llm.complete("Once upon a time", params).token_ids for llm in models]
    assert told[0] == told[1]
    model = models[1].model
    cache = DenseKVCache.create(model.config, model.positions, BF16, device="EMU")
    position = Variable("position", 0, model.positions - 1).bind(7)
    logits = model.step(Tensor([[5]], device="EMU"), position, cache)
    templates = [kernel.template for kernel in explain(logits).kernels]
    assert templates.count("decode") == model.config.num_layers
    assert not any(template and template.startswith("flash") for template in templates)


# **** other graphs ****

def scores(q: Tensor, k: Tensor) -> Tensor: return q.matmul(k.transpose(-1, -2), dtype=F32) * 0.125


def attended(x: Tensor, v: Tensor) -> Tensor: return x.softmax(-1).cast(v.dtype) @ v


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("rows", [1, 4])
def test_soft_caps_and_biases(gpu: str, rows: int):
    """A bias of rows and keys, slopes of heads times distances, a mask of keys."""
    operands = made(heads=4, kv=4, rows=rows, keys=1040)
    q, k, v = of(operands)
    bias, mask = normal(4, rows, 1040, seed=3), normal(1040, seed=4) > -1
    slopes, c = normal(4, seed=5, dtype=F32), torch.arange(1040)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x * 0.125 / 20) * 20 + bias.to(x.dtype)
        x = x + slopes.to(x.dtype)[:, None, None] * (c - 1039).to(x.dtype)
        return torch.where(mask, x, HIDDEN)
    x = (scores(q, k) / 20).tanh() * 20 + stored(bias)
    x = x + stored(slopes, F32).reshape(4, 1, 1) * (Tensor.arange(1040) - 1039).float()
    known = Tensor(mask.numpy(), device=gpu).contiguous().realize()
    spec = near(attended(known.where(x, -float("inf")), v), operands, theirs, kernels=2)
    assert isinstance(spec, DecodeSpec)
    assert (spec.rows, spec.length, len(spec.parameters)) == (rows, "most", 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("heads", "kv", "dtype"), [(48, 1, BF16), (6, 6, F16), (12, 4, F16)])
def test_heads(heads: int, kv: int, dtype: DType):
    operands = made(b=2, heads=heads, kv=kv, rows=1, keys=1040, dtype=dtype)
    q, k, v = of(operands, dtype)
    y = q.scaled_dot_product_attention(k, v, enable_gqa=True)
    spec = near(y, operands, scaled, kernels=1 if kv == 1 else 2)  # splits are longer with 48 rows
    assert isinstance(spec, DecodeSpec)
    assert (spec.group, spec.batch * spec.heads) == (heads // kv, 2 * kv)


def test_rows_of_queries_that_all_see_all():
    """Of cross attention: as query heads of one key head."""
    operands = made(b=2, heads=2, kv=2, rows=24, keys=600)
    q, k, v = of(operands)
    spec = near(attended(scores(q, k), v), operands, scaled)
    assert isinstance(spec, DecodeSpec)
    assert (spec.s_q, spec.group) == (1, 24)


# **** which ****

@pytest.mark.parametrize(("rows", "heads", "keys", "template"), [
    (1, 2, 129, "decode"), (1, 2, 128, "flash_mma"), (8, 2, 300, "decode"), (9, 2, 300, "flash_mma"),
    (8, 16, 1025, "decode"), (8, 16, 1024, "flash_mma"), (8, 18, 2000, "flash_mma")])
def test_which_attentions_are_divided(gpu: str, rows: int, heads: int, keys: int, template: str):
    def empty(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=BF16, device=gpu)
    cache = empty(2, 1, 2, keys, 64)
    y = step(empty(1, heads, rows, 64), cache, keys - rows)
    assert explain(y).kernels[0].template == template


@pytest.mark.parametrize("change", ["d", "result", "beyond"])
def test_what_decode_kernels_do_not_take(gpu: str, change: str):
    """Heads of 72 elements, results in float32, masks that end behind the keys: by flash attention."""
    q, k, v = of(made(rows=2, keys=300, d=72 if change == "d" else 64))
    x, rows = scores(q, k), Tensor.arange(2).reshape(2, 1)
    if change == "beyond": x = (Tensor.arange(300).reshape(1, 300) <= rows + 299).where(x, -float("inf"))
    w = x.softmax(-1).cast(BF16)
    y = w.matmul(v, dtype=F32) if change == "result" else w @ v
    assert [kernel.template for kernel in explain(y).kernels] == ["flash_mma"]
