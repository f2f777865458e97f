// Units of packed operands. W and what vector.h defines are there.
//
// A unit is 32 bits, what a lane multiplies in one step: a float32 (fma), a pair of bfloat16 along k (pair), or
// four bytes along k (quad), of which a's and b's differ in sign. dot_…(c, a, b) adds products to c.

#define NOINLINE static __attribute__((noinline, unused))
typedef u32 __attribute__((may_alias)) word;   // units of a, which may lie where floats were stored
typedef VECTOR(s32, 16) v16; typedef VECTOR(s32, 8) v8; typedef VECTOR(s32, 4) v4;

INLINE vf dot_fma(vf c, vi a, vi b) { return fma_(as_f(a), as_f(b), c); }
INLINE vf dot_pair(vf c, vi a, vi b) {
#if HAVE_BF16
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
#else
  c = fma_(as_f(a & (s32)0xffff0000), as_f(b & (s32)0xffff0000), c);
  return fma_(as_f(a << 16), as_f(b << 16), c);
#endif
}
// AVX-VNNI's has the name of AVX-512's
#if AVX512
#define VPDPBUSD "vpdpbusd"
#define REGISTER "v"
#else
#define VPDPBUSD "%{vex%} vpdpbusd"
#define REGISTER "x"   // VEX reaches 16, of the 32 that a processor with AVX-512 has, too
#endif
// of a byte without a sign (`free`) and one with
INLINE vi dot_quad(vi c, vi free, vi with) {
#if HAVE_VNNI
  __asm__(VPDPBUSD " %2, %1, %0" : "+" REGISTER(c) : REGISTER(free), REGISTER(with));
  return c;
#else
  for (int i = 0; i < 32; i += 8) c += ((free >> i) & 0xff) * (with << (24 - i) >> 24);
  return c;
#endif
}
#if W == 16
// The sums of 16 vectors, in their order: of neighbouring lanes, then of the blocks of 4
INLINE vf add_lanes(vf x, vf y) { return LOW(x, y) + HIGH(x, y); }
INLINE vf add_pairs(vf x, vf y) { return LOW2(x, y) + HIGH2(x, y); }
INLINE vf add_blocks(vf x, vf y) { return EVEN(x, y) + ODD(x, y); }
INLINE vf sum16_(vf a, vf b, vf c, vf d, vf e, vf f, vf g, vf h, vf i, vf j, vf k, vf l, vf m, vf n, vf o, vf p) {
  vf q = add_pairs(add_lanes(a, b), add_lanes(c, d)), r = add_pairs(add_lanes(e, f), add_lanes(g, h));
  vf s = add_pairs(add_lanes(i, j), add_lanes(k, l)), t = add_pairs(add_lanes(m, n), add_lanes(o, p));
  return add_blocks(add_blocks(q, r), add_blocks(s, t));
}
#endif
