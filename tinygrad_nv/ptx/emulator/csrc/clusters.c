/* Clusters, CTAs and warps: how they begin, and what is checked when they end. */

#include "core.h"

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
    set_special(m, w, SMID, (u32)cta_number(m, c) % a->sm_count);
    set_special(m, w, SHARED_ORIGIN, (u32)c->rank << RANK_SHIFT);
}

static void start_warp(Machine *m, Cta *c, i32 id, u32 threads) {
    const Launch *a = &m->launch;
    Warp *w = &c->warps[id];
    u32 count = threads - (u32)id * LANES;
    w->cta = c;
    w->id = id;
    w->lanes = w->alive = count >= LANES ? ~0u : (1u << count) - 1;
    w->regs = count_held(aligned_alloc(128, (size_t)(a->register_bytes + 127) / 128 * 128));
    memset(w->regs + a->constant_bytes, 0xcd, (size_t)(a->register_bytes - a->constant_bytes));
    memcpy(w->regs, a->constants, (size_t)a->constant_bytes);
    w->local = take((size_t)a->local_bytes * LANES + 1);
    memset(w->local, 0xcd, (size_t)a->local_bytes * LANES);
    w->tried_pc = -1;
    EACH w->failed_pc[l] = -1;
    w->now = 1;
    w->fence_epoch = 1;
    w->clock = clock_new(m);
    if (a->uses_wgmma && a->check) {
        size_t places = (size_t)a->register_bytes / 128 + 1;
        w->written_at = take_zeros(2 * places, sizeof *w->written_at), w->read_at = w->written_at + places;
    }
    clock_begin(w, m);
    if (c->cluster->alone && !(c->cluster->alone >> id & 1)) { w->alive = 0, c->exited++; return; }
    set_specials(m, w);
    add_group(w, w->alive, 0, -1);
    tape_start(m, w);
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
    c->shared.data = count_held(aligned_alloc(1024, (a->shared_bytes + 2047) / 1024 * 1024));
    memset(c->shared.data, 0xff, a->shared_bytes);
    c->shared.valid = take_zeros(a->shared_bytes + 1, 1);
    c->remote = take_zeros((size_t)m->actors, sizeof *c->remote);
    c->warp_count = (i32)(threads + LANES - 1) / LANES;
    c->warps = take_zeros((size_t)c->warp_count, sizeof *c->warps);
    for (i32 i = 0; i < c->warp_count; i++) start_warp(m, c, i, threads);
}

static void start_cluster(Machine *m) {
    const Launch *a = &m->launch;
    Cluster *k = take_zeros(1, sizeof *k);
    u32 at = m->next_cluster++, number = a->taped ? (u32)a->taped[at] : at;
    u32 nx = a->grid[0] / a->cluster[0], ny = a->grid[1] / a->cluster[1];
    k->id[0] = number % nx, k->id[1] = number / nx % ny, k->id[2] = number / nx / ny;
    k->number = number, k->events = 1;
    k->peers = a->peers, k->launch = m->peer_launch + 1;
    k->sequence = a->peers ? peers_cluster(m, number) : 1 + number % CLUSTERS_TOLD_APART;
    if (a->taped && (i32)at >= a->whole) k->most = a->brief, k->alone = a->readers;
    k->size = k->live = (i32)(a->cluster[0] * a->cluster[1] * a->cluster[2]);
    k->ctas = take_zeros((size_t)k->size, sizeof *k->ctas);
    k->clock[0] = clock_new(m), k->clock[1] = clock_new(m);
    for (i32 i = 0; i < k->size; i++) start_cta(m, k, i);
    m->clusters[m->cluster_count++] = k;
}

/* Says whether all have begun: the second and on do while half of the memory is free. */
static bool fill_window(Machine *m) {
    while (m->cluster_count < m->window && m->next_cluster < m->cluster_total) {
        if (m->cluster_count && holds(m, 2)) return false;
        start_cluster(m);
    }
    return true;
}

/* **** the end of lanes, warps, CTAs and clusters **** */

static void cta_exit(Machine *m, Cta *c) {
    c->gone = true;
    c->cluster->live--;
    shadow_exit(m, c);
    grid_exit(m, c);
}

void warp_exit(Machine *m, Warp *w, u32 lanes) {
    check_passed(m, w, lanes);
    w->alive &= ~lanes;
    for (i32 i = w->group_count - 1; i >= 0; i--)
        if (!(w->groups[i].mask &= ~lanes)) remove_group(w, i);
    for (i32 i = 0; i < 2 * LANES; i++) {
        w->joins[i].mask &= ~lanes;
        w->joins[i].arrived &= ~lanes;
        release_join(w, i, false);
    }
    happened(m, w->cta->cluster);
    if (w->alive) return;
    w->group_count = 0;
    EACH if (m->launch.check && w->bulk_issued[l] > w->bulk_read[l])
        report(m, NOTE, w->bulk_last, w, l,
               "the thread exits while its bulk copy may still read shared memory: PTX asks for "
               "cp.async.bulk.wait_group.read before");
    tensor_exit(m, w);
    clock_end(m, w);
    if (++w->cta->exited == w->cta->warp_count) cta_exit(m, w->cta);
}

/* A cluster of which no more is asked for. */
static void cut_short(Machine *m, Cluster *k) {
    u64 executed = 0;
    for (i32 c = 0; c < k->size; c++)
        for (i32 i = 0; i < k->ctas[c].warp_count; i++) executed += k->ctas[c].warps[i].executed;
    if (executed < k->most) return;
    for (i32 c = 0; c < k->size; c++) {
        Cta *cta = &k->ctas[c];
        for (i32 i = 0; i < cta->warp_count; i++) cta->warps[i].alive = 0, cta->warps[i].group_count = 0;
        cta->gone = true;
    }
    k->live = 0;
}

static void free_cluster(Machine *m, Cluster *k) {
    for (i32 c = 0; c < k->size; c++) {
        Cta *cta = &k->ctas[c];
        for (i32 i = 0; i < cta->warp_count; i++) {
            Warp *w = &cta->warps[i];
            tensor_free(m, w);
            clock_free(w->clock);
            give(w->written_at), give(w->local), give(w->regs);
        }
        barriers_free(m, cta);
        shadow_region_free(m, &cta->shared);
        give(cta->remote), give(cta->shared.valid), give(cta->shared.data), give(cta->warps);
    }
    clock_free(k->clock[0]), clock_free(k->clock[1]);
    give(k->ctas), give(k);
}
