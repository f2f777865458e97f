"""RNN, GRU and LSTM.

Protocol: x is [steps, batch, inputs] (layout 0). A direction has weights of its own: x W of all steps is one
matmul, and a cell takes a step's part of it and the state; the steps are unrolled into the graph. Past a
sequence's length the state stays and the output is 0.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.limits import budget
from tinygrad_nv.onnx.ops.quantised import dequantize, dynamic
from tinygrad_nv.onnx.table import op

CELL_NODES = 4      # of a step, that limits count
Activation = Callable[[Tensor], Tensor]
NUMBERED = ("affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu")
State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State], State]


def activation(name: str, alpha: float | None, beta: float | None) -> Activation:
    """An activation by its name, with ONNX's defaults of alpha and beta."""
    def default(given: float | None, usual: float) -> float: return usual if given is None else given
    table: dict[str, Activation] = {
        "relu": Tensor.relu, "tanh": Tensor.tanh, "sigmoid": Tensor.sigmoid, "softsign": Tensor.softsign,
        "softplus": Tensor.softplus,
        "affine": lambda x: x * default(alpha, 1.0) + default(beta, 0.0),
        "leakyrelu": lambda x: x.leaky_relu(default(alpha, 0.01)),
        "thresholdedrelu": lambda x: (x > default(alpha, 1.0)).where(x, 0),
        "scaledtanh": lambda x: (x * default(beta, 1.0)).tanh() * default(alpha, 1.0),
        "hardsigmoid": lambda x: (x * default(alpha, 0.2) + default(beta, 0.5)).clip(0, 1),
        "elu": lambda x: x.elu(default(alpha, 1.0))}
    if name.lower() not in table: raise OnnxError(f"an activation {name!r}", ", ".join(table))
    return table[name.lower()]


@dataclass(frozen=True)
class Settings:
    """The attributes that the three ops share."""
    activation_alpha: Sequence[float] = ()
    activation_beta: Sequence[float] = ()
    activations: Sequence[str] = ()
    clip: float | None = None
    direction: str = "forward"
    hidden_size: int = 0
    layout: int = 0

    def functions(self, usual: Sequence[str], direction: int) -> list[Activation]:
        """The activations of a direction."""
        names = list(self.activations) or list(usual) * 2
        alphas, betas = iter(self.activation_alpha), iter(self.activation_beta)
        made = []
        for name in names:      # those that take a number have one of the list each
            takes = name.lower() in NUMBERED
            made.append(activation(name, next(alphas, None) if takes else None,
                                   next(betas, None) if takes else None))
        return made[direction * len(usual):(direction + 1) * len(usual)]

    def clip_input(self, x: Tensor) -> Tensor: return x if self.clip is None else x.clip(-self.clip,
                                                                                         self.clip)


def _unroll(cell: Cell, given: Tensor, state: State, lengths: Tensor | None, backwards: bool
              ) -> tuple[Tensor, State]:
    """The first state after each step, and all states after the last."""
    steps, made = range(int(given.shape[0])), list[Tensor]()
    budget().spend(len(steps) * CELL_NODES)
    for i in reversed(steps) if backwards else steps:
        after, shown = cell(given[i], state), None
        if lengths is not None:
            inside = (lengths > i).reshape(-1, 1)
            after = tuple(inside.where(new, old) for new, old in zip(after, state, strict=True))
            shown = inside.where(after[0], 0)
        made.append(after[0] if shown is None else shown)
        state = after
    return Tensor.stack(*(made[::-1] if backwards else made), dim=0), state


def _run(settings: Settings, x: Tensor, w: Tensor, biases: Sequence[Tensor | float], cells: Sequence[Cell],
         states: Sequence[Tensor | None], lengths: Tensor | None) -> tuple[Tensor, ...]:
    """Y [steps, directions, batch, hidden] and the last states [directions, batch, hidden]."""
    if settings.layout:
        x = x.transpose(0, 1)
        states = [None if each is None else each.transpose(0, 1) for each in states]
    zero = Tensor.zeros(int(x.shape[1]), settings.hidden_size, dtype=x.dtype, device=x.device)
    flat, outputs, lasts = x.reshape(-1, x.shape[-1]).contiguous(), [], list[State]()
    for d, cell in enumerate(cells):
        backwards = settings.direction == "reverse" or d == 1
        first = tuple(zero if each is None else each[d].contiguous() for each in states)
        # operands in memory, and one sum a kernel: else these are no matmuls of ours
        given = (flat @ w[d].T + biases[d]).reshape(*x.shape[:2], -1).contiguous()
        made, last = _unroll(cell, given, first, lengths, backwards)
        outputs.append(made)
        lasts.append(last)
    y = Tensor.stack(*outputs, dim=1)
    final = [Tensor.stack(*each, dim=0) for each in zip(*lasts, strict=True)]
    if not settings.layout: return y, *final
    return y.permute(2, 0, 1, 3), *(each.transpose(0, 1) for each in final)


def _sums(b: Tensor | None, w: Tensor) -> list[Tensor | float]:
    """The bias of each direction: that of the input and that of the state."""
    if b is None: return [0.0] * int(w.shape[0])
    return [b[d][:int(w.shape[1])] + b[d][int(w.shape[1]):] for d in range(int(w.shape[0]))]


@op("RNN")
def rnn(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
        h: Tensor | None = None, **attributes: object) -> tuple[Tensor, ...]:
    """f(x Wᵀ + h Rᵀ + b)."""
    settings, w, r = _settings(attributes, r), w.contiguous(), r.contiguous()

    def make_cell(d: int) -> Cell:
        f, = settings.functions(["Tanh"], d)
        return lambda given, state: (f(settings.clip_input(state[0] @ r[d].T + given)),)
    return _run(settings, x, w, _sums(b, w), [make_cell(d) for d in range(int(w.shape[0]))], [h], lengths)


@op("GRU")
def gru(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
        h: Tensor | None = None, linear_before_reset: int = 0, **attributes: object) -> tuple[Tensor, ...]:
    """Gates in the order update, reset, hidden."""
    settings, w, r = _settings(attributes, r), w.contiguous(), r.contiguous()
    size = settings.hidden_size

    def make_cell(d: int) -> Cell:
        f, g = settings.functions(["Sigmoid", "Tanh"], d)
        of_state, rows = None if b is None else b[d].chunk(2)[1], r[d][2 * size:]

        def cell(given: Tensor, state: State) -> State:
            h, = state
            before = h @ (r[d] if linear_before_reset else r[d][:2 * size]).T
            if of_state is not None: before = before + of_state[:int(before.shape[1])]
            gates = given[:, :2 * size] + before[:, :2 * size]
            z, reset = (f(settings.clip_input(each)) for each in gates.chunk(2, dim=1))
            if linear_before_reset: recurrent = reset * before[:, 2 * size:]
            else: recurrent = (reset * h) @ rows.T + (0.0 if of_state is None else of_state[2 * size:])
            new = g(settings.clip_input(given[:, 2 * size:] + recurrent))
            return ((1 - z) * new + z * h,)
        return cell
    count = int(w.shape[0])
    biases: list[Tensor | float] = [0.0 if b is None else b[d].chunk(2)[0] for d in range(count)]
    return _run(settings, x, w, biases, [make_cell(d) for d in range(count)], [h], lengths)


@op("LSTM")
def lstm(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
         h: Tensor | None = None, c: Tensor | None = None, p: Tensor | None = None, input_forget: int = 0,
         multiplied: Activation = lambda x: x, **attributes: object) -> tuple[Tensor, ...]:
    """Gates in the order input, output, forget, cell; `p` are peepholes of the first three. `multiplied`:
    what becomes of x and h before they are multiplied."""
    settings, w, r = _settings(attributes, r), w.contiguous(), r.contiguous()

    def make_cell(d: int) -> Cell:
        f, g, out = settings.functions(["Sigmoid", "Tanh", "Tanh"], d)
        peep: Sequence[Tensor | float] = (0.0, 0.0, 0.0) if p is None else p[d].chunk(3)

        def cell(given: Tensor, state: State) -> State:
            h, c = state
            gates = multiplied(h) @ r[d].T + given
            i, o, forget, new = (settings.clip_input(each) for each in gates.chunk(4, dim=1))
            i = f(i + peep[0] * c)
            forget = 1 - i if input_forget else f(forget + peep[2] * c)
            c = forget * c + i * g(new)
            return f(o + peep[1] * c) * out(c), c
        return cell
    cells = [make_cell(d) for d in range(int(w.shape[0]))]
    return _run(settings, multiplied(x), w, _sums(b, w), cells, [h, c], lengths)


@op("DynamicQuantizeLSTM", domain="com.microsoft")
def dynamic_quantize_lstm(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, lengths: Tensor | None,
                          h: Tensor | None, c: Tensor | None, p: Tensor | None, w_scale: Tensor,
                          w_zero: Tensor, r_scale: Tensor, r_zero: Tensor, **attributes: Any
                          ) -> tuple[Tensor, ...]:
    """LSTM of 8-bit weights [directions, inputs, 4 · hidden], with a scale and a zero point for each
    direction or each of its columns; x and h are rounded to 8 bits by their range."""
    def numbers(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        s, z = (each.reshape(int(codes.shape[0]), 1, -1) for each in (scale, zero))
        return ((codes.cast(dtypes.int32) - z.cast(dtypes.int32)).cast(s.dtype) * s).transpose(1, 2)

    def quantise(x: Tensor) -> Tensor: return dequantize(*dynamic(x))
    return lstm(x, numbers(w, w_scale, w_zero), numbers(r, r_scale, r_zero), b, lengths, h, c, p,
                multiplied=quantise, **attributes)


def _settings(attributes: dict[str, object], r: Tensor) -> Settings:
    return Settings(**{"hidden_size": int(r.shape[-1]), **attributes})    # type: ignore[arg-type]
