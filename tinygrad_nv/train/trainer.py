"""The loop over steps: data, step, log, evaluation, checkpoints, and the trained model at the end.

Protocol: `train(run)` goes on from the checkpoint that the arguments name, or begins. After each step the
state of the run is in tensors (`Run.tensors`) and in JSON (the number of steps, where the data are), both of
which a checkpoint has: a run that goes on has the same bits as one that never stopped. Ctrl-C saves a
checkpoint and ends.

Several ranks (ranks.py) all run the loop, and take each decision on the same figures. Rank 0 logs, and writes
the model.

A step whose gradients are not finite changes nothing, and is said. A loss that is NaN ends the run with the
first layer that made it (`TrainingError`), and leaves the last checkpoint as it is.
"""
from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import GlobalCounters

from tinygrad_nv.errors import CheckpointError, TrainingError
from tinygrad_nv.functional import embedding
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.runtime.memory import write
from tinygrad_nv.train import checkpoints
from tinygrad_nv.train.adapter import ALL
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.checkpoints import CheckpointWriter
from tinygrad_nv.train.data import Loader, LoaderOptions, SamplerState
from tinygrad_nv.train.data import Step as DataStep
from tinygrad_nv.train.export import save_adapter, save_pretrained
from tinygrad_nv.train.log import Log, Silent
from tinygrad_nv.train.optimizers import ScheduleOptions, schedule
from tinygrad_nv.train.ranks import OneRank, Stopped
from tinygrad_nv.train.run import Run
from tinygrad_nv.train.step import LOSS, StepResult

LATEST = "latest"


@dataclass(frozen=True)
class Trained:
    """Result of a run: the directory of the model or adapter, the last loss, the evaluation's, seconds."""
    directory: Path
    steps: int
    loss: float
    eval_loss: float | None
    seconds: float


@dataclass
class Progress:
    """Position of a run: steps done, and where its data are."""
    step: int
    data: SamplerState | None

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"step": self.step, "data": None if self.data is None else self.data.to_json()}


def train(run: Run) -> Trained:
    """Runs all steps that are left. Raises `TrainingError`, `CheckpointError`, `ConfigError`."""
    arguments, ranks, begun = run.arguments, run.ranks, time.perf_counter()
    output = Path(arguments.output_dir)
    with ranks.first_before_others("output"):
        if ranks.first: _require_new(arguments, ranks, output)
    loop = _Loop(run)
    with CheckpointWriter(output, run=run.identity, keep=arguments.save_total_limit, rank=ranks.rank,
                          ranks=ranks.size, barrier=lambda: ranks.barrier("checkpoint"),
                          asynchronous=arguments.save_asynchronous) as writer:
        at = _resume(run, output)
        with Log(arguments, run.steps, at.step) if ranks.first else Silent() as log:
            loop.run(at, writer, log)
            log.finish()
    with run.parts.save(run.model) as model:
        made = _export(run, model, output) if ranks.first else output
    ranks.barrier("trained")
    return Trained(made, run.steps, loop.loss, loop.eval_loss, time.perf_counter() - begun)


class _Loop:
    """The steps of a run."""

    def __init__(self, run: Run) -> None:
        a = run.arguments
        self.run_ = run
        self.step = run.step()
        options = ScheduleOptions(min_lr_rate=a.min_lr_rate, decay_steps=a.lr_decay_steps)
        self.factor = schedule(a.lr_scheduler_type, run.steps, a.warmup(run.steps), options)
        self.loss, self.eval_loss = math.nan, None if run.evaluation is None else math.nan
        self._samples: Continuation | None = None

    def run(self, at: Progress, writer: CheckpointWriter, log: Log | Silent) -> None:
        """Runs the steps that are left."""
        run, a = self.run_, self.run_.arguments
        options = run.loader_options()
        several = f" over {run.ranks.size} ranks" if run.ranks.size > 1 else ""
        log.say(f"{run.parameters:,} parameters to train{several}; {run.data.summary}; steps "
                f"{at.step + 1} to {run.steps}")
        log.say(f"{a.recipe}" + ("" if run.fp8 is None else f"; {run.fp8}"))
        self.step.done = at.step
        with Loader(run.data, options, at.data) as loader, run.ranks.stoppable():
            try:
                while at.step < run.steps:
                    data = next(loader)
                    epochs = data.before.epoch, data.state.epoch
                    self._take(data, at, log)
                    last = at.step == run.steps
                    if last or (a.eval_steps and at.step % a.eval_steps == 0): self._evaluate(at.step, log)
                    if _saves(a, at.step, epochs, last):
                        writer.save(at.step, run.own_tensors(), at.to_json())
            except Stopped:
                if not at.step: raise
                writer.save(at.step, run.own_tensors(), at.to_json())
                log.say(f"stopped after step {at.step}; --resume-from-checkpoint latest goes on")
                raise

    def _take(self, data: DataStep, at: Progress, log: Log | Silent) -> None:
        run, begun = self.run_, time.perf_counter()
        rate = run.arguments.learning_rate * self.factor(at.step)
        own = sum(run.objective.count(batch) for batch in data.batches)
        count, tokens = run.ranks.begin(np.array([own, data.tokens], np.float64))
        run.optimizer.set_lr(rate)
        result = self.step(data.batches, int(count))
        if math.isnan(result.loss): self._stop(at.step + 1)
        at.step, at.data, self.loss = at.step + 1, data.state, result.loss
        seconds = time.perf_counter() - begun
        log.step({"step": at.step, "loss": result.loss, "grad_norm": result.grad_norm, "learning_rate": rate,
                  "epoch": round(data.epoch, 4), "tokens_per_s": tokens / seconds, "seconds": seconds,
                  "memory_bytes": GlobalCounters.mem_used, **result.means, **result.precision,
                  **({"skipped": True} if result.skipped else {})})
        if result.skipped: log.say(_skip(at.step, result))

    def _stop(self, step: int) -> None:
        """Raises `TrainingError` for a loss that is NaN, which another rank's rows may have made."""
        own = self.step.first_bad(self.run_.arguments.packing)
        found = self.run_.ranks.gather_texts("not finite", own)
        layer = next((each for each in found if each != LOSS), LOSS)
        raise TrainingError(f"the loss of step {step} is NaN; the first layer with a value that is not "
                            f"finite is {layer}", "finite values",
                            "lower --learning-rate or --max-grad-norm, and go on with "
                            "--resume-from-checkpoint latest")

    def _evaluate(self, step: int, log: Log | Silent) -> None:
        run, a = self.run_, self.run_.arguments
        if run.evaluation is not None:
            found = self._evaluate_all()
            self.eval_loss = float(found[0])
            row = {"step": step, "eval_loss": self.eval_loss,
                   **{f"eval_{name}": float(each) for name, each
                      in zip(run.objective.names, found[1:], strict=True)}}
            log.note(row, f"step {step}: evaluation loss {self.eval_loss:.4f}")
        for prompt in a.sample_prompts:
            text = self._sample(prompt)
            log.note({"step": step, "prompt": prompt, "sample": text}, f"step {step}: {prompt}{text}")

    def _evaluate_all(self) -> np.ndarray:
        """Means over the evaluation's data, of which each rank has its batches."""
        run, a, ranks = self.run_, self.run_.arguments, self.run_.ranks
        assert run.evaluation is not None
        rank, size = ranks.place.data, ranks.layout.data
        options = LoaderOptions(a.per_device_train_batch_size, 1, rank, size, shuffle=False, epochs=1)
        found = np.zeros(2 + len(run.objective.names))      # the last: what is counted
        with Loader(run.evaluation, options) as loader:
            for number, data in enumerate(loader):
                if a.eval_batches and number * size + rank >= a.eval_batches: break
                found[:-1] += self.step.evaluate(data.batches[0])
                found[-1] += run.objective.count(data.batches[0])
        if not ranks.layout.counts(ranks.rank): found[-1] = 0
        *sums, counted = ranks.sum_losses(found)
        return np.array(sums) / max(counted, 1)

    def _sample(self, prompt: str) -> str:
        run = self.run_
        assert run.tokenizer is not None, "run.py requires one"
        if self._samples is None: self._samples = Continuation(run.model, run.data.width)
        ids = run.tokenizer.encode(prompt)
        with run.parts.present():
            made = self._samples(ids, run.arguments.sample_tokens, run.model.config.eos_token_ids)
        return run.tokenizer.decode([*ids, *made])[len(run.tokenizer.decode(ids)):]


def _skip(step: int, result: StepResult) -> str:
    return f"step {step} changed nothing: the norm of its gradients is {result.grad_norm}"


def _saves(arguments: TrainingArguments, step: int, epochs: tuple[int, int], last: bool) -> bool:
    if last: return arguments.save_strategy != "no"
    if arguments.save_strategy == "steps": return step % arguments.save_steps == 0
    return arguments.save_strategy == "epoch" and epochs[0] != epochs[1]


def _require_new(arguments: TrainingArguments, ranks: OneRank, output: Path) -> None:
    """Raises `CheckpointError` for checkpoints that nothing was said of."""
    if arguments.resume_from_checkpoint is not None or ranks.is_restarted or not output.is_dir(): return
    if not (found := sorted(output.glob("checkpoint-*"))): return
    if not arguments.overwrite_output_dir:
        raise CheckpointError(f"{output} has {found[-1].name} of another run", "an empty directory",
                              "go on with --resume-from-checkpoint latest, begin anew with "
                              "--overwrite-output-dir, or choose another --output-dir")
    for each in found: shutil.rmtree(each)


def _resume(run: Run, output: Path) -> Progress:
    """The state of the checkpoint that the arguments name, or of the last where ranks were started again."""
    found, ranks = _checkpoint(run, output), run.ranks
    steps = set(ranks.gather_texts("checkpoint", "none" if found is None else str(found.step)))
    if len(steps) > 1:
        raise CheckpointError(f"ranks see other checkpoints in {output}: {', '.join(sorted(steps))}",
                              "one directory for all ranks", "choose an --output-dir that all hosts share")
    if found is None: return Progress(0, None)
    found.restore(run.tensors(), run.cut())
    if changed := run.parts.gather(): Tensor.realize(*changed)
    state = found.state if isinstance(found.state, dict) else {}
    if type(step := state.get("step")) is not int or "data" not in state:
        raise CheckpointError(f"{found.path} has no state of a training run", '"step" and "data"',
                              "resume from another checkpoint")
    return Progress(step, SamplerState.from_json(state["data"]))


def _checkpoint(run: Run, output: Path) -> checkpoints.Checkpoint | None:
    """The one that the run goes on from."""
    asked, ranks = run.arguments.resume_from_checkpoint, run.ranks
    latest = asked in (LATEST, "true", "True")      # transformers takes True
    if latest or ranks.is_restarted:
        found = checkpoints.load_latest(output, run=run.identity, rank=run.keeper, ranks=ranks.size)
        if found is not None: return found
    if asked is None or latest: return None
    return checkpoints.load(asked, run=run.identity, rank=run.keeper, ranks=ranks.size)


def _export(run: Run, model: Llama, output: Path) -> Path:
    """Writes the trained model, or the adapter."""
    if run.adapter is None: return save_pretrained(model, output, run.directory)
    options = run.adapter.options
    return save_adapter(output, run.adapter.matrices(), options.rank, options.alpha, rslora=options.rslora,
                        target_modules=ALL if ALL in options.targets else options.targets,
                        dropout=options.dropout,
                        base_model=str(run.directory))


class Continuation:
    """Continues token ids by the likeliest tokens, in rows of `width` tokens: computes all of the row again
    for each token, slow, and without a cache beside the training state."""

    def __init__(self, model: Llama, width: int) -> None:
        self.model, self.width = model, width
        self.ids = Tensor.zeros(1, width, dtype=dtypes.int32, device=model.device).contiguous().realize()
        self.place = Tensor.zeros(1, dtype=dtypes.int32, device=model.device).contiguous().realize()
        self._next = TinyJit(self._likeliest)

    def __call__(self, ids: list[int], count: int, ends: tuple[int, ...]) -> list[int]:
        """At most `count` tokens after `ids`, up to one of `ends`."""
        made = list(ids[-(self.width - 1):])
        begin = len(made)
        while len(made) < self.width and len(made) - begin < count:
            row = np.zeros(self.width, np.int32)
            row[:len(made)] = made
            write(self.ids, 0, row.data.cast("B"))
            write(self.place, 0, np.array([len(made) - 1], np.int32).data.cast("B"))
            made.append(int(self._next().item()))
            if made[-1] in ends: break
        return made[begin:]

    def _likeliest(self) -> Tensor:
        hidden = self.model.hidden_states(self.ids)[0]
        return self.model.logits(embedding(hidden, self.place)).argmax(-1).realize()
