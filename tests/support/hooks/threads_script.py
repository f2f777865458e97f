"""What test_hook_threads.py runs in new processes: programs, a TinyJit and an engine, each in a thread.
`threads_script.py KIND [MODEL]` exits with 1 and the errors if any thread fails or computes another thing."""
from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tinygrad_nv import LLM, SamplingParams, Tensor, TinyJit

errors: list[str] = []


def values(seed: int, *shape: int) -> np.ndarray:
    """Small whole numbers: sums of their products are exact."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def program(seed: int) -> None:
    """Kernels of ours and of tinygrad, of shapes that no other thread has, and of shapes that all have."""
    for rows in (9 + seed, 16):
        a, b = values(seed, rows, 32), values(seed + 1, 32, 24)
        np.testing.assert_array_equal(((Tensor(a) @ Tensor(b)).relu() + seed).sum(0).numpy(),
                                      (np.maximum(a @ b, 0) + seed).sum(0))


def gradient(seed: int) -> None:
    """A step of training."""
    a, w = values(seed, 8 + seed, 16), Tensor(values(seed + 1, 16, 4))
    grad, = (Tensor(a) @ w).sum().gradient(w)
    np.testing.assert_array_equal(grad.numpy(), np.repeat(a.sum(0)[:, None], 4, 1))


def jitted(seed: int) -> None:
    """A step that is captured and replayed while other threads schedule."""
    @TinyJit
    def step(x: Tensor) -> Tensor: return ((x @ w).relu() * 2 + seed).realize()

    w = Tensor(values(seed, 24, 16)).realize()
    for turn in range(5):
        a = values(turn, 8 + seed, 24)
        got = step(Tensor(a).realize()).numpy()
        np.testing.assert_array_equal(got, np.maximum(a @ w.numpy(), 0) * 2 + seed)


def engine(model: Path) -> Callable[[int], None]:
    """The same answer to the same prompts, whatever runs beside."""
    llm = LLM(str(model), max_num_seqs=2, max_model_len=64)

    def answer() -> list[str]:
        greedy = SamplingParams(temperature=0, max_tokens=6)
        return [out.text for out in llm.generate(["Once upon a time"], greedy)]
    alone = answer()

    def generate(seed: int) -> None:
        assert answer() == alone
    return generate


def run(work: Callable[[int], None], seed: int) -> None:
    try: work(seed)
    except BaseException: errors.append(traceback.format_exc())


def main() -> int:
    kind, works = sys.argv[1], [program] * 8
    if kind == "mixed": works = [program, program, gradient, gradient, jitted, jitted]
    if len(sys.argv) > 2: works.append(engine(Path(sys.argv[2])))
    threads = [threading.Thread(target=run, args=(work, seed)) for seed, work in enumerate(works)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print("\n".join(errors), file=sys.stderr)
    return bool(errors)


if __name__ == "__main__": sys.exit(main())
