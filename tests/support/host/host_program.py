"""C programs that call CUDA as nvcc's do: compiled here, with PTX in a fat binary that they register."""
from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from tinygrad_nv.host import fatbin
from tinygrad_nv.host.library import build_library
from tinygrad_nv.toolchain import find_compiler

FLAGS = ("-std=gnu11", "-O1", "-fno-sanitize=all", "-w", "-Wno-implicit-function-declaration")
HEADER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef unsigned long size_t;
typedef struct { unsigned x, y, z; } dim3;
enum { HtoH, HtoD, DtoH, DtoD, Default };
"""
# those whose arguments are converted, or that return pointers; others are called as they are found
PROTOTYPES = """
int cudaMalloc(void *, size_t), cudaMemcpy(void *, const void *, size_t, int), cudaMemset(void *, int,
                                                                                          size_t);
int cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, int);
int cudaMemcpyFromSymbol(void *, const void *, size_t, size_t, int);
int cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, void *);
int cudaMallocHost(void *, size_t), cudaMallocManaged(void *, size_t, int);
const char *cudaGetErrorName(int), *cudaGetErrorString(int);
void **__cudaRegisterFatBinary(const void *);
"""
REGISTERED = """
static const unsigned char image[] __attribute__((aligned(8))) = {%s};
static const struct { int magic, version; const void *data, *rest; } wrapper = {0x466243b1, 1, image, 0};
static void **handle;
%s
__attribute__((constructor)) static void registered(void) {
    handle = __cudaRegisterFatBinary(&wrapper);
    %s
}
#define RUN(kernel, blocks, threads, ...) cudaLaunchKernel(&kernel, (dim3){blocks, 1, 1}, \\
    (dim3){threads, 1, 1}, (void *[]){__VA_ARGS__}, 0, 0)
#define TRY(call) do { int error_ = (call); printf("%%s ", cudaGetErrorName(error_)); } while (0)
"""
OWN = """__attribute__((aligned(16), visibility("hidden"), noinline))
int %s(void) { volatile int a = 1; a += a; a += a; __builtin_trap(); }
"""
# y[i] = scale * x[i] + i of `count` threads, and a counter of those that ran
SCALE = """.version 8.0
.target sm_90
.address_size 64
.visible .global .align 4 .u32 counter;
.visible .const .align 4 .f32 scale = 0f40000000;
.visible .entry scaled(.param .u64 x, .param .u64 y, .param .u32 count) {
    .reg .pred %p; .reg .b32 %r<6>; .reg .b64 %rd<6>; .reg .f32 %f<4>;
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r1, [count];
    mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x;
    mad.lo.s32 %r2, %r3, %r4, %r2;
    setp.ge.u32 %p, %r2, %r1;
    @%p ret;
    mul.wide.u32 %rd3, %r2, 4;
    add.u64 %rd1, %rd1, %rd3; add.u64 %rd2, %rd2, %rd3;
    ld.global.f32 %f1, [%rd1];
    ld.const.f32 %f2, [scale];
    cvt.rn.f32.u32 %f3, %r2;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    st.global.f32 [%rd2], %f1;
    mov.u64 %rd4, counter;
    red.global.add.u32 [%rd4], 1;
    ret;
}
"""


def fat_binary(*texts: str, flags: int = 0, packed: Callable[[bytes], bytes] | None = None) -> bytes:
    """A fat binary with these PTX texts, which `packed` compresses."""
    parts = b""
    for text in texts:
        plain = text.encode() + b"\0"
        data = packed(plain) if packed else plain
        size = len(data)
        data += bytes(-size % 8)
        parts += fatbin.ENTRY.pack(fatbin.PTX, 0x101, fatbin.ENTRY.size, len(data), 0, size if packed else 0,
                                   0, 0,
                                   90, 0, 0, flags, 0, len(plain) if packed else 0) + data
    return struct.pack("<IHHQ", fatbin.HEADER, 1, 16, len(parts)) + parts


def compiled(folder: Path, main: str, ptx: str = SCALE, kernels: tuple[str, ...] = ("scaled",),
             variables: tuple[str, ...] = (), own_runtime: str = "", image: bytes = b"",
             before: str = "") -> Path:
    """A program whose `main` is this, with an image of these kernels and variables, or `image`.
    `own_runtime`: these functions of the API are linked into it, and end it when they run; no library has
    them then."""
    data = ",".join(map(str, image or fat_binary(ptx)))
    stands = "".join(f"static char {name};\n" for name in (*kernels, *variables)) + before
    calls = "".join(f'__cudaRegisterFunction(handle, &{name}, (char *)"{name}", "{name}", -1, 0, 0, 0, 0, 0);'
                    for name in kernels)
    calls += "".join(f'__cudaRegisterVar(handle, &{name}, (char *)"{name}", "{name}", 0, 4, 0, 0);'
                     for name in variables)
    source, out = folder / "program.c", folder / "program"
    source.write_text(HEADER + PROTOTYPES + REGISTERED % (data, stands, calls)
                      + f"int main(int argc, char **argv) {{\n{main}\n}}\n")
    files = [str(source)]
    if own_runtime:
        runtime = folder / "runtime.c"
        runtime.write_text("".join(OWN % name for name in own_runtime.split()))
        files.append(str(runtime))
    else: files += [str(build_library() / "libcudart.so.13"), str(build_library() / "libcuda.so.1")]
    compiler = find_compiler(any_c=True)
    done = subprocess.run([*compiler.command, *FLAGS, *files, "-o", str(out)], capture_output=True,
                          text=True, check=False, env=compiler.environment())
    assert done.returncode == 0, done.stderr
    return out
