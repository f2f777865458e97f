"""Adapters of the command line: arguments of `LLM`, and the names and paths of --lora-modules."""
from __future__ import annotations

import argparse
import json
from typing import Any

from tinygrad_nv.errors import RequestError


def lora_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `LLM`."""
    return {"enable_lora": bool(arguments.enable_lora or arguments.lora_modules),
            "max_loras": arguments.max_loras, "max_lora_rank": arguments.max_lora_rank,
            "max_cpu_loras": arguments.max_cpu_loras, "lora_dtype": arguments.lora_dtype}


def lora_modules(arguments: argparse.Namespace, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Names and paths of --lora-modules, of a model that is served under `names`. Raises `RequestError`."""
    return [_module(text, names) for text in arguments.lora_modules]


def _module(text: str, names: tuple[str, ...]) -> tuple[str, str]:
    if not text.lstrip().startswith("{"):
        name, there, path = text.partition("=")
        if not (name and there and path): raise _wrong(text)
        return name, path
    try: data = json.loads(text)
    except ValueError as error: raise _wrong(text) from error
    known = {"name", "path", "base_model_name"}
    if not isinstance(data, dict) or set(data) - known or not all(
            isinstance(data.get(key), str) and data[key] for key in ("name", "path")): raise _wrong(text)
    base = data.get("base_model_name")
    if base is not None and base not in names:
        raise RequestError(f"--lora-modules: the base of {data['name']!r} is {base!r}", ", ".join(names),
                           "leave base_model_name out, or serve the model under that name")
    return data["name"], data["path"]


def _wrong(text: str) -> RequestError:
    return RequestError(f"--lora-modules: {text[:100]!r}", 'NAME=PATH, or {"name": …, "path": …}',
                        "change --lora-modules")
