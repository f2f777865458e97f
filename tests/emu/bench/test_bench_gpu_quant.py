"""The part "quant" of bench/gpu/run.py: matrices as kernels and contenders take them, kernels on the
emulator, what is wrong, and recorded launches of quantised matmuls."""
from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.gpu import gemm as gpu_gemm
from bench.gpu import quant as gpu_quant
from bench.gpu import quant_contenders
from bench.gpu import record as gpu_record
from bench.gpu.cases import Cases
from bench.gpu.correct import verdict
from bench.gpu.parts import CONTENDERS, NotMeasured
from bench.gpu.quant_data import buffers_of, dequantise, torch_dtype
from bench.gpu.quant_workloads import TYPES, CodesWorkload, WeightOnly
from bench.gpu.sparse_workloads import SparseWorkload, sparse
from tests.support.tile import reference_case
from tests.support.tile.quant_case import BF16, F32, matmul, storages
from tests.support.tile.quant_case import TYPES as TESTED
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.quant import QTensor, types
from tinygrad_nv.quant.sparse import compress
from tinygrad_nv.tile.quant_gemm.schedules import QuantGemv
from tinygrad_nv.tile.template import GPU

OPTIONS = Namespace(arch="sm_90a", seed=1)
EVERY = {**TYPES, **gpu_quant.OTHERS}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EVERY)
def test_matrices_are_what_the_package_has(name: str):
    """24 rows and 256 columns: in fragments, and dequantised."""
    type, n, k = EVERY[name], 24, 256
    laid, rows = buffers_of(type, n, k, "cpu")
    bits = type.bits
    packed = rows["codes"] if bits == 8 else rows["codes"][:, ::2] | rows["codes"][:, 1::2] << 4
    arrays = {key: data.contiguous().view(torch.uint8).numpy()
              for key, data in {**rows, "codes": packed}.items()}
    matrix = QTensor.of(type, (n, k), arrays, "CPU")
    wanted = matrix.with_layout("fragments").buffers
    for key, data in laid.items():
        found = wanted[key].contiguous().bitcast(types.dtypes.uint8).flatten().numpy()
        assert found.tobytes() == data.view(torch.uint8).numpy().tobytes(), key
    exact = torch.from_numpy(matrix.dequantize().numpy())
    assert torch.equal(dequantise(type, {f"rows {key}": data for key, data in rows.items()}, k), exact)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["int4 8B gate_up M=16", "Q4_K 8B gate_up M=1", "W8A8 8B down M=64",
                                  "FP8 8B down M=16", "FP8 blocks 8B down M=16", "2:4 bf16 8B gate_up M=64",
                                  "2:4 FP8 8B gate_up M=1", "2:4 INT8 8B gate_up M=1"])
def test_rows_are_right_on_the_emulated_device(name: str):
    shape = next(each for each in gpu_quant.shapes() if each.name == name)
    row = gpu_quant.run_emulated(shape, OPTIONS)
    assert row["status"] == "emulated", row


def test_every_row_has_a_kernel_and_a_name_of_its_own():
    every = list(gpu_quant.shapes())
    assert len({each.name for each in every}) == len(every)
    for shape in every: assert gpu_quant.TABLE.choose(shape.spec, GPU("sm_90a", 132)) is not None, shape.name
    assert every[0].nbytes == 6144 * 4096 / 2 + 2 * 6144 * 32 + 2 * (6144 + 4096)


@pytest.mark.parametrize("name", gpu_quant.SPARSE)
def test_sparse_matrices_are_what_the_package_has(name: str):
    """24 rows and 136 columns, no multiples of tiles and units."""
    dtype, n, k = gpu_quant.SPARSE[name], 24, 136
    bits = torch.int16 if dtype.itemsize == 2 else torch.int8
    whole = torch.randint(1, 100, (n, k), dtype=bits)
    pairs = torch.randint(6, (n, k // 4))
    dense, values, metadata = sparse(dtype, whole.view(torch_dtype(dtype)), pairs)
    wanted = compress(whole.numpy(), dense.view(bits).numpy() != 0)
    assert torch.equal(dense.view(bits), torch.where(dense.view(bits) != 0, whole, 0))
    assert values.view(bits).numpy().tobytes() == wanted["values"].tobytes()
    assert metadata.numpy().tobytes() == wanted["metadata"].tobytes()


# **** contenders ****

def small(kind: str) -> WeightOnly | CodesWorkload | gpu_gemm.GemmWorkload | SparseWorkload:
    """Of each kind of workload."""
    if kind in gpu_quant.SPARSE: return SparseWorkload(kind, gpu_quant.SPARSE[kind], 24, 64, 256)
    if kind in EVERY: return WeightOnly(kind, EVERY[kind], 24, 64, 256)
    if kind in gpu_quant.CODES: return CodesWorkload(kind, gpu_quant.CODES[kind], 24, 64, 256)
    return gpu_gemm.GemmWorkload(kind, 24, 256, 256, fp8=True, blocks=True)


def spread(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A scale of each element."""
    for axis, extent in enumerate(shape):
        scales = scales.repeat_interleave(extent // scales.shape[axis], axis)
    return scales


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[k, n] of GPTQ's words, less what symmetric codes have more."""
    fields = torch.stack([packed >> (i * bits) & ((1 << bits) - 1) for i in range(32 // bits)], 1)
    return (fields.flatten(0, 1) - (1 << bits - 1)).float()


class Fake:
    """What contenders call of vLLM, and torch's kernels that the CPU lacks, by plain matmuls."""
    uint4b8, uint8b128 = "uint4b8", "uint8b128"

    @staticmethod
    def apply_gptq_marlin_linear(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
                                 wtype: str, **more: Any) -> torch.Tensor:
        values = unpacked(weight, 4 if wtype == "uint4b8" else 8)
        return (x.float() @ (values * spread(weight_scale.float(), values.shape))).bfloat16()

    @staticmethod
    def machete_mm(a: torch.Tensor, b_q: torch.Tensor, b_type: str, b_group_scales: torch.Tensor,
                   b_group_size: int, out_type: torch.dtype) -> torch.Tensor:
        assert b_q.stride(0) == 1
        assert b_group_size in (-1, 128)
        return Fake.apply_gptq_marlin_linear(a, b_q, b_group_scales, b_type)

    @staticmethod
    def apply_fp8_marlin_linear(input: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
                                **more: Any) -> torch.Tensor:
        return (input.float() @ (weight.float() * weight_scale.T)).bfloat16()

    @staticmethod
    def prepare_fp8_layer_for_marlin(layer: Any, size_k_first: bool) -> None:
        assert layer.weight.shape == (layer.input_size_per_partition, layer.output_size_per_partition)
        layer.workspace = None

    @staticmethod
    def cutlass_scaled_mm(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, outputs: torch.Tensor,
                          kind: torch.dtype) -> torch.Tensor:
        if rows.shape[1] > 1: assert (rows.stride(0), outputs.stride(0)) == (1, 1)
        left, right = a.double() * spread(rows, a.shape), b.double() * spread(outputs, b.shape)
        return (left @ right).to(kind)

    @staticmethod
    def scaled_mm(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, outputs: torch.Tensor,
                  out_dtype: torch.dtype, use_fast_accum: bool, out: torch.Tensor) -> None:
        if rows.ndim == 0: rows, outputs = rows[None, None], outputs[None, None]
        out.copy_(Fake.cutlass_scaled_mm(a, b, rows, outputs, out_dtype))

    @staticmethod
    def cslt_sparse_mm(packed: torch.Tensor, dense: torch.Tensor, out_dtype: torch.dtype,
                       transpose_result: bool) -> torch.Tensor:
        assert transpose_result
        assert dense.shape[1] % 8 == 0
        return (packed.double() @ dense.double()).T.to(out_dtype)

    gptq_marlin_repack = staticmethod(lambda codes, *rest: codes)
    machete_prepack_B = staticmethod(lambda codes, *rest: codes)
    marlin_permute_scales = staticmethod(lambda scales, *rest: scales)
    marlin_make_empty_g_idx = marlin_make_workspace_new = staticmethod(lambda device: None)
    int4packed = staticmethod(lambda data, tiles: torch.stack([data >> 4, data & 15], -1).flatten(1))

    @staticmethod
    def int4pack_mm(a: torch.Tensor, codes: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
        assert scales.dtype == torch.bfloat16
        scale, zero = (scales[..., i].float().T.repeat_interleave(group, 1) for i in range(2))
        return (a.float() @ ((codes - 8.0) * scale + zero).T).bfloat16()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules by the names that are imported."""
    where = "vllm.model_executor.layers.quantization.utils"
    names = ["vllm", "vllm._custom_ops", "vllm.scalar_type", "vllm.model_executor",
             "vllm.model_executor.layers", "vllm.model_executor.layers.quantization", where,
             f"{where}.marlin_utils", f"{where}.marlin_utils_fp8"]
    for name in names:
        module = ModuleType(name)
        vars(module).update({key: getattr(Fake, key) for key in vars(Fake) if not key.startswith("__")},
                            scalar_types=Fake)
        monkeypatch.setitem(sys.modules, name, module)
    for name in names[1:]:
        parent, _, own = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], own, sys.modules[name], raising=False)
    monkeypatch.setattr(quant_contenders, "find_spec", lambda name: object())
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", Fake.int4packed)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", Fake.int4pack_mm)
    monkeypatch.setattr(torch, "_scaled_mm", Fake.scaled_mm)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    monkeypatch.setattr(torch, "_cslt_compress", lambda dense: dense)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", Fake.cslt_sparse_mm)
    monkeypatch.setattr(torch, "compile", lambda step, dynamic: step)


HAVE = {"int4": {"bf16", "torch", "Marlin", "Machete"}, "int8": {"bf16", "torch", "Marlin", "Machete"},
        "fp8": {"bf16", "Marlin"}, "AWQ": {"bf16"}, "MXFP4": {"bf16"}, "Q4_K": {"bf16"}, "NF4": {"bf16"},
        "W8A8": {"torch", "CUTLASS"}, "FP8": {"torch", "CUTLASS"}, "blocks": {"torch", "CUTLASS"},
        "2:4 bf16": {"bf16", "cuSPARSELt"}, "2:4 FP8": {"torch", "cuSPARSELt"},
        "2:4 INT8": {"torch", "cuSPARSELt"}}


@pytest.mark.parametrize("kind", HAVE)
def test_contenders_multiply_the_same_matrix(kind: str, vllm: None):
    shape, found = small(kind), set()
    for name, made in CONTENDERS["quant"].items():
        if name == "ours": continue
        given = shape.make_inputs("cpu")
        try: run = made(shape, given, OPTIONS)
        except NotMeasured: continue
        for i in range(len(given)): run(i)
        assert [shape.unlike(one) for one in given] == [""] * len(given), name
        found.add(name)
    assert found == HAVE[kind]


def test_contenders_that_are_not_installed_are_left_out_in_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quant_contenders, "find_spec", lambda name: None)
    shape = small("int4")
    for name in ("Marlin", "Machete"):
        with pytest.raises(NotMeasured, match="vLLM is not installed"):
            CONTENDERS["quant"][name](shape, shape.make_inputs("cpu"), OPTIONS)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    with pytest.raises(NotMeasured, match="this torch has no cuSPARSELt"):
        CONTENDERS["quant"]["cuSPARSELt"](small("2:4 bf16"), [], OPTIONS)


@pytest.mark.parametrize("kind", ["int4", "AWQ", "W8A8", *gpu_quant.SPARSE])
def test_what_is_wrong_is_said(kind: str):
    shape = small(kind)
    one = shape.make_inputs("cpu")[0]
    if isinstance(shape, SparseWorkload):
        left, right = one["a"].view(shape.m, -1).double(), one["dense"].double()
    elif isinstance(shape, CodesWorkload):
        left, right = (one[name].view(-1, shape.k).double() * one[scale][:, None]
                       for name, scale in (("a", "x1"), ("b", "x0")))
    else: left, right = one["a"].view(shape.m, -1).double(), dequantise(shape.type, one, shape.k).double()
    one["out"] = (left @ right.T).bfloat16().flatten()
    assert shape.unlike(one) == ""
    for place in range(0, 24 * 64, 101):
        out = one["out"].clone()
        out[place] += 1 + out[place].abs() / 8
        row, column = divmod(place, 64)
        assert shape.unlike({**one, "out": out}).startswith(f"row {row}, column {column}: ")


# **** recorded launches ****

@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gpu_record.Recorder]:
    monkeypatch.setattr(Emulator, "launch", Emulator.launch)
    monkeypatch.setattr(reference_case, "run", reference_case.run)
    cases = Cases(tmp_path / "cases.sqlite", write=True)
    made = gpu_record.Recorder(cases)
    made.install()
    gpu_record.judge_quantised(made)
    yield made
    cases.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("whole", [False, True])
def test_launches_are_judged_by_their_reference(recorder: gpu_record.Recorder, whole: bool):
    """One place of the result is another: within the bound it is close, where sums are exact it must be the
    same."""
    spec = matmul(TESTED["int4 g32"], 3, 24, 256, out=F32 if whole else BF16)
    reference_case.run(spec, QuantGemv().of(1, 1).warps(2), GPU("sm_90a", 132), storages(spec, 0, whole))
    case = recorder.cases.get(recorder.cases.names()[0])
    (judged,) = case.judged
    assert case.memory[judged.memory].dtype == ("float32" if whole else "bfloat16")
    assert (judged.exact.size == 0) == whole
    addresses = [each.address for each in case.memory]
    emulated = [each.after for each in case.memory]
    dtype = torch.float32 if whole else torch.bfloat16
    for by, kind in ((0.0, "same"), (0.01, "disagrees" if whole else "close"), (0.2, "disagrees")):
        out = torch.frombuffer(bytearray(emulated[judged.memory]), dtype=dtype)
        out[int(out.abs().argmax())] *= 1 + by
        found = [*emulated]
        found[judged.memory] = out.view(torch.uint8).numpy().tobytes()
        assert verdict(case, found, addresses).kind == kind, by
