"""Protocol of a model that comes with its steps and its weights, as from a bundle.

Protocol: `weights` is memory by name, as `ModelRunner` names it (step_store.py). `steps(tensors)` has the
schedules of all of `jobs(runner)`, over memory by name.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np
from tinygrad.device import Buffer

from tinygrad_nv.engine.worker.input_buffer import BatchShape, InputLayout
from tinygrad_nv.engine.worker.step_store import StepStore
from tinygrad_nv.engine.worker.warm_up import Job


class JobRunner(Protocol):
    """Protocol of a runner: its jobs, their names, and where it lays their inputs."""

    @property
    def jobs(self) -> tuple[list[Job], list[Job]]: ...
    def job_name(self, job: Job) -> str: ...
    def layout(self, shape: BatchShape) -> InputLayout: ...


class KeptModel(Protocol):
    """A model whose steps are captured, and whose weights are in memory."""

    @property
    def weights(self) -> Mapping[str, Buffer]: ...
    @property
    def cache_scales(self) -> Iterable[tuple[np.ndarray, np.ndarray]]: ...
    def steps(self, tensors: Callable[[], Mapping[str, Buffer]]) -> StepStore: ...
    def jobs(self, runner: JobRunner) -> list[Job]: ...
