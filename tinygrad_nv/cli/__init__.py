"""`tinygrad-nv`: generate, chat, serve, run-batch, train, bench, doctor, explain, ptx, tune, plan, quantize,
shapes, replay, launch, compile, bundle, transcribe, image, onnx, completion.

Protocol: only generated text goes to stdout, as it is generated; progress, notes and errors go to stderr. An
`NVError` prints its message and exits with 2, Ctrl-C exits with 130, a closed pipe exits quietly.
"""
from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tinygrad_nv import collection, config, interrupt, models
from tinygrad_nv.cli import vllm_options
from tinygrad_nv.cli.engine_options import add_engine_options, add_lora_option, choose_model, size
from tinygrad_nv.cli.model_path import find_model
from tinygrad_nv.cli.option_file import with_file
from tinygrad_nv.cli.sampling_options import add_sampling_options, token_ids
from tinygrad_nv.errors import ModelError, NVError, RequestError
from tinygrad_nv.version import versions

DEFAULT_MODEL = Path(models.__file__).parent / "tales"
COMMANDS = ("generate", "chat", "serve", "run-batch", "train", "bench", "doctor", "explain", "ptx", "tune",
            "plan", "quantize", "shapes", "replay", "launch", "compile", "bundle", "transcribe", "image",
            "onnx", "completion")
WORD = 400      # characters of a word of an error, as a path may have


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    _survive_any_terminal()
    try: return _main(argv)
    finally: interrupt.ending()


def _main(argv: Sequence[str] | None) -> int:
    try:
        interrupt.ready()
        try:
            arguments = parse_arguments(argv)
            # these load a model first
            if arguments.argv[:1] not in (["generate"], ["chat"]): collection.as_usual()
            return int(arguments.run(arguments))
        finally: sys.stdout.flush()  # inside the try, so that its errors are reported
    except NVError as error: return _say_error(error)
    except KeyboardInterrupt:
        interrupt.forget_interrupt()
        print(file=sys.stderr)
        interrupt.leave()
        return 130
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        return _say_error(NVError(f"the system refused: {error}",
                                  "files that can be read, output that can be written",
                                  "check permissions and free space"))
    except (RecursionError, OverflowError, UnicodeError) as error:
        return _say_error(NVError(f"what was given is too deep, too large or no text: {str(error)[:300]}",
                                  "files and options of ordinary sizes, in UTF-8", "check files and options"))
    except MemoryError:
        return _say_error(NVError("out of memory",
                                  "room for weights, for the cache of the whole context and for --swap-space",
                                  "lower --max-model-len or --swap-space, or use --dtype bfloat16"))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments of a command line, and the line itself as `argv`; settings that it asks for are
    this process's from now on. argparse takes all positional arguments from one place; here PROMPT may also
    follow options that follow MODEL."""
    words = list(sys.argv[1:] if argv is None else argv)
    top = parser(words[0] if words and words[0] in COMMANDS else None)
    if words[:1] == ["bench"]: words = _module("bench").add_bench_name(words)
    words, model = vllm_options.normal(words), None
    if words[:1] == ["train"]: words = _module("train").with_switches(words)
    if (command := _command(top, words)) is not None: words, model = with_file(command, words)
    arguments, rest = top.parse_known_args(words)
    if model is not None and arguments.named is None and getattr(arguments, "model", None) is None:
        arguments.named = model
    options_end = rest.index("--") if "--" in rest else len(rest)
    if rest and (not hasattr(arguments, "words") or any(word.startswith("-") for word in rest[:options_end])):
        arguments.command.error(f"unrecognized arguments: {' '.join(rest)}"
                                + vllm_options.nearest(arguments.command, rest))
    if rest: arguments.words += rest[:options_end] + rest[options_end + 1:]
    arguments.argv = words
    if getattr(arguments, "deterministic", False): config.keep("NV_DETERMINISTIC", 1)
    return arguments


def _say_error(error: NVError) -> int:
    print(f"tinygrad-nv: {_brief(str(error))}", file=sys.stderr)
    return error.exit_code


def _brief(text: str) -> str:
    """A message, in which long words, such as a number of thousands of digits, keep their beginning."""
    return re.sub(rf"(\S{{{WORD}}})\S+", r"\1…", text)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors quote the beginning of long words."""

    def error(self, message: str) -> NoReturn: super().error(_brief(message))


def _drop_output() -> None:
    """Redirects stdout to nowhere: the interpreter's last flush would fail on the closed pipe."""
    with contextlib.suppress(OSError): os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _survive_any_terminal() -> None:
    """Escapes characters that the terminal cannot show, and decodes invalid bytes as U+FFFD, instead of
    raising. A stream that was closed at startup becomes an empty one."""
    sys.stdin, sys.stdout, sys.stderr = (
        open(os.devnull, mode) if stream is None else stream  # noqa: SIM115 (for as long as the process lives)
        for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w")))
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"),
                           (sys.stderr, "backslashreplace")):
        with contextlib.suppress(AttributeError, ValueError): stream.reconfigure(errors=errors)  # type: ignore[union-attr]


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The command line; with `only` that of one command, of which alone modules are loaded."""
    directory = "a model directory, a GGUF file or a hub name (default: the bundled model)"
    top: argparse.ArgumentParser = _Parser(prog="tinygrad-nv",
                                           description="Run transformers with tinygrad, fast on NVIDIA.")
    top.add_argument("--version", action=_Version, nargs=0, help="show versions and exit")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS if only is None else [only]: _add(name, commands, directory)
    _know_themselves(commands)
    return top


def _command(top: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser | None:
    """The parser of the command that the words begin with."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction): return action.choices.get((words or [""])[0])
    return None


def _know_themselves(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Has each command say which it is, the innermost one last: an error shows its usage."""
    for each in commands.choices.values():
        each.set_defaults(command=each)
        each.register("type", int, _whole)
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction): _know_themselves(action)


def _whole(text: str) -> int:
    """The number of an option of type int. Raises `ArgumentTypeError` for one that no 64 bits hold."""
    if len(text) < 4096 and -1 << 63 <= (number := int(text)) < 1 << 63: return number
    raise argparse.ArgumentTypeError(f"{text[:40]}… is no number of 64 bits")


def _add(name: str, commands: argparse._SubParsersAction[argparse.ArgumentParser], directory: str) -> None:
    """Adds a command."""
    match name:
        case "generate": _add_generate(commands, directory)
        case "chat": _add_chat(commands, directory)
        case "serve" | "run-batch":
            module = _module(name.replace("-", "_"))
            module.add_command(commands, directory, _model)
        case "compile": _module(name).add_command(commands, directory, _model, size)
        case "bench" | "explain":
            _module(name).add_command(commands, directory, _model)
        case "doctor":
            commands.add_parser("doctor", help="check this machine: what is found, used and missing"
                                ).set_defaults(run=_doctor)
        case "ptx":
            from tinygrad_nv.host import command as host
            from tinygrad_nv.ptx import command as ptx
            host.add_command(ptx.add_commands(commands))
        case "tune" | "plan" | "launch" | "shapes" | "bundle" | "transcribe" | "image":
            _module(name).add_command(commands)
        case "replay": _module(name).add_command(commands, parse_arguments)
        case "quantize" | "train" | "onnx": _module(name).add_command(commands, "a model directory")
        case "completion":
            completion = commands.add_parser(name, help="a script that completes commands and options")
            completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="such as: source "
                                    "<(tinygrad-nv completion bash)")
            completion.set_defaults(run=_completion)


def _module(name: str) -> Any:
    """The module of a command. (Loading those of all commands takes half a second.)"""
    return importlib.import_module(f"tinygrad_nv.cli.{name}")


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser], directory: str) -> None:
    generate = commands.add_parser("generate", help="continue a prompt",
                                   usage="%(prog)s [options] [MODEL] PROMPT")
    generate.add_argument("words", nargs="*", metavar="[MODEL] PROMPT",
                          help=f"{directory} and the text to continue")
    generate.add_argument("--prompt-ids", type=token_ids, metavar="1,2,3", help="token ids instead of a text")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    generate.add_argument("--trace", type=Path, metavar="FILE", help="time every kernel on its own: a Chrome "
                          "trace to FILE, a table to stderr (slower)")
    generate.add_argument("--record", type=Path, metavar="LOG", help="write what each kernel reads and "
                          "writes, by hashes, for `tinygrad-nv replay LOG` (slower)")
    add_lora_option(add_engine_options(generate, None))
    add_sampling_options(generate, answers=True)
    vllm_options.add_options(generate)
    generate.set_defaults(run=_generate)


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser], directory: str) -> None:
    chat = commands.add_parser("chat", help="talk to a model", usage="%(prog)s [options] [MODEL]")
    chat.add_argument("model", nargs="?", metavar="MODEL", help=directory)
    chat.add_argument("--system", metavar="TEXT", help="a system message")
    add_lora_option(add_engine_options(chat, None))
    add_sampling_options(chat, answers=False)
    vllm_options.add_options(chat)
    chat.add_argument("--markdown", action=argparse.BooleanOptionalAction,
                      help="render Markdown (default: on a terminal)")
    chat.set_defaults(run=_chat)


class _Version(argparse.Action):
    """Shows this package's version and tinygrad's. (Looking the latter up takes 0.1 s, which no other command
    shall wait for.)"""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(versions())
        parser.exit()


def _split_words(arguments: argparse.Namespace) -> tuple[Path, str]:
    """MODEL, or --model, and PROMPT from the positional arguments."""
    words, with_ids = arguments.words, arguments.prompt_ids is not None
    most = (1 if with_ids else 2) - (arguments.named is not None)
    if len(words) > most or (not words and not with_ids):
        raise RequestError(f"{len(words)} positional arguments",
                           "[MODEL] with --prompt-ids, else [MODEL] PROMPT",
                           "put the prompt in quotes")
    if not with_ids and len(words) == 1 and (
            os.path.isfile(os.path.join(words[0], "config.json"))
            or (words[0].endswith((".gguf", ".tnv")) and os.path.isfile(words[0]))):
        raise RequestError(f"{words[0]} is a model, and no prompt follows it", "[MODEL] PROMPT",
                           "add the text to continue, in quotes")
    if not with_ids and not words[-1]:
        raise RequestError("the prompt is empty", "at least one character", "write a prompt")
    model = words[0] if arguments.named is None and len(words) == most else arguments.named
    return _model(model, arguments.download), "" if with_ids else words[-1]


def _model(name: str | None, download: bool = False) -> Path:
    if name is None and not (DEFAULT_MODEL / "config.json").is_file():
        raise ModelError(f"the bundled model is not at {DEFAULT_MODEL}",
                         "an installation with its model files",
                         "reinstall tinygrad-nv, or name a model directory")
    return DEFAULT_MODEL if name is None else find_model(name, download)


def _generate(arguments: argparse.Namespace) -> int:
    from tinygrad_nv.cli import console
    from tinygrad_nv.cli.console import adapter
    from tinygrad_nv.cli.replay import Region
    directory, prompt = _split_words(arguments)
    request = prompt if arguments.prompt_ids is None else arguments.prompt_ids
    region = Region(arguments)
    with console.tracing(arguments.trace) as recorded, region.whole():
        llm = console.load(directory, arguments)
        params, lora = console.sampling(arguments, llm), adapter(arguments)
        if (params.logprobs, params.prompt_logprobs) != (None, None) and not arguments.json:
            raise RequestError("log probabilities are asked for as text", "--json, which has them",
                               "add --json")
        ids = llm.tokenize(request)  # raises for a bad prompt before anything is compiled
        console.compile_steps(llm, params, len(ids))
        if arguments.json:
            with recorded(), region(): done = region.answer(llm.complete(ids, params, lora_request=lora))
            print(json.dumps(console.report(done, llm)))
            return 0
        with recorded(), region():
            if params.n == 1:
                console.say(prompt, end="")
                done = region.answer(llm.complete(ids, params, lambda piece: console.say(piece.text, end=""),
                                                  lora_request=lora))
                console.say("")
            else:
                done = region.answer(llm.complete(ids, params, lora_request=lora))
                for each in done.outputs: console.say(prompt + each.text)
        print(console.summary(done, llm), file=sys.stderr)
        return 0


def _chat(arguments: argparse.Namespace) -> int:
    from tinygrad_nv.cli import chat
    return chat.run(arguments, _model(choose_model(arguments), arguments.download))


def _completion(arguments: argparse.Namespace) -> int:
    from tinygrad_nv.cli import completion
    print(completion.script(parser(), arguments.shell), end="")
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from tinygrad_nv.cli import doctor
    findings = doctor.examine()
    print(doctor.table(findings))
    return 0 if doctor.usable(findings) else 1

