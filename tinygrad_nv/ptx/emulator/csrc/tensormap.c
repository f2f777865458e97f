/* Tensor maps: the 128 bytes decoded when an instruction uses them, and the instructions that edit them.
 *
 * Layout, as ptxas writes it for tensormap.replace (little-endian): 0x00 address; 0x08 bits 4-6 rank - 1,
 * 7-10 element type, 11-12 interleave, 13-14 swizzle, 15 fill; 0x0c + 4i stride of dimension i + 1 >> 4, its
 * upper 4 bits in nibble i of 0x1c; 0x20 + 4i dimension i - 1; 0x34 bits 3i element stride i - 1, bits 24-31
 * box 0 - 1; 0x38 + i - 1 box i - 1.
 * How hardware keeps the fields of im2col maps is not known. Here, in 16 bits each: 0x40 1, 0x42 channels,
 * 0x44 pixels, 0x48 and 0x50 the corners for W, H, D.
 */
#include "core.h"

enum { MAP_BYTES = 128, IM2COL = 16, MAX_PITCH = 256 * 8, MAX_BOX = 256 << 10 };
enum { FIELD_ADDRESS, FIELD_RANK, FIELD_TYPE, FIELD_INTERLEAVE, FIELD_SWIZZLE, FIELD_FILL, FIELD_DIM,
       FIELD_STRIDE, FIELD_STEP, FIELD_BOX };

/* Dimension 0 is the innermost; strides are bytes. */
typedef struct {
    u64 address, stride[5], dim[5], bytes;
    u32 rank, type, width, swizzle, fill;   /* swizzle: the address bits it flips, 7, 3, 1 or 0 */
    u32 box[5], step[5], count[5];          /* count: elements of the box, by their steps */
    u32 pitch, rows;                        /* a box in shared memory */
    bool im2col;
    i16 lower[3], upper[3];
    char wrong[96];                         /* what makes it no map, or empty */
} Map;

static u32 map_word(const u8 *raw, u32 at) {
    u32 x;
    memcpy(&x, raw + at, 4);
    return x;
}

/* Returns the rows of a box. */
static u64 decode_im2col(const u8 *raw, Map *map) {
    u16 counts[2];
    memcpy(counts, raw + 0x42, 4), memcpy(map->lower, raw + 0x48, 6), memcpy(map->upper, raw + 0x50, 6);
    map->box[0] = counts[0];
    return counts[1];
}

/* Decodes; `wrong` names the first field that cannot be. */
static void decode_map(const u8 *raw, Map *map) {
    u32 head = map_word(raw, 8), steps = map_word(raw, 0x34);
    u32 swizzle = head >> 13 & 3, interleave = head >> 11 & 3;
    u64 rows = 1;
    *map = (Map){.rank = (head >> 4 & 7) + 1, .type = head >> 7 & 15, .swizzle = (1u << swizzle) - 1,
                 .fill = head >> 15 & 1, .im2col = raw[0x40] == 1};
    memcpy(&map->address, raw, 8);
    if (map->rank > 5) { snprintf(map->wrong, sizeof map->wrong, "rank %u", map->rank); return; }
    if (map->type >= MAP_TYPES) {
        snprintf(map->wrong, sizeof map->wrong, "element type %u", map->type);
        return;
    }
    map->width = map_width[map->type];
    for (u32 i = 0; i < map->rank; i++) {
        u64 high = i ? map_word(raw, 0x1c) >> 4 * (i - 1) & 15 : 0;
        map->stride[i] = i ? (map_word(raw, 0x0c + 4 * (i - 1)) | high << 32) << 4 : map->width;
        map->dim[i] = map_word(raw, 0x20 + 4 * i) + 1ull;
        map->step[i] = (steps >> 3 * i & 7) + 1;
        map->box[i] = (i ? raw[0x38 + i - 1] : steps >> 24) + 1u;
        map->count[i] = i ? (map->box[i] + map->step[i] - 1) / map->step[i] : map->box[0];
        if (i) rows *= map->count[i];
    }
    if (map->im2col) rows = decode_im2col(raw, map);
    map->pitch = map->box[0] * map->width;
    map->bytes = rows * map->pitch;
    map->rows = (u32)rows;
    const char *wrong = !map->address ? "a global address of 0"
        : map->address % 16 ? "a global address that is not a multiple of 16"
        : interleave ? "an interleaved layout, which is not emulated"
        : map->pitch % 16 ? "an inner box dimension that is not a multiple of 16 bytes"
        : swizzle && map->pitch > 16u << swizzle ? "an inner box dimension wider than the swizzle"
        : map->fill && map->type < MAP_F16 ? "NaN as the fill of an integer type"
        : !map->bytes || map->pitch > MAX_PITCH ? "no pixels, no channels, or more than 256 of these"
        : map->bytes > MAX_BOX ? "a box larger than shared memory"
        : map->im2col && map->rank < 3 ? "im2col of rank less than 3" : "";
    snprintf(map->wrong, sizeof map->wrong, "%s", wrong);
}

/* The map at a generic address, for an instruction on a tensor of `vector` dimensions; false: reported. It is
 * read past the generic proxy, so that who writes one in global memory must pass a fence.proxy.tensormap; and until
 * `actor` has come to `clock`. */
static bool read_map(Machine *m, Warp *w, const Op *op, int lane, u64 address, u32 actor, u32 clock, Map *map) {
    Place p;
    if (!async_place(m, w, op, lane, GENERIC, address, MAP_BYTES, 64, READ, &p)) return false;
    Who who = {.warp = w, .op = op, .lane = lane, .actor = actor, .clock = clock, .async = 2};
    enter_access(m, &who, p.region, p.offset, MAP_BYTES, READ);
    decode_map(p.host, map);
    bool im2col = op->flags & IM2COL;
    if (!map->wrong[0] && map->rank != op->vector)
        snprintf(map->wrong, sizeof map->wrong, "rank %u for an instruction of %u dimensions", map->rank,
                 op->vector);
    else if (!map->wrong[0] && map->im2col != im2col)
        snprintf(map->wrong, sizeof map->wrong, "%s mode for an instruction of %s mode",
                 map->im2col ? "im2col" : "tiled", im2col ? "im2col" : "tiled");
    if (!map->wrong[0]) return true;
    report(m, OUT_OF_BOUNDS, op, w, lane, "the tensor map at 0x%llx has %s", (unsigned long long)address,
           map->wrong);
    return false;
}

/* **** tensormap.replace **** */

/* Where a field lies: byte offset of its 32-bit word, first bit, bits. */
static void map_field(int field, u32 ordinal, u32 *at, u32 *bit, u32 *bits) {
    static const u8 in_head[][2] = {[FIELD_RANK] = {4, 3}, [FIELD_TYPE] = {7, 4},
                                    [FIELD_INTERLEAVE] = {11, 2}, [FIELD_SWIZZLE] = {13, 2},
                                    [FIELD_FILL] = {15, 1}};
    *bit = 0, *bits = 32;
    switch (field) {
    case FIELD_DIM: *at = 0x20 + 4 * ordinal; return;
    case FIELD_STRIDE: *at = 0x0c + 4 * ordinal; return;
    case FIELD_STEP: *at = 0x34, *bit = 3 * ordinal, *bits = 3; return;
    case FIELD_BOX:
        *at = ordinal ? 0x38 : 0x34, *bit = ordinal ? 8 * (ordinal - 1) : 24, *bits = 8;
        return;
    default: *at = 8, *bit = in_head[field][0], *bits = in_head[field][1];
    }
}

/* Replaces bits of a word of the map, as ordinary loads and stores. */
static void replace_bits(Machine *m, Warp *w, const Op *op, int lane, u64 address, u32 bit, u32 bits,
                         u32 value) {
    u32 mask = (bits == 32 ? ~0u : (1u << bits) - 1) << bit, word = 0;
    u8 *host;
    if (bits < 32) {
        if (!(host = touch(m, w, op, lane, op->space, address, 4, 4, READ))) return;
        memcpy(&word, host, 4);
    }
    if (!(host = touch(m, w, op, lane, op->space, address, 4, 4, WRITE))) return;
    word = (word & ~mask) | (value << bit & mask);
    memcpy(host, &word, 4);
}

static void replace_field(Machine *m, Warp *w, const Op *op, int lane, u64 map, u64 value) {
    u32 at, bit, bits, ordinal = op->flags;
    bool less_one = op->more == FIELD_DIM || op->more == FIELD_STEP || op->more == FIELD_BOX;
    if (op->more == FIELD_ADDRESS) {
        replace_bits(m, w, op, lane, map, 0, 32, (u32)value);
        replace_bits(m, w, op, lane, map + 4, 0, 32, (u32)(value >> 32));
        return;
    }
    map_field(op->more, ordinal, &at, &bit, &bits);
    if (op->more == FIELD_STRIDE) {
        value >>= 4;
        replace_bits(m, w, op, lane, map + 0x1c, 4 * ordinal, 4, (u32)(value >> 32));
    }
    replace_bits(m, w, op, lane, map + at, bit, bits, (u32)(value - less_one));
    if (op->more == FIELD_SWIZZLE && value) replace_bits(m, w, op, lane, map + 8, 22, 1, 0);
}

/* tensormap.replace: `a` the map, b the value (u64), more the field, flags the ordinal. Lanes that name the
 * same map do the same, so that one is enough. */
HANDLER(tensormap_replace) {
    u64 address[LANES];
    u32 left = mask;
    addresses(w, op, address);
    while (left) {
        int lane = lowest(left);
        if (address[lane] % 64)
            report(m, MISALIGNED, op, w, lane, "a tensor map at 0x%llx, which is not a multiple of 64",
                   (unsigned long long)address[lane]);
        replace_field(m, w, op, lane, address[lane], r64(w, op->b)[lane]);
        EACH if (address[l] == address[lane]) left &= ~(1u << l);
    }
    return NEXT;
}

/* tensormap.cp_fenceproxy: the warp copies 128 bytes from shared (b) to global memory and releases them. */
HANDLER(tensormap_copy) {
    u64 to[LANES], offset;
    int lane = lowest(mask);
    Region *r;
    addresses(w, op, to);
    lanes_sync(m, w, mask);
    const u8 *from = touch(m, w, op, lane, SHARED, r64(w, op->b)[lane], MAP_BYTES, 64, READ);
    m->storing = from;
    u8 *host = touch(m, w, op, lane, GLOBAL, to[lane], MAP_BYTES, 64, WRITE);
    m->storing = NULL;
    if (!from || !host) return NEXT;
    memcpy(host, from, MAP_BYTES);
    if (locate(m, w, op, lane, GLOBAL, to[lane], MAP_BYTES, 64, &r, &offset))
        clock_location(m, w, r, offset, false, true, false, true, scope_of(op));
    lanes_sync(m, w, mask);
    happened(m, w->cta->cluster);
    return NEXT;
}

/* fence.proxy.tensormap::generic.acquire [a], 128: what was released with the map is known, and the map's
 * reader sees what this warp knows of global memory. Nothing is read: CUTLASS's warps with no map name 0. */
HANDLER(tensormap_acquire) {
    u64 address[LANES], offset;
    Region *r;
    addresses(w, op, address);
    u32 left = mask;
    while (left) {
        int lane = lowest(left);
        EACH if (address[l] == address[lane]) left &= ~(1u << l);
        if (!address[lane]) continue;
        if (locate(m, w, op, lane, GENERIC, address[lane], MAP_BYTES, 1, &r, &offset) && r)
            clock_location(m, w, r, offset, true, false, true, false, scope_of(op));
    }
    clock_fence(m, w, true, false, scope_of(op));
    clock_proxy_fence(m, w, false, true);
    return NEXT;
}
