"""How a model is divided over GPUs, and the work that they do: types, and which layouts are impossible.

Protocol: `Layout(tp=8, pp=2, dp=4)` takes tp · pp · dp GPUs. Ranks of a tensor-parallel group are neighbours,
then come the ranks of a pipeline, then data-parallel ones. With `ep`, experts are whole on `ep` of the tp ·
dp ranks of a pipeline stage; with ep = 1 they are sliced by tp like all other matrices. `require(layout,
config, cluster, work)` raises `PlanError` for an impossible layout, with the numbers that would divide.

`rank_config(config, layout, stage)` is the model that a rank of a pipeline stage computes: its layers (those
that the engine gives the stage: models/parallel.py), its heads, its columns, its experts. Stages are numbered
as layers follow each other: 0 has the embedding, the last one the head, whichever ranks run them. All sizes,
and the engine's estimates of memory, follow from it. Key/value heads of which there are fewer than ranks are
held by several. `parameters(config, layout, stage)` counts what is stored; with one rank that is
`config.parameters`.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from tinygrad_nv.dist.plan.cluster import Cluster, figures
from tinygrad_nv.dist.plan.collectives import GroupSize
from tinygrad_nv.errors import PlanError
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.parallel import stage_layers

HALF = 2        # bytes of an element of hidden states, norms, embeddings: bf16
DTYPES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}   # bytes of an element of a matrix
KV_DTYPES = {"bf16": 2, "fp8": 1}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
RECOMPUTES = ("none", "selective", "full")
ZEROS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Layout:
    """Ranks of each kind of parallelism; `sp`: hidden states between tensor-parallel matmuls are sharded by
    tokens (sequence parallel)."""
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    sp: bool = False

    @property
    def gpus(self) -> int:
        """Number of GPUs that it takes."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        named = [f"{name} {ranks}" for name in ("tp", "pp", "dp", "ep") if (ranks := getattr(self, name)) > 1]
        return ", ".join([*named, *["sp"] * self.sp]) or "one GPU"

    def tensor_group(self, cluster: Cluster) -> GroupSize:
        """Ranks that hold slices of the same matrices."""
        return GroupSize(self.tp, min(self.tp, cluster.per_node))

    def data_group(self, cluster: Cluster) -> GroupSize:
        """Ranks that hold the same slices."""
        near = self.tp * self.dp <= cluster.per_node
        return GroupSize(self.dp, self.dp if near else max(1, cluster.per_node // self.tp))

    def expert_group(self, cluster: Cluster) -> GroupSize:
        """Ranks that tokens are sent among."""
        return GroupSize(self.ep, min(self.ep, cluster.per_node))

    def stages_apart(self, cluster: Cluster) -> GroupSize:
        """Two neighbouring stages."""
        return GroupSize(2, 2 if self.gpus <= cluster.per_node else 1)


def achievable(name: str) -> float:
    """A share of figures.toml."""
    share: float = figures()["achieved"][name]
    return share


@dataclass(frozen=True)
class Inference:
    """`batch` sequences in all at once, each with `input_len` tokens of prompt and `output_len` to make.
    `quantization`: of matrices, and of what they are multiplied with for fp8; `max_tokens` of a step of
    prefill. `achievable`: of the modelled rates of kernels."""
    batch: int = 1
    input_len: int = 1024
    output_len: int = 128
    quantization: str = "bf16"
    kv_dtype: str = "bf16"
    utilization: float = 0.9
    max_tokens: int = 8192
    achieved: float = field(default_factory=lambda: achievable("inference"))


@dataclass(frozen=True)
class Training:
    """`batch` sequences of `seq_len` tokens in a step of all GPUs, `microbatch` of them at a time on each
    data-parallel rank. Matrices are multiplied in `precision`; master weights, gradients' sums and AdamW's
    states are float32. `grad_bytes`: of an element of gradients on the wire. `virtual`: chunks of layers of a
    stage, interleaved. `overlap_tp`: collectives of tensor parallelism run beside the matmuls that need them,
    which hides the share `overlap`. `achievable`: of the modelled rates of kernels."""
    batch: int = 8
    seq_len: int = 8192
    microbatch: int = 1
    precision: str = "bf16"
    zero: int = 3
    recompute: str = "selective"
    schedule: str = "1f1b"
    virtual: int = 1
    grad_bytes: int = 4
    overlap_tp: bool = False
    utilization: float = 0.95
    achieved: float = field(default_factory=lambda: achievable("training"))
    overlap: float = field(default_factory=lambda: achievable("overlap"))


Work = Inference | Training


def require(layout: Layout, config: ModelConfig, cluster: Cluster, work: Work) -> None:
    """Raises `PlanError` for a layout that cannot be."""
    for problem in (_of_gpus(layout, cluster), _of_model(layout, config), _of_experts(layout, config),
                    _of_work(layout, config, cluster, work)):
        if problem is not None: raise problem


def divisors(number: int) -> tuple[int, ...]:
    """Returns the divisors of a number, the smallest first."""
    return tuple(i for i in range(1, number + 1) if number % i == 0)


def _list_numbers(numbers: tuple[int, ...]) -> str: return ", ".join(map(str, numbers))


def _of_gpus(layout: Layout, cluster: Cluster) -> PlanError | None:
    for name in ("tp", "pp", "dp", "ep"):
        if getattr(layout, name) < 1: return PlanError(f"--{name} {getattr(layout, name)}", "1 or more")
    if layout.gpus == cluster.gpus: return None
    product = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}"
    rest = cluster.gpus // (layout.tp * layout.pp)
    whole = layout.tp * layout.pp * rest == cluster.gpus
    return PlanError(f"{product} are {layout.gpus} GPUs, of {cluster.gpus}",
                     f"numbers whose product is {cluster.gpus}",
                     f"--dp {rest}" if whole else f"tp and pp that divide {cluster.gpus}")


def _of_model(layout: Layout, config: ModelConfig) -> PlanError | None:
    heads, kv, width = config.num_heads, config.num_kv_heads, config.intermediate_size
    if config.has_states:
        return PlanError(f"{config.architecture}, whose layers keep states", "a model of attention alone",
                         "plan a model of its size")
    if heads % layout.tp:
        return PlanError(f"--tp {layout.tp} does not divide {heads} heads",
                         f"one of {_list_numbers(divisors(heads))}")
    if config.latent is None and kv % layout.tp and layout.tp % kv:
        return PlanError(f"--tp {layout.tp} of {kv} key/value heads", f"a divisor or a multiple of {kv}")
    if width % layout.tp:
        return PlanError(f"--tp {layout.tp} does not divide intermediate_size {width}", "a divisor")
    if layout.pp > config.num_layers:
        return PlanError(f"--pp {layout.pp} of {config.num_layers} layers",
                         f"at most {config.num_layers}: a stage has a layer at least")
    if layout.sp and layout.tp == 1:
        return PlanError("--sp without tensor parallelism", "--tp of 2 or more", "leave --sp out")
    return None


def _of_experts(layout: Layout, config: ModelConfig) -> PlanError | None:
    if config.moe is None:
        if layout.ep == 1: return None
        return PlanError(f"--ep {layout.ep} of a model without experts", "--ep 1", "leave --ep out")
    if layout.ep == 1:
        if config.moe.width % layout.tp == 0: return None
        return PlanError(f"--tp {layout.tp} does not divide experts of {config.moe.width} columns",
                         "a divisor", f"--ep {layout.tp}, which leaves experts whole")
    if config.moe.experts % layout.ep:
        return PlanError(f"--ep {layout.ep} does not divide {config.moe.experts} experts",
                         f"one of {_list_numbers(divisors(config.moe.experts))}")
    if (layout.tp * layout.dp) % layout.ep or layout.ep % layout.tp:
        return PlanError(f"--ep {layout.ep} of {layout.tp} x {layout.dp} ranks of a stage",
                         f"a multiple of tp {layout.tp} that divides {layout.tp * layout.dp}")
    return None


def _of_work(layout: Layout, config: ModelConfig, cluster: Cluster, work: Work) -> PlanError | None:
    kind = work.quantization if isinstance(work, Inference) else work.precision
    known = DTYPES if isinstance(work, Inference) else ("bf16", "fp8")
    if kind not in known: return PlanError(f"matrices of {kind}", f"one of {', '.join(known)}")
    if kind == "fp8" and not cluster.device.fp8:
        return PlanError(f"fp8 on {cluster.device.name}",
                         "a GPU whose tensor cores take 8-bit floats: H100, H200, L40S",
                         "use bf16" + ", int8 or int4" * isinstance(work, Inference))
    if isinstance(work, Inference): return _of_inference(layout, work)
    return _of_training(layout, config, work)


def _of_inference(layout: Layout, work: Inference) -> PlanError | None:
    if layout.sp:
        return PlanError("--sp of inference", "sequence parallel training: --train", "leave --sp out")
    if work.kv_dtype not in KV_DTYPES:
        return PlanError(f"keys and values of {work.kv_dtype}", f"one of {', '.join(KV_DTYPES)}")
    if min(work.batch, work.input_len, work.output_len) < 1:
        return PlanError(f"batch {work.batch} of {work.input_len} + {work.output_len} tokens",
                         "1 or more of each")
    if work.batch % layout.dp:
        return PlanError(f"batch {work.batch} over dp {layout.dp}", f"a multiple of {layout.dp}",
                         f"--batch {-(-work.batch // layout.dp) * layout.dp}")
    return None


def _of_training(layout: Layout, config: ModelConfig, work: Training) -> PlanError | None:
    for what, word, known in (("zero", work.zero, ZEROS), ("recompute", work.recompute, RECOMPUTES),
                              ("schedule", work.schedule, SCHEDULES)):
        if word not in known:
            return PlanError(f"--{what} {word}", f"one of {', '.join(map(str, known))}")
    each = layout.dp * work.microbatch
    if min(work.batch, work.seq_len, work.microbatch) < 1 or work.batch % each:
        return PlanError(f"batch {work.batch} in microbatches of {work.microbatch} over dp {layout.dp}",
                         f"a multiple of {each}", f"--batch {max(1, -(-work.batch // each)) * each}")
    if work.virtual > 1 and work.schedule != "interleaved":
        return PlanError(f"--virtual {work.virtual} with the schedule {work.schedule}", "interleaved")
    if work.schedule == "interleaved" and layout.pp * work.virtual > config.num_layers:
        return PlanError(f"pp {layout.pp} x {work.virtual} chunks of {config.num_layers} layers",
                         f"at most {config.num_layers} chunks", "lower --virtual")
    if work.schedule == "interleaved" and (microbatches := work.batch // each) % layout.pp:
        return PlanError(f"{microbatches} microbatches of a rank, interleaved over pp {layout.pp}",
                         f"a multiple of {layout.pp}",
                         f"--batch {-(-microbatches // layout.pp) * layout.pp * each}, or --schedule 1f1b")
    return None


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of one rank: `matrices` are multiplied and can be quantised, `experts` of them
    those of experts; `others` are the embedding, the head, norms and routers."""
    matrices: int
    experts: int
    others: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.others


def rank_config(config: ModelConfig, layout: Layout, stage: int) -> ModelConfig:
    """The share of a rank of a stage. Raises nothing: `layout.require` comes first."""
    layers, tp = stage_layers(config.num_layers, stage, layout.pp), layout.tp
    part = slice(layers.start, layers.stop)
    moe = config.moe
    if moe is not None:
        mine = moe.experts // layout.ep
        moe = replace(moe, experts=mine, width=moe.width if layout.ep > 1 else moe.width // tp,
                      shared_width=-(-moe.shared_width // tp), layers=moe.layers[part])
        if not any(moe.layers): moe = None
    return replace(config, num_layers=len(layers), num_heads=config.num_heads // tp,
                   num_kv_heads=max(1, config.num_kv_heads // tp), head_dim=config.head_dim,
                   intermediate_size=config.intermediate_size // tp, vocab_size=-(-config.vocab_size // tp),
                   ropes=config.ropes[part], windows=config.windows[part], moe=moe)


def parameters(config: ModelConfig, layout: Layout, stage: int) -> Parameters:
    """Returns the numbers of parameters that a rank of a stage stores."""
    rank = rank_config(config, layout, stage)
    ends = rank.hidden_size * (rank.vocab_size * (2 - rank.tied) + 1)
    layers = rank.parameters - ends
    norms = rank.num_layers * rank.hidden_size * len(rank.names.norms)
    routers = experts = 0
    if rank.moe is not None and config.moe is not None:
        mixtures = sum(rank.moe.layers)
        experts = mixtures * 3 * rank.hidden_size * rank.moe.width * rank.moe.experts
        routers = mixtures * rank.hidden_size * config.moe.experts
        layers += mixtures * rank.hidden_size * (config.moe.experts - rank.moe.experts)
    first, last = stage == 0, stage == layout.pp - 1
    vocabulary = rank.hidden_size * rank.vocab_size
    kept = vocabulary * first + (vocabulary * (not (rank.tied and first)) + rank.hidden_size) * last
    return Parameters(layers - norms - routers, experts, kept + norms + routers)


def optimizer_share(held: Parameters, layout: Layout) -> float:
    """Parameters whose optimizer states a rank has where data-parallel ranks share them out: experts are on
    some of these only."""
    copies = max(1, layout.tp * layout.dp // layout.ep) if layout.ep > 1 else layout.dp
    return (held.total - held.experts) / layout.dp + held.experts / copies
