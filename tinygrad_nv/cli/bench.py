"""`tinygrad-nv bench latency | throughput | serve`: how fast a model answers, alone and beside its peers.

Protocol: options and results have vLLM's names. Figures go to stdout, progress to stderr; `--output-json`
(serve: `--save-result`) writes them with the raw ones. `--against` runs the same load on a peer that is
installed, by turns with ours, and tells the ratio with its spread; one that is not installed is said in words
(exit code 2). Prompts are made up from a seed, answers have their full length, and prefixes are not shared
unless that is asked for.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinygrad_nv.benchmarks import figures
from tinygrad_nv.benchmarks.engines import PEERS, Engine, Ours, peer, require_installed
from tinygrad_nv.benchmarks.figures import Answered
from tinygrad_nv.benchmarks.workload import Ask, arrivals, from_file, made_up, total
from tinygrad_nv.errors import NVError, RequestError

START_S = 300.0     # a server of ours may take to start


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], directory: str,
                add_model_options: Callable[[argparse.ArgumentParser], None],
                model: Callable[[str | None], Path]) -> None:
    """Adds `bench`. What is about models is __init__.py's."""
    bench = commands.add_parser("bench", help="how fast a model answers, alone and beside its peers")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    for name, words, run in (("latency", "one batch, from its prompts to its last token", latency),
                             ("throughput", "many prompts at once", throughput),
                             ("serve", "a server under load: any of OpenAI's API, or ours", serve)):
        each = kinds.add_parser(name, help=words, usage="%(prog)s [options] [MODEL]",
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        each.add_argument("model", nargs="?", metavar="MODEL", help=directory)
        each.add_argument("--model", dest="named", metavar="MODEL", help="the same, in vLLM's way")
        each.add_argument("--against", choices=PEERS, help="run the same load on a peer, by turns")
        each.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
        add_model_options(each)
        ADD[name](each)
        each.set_defaults(run=lambda arguments, run=run: run(arguments, model(_model(arguments))))


def _add_latency(command: argparse.ArgumentParser) -> None:
    _lengths(command, 32, 128)
    command.add_argument("--batch-size", type=_count, default=8, metavar="N", help="sequences")
    command.add_argument("--num-iters-warmup", type=_count, default=2, metavar="N", help="batches before")
    command.add_argument("--num-iters", type=_count, default=10, metavar="N", help="batches that count")
    _engine(command)


def _add_throughput(command: argparse.ArgumentParser) -> None:
    _lengths(command, 128, 128)
    _dataset(command, 64)
    command.add_argument("--num-iters", type=_count, default=1, metavar="N", help="times the load is run")
    _engine(command)


def _add_serve(command: argparse.ArgumentParser) -> None:
    _lengths(command, 128, 128)
    _dataset(command, 100)
    command.add_argument("--base-url", metavar="URL",
                         help="of a server that runs; without one ours is started")
    command.add_argument("--served-model-name", metavar="NAME", help="the model's name there")
    command.add_argument("--api-key", metavar="KEY", help="if the server wants one")
    command.add_argument("--request-rate", type=float, default=float("inf"), metavar="R",
                         help="requests a second; inf: all at once")
    command.add_argument("--burstiness", type=float, default=1.0, metavar="B",
                         help="1: a Poisson process; above smoother, below in bursts")
    command.add_argument("--max-concurrency", type=_count, metavar="N", help="requests at a time at most")
    command.add_argument("--num-warmups", type=int, metavar="N", help="of the requests, sent once before the "
                         "load (None: 1; all if the server is started here, which compiles as they come)")
    command.add_argument("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="P,…",
                         help="of each metric")
    command.add_argument("--save-result", type=Path, metavar="FILE", help="figures and raw figures as JSON")
    command.add_argument("--plot", type=Path, metavar="FILE", help="distributions as a picture (matplotlib)")


ADD = {"latency": _add_latency, "throughput": _add_throughput, "serve": _add_serve}


def _lengths(command: argparse.ArgumentParser, inputs: int, outputs: int) -> None:
    command.add_argument("--input-len", "--random-input-len", type=_count, default=inputs, metavar="N",
                         help="tokens of a prompt")
    command.add_argument("--output-len", "--random-output-len", type=_count, default=outputs, metavar="N",
                         help="tokens of an answer")


def _dataset(command: argparse.ArgumentParser, prompts: int) -> None:
    command.add_argument("--num-prompts", type=_count, default=prompts, metavar="N", help="requests")
    command.add_argument("--dataset-name", choices=("random", "custom"), default="random", help="of prompts")
    command.add_argument("--dataset-path", type=Path, metavar="FILE",
                         help='JSON lines with "prompt" (custom)')
    command.add_argument("--random-range-ratio", type=float, default=0.0, metavar="X",
                         help="lengths are within 1 ± X of those given")
    command.add_argument("--random-prefix-len", type=int, default=0, metavar="N",
                         help="tokens with which all prompts begin alike")


def _engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-num-seqs", type=_count, default=64, metavar="N",
                         help="sequences that run at a time, and transformers' batch")
    command.add_argument("--max-num-batched-tokens", type=_count, default=512, metavar="N",
                         help="tokens that a step computes")
    command.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=False,
                         help="prompts that begin alike share what is computed of them")
    command.add_argument("--speculative", metavar="HOW", help="ngram:K or draft:DIR:K")
    command.add_argument("--gguf", type=Path, metavar="FILE", help="the same model, for llama.cpp")
    command.add_argument("--output-json", type=Path, metavar="FILE", help="figures and raw figures")


def _model(arguments: argparse.Namespace) -> str | None:
    if arguments.model is not None and arguments.named is not None:
        raise RequestError(f"the models {arguments.model} and {arguments.named}", "one model",
                           "leave out one of MODEL and --model")
    return arguments.named if arguments.model is None else arguments.model


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31: return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number ≥ 1")


def _percentiles(text: str) -> tuple[float, ...]:
    try: made = tuple(float(word) for word in text.split(","))
    except ValueError: made = ()
    if made and all(0 <= part <= 100 for part in made): return made
    raise argparse.ArgumentTypeError(f"{text!r} is no list of percentiles; write 50,90,99")


# **** in this process ****

def latency(arguments: argparse.Namespace, directory: Path) -> int:
    """The time of whole batches."""
    names, runs = _by_turns(arguments, directory, lambda vocab: made_up(
        arguments.batch_size, arguments.input_len, arguments.output_len, vocab, arguments.seed),
        arguments.num_iters_warmup)
    made = {name: figures.latency(seconds) for name, seconds in zip(names, runs, strict=True)}
    for name, one in made.items(): print((f"{name}:\n" if len(made) > 1 else "") + figures.latency_text(one))
    return _told(arguments, names, runs, made)


def throughput(arguments: argparse.Namespace, directory: Path) -> int:
    """Tokens a second of many prompts."""
    asked: list[Ask] = []

    def load(vocab: int) -> list[Ask]:
        asked[:] = _asks(arguments, directory, vocab)
        return asked

    names, runs = _by_turns(arguments, directory, load, 1)
    inputs, outputs = total(asked)
    made = {}
    for name, seconds in zip(names, runs, strict=True):
        middle = figures.percentile(seconds, 50)
        made[name] = {**figures.throughput(middle, len(asked), inputs, outputs), "elapsed_times": seconds}
        print((f"{name}:\n" if len(names) > 1 else "") + figures.throughput_text(made[name], inputs, outputs))
    return _told(arguments, names, runs, made)


def _by_turns(arguments: argparse.Namespace, directory: Path, load: Callable[[int], list[Ask]],
              warm: int) -> tuple[list[str], list[list[float]]]:
    """Seconds of each engine's runs, one of each after the other."""
    from tinygrad_nv.cli import console
    if arguments.against: require_installed(arguments.against)      # before anything is loaded
    llm = console.load(directory, arguments, max_num_seqs=arguments.max_num_seqs,
                       max_num_batched_tokens=arguments.max_num_batched_tokens,
                       enable_prefix_caching=arguments.enable_prefix_caching,
                       speculative=arguments.speculative)
    try:
        asks = load(llm.config.vocab_size)
        for ask in asks: _require_fitting(ask, llm.length)
        engines: dict[str, Engine] = {"tinygrad_nv": Ours(llm)}
        if arguments.against:
            dtype = str(llm.dtype).rpartition(".")[2]
            engines[arguments.against] = peer(arguments.against, directory, NAMES.get(dtype, dtype),
                                              arguments.max_num_seqs, llm.length, arguments.gguf)
        runs: list[list[float]] = [[] for _ in engines]
        with _progress("running", (warm + arguments.num_iters) * len(engines)) as step:
            for number in range(warm + arguments.num_iters):
                for seconds, engine in zip(runs, engines.values(), strict=True):
                    took = engine.run(asks)
                    if number >= warm: seconds.append(took)
                    step()
        return list(engines), runs
    finally: llm.close()


NAMES = {"float": "float32", "half": "float16", "__bf16": "bfloat16"}


def _asks(arguments: argparse.Namespace, directory: Path, vocab: int) -> list[Ask]:
    if arguments.dataset_name == "random":
        if not 0 <= arguments.random_range_ratio < 1:
            raise RequestError(f"--random-range-ratio {arguments.random_range_ratio}", "0 ≤ x < 1",
                               "change --random-range-ratio")
        return made_up(arguments.num_prompts, arguments.input_len, arguments.output_len, vocab,
                       arguments.seed, arguments.random_range_ratio, arguments.random_prefix_len)
    from tinygrad_nv.engine.text.tokenizer import Tokenizer
    if arguments.dataset_path is None:
        raise RequestError("--dataset-name custom, and no file", "--dataset-path with JSON lines",
                           "name the file")
    return from_file(arguments.dataset_path, arguments.num_prompts, arguments.output_len,
                     Tokenizer.load(directory).encode)


def _require_fitting(ask: Ask, length: int) -> None:
    if (asked := len(ask.prompt) + ask.output) > length:
        raise RequestError(f"{len(ask.prompt)} tokens and {ask.output} after them are {asked}",
                           f"at most {length}, the context", "lower --input-len or --output-len")


def _told(arguments: argparse.Namespace, names: list[str], runs: list[list[float]],
          made: dict[str, dict[str, Any]]) -> int:
    if len(names) > 1: print(figures.compared(runs[0], runs[1], names[1]))
    if arguments.output_json:
        _write(arguments.output_json, made[names[0]] | ({names[1]: made[names[1]]} if len(names) > 1 else {}))
    return 0


def _write(path: Path, record: dict[str, Any]) -> None:
    try: path.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error}", "a file in a directory there is",
                           "change the path") from error


@contextmanager
def _progress(words: str, count: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr where somebody looks."""
    from rich.console import Console
    from rich.progress import Progress
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=count)
        yield lambda: bar.advance(task)


# **** a server ****

def serve(arguments: argparse.Namespace, directory: Path) -> int:
    """A server under load."""
    if arguments.against:
        require_installed(arguments.against)
        raise NVError("bench serve loads one server", "bench throughput --against, or a run for each",
                      f"start {arguments.against}'s own server, and give its address with --base-url")
    if not arguments.request_rate > 0 or not 0 < arguments.burstiness < float("inf"):
        raise RequestError(f"--request-rate {arguments.request_rate}, --burstiness {arguments.burstiness}",
                           "numbers > 0", "change them")
    from tinygrad_nv.models.config import read_config
    asks = _asks(arguments, directory, read_config(directory).vocab_size)
    if arguments.base_url: answers, seconds, name = asyncio.run(_loaded(arguments, arguments.base_url, asks))
    else:
        with our_server(arguments, directory) as url:
            answers, seconds, name = asyncio.run(_loaded(arguments, url, asks))
    made = figures.served(answers, seconds, arguments.metric_percentiles)
    print(figures.served_text(made, arguments.metric_percentiles))
    if failed := [each.error for each in answers if each.error]:
        print(f"the first of {len(failed)} failures: {failed[0]}", file=sys.stderr)
    if arguments.save_result: _write(arguments.save_result, _record(arguments, name, answers, made))
    if arguments.plot: _plot(arguments.plot, answers)
    return 1 if not made["completed"] else 0


async def _loaded(arguments: argparse.Namespace, url: str,
                  asks: list[Ask]) -> tuple[list[Answered], float, str]:
    from tinygrad_nv.benchmarks import client
    target = client.Target(url.rstrip("/").removesuffix("/v1"), arguments.served_model_name or "",
                           arguments.api_key)
    try: models = [each["id"] for each in (await client.fetch(target, "/v1/models"))["data"]]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise NVError(f"no server of OpenAI's API at {url}: {error}", "the address of one that runs",
                      "change --base-url") from error
    name = arguments.served_model_name or models[0]
    target = client.Target(target.url, name, arguments.api_key)
    warm = arguments.num_warmups
    if warm is None: warm = 1 if arguments.base_url else len(asks)
    if warm: await client.load(target, asks[:warm], [0.0] * warm, arguments.max_concurrency)
    at = arrivals(len(asks), arguments.request_rate, arguments.seed, arguments.burstiness)
    with _progress("requests", len(asks)) as step:
        answers, seconds = await client.load(target, asks, at, arguments.max_concurrency, step)
    return answers, seconds, name


@contextmanager
def our_server(arguments: argparse.Namespace, directory: Path) -> Iterator[str]:
    """A server of ours for as long as the load runs."""
    words = [sys.executable, "-m", "tinygrad_nv", "serve", str(directory), "--port", "0",
             "--no-enable-prefix-caching", "--dtype", arguments.dtype]
    for option in ("max_model_len", "device", "gpu_memory_utilization"):
        if (value := getattr(arguments, option)) is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try: yield _address(process)
    finally:
        process.terminate()
        with process: pass


def _address(process: subprocess.Popen[str]) -> str:
    """Where a server says that it listens, once it is ready."""
    import re
    import threading
    lines, ends = [], time.monotonic() + START_S
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if "ready" in line and (match := re.search(r"https?://[^\s\"',}]+", line)):
            # what it says from now on nobody reads, and a full pipe would stop it
            threading.Thread(target=_drop, args=(process.stderr,), daemon=True).start()
            return match[0]
        if time.monotonic() > ends: break
    raise NVError("the server did not start:\n" + "".join(lines[-5:]).rstrip(), "a model that can be served",
                  "try `tinygrad-nv serve` with the same options")


def _drop(stream: Iterable[str]) -> None:
    with contextlib.suppress(ValueError):   # closed when the server has ended
        for _ in stream: pass


def _record(arguments: argparse.Namespace, name: str, answers: list[Answered],
            made: dict[str, Any]) -> dict[str, Any]:
    """vLLM's JSON: what was asked, the figures, and the raw ones."""
    rate = arguments.request_rate
    return {"date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"), "endpoint_type": "openai",
            "model_id": name, "num_prompts": len(answers), "burstiness": arguments.burstiness,
            "request_rate": "inf" if rate == float("inf") else rate,
            "max_concurrency": arguments.max_concurrency, **made,
            "input_lens": [each.prompt_tokens for each in answers],
            "output_lens": [each.output_tokens for each in answers],
            "ttfts": [each.ttft for each in answers], "itls": [each.gaps for each in answers],
            "generated_texts": [each.text for each in answers], "errors": [each.error for each in answers]}


def _plot(path: Path, answers: list[Answered]) -> None:
    """Each metric's share of requests below a time."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise NVError("matplotlib is not installed", "it, for --plot", "pip install matplotlib") from error
    chart, axes = pyplot.subplots(1, 4, figsize=(14, 3.2), layout="constrained")
    for place, (name, values) in zip(axes, figures.raw(answers).items(), strict=True):
        ordered = sorted(1e3 * value for value in values)
        place.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
        place.set(title=figures.METRICS[name], xlabel="ms", ylabel="share", ylim=(0, 1.02))
        place.title.set_fontsize(9)
    chart.savefig(path, dpi=120)
    pyplot.close(chart)
