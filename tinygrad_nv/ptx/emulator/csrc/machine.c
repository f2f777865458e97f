/* The machine: clusters come and go, warps take turns, asynchronous work completes.
 *
 * A handler that must wait returns BLOCKED and is called again when Cluster.events has changed. When nothing
 * can run, an asynchronous operation completes; with none left, more clusters start; then joins break; then
 * partial collectives and failed try_waits are forced; then it is a deadlock.
 *
 */
#include <stdio.h>

#include "core.h"
#include "findings.c"
#include "queue.c"
#include "tape.c"
#include "groups.c"
#include "clusters.c"

enum { MORE, DONE, STUCK, LIMIT };
enum { JOIN_PATIENCE = 4096, WINDOW = 4, FORCED_ROUNDS = 3, SPINNING = 1 << 13, LONG_RUN = 1 << 22,
       ENDLESS = 1 << 22, ASYNC_MOST = 4096, WORK = 20 };

/* **** turns **** */

static void stamp(const Machine *m, u32 *stamps, i32 list, u32 epoch) {
    if (list < 0) return;
    const i32 *places = m->launch.lists + list;
    for (i32 i = 1; i <= places[0]; i++) stamps[places[i] >> 7] = epoch;
}

/* All lanes of a warp that have come to one place go on together, wherever they parted. */
static void regroup(Warp *w) {
    for (i32 i = 1; i < w->group_count; i++) if (w->groups[i].pc != w->groups[0].pc) return;
    w->groups[0].mask = w->alive, w->groups[0].join = -1;
    w->group_count = 1, w->current = 0, w->waiting = 0;
    for (i32 i = 0; i < 2 * LANES; i++) w->joins[i].mask = 0;
}

static void advance(Warp *w, i32 by) {
    if (w->gathered) {
        u32 lanes = 0;
        for (i32 i = 0; i < w->group_count; i++)
            if (w->groups[i].mask & w->gathered) {
                Group *g = &w->groups[i];
                g->pc += by, g->blocked = g->forced = g->partial = g->ticket = 0;
                lanes |= g->mask;
            }
        if (lanes == w->alive && w->group_count > 1) regroup(w);
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
    g->partial = 0;  /* gather says so again; when it no longer does, forcing would change nothing */
    if (!mask) { advance(w, 1); return NEXT; }
    if ((op->aligned & 1) && g->mask != w->alive) {
        if (!(mask = aligned_lanes(m, w, op))) return BLOCKED;
    } else if ((op->aligned & 1) && mask != g->mask) {
        report(m, BARRIER, op, w, lowest(mask),
               "an .aligned instruction is executed by lanes %08x of %08x: its guard differs within "
               "the warp", mask, w->alive);
    }
    if (w->in_flight && m->launch.check) tensor_check_registers(m, w, op);
    if (m->launch.trace_warps >> w->id & 1
        && (m->launch.trace_cta < 0 || m->launch.trace_cta == cta_number(m, w->cta)))
        m->launch.trace(w, op, mask);
    u32 gathered = w->gathered;
    m->current = op;
    Counter *c = &m->launch.counters[op->source];
    u64 passes = c->passes;
    int result = op->handler(m, w, op, mask);
    if (result == BLOCKED) {
        if (w->tape) w->tape->note_count = w->tape->noted;
        return BLOCKED;
    }
    if (w->tape) w->tape->passes += c->passes - passes;
    if (op->aligned & 2) {
        c->warps++, c->threads += (u64)popcount(mask);
        if (w->tape) tape_step(w->tape, (u32)op->source);
    }
    m->steps++, w->executed++;
    if (result == JUMPED) return NEXT;
    if (w->written_at) {  /* after an ordinary instruction: its registers were used in this fence epoch */
        stamp(m, w->written_at, op->writes, w->fence_epoch);
        stamp(m, w->read_at, op->reads, w->fence_epoch);
    }
    if (gathered) w->gathered |= gathered;
    advance(w, 1);
    return result;
}

/* A group of the warp that can run becomes the current one. */
static bool choose_group(Warp *w, bool another) {
    for (i32 i = 0; i < w->group_count; i++) {
        i32 at = (w->current + i + another) % w->group_count;
        const Group *g = &w->groups[at];
        if (!g->blocked || g->seen != w->cta->cluster->events || g->forced) { w->current = at; return true; }
    }
    return false;
}

/* Runs a warp for up to `quantum` instructions; says whether it did anything. */
static bool run_warp(Machine *m, Warp *w, u32 quantum) {
    bool any = false, another = true;
    m->running = w;
    while (quantum-- && w->group_count && choose_group(w, another)) {
        Group *g = group_of(w);
        another = false;
        if (g->join >= 0 && w->joins[g->join].pc == g->pc) { arrive_join(w,
                                                                         w->current); any = true; continue; }
        int result = execute(m, w);
        if (result == BLOCKED) {
            g = group_of(w);
            g->blocked = 1, g->forced = 0, g->seen = w->cta->cluster->events;
            another = true;
            continue;
        }
        any = true;
        if (result == YIELD) { m->yields++, m->polled = true, another = true; break; }
    }
    if (any && w->alive && lanes_wait(w) && ++w->waiting > JOIN_PATIENCE) break_joins(w);
    return any;
}

/* Early completions, as the seed has it: seeds divisible by four leave everything as late as it can be. */
static void some_asynchrony(Machine *m, Warp *w) {
    while (m->async_count > ASYNC_MOST) complete_at(m, &m->async);  /* a loop that never waits */
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
            if (!w->alive || holds(m, 1)) continue;
            any |= run_warp(m, w, 8 + (u32)(random_u64(m) % 56));
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
        report(m, DEADLOCK, &m->launch.ops[g->pc], w, lowest(g->mask),
               "warp %d of CTA %d waits for ever: %s", w->id,
               cta_number(m, w->cta), what);
        said++;
    })
}

/* Nothing could run: makes something able to, or says that it is a deadlock. */
static bool unstick(Machine *m) {
    if (complete_any(m, NULL)) return true;
    if (m->cluster_count < m->launch.resident && m->next_cluster < m->cluster_total) {
        m->window = m->cluster_count + 1;
        m->crowded = !fill_window(m);
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
        if (k->live && k->most) cut_short(m, k);
        if (k->live) continue;
        while (k->pending && complete_any(m, k)) {}
        free_cluster(m, k);
        m->clusters[i--] = m->clusters[--m->cluster_count];
        m->last_exit = m->steps;
    }
    /* CTAs that spin may wait for some that are not there yet */
    if (m->yields > SPINNING || m->steps - m->last_exit > LONG_RUN) {
        m->window = 2 * m->window < m->launch.resident ? 2 * m->window : m->launch.resident;
        m->last_exit = m->steps, m->yields = 0;
    }
    fill_window(m);
}

/* **** what Python calls **** */

static void peers_begin(Machine *m);

Machine *machine_new(const Launch *launch) {
    Machine *m = take_zeros(1, sizeof *m);
    m->launch = *launch;
    m->rng = launch->seed * 0x2545f4914f6cdd1dull + 1;
    m->async_end = &m->async;
    m->actors = (i32)(launch->cluster[0] * launch->cluster[1] * launch->cluster[2]) * ACTORS;
    m->launch.remote &= m->actors > ACTORS;
    m->findings = take_zeros(MAX_FINDINGS, sizeof *m->findings);
    u64 ctas = (u64)launch->grid[0] * launch->grid[1] * launch->grid[2];
    m->cluster_total = (u32)(ctas / ((u64)m->actors / ACTORS));
    if (launch->taped) m->cluster_total = (u32)launch->taped_count;
    m->clusters = take_zeros((size_t)launch->resident + 1, sizeof *m->clusters);
    m->window = launch->resident < WINDOW ? launch->resident : WINDOW;
    m->events = 1;
    shadow_start(m);
    if (launch->peers) peers_begin(m);
    fill_window(m);
    return m;
}

/* The instructions a launch may take. Threads that read memory again and again, with strong loads, atomics or
 * try_wait, may wait for what never comes: the step limit. Where none does, it is work or an endless loop of
 * arithmetic: WORK times as many (tinygrad's masked_select of 320 elements takes 5e9 instructions in loops over
 * constants, without a load). Where a thread is in a loop without a way out, the others may end meanwhile. */
static u64 limit_of(const Machine *m) {
    if (m->endless && m->launch.step_limit > ENDLESS) return ENDLESS;
    return m->polled ? m->launch.step_limit : WORK * m->launch.step_limit;
}

/* Whether it ends because of what the host's memory would have to hold. */
static bool is_full(const Machine *m) { return m->crowded || holds(m, 1); }

/* Runs for about `slice` instructions: MORE, DONE, STUCK (deadlock, reported) or LIMIT (instruction limit). */
int machine_run(Machine *m, u64 slice) {
    u64 until = m->steps + slice;
    while (m->cluster_count) {
        bool any = false;
        for (i32 i = 0; i < m->cluster_count; i++) any |= run_cluster(m, m->clusters[i]);
        retire(m);
        if (m->stopped) return STUCK;
        if (!any && m->cluster_count && !unstick(m)) return STUCK;
        if (m->steps >= limit_of(m) || is_full(m)) return LIMIT;
        if (m->steps >= until || m->rested) { m->rested = false; return MORE; }
    }
    return DONE;
}

/* Where everything stands, as findings: for a launch that reached a limit, which `limit` says. */
void machine_report_running(Machine *m, const char *limit) {
    i32 said = 0;
    u64 steps = m->steps < limit_of(m) ? m->steps : limit_of(m);
    if (is_full(m)) limit = "at the limit of the emulator's memory";
    const char *why = is_full(m) ? "many threads with many registers, or accesses to much memory"
                    : m->endless ? "an endless loop, from which no way leads to an exit"
                    : m->polled ? "much work, an endless loop, or a wait for what never comes"
                    : "much work, or an endless loop";
    FOR_GROUPS(m, if (said++ < 32) report(m, INSTRUCTION_LIMIT, &m->launch.ops[g->pc], w, lowest(g->mask),
        "warp %d of CTA %d still runs here after %llu warp-instructions, %s: %s", w->id,
        cta_number(m, w->cta), (unsigned long long)steps, limit, why);)
}

void machine_free(Machine *m) {
    while (complete_any(m, NULL)) {}
    while (m->cluster_count) free_cluster(m, m->clusters[--m->cluster_count]);
    shadow_finish(m);
    footprint_finish(m);
    tapes_free(m);
    give(m->clusters), give(m->findings), give(m->printed), give(m);
}

const Finding *machine_findings(const Machine *m) { return m->findings; }
i32 machine_finding_count(const Machine *m) { return m->finding_count; }
const Totals *machine_totals(const Machine *m) { return &m->totals; }
u64 machine_steps(const Machine *m) { return m->steps; }
u32 machine_ended(const Machine *m) { return m->next_cluster - (u32)m->cluster_count; }
bool machine_held(const Machine *m) { return m->held; }
const u8 *warp_registers(const Warp *w) { return w->regs; }
i32 warp_id(const Warp *w) { return w->id; }
i32 warp_number(const Machine *m, const Warp *w) { return cta_number(m, w->cta); }
