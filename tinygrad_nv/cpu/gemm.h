// Units of packed operands, and the transposition that packing needs. W and what vector.h defines are there.
//
// A unit is 32 bits, what a lane multiplies in one step: a float32 (fma), a pair of bfloat16 along k (pair), or
// four bytes along k (quad), of which a's and b's differ in sign. dot_…(c, a, b) adds products to c.

#define NOINLINE static __attribute__((noinline, unused))
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
// of a byte without a sign (`free`) and one with
INLINE vi dot_quad(vi c, vi free, vi with) {
#if HAVE_VNNI
  __asm__("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(free), "v"(with));
  return c;
#else
  for (int i = 0; i < 32; i += 8) c += ((free >> i) & 0xff) * (with << (24 - i) >> 24);
  return c;
#endif
}

// The transposition of W vectors of W units, x, in place: within 4 lanes, then of the blocks of 4
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
