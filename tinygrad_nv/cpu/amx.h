// Tiles of 16 rows of 64 bytes, and products of them. HAVE_AMX: the instructions; else the same in plain C.
//
// tile_dot(kind, c, a, b): c[m][n] += Σ_k a[m][k] · b[k][n], of pairs of bfloat16 or four bytes of which a's and
// b's have a sign (s) or none (u). TILES declares what stands for the registers; tiles_begin and tiles_end are
// around all of it. Names of tiles are numbers 0 … 7: 0 … 3 are c's, 4 and 5 a's, 6 and 7 b's. TILE_UNITS, where
// it is defined ahead, is how many units of 32 bits along k a's and b's have, else 16.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG, TDPBF16PS, TDPBSSD.

#ifndef TILE_UNITS
#define TILE_UNITS 16
#endif
#if HAVE_AMX
#define TILES
INLINE void tiles_begin(void) {
  u8 config[64] __attribute__((aligned(64))) = {1};                 // palette 1: 8 tiles of 1 KB
  for (int i = 0; i < 8; i++) {
    config[16 + 2 * i] = i / 2 == 2 ? 4 * TILE_UNITS : 64;          // bytes of a row
    config[48 + i] = i / 2 == 3 ? TILE_UNITS : 16;                  // rows
  }
  __asm__ volatile("ldtilecfg %0" :: "m"(config) : "memory");
}
INLINE void tiles_end(void) { __asm__ volatile("tilerelease" ::: "memory"); }
#define tile_zero(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define tile_load(t, p, bytes) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t :: "r"(p), "r"((s64)(bytes)) : "memory")
#define tile_store(t, p, bytes) \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" :: "r"(p), "r"((s64)(bytes)) : "memory")
#define tile_dot(kind, c, a, b) \
  __asm__ volatile("tdp" #kind " %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#else
typedef VECTOR(double, 16) vd16;
#define TILES vi tiles[8][16]
INLINE void tiles_begin(void) {}
INLINE void tiles_end(void) {}
#define tile_zero(t) for (int i_ = 0; i_ < 16; i_++) tiles[t][i_] = (vi)0
#define tile_load(t, p, bytes) \
  for (int i_ = 0; i_ < ((t) / 2 == 3 ? TILE_UNITS : 16); i_++) \
    __builtin_memcpy(&tiles[t][i_], (const u8 *)(p) + i_ * (s64)(bytes), (t) / 2 == 2 ? 4 * TILE_UNITS : 64)
#define tile_store(t, p, bytes) \
  for (int i_ = 0; i_ < 16; i_++) *(vi_u *)((u8 *)(p) + i_ * (s64)(bytes)) = tiles[t][i_]
#define tile_dot(kind, c, a, b) emulated_##kind(tiles[c], tiles[a], tiles[b])
// subnormal numbers are zeros, before and after every step, whatever the processor is set to
INLINE vf flushed(vf x) { return as_f(pick_i((as_i(x) & 0x7f800000) == 0, as_i(x) & (s32)0x80000000, as_i(x))); }
// one rounding: the product is exact in double, and so is what a sum of it keeps of a float32
INLINE vf fused(vf a, vf b, vf c) {
  vd16 sum = __builtin_convertvector(flushed(a), vd16) * __builtin_convertvector(flushed(b), vd16)
    + __builtin_convertvector(c, vd16);
  return flushed(__builtin_convertvector(sum, vf));
}
#define EMULATED static __attribute__((noinline, unused)) void
EMULATED emulated_bf16ps(vi *c, const vi *a, const vi *b) {
  for (int m = 0; m < 16; m++) {
    vf even = (vf)0.f, odd = (vf)0.f;
    for (int k = 0; k < TILE_UNITS; k++) {
      vi x = (vi)a[m][k];
      even = fused(as_f(x << 16), as_f(b[k] << 16), even);
      odd = fused(as_f(x & (s32)0xffff0000), as_f(b[k] & (s32)0xffff0000), odd);
    }
    c[m] = as_i(flushed(flushed(as_f(c[m])) + flushed(even + odd)));
  }
}
#define BYTES(kind, of_a, of_b) \
EMULATED emulated_##kind(vi *c, const vi *a, const vi *b) { \
  for (int m = 0; m < 16; m++) for (int k = 0; k < TILE_UNITS; k++) for (int i = 0; i < 32; i += 8) { \
    vi x = (vi)a[m][k], y = b[k]; \
    c[m] += (of_a) * (of_b); \
  } \
}
#define SIGNED(x) ((x) << (24 - i) >> 24)
#define PLAIN(x) ((x) >> i & 0xff)
BYTES(bssd, SIGNED(x), SIGNED(y)) BYTES(bsud, SIGNED(x), PLAIN(y))
BYTES(busd, PLAIN(x), SIGNED(y)) BYTES(buud, PLAIN(x), PLAIN(y))
#endif
