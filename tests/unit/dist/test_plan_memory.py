"""What a plan says a device holds, of several GPUs what is cut and what is not; and the α–β model of
collectives, by hand, and what must hold of every way."""
from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tinygrad_nv.dist.plan.cluster import Cluster, cluster
from tinygrad_nv.dist.plan.collectives import KERNELS, GroupSize, collective, ways
from tinygrad_nv.dist.plan.layout import Inference, Layout, Training, optimizer_share, parameters, rank_config
from tinygrad_nv.dist.plan.memory import inference, memory, most_sequences, training
from tinygrad_nv.dist.plan.presets import names, preset, storage_of
from tinygrad_nv.models.parallel import local_config, stage_config, stage_layers
from tinygrad_nv.tile.all_reduce.cost import choose

DENSE = preset("llama-3.1-8b")
EXPERTS = preset("qwen3-30b-a3b")
# billions of parameters that their makers state
STATED = {"llama-2-7b": 6.74, "llama-2-70b": 69.0, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6,
          "llama-3.1-405b": 406,
          "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "mistral-7b": 7.25, "mixtral-8x7b": 46.7,
          "mixtral-8x22b": 141, "qwen3-8b": 8.2, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
          "qwen3-235b-a22b": 235,
          "deepseek-v3": 671}


@pytest.mark.parametrize("name", names())
def test_a_preset_has_the_parameters_that_its_makers_state(name: str):
    held = parameters(preset(name), Layout(), 0)
    assert held.total == preset(name).parameters
    if name in STATED: assert held.total / 1e9 == pytest.approx(STATED[name], rel=5e-3)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-2-13b", "mixtral-8x7b", "qwen3-235b-a22b",
                                  "deepseek-v3"])
@pytest.mark.parametrize("stages", [1, 3, 4])
def test_stages_hold_the_model_once(name: str, stages: int):
    config = preset(name)
    held = [parameters(config, Layout(pp=stages), stage) for stage in range(stages)]
    assert sum(each.total for each in held) == config.parameters
    for stage in range(stages):     # as the engine's stage has it
        mine, engines = rank_config(config, Layout(pp=stages), stage), stage_config(config, stage, stages)
        assert (mine.num_layers, mine.ropes, mine.windows) == \
            (engines.num_layers, engines.ropes, engines.windows)


def test_the_last_stages_have_one_layer_more():
    """61 layers on 4 stages, as the engine's pipelines have them."""
    deepseek = preset("deepseek-v3")
    assert [rank_config(deepseek, Layout(pp=4), stage).num_layers for stage in range(4)] == [15, 15, 15, 16]
    assert stage_layers(61, 3, 4) == range(45, 61)


@pytest.mark.parametrize(("name", "ranks"), [("llama-3.1-8b", 2), ("llama-3.1-8b", 8), ("llama-3.1-70b", 16),
                                             ("mixtral-8x7b", 4), ("qwen3-8b", 4)])
def test_a_rank_is_cut_as_the_engine_cuts_it(name: str, ranks: int):
    config = preset(name)
    mine, engines = rank_config(config, Layout(tp=ranks), 0), local_config(config, ranks)
    assert replace(mine, vocab_size=config.vocab_size) == engines
    assert mine.vocab_size == -(-config.vocab_size // ranks)


def test_tensor_parallel_ranks_hold_shares_and_all_norms():
    whole, mine = parameters(DENSE, Layout(), 0), parameters(DENSE, Layout(tp=8), 0)
    norms = (2 * DENSE.num_layers + 1) * DENSE.hidden_size
    assert mine.matrices == whole.matrices / 8
    assert mine.others - norms == (whole.others - norms) / 8
    # 8 key/value heads on 16 ranks: each is there twice
    many = parameters(DENSE, Layout(tp=16), 0)
    double = 2 * DENSE.hidden_size * DENSE.head_dim * DENSE.num_layers
    assert many.matrices - double == (whole.matrices - 8 * double) / 16


def test_experts_are_sliced_or_dealt():
    whole = parameters(EXPERTS, Layout(), 0)
    sliced, dealt = parameters(EXPERTS, Layout(tp=4), 0), parameters(EXPERTS, Layout(tp=4, ep=4), 0)
    assert sliced.experts == dealt.experts == whole.experts / 4
    assert sliced.total == dealt.total
    assert parameters(EXPERTS, Layout(dp=8, ep=8), 0).experts == whole.experts / 8
    assert optimizer_share(whole, Layout(dp=8)) == whole.total / 8
    dealt = parameters(EXPERTS, Layout(dp=8, ep=4), 0)     # each expert on two of eight ranks
    assert optimizer_share(dealt, Layout(dp=8, ep=4)) == (dealt.total - dealt.experts) / 8 + dealt.experts / 2


def test_a_cache_of_latents_is_on_every_rank():
    work = Inference(4, 1000, 24)
    one, many = (inference(preset("deepseek-v3"), Layout(tp=tp), work, 0)["KV cache"] for tp in (1, 8))
    assert one == many
    dense = [inference(DENSE, Layout(tp=tp), work, 0)["KV cache"] for tp in (1, 8)]
    assert dense[0] == 8 * dense[1] == 4 * 65 * 16 * 2 * 8 * 128 * 2 * DENSE.num_layers


def test_windows_bound_the_cache():
    config = replace(DENSE, windows=(512,) * DENSE.num_layers)
    short, long = (inference(config, Layout(), Inference(1, tokens, 1), 0)["KV cache"]
                   for tokens in (4096, 65536))
    assert short == long == 33 * 16 * 2 * 8 * 128 * 2 * DENSE.num_layers


def test_quantised_matrices_and_float_embeddings():
    held = parameters(DENSE, Layout(), 0)
    for kind, size in (("bf16", 2), ("fp8", 1), ("int8", 1), ("int4", .5)):
        found = inference(DENSE, Layout(), Inference(quantization=kind), 0)["weights"]
        assert found == held.matrices * size + held.others * 2


@pytest.mark.parametrize(("given", "expected"), [
    (None, "bf16"), ({"quant_method": "fp8"}, "fp8"), ({"quant_method": "gptq", "bits": 4}, "int4"),
    ({"quant_method": "awq", "bits": 8}, "int8"), ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    ({"quant_method": "compressed-tensors",
      "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8"),
    ({"quant_method": "compressed-tensors",
      "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}, "int4")])
def test_how_a_checkpoint_is_stored(given: dict[str, object] | None, expected: str):
    assert storage_of(replace(DENSE, quantization=given)) == expected


def test_zero_shares_out_what_it_says():
    """bf16 weights, float32 master, AdamW and gradients, of 8 ranks: the ZeRO paper's 16 bytes and 4 more, as
    gradients are float32."""
    whole = DENSE.parameters
    def parts(zero: int) -> dict[str, int]: return training(DENSE, Layout(dp=8), Training(16, zero=zero), 0)
    assert [parts(0)[name] for name in ("weights", "master weights", "AdamW", "gradients")] == \
        [2 * whole, 4 * whole, 8 * whole, 4 * whole]
    assert [parts(1)[name] for name in ("weights", "master weights", "AdamW", "gradients")] == \
        [2 * whole, whole / 2, whole, 4 * whole]
    resident = 2 * (DENSE.parameters - 2 * 128256 * 4096) / 32 + 2 * 128256 * 4096
    assert parts(2)["gradients"] == pytest.approx(whole / 2 + 4 * resident, rel=1e-6)
    assert parts(3)["weights"] == pytest.approx(2 * resident, rel=1e-6)
    assert parts(3)["gradients"] == parts(2)["gradients"]


def test_recomputation_sequence_parallel_and_stages_hold_fewer_activations():
    def kept(layout: Layout, **settings: object) -> int:
        return training(DENSE, layout, Training(16, zero=1, **settings), 0)["activations"]  # type: ignore[arg-type]
    none, selective, full = (kept(Layout(dp=8), recompute=what) for what in ("none", "selective", "full"))
    layer = 2 * 8192 * 4096
    assert none > selective > full > 32 * layer
    assert full - kept(Layout(pp=2, dp=4), recompute="full") == \
        pytest.approx(32 * layer - 2 * 16 * layer, abs=1)     # two microbatches are under way on 16 layers
    assert kept(Layout(tp=8), recompute="full") - kept(Layout(tp=8, sp=True), recompute="full") == \
        pytest.approx(7 / 8 * (32 + 4) * layer, rel=1e-6)


def test_zero_bubble_keeps_as_many_microbatches_on_every_stage():
    def kept(schedule: str) -> list[int]:
        work = Training(32, zero=0, recompute="none", schedule=schedule)
        return [training(DENSE, Layout(pp=4), work, stage)["activations"] for stage in range(4)]
    assert len(set(kept("zero-bubble"))) == 1
    assert kept("zero-bubble")[0] == kept("1f1b")[0] > kept("1f1b")[3]


def test_the_fullest_stage_counts():
    held = memory(DENSE, Layout(pp=4), Training(8, zero=0), cluster("4xH100"))
    assert held.stage == 0      # most microbatches under way
    work = Training(1, seq_len=16384, zero=0, recompute="full")
    held = memory(DENSE, Layout(pp=4), work, cluster("4xH100"))
    assert (held.stage, held.of("logits")) == (3, 16384 * 128256 * 8)


def test_as_many_sequences_as_fit():
    where, work = cluster("4xH100"), Inference(1, 4096, 1024)
    for layout in (Layout(tp=4), Layout(tp=2, dp=2), Layout(dp=4)):
        most = most_sequences(DENSE, layout, work, where)
        assert most % layout.dp == 0
        assert memory(DENSE, layout, replace(work, batch=most), where).fits
        assert not memory(DENSE, layout, replace(work, batch=most + layout.dp), where).fits
    assert most_sequences(preset("llama-3.1-405b"), Layout(tp=4), work, where) == 0


# **** collectives ****


MIB = 1 << 20
NODE, TWO, PCIE = cluster("8xH100"), cluster("8xH100", nodes=2), cluster("4xL40S")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def way(kind: str, nbytes: float, group: GroupSize, where: Cluster, name: str) -> float:
    return next(each.seconds for each in ways(kind, nbytes, group, where) if each.algorithm == name)


def test_a_ring_by_hand():
    """NCCL's latencies: a launch, and 14 hops of 3.4 us; 7/4 of the bytes at 370.8 GB/s."""
    found = way("all_reduce", 64 * MIB, GroupSize(8, 8), NODE, "ring Simple")
    assert found == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 1.75 * 64 * MIB / 370.8e9)
    half = way("all_gather", 64 * MIB, GroupSize(8, 8), NODE, "ring Simple")
    assert half == pytest.approx(8.4e-6 + 7 * 3.4e-6 + .875 * 64 * MIB / 370.8e9)


def test_a_ring_over_two_nodes_by_hand():
    """30 hops, two of them between nodes; a rank of each node: one adapter of 47 GB/s."""
    found = way("all_reduce", 64 * MIB, GroupSize(16, 8), TWO, "ring Simple")
    assert found == pytest.approx(8.4e-6 + 28 * 3.4e-6 + 2 * 14e-6 + 1.875 * 64 * MIB / 370.8e9)
    apart = way("all_reduce", 64 * MIB, GroupSize(2, 1), TWO, "ring Simple")
    assert apart == pytest.approx(8.4e-6 + 2 * 14e-6 + 64 * MIB / 47e9)


def test_kernels_over_peer_memory_by_hand():
    """Latency and rate of tile/all_reduce/cost.py; NVLink 3 has 240 of NVLink 4's 370.8 GB/s."""
    one = way("all_reduce", MIB, GroupSize(4, 4), NODE, "one-shot")
    assert one == pytest.approx(5.3e-6 + 3 * MIB / 350e9)
    slower = way("all_reduce", MIB, GroupSize(4, 4), cluster("4xA100"), "one-shot")
    assert slower == pytest.approx(5.3e-6 + 3 * MIB / 350e9 * 370.8 / 240)
    two = way("all_reduce", 8 * MIB, GroupSize(4, 4), NODE, "two-shot")
    assert two == pytest.approx(12.5e-6 + 1.5 * 8 * MIB / 260e9)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("kib", [1, 256, 257, 512, 513, 2048, 2049, 1 << 15, (1 << 15) + 1, 1 << 17])
def test_a_plan_has_the_kernel_that_a_graph_has(ranks: int, kib: int):
    """tile/all_reduce/cost.py says which one, by size."""
    found = {each.algorithm for each in ways("all_reduce", kib << 10, GroupSize(ranks, ranks), NODE)
             if each.algorithm in KERNELS.values()}
    chosen = choose(ranks, kib << 10)
    assert found == ({KERNELS[chosen]} if chosen else set())


def test_experts_tokens_by_hand():
    """Of 16 ranks' shares half stay in the node, one sixteenth at home."""
    found = way("all_to_all", 16 * MIB, GroupSize(16, 8), TWO, "pairs")
    assert found == pytest.approx(14e-6 + 4e-6 + 8 * MIB / 47e9)
    near = way("all_to_all", 16 * MIB, GroupSize(8, 8), NODE, "pairs")
    assert near == pytest.approx(14e-6 + 14 * MIB / 370.8e9)


@pytest.mark.parametrize(("nbytes", "name"), [(16 << 10, "one-shot"), (MIB, "ring LL"), (16 * MIB, "NVLS")])
def test_the_fastest_of_eight_by_size(nbytes: int, name: str):
    assert collective("all_reduce", nbytes, GroupSize(8, 8), NODE).algorithm == name


def test_what_hardware_lacks_is_not_used():
    def named(where: Cluster, peer: bool = True) -> set[str]:
        return {each.algorithm.split()[0] for each in ways("all_reduce", MIB, GroupSize(4, 4), where, peer)}
    assert named(NODE) == {"ring", "tree", "NVLS", "one-shot"}
    assert named(NODE, peer=False) == {"ring", "tree", "NVLS"}
    assert named(cluster("4xA100")) == {"ring", "tree", "one-shot"}
    assert named(PCIE) == {"ring", "tree"}
    two = {each.algorithm for each in ways("all_reduce", MIB, GroupSize(2, 2), NODE)}
    assert "NVLS" not in two


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_take_longer_and_nothing_is_faster_than_its_wire(kind: str):
    for where, group in ((NODE, GroupSize(8, 8)), (TWO, GroupSize(16, 8)), (PCIE, GroupSize(4, 4))):
        sizes = (1 << 10, 1 << 16, 1 << 22, 1 << 28)
        times = [collective(kind, size, group, where).seconds for size in sizes]
        assert all(a < b for a, b in itertools.pairwise(times))
        least = (1 << 28) / group.ranks / where.device.link.bytes_per_s
        assert times[-1] > least


@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_slower_network_is_slower(kind: str):
    slow = replace(TWO, net=cluster("8xH100", 2, "100G").net)
    assert collective(kind, 1 << 28, GroupSize(16, 8), slow).seconds > \
        1.5 * collective(kind, 1 << 28, GroupSize(16, 8), TWO).seconds


def test_one_rank_waits_for_none():
    assert collective("all_reduce", MIB, GroupSize(1, 1), NODE).seconds == 0
