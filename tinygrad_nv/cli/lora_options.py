"""Options of adapters: --lora, and those of vLLM's `serve`."""
from __future__ import annotations

import argparse
from collections.abc import Callable


def add_lora_option(group: argparse._ArgumentGroup) -> None:
    """Adds --lora, of a command that has one answer at a time."""
    group.add_argument("--lora", metavar="NAME=DIR", help="an adapter (LoRA), as PEFT saves it")


def add_lora_options(parser: argparse.ArgumentParser, whole: Callable[[str], int]) -> None:
    """Adds --enable-lora, --lora-modules and their limits."""
    group = parser.add_argument_group("adapters (LoRA)")
    group.add_argument("--enable-lora", action="store_true", help="requests may use adapters")
    group.add_argument("--lora-modules", "--lora", nargs="+", metavar="NAME=PATH", default=[],
                       help='adapters served under names, or JSON: {"name": …, "path": …}; implies '
                       "--enable-lora")
    group.add_argument("--max-loras", type=whole, default=4, metavar="N",
                       help="adapters that run at a time (default 4)")
    group.add_argument("--max-lora-rank", type=whole, default=16, metavar="N",
                       help="largest rank of an adapter (default 16)")
    group.add_argument("--max-cpu-loras", type=whole, metavar="N",
                       help="adapters kept in host memory (default 16, or --max-loras)")
    group.add_argument("--lora-dtype", default="auto", metavar="D",
                       help="of adapters: float32, float16, bfloat16 (default auto: the model's)")
    group.add_argument("--allow-runtime-lora-updating", action="store_true",
                       help="clients may load and unload adapters from paths of this machine")
