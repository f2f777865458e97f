"""Instructions of the tensor cores and those that carry fragments.

Rows as `__init__.py` reads them: `key pattern; operands; needs`. A fragment is `count:type`; two 16-bit or
four 8-bit elements share a b32. `acc:T` is a wgmma accumulator: N/2 registers of f32 and s32, N/4 of f16.
"""
from __future__ import annotations

FRAGMENTS = """
ldmatrix .sync.aligned.m8n8.x1{.trans}{<cta>}.b16;           =1:b32 [s]
ldmatrix .sync.aligned.m8n8.x2{.trans}{<cta>}.b16;           =2:b32 [s]
ldmatrix .sync.aligned.m8n8.x4{.trans}{<cta>}.b16;           =4:b32 [s]
stmatrix .sync.aligned.m8n8.x1{.trans}{<cta>}.b16;           [s] 1:b32;                              90
stmatrix .sync.aligned.m8n8.x2{.trans}{<cta>}.b16;           [s] 2:b32;                              90
stmatrix .sync.aligned.m8n8.x4{.trans}{<cta>}.b16;           [s] 4:b32;                              90
movmatrix .sync.aligned.m8n8.trans.b16;                      =b32 reg;                               80:7.8
"""

MMA = """
mma.sync .aligned.m8n8k4(.row|.col)(.row|.col).f16.f16.f16.f16; =4:b32 2:b32 2:b32 4:b32
mma.sync .aligned.m8n8k4(.row|.col)(.row|.col).f32.f16.f16.f16; =8:f32 2:b32 2:b32 4:b32
mma.sync .aligned.m8n8k4(.row|.col)(.row|.col).f32.f16.f16.f32; =8:f32 2:b32 2:b32 8:f32
mma.sync .aligned.m16n8k8.row.col.f16.f16.f16.f16;           =2:b32 2:b32 1:b32 2:b32
mma.sync .aligned.m16n8k8.row.col.f32.f16.f16.f32;           =4:f32 2:b32 1:b32 4:f32
mma.sync .aligned.m16n8k8.row.col.f32.bf16.bf16.f32;         =4:f32 2:b32 1:b32 4:f32
mma.sync .aligned.m16n8k16.row.col.f16.f16.f16.f16;          =2:b32 4:b32 2:b32 2:b32
mma.sync .aligned.m16n8k16.row.col.f32.f16.f16.f32;          =4:f32 4:b32 2:b32 4:f32
mma.sync .aligned.m16n8k16.row.col.f32.bf16.bf16.f32;        =4:f32 4:b32 2:b32 4:f32
mma.sync .aligned.m16n8k4.row.col.f32.tf32.tf32.f32;         =4:f32 2:b32 1:b32 4:f32
mma.sync .aligned.m16n8k8.row.col.f32.tf32.tf32.f32;         =4:f32 4:b32 2:b32 4:f32
mma.sync .aligned.m8n8k16.row.col{.satfinite}.s32(.u8|.s8)(.u8|.s8).s32; =2:s32 1:b32 1:b32 2:s32
mma.sync .aligned.m16n8k16.row.col{.satfinite}.s32(.u8|.s8)(.u8|.s8).s32; =4:s32 2:b32 1:b32 4:s32
mma.sync .aligned.m16n8k32.row.col{.satfinite}.s32(.u8|.s8)(.u8|.s8).s32; =4:s32 4:b32 2:b32 4:s32
mma.sync .aligned.m8n8k32.row.col{.satfinite}.s32(.u4|.s4)(.u4|.s4).s32; =2:s32 1:b32 1:b32 2:s32
mma.sync .aligned.m16n8k32.row.col{.satfinite}.s32(.u4|.s4)(.u4|.s4).s32; =4:s32 2:b32 1:b32 4:s32
mma.sync .aligned.m16n8k64.row.col{.satfinite}.s32(.u4|.s4)(.u4|.s4).s32; =4:s32 4:b32 2:b32 4:s32
mma.sync .aligned.m8n8k128.row.col.s32.b1.b1.s32(.xor@80|.and@80:7.1).popc; =2:s32 1:b32 1:b32 2:s32
mma.sync .aligned.m16n8k128.row.col.s32.b1.b1.s32(.xor|.and@80:7.1).popc; =4:s32 2:b32 1:b32 4:s32
mma.sync .aligned.m16n8k256.row.col.s32.b1.b1.s32(.xor|.and@80:7.1).popc; =4:s32 4:b32 2:b32 4:s32
mma.sync .aligned.m16n8k32.row.col.f32(.e4m3|.e5m2)(.e4m3|.e5m2).f32; =4:f32 4:b32 2:b32 4:f32;      89:8.4
mma.sync .aligned.m16n8k32.row.col.f16(.e4m3|.e5m2)(.e4m3|.e5m2).f16; =2:b32 4:b32 2:b32 2:b32;      89:8.7
mma.sync .aligned.m16n8k16.row.col.f32(.e4m3|.e5m2)(.e4m3|.e5m2).f32; =4:f32 2:b32 1:b32 4:f32;      89:8.7
mma.sync .aligned.m16n8k16.row.col.f16(.e4m3|.e5m2)(.e4m3|.e5m2).f16; =2:b32 2:b32 1:b32 2:b32;      89:8.7
mma.sync .aligned.m8n8k4.row.col{<round>}.f64.f64.f64.f64;   =2:f64 1:f64 1:f64 2:f64
mma.sync .aligned.m16n8k4.row.col{<round>}.f64.f64.f64.f64;  =4:f64 2:f64 1:f64 4:f64;               90
mma.sync .aligned.m16n8k8.row.col{<round>}.f64.f64.f64.f64;  =4:f64 4:f64 2:f64 4:f64;               90
mma.sync .aligned.m16n8k16.row.col{<round>}.f64.f64.f64.f64; =4:f64 8:f64 4:f64 4:f64;               90
"""

SPARSE = """
m16n8k16.row.col.f16.f16.f16.f16;                            =2:b32 2:b32 2:b32 2:b32 reg #0..3
m16n8k16.row.col.f32.f16.f16.f32;                            =4:f32 2:b32 2:b32 4:f32 reg #0..3
m16n8k16.row.col.f32.bf16.bf16.f32;                          =4:f32 2:b32 2:b32 4:f32 reg #0..3
m16n8k32.row.col.f16.f16.f16.f16;                            =2:b32 4:b32 4:b32 2:b32 reg #0..1
m16n8k32.row.col.f32.f16.f16.f32;                            =4:f32 4:b32 4:b32 4:f32 reg #0..1
m16n8k32.row.col.f32.bf16.bf16.f32;                          =4:f32 4:b32 4:b32 4:f32 reg #0..1
m16n8k8.row.col.f32.tf32.tf32.f32;                           =4:f32 2:b32 2:b32 4:f32 reg #0..3
m16n8k16.row.col.f32.tf32.tf32.f32;                          =4:f32 4:b32 4:b32 4:f32 reg #0..1
m16n8k32.row.col{.satfinite}.s32(.u8|.s8)(.u8|.s8).s32;      =4:s32 2:b32 2:b32 4:s32 reg #0..1
m16n8k64.row.col{.satfinite}.s32(.u8|.s8)(.u8|.s8).s32;      =4:s32 4:b32 4:b32 4:s32 reg #0
m16n8k64.row.col{.satfinite}.s32(.u4|.s4)(.u4|.s4).s32;      =4:s32 2:b32 2:b32 4:s32 reg #0..1
m16n8k128.row.col{.satfinite}.s32(.u4|.s4)(.u4|.s4).s32;     =4:s32 4:b32 4:b32 4:s32 reg #0
m16n8k64.row.col.f32(.e4m3|.e5m2)(.e4m3|.e5m2).f32;          =4:f32 4:b32 4:b32 4:f32 reg #0;        89:8.4
"""

WMMA = """
wmma.load (.a|.b).sync.aligned<layout>(<m16k16>){<fspace>}.f16; =8:b32 [a] u32?
wmma.load .c.sync.aligned<layout>(<m16k16>){<fspace>}.f16;   =4:b32 [a] u32?
wmma.load .c.sync.aligned<layout>(<m16k16>){<fspace>}(.f32|.s32); =8:T [a] u32?
wmma.load (.a|.b).sync.aligned<layout>.m16n16k16{<fspace>}.bf16; =4:b32 [a] u32?
wmma.load .a.sync.aligned<layout>.m8n32k16{<fspace>}.bf16;   =2:b32 [a] u32?
wmma.load .b.sync.aligned<layout>.m8n32k16{<fspace>}.bf16;   =8:b32 [a] u32?
wmma.load .a.sync.aligned<layout>.m32n8k16{<fspace>}.bf16;   =8:b32 [a] u32?
wmma.load .b.sync.aligned<layout>.m32n8k16{<fspace>}.bf16;   =2:b32 [a] u32?
wmma.load (.a|.b).sync.aligned<layout>.m16n16k16{<fspace>}(.u8|.s8); =2:b32 [a] u32?
wmma.load .a.sync.aligned<layout>.m8n32k16{<fspace>}(.u8|.s8); =1:b32 [a] u32?
wmma.load .b.sync.aligned<layout>.m8n32k16{<fspace>}(.u8|.s8); =4:b32 [a] u32?
wmma.load .a.sync.aligned<layout>.m32n8k16{<fspace>}(.u8|.s8); =4:b32 [a] u32?
wmma.load .b.sync.aligned<layout>.m32n8k16{<fspace>}(.u8|.s8); =1:b32 [a] u32?
wmma.load (.a|.b).sync.aligned<layout>.m16n16k8{<fspace>}.tf32; =4:b32 [a] u32?
wmma.load .c.sync.aligned<layout>.m16n16k8{<fspace>}.f32;    =8:f32 [a] u32?
wmma.load (.a|.b).sync.aligned<layout>.m8n8k4{<fspace>}.f64; =1:f64 [a] u32?
wmma.load .c.sync.aligned<layout>.m8n8k4{<fspace>}.f64;      =2:f64 [a] u32?
wmma.load .a.sync.aligned.row.m8n8k32{<fspace>}(.u4|.s4);    =1:b32 [a] u32?
wmma.load .b.sync.aligned.col.m8n8k32{<fspace>}(.u4|.s4);    =1:b32 [a] u32?
wmma.load .a.sync.aligned.row.m8n8k128{<fspace>}.b1;         =1:b32 [a] u32?
wmma.load .b.sync.aligned.col.m8n8k128{<fspace>}.b1;         =1:b32 [a] u32?
wmma.load .c.sync.aligned<layout>(.m8n8k32|.m8n8k128){<fspace>}.s32; =2:s32 [a] u32?
wmma.mma .sync.aligned<layout><layout>(<m16k16>).f16.f16;    =4:b32 8:b32 8:b32 4:b32
wmma.mma .sync.aligned<layout><layout>(<m16k16>).f16.f32;    =4:b32 8:b32 8:b32 8:f32
wmma.mma .sync.aligned<layout><layout>(<m16k16>).f32.f16;    =8:f32 8:b32 8:b32 4:b32
wmma.mma .sync.aligned<layout><layout>(<m16k16>).f32.f32;    =8:f32 8:b32 8:b32 8:f32
wmma.mma .sync.aligned<layout><layout>.m16n16k16.f32.bf16.bf16.f32; =8:f32 4:b32 4:b32 8:f32
wmma.mma .sync.aligned<layout><layout>.m8n32k16.f32.bf16.bf16.f32; =8:f32 2:b32 8:b32 8:f32
wmma.mma .sync.aligned<layout><layout>.m32n8k16.f32.bf16.bf16.f32; =8:f32 8:b32 2:b32 8:f32
wmma.mma .sync.aligned<layout><layout>.m16n16k8.f32.tf32.tf32.f32; =8:f32 4:b32 4:b32 8:f32
wmma.mma .sync.aligned<layout><layout>.m8n8k4{<round>}.f64.f64.f64.f64; =2:f64 1:f64 1:f64 2:f64
wmma.mma .sync.aligned<layout><layout>.m16n16k16.s32.s8.s8.s32{.satfinite}; =8:s32 2:b32 2:b32 8:s32
wmma.mma .sync.aligned<layout><layout>.m16n16k16.s32.u8.u8.s32{.satfinite}; =8:s32 2:b32 2:b32 8:s32
wmma.mma .sync.aligned<layout><layout>.m8n32k16.s32.s8.s8.s32{.satfinite}; =8:s32 1:b32 4:b32 8:s32
wmma.mma .sync.aligned<layout><layout>.m8n32k16.s32.u8.u8.s32{.satfinite}; =8:s32 1:b32 4:b32 8:s32
wmma.mma .sync.aligned<layout><layout>.m32n8k16.s32.s8.s8.s32{.satfinite}; =8:s32 4:b32 1:b32 8:s32
wmma.mma .sync.aligned<layout><layout>.m32n8k16.s32.u8.u8.s32{.satfinite}; =8:s32 4:b32 1:b32 8:s32
wmma.mma .sync.aligned.row.col.m8n8k32.s32.s4.s4.s32{.satfinite}; =2:s32 1:b32 1:b32 2:s32
wmma.mma .sync.aligned.row.col.m8n8k32.s32.u4.u4.s32{.satfinite}; =2:s32 1:b32 1:b32 2:s32
wmma.mma (.xor|.and@80:7.1).popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32; =2:s32 1:b32 1:b32 2:s32
wmma.store .d.sync.aligned<layout>(<m16k16>){<fspace>}.f16;  [a] 4:b32 u32?
wmma.store .d.sync.aligned<layout>(<m16k16>){<fspace>}(.f32|.s32); [a] 8:T u32?
wmma.store .d.sync.aligned<layout>.m16n16k8{<fspace>}.f32;   [a] 8:f32 u32?
wmma.store .d.sync.aligned<layout>.m8n8k4{<fspace>}.f64;     [a] 2:f64 u32?
wmma.store .d.sync.aligned<layout>(.m8n8k32|.m8n8k128){<fspace>}.s32; [a] 2:s32 u32?
"""

WGMMA = """
wgmma.fence .sync.aligned;                                   -;                                      90a
wgmma.commit_group .sync.aligned;                            -;                                      90a
wgmma.wait_group .sync.aligned;                              #0..4294967295;                         90a
wgmma.mma_async .sync.aligned<m64k16>(.f16|.f32).f16.f16;
        =acc:T DESC b64 on sign sign #0..1 #0..1
        | =acc:T 4:b32 b64 on sign sign #0..1; 90a
wgmma.mma_async .sync.aligned<m64k16>.f32.bf16.bf16;
        =acc:T DESC b64 on sign sign #0..1 #0..1
        | =acc:T 4:b32 b64 on sign sign #0..1; 90a
wgmma.mma_async .sync.aligned<m64k8>.f32.tf32.tf32;          =acc:T A b64 on sign sign;              90a
wgmma.mma_async .sync.aligned<m64k32>(.f16|.f32)<fp8><fp8>;  =acc:T A b64 on sign sign;              90a
wgmma.mma_async .sync.aligned<m64k32i>{.satfinite}.s32.s8.s8; =acc:T A b64 on;                       90a
wgmma.mma_async .sync.aligned<m64k32i>{.satfinite}.s32.u8.u8; =acc:T A b64 on;                       90a
wgmma.mma_async .sync.aligned<m64k32i>{.satfinite}.s32.s8.u8; =acc:T A b64 on;                       90a:8.4
wgmma.mma_async .sync.aligned<m64k32i>{.satfinite}.s32.u8.s8; =acc:T A b64 on;                       90a:8.4
wgmma.mma_async .sync.aligned<m64k256>.s32.b1.b1.and.popc;   =acc:T A b64 on;                        90a
wgmma.mma_async.sp .sync.aligned<m64k32>(.f16|.f32).f16.f16;
        =acc:T DESC b64 reg #0..1 on sign sign #0..1 #0..1
        | =acc:T 4:b32 b64 reg #0..1 on sign sign #0..1; 90a:8.2
wgmma.mma_async.sp .sync.aligned<m64k32>.f32.bf16.bf16;
        =acc:T DESC b64 reg #0..1 on sign sign #0..1 #0..1
        | =acc:T 4:b32 b64 reg #0..1 on sign sign #0..1; 90a:8.2
wgmma.mma_async.sp .sync.aligned<m64k16>.f32.tf32.tf32;      =acc:T A b64 reg #0..1 on sign sign;    90a:8.2
wgmma.mma_async.sp .sync.aligned<m64k64>(.f16|.f32)<fp8><fp8>; =acc:T A b64 reg #0 on sign sign;     90a:8.2
wgmma.mma_async.sp .sync.aligned<m64k64i>{.satfinite}.s32.s8.s8; =acc:T A b64 reg #0 on;             90a:8.2
wgmma.mma_async.sp .sync.aligned<m64k64i>{.satfinite}.s32.u8.u8; =acc:T A b64 reg #0 on;             90a:8.2
wgmma.mma_async.sp .sync.aligned<m64k64i>{.satfinite}.s32.s8.u8; =acc:T A b64 reg #0 on;             90a:8.4
wgmma.mma_async.sp .sync.aligned<m64k64i>{.satfinite}.s32.u8.s8; =acc:T A b64 reg #0 on;             90a:8.4
"""
