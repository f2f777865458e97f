// Vectors of W float32 lanes and what kernels do with them; W, HAVE_FMA, HAVE_F16C and AVX512 are defined ahead.
//
// Every number in memory is loaded into lanes of float32 (vf) or int32 (vi) and stored from there, by functions
// named after the dtype: load_bf16(p), load_n_bf16(p, n) for the first n lanes (the others are 0),
// store_bf16(p, v), store_n_bf16(p, v, n), one_bf16(p) for a single element as a scalar, and round_bf16(v), the
// nearest bfloat16 as float32. A boolean is a vi of 0 and -1. Nothing here calls a library.

#define INLINE static inline __attribute__((always_inline, unused))
#define VECTOR(type, count) type __attribute__((ext_vector_type(count)))
typedef unsigned char u8; typedef signed char s8; typedef unsigned short u16; typedef short s16;
typedef unsigned int u32; typedef int s32; typedef long long s64; typedef unsigned long long u64;
typedef VECTOR(float, W) vf; typedef VECTOR(s32, W) vi; typedef VECTOR(u32, W) vu;
typedef VECTOR(u16, W) vh; typedef VECTOR(s16, W) vsh; typedef VECTOR(u8, W) vb; typedef VECTOR(s8, W) vsb;
#define ANYWHERE(name, type) typedef type name __attribute__((aligned(1), may_alias))
ANYWHERE(vf_u, vf); ANYWHERE(vi_u, vi); ANYWHERE(vh_u, vh); ANYWHERE(vsh_u, vsh); ANYWHERE(vb_u, vb);
ANYWHERE(vsb_u, vsb);

INLINE vf as_f(vi x) { return (vf)x; }
INLINE vi as_i(vf x) { return (vi)x; }
INLINE vu as_u(vf x) { return (vu)x; }
INLINE vf to_f(vi x) { return __builtin_convertvector(x, vf); }
INLINE vf pick(vi mask, vf yes, vf no) { return as_f((mask & as_i(yes)) | (~mask & as_i(no))); }
INLINE vi pick_i(vi mask, vi yes, vi no) { return (mask & yes) | (~mask & no); }
// Towards zero; -2^31 for NaN and what int32 does not hold, which C leaves undefined, and x86's instruction does not
#if defined(__x86_64__) && W == 16 && AVX512
INLINE vi to_i(vf x) { return (vi)__builtin_ia32_cvttps2dq512_mask((vf)x, (vi)0, (u16)0xffff, 4); }
#elif defined(__x86_64__) && W == 8 && HAVE_FMA
INLINE vi to_i(vf x) { return (vi)__builtin_ia32_cvttps2dq256(x); }
#elif defined(__x86_64__) && W == 4
INLINE vi to_i(vf x) { return (vi)__builtin_ia32_cvttps2dq(x); }
#else
INLINE vi to_i(vf x) {
  vi held = (x >= -0x1p31f) & (x < 0x1p31f);
  return pick_i(held, __builtin_convertvector(pick(held, x, (vf)0.f), vi), (vi)(-0x7fffffff - 1));
}
#endif
// the same for 32 bits without a sign: 0 from 2^32 on
INLINE vi to_u(vf x) { return pick_i(x >= 0x1p31f, to_i(x - 0x1p31f) ^ (-0x7fffffff - 1), to_i(x)); }
#if HAVE_FMA
INLINE vf fma_(vf a, vf b, vf c) { return __builtin_elementwise_fma(a, b, c); }
#else
INLINE vf fma_(vf a, vf b, vf c) { return a * b + c; }
#endif
INLINE vf max_(vf a, vf b) { return pick(a > b, a, b); }   // b where either is NaN
INLINE vf min_(vf a, vf b) { return pick(a < b, a, b); }
INLINE vf abs_(vf a) { return as_f(as_i(a) & 0x7fffffff); }
INLINE vf sqrt_(vf a) { return __builtin_elementwise_sqrt(a); }
// to the nearest integer, ties to even
#if defined(__x86_64__) && W == 16 && AVX512
INLINE vf round_(vf a) { return (vf)__builtin_ia32_rndscaleps_mask(a, 8, a, (u16)0xffff, 4); }
#elif defined(__x86_64__) && W == 8 && HAVE_FMA
INLINE vf round_(vf a) { return (vf)__builtin_ia32_roundps256(a, 8); }
#else
INLINE vf round_(vf a) {
  vf x = abs_(a), n = pick(x < 0x1p23f, (x + 0x1p23f) - 0x1p23f, x);
  return as_f(as_i(n) | (as_i(a) & (s32)0x80000000));
}
#endif
INLINE vi iota_(void) { vi x; for (int i = 0; i < W; i++) x[i] = i; return x; }

// The sum of all lanes, halves added to halves: the same order whatever the processor.
INLINE float sum_(vf x) {
#if W == 16
  VECTOR(float, 8) h = x.lo + x.hi; VECTOR(float, 4) q = h.lo + h.hi;
#elif W == 8
  VECTOR(float, 4) q = x.lo + x.hi;
#else
  VECTOR(float, 4) q = x;
#endif
  VECTOR(float, 2) p = q.lo + q.hi;
  return p.x + p.y;
}
// The sums of four vectors, each in the order of sum_.
typedef VECTOR(float, 4) vf4;
INLINE vf4 quarter_(vf x) {
#if W == 16
  VECTOR(float, 8) h = x.lo + x.hi; return h.lo + h.hi;
#elif W == 8
  return x.lo + x.hi;
#else
  return x;
#endif
}
INLINE vf4 sum4_(vf a, vf b, vf c, vf d) {
  vf4 p = quarter_(a), q = quarter_(b), r = quarter_(c), s = quarter_(d);
  vf4 ab = __builtin_shufflevector(p, q, 0, 1, 4, 5) + __builtin_shufflevector(p, q, 2, 3, 6, 7);
  vf4 cd = __builtin_shufflevector(r, s, 0, 1, 4, 5) + __builtin_shufflevector(r, s, 2, 3, 6, 7);
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}
INLINE float top_(vf x) {
  float best = x[0];
  for (int i = 1; i < W; i++) best = x[i] > best ? x[i] : best;
  return best;
}
INLINE s32 sum_i(vi x) { s32 s = 0; for (int i = 0; i < W; i++) s += x[i]; return s; }

// **** dtypes ****

INLINE vf wide_bf16(vh x) { return as_f(__builtin_convertvector(x, vi) << 16); }
// to the nearest, ties to even: half of the last place is added, less one bit where the place is even
INLINE vh narrow_bf16(vf x) {
  vu bits = as_u(x), up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vi nan = x != x;
  return __builtin_convertvector((vu)pick_i(nan, (vi)((bits >> 16) | 64), (vi)up), vh);
}
#if HAVE_F16C
typedef VECTOR(_Float16, W) vhalf;
INLINE vf wide_f16(vh x) { return __builtin_convertvector((vhalf)x, vf); }
INLINE vh narrow_f16(vf x) { return (vh)__builtin_convertvector(x, vhalf); }
#else
INLINE vf wide_f16(vh x) {
  vi bits = __builtin_convertvector(x, vi), sign = (bits & 0x8000) << 16, rest = (bits & 0x7fff) << 13;
  vf value = as_f(rest) * 0x1p112f;               // the exponent's bias, subnormal numbers too
  vi special = (bits & 0x7c00) == 0x7c00;
  return as_f(sign | pick_i(special, rest | 0x7f800000, as_i(value)));
}
INLINE vh narrow_f16(vf x) {
  vi bits = as_i(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  // normal numbers: round at bit 13; subnormal ones: the addition of a half rounds at 2^-24
  vi normal = (rest + 0xfff + ((rest >> 13) & 1) - (112 << 23)) >> 13;
  vi small = as_i(as_f(rest) + 0.5f) - 0x3f000000;
  vi value = pick_i(rest < 0x38800000, small, pick_i(rest >= 0x47800000, (vi)0x7c00, normal));
  value = pick_i(rest > 0x7f800000, (vi)0x7e00 | ((bits >> 13) & 0x3ff), value);
  return __builtin_convertvector(sign | value, vh);
}
#endif
// e4m3fn: 1 sign, 4 exponent (bias 7), 3 mantissa; 0x7f is NaN, there are no infinities
INLINE vf wide_e4m3(vb x) {
  vi bits = __builtin_convertvector(x, vi), sign = (bits & 0x80) << 24, rest = bits & 0x7f;
  vf value = as_f(rest << 20) * 0x1p120f;
  return as_f(sign | pick_i(rest == 0x7f, (vi)0x7fc00000, as_i(value)));
}
INLINE vf wide_e5m2(vb x) { return wide_f16(__builtin_convertvector(x, vh) << (u16)8); }
// 8-bit floats saturate: too large becomes the largest; MANTISSA bits, smallest normal exponent LOW, largest MOST
#define NARROW8(name, MANTISSA, LOW, MOST, NAN8, SHIFT, BIAS) \
INLINE vb narrow_##name(vf x) { \
  vi bits = as_i(x), sign = (bits >> 24) & 0x80, rest = bits & 0x7fffffff; \
  vi nan = rest > 0x7f800000; \
  vf kept = min_(as_f(rest), (vf)(MOST)); \
  vi magnitude = as_i(kept); \
  vi normal = (magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1) - ((BIAS) << 23)) >> SHIFT; \
  vf step = (vf)(LOW); /* 2^23 times the smallest subnormal: an addition rounds to it */ \
  vi small = as_i(kept + step) - as_i(step); \
  vi value = pick_i(magnitude < ((BIAS) + 1) << 23, small, normal); \
  return __builtin_convertvector(sign | pick_i(nan, (vi)(NAN8), value), vb); \
}
NARROW8(e4m3, 3, 0x1p14f, 448.f, 0x7f, 20, 120)
NARROW8(e5m2, 2, 0x1p7f, 57344.f, 0x7e, 21, 112)

// some_T(p, n): the first n elements, the others 0 and not read; keep_T(p, x, n) writes the first n alone
#if AVX512
INLINE u16 first_(s64 n) { return (u16)(n >= W ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }
#define SOME(vector, element, move) \
INLINE vector some_##vector(const element *p, s64 n) { \
  vector x; \
  __asm__(move " %2, %0%{%1%}%{z%}" : "=v"(x) : "Yk"(first_(n)), "m"(*(const vector##_u *)p)); \
  return x; \
} \
INLINE void keep_##vector(element *p, vector x, s64 n) { \
  __asm__(move " %2, %0%{%1%}" : "+m"(*(vector##_u *)p) : "Yk"(first_(n)), "v"(x)); \
}
#else
#define SOME(vector, element, move) \
INLINE vector some_##vector(const element *p, s64 n) { \
  if (n >= W) return *(const vector##_u *)p; \
  vector x = (vector)0; \
  for (s64 i = 0; i < n; i++) x[i] = p[i]; \
  return x; \
} \
INLINE void keep_##vector(element *p, vector x, s64 n) { \
  if (n >= W) { *(vector##_u *)p = x; return; } \
  for (s64 i = 0; i < n; i++) p[i] = x[i]; \
}
#endif
SOME(vf, float, "vmovups") SOME(vi, s32, "vmovdqu32") SOME(vh, u16, "vmovdqu16") SOME(vb, u8, "vmovdqu8")

#define LOADS(name, wide, element, vector, any, in, out) \
INLINE wide load_##name(const element *p) { vector x = *(const vector##_u *)p; return in; } \
INLINE wide load_n_##name(const element *p, s64 n) { \
  vector x = (vector)some_##any((const void *)p, n); \
  return in; \
} \
INLINE void store_##name(element *p, wide v) { *(vector##_u *)p = out; } \
INLINE void store_n_##name(element *p, wide v, s64 n) { vector x = out; keep_##any((void *)p, (any)x, n); }
LOADS(f32, vf, float, vf, vf, x, v)
LOADS(bf16, vf, u16, vh, vh, wide_bf16(x), narrow_bf16(v))
LOADS(f16, vf, u16, vh, vh, wide_f16(x), narrow_f16(v))
LOADS(e4m3, vf, u8, vb, vb, wide_e4m3(x), narrow_e4m3(v))
LOADS(e5m2, vf, u8, vb, vb, wide_e5m2(x), narrow_e5m2(v))
LOADS(s32, vi, s32, vi, vi, x, v)
LOADS(u32, vi, u32, vi, vi, x, v)
#define WIDE(vector) __builtin_convertvector(x, vi)
LOADS(s16, vi, s16, vsh, vh, WIDE(x), __builtin_convertvector(v, vsh))
LOADS(u16, vi, u16, vh, vh, WIDE(x), __builtin_convertvector(v, vh))
LOADS(s8, vi, s8, vsb, vb, WIDE(x), __builtin_convertvector(v, vsb))
LOADS(u8, vi, u8, vb, vb, WIDE(x), __builtin_convertvector(v, vb))
LOADS(bool, vi, u8, vb, vb, WIDE(x) != 0, __builtin_convertvector(v & 1, vb))

#if HAVE_BF16
// 2 W elements as pairs; c + a b of both elements of each pair, where subnormal numbers are 0
INLINE vi load_pairs(const u16 *p) { return *(const vi_u *)p; }
INLINE vi load_n_pairs(const u16 *p, s64 n) {
  u32 mask = n >= 2 * W ? ~0u : (1u << n) - 1;
  vi x;
  __asm__("vmovdqu16 %2, %0%{%1%}%{z%}" : "=v"(x) : "Yk"(mask), "m"(*(const vi_u *)p));
  return x;
}
INLINE vf dot_pairs(vf c, vi a, vi b) { __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b)); return c; }
#endif

INLINE vf round_f32(vf x) { return x; }
INLINE vf round_bf16(vf x) { return wide_bf16(narrow_bf16(x)); }
INLINE vf round_f16(vf x) { return wide_f16(narrow_f16(x)); }
INLINE vf round_e4m3(vf x) { return wide_e4m3(narrow_e4m3(x)); }
INLINE vf round_e5m2(vf x) { return wide_e5m2(narrow_e5m2(x)); }
INLINE vi round_s32(vi x) { return x; }
INLINE vi round_u32(vi x) { return x; }
INLINE vi round_s16(vi x) { return x << 16 >> 16; }
INLINE vi round_u16(vi x) { return x & 0xffff; }
INLINE vi round_s8(vi x) { return x << 24 >> 24; }
INLINE vi round_u8(vi x) { return x & 0xff; }

INLINE float one_f32(const float *p) { return *p; }
INLINE float one_bf16(const u16 *p) { union { u32 i; float f; } x = {(u32)*p << 16}; return x.f; }
INLINE float one_f16(const u16 *p) { return wide_f16((vh)*p)[0]; }
INLINE float one_e4m3(const u8 *p) { return wide_e4m3((vb)*p)[0]; }
INLINE float one_e5m2(const u8 *p) { return wide_e5m2((vb)*p)[0]; }
#define ONE(name, element) INLINE s32 one_##name(const element *p) { return (s32)*p; }
ONE(s32, s32) ONE(u32, u32) ONE(s16, s16) ONE(u16, u16) ONE(s8, s8) ONE(u8, u8)
INLINE s32 one_bool(const u8 *p) { return *p ? -1 : 0; }

// **** functions ****

// 2^x = 2^n 2^f with f in [-1/2, 1/2]: a polynomial of degree 6 (relative error 2^-25 before rounding), scaled in
// two steps so that results below 2^-126 are rounded once more and none overflows early; within 1 ulp
INLINE vf exp2_poly(vf f) {
  vf p = fma_((vf)1.535336188319500e-4f, f, (vf)1.339887440266574e-3f);
  p = fma_(p, f, (vf)9.618437357674640e-3f); p = fma_(p, f, (vf)5.550332471162809e-2f);
  p = fma_(p, f, (vf)2.402264791363012e-1f); p = fma_(p, f, (vf)6.931472028550421e-1f);
  return fma_(p, f, (vf)1.f);
}
// x + 1.5 2^23 has the nearest integer of x in its lowest bits
#define NEAREST 0x1.8p23f
INLINE vf exp2_(vf x) {
  vf kept = min_((vf)160.f, max_((vf)-160.f, x));
  vf n = kept + NEAREST;
  vi i = as_i(n) - as_i((vf)NEAREST), half = i >> 1;
  vf y = exp2_poly(kept - (n - NEAREST)) * as_f((half + 127) << 23) * as_f((i - half + 127) << 23);
  return pick(x != x, x, y);
}
// 2^x of numbers that are at most about 1, as in a softmax: 0 below 2^-126. A NaN, whose lowest bits are added
// to an exponent as they are, is returned by the maximum
INLINE vf exp2_small(vf x) {
  vf kept = max_((vf)-126.5f, x);
  vf n = kept + NEAREST;
  vf y = as_f(as_i(exp2_poly(kept - (n - NEAREST))) + (as_i(n) << 23));
  return pick(x >= -126.f, y, max_((vf)0.f, x));
}
// log2 x = e + log2 m with m in [sqrt 1/2, sqrt 2): 2 atanh((m-1)/(m+1)) / ln 2; within 3 ulp
INLINE vf log2_(vf x) {
  vi tiny = x < 0x1p-126f;
  vf scaled = pick(tiny, x * 0x1p24f, x);
  vi bits = as_i(scaled), e = ((bits - 0x3f3504f3) >> 23);
  vf m = as_f(bits - (e << 23));
  vf s = (m - 1.f) / (m + 1.f), t = s * s;
  vf p = fma_((vf)0.2546f, t, (vf)0.3206055f);
  p = fma_(p, t, (vf)0.41219827f); p = fma_(p, t, (vf)0.57707752f); p = fma_(p, t, (vf)0.96179670f);
  vf y = fma_(p * t, s, s * 2.8853901f) + to_f(e - (tiny & 24));
  y = pick(x == 0.f, (vf)-__builtin_inff(), y);
  y = pick(x < 0.f, (vf)__builtin_nanf(""), y);
  return pick((x != x) | (x == __builtin_inff()), x, y);
}

// **** elements that do not lie side by side ****

#define STRIDED(name, wide, element) \
INLINE wide strided_##name(const element *p, s64 stride, s64 n) { \
  wide x = (wide)0; \
  for (s64 i = 0; i < W; i++) if (i < n) x[i] = one_##name(p + i * stride); \
  return x; \
} \
INLINE void scatter_##name(element *p, s64 stride, wide v, s64 n) { \
  element x[W]; \
  store_##name(x, v); \
  for (s64 i = 0; i < W; i++) if (i < n) p[i * stride] = x[i]; \
}
STRIDED(f32, vf, float) STRIDED(bf16, vf, u16) STRIDED(f16, vf, u16) STRIDED(e4m3, vf, u8) STRIDED(e5m2, vf, u8)
STRIDED(s32, vi, s32) STRIDED(u32, vi, u32) STRIDED(s16, vi, s16) STRIDED(u16, vi, u16) STRIDED(s8, vi, s8)
STRIDED(u8, vi, u8) STRIDED(bool, vi, u8)

// The transposition of W vectors of W lanes, x, in place: within 4 lanes, then of the blocks of 4
#define PICK(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#if W == 4
#define LOW(x, y) PICK(x, y, 0, 4, 1, 5)
#define HIGH(x, y) PICK(x, y, 2, 6, 3, 7)
#define LOW2(x, y) PICK(x, y, 0, 1, 4, 5)
#define HIGH2(x, y) PICK(x, y, 2, 3, 6, 7)
#elif W == 8
#define LOW(x, y) PICK(x, y, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(x, y) PICK(x, y, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW2(x, y) PICK(x, y, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH2(x, y) PICK(x, y, 2, 3, 10, 11, 6, 7, 14, 15)
#else
#define LOW(x, y) PICK(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(x, y) PICK(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW2(x, y) PICK(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(x, y) PICK(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN(x, y) PICK(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD(x, y) PICK(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#endif
INLINE void transpose(vi *x) {
  vi y[W];
#pragma clang loop unroll(full)
  for (int g = 0; g < W; g += 4) {
    vi a = LOW(x[g], x[g + 1]), b = LOW(x[g + 2], x[g + 3]);
    vi c = HIGH(x[g], x[g + 1]), d = HIGH(x[g + 2], x[g + 3]);
    y[g] = LOW2(a, b); y[g + 1] = HIGH2(a, b); y[g + 2] = LOW2(c, d); y[g + 3] = HIGH2(c, d);
  }
#pragma clang loop unroll(full)
  for (int j = 0; j < 4; j++) {
#if W == 4
    x[j] = y[j];
#elif W == 8
    x[j] = PICK(y[j], y[4 + j], 0, 1, 2, 3, 8, 9, 10, 11);
    x[4 + j] = PICK(y[j], y[4 + j], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    vi a = EVEN(y[j], y[4 + j]), b = EVEN(y[8 + j], y[12 + j]);
    vi c = ODD(y[j], y[4 + j]), d = ODD(y[8 + j], y[12 + j]);
    x[j] = EVEN(a, b); x[4 + j] = EVEN(c, d); x[8 + j] = ODD(a, b); x[12 + j] = ODD(c, d);
#endif
  }
}
