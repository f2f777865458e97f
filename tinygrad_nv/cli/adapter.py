"""The adapter of --lora: what it is, and the room that a model needs for it."""
from __future__ import annotations

import argparse
from typing import Any

from tinygrad_nv.engine.lora.request import LoRARequest
from tinygrad_nv.errors import RequestError


def adapter(arguments: argparse.Namespace) -> LoRARequest | None:
    """Returns the adapter that --lora names. Raises `RequestError`."""
    if (text := getattr(arguments, "lora", None)) is None: return None
    name, _, path = text.partition("=")
    if not (name and path): raise RequestError(f"--lora {text[:100]!r}", "NAME=DIR", "change --lora")
    return LoRARequest(name, 1, path)


def room_for(found: LoRARequest | None) -> dict[str, Any]:
    """Arguments of `LLM` for an adapter. Raises `ModelError` where there is none."""
    if found is None: return {}
    from tinygrad_nv.models.peft import read_config
    config = read_config(found.directory)
    rank = max([config.get("r", 8), *(config.get("rank_pattern") or {}).values()])
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
