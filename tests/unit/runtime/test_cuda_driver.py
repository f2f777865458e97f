"""CUDADriver on the fake driver library: the tests of the driver interface that are not about the emulator,
and that nothing is left when it is closed."""
from __future__ import annotations

from tests.unit.runtime.test_driver import (  # noqa: F401
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
