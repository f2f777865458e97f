/* Streaming multiprocessors in cycles: warps issue SASS in order, units are servers, barriers are events.
 *
 * Protocol: Python fills in a `Job`: instructions with ptxas's control bits (Instr), each warp's stream of
 * them (Step), events that steps signal and wait for, and the GPU's figures; `sm_run` fills in when everything
 * happened. One job is the CTAs of a cluster, or those that share an SM; the rest of the GPU takes its share of
 * L2 and HBM, which are therefore given as one SM's part.
 *
 * A scheduler issues one instruction a cycle, of the warp that can and has waited longest. A warp can when its
 * last instruction's stall has passed, the scoreboards of its wait mask are clear, and the unit takes another.
 * Results of a fixed latency need nothing else: ptxas has put stalls there. Others clear a scoreboard when they
 * are done. wgmma, TMA, copies and barriers work by themselves, and steps wait for them. */
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

enum { SCHEDULERS = 4, SCOREBOARDS = 6, GROUPS = 64 };
enum Unit { CONTROL, FMA, ALU, HALF, WIDE, XU, UNIFORM, DOUBLE, SHARED, MEMORY, TENSOR, COPY, UNITS };
enum Kind { PLAIN, WGMMA, WGMMA_WAIT, MMA, SHARED_ACCESS, GLOBAL_READ, GLOBAL_WRITE, TMA_READ,
            TMA_WRITE, BULK_COMMIT, COPY_ASYNC, COPY_COMMIT, COPY_WAIT };
/* What a warp waits for: STALL its own last instruction, BOARD a result, UNIT_BUSY, EVENT, GROUP wgmmas and
 * copies, TURN another warp that issues */
enum Reason { ISSUED, STALL, BOARD, UNIT_BUSY, EVENT, GROUP, TURN, REASONS };

typedef struct {
    u8 unit, kind, stall, wait_mask;
    i8 write_board, read_board;  /* -1: none */
    u16 busy;                    /* cycles for which its unit takes no other of the scheduler (or of the SM) */
    u16 latency;                 /* from issue to the result */
    u16 tensor, shared;          /* WGMMA: cycles of the tensor core, and of shared memory; MMA: of the former */
    u16 number;                  /* of a wait: groups that may be under way; WGMMA: 1 for the last of a group */
} Instr;

/* `passes`: through shared memory. `note`, `notes`: of Job.notes. */
typedef struct { i32 instr, note; u16 notes, passes; } Step;

/* What a step does beyond its unit. event -1: none. bytes are moved, `far` of them from or to HBM. It signals
 * the event, `delay` cycles later; it waits until `delay` after it; or both. `late`: HBM's latency, not L2's. */
typedef struct { i32 event; u32 bytes, far; u16 delay; u8 waits, signals, late; u8 unused[3]; } Effect;

/* `cta` counts those of the job. The warps of one begin when those of CTA `after` have ended, -1: at once. */
typedef struct { i32 first, end, sm, scheduler, cta, after; } WarpJob;

typedef struct {
    f64 l2_bytes, hbm_bytes;        /* a cycle, of one SM */
    i32 begin_latency, l2_latency, hbm_latency, tma_latency, tma_issue, write_latency;
    i32 wgmma_latency, wgmma_ahead, shared_ahead;
} Figures;

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
    i64 log_room, log_count, most_cycles, cycles, l2_busy, hbm_busy;
    i32 warp_count, event_count, instr_count, sm_count, cta_count, stuck;
    Figures f;
} Job;

typedef struct { i64 at[GROUPS]; i32 open; i64 last; } Groups;  /* ends of groups, by number % GROUPS */

typedef struct {
    i64 next, since;                 /* when its stall ends; when it last issued */
    i64 board[SCOREBOARDS];          /* when clear */
    i32 at;
    Groups wgmma, bulk, copies;      /* bulk: until sources are read */
    bool gone, posted;               /* posted: it has signalled what it now waits for */
} Warp;

typedef struct {
    i64 free[SCHEDULERS][UNITS], shared_free, tma_free;
    f64 l2_free, hbm_free;
    i64 tensor_free[SCHEDULERS];
} Sm;

static i64 later(i64 a, i64 b) { return a > b ? a : b; }

/* **** groups of asynchronous work **** */

static void group_add(Groups *g, i64 end) { if (end > g->last) g->last = end; }
static void group_commit(Groups *g) { g->at[g->open++ % GROUPS] = g->last; }
/* When all but the newest `pending` groups have ended. */
static i64 group_end(const Groups *g, i32 pending) {
    i32 up_to = g->open - pending;
    if (up_to <= 0) return 0;
    return g->at[(up_to - 1) % GROUPS];
}

/* SASS has one wait for the groups of cp.async and of bulk copies: a warp has one of the two. */
static i64 copies_end(const Warp *w, i32 pending) {
    return later(group_end(&w->copies, pending), group_end(&w->bulk, pending));
}

/* **** memory beyond the SM **** */

/* When `bytes`, `far` of them from HBM, have been moved for an SM. */
static i64 moved(Job *j, Sm *s, i64 now, u32 bytes, u32 far, i32 latency) {
    f64 l2 = bytes / j->f.l2_bytes, hbm = far / j->f.hbm_bytes;
    if (s->l2_free < now) s->l2_free = (f64)now;
    s->l2_free += l2, j->l2_busy += (i64)l2;
    i64 end = (i64)s->l2_free + latency;
    if (far) {
        if (s->hbm_free < now) s->hbm_free = (f64)now;
        s->hbm_free += hbm, j->hbm_busy += (i64)hbm;
        end = later(end, (i64)s->hbm_free + latency);
    }
    return end;
}

/* **** events **** */

static void signal(Job *j, i32 event, i64 when) {
    if (j->happened[event] < when) j->happened[event] = when;
    j->need[event]--;
}

/* When a wait ends; never, for an event that lacks signals. */
static i64 wait_end(const Job *j, const Effect *e) {
    return j->need[e->event] > 0 ? INT64_MAX : j->happened[e->event] + e->delay;
}

/* **** a warp's next step **** */

/* Why the warp cannot issue now; ISSUED: it can. */
static int held(const Job *j, const Warp *w, const WarpJob *where, const Sm *s, i64 now) {
    const Step *step = &j->steps[w->at];
    const Instr *i = &j->instrs[step->instr];
    if (now < w->next) return STALL;
    for (int b = 0; b < SCOREBOARDS; b++)
        if (i->wait_mask >> b & 1 && w->board[b] > now) return BOARD;
    if (s->free[where->scheduler][i->unit] > now) return UNIT_BUSY;
    switch (i->kind) {
    case WGMMA: case MMA:
        if (s->tensor_free[where->scheduler] > now + j->f.wgmma_ahead) return UNIT_BUSY;
        break;
    case SHARED_ACCESS: if (s->shared_free > now + j->f.shared_ahead) return UNIT_BUSY; break;
    case WGMMA_WAIT: if (group_end(&w->wgmma, i->number) > now) return GROUP; break;
    case COPY_WAIT: if (copies_end(w, i->number) > now) return GROUP; break;
    default: break;
    }
    for (i32 n = step->note; n < step->note + step->notes; n++) {
        const Effect *e = &j->effects[n];
        if (e->waits && (!e->signals || w->posted) && wait_end(j, e) > now) return EVENT;
    }
    return ISSUED;
}

/* Cycles in which shared memory serves a step. */
static i64 share(Sm *s, i64 now, i64 cycles) {
    s->shared_free = later(s->shared_free, now) + cycles;
    return s->shared_free;
}

/* A barrier that is also waited for: signalled first; true: the step is not over. */
static bool meets(Job *j, const Step *step, Warp *w, i64 now) {
    if (w->posted) { w->posted = false; return false; }
    for (i32 n = step->note; n < step->note + step->notes; n++) {
        const Effect *e = &j->effects[n];
        if (!e->waits || !e->signals) continue;
        signal(j, e->event, now + e->delay);
        w->posted = true, w->next = now + 1;
    }
    return w->posted;
}

/* Bytes that a step moves: when they are there. */
static i64 transfer(Job *j, Warp *w, Sm *s, const Instr *i, const Effect *e, i64 *busy, i64 now) {
    const Figures *f = &j->f;
    bool reads = i->kind == TMA_READ, writes = i->kind == TMA_WRITE || i->kind == GLOBAL_WRITE;
    i64 begin = now;
    if (i->unit == COPY) {
        begin = s->tma_free = later(s->tma_free, now) + f->tma_issue;
        busy[COPY] += f->tma_issue;
    }
    i32 near = writes ? f->write_latency : reads ? f->tma_latency : f->l2_latency;
    if (e->late && !writes) near += f->hbm_latency - f->l2_latency;
    i64 end = moved(j, s, begin, e->bytes, e->far, near);
    if (i->kind == TMA_WRITE) group_add(&w->bulk, end - f->write_latency);
    if (i->kind == COPY_ASYNC) group_add(&w->copies, end);
    return end;
}

/* When a step's signal is heard: of copies when they have ended. */
static i64 signalled(const Warp *w, const Instr *i, i64 now, i64 end) {
    if (i->kind == TMA_READ) return end;
    return i->kind == COPY_ASYNC ? later(now, w->copies.last) : now;
}

static void issue(Job *j, Warp *w, const WarpJob *where, Sm *s, i64 now) {
    const Step *step = &j->steps[w->at];
    const Instr *i = &j->instrs[step->instr];
    const Figures *f = &j->f;
    i64 *busy = j->busy + where->sm * UNITS, done = now + i->latency, end = now;
    if (meets(j, step, w, now)) return;
    s->free[where->scheduler][i->unit] = now + i->busy;
    busy[i->unit] += i->busy;
    switch (i->kind) {
    case WGMMA: {
        i64 begin = later(now, s->tensor_free[where->scheduler]);
        s->tensor_free[where->scheduler] = begin + i->tensor;
        busy[TENSOR] += i->tensor;
        group_add(&w->wgmma, begin + i->tensor + f->wgmma_latency);
        if (i->number) group_commit(&w->wgmma);
        if (where->scheduler == 0) share(s, begin, i->shared), busy[SHARED] += i->shared;
        break;
    }
    case MMA: {
        i64 begin = later(now, s->tensor_free[where->scheduler]);
        s->tensor_free[where->scheduler] = begin + i->tensor;
        busy[TENSOR] += i->tensor;
        done = begin + i->latency;
        break;
    }
    case BULK_COMMIT: group_commit(&w->bulk); break;
    case COPY_COMMIT: group_commit(&w->copies); break;
    case SHARED_ACCESS:
        done = share(s, now, step->passes) + i->latency;
        busy[SHARED] += step->passes;
        break;
    default: break;
    }
    for (i32 n = step->note; n < step->note + step->notes; n++) {
        const Effect *e = &j->effects[n];
        if (e->bytes) done = later(done, end = later(end, transfer(j, w, s, i, e, busy, now)));
        if (e->signals && !e->waits) signal(j, e->event, e->delay + signalled(w, i, now, end));
    }
    if (i->write_board >= 0) w->board[i->write_board] = later(w->board[i->write_board], done);
    if (i->read_board >= 0)
        w->board[i->read_board] = later(w->board[i->read_board], now + (i->kind == PLAIN ? 8 : 20));
    w->next = now + (i->stall ? i->stall : 1);
    w->since = now;
    if (++w->at == where->end) w->gone = true;
}

/* The next moment at which something may change for a warp that is held. */
static i64 wakes(const Job *j, const Warp *w, const WarpJob *where, const Sm *s, int reason, i64 now) {
    const Step *step = &j->steps[w->at];
    const Instr *i = &j->instrs[step->instr];
    i64 at = now + 1;
    if (reason == STALL) return w->next;
    if (reason == BOARD)
        for (int b = 0; b < SCOREBOARDS; b++) if (i->wait_mask >> b & 1) at = later(at, w->board[b]);
    if (reason == UNIT_BUSY && s->free[where->scheduler][i->unit] > at) at = s->free[where->scheduler][i->unit];
    if (reason == GROUP)
        at = later(at, i->kind == WGMMA_WAIT ? group_end(&w->wgmma, i->number) : copies_end(w, i->number));
    if (reason == EVENT)
        for (i32 n = step->note; n < step->note + step->notes; n++) {
            const Effect *e = &j->effects[n];
            if (!e->waits || (e->signals && !w->posted)) continue;
            at = later(at, wait_end(j, e));
        }
    return at;
}

/* A CTA has ended: those that were to come after it begin. */
static void begin_others(const Job *j, Warp *warps, i32 cta, i64 now) {
    for (i32 i = 0; i < j->warp_count; i++)
        if (j->warps[i].after == cta && !warps[i].gone) warps[i].next = warps[i].since = now + j->f.begin_latency;
}

/* Runs the job; 0: done, 1: nothing can go on, 2: more cycles than it may take. */
int sm_run(Job *j) {
    Warp *warps = calloc((size_t)j->warp_count, sizeof *warps);
    Sm *sms = calloc((size_t)j->sm_count, sizeof *sms);
    int *reasons = calloc((size_t)j->warp_count, sizeof *reasons);
    i32 left = j->warp_count, *live = calloc((size_t)j->cta_count + 1, sizeof *live);
    i64 now = 0;
    for (i32 i = 0; i < j->warp_count; i++) {
        warps[i].at = j->warps[i].first;
        if (j->warps[i].first == j->warps[i].end) { warps[i].gone = true, left--; continue; }
        live[j->warps[i].cta]++;
        if (j->warps[i].after >= 0) warps[i].next = INT64_MAX;
    }
    int state = 0;
    while (left) {
        i64 next = INT64_MAX;
        bool any = false;
        i32 chosen[64 * SCHEDULERS];
        memset(chosen, -1, sizeof *chosen * (size_t)j->sm_count * SCHEDULERS);
        for (i32 i = 0; i < j->warp_count; i++) {
            if (warps[i].gone || warps[i].next == INT64_MAX) continue;
            const WarpJob *where = &j->warps[i];
            reasons[i] = held(j, &warps[i], where, &sms[where->sm], now);
            if (reasons[i] == ISSUED) {
                i32 *c = &chosen[where->sm * SCHEDULERS + where->scheduler];
                if (*c < 0 || warps[i].since < warps[*c].since) *c = i;
                any = true;
            } else {
                i64 at = wakes(j, &warps[i], where, &sms[where->sm], reasons[i], now);
                if (at < next) next = at;
            }
        }
        if (any) next = now + 1;
        if (next == INT64_MAX) { state = 1; break; }
        for (i32 i = 0; i < j->warp_count; i++) {
            if (warps[i].gone || warps[i].next == INT64_MAX) continue;
            const WarpJob *where = &j->warps[i];
            i32 instr = j->steps[warps[i].at].instr;
            bool mine = chosen[where->sm * SCHEDULERS + where->scheduler] == i;
            int why = mine ? ISSUED : reasons[i] == ISSUED ? TURN : reasons[i];
            j->waited[(i64)instr * REASONS + why] += next - now;
            if (!mine) continue;
            if (j->log && j->log_count < j->log_room) {
                i64 *row = j->log + 4 * j->log_count++;
                row[0] = i, row[1] = instr, row[2] = now, row[3] = now - warps[i].since;
            }
            issue(j, &warps[i], where, &sms[where->sm], now);
            if (!warps[i].gone) continue;
            j->ends[i] = now, left--;
            if (!--live[where->cta]) begin_others(j, warps, where->cta, now);
        }
        now = next;
        if (now > j->most_cycles) { state = 2; break; }
    }
    j->cycles = now;
    j->stuck = -1;
    for (i32 i = 0; state == 1 && i < j->warp_count; i++) if (!warps[i].gone) { j->stuck = i; break; }
    free(warps), free(sms), free(reasons), free(live);
    return state;
}
