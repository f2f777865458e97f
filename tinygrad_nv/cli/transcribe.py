"""`tinygrad-nv transcribe`: recordings to text, by a Whisper model.

Protocol: text, JSON or subtitles go to stdout, or with --output-dir to a file for each recording; progress
and a summary go to stderr. Of several recordings each text has its file's name above, and JSON is a line for
each. Recordings are read before the model is loaded, so that a wrong path is told at once.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad_nv.cli.model_path import find_model
from tinygrad_nv.errors import NVError, RequestError

if TYPE_CHECKING:   # importing these takes a second
    import numpy as np

    from tinygrad_nv.engine.speech.outputs import Transcription
    from tinygrad_nv.engine.speech.params import TranscriptionParams
    from tinygrad_nv.engine.speech.transcriber import Transcriber


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `transcribe`."""
    command = commands.add_parser("transcribe", help="recordings to text, with a Whisper model",
                                  usage="%(prog)s [options] --model MODEL FILE…")
    command.add_argument("files", nargs="+", type=Path, metavar="FILE",
                         help="WAV; with the package soundfile also FLAC, MP3, OGG and others")
    model = command.add_argument_group("model")
    model.add_argument("--model", "-m", metavar="MODEL", help="a directory of a Whisper model, as "
                       "transformers saves it, or a hub name such as openai/whisper-tiny")
    model.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, float16, bfloat16")
    model.add_argument("--device", help="tinygrad's device (default: its choice, or DEV)")
    model.add_argument("--max-num-seqs", type=int, default=8, metavar="N",
                       help="recordings that run at a time (default 8)")
    speech = command.add_argument_group("speech")
    speech.add_argument("--language", metavar="L",
                        help="code or English name, such as de (default: detected)")
    speech.add_argument("--task", choices=("transcribe", "translate"), default="transcribe",
                        help="translate: into English")
    speech.add_argument("--prompt", metavar="TEXT",
                        help="text that might come before, for spelling and style")
    speech.add_argument("--temperature", type=float, metavar="T", help="one temperature (0: greedy) instead "
                        "of rising ones while a window's text repeats itself or is unlikely")
    speech.add_argument("--condition-on-previous", action="store_true",
                        help="windows of 30 s continue the text of those before")
    speech.add_argument("--seed", type=int, default=0, metavar="N",
                        help="of choices at temperatures above 0 (default 0)")
    output = command.add_argument_group("output").add_mutually_exclusive_group()
    output.add_argument("--timestamps", action="store_const", dest="format", const="lines", default="text",
                        help="a line for each segment, with its times")
    for kind, what in (("json", "a JSON object with segments and figures"), ("srt", "subtitles as SubRip"),
                       ("vtt", "subtitles as WebVTT")):
        output.add_argument(f"--{kind}", action="store_const", dest="format", const=kind, help=what)
    command.add_argument("--output-dir", "-o", type=Path, metavar="DIR",
                         help="write a file for each recording, of the same name")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The command. Returns the exit code."""
    from tinygrad_nv.engine.speech.audio import read_audio
    check(arguments)
    params = params_of(arguments)
    samples = [read_audio(path) for path in arguments.files]
    transcriber = load_model(arguments)
    try:
        begun = time.perf_counter()
        made = transcribe_files(transcriber, arguments.files, samples, params)
        took_s = time.perf_counter() - begun
    finally: transcriber.close()
    for path, each in zip(arguments.files, made, strict=True): write(arguments, path, each)
    print(summary(made, took_s, transcriber.device), file=sys.stderr)
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Raises `RequestError` for options that do not fit each other."""
    if arguments.model is None:
        raise RequestError("no model is named", "--model with a directory of a Whisper model",
                           "hf download openai/whisper-tiny, then add --model openai/whisper-tiny")
    if arguments.max_num_seqs < 1:
        raise RequestError(f"--max-num-seqs is {arguments.max_num_seqs}", "at least 1")
    names = [path.stem for path in arguments.files]
    if arguments.output_dir is not None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"two recordings are called {twice}, and --output-dir gets a file for each",
                           "files of different names", "transcribe them one after the other")
    if arguments.output_dir is None and len(arguments.files) > 1 and arguments.format in ("srt", "vtt"):
        raise RequestError(f"{len(arguments.files)} recordings, and one output of subtitles",
                           "--output-dir, which gets a file for each", "add --output-dir .")


def params_of(arguments: argparse.Namespace) -> TranscriptionParams:
    """Returns the parameters that the command line asks for."""
    from tinygrad_nv.engine.speech.params import FALLBACK, TranscriptionParams
    temperatures = FALLBACK if arguments.temperature is None else (arguments.temperature,)
    return TranscriptionParams(arguments.language, arguments.task, arguments.format != "text", temperatures,
                               prompt=arguments.prompt, seed=arguments.seed,
                               condition_on_previous=arguments.condition_on_previous)


def load_model(arguments: argparse.Namespace) -> Transcriber:
    """Loads the model of the command line. `--device` becomes tinygrad's default for this process."""
    from tinygrad.helpers import DEV

    from tinygrad_nv.engine.speech.transcriber import Transcriber
    if arguments.device:
        try: DEV.value = arguments.device
        except RuntimeError as error:
            raise RequestError(f"--device {arguments.device}: {error}",
                               "a device of tinygrad, such as CPU or CUDA",
                               "run `tinygrad-nv doctor` to see what this machine has") from error
    directory = find_model(arguments.model)
    with bar(f"loading {directory.name}") as update:
        return Transcriber(directory, dtype=arguments.dtype, progress=update,
                           max_num_seqs=min(arguments.max_num_seqs, len(arguments.files)))


def transcribe_files(transcriber: Transcriber, files: Sequence[Path], samples: Sequence[np.ndarray],
                params: TranscriptionParams) -> list[Transcription]:
    """Returns the transcriptions, with a bar of seconds."""
    rate, seconds = 16000, [0.0] * len(files)
    with bar(f"transcribing {files[0].name if len(files) == 1 else f'{len(files)} files'}") as update:
        def progress(number: int, done: float, total: float) -> None:
            seconds[number] = done
            update(sum(seconds), sum(map(len, samples)) / rate)
        return transcriber.transcribe_all(samples, params, progress)


@contextmanager
def bar(title: str) -> Iterator[Callable[[float, float], None]]:
    """A bar on stderr, which is removed at the end; none if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
                  console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def write(arguments: argparse.Namespace, path: Path, made: Transcription) -> None:
    """One transcription, in the format that is asked for."""
    text = format_transcription(arguments, path, made)
    if (folder := arguments.output_dir) is None:
        if len(arguments.files) > 1 and arguments.format != "json": print(f"== {path} ==")
        print(text)
        return
    suffix = {"text": ".txt", "lines": ".txt"}.get(arguments.format, f".{arguments.format}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.with_suffix(suffix).name).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise NVError(f"{folder} cannot be written: {error.strerror}", "a directory with room",
                      "change --output-dir") from error


def format_transcription(arguments: argparse.Namespace, path: Path, made: Transcription) -> str:
    """Returns a transcription as text."""
    from tinygrad_nv.engine.speech import outputs
    from tinygrad_nv.engine.speech.outputs import segment_fields
    if arguments.format == "text": return made.text
    if arguments.format == "lines": return outputs.lines(made)
    if arguments.format in ("srt", "vtt"): return str(getattr(outputs, arguments.format)(made)).rstrip()
    found: dict[str, Any] = {
        "file": str(path), "task": arguments.task, "language": made.language,
        "duration": round(made.duration, 3), "text": made.text,
        "segments": [segment_fields(number, each) for number, each in enumerate(made.segments)]}
    return json.dumps(found, ensure_ascii=False)


def summary(made: Sequence[Transcription], took_s: float, device: str) -> str:
    """One line: how much was transcribed, and how fast."""
    seconds = sum(each.duration for each in made)
    languages = ", ".join(sorted({each.language for each in made if each.language}))
    return (f"[{seconds:.1f} s of speech in {took_s:.1f} s · {seconds / max(took_s, 1e-9):.1f} × real time"
            f"{' · ' * bool(languages)}{languages} · {device}]")
