// Functions of programs in the tile language. W and what vector.h defines are there.

INLINE vi quotient_i(vi a, vi b) {
  vi r;
  for (int l = 0; l < W; l++) r[l] = b[l] == 0 ? 0 : b[l] == -1 ? (s32)(0u - (u32)a[l]) : a[l] / b[l];
  return r;
}
INLINE vu quotient_u(vu a, vu b) {
  vu r;
  for (int l = 0; l < W; l++) r[l] = b[l] == 0 ? 0 : a[l] / b[l];
  return r;
}
INLINE vi remainder_i(vi a, vi b) { return pick_i(b == 0, (vi)0, a - quotient_i(a, b) * b); }
INLINE vu remainder_u(vu a, vu b) { return (vu)(b != 0u) & (a - quotient_u(a, b) * b); }
INLINE vi shift_left_i(vi a, vi b) { return ((vu)b < 32u) & (a << (b & 31)); }
INLINE vi shift_right_i(vi a, vi b) { return a >> pick_i((vi)((vu)b < 32u), b, (vi)31); }
INLINE vu shift_right_u(vu a, vu b) { return (vu)((vu)b < 32u) & (a >> (b & 31u)); }
INLINE vu funnel_left_u(vu low, vu high, vu by) { return high << (by & 31u) | low >> 1 >> (31u - (by & 31u)); }
INLINE s64 smaller(s64 a, s64 b) { return a < b ? a : b; }
INLINE s64 larger(s64 a, s64 b) { return a > b ? a : b; }
INLINE int any_(vi x) { return __builtin_reduce_or(x) != 0; }
// Elements of two vectors in turn: the first half of each, the second
#if W == 16
#define TURNS(i) i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19, i + 4, i + 20, i + 5, i + 21, i + 6, i + 22, i + 7, i + 23
#elif W == 8
#define TURNS(i) i, i + 8, i + 1, i + 9, i + 2, i + 10, i + 3, i + 11
#else
#define TURNS(i) i, i + 4, i + 1, i + 5
#endif
INLINE vi lows_(vi a, vi b) { return __builtin_shufflevector(a, b, TURNS(0)); }
INLINE vi highs_(vi a, vi b) { return __builtin_shufflevector(a, b, TURNS(W / 2)); }
// log x of normal numbers: log2 m + e with m in [3/4, 3/2), statement by statement as tinygrad's own kernels
INLINE vf log_normal(vf x) {
  vi small = x < 9.999999747378752e-05f;
  vf scaled = pick(small, x * 0x1p64f, x);
  vf thirds = scaled * 1.3333333730697632f;
  vi e = ((as_i(thirds) >> 23) & 255) - 127;
  vf m = as_f(as_i(scaled) - (e << 23));
  vf s = (m + -1.f) / (m + 1.f);
  vf t = s * s;
  vf whole = pick(small, to_f(e) + -64.f, to_f(e));
  vf y = ((((0.43745502829551697f * t + 0.5764790177345276f) * t) + 0.961801290512085f) * s * t) + whole
         + (s * 2.885390043258667f) + (s * 3.2734472910078694e-08f);
  return y * 0.6931471824645996f;
}
INLINE vi mul_high_i(vi a, vi b) {
  VECTOR(s64, W) p = __builtin_convertvector(a, VECTOR(s64, W)) * __builtin_convertvector(b, VECTOR(s64, W));
  return __builtin_convertvector(p >> 32, vi);
}
INLINE vu mul_high_u(vu a, vu b) {
  VECTOR(u64, W) p = __builtin_convertvector(a, VECTOR(u64, W)) * __builtin_convertvector(b, VECTOR(u64, W));
  return __builtin_convertvector(p >> 32, vu);
}
// sin x of |x| < 2^30: x = n pi + r, n the nearest integer, in float64; an odd polynomial of degree 11 of r in
// [-pi/2, pi/2], 2e-8 (Taylor's, the last factors fitted)
INLINE vf sin_(vf x) {
  typedef VECTOR(double, W) vd;
  vd d = __builtin_convertvector(x, vd), n = (d * 0.31830988618379067154 + 0x1.8p52) - 0x1.8p52;
  vf r = __builtin_convertvector(d - n * 3.14159265358979323846, vf), s = r * r;
  vf p = fma_((vf)-2.3889859e-8f, s, (vf)2.7525562e-6f);
  p = fma_(p, s, (vf)-1.98408743e-4f); p = fma_(p, s, (vf)8.33333096e-3f); p = fma_(p, s, (vf)-1.66666667e-1f);
  vf y = fma_(p * s, r, r);
  vi odd = __builtin_convertvector(n, vi) << 31;
  return pick(abs_(x) < 0x1p30f, as_f(as_i(y) ^ odd), (vf)__builtin_nanf(""));
}

// A row's elements first, first + 1, … below extent, `other` where there is none
#define WINDOW(name, wide, element, choose) \
INLINE wide window_##name(const element *row, s64 first, s64 extent, wide other) { \
  if (first >= 0) { \
    if (first + W <= extent) return load_##name(row + first); \
    if (first >= extent) return other; \
    return choose(iota_() < (s32)(extent - first), load_n_##name(row + first, extent - first), other); \
  } \
  wide x = other; \
  for (s64 l = 0; l < W; l++) if (first + l >= 0 && first + l < extent) x[l] = one_##name(row + first + l); \
  return x; \
} \
INLINE void put_window_##name(element *row, s64 first, s64 extent, wide x, s64 count) { \
  if (first >= extent) return; \
  if (first >= 0) { store_n_##name(row + first, x, first + count <= extent ? count : extent - first); return; } \
  element y[W]; \
  store_##name(y, x); \
  for (s64 l = 0; l < count; l++) if (first + l >= 0 && first + l < extent) row[first + l] = y[l]; \
}
#define FLOATS(name, element) WINDOW(name, vf, element, pick)
#define WHOLES(name, element) WINDOW(name, vi, element, pick_i)
FLOATS(f32, float) FLOATS(bf16, u16) FLOATS(f16, u16) FLOATS(e4m3, u8) FLOATS(e5m2, u8)
WHOLES(s32, s32) WHOLES(u32, u32) WHOLES(s16, s16) WHOLES(u16, u16) WHOLES(s8, s8) WHOLES(u8, u8) WHOLES(bool, u8)

// **** atomics: the element before ****

#define ATOMIC(fn, name, element, made) \
INLINE element atomic_##fn##_##name(element *p, element v) { \
  element old = __atomic_load_n(p, __ATOMIC_RELAXED), new; \
  do new = made; while (!__atomic_compare_exchange_n(p, &old, new, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); \
  return old; \
}
#define INTEGERS(name, element) \
ATOMIC(add, name, element, (element)((u32)old + (u32)v)) ATOMIC(max, name, element, old > v ? old : v) \
ATOMIC(min, name, element, old < v ? old : v) ATOMIC(and, name, element, old & v) \
ATOMIC(or, name, element, old | v) ATOMIC(xor, name, element, old ^ v) ATOMIC(exchange, name, element, v)
INTEGERS(s32, s32) INTEGERS(u32, u32)
INLINE float float_(u32 x) { union { u32 i; float f; } y = {x}; return y.f; }
INLINE u32 word_(float x) { union { float f; u32 i; } y = {x}; return y.i; }
INLINE float atomic_add_f32(float *p, float v) {
  u32 *at = (u32 *)p, old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(at, &old, word_(float_(old) + v), 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return float_(old);
}
INLINE float atomic_exchange_f32(float *p, float v) {
  return float_(__atomic_exchange_n((u32 *)p, word_(v), __ATOMIC_RELAXED));
}
