"""Console output: text on stdout; progress and notes on stderr, animated only on a terminal.

Protocol: `load` and `compile_steps` each show a bar (bytes read, kernels compiled) and remove it, so that
only text is written once generation starts. `say` writes text at once. `report` and `summary` describe a
finished answer, as JSON fields and as one line. `adapter` and `room_for` are what --lora names, and the
arguments of `LLM` for it.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text
from tinygrad import Device
from tinygrad.helpers import DEV

from tinygrad_nv import collection
from tinygrad_nv.cli.sampling_options import sampling_fields
from tinygrad_nv.engine.command_line import llm_arguments
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.lora.request import LoRARequest
from tinygrad_nv.engine.request_output import CompletionOutput, Logprob, RequestOutput
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import RequestError
from tinygrad_nv.runtime.observe.peak import memory_words, peak_memory
from tinygrad_nv.runtime.programs import programs_compiled, programs_known


class _Kernels(ProgressColumn):
    """Number of kernels created since the bar was, and how many of them were compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.before = programs_known(), programs_compiled()

    def render(self, task: Task) -> Text:
        there, compiled = programs_known() - self.before[0], programs_compiled() - self.before[1]
        return Text(f"{there} kernels, {compiled} compiled, {task.elapsed or 0:.1f} s")


@contextmanager
def _bar(*columns: ProgressColumn | str) -> Iterator[Progress]:
    """A bar on stderr that is removed at the end; none if stderr is not a terminal."""
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True,
                  disable=not console.is_terminal) as progress:
        yield progress


def load(directory: Path, arguments: argparse.Namespace, **more: Any) -> LLM:
    """The model of the command line, for one text at a time unless `more` arguments of `LLM` say otherwise.
    `--device` becomes tinygrad's default for this process."""
    if arguments.device:
        try: DEV.value = arguments.device
        except RuntimeError as error:
            raise RequestError(f"--device {arguments.device}: {error}",
                               "a device of tinygrad, such as CPU or CUDA",
                               "run `tinygrad-nv doctor` to see what this machine has") from error
    with _bar(BarColumn(), DownloadColumn()) as progress:
        task = progress.add_task(f"loading {directory.name}", total=None)
        llm = LLM(directory, progress=lambda done, total: progress.update(task, completed=done, total=total),
                  **{"max_num_seqs": max(getattr(arguments, "n", None) or 1, 1), "task": "generate",
                     **llm_arguments(arguments), **room_for(adapter(arguments)), **more})
    collection.as_usual()
    return llm


def compile_steps(llm: LLM, params: SamplingParams, prompt_tokens: int) -> None:
    """Compiles what an answer to a prompt of this length needs; a bundle has it compiled."""
    if llm.bundle is not None: return
    with _bar(BarColumn(), _Kernels()) as progress:
        progress.add_task("preparing", total=None)
        llm.warm_up(params, prompt_tokens)


@contextmanager
def tracing(path: Path | None) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Wraps a whole command, so that captured kernels know their layers. Yields a context manager for the
    part to record, which writes a trace to `path`, if given, and its table to stderr."""
    if path is None:
        yield nullcontext
        return
    from tinygrad_nv.runtime.observe import ranges, timeline
    timeline.check(path)

    @contextmanager
    def record() -> Iterator[None]:
        with timeline.timeline(path) as found: yield
        print(f"{found.table()}\ntrace: {path} (to look at: https://ui.perfetto.dev)", file=sys.stderr)

    with ranges.track_layers(): yield record


def sampling(arguments: argparse.Namespace, llm: LLM) -> SamplingParams:
    """The model's sampling defaults, overridden by the command line."""
    return replace(llm.defaults, **sampling_fields(arguments))


def say(text: str, end: str = "\n") -> None:
    """Writes text at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def ask() -> str | None:
    """A line of input, or None at its end."""
    try: return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty(): say("")
        return None


def fit(llm: LLM, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int]]:
    """The conversation without the oldest exchanges that exceed the context, and its token ids.

    A system message is kept. A last question that is too long by itself raises, as any prompt does."""
    first = 1 if messages[0]["role"] == "system" else 0
    kept = messages
    while len(llm.require_tokenizer().encode_chat(kept)) >= llm.length and len(kept) > first + 1:
        kept = kept[:first] + kept[first + 2:]
    if forgotten := (len(messages) - len(kept)) // 2:
        print(f"[the context is full: forgot the oldest {forgotten} exchange(s)]", file=sys.stderr)
    return kept, llm.encode_chat(kept)


def device_name(llm: LLM) -> str:
    """Device and, where it has one, the renderer's architecture: `CPU x86_64`."""
    arch = getattr(Device[llm.device], "arch", None)
    return f"{llm.device} {arch.split(',')[0]}" if arch else str(llm.device)


def weight_rate(done: RequestOutput, llm: LLM) -> float:
    """GB of weights read a second while decoding."""
    return done.tokens_per_s * llm.streamed_bytes / 1e9


def report(done: RequestOutput, llm: LLM) -> dict[str, Any]:
    """The answer and its figures, for `--json`."""
    many = {"outputs": [_answer(each) for each in done.outputs]} if len(done.outputs) > 1 else {}
    told = {} if done.outputs[0].logprobs is None else {"logprobs": _logprobs(done.outputs[0].logprobs)}
    asked = {} if done.prompt_logprobs is None else {"prompt_logprobs": _logprobs(done.prompt_logprobs)}
    return {**many, **told, **asked,
            "prompt_token_ids": list(done.prompt_token_ids), "token_ids": list(done.token_ids),
            "text": done.text, "finish_reason": done.finish_reason, "seed": done.seed,
            "ttft_s": round(done.ttft_s, 6),
            "tokens_per_s": round(done.tokens_per_s, 3), "weight_gb_per_s": round(weight_rate(done, llm), 4),
            **peak_memory(llm.device), "device": device_name(llm)}


def _answer(output: CompletionOutput) -> dict[str, Any]:
    told = {} if output.logprobs is None else {"logprobs": _logprobs(output.logprobs)}
    return {"index": output.index, "token_ids": list(output.token_ids), "text": output.text,
            "finish_reason": output.finish_reason, **told}


def _logprobs(tokens: Sequence[dict[int, Logprob] | None]) -> list[Any]:
    """Lists for each token its own log probability first, then the likeliest; null for the first of a
    prompt."""
    return [each and [{"id": token, "token": found.decoded_token, "logprob": found.logprob}
                      for token, found in each.items()] for each in tokens]


def summary(done: RequestOutput, llm: LLM) -> str:
    """One line: time to first token, tokens/s, GB/s of weights, peak memory."""
    return (f"[{len(done.token_ids)} tokens · first after {done.ttft_s * 1e3:.0f} ms"
            f" · {done.tokens_per_s:.1f} tokens/s"
            f" · {weight_rate(done, llm):.2f} GB/s of weights"
            f" · {memory_words(peak_memory(llm.device))} at most · {device_name(llm)}]")


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
