"""RNN, GRU and LSTM.

Protocol: x is [steps, batch, inputs] (layout 0). A direction is a cell with its own weights, called once a
step; the steps are unrolled into the graph. Past a sequence's length the state stays and the output is 0.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import Tensor

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.table import op

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

    def clipped(self, x: Tensor) -> Tensor: return x if self.clip is None else x.clip(-self.clip, self.clip)


def _unrolled(cell: Cell, x: Tensor, state: State, lengths: Tensor | None, backwards: bool
              ) -> tuple[Tensor, State]:
    """The first state after each step, and all states after the last."""
    steps, made = range(int(x.shape[0])), list[Tensor]()
    for i in reversed(steps) if backwards else steps:
        after, shown = cell(x[i], state), None
        if lengths is not None:
            inside = (lengths > i).reshape(-1, 1)
            after = tuple(inside.where(new, old) for new, old in zip(after, state, strict=True))
            shown = inside.where(after[0], 0)
        made.append(after[0] if shown is None else shown)
        state = after
    return Tensor.stack(*(made[::-1] if backwards else made), dim=0), state


def _run(settings: Settings, x: Tensor, cells: Sequence[Cell], states: Sequence[Tensor | None],
         lengths: Tensor | None) -> tuple[Tensor, ...]:
    """Y [steps, directions, batch, hidden] and the last states [directions, batch, hidden]."""
    if settings.layout:
        x = x.transpose(0, 1)
        states = [None if each is None else each.transpose(0, 1) for each in states]
    zero = Tensor.zeros(int(x.shape[1]), settings.hidden_size, dtype=x.dtype, device=x.device)
    outputs, lasts = [], list[State]()
    for d, cell in enumerate(cells):
        backwards = settings.direction == "reverse" or d == 1
        first = tuple(zero if each is None else each[d] for each in states)
        made, last = _unrolled(cell, x, first, lengths, backwards)
        outputs.append(made)
        lasts.append(last)
    y = Tensor.stack(*outputs, dim=1)
    final = [Tensor.stack(*each, dim=0) for each in zip(*lasts, strict=True)]
    if not settings.layout: return y, *final
    return y.permute(2, 0, 1, 3), *(each.transpose(0, 1) for each in final)


def _bias(b: Tensor | None, d: int) -> tuple[Tensor | float, Tensor | float]:
    """The biases of the input and of the state."""
    if b is None: return 0.0, 0.0
    of_input, of_state = b[d].chunk(2)
    return of_input, of_state


@op("RNN")
def rnn(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
        h: Tensor | None = None, **attributes: object) -> tuple[Tensor, ...]:
    """f(x Wᵀ + h Rᵀ + b)."""
    settings = _settings(attributes, r)

    def made(d: int) -> Cell:
        (f,), (of_input, of_state) = settings.functions(["Tanh"], d), _bias(b, d)
        return lambda x, state: (f(settings.clipped(x @ w[d].T + state[0] @ r[d].T + of_input + of_state)),)
    return _run(settings, x, [made(d) for d in range(int(w.shape[0]))], [h], lengths)


@op("GRU")
def gru(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
        h: Tensor | None = None, linear_before_reset: int = 0, **attributes: object) -> tuple[Tensor, ...]:
    """Gates in the order update, reset, hidden."""
    settings = _settings(attributes, r)
    size = settings.hidden_size

    def made(d: int) -> Cell:
        (f, g), (of_input, of_state) = settings.functions(["Sigmoid", "Tanh"], d), _bias(b, d)

        def cell(x: Tensor, state: State) -> State:
            (h,), given = state, x @ w[d].T + of_input
            gates = (given + h @ r[d].T + of_state)[:, :2 * size]
            z, reset = (f(settings.clipped(each)) for each in gates.chunk(2, dim=1))
            rows, offset = r[d][2 * size:], of_state if isinstance(of_state, float) else of_state[2 * size:]
            recurrent = reset * (h @ rows.T + offset) if linear_before_reset else \
                (reset * h) @ rows.T + offset
            new = g(settings.clipped(given[:, 2 * size:] + recurrent))
            return ((1 - z) * new + z * h,)
        return cell
    return _run(settings, x, [made(d) for d in range(int(w.shape[0]))], [h], lengths)


@op("LSTM")
def lstm(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
         h: Tensor | None = None, c: Tensor | None = None, p: Tensor | None = None, input_forget: int = 0,
         **attributes: object) -> tuple[Tensor, ...]:
    """Gates in the order input, output, forget, cell; `p` are peepholes of the first three."""
    settings = _settings(attributes, r)

    def made(d: int) -> Cell:
        f, g, out = settings.functions(["Sigmoid", "Tanh", "Tanh"], d)
        of_input, of_state = _bias(b, d)
        peep: Sequence[Tensor | float] = (0.0, 0.0, 0.0) if p is None else p[d].chunk(3)

        def cell(x: Tensor, state: State) -> State:
            h, c = state
            gates = x @ w[d].T + h @ r[d].T + of_input + of_state
            i, o, forget, new = (settings.clipped(each) for each in gates.chunk(4, dim=1))
            i = f(i + peep[0] * c)
            forget = 1 - i if input_forget else f(forget + peep[2] * c)
            c = forget * c + i * g(new)
            return f(o + peep[1] * c) * out(c), c
        return cell
    return _run(settings, x, [made(d) for d in range(int(w.shape[0]))], [h, c], lengths)


def _settings(attributes: dict[str, object], r: Tensor) -> Settings:
    return Settings(**{"hidden_size": int(r.shape[-1]), **attributes})    # type: ignore[arg-type]
