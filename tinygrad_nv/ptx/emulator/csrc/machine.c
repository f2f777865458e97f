/* The machine: clusters come and go, warps take turns, lanes part and meet.
 *
 * Lanes of a warp that are at the same place are a group. A branch that not all take splits the group; the parts meet
 * at the branch's immediate post-dominator (Op.join), where ptxas would put its convergence barrier. Any group may run
 * next, so that lanes can wait for one another; lanes that wait at a join are let go when nothing else helps.
 *
 * A handler that must wait returns BLOCKED and is called again when Machine.events has changed. When nothing can run,
 * an asynchronous operation completes; with none left, more clusters start; then joins break; then partial collectives
 * and failed try_waits are forced; then it is a deadlock.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "core.h"

enum { MORE, DONE, STUCK, LIMIT };
enum { MAX_FINDINGS = 256, JOIN_PATIENCE = 4096, WINDOW = 4, FORCED_ROUNDS = 3 };

u64 random_u64(Machine *m) {  /* splitmix64 */
    u64 z = m->rng += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

i32 cta_number(const Machine *m, const Cta *c) {
    return (i32)(c->id[0] + m->launch.grid[0] * (c->id[1] + m->launch.grid[1] * c->id[2]));
}

/* **** findings **** */

void report_pair(Machine *m, int kind, const Op *op, const Warp *w, int lane, int other_line, int other_cta,
                 int other_thread, const char *text) {
    if (!m->launch.check && kind != OUT_OF_BOUNDS && kind != MISALIGNED && kind != DEADLOCK && kind != BARRIER) return;
    i32 line = op ? op->line : 0;
    for (i32 i = 0; i < m->finding_count; i++) {
        Finding *f = &m->findings[i];
        if (f->kind == kind && f->line == line && f->other == other_line) { f->count++; return; }
    }
    if (m->finding_count == MAX_FINDINGS) return;
    Finding *f = &m->findings[m->finding_count++];
    *f = (Finding){kind, line, other_line, w ? cta_number(m, w->cta) : -1, other_cta,
                   w ? (i32)warp_thread(w, lane) : -1, other_thread, 1, ""};
    snprintf(f->text, sizeof f->text, "%s", text);
}

void report(Machine *m, int kind, const Op *op, const Warp *w, int lane, const char *format, ...) {
    char text[256];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    report_pair(m, kind, op, w, lane, 0, -1, -1, text);
}

/* **** asynchronous operations **** */

Async *async_add(Machine *m, Async a) {
    Async *made = malloc(sizeof *made);
    *made = a;
    made->next = NULL;
    made->born = m->steps;
    *m->async_end = made;
    m->async_end = &made->next;
    a.warp->cta->cluster->pending++;
    return made;
}

/* Runs the operation at `*link` and takes it out. */
static void complete_at(Machine *m, Async **link) {
    Async *a = *link;
    *link = a->next;
    if (m->async_end == &a->next) m->async_end = link;
    a->complete(m, a);
    a->warp->cta->cluster->pending--;
    m->events++;
    free(a->bytes);
    free(a);
}

/* Whether nothing that is queued before `a` holds it back. */
static bool is_first(Machine *m, const Async *a) {
    if (!a->queue) return true;
    for (Async *b = m->async; b != a; b = b->next) if (b->queue == a->queue) return false;
    return true;
}

/* Completes one operation, any that may be next (of `cluster`, when not NULL). */
static bool complete_any(Machine *m, const Cluster *cluster) {
    u64 count = 0;
    Async **chosen = NULL;
    for (Async **link = &m->async; *link; link = &(*link)->next)
        if ((!cluster || (*link)->warp->cta->cluster == cluster) && is_first(m, *link) && random_u64(m) % ++count == 0)
            chosen = link;
    if (chosen) complete_at(m, chosen);
    return chosen != NULL;
}

void async_complete_groups(Machine *m, Warp *w, int family, int lane, u32 up_to, bool reads_only) {
    for (Async **link = &m->async; *link;) {
        Async *a = *link;
        bool ours = a->warp == w && a->family == family && (lane < 0 || a->lane == lane);
        if (ours && a->group && a->group <= up_to && (!reads_only || a->reading)) complete_at(m, link);
        else link = &a->next;
    }
}

/* **** groups and joins **** */

static void remove_group(Warp *w, i32 at) {
    w->groups[at] = w->groups[--w->group_count];
    w->current = 0;
}

static void add_group(Warp *w, u32 mask, i32 pc, i32 join) {
    w->groups[w->group_count++] = (Group){.mask = mask, .pc = pc, .join = join};
}

static i32 new_join(Warp *w, u32 mask, i32 pc, i32 parent) {
    i32 at = 0;
    while (w->joins[at].mask) at++;  /* masks of nested joins shrink, so 2 * 32 are enough */
    w->joins[at] = (Join){mask, 0, pc, parent};
    return at;
}

void split_group(Machine *m, Warp *w, u32 taken, i32 target, i32 join) {
    (void)m;
    Group *g = group_of(w);
    i32 node = g->join;
    if (join >= 0 && (node < 0 || w->joins[node].pc != join)) node = new_join(w, g->mask, join, g->join);
    add_group(w, taken, target, node);
    g->mask &= ~taken;
    g->join = node;
    g->pc++;
}

/* Lets the lanes that have arrived at a join go on, if they are all or if `anyway`. */
static bool release_join(Warp *w, i32 at, bool anyway) {
    Join *j = &w->joins[at];
    if (!j->mask || !j->arrived || (j->arrived != j->mask && !anyway)) return false;
    add_group(w, j->arrived, j->pc, j->parent);
    j->mask &= ~j->arrived;
    j->arrived = 0;
    return true;
}

static void arrive_join(Warp *w, i32 at) {
    i32 node = w->groups[at].join;
    w->joins[node].arrived |= w->groups[at].mask;
    remove_group(w, at);
    release_join(w, node, false);
}

static bool break_joins(Warp *w) {
    bool any = false;
    for (i32 i = 0; i < 2 * LANES; i++) any |= release_join(w, i, true);
    w->waiting = 0;
    return any;
}

static bool lanes_wait(const Warp *w) {
    u32 running = 0;
    for (i32 i = 0; i < w->group_count; i++) running |= w->groups[i].mask;
    return running != w->alive;
}

/* **** collectives **** */

static u32 guarded(const Warp *w, const Op *op, u32 mask) {
    if (op->guard < 0) return mask;
    u32 p = pred(w, op->guard);
    return mask & (op->guard_negated ? ~p : p);
}

static u32 gather_where(Machine *m, Warp *w, const Op *op, u32 wanted, bool any_place) {
    u32 lanes = 0, all = 0;
    for (i32 i = 0; i < w->group_count; i++) {
        const Op *at = &m->launch.ops[w->groups[i].pc];
        if (at != op && !(any_place && at->handler == op->handler)) continue;
        if (at->guard >= 0 && at != op && !guarded(w, at, w->groups[i].mask)) continue;
        lanes |= guarded(w, at, w->groups[i].mask);
        all |= w->groups[i].mask;
    }
    wanted &= w->alive;
    Group *g = group_of(w);
    if ((lanes & wanted) != wanted) {
        if (!g->forced) { g->partial = 1; return 0; }
        report(m, BARRIER, op, w, lowest(g->mask), "lanes %08x of the warp never come here: the instruction names lanes %08x, "
               "%08x are here", wanted & ~lanes, wanted, lanes);
    }
    w->gathered = all;
    return lanes;
}

u32 gather(Machine *m, Warp *w, const Op *op, u32 wanted) { return gather_where(m, w, op, wanted, false); }
u32 gather_any(Machine *m, Warp *w, const Op *op, u32 wanted) { return gather_where(m, w, op, wanted, true); }

/* **** the end of lanes, warps, CTAs and clusters **** */

static void cta_exit(Machine *m, Cta *c) {
    c->gone = true;
    c->cluster->live--;
    shadow_exit(m, c);
}

void warp_exit(Machine *m, Warp *w, u32 lanes) {
    w->alive &= ~lanes;
    for (i32 i = w->group_count - 1; i >= 0; i--)
        if (!(w->groups[i].mask &= ~lanes)) remove_group(w, i);
    for (i32 i = 0; i < 2 * LANES; i++) {
        w->joins[i].mask &= ~lanes;
        w->joins[i].arrived &= ~lanes;
        release_join(w, i, false);
    }
    m->events++;
    if (w->alive) return;
    w->group_count = 0;
    for (Async *a = m->async; a; a = a->next)
        if (a->warp == w && a->family == BULK && a->reading)
            report(m, ASYNC_HAZARD, a->op, w, a->lane, "the thread exits while its bulk copy may still read shared memory: "
                   "cp.async.bulk.wait_group.read is missing");
    tensor_exit(m, w);
    if (++w->cta->exited == w->cta->warp_count) cta_exit(m, w->cta);
}

static void free_cluster(Machine *m, Cluster *k) {
    for (i32 c = 0; c < k->size; c++) {
        Cta *cta = &k->ctas[c];
        for (i32 i = 0; i < cta->warp_count; i++) {
            Warp *w = &cta->warps[i];
            tensor_free(m, w);
            clock_free(w->clock);
            free(w->stamps), free(w->local), free(w->regs);
        }
        barriers_free(m, cta);
        shadow_region_free(m, &cta->shared);
        free(cta->remote), free(cta->shared.valid), free(cta->shared.data), free(cta->warps);
    }
    clock_free(k->clock[0]), clock_free(k->clock[1]);
    free(k->ctas), free(k);
}

/* **** the start of clusters **** */

static void set_special(const Machine *m, Warp *w, int which, u32 value) {
    if (m->launch.specials[which] >= 0) EACH r32(w, m->launch.specials[which])[l] = value;
}

static void set_specials(const Machine *m, Warp *w) {
    const Launch *a = &m->launch;
    const Cta *c = w->cta;
    const i32 *at = a->specials;
    EACH {
        u32 t = warp_thread(w, l), bit = 1u << l;
        u32 value[] = {t % a->block[0], t / a->block[0] % a->block[1], t / a->block[0] / a->block[1]};
        for (int i = 0; i < 3; i++) if (at[TID_X + i] >= 0) r32(w, at[TID_X + i])[l] = value[i];
        u32 masks[] = {bit, bit - 1, bit | (bit - 1), ~(bit | (bit - 1)), ~(bit - 1)};
        for (int i = 0; i < 5; i++) if (at[LANEMASK_EQ + i] >= 0) r32(w, at[LANEMASK_EQ + i])[l] = masks[i];
        if (at[LANEID] >= 0) r32(w, at[LANEID])[l] = (u32)l;
    }
    for (int i = 0; i < 3; i++) {
        set_special(m, w, CTAID_X + i, c->id[i]);
        set_special(m, w, CLUSTERID_X + i, c->cluster->id[i]);
        set_special(m, w, CLUSTER_CTAID_X + i, c->id[i] % a->cluster[i]);
    }
    set_special(m, w, WARPID, (u32)w->id);
    set_special(m, w, CLUSTER_CTARANK, (u32)c->rank);
    set_special(m, w, SMID, (u32)cta_number(m, c) % 132);
    set_special(m, w, SHARED_ORIGIN, (u32)c->rank << RANK_SHIFT);
}

static void start_warp(Machine *m, Cta *c, i32 id, u32 threads) {
    const Launch *a = &m->launch;
    Warp *w = &c->warps[id];
    u32 count = threads - (u32)id * LANES;
    w->cta = c;
    w->id = id;
    w->lanes = w->alive = count >= LANES ? ~0u : (1u << count) - 1;
    w->regs = aligned_alloc(128, (size_t)(a->register_bytes + 127) / 128 * 128);
    memset(w->regs + a->constant_bytes, 0xcd, (size_t)(a->register_bytes - a->constant_bytes));
    memcpy(w->regs, a->constants, (size_t)a->constant_bytes);
    w->local = malloc((size_t)a->local_bytes * LANES + 1);
    memset(w->local, 0xcd, (size_t)a->local_bytes * LANES);
    w->tried_pc = -1;
    w->now = 1;
    w->fence_epoch = 1;
    w->clock = clock_new(m);
    if (a->uses_wgmma) w->stamps = calloc((size_t)a->register_bytes / 128 + 1, sizeof *w->stamps);
    set_specials(m, w);
    add_group(w, w->alive, 0, -1);
}

static void start_cta(Machine *m, Cluster *k, i32 rank) {
    const Launch *a = &m->launch;
    Cta *c = &k->ctas[rank];
    u32 threads = a->block[0] * a->block[1] * a->block[2];
    c->cluster = k;
    c->rank = rank;
    u32 at[] = {(u32)rank % a->cluster[0], (u32)rank / a->cluster[0] % a->cluster[1],
                (u32)rank / a->cluster[0] / a->cluster[1]};
    for (int i = 0; i < 3; i++) c->id[i] = k->id[i] * a->cluster[i] + at[i];
    c->shared = (Region){.base = (u64)rank << RANK_SHIFT | SHARED_BASE, .size = a->shared_bytes, .cta = c};
    c->shared.data = aligned_alloc(1024, (a->shared_bytes + 2047) / 1024 * 1024);
    memset(c->shared.data, 0xff, a->shared_bytes);
    c->shared.valid = calloc(a->shared_bytes + 1, 1);
    c->remote = calloc((size_t)m->actors, sizeof *c->remote);
    c->warp_count = (i32)(threads + LANES - 1) / LANES;
    c->warps = calloc((size_t)c->warp_count, sizeof *c->warps);
    for (i32 i = 0; i < c->warp_count; i++) start_warp(m, c, i, threads);
}

static void start_cluster(Machine *m) {
    const Launch *a = &m->launch;
    Cluster *k = calloc(1, sizeof *k);
    u32 number = m->next_cluster++, nx = a->grid[0] / a->cluster[0], ny = a->grid[1] / a->cluster[1];
    k->id[0] = number % nx, k->id[1] = number / nx % ny, k->id[2] = number / nx / ny;
    k->sequence = number + 1;
    k->size = k->live = (i32)(a->cluster[0] * a->cluster[1] * a->cluster[2]);
    k->ctas = calloc((size_t)k->size, sizeof *k->ctas);
    k->clock[0] = clock_new(m), k->clock[1] = clock_new(m);
    for (i32 i = 0; i < k->size; i++) start_cta(m, k, i);
    m->clusters[m->cluster_count++] = k;
}

static void fill_window(Machine *m) {
    while (m->cluster_count < m->window && m->next_cluster < m->cluster_total) start_cluster(m);
}

/* **** turns **** */

/* After an ordinary instruction: its destinations were written in this fence epoch. */
static void stamp(Machine *m, Warp *w, const Op *op) {
    if (op->writes < 0) return;
    const i32 *list = m->launch.lists + op->writes;
    for (i32 i = 1; i <= list[0]; i++) w->stamps[list[i] >> 7] = w->fence_epoch;
}

static void advance(Warp *w, i32 by) {
    if (w->gathered) {
        for (i32 i = 0; i < w->group_count; i++)
            if (w->groups[i].mask & w->gathered) {
                Group *g = &w->groups[i];
                g->pc += by, g->blocked = g->forced = g->partial = g->ticket = 0;
            }
        w->gathered = 0;
        return;
    }
    Group *g = group_of(w);
    g->pc += by;
    g->blocked = g->forced = g->partial = g->ticket = 0;
}

/* The lanes an .aligned instruction runs for: 0 when it has to wait for the others of the warp. */
static u32 aligned_lanes(Machine *m, Warp *w, const Op *op) {
    u32 lanes = gather(m, w, op, w->alive);
    return lanes;
}

/* One instruction of the current group. */
static int execute(Machine *m, Warp *w) {
    Group *g = group_of(w);
    const Op *op = &m->launch.ops[g->pc];
    u32 mask = guarded(w, op, g->mask);
    w->gathered = 0;
    if (!mask) { advance(w, 1); return NEXT; }
    if ((op->aligned & 1) && g->mask != w->alive) {
        if (!(mask = aligned_lanes(m, w, op))) return BLOCKED;
    } else if ((op->aligned & 1) && mask != g->mask) {
        report(m, BARRIER, op, w, lowest(mask), "an .aligned instruction is executed by lanes %08x of %08x: its guard differs within "
               "the warp", mask, w->alive);
    }
    if (w->in_flight && m->launch.check) tensor_check_registers(m, w, op);
    if (m->launch.trace_warps >> w->id & 1 && (m->launch.trace_cta < 0 || m->launch.trace_cta == cta_number(m, w->cta)))
        m->launch.trace(w, op, mask);
    u32 gathered = w->gathered;
    m->current = op;
    int result = op->handler(m, w, op, mask);
    if (result == BLOCKED) return BLOCKED;
    if (op->aligned & 2) {
        Counter *c = &m->launch.counters[op->source];
        c->warps++, c->threads += (u64)popcount(mask);
    }
    m->steps++, w->executed++;
    if (result == JUMPED) return NEXT;
    if (w->stamps) stamp(m, w, op);
    if (gathered) w->gathered |= gathered;
    advance(w, 1);
    return result;
}

/* A group of the warp that can run becomes the current one. */
static bool choose_group(const Machine *m, Warp *w, bool another) {
    for (i32 i = 0; i < w->group_count; i++) {
        i32 at = (w->current + i + another) % w->group_count;
        const Group *g = &w->groups[at];
        if (!g->blocked || g->seen != m->events || g->forced) { w->current = at; return true; }
    }
    return false;
}

/* Runs a warp for up to `quantum` instructions; says whether it did anything. */
static bool run_warp(Machine *m, Warp *w, u32 quantum) {
    bool any = false, another = true;
    m->running = w;
    while (quantum-- && w->group_count && choose_group(m, w, another)) {
        Group *g = group_of(w);
        another = false;
        if (g->join >= 0 && w->joins[g->join].pc == g->pc) { arrive_join(w, w->current); any = true; continue; }
        int result = execute(m, w);
        if (result == BLOCKED) {
            g = group_of(w);
            g->blocked = 1, g->forced = 0, g->seen = m->events;
            another = true;
            continue;
        }
        any = true;
        if (result == YIELD) { another = true; break; }
    }
    if (any && w->alive && lanes_wait(w) && ++w->waiting > JOIN_PATIENCE) break_joins(w);
    return any;
}

/* Early completions, as the seed has it: seeds divisible by four leave everything as late as it can be. */
static void some_asynchrony(Machine *m, Warp *w) {
    if (m->launch.seed % 4) {
        if (m->async && random_u64(m) % 8 == 0) complete_any(m, NULL);
        if (w->in_flight && random_u64(m) % 16 == 0) tensor_complete(m, w, w->wgmma_groups);
    } else if (m->async && m->steps - m->async->born > 1 << 17) complete_any(m, NULL);
}

static bool run_cluster(Machine *m, Cluster *k) {
    bool any = false;
    i32 first = (i32)(random_u64(m) % (u64)k->size);
    for (i32 i = 0; i < k->size; i++) {
        Cta *c = &k->ctas[(first + i) % k->size];
        i32 turn = (i32)(random_u64(m) % (u64)c->warp_count);
        for (i32 j = 0; j < c->warp_count; j++) {
            Warp *w = &c->warps[(turn + j) % c->warp_count];
            if (!w->alive) continue;
            any |= run_warp(m, w, 64 + (u32)(random_u64(m) % 448));
            if (m->async || w->in_flight) some_asynchrony(m, w);
        }
    }
    return any;
}

/* **** when nothing runs **** */

#define FOR_GROUPS(m, body) \
    for (i32 k_ = 0; k_ < (m)->cluster_count; k_++) \
        for (i32 c_ = 0; c_ < (m)->clusters[k_]->size; c_++) \
            for (i32 w_ = 0; w_ < (m)->clusters[k_]->ctas[c_].warp_count; w_++) { \
                Warp *w = &(m)->clusters[k_]->ctas[c_].warps[w_]; \
                for (i32 g_ = 0; g_ < w->group_count; g_++) { Group *g = &w->groups[g_]; body } \
            }

static bool break_all_joins(Machine *m) {
    bool any = false;
    for (i32 k = 0; k < m->cluster_count; k++)
        for (i32 c = 0; c < m->clusters[k]->size; c++)
            for (i32 i = 0; i < m->clusters[k]->ctas[c].warp_count; i++) {
                Warp *w = &m->clusters[k]->ctas[c].warps[i];
                if (w->alive && lanes_wait(w)) any |= break_joins(w);
            }
    return any;
}

/* Forces one collective whose other lanes do not come. */
static bool force_partial(Machine *m) {
    FOR_GROUPS(m, if (g->partial && !g->forced) { g->forced = 1; return true; })
    return false;
}

static void report_deadlock(Machine *m) {
    i32 said = 0;
    FOR_GROUPS(m, if (said < 32) {
        char what[200] = "";
        describe_wait(m, w, g, what, sizeof what);
        report(m, DEADLOCK, &m->launch.ops[g->pc], w, lowest(g->mask), "warp %d of CTA %d waits for ever: %s", w->id,
               cta_number(m, w->cta), what);
        said++;
    })
}

/* Nothing could run: makes something able to, or says that it is a deadlock. */
static bool unstick(Machine *m) {
    if (complete_any(m, NULL)) return true;
    if (m->cluster_count < m->launch.resident && m->next_cluster < m->cluster_total) {
        m->window = m->cluster_count + 1;
        fill_window(m);
        return true;
    }
    if (m->stuck_events != m->events) m->stuck = 0;
    m->stuck_events = m->events;
    if (break_all_joins(m) || force_partial(m)) return true;
    if (m->stuck++ < FORCED_ROUNDS) {
        FOR_GROUPS(m, g->forced = 1;)
        return true;
    }
    report_deadlock(m);
    return false;
}

/* Clusters whose CTAs have all exited go, and others take their place. */
static void retire(Machine *m) {
    for (i32 i = 0; i < m->cluster_count; i++) {
        Cluster *k = m->clusters[i];
        if (k->live) continue;
        while (k->pending && complete_any(m, k)) {}
        free_cluster(m, k);
        m->clusters[i--] = m->clusters[--m->cluster_count];
        m->last_exit = m->steps;
    }
    if (m->steps - m->last_exit > 1 << 20 && m->window < m->launch.resident) m->window++, m->last_exit = m->steps;
    fill_window(m);
}

/* **** what Python calls **** */

Machine *machine_new(const Launch *launch) {
    Machine *m = calloc(1, sizeof *m);
    m->launch = *launch;
    m->rng = launch->seed * 0x2545f4914f6cdd1dull + 1;
    m->async_end = &m->async;
    m->actors = (i32)(launch->cluster[0] * launch->cluster[1] * launch->cluster[2]) * ACTORS;
    m->findings = calloc(MAX_FINDINGS, sizeof *m->findings);
    u64 ctas = (u64)launch->grid[0] * launch->grid[1] * launch->grid[2];
    m->cluster_total = (u32)(ctas / ((u64)m->actors / ACTORS));
    m->clusters = calloc((size_t)launch->resident + 1, sizeof *m->clusters);
    m->window = launch->resident < WINDOW ? launch->resident : WINDOW;
    m->events = 1;
    shadow_start(m);
    fill_window(m);
    return m;
}

/* Runs for about `slice` instructions: MORE, DONE, STUCK (deadlock, reported) or LIMIT (step limit). */
int machine_run(Machine *m, u64 slice) {
    u64 until = m->steps + slice;
    while (m->cluster_count) {
        bool any = false;
        for (i32 i = 0; i < m->cluster_count; i++) any |= run_cluster(m, m->clusters[i]);
        retire(m);
        if (m->stopped) return STUCK;
        if (!any && m->cluster_count && !unstick(m)) return STUCK;
        if (m->steps >= m->launch.step_limit) return LIMIT;
        if (m->steps >= until) return MORE;
    }
    return DONE;
}

/* Where everything stands, as findings: for a launch that reached its step limit. */
void machine_report_running(Machine *m) {
    i32 said = 0;
    FOR_GROUPS(m, if (said++ < 32) report(m, DEADLOCK, &m->launch.ops[g->pc], w, lowest(g->mask),
        "warp %d of CTA %d still runs here after %llu warp-instructions (the step limit)", w->id, cta_number(m, w->cta),
        (unsigned long long)m->steps);)
}

void machine_free(Machine *m) {
    while (complete_any(m, NULL)) {}
    while (m->cluster_count) free_cluster(m, m->clusters[--m->cluster_count]);
    shadow_finish(m);
    free(m->clusters), free(m->findings), free(m);
}

const Finding *machine_findings(const Machine *m) { return m->findings; }
i32 machine_finding_count(const Machine *m) { return m->finding_count; }
const Totals *machine_totals(const Machine *m) { return &m->totals; }
u64 machine_steps(const Machine *m) { return m->steps; }
const u8 *warp_registers(const Warp *w) { return w->regs; }
i32 warp_id(const Warp *w) { return w->id; }
i32 warp_number(const Machine *m, const Warp *w) { return cta_number(m, w->cta); }

/* **** control flow **** */

/* bra: `mask` are the lanes that take it. */
HANDLER(bra) {
    Group *g = group_of(w);
    if (mask == g->mask) g->pc = op->target;
    else split_group(m, w, mask, op->target, op->join);
    (void)m;
    return JUMPED;
}

/* brx.idx: each lane goes to the op named by its index (lists[list + index]); beyond the table, undefined: the last. */
HANDLER(brx) {
    u32 left = mask;
    while (left) {
        u32 index = r32(w, op->a)[lowest(left)], same = 0;
        ACTIVE if ((left >> l & 1) && r32(w, op->a)[l] == index) same |= 1u << l;
        left &= ~same;
        i32 target = m->launch.lists[op->list + (i32)(index < (u32)op->count ? index : (u32)op->count - 1)];
        Group *g = group_of(w);
        if (same == g->mask) { g->pc = target; return JUMPED; }
        i32 before = g->pc;
        split_group(m, w, same, target, op->join);
        g->pc = before;
    }
    return JUMPED;
}

/* exit and ret of an entry function. */
HANDLER(exit) {
    Group *g = group_of(w);
    bool all = mask == g->mask;
    if (!all) g->pc++;
    warp_exit(m, w, mask);
    return JUMPED;
}

HANDLER(nop) {
    (void)m, (void)w, (void)op, (void)mask;
    return NEXT;
}

/* trap, and calls of functions that end a kernel. */
HANDLER(trap) {
    report(m, BARRIER, op, w, lowest(mask), "trap: the kernel ended itself");
    m->stopped = true;
    return YIELD;
}
