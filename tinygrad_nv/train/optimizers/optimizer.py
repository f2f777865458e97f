"""An optimiser: update rules over named parameters, their state, and what all rules share.

Protocol. `Optimizer(parameters, lr, rule)` takes parameters by the names of their checkpoint. A step, which
a TinyJit may capture:

    loss.backward()
    Tensor.realize(loss, *optimizer.schedule_step())        or optimizer.step()
    optimizer.zero_grad()

The learning rate is on the device: `optimizer.set_lr(x)` between steps serves a captured step, too. So are
the number of steps done and of those skipped. In this order a step

    takes the norm of all gradients (`grad_norm`), and the scale that clips it to `max_grad_norm`
    is skipped as a whole where the norm is not finite (`skip_nonfinite`): nothing changes but `skipped`
    advances slots and moves parameters by their rule (rules.py) in float32
    rounds parameters of 16 bits from their fp32_master, or stochastically without one (`round_to`)

`state` has all that a resumed run needs, by flat names (state.py): with it, the parameters and the learning
rate, the next steps have the same bits as never having stopped.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.numerics.recipes import LossScaler, LossScaling
from tinygrad_nv.patterns.optimizer import Entry, adamw_update
from tinygrad_nv.tile.attention.dropout import philox
from tinygrad_nv.train.optimizers.gradients import clip_scale, gradients_of, square_and_sum
from tinygrad_nv.train.optimizers.rules import (
    AdamWRule,
    At,
    ParameterGroup,
    UpdateRule,
    decay_groups,
    group_of,
)
from tinygrad_nv.train.optimizers.state import FloatSlot, OptimizerState, ParameterState, keep, make_slot

RUN = 8     # elements of a call of Philox
FLOAT16S = (dtypes.bfloat16, dtypes.float16)
RuleOf = Callable[[str, Tensor], UpdateRule]


@dataclass(frozen=True)
class StateOptions:
    """How state is kept. `master`: parameters of 16 bits have float32 master weights; without, bfloat16 is
    rounded stochastically from `seed`. `bits` 8: quantised blockwise, `paged`: in the host's
    memory (state.py). `max_grad_norm` None: nothing is clipped. `rows`: extents of
    projections that lie one below the other in a parameter, by its name. `squares`: where ranks have parts
    of parameters, the sum of squares of all gradients, of this rank's by name, float64 (1). `counts`:
    elements of whole parameters there, by name, which say whether their state is quantised.
    `loss_scaling`: gradients are those of a loss times `Optimizer.loss_scaler.scale`, which the step takes
    out and moves."""
    master: bool = True
    seed: int = 0
    bits: int = 32
    paged: bool = False
    max_grad_norm: float | None = None
    skip_nonfinite: bool = True
    rows: Mapping[str, tuple[int, ...]] | None = None
    squares: Callable[[dict[str, Tensor]], Tensor] | None = None
    counts: Mapping[str, int] | None = None
    loss_scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm {self.max_grad_norm}", "a number above 0, or None")
        if self.loss_scaling is not None and not self.skip_nonfinite:
            raise ConfigError("loss_scaling without skip_nonfinite", "both: a scale too large skips a step")
        if self.bits not in (8, 32): raise ConfigError(f"state of {self.bits} bits", "8 or 32")
        if self.bits == 8 and self.paged: raise ConfigError("paged state of 8 bits", "paged, or of 8 bits")
        if not 0 <= self.seed < 1 << 64: raise ConfigError(f"seed {self.seed}", "0 to 2⁶⁴ − 1")


class Optimizer:
    """`rule`: one for all parameters, or a function of name and tensor. `groups`: by default those of
    `decay_groups` with `weight_decay`. Raises `ConfigError`."""

    def __init__(self, parameters: Mapping[str, Tensor], lr: float, rule: UpdateRule | RuleOf, *,
                 weight_decay: float = 0.0, groups: Sequence[ParameterGroup] | None = None,
                 options: StateOptions | None = None) -> None:
        self.options = options or StateOptions()
        self.parameters = dict(parameters)
        self._check(lr)
        self.groups = tuple(groups) if groups is not None else decay_groups(self.parameters, weight_decay)
        self.group = group_of(self.parameters, self.groups)
        self.rules = {name: rule(name, each) if callable(rule) else rule
                      for name, each in self.parameters.items()}
        self.device = next(iter(self.parameters.values())).device
        self.lr = self._scalar(lr, dtypes.float32)
        self.grad_norm = self._scalar(0.0, dtypes.float32)
        self.steps, self.skipped = (self._scalar(0, dtypes.int32) for _ in range(2))
        seed = self.options.seed
        self.seed = Tensor([seed & 0xFFFFFFFF, seed >> 32], dtype=dtypes.uint32, device=self.device)
        self.loss_scaler = None
        if (how := self.options.loss_scaling) is not None: self.loss_scaler = LossScaler(how, self.device)
        scaling = {} if self.loss_scaler is None else self.loss_scaler.tensors()
        self.state = OptimizerState({name: self._state(name) for name in self.parameters},
                                    {"step": self.steps, "skipped": self.skipped, "seed": self.seed,
                                     **scaling})
        Tensor.realize(self.lr, self.grad_norm, *self.state.tensors().values())

    def _check(self, lr: float) -> None:
        if not self.parameters: raise ConfigError("an optimizer without parameters", "one at least")
        if not lr >= 0: raise ConfigError(f"learning rate {lr}", "a number from 0")
        for name, each in self.parameters.items():
            if each.dtype not in (dtypes.float32, *FLOAT16S):
                raise ConfigError(f"{name} of {each.dtype.name}", "float32, bfloat16 or float16")
            if each.dtype == dtypes.float16 and not self.options.master:
                raise ConfigError(f"{name} of float16 without master weights", "bfloat16, or master=True")
            if each.device != (first := next(iter(self.parameters.values())).device):
                raise ConfigError(f"{name} on {each.device}, others on {first}", "one device for all")
        for name, rows in (self.options.rows or {}).items():
            if name not in self.parameters: raise ConfigError(f"rows of {name!r}", "names of parameters")
            if sum(rows) != self.parameters[name].shape[-2]:
                raise ConfigError(f"rows {', '.join(map(str, rows))} of {name}",
                                  f"{self.parameters[name].shape[-2]} in all")

    def _scalar(self, value: float, dtype: object) -> Tensor:
        return Tensor([value], dtype=dtype, device=self.device).contiguous().is_param_(False)

    def _state(self, name: str) -> ParameterState:
        parameter, rule = self.parameters[name], self.rules[name]
        shape = tuple(int(extent) for extent in parameter.shape)
        count = prod(shape) if self.options.counts is None else self.options.counts[name]
        slots = {key: make_slot(key, own, self.device, self.options.bits, self.options.paged,
                                count if own == shape else 0) for key, own in rule.slots(shape).items()}
        master = None
        if parameter.dtype in FLOAT16S and self.options.master:
            master = parameter.detach().cast(dtypes.float32).contiguous().is_param_(False)
        return ParameterState(slots, master)

    @property
    def params(self) -> list[Tensor]:
        """The parameters, as tinygrad's optimisers have them."""
        return list(self.parameters.values())

    def zero_grad(self) -> None:
        """Drops the gradients of all parameters."""
        for each in self.parameters.values(): each.grad = None

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of the next steps, without another capture."""
        self.lr.assign(Tensor([lr], dtype=dtypes.float32, device=self.device)).realize()

    def step(self) -> None:
        """One step, realized."""
        Tensor.realize(*self.schedule_step())

    def schedule_step(self, gradients: Mapping[str, Tensor] | None = None,
                      inverse_scale: Tensor | None = None) -> list[Tensor]:
        """One step; what is to be realized. `gradients`: others than the parameters' own, by name.
        `inverse_scale`, float32 (1): what they are to be multiplied by, where a loss scale is in them that is
        not the optimiser's own. Raises
        `ConfigError` for a parameter without a gradient."""
        given = gradients_of(self.parameters) if gradients is None else dict(gradients)
        if inverse_scale is None and self.loss_scaler is not None: inverse_scale = self.loss_scaler.inverse
        scale, go = self._guard(given, inverse_scale)
        done = 1 if go is None else go.cast(dtypes.int32)
        self.steps.assign(self.steps + done)
        self.skipped.assign(self.skipped + (1 - done))
        changed = [self.steps, self.skipped, self.grad_norm]
        if self.loss_scaler is not None and go is not None: changed += self.loss_scaler.schedule_update(go)
        fused = [name for name in self.parameters if self._is_fused(name)]
        for rule in dict.fromkeys(self.rules[name] for name in fused):
            assert isinstance(rule, AdamWRule)
            alike = [name for name in fused if self.rules[name] == rule]
            changed += self._fuse(rule, alike, given, scale, go)
        for name in self.parameters:
            if name not in fused: changed += self._update(name, given[name], scale, go)
        return changed

    def _is_fused(self, name: str) -> bool:
        """Whether a parameter is one of many that AdamW updates in one launch."""
        parameter, own = self.parameters[name], self.state.parameters[name]
        return isinstance(self.rules[name], AdamWRule) and isinstance(parameter.device, str) and \
            all(isinstance(slot, FloatSlot) for slot in own.slots.values()) and \
            (parameter.dtype == dtypes.float32) == (own.master is None)

    def _fuse(self, rule: AdamWRule, names: Sequence[str], given: Mapping[str, Tensor], scale: Tensor | None,
               go: Tensor | None) -> list[Tensor]:
        """Updates parameters of a rule together (patterns/optimizer)."""
        entries = []
        for name in names:
            own = self.state.parameters[name]
            m, v = (own.slots[key].tensors()[""] for key in ("exp_avg", "exp_avg_sq"))
            entries.append(Entry(self.parameters[name], m, v, given[name], self.group[name], own.master))
        one = Tensor.ones(1, dtype=dtypes.float32).to(self.device)
        control = [one if go is None else go.cast(dtypes.float32), one if scale is None else scale]
        ats = [At.of(group, self.lr, self.steps) for group in self.groups]
        control.append(rule.root(ats[0]))
        for at in ats: control += [at.decay, rule.step_size(at)]
        adamw_update(entries, Tensor.cat(*control).contiguous(), rule.beta1, rule.beta2, rule.eps)
        return [tensor for entry in entries for tensor in entry.outputs]

    def _guard(self, gradients: dict[str, Tensor], scale: Tensor | None
               ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the factor of gradients, and whether the step is taken; None for 1 and for always."""
        most = self.options.max_grad_norm
        if most is None and not self.options.skip_nonfinite: return scale, None
        squares = square_and_sum(list(gradients.values())) if self.options.squares is None else \
            self.options.squares(gradients)
        norm = squares.sqrt().cast(dtypes.float32)
        if scale is not None: norm = norm * scale
        self.grad_norm.assign(norm)
        go = self.grad_norm.isfinite() if self.options.skip_nonfinite else None
        if most is None: return scale, go
        clip = clip_scale(self.grad_norm, most)
        return (clip if scale is None else clip * scale), go

    def at(self, name: str) -> At:
        """Returns the values of this step that the rule of a parameter needs."""
        return At.of(self.groups[self.group[name]], self.lr, self.steps,
                     (self.options.rows or {}).get(name, ()))

    def _update(self, name: str, gradient: Tensor, scale: Tensor | None, go: Tensor | None) -> list[Tensor]:
        parameter, own, rule, at = self.parameters[name], self.state.parameters[name], self.rules[name], \
            self.at(name)
        g = gradient.cast(dtypes.float32)
        if scale is not None: g = g * scale
        x = (parameter if own.master is None else own.master).detach().cast(dtypes.float32)
        old = {key: slot.read() for key, slot in own.slots.items()}
        advanced = rule.advance(x, g, old, at)
        new = {key: slot.write(advanced[key], go) for key, slot in own.slots.items()}
        moved = rule.move(x, g, old, new, at)
        self._put(name, parameter, own, moved, go)
        return [parameter, *(tensor for _, tensor in own.tensors())]

    def _put(self, name: str, parameter: Tensor, own: ParameterState, moved: Tensor,
             go: Tensor | None) -> None:
        """Stores new numbers of a parameter, rounded."""
        if own.master is not None:
            own.master.assign(keep(go, moved, own.master))
            parameter.assign(own.master.detach().cast(parameter.dtype))
        elif parameter.dtype == dtypes.bfloat16:
            number = list(self.parameters).index(name)
            parameter.assign(keep(go, round_to(moved, self.seed, self.steps, number), parameter))
        else: parameter.assign(keep(go, moved, parameter))

    def state_dict(self) -> dict[str, Tensor]:
        """The state by flat names, the learning rate among it."""
        return {**self.state.tensors(), "lr": self.lr}

    def load_state_dict(self, given: Mapping[str, Tensor]) -> None:
        """Takes what `state_dict` gave, to the bit. Raises `WeightError` for names, shapes or dtypes that
        differ, before anything is written."""
        OptimizerState(self.state.parameters, {**self.state.scalars, "lr": self.lr}).load(given)


def round_to(x: Tensor, seed: Tensor, step: Tensor, number: int) -> Tensor:
    """x, float32, as bfloat16: rounded stochastically from a counter, to the same bits for the same seed,
    step and element. seed u32 (2); step int32 (1); `number` is the parameter's. 16 random bits are added
    below the last kept one, and the sum is cut: a number is rounded up as often as it lies near the upper
    one, so that the mean of many roundings is the number (Gupta et al., arXiv 1502.02551). NaN and infinities
    stay what they are."""
    bits = x.bitcast(dtypes.uint32)
    there = (bits & 0x7F800000) != 0x7F800000
    noise = _noise(int(x.numel()), seed, step, number).reshape(x.shape).cast(dtypes.uint32)
    moved = ((bits + noise) & 0xFFFF0000).bitcast(dtypes.float32)
    return there.where(moved, x).cast(dtypes.bfloat16)


def _noise(count: int, seed: Tensor, step: Tensor, number: int) -> Tensor:
    """16 random bits for each element, as u64, of Philox4x32-10 (tile/attention/dropout.py) with

        key        seed, two u32
        counter    (element // 8, parameter's number, step, 0)
        bits       element % 8: the half element % 2, lower first, of word element % 8 // 2

    so that a call serves 8 elements that lie side by side."""
    wide = dtypes.uint64
    calls = Tensor.arange(-(-count // RUN), dtype=wide).to(seed.device)
    key = [seed[i:i + 1].cast(wide) for i in range(2)]
    words = philox((calls, calls * 0 + number, calls * 0 + step.cast(wide), calls * 0), key)
    halves = [word >> 16 * half & 0xFFFF for word in words for half in range(2)]
    return Tensor.stack(*halves, dim=1).reshape(-1)[:count]
