"""The errors a user can meet. Each message says what was found, what was expected, and what to do.

Errors of our own invariants are asserts; everything that input, files or the machine can cause is one of
these. The CLI prints the message alone and exits with `exit_code`; libraries catch `NVError`.
"""
from __future__ import annotations

MAX_WORDS = 8192    # limit: characters of each part of an error's message, which may quote a file
MAX_SHOWN = 200     # limit: characters of one value that a message quotes


def shorten(text: str, most: int = MAX_SHOWN) -> str:
    """Returns a text, cut off after `most` characters."""
    return text if len(text) <= most else text[:most] + "…"


def brief(value: object) -> str:
    """Returns a value as messages quote it."""
    if isinstance(value, int) and value.bit_length() > 4096: return "a number of thousands of digits"
    try: return shorten(repr(value))
    except (ValueError, RecursionError): return f"a {type(value).__name__} that is too large to be shown"


class NVError(Exception):
    """Base of every user-facing error: `found` went wrong, `expected` would have been right, `fix` is the
    way out."""
    exit_code = 2

    def __init__(self, found: str, expected: str = "", fix: str = "") -> None:
        self.found, self.expected, self.fix = map(_cut, (found, expected, fix))
        lines = [self.found]
        if expected: lines.append(f"  expected: {self.expected}")
        if fix: lines.append(f"  to fix:   {self.fix}")
        super().__init__("\n".join(lines))


def _cut(words: str) -> str:
    """Returns words without the middle of what is too long, and with escapes for what is no Unicode."""
    if not words.isascii(): words = words.encode(errors="backslashreplace").decode()
    half = MAX_WORDS // 2 - 2
    return words if len(words) <= MAX_WORDS else f"{words[:half]} … {words[-half:]}"


def as_well(error: NVError, other: Exception) -> NVError:
    """The error with its words, as one of the other's type too: code that catches what tinygrad raises
    catches this."""
    return _both(type(error), type(other), error.found, error.expected, error.fix)


def _both(ours: type[NVError], theirs: type[Exception], *words: str) -> NVError:
    return _join_types(ours, theirs)(*words)


_types: dict[tuple[type[NVError], type[Exception]], type[NVError]] = {}


def _join_types(ours: type[NVError], theirs: type[Exception]) -> type[NVError]:
    def reduce(error: NVError) -> tuple[object, ...]:
        return _both, (ours, theirs, error.found, error.expected, error.fix)
    if issubclass(ours, theirs): return ours
    members = {"__module__": ours.__module__, "__reduce__": reduce}
    return _types.setdefault((ours, theirs), type(ours.__name__, (ours, theirs), members))


class ToolchainError(NVError):
    """No compiler for the CPU device, or one that does not work."""


class ConfigError(NVError):
    """A setting of ours, or an environment variable, has a value it cannot have."""


class HookError(NVError):
    """tinygrad is not the version the hooks were made for, or a hook was registered twice."""


class ModelError(NVError):
    """The model directory or its config.json cannot be used."""


class WeightError(ModelError):
    """A weight file is missing, truncated, or its tensors do not fit the model."""


class CheckpointError(NVError):
    """A checkpoint of a training run, or a trained model, that cannot be written, or that is not whole."""


class BundleError(NVError):
    """A bundle that is damaged, of another format or machine, or not signed as asked for."""


class TokenizerError(NVError):
    """The tokenizer or the chat template cannot be used."""


class RequestError(NVError):
    """A prompt or a sampling parameter is out of range."""


class AudioError(RequestError):
    """A recording that cannot be read."""


class QueueFull(RequestError):
    """Refusal of a request, as many as may wait already: come again."""


class DataError(NVError):
    """Training data that cannot be read, or that is of no kind training knows."""


class PTXError(NVError):
    """PTX text that is not understood, or not allowed where it stands. `line` counts from 1."""

    def __init__(self, found: str, line: int = 0, expected: str = "", fix: str = "") -> None:
        super().__init__(found, expected, fix)
        self.line = line


class DLPackError(NVError, BufferError):
    """Memory that cannot be shared with another library. A BufferError, as the array API asks."""


class TorchError(NVError):
    """A function of Tensors, or what it is given, that PyTorch or JAX cannot call."""


class DriverError(NVError):
    """A device was asked for what it cannot do, or a kernel on it went wrong."""


class KernelError(DriverError, RuntimeError):
    """A kernel that ran did what it must not. A RuntimeError, as BEAM expects of candidates that fail."""


class OutOfMemoryError(DriverError, MemoryError):
    """Memory of a device, or page-locked memory, that cannot be had: `asked` bytes (0: unknown) for
    `label`. `report` is a `MemoryReport` of that moment, None for page-locked memory."""

    def __init__(self, found: str, expected: str = "", fix: str = "", asked: int = 0, label: str = "",
                 report: object = None) -> None:
        super().__init__(found, expected, fix)
        self.asked, self.label, self.report = asked, label, report


class TensorMapError(NVError):
    """A tensor map that cuTensorMapEncodeTiled would refuse."""


class SpecError(NVError):
    """A computation that no spec can state."""


class ShapeError(NVError):
    """A dimension, a shape or a dtype that does not fit what a function's annotations say, or tensors inside
    it that do not fit each other."""


class TransformError(NVError):
    """A function that a transform (grad, vmap, scan, …) cannot take, or arguments that do not fit it."""


class PageError(NVError):
    """A block table or a length that does not fit the pages of keys and values (NV_DEBUG=1)."""


class ScheduleError(NVError):
    """A schedule that a kernel cannot have, with the arithmetic."""


class OnnxError(NVError):
    """An ONNX model that cannot be read or run, or a function that cannot be exported as one."""


class LanguageError(NVError):
    """A kernel in the tile language that cannot be: `found` begins with the user's file and line."""


class EffectError(NVError):
    """A placement, or a movement of tensors, that cannot be kept; or a state that an operation has
    replaced."""


class GraphError(NVError):
    """A graph pool was made or called with what it cannot serve, or its step cannot be captured."""


class PlanError(NVError):
    """A layout of a model over GPUs that cannot be, or a cluster without figures."""


class EngineError(NVError):
    """The engine stopped in the middle of its work, with the requests it had."""


class DistError(NVError):
    """Ranks that cannot find each other, that differ in what they do, or that were lost. `ranks` are those
    that the message names as the cause."""

    def __init__(self, found: str, expected: str = "", fix: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(found, expected, fix)
        self.ranks = ranks


class DistTimeout(DistError):
    """Ranks that did not come, or a value that was not set, in the time there was."""


class TrainingError(NVError):
    """A run of training that cannot go on: its loss is NaN."""


class ReplayError(NVError):
    """A recorded run that cannot be read or repeated, or a run that cannot be recorded."""


class NumericsError(NVError):
    """A policy that a dtype cannot have, policies that contradict each other, a value out of the range it
    was promised to have, or one that is NaN or infinite."""
