/* Lanes of a warp: groups at one place, joins where groups meet, collectives that need several, and control
 * flow.
 *
 * A branch that not all lanes take splits the group; the parts meet at the branch's immediate post-dominator
 * (Op.join), where ptxas would put its convergence barrier. Lanes that wait there are let go when nothing
 * else helps, so that code in which lanes wait for one another goes on, as hardware promises since sm_70.
 *
 */
#include "core.h"

static void remove_group(Warp *w, i32 at) {
    w->groups[at] = w->groups[--w->group_count];
    w->current = 0;
}

static void add_group(Warp *w, u32 mask, i32 pc, i32 join) {
    w->groups[w->group_count++] = (Group){.mask = mask, .pc = pc, .join = join};
}

/* Without room the lanes meet where those of the parent do: joins that were broken, of lanes that went on in loops, may
 * have taken all of it. */
static i32 new_join(Warp *w, u32 mask, i32 pc, i32 parent) {
    i32 at = 0;
    while (at < 2 * LANES && w->joins[at].mask) at++;
    if (at == 2 * LANES) return parent;
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
    if (j->arrived != j->mask) w->passed |= j->arrived;
    else if (j->arrived == w->alive) w->passed = 0;
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
        report(m, BARRIER, op, w, lowest(g->mask),
               "lanes %08x of the warp never come here: the instruction names lanes %08x, "
               "%08x are here", wanted & ~lanes, wanted, lanes);
    }
    w->gathered = all;
    if (lanes == w->alive) w->passed = 0;
    return lanes;
}

u32 gather(Machine *m, Warp *w, const Op *op, u32 wanted) { return gather_where(m, w, op, wanted, false); }
u32 gather_any(Machine *m, Warp *w, const Op *op, u32 wanted) { return gather_where(m, w, op, wanted, true); }

/* Lanes exit. Where an .aligned instruction waits for them they should have come: not when they branched
 * to the exit, which is as if they had never been, but when they met the others' way again behind it. */
static void check_passed(Machine *m, Warp *w, u32 lanes) {
    for (i32 i = 0; (lanes & w->passed) && i < w->group_count; i++) {
        const Group *g = &w->groups[i];
        const Op *op = &m->launch.ops[g->pc];
        if (g->partial && op->aligned & 1 && !(g->mask & lanes))
            report(m, BARRIER, op, w, lowest(g->mask),
                   "lanes %08x wait here for the whole warp: lanes %08x went another way", g->mask, lanes
                       & w->passed);
    }
}

/* **** control flow **** */

/* bra: `mask` are the lanes that take it. */
HANDLER(bra) {
    Group *g = group_of(w);
    if (mask == g->mask) g->pc = op->target;
    else split_group(m, w, mask, op->target, op->join);
    (void)m;
    return JUMPED;
}

/* A branch from which no way leads to an exit. */
HANDLER(bra_endless) {
    m->endless = true;
    return op_bra(m, w, op, mask);
}

/* brx.idx: each lane goes to the op named by its index (lists[list + index]); beyond the table, undefined:
 * the last. */
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

/* Text in device memory, for messages. */
static void read_text(Machine *m, Warp *w, const Op *op, int lane, u64 address, char *out, size_t size) {
    size_t n = 0;
    Region *r;
    u64 at;
    for (const u8 *c; n + 1 < size; n++) {
        if (!(c = locate(m, w, op, lane, GENERIC, address + n, 1, 1, &r, &at)) || !*c) break;
        out[n] = (char)*c;
    }
    out[n] = 0;
}

/* __assertfail: the list has the places in local memory of its parameters: message, file, line, function,
 * size of a character. */
HANDLER(assertfail) {
    const i32 *list = m->launch.lists + op->list;
    char text[3][80];
    int lane = lowest(mask);
    const u8 *local = w->local + (size_t)lane * m->launch.local_bytes;
    u32 line;
    memcpy(&line, local + list[2], 4);
    for (int i = 0; i < 3; i++) {
        u64 address;
        memcpy(&address, local + list[i == 2 ? 3 : i], 8);
        read_text(m, w, op, lane, address, text[i], sizeof text[i]);
    }
    report(m, BARRIER, op, w, lane, "assertion failed: %s (%s:%u, %s)", text[0], text[1], line, text[2]);
    m->stopped = true;
    return YIELD;
}
