"""llama.cpp for benches, in the Python that has it: numpy and llama-cpp-python, built for this processor, are
all it needs.

Protocol: `Session(path, room)` has a file open with as many threads as the machine has cores, and llama.cpp's
defaults otherwise. `greedy(prompt, count)` chooses tokens from an empty cache. The calls are those of
llama-bench: a batch with logits of its last token, llama_decode, and argmax.

Built with GCC 12, ggml 0.25.3 ends with SIGSEGV in its AMX matmul: the compiler drops the stores of the tile
configuration in front of `_tile_loadconfig` (ggml-cpu/amx/mmq.cpp). The results are of a build with
`asm volatile("" : : "r"(&tc) : "memory")` in front of it.

    python bench/cpu/gguf_peer.py quantise SOURCE PATH FORMAT      a file of float16 in another format
"""
from __future__ import annotations

import ctypes
import os
import sys
import time

import llama_cpp
import numpy as np


class Session:
    """A model that chooses the likeliest tokens."""

    def __init__(self, path: str, room: int, threads: int | None = None) -> None:
        llama_cpp.llama_log_set(SILENT, None)
        llama_cpp.llama_backend_init()
        how = llama_cpp.llama_model_default_params()
        how.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE      # read, not mapped, for the peak of memory
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), how)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = room, max(params.n_ubatch, 512)
        params.n_threads = params.n_threads_batch = threads or os.cpu_count() or 1
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context: raise SystemExit(f"llama.cpp does not open {path}")
        self.batch = int(params.n_batch)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], float, float]:
        """Tokens, seconds to the first, and in all."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        ids: list[int] = []
        begun, first, tokens = time.perf_counter(), 0.0, prompt
        for _ in range(count):
            for i in range(0, len(tokens), self.batch): self.decode(tokens[i:i + self.batch])
            ids.append(int(np.argmax(self.logits())))
            first = first or time.perf_counter() - begun
            tokens = ids[-1:]
        return ids, first, time.perf_counter() - begun

    def decode(self, tokens: list[int]) -> None:
        """Decodes one batch, behind what is cached."""
        some = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(some, len(tokens))):
            raise SystemExit("llama_decode failed")

    def logits(self) -> np.ndarray:
        """Returns the logits of the last token."""
        last = llama_cpp.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(last, shape=(self.vocabulary,))


@llama_cpp.llama_log_callback
def SILENT(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drops a line of llama.cpp's log."""


def quantise(source: str, path: str, format: str) -> None:
    """A file as llama.cpp's own quantiser makes it."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{format.upper()}")
    if llama_cpp.llama_model_quantize(source.encode(), path.encode(), params):
        raise SystemExit(f"llama.cpp does not make {format} of {source}")


if __name__ == "__main__":
    if sys.argv[1:2] != ["quantise"] or len(sys.argv) != 5: raise SystemExit(__doc__)
    quantise(*sys.argv[2:])
