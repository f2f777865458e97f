"""A rank of test_collectives.py: what each primitive of training over ranks makes, against one device.

Each check is called by its name, with this rank's group. Weights are small integers and learning rates powers
of two, so that sums are exact in any order, where no bound is said.
"""
from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

import numpy as np
from tinygrad import Tensor, TinyJit, dtypes, nn
from tinygrad.helpers import Context, GlobalCounters

from tinygrad_nv.dist.collectives.functions import all_reduce, copy_to_ranks
from tinygrad_nv.dist.group import Group, init
from tinygrad_nv.dist.mesh.mesh import collectives_of
from tinygrad_nv.dist.train import data_parallel, experts, ring_attention, schedules
from tinygrad_nv.dist.train.cross_entropy import VocabularyLoss
from tinygrad_nv.dist.train.data_parallel import ShardedOptimizer
from tinygrad_nv.dist.train.fully_sharded import FullySharded
from tinygrad_nv.dist.train.pipeline import Pipeline, Recomputed
from tinygrad_nv.dist.train.sequence import SequenceParallel
from tinygrad_nv.functional import Experts, dispatch, linear_cross_entropy

STEPS = 2
H, BATCH, LAYERS = 4, 8, 3
Array = np.ndarray
Make = Callable[[list[Tensor]], nn.optim.Optimizer]


def integers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same(found: Array, wanted: Array, what: object) -> None:
    assert np.array_equal(found, wanted), f"{what}: {found} is not {wanted}"


def close(found: Array, wanted: Array, exact: Array, what: object, c: float = 4) -> None:
    """`found` is as near to float64 as one device is, up to c, or to c roundings of the largest value."""
    bound = c * max(np.abs(wanted - exact).max(), float(np.finfo(np.float32).eps) * np.abs(exact).max())
    assert np.abs(found - exact).max() <= bound, f"{what}: {np.abs(found - exact).max()} above {bound}"


class Layer:
    """A matmul with a bias, and what is not linear."""

    def __init__(self, seed: int, draw: Callable[..., Array] = integers, h: int = H) -> None:
        self.weight, self.bias = Tensor(draw(seed, h, h)).realize(), Tensor(draw(seed + 99, h)).realize()

    def __call__(self, x: Tensor) -> Tensor: return (x @ self.weight + self.bias).relu()


def loss_of(y: Tensor, wanted: Tensor) -> Tensor: return ((y - wanted) ** 2).sum() / y.shape[0]


# **** data parallel and ZeRO ****

def trained(how: str, group: Group, make: Make, draw: Callable[..., Array] = integers) -> list[Array]:
    """Parameters after steps on a batch, of which each rank has its part but for `how` "one"."""
    layers = [Layer(i, draw) for i in range(LAYERS)]
    own = [each for layer in layers for each in (layer.weight, layer.bias)]
    if how == "data":
        for each in own: each.assign(each + group.rank).realize()
        data_parallel.same_parameters(own, group)
    model = FullySharded(layers, group) if how == "zero3" else None
    parameters = own if model is None else model.shards
    sharded = None
    if how in ("zero1", "zero2"): sharded = ShardedOptimizer(parameters, group, make, bucket_bytes=100)
    optimizer = make(parameters) if sharded is None else sharded
    rows = BATCH // group.size
    part = slice(None) if how == "one" else slice(group.rank * rows, (group.rank + 1) * rows)
    for step in range(STEPS):
        x, wanted = (Tensor(draw(7 + 2 * step + i, BATCH, H)[part]).realize() for i in (0, 1))
        for each in parameters: each.grad = None
        halves = 2 if how == "zero2" else 1
        for part_x, part_wanted in zip(x.chunk(halves), wanted.chunk(halves), strict=True):
            y = part_x
            if model is not None: y = model(y)
            else:
                for layer in layers: y = layer(y)
            (loss_of(y, part_wanted) / (halves * (group.size if how == "zero3" else 1))).backward()
            if how == "zero2" and sharded is not None: sharded.reduce()
        if how == "data": data_parallel.average_gradients(parameters, group, bucket_bytes=100)
        optimizer.step()
    if model is None: return [each.numpy() for each in own]
    with model.whole(): return [each.numpy() for each in own]


def network(weights: list[Array], biases: list[Array], x: Array, wanted: Array) -> tuple[Array, list[Array]]:
    """The squared differences, and the gradients of weights and biases in turn: NumPy's."""
    inputs = [x]
    for weight, bias in zip(weights, biases, strict=True):
        inputs.append(np.maximum(inputs[-1] @ weight + bias, 0))
    grad, made = 2 * (inputs[-1] - wanted), list[Array]()
    for weight, x, y in zip(weights[::-1], inputs[-2::-1], inputs[:0:-1], strict=True):
        grad = grad * (y > 0)
        made = [x.T @ grad, grad.sum(0), *made]
        grad = grad @ weight.T
    return (inputs[-1] - wanted) ** 2, made


def stepped() -> list[Array]:
    """Parameters after steps of SGD, in NumPy."""
    own = [each for i in range(LAYERS) for each in (integers(i, H, H), integers(i + 99, H))]
    moments = [np.zeros_like(each) for each in own]
    for step in range(STEPS):
        x, wanted = (integers(7 + 2 * step + i, BATCH, H) for i in (0, 1))
        grads = network(own[::2], own[1::2], x, wanted)[1]
        moments = [0.5 * a + b / BATCH for a, b in zip(moments, grads, strict=True)]
        own = [a - 2 ** -4 * b for a, b in zip(own, moments, strict=True)]
    return own


def steps(group: Group, *hows: str) -> None:
    """Data parallel, ZeRO-1, 2 and 3: parameters after steps of SGD, bit for bit."""
    def make(parameters: list[Tensor]) -> nn.optim.Optimizer:
        return nn.optim.SGD(parameters, lr=2 ** -4, momentum=0.5)
    wanted = stepped()
    for how in hows or ("one", "data", "zero1", "zero2", "zero3"):
        for i, (a, b) in enumerate(zip(trained(how, group, make), wanted, strict=True)): same(a, b, (how, i))


def fully_sharded(group: Group) -> None: steps(group, "zero3")


def adam(group: Group) -> None:
    """The same of random weights with AdamW: 2 steps of 2^-7, which tell apart gradients by no more than
    their roundings."""
    def make(parameters: list[Tensor]) -> nn.optim.Optimizer: return nn.optim.AdamW(parameters, lr=2 ** -7)
    wanted = trained("one", group, make, normal)
    for how in ("data", "zero1", "zero2", "zero3"):
        for i, (a, b) in enumerate(zip(trained(how, group, make, normal), wanted, strict=True)):
            assert np.abs(a - b).max() <= 16 * np.finfo(np.float32).eps * np.abs(b).max(), (how, i, a - b)


def overlap(group: Group) -> None:
    """The all_reduce of a bucket waits for none of another; the last layers' come first."""
    layers = [Layer(i) for i in range(LAYERS)]
    own = [each for layer in layers for each in (layer.weight, layer.bias)]
    y = Tensor(integers(7, BATCH, H)).realize()
    for layer in layers: y = layer(y)
    y.sum().backward()
    data_parallel.average_gradients(own, group, bucket_bytes=H * H * 4)
    found = [collectives_of(each.grad) for each in own if each.grad is not None]
    assert [len(each) for each in found] == [1] * len(own), found
    assert found[-1][0].name.endswith("bucket 0"), found
    assert len(collectives_of(*(each.grad for each in own if each.grad is not None))) == len(own)


def memory(group: Group) -> None:
    """ZeRO-3 in a captured step: a rank holds its part of parameters and of two states of AdamW within 5 %,
    and around them 5.5 layers' parameters at most, of 8 layers as of 4."""
    h, around = 128, list[float]()
    layer_bytes = (h * h + h) * 4
    for count in (4, 8):
        gc.collect()
        before = GlobalCounters.mem_used
        model = FullySharded([Layer(i, normal, h) for i in range(count)], group)
        optimizer = nn.optim.AdamW(model.shards, lr=0.01)

        @TinyJit
        def step(x: Tensor, model: FullySharded = model, optimizer: nn.optim.Optimizer = optimizer) -> Tensor:
            loss = loss_of(model(x), x)
            loss.backward()
            optimizer.step()
            for each in (x, *model.shards): each.grad = None
            return loss.realize()
        x = Tensor(normal(1, 4, h)).realize()
        step(x)
        gc.collect()
        held = GlobalCounters.mem_used - before
        theory = 3 * count * layer_bytes / group.size
        assert abs(held / theory - 1) < 0.05, (held, theory)
        for _ in range(3): step(x)
        gc.collect()
        around.append((GlobalCounters.mem_used - before - held) / layer_bytes)
        del step, model, optimizer
    print(f"around the shards: {around[0]:.2f} and {around[1]:.2f} layers")
    assert around[1] < around[0] + 0.5, around
    assert max(around) <= 5.5, around


# **** pipelines ****

def piped(group: Group, schedule: schedules.Schedule) -> None:
    """A schedule's losses and gradients, bit for bit."""
    count, rows = schedule.microbatches, 2
    weights = [integers(i, H, H) for i in range(schedule.stages)]
    x, wanted = (integers(i, count, rows, H) for i in (40, 41))
    xs, ys = ([Tensor(each).realize() for each in one] for one in (x, wanted))
    stages = {}
    for s in range(schedule.stages):
        if schedule.rank_of(s) != group.rank: continue
        weight = Tensor(weights[s]).realize()

        def function(x: Tensor, *wanted: Tensor, weight: Tensor = weight) -> Tensor:
            y = (x @ weight).relu()
            return ((y - wanted[0]) ** 2).sum() if wanted else y
        def data(m: int, s: int = s) -> tuple[Tensor, ...]:
            return (*((xs[m],) if s == 0 else ()), *((ys[m],) if s == schedule.stages - 1 else ()))
        stages[s] = Recomputed(function, [weight], data)
    losses = Pipeline(schedule, group, stages, (rows, H), dtypes.float32).run()
    squares, grads = network(weights, [np.zeros(H, np.float32)] * len(weights), x.reshape(-1, H),
                             wanted.reshape(-1, H))
    for s, stage in stages.items():
        grad = stage.parameters[0].grad
        assert grad is not None
        same(grad.numpy(), grads[2 * s], (schedule.name, s))
        assert not stage.inputs, "nothing is kept behind"
        assert not stage.gradients, "nothing is kept behind"
    if schedule.rank_of(schedule.stages - 1) == group.rank:
        found = np.array([losses[m].item() for m in range(count)])
        same(found, squares.reshape(count, -1).sum(1), schedule.name)


def zero_bubble(group: Group) -> None: piped(group, schedules.zero_bubble_h1(group.size, group.size + 1))


def pipelines(group: Group) -> None:
    """GPipe, 1F1B, and interleaved 1F1B."""
    n = group.size
    for each in (schedules.gpipe(n, n), schedules.one_f_one_b(n, 2 * n), schedules.interleave(n, 2 * n, 2)):
        piped(group, each)


# **** sequences and experts ****

def sequence(group: Group) -> None:
    """A tensor parallel layer between scales of this rank's tokens, in place of norms, which round: result
    and gradients, bit for bit."""
    tokens, width, n, r = 2 * group.size, 2 * group.size, group.size, group.rank
    x, scale, up, down, of = (integers(i, *shape) for i, shape in enumerate(
        ((2, tokens, H), (H,), (H, width), (width, H), (2, tokens, H))))

    def half(cut: SequenceParallel | None, x: Tensor, scale: Tensor, up: Tensor, down: Tensor) -> Tensor:
        if cut is not None: x, scale = cut.own(x), cut.share(scale)
        h = x * scale
        if cut is not None: h = cut.begin_half(h)
        h = (h @ up).relu() @ down
        if cut is not None: h = cut.sum_halves(h)
        x = (x + h) * scale
        return x if cut is None else cut.whole(x)
    own = slice(r * width // n, (r + 1) * width // n)
    whole = [Tensor(each).realize() for each in (x, scale, up, down)]
    part = [Tensor(each).realize() for each in (x, scale, up[:, own], down[own])]
    made = [half(None, *whole), half(SequenceParallel(group), *part)]
    for each in made: (each * Tensor(of)).sum().backward()
    same(made[1].numpy(), made[0].numpy(), "result")
    for name, a, b in zip(("x", "scale", "up", "down"), part, whole, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        exact = b.grad.numpy()
        if name in ("up", "down"): exact = exact[:, own] if name == "up" else exact[own]
        same(a.grad.numpy(), exact, name)


def exact_losses(hidden: Array, weight: Array, labels: Array, scale: Array, softcap: float | None,
                 divisor: float, smoothing: float, z_loss: float) -> list[Array]:
    """Losses of rows, and the gradients of hidden and weight of their sum times `scale`, float64."""
    h, w = hidden.astype(np.float64), weight.astype(np.float64)
    x = h @ w.T / divisor
    slope = np.full_like(x, 1 / divisor)
    if softcap is not None: x, slope = softcap * np.tanh(x / softcap), slope / np.cosh(x / softcap) ** 2
    top = x.max(1, keepdims=True)
    lse = top + np.log(np.exp(x - top).sum(1, keepdims=True))
    counted, one = (labels != -100)[:, None], np.eye(len(w))[np.maximum(labels, 0)]
    wanted = one * (1 - smoothing) + smoothing / len(w)
    losses = ((wanted * (lse - x)).sum(1, keepdims=True) + z_loss * lse ** 2) * counted
    d = (np.exp(x - lse) * (1 + 2 * z_loss * lse) - wanted) * slope * counted * scale[:, None]
    return [losses[:, 0], d @ w, d.T @ h]


def vocabulary(group: Group) -> None:
    """The loss of a cut vocabulary, with each option, in one chunk and in several, rows that are ignored, and
    logits up to 1e4; its gradients: as near to float64 as one device."""
    size, width = 37, -(-37 // group.size)
    first = min(group.rank * width, size)
    count = min(width, size - first)
    for number, (options, large, chunk) in enumerate((
            ({}, 1.0, 0), ({"softcap": 5.0, "divisor": 2.0}, 4.0, 3), ({"label_smoothing": 0.1}, 1.0, 4),
            ({"z_loss": 0.01}, 1.0, 0), ({"label_smoothing": 0.2, "z_loss": 0.1}, 2000.0, 5))):
        hidden, weight, scale = normal(number, 11, 8) * large, normal(50 + number, size, 8), normal(9, 11)
        labels = np.random.default_rng(number).integers(0, size, 11).astype(np.int32)
        labels[[2, 7]] = -100
        own = np.zeros((width, 8), np.float32)
        own[:count] = weight[first:first + count]
        mine, part, whole, of = (Tensor(each).realize() for each in (hidden, own, weight, hidden))
        loss = VocabularyLoss(group, first, count, size, **options)
        made = loss(copy_to_ranks(mine, group), part, Tensor(labels), chunk)
        there = linear_cross_entropy(of, whole, Tensor(labels), reduction="none", **options)
        for each in (made, there): (each * Tensor(scale)).sum().backward()
        exact = exact_losses(hidden, weight, labels, scale, options.get("softcap"),
                             options.get("divisor", 1.0), options.get("label_smoothing", 0.0),
                             options.get("z_loss", 0.0))
        grads = [each.grad.numpy() for each in (mine, part, of, whole) if each.grad is not None]
        close(made.numpy(), there.numpy(), exact[0], f"losses {number}")
        close(grads[0], grads[2], exact[1], f"hidden {number}")
        rows = exact[2].copy()      # others are other ranks'; a few rows of one device may be right by luck
        rows[first:first + count] = grads[1][:count]
        close(rows, grads[3], exact[2], number)
        same(grads[1][count:], 0 * grads[1][count:], "rows that are no tokens")


def attended(causal: bool, q: Array, k: Array, v: Array, grad: Array) -> list[Array]:
    """The attention's result and gradients in the arrays' dtype."""
    repeat = q.shape[1] // k.shape[1]
    keys, values = (each.repeat(repeat, 1) for each in (k, v))
    scale = q.dtype.type(1 / np.sqrt(q.shape[-1]))
    s = q @ keys.swapaxes(2, 3) * scale
    if causal: s = np.where(np.tril(np.ones(s.shape[2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    out, dp = p @ values, grad @ values.swapaxes(2, 3)
    ds = p * (dp - (grad * out).sum(-1, keepdims=True)) * scale

    def added(x: Array) -> Array: return x.reshape(*k.shape[:2], repeat, *x.shape[2:]).sum(2)
    return [out, ds @ keys, added(ds.swapaxes(2, 3) @ q), added(p.swapaxes(2, 3) @ grad)]


def ring(group: Group, causal: bool = True) -> None:
    """Attention over a sequence in parts, and its gradients."""
    shape = 1, 1, 4 * group.size, 4
    given = normal(0, 1, 2, *shape[2:]), normal(1, *shape), normal(2, *shape), normal(3, 1, 2, *shape[2:])
    single = attended(causal, *given)
    exact = attended(causal, *(each.astype(np.float64) for each in given))
    q, k, v, grad = (ring_attention.zigzag(Tensor(each), group).realize() for each in given)
    out = ring_attention.ring_attention(q, k, v, group, causal=causal)
    (out * grad).sum().backward()
    found = [each for each in (out, q.grad, k.grad, v.grad) if each is not None]
    Tensor.realize(*found)
    kinds = {each.kind for each in collectives_of(*found)}
    assert not kinds, kinds
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), found, single, exact, strict=True):
        close(ring_attention.unzigzag(a, group).numpy(), b, c, name)


def ring_both_ways(group: Group) -> None: ring(group, causal=False)


def expert(group: Group) -> None:
    """A mixture of experts over ranks; the same tokens with too little room lose what the rule says."""
    tokens, hidden, width, count = 4, H, 2, 2 * group.size
    n, r, local = group.size, group.rank, count // group.size
    x, grad = normal(0, n * tokens, hidden), normal(1, n * tokens, hidden)
    router, gate_up, down = normal(2, count, hidden), normal(3, count, 2 * width, hidden), normal(
        4, count, hidden, width)
    whole = Experts(*(Tensor(each).realize() for each in (router, gate_up, down)))
    own = slice(r * local, (r + 1) * local)
    part = experts.LocalExperts(*(Tensor(each).realize() for each in (router, gate_up[own], down[own])))
    rows = slice(r * tokens, (r + 1) * tokens)
    given, mine = Tensor(x).realize(), Tensor(x[rows]).realize()
    wanted, made = dispatch(given, whole), experts.dispatch(mine, part, group)
    (wanted * Tensor(grad)).sum().backward()
    (made * Tensor(grad[rows])).sum().backward()
    assert isinstance(whole.gate_up, Tensor)
    assert isinstance(whole.down, Tensor)
    pairs = [("result", made, wanted, rows), ("tokens", mine.grad, given.grad, rows),
             ("gate_up", part.gate_up.grad, whole.gate_up.grad, own),
             ("down", part.down.grad, whole.down.grad, own)]
    for name, a, b, where in pairs:
        assert a is not None
        assert b is not None
        exact = b.numpy()[where]
        close(a.numpy(), exact, exact, name)
    assert part.router.grad is not None
    assert whole.router.grad is not None
    exact = whole.router.grad.numpy()
    close(all_reduce(part.router.grad, group).numpy(), exact, exact, "router", c=16)
    few = experts.dispatch(mine.detach(), part, group, "top1", capacity=1).numpy()
    chosen = (x[rows] @ router.T).argmax(-1)
    order = sorted(range(tokens), key=lambda t: (chosen[t], t))
    kept = {next(t for t in order if chosen[t] // local == rank) for rank in set(chosen // local)}
    full = experts.dispatch(mine.detach(), part, group, "top1").numpy()
    same(few, np.where(np.isin(np.arange(tokens), list(kept))[:, None], full, 0), "dropped")


def main() -> None:
    world = init()
    group = world.group()
    with Context(TRAINING=1):
        for name in sys.argv[1:]:
            begun = time.process_time()
            globals()[name](group)
            print(f"rank {world.rank} of {world.size}: {name} is right, "
                  f"{time.process_time() - begun:.1f} s of a core", flush=True)


if __name__ == "__main__": main()
