"""Output of a run: a progress bar, lines, JSON lines, curves, TensorBoard.

Protocol: `Log(output, arguments, steps)` is a context. `step(row)` takes the figures of a step, `note(row)`
those of an evaluation. Each is a JSON object on a line of the log file, which is flushed at once, so that a
killed run loses none, and of which a resumed run drops lines after its step. On a terminal a bar shows loss,
tokens/s, norm, memory and the time that is left, by the median of later steps, as the first ones compile;
elsewhere a line is printed every few seconds. `finish`
draws curves.png; without matplotlib a line says that there is none.
"""
from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.runtime.observe.memory_report import human
from tinygrad_nv.train.arguments import TrainingArguments

CURVES = "curves.png"
COUNTED = "fp8_"        # how names of counts begin
COMPILING, RECENT = 2, 20   # steps that compile and capture; and those whose time predicts others
QUIET_S = 10.0      # between printed lines where there is no terminal


class Silent:
    """The log of a rank that shows nothing."""

    def __enter__(self) -> Silent: return self

    def __exit__(self, *ignored: object) -> None: pass

    def step(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def note(self, row: dict[str, Any], words: str) -> None:
        """Nothing."""

    def say(self, words: str) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


class Log:
    """The log of a run of `steps` steps, `first` of which are done. Raises `ConfigError` for a log file that
    cannot be written, and for --report-to tensorboard without that package."""

    def __init__(self, arguments: TrainingArguments, steps: int, first: int) -> None:
        self.arguments, self.steps = arguments, steps
        self.path = Path(arguments.log_file or Path(arguments.output_dir) / "log.jsonl")
        self.rows = _before(self.path, first)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
            self._file.writelines(json.dumps(row) + "\n" for row in self.rows)
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"--log-file {self.path}: {error.strerror}", "a file that can be written",
                              "choose another") from error
        self._seen, self._seconds = 0, list[float]()
        self._losses, self._counts = list[float](), Counter[str]()      # since the last line
        self._board, self._bar, self._printed = _board(arguments), _bar(steps, first), 0.0

    def __enter__(self) -> Log: return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._file.close()
        if self._bar is not None: self._bar[0].stop()
        if self._board is not None: self._board.close()

    def step(self, row: dict[str, Any]) -> None:
        """The figures of a step: step, loss, learning_rate, grad_norm, tokens_per_s, epoch and others. A line
        has the mean loss of the steps since the line before, as transformers has it, and what FP8 counted in
        all of them."""
        self._losses.append(row["loss"])
        self._counts.update({name: each for name, each in row.items() if name.startswith(COUNTED)})
        if row["step"] % self.arguments.logging_steps == 0 or row["step"] == self.steps:
            self._write(row | {"loss": sum(self._losses) / len(self._losses), **self._counts})
            self._losses.clear()
            self._counts.clear()
        words = (f"loss {row['loss']:.4f}  lr {row['learning_rate']:.2e}  norm {row['grad_norm']:.3f}  "
                 f"{row['tokens_per_s']:,.0f} tokens/s  {human(row['memory_bytes'])}")
        left = self._remaining(row)
        if self._bar is not None: self._bar[0].update(self._bar[1], completed=row["step"], figures=words,
                                                      left=left)
        elif time.monotonic() - self._printed > QUIET_S or row["step"] == self.steps:
            self._printed = time.monotonic()
            print(f"step {row['step']:>6}/{self.steps}  {words}  {left}".rstrip(), file=sys.stderr)

    def _remaining(self, row: dict[str, Any]) -> str:
        """The time that is left in words, "" until a step has run that compiled nothing."""
        self._seen += 1
        if self._seen > COMPILING: self._seconds = [*self._seconds[1 - RECENT:], row["seconds"]]
        if not self._seconds: return ""
        left = round((self.steps - row["step"]) * median(self._seconds))
        return f"{timedelta(seconds=left)} left"

    def note(self, row: dict[str, Any], words: str) -> None:
        """Figures of something else than a step, and words to print."""
        self._write(row)
        self.say(words)

    def say(self, words: str) -> None:
        """Prints a line."""
        if self._bar is not None: self._bar[0].console.print(words, highlight=False, markup=False)
        else: print(words, file=sys.stderr)

    def finish(self) -> None:
        """Draws the curves, or says why there are none."""
        try: _draw(self.rows, Path(self.arguments.output_dir) / CURVES)
        except ImportError: self.say(f"no {CURVES}: it needs matplotlib (pip install 'tinygrad-nv[train]')")

    def _write(self, row: dict[str, Any]) -> None:
        # JSON has no infinity, which the norm of a skipped step may be
        row = {name: None if isinstance(each, float) and not math.isfinite(each) else each
               for name, each in row.items()}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None: self._board.add_event(_event(row))


def _event(row: dict[str, Any]) -> Any:
    """Figures as TensorBoard's event."""
    of = "tensorboard.compat.proto"
    kind = import_module(f"{of}.summary_pb2").Summary
    values = [kind.Value(tag=name, simple_value=each) for name, each in row.items()
              if isinstance(each, float)]
    return import_module(f"{of}.event_pb2").Event(wall_time=time.time(), step=row["step"],
                                                  summary=kind(value=values))


def _before(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of a log up to a step; one that a killed process left unfinished is dropped."""
    rows = list[dict[str, Any]]()
    if not step or not path.is_file(): return rows
    for line in path.read_text(encoding="utf-8").splitlines():
        try: row = json.loads(line)
        except ValueError: continue
        if row.get("step", 0) <= step: rows.append(row)
    return rows


def _board(arguments: TrainingArguments) -> Any:
    """TensorBoard's writer, where it is asked for or installed."""
    if arguments.report_to == "none": return None
    try: found = import_module("tensorboard.summary.writer.event_file_writer")
    except ImportError:
        if arguments.report_to == "auto": return None
        raise ConfigError("--report-to tensorboard", "the package tensorboard",
                          "pip install 'tinygrad-nv[train]'") from None
    return found.EventFileWriter(str(Path(arguments.output_dir) / "runs"))


def _bar(steps: int, first: int) -> Any:
    """rich's bar and its task on a terminal, else None."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    console = Console(stderr=True)
    if not console.is_terminal: return None
    made = Progress(MofNCompleteColumn(), BarColumn(20), TextColumn("{task.fields[figures]}"),
                    TextColumn("{task.fields[left]}"), console=console)
    task = made.add_task("", total=steps, completed=first, figures="compiling", left="")
    made.start()
    return made, task


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Curves of loss, norm and learning rate by step."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True)
    for axis, names in zip(axes, (("loss", "eval_loss"), ("grad_norm",), ("learning_rate",)), strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points: axis.plot(*zip(*points, strict=True), label=name, linewidth=1)
        axis.set_ylabel(names[0].replace("_", " "))
        axis.grid(alpha=0.3)
        if len(axis.lines) > 1: axis.legend()
    axes[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
