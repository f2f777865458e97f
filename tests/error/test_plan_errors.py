"""`tinygrad-nv plan`: layouts that cannot be, that do not fit, and clusters without figures."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 128,
          "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
EIGHT = ("--gpus", "8xH100")
TENSOR, DATA = (*EIGHT, "--tp", "8", "--pp", "1"), (*EIGHT, "--tp", "1", "--pp", "1")
TRAIN = ("--train", "--zero", "1", "--recompute", "none", "--microbatch", "1")


@pytest.mark.parametrize(("arguments", "words"), [
    # GPUs and networks
    (("--gpus", "8xB200"), ("no figures of a GPU 'B200'", "one of h100, h100-pcie, h200, a100, l40s",
                            "to fix:   name one of these, or add it to tinygrad_nv/dist/plan/figures.toml")),
    (("--gpus", "0xH100"), ("--gpus 0xH100", "expected: a number and a GPU, such as 8xH100")),
    (("--gpus", "8x"), ("--gpus 8x", "expected: a number and a GPU, such as 8xH100")),
    (("--gpus", "12xH100"), ("12 GPUs are not whole nodes of 8", "at most 8, or a multiple of 8",
                             "say how many a node has, and --nodes")),
    ((*EIGHT, "--nodes", "0"), ("--nodes 0", "expected: 1 or more")),
    ((*EIGHT, "--net", "fast"), ("--net fast", "the rate of a GPU's adapter, such as 400G (NDR)",
                                 "to fix:   --net 400G")),
    ((*EIGHT, "--power", "900"), ("--power 900 of a H100 SXM", "more than 142 W, at most 700 W")),
    (("--gpus", "8xH100-PCIe", "--power", "300"), ("--power of a H100 PCIe", "with figures of its power")),
    # numbers that do not divide
    ((*EIGHT, "--tp", "3", "--pp", "1", "--dp", "2"), ("tp 3 x pp 1 x dp 2 are 6 GPUs, of 8",
                                                       "numbers whose product is 8",
                                                       "tp and pp that divide 8")),
    ((*EIGHT, "--tp", "2", "--pp", "2", "--dp", "4"), ("tp 2 x pp 2 x dp 4 are 16 GPUs, of 8", "--dp 2")),
    (("--gpus", "8xH100", "--nodes", "8", "--tp", "64", "--pp", "1", "--dp", "1"),
     ("--tp 64 does not divide 32 heads", "expected: one of 1, 2, 4, 8, 16, 32")),
    (("--gpus", "8xH100", "--nodes", "8", "--tp", "1", "--pp", "64", "--dp", "1"),
     ("--pp 64 of 32 layers", "at most 32: a stage has a layer at least")),
    ((*TENSOR, "--ep", "8"), ("--ep 8 of a model without experts", "leave --ep out")),
    ((*DATA, "--batch", "9"), ("batch 9 over dp 8", "a multiple of 8", "--batch 16")),
    ((*EIGHT, "--tp", "1", "--pp", "8", "--sp"), ("--sp without tensor parallelism", "leave --sp out")),
    ((*TENSOR, "--sp"), ("--sp of inference", "sequence parallel training: --train", "leave --sp out")),
    # types and settings
    ((*TENSOR, "-q", "fp4"), ("matrices of fp4", "one of bf16, fp8, int8, int4")),
    ((*TENSOR, "--kv-cache-dtype", "int4"), ("keys and values of int4", "bf16, fp8")),
    (("--gpus", "8xA100", "--tp", "8", "--pp", "1", "-q", "fp8"),
     ("fp8 on A100 SXM 80GB", "a GPU whose tensor cores take 8-bit floats", "use bf16, int8 or int4")),
    ((*EIGHT, "--gpu-memory-utilization", "1.5"), ("--gpu-memory-utilization 1.5", "more than 0, at most 1")),
    ((*EIGHT, "--achieved", "0"), ("--achieved 0", "more than 0, at most 1")),
    ((*EIGHT, "--top", "0"), ("--top 0", "expected: 1 or more")),
    ((*TENSOR, *TRAIN, "--schedule", "zigzag"),
     ("--schedule zigzag", "one of 1f1b, gpipe, interleaved, zero-bubble")),
    ((*EIGHT, "--tp", "4", "--pp", "2", *TRAIN, "--virtual", "2"), ("--virtual 2 with the schedule 1f1b",)),
    ((*EIGHT, "--tp", "2", "--pp", "4", *TRAIN, "--schedule", "interleaved", "--virtual", "2",
      "--batch", "6"),
     ("6 microbatches of a rank, interleaved over pp 4", "a multiple of 4", "--batch 8, or --schedule 1f1b")),
    ((*TENSOR, "--train", "--zero", "4", "--recompute", "none", "--microbatch", "1"),
     ("--zero 4", "one of 0, 1, 2, 3")),
    ((*DATA, *TRAIN, "--batch", "12"),
     ("batch 12 in microbatches of 1 over dp 8", "a multiple of 8", "--batch 16")),
])
def test_what_cannot_be(command, arguments: tuple[str, ...], words: tuple[str, ...]):
    command("plan", "llama-3.1-8b", *arguments).refused(*words)


@pytest.mark.parametrize(("arguments", "words"), [
    (("mixtral-8x7b", "--gpus", "8xH100", "--tp", "1", "--pp", "1", "--ep", "3"),
     ("--ep 3 does not divide 8 experts", "one of 1, 2, 4, 8")),
    (("qwen3-235b-a22b", "--gpus", "8xH100", "--tp", "4", "--pp", "1", "--ep", "2"),
     ("--ep 2 of 4 x 2 ranks of a stage", "a multiple of tp 4 that divides 8")),
    (("llama-9-9b", "--gpus", "8xH100"), ("no model 'llama-9-9b'", "one of llama-2-7b, llama-2-13b",
                                          "name a directory that has the model's config.json")),
    # memory: by how much, and what would fit
    (("llama-3.1-70b", "--gpus", "1xH100"),
     ("one GPU: 149.28 GiB a GPU", "more than fit", "131.42 GiB of weights",
      "at most 70.68 GiB of the 79.65 GiB of H100",
      "more GPUs: weights are 131.42 GiB each, or --quantization int4")),
    (("llama-3.1-70b", "--gpus", "4xH100", "--tp", "4", "--pp", "1", "--batch", "2048"),
     ("tp 4:", "GiB of KV cache", "to fix:   --batch", ", which fits")),
    (("llama-3.1-405b", "--gpus", "8xH100"), ("none of 10 layouts fits; the nearest, tp 8, takes",
                                              "more GPUs, a smaller --batch, or --quantization fp8")),
    (("llama-3.1-8b", *DATA, "--train", "--zero", "0", "--recompute", "none", "--microbatch", "2"),
     ("dp 8:", "GiB of AdamW", "--zero 3; or --recompute full; or --microbatch 1; or more")),
])
def test_models_that_do_not_fit(command, arguments: tuple[str, ...], words: tuple[str, ...]):
    command("plan", *arguments).refused(*words)


def test_gpus_are_asked_for(command):
    command("plan", "llama-3.1-8b").refused("the following arguments are required: --gpus")


def test_a_directory_that_is_no_model(command, tmp_path: Path):
    command("plan", tmp_path, "--gpus", "H100").refused(f"{tmp_path} has no config.json")


def test_weights_quantised_in_a_way_that_plans_do_not_know(command, tmp_path: Path):
    config = {**CONFIG, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command("plan", tmp_path, "--gpus", "H100").refused(
        "weights are quantised by mxfp4", "expected: bf16, fp8, and integers of 8 or 4 bits",
        "--quantization int4")


def test_training_for_a_gpu_without_figures(command):
    words = "no figures of a GPU 'B300'"
    command("train", "--plan", "llama-3.1-8b", "--plan-gpu", "B300").refused(words)
    command("train", "--plan", "--plan-gpu", "H100").refused("no MODEL")
    command("train", "--plan", "llama-3.1-8b", "-dp", "12").refused("12 GPUs are not whole nodes of 8")
