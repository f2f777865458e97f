/* Asynchronous operations that have been issued and are not complete. Any may be next, but those of one
 * queue, which keep their order. */

#include "core.h"

Async *async_add(Machine *m, Async a) {
    Async *made = take(sizeof *made);
    *made = a;
    made->next = NULL;
    made->born = m->steps;
    *m->async_end = made;
    m->async_end = &made->next;
    m->async_count++;
    a.warp->cta->cluster->pending++;
    return made;
}

/* Runs the operation at `*link` and takes it out. */
static void complete_at(Machine *m, Async **link) {
    Async *a = *link;
    *link = a->next;
    m->async_count--;
    if (m->async_end == &a->next) m->async_end = link;
    a->complete(m, a);
    a->warp->cta->cluster->pending--;
    happened(m, a->warp->cta->cluster);
    give(a->bytes);
    give(a);
}

/* Whether nothing that is queued before `a` holds it back. */
static bool is_first(Machine *m, const Async *a) {
    if (!a->queue) return true;
    for (Async *b = m->async; b != a; b = b->next) if (b->queue == a->queue) return false;
    return true;
}

/* Completes one operation, any that may be next (of `cluster`, when not NULL); the oldest when the launch is
 * late. */
static bool complete_any(Machine *m, const Cluster *cluster) {
    u64 count = 0;
    Async **chosen = NULL;
    for (Async **link = &m->async; *link; link = &(*link)->next)
        if ((!cluster || (*link)->warp->cta->cluster == cluster) && is_first(m, *link)
            && (m->launch.late ? !chosen : random_u64(m) % ++count == 0))
            chosen = link;
    if (chosen) complete_at(m, chosen);
    return chosen != NULL;
}

void async_complete_groups(Machine *m, Warp *w, int family, int lane, u32 up_to, bool reads_only) {
    for (Async **link = &m->async; *link;) {
        Async *a = *link;
        bool ours = a->warp == w && a->family == family
            && (lane < 0 || a->lane == lane || a->twins >> lane & 1);
        if (ours && a->group && a->group <= up_to && (!reads_only || a->reading)) complete_at(m, link);
        else link = &a->next;
    }
}
