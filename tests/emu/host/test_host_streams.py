"""Streams, events, graphs and programmatic launches of programs: what they compute, and the order that is
missing."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.host.host_program import SCALE, compiled
from tinygrad_nv.host import run_program

# y = 2 x + i of 32 floats, three times in a row
START = """
    float x[32] = {1}, y[32]; int count = 32;
    void *a, *b, *one, *two, *event, *graph, *run;
    cudaMalloc(&a, 128); cudaMalloc(&b, 128);
    cudaStreamCreateWithFlags(&one, 1); cudaStreamCreateWithFlags(&two, 1); cudaEventCreate(&event);
    cudaMemcpy(a, x, 128, HtoD);
    cudaMemset(b, 0, 128);
    cudaDeviceSynchronize();
    #define ON(stream, from, to) cudaLaunchKernel(&scaled, (dim3){1, 1, 1}, (dim3){32, 1, 1}, \\
                                                  (void *[]){&from, &to, &count}, 0, stream)
"""
SHOW = """
    TRY(cudaDeviceSynchronize());
    cudaMemcpy(y, b, 128, DtoH);
    printf("%g %g", y[0], y[31]);
"""


def ran(folder: Path, body: str, capfd: pytest.CaptureFixture[str], end: str = SHOW, **options: bool):
    """What a program printed, and what is said of it."""
    result = run_program([str(compiled(folder, START + body + end))], **{"check": True, **options})
    assert (result.status, result.refused) == (0, ())
    return capfd.readouterr().out, result


@pytest.mark.parametrize(("between", "told"), [
    ("cudaEventRecord(event, one); cudaStreamWaitEvent(two, event, 0);", False), ("", True),
    ("cudaStreamSynchronize(one);", False), ("cudaEventRecord(event, one); cudaEventSynchronize(event);",
                                             False),
    ("cudaStreamSynchronize(two);", True), ("cudaStreamWaitEvent(two, event, 0);", True)])
def test_work_of_two_streams_needs_an_event(tmp_path: Path, capfd: pytest.CaptureFixture[str], between: str,
                                            told: bool):
    said, result = ran(tmp_path, f"TRY(ON(one, a, b)); {between} TRY(ON(two, b, b));", capfd)
    assert said == "cudaSuccess cudaSuccess cudaSuccess 4 93"
    assert bool(result.order) is told
    if told:
        assert "record an event in stream 1 after launch 0 (scaled), and let stream 2 wait" in result.order[0]


@pytest.mark.parametrize(("made", "told"), [
    ("cudaStreamCreate(&one);", False), ("cudaStreamCreateWithFlags(&one, 1);", True)],
    ids=["blocking", "non-blocking"])
def test_the_default_stream_waits_for_blocking_streams(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                       made: str, told: bool):
    _, result = ran(tmp_path, f"{made} ON(one, a, b); ON(0, b, b);", capfd)
    assert bool(result.order) is told


CAPTURED = """
    TRY(cudaStreamBeginCapture(one, 0));
    ON(one, a, b);
    %s
    TRY(cudaStreamEndCapture(one, &graph));
    TRY(cudaGraphInstantiate(&run, graph, 0ul));
    x[0] = 10; cudaMemcpy(a, x, 128, HtoD);
    for (int i = 0; i < 3; i++) TRY(cudaGraphLaunch(run, two));
"""


@pytest.mark.parametrize(("inside", "said", "order"), [
    ("ON(one, b, b);", "40 93", False),
    ("cudaEventRecord(event, one); cudaStreamWaitEvent(two, event, 0); ON(two, b, b); "
     "cudaEventRecord(event, two); cudaStreamWaitEvent(one, event, 0);", "40 93", False),
    ("cudaEventRecord(event, one); cudaStreamWaitEvent(two, event, 0); cudaMemsetAsync(b, 0, 64ul, two); "
     "ON(one, b, b); cudaEventRecord(event, two); cudaStreamWaitEvent(one, event, 0);", "0 93", True)],
    ids=["one stream", "fork and join", "nothing between the branches"])
def test_a_captured_graph_runs_at_its_launches(tmp_path: Path, capfd: pytest.CaptureFixture[str], inside: str,
                                               said: str, order: bool):
    out, result = ran(tmp_path, CAPTURED % inside, capfd)
    assert out == "cudaSuccess " * 7 + said
    assert bool(result.order) is order
    if order: assert "add an edge" in result.order[0]
    assert len(result.launches) % 3 == 0


@pytest.mark.parametrize(("inside", "error"), [
    ("cudaEventRecord(event, one); cudaStreamWaitEvent(two, event, 0); ON(two, b, b);",
     "cudaErrorStreamCaptureUnjoined"),
    ("TRY(cudaStreamSynchronize(one));",
     "cudaErrorStreamCaptureUnsupported cudaErrorStreamCaptureInvalidated")])
def test_a_capture_that_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str], inside: str, error: str):
    out, _ = ran(tmp_path, f"""
        TRY(cudaStreamBeginCapture(one, 0));
        ON(one, a, b);
        {inside}
        TRY(cudaStreamEndCapture(one, &graph));""", capfd, end="")
    assert out == f"cudaSuccess {error} "


def test_a_graph_of_explicit_nodes(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    out, result = ran(tmp_path, """
        void *first, *second;
        struct { void *function; dim3 grid, block; unsigned smem; void **arguments, **extra; } kernel = {
            &scaled, {1, 1, 1}, {32, 1, 1}, 0, (void *[]){&a, &b, &count}};
        struct { void *target; size_t pitch; unsigned value, size; size_t width, height; } fill = {
            b, 0, 0x40000000, 4, 8, 1};
        TRY(cudaGraphCreate(&graph, 0));
        TRY(cudaGraphAddKernelNode(&first, graph, 0, 0ul, &kernel));
        TRY(cudaGraphAddMemsetNode(&second, graph, &first, 1ul, &fill));
        TRY(cudaGraphInstantiate(&run, graph, 0ul));
        TRY(cudaGraphLaunch(run, one));
        kernel.block.x = 16;
        TRY(cudaGraphExecKernelNodeSetParams(run, first, &kernel));
        TRY(cudaGraphLaunch(run, one));""", capfd)
    assert out == "cudaSuccess " * 8 + "2 31"
    assert result.order == ()
    assert [launch.block[0] for launch in result.launches] == [32, 16]


PROGRAMMATIC = """
    struct { unsigned name, pad, value[16]; } pdl = {6, 0, {1}};
    struct { dim3 grid, block; size_t smem; void *stream, *attributes; unsigned count; } config = {
        {1, 1, 1}, {32, 1, 1}, 0, one, &pdl, 1};
    %s
    ON(one, a, b);
    cudaLaunchKernelExC(&config, &scaled, (void *[]){&b, &b, &count});
    %s"""


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("before", "after"), [("", ""), (
    "cudaStreamBeginCapture(one, 0);", "cudaStreamEndCapture(one, &graph);"
    "cudaGraphInstantiate(&run, graph, 0ul); cudaGraphLaunch(run, two);")], ids=["stream", "graph"])
def test_a_programmatic_launch_waits(tmp_path: Path, capfd: pytest.CaptureFixture[str], before: str,
                                     after: str,
                                     waits: bool):
    wait = "griddepcontrol.wait; " if waits else ""
    ptx = SCALE.replace("    ld.global.f32", f"    {wait}ld.global.f32")
    body = START + PROGRAMMATIC % (before, after) + SHOW
    result = run_program([str(compiled(tmp_path, body, ptx))], check=True)
    assert capfd.readouterr().out == "cudaSuccess 4 93"
    kinds = {finding.kind for launch in result.launches for finding in launch.findings}
    assert kinds == (set() if waits else {"race", "barrier"})


def test_what_a_graph_copies_is_there_when_it_was_waited_for(tmp_path: Path,
                                                              capfd: pytest.CaptureFixture[str]):
    out, _ = ran(tmp_path, """
        float *pinned; cudaMallocHost(&pinned, 128);
        cudaStreamBeginCapture(one, 0);
        ON(one, a, b); cudaMemcpyAsync(pinned, b, 128ul, DtoH, one);
        cudaStreamEndCapture(one, &graph); cudaGraphInstantiate(&run, graph, 0ul); cudaGraphLaunch(run, one);
        printf("%d ", pinned[0] == 2); cudaStreamSynchronize(one); printf("%d",
                                                                          pinned[0] == 2);""", capfd, end="")
    assert out == "0 1"


def test_events_tell_predicted_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    out, result = ran(tmp_path, """
        void *begin, *end; float ms;
        cudaEventCreate(&begin); cudaEventCreate(&end);
        cudaEventRecord(begin, one);
        ON(one, a, b); ON(one, b, b);
        cudaEventRecord(event, one); cudaStreamWaitEvent(two, event, 0);
        ON(two, a, b);
        cudaEventRecord(end, two);
        cudaEventElapsedTime(&ms, begin, end);
        printf("%.6f ", ms * 1e3);""", capfd, time=True)
    times = [launch.timing.seconds for launch in result.launches if launch.timing is not None]
    assert len(times) == 3
    told, *rest = out.split()
    assert float(told) == pytest.approx(sum(times) * 1e6, rel=1e-6)
    assert rest == ["cudaSuccess", "2", "31"]


LIFE = """
    int bug = atoi(argv[1]); void *p;
    cudaMallocAsync(&p, 128ul, one);
    if (bug != 1) { cudaEventRecord(event, one); cudaStreamWaitEvent(two, event, 0); }
    ON(two, a, p); ON(two, p, b);
    if (bug == 3) cudaFreeAsync(p, two);
    if (bug != 2) { cudaEventRecord(event, two); cudaStreamWaitEvent(one, event, 0); }
    if (bug == 4) cudaStreamBeginCapture(one, 0), cudaFreeAsync(p, one), cudaStreamEndCapture(one, &graph);
    if (bug == 3) ON(one, p, b);
    else if (bug != 4) cudaFreeAsync(p, one);
"""


def test_memory_of_a_stream_is_there_from_its_allocation_to_its_end(tmp_path: Path,
                                                                    capfd: pytest.CaptureFixture[str]):
    program = str(compiled(tmp_path, START + LIFE + SHOW))
    results = [run_program([program, str(bug)], check=True) for bug in range(5)]
    said = [result.order for result in results]
    assert [len(each) for each in said] == [0, 2, 1, 0, 0]
    assert "launch 0 (scaled) writes, and cudaMallocAsync allocates, bytes 0 to 127" in said[1][0]
    assert "record an event in stream 1 after cudaMallocAsync, and let stream 2 wait for it" in said[1][0]
    assert "cudaFreeAsync frees, and launch 1 (scaled) reads, bytes 0 to 127" in said[2][0]
    assert "record an event in stream 2 after launch 1 (scaled), and let stream 1 wait for it" in said[2][0]
    ended = [result.launches[-1].status.name for result in results]
    assert ended == ["SUCCESS"] * 3 + ["ILLEGAL_ADDRESS", "SUCCESS"]
    assert re.fullmatch(r"launch 2 .* uses 0x\w+: byte 0 of 128 that have been freed", results[3].notes[0])
    assert "cudaErrorIllegalAddress" in capfd.readouterr().out
