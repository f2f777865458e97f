/* The emulated GPU's objects, and the few functions its parts share.
 *
 * Protocol: Python lowers PTX to an array of `Op`s, each with the address of its handler (`op_<name>`),
 * fills a `Launch` and calls `machine_run` until it says that the grid is done. A handler executes one
 * instruction for the lanes in `mask` of one warp and says what follows: NEXT, JUMPED (it set the groups'
 * positions), BLOCKED (try again when something happened), or YIELD (NEXT, but let others run first).
 *
 * Registers: a warp has a file of bytes. 32-bit registers (and all narrower ones, kept zero-extended) are
 * u32[32], one for each lane; 64-bit ones u64[32]; 128-bit ones two u64[32], low half first; predicates one
 * u32 with a bit for each lane. Operands are byte offsets into the file, -1 when absent; immediates and
 * special registers have places in it too.
 */
#ifndef EMULATOR_CORE_H
#define EMULATOR_CORE_H

#ifdef __APPLE__
#include <malloc/malloc.h>
#define malloc_usable_size malloc_size
#else
#include <malloc.h>
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;
typedef float f32;
typedef double f64;

enum { LANES = 32, MAX_WARPS = 32, NAMED_BARRIERS = 16, RANK_SHIFT = 24,
      CLUSTERS_TOLD_APART = (1 << 20) - 1 };
enum { NEXT, JUMPED, BLOCKED, YIELD };
enum { READ, WRITE, ATOMIC };
enum { GENERIC, GLOBAL, SHARED, SHARED_CLUSTER, LOCAL, CONST, PARAM };
enum { RACE, PROXY_FENCE, UNINITIALIZED, OUT_OF_BOUNDS, MISALIGNED, BARRIER, DEADLOCK, WGMMA_HAZARD,
      ASYNC_HAZARD, INSTRUCTION_LIMIT, NOTE };  /* NOTE: PTX does not promise it, known GPUs do it */

/* Generic addresses of windows. Global allocations lie below, from 0x700000000 up. */
#define LOCAL_WINDOW 0x7e0000000000ull
#define SHARED_WINDOW 0x7f0000000000ull
#define PARAM_WINDOW 0x7d0000000000ull
#define WINDOW_BYTES 0x100000000ull

typedef struct Op Op;
typedef struct Warp Warp;
typedef struct Cta Cta;
typedef struct Cluster Cluster;
typedef struct Machine Machine;
typedef struct Region Region;
typedef struct Async Async;
typedef struct Clock Clock;
typedef struct Mbarrier Mbarrier;
typedef struct Tape Tape;
typedef struct Peers Peers;

typedef int Handler(Machine *m, Warp *w, const Op *op, u32 mask);
#define HANDLER(name) int op_##name(Machine *m, Warp *w, const Op *op, u32 mask)

/* One lowered instruction; Python packs it with struct format "<Pq14iI4BHHi" (see program.py). */
struct Op {
    Handler *handler;
    i64 imm;            /* an immediate, or the constant part of an address */
    i32 d, a, b, c, e;  /* register-file offsets: destination, sources */
    i32 guard;          /* predicate, or -1 */
    i32 list, count;    /* further operands: Launch.lists[list .. list + count) */
    i32 target, join;   /* branches: positions of the target and of the reconvergence point (-1: none) */
    i32 line;           /* of the PTX text */
    i32 source;         /* number of the PTX instruction, for counters */
    i32 reads, writes;  /* where Launch.lists holds [n, offset...] of registers read and written, or -1 */
    u32 flags;          /* bits the handler's family defines */
    u8 guard_negated;   /* run where the guard is false */
    u8 aligned;         /* bit 0: all lanes of the warp that have not exited must be here; bit 1: counts as an
                           instruction (the last op of one) */
    u8 space;           /* of the address */
    u8 wide;            /* the address register is 64 bits wide */
    u16 width;          /* bytes of an element in memory */
    u16 vector;         /* elements */
    i32 more;           /* a small number the handler's family defines */
};

/* Memory that has bounds: an allocation, or the shared memory of a CTA (base is then SHARED_BASE | rank <<
 * 24). */
struct Region {
    u64 base, size;
    u8 *data;
    u8 *valid;            /* 1 for each byte that was written; NULL: all of them were */
    struct Page **pages;  /* what was last done to each word (shadow.c), made when first touched */
    Cta *cta;             /* whose shared memory, or NULL */
    /* footprint.c: what this launch touched, made when first touched, all within [low, high); and what kernels
     * touch that may still run, NULL: nothing */
    u8 *touched;
    u64 low, high;
    const u8 *flight;
    i32 gpu;              /* whose memory it is, among peers */
    i32 outside;          /* other processes write it, too */
};

/* Lanes of a warp that are at the same place. */
typedef struct {
    u32 mask;
    i32 pc;
    i32 join;     /* innermost reconvergence point waited for: an index into Warp.joins, or -1 */
    u8 blocked;   /* the handler said BLOCKED when Cluster.events was `seen` */
    u8 forced;    /* the machine is stuck: the handler should do what it can without waiting */
    u8 partial;   /* blocked because other lanes of the warp are missing */
    u8 ticket;    /* what a blocking handler needs to remember; 0 when it starts */
    u64 seen, value;  /* value: another word of the handler's */
} Group;

/* A point where lanes that went different ways meet: all of `mask` must come, `arrived` have. */
typedef struct {
    u32 mask, arrived;
    i32 pc, parent;
} Join;

struct Warp {
    Cta *cta;
    i32 id;             /* in the CTA */
    u32 lanes, alive;   /* lanes that exist; those that have not exited */
    u8 *regs, *local;   /* local: Launch.local_bytes for each lane, one after the other */
    i32 group_count, current;
    Group groups[LANES];
    Join joins[2 * LANES];
    i32 join_count;
    i32 tried_pc;       /* the try_wait that last failed, and on what */
    u64 tried;
    i32 failed_pc[LANES];  /* with Launch.late: where a lane's first try_wait was made to fail, -1: nowhere */
    u64 executed;       /* instructions */
    /* lanes of all groups that the instruction being executed advances; 0: the current one */
    u32 gathered;
    u64 waiting;        /* turns in which lanes waited at a join */
    u32 passed;         /* lanes that left a join before the others came */
    u32 cluster_arrived, cluster_pending;  /* barrier.cluster: lanes arrived in this phase; lanes that have yet to wait */
    i32 registers;      /* a thread's, after setmaxnreg; 0: Launch.registers */
    /* checks */
    u32 now;            /* own clock */
    Clock *clock;       /* what this warp knows to have happened */
    u32 copies_seen[LANES];  /* other lanes' cp.asyncs up to this clock are complete and ordered before this lane's */
    u32 lane_sync[LANES];  /* other lanes' accesses before this clock are ordered before this lane's */
    u32 behind;         /* lanes that have not learned from others that griddepcontrol.wait has ended */
    u32 fence_epoch;    /* wgmma.fence count */
    /* per 128 bytes of registers: fence_epoch when last written, and read, by an ordinary instruction */
    u32 *written_at, *read_at;
    /* asynchronous work of this warp */
    u32 copy_groups[LANES], copy_done[LANES];  /* cp.async groups committed, known complete */
    u32 copy_arrivals;  /* cp.async.mbarrier.arrives: they tell copies before them from those after */
    u32 bulk_groups[LANES], bulk_done[LANES], bulk_read[LANES];
    u32 map_reads;      /* tensor maps that loads of this warp began to read */
    u32 bulk_issued[LANES];  /* the group of the last copy out of shared memory, and which that was */
    const Op *bulk_last;
    u32 wgmma_groups, wgmma_done;
    i32 in_flight;      /* wgmmas not complete */
    void *tensor;       /* state of tensor.c */
    /* strong loads in a row while nothing changed on any of the peers, and the last of them (peers.c) */
    u64 polls, poll_changes, polled;
    const Op *poll;
    Tape *tape;         /* tape.c; NULL: not asked for */
};

/* A named barrier. */
typedef struct {
    i32 expected, arrived;  /* threads */
    u32 phase;
    u32 reduction[3];       /* popc, and, or of this phase */
    u32 result[3];
    u32 lanes[MAX_WARPS], waiting;  /* lanes of each warp that have arrived; warps that wait */
    bool open;              /* a thread arrived without a count: all threads of the CTA that have not exited must */
    Clock *clock[2];        /* of the phase under way; [1] is not used */
} Named;

struct Cta {
    Cluster *cluster;
    i32 rank, warp_count, exited;   /* rank in the cluster; warps exited */
    u32 id[3];
    Warp *warps;
    Region shared;
    Named named[NAMED_BARRIERS];
    Mbarrier *mbarriers;
    i32 mbarrier_count, mbarrier_room;
    /* for each actor of the cluster: its clock when it last touched this CTA's shared memory */
    u32 *remote;
    i32 register_pool;  /* setmaxnreg: registers free, in units of one a thread of a warp */
    bool gone;
    bool waited, released;  /* griddepcontrol.wait, .launch_dependents were executed */
    u8 phases;          /* rows of swizzle patterns (address >> 7) at which boxes of tensor copies began */
};

struct Cluster {
    u32 number;         /* in the grid */
    u32 sequence;       /* number of the cluster in the order of launch, from 1; a million on, it comes again */
    u32 id[3];
    i32 size;           /* CTAs */
    Cta *ctas;
    i32 live;           /* CTAs not gone */
    i32 pending;        /* asynchronous operations of its CTAs */
    u64 most;           /* instructions after which it ends; 0: it runs to its end */
    u32 alone;          /* the warps that run, and wait for nothing; 0: all run */
    u32 arrived, phase; /* barrier.cluster: threads arrived */
    u64 events;         /* changes that may let something of it go on: nothing that blocks is of another cluster */
    Clock *clock[2];
    const Peers *peers; /* NULL: none */
    u32 launch;         /* among peers: the launch's number, from 1 */
};

/* An asynchronous operation: `complete` moves the data when its time comes. */
struct Async {
    void (*complete)(Machine *m, Async *a);
    Async *next;
    Warp *warp;
    const Op *op;
    i32 lane;
    u32 queue;        /* those of the same non-zero queue complete in order */
    u32 group;        /* which of the lane's groups it is in; 0: none (an mbarrier tells) */
    u32 twins;        /* lanes whose groups it is in as well */
    u8 family;        /* COPY, BULK, WGMMA, OTHER */
    u8 reading;       /* its source is in shared memory and not yet read */
    u64 born;         /* Machine.steps at issue */
    u64 args[12];
    u8 *bytes;        /* anything larger, freed with it */
};
enum { OTHER, COPY, BULK, WGMMA };

typedef struct {
    i32 kind, line, other;  /* other: PTX line of the earlier access, or 0 */
    i32 cta, other_cta;     /* linear CTA numbers, -1: none */
    i32 thread, other_thread;
    i32 count;              /* how often it was seen */
    u64 address;            /* UNINITIALIZED: of the byte */
    char text[256];
} Finding;

/* Counters of one PTX instruction. */
typedef struct {
    u64 warps, threads;      /* times executed by a warp, by a thread */
    u64 conflicts;           /* shared memory: passes beyond the least that could do */
    u64 passes;
    u64 sectors, requests;   /* global memory: 32-byte sectors, warp requests */
    u64 flops;               /* tensor core */
} Counter;

typedef struct { u64 global_read, global_written, l2, shared, async; } Totals;

/* What Python fills in; pointers stay valid during the launch. */
typedef struct {
    const Op *ops;
    const i32 *lists;
    const u8 *constants;   /* first `constant_bytes` of each register file */
    const u8 *parameters;
    Region *regions;       /* sorted by base */
    Counter *counters;
    i32 op_count, source_count, constant_bytes, register_bytes, parameter_bytes, region_count;
    i32 specials[32];      /* register offsets of special registers, -1: unused (enum Special) */
    u32 grid[3], block[3], cluster[3];
    u32 shared_bytes, static_bytes, dynamic_align, local_bytes, sm_count;
    i32 arch;              /* 80, 89, 90 */
    i32 check, exact;      /* checks on; tensor cores accumulate exactly in fp32 */
    i32 uses_wgmma, registers, resident;  /* resident: clusters that fit on the device at once */
    i32 narrow, remote;    /* an access or fence has a scope smaller than the GPU's; mbarriers arrived at may be remote */
    u64 seed, step_limit;
    i64 most_held;         /* bytes of the host for threads and the shadow of memory; INT64_MAX: no limit */
    i32 late;              /* the seed "late": copies complete when nothing else can run, first waits fail */
    void (*trace)(const Warp *w, const Op *op, u32 mask);
    i64 trace_cta;         /* -1: all */
    u64 trace_warps;       /* mask; 0: no trace */
    i32 footprint, pdl;    /* Region.touched is asked for; the launch is programmatic */
    const char *ahead;     /* names of the kernels whose bytes Region.flight has */
    const i32 *taped;      /* the clusters that run, in their order, and have tapes; NULL: all run, without */
    i32 taped_count, whole;  /* those from `whole` on end after `brief` instructions, and tell only what they read */
    u64 brief;
    i32 idle;              /* tensor cores add random numbers: only time is asked for */
    u32 readers;           /* the warps that run of clusters that tell only what they read: Cluster.alone */
    Peers *peers;          /* GPUs that run beside this one, NULL: none (peers.c) */
    i32 gpu;               /* which of them it is */
    const char *name;      /* of the kernel */
    const struct Multicast *multicasts;
    i32 multicast_count;
} Launch;

enum Special { TID_X, TID_Y, TID_Z, CTAID_X, CTAID_Y, CTAID_Z, LANEID, WARPID, CLUSTERID_X, CLUSTERID_Y,
              CLUSTERID_Z,
    CLUSTER_CTAID_X, CLUSTER_CTAID_Y, CLUSTER_CTAID_Z, CLUSTER_CTARANK, SMID, LANEMASK_EQ, LANEMASK_LT,
    LANEMASK_LE, LANEMASK_GT, LANEMASK_GE, SHARED_ORIGIN };

struct Machine {
    Launch launch;
    u64 rng, steps, events;   /* events: of all clusters */
    u64 pending_turn;
    Totals totals;
    Finding *findings;
    i32 finding_count, finding_room;
    u32 conflicts;            /* of accesses that nothing orders */
    bool noncoherent;         /* ld.global.nc has been executed */
    Cluster **clusters;       /* resident */
    i32 cluster_count, cluster_room, window;
    u32 next_cluster, cluster_total;
    Async *async, **async_end;
    i32 async_count;
    i32 actors;               /* of a cluster: length of its clocks */
    struct Shadow *shadow;
    Warp *running;
    const Op *current;        /* the op being executed */
    /* while touch() is asked for WRITE by an ordinary store: the bytes it will write (so that replicated stores
     * of one value are no race); NULL otherwise */
    const u8 *storing;
    u64 stuck_events, last_exit, yields;
    bool crowded;             /* clusters that could go on do not begin: too much is held */
    bool endless;             /* a thread is in a loop that no way leads out of */
    bool polled;              /* a thread has asked for what others may change */
    bool rested;              /* access.c: a thread that polls memory of other processes has slept */
    i32 stuck;                /* rounds in which nothing could be done but to force */
    bool stopped;
    bool held;                /* the next grid cannot begin before the kernels ahead have ended */
    Tape **tapes;
    i32 tape_count, tape_room, draws;  /* draws: of work tiles from a counter (atomics.c) */
    u32 peer_launch;          /* in Peers.launches */
    u64 *changes;             /* peers.c: counts what may let a thread that polls go on; NULL without peers */
    char *printed;            /* print.c */
    size_t printed_count;
};

/* **** memory that launches hold, which is all taken and given back here **** */

static i64 held_bytes;

static inline void *count_held(void *p) {
    __atomic_fetch_add(&held_bytes, (i64)malloc_usable_size(p), __ATOMIC_RELAXED);
    return p;
}
static inline void count_given(void *p) {
    __atomic_fetch_sub(&held_bytes, (i64)malloc_usable_size(p), __ATOMIC_RELAXED);
}
static inline void *take(size_t n) { return count_held(malloc(n)); }
static inline void *take_zeros(size_t n, size_t size) { return count_held(calloc(n, size)); }
static inline void *take_more(void *p, size_t n) { count_given(p); return count_held(realloc(p, n)); }
static inline void give(void *p) { count_given(p); free(p); }

/* Whether `share`ths of what a launch may hold are held. */
static inline bool holds(const Machine *m, i64 share) { return held_bytes > m->launch.most_held / share; }

/* Something of a cluster has changed. */
static inline void happened(Machine *m, Cluster *k) {
    m->events++, k->events++;
    if (m->changes) ++*m->changes;
}

/* **** registers **** */

static inline u32 *r32(const Warp *w, i32 at) { return (u32 *)(w->regs + at); }
static inline i32 *s32(const Warp *w, i32 at) { return (i32 *)(w->regs + at); }
static inline u64 *r64(const Warp *w, i32 at) { return (u64 *)(w->regs + at); }
static inline f32 *rf32(const Warp *w, i32 at) { return (f32 *)(w->regs + at); }
static inline f64 *rf64(const Warp *w, i32 at) { return (f64 *)(w->regs + at); }
static inline u32 pred(const Warp *w, i32 at) { return *(const u32 *)(w->regs + at); }

#define EACH for (int l = 0; l < LANES; l++)
#define ACTIVE EACH if (mask >> l & 1)

/* Writes values to the lanes in mask. */
static inline void put32(Warp *w, i32 at, const u32 *value, u32 mask) {
    u32 *d = r32(w, at);
    if (mask == ~0u) memcpy(d, value, 4 * LANES);
    else EACH d[l] = mask >> l & 1 ? value[l] : d[l];
}
static inline void put64(Warp *w, i32 at, const u64 *value, u32 mask) {
    u64 *d = r64(w, at);
    if (mask == ~0u) memcpy(d, value, 8 * LANES);
    else EACH d[l] = mask >> l & 1 ? value[l] : d[l];
}
static inline void put_pred(Warp *w, i32 at, u32 value, u32 mask) {
    u32 *d = (u32 *)(w->regs + at);
    *d = (*d & ~mask) | (value & mask);
}
static inline Group *group_of(Warp *w) { return &w->groups[w->current]; }
static inline u32 warp_thread(const Warp *w, int lane) { return (u32)(w->id * LANES + lane); }
static inline int popcount(u32 x) { return __builtin_popcount(x); }
static inline int lowest(u32 x) { return __builtin_ctz(x); }

/* Addresses of all lanes: op->a (32 or 64 bits wide, or absent) + op->imm. */
static inline void addresses(const Warp *w, const Op *op, u64 *out) {
    if (op->a < 0) EACH out[l] = (u64)op->imm;
    else if (op->wide) EACH out[l] = r64(w, op->a)[l] + (u64)op->imm;
    else EACH out[l] = (u32)(r32(w, op->a)[l] + (u32)op->imm);
}

/* **** machine.c **** */

/* seeded; not for anything that changes results of a correct program */
u64 random_u64(Machine *m);
/* Enters a finding (the same kind at the same lines is counted once). `other_*`: 0 / -1 when there is none.
 */
void report(Machine *m, int kind, const Op *op, const Warp *w, int lane, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
void report_pair(Machine *m, int kind, const Op *op, const Warp *w, int lane, int other_line, int other_cta,
                 int other_thread, const char *text);
i32 cta_number(const Machine *m, const Cta *c);   /* linear number in the grid */
void split_group(Machine *m, Warp *w, u32 taken, i32 target, i32 join);
/* Warp collectives. The lanes at this op (their guards true), when all of `wanted` that are alive are there:
 * the handler then works for all of them at once. 0: some are missing, return BLOCKED. `gather_any` takes
 * lanes at other ops of the same handler too (bar.warp.sync). When the machine is stuck they report BARRIER
 * and give who is there. */
u32 gather(Machine *m, Warp *w, const Op *op, u32 wanted);
u32 gather_any(Machine *m, Warp *w, const Op *op, u32 wanted);
void warp_exit(Machine *m, Warp *w, u32 lanes);
/* Async operations. `async_add` takes a zeroed `Async` by value and queues it; complete_* run those that
 * match now. */
Async *async_add(Machine *m, Async a);
void async_complete_groups(Machine *m, Warp *w, int family, int lane, u32 up_to, bool reads_only);

/* **** memory.c **** */

/* Host pointer to `bytes` at an address for one lane after checking bounds, alignment to `align`,
 * initialisation and races; NULL when it is not there (reported). kind: READ, WRITE, ATOMIC. space as in Op.
 */
u8 *touch(Machine *m, Warp *w, const Op *op, int lane, int space, u64 address, u32 bytes, u32 align,
          int kind);
/* The same without entering the access in the shadow: bounds and alignment alone. Gives region and offset
 * when not NULL. */
u8 *locate(Machine *m, Warp *w, const Op *op, int lane, int space, u64 address, u32 bytes, u32 align,
           Region **region,
           u64 *offset);
/* The CTA of a shared-window address (rank in bits 24+), NULL when there is none or it has exited
 * (reported). */
Cta *shared_owner(Machine *m, Warp *w, const Op *op, int lane, u64 address);

/* **** shadow.c: happens-before. All of it does nothing when checks are off. **** */

/* Who touches memory: a thread, or an asynchronous operation it issued. `clock` is that of `actor`. */
typedef struct {
    Warp *warp;   /* issuer */
    const Op *op;
    i32 lane;
    u32 actor, clock;
    u8 async;     /* 0: generic; 1: cp.async (generic proxy, asynchronous); 2: async proxy */
    u8 strong;    /* acquire/release/relaxed/volatile: atomic accesses do not race with one another */
    i8 scope;     /* of strong accesses */
    u8 noncoherent;  /* ld.global.nc */
} Who;

/* Scopes of strong accesses and fences, by size. */
enum { SCOPE_CTA = -2, SCOPE_CLUSTER, SCOPE_GPU, SCOPE_SYSTEM };

/* Numbers of actors in a cluster: of each CTA, 32 warps, their wgmmas, bulk groups, cp.async groups, and its
 * mbarriers; then what bulk groups read, which wait_group.read waits for alone, and the tensor maps of loads. */
enum { ACTORS = 256, ACTOR_WGMMA = 32, ACTOR_BULK = 64, ACTOR_COPY = 96, ACTOR_MBARRIER = 128,
       MBARRIER_ACTORS = 64, ACTOR_BULK_READ = ACTOR_MBARRIER + MBARRIER_ACTORS, ACTOR_MAP = ACTOR_BULK_READ + 32 };
static inline u32 actor_of(const Warp *w,
                           int family) { return (u32)(w->cta->rank * ACTORS + family + w->id); }

void shadow_access(Machine *m, const Who *who, Region *r, u64 offset, u64 bytes, int kind);
Clock *clock_new(Machine *m);
void clock_free(Clock *c);
void clock_clear(Machine *m, Clock *c);
void clock_release(Machine *m, Warp *w, Clock *into);        /* what w knows, into a synchronisation object */
void clock_acquire(Machine *m, Warp *w, const Clock *from);  /* and out of it */
/* which phases of mbarriers w knows to have ended, into a synchronisation object: also what an asynchronous
 * operation of w signals tells that much */
void clock_phases(Machine *m, const Warp *w, Clock *into);
void clock_observe(Machine *m, Warp *w, u32 actor, u32 clock);  /* w waited until `actor` reached `clock` */
/* fence.acq_rel of a scope, for relaxed accesses around it */
void clock_fence(Machine *m, Warp *w, bool acquire, bool release, int scope);
void clock_proxy_fence(Machine *m, Warp *w, bool shared, bool global);
void clock_wait(Machine *m, Warp *w, u32 mask);              /* the lanes waited for the kernels ahead */
bool clock_after_wait(const Warp *w, int lane);              /* this lane did, or learned that another has */
void lanes_sync(Machine *m, Warp *w, u32 mask);              /* bar.warp.sync and all that includes it */
/* A release / acquire / relaxed access to one location (atomics, ld.acquire, st.release, volatile). */
void clock_location(Machine *m, Warp *w, Region *r, u64 offset, bool reads, bool writes, bool acquire,
                    bool release, int scope);
void clock_begin(Warp *w, const Machine *m);    /* a warp starts: what its stream knows, among peers */
void clock_end(Machine *m, const Warp *w);      /* and ends */

/* **** peers.c **** */

enum { MOST_PEERS = 16 };

/* Addresses that stand for those of one allocation, from `members[i]` on, in each of several GPUs (multimem.c). */
typedef struct Multicast { u64 base, size, members[MOST_PEERS]; i32 count; } Multicast;

u32 peers_cluster(Machine *m, u32 number);      /* the sequence of a cluster that starts */
void peers_poll(Machine *m, Warp *w, const Op *op, u64 address);
bool describe_poll(const Machine *m, const Warp *w, char *out, size_t size);

/* **** footprint.c **** */

void footprint_enter(Machine *m, const Who *who, Region *r, u64 offset, u32 bytes, int kind);
void footprint_finish(Machine *m);
void grid_exit(Machine *m, const Cta *c);

/* **** async.c **** */

/* An mbarrier in shared memory. Phase k is under way; waiting for phase k ends when `phase` > k. */
struct Mbarrier {
    u64 offset;         /* in its CTA's shared memory, from SHARED_BASE */
    u32 phase;
    i32 expected, pending;
    i64 tx;
    /* phases since the machine started, for clocks (an mbarrier may be initialised again) */
    u32 actor, epoch;
    u32 first;          /* epoch when it was initialised */
    Clock *clock[2];
    /* of this phase and the last, by parity: arrivals (by rank * MAX_WARPS + warp); whether copies had a part */
    struct Arrival *arrivals[2];
    bool copies[2];
    bool live;
    /* mbarrier.init: its line, actor, clock and lane; the clock of that thread's fence.mbarrier_init, or 0 */
    i32 init_line, init_lane;
    u32 init_actor, init_clock, init_fenced;
};
/* complete_tx on a barrier of a CTA (no-op with a finding when there is none). */
void mbarrier_complete_tx(Machine *m, Warp *w, const Op *op, int lane, Cta *cta, u64 offset, i64 bytes);
/* NULL: reported */
Mbarrier *mbarrier_at(Machine *m, Warp *w, const Op *op, int lane, Cta *cta, u64 offset);

/* **** tape.c **** */

void tape_note(const Warp *w, u32 kind, u32 count, u64 key, u64 a, u64 b);
void add_random_sums(Warp *w, int rows, int n, int k, f32 *c, int ldc);

/* **** lifetimes: each part makes and frees what it keeps in a warp or a CTA **** */
void tensor_free(Machine *m, Warp *w);
void barriers_free(Machine *m, Cta *c);
void shadow_start(Machine *m);
void shadow_finish(Machine *m);
void shadow_region_free(Machine *m, Region *r);
/* a CTA is gone: who of its cluster may still touch its shared memory? */
void shadow_exit(Machine *m, Cta *c);
void tensor_exit(Machine *m, Warp *w);  /* wgmmas not waited for are reported */

/* barriers.c: what a group waits for */
void describe_wait(Machine *m, Warp *w, Group *g, char *out, size_t size);

/* Tensor-core work in flight, for the main loop: an ordinary instruction that touches its registers is a
 * hazard. */
void tensor_check_registers(Machine *m, Warp *w, const Op *op);
void tensor_complete(Machine *m, Warp *w, u32 up_to_group);   /* wgmma groups <= up_to_group, or all: ~0u */

#endif
