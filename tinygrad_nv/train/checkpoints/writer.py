"""Checkpoints, written beside the steps of a training run.

Protocol: `CheckpointWriter.save(step, tensors, state)` waits for the checkpoint before, copies the tensors to
host memory, and returns; a thread then writes them. Steps may change the tensors at once. What goes wrong in
the thread is raised by the next call of `save`, `wait` or `close`: a `CheckpointError`, or what `barrier`
raised. The checkpoint that failed is taken away, those before it are as they were, and the writer can be
used again.

A process that is killed while a checkpoint of step N is written resumes from the one before: as `save` waits,
it loses at most one interval before N. With `asynchronous=False`, `save` returns when the checkpoint is on
the disk.

Several ranks: all call `save` for the same steps, with one directory that all of them see. Each writes the
tensors that it passes, in files of its own; what all ranks have, one alone should pass. `barrier()` returns
when every rank has called it. It is called three times a checkpoint, in the thread, by every rank, also by
one that failed: it must not disturb collectives of a step (`Store.barrier` does not).
"""
from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tinygrad import Tensor

from tinygrad_nv.errors import CheckpointError
from tinygrad_nv.train.checkpoints import folder
from tinygrad_nv.train.checkpoints.folder import require_same_run, to_plain_json
from tinygrad_nv.train.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    Part,
    StoredTensor,
    part_from_json,
    part_to_json,
    to_json,
)
from tinygrad_nv.train.checkpoints.snapshot import Snapshot
from tinygrad_nv.train.files import (
    FileRecord,
    Source,
    make_folder,
    refusal,
    shards,
    write_file,
    write_tensors,
)

SHARD_BYTES = 5 * 10 ** 9   # of a file, as transformers has it
Phase = Callable[[], None]


@dataclass(frozen=True)
class Job:
    """A checkpoint to be written: `state` and `run` are JSON."""
    step: int
    tensors: Mapping[str, Source]
    state: Any

    @property
    def nbytes(self) -> int: return sum(source.nbytes for source in self.tensors.values())


class CheckpointWriter:
    """Writes the checkpoints of one training run to `directory`, and keeps the `keep` newest.

    `run` is what a run must have in common with another to go on with its checkpoints, as JSON: it is refused
    if a checkpoint in the directory has another. Files have at most `shard_bytes` bytes of tensors, unless
    one tensor has more. Raises `CheckpointError` for a directory that cannot be written, that another process
    writes to, or that has checkpoints of another run.
    """

    def __init__(self, directory: str | Path, *, run: Mapping[str, Any] | None = None, keep: int = 2,
                 shard_bytes: int = SHARD_BYTES, asynchronous: bool = True, rank: int = 0, ranks: int = 1,
                 barrier: Callable[[], None] | None = None) -> None:
        if keep < 1 or shard_bytes < 1 or not 0 <= rank < ranks or (ranks > 1 and barrier is None):
            raise CheckpointError(f"keep is {keep}, shard_bytes {shard_bytes}, rank {rank} of {ranks}, "
                                  f"barrier {barrier}", "keep ≥ 1, shard_bytes ≥ 1, 0 ≤ rank < ranks; of "
                                  "several ranks a barrier", "correct the arguments")
        self.directory, self.keep, self.shard_bytes = Path(directory), keep, shard_bytes
        self.rank, self.ranks, self.asynchronous = rank, ranks, asynchronous
        self.run = to_plain_json({} if run is None else run, "run")
        self._barrier = barrier or (lambda: None)
        self._snapshot, self._lock = Snapshot(), None if rank else self._open()
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._pending: Future[Path] | None = None

    def _open(self) -> folder.Lock:
        """The lock of a directory that is there, and has nothing of killed processes."""
        try:
            make_folder(self.directory)
            lock = folder.Lock(self.directory)
            try:
                require_same_run(self.directory, self.run)
                folder.sweep(self.directory)
            except BaseException:
                lock.release()
                raise
        except OSError as error: raise refusal(self.directory, error) from error
        return lock

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Writes a checkpoint of a step: tensors by name, bit for bit, and `state`, which is JSON: objects
        with names as keys, lists, strings, numbers, booleans and None. One of the same step is replaced when
        the new one is whole. Raises `CheckpointError`: of the checkpoint before, or of arguments."""
        self.wait()
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"step is {step!r}", "a number of steps, 0 or more", "pass that")
        plain = to_plain_json(state, "state")
        job = Job(step, self._snapshot.take(tensors), plain)
        self._pending = self._thread.submit(self._write, job)
        if not self.asynchronous: self.wait()

    def wait(self) -> Path | None:
        """Returns when the last checkpoint is on the disk: its directory, None if none was begun since the
        last `wait`. Raises what its thread met."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Waits for the last checkpoint. Raises what its thread met."""
        try: self.wait()
        finally:
            self._thread.shutdown()
            if self._lock is not None: self._lock.release()

    def __enter__(self) -> CheckpointWriter: return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try: self.close()
        except Exception as other:
            if error is None: raise
            error.add_note(f"the last checkpoint was not written, too: {other}")

    # **** in the thread ****

    def _write(self, job: Job) -> Path:
        failure: Exception | None = None
        for phase in (self._begin, self._write_part, self._commit):
            try:
                if failure is None: phase(job)
            except OSError as error:
                failure = refusal(Path(error.filename or self.directory), error, job.nbytes)
                failure.__cause__ = error
            except Exception as error: failure = error
            self._barrier()     # ranks that wait for this one find out after it
        if failure is not None: self._clean(job)
        if failure is None and self.rank and not (folder.final(self.directory, job.step) / MANIFEST).exists():
            failure = CheckpointError(f"rank 0 did not finish {folder.final(self.directory, job.step)}",
                                      "a checkpoint of all ranks", "see the error of rank 0")
        if failure is not None: raise failure
        return folder.final(self.directory, job.step)

    def _begin(self, job: Job) -> None:
        """Makes an empty folder."""
        if self.rank: return
        make_folder(self.directory)
        path = folder.partial(self.directory, job.step)
        if path.exists(): shutil.rmtree(path)
        os.mkdir(path)

    def _write_part(self, job: Job) -> None:
        """Writes this rank's files, then what they are."""
        path, files, tensors = folder.partial(self.directory, job.step), dict[str, FileRecord](), \
            dict[str, StoredTensor]()
        found = shards(job.tensors, self.shard_bytes)
        for number, sources in enumerate(found, 1):
            name = f"rank-{self.rank:05}-{number:05}-of-{len(found):05}.safetensors"
            files[name], placed = write_tensors(path / name, sources)
            tensors |= {tensor: StoredTensor(name, each.dtype, each.shape, each.offset)
                        for tensor, each in placed.items()}
        part = Part(self.rank, job.state, files, tensors)
        write_file(path / _part_name(self.rank), (part_to_json(part).encode(),))

    def _commit(self, job: Job) -> None:
        """Joins the parts of all ranks, gives the checkpoint its name, and removes older ones."""
        if self.rank: return
        path = folder.partial(self.directory, job.step)
        names = [path / _part_name(rank) for rank in range(self.ranks)]
        if lacking := [str(rank) for rank, name in enumerate(names) if not name.exists()]:
            raise CheckpointError(f"rank {', '.join(lacking)} wrote no part of checkpoint {job.step}",
                                  f"{self.directory} is one directory for all ranks, with room for all parts",
                                  "see the errors of these ranks")
        parts = tuple(part_from_json(json.loads(name.read_text(encoding="utf-8"))) for name in names)
        for name in names: name.unlink()
        write_file(path / MANIFEST, (to_json(Manifest(job.step, self.run, parts)).encode(),))
        folder.commit(self.directory, job.step)
        folder.rotate(self.directory, self.keep, job.step)

    def _clean(self, job: Job) -> None:
        """Gives back the space of a checkpoint that failed."""
        if self.rank: return
        with contextlib.suppress(OSError): shutil.rmtree(folder.partial(self.directory, job.step))


def _part_name(rank: int) -> str: return f"rank-{rank:05}.json"


def save(directory: str | Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any],
         keep: int = 2, run: Mapping[str, Any] | None = None) -> Path:
    """One checkpoint, on the disk when this returns: its directory. As `CheckpointWriter` writes it."""
    with CheckpointWriter(directory, run=run, keep=keep, asynchronous=False) as writer:
        writer.save(step, tensors, state)
    return folder.final(Path(directory), step)
