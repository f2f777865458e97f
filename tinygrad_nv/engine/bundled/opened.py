"""A model in a bundle, as `LLM` loads it.

Protocol: `BundledModel.open(path, device)` checks the file and chooses the set of kernels for the device.
The small files of the model (config, tokenizer) are written to a folder of this process, which readers of
models take. `options(asked)` are the options of the bundle: it was compiled for limits, and asking for more
is an error. `runner(plan)` fills memory with weights, each checked as it is read, and makes the model runner,
whose steps are read when they are first used: a start reads what the first answer needs.
"""
from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from tinygrad_nv import config
from tinygrad_nv.bundle import manifest
from tinygrad_nv.bundle.container import Bundle, open_bundle
from tinygrad_nv.engine.bundled.kept_steps import AGAIN, KeptSteps, SetParts, give_pool, no_memory
from tinygrad_nv.engine.bundled.sets import choose_set, layout_of
from tinygrad_nv.engine.executor.plan import RunnerPlan, make_runner
from tinygrad_nv.engine.load_options import LoadOptions
from tinygrad_nv.engine.memory_planning import WEIGHTS
from tinygrad_nv.engine.worker.input_buffer import BatchShape
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.engine.worker.warm_up import Job, JobRunner
from tinygrad_nv.errors import BundleError, NVError
from tinygrad_nv.runtime.memory import allocate, allocate_arena, host_bytes, write
from tinygrad_nv.runtime.memory_pool import label_allocations
from tinygrad_nv.tile.order import SETTING

if TYPE_CHECKING:
    from tinygrad_nv.models.config import ModelConfig
    from tinygrad_nv.models.llama import Llama

OPTIONS: dict[str, manifest.Type] = {
    "dtype": str, "max_num_seqs": int, "max_num_batched_tokens": int, "kv_cache_dtype": str, "page_size": int,
    "speculative": (str, type(None)), "quantization": (str, type(None)), "max_model_len": (int, type(None)),
    "num_pages": (int, type(None))}
SET: dict[str, manifest.Type] = {
    "name": str, "device": str, "threads": int, "layouts": dict, "steps": dict, "memory": dict, "parts": dict,
    "weight_bytes": int, "sparse_bytes": int, "cache_scales": list, "pages": int, "length": int, "pool": bool,
    "settings": dict}
MOST = 1 << 48          # of numbers of a set
FILES = "model/"        # parts that are files of the model
SMALL = 256 << 20       # bytes of such a file
LIMITS = {"max_num_seqs": "--max-num-seqs", "max_num_batched_tokens": "--max-num-batched-tokens"}
SAME = {"page_size": "--block-size", "kv_cache_dtype": "--kv-cache-dtype", "dtype": "--dtype",
        "speculative": "--speculative-config", "quantization": "--quantization"}
DEFAULTS = {"page_size": 16, "kv_cache_dtype": "auto", "dtype": "auto", "speculative": None,
            "quantization": None}


@dataclass
class BundledModel:
    """An open bundle, and its set for a device. `directory` has the model's small files."""
    bundle: Bundle
    set: SetParts
    device: str
    directory: Path
    weights: dict[str, Buffer] = field(default_factory=dict)
    memory: Tensor | None = None

    @staticmethod
    def open(path: Path, device: str, required_key: Path | None = None,
             weights: Path | None = None) -> BundledModel:
        """Opens the bundle of a model. Raises `BundleError`."""
        bundle = open_bundle(path, required_key, weights)
        if bundle.manifest.kind != "model":
            raise BundleError(f"{path} is the bundle of a {bundle.manifest.kind}", "one of a model",
                              "load it with tinygrad_nv.load")
        there = manifest.field(bundle.manifest.about, "sets", list, str(path))
        name = choose_set(device, map(str, there), str(path))
        _check_options(bundle.manifest.about.get("options"), f"{path}: options")
        parts = SetParts(bundle, name, _check_set(bundle.json(f"{name}/set.json"), name, str(path)))
        if config.get(SETTING) and not parts.about["settings"].get(SETTING):
            raise BundleError(f"{SETTING}=1, and {path} was compiled without", "steps of one class",
                              "compile it with --deterministic")
        directory = Path(tempfile.mkdtemp(prefix="tinygrad-nv-"))
        made = BundledModel(bundle, parts, device, directory)
        weakref.finalize(made, shutil.rmtree, directory, True)
        made._write_files()
        if parts.about["pool"]: give_pool(bundle, name)
        return made

    def _write_files(self) -> None:
        for part in self.bundle.manifest.parts:
            if not part.name.startswith(FILES): continue
            name = part.name.removeprefix(FILES)
            if "/" in name or part.nbytes > SMALL:
                raise BundleError(f"{self.bundle.path}: {part.name} of {part.nbytes} bytes",
                                  f"a file without a folder, of {SMALL} bytes at most", manifest.FIX)
            (self.directory / name).write_bytes(self.bundle.read(part.name))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights."""
        return int(self.set.about["weight_bytes"])

    @property
    def sparse_bytes(self) -> int:
        """Bytes of those that are zeros of sparse matrices, and are not read."""
        return int(self.set.about["sparse_bytes"])

    def options(self, asked: LoadOptions) -> LoadOptions:
        """The options the bundle was compiled for, with those of `asked` that it leaves open. Raises
        `BundleError` where more is asked for."""
        own = self.bundle.manifest.about["options"]
        file, again = self.bundle.path, "compile it so, or leave the option out"
        for name, option in LIMITS.items():
            if (wanted := getattr(asked, name)) > own[name] and wanted != _default(name):
                raise BundleError(f"{option} {wanted} of {file}", f"{own[name]} at most", again)
        for name, option in SAME.items():
            if (wanted := getattr(asked, name)) not in (own[name], DEFAULTS[name]):
                raise BundleError(f"{option} {wanted} of {file}", f"{own[name]}, as it was compiled", again)
        if asked.max_model_len is not None and asked.max_model_len > self.set.about["length"]:
            raise BundleError(f"--max-model-len {asked.max_model_len} of {file}",
                              f"{self.set.about['length']} at most", again)
        if asked.lora is not None or asked.world_size > 1:
            raise BundleError(f"{file} with {'adapters' if asked.lora is not None else 'several ranks'}",
                              "a model of one rank, without adapters", "serve the model from its directory")
        if asked.num_pages not in (None, self.set.about["pages"]) or asked.kv_cache_bytes is not None:
            raise BundleError(f"another number of pages than {self.set.about['pages']} of {file}",
                              "as many as it was compiled for", again)
        return replace(asked, **{name: own[name] for name in (*LIMITS, *SAME)},
                       max_model_len=self.set.about["length"], num_pages=self.set.about["pages"])

    def runner(self, plan: RunnerPlan, progress: Callable[[int, int], None] | None,
               stage: Callable[[str], None]) -> ModelRunner:
        """The model runner, with its weights."""
        model = _Unloaded(plan.config, plan.tinygrad_dtype, plan.device, plan.length)
        stage("read files")
        try:
            with label_allocations(WEIGHTS): self._load(progress)
            stage("load weights")
            return make_runner(plan, cast("Llama", model), bundled=self)
        except MemoryError as error:
            if isinstance(error, NVError): raise
            raise no_memory(self.bundle, f"its weights, and {self.set.about['pages']} pages of keys and "
                            f"values for {plan.length} tokens") from error

    # **** what the model runner asks for ****

    @property
    def cache_scales(self) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        """Scales of keys and values by layer and head, of a cache of 8 bits."""
        for keys, values in self.set.about["cache_scales"]:
            yield np.array(keys, np.float32), np.array(values, np.float32)

    def steps(self, tensors: Callable[[], Mapping[str, Buffer]]) -> KeptSteps:
        """The steps, over memory by name."""
        return KeptSteps(self.set, self.device, tensors)

    def jobs(self, runner: JobRunner) -> list[Job]:
        """Lists the jobs of a runner that the bundle has steps for. Raises `BundleError` where it lays out
        inputs in another way."""
        wanted = [job for each in runner.jobs for job in each]
        there, layouts = self.set.about["steps"], self.set.about["layouts"]
        for job in wanted:
            name = runner.job_name(job)
            layout = layout_of(runner.layout(job)) if isinstance(job, BatchShape) else None
            if name in there and layouts.get(name) == layout: continue
            raise BundleError(f"{self.bundle.path} has no {name} as this version of tinygrad_nv has it",
                              "steps with the inputs that the engine writes", AGAIN)
        return wanted

    def _load(self, progress: Callable[[int, int], None] | None) -> None:
        """Fills one memory with all weights; names that had one place have one again."""
        found: Mapping[str, str] = self.set.about["parts"]
        parts = [self.bundle.part(name) for name in dict.fromkeys(found.values())]
        ends = list(accumulate((-(-each.nbytes // manifest.ALIGNMENT) * manifest.ALIGNMENT for each in parts),
                               initial=0))
        self.memory = Tensor.empty(max(ends[-1], 1), dtype=dtypes.uint8, device=self.device)
        allocate_arena([self.memory])
        total, done = sum(each.nbytes for each in parts), 0

        def report(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None: progress(done, total)
        view = host_bytes(self.memory)
        for part, start in zip(parts, ends, strict=False):
            if view is not None: self.bundle.read_into(part.name, view[start:start + part.nbytes], report)
            else:
                write(self.memory, start, memoryview(self.bundle.read(part.name)))
                report(part.nbytes)
        whole = allocate(self.memory)
        places = {part.name: whole.view(part.nbytes, dtypes.uint8, start)
                  for part, start in zip(parts, ends, strict=False) if part.nbytes}
        self.weights = {name: places[part] for name, part in found.items() if part in places}


class _Unloaded:
    """In the place of a network whose steps a bundle has: what else is asked of one."""

    def __init__(self, config: ModelConfig, dtype: DType, device: str, positions: int) -> None:
        self.config, self.dtype, self.device, self.parallel = config, dtype, device, None
        self.positions = self.rope_rows = positions
        self.blocks, self.int8_inputs = list[Any](), False
        self.quantised_head = self.quantised_embedding = None


def _default(name: str) -> int: return {"max_num_seqs": 64, "max_num_batched_tokens": 512}[name]


def _check_options(found: Any, what: str) -> None:
    """Raises unless these are options that compile takes."""
    for name, value in manifest.fields(found, OPTIONS, what, ("max_model_len", "num_pages")).items():
        if isinstance(value, int) and not 1 <= value < MOST:
            raise BundleError(f"{what} has {name} = {manifest.shorten(value)}", f"1 to {MOST}", manifest.FIX)
    if not (found["speculative"] or "ngram:").startswith("ngram:"):    # a draft model is outside of the file
        raise BundleError(f"{what} has speculative = {manifest.shorten(found['speculative'])}", "ngram:K",
                          manifest.FIX)


def _check_set(found: Any, own: str, file: str) -> Mapping[str, Any]:
    """Returns a set's JSON, whose fields have their types, and numbers that a model can have."""
    about = manifest.fields(found, SET, what := f"{file}: {own}/set.json")
    for name in ("layouts", "parts"): manifest.entries(about, name, str, what)
    manifest.entries(about, "memory", int, what)
    manifest.entries(about, "settings", (int, str), what)
    for name, low in (("weight_bytes", 0), ("sparse_bytes", 0), ("threads", 0), ("length", 1), ("pages", 1)):
        if not low <= about[name] < MOST:
            raise BundleError(f"{what} has {name} = {manifest.shorten(about[name])}", f"{low} to {MOST}",
                              manifest.FIX)
    if about["name"] != own: raise BundleError(f"{what} is of {manifest.shorten(about['name'])}", own)
    return about
