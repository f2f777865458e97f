/* One translation unit, so that everything is inlined where it is used. Read core.h first. */
#include "machine.c"
#include "shadow.c"  /* and clocks.c */
#if !__has_include("memory.c")  /* while parts are missing */
u8 *touch(Machine *m, Warp *w, const Op *op, int l, int s, u64 a, u32 b, u32 al, int k) { return NULL; }
u8 *locate(Machine *m, Warp *w, const Op *op, int l, int s, u64 a, u32 b, u32 al, Region **r, u64 *o) { return NULL; }
Cta *shared_owner(Machine *m, Warp *w, const Op *op, int l, u64 a) { return NULL; }
#endif
#if !__has_include("barriers.c")
void describe_wait(Machine *m, Warp *w, Group *g, char *out, size_t size) {}
void barriers_free(Machine *m, Cta *c) {}
#endif
#if !__has_include("wgmma.c")
void tensor_free(Machine *m, Warp *w) {}
void tensor_exit(Machine *m, Warp *w) {}
void tensor_check_registers(Machine *m, Warp *w, const Op *op) {}
void tensor_complete(Machine *m, Warp *w, u32 g) {}
#endif
#if __has_include("integer.c")
#include "integer.c"
#include "bits.c"
#include "move.c"
#include "compare.c"
#endif
#if __has_include("float.c")
#include "float.c"
#endif
#if __has_include("half.c")
#include "half.c"
#endif
#if __has_include("convert.c")
#include "convert.c"
#endif
#if __has_include("lanes.c")
#include "lanes.c"
#endif
#if __has_include("memory.c")
#include "memory.c"
#include "access.c"
#endif
#if __has_include("atomics.c")
#include "atomics.c"
#endif
#if __has_include("barriers.c")
#include "mbarrier.c"
#include "barriers.c"
#endif
#if __has_include("tma.c")
#include "async.c"
#include "bulk.c"
#include "tma.c"
#endif
#if __has_include("dot.c")
#include "dot.c"
#endif
#if __has_include("mma.c")
#include "mma.c"
#endif
#if __has_include("wgmma.c")
#include "wgmma.c"
#endif
#if __has_include("matrix.c")
#include "matrix.c"
#endif
