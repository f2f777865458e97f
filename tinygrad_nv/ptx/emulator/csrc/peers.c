/* Peers: GPUs that see each other's memory, and whose launches run beside one another.
 *
 * Each GPU runs one launch at a time, a Machine; those of all GPUs take turns (peers_run), as the seed has it: seeds
 * that four does not divide let a GPU stand still for a while now and then. They share the shadow of memory, so that
 * races between them are found. What orders them is flags in memory, with releases and acquires of system scope
 * (clocks.c). A launch knows all that the launches ahead of it on its GPU knew.
 *
 * When every thread of every GPU waits, for a barrier or for memory that it polls, and nothing changes, it is a
 * deadlock.
 */
#include <stdio.h>

#include "core.h"

enum { POLLS = 2048, LOOK = 64, SLEEPS = 64, LONGEST_SLEEP = 8, LONG_SLICE = 128 };

/* **** what Python calls **** */

Peers *peers_new(i32 gpus, u64 seed) {
    Peers *p = take_zeros(1, sizeof *p);
    p->gpu_count = gpus;
    p->gpus = take_zeros((size_t)gpus, sizeof *p->gpus);
    p->shadow = take_zeros(1, sizeof *p->shadow);
    p->seed = seed, p->rng = seed * 0x2545f4914f6cdd1dull + 1;
    return p;
}

/* Where the shadow of an allocation is kept, for Region.pages of all launches. */
Page **peers_pages(Peers *p, u64 nbytes) {
    struct PeerPages *made = take_zeros(1, sizeof *made);
    *made = (struct PeerPages){p->pages, take_zeros(page_count(nbytes), sizeof *made->pages), page_count(nbytes)};
    p->pages = made;
    return made->pages;
}

void peers_free(Peers *p) {
    while (p->pages) {
        struct PeerPages *each = p->pages;
        p->pages = each->next;
        free_pages(each->pages, each->count), give(each);
    }
    for (i32 i = 0; i < p->gpu_count; i++)
        give(p->gpus[i].before.items), give(p->gpus[i].known.items), give(p->gpus[i].ended.items);
    for (i32 i = 0; i < p->note_count; i++) give(p->notes[i].items);
    shadow_free(p->shadow);
    give(p->notes), give(p->gpus), give(p->launches), give(p->clusters), give(p);
}

/* **** the launches of a GPU **** */

/* A launch begins: its machine takes turns from now on. */
static void peers_begin(Machine *m) {
    Peers *p = m->launch.peers;
    PeerGpu *gpu = &p->gpus[m->launch.gpu];
    if (p->launch_count == p->launch_room)
        p->launches = take_more(p->launches, sizeof *p->launches * (p->launch_room = 2 * p->launch_room + 16));
    PeerLaunch *launch = &p->launches[p->launch_count];
    *launch = (PeerLaunch){.ops = m->launch.ops, .number = ++gpu->launches, .gpu = m->launch.gpu};
    snprintf(launch->name, sizeof launch->name, "%s", m->launch.name);
    memcpy(launch->grid, m->launch.grid, sizeof launch->grid);
    memcpy(launch->cluster, m->launch.cluster, sizeof launch->cluster);
    m->peer_launch = p->launch_count++;
    m->changes = &p->changes;
    gpu->machine = m;
}

u32 peers_cluster(Machine *m, u32 number) {
    Peers *p = m->launch.peers;
    u32 sequence = 1 + p->started++ % CLUSTERS_TOLD_APART;
    if (sequence >= p->cluster_room)
        p->clusters = take_more(p->clusters, sizeof *p->clusters * (p->cluster_room = 2 * p->cluster_room + 64));
    p->clusters[sequence] = (PeerCluster){m->peer_launch, number};
    p->changes++;
    return sequence;
}

/* What comes after it on its GPU knows what it knew, and that it has ended. */
static void peers_end(Peers *p, i32 number) {
    PeerGpu *gpu = &p->gpus[number];
    gpu->before.count = 0;
    sparse_join(&gpu->before, &gpu->known);
    sparse_join(&gpu->known, &gpu->ended);
    if (gpu->known.count && gpu->known.items[0].key == AHEAD)
        memmove(gpu->known.items, gpu->known.items + 1, sizeof *gpu->known.items * (size_t)--gpu->known.count);
    sparse_raise(&gpu->known, (Foreign){(u32)number + 1, gpu->launches, gpu->launches});
    forget_ended(p, &gpu->known);
    gpu->ended.count = 0;
    gpu->machine = NULL;
    p->changes++;
}

/* What a GPU knows between launches, by a number, for another GPU that waits for this point. */
i32 peers_note(Peers *p, i32 gpu) {
    if (p->note_count == p->note_room)
        p->notes = take_more(p->notes, sizeof *p->notes * (size_t)(p->note_room = 2 * p->note_room + 16));
    p->notes[p->note_count] = (Sparse){0};
    sparse_join(&p->notes[p->note_count], &p->gpus[gpu].known);
    return p->note_count++;
}

void peers_learn(Peers *p, i32 gpu, i32 note) {
    sparse_join(&p->gpus[gpu].known, &p->notes[note]);
    sparse_join(&p->gpus[gpu].before, &p->notes[note]);
}

/* **** threads that poll **** */

void peers_poll(Machine *m, Warp *w, const Op *op, u64 address) {
    if (w->poll_changes != *m->changes) w->polls = 0, w->poll_changes = *m->changes;
    w->polls++, w->poll = op, w->polled = address;
}

/* What a warp polls, in words; false when it does not. */
bool describe_poll(const Machine *m, const Warp *w, char *out, size_t size) {
    if (!m->changes || !w->poll || w->poll_changes != *m->changes) return false;
    i32 i = region_below(m, w->polled);
    u64 value = 0;
    u32 bytes = (u32)w->poll->width;
    const Region *r = i < 0 ? NULL : &m->launch.regions[i];
    if (!r || !within(w->polled - r->base, bytes, r->size)) return false;
    memcpy(&value, r->data + (w->polled - r->base), bytes < 8 ? bytes : 8);
    snprintf(out, size, "line %d polls %u bytes at %#llx of GPU %d, which hold %lld; no GPU changes them", w->poll->line,
             bytes, (ull)w->polled, r->gpu, bytes == 4 ? (long long)(i32)value : (long long)value);
    return true;
}

static bool warp_waits(const Warp *w, u64 changes) {
    if (!w->alive || (w->polls >= POLLS && w->poll_changes == changes)) return true;
    for (i32 i = 0; i < w->group_count; i++)
        if (!w->groups[i].blocked || w->groups[i].seen != w->cta->cluster->events) return false;
    return true;
}

/* Whether nothing of a launch can go on by itself. */
static bool machine_waits(const Machine *m, u64 changes) {
    bool room = m->cluster_count < m->launch.resident && m->next_cluster < m->cluster_total;
    if (room || m->async_count || !m->cluster_count) return false;  /* without clusters it is about to end */
    for (i32 k = 0; k < m->cluster_count; k++)
        for (i32 c = 0; c < m->clusters[k]->size; c++)
            for (i32 i = 0; i < m->clusters[k]->ctas[c].warp_count; i++)
                if (!warp_waits(&m->clusters[k]->ctas[c].warps[i], changes)) return false;
    return true;
}

static bool all_wait(const Peers *p) {
    for (i32 i = 0; i < p->gpu_count; i++)
        if (p->gpus[i].machine && !machine_waits(p->gpus[i].machine, p->changes)) return false;
    return true;
}

/* **** turns **** */

static u64 drawn(Peers *p) {
    Machine for_random = {.rng = p->rng};
    u64 made = random_u64(&for_random);
    p->rng = for_random.rng;
    return made;
}

/* The GPU of the next turn, -1: those that have work all stand still. */
static i32 next_gpu(Peers *p) {
    i32 chosen = -1;
    u64 ready = 0;
    for (i32 i = 0; i < p->gpu_count; i++) {
        PeerGpu *gpu = &p->gpus[i];
        if (!gpu->machine) continue;
        if (gpu->sleep) gpu->sleep--;
        else if (drawn(p) % ++ready == 0) chosen = i;
    }
    if (chosen >= 0 && p->seed % 4 && drawn(p) % SLEEPS == 0)
        p->gpus[chosen].sleep = (u32)(drawn(p) % (1ull << drawn(p) % (LONGEST_SLEEP + 1)));
    return chosen;
}

static i32 ended_as(Peers *p, i32 gpu, int state) {
    peers_end(p, gpu);
    return gpu * 4 + state;
}

/* Runs for about `turns`, or until a launch ends: 4 * its GPU + how it ended (DONE, STUCK, LIMIT); -1: none has. */
i32 peers_run(Peers *p, u64 turns) {
    while (turns--) {
        if (++p->turns % LOOK == 0 && all_wait(p)) {
            for (i32 i = 0; i < p->gpu_count; i++) if (p->gpus[i].machine) report_deadlock(p->gpus[i].machine);
            p->stuck = true;
        }
        for (i32 i = 0; p->stuck && i < p->gpu_count; i++) if (p->gpus[i].machine) return ended_as(p, i, STUCK);
        i32 gpu = next_gpu(p);
        if (gpu < 0) continue;
        int state = machine_run(p->gpus[gpu].machine, 1 + drawn(p) % LONG_SLICE);
        if (state != MORE) return ended_as(p, gpu, state);
    }
    return -1;
}
