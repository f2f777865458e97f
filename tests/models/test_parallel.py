"""Models on several ranks: the tokens of the bundled one are those of one rank; logits of each family are
those of one device, also with whole experts a rank; and on emulated GPUs, with sums by NCCL's stand-in
and by kernels over the memory of peers."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from transformers import AutoModelForCausalLM

from tests.support import SUPPORT
from tests.support.dist import rank_programs
from tests.support.models import parallel_program
from tests.support.models.families import CASES, saved
from tinygrad_nv.errors import ModelError
from tinygrad_nv.functional import Policy
from tinygrad_nv.models import tales
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.layer_config import MoEConfig
from tinygrad_nv.models.parallel import local_config
from tinygrad_nv.models.rope import RopeConfig

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


PROGRAM = "models/logits_program.py"


def require_right(directories: list[str], ranks: int, timeout_s: float) -> None:
    made = rank_programs.run(PROGRAM, ranks, *directories, timeout_s=timeout_s)
    assert all(each.code == 0 for each in made), "".join(each.text for each in made)
    for directory in directories: assert f"{directory}: right" in made[0].text, made[0].text


def test_two_ranks(tmp_path: Path):
    """Norms over all heads, and experts that stay whole, of which a rank has one more than the other."""
    case = CASES["olmoe"]
    one = replace(case, fields={**case.fields, "num_hidden_layers": 1})
    require_right([f"{saved(one, tmp_path, 7)}+ep"], 2, 300)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_family(hf_model: Callable[[str], Path], ranks: int):
    """Of those that have experts also with experts that stay whole."""
    arguments = []
    for name in CASES:
        config = read_config(hf_model(name))
        for experts in (False, True):
            try: local_config(config, ranks, experts)
            except ModelError: continue
            arguments.append(f"{hf_model(name)}{'+ep' * experts}")
    assert len(arguments) > len(CASES) * 2 // 3
    require_right(arguments, ranks, 3600)


HIDDEN, WIDTH, EXPERTS, TOKENS = 32, 16, 5, 9


def block(k: int, own: range | None = None) -> MixtureOfExperts:
    """Of random weights, or the experts `own` of them."""
    moe, random = MoEConfig(EXPERTS, WIDTH, Policy(k), (True,)), np.random.default_rng(2)
    config = ModelConfig("MixtralForCausalLM", 320, HIDDEN, WIDTH, 1, 2, 2, 16, 64,
                         (RopeConfig("default", 1e4, 16, 64),), windows=(None,), moe=moe)
    made = MixtureOfExperts(config, moe, dtypes.float32, "CPU", own)
    def normal(*shape: int) -> np.ndarray: return random.standard_normal(shape).astype(np.float32)
    router, gate_up, down = normal(EXPERTS, HIDDEN), normal(EXPERTS, 2 * WIDTH, HIDDEN), \
        normal(EXPERTS, HIDDEN, WIDTH)
    made.router = Tensor(router, device="CPU").realize()
    made.gate_up, made.down = (
        Tensor(each[made.own.start:made.own.stop].reshape(-1, each.shape[-1]), device="CPU").realize()
        for each in (gate_up, down))
    return made


@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_sums_over_ranks(k: int):
    """Of one expert for each token the bits are the same: ranks that do not have it add 0. Of several they
    are added in another order."""
    x = Tensor(np.random.default_rng(3).standard_normal((1, TOKENS, HIDDEN)).astype(np.float32), device="CPU")
    whole = block(k)(x).numpy()
    parts = [block(k, own)(x).numpy() for own in (range(3), range(3, EXPERTS))]
    if k > 1:       # k - 1 additions of numbers of about this size, twice
        most = 4 * (k - 1) * 2.0 ** -23 * (np.abs(parts).max(0) + np.abs(whole).max())
        assert np.all(np.abs(parts[0] + parts[1] - whole) <= most)
        return
    assert all(bool((each == 0).all(-1).any()) for each in parts)
    assert np.array_equal(parts[0] + parts[1], whole)


MODEL = Path(__file__).parents[2] / "models" / "tales"


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "kind"), [("auto", "tensor"), ("nccl", "tensor"), ("auto", "pipeline")])
def test_tokens_are_those_of_one_gpu(setting: str, kind: str, monkeypatch: pytest.MonkeyPatch,
                                     tmp_path: Path) -> None:
    monkeypatch.setenv("NV_ALL_REDUCE", setting)
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    program = str(SUPPORT / "models" / "parallel_gpus_program.py")
    for start in ("first", "second"):
        command = [sys.executable, program, str(MODEL), start, f"{kind}_parallel_size"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.endswith("all right\n")
