/* What sm.c works on, its queues of asynchronous work, and moments: how the critical path is kept.
 *
 * Each step has four moments (Node): issued, posted at a barrier, served by a unit that others share, ended.
 * Each knows the moment that it followed and what took the time between (Cause); from the last moment of all,
 * `sm_path` goes back to the beginning. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef int8_t i8;
typedef uint16_t u16;
typedef int32_t i32;
typedef uint32_t u32;
typedef int64_t i64;
typedef double f64;

enum { SCHEDULERS = 4, SCOREBOARDS = 6, GROUPS = 64, PORTS = 3, WARPGROUP = 4 };
enum Unit { CONTROL, FMA, ALU, HALF, WIDE, XU, UNIFORM, DOUBLE, SHARED, MEMORY, TENSOR, COPY, UNITS };
enum Kind { PLAIN, WGMMA, WGMMA_WAIT, MMA, SHARED_ACCESS, GLOBAL_READ, GLOBAL_WRITE, TMA_READ,
            TMA_WRITE, BULK_COMMIT, COPY_ASYNC, COPY_COMMIT, COPY_WAIT, HOLD, WGMMA_ARRIVE };
/* What a warp waits for: STALL its own last instruction, BOARD a result, UNIT_BUSY, EVENT, GROUP wgmmas and
 * copies, TURN another warp that issues */
enum Reason { ISSUED, STALL, BOARD, UNIT_BUSY, EVENT, GROUP, TURN, REASONS };
/* What takes the cycles between two moments: rates of what is shared, latencies, and a warp's own order */
enum Cause { BEGINS, IN_ORDER, ISSUE_SLOT, PIPE, RESULT, TENSOR_RATE, TENSOR_LATENCY, SHARED_RATE, SHARED_LATENCY,
             L2_RATE, HBM_RATE, COPY_RATE, MEMORY_LATENCY, SYNC };
enum Moment { AT_ISSUE, AT_POST, AT_SERVICE, AT_END, MOMENTS };

typedef struct {
    u8 unit, kind, stall, wait_mask;
    i8 write_board, read_board;  /* -1: none */
    u16 busy;                    /* cycles for which its unit takes no other of the scheduler (or of the SM) */
    u16 latency;                 /* from issue to the result */
    u16 tensor, shared;          /* WGMMA: cycles of the tensor core, and of shared memory; MMA: of the former */
    u16 registers;               /* that it reads */
    u16 number;                  /* of a wait: groups that may be under way; WGMMA: 1 for the last of a group */
} Instr;

/* `passes`: through shared memory. `note`, `notes`: of Job.notes. */
typedef struct { i32 instr, note; u16 notes, passes; } Step;

/* What a step does beyond its unit. event -1: none. bytes are moved, `near` of them by L2, which gives what
 * several SMs ask for at once only once, `far` of them from or to HBM. It signals
 * the event, `delay` cycles later; it waits until `delay` after it; or both. `late`: HBM's latency, not L2's. */
typedef struct { i32 event; u32 bytes, near, far; u16 delay; u8 waits, signals, late; u8 unused[3]; } Effect;

/* `cta` counts those of the job. The warps of one begin when those of CTA `after` have ended, -1: at once. `group`:
 * the first warp of its warpgroup, -1: of none. */
typedef struct { i32 first, end, sm, scheduler, cta, after, group; } WarpJob;

/* A moment of a step, number step * MOMENTS + Moment. by: the moment it followed, -1: none. */
typedef struct { i64 at; i32 by, cause; } Node;

typedef struct {
    /* beside wgmmas an instruction takes a scheduler so many cycles for each register that it reads, and so many
     * more for one of the SFU */
    f64 beside_wgmma, xu_beside_wgmma;
    f64 l2_bytes, hbm_bytes;        /* a cycle, of one SM: its part */
    f64 hbm_crowding, port_bytes;   /* cycles (see `crowded`); a cycle, the most that an SM gets of L2 */
    i32 begin_latency, l2_latency, hbm_latency, tma_latency, tma_issue, write_latency;
    i32 wgmma_latency, wgmma_ahead, shared_ahead;
} Figures;

/* Something that moves bytes, one after the other: when it is free, and the moment of its last user; at `since` it
 * had `waiting` bytes to move. */
typedef struct { f64 free, since, waiting; i32 user; } Queue;

typedef struct {
    const Instr *instrs;
    const Step *steps;
    const Effect *effects;
    const WarpJob *warps;
    i32 *need;            /* of each event: signals it takes */
    i64 *happened;        /* when the last of them came */
    i64 *waited;          /* [instr][REASONS]: warp-cycles */
    i64 *busy;            /* [sm][UNITS]: cycles */
    i64 *ends;            /* of each warp */
    i64 *log;             /* [log_room][4]: warp, instr, issue, wait; or NULL */
    Node *nodes;          /* [step][MOMENTS] */
    i32 *event_by;        /* of each event: the moment that completed it */
    i64 log_room, log_count, most_cycles, cycles;
    f64 l2_busy, hbm_busy;
    i32 warp_count, event_count, instr_count, sm_count, cta_count, stuck;
    i32 cluster;          /* SMs of a cluster */
    Figures f;
} Job;

typedef struct { i64 at[GROUPS], last; i32 by[GROUPS], open, last_by; } Groups;  /* ends, by number % GROUPS */

typedef struct {
    i64 next, since;                 /* when its stall ends; when it last issued */
    i64 board[SCOREBOARDS];          /* when clear */
    i32 board_by[SCOREBOARDS], at, before;  /* before: the moment of its last step */
    int why;                         /* what it waited for last, since then */
    Groups wgmma, bulk, copies;      /* bulk: until sources are read */
    i32 arrived, arrived_by;         /* WARPGROUP.ARRIVE: how often, and the moment of the last */
    bool gone, posted;               /* posted: it has signalled what it now waits for */
} Warp;

typedef struct {
    i64 free[SCHEDULERS][UNITS], shared_free, tma_free;
    Queue port, l2, hbm;        /* l2, hbm: those of a cluster's first SM are all of its SMs' */
    i64 tensor_free[SCHEDULERS], wgmma_end[SCHEDULERS];
    f64 registers_free[SCHEDULERS];
    i32 number;
    /* the moments of those who had them last */
    i32 user[SCHEDULERS][UNITS], issuer[SCHEDULERS], tensor_user[SCHEDULERS], shared_user, tma_user;
} Sm;

static i64 later(i64 a, i64 b) { return a > b ? a : b; }

/* **** moments **** */

static i32 moment(i64 step, int which) { return (i32)(step * MOMENTS + which); }

/* That the moment `n` is at `at`, after the moment `by`. A step that used a unit before follows what it did then. */
static void follows(Job *j, i32 n, i64 at, i32 by, int cause) {
    if (by != n) j->nodes[n].by = by, j->nodes[n].cause = cause;
    j->nodes[n].at = at;
}

/* A service of a unit that is shared: begun at `now`, after the moment `by`, or when the one before had ended. */
static i32 served(Job *j, i64 step, i64 end, bool queued, i32 by, i32 *user, int cause) {
    i32 n = moment(step, AT_SERVICE);
    follows(j, n, end, queued ? *user : by, cause);
    return *user = n;
}

/* **** groups of asynchronous work **** */

static void group_add(Groups *g, i64 end, i32 by) { if (end > g->last) g->last = end, g->last_by = by; }
static void group_commit(Groups *g) { g->by[g->open % GROUPS] = g->last_by; g->at[g->open++ % GROUPS] = g->last; }
/* When all but the newest `pending` groups have ended. */
static i64 group_end(const Groups *g, i32 pending) {
    i32 up_to = g->open - pending;
    if (up_to <= 0) return 0;
    return g->at[(up_to - 1) % GROUPS];
}

static i32 group_by(const Groups *g, i32 pending) {
    i32 up_to = g->open - pending;
    return up_to <= 0 ? -1 : g->by[(up_to - 1) % GROUPS];
}

/* SASS has one wait for the groups of cp.async and of bulk copies: a warp has one of the two. */
static i64 copies_end(const Warp *w, i32 pending) {
    return later(group_end(&w->copies, pending), group_end(&w->bulk, pending));
}

/* The critical path, from its end: [step * MOMENTS + Moment, begin, end, Cause] of each moment, at most `room`.
 * Returns how many there are. */
i64 sm_path(const Job *j, i64 *rows, i64 room) {
    i32 at = -1;
    i64 count = 0;
    for (i32 i = 0; i < j->warp_count; i++) {
        i32 last = moment(j->warps[i].end - 1, AT_ISSUE);
        if (j->warps[i].first < j->warps[i].end && (at < 0 || j->nodes[last].at > j->nodes[at].at)) at = last;
    }
    for (; at >= 0; at = j->nodes[at].by, count++) {
        if (count >= room) continue;
        const Node *n = &j->nodes[at];
        i64 *row = rows + 4 * count;
        row[0] = at, row[1] = n->by < 0 ? 0 : j->nodes[n->by].at, row[2] = n->at, row[3] = n->cause;
    }
    return count;
}
