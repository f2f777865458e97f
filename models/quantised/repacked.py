"""Quantised weights in the order of kernels, kept on disk: a second load reads them, and repacks nothing.

Protocol: `with opened(model, plan, entries) as kept`: `kept.restore(readers)` gives each layer's parts, or
None where they are not kept; `kept.add(number, parts)` keeps those of a layer that was repacked. A thread
writes them, each file beside its place and renamed, so that a reader sees all of it or nothing, and several
processes may load at once. Where a layer cannot be written a line on stderr says why, and the load goes on;
a file that is damaged is removed, and its layer repacked. Layers that are read as they are stored, as of
GPUs that multiply codes, are not kept.

A model is a folder (repack_folder.py), a layer a file in it (repack_file.py). Files are read, not mapped:
kernels read weights faster from huge pages, which files have not, and a file that is cut off later ends no
process.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tinygrad import Tensor

from tinygrad_nv.quant.activations import QWeight, SparseWeight, StackWeight
from tinygrad_nv.runtime.memory import allocate_arena
from tinygrad_nv.runtime.memory_pool import label_allocations

from ..checkpoint import TensorEntry
from ..llama import Llama
from .layers import Part, Plan
from .repack_file import DAMAGES, bytes_of, describe, empty, read, tensors_of, write
from .repack_folder import Folder, folder_of

NOT_OURS = (FileNotFoundError, PermissionError)
Loaded = tuple[Part, ...]


@contextmanager
def open_cache(model: Llama, plan: Plan, entries: Mapping[str, TensorEntry]) -> Iterator[RepackCache]:
    """Opens what is kept of a model; at the end what is being written is waited for."""
    kept = RepackCache(model, plan, folder_of(model, plan, entries) if plan.layers else None)
    try: yield kept
    except BaseException:
        kept.writer.shutdown(cancel_futures=True)
        raise
    kept.writer.shutdown()
    if kept.writing is not None: kept.writing.result()
    if kept.folder is not None and kept.why:
        print(f"tinygrad-nv: repacked weights are not kept in {kept.folder.path.parent}: {kept.why}",
              file=sys.stderr)


class RepackCache:
    """The layers that are kept of a model, in a folder if there is one. `why`: what keeps others from being
    written."""

    def __init__(self, model: Llama, plan: Plan, folder: Folder | None) -> None:
        self.model, self.plan, self.folder = model, plan, folder
        self.writer, self.why, self.has_room = ThreadPoolExecutor(1), "", False
        self.writing: Future[None] | None = None
        self.missing = set(range(len(plan.layers)))

    def restore(self, readers: ThreadPoolExecutor) -> Iterator[Loaded | None]:
        """The parts of each layer, which `readers` read; None where they are not kept."""
        begun = [self._begin(number, readers) for number in range(len(self.plan.layers))]
        if self.folder is not None and any(begun): self.folder.touch()
        for number, layer in enumerate(begun):
            if layer is not None and self._wait_for(number, layer[1]):
                self.missing.discard(number)
                yield layer[0]
            else: yield None

    def _begin(self, number: int, readers: ThreadPoolExecutor) -> tuple[Loaded, Future[None]] | None:
        """A layer's parts, empty, and what reads them."""
        if self.folder is None: return None
        path = self.folder.layer(number)
        try:
            described, size = describe(path, self.folder.key)
            plain = self._plain(number)
            parts = tuple([empty(each, plain, self.model.device) for each in described])
            tensors = [tensor for part in parts for tensor in tensors_of(part).values()]
            if sum(int(each.nbytes()) for each in tensors) != size:
                raise ValueError(f"{size} bytes of buffers")
            sums = [int(total) for each in described for total in each.get("sums", {}).values()]
        except NOT_OURS: return None
        except DAMAGES as error:
            _discard(path, error)
            return None
        with label_allocations("weights"): allocate_arena(tensors)
        return parts, readers.submit(read, path, tensors, sums)

    def _wait_for(self, number: int, reading: Future[None]) -> bool:
        """Whether a layer was read, which is waited for."""
        assert self.folder is not None
        try: reading.result()
        except DAMAGES as error: _discard(self.folder.layer(number), error)
        else: return True
        return False

    def _plain(self, number: int) -> list[Tensor]:
        """Tensors of a layer's projections that are not quantised."""
        return [part for part in self.plan.layers[number].parts if isinstance(part, Tensor)]

    def add(self, number: int, parts: Loaded) -> None:
        """Keeps the parts of a layer; they are written later."""
        if self.folder is None or self.why or not _is_repacked(parts, self._plain(number)): return
        if not self.has_room: self.why = self.folder.make_room(self.missing)
        self.has_room = not self.why
        if self.why: return
        # one layer is written while another is repacked. Copied out here, where kernels are launched
        if self.writing is not None: self.writing.result()
        data = [{name: bytes_of(tensor) for name, tensor in tensors_of(part).items()} for part in parts]
        self.writing = self.writer.submit(self._keep, number, parts, data)

    def _keep(self, number: int, parts: Loaded, data: list[dict[str, memoryview]]) -> None:
        assert self.folder is not None
        key = self.folder.key
        try: self.folder.keep(number, lambda file: write(file, key, parts, data))
        except OSError as error: self.why = error.strerror or str(error)


def _discard(path: Path, error: Exception) -> None:
    print(f"tinygrad-nv: {path} is damaged ({error}); its layer is repacked", file=sys.stderr)
    with contextlib.suppress(OSError): path.unlink()


def _is_repacked(parts: Loaded, plain: list[Tensor]) -> bool:
    """Whether a layer's parts lie in another order than stored; dense ones are those of the network."""
    known = {id(each) for each in plain}
    def is_repacked(part: Part) -> bool:
        if isinstance(part, StackWeight): return part.matrix.type.layout != "rows"
        if isinstance(part, QWeight): return not part.codes or part.matrix.type.layout != "rows"
        return isinstance(part, SparseWeight)
    return all(id(each) in known for each in parts
               if isinstance(each, Tensor)) and any(map(is_repacked, parts))
