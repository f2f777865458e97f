"""Adapter of a request, and limits of adapters.

Protocol: as vLLM's. A `LoRARequest` names an adapter; requests with an equal one share it. A `LoRAConfig` is
made of the arguments of `LLM`, and raises `ConfigError` for values that cannot be.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.engine.vllm_arguments import whole
from tinygrad_nv.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from tinygrad_nv.models.config import ModelConfig

MOST_RANK = 512     # vLLM's largest max_lora_rank
SLOTS = 4           # adapters that run at a time, where max_loras does not say
DTYPES = {"float32": dtypes.float32, "float16": dtypes.float16, "bfloat16": dtypes.bfloat16}


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, a number ≥ 1 of its own, and its directory. Raises `RequestError`."""
    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_path", str(self.lora_path))
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name is {self.lora_name!r}", "a name", "name the adapter")
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RequestError(f"lora_int_id of {self.lora_name!r} is {number!r}", "a whole number ≥ 1",
                               "give each adapter a number of its own")

    @property
    def directory(self) -> Path:
        """Directory of adapter_config.json."""
        return Path(self.lora_path)


@dataclass(frozen=True)
class LoRAConfig:
    """At most `slots` adapters run at a time and `cached` are kept in host memory, of ranks up to `rank`, in
    `dtype`."""
    slots: int
    rank: int
    cached: int
    dtype: DType

    @staticmethod
    def of(config: ModelConfig, model: DType, device: str, *, max_loras: Any, max_lora_rank: Any,
           max_cpu_loras: Any, lora_dtype: Any) -> LoRAConfig:
        """Returns the config of `LLM`'s arguments, for a model of dtype `model`. Raises `ConfigError`."""
        few = min(SLOTS, whole("max_cpu_loras", max_cpu_loras, SLOTS))
        slots, rank = whole("max_loras", max_loras, few), whole("max_lora_rank", max_lora_rank, 16)
        cached = whole("max_cpu_loras", max_cpu_loras, max(slots, 16))
        if cached < slots:
            raise ConfigError(f"max_cpu_loras is {cached}, and max_loras {slots}", f"at least {slots}",
                              "raise max_cpu_loras")
        if slots > 255: raise ConfigError(f"max_loras is {slots}", "at most 255", "lower max_loras")
        if rank > MOST_RANK:
            raise ConfigError(f"max_lora_rank is {rank}", f"at most {MOST_RANK}", "lower max_lora_rank")
        name = "auto" if lora_dtype is None else lora_dtype
        if not isinstance(name, str) or name not in ("auto", *DTYPES):
            raise ConfigError(f"lora_dtype is {lora_dtype!r}", f"auto, {', '.join(DTYPES)}",
                              "change lora_dtype")
        dtype = model if name == "auto" else DTYPES[name]
        mixed = model == dtypes.float32 and device.partition(":")[0] == "CPU"
        if dtype != model and not mixed:
            raise ConfigError(f"lora_dtype is {name}, and the model computes in {model.name} on {device}",
                              "the model's dtype: 16-bit adapters beside float32 run on a CPU alone",
                              "leave lora_dtype out")
        if config.latent is not None and all(config.moe.layers if config.moe else ()):
            raise ConfigError("enable_lora is True, and no layer of this model takes adapters",
                              "a model with attention and dense layers of its own", "leave enable_lora out")
        return LoRAConfig(slots, rank, cached, dtype)

    def nbytes(self, config: ModelConfig, model: DType, device: str) -> int:
        """Bytes of the slots, for a model of dtype `model`."""
        from tinygrad_nv.models.llama import Llama
        from tinygrad_nv.models.lora import slot_bytes
        return self.slots * slot_bytes(Llama(config, model, device), self.rank, self.dtype)


def one_for_each(given: Any, count: int) -> list[LoRARequest | None]:
    """`lora_request` for so many prompts: one or None for all, or a list with one for each. Raises
    `RequestError`."""
    found = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(found) != count:
        raise RequestError(f"{len(found)} lora_requests for {count} prompts", "one for all, or one for each",
                           "pass as many")
    for each in found:
        if each is not None and not isinstance(each, LoRARequest):
            raise RequestError(f"lora_request of type {type(each).__name__}",
                               "LoRARequest(name, number, path) or None", "pass a LoRARequest")
    return found
