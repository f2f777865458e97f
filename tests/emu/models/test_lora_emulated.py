"""DEV=EMU, checks on: adapters in one batch choose what each request chooses alone, and PEFT for them."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.support.models.lora_case import adapter, answers, greedy, prompts
from tests.support.patterns.on_emu import emu  # noqa: F401
from tinygrad_nv import LLM, LoRARequest
from tinygrad_nv.explain import explain
from tinygrad_nv.functional import lora_added

COUNT = 6


def test_what_runs_of_float32():
    """x Aᵀ is a kernel; expand multiplies by tensor cores, so tinygrad's own kernels run, and why is said."""
    def some(*shape: int, dtype: DType = dtypes.float32) -> Tensor:
        return Tensor.empty(*shape, dtype=dtype, device="EMU")
    for dtype, found in ((dtypes.float32, {"grouped_gemv"}), (dtypes.bfloat16, {"grouped_gemv",
                                                                               "lora_expand_mma"})):
        x, a, b = (some(*shape, dtype=dtype) for shape in ((8, 64), (4, 24, 64), (4, 8, 128)))
        ranks, offsets, order = (some(*shape, dtype=dtypes.int32) for shape in ((4, 3), (6,), (8,)))
        kernels = explain(lora_added(x, a, b, ranks, (64, 32, 32), offsets, order)).kernels
        assert {each.name for each in kernels if each.template == "lora"} == found
        refused = any("lora: operands of float without tf32" in each.reason for each in kernels)
        assert refused is (dtype == dtypes.float32)


@pytest.mark.slow
def test_a_mixed_batch(make_model: Callable[..., Path], tmp_path: Path):
    """Rows without an adapter, of one that changes some projections alone, and of one that changes all. bf16
    rounds more than PEFT's float32: most tokens agree."""
    model, given = make_model(), prompts(3, 0, 2, 20)
    paths = [adapter(model, tmp_path / "a", 1, torch.bfloat16, target_modules="all-linear", lora_alpha=16),
             adapter(model, tmp_path / "b", 2, torch.bfloat16, r=4, target_modules=["q_proj", "v_proj"])]
    loras = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1))]
    with LLM(model, device="EMU", dtype="bfloat16", enable_lora=True, max_loras=2, max_num_seqs=4,
             max_num_batched_tokens=32, max_model_len=64) as made:
        together = answers(made, given, loras, COUNT)
        assert together == [answers(made, [prompt], [lora], COUNT)[0]
                            for prompt, lora in zip(given, loras, strict=True)]
    wanted = [greedy(model, [prompt], path, COUNT)[0]
              for prompt, path in zip(given, [None, *paths], strict=True)]
    assert [tokens[0] for tokens in together] == [tokens[0] for tokens in wanted]
