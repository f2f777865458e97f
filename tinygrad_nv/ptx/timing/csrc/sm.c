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
 * are done. wgmma, TMA, copies and barriers work by themselves, and steps wait for them.
 * What each of them waited for last is kept for the critical path (moments.h). */
#include <math.h>
#include "moments.h"

/* A moment as a whole number; those beyond all that is simulated are the same. */
static i64 whole(f64 cycles) { return cycles < 1e15 ? (i64)cycles : (i64)1e15; }

/* **** memory beyond the SM **** */

/* When a queue has moved `bytes` that were asked for at `now`; `before`: the moment that it followed. */
static i64 queued(Queue *q, f64 bytes, f64 rate, i64 now, i32 by, i32 *before) {
    bool waits = q->free > (f64)now;
    *before = waits ? q->user : by;
    q->free = (waits ? q->free : (f64)now) + bytes / rate;
    return whole(q->free);
}

/* HBM's rate with so many bytes waiting. A request waits c r / (1 - r) cycles where HBM is busy for a share r of the
 * time, as banks and turns from reads to writes have it; by Little's law as many bytes wait as come in that time,
 * waiting = c rate r^2 / (1 - r). */
static f64 crowded(const Figures *f, f64 waiting, f64 rate) {
    f64 whole = f->hbm_crowding * rate;
    return whole > 0 ? rate * (sqrt(waiting * waiting + 4 * whole * waiting) - waiting) / (2 * whole) : rate;
}

/* Bytes to move that were not yet moved at `now`. */
static f64 waiting_at(const Queue *q, i64 now) {
    return q->free > (f64)now ? q->waiting * (q->free - (f64)now) / (q->free - q->since) : 0;
}

/* When an effect's bytes have been moved for an SM by a step, after the moment `by`. The SMs of a cluster have
 * their part of L2 and HBM together: one may ask for more than another. */
static i64 moved(Job *j, Sm *s, i64 step, i64 now, i32 by, const Effect *e, i32 latency) {
    f64 l2_rate = j->f.l2_bytes * j->cluster, hbm_rate = j->f.hbm_bytes * j->cluster;
    Sm *first = s - s->number % j->cluster;
    i32 n = moment(step, AT_SERVICE), before, other;
    int cause = L2_RATE;
    i64 end = queued(&first->l2, e->near, l2_rate, now, by, &before);
    i64 port = queued(&s->port, e->bytes, j->f.port_bytes, now, by, &other);
    if (port > end) end = port, before = other;
    j->l2_busy += e->near / l2_rate, j->hbm_busy += e->far / hbm_rate;
    if (e->far) {
        Queue *q = &first->hbm;
        f64 waiting = waiting_at(q, now) + e->far;
        i64 hbm = queued(q, e->far, crowded(&j->f, waiting, hbm_rate), now, by, &other);
        q->waiting = waiting, q->since = (f64)now;
        if (hbm > end) end = hbm, before = other, cause = HBM_RATE;
        first->hbm.user = n;
    }
    first->l2.user = s->port.user = n;
    follows(j, n, end, before, cause);
    follows(j, moment(step, AT_END), end + latency, n, MEMORY_LATENCY);
    return end + latency;
}

/* **** events **** */

static void signal(Job *j, i32 event, i64 when, i32 by) {
    if (j->happened[event] < when || j->event_by[event] < 0) j->happened[event] = when, j->event_by[event] = by;
    j->need[event]--;
}

/* When a wait ends; never, for an event that lacks signals. */
static i64 wait_end(const Job *j, const Effect *e) {
    return j->need[e->event] > 0 ? INT64_MAX : j->happened[e->event] + e->delay;
}

/* **** a warp's next step **** */

static bool reads_registers(const Instr *i) { return (i->unit >= FMA && i->unit <= XU) || i->kind == MMA; }

/* How many cycles of work a busy tensor core takes ahead: of wgmma many, of mma.sync what its warp may wait for. */
static i32 ahead(const Job *j, const Instr *i) { return i->kind == MMA ? j->f.shared_ahead : j->f.wgmma_ahead; }

/* The warp of its warpgroup that a wgmma of this warp waits for: tensor cores begin when all four have arrived. NULL:
 * for none. */
static const Warp *absent(const Warp *warps, const Warp *w, const WarpJob *where) {
    if (where->group >= 0)
        for (const Warp *each = warps + where->group; each < warps + where->group + WARPGROUP; each++)
            if (each->arrived < w->arrived) return each;
    return NULL;
}

/* Why the warp cannot issue now; ISSUED: it can. */
static int held(const Job *j, const Warp *warps, const Warp *w, const WarpJob *where, const Sm *s, i64 now) {
    const Step *step = &j->steps[w->at];
    const Instr *i = &j->instrs[step->instr];
    if (now < w->next) return STALL;
    for (int b = 0; b < SCOREBOARDS; b++)
        if (i->wait_mask >> b & 1 && w->board[b] > now) return BOARD;
    if (s->free[where->scheduler][i->unit] > now) return UNIT_BUSY;
    if (reads_registers(i) && s->registers_free[where->scheduler] >= (f64)(now + 1)) return UNIT_BUSY;
    switch (i->kind) {
    case WGMMA:
        if (absent(warps, w, where)) return GROUP;
        /* fall through */
    case MMA:
        if (s->tensor_free[where->scheduler] > now + ahead(j, i)) return UNIT_BUSY;
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

/* The moment that a step followed when it stopped waiting, and what had taken the time. */
static i32 cause_of(const Job *j, const Warp *warps, const Warp *w, const WarpJob *where, const Sm *s, i64 now, int *cause) {
    const Step *step = &j->steps[w->at];
    const Instr *i = &j->instrs[step->instr];
    i32 by = w->before;
    i64 last = -1;
    *cause = w->at == where->first ? BEGINS : IN_ORDER;
    switch (w->why) {
    case BOARD:
        for (int b = 0; b < SCOREBOARDS; b++)
            if (i->wait_mask >> b & 1 && w->board[b] > last) last = w->board[b], by = w->board_by[b];
        break;
    case UNIT_BUSY:
        if (i->kind == SHARED_ACCESS && s->shared_free + 1 >= now + j->f.shared_ahead)
            return *cause = SHARED_RATE, s->shared_user;
        if ((i->kind == WGMMA || i->kind == MMA) && s->tensor_free[where->scheduler] + 1 >= now + ahead(j, i))
            return *cause = TENSOR_RATE, s->tensor_user[where->scheduler];
        return *cause = PIPE, s->user[where->scheduler][i->unit];
    case EVENT:
        for (i32 n = step->note; n < step->note + step->notes; n++) {
            const Effect *e = &j->effects[n];
            if (e->waits && wait_end(j, e) > last) last = wait_end(j, e), by = j->event_by[e->event];
        }
        return *cause = SYNC, by;
    case GROUP:
        if (i->kind == WGMMA) {
            for (i32 n = where->group; n < where->group + WARPGROUP; n++)
                if (warps[n].arrived_by > 0 && j->nodes[warps[n].arrived_by].at > last)
                    last = j->nodes[warps[n].arrived_by].at, by = warps[n].arrived_by;
            return *cause = SYNC, by;
        }
        if (i->kind == WGMMA_WAIT) by = group_by(&w->wgmma, i->number);
        else by = group_by(group_end(&w->copies, i->number) > group_end(&w->bulk, i->number) ? &w->copies : &w->bulk,
                           i->number);
        break;
    case TURN: return *cause = ISSUE_SLOT, s->issuer[where->scheduler];
    default: break;
    }
    return by < 0 ? w->before : by;
}

/* Shared memory serves a step for some cycles: when that ends. */
static i64 share(Job *j, Sm *s, i64 step, i64 now, i64 cycles) {
    bool waits = s->shared_free > now;
    s->shared_free = later(s->shared_free, now) + cycles;
    served(j, step, s->shared_free, waits, moment(step, AT_ISSUE), &s->shared_user, SHARED_RATE);
    return s->shared_free;
}

/* A scheduler's tensor core does: when it begins. */
static i64 multiply(Job *j, Sm *s, i64 step, i64 now, int scheduler, const Instr *i) {
    i64 *unit = &s->tensor_free[scheduler], begin = later(now, *unit);
    bool waits = *unit > now;
    i32 before = waits ? s->tensor_user[scheduler] : moment(step, AT_ISSUE);
    *unit = begin + i->tensor;
    served(j, step, *unit, waits, before, &s->tensor_user[scheduler], TENSOR_RATE);
    if (i->kind == WGMMA)
        follows(j, moment(step, AT_END), *unit + j->f.wgmma_latency, moment(step, AT_SERVICE), TENSOR_LATENCY);
    else follows(j, moment(step, AT_END), begin + i->latency, before, TENSOR_LATENCY);
    return begin;
}

/* A barrier that is also waited for: signalled first; true: the step is not over. */
static bool meets(Job *j, const Warp *warps, const Step *step, Warp *w, const WarpJob *where, const Sm *s, i64 now) {
    if (w->posted) { w->posted = false; return false; }
    int cause;
    i32 posted = moment(w->at, AT_POST), by = cause_of(j, warps, w, where, s, now, &cause);
    for (i32 n = step->note; n < step->note + step->notes; n++) {
        const Effect *e = &j->effects[n];
        if (!e->waits || !e->signals) continue;
        signal(j, e->event, now + e->delay, posted);
        w->posted = true, w->next = now + 1;
    }
    if (w->posted) follows(j, posted, now, by, cause), w->before = posted, w->why = STALL;
    return w->posted;
}

/* Bytes that a step moves: when they are there. */
static i64 transfer(Job *j, Warp *w, Sm *s, const Instr *i, const Effect *e, i64 *busy, i64 now) {
    const Figures *f = &j->f;
    bool reads = i->kind == TMA_READ, writes = i->kind == TMA_WRITE || i->kind == GLOBAL_WRITE;
    i64 begin = now;
    i32 by = moment(w->at, AT_ISSUE);
    if (i->unit == COPY) {
        bool waits = s->tma_free > now;
        begin = s->tma_free = later(s->tma_free, now) + f->tma_issue;
        busy[COPY] += f->tma_issue;
        by = served(j, w->at, begin, waits, by, &s->tma_user, COPY_RATE);
    }
    i32 near = writes ? f->write_latency : reads ? f->tma_latency : f->l2_latency;
    if (e->late && !writes) near += f->hbm_latency - f->l2_latency;
    i64 end = moved(j, s, w->at, begin, by, e, near);
    if (i->kind == TMA_WRITE) group_add(&w->bulk, end - f->write_latency, moment(w->at, AT_SERVICE));
    if (i->kind == COPY_ASYNC) group_add(&w->copies, end, moment(w->at, AT_END));
    return end;
}

/* Whether an instruction holds its warp for its latency: a fence does, and so does meeting again after a branch in a
 * warp that issues wgmmas; in others a __syncwarp takes 2 cycles (HOPPER_TIMING.md 7.5). */
static bool holds(const Warp *w, const Instr *i) {
    return i->kind == HOLD && (i->unit == MEMORY || w->wgmma.open > 0);
}

/* A step's signal: of copies when they have ended. */
static void signals(Job *j, const Warp *w, const Instr *i, const Effect *e, i64 now, i64 end) {
    i32 by = moment(w->at, AT_ISSUE);
    i64 when = now;
    if (i->kind == TMA_READ && end > now) when = end, by = moment(w->at, AT_END);
    if (i->kind == COPY_ASYNC && w->copies.last > now) when = w->copies.last, by = w->copies.last_by;
    signal(j, e->event, when + e->delay, by);
}

/* A scheduler's registers give three a cycle, what an FFMA takes: an mma with many leaves few to others. wgmmas keep
 * their sums in registers: while they run, what else reads registers is issued less often. */
static void read_registers(const Job *j, Sm *s, int scheduler, const Instr *i, i64 now) {
    if (!reads_registers(i)) return;
    f64 cycles = i->registers / (f64)PORTS, *free = &s->registers_free[scheduler];
    if (s->wgmma_end[scheduler] > now)
        cycles = j->f.beside_wgmma * i->registers + (i->unit == XU ? j->f.xu_beside_wgmma : 0);
    *free = (*free > (f64)now ? *free : (f64)now) + cycles;
}

static void issue(Job *j, const Warp *warps, Warp *w, const WarpJob *where, Sm *s, i64 now) {
    const Step *step = &j->steps[w->at];
    const Instr *i = &j->instrs[step->instr];
    i64 *busy = j->busy + where->sm * UNITS, done = now + i->latency, end = now;
    if (meets(j, warps, step, w, where, s, now)) return;
    int cause;
    i32 self = moment(w->at, AT_ISSUE), by = cause_of(j, warps, w, where, s, now, &cause);
    follows(j, self, now, by, cause);
    follows(j, moment(w->at, AT_END), done, self, RESULT);
    s->user[where->scheduler][i->unit] = s->issuer[where->scheduler] = self;
    s->free[where->scheduler][i->unit] = now + i->busy;
    busy[i->unit] += i->busy;
    read_registers(j, s, where->scheduler, i, now);
    switch (i->kind) {
    case WGMMA: {
        i64 begin = multiply(j, s, w->at, now, where->scheduler, i);
        busy[TENSOR] += i->tensor, s->wgmma_end[where->scheduler] = begin + i->tensor;
        group_add(&w->wgmma, begin + i->tensor + j->f.wgmma_latency, moment(w->at, AT_END));
        if (i->number) group_commit(&w->wgmma);
        if (where->scheduler) break;
        s->shared_free = later(s->shared_free, begin) + i->shared, s->shared_user = moment(w->at, AT_SERVICE);
        busy[SHARED] += i->shared;
        break;
    }
    case MMA:
        done = multiply(j, s, w->at, now, where->scheduler, i) + i->latency;
        busy[TENSOR] += i->tensor;
        break;
    case WGMMA_ARRIVE: w->arrived++, w->arrived_by = self; break;
    case BULK_COMMIT: group_commit(&w->bulk); break;
    case COPY_COMMIT: group_commit(&w->copies); break;
    case SHARED_ACCESS:
        done = share(j, s, w->at, now, step->passes) + i->latency;
        follows(j, moment(w->at, AT_END), done, moment(w->at, AT_SERVICE), SHARED_LATENCY);
        busy[SHARED] += step->passes;
        break;
    default: break;
    }
    for (i32 n = step->note; n < step->note + step->notes; n++) {
        const Effect *e = &j->effects[n];
        if (e->bytes) done = later(done, end = later(end, transfer(j, w, s, i, e, busy, now)));
        if (e->signals && !e->waits) signals(j, w, i, e, now, end);
    }
    if (i->write_board >= 0 && done > w->board[i->write_board])
        w->board[i->write_board] = done, w->board_by[i->write_board] = moment(w->at, AT_END);
    i64 read = now + (i->kind == PLAIN ? 8 : 20);
    if (i->read_board >= 0 && read > w->board[i->read_board])
        w->board[i->read_board] = read, w->board_by[i->read_board] = self;
    w->next = now + (holds(w, i) ? i->latency : i->stall ? i->stall : 1);
    w->since = now, w->before = self, w->why = STALL;
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
    if (reason == UNIT_BUSY && reads_registers(i))
        at = later(at, whole(s->registers_free[where->scheduler]));
    if (reason == UNIT_BUSY && s->free[where->scheduler][i->unit] > at) at = s->free[where->scheduler][i->unit];
    if (reason == GROUP && i->kind == WGMMA) return INT64_MAX;     /* until a warp arrives */
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

/* A CTA has ended, with the moment `by`: those that were to come after it begin. */
static void begin_others(const Job *j, Warp *warps, i32 cta, i64 now, i32 by) {
    for (i32 i = 0; i < j->warp_count; i++)
        if (j->warps[i].after == cta && !warps[i].gone)
            warps[i].next = warps[i].since = now + j->f.begin_latency, warps[i].before = by;
}

/* Runs the job; 0: done, 1: nothing can go on, 2: more cycles than it may take. */
int sm_run(Job *j) {
    Warp *warps = calloc((size_t)j->warp_count, sizeof *warps);
    Sm *sms = calloc((size_t)j->sm_count, sizeof *sms);
    int *reasons = calloc((size_t)j->warp_count, sizeof *reasons);
    i32 left = j->warp_count, *live = calloc((size_t)j->cta_count + 1, sizeof *live);
    i64 now = 0;
    for (i32 i = 0; i < j->warp_count; i++) {
        warps[i].at = j->warps[i].first, warps[i].before = -1, warps[i].why = STALL;
        if (j->warps[i].first == j->warps[i].end) { warps[i].gone = true, left--; continue; }
        live[j->warps[i].cta]++;
        if (j->warps[i].after >= 0) warps[i].next = INT64_MAX;
    }
    for (i32 i = 0; i < j->event_count; i++) j->event_by[i] = -1;
    for (i32 i = 0; i < j->sm_count; i++) sms[i].number = i;
    int state = 0;
    while (left) {
        i64 next = INT64_MAX;
        bool any = false;
        i32 chosen[64 * SCHEDULERS];
        memset(chosen, -1, sizeof *chosen * (size_t)j->sm_count * SCHEDULERS);
        for (i32 i = 0; i < j->warp_count; i++) {
            if (warps[i].gone || warps[i].next == INT64_MAX) continue;
            const WarpJob *where = &j->warps[i];
            reasons[i] = held(j, warps, &warps[i], where, &sms[where->sm], now);
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
            if (!mine) { warps[i].why = why; continue; }
            if (j->log && j->log_count < j->log_room) {
                i64 *row = j->log + 4 * j->log_count++;
                row[0] = i, row[1] = instr, row[2] = now, row[3] = now - warps[i].since;
            }
            issue(j, warps, &warps[i], where, &sms[where->sm], now);
            if (!warps[i].gone) continue;
            j->ends[i] = now, left--;
            if (!--live[where->cta]) begin_others(j, warps, where->cta, now, warps[i].before);
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
