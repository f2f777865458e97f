"""The bundled model on several ranks: the tokens are those of one."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models import parallel_program
from tinygrad_nv.models import tales

TALES = Path(tales.__file__).parent


@pytest.fixture(scope="module")
def alone() -> parallel_program.Answers: return parallel_program.answers(str(TALES))


@pytest.fixture(scope="module")
def exact(alone: parallel_program.Answers) -> list[np.ndarray]:
    """Log probabilities of one rank's tokens, in float64."""
    theirs, made = AutoModelForCausalLM.from_pretrained(TALES, dtype=torch.float64).eval(), []
    for prompt, tokens, _ in alone.scored:
        with torch.no_grad(): logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1]
        made.append(logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy())
    return made


@pytest.mark.parametrize("options", [
    {"pipeline_parallel_size": 2, "speculative": "ngram:3"},
    pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2, "speculative": "ngram:3"}, marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 4}, marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_size": 4}, marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2, "speculative": "draft:TALES:3"}, marks=pytest.mark.slow)],
    ids=str)
def test_tokens(options: dict[str, object], alone: parallel_program.Answers, exact: list[np.ndarray]) -> None:
    """With structured output, sequences that are preempted, prefix hits and speculation. Log probabilities
    are off float64 by no more than 4 times what those of one rank are, or 4 roundings of the largest."""
    done = _run(json.dumps(options).replace("TALES", str(TALES)))
    assert done.returncode == 0, done.stderr
    found = parallel_program.Answers(**json.loads(done.stdout.splitlines()[-1]))
    assert found.tokens == alone.tokens, done.stderr
    assert found.hits > 0, found
    # stages have steps of other sequences, which so are not short of pages at once
    if "pipeline_parallel_size" not in options: assert found.preempted > 0, found
    for (_, _, mine), (_, _, one), wanted in zip(found.scored, alone.scored, exact, strict=True):
        rounding = np.finfo(np.float32).eps * np.abs(wanted).max()
        bound = 4 * max(np.abs(one - wanted).max(), rounding)
        assert np.abs(mine - wanted).max() <= bound, (mine, one, wanted)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_step_that_fails_on_one_rank(rank: int) -> None:
    done = _run(str(rank))
    assert "second: the ranks of this process have a model already" in done.stdout, done
    assert f"a step failed on rank {rank}: ValueError: invalid literal" in done.stdout, done


MPI, TORCHRUN = ("mpiexec", "-n"), ("torchrun", "--nproc-per-node")


@pytest.mark.parametrize(("launcher", "option", "ranks"), [
    (MPI, "-tp", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (MPI, "-tp", 4), (MPI, "-pp", 2), (MPI, "-pp", 4), (MPI, "-dp", 2), (TORCHRUN, "-tp", 2),
        (TORCHRUN, "-dp", 2)))], ids=lambda each: each[0] if isinstance(each, tuple) else each)
def test_ranks_of_a_launcher(launcher: tuple[str, str], option: str, ranks: int) -> None:
    """All run the same command, of which rank 0 answers; all end in good order."""
    found = shutil.which(launcher[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found is not None, launcher
    python = [] if launcher is TORCHRUN else [sys.executable]
    command = [found, launcher[1], str(ranks), *python, "-m", "tinygrad_nv", "generate", option, str(ranks),
               "--temperature", "0", "--max-tokens", "8", "Once upon a time"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300,
                          env={**os.environ, "NUM_CPU_THREADS": "1"})
    assert done.returncode == 0, done
    assert done.stdout.strip() == "Once upon a time, there was a kind little girl named", done


def _run(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(Path(parallel_program.__file__)), str(TALES), how],
                          capture_output=True, text=True, check=False, timeout=300,
                          env={**os.environ, "NV_PROGRAM_CACHE": "1"})
