/* wgmma's operands in shared memory: matrix descriptors, reading what they describe, and what is checked at
 * issue.
 *
 * A matrix is read in chunks of 16 bytes along its major dimension. The address of a chunk is start +
 * offset by the canonical layouts, and the swizzle is an XOR of the absolute shared address: bits 4 .. 6
 * with bits 7 .. 9 less the base offset.
 */
#include "core.h"

enum { WGMMA_NEGATE_A = 1 << 8, WGMMA_NEGATE_B = 1 << 9, WGMMA_MN_A = 1 << 10, WGMMA_MN_B = 1 << 11 };

static const char *wgmma_name(const Op *op) {
    return op->flags & MMA_SPARSE ? "wgmma.mma_async.sp" : "wgmma.mma_async";
}

/* A matrix in shared memory: 16-byte chunks of `per` elements along the major dimension. */
typedef struct {
    u32 start, lbo, sbo;
    u32 span, mask, phase;   /* bytes of the swizzle, 0 for none; row bits in the XOR; base offset */
    int size, per;
    bool mn;
} Matrix;

static Matrix matrix_of(u64 descriptor, int element, bool mn) {
    static const u8 masks[] = {0, 7, 3, 1};
    static const u8 spans[] = {0, 128, 64, 32};
    int mode = (int)(descriptor >> 62), size = element == B1 ? 1 : element_bits[element] / 8;
    return (Matrix){(u32)(descriptor & 0x3fff) << 4, (u32)(descriptor >> 16 & 0x3fff) << 4,
                    (u32)(descriptor >> 32 & 0x3fff) << 4,
                    spans[mode], masks[mode], (u32)(descriptor >> 49 & 7), size, 16 / size, mn};
}

/* The shared-window address of the chunk of element (mn, k). For single bits, k counts bytes. */
static inline u32 chunk_address(const Matrix *x, u32 mn, u32 k) {
    u32 size = (u32)x->size, per = (u32)x->per, span = x->span, offset;
    if (!x->mn && !span) offset = mn / 8 * x->sbo + mn % 8 * 16 + k / per * x->lbo;
    else if (!x->mn) offset = mn / 8 * x->sbo + mn % 8 * span + k * size / span * x->lbo + k * size % span;
    else if (!span) offset = mn / per * x->sbo + k % 8 * 16 + k / 8 * x->lbo;
    else offset = mn * size % span + mn * size / span * x->lbo + k % 8 * span + k / 8 * x->sbo;
    u32 address = x->start + offset;
    return address ^ (((address >> 7) - x->phase) & x->mask) << 4;
}

/* Runs a block for each chunk: it sees the `address`, and `mn` and `k` of the first element. */
#define EACH_CHUNK(x, first, count, extent, ...) \
    if ((x)->mn) { \
        for (u32 k = 0; k < (u32)(extent); k++) \
            for (u32 mn = (u32)(first); mn < (u32)((first) + (count)); mn += (u32)(x)->per) { \
                u32 address = chunk_address(x, mn, k); __VA_ARGS__ } \
    } else { \
        for (u32 mn = (u32)(first); mn < (u32)((first) + (count)); mn++) \
            for (u32 k = 0; k < (u32)(extent); k += (u32)(x)->per) { \
                u32 address = chunk_address(x, mn, k); __VA_ARGS__ } \
    }

/* Codes of rows first .. first + count, `extent` elements along k, to out[(mn - first) * mn_step + k *
 * k_step]. Single bits become words. What lies outside shared memory is zero. */
static void read_matrix(const Warp *w, const Matrix *x, int first, int count, int extent, u32 *out,
                        int mn_step, int k_step) {
    const Region *r = &w->cta->shared;
    u32 base = (u32)r->base & ((1u << RANK_SHIFT) - 1);
    static const u8 zeros[16];
    int step = x->mn ? mn_step : k_step;
    EACH_CHUNK(x, first, count, extent, {
        u64 offset = (u64)address - base;
        const u8 *from = address >= base && offset + 16 <= r->size ? r->data + offset : zeros;
        u32 *to = out + ((int)mn - first) * mn_step + (int)k * k_step;
        if (x->size == 1) for (int j = 0; j < 16; j++) to[j * step] = from[j];
        else if (x->size == 2)
            for (int j = 0; j < 8; j++) to[j * step] = (u32)from[2 * j] | (u32)from[2 * j + 1] << 8;
        else for (int j = 0; j < 4; j++) memcpy(to + j * step, from + 4 * j, 4);
    })
}

/* Bytes of single-bit rows become the words of dot_bits. */
static void join_bytes(u32 *out, int words, int rows, int row_step, int k_step) {
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < words; k++) {
            u32 word = 0;
            for (int j = 0; j < 4; j++) word |= out[i * row_step + (4 * k + j) * k_step] << (8 * j);
            out[i * row_step + k * k_step] = word;
        }
}

/* **** checks at issue **** */

/* Enters 16-byte chunks that were collected into one range, as read by the warpgroup. */
static void enter_range(Machine *m, Warp *w, const Op *op, u32 from, u32 bytes, const char *which) {
    Region *r = &w->cta->shared;
    u64 offset = from - ((u32)r->base & ((1u << RANK_SHIFT) - 1));
    u32 conflicts = m->conflicts;
    u32 leader = (u32)(w->cta->rank * ACTORS + ACTOR_WGMMA + (w->id & ~3));
    Who who = {.warp = w, .op = op, .lane = 0, .actor = leader, .clock = w->wgmma_groups + 1, .async = 2};
    shadow_access(m, &who, r, offset, bytes, READ);
    const u8 *invalid = r->valid && m->conflicts == conflicts ? memchr(r->valid + offset, 0, bytes) : NULL;
    if (!invalid) return;
    i32 before = m->finding_count;
    u64 first = (u64)(invalid - r->valid);
    report(m, UNINITIALIZED, op, w, 0, "%s reads shared memory at 0x%x as %s, and nothing has been written there",
           wgmma_name(op), (u32)first + ((u32)r->base & ((1u << RANK_SHIFT) - 1)), which);
    if (m->finding_count > before) m->findings[before].address = r->base + first;
}

/* Enters what this warp answers for: its rows of A, or a quarter of B's, which all four read. */
static void enter_matrix(Machine *m, Warp *w, const Op *op, const Matrix *x, int first, int count, int extent,
                         const char *which) {
    const Region *r = &w->cta->shared;
    u32 base = (u32)r->base & ((1u << RANK_SHIFT) - 1), end = base + (u32)r->size, from = 0, bytes = 0;
    EACH_CHUNK(x, first, count, extent, {
        if (address < base || address + 16 > end) {
            report(m, OUT_OF_BOUNDS, op, w, 0,
                   "%s: row %u, column %u of %s is at shared address 0x%x, outside the CTA's "
                   "0x%x .. 0x%x", wgmma_name(op), x->mn ? k : mn, x->mn ? mn : k, which, address, base, end);
            return;
        }
        if (!m->launch.check) continue;
        if (bytes && address == from + bytes) bytes += 16;
        else if (bytes && address + 16 == from) from = address, bytes += 16;
        else {
            if (bytes) enter_range(m, w, op, from, bytes, which);
            from = address, bytes = 16;
        }
    })
    if (bytes) enter_range(m, w, op, from, bytes, which);
}

/* A swizzled tile's pattern must begin where the descriptor says: rows of the pattern are numbered by
 * address. A tile in the midst of a pattern is right all the same when its writer numbered rows so too,
 * as tensor copies and CuTe's layouts do. CUTLASS leaves tiles where its structures end, in dynamic shared
 * memory that it does not align; elsewhere it is a mistake. */
static void check_base(Machine *m, Warp *w, const Op *op, const Matrix *x, const char *which) {
    u32 row = x->start >> 7 & x->mask;
    if (!row || x->phase) return;
    const Launch *a = &m->launch;
    bool unaligned = a->dynamic_align < (x->mask + 1) * 128 && x->start >= SHARED_BASE + a->static_bytes;
    if (unaligned && w->cta->phases >> row & 1) return;
    report(m, MISALIGNED, op, w, 0,
           "%s: %s is swizzled over %u bytes and starts at shared address 0x%x, in the middle of the "
           "%u-byte pattern: align the tile to it", wgmma_name(op), which, x->span, x->start,
           (x->mask + 1) * 128);
}

static void check_matrix(Machine *m, Warp *w, const Op *op, u64 descriptor, bool is_b) {
    const char *which = is_b ? "B" : "A";
    int element = is_b ? op->vector : op->width, k = mma_k(op);
    Matrix x = matrix_of(descriptor, element, op->flags & (is_b ? WGMMA_MN_B : WGMMA_MN_A));
    int extent = (is_b || !(op->flags & MMA_SPARSE) ? k : k / 2) / (element == B1 ? 8 : 1), p = w->id & 3;
    check_base(m, w, op, &x, which);
    if (!is_b) enter_matrix(m, w, op, &x, 16 * p, 16, extent, which);
    else if (x.mn) {  /* a quarter of the rows of 8 elements */
        int blocks = mma_n(op) / 8, from = blocks * p / 4, to = blocks * (p + 1) / 4;
        enter_matrix(m, w, op, &x, 8 * from, 8 * (to - from), extent, which);
    } else {
        int quarter = mma_n(op) / 4;
        enter_matrix(m, w, op, &x, quarter * p, quarter, extent, which);
    }
}
