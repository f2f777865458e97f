"""`tinygrad-nv bench serve`: a server under load, with the options, figures and files of `vllm bench serve`.

Protocol: --base-url, or --host and --port, name a server that runs; without them ours is started. The load
goes to --endpoint in the shape of --backend. Figures go to stdout; --save-result writes vLLM's JSON under
vLLM's name to --result-dir, --output-json all of it to a file. `--against URL` sends the same load to another
server after each one that is measured. docs/serving.md says what differs from vLLM.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv.benchmarks import client, figures
from tinygrad_nv.benchmarks.engines import PEERS
from tinygrad_nv.benchmarks.figures import METRICS, RequestResult
from tinygrad_nv.benchmarks.workload import BenchRequest, arrivals, with_texts
from tinygrad_nv.cli import bench_dataset
from tinygrad_nv.cli.bench_options import count, progress, write
from tinygrad_nv.cli.engine_options import choose_model
from tinygrad_nv.engine.command_line import ENGINE, MODEL
from tinygrad_nv.errors import NVError, RequestError

START_S = 300.0     # timeout for our server to start
BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
GOODS = ("ttft", "tpot", "e2el")        # what --goodput bounds
# raw figures, which vLLM writes with --save-detailed
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")
SAMPLING: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int, "min_p": float,
                             "frequency_penalty": float, "presence_penalty": float,
                             "repetition_penalty": float, "logprobs": int}


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds what is not of other kinds."""
    bench_dataset.add_options(command, 128, 128, 100)
    server = command.add_argument_group("server")
    server.add_argument("--backend", "--endpoint-type", choices=tuple(BACKENDS), default="openai",
                        help="shape of requests: completions, or conversations")
    server.add_argument("--base-url", metavar="URL", help="of a server that runs")
    server.add_argument("--host", help="the same as its address (127.0.0.1, if --port is given)")
    server.add_argument("--port", type=count, metavar="N", help="the same (8000, if --host is given)")
    server.add_argument("--endpoint", metavar="PATH", help="where requests go (that of --backend)")
    server.add_argument("--against", metavar="URL", help="send the same load to this server, too")
    server.add_argument("--served-model-name", metavar="NAME", help="the model's name there")
    server.add_argument("--tokenizer", metavar="DIR", help="a model directory whose vocabulary prompts are "
                        "of (MODEL's)")
    server.add_argument("--api-key", metavar="KEY", help="if the server requires one")
    server.add_argument("--header", nargs="+", type=_pair, default=(), metavar="NAME=VALUE",
                        help="headers of requests")
    _add_load(command)
    _add_results(command)


def _add_load(command: argparse.ArgumentParser) -> None:
    load = command.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=float("inf"), metavar="R",
                      help="requests a second; inf: all at once")
    load.add_argument("--burstiness", type=float, default=1.0, metavar="B",
                      help="1: a Poisson process; above smoother, below in bursts")
    load.add_argument("--max-concurrency", type=count, metavar="N", help="requests at a time at most")
    load.add_argument("--num-warmups", type=int, metavar="N", help="of the requests, sent once before the "
                      "load (1; all if the server is started here, which compiles as they come)")
    load.add_argument("--ignore-eos", action="store_true", help="answers go on past the end token")
    load.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON",
                      help="more fields of requests")
    for name, kind in SAMPLING.items():
        load.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X",
                          default=0.0 if name == "temperature" else None, help="of requests")


def _add_results(command: argparse.ArgumentParser) -> None:
    results = command.add_argument_group("results")
    results.add_argument("--percentile-metrics", type=_metrics, default=("ttft", "tpot", "itl"),
                         metavar="M,…", help=f"metrics that are shown, of {','.join(METRICS)} "
                         "(default ttft,tpot,itl)")
    results.add_argument("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="P,…",
                         help="of each metric (default 99)")
    results.add_argument("--goodput", nargs="+", type=_objective, default=(), metavar="METRIC:MS",
                         help=f"count requests within these limits, of {', '.join(GOODS)}")
    results.add_argument("--save-result", action="store_true", help="write figures as vLLM does")
    results.add_argument("--save-detailed", action="store_true", help="those of each request, too")
    results.add_argument("--append-result", action="store_true", help="add a line to the file")
    results.add_argument("--result-dir", type=Path, metavar="DIR", help="where (the working directory)")
    results.add_argument("--result-filename", metavar="NAME", help="the file (vLLM's name, with the date)")
    results.add_argument("--label", help="in the file's name, for --backend")
    results.add_argument("--metadata", nargs="+", type=_pair, default=(), metavar="NAME=VALUE",
                         help="further entries of the file")
    results.add_argument("--output-json", type=Path, metavar="FILE", help="figures and raw figures")
    results.add_argument("--plot", type=Path, metavar="FILE", help="distributions as a picture (matplotlib)")


# **** values ****

def _pair(text: str) -> tuple[str, str]:
    name, there, value = text.partition("=")
    if name and there: return name, value
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")


def _json_object(text: str) -> dict[str, Any]:
    try: made = json.loads(text)
    except ValueError: made = None
    if isinstance(made, dict): return made
    raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(word for word in text.split(",") if word)
    if all(name in METRICS for name in names): return names
    raise argparse.ArgumentTypeError(f"{text!r} is no list of {','.join(METRICS)}")


def _percentiles(text: str) -> tuple[float, ...]:
    try: made = tuple(float(word) for word in text.split(","))
    except ValueError: made = ()
    if made and all(0 <= part <= 100 for part in made): return made
    raise argparse.ArgumentTypeError(f"{text!r} is no list of percentiles; write 50,90,99")


def _objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    with contextlib.suppress(ValueError):
        if name in GOODS and float(limit) >= 0: return name, float(limit)
    raise argparse.ArgumentTypeError(f"{text!r} is not METRIC:MS, a metric of {', '.join(GOODS)} and the "
                                     "milliseconds it may take")


# **** the run ****

@dataclass(frozen=True)
class _Run:
    """The load of one server, answered."""
    name: str
    answers: list[RequestResult]
    figures: dict[str, Any]


def run(arguments: argparse.Namespace, find: Callable[[str | None, bool], Path]) -> int:
    """Measures a server under load."""
    _check(arguments)
    directory = find(arguments.tokenizer or choose_model(arguments), arguments.download)
    workload = bench_dataset.requests(arguments, directory)
    if arguments.backend == "openai-chat": workload = with_texts(workload, directory)
    url = _url(arguments)
    with contextlib.nullcontext(url) if url else our_server(arguments, directory) as address:
        runs = [_measure(arguments, each, workload, started=url is None and each == address)
                for each in (address, *[arguments.against] * bool(arguments.against))]
    mine, parts = runs[0], arguments.metric_percentiles
    for one, where in zip(runs, (address, arguments.against), strict=False):
        if len(runs) > 1: print(f"{where}:")
        print(figures.render_serving(one.figures, parts, arguments.percentile_metrics))
        if failed := [each.error for each in one.answers if each.error]:
            print(f"the first of {len(failed)} failures: {failed[0]}", file=sys.stderr)
    if len(runs) > 1: print(figures.compare_serving(mine.figures, runs[1].figures))
    record = _record(arguments, mine)
    if arguments.output_json: write(arguments.output_json, record)
    if arguments.save_result or arguments.append_result: _save(arguments, mine.name, record)
    if arguments.plot: _plot(arguments.plot, mine.answers)
    return 1 if not mine.figures["completed"] else 0


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.request_rate > 0 or not 0 < arguments.burstiness < float("inf"):
        raise RequestError(f"--request-rate {arguments.request_rate}, --burstiness {arguments.burstiness}",
                           "numbers > 0", "change them")
    if arguments.against in PEERS:
        raise NVError(f"--against {arguments.against}, and bench serve loads servers",
                      "the address of a server that runs",
                      f"start {arguments.against}'s own server and give --against its URL, or use bench "
                      "throughput --against")
    if arguments.endpoint is None: arguments.endpoint = BACKENDS[arguments.backend]
    chat = arguments.backend == "openai-chat"
    if chat != arguments.endpoint.rstrip("/").endswith("chat/completions"):
        raise RequestError(f"--endpoint {arguments.endpoint} with --backend {arguments.backend}",
                           f"an endpoint such as {BACKENDS[arguments.backend]}", "change one of them")


def _url(arguments: argparse.Namespace) -> str | None:
    if arguments.base_url: return str(arguments.base_url)
    if arguments.host is None and arguments.port is None: return None
    return f"http://{arguments.host or '127.0.0.1'}:{arguments.port or 8000}"


def _measure(arguments: argparse.Namespace, url: str, workload: list[BenchRequest], started: bool) -> _Run:
    answers, seconds, name = asyncio.run(_send_load(arguments, url, workload, started))
    return _Run(name, answers, figures.summarise_serving(answers, seconds, arguments.metric_percentiles,
                                              dict(arguments.goodput)))


async def _send_load(arguments: argparse.Namespace, url: str, workload: list[BenchRequest],
                  started: bool) -> tuple[list[RequestResult], float, str]:
    body = {name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None}
    body |= {"ignore_eos": True} if arguments.ignore_eos else {}
    target = client.Endpoint(url.rstrip("/").removesuffix("/v1"), "", arguments.api_key,
                             path=arguments.endpoint, body={**body, **arguments.extra_body},
                             headers=tuple(arguments.header))
    try: models = [each["id"] for each in (await client.fetch(target, "/v1/models"))["data"]]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise NVError(f"no server of OpenAI's API at {url}: {error}", "the address of one that runs",
                      "change --base-url, --host or --port") from error
    own = choose_model(arguments)
    name: str = arguments.served_model_name or (own if own is not None and own in models else models[0])
    target = target.of(name)
    warm = arguments.num_warmups
    if warm is None: warm = len(workload) if started else 1
    if warm: await client.load(target, workload[:warm], [0.0] * warm, arguments.max_concurrency)
    at = arrivals(len(workload), arguments.request_rate, arguments.seed, arguments.burstiness)
    with progress("requests", len(workload)) as step:
        answers, seconds = await client.load(target, workload, at, arguments.max_concurrency, step)
    return answers, seconds, name


# **** our server ****

@contextmanager
def our_server(arguments: argparse.Namespace, directory: Path) -> Iterator[str]:
    """A server of ours, for as long as the workload runs."""
    process = subprocess.Popen([sys.executable, "-m", "tinygrad_nv", "serve", str(directory), "--port", "0",
                                *_engine_words(arguments)], stderr=subprocess.PIPE, text=True)
    try: yield _address(process)
    finally:
        process.terminate()
        with process: pass


def _engine_words(arguments: argparse.Namespace) -> list[str]:
    """The options of model and engine, as `serve` takes them."""
    words = ["--deterministic"] if arguments.deterministic else []
    given = {name: value for name in (*MODEL, *ENGINE, "device", "require_signed")
             if (value := getattr(arguments, name, None)) is not None} | arguments.vllm
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            if value: words.append(option)
            elif name == "enable_prefix_caching": words.append("--no-enable-prefix-caching")
        else: words.append(f"{option}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


def _address(process: subprocess.Popen[str]) -> str:
    """The address that a server logs once it is ready."""
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


# **** files ****

def _record(arguments: argparse.Namespace, run: _Run) -> dict[str, Any]:
    """vLLM's JSON: options, figures, and raw figures."""
    rate, answers = arguments.request_rate, run.answers
    return {"date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"), "endpoint_type": arguments.backend,
            "backend": arguments.backend, "label": arguments.label, "model_id": run.name,
            "tokenizer_id": arguments.tokenizer or run.name, "num_prompts": len(answers),
            **dict(arguments.metadata), "request_rate": "inf" if rate == float("inf") else rate,
            "burstiness": arguments.burstiness, "max_concurrency": arguments.max_concurrency, **run.figures,
            "input_lens": [each.prompt_tokens for each in answers],
            "output_lens": [each.output_tokens for each in answers],
            "ttfts": [each.ttft for each in answers], "itls": [each.gaps for each in answers],
            "generated_texts": [each.text for each in answers], "errors": [each.error for each in answers]}


def _save(arguments: argparse.Namespace, model: str, record: dict[str, Any]) -> None:
    """Writes the file of --save-result, under vLLM's name."""
    limit = "" if arguments.max_concurrency is None else f"-concurrency{arguments.max_concurrency}"
    name = arguments.result_filename or (f"{arguments.label or arguments.backend}-{arguments.request_rate}qps"
                                         f"{limit}-{model.rpartition('/')[2]}-{record['date']}.json")
    if not arguments.save_detailed: record = {key: value for key, value in record.items()
                                              if key not in DETAILS}
    folder: Path = arguments.result_dir or Path()
    with contextlib.suppress(OSError): folder.mkdir(parents=True, exist_ok=True)
    write(folder / name, record, arguments.append_result)


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
        place.set(title=METRICS[name], xlabel="ms", ylabel="share", ylim=(0, 1.02))
        place.title.set_fontsize(9)
    chart.savefig(path, dpi=120)
    pyplot.close(chart)
