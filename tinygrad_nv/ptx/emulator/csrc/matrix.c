/* ldmatrix, stmatrix, movmatrix, and the older wmma.load, wmma.store, wmma.mma.
 *
 * An 8 by 8 matrix of 16-bit elements in a register: lane 4g + q holds row g, columns 2q (low half) and 2q +
 * 1; transposed: rows 2q and 2q + 1, column g. Lane 8i + r gives the address of the 16 bytes of row r of
 * matrix i.
 *
 * Where wmma's fragments keep elements is not specified by PTX; load, mma and store must agree. Here a
 * matrix of R rows and C columns is cut into 32 equal runs of its row-major order, run l in lane l,
 * elements packed into registers in order. A and B of f16 have more registers than that takes: the others
 * hold zeros.
 */
#include "core.h"

enum { MATRIX_TRANSPOSED = 1 };
enum { WMMA_COLUMN_MAJOR = 1, WMMA_B_COLUMN = 8 };

/* Register words of an 8 by 8 matrix from its rows. */
static void matrix_words(u8 *const *rows, bool transposed, u32 *words) {
    EACH {
        int g = l >> 2, q = l & 3;
        u16 low, high;
        memcpy(&low, transposed ? rows[2 * q] + 2 * g : rows[g] + 4 * q, 2);
        memcpy(&high, transposed ? rows[2 * q + 1] + 2 * g : rows[g] + 4 * q + 2, 2);
        words[l] = low | (u32)high << 16;
    }
}

/* Rows of an 8 by 8 matrix from its register. */
static void matrix_rows(const u32 *words, bool transposed, u16 rows[8][8]) {
    EACH for (int h = 0; h < 2; h++) {
        int g = l >> 2, c = 2 * (l & 3) + h;
        u16 value = (u16)(words[l] >> (16 * h));
        if (transposed) rows[c][g] = value;
        else rows[g][c] = value;
    }
}

/* The lanes that give addresses for an op of op->count matrices. */
static u32 row_lanes(const Op *op) { return op->count == 4 ? ~0u : (1u << 8 * op->count) - 1; }

HANDLER(ldmatrix) {
    u64 address[LANES];
    Reach reach;
    const i32 *places = m->launch.lists + op->list;
    addresses(w, op, address);
    reach_warp(m, w, op, address, mask & row_lanes(op), 16, 16, READ, &reach);
    Who who = thread_of(w, op, 0);
    EACH {
        if (!(reach.good >> l & 1)) continue;
        who.lane = l;
        enter_access(m, &who, reach.region[l], reach.offset[l], 16, READ);
    }
    u32 words[4][LANES];
    for (int i = 0; i < op->count; i++)
        matrix_words(reach.host + 8 * i, op->flags & MATRIX_TRANSPOSED, words[i]);
    for (int i = 0; i < op->count; i++) put32(w, places[i], words[i], mask);
    count_access(m, op, address, &reach, 16, READ);
    return NEXT;
}

HANDLER(stmatrix) {
    u64 address[LANES];
    Reach reach;
    const i32 *places = m->launch.lists + op->list;
    u16 rows[LANES][8];
    addresses(w, op, address);
    reach_warp(m, w, op, address, mask & row_lanes(op), 16, 16, WRITE, &reach);
    for (int i = 0; i < op->count; i++)
        matrix_rows(r32(w, places[i]), op->flags & MATRIX_TRANSPOSED, rows + 8 * i);
    Who who = thread_of(w, op, 0);
    EACH {
        if (!(reach.good >> l & 1)) continue;
        who.lane = l;
        m->storing = (const u8 *)rows[l];
        enter_access(m, &who, reach.region[l], reach.offset[l], 16, WRITE);
        memcpy(reach.host[l], rows[l], 16);
    }
    m->storing = NULL;
    count_access(m, op, address, &reach, 16, WRITE);
    return NEXT;
}

/* movmatrix.trans: a transposition between lanes. */
HANDLER(movmatrix) {
    u16 rows[8][8];
    u8 *pointers[8];
    u32 words[LANES];
    (void)m;
    matrix_rows(r32(w, op->a), true, rows);
    for (int i = 0; i < 8; i++) pointers[i] = (u8 *)rows[i];
    matrix_words(pointers, false, words);
    put32(w, op->d, words, mask);
    return NEXT;
}

/* **** wmma **** */

/* The word or half of word that holds item `i` of a lane's run. */
static u32 item_get(const Warp *w, const i32 *places, int bits, int i, int l) {
    int per = 32 / bits;
    return code_of(r32(w, places[i / per])[l], bits, i % per);
}

static void item_put(Warp *w, const i32 *places, int bits, int i, int l, u32 value) {
    int per = 32 / bits, shift = bits * (i % per);
    u32 keep = bits == 32 ? 0 : ~(((1u << bits) - 1) << shift), *word = &r32(w, places[i / per])[l];
    *word = (*word & keep) | value << shift;
}

/* Bytes from an address in memory to element (row, column), for a stride in elements. */
static u64 element_bits_at(const Op *op, u64 stride, int row, int column, int bits) {
    u64 i = (u64)row, j = (u64)column;
    return (op->flags & WMMA_COLUMN_MAJOR ? i + j * stride : i * stride + j) * (u64)bits;
}

/* wmma.load / wmma.store: more = rows | columns << 16, width = bits of an element, b = place of the
 * stride, list = registers. */
static int wmma_transfer(Machine *m, Warp *w, const Op *op, u32 mask, int kind) {
    int rows = op->more & 0xffff, columns = op->more >> 16, bits = op->width, run = rows * columns / LANES;
    const i32 *places = m->launch.lists + op->list;
    u64 address[LANES];
    addresses(w, op, address);
    u32 bytes = bits < 8 ? 1 : (u32)bits / 8;
    if (kind == READ && bits < 64)
        for (int i = 0; i < op->count; i++) memset(r32(w, places[i]), 0, sizeof(u32) * LANES);
    ACTIVE for (int i = 0; i < run; i++) {
        int at = l * run + i;
        u64 bit = element_bits_at(op, r32(w, op->b)[l], at / columns, at % columns, bits);
        if (bits < 8 && kind == READ && bit % 8 && i) continue;  /* came with the first of its byte */
        u8 *host = touch(m, w, op, l, op->space, address[l] + bit / 8, bytes, bytes, kind);
        u64 value = 0;
        if (!host) continue;
        if (bits == 64) {
            if (kind == READ) memcpy(&r64(w, places[i])[l], host, 8);
            else memcpy(host, &r64(w, places[i])[l], 8);
        } else if (kind == WRITE) {
            value = item_get(w, places, bits, i, l);
            memcpy(host, &value, bytes);
        } else {
            memcpy(&value, host, bytes);
            if (bits >= 8) item_put(w, places, bits, i, l, (u32)value);
            else for (int j = 0; j < 8 / bits && i + j < run; j++)  /* a stride may be odd */
                item_put(w, places, bits, i + j, l, (u32)value >> (bits * j) & ((1u << bits) - 1));
        }
    }
    return NEXT;
}

HANDLER(wmma_load) { return wmma_transfer(m, w, op, mask, READ); }
HANDLER(wmma_store) { return wmma_transfer(m, w, op, mask, WRITE); }

/* Element (row, column) of an operand's fragment. */
static u32 fragment_code(const Warp *w, const i32 *places, int bits, int rows, int columns, int row,
                         int column) {
    int run = rows * columns / LANES, at = row * columns + column;
    return item_get(w, places, bits, at % run, at / run);
}

/* wmma.mma: more, width, vector, flags as for mma; list = D, A, B, C; imm = registers of A | of B << 8 | C
 * is f16 << 16. Done in pieces of 16 rows, or 8, and 8 columns. */
HANDLER(wmma_mma) {
    int rows = mma_m(op), n = mma_n(op), k = mma_k(op), result = (int)(op->flags & MMA_RESULT);
    const i32 *places = m->launch.lists + op->list;
    int na = (int)(op->imm & 0xff), nb = (int)(op->imm >> 8 & 0xff), half_c = (int)(op->imm >> 16 & 1);
    int out_bits = result == RESULT_F16 ? 16 : 32, in_bits = half_c ? 16 : 32, run = rows * n / LANES;
    int nd = run * out_bits / 32, bits = op->width == B1 ? 32 : element_bits[op->width],
        words = op->width == B1 ? k / 32 : k;
    u32 c[32][32] __attribute__((aligned(64)));
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < n; j++) {
            u32 x = fragment_code(w, places + nd + na + nb, in_bits, rows, n, i, j);
            c[i][j] = half_c ? as_u32(f16_to_f32(x)) : x;
        }
    int ld = dot_ld(n);
    for (int j = 0; j < n; j++)
        for (int i = 0; i < words; i++)  /* B's fragment is stored as its transpose, n by k */
            dot_tile.raw_b[i * ld + j] = fragment_code(w, places + nd + na, bits, n, words, j, i);
    for (int first = 0; first < rows; first += DOT_ROWS) {
        Dot d = {.a = op->width, .b = op->vector, .result = result, .rows = rows < 16 ? rows : 16, .n = n,
                 .k = k, .saturate = op->flags & MMA_SATURATE, .c = c[first], .ldc = 32};
        for (int i = 0; i < d.rows; i++)
            for (int j = 0; j < words; j++)
                dot_tile.raw_a[i][j] = fragment_code(w, places + nd, bits, rows, words, first + i, j);
        mma_arithmetic(m, &d, false);
        if (d.a == B1) dot_bits(&d, op->flags & MMA_XOR);
        else dot(&d, false);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < n; j++) {
            int at = i * n + j;
            u32 x = out_bits == 16 ? f32_to_f16(as_f32(c[i][j])) : c[i][j];
            if (mask >> at / run & 1) item_put(w, places, out_bits, at % run, at / run, x);
        }
    m->launch.counters[op->source].flops += 2ull * (u64)rows * (u64)n * (u64)k;
    return NEXT;
}

/* wmma.mma of f64, m8n8k4: list = D, A, B, C in 64-bit registers. */
HANDLER(wmma_mma_f64) {
    const i32 *places = m->launch.lists + op->list;
    f64 out[8][8];
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) {
            int at = i * 8 + j;
            f64 sum = rf64(w, places[4 + at % 2])[at / 2];
            for (int k = 0; k < 4; k++)
                sum = fma(rf64(w, places[2])[i * 4 + k], rf64(w, places[3])[j * 4 + k], sum);
            out[i][j] = sum;
        }
    for (int r = 0; r < 2; r++) {
        u64 words[LANES];
        EACH words[l] = as_u64(out[(2 * l + r) / 8][(2 * l + r) % 8]);
        put64(w, places[r], words, mask);
    }
    m->launch.counters[op->source].flops += 2ull * 8 * 8 * 4;
    return NEXT;
}
