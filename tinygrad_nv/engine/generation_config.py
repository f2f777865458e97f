"""Sampling defaults of a model: vLLM's, and what generation_config.json changes of them.

Protocol: `GenerationConfig.read(directory, config, source, changes)`. `source` is "auto" (the file of the
model), "vllm" (no file: SamplingParams' own defaults) or a directory with another file; `changes` override
its fields. As in vLLM, the file's `do_sample` says nothing: greedy decoding is temperature 0, which a request
asks for. End tokens are those of the file, also with "vllm", and override those of config.json.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import ConfigError, ModelError, RequestError, brief
from tinygrad_nv.models.config import ModelConfig, read_json, token_ids

FILE = "generation_config.json"
ANSWER_TOKENS = 256     # of an answer at most, unless a request says otherwise
AUTO, VLLM = "auto", "vllm"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
LIMIT = "max_new_tokens"


@dataclass(frozen=True)
class GenerationConfig:
    """`defaults` of requests, the tokens `eos` that end an answer, and `limit`: tokens of any answer of a
    server at most (max_new_tokens)."""
    defaults: SamplingParams
    eos: tuple[int, ...]
    limit: int | None = None

    @staticmethod
    def read(directory: Path, config: ModelConfig, source: Any = AUTO, changes: Any = None
             ) -> GenerationConfig:
        """See above. Raises `ModelError` for a file that is damaged, `ConfigError` for the arguments."""
        path = _path(directory, source)
        data: dict[str, Any] = read_json(path) if path.is_file() else {}
        eos = token_ids(data.get("eos_token_id"), f"{path}: eos_token_id") or config.eos_token_ids
        given = {} if source == VLLM else _numbers(data, str(path))
        given |= _numbers(_changes(changes), "override_generation_config")
        limit = given.pop(LIMIT, None)
        try: return GenerationConfig(SamplingParams(max_tokens=limit or ANSWER_TOKENS, **given), eos, limit)
        except RequestError as error:
            name = error.found.split(" ", 1)[0]
            place = "override_generation_config" if name in (changes or ()) else path
            raise ModelError(f"{place}: {error.found}", error.expected, "correct the file") from error


def _path(directory: Path, source: Any) -> Path:
    """The file; that of the model may be missing."""
    if source is None or source in (AUTO, VLLM): return directory / FILE
    path = Path(source) / FILE if isinstance(source, str | Path) else None
    if path is not None and path.is_file(): return path
    raise ConfigError(f"generation_config is {str(source)!r}", f"auto, vllm or a directory with {FILE}",
                      "change generation_config")


def _changes(given: Any) -> dict[str, Any]:
    if given is None: return {}
    known = (*SAMPLING, LIMIT, "do_sample")
    if not isinstance(given, Mapping):
        raise ConfigError(f"override_generation_config is {given!r}", 'fields and values, such as '
                          '{"temperature": 0.5}', "change override_generation_config")
    if bad := [name for name in given if name not in known]:
        raise ConfigError(f"override_generation_config has {str(bad[0])[:60]!r}",
                          f"some of {', '.join(known)}", "leave it out")
    return dict(given)


def _numbers(data: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The fields that are defaults of requests."""
    given = {name: data[name] for name in (*SAMPLING, LIMIT) if data.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{place}: {name} is {brief(value)}", "a number", "correct the file")
    if LIMIT in given and not (isinstance(given[LIMIT], int) and given[LIMIT] > 0):
        raise ModelError(f"{place}: {LIMIT} is {brief(given[LIMIT])}", "a whole number ≥ 1",
                         "correct the file")
    return given
