"""`tinygrad-nv bench [speed | latency | throughput | serve]`: the speed of a model, alone and beside others.

`speed`, which is what runs without a name, has llama-bench's tests: prefill and decode of one sequence, and
GB/s of weights. The others are vLLM's.

Protocol: options and results have vLLM's names. Figures go to stdout, progress to stderr; `--output-json`
(serve: `--save-result`) writes them with the raw figures. `--against` runs the same workload on an installed
peer, interleaved with ours, and reports the ratio with its spread; a peer that is not installed is an error
(exit code 2). Prompts are random from a seed, answers have their full length, and prefix caching is off
unless requested.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad_nv.benchmarks import figures
from tinygrad_nv.benchmarks.engines import PEERS, BenchEngine, TinygradNV, peer, require_installed
from tinygrad_nv.benchmarks.figures import RequestResult
from tinygrad_nv.benchmarks.workload import BenchRequest, arrivals, random_requests, requests_from_file, total
from tinygrad_nv.cli import bench_speed
from tinygrad_nv.cli.bench_options import count, progress, write
from tinygrad_nv.errors import NVError, RequestError

if TYPE_CHECKING:
    from tinygrad_nv.benchmarks.speed import Weights  # NumPy

START_S = 300.0     # timeout for our server to start


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], directory: str,
                add_model_options: Callable[[argparse.ArgumentParser], None],
                model: Callable[[str | None], Path]) -> None:
    """Adds `bench`. Options of models are defined in __init__.py."""
    bench = commands.add_parser("bench", help="measure a model's speed, alone and beside other engines")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    for name, words, run in (("speed", "prefill and decode of one sequence, as llama-bench", bench_speed.run),
                             ("latency", "one batch, from its prompts to its last token", latency),
                             ("throughput", "many prompts at once", throughput),
                             ("serve", "a server under load: any OpenAI-compatible one, or ours", serve)):
        each = kinds.add_parser(name, help=words, usage="%(prog)s [options] [MODEL]",
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        each.add_argument("model", nargs="?", metavar="MODEL", help=directory)
        each.add_argument("--model", dest="named", metavar="MODEL", help="the same, in vLLM's way")
        if name != "speed":
            each.add_argument("--against", choices=PEERS,
                              help="run the same workload on a peer, interleaved")
        each.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
        add_model_options(each)
        ADD[name](each)
        each.set_defaults(run=lambda arguments, run=run: run(arguments, model(_model(arguments))))


def named(words: list[str]) -> list[str]:
    """The command line, where it is `bench …` with the name of what it measures."""
    plain = words[:1] == ["bench"] and not {*words[1:2]} & {*ADD, "-h", "--help"}
    return ["bench", "speed", *words[1:]] if plain else words


def _add_latency(command: argparse.ArgumentParser) -> None:
    _lengths(command, 32, 128)
    command.add_argument("--batch-size", type=count, default=8, metavar="N", help="sequences")
    command.add_argument("--num-iters-warmup", type=count, default=2, metavar="N", help="batches before")
    command.add_argument("--num-iters", type=count, default=10, metavar="N", help="batches that count")
    _engine(command)


def _add_throughput(command: argparse.ArgumentParser) -> None:
    _lengths(command, 128, 128)
    _dataset(command, 64)
    command.add_argument("--num-iters", type=count, default=1, metavar="N", help="times the load is run")
    _engine(command)


def _add_serve(command: argparse.ArgumentParser) -> None:
    _lengths(command, 128, 128)
    _dataset(command, 100)
    command.add_argument("--base-url", metavar="URL",
                         help="of a running server; without it, ours is started")
    command.add_argument("--served-model-name", metavar="NAME", help="the model's name there")
    command.add_argument("--api-key", metavar="KEY", help="if the server requires one")
    command.add_argument("--request-rate", type=float, default=float("inf"), metavar="R",
                         help="requests a second; inf: all at once")
    command.add_argument("--burstiness", type=float, default=1.0, metavar="B",
                         help="1: a Poisson process; above smoother, below in bursts")
    command.add_argument("--max-concurrency", type=count, metavar="N", help="requests at a time at most")
    command.add_argument("--num-warmups", type=int, metavar="N", help="of the requests, sent once before the "
                         "load (None: 1; all if the server is started here, which compiles as they come)")
    command.add_argument("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="P,…",
                         help="of each metric")
    command.add_argument("--save-result", type=Path, metavar="FILE", help="figures and raw figures as JSON")
    command.add_argument("--plot", type=Path, metavar="FILE", help="distributions as a picture (matplotlib)")


ADD = {"speed": bench_speed.add_options, "latency": _add_latency, "throughput": _add_throughput,
       "serve": _add_serve}


def _lengths(command: argparse.ArgumentParser, inputs: int, outputs: int) -> None:
    command.add_argument("--input-len", "--random-input-len", type=count, default=inputs, metavar="N",
                         help="tokens of a prompt")
    command.add_argument("--output-len", "--random-output-len", type=count, default=outputs, metavar="N",
                         help="tokens of an answer")


def _dataset(command: argparse.ArgumentParser, prompts: int) -> None:
    command.add_argument("--num-prompts", type=count, default=prompts, metavar="N", help="requests")
    command.add_argument("--dataset-name", choices=("random", "custom"), default="random", help="of prompts")
    command.add_argument("--dataset-path", type=Path, metavar="FILE",
                         help='JSON lines with "prompt" (custom)')
    command.add_argument("--random-range-ratio", type=float, default=0.0, metavar="X",
                         help="lengths are within 1 ± X of those given")
    command.add_argument("--random-prefix-len", type=int, default=0, metavar="N",
                         help="length of a prefix common to all prompts")


def _engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-num-seqs", type=count, default=64, metavar="N",
                         help="sequences that run at a time, and transformers' batch")
    command.add_argument("--max-num-batched-tokens", type=count, default=512, metavar="N",
                         help="tokens that a step computes")
    command.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=False,
                         help="prompts with a common prefix share its KV cache")
    command.add_argument("--speculative", metavar="HOW", help="ngram:K or draft:DIR:K")
    command.add_argument("--gguf", type=Path, metavar="FILE", help="the same model, for llama.cpp")
    command.add_argument("--output-json", type=Path, metavar="FILE", help="figures and raw figures")


def _model(arguments: argparse.Namespace) -> str | None:
    if arguments.model is not None and arguments.named is not None:
        raise RequestError(f"the models {arguments.model} and {arguments.named}", "one model",
                           "leave out one of MODEL and --model")
    return arguments.named if arguments.model is None else arguments.model


def _percentiles(text: str) -> tuple[float, ...]:
    try: made = tuple(float(word) for word in text.split(","))
    except ValueError: made = ()
    if made and all(0 <= part <= 100 for part in made): return made
    raise argparse.ArgumentTypeError(f"{text!r} is no list of percentiles; write 50,90,99")


# **** in this process ****

def latency(arguments: argparse.Namespace, directory: Path) -> int:
    """Times whole batches."""
    names, runs, weights = _interleaved(arguments, directory, lambda vocab: random_requests(
        arguments.batch_size, arguments.input_len, arguments.output_len, vocab, arguments.seed),
                               arguments.num_iters_warmup)
    made = {name: figures.latency(seconds) for name, seconds in zip(names, runs, strict=True)}
    for name, one in made.items(): print((f"{name}:\n" if len(made) > 1 else "") + figures.latency_text(one))
    return _report(arguments, names, runs, made, weights)


def throughput(arguments: argparse.Namespace, directory: Path) -> int:
    """Measures tokens a second over many prompts."""
    workload: list[BenchRequest] = []

    def load(vocab: int) -> list[BenchRequest]:
        workload[:] = _workload(arguments, directory, vocab)
        return workload

    names, runs, weights = _interleaved(arguments, directory, load, 1)
    inputs, outputs = total(workload)
    made = {}
    for name, seconds in zip(names, runs, strict=True):
        middle = figures.percentile(seconds, 50)
        made[name] = {**figures.throughput(middle, len(workload), inputs, outputs), "elapsed_times": seconds}
        print((f"{name}:\n" if len(names) > 1 else "") + figures.throughput_text(made[name], inputs, outputs))
    return _report(arguments, names, runs, made, weights)


def _interleaved(arguments: argparse.Namespace, directory: Path, load: Callable[[int], list[BenchRequest]],
                 warm: int) -> tuple[list[str], list[list[float]], Weights]:
    """Seconds of each engine's runs, interleaved; and what our weights are."""
    from tinygrad_nv.benchmarks.speed import described
    from tinygrad_nv.cli import console
    if arguments.against: require_installed(arguments.against)      # before anything is loaded
    llm = console.load(directory, arguments, max_num_seqs=arguments.max_num_seqs,
                       max_num_batched_tokens=arguments.max_num_batched_tokens,
                       enable_prefix_caching=arguments.enable_prefix_caching,
                       speculative=arguments.speculative)
    try:
        workload = load(llm.config.vocab_size)
        for one in workload: _require_fitting(one, llm.length)
        engines: dict[str, BenchEngine] = {"tinygrad_nv": TinygradNV(llm)}
        if arguments.against:
            dtype = str(llm.dtype).rpartition(".")[2]
            engines[arguments.against] = peer(arguments.against, directory, NAMES.get(dtype, dtype),
                                              arguments.max_num_seqs, llm.length, arguments.gguf)
        runs: list[list[float]] = [[] for _ in engines]
        with progress("running", (warm + arguments.num_iters) * len(engines)) as step:
            for number in range(warm + arguments.num_iters):
                for seconds, engine in zip(runs, engines.values(), strict=True):
                    took = engine.run(workload)
                    if number >= warm: seconds.append(took)
                    step()
        return list(engines), runs, described(llm, min(len(workload), arguments.max_num_seqs))
    finally: llm.close()


NAMES = {"float": "float32", "half": "float16", "__bf16": "bfloat16"}


def _workload(arguments: argparse.Namespace, directory: Path, vocab: int) -> list[BenchRequest]:
    if arguments.dataset_name == "random":
        if not 0 <= arguments.random_range_ratio < 1:
            raise RequestError(f"--random-range-ratio {arguments.random_range_ratio}", "0 ≤ x < 1",
                               "change --random-range-ratio")
        return random_requests(arguments.num_prompts, arguments.input_len, arguments.output_len, vocab,
                               arguments.seed, arguments.random_range_ratio, arguments.random_prefix_len)
    from tinygrad_nv.engine.text.tokenizer import Tokenizer
    if arguments.dataset_path is None:
        raise RequestError("--dataset-name custom, and no file", "--dataset-path with JSON lines",
                           "name the file")
    return requests_from_file(arguments.dataset_path, arguments.num_prompts, arguments.output_len,
                              Tokenizer.load(directory).encode)


def _require_fitting(one: BenchRequest, length: int) -> None:
    if (asked := len(one.prompt) + one.output) > length:
        raise RequestError(f"{len(one.prompt)} tokens and {one.output} after them are {asked}",
                           f"at most {length}, the context", "lower --input-len or --output-len")


def _report(arguments: argparse.Namespace, names: list[str], runs: list[list[float]],
            made: dict[str, dict[str, Any]], weights: Weights) -> int:
    print(f"Weights: {weights}")
    if len(names) > 1: print(figures.compared(runs[0], runs[1], names[1]))
    if arguments.output_json:
        mine = {**made[names[0]], "weights": weights.record()}
        write(arguments.output_json, mine | ({names[1]: made[names[1]]} if len(names) > 1 else {}))
    return 0


# **** a server ****

def serve(arguments: argparse.Namespace, directory: Path) -> int:
    """Measures a server under load."""
    if arguments.against:
        require_installed(arguments.against)
        raise NVError("bench serve loads one server", "bench throughput --against, or a run for each",
                      f"start {arguments.against}'s own server, and give its address with --base-url")
    if not arguments.request_rate > 0 or not 0 < arguments.burstiness < float("inf"):
        raise RequestError(f"--request-rate {arguments.request_rate}, --burstiness {arguments.burstiness}",
                           "numbers > 0", "change them")
    from tinygrad_nv.models.config import read_config
    workload = _workload(arguments, directory, read_config(directory).vocab_size)
    if arguments.base_url:
        answers, seconds, name = asyncio.run(_loaded(arguments, arguments.base_url, workload))
    else:
        with our_server(arguments, directory) as url:
            answers, seconds, name = asyncio.run(_loaded(arguments, url, workload))
    made = figures.served(answers, seconds, arguments.metric_percentiles)
    print(figures.served_text(made, arguments.metric_percentiles))
    if failed := [each.error for each in answers if each.error]:
        print(f"the first of {len(failed)} failures: {failed[0]}", file=sys.stderr)
    if arguments.save_result: write(arguments.save_result, _record(arguments, name, answers, made))
    if arguments.plot: _plot(arguments.plot, answers)
    return 1 if not made["completed"] else 0


async def _loaded(arguments: argparse.Namespace, url: str,
                  workload: list[BenchRequest]) -> tuple[list[RequestResult], float, str]:
    from tinygrad_nv.benchmarks import client
    target = client.Endpoint(url.rstrip("/").removesuffix("/v1"), arguments.served_model_name or "",
                           arguments.api_key)
    try: models = [each["id"] for each in (await client.fetch(target, "/v1/models"))["data"]]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise NVError(f"no server of OpenAI's API at {url}: {error}", "the address of one that runs",
                      "change --base-url") from error
    name = arguments.served_model_name or models[0]
    target = client.Endpoint(target.url, name, arguments.api_key)
    warm = arguments.num_warmups
    if warm is None: warm = 1 if arguments.base_url else len(workload)
    if warm: await client.load(target, workload[:warm], [0.0] * warm, arguments.max_concurrency)
    at = arrivals(len(workload), arguments.request_rate, arguments.seed, arguments.burstiness)
    with progress("requests", len(workload)) as step:
        answers, seconds = await client.load(target, workload, at, arguments.max_concurrency, step)
    return answers, seconds, name


@contextmanager
def our_server(arguments: argparse.Namespace, directory: Path) -> Iterator[str]:
    """A server of ours, for as long as the workload runs."""
    words = [sys.executable, "-m", "tinygrad_nv", "serve", str(directory), "--port", "0",
             "--no-enable-prefix-caching", "--dtype", arguments.dtype]
    for option in ("quantization", "max_model_len", "device", "gpu_memory_utilization",
                   "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if (value := getattr(arguments, option)) is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    if arguments.enable_expert_parallel: words.append("--enable-expert-parallel")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try: yield _address(process)
    finally:
        process.terminate()
        with process: pass


def _address(process: subprocess.Popen[str]) -> str:
    """The address that a server logs once it is ready."""
    import re
    import threading
    lines, ends = [], time.monotonic() + START_S
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if "ready" in line and (match := re.search(r"https?://[^\s\"',}]+", line)):
            # drain the pipe: a full one would block the server
            threading.Thread(target=_drop, args=(process.stderr,), daemon=True).start()
            return match[0]
        if time.monotonic() > ends: break
    raise NVError("the server did not start:\n" + "".join(lines[-5:]).rstrip(), "a model that can be served",
                  "try `tinygrad-nv serve` with the same options")


def _drop(stream: Iterable[str]) -> None:
    with contextlib.suppress(ValueError):   # closed when the server has ended
        for _ in stream: pass


def _record(arguments: argparse.Namespace, name: str, answers: list[RequestResult],
            made: dict[str, Any]) -> dict[str, Any]:
    """vLLM's JSON: options, figures, and raw figures."""
    rate = arguments.request_rate
    return {"date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"), "endpoint_type": "openai",
            "model_id": name, "num_prompts": len(answers), "burstiness": arguments.burstiness,
            "request_rate": "inf" if rate == float("inf") else rate,
            "max_concurrency": arguments.max_concurrency, **made,
            "input_lens": [each.prompt_tokens for each in answers],
            "output_lens": [each.output_tokens for each in answers],
            "ttfts": [each.ttft for each in answers], "itls": [each.gaps for each in answers],
            "generated_texts": [each.text for each in answers], "errors": [each.error for each in answers]}


def _plot(path: Path, answers: list[RequestResult]) -> None:
    """Cumulative distribution of each metric."""
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
