/* Collectives of a warp: shfl, vote, match, redux, elect, activemask, bar.warp.sync. PTX ISA "Parallel
 * Synchronization and Communication Instructions".
 *
 * Each names the lanes that take part; those that are alive must all come, perhaps from elsewhere in the
 * program, before any goes on (machine.c: gather). Lanes of one instruction may name different sets, which
 * then act apart.
 */
#include "core.h"

/* Where the lanes' sets are, and who is in them. */
typedef struct { const u32 *members; u32 here; } Party;

/* Gathers everybody that the lanes in `mask` name in op->c; false: not all are here yet. */
static bool assemble(Machine *m, Warp *w, const Op *op, u32 mask, bool any_place, Party *p) {
    u32 wanted = 0, strangers = 0;
    p->members = r32(w, op->c);
    p->here = mask;
    EACH wanted |= mask >> l & 1 ? p->members[l] : 0;
    if (wanted & w->alive & ~mask) {
        if (!(p->here = any_place ? gather_any(m, w, op, wanted) : gather(m, w, op, wanted))) return false;
    }
    EACH strangers |= (~p->members[l] >> l & 1) << l;
    if (strangers &= p->here)
        report(m, BARRIER, op, w, lowest(strangers), "lanes %08x execute a warp collective whose member mask "
               "(%08x) does not name them", strangers, p->members[lowest(strangers)]);
    return true;
}
/* The lanes that act together with lane l. */
static inline u32 together(const Party *p, int l) { return p->members[l] & p->here; }

#define PARTY Party p; if (!assemble(m, w, op, mask, false, &p)) return BLOCKED; mask = p.here;

/* **** shfl: e is the second operand (lane or distance), b the clamp and segment; more: up, down, bfly, idx
 * **** */

enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };

#define SHUFFLE(source, valid) \
    EACH { \
        i32 lane = l, by = (i32)(b[l] & 31), segment = (i32)(c[l] >> 8 & 31), clamp = (i32)(c[l] & 31); \
        i32 limit = (lane & segment) | (clamp & ~segment), from = source; \
        bool ok = valid; \
        out[l] = a[ok ? from : lane]; \
        in_range |= (u32)ok << l; \
    } \
    break;
HANDLER(shfl) {
    PARTY
    const u32 *a = r32(w, op->a), *b = r32(w, op->e), *c = r32(w, op->b);
    i32 also = op->count ? m->launch.lists[op->list] : -1;   /* the predicate: was the source lane in range */
    u32 out[LANES], in_range = 0;
    switch (op->more) {
        case SHFL_UP: SHUFFLE(lane - by, from >= limit)
        case SHFL_DOWN: SHUFFLE(lane + by, from <= limit)
        case SHFL_BFLY: SHUFFLE(lane ^ by, from <= limit)
        default: SHUFFLE((lane & segment) | (by & ~segment), from <= limit)
    }
    put32(w, op->d, out, mask);
    if (also >= 0) put_pred(w, also, in_range, mask);
    return NEXT;
}

/* **** vote: a is a predicate; more: all, any, uni, ballot **** */

enum { VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT };

HANDLER(vote) {
    PARTY
    u32 a = pred(w, op->a), out[LANES], bits = 0;
    if (op->more == VOTE_BALLOT) {
        EACH out[l] = a & together(&p, l);
        put32(w, op->d, out, mask);
        return NEXT;
    }
    EACH {
        u32 who = together(&p, l), yes = a & who;
        bool all = yes == who, any = yes != 0;
        bits |= (u32)(op->more == VOTE_ALL ? all : op->more == VOTE_ANY ? any : all || !any) << l;
    }
    put_pred(w, op->d, bits, mask);
    return NEXT;
}

/* **** match: it orders memory among its lanes, as libcu++ has it (the lane that invalidates the barriers of a
 * pipeline which all have used is elected so); PTX says nothing, and the other collectives do not **** */

static inline u64 matched_value(const Warp *w, const Op *op, int l) {
    return op->wide ? r64(w, op->a)[l] : r32(w, op->a)[l];
}
/* The lanes of `who` that hold the value of lane l. */
static u32 equals(const Warp *w, const Op *op, u32 who, int l) {
    u64 value = matched_value(w, op, l);
    u32 same = 0;
    for (int i = 0; i < LANES; i++) if (who >> i & 1) same |= (u32)(matched_value(w, op, i) == value) << i;
    return same;
}
HANDLER(match_any) {
    PARTY
    u32 out[LANES] = {0};
    ACTIVE out[l] = equals(w, op, together(&p, l), l);
    put32(w, op->d, out, mask);
    lanes_sync(m, w, mask);
    /* libcu++ elects with it the thread that ends a pipeline's barriers, after all uses by the others */
    lanes_sync(m, w, p.here);
    return NEXT;
}
/* match.all: everybody and true where all agree, 0 and false elsewhere. */
HANDLER(match_all) {
    PARTY
    i32 also = op->count ? m->launch.lists[op->list] : -1;
    u32 out[LANES] = {0}, agree = 0;
    ACTIVE {
        u32 who = together(&p, l);
        bool all = equals(w, op, who, l) == who;
        out[l] = all ? who : 0;
        agree |= (u32)all << l;
    }
    put32(w, op->d, out, mask);
    if (also >= 0) put_pred(w, also, agree, mask);
    lanes_sync(m, w, mask);
    return NEXT;
}

/* **** redux: more: add, min, max of s32 and of u32, and, or, xor **** */

enum { REDUX_ADD, REDUX_MIN_S, REDUX_MAX_S, REDUX_MIN_U, REDUX_MAX_U, REDUX_AND, REDUX_OR, REDUX_XOR };

static inline u32 reduced(u32 x, u32 y, int how) {
    switch (how) {
        case REDUX_ADD: return x + y;
        case REDUX_MIN_S: return (i32)x < (i32)y ? x : y;
        case REDUX_MAX_S: return (i32)x > (i32)y ? x : y;
        case REDUX_MIN_U: return x < y ? x : y;
        case REDUX_MAX_U: return x > y ? x : y;
        case REDUX_AND: return x & y;
        case REDUX_OR: return x | y;
        default: return x ^ y;
    }
}
HANDLER(redux) {
    PARTY
    const u32 *a = r32(w, op->a);
    u32 out[LANES] = {0};
    for (u32 left = mask; left;) {
        int first = lowest(left);
        u32 who = together(&p, first) | 1u << first, sum = a[first];
        for (u32 rest = who & ~(1u << first); rest; rest &= rest - 1)
            sum = reduced(sum, a[lowest(rest)], op->more);
        for (u32 rest = who; rest; rest &= rest - 1) out[lowest(rest)] = sum;
        left &= ~who;
    }
    put32(w, op->d, out, mask);
    return NEXT;
}

/* **** elect, activemask, bar.warp.sync **** */

/* elect.sync: one lane of the members, the lowest; d (may be absent) is its number, the predicate true for
 * it alone. */
HANDLER(elect) {
    PARTY
    i32 chosen = m->launch.lists[op->list];
    u32 out[LANES] = {0}, leads = 0;
    ACTIVE {
        u32 who = together(&p, l) | 1u << l;
        out[l] = (u32)lowest(who);
        leads |= (u32)(out[l] == (u32)l) << l;
    }
    if (op->d >= 0) put32(w, op->d, out, mask);
    put_pred(w, chosen, leads, mask);
    return NEXT;
}

HANDLER(activemask) {
    u32 out[LANES];
    EACH out[l] = mask;
    put32(w, op->d, out, mask);
    return NEXT;
}

/* bar.warp.sync: the members may be at different places in the program; what they did before is ordered
 * before what they do next. */
HANDLER(bar_warp_sync) {
    Party p;
    if (!assemble(m, w, op, mask, true, &p)) return BLOCKED;
    lanes_sync(m, w, p.here);
    return NEXT;
}
