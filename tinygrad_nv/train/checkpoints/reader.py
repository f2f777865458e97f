"""The newest checkpoint that is whole, and its tensors.

Protocol: `load_latest(directory)` reads every file of the newest checkpoint and compares it with its hash.
One that is damaged or incomplete is skipped, and reported: a warning, and in `Checkpoint.skipped`. If there
are checkpoints and none is whole it raises, so that no run begins anew by mistake. `load(path)` opens one,
and raises if it is not whole. `Checkpoint.restore(tensors)` compares all names, shapes and dtypes before it
writes the first byte, then writes into the memory that the tensors have: steps that were captured with them
go on with what is there then.

Several ranks: a rank that resumes with as many ranks as wrote the checkpoint gets its own part, and what
another rank alone passed. With another number of ranks every name must be in one part alone, but for those
that `restore` knows to be cut: vectors of which rank r has the r-th of equal parts, the last ones with
elements of nothing at their end. They are read from the parts of all ranks that wrote them.
"""
from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinygrad import Tensor

from tinygrad_nv.errors import CheckpointError
from tinygrad_nv.models.checkpoint import ITEM_BYTES
from tinygrad_nv.runtime.memory import host_bytes, write
from tinygrad_nv.train.checkpoints.folder import list_checkpoints, require_run, to_plain_json
from tinygrad_nv.train.checkpoints.manifest import Manifest, StoredTensor, incomplete, verify
from tinygrad_nv.train.checkpoints.snapshot import dtype_of, has_memory, shape_of
from tinygrad_nv.train.files import CHUNK

MODEL = "resume with the model and the optimizer that wrote it"


class CheckpointWarning(UserWarning):
    """A checkpoint was skipped."""


@dataclass(frozen=True)
class Section:
    """Some elements of a stored vector, and the byte of a tensor from which on they belong."""
    stored: StoredTensor
    first: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose hashes are right. `skipped` are the newer ones that are not whole."""
    path: Path
    manifest: Manifest
    rank: int = 0
    ranks: int = 1
    skipped: tuple[CheckpointError, ...] = ()

    @property
    def step(self) -> int: return self.manifest.step

    @property
    def state(self) -> Any:
        """The state that this rank saved; with another number of ranks that of rank 0."""
        return self.manifest.parts[self.rank if self._same_ranks else 0].state

    @property
    def _same_ranks(self) -> bool: return len(self.manifest.parts) == self.ranks

    def _read_stored(self, name: str) -> StoredTensor | None:
        """A tensor as this rank sees it. Raises `CheckpointError` for one that several ranks have."""
        own = self.manifest.parts[self.rank].tensors if self._same_ranks else {}
        if name in own: return own[name]
        found = [part.tensors[name] for part in self.manifest.parts if name in part.tensors]
        if len(found) > 1:
            raise CheckpointError(f"{self.path}: {len(found)} ranks have a {name} of their own",
                                  f"as many ranks as wrote it, {len(self.manifest.parts)}",
                                  "resume with that number of ranks")
        return found[0] if found else None

    def _surplus(self, tensors: Mapping[str, Tensor]) -> str | None:
        """A name of this rank's that is not asked for."""
        parts = self.manifest.parts
        mine = [parts[self.rank]] if self._same_ranks else [*parts] if self.ranks == 1 else []
        return next((name for part in mine for name in part.tensors if name not in tensors), None)

    def restore(self, tensors: Mapping[str, Tensor], cut: Mapping[str, int] | None = None) -> None:
        """Writes the checkpoint's tensors into these, by name. `cut` has the elements of whole vectors of
        which ranks have parts, by name; what is behind them in the last parts stays. Raises
        `CheckpointError` that names the first that differs, before anything is written: one that is missing
        on either side, of another shape or dtype, or that has no memory of its own to write to."""
        if tensors: Tensor.realize(*tensors.values())
        split = {} if self._same_ranks else {name: count for name, count in (cut or {}).items()
                                             if name in tensors}
        sections = {name: self._sections(name, tensors[name], count) for name, count in split.items()}
        found = {name: self._require(name, tensor) for name, tensor in tensors.items() if name not in split}
        if (name := self._surplus(tensors)) is not None:
            raise CheckpointError(f"{self.path} has a tensor {name}, and the run has none of that name",
                                  "the tensors that were saved", MODEL)
        for name, stored in found.items(): self._read(stored, tensors[name])
        for name, own in sections.items():
            for section in own: self._read(section.stored, tensors[name], section.first)

    def _require(self, name: str, tensor: Tensor) -> StoredTensor:
        stored, wanted = self._read_stored(name), (dtype_of(name, tensor), shape_of(tensor))
        if stored is None:
            raise CheckpointError(f"{self.path} has no tensor {name}", "the tensors of the run", MODEL)
        if (stored.dtype, stored.shape) != wanted:
            raise CheckpointError(f"{self.path}: {name} is {stored.dtype} {list(stored.shape)}",
                                  f"{wanted[0]} {list(wanted[1])}, as the run has it", MODEL)
        _require_memory(name, tensor)
        return stored

    def _sections(self, name: str, tensor: Tensor, count: int) -> list[Section]:
        """Lists where the bytes of this rank's part of a vector of `count` elements are. Raises
        `CheckpointError`."""
        stored = [part.tensors[name] for part in self.manifest.parts if name in part.tensors]
        each, wanted = shape_of(tensor)[0], dtype_of(name, tensor)
        sizes = {(one.dtype, one.shape) for one in stored}
        if len(stored) != len(self.manifest.parts) or len(sizes) != 1 or stored[0].dtype != wanted or \
                len(stored[0].shape) != 1 or stored[0].shape[0] * len(stored) < count:
            raise CheckpointError(f"{self.path}: {name} is not in equal parts of {count} {wanted} together, "
                                  "one of each rank that wrote it", "parts as --zero-stage makes them", MODEL)
        _require_memory(name, tensor)
        theirs, item, made = stored[0].shape[0], ITEM_BYTES[wanted], list[Section]()
        own = at = self.rank * each
        end = min(own + each, count)
        while at < end:
            part, within = divmod(at, theirs)
            size = min(theirs - within, end - at)
            source = replace(stored[part], offset=stored[part].offset + within * item, shape=(size,))
            made.append(Section(source, (at - own) * item))
            at += size
        return made

    def _read(self, stored: StoredTensor, tensor: Tensor, done: int = 0) -> None:
        """Reads a tensor into the bytes of another from `done` on."""
        left = math.prod(stored.shape) * ITEM_BYTES[stored.dtype]
        if not left: return
        view, file = host_bytes(tensor), self.path / stored.file
        try:
            with file.open("rb", buffering=0) as opened:
                opened.seek(stored.offset)
                while left:
                    size = min(left, CHUNK)
                    target = memoryview(bytearray(size)) if view is None else view[done:done + size]
                    if not (count := opened.readinto(target)): raise incomplete(self.path, f"{file} ended")
                    if view is None: write(tensor, done, target[:count])
                    left, done = left - count, done + count
        except OSError as error: raise incomplete(self.path, f"{file}: {error.strerror}") from error


def _require_memory(name: str, tensor: Tensor) -> None:
    if math.prod(shape_of(tensor)) and not has_memory(tensor):
        raise CheckpointError(f"{name} has no memory of its own to load into",
                              "a tensor that is contiguous and realized, on one device",
                              "make it with Tensor.empty, or call .contiguous().realize()")


def load(path: str | Path, *, run: Mapping[str, Any] | None = None, rank: int = 0,
         ranks: int = 1) -> Checkpoint:
    """The checkpoint in a directory. Raises `CheckpointError` if it is not whole, or not of `run`."""
    if not Path(path).is_dir():
        raise CheckpointError(f"no such checkpoint: {path}", "a directory checkpoint-<step>",
                              "check the path")
    manifest = verify(Path(path))
    if run is not None: require_run(Path(path), manifest, to_plain_json(run, "run"))
    return Checkpoint(Path(path), manifest, rank, ranks)


def load_latest(directory: str | Path, *, run: Mapping[str, Any] | None = None, rank: int = 0,
                ranks: int = 1) -> Checkpoint | None:
    """The newest checkpoint of a directory that is whole; None where there is none at all. Raises
    `CheckpointError` if there are some and none is whole, or if it is not of `run`."""
    skipped: list[CheckpointError] = []
    try: candidates = list_checkpoints(Path(directory))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}", "a directory of checkpoints",
                              "check its permissions") from error
    for _, path in candidates:
        try: manifest = verify(path)
        except CheckpointError as error:
            skipped.append(error)
            continue
        for other in skipped:
            warnings.warn(f"{other.found}; resuming from {path.name}", CheckpointWarning, stacklevel=2)
        if run is not None: require_run(path, manifest, to_plain_json(run, "run"))
        return Checkpoint(path, manifest, rank, ranks, tuple(skipped))
    if not skipped: return None
    found = "\n  ".join(each.found for each in skipped)
    raise CheckpointError(f"{directory} has checkpoints, and none is whole:\n  {found}",
                          "one that is as it was written",
                          "restore one from a backup; or begin anew, in another directory")
