"""Instructions on memory, on addresses, on barriers and between threads; and control flow.

Rows as `__init__.py` reads them: `key pattern; operands; needs`.
"""
from __future__ import annotations

LOAD_STORE = """
ld {.weak}{<space>|.param|.const}{.ca|.cg|.cs|.lu|.cv}{<vec>}<mem>; =n:>T [a]
ld {.weak}{.global}{<L1>}{<prefetch>}{<hint>}{<vec>}<mem>;   =n:>T [a] hint
ld {.weak}{.global}{.ca|.cg|.cs|.lu|.cv}{<prefetch>}{<hint>}{<vec>}<mem>; =n:>T [a] hint
ld .volatile{.global|<shared>}{<prefetch>}{<vec>}<mem>;      =n:>T [a]
ld (.relaxed|.acquire)<scope>{<shared>|.global}{<vec>}<mem>; =n:>T [a]
ld (.relaxed|.acquire)<scope>{.global}{<L1>}{<prefetch>}{<hint>}{<vec>}<mem>; =n:>T [a] hint
ld .global{.ca|.cg|.cs}.nc{<prefetch>}{<hint>}{<vec>}<mem>;  =n:>T [a] hint
ld .global.nc<L1>{<prefetch>}{<hint>}{<vec>}<mem>;           =n:>T [a] hint
ldu {.global}{<vec>}<mem>;                                   =n:>T [a]
st {.weak}{<space>}{.wb|.cg|.cs|.wt}{<vec>}<mem>;            [a] n:>T
st {.weak}{.global}{<L1>}{<hint>}{<vec>}<mem>;               [a] n:>T hint
st {.weak}{.global}{.wb|.cg|.cs|.wt}{<hint>}{<vec>}<mem>;    [a] n:>T hint
st .volatile{.global|<shared>}{<vec>}<mem>;                  [a] n:>T
st (.relaxed|.release)<scope>{<shared>|.global}{<vec>}<mem>; [a] n:>T
st (.relaxed|.release)<scope>{.global}{<L1>}{<hint>}{<vec>}<mem>; [a] n:>T hint
st.async {.weak}{.shared::cluster}.mbarrier::complete_tx::bytes{<vec>}
        (.b32|.b64|.u32|.u64|.s32|.s64|.f32|.f64);
        [s] n:T [s]; 90:8.1
red.async .relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes(.inc|.dec).u32; [s] T [s]; 90:8.1
red.async .relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes(.min|.max)(.u32|.s32);
        [s] T [s]; 90:8.1
red.async .relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes(.and|.or|.xor).b32;
        [s] T [s]; 90:8.1
red.async .relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes.add(.u32|.s32|.u64);
        [s] T [s]; 90:8.1
prefetch {.global|.local}(.L1|.L2);                          [a]
prefetch .global(.L2::evict_last|.L2::evict_normal);         [a];                                    80:7.4
prefetch.tensormap {.const|.param};                          [a];                                    90:8.0
prefetchu .L1;                                               [a]
applypriority {.global}.L2::evict_normal;                    [a] #128;                               80:7.4
discard {.global}.L2;                                        [a] #128;                               80:7.4
createpolicy.fractional <evict>{.L2::evict_first|.L2::evict_unchanged}.b64; =b64 f32?;               80:7.4
createpolicy.range {.global}<evict>{.L2::evict_first|.L2::evict_unchanged}.b64; =b64 [a] u32 u32;    80:7.4
createpolicy.cvt .L2.b64;                                    =b64 b64;                               80:7.4
"""

ATOMIC = """
atom {<sem>}{<scope>}{<shared>|.global}{<hint>}.add(.u32|.s32|.u64|.f32|.f64); =T_ [a] T hint
atom {<sem>}{<scope>}{<shared>|.global}{<hint>}.add.noftz(.f16|.f16x2|.bf16@90|.bf16x2@90); =T_ [a] T hint
atom {<sem>}{<scope>}{<shared>|.global}{<hint>}(.min|.max)(.u32|.s32|.u64|.s64); =T_ [a] T hint
atom {<sem>}{<scope>}{<shared>|.global}{<hint>}(.inc|.dec).u32; =T_ [a] T hint
atom {<sem>}{<scope>}{<shared>|.global}{<hint>}(.and|.or|.xor)(.b32|.b64); =T_ [a] T hint
atom {<sem>}{<scope>}{<shared>|.global}{<hint>}.exch(.b32|.b64|.b128@90:8.3); =T_ [a] T hint
atom {<sem>}{<scope>}{<shared>|.global}.cas(.b16|.b32|.b64|.b128@90:8.3); =T_ [a] T T
atom {<sem>}{<scope>}.global{<hint>}.add(.v2|.v4).f32;       =n:T [a] n:T hint;                      90:8.1
atom {<sem>}{<scope>}.global{<hint>}(.add|.min|.max).noftz(.v2|.v4|.v8)(.f16|.bf16|.f16x2|.bf16x2);
        =n:T [a] n:T hint; 90:8.1
red {.relaxed|.release}{<scope>}{<shared>|.global}{<hint>}.add(.u32|.s32|.u64|.f32|.f64); [a] T hint
red {.relaxed|.release}{<scope>}{<shared>|.global}{<hint>}.add.noftz(.f16|.f16x2|.bf16@90|.bf16x2@90);
        [a] T hint
red {.relaxed|.release}{<scope>}{<shared>|.global}{<hint>}(.min|.max)(.u32|.s32|.u64|.s64); [a] T hint
red {.relaxed|.release}{<scope>}{<shared>|.global}{<hint>}(.inc|.dec).u32; [a] T hint
red {.relaxed|.release}{<scope>}{<shared>|.global}{<hint>}(.and|.or|.xor)(.b32|.b64); [a] T hint
red {.relaxed|.release}{<scope>}.global{<hint>}.add(.v2|.v4).f32; [a] n:T hint;                      90:8.1
red {.relaxed|.release}{<scope>}.global{<hint>}(.add|.min|.max).noftz(.v2|.v4|.v8)(.f16|.bf16|.f16x2|.bf16x2);
        [a] n:T hint; 90:8.1
"""

MULTIMEM = """
multimem.ld_reduce {.weak}{.global}.add(.u32|.s32|.u64|.f32|.f64); =T [a];                           90:8.1
multimem.ld_reduce {.weak}{.global}(.min|.max)(.u32|.s32|.u64|.s64); =T [a];                         90:8.1
multimem.ld_reduce {.weak}{.global}(.and|.or|.xor)(.b32|.b64); =T [a];                               90:8.1
multimem.ld_reduce {.weak}{.global}.add(.v2|.v4).f32;        =n:T [a];                               90:8.1
multimem.ld_reduce {.weak}{.global}.add{.acc::f32@90:8.2}(.v2|.v4)(.f16x2|.bf16x2); =n:T [a];        90:8.1
multimem.ld_reduce (.relaxed|.acquire)<scope>{.global}.add(.u32|.s32|.u64|.f32|.f64); =T [a];        90:8.1
multimem.ld_reduce (.relaxed|.acquire)<scope>{.global}.add(.v2|.v4).f32; =n:T [a];                   90:8.1
multimem.ld_reduce (.relaxed|.acquire)<scope>{.global}.add{.acc::f32@90:8.2}(.v2|.v4)(.f16x2|.bf16x2);
        =n:T [a]; 90:8.1
multimem.st {.weak}{.global}(.u32|.s32|.b32|.u64|.s64|.b64|.f32|.f64); [a] T;                        90:8.1
multimem.st {.weak}{.global}(.v2|.v4)(.f32|.f16x2|.bf16x2);  [a] n:T;                                90:8.1
multimem.st (.relaxed|.release)<scope>{.global}(.u32|.s32|.b32|.u64|.s64|.b64|.f32|.f64); [a] T;     90:8.1
multimem.st (.relaxed|.release)<scope>{.global}(.v2|.v4)(.f32|.f16x2|.bf16x2); [a] n:T;              90:8.1
multimem.red [(.relaxed|.release)<scope>]{.global}.add(.u32|.s32|.u64|.f32|.f64); [a] T;             90:8.1
multimem.red [(.relaxed|.release)<scope>]{.global}(.min|.max)(.u32|.s32|.u64|.s64); [a] T;           90:8.1
multimem.red [(.relaxed|.release)<scope>]{.global}(.and|.or|.xor)(.b32|.b64); [a] T;                 90:8.1
"""

ADDRESSES = """
cvta (.global|.const|.local|<shared>|.param@80:7.7).u64;     =u64 any
cvta .to(.global|.const|.local|<shared>|.param@80:7.7).u64;  =u64 any
isspacep (.global|.const|.local|<shared>|.param@80:7.7);     =pred b64
mapa .shared::cluster.u32;                                   =u32 any u32;                           90
mapa .shared::cluster.u64;                                   =u64 any u32;                           90
mapa .u64;                                                   =u64 u64 u32;                           90
getctarank .shared::cluster(.u32|.u64);                      =u32 any;                               90
getctarank .u64;                                             =u32 u64;                               90
"""

COPIES = """
cp.async .ca(.shared|.shared::cta).global{<hint>}{<prefetch>};
        [s] [g] #4|8|16 u32#0..16? hint
        | [s] [g] #4|8|16 pred@80:7.5 hint
cp.async .cg(.shared|.shared::cta).global{<hint>}{<prefetch>};
        [s] [g] #16 u32#0..16? hint
        | [s] [g] #16 pred@80:7.5 hint
cp.async.commit_group;                                       -
cp.async.wait_group;                                         #0..4294967295
cp.async.wait_all;                                           -
cp.async.mbarrier.arrive {.noinc}{.shared|.shared::cta@80:7.8}.b64; [s]
cp.async.bulk .shared::cluster.global.mbarrier::complete_tx::bytes{.multicast::cluster}{<hint>};
        [s] [g] bytes [s] mask hint; 90:8.0
cp.async.bulk .shared::cta.global.mbarrier::complete_tx::bytes{<hint>}; [s] [g] bytes [s] hint;      90:8.6
cp.async.bulk .shared::cluster.shared::cta.mbarrier::complete_tx::bytes; [s] [s] bytes [s];          90:8.0
cp.async.bulk .global.shared::cta.bulk_group{<hint>};        [g] [s] bytes hint;                     90:8.0
cp.async.bulk.prefetch .L2.global{<hint>};                   [g] bytes hint;                         90:8.0
cp.async.bulk.commit_group;                                  -;                                      90:8.0
cp.async.bulk.wait_group {.read};                            #0..4294967295;                         90:8.0
cp.async.bulk.tensor <dim>.shared::cluster.global{.tile}.mbarrier::complete_tx::bytes
        {.multicast::cluster}{<hint>};
        [s] [map] [s] mask hint; 90:8.0
cp.async.bulk.tensor <dim>.shared::cta.global{.tile}.mbarrier::complete_tx::bytes{<hint>};
        [s] [map] [s] hint; 90:8.6
cp.async.bulk.tensor <dim3>.shared::cluster.global.im2col.mbarrier::complete_tx::bytes
        {.multicast::cluster}{<hint>};
        [s] [map] [s] offsets mask hint; 90:8.0
cp.async.bulk.tensor <dim3>.shared::cta.global.im2col.mbarrier::complete_tx::bytes{<hint>};
        [s] [map] [s] offsets hint; 90:8.6
cp.async.bulk.tensor <dim>.global.shared::cta{.tile}.bulk_group{<hint>}; [map] [s] hint;             90:8.0
cp.async.bulk.tensor <dim3>.global.shared::cta.im2col_no_offs.bulk_group{<hint>}; [map] [s] hint;    90:8.0
cp.async.bulk.prefetch.tensor <dim>.L2.global{.tile}{<hint>}; [map] hint;                            90:8.0
cp.async.bulk.prefetch.tensor <dim3>.L2.global.im2col{<hint>}; [map] offsets hint;                   90:8.0
cp.reduce.async.bulk .shared::cluster.shared::cta.mbarrier::complete_tx::bytes(.and|.or|.xor).b32;
        [s] [s] bytes [s]; 90:8.0
cp.reduce.async.bulk .shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add(.u32|.s32|.u64);
        [s] [s] bytes [s]; 90:8.0
cp.reduce.async.bulk .shared::cluster.shared::cta.mbarrier::complete_tx::bytes(.min|.max)(.u32|.s32);
        [s] [s] bytes [s]; 90:8.0
cp.reduce.async.bulk .shared::cluster.shared::cta.mbarrier::complete_tx::bytes(.inc|.dec).u32;
        [s] [s] bytes [s]; 90:8.0
cp.reduce.async.bulk .global.shared::cta.bulk_group{<hint>}(.and|.or|.xor)(.b32|.b64);
        [g] [s] bytes hint; 90:8.0
cp.reduce.async.bulk .global.shared::cta.bulk_group{<hint>}.add(.u32|.s32|.u64|.f32|.f64);
        [g] [s] bytes hint; 90:8.0
cp.reduce.async.bulk .global.shared::cta.bulk_group{<hint>}.add.noftz(.f16|.bf16); [g] [s] bytes hint; 90:8.0
cp.reduce.async.bulk .global.shared::cta.bulk_group{<hint>}(.min|.max)(.u32|.s32|.u64|.s64|.f16|.bf16);
        [g] [s] bytes hint; 90:8.0
cp.reduce.async.bulk .global.shared::cta.bulk_group{<hint>}(.inc|.dec).u32; [g] [s] bytes hint;      90:8.0
cp.reduce.async.bulk.tensor <dim>.global.shared::cta(.add|.min|.max|.inc|.dec|.and|.or|.xor){.tile}
        .bulk_group{<hint>};
        [map] [s] hint; 90:8.0
cp.reduce.async.bulk.tensor <dim3>.global.shared::cta(.add|.min|.max|.inc|.dec|.and|.or|.xor)
        .im2col_no_offs.bulk_group{<hint>};
        [map] [s] hint; 90:8.0
tensormap.replace .tile.global_address{.global|.shared::cta}.b1024.b64; [a] b64;                     90a:8.3
tensormap.replace .tile.rank{.global|.shared::cta}.b1024.b32; [a] b32;                               90a:8.3
tensormap.replace .tile(.box_dim|.global_dim|.element_stride){.global|.shared::cta}.b1024.b32;
        [a] #0..4 bits; 90a:8.3
tensormap.replace .tile.global_stride{.global|.shared::cta}.b1024.b64; [a] #0..4 b64;                90a:8.3
tensormap.replace .tile.elemtype{.global|.shared::cta}.b1024.b32; [a] #0..12;                        90a:8.3
tensormap.replace .tile.interleave_layout{.global|.shared::cta}.b1024.b32; [a] #0..2;                90a:8.3
tensormap.replace .tile.swizzle_mode{.global|.shared::cta}.b1024.b32; [a] #0..3;                     90a:8.3
tensormap.replace .tile.fill_mode{.global|.shared::cta}.b1024.b32; [a] #0..1;                        90a:8.3
tensormap.cp_fenceproxy .global.shared::cta.tensormap::generic.release<scope>.sync.aligned;
        [g] [s] #128; 90:8.3
"""

BARRIERS = """
bar {.cta@80:7.8}.sync;                                      id threads?
bar {.cta@80:7.8}.arrive;                                    id threads
bar {.cta@80:7.8}.red.popc.u32;                              =u32 id pred | =u32 id threads pred
bar {.cta@80:7.8}.red(.and|.or).pred;                        =pred id pred | =pred id threads pred
bar.warp.sync;                                               bits
barrier {.cta@80:7.8}.sync{.aligned};                        id threads?
barrier {.cta@80:7.8}.arrive{.aligned};                      id threads
barrier {.cta@80:7.8}.red{.aligned}.popc.u32;                =u32 id pred | =u32 id threads pred
barrier {.cta@80:7.8}.red{.aligned}(.and|.or).pred;          =pred id pred | =pred id threads pred
barrier.cluster.arrive {.release@90:8.0|.relaxed@90:8.0}{.aligned}; -;                               90
barrier.cluster.wait {.acquire@90:8.0}{.aligned};            -;                                      90
mbarrier.init {<cta>}.b64;                                   [s] count
mbarrier.inval {<cta>}.b64;                                  [s]
mbarrier.expect_tx [.relaxed<near>]{<cta>|.shared::cluster}.b64; [s] bits;                            90:8.0
mbarrier.complete_tx [.relaxed<near>]{<cta>|.shared::cluster}.b64; [s] bits;                          90:8.0
mbarrier.arrive {<cta>}.b64;                                 =b64_ [s] count?@90
mbarrier.arrive (.release@80:8.0|.relaxed@90:8.6)(.cta|.cluster@90){<cta>}.b64; =b64_ [s] count?@90
mbarrier.arrive [(.release|.relaxed@90:8.6)<near>].shared::cluster.b64; _ [s] count?;                  90:8.0
mbarrier.arrive .expect_tx[(.release|.relaxed@90:8.6)<near>]{<cta>}.b64; =b64_ [s] bits;              90:8.0
mbarrier.arrive .expect_tx[(.release|.relaxed@90:8.6)<near>].shared::cluster.b64; _ [s] bits;         90:8.0
mbarrier.arrive .noComplete[(.release@80:8.0).cta]{<cta>}.b64; =b64_ [s] count
mbarrier.arrive_drop {<cta>}.b64;                            =b64_ [s] count?@90
mbarrier.arrive_drop (.release@80:8.0|.relaxed@90:8.6)(.cta|.cluster@90){<cta>}.b64; =b64_ [s] count?@90
mbarrier.arrive_drop [(.release|.relaxed@90:8.6)<near>].shared::cluster.b64; _ [s] count?;             90:8.0
mbarrier.arrive_drop .expect_tx[(.release|.relaxed@90:8.6)<near>]{<cta>}.b64; =b64_ [s] bits;         90:8.0
mbarrier.arrive_drop .expect_tx[(.release|.relaxed@90:8.6)<near>].shared::cluster.b64; _ [s] bits;    90:8.0
mbarrier.arrive_drop .noComplete[(.release@80:8.0).cta]{<cta>}.b64; =b64_ [s] count
mbarrier.test_wait [(.acquire@80:8.0|.relaxed@90:8.6)(.cta|.cluster@90)]{<cta>}.b64; =pred [s] b64
mbarrier.test_wait .parity[(.acquire@80:8.0|.relaxed@90:8.6)(.cta|.cluster@90)]{<cta>}.b64;
        =pred [s] parity; 80:7.1
mbarrier.try_wait [(.acquire@90:8.0|.relaxed@90:8.6)<near>]{<cta>}.b64; =pred [s] b64 bits?;          90
mbarrier.try_wait .parity[(.acquire@90:8.0|.relaxed@90:8.6)<near>]{<cta>}.b64; =pred [s] parity bits?;   90
mbarrier.pending_count .b64;                                 =bits b64
membar (.cta|.gl|.sys);                                      -
fence (.sc|.acq_rel)<scope>;                                 -
fence (.acquire|.release)<scope>;                            -
fence .acquire.sync_restrict::shared::cluster.cluster;       -;                                      90:8.6
fence .release.sync_restrict::shared::cta.cluster;           -;                                      90:8.6
fence.mbarrier_init .release.cluster;                        -;                                      90:8.0
fence.proxy.alias;                                           -;                                      80:7.5
fence.proxy.async {.global@90:8.0|.shared::cta@90:8.0|.shared::cluster@90:8.0}; -;                   90
fence.proxy.async::generic .acquire.sync_restrict::shared::cluster.cluster; -;                       90:8.6
fence.proxy.async::generic .release.sync_restrict::shared::cta.cluster; -;                           90:8.6
fence.proxy.tensormap::generic .release<scope>;              -;                                      90:8.3
fence.proxy.tensormap::generic .acquire<scope>;              [a] #128;                               90:8.3
"""

THREADS = """
shfl.sync (.up|.down|.bfly|.idx).b32;                        =T/pred T b32 b32 bits
vote.sync (.all|.any|.uni).pred;                             =pred pred bits
vote.sync .ballot.b32;                                       =b32 pred bits
match.any.sync (.b32|.b64);                                  =bits T bits
match.all.sync (.b32|.b64);                                  =bits/pred T bits
redux.sync (.add|.min|.max)(.u32|.s32);                      =T T bits
redux.sync (.and|.or|.xor).b32;                              =bits bits bits
elect.sync;                                                  =b32_|pred bits;                         90:8.0
setmaxnreg (.inc|.dec).sync.aligned.u32;                     #24..256/8;                             90a
griddepcontrol.wait;                                         -;                                      90
griddepcontrol.launch_dependents;                            -;                                      90
nanosleep .u32;                                              u32
bra {.uni};                                                  label
brx.idx {.uni};                                              u32 table
ret {.uni};                                                  -
exit;                                                        -
trap;                                                        -
brkpt;                                                       -
pmevent;                                                     #0..15
pmevent .mask;                                               #0..65535
"""
