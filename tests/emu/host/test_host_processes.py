"""Threads and processes of programs, and scripts that start them."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.host.host_program import compiled
from tinygrad_nv.host import run_program

INCLUDES = "#include <pthread.h>\n#include <unistd.h>\n#include <sys/wait.h>\n"
THREADS = INCLUDES + """
    static void *work(void *given) {
        float x[32], y[32]; int count = 32; void *a, *b, *stream;
        long number = (long)given;
        for (int i = 0; i < 32; i++) x[i] = number;
        cudaMalloc(&a, 128); cudaMalloc(&b, 128); cudaStreamCreateWithFlags(&stream, 1);
        for (int i = 0; i < 5; i++) {
            cudaMemcpyAsync(a, x, 128ul, HtoD, stream);
            void *arguments[] = {&a, &b, &count};
            cudaLaunchKernel(&scaled, (dim3){1, 1, 1}, (dim3){32, 1, 1}, arguments, 0, stream);
            cudaMemcpyAsync(y, b, 128ul, DtoH, stream);
            cudaStreamSynchronize(stream);
            if (y[3] != 2 * number + 3) return (void *)1;
        }
        cudaSetDevice(number);      // an error of one thread is not another's
        return (void *)(long)(cudaGetLastError() != (number ? 101 : 0));
    }
"""


def test_threads_call_beside_each_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    program = compiled(tmp_path, """
        pthread_t threads[4]; long wrong = 0;
        for (long i = 0; i < 4; i++) pthread_create(&threads[i], 0, work, (void *)i);
        for (int i = 0; i < 4; i++) { void *each; pthread_join(threads[i], &each); wrong += (long)each; }
        printf("%ld", wrong);""", before=THREADS)
    result = run_program([str(program)], check=True)
    assert capfd.readouterr().out == "0"
    assert len(result.launches) == 20
    assert result.order == ()


def test_a_child_process_has_a_gpu_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    program = compiled(tmp_path, """
        void *a; size_t before, after, total; int status;
        cudaMalloc(&a, 1ul << 20); cudaMemGetInfo(&before, &total);
        if (!fork()) { cudaMemGetInfo(&after, &total); _exit(after == total ? 9 : 1); }
        wait(&status);
        cudaMemGetInfo(&after, &total);
        printf("%d %d", status >> 8, before == after);""", before=INCLUDES)
    assert run_program([str(program)]).status == 0
    assert capfd.readouterr().out == "9 1"


def test_a_script_that_starts_a_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    program = compiled(tmp_path, "void *a; TRY(cudaMalloc(&a, 16)); return 3;")
    assert run_program(["sh", "-c", f"{program}; echo status $?"]).status == 0
    assert capfd.readouterr().out == "cudaSuccess status 3\n"
