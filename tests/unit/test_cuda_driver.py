"""CUDADriver on the fake driver library: the tests of the driver interface that are not about the emulator,
and that nothing is left when it is closed."""
from __future__ import annotations

from collections.abc import Iterator

import cuda_fake
import pytest
from test_driver import (  # noqa: F401
    Numbers,
    test_a_capture_forks_and_joins,
    test_a_capture_records_and_does_not_run,
    test_a_copy_of_what_was_never_written_stays_so,
    test_a_stream_runs_in_order,
    test_a_tensor_map_beyond_the_limits,
    test_a_tensor_map_is_given_innermost_first,
    test_an_explicit_graph_obeys_its_edges,
    test_an_unloaded_module_is_not_launched,
    test_bytes_outside_an_allocation,
    test_events_never_recorded,
    test_functions_and_their_attributes,
    test_memory_ends,
    test_memory_in_and_out_at_an_offset,
    test_memory_is_freed_once,
    test_no_such_function,
    test_time_passes,
    test_two_captures_do_not_meet,
    test_updates_change_the_next_launch_only,
    test_updates_that_are_none,
    test_what_a_capture_refuses,
)

from tinygrad_nv.runtime.cuda import CUDADriver


@pytest.fixture
def fake() -> Iterator[cuda_fake.Fake]:
    with cuda_fake.installed() as fake: yield fake


@pytest.fixture
def gpu(fake: cuda_fake.Fake) -> Iterator[CUDADriver]:
    gpu = CUDADriver()
    yield gpu
    gpu.close()
    assert fake.left() == {}


@pytest.fixture
def numbers(gpu: CUDADriver) -> Numbers: return Numbers(gpu)
