"""Every way a checkpoint can lie on disk gives the same parameters; conversions are torch's, bit for bit."""
from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tinygrad import Device, Tensor, dtypes

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.models import weights
from tinygrad_nv.models.checkpoint import convert
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.tied import load_config
from tinygrad_nv.quant.floats import narrow_bfloat16, widen_bfloat16
from tinygrad_nv.runtime.memory import allocate_arena, host_bytes, read, write

DTYPES = {"float32": (dtypes.float32, torch.float32), "float16": (dtypes.float16, torch.float16),
          "bfloat16": (dtypes.bfloat16, torch.bfloat16)}
EDGES = [0.0, -0.0, 1.0, -1.5, 65504.0, 65520.0, 1e-8, 3e38, float("inf"), -float("inf"), 1.00390625,
         1.01171875, 0.333251953125, 5.9604645e-08, 2.0 ** -130]


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def parameters(directory: Path, dtype: str) -> dict[str, np.ndarray]:
    """Bytes of every tensor of the checkpoint as the model holds it."""
    model = Llama(read_config(directory), DTYPES[dtype][0], "CPU")
    weights.load(model, directory)
    out = {}
    for name, slot in weights.slots(model).items():
        count = int(np.prod(slot.shape)) * slot.tensor.dtype.itemsize
        out[name] = read(slot.tensor, np.uint8)[slot.offset:slot.offset + count].copy()
    return out


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_conversions_are_torchs_bit_for_bit(source: str, target: str):
    drawn = np.random.default_rng(0).standard_normal(4096) * 100
    values = torch.tensor(EDGES + list(drawn), dtype=torch.float32)
    given = values.to(DTYPES[source][1])
    converted = convert(memoryview(bits(given)), source, DTYPES[target][0])
    np.testing.assert_array_equal(np.frombuffer(converted, np.uint8), bits(given.to(DTYPES[target][1])))


def test_bfloat16_round_trip_and_nan():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    wide = widen_bfloat16(patterns)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(narrow_bfloat16(wide)[number], patterns[number])
    assert np.isnan(widen_bfloat16(narrow_bfloat16(wide[~number]))).all()


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_any_stored_dtype_loads_as_any_other(hf_model: Callable[[str], Path], tmp_path: Path, stored: str,
                                             wanted: str):
    source = hf_model("llama-biases")
    given = {k: v.to(DTYPES[stored][1]) for k, v in load_file(source / "model.safetensors").items()}
    save_file(given, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    loaded = parameters(tmp_path, wanted)
    assert set(loaded) == set(given)
    for name, value in given.items():
        np.testing.assert_array_equal(loaded[name], bits(value.to(DTYPES[wanted][1])))


def test_shards_pickles_and_one_file_are_the_same_model(hf_model: Callable[[str], Path], tmp_path: Path):
    shards = hf_model("llama-sharded")
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    state: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()): state |= load_file(shards / file)
    single, pickled, pickled_shards = tmp_path / "single", tmp_path / "pickled", tmp_path / "pickled-shards"
    for directory in (single, pickled, pickled_shards):
        directory.mkdir()
        (directory / "config.json").write_text((shards / "config.json").read_text())
    save_file(state, single / "model.safetensors")
    torch.save(state, pickled / "pytorch_model.bin")
    names = sorted(state)
    weight_map = {name: f"pytorch_model-{i % 2 + 1:05d}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({n: state[n] for n in names if weight_map[n] == file}, pickled_shards / file)
    (pickled_shards / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = parameters(shards, "float32")
    for directory in (single, pickled, pickled_shards):
        loaded = parameters(directory, "float32")
        for name, value in expected.items(): np.testing.assert_array_equal(loaded[name], value, err_msg=name)


def test_progress_counts_every_byte_once(hf_model: Callable[[str], Path]):
    seen: list[tuple[int, int]] = []
    model = Llama(read_config(hf_model("llama")), device="CPU")
    total = weights.load(model, hf_model("llama"), lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    assert total == model.config.parameters * 4


def loaded_in_a_process(directory: Path, dtype: str) -> dict[str, float]:
    """Makes 0.4 GB of shards and loads them, each in a process of its own: bench/cpu/load.py's
    measurement."""
    head = "import json; from bench.cpu import load; from pathlib import Path\n"
    head += f"directory = Path({str(directory)!r})\n"
    for script in ("load.make_directory(directory, 0.4)",
                   f"print(json.dumps(load.work('load', directory, {dtype!r})))"):
        done = subprocess.run([sys.executable, "-c", head + script], capture_output=True, text=True,
                              check=True, cwd=Path(__file__).parents[2])
    return dict(json.loads(done.stdout))


def test_memory_is_that_of_the_model(tmp_path: Path):
    """Peak resident memory while loading ≤ 1.2 × the model over what the process had before."""
    done = loaded_in_a_process(tmp_path, "float32")
    assert done["rss_peak"] - done["rss_before"] <= 1.2 * done["model_bytes"]
    assert done["rss_peak"] - done["rss_before"] >= 0.9 * done["model_bytes"], "else this measures nothing"


@pytest.mark.slow
def test_memory_is_that_of_the_model_when_the_dtype_changes_too(tmp_path: Path):
    """float32 files into a bfloat16 model, which is half as large as what is read."""
    done = loaded_in_a_process(tmp_path, "bfloat16")
    assert done["rss_peak"] - done["rss_before"] <= 1.2 * done["model_bytes"]


def test_a_pickled_weight_is_read_in_another_process(hf_model: Callable[[str], Path], tmp_path: Path):
    """Its bytes travel, not its address. The pickle is tinygrad's own, so that tinygrad alone reads it where
    there is clang; the other process imports the package for the compiler of the ziglang wheel."""
    model = Llama(read_config(hf_model("llama")), device="CPU")
    weights.load(model, hf_model("llama"))
    (tmp_path / "weight.pickle").write_bytes(pickled := pickle.dumps(model.embedding))
    assert b"tinygrad_nv" not in pickled
    path = str(tmp_path / "weight.pickle")
    script = f"import pickle, tinygrad_nv; print(pickle.load(open({path!r}, 'rb')).numpy().tobytes().hex())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert bytes.fromhex(done.stdout.strip()) == model.embedding.numpy().tobytes()


def test_transposed_tensors_and_masks_in_a_pickle(hf_model: Callable[[str], Path], tmp_path: Path):
    """A weight saved as a view in another order, and a boolean buffer that older checkpoints carry."""
    source = hf_model("llama-biases")
    given = load_file(source / "model.safetensors")
    turned = {name: value.T.contiguous().T if value.ndim == 2 else value for name, value in given.items()}
    assert not turned["lm_head.weight"].is_contiguous()
    turned["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    turned["model.layers.0.attn.bias"] = torch.ones(4, 4, dtype=torch.bool)
    torch.save(turned, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    loaded = parameters(tmp_path, "float32")
    for name, value in given.items(): np.testing.assert_array_equal(loaded[name], bits(value), err_msg=name)


def test_a_config_without_dtype_takes_that_of_the_weights(hf_model: Callable[[str], Path], tmp_path: Path):
    source = hf_model("llama-biases")
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {k: v.to(torch.bfloat16) for k, v in load_file(source / "model.safetensors").items()}
    save_file(given, tmp_path / "model.safetensors")
    assert LLM(tmp_path, device="CPU").dtype == dtypes.bfloat16
    assert LLM(tmp_path, "float32", device="CPU").dtype == dtypes.float32


def test_an_arena_lives_as_long_as_its_tensors():
    tensors = [Tensor.empty(1 << 20, device="CPU") for _ in range(3)]
    allocate_arena(tensors)
    for i, tensor in enumerate(tensors):
        assert read(tensor, np.float32).ctypes.data % 256 == 0
        write(tensor, 0, memoryview(np.full(1 << 20, i + 1, np.float32)).cast("B"))
    last = tensors[2]
    del tensors, tensor
    Tensor.ones(1 << 20, device="CPU").contiguous().realize()  # would take freed memory
    Device["CPU"].synchronize()
    assert host_bytes(last) is not None
    assert (last * 2).sum().item() == 6 * (1 << 20)


@pytest.mark.parametrize("stored", ["both", "head", "embedding"])
def test_logits_where_the_configuration_ties_the_head(tmp_path: Path, stored: str):
    """transformers 5 keeps a head that differs from the embedding; of one of them alone it makes both."""
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    path, other = tmp_path / "model.safetensors", {"head": weights.EMBEDDING, "embedding": weights.HEAD}
    save_file({name: each for name, each in load_file(path).items() if name != other.get(stored)}, path,
              metadata={"format": "pt"})
    ids = [5, 1, 60]
    with torch.no_grad():
        expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path)(torch.tensor([ids])).logits.numpy()
    for configuration in (read_config, load_config):
        model = Llama(configuration(tmp_path), dtypes.float32, "CPU")
        weights.load(model, tmp_path)
        logits = model(Tensor([ids], dtype=dtypes.int32, device="CPU")).numpy()
        assert np.abs(logits - expected).max() <= 2e-4 * np.abs(expected).max()
        assert model.config.tied == (stored != "both")
