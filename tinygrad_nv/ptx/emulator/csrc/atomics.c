/* atom and red.
 *
 * Ops: `more` is operation | type << 8; the list has `vector` destinations (-1: not wanted), `vector`
 * sources and, for cas, the new value. Each element is atomic by itself. Lanes take turns in an order that
 * the seed chooses.
 */
#include "core.h"
#include "formats.h"

enum { ADD, MIN, MAX, INC, DEC, AND, OR, XOR, EXCH, CAS };
enum { BITS, UNSIGNED, SIGNED_INT, FLOAT, HALF, BFLOAT, HALF_PAIR, BFLOAT_PAIR };

/* **** one element **** */

static u64 combine_integers(int operation, bool is_signed, u32 width, u64 a, u64 b) {
    i64 x = width == 8 ? (i64)a : (i32)a, y = width == 8 ? (i64)b : (i32)b;
    bool less = is_signed ? x < y : a < b;
    switch (operation) {
    case ADD: return a + b;
    case MIN: return less ? a : b;
    case MAX: return less ? b : a;
    case INC: return a >= b ? 0 : a + 1;
    case DEC: return a == 0 || a > b ? b : a - 1;
    case AND: return a & b;
    case OR: return a | b;
    case XOR: return a ^ b;
    default: return b;
    }
}

/* min and max of two f32: a NaN gives the other, -0 is less than +0. */
static f32 lesser_of(f32 a, f32 b, bool most) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == b) return (as_u32(a) >> 31 != 0) != most ? a : b;
    return (a < b) != most ? a : b;
}

/* Half-precision operations are exact in f32 up to the one rounding (24 bits are enough for sums of 11). */
static u32 combine_half(int operation, bool bfloat, u32 a, u32 b) {
    f32 x = bfloat ? bf16_to_f32(a) : f16_to_f32(a), y = bfloat ? bf16_to_f32(b) : f16_to_f32(b);
    f32 z = operation == ADD ? x + y : lesser_of(x, y, operation == MAX);
    return bfloat ? f32_to_bf16(z) : f32_to_f16(z);
}

static u64 combine_float(u32 width, u64 a, u64 b, bool flushes) {
    if (width == 8) return as_u64(as_f64(a) + as_f64(b));
    f32 x = as_f32((u32)a), y = as_f32((u32)b);
    if (!flushes) return canonical(x + y);
    return canonical(flush(flush(x) + flush(y)));
}

/* What `old` becomes: the operation on two elements of `width` bytes. `flushes`: f32 subnormals are zero
 * (global memory). cas is not one of these. */
static u64 combine(int operation, int type, u32 width, u64 old, u64 b, bool flushes) {
    switch (operation == EXCH ? BITS : type) {
    case FLOAT: return combine_float(width, old, b, flushes);
    case HALF: return combine_half(operation, false, (u32)old, (u32)b);
    case BFLOAT: return combine_half(operation, true, (u32)old, (u32)b);
    case HALF_PAIR: case BFLOAT_PAIR: {
        bool bfloat = type == BFLOAT_PAIR;
        u32 low = combine_half(operation, bfloat, old & 0xffff, b & 0xffff);
        return low | combine_half(operation, bfloat, old >> 16 & 0xffff, b >> 16 & 0xffff) << 16;
    }
    default: return combine_integers(operation, type == SIGNED_INT, width, old, b);
    }
}

/* **** instructions **** */

static u64 operand_of(const Warp *w, i32 place, u32 width, int lane) {
    if (width == 8) return r64(w, place)[lane];
    u32 x = r32(w, place)[lane];
    return width == 2 ? x & 0xffff : x;
}

/* One lane's elements: memory changes, what was there goes to `old`. */
static void atomic_lane(const Warp *w, const Op *op, const i32 *list, u8 *host, int lane, bool global,
                        u64 *old) {
    int operation = op->more & 255, type = op->more >> 8;
    for (int i = 0; i < op->vector; i++) {
        u64 before = 0, b = operand_of(w, list[op->vector + i], op->width, lane), after;
        memcpy(&before, host + i * op->width, op->width);
        if (operation == CAS) after = before == b ? operand_of(w, list[2], op->width, lane) : before;
        else after = combine(operation, type, op->width, before, b, global);
        memcpy(host + i * op->width, &after, op->width);
        old[i] = before;
    }
}

static void put_old(Warp *w, const Op *op, const i32 *list, u64 (*old)[8], u32 mask) {
    u32 narrow[LANES];
    u64 wide[LANES];
    for (int i = 0; i < op->vector; i++) {
        if (list[i] < 0) continue;
        EACH narrow[l] = (u32)(wide[l] = old[l][i]);
        if (op->width == 8) put64(w, list[i], wide, mask);
        else put32(w, list[i], narrow, mask);
    }
}

/* What comes before and after every atomic: places, the order of lanes, and clocks. */
typedef struct { Reach reach; u64 address[LANES]; u32 first, stride; Who who; u32 bytes; } Atomic;

static void atomic_begin(Machine *m, Warp *w, const Op *op, u32 mask, Atomic *a) {
    a->bytes = (u32)op->width * op->vector;
    addresses(w, op, a->address);
    reach_warp(m, w, op, a->address, mask, a->bytes, a->bytes, ATOMIC, &a->reach);
    u64 order = random_u64(m);
    a->first = order & 31, a->stride = (order >> 5 & 31) | 1;
    a->who = thread_of(w, op, 0);
    a->who.scope = (i8)scope_of(op);
    synchronise(m, w, op, &a->reach, true, false);
}

/* The lane of turn `i`, with its access entered; -1: it takes no part. */
static int atomic_turn(Machine *m, Atomic *a, u32 i) {
    int lane = (int)((a->first + i * a->stride) % LANES);
    if (!(a->reach.good >> lane & 1)) return -1;
    a->who.lane = lane;
    enter_access(m, &a->who, a->reach.region[lane], a->reach.offset[lane], a->bytes, ATOMIC);
    return lane;
}

static int atomic_end(Machine *m, Warp *w, const Op *op, Atomic *a, bool wanted) {
    synchronise(m, w, op, &a->reach, false, true);
    count_access(m, op, a->address, &a->reach, a->bytes, ATOMIC);
    happened(m, w->cta->cluster);
    return wanted ? YIELD : NEXT;  /* a thread that spins on what it reads must let others go on */
}

/* Where chosen clusters alone run, for their tapes, a thread that adds to a counter and takes what was there is
 * taken for one that draws the next work tile: those that do not run draw theirs too, as many for each draw as
 * there are clusters for each that runs. Clusters that end early draw none. Which of a round's tiles it gets goes on by
 * multiples of an irrational number: tiles of a row differ in length, and a whole number of rows in a round would give
 * it the same place in each. (M. Roberts's R2 sequence: of those tried it came nearest to the mean of all clusters.) */
static void draw_for_others(Machine *m, const Warp *w, const Op *op, const i32 *list, u8 *host, int lane, u64 *old) {
    const Launch *a = &m->launch;
    u64 all = (u64)a->grid[0] * a->grid[1] * a->grid[2] / (a->cluster[0] * a->cluster[1] * a->cluster[2]);
    u64 step = operand_of(w, list[1], op->width, lane), share = all / (u64)a->whole;
    if (share < 1) share = 1;
    u64 stride = step * share;  /* 0, too, where it wraps */
    u64 next = w->cta->cluster->most ? *old : *old + stride, round = stride ? *old / stride + 1 : 0;
    memcpy(host, &next, op->width);
    f64 place = 0.7548776662466927 * (f64)round;
    m->draws++;
    *old += step * (u64)((place - (f64)(u64)place) * (f64)share);
    if (w->tape) tape_note(w, DRAWN, 1, *old, step, 0);
}

HANDLER(atom) {
    Atomic a;
    u64 old[LANES][8] = {{0}};
    const i32 *list = m->launch.lists + op->list;
    atomic_begin(m, w, op, mask, &a);
    for (u32 i = 0; i < LANES; i++) {
        int lane = atomic_turn(m, &a, i);
        if (lane < 0) continue;
        const Region *r = a.reach.region[lane];
        atomic_lane(w, op, list, a.reach.host[lane], lane, r && !r->cta, old[lane]);
    }
    bool wanted = false;
    for (int i = 0; i < op->vector; i++) wanted |= list[i] >= 0;
    int lane = __builtin_ctz(mask), type = op->more >> 8;
    const Region *r = a.reach.region[lane];
    bool counter = (op->more & 255) == ADD && (type == SIGNED_INT || type == UNSIGNED) && op->vector == 1;
    if (m->launch.taped && wanted && counter && popcount(mask) == 1 && r && !r->cta)
        draw_for_others(m, w, op, list, a.reach.host[lane], lane, &old[lane][0]);
    put_old(w, op, list, old, mask);
    return atomic_end(m, w, op, &a, wanted);
}

/* atom.exch.b128 and atom.cas.b128. */
HANDLER(atom_b128) {
    Atomic a;
    u64 low[LANES] = {0}, high[LANES] = {0};
    const i32 *list = m->launch.lists + op->list;
    atomic_begin(m, w, op, mask, &a);
    for (u32 i = 0; i < LANES; i++) {
        int l = atomic_turn(m, &a, i);
        if (l < 0) continue;
        u8 *host = a.reach.host[l];
        memcpy(&low[l], host, 8), memcpy(&high[l], host + 8, 8);
        const u64 *b = r64(w, list[1]);
        bool swaps = op->more == EXCH || (low[l] == b[l] && high[l] == b[l + LANES]);
        const u64 *from = r64(w, list[op->more == CAS ? 2 : 1]);
        if (swaps) memcpy(host, &from[l], 8), memcpy(host + 8, &from[l + LANES], 8);
    }
    if (list[0] >= 0) put64(w, list[0], low, mask), put64(w, list[0] + 8 * LANES, high, mask);
    return atomic_end(m, w, op, &a, true);
}
