/* mma.m8n8k4 of f16: four products of 8 x 8 x 4, one for each pair of quads (lanes 4q .. 4q+3 and 16+4q .. 16+4q+3), as
 * Volta had it; later chips take it for old code. Products are exact, summed in f64 and rounded once to nearest.
 * Fragments are those of the PTX manual, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type".
 *
 * Op: list = D, A, B, C; flags below.
 */
#include "core.h"
#include "formats.h"

enum { QUAD_A_COL = 1, QUAD_B_ROW = 2, QUAD_D_F32 = 4, QUAD_C_F32 = 8 };

static f64 quad_half(const Warp *w, const i32 *places, int i, int lane) {
    return f16_to_f32((u16)(r32(w, places[i / 2])[lane] >> 16 * (i % 2)));
}

/* Row and column of element i of C or D in a lane. */
static void quad_place(int lane, int i, bool wide, int *row, int *column) {
    *row = wide ? (lane & 1) + (i & 2) : lane & 3;
    if (lane >= 16) *row += 4;
    *column = wide ? (i & 4) + (lane & 2) + (i & 1) : i;
}

static void quad_products(const Warp *w, const Op *op, const i32 *a, const i32 *b, const i32 *c, int q, f64 out[8][8]) {
    f64 left[8][4], right[4][8];
    for (int t = 0; t < 8; t++) {
        int lane = 4 * q + (t & 3) + (t >= 4 ? 16 : 0), half = t >= 4 ? 4 : 0;
        for (int i = 0; i < 4; i++) {
            int row = op->flags & QUAD_A_COL ? i + half : (t & 3) + half;
            left[row][op->flags & QUAD_A_COL ? t & 3 : i] = quad_half(w, a, i, lane);
            int column = op->flags & QUAD_B_ROW ? i + half : (t & 3) + half;
            right[op->flags & QUAD_B_ROW ? t & 3 : i][column] = quad_half(w, b, i, lane);
        }
        for (int i = 0; i < 8; i++) {
            int row, column;
            quad_place(lane, i, op->flags & QUAD_C_F32, &row, &column);
            out[row][column] = op->flags & QUAD_C_F32 ? rf32(w, c[i])[lane] : quad_half(w, c, i, lane);
        }
    }
    for (int row = 0; row < 8; row++)
        for (int column = 0; column < 8; column++)
            for (int x = 0; x < 4; x++) out[row][column] += left[row][x] * right[x][column];
}

HANDLER(mma_quad) {
    const i32 *places = m->launch.lists + op->list;
    bool wide = op->flags & QUAD_D_F32;
    int words = wide ? 8 : 4;
    u32 d[8][LANES] = {{0}};
    for (int q = 0; q < 4; q++) {
        f64 out[8][8];
        quad_products(w, op, places + words, places + words + 2, places + words + 4, q, out);
        for (int t = 0; t < 8; t++) {
            int lane = 4 * q + (t & 3) + (t >= 4 ? 16 : 0);
            for (int i = 0; i < 8; i++) {
                int row, column;
                quad_place(lane, i, wide, &row, &column);
                f32 value = (f32)out[row][column];
                if (wide) memcpy(&d[i][lane], &value, 4);
                else d[i / 2][lane] |= (u32)f64_to_f16(out[row][column], RN) << 16 * (i % 2);
            }
        }
    }
    for (int i = 0; i < words; i++) put32(w, places[i], d[i], mask);
    m->launch.counters[op->source].flops += 4 * 2ull * 8 * 8 * 4;
    return NEXT;
}
