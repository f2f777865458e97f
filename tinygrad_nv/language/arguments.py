"""The arguments of a kernel's call: tensors, outputs, constants.

Protocol: `bound(fn, own, args, kwargs, schedule)` gives, for one call,

    tensors     by name, in the order of the parameters; those of an object with Tensors `.K` and `.V` are
                called cache.K and cache.V
    constants   numbers, texts, dtypes and None, by name; a keyword argument with a name of the schedule (BM,
                BN, BK, BD, warps, stages, vector) has the schedule's value where the call gives none
    outputs     parameters annotated as OTile: their shapes and dtypes; a Tensor that is given for one is what
                it contains first
    result      shape and dtype of what the function returns, where its annotation says

Names in annotations get their sizes from the tensors, as shapes/binding.py finds them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tinygrad import Device, Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import LanguageError, NumericsError
from tinygrad_nv.language.effects import Donated
from tinygrad_nv.numerics.policy import Accumulate, Deterministic, Saturate, StochasticRound
from tinygrad_nv.shapes.binding import Bindings
from tinygrad_nv.shapes.signature import Signature, type_of
from tinygrad_nv.shapes.types import TensorType
from tinygrad_nv.tile.language.ir import TensorParameter
from tinygrad_nv.tile.language.memory import TensorRef
from tinygrad_nv.tile.language.program import RESULT
from tinygrad_nv.tile.language.schedule import TileSchedule

PLAIN = (int, float, bool, str, type(None), DType)
OUT = "OTile"
WEAK = {dtypes.weakfloat: dtypes.float32, dtypes.weakint: dtypes.int32}     # of Python's numbers


@dataclass
class Bound:
    """One call's arguments."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, TensorParameter] = field(default_factory=dict)
    caches: dict[str, tuple[str, ...]] = field(default_factory=dict)
    donated: set[str] = field(default_factory=set)
    deterministic: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    result: TensorParameter | None = None

    @property
    def parameters(self) -> list[TensorParameter]:
        """The program's tensors: inputs, then outputs."""
        made = [TensorParameter(name, x.dtype, tuple(x.shape)) for name, x in self.tensors.items()
                if name not in self.outputs]
        return [*made, *self.outputs.values()]

    @property
    def names(self) -> dict[str, Any]:
        """Names that a grid may be made of: sizes of names, and constants."""
        return {**self.sizes, **self.constants}

    @property
    def arguments(self) -> dict[str, Any]:
        """The function's arguments, with references in the place of tensors."""
        refs = {each.name: TensorRef(each) for each in self.parameters}
        caches = {name: SimpleNamespace(**{part: refs[f"{name}.{part}"] for part in parts})
                  for name, parts in self.caches.items()}
        return {**self.constants, **caches, **{name: ref for name, ref in refs.items() if "." not in name}}


def bind_arguments(name: str, own: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any],
          schedule: TileSchedule) -> Bound:
    """Returns one call's arguments. Raises `LanguageError`, and `ShapeError` for shapes that do not fit."""
    given = _collect(name, own, args, kwargs, schedule)
    made, bindings = Bound(), Bindings()
    for key, value in given.items():
        if type(value) is int and key in own.symbols: bindings.scalar(key, value, f"{key}={value}")
    for key, value in given.items():
        annotation = type_of(own.annotations.get(key))
        if annotation is not None: made.deterministic |= _is_exact(name, key, annotation)
        if annotation is not None and annotation.kind == OUT and value is None: continue
        _take(name, key, value, annotation, made, bindings)
    made.sizes = dict(bindings.sizes)
    sizes = [key for key in own.symbols if key in own.parameters.parameters and key not in given]
    if missing := [key for key in sizes if key not in made.sizes]: raise _missing(name, own, missing)
    made.constants.update({key: made.sizes[key] for key in sizes})
    _outputs(name, own, given, made, bindings)
    made.result = _result(name, own, made)
    if not made.tensors: raise LanguageError(f"kernel {name} called without a Tensor", "one Tensor at least")
    return made


def place_together(made: Bound) -> Bound:
    """Puts constants of tinygrad, which are on no device, where the other tensors are."""
    devices = [x.device for x in made.tensors.values() if x.device is not None]
    for key, x in made.tensors.items():
        if x.device is None: made.tensors[key] = x.clone(device=devices[0] if devices else Device.DEFAULT)
    return made


def _collect(name: str, own: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any],
           schedule: TileSchedule) -> dict[str, Any]:
    parameters, defaults = own.parameters.parameters, dict[str, Any]()
    for key, each in parameters.items():
        annotation = type_of(own.annotations.get(key))
        if annotation is not None and annotation.kind == OUT: defaults[key] = None
        elif each.kind is each.KEYWORD_ONLY and key in schedule.numbers and each.default is each.empty:
            defaults[key] = schedule.numbers[key]
    try: found = own.parameters.bind_partial(*args, **kwargs)
    except TypeError as error:
        raise LanguageError(f"kernel {name}: {error}", f"the arguments {_signature_text(own)}") from error
    made = dict(found.arguments)
    for key, each in parameters.items():
        if key not in defaults and each.default is not each.empty: made.setdefault(key, each.default)
    for key, value in defaults.items(): made.setdefault(key, value)
    missing = [key for key, each in parameters.items() if key not in made and key not in own.symbols and
               each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if missing: raise _missing(name, own, missing)
    return {key: made[key] for key in parameters if key in made}


def _missing(name: str, own: Signature, keys: Sequence[str]) -> LanguageError:
    return LanguageError(f"kernel {name} called without {', '.join(keys)}",
                         f"the arguments {_signature_text(own)}")


def _signature_text(own: Signature) -> str:
    bare = [each.replace(annotation=each.empty) for each in own.parameters.parameters.values()]
    return str(own.parameters.replace(parameters=bare, return_annotation=own.parameters.empty))


def _take(name: str, key: str, value: Any, annotation: TensorType | None, made: Bound,
          bindings: Bindings) -> None:
    if isinstance(value, Donated):
        if annotation is None or annotation.kind != OUT:
            raise LanguageError(f"kernel {name}: donate for {key}, which it does not write",
                                "an output: OTile[...]")
        made.donated.add(key)
        value = value.tensor
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == (): value = value.item()
    if isinstance(value, Tensor):
        value = _of_dtype(value, annotation)
        _tensor(name, key, value, made)
        if annotation is not None: bindings.tensor(f"argument {key}", annotation, value.shape, value.dtype)
    elif (parts := _parts(value)):
        for part in parts: _tensor(name, f"{key}.{part}", getattr(value, part), made)
        made.caches[key] = parts
    elif isinstance(value, PLAIN) or (hasattr(value, "dtype") and hasattr(value, "policies")):
        if annotation is not None:
            raise LanguageError(f"kernel {name}: argument {key} is {value!r}", f"a Tensor: {annotation}")
        made.constants[key] = value
    else:
        raise LanguageError(f"kernel {name}: argument {key} is a {type(value).__name__}",
                            "a Tensor, an object with Tensors .K and .V, or a number",
                            "numbers become constants of the kernel")


def _of_dtype(value: Tensor, annotation: TensorType | None) -> Tensor:
    """A Tensor of a Python number, which tinygrad gives no certain dtype, in that of the annotation."""
    if value.dtype not in WEAK: return value
    asked, like = None if annotation is None else annotation.element, WEAK[value.dtype]
    fits = asked is not None and (dtypes.is_float(asked) or not dtypes.is_float(like))
    return value.cast(asked if fits else like)


def _parts(value: Any) -> tuple[str, ...]:
    return tuple(part for part in ("K", "V") if isinstance(getattr(value, part, None), Tensor))


def _tensor(name: str, key: str, value: Tensor, made: Bound) -> None:
    if not all(isinstance(extent, int) for extent in value.shape):
        shown = ", ".join(str(each) if isinstance(each, int) else "…" for each in value.shape)
        raise LanguageError(f"kernel {name}: {key} has the symbolic shape ({shown})", "a shape of numbers",
                            "a kernel in the tile language is built for each shape: pad to the largest")
    if 0 in value.shape:
        raise LanguageError(f"kernel {name}: {key} of shape {tuple(value.shape)} has no elements",
                            "tensors with elements", "leave the call out where there are none")
    made.tensors[key] = value


def _outputs(name: str, own: Signature, given: Mapping[str, Any], made: Bound, bindings: Bindings) -> None:
    for key, annotation in own.annotations.items():
        found = type_of(annotation)
        if found is None or found.kind != OUT or key == "return": continue
        if key in made.tensors: shape, dtype = tuple(made.tensors[key].shape), made.tensors[key].dtype
        else: shape, dtype = _shape_and_dtype(name, key, found, made.sizes)
        made.outputs[key] = TensorParameter(key, dtype, shape, True, *stores(found))


def _shape_and_dtype(name: str, key: str, found: TensorType,
                     sizes: Mapping[str, int]) -> tuple[tuple[int, ...],
                                                                                         DType]:
    shape, dtype = found.shape(sizes), found.element
    if found.leading or shape is None:
        unknown = [each for each in found.symbols if each not in sizes]
        raise LanguageError(f"kernel {name}: the shape of {key}: {found} is not known from the call",
                            f"a size for {', '.join(unknown) or 'the leading dimensions'}",
                            "name it in the annotation of an argument, or add a keyword argument of type int")
    if dtype is None:
        raise LanguageError(f"kernel {name}: {key}: {found} has no dtype", f"{found.kind}[…, f32]")
    return shape, dtype


def stores(found: TensorType) -> tuple[bool, int | None]:
    """Returns what policies say of stores: whether they saturate, and the seed of stochastic rounding."""
    policies = getattr(found.dtype, "policies", ())
    seeds = [each.seed or 0 for each in policies if isinstance(each, StochasticRound)]
    return any(isinstance(each, Saturate) for each in policies), seeds[0] if seeds else None


def _is_exact(name: str, key: str, found: TensorType) -> bool:
    """Whether bits are asked for that depend on no order. Raises `NumericsError` for sums that the tile
    language does not keep."""
    policies = getattr(found.dtype, "policies", ())
    for each in policies:
        if isinstance(each, Accumulate) and each.dtype not in (dtypes.float32, dtypes.int32):
            raise NumericsError(f"kernel {name}: {key}: {found}",
                                "accum(f32) of floats, accum(int32) of bytes",
                                "sums of tile.dot are kept in these; cast what they make to round it")
    return any(isinstance(each, Deterministic) for each in policies)


def _result(name: str, own: Signature, made: Bound) -> TensorParameter | None:
    found = type_of(own.result)
    if found is None: return None
    made.deterministic |= _is_exact(name, "the result", found)
    first = next(iter(made.tensors.values()))
    if found.leading:
        tail = _shape_and_dtype(name, "result", TensorType(found.kind, found.dims, found.dtype), made.sizes)
        shape, dtype = (*first.shape[:first.ndim - len(found.dims)], *tail[0]), tail[1]
    else: shape, dtype = _shape_and_dtype(name, "the result", found, made.sizes)
    return TensorParameter(RESULT, dtype, shape, True, *stores(found))


