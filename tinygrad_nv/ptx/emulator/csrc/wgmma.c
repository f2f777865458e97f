/* wgmma: asynchronous matmuls of a warpgroup, and what can go wrong with them.
 *
 * Protocol: each warp p of a warpgroup computes its rows 16p .. 16p+15. Issue queues the product in the
 * warp's own FIFO and moves the accumulators from the registers to a matrix on the side; with checks on the
 * registers hold NaNs meanwhile. The arithmetic, which reads A's registers and shared memory, happens when
 * wait_group (or the machine, earlier) asks for it. wgmma is one operation of four warps: a warp that waits,
 * waits for the parts of all of them. Accumulators return to the registers at the warp's own wait_group, when
 * nothing that is still in flight adds to them.
 *
 * Op: more, width, vector as in mma.c; a, b = places of the descriptors (a < 0: A is in registers); c =
 * predicate scale-d; e = metadata; list = D, then A's registers. The op has no reads and writes but those
 * of its ordinary operands.
 */

#include "core.h"
#include "descriptor.c"

enum { POISON = 0x7fffffff, PRODUCTS_MOST = 1024 };

/* The accumulators of products in flight: `matrix` is f32 or s32 [16][ldc]. */
typedef struct Accumulator {
    struct Accumulator *next;
    const i32 *places;
    i32 count, n, ldc, result, pending;
    u32 *matrix;
} Accumulator;

typedef struct {
    const Op *op;
    u64 a, b;
    u64 metadata[DOT_ROWS];
    Accumulator *accumulator;
    u32 group;
    bool scale, done;
} Product;

/* What a warp has in flight. `held`: for each 128 bytes of registers, products that use it: low half as D,
 * high half as A. */
typedef struct {
    Product *queue;
    i32 first, count, room;
    Accumulator *live, *spare;
    u32 *held;
} Tensor;

static Tensor *tensor_of(Machine *m, Warp *w) {
    if (!w->tensor) {
        Tensor *t = w->tensor = take_zeros(1, sizeof *t);
        t->held = take_zeros((size_t)m->launch.register_bytes / 128 + 1, sizeof *t->held);
    }
    return w->tensor;
}

static int wgmma_result_words(const Op *op) {
    return mma_n(op) / ((op->flags & MMA_RESULT) == RESULT_F16 ? 4 : 2);
}

/* **** execution **** */

static void load_operand(const Warp *w, const Product *p, bool is_b) {
    const Op *op = p->op;
    int n = mma_n(op), k = mma_k(op), bits = element_bits[op->width], ld = dot_ld(n);
    int extent = !is_b && op->flags & MMA_SPARSE ? k / 2 : k;
    if (bits == 1) extent /= 8;
    if (is_b) {
        Matrix x = matrix_of(p->b, op->vector, op->flags & WGMMA_MN_B);
        read_matrix(w, &x, 0, n, extent, dot_tile.raw_b, 1, ld);
        if (bits == 1) join_bytes(dot_tile.raw_b, k / 32, n, 1, ld);
    } else {
        Matrix x = matrix_of(p->a, op->width, op->flags & WGMMA_MN_A);
        read_matrix(w, &x, 16 * (w->id & 3), 16, extent, dot_tile.raw_a[0], DOT_K, 1);
        if (bits == 1) join_bytes(dot_tile.raw_a[0], k / 32, 16, DOT_K, 1);
    }
}

/* Does the arithmetic of a product, reading its operands now. */
static void product_run(Machine *m, Warp *w, Product *p) {
    const Op *op = p->op;
    Accumulator *c = p->accumulator;
    if (!p->scale) memset(c->matrix, 0, sizeof(u32) * DOT_ROWS * (size_t)c->ldc);
    if (m->launch.idle) {
        if (c->result != RESULT_S32) add_random_sums(w, 16, c->n, mma_k(op), (f32 *)c->matrix, c->ldc);
        p->done = true;
        return;
    }
    bool sparse = op->flags & MMA_SPARSE, eight = op->width == E4M3 || op->width == E5M2;
    int k = mma_k(op);
    if (op->a < 0) mma_load_a(w, m->launch.lists + op->list + wgmma_result_words(op), 4, op->width, 16);
    else load_operand(w, p, false);
    if (sparse) sparse_expand(op->width, p->metadata, k);
    load_operand(w, p, true);
    Dot d = {.a = op->width, .b = op->vector, .result = c->result, .rows = 16, .n = c->n, .k = k, .step = k,
             .bits = eight ? 13 : 25, .keep = eight ? 0xfffffc00 : ~0u, .exact = m->launch.exact,
             .saturate = op->flags & MMA_SATURATE, .negate_a = op->flags & WGMMA_NEGATE_A,
             .negate_b = op->flags & WGMMA_NEGATE_B, .c = c->matrix, .ldc = c->ldc};
    if (d.a == B1) dot_bits(&d, false);
    else dot(&d, sparse);
    p->done = true;
}

void tensor_complete(Machine *m, Warp *w, u32 up_to_group) {
    Tensor *t = w->tensor;
    if (!t) return;
    for (i32 i = 0; i < t->count; i++) {
        Product *p = &t->queue[(t->first + i) % t->room];
        if (p->group > up_to_group) return;
        if (!p->done) product_run(m, w, p);
    }
}

/* **** registers in flight **** */

/* A product takes hold of its registers, or lets go of them. */
static void hold(Machine *m, Tensor *t, const Op *op, int by) {
    const i32 *places = m->launch.lists + op->list;
    int words = wgmma_result_words(op);
    for (int i = 0; i < op->count; i++) t->held[places[i] >> 7] += (u32)(i < words ? by : by * 65536);
}

static bool same_places(const Accumulator *c, const i32 *places, i32 count) {
    return c->count == count && !memcmp(c->places, places, sizeof *places * (size_t)count);
}

static bool overlaps(const Accumulator *c, const i32 *places, i32 count) {
    for (i32 i = 0; i < count; i++)
        for (i32 j = 0; j < c->count; j++) if (c->places[j] == places[i]) return true;
    return false;
}

static void accumulator_release(Warp *w, Tensor *t, Accumulator *c) {
    store_accumulators(w, c->places, 16, c->n, c->result, c->matrix, c->ldc, ~0u);
    for (Accumulator **link = &t->live; *link; link = &(*link)->next)
        if (*link == c) { *link = c->next; break; }
    c->next = t->spare;
    t->spare = c;
}

/* Takes finished products off the queue, and gives the registers back. */
static void tensor_retire(Machine *m, Warp *w, u32 up_to_group) {
    Tensor *t = w->tensor;
    tensor_complete(m, w, up_to_group);
    while (t->count && t->queue[t->first].group <= up_to_group) {
        Product *p = &t->queue[t->first];
        hold(m, t, p->op, -1);
        if (!--p->accumulator->pending) accumulator_release(w, t, p->accumulator);
        t->first = (t->first + 1) % t->room;
        w->in_flight = --t->count;
    }
}

/* The accumulators an op adds to: those in flight, or out of the registers. */
static Accumulator *accumulator_take(Machine *m, Warp *w, Tensor *t, const Op *op) {
    const i32 *places = m->launch.lists + op->list;
    i32 count = wgmma_result_words(op), result = (i32)(op->flags & MMA_RESULT);
    for (Accumulator *c = t->live; c; c = c->next) {
        if (same_places(c, places, count) && c->result == result && c->n == mma_n(op)) return c;
        if (!overlaps(c, places, count)) continue;
        report(m, WGMMA_HAZARD, op, w, 0,
               "accumulators of a wgmma of another shape or type are still in flight in the same "
               "registers: wgmma.wait_group is missing between them");
        tensor_retire(m, w, ~0u);
        break;
    }
    Accumulator *c = t->spare;
    if (c) t->spare = c->next;
    else {
        c = take(sizeof *c);
        c->matrix = count_held(aligned_alloc(64, sizeof(u32) * DOT_ROWS * DOT_N));
    }
    *c = (Accumulator){t->live, places, count, mma_n(op), (mma_n(op) + 15) / 16 * 16, result, 0, c->matrix};
    t->live = c;
    memset(c->matrix, 0, sizeof(u32) * DOT_ROWS * (size_t)c->ldc);
    load_accumulators(w, places, 16, c->n, result, c->matrix, c->ldc);
    if (m->launch.check) for (i32 i = 0; i < count; i++) EACH r32(w, places[i])[l] = POISON;
    return c;
}

/* The line of a product in flight that uses a register. */
static int holder_line(const Machine *m, const Tensor *t, i32 place) {
    for (i32 i = t->count - 1; i >= 0; i--) {
        const Op *op = t->queue[(t->first + i) % t->room].op;
        for (i32 j = 0; j < op->count; j++) if (m->launch.lists[op->list + j] == place) return op->line;
    }
    return 0;
}

/* The first of a list of registers that is held in one of the ways of `mask`, or -1. */
static i32 held_one(const Machine *m, const Tensor *t, i32 list, u32 mask) {
    if (list < 0) return -1;
    const i32 *places = m->launch.lists + list;
    for (i32 i = 1; i <= places[0]; i++) if (t->held[places[i] >> 7] & mask) return places[i];
    return -1;
}

void tensor_check_registers(Machine *m, Warp *w, const Op *op) {
    const Tensor *t = w->tensor;
    i32 read = held_one(m, t, op->reads, 0xffff), written = held_one(m, t, op->writes, ~0u);
    if (read >= 0)
        report_pair(m, WGMMA_HAZARD, op, w, 0, holder_line(m, t, read), -1, -1,
                    "an accumulator is read while a wgmma that "
                    "writes it is in flight: wgmma.wait_group must cover it first");
    if (written >= 0)
        report_pair(m, WGMMA_HAZARD, op, w, 0, holder_line(m, t, written), -1, -1,
                    t->held[written >> 7] & 0xffff
                    ? "an accumulator of a wgmma in flight is written: wgmma.wait_group must come first"
                    : "a register that is part of A of a wgmma in flight is written: wgmma.wait_group must "
                      "come first");
}

/* **** checks at issue **** */

/* Ordinary instructions may not have accessed accumulators, nor written A, since the last wgmma.fence. (PTX
 * names any access; that wgmma reads what was read before cannot be told from the other order.) */
static void check_fence(Machine *m, Warp *w, const Op *op) {
    const i32 *places = m->launch.lists + op->list;
    if (w->fence_epoch == 1) {
        report(m, WGMMA_HAZARD, op, w, 0, "%s without a wgmma.fence before it", wgmma_name(op));
        return;
    }
    for (i32 i = 0; i < op->count; i++) {
        bool result = i < wgmma_result_words(op);
        bool written = w->written_at[places[i] >> 7] == w->fence_epoch;
        if (!written && !(result && w->read_at[places[i] >> 7] == w->fence_epoch)) continue;
        report(m, WGMMA_HAZARD, op, w, 0,
               "%s were %s by an ordinary instruction since the last wgmma.fence: one must stand between them",
               result ? "accumulators" : "registers of A", written ? "written" : "read");
        return;
    }
}

static void check_group(Machine *m, Warp *w, const Op *op) {
    if ((w->id | 3) >= w->cta->warp_count)
        report(m, WGMMA_HAZARD, op, w, 0, "%s takes four warps, the last warpgroup of the CTA has %d",
               wgmma_name(op),
               w->cta->warp_count & 3);
}

/* **** instructions **** */

static Product *queue_push(Tensor *t) {
    if (t->count == t->room) {
        i32 room = t->room ? 2 * t->room : 16;
        Product *bigger = take(sizeof *bigger * (size_t)room);
        for (i32 i = 0; i < t->count; i++) bigger[i] = t->queue[(t->first + i) % t->room];
        give(t->queue);
        t->queue = bigger, t->first = 0, t->room = room;
    }
    return &t->queue[(t->first + t->count++) % t->room];
}

/* wgmma.mma_async{.sp}: queued; the registers are not the program's until wait_group. */
HANDLER(wgmma) {
    Tensor *t = tensor_of(m, w);
    int lane = lowest(mask);
    u64 a = op->a < 0 ? 0 : r64(w, op->a)[lane], b = r64(w, op->b)[lane];
    check_group(m, w, op);
    if (m->launch.check) check_fence(m, w, op);
    if (op->a >= 0) check_matrix(m, w, op, a, false);
    check_matrix(m, w, op, b, true);
    /* a loop that never waits */
    if (t->count >= PRODUCTS_MOST) tensor_retire(m, w, t->queue[t->first].group);
    Accumulator *c = accumulator_take(m, w, t, op);
    Product *p = queue_push(t);
    *p = (Product){.op = op, .a = a, .b = b, .accumulator = c, .group = w->wgmma_groups + 1,
                   .scale = pred(w, op->c) >> lane & 1};
    if (op->flags & MMA_SPARSE)
        sparse_metadata(op->width, mma_k(op), r32(w, op->e), op->flags >> MMA_SELECTOR_SHIFT & 3,
                        p->metadata);
    c->pending++;
    hold(m, t, op, 1);
    w->in_flight = t->count;
    m->launch.counters[op->source].flops += 2ull * DOT_ROWS * (u64)mma_n(op) * (u64)mma_k(op);
    return NEXT;
}

HANDLER(wgmma_fence) {
    (void)m, (void)op, (void)mask;
    w->fence_epoch++;
    return NEXT;
}

HANDLER(wgmma_commit) {
    (void)op, (void)mask;
    w->wgmma_groups++;
    happened(m, w->cta->cluster);
    return NEXT;
}

/* wgmma.wait_group N: until at most the N latest groups are pending, for all four warps of the warpgroup. */
HANDLER(wgmma_wait) {
    (void)mask;
    u32 pending = (u32)op->imm, target = w->wgmma_groups > pending ? w->wgmma_groups - pending : 0;
    if (target <= w->wgmma_done) return NEXT;
    i32 leader = w->id & ~3;
    for (i32 i = leader; i < leader + 4 && i < w->cta->warp_count; i++) {
        const Warp *other = &w->cta->warps[i];
        if (other->wgmma_groups >= target) continue;
        if (!group_of(w)->forced) return BLOCKED;
        report(m, WGMMA_HAZARD, op, w, 0,
               "warp %d has committed %u wgmma groups, warp %d of the same warpgroup %u: all four warps "
               "must execute the same wgmma instructions", w->id, w->wgmma_groups, other->id,
               other->wgmma_groups);
    }
    for (i32 i = leader; i < leader + 4 && i < w->cta->warp_count; i++)
        tensor_complete(m, &w->cta->warps[i], target);
    if (w->tensor) tensor_retire(m, w, target);
    w->wgmma_done = target;
    clock_observe(m, w, (u32)(w->cta->rank * ACTORS + ACTOR_WGMMA + leader), target);
    return NEXT;
}

/* **** lifetimes **** */

void tensor_exit(Machine *m, Warp *w) {
    Tensor *t = w->tensor;
    if (!t || !t->count) return;
    const Product *p = &t->queue[t->first];
    report(m, WGMMA_HAZARD, p->op, w, 0, "the warp exits with this wgmma in flight: %s",
           p->group > w->wgmma_groups
           ? "wgmma.commit_group and wgmma.wait_group are missing" : "wgmma.wait_group is missing");
}

static void accumulators_free(Accumulator *c) {
    while (c) {
        Accumulator *next = c->next;
        give(c->matrix), give(c);
        c = next;
    }
}

void tensor_free(Machine *m, Warp *w) {
    Tensor *t = w->tensor;
    (void)m;
    if (!t) return;
    accumulators_free(t->live), accumulators_free(t->spare);
    give(t->queue), give(t->held), give(t);
    w->tensor = NULL;
}
