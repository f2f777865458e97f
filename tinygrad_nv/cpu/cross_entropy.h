// Rows of logits on a CPU, over vector.h: what an element is, and sums over a row. DIVISOR, and CAP where there is
// a soft-cap, are defined ahead.

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define LEAST (-0x1.fffffep127f)

// (1 - e) / (1 + e) with e = exp(-2 |x|) loses digits of small x: a series there, to x^9 (relative error 1e-8)
INLINE vf tanh_(vf x) {
  vf e = exp2_small(abs_(x) * (-2.f * LOG2E)), far = (1.f - e) / (1.f + e);
  vf t = x * x, p = fma_((vf)0.021869488f, t, (vf)-0.053968254f);
  p = fma_(p, t, (vf)0.13333333f); p = fma_(p, t, (vf)-0.33333333f);
  vf near = fma_(p * t, x, x);
  vf signed_far = as_f(as_i(far) | (as_i(x) & (s32)0x80000000));
  return pick(abs_(x) < 0.25f, near, signed_far);
}

// x of logits, and dx / dl at x
#ifdef CAP
INLINE vf value_(vf l) { return tanh_(l / (CAP * DIVISOR)) * CAP; }
INLINE vf slope_(vf x) { vf kept = x * (1.f / CAP); return (1.f - kept * kept) * (1.f / DIVISOR); }
#elif DIVIDED
INLINE vf value_(vf l) { return l / DIVISOR; }
INLINE vf slope_(vf x) { return (vf)(1.f / DIVISOR); }
#else
INLINE vf value_(vf l) { return l; }
INLINE vf slope_(vf x) { return (vf)1.f; }
#endif

INLINE vf exp_(vf x) { return exp2_small(x * LOG2E); }
INLINE float log_(float x) { return (log2_((vf)x) * LN2)[0]; }
// of four vectors of sums
INLINE float sums_(const vf *s) { return sum_((s[0] + s[1]) + (s[2] + s[3])); }

// A vector of a row at p: all W of it, or its first n; what lies beyond counts as 0, of a maximum as nothing
#define OF(name, element) \
INLINE vf get_##name(const element *p, int whole, s64 n) { if (whole) return load_##name(p); return load_n_##name(p, n); } \
INLINE void put_##name(element *p, vf v, int whole, s64 n) { \
  if (whole) store_##name(p, v); else store_n_##name(p, v, n); \
} \
INLINE vf one_of_##name(const element *p) { return (vf)one_##name(p); }
OF(f32, float) OF(bf16, u16) OF(f16, u16)
INLINE vf inside(vf v, int whole, s64 n, float other) {
  if (whole) return v;
  return pick(iota_() < (s32)(n < W ? n : W), v, (vf)other);
}
