"""Settings of a model directory and a device, resolved before anything is loaded: dtype, context length,
tokenizer. generation_config.py has sampling defaults.

Protocol: each function resolves one setting, or raises an `NVError` that says what to change.
"""
from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tinygrad import Device, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import DEV

from tinygrad_nv.engine.memory_planning import CACHE_BYTES, token_bytes
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import ModelError, NVError, RequestError, TokenizerError
from tinygrad_nv.models.config import DTYPES
from tinygrad_nv.models.rope import default_context

if TYPE_CHECKING:
    from tinygrad_nv.models.config import ModelConfig
    from tinygrad_nv.models.encoder_config import EncoderConfig


def resolve_dtype(name: str, config: ModelConfig | EncoderConfig, directory: Path,
                  device: str = "CPU") -> DType:
    """tinygrad's dtype for "auto" (config.json's dtype, else the checkpoint's) or for one of `DTYPES`, short
    forms included. Blocks of a GGUF file have none: "auto" is float32 on a CPU, whose kernels round inputs of
    float32 to int8 as fast as others and twice as exactly as bfloat16, and bfloat16 elsewhere."""
    if name == "auto" and of_blocks(config):
        name = "float32" if device.partition(":")[0] == "CPU" else "bfloat16"
    elif name == "auto" and config.dtype: name = config.dtype
    elif name == "auto":
        from tinygrad_nv.models.weights import main_dtype
        name = main_dtype(directory)
    full = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16",
            "bf16": "bfloat16"}.get(name, name)
    if full not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}", f"auto, {', '.join(DTYPES)}", "change --dtype")
    return {"float32": dtypes.float32, "float16": dtypes.float16, "bfloat16": dtypes.bfloat16}[full]


def of_blocks(config: ModelConfig | EncoderConfig) -> bool:
    """Whether a model is a GGUF file with blocks of codes."""
    return config.quantization is not None and config.quantization["quant_method"] == "gguf"


def with_quantization(name: str | None, config: ModelConfig, directory: Path) -> ModelConfig:
    """The config of weights that are quantised as `name` says, one of vLLM's names: of a checkpoint that is
    not, those of `SCHEMES` quantise it while it is loaded. None is what the checkpoint says, and the name of
    another kind than the checkpoint's (awq_marlin is awq, …) raises `ModelError`."""
    if name is None: return config
    from tinygrad_nv.models.config import find_gguf
    from tinygrad_nv.quant.readers.online import SCHEMES
    from tinygrad_nv.quant.readers.reader import ONLINE
    found = None if config.quantization is None else str(config.quantization["quant_method"])
    if found is None and name in SCHEMES:
        if find_gguf(directory) is not None:
            raise ModelError(f"quantization is {name!r}, and {directory} is a GGUF file of floats",
                             "a directory of safetensors", "quantise the file with llama-quantize")
        return replace(config, quantization={"quant_method": ONLINE, "scheme": name})
    wanted = name.removesuffix("_marlin").replace("_", "-")
    if found is None or wanted != found.replace("_", "-"):
        raise ModelError(f"quantization is {name!r}, and the weights in {directory} are "
                         f"{'not quantised' if found is None else found}",
                         "what the checkpoint's quantization_config says, or of weights that are not "
                         f"quantised one of {', '.join(SCHEMES)}",
                         "leave --quantization out: it is read from the checkpoint")
    return config


def context_length(config: ModelConfig, dtype: DType, requested: int | None) -> int:
    """Tokens a sequence may have, prompt included."""
    if requested is not None:
        if not 2 <= requested <= config.max_positions:
            raise ModelError(f"max_model_len is {requested}",
                             f"2 to {config.max_positions}, the model's own length", "change --max-model-len")
        return requested
    fitting = max(CACHE_BYTES // max(token_bytes(config, dtype), 1), 2048)
    return min(config.max_positions, fitting, default_context(config.distinct_ropes))


HASHED_BYTES = 16 << 20     # of a model file whose content is hashed; others are known by their time


def weights_identity(model: Path) -> str:
    """Returns a text that tells the files of a model from others: the content of small ones, size and time of
    large ones."""
    made = hashlib.sha256()
    for file in [model] if model.is_file() else sorted(each for each in model.iterdir() if each.is_file()):
        if file.suffix in (".py", ".xz"): continue  # of the bundled model
        stat = file.stat()
        small = stat.st_size <= HASHED_BYTES
        what = file.read_bytes() if small else f"{file.resolve()} {stat.st_mtime_ns}".encode()
        made.update(f"{file.name} {stat.st_size} ".encode() + what)
    return made.hexdigest()


def open_device(name: str | None) -> str:
    """Opens tinygrad's device `name` (its default when None) and returns the canonical name."""
    requested = name or repr(DEV) or "default"
    try:
        device = Device[name or Device.DEFAULT]
        if device.device.partition(":")[0] in ("DISK", "NPY", "TINYFS"):
            raise RuntimeError("it is a storage device")
        # created on first access; fails here if the device lacks it
        _ = device.renderer
        return str(device.device)
    except NVError: raise
    except ModuleNotFoundError as error:
        raise RequestError(f"no such device: {requested}", "CPU, CUDA, EMU or another device of tinygrad",
                           "run `tinygrad-nv doctor` to see what this machine has") from error
    except Exception as error:  # drivers raise arbitrary exceptions
        raise RequestError(f"device {requested} cannot be opened: {error}", "a device this machine has",
                           "run `tinygrad-nv doctor` to see what is missing") from error


def optional_tokenizer(directory: Path) -> tuple[Tokenizer | None, TokenizerError | None]:
    """The tokenizer, or the reason why it cannot be loaded: prompts of token ids do not need it."""
    try: return Tokenizer.load(directory), None
    except TokenizerError as error: return None, error
