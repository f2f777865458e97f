"""`tinygrad-nv serve`: the model behind OpenAI's HTTP API.

Protocol: options are vLLM's where vLLM has them. All logs go to stderr, one event a line (server/log.py). The
port is bound before the model is loaded, so a port conflict is reported at once. SIGTERM or Ctrl-C drains
(server/serving.py).
"""
from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tinygrad_nv.cli import vllm_options
from tinygrad_nv.cli.engine_options import add_engine_options, add_lora_options, choose_model, positive, whole
from tinygrad_nv.cli.model_path import list_names
from tinygrad_nv.errors import NVError, RequestError

PREFIXES = ("tinygrad_nv", "vllm")
MAX_LOGPROBS = 20   # the engine's: importing it takes a second
HOST = re.compile(r"\*|(\*\.)?[\w.-]+|\[?[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:.]*\]?")
LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], directory: str,
                model: Callable[[str | None, bool], Path]) -> None:
    """Adds `serve`."""
    serve = commands.add_parser("serve", help="serve a model over OpenAI's HTTP API, with a page to chat",
                                usage="%(prog)s [options] [MODEL]")
    serve.add_argument("model", nargs="?", metavar="MODEL", help=directory)
    engine = add_engine_options(serve)
    engine.add_argument("--task", default="auto", metavar="T", help="generate, or embed for /v1/embeddings "
                        "(default auto: what the model's files say)")
    engine.add_argument("--seed", type=int, metavar="N", help="for requests without one (default random)")
    vllm_options.add_generation_options(engine)
    engine.add_argument("--chat-template", metavar="FILE", help="instead of the model's own, or the name of "
                        "one of them")
    engine.add_argument("--chat-template-content-format", choices=("auto", "string", "openai"),
                        default="auto", help="templates get contents as texts (string) or as lists of parts "
                        "(openai; default auto: what the template reads)")
    engine.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True,
                        help="compile and capture before serving (default on)")
    add_lora_options(serve, whole)
    _add_parser_options(serve)
    _add_server_options(serve)
    _add_http_options(serve)
    vllm_options.add_options(serve, server=True)

    def start(arguments: argparse.Namespace) -> NoReturn:
        arguments.model = choose_model(arguments)
        _require_own_model(arguments)
        directory = model(arguments.model, arguments.download)
        arguments.served_model_name = list_names(arguments.served_model_name, arguments.model, directory)
        run(arguments, directory)
    serve.set_defaults(run=start)


def _require_own_model(arguments: argparse.Namespace) -> None:
    """Raises `RequestError` where an option with several values took MODEL for its last one."""
    if arguments.model is not None: return
    for option, words in (("--api-key", arguments.api_key),
                          ("--served-model-name", arguments.served_model_name)):
        if len(words or ()) > 1 and Path(words[-1]).exists():
            raise RequestError(f"{option} has the value {words[-1]}, which is a file or directory",
                               "MODEL in front of options with several values", f"put MODEL before {option}")


def _add_parser_options(serve: argparse.ArgumentParser) -> None:
    parsers = serve.add_argument_group("answers")
    for option, kind, what in (("--reasoning-parser", "REASONING", "reasoning, such as think, qwen3, "
                                                                   "openai"),
                               ("--tool-call-parser", "TOOLS", "tool calls, such as hermes, llama3_json, "
                                                               "openai")):
        parsers.add_argument(option, default="auto", type=_parser_name(kind), metavar="NAME", help="how the "
                                                                                                   "model "
                             f"writes {what}, or none (default auto: what the chat template says)")
    parsers.add_argument("--enable-auto-tool-choice", action=argparse.BooleanOptionalAction, default=True,
                         help="the model decides whether it calls a tool (default on)")
    parsers.add_argument("--trust-request-chat-template", action=argparse.BooleanOptionalAction,
                         default=False,
                         help="run chat templates of requests, in the sandbox (default off)")
    for option, words in (("--enable-force-include-usage", "each chunk of a stream has its usage"),
                          ("--return-tokens-as-token-ids", 'log probabilities have "token_id:5" for texts')):
        parsers.add_argument(option, action=argparse.BooleanOptionalAction, default=False,
                             help=f"{words} (default off)")
    parsers.add_argument("--strict-requests", action=argparse.BooleanOptionalAction, default=False,
                         help="refuse fields that have no effect, unknown ones too, which are else named in "
                              "the header x-ignored-fields (default off)")


def _add_server_options(serve: argparse.ArgumentParser) -> None:
    server = serve.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1",
                        help="(default 127.0.0.1; 0.0.0.0 is every address)")
    server.add_argument("--port", type=_port, default=8000, metavar="N",
                        help="0 takes a free one (default 8000)")
    server.add_argument("--api-key", nargs="+", action="extend", metavar="KEY", help="required by what "
                        "computes; may be several (default NV_API_KEY or VLLM_API_KEY, else none)")
    server.add_argument("--served-model-name", nargs="+", metavar="NAME",
                        help="(default: the hub's name, or the directory's name and MODEL)")
    server.add_argument("--uds", metavar="PATH", help="listen at a Unix socket instead")
    server.add_argument("--max-logprobs", type=_logprobs, default=MAX_LOGPROBS, metavar="N",
                        help="log probabilities that a request may ask for "
                             f"(default {MAX_LOGPROBS}, the most)")
    server.add_argument("--max-queue", type=whole, default=1024, metavar="N",
                        help="requests that may wait; more get 429 (default 1024)")
    server.add_argument("--max-body-bytes", type=whole, default=4 << 20, metavar="N",
                        help="of a request; a larger one gets 413 (default 4 MiB)")
    server.add_argument("--max-images", type=whole, default=256, metavar="N",
                        help="images of a request (default 256)")
    server.add_argument("--max-image-pixels", type=whole, default=1 << 27, metavar="N",
                        help="pixels of a request's images together (default 134217728)")
    server.add_argument("--max-audio-seconds", type=positive, default=7200.0, metavar="S",
                        help="seconds of a recording (default 7200)")
    for name, default, what in (("header", 10, "headers to arrive"), ("body", 30, "a body to arrive"),
                                ("request", 600, "an answer to be complete"),
                                ("drain", 30, "what runs when the server is told to stop")):
        server.add_argument(f"--{name}-timeout", type=positive, default=float(default), metavar="S",
                            help=f"seconds for {what} (default {default})")
    server.add_argument("--max-connections", type=whole, default=4096, metavar="N", help="that may be open; "
                        "more get 503 (default 4096, or what the files that a process may open leave)")
    server.add_argument("--shared-prefix-cache", action="store_true", help="requests with different API keys "
                        "share cached prefixes, and can find out by the time what others asked")
    server.add_argument("--enable-sleep-mode", action="store_true",
                        help="clients may have the model sleep: POST /sleep, /wake_up, GET /is_sleeping")
    server.add_argument("--metrics-prefix", choices=PREFIXES, default=PREFIXES[0],
                        help="of names in /metrics (default tinygrad_nv)")
    server.add_argument("--otlp-traces-endpoint", metavar="URL", help="send a trace of each request to an "
                        "OpenTelemetry collector, such as http://localhost:4318/v1/traces")
    server.add_argument("--log-interval", type=positive, default=10.0, metavar="S",
                        help="seconds between lines about the engine (default 10)")


def _add_http_options(serve: argparse.ArgumentParser) -> None:
    http = serve.add_argument_group("HTTP")
    for name, what in (("origins", "pages of other origins that browsers let use the server"),
                       ("methods", "methods that they may use"), ("headers", "headers that they may send")):
        http.add_argument(f"--allowed-{name}", type=_texts, default=("*",), metavar="JSON",
                          help=f'{what}, a JSON list (default ["*"])')
    http.add_argument("--allowed-hosts", type=_hosts, default=(), metavar="HOSTS", help="hosts that requests "
                      "may be for, besides localhost and that of --host: a list with commas, also "
                      "*.example.org, or * (a server with keys checks hosts with this option only)")
    http.add_argument("--allow-credentials", action="store_true", help="they may send cookies")
    http.add_argument("--root-path", type=_root_path, default="", metavar="PATH",
                      help="what a proxy in front takes off paths")
    for name, what in (("keyfile", "private key: serve HTTPS"), ("certfile", "certificate"),
                       ("ca-certs", "certificates that clients' are checked with")):
        http.add_argument(f"--ssl-{name}", metavar="FILE", help=f"{what}, PEM")
    http.add_argument("--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=0,
                      help="clients need no certificate (0, the default), may (1) or must have one (2)")
    http.add_argument("--enable-scale-out", action=argparse.BooleanOptionalAction, default=False,
                      help="serve /inference/v1/generate, and …/render and …/derender of completions, "
                           "conversations, messages and responses")
    http.add_argument("--enable-tokenizer-info-endpoint", action=argparse.BooleanOptionalAction,
                      default=False, help="serve /tokenizer_info: special tokens and chat template")
    http.add_argument("--enable-prompt-tokens-details", action=argparse.BooleanOptionalAction, default=False,
                      help="tell in usage how many tokens of the prompt the prefix cache had")
    http.add_argument("--uvicorn-log-level", choices=LEVELS, default="warning",
                      help="of the HTTP library's own lines (default warning)")


def _texts(text: str) -> tuple[str, ...]:
    try: found = json.loads(text)
    except (ValueError, RecursionError): found = None
    if isinstance(found, list) and all(isinstance(each, str) for each in found): return tuple(found)
    raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of strings, such as '[\"*\"]'")


def _hosts(text: str) -> tuple[str, ...]:
    found = tuple(filter(None, (each.strip() for each in text.split(","))))
    if found and all(HOST.fullmatch(each) for each in found): return found
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of hosts without ports, such as "
                                     "llm.example.org,*.example.net")


def _root_path(text: str) -> str:
    if text == "" or text.startswith("/"): return text.rstrip("/")
    raise argparse.ArgumentTypeError(f"{text!r} does not begin with /")


def _parser_name(kind: str) -> Callable[[str], str]:
    def name(text: str) -> str:
        from tinygrad_nv.server.parsers import table
        names = (table.AUTO, table.NONE, *getattr(table, kind))
        if text in names: return text
        if not text: return table.NONE      # vLLM's default
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
    return name


def _logprobs(text: str) -> int:
    """The limit of a request: MAX_LOGPROBS for more, and for -1, vLLM's word for all."""
    if text == "-1": return MAX_LOGPROBS
    if text.isascii() and text.isdigit() and len(text) < 100: return min(int(text), MAX_LOGPROBS)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, or -1")


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) < 1 << 16: return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")


def run(arguments: argparse.Namespace, directory: Path) -> NoReturn:
    """Runs the server. Ends the process when the server was told to stop."""
    try:
        from tinygrad_nv.models.whisper.config import is_whisper
        from tinygrad_nv.server import image_startup, serving, speech_startup, startup
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tinygrad_nv"): raise
        raise NVError(f"the Python package {error.name} is not installed",
                      "starlette, uvicorn, prometheus_client and llguidance, which serving needs",
                      "pip install starlette uvicorn prometheus_client llguidance") from error
    images = (directory / "model_index.json").is_file()
    module = image_startup if images else speech_startup if is_whisper(directory) else startup
    module.run(arguments, directory)
    sys.stdout.flush()
    sys.stderr.flush()
    serving.leave(0)
