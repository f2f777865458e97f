/* Sums of what several ranks have, in the order of ranks: every rank that adds up the same elements gets the
 * same bits. 16-bit floats are added in float32 and rounded once. */
enum { BLOCK = 2048 };  /* elements at a time: 8 KB of float32 stay in the first cache */

static inline float of_bf16(u16 x) { u32 bits = (u32)x << 16; float f; memcpy(&f, &bits, 4); return f; }

static inline u16 to_bf16(float f) {
  u32 bits;
  memcpy(&bits, &f, 4);
  u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded;  /* a NaN stays one */
}

static inline float of_f16(_Float16 x) { return (float)x; }
static inline _Float16 to_f16(float f) { return (_Float16)f; }

#define ADD(a, b) ((a) + (b))
/* as tinygrad's MAX: a NaN is kept */
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

#define PLAIN(NAME, T, COMBINE)                                                          \
  static void NAME(T *out, const void *const *in, u64 ranks, u64 begin, u64 end) {       \
    const T *first = in[0], *second = in[1];                                             \
    T sums[BLOCK], *to = out;                                                            \
    for (u64 r = 2; r < ranks; r++) if (in[r] == out) to = sums - begin;                 \
    for (u64 i = begin; i < end; i++) to[i] = COMBINE(first[i], second[i]);              \
    for (u64 r = 2; r < ranks; r++) {                                                    \
      const T *next = in[r];                                                             \
      for (u64 i = begin; i < end; i++) to[i] = COMBINE(to[i], next[i]);                 \
    }                                                                                    \
    if (to != out) memcpy(out + begin, sums, (end - begin) * sizeof(T));                 \
  }

#define ROUNDED(NAME, T, OF, TO, COMBINE)                                                \
  static void NAME(T *out, const void *const *in, u64 ranks, u64 begin, u64 end) {       \
    float sums[BLOCK];                                                                   \
    const T *first = in[0];                                                              \
    for (u64 i = begin; i < end; i++) sums[i - begin] = OF(first[i]);                    \
    for (u64 r = 1; r < ranks; r++) {                                                    \
      const T *next = in[r];                                                             \
      for (u64 i = begin; i < end; i++) sums[i - begin] = COMBINE(sums[i - begin], OF(next[i])); \
    }                                                                                    \
    for (u64 i = begin; i < end; i++) out[i] = TO(sums[i - begin]);                      \
  }

#define FUNCTIONS(MAKE, SUFFIX, ...)                                                     \
  MAKE(sum_##SUFFIX, __VA_ARGS__, ADD) MAKE(max_##SUFFIX, __VA_ARGS__, LARGER) MAKE(min_##SUFFIX, __VA_ARGS__, SMALLER)
#define ROW(SUFFIX) { (Combine)sum_##SUFFIX, (Combine)max_##SUFFIX, (Combine)min_##SUFFIX }

typedef void (*Combine)(void *, const void *const *, u64, u64, u64);
FUNCTIONS(PLAIN, f32, float) FUNCTIONS(PLAIN, f64, double)
FUNCTIONS(ROUNDED, bf16, u16, of_bf16, to_bf16) FUNCTIONS(ROUNDED, f16, _Float16, of_f16, to_f16)
FUNCTIONS(PLAIN, s8, int8_t) FUNCTIONS(PLAIN, u8, u8) FUNCTIONS(PLAIN, s16, int16_t) FUNCTIONS(PLAIN, u16, u16)
FUNCTIONS(PLAIN, s32, int32_t) FUNCTIONS(PLAIN, u32, u32) FUNCTIONS(PLAIN, s64, int64_t) FUNCTIONS(PLAIN, u64, u64)

static const Combine COMBINES[TYPES][OPS] = {
  ROW(f32), ROW(f64), ROW(bf16), ROW(f16), ROW(s8), ROW(u8), ROW(s16), ROW(u16), ROW(s32), ROW(u32), ROW(s64), ROW(u64)};

/* out[i] of in[0][i] … in[ranks - 1][i]; out may be one of them. */
void reduce(void *out, const void *const *in, u64 ranks, u64 count, u64 type, u64 op) {
  if (ranks == 1) { if (out != in[0]) memcpy(out, in[0], count * SIZES[type]); return; }
  for (u64 i = 0; i < count; i += BLOCK)
    COMBINES[type][op](out, in, ranks, i, i + BLOCK < count ? i + BLOCK : count);
}
