"""Options of a run of training, by the names of transformers' TrainingArguments, TRL and PEFT.

Protocol: `TrainingArguments` is frozen and checked. Each field is an option of `tinygrad-nv train`
(--max-steps, or --max_steps as transformers spells it) and a key of a --config file (YAML or JSON); the
command line wins. Defaults are TRL's where it has one, for `sft`.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.numerics import RECIPES, PrecisionRecipe
from tinygrad_nv.numerics.recipes import ALGORITHMS, FORMATS, NAMES, DelayedScaling
from tinygrad_nv.quant.readers.online import SCHEMES as ONLINE
from tinygrad_nv.train.data import DataOptions
from tinygrad_nv.train.optimizers import SCHEDULES
from tinygrad_nv.train.regions import POLICIES, Policy

METHODS = ("sft", "dpo")
DTYPES = {"float32": dtypes.float32, "bfloat16": dtypes.bfloat16, "float16": dtypes.float16}
# names of transformers' --optim: the rule, the bits of its state, and whether that is on the host
OPTIMIZERS = {"adamw_torch": ("adamw", 32, False), "adamw_torch_fused": ("adamw", 32, False),
              "adamw": ("adamw", 32, False), "adamw_8bit": ("adamw", 8, False),
              "adamw_bnb_8bit": ("adamw", 8, False), "paged_adamw_32bit": ("adamw", 32, True),
              "lion_32bit": ("lion", 32, False), "lion_8bit": ("lion", 8, False),
              "paged_lion_32bit": ("lion", 32, True), "muon": ("muon", 32, False),
              "adafactor": ("adafactor", 32, False), "sgd": ("sgd", 32, False)}
FLAGS_OF_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}     # flags of transformers for a dtype
# values of booleans that transformers takes
TRUTHS = {**dict.fromkeys(("true", "yes", "t", "y", "1"), True),
          **dict.fromkeys(("false", "no", "f", "n", "0"), False)}
SAVES = ("steps", "epoch", "no")
FOUR_BITS = "bitsandbytes"      # of `ONLINE`, as vLLM calls it
# words that YAML takes for booleans
YAML_WORDS = {("save_strategy", False): "no", ("resume_from_checkpoint", True): "latest"}
WHOLE_MATRICES = ("muon", "adafactor")
PIPELINE_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


def option(default: Any, words: str, group: str = "training", metavar: str | None = None) -> Any:
    """A field with the help of its option."""
    return field(default=default, metadata={"help": words, "group": group, "metavar": metavar})


@dataclass(frozen=True)
class TrainingArguments:
    """Arguments of a run. Raises `ConfigError` for what cannot be."""
    output_dir: str = option("trained", "directory for checkpoints and the trained model", metavar="DIR")
    method: str = option("sft", f"{', '.join(METHODS)}: what is learnt of the data")
    from_scratch: bool = option(False, "new weights for MODEL's config.json, in place of its own")
    dtype: str = option("float32", f"{', '.join(DTYPES)}: of weights; those of 16 bits have float32 "
                        "master weights, float16 a scaled loss")
    precision: str | None = option(None, f"{', '.join(RECIPES)}: what is computed and kept in how many bits "
                                   "(default: the recipe of --dtype)", "precision", "NAME")
    fp8_exclude: tuple[str, ...] = option((), "matrices that are not in FP8: names, * stands for any text",
                                          "precision", "NAME")
    fp8_format: str | None = option(None, f"{', '.join(FORMATS)}: e4m3, gradients in e5m2, or all in e4m3 "
                                    "(default: hybrid; of blocks e4m3)", "precision", "NAME")
    fp8_margin: int = option(0, "delayed scaling: powers of two left above the largest magnitude",
                             "precision", "N")
    fp8_amax_history_len: int = option(1024, "delayed scaling: steps that are looked back on", "precision",
                                       "N")
    fp8_amax_compute_algo: str = option("max", f"{', '.join(ALGORITHMS)}: delayed scaling: which of them "
                                        "decides", "precision", "NAME")
    seed: int = option(42, "of new weights, the order of data, dropout")

    max_steps: int = option(-1, "steps in all; -1: as many as --num-train-epochs has")
    num_train_epochs: float = option(3.0, "passes over the data")
    per_device_train_batch_size: int = option(8, "rows of a micro-batch")
    gradient_accumulation_steps: int = option(1, "micro-batches of a step")
    learning_rate: float = option(2e-5, "the peak; for adapters about 10 times that")
    lr_scheduler_type: str = option("linear", ", ".join(SCHEDULES))
    warmup_steps: int = option(0, "steps in which the learning rate rises")
    warmup_ratio: float = option(0.0, "the same as a share of all steps")
    min_lr_rate: float = option(0.0, "the least share of the peak (cosine_with_min_lr)")
    lr_decay_steps: int = option(0, "the last steps, in which it falls (warmup_stable_decay)")
    optim: str = option("adamw_torch", ", ".join(OPTIMIZERS))
    weight_decay: float = option(0.0, "of matrices; norms, biases and embeddings have none")
    adam_beta1: float = option(0.9, "decay of the mean of gradients")
    adam_beta2: float = option(0.999, "decay of the mean of their squares")
    adam_epsilon: float = option(1e-8, "added to its root")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm; 0: not")
    label_smoothing_factor: float = option(0.0, "share of a label that all tokens have")
    z_loss: float = option(0.0, "weight of the square of log-sum-exp in the loss")

    max_length: int = option(1024, "tokens of a row", "data")
    packing: bool = option(False, "several documents in a row, without attention across", "data")
    packing_strategy: str = option("bfd", "bfd, bfd_split, wrapped", "data")
    sample_by: str = option("document", "of .txt: document, paragraph or line", "data")
    shard_dtype: str = option("auto", "of .bin: uint16, uint32", "data")
    shuffle: bool = option(True, "rows in a random order, another in each epoch", "data")
    completion_only_loss: bool | None = option(None, "loss on completions alone (default: where there are "
                                               "prompts)", "data")
    assistant_only_loss: bool | None = option(None, "loss on the assistant's messages alone (default: yes)",
                                              "data")
    eos_token: str | None = option(None, "ends a document, in place of the tokenizer's", "data", "TOKEN")

    gradient_checkpointing: bool = option(False, "compute layers again for the backward pass", "memory")
    gradient_checkpointing_policy: str = option("full", f"{', '.join(POLICIES)}, or the share of activations "
                                                "that is kept (0.5): what layers keep", "memory")

    eval_data: tuple[str, ...] = option((), "files to evaluate on", "evaluation", "FILE")
    eval_steps: int = option(0, "evaluate every N steps; 0: at the end", "evaluation")
    eval_batches: int = option(0, "batches of an evaluation at most; 0: all", "evaluation")
    sample_prompts: tuple[str, ...] = option((), "continued at each evaluation", "evaluation", "TEXT")
    sample_tokens: int = option(60, "tokens of a sample", "evaluation")

    save_strategy: str = option("steps", ", ".join(SAVES), "saving")
    save_steps: int = option(500, "a checkpoint every N steps", "saving")
    save_total_limit: int = option(2, "checkpoints that are kept", "saving")
    save_asynchronous: bool = option(False, "write checkpoints beside the next steps; one that a kill "
                                     "interrupts is lost, and with it up to two intervals", "saving")
    resume_from_checkpoint: str | None = option(None, "latest, or a directory checkpoint-N", "saving", "DIR")
    overwrite_output_dir: bool = option(False, "remove checkpoints of another run first", "saving")

    logging_steps: int = option(1, "a line every N steps", "logging")
    log_file: str | None = option(None, "JSON lines, one for each logged step (default: "
                                  "OUTPUT_DIR/log.jsonl)", "logging", "FILE")
    report_to: str = option("auto", "auto, tensorboard, none", "logging")

    use_peft: bool = option(False, "train an adapter (LoRA)", "adapter")
    lora_r: int = option(16, "its rank", "adapter")
    lora_alpha: float = option(32.0, "it is scaled by alpha / rank", "adapter")
    lora_dropout: float = option(0.05, "share of its inputs that are dropped; with dpo none are", "adapter")
    lora_target_modules: tuple[str, ...] = option((), "ends of names of layers, or all-linear (default)",
                                                  "adapter", "NAME")
    use_rslora: bool = option(False, "scale by alpha / √rank", "adapter")
    quantization: str | None = option(None, f"{', '.join(ONLINE)}: quantise the weights that the adapter is "
                                      "trained on as they are read (default: as they are)", "adapter", "NAME")
    load_in_4bit: bool = option(False, "--quantization bitsandbytes: nf4 (QLoRA)", "adapter")

    data_parallel_size: int = option(0, "ranks, each with its rows of a batch (0: as many as a launcher has "
                                     "started, or 1)", "several devices", "N")
    zero_stage: int = option(0, "0: every rank updates all weights; 1: its part of them; 2: and adds up its "
                             "part of gradients alone; 3: and keeps its part of weights alone",
                             "several devices", "N")
    tensor_parallel_size: int = option(1, "ranks that have each layer together", "several devices", "N")
    sequence_parallel: bool = option(False, "tensor parallel ranks have parts of tokens between layers",
                                     "several devices")
    pipeline_parallel_size: int = option(1, "stages of layers", "several devices", "N")
    pipeline_schedule: str | None = option(None, f"{', '.join(PIPELINE_SCHEDULES)}: the order of "
                                           "micro-batches in stages, interleaved with two stages a rank "
                                           "(default: 1f1b)",
                                           "several devices", "NAME")
    context_parallel_size: int = option(1, "ranks that have parts of each row", "several devices", "N")
    enable_expert_parallel: bool = option(False, "ranks have some experts whole", "several devices")
    max_restarts: int = option(0, "after a rank failed, start all again from the last checkpoint, so many "
                               "times", "several devices", "N")

    beta: float = option(0.1, "how far from the reference model preferences may lead", "dpo")

    def __post_init__(self) -> None:
        self._require_choices()
        for name, least in (("per_device_train_batch_size", 1), ("gradient_accumulation_steps", 1),
                            ("logging_steps", 1), ("save_steps", 1), ("save_total_limit", 1), ("lora_r", 1),
                            ("max_length", 2), ("warmup_steps", 0), ("eval_steps", 0), ("seed", 0),
                            ("eval_batches", 0), ("sample_tokens", 1), ("lr_decay_steps", 0),
                            ("data_parallel_size", 0), ("tensor_parallel_size", 1),
                            ("pipeline_parallel_size", 1), ("context_parallel_size", 1), ("max_restarts", 0)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value}", f"{least} or more", "raise it")
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "beta", "lora_alpha", "z_loss",
                     "adam_epsilon", "num_train_epochs"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {value}", "a number from 0", "correct it")
        for name in ("lora_dropout", "label_smoothing_factor", "warmup_ratio", "adam_beta1", "adam_beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}", "0 to less than 1", "correct it")
        if self.max_steps < 1 and not self.num_train_epochs > 0:
            raise ConfigError(f"--num-train-epochs {self.num_train_epochs}", "more than 0", "or --max-steps")
        Policy.read(self.gradient_checkpointing_policy)
        if self.lr_scheduler_type == "warmup_stable_decay" and not self.lr_decay_steps:
            raise ConfigError("--lr-scheduler-type warmup_stable_decay without decay", "--lr-decay-steps N",
                              "say in how many of the last steps the learning rate falls")
        if self.from_scratch and self.use_peft:
            raise ConfigError("--use-peft with --from-scratch", "an adapter on weights that are saved",
                              "leave one out")
        if self.online is not None and not self.use_peft:
            raise ConfigError(f"--quantization {self.online} without --use-peft", "an adapter, which is what "
                              "is trained on quantised weights", "add --use-peft, or leave it out")
        if self.load_in_4bit and self.quantization not in (None, FOUR_BITS):
            raise ConfigError(f"--load-in-4bit with --quantization {self.quantization}", FOUR_BITS,
                              "leave one out")
        if self.method == "dpo" and (self.label_smoothing_factor or self.z_loss):
            raise ConfigError("--label-smoothing-factor or --z-loss with --method dpo", "the loss of DPO",
                              "leave them out")
        if self.method == "dpo" and self.packing:
            raise ConfigError("--packing of preferences", "a row for each answer", "leave --packing out")
        self._require_ranks()
        self._require_pipeline()
        self._require_precision()

    def _require_ranks(self) -> None:
        """Requires options that go with parts of weights."""
        self._require_cut()
        if not 0 <= self.zero_stage <= 3:
            raise ConfigError(f"--zero-stage {self.zero_stage}", "0, 1, 2 or 3", "choose one")
        if self.zero_stage == 3 and self.use_peft:
            raise ConfigError("--zero-stage 3 with --use-peft", "weights that are all trained",
                              "choose --zero-stage 2, or leave --use-peft out")
        if self.zero_stage and OPTIMIZERS[self.optim][0] in WHOLE_MATRICES:
            raise ConfigError(f"--optim {self.optim} with --zero-stage {self.zero_stage}, whose ranks have "
                              "parts of matrices", "adamw, lion or sgd, which treat elements alike",
                              "choose one of these, or --zero-stage 0")

    def _require_pipeline(self) -> None:
        """Requires options that stages of a pipeline can do."""
        ranks, order = self.pipeline_parallel_size, self.pipeline_schedule
        if ranks == 1:
            if order is None: return
            raise ConfigError(f"--pipeline-schedule {order} without stages", "--pipeline-parallel-size N",
                              "say how many stages there are, or leave it out")
        refused = {"--method dpo": self.method == "dpo", "--use-peft": self.use_peft,
                   "--zero-stage 3": self.zero_stage == 3, "--sample-prompts": bool(self.sample_prompts),
                   f"--precision {self.precision}": self.recipe.fp8 is not None}
        if found := [name for name, asked in refused.items() if asked]:
            raise ConfigError(f"{found[0]} with --pipeline-parallel-size {ranks}",
                              "one of both: a stage has some layers alone", "leave one of them out")
        if order != "interleaved": return
        if self.zero_stage == 2:
            raise ConfigError("--zero-stage 2 with --pipeline-schedule interleaved, whose ranks have the "
                              "gradients of one of their stages at a time", "--zero-stage 1, or 1f1b",
                              "choose one of these")
        if self.gradient_accumulation_steps % ranks:
            raise ConfigError(f"--pipeline-schedule interleaved with --gradient-accumulation-steps "
                              f"{self.gradient_accumulation_steps}", f"a multiple of {ranks} micro-batches",
                              "change it, or choose 1f1b")

    def _require_cut(self) -> None:
        """Requires options that go with parts of layers."""
        if self.tensor_parallel_size == 1:
            for name in ("sequence_parallel", "enable_expert_parallel"):
                if getattr(self, name):
                    raise ConfigError(f"--{name.replace('_', '-')} without --tensor-parallel-size",
                                      "--tensor-parallel-size 2 or more",
                                      "say how many ranks have each layer together")
            return
        cut, optim = f"--tensor-parallel-size {self.tensor_parallel_size}", f"--optim {self.optim}"
        axes = {"pipeline": self.pipeline_parallel_size, "context": self.context_parallel_size}
        refused = {f"--{axis}-parallel-size {size}": (size > 1, "data parallel ranks beside them")
                   for axis, size in axes.items()}
        refused |= {"--use-peft": (self.use_peft, "weights that are all trained"),
                    "--method dpo": (self.method == "dpo", "--method sft"),
                   "--zero-stage 3": (self.zero_stage == 3, "--zero-stage 2 or less"),
                   f"--precision {self.precision}": (self.recipe.fp8 is not None, "weights and matmuls of 16 "
                                                     "or 32 bits"),
                   optim: (OPTIMIZERS[self.optim][0] in WHOLE_MATRICES, "adamw, lion or sgd, which treat "
                           "elements alike")}
        for found, (there, expected) in refused.items():
            if there:
                raise ConfigError(f"{found} with {cut}, whose ranks have parts of matrices", expected,
                                  f"leave {found} or {cut} out")

    def _require_precision(self) -> None:
        recipe = self.recipe
        other = self.dtype != "float32" and self.weights != DTYPES[self.dtype]
        if self.precision is not None and other:
            raise ConfigError(f"--dtype {self.dtype} with --precision {self.precision}",
                              f"weights of {NAMES[self.weights]}, as the recipe has them",
                              "leave --dtype out")
        if not recipe.master and self.zero_stage:
            raise ConfigError(f"--precision {self.precision} with --zero-stage {self.zero_stage}, whose "
                              "parts of weights are float32", "--precision bfloat16, or --zero-stage 0",
                              "choose one")
        if recipe.fp8 is not None and self.zero_stage == 3:
            raise ConfigError(f"--precision {self.precision} with --zero-stage 3, whose layers are gathered "
                              "in 16 or 32 bits", "--zero-stage 2 or less", "choose one")
        of_fp8 = [name for name in ("fp8_exclude", "fp8_format", "fp8_margin") if getattr(self, name)]
        if of_fp8 and recipe.fp8 is None:
            name = of_fp8[0].replace("_", "-")
            raise ConfigError(f"--{name} with --precision {self.precision or self.dtype}",
                              ", ".join(name for name, each in RECIPES.items() if each.fp8 is not None),
                              "choose one of these, or leave the option out")

    def _require_choices(self) -> None:
        for name, allowed in (("method", METHODS), ("dtype", tuple(DTYPES)), ("optim", tuple(OPTIMIZERS)),
                              ("save_strategy", SAVES), ("lr_scheduler_type", tuple(SCHEDULES)),
                              ("report_to", ("auto", "tensorboard", "none")),
                              ("quantization", (None, *ONLINE)),
                              ("precision", (None, *RECIPES)), ("fp8_format", (None, *FORMATS)),
                              ("pipeline_schedule", (None, *PIPELINE_SCHEDULES)),
                              ("fp8_amax_compute_algo", ALGORITHMS)):
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"--{name.replace('_', '-')} {value}",
                                  ", ".join(each for each in allowed if each is not None), "choose one")

    @property
    def weights(self) -> DType:
        """The dtype of weights."""
        return self.recipe.weights

    @property
    def online(self) -> str | None:
        """How weights of floats are quantised as they are read; None: not."""
        return FOUR_BITS if self.load_in_4bit else self.quantization

    @property
    def recipe(self) -> PrecisionRecipe:
        """The recipe of precision, with the options of FP8 in it. Raises `ConfigError`."""
        made = RECIPES[self.precision or self.dtype]
        fp8 = made.fp8
        if fp8 is None: return made
        if isinstance(fp8, DelayedScaling):
            fp8 = replace(fp8, margin=self.fp8_margin, amax_history_len=self.fp8_amax_history_len,
                          amax_compute_algo=self.fp8_amax_compute_algo)
        if self.fp8_format is not None: fp8 = replace(fp8, fp8_format=self.fp8_format)
        return replace(made, fp8=fp8)

    @property
    def data(self) -> DataOptions:
        """How files become rows."""
        return DataOptions(**{each.name: getattr(self, each.name) for each in fields(DataOptions)
                              if hasattr(self, each.name)})

    @property
    def regions(self) -> Policy:
        """Policy of what layers keep for the backward pass."""
        if not self.gradient_checkpointing: return Policy("none")
        return Policy.read(self.gradient_checkpointing_policy)

    def warmup(self, steps: int) -> int:
        """Steps of warm-up, of so many."""
        return self.warmup_steps or int(self.warmup_ratio * steps + 0.999999)


def make_arguments(options: Mapping[str, Any]) -> TrainingArguments:
    """The arguments of options by name, whose values may be texts, as YAML reads 1e-4. Raises
    `ConfigError`."""
    known = {each.name: each for each in fields(TrainingArguments)}
    options = _with_dtype(options)
    if strange := sorted(set(options) - set(known)):
        raise ConfigError(f"unknown option {strange[0]}", "an option of `tinygrad-nv train --help`",
                          "correct its name")
    return TrainingArguments(**{name: _value(known[name].type, name, value)
                                for name, value in options.items()})


def _with_dtype(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with `dtype` for the names that transformers and TRL have for it."""
    given = dict(options)
    asked = {name: dtype for name, dtype in FLAGS_OF_DTYPES.items()
             if _value("bool", name, given.pop(name, False))}
    if (older := given.pop("torch_dtype", None)) is not None: asked["torch_dtype"] = str(older)
    for name, dtype in asked.items():
        if given.setdefault("dtype", dtype) != dtype:
            raise ConfigError(f"{name} and dtype {given['dtype']}", "one of them", "leave one out")
    return given


def _value(kind: Any, name: str, value: Any) -> Any:
    """A value as its field has it."""
    try:
        if value is None and "None" in str(kind): return None
        if str(kind).startswith("tuple"):
            return (value,) if isinstance(value, str) else tuple(str(each) for each in value)
        if str(kind).startswith("bool"):
            if isinstance(value, bool): return value
            if str(value).lower() in TRUTHS: return TRUTHS[str(value).lower()]
            raise ValueError("true or false")
        if isinstance(value, bool): return YAML_WORDS[name, value]
        if kind == "int":
            if isinstance(value, int): return value
            if (number := float(value)) != int(number): raise ValueError("a whole number")
            return int(number)
        if kind == "float": return float(value)
        return str(value)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {value!r}", f"{kind}", "correct it") from error
