/* One translation unit, so that everything is inlined where it is used. Read core.h first. */
#include "machine.c"
#include "shadow.c"  /* and clocks.c */
#if __has_include("integer.c")
#include "integer.c"
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
#endif
#if __has_include("atomics.c")
#include "atomics.c"
#endif
#if __has_include("barriers.c")
#include "barriers.c"
#endif
#if __has_include("async.c")
#include "async.c"
#endif
#if __has_include("tma.c")
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
