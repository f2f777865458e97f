"""Options of a model and of the engine that runs it, for every command that loads one.

Protocol: `add_model_options` has what any model needs, `add_engine_options` what runs many sequences,
`add_lora_options` adapters of requests, `add_lora_option` that of a command that has one answer at a time.
vllm_options.py adds vLLM's others, and engine/command_line.py makes arguments of `LLM` of all.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tinygrad_nv.errors import RequestError
from tinygrad_nv.runtime.memory_pool import UTILIZATION


def add_model_options(command: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the options of a model."""
    group = command.add_argument_group("model")
    group.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, float16, bfloat16")
    group.add_argument("--quantization", "-q", metavar="METHOD",
                       help="check that the weights are quantised so, or quantise those that are not while "
                       "loading: fp8, int8 (default: what the checkpoint says)")
    group.add_argument("--max-model-len", type=size, metavar="N",
                       help="context in tokens, such as 4096 or 32k")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="X",
                       help="fraction of a GPU's memory for weights, cache and all else "
                       f"(default {UTILIZATION}; no effect on a CPU)")
    group.add_argument("--deterministic", action="store_true",
                       help="the same tokens and log probabilities for a request alone and among others, to "
                       "the last bit (NV_DETERMINISTIC=1; slower)")
    group.add_argument("--require-signed", type=Path, metavar="PEM",
                       help="of a bundle: the public key that has to have signed it")
    group.add_argument("--weights", type=Path, metavar="DIR",
                       help="of a bundle that refers to weights: where their files are")
    group.add_argument("--download", action="store_true",
                       help="download a hub name that is not in the Hugging Face cache")
    group.add_argument("--device", help="tinygrad's device (default: its choice, or DEV)")
    group.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N",
                       help="ranks that have the model together, each a part of every layer (default 1)")
    group.add_argument("--enable-expert-parallel", "-ep", action="store_true",
                       help="of a mixture of experts, each rank has some experts whole")
    group.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1, metavar="N",
                       help="stages of layers, each on ranks of its own (default 1)")
    group.add_argument("--data-parallel-size", "-dp", type=int, default=1, metavar="N",
                       help="replicas of the model, each on ranks of its own, that share requests "
                       "(default 1)")
    return group


def add_engine_options(command: argparse.ArgumentParser, max_num_seqs: int | None = 64,
                       prefix_caching: bool = True, file: bool = True) -> argparse._ArgumentGroup:
    """Adds the options of a model and of the engine, and with `file` --config. `max_num_seqs` None: as many
    as the command has answers at a time."""
    add_model_options(command).add_argument("--model", dest="named", metavar="MODEL",
                                            help="the same as MODEL, as vLLM has it")
    engine = command.add_argument_group("engine")
    engine.add_argument("--max-num-seqs", type=whole, default=max_num_seqs, metavar="N",
                        help="sequences that run at a time (default "
                        f"{max_num_seqs or 'one for each answer'})")
    engine.add_argument("--max-num-batched-tokens", type=size, default=512, metavar="N",
                        help="tokens that a step computes (default 512)")
    engine.add_argument("--kv-cache-dtype", default="auto", metavar="D", help="of keys and values: float32, "
                        "float16, bfloat16, fp8, fp8_e5m2, int8 (default auto: the checkpoint's, else the "
                        "model's)")
    engine.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction,
                        default=prefix_caching, help="prompts with a common prefix share its KV cache "
                        f"(default {'on' if prefix_caching else 'off'})")
    engine.add_argument("--swap-space", type=positive, default=0.0, metavar="GIB",
                        help="host memory for offloaded KV cache pages (default 0)")
    engine.add_argument("--speculative", metavar="HOW", help="speculative decoding, which does not change "
                        "the output: ngram:K (prompt lookup) or draft:DIR:K (a draft model)")
    if file: engine.add_argument("--config", type=Path, dest="option_file", metavar="FILE",
                                 help="options in YAML, or JSON in a .json file, by their long names; those "
                                 "of the command line win")
    return engine


def choose_model(arguments: argparse.Namespace) -> str | None:
    """Returns MODEL, or --model. Raises `RequestError` for two."""
    given: str | None = arguments.model
    named: str | None = arguments.named
    if given is not None and named is not None and given != named:
        raise RequestError(f"MODEL is {given}, and --model is {named}", "one of them", "leave one out")
    return named if given is None else given


def size(text: str) -> int:
    """A number of tokens; k and m count in thousands as vLLM's do: 32k is 32000, 32K is 32768."""
    units = {"k": 1000, "K": 1024, "m": 1000 ** 2, "M": 1024 ** 2}
    factor = units.get(text[-1:], 1)
    try: return int(float(text[:-1]) * factor) if factor != 1 else int(text)
    except (ValueError, OverflowError) as error:
        message = f"{text!r} is not a number of tokens; write 4096, 32k or 32K"
        raise argparse.ArgumentTypeError(message) from error


def whole(text: str) -> int:
    """A whole number from 1 on."""
    if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 40: return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number ≥ 1")


def positive(text: str) -> float:
    """A number from 0 on."""
    try: value = float(text)
    except ValueError: value = -1.0
    if 0 <= value < 1e9: return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number ≥ 0")


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
    group.add_argument("--max-loras", type=whole, metavar="N",
                       help="adapters that run at a time (default 4, or --max-cpu-loras where that is less)")
    group.add_argument("--max-lora-rank", type=whole, default=16, metavar="N",
                       help="largest rank of an adapter (default 16)")
    group.add_argument("--max-cpu-loras", type=whole, metavar="N",
                       help="adapters kept in host memory (default 16, or --max-loras)")
    group.add_argument("--lora-dtype", default="auto", metavar="D",
                       help="of adapters: float32, float16, bfloat16 (default auto: the model's)")
    group.add_argument("--allow-runtime-lora-updating", action="store_true",
                       help="clients may load and unload adapters from paths of this machine")
