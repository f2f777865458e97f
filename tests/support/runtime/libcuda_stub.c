/* A libcuda.so.1 that does nothing and says what it was asked: one line for each call on standard error.

   cuda.bindings find their functions through cuGetProcAddress_v2. What is not in `functions` answers
   CUDA_SUCCESS; what STUB_WITHOUT names in the environment is not there. In a fork of the process that called
   cuInit nothing is initialised. Handles count up; memory is at 0x700000000000. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef uint64_t u64;
enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_PTX = 218, NOT_FOUND = 500, PARAMETERS = 2 };
static pid_t process;
static u64 handles = 0x100, memory = 0x700000000000, current;
#define SAY(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), 0)

static int succeed(void) { return 0; }
static int version(int *out) { return *out = 13000, 0; }
static int count(int *out) { return *out = 1, 0; }
static int device(int *out, int ordinal) { return *out = ordinal, 0; }
static int name(char *out, int size, int d) { return snprintf(out, size, "stub"), 0; }
static int total(size_t *out, int d) { return *out = 1 << 30, 0; }
static int retain(u64 *out, int d) { return *out = 0xc0, 0; }
static int get_current(u64 *out) { return getpid() == process ? (*out = current, 0) : NOT_INITIALIZED; }
static int set_current(u64 context) { return current = context, 0; }
static int capturing(u64 stream, int *out) { return *out = 0, 0; }
static int make(u64 *out) { return *out = handles += 16, 0; }
static int string(int status, const char **out) { return *out = "words", 0; }

static int attribute(int *out, int which, int d)
{
    *out = which == 75 ? 9 : which == 76 ? 0 : which == 97 ? 232448 : which == 109 ? 1 << 20 : 49152;
    return 0;
}

static int pool_create(u64 *out, const int *p)
{
    SAY("pool: type %d, handles %d, location %d, id %d", p[0], p[1], p[2], p[3]);
    return make(out);
}

static int pool_set(u64 pool, int which, const void *value)
{
    return SAY("pool attribute %d = %llx", which,
               (unsigned long long)(which < 4 ? *(const unsigned *)value : *(const u64 *)value));
}

static int pool_get(u64 pool, int which, u64 *out) { return *out = which == 5 ? 4096 : 1024, 0; }
static int pool_access(u64 pool, const int *a, size_t n)
{
    return SAY("access: location %d, id %d, flags %d, count %zu", a[0], a[1], a[2], n);
}

static int pool_alloc(u64 *out, size_t n, u64 pool, u64 stream)
{
    *out = memory += 4096;
    return SAY("alloc %zu in %llx", n, (unsigned long long)stream);
}

static int free_async(u64 at, u64 stream) { return SAY("free in %llx", (unsigned long long)stream); }
static int host_alloc(void **out, size_t n, unsigned flags)
{
    *out = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
    return SAY("host %zu, flags %u", n, flags);
}

static int host_free(void *p) { return free(p), SAY("host free"); }
static int info(size_t *left, size_t *all) { return *left = 1 << 20, *all = 1 << 30, 0; }
static int upload(u64 to, const unsigned char *from, size_t n, u64 stream)
{
    return SAY("upload %zu: %d %d", n, from[0], from[n - 1]);
}

static int download(unsigned char *to, u64 from, size_t n, u64 stream)
{
    return memset(to, 7, n), SAY("download %zu", n);
}

static int fill(u64 to, unsigned char value, size_t n, u64 stream) { return SAY("fill %d, %zu", value, n); }
static int load(u64 *out, const char *image, unsigned n, const int *options, char **values)
{
    SAY("load: %zu bytes, options %u %d %d, log %zu", strlen(image), n, options[0], options[1], (size_t)values[1]);
    if (strstr(image, "broken")) return strcpy(values[0], "line 1: it is broken"), INVALID_PTX;
    return make(out);
}

static int function(u64 *out, u64 module, const char *wanted)
{
    if (!strcmp(wanted, "nope")) return NOT_FOUND;
    return SAY("function %s", wanted), make(out);
}

static int function_get(int *out, int which, u64 f) { return *out = which == 0 ? 1024 : which, 0; }
static int function_set(u64 f, int which, int value) { return SAY("function attribute %d = %d", which, value); }
static int parameter(u64 f, size_t i, size_t *offset, size_t *size)
{
    if (i >= PARAMETERS) return INVALID_VALUE;
    return *offset = 8 * i, *size = i ? 4 : 8, 0;
}

/* words of a CUlaunchAttributeValue */
static void say_attribute(const char *what, unsigned id, const unsigned *v)
{
    if (id == 1)
        SAY("%s %u: window of %llu, ratio %g, %u %u", what, id, *(unsigned long long *)(v + 2), *(float *)(v + 4),
            v[5], v[6]);
    else if (id == 4) SAY("%s %u: %u %u %u", what, id, v[0], v[1], v[2]);
    else SAY("%s %u: %u", what, id, v[0]);
}

static int launch(const unsigned *c, u64 f, void **p, void **extra)
{
    const unsigned *a = *(const unsigned *const *)(c + 10);
    SAY("launch: grid %u %u %u, block %u %u %u, shared %u, arguments %llx %x, extra %p", c[0], c[1], c[2], c[3],
        c[4], c[5], c[6], *(unsigned long long *)p[0], *(unsigned *)p[1], (void *)extra);
    for (unsigned i = 0; i < c[12]; i++, a += 18) say_attribute("attribute", a[0], a + 2);
    return 0;
}

static int occupancy(int *out, u64 f, const unsigned *c)
{
    const unsigned *a = *(const unsigned *const *)(c + 10);
    SAY("occupancy: block %u, shared %u, attribute %u: %u %u %u", c[3], c[6], a[0], a[2], a[3], a[4]);
    return *out = 15, 0;
}

static int kernel_node(u64 *out, u64 graph, u64 *after, size_t n, const u64 *p)
{
    const unsigned *w = (const unsigned *)(p + 1);
    SAY("kernel node: after %zu, grid %u, block %u, shared %u, arguments %llx %x, extra %llx", n, w[0], w[3],
        w[6], (unsigned long long)**(u64 **)p[5], *(unsigned *)((void **)p[5])[1], (unsigned long long)p[6]);
    return make(out);
}

static int node_attribute(u64 node, unsigned id, const unsigned *v)
{
    return say_attribute("node attribute", id, v), 0;
}

static int memset_node(u64 *out, u64 graph, u64 *after, size_t n, const unsigned *p, u64 context)
{
    SAY("memset node: value %u, element %u, width %u, height %u, context %llx", p[4], p[5], p[6], p[8],
        (unsigned long long)context);
    return make(out);
}

static int memcpy_node(u64 *out, u64 graph, u64 *after, size_t n, const u64 *p, u64 context)
{
    SAY("memcpy node: %u %s %s to %u %s %s, %u x %u x %u", (unsigned)p[4], p[5] ? "host" : "-",
        p[6] ? "device" : "-", (unsigned)p[15], p[16] ? "host" : "-", p[17] ? "device" : "-", (unsigned)p[22],
        (unsigned)p[23], (unsigned)p[24]);
    return make(out);
}

static int dependencies(u64 graph, u64 *from, u64 *to, const unsigned char *data, size_t n)
{
    for (size_t i = 0; i < n; i++) SAY("edge: port %d to %d, type %d", data[8 * i], data[8 * i + 1], data[8 * i + 2]);
    return 0;
}

static int instantiate(u64 *out, u64 graph, u64 flags) { return SAY("instantiate %d", (int)flags), make(out); }
static int set_kernel(u64 e, u64 node, const u64 *p)
{
    return SAY("set kernel: arguments %llx", (unsigned long long)**(u64 **)p[5]);
}

static int set_memset(u64 e, u64 node, const unsigned *p, u64 context) { return SAY("set memset: %u", p[4]); }
static int set_memcpy(u64 e, u64 node, const u64 *p, u64 context) { return SAY("set memcpy: %u", (unsigned)p[22]); }
static int elapsed(float *out, u64 a, u64 b) { return *out = 1.5f, 0; }
static int limit(int which, size_t value) { return SAY("limit %d = %zu", which, value); }
static int encode(void *map, int type, unsigned rank, void *at, const u64 *dims, const u64 *strides,
                  const unsigned *box, const unsigned *steps, int interleave, int swizzle, int l2, int fill_)
{
    SAY("map: at %% 128 = %d, type %d, rank %u, dims %u %u, stride %u, box %u %u, steps %u %u, %d %d %d %d",
        (int)((uintptr_t)map % 128), type, rank, (unsigned)dims[0], (unsigned)dims[1], (unsigned)strides[0],
        box[0], box[1], steps[0], steps[1], interleave, swizzle, l2, fill_);
    return memset(map, 0xab, 128), 0;
}

int cuInit(unsigned flags)
{
    if (!process) process = getpid();
    return getpid() == process ? 0 : NOT_INITIALIZED;
}

int cuGetProcAddress_v2(const char *symbol, void **out, int version, u64 flags, int *status);

static const struct { const char *symbol; void *function; } functions[] = {
    {"cuInit", cuInit}, {"cuDriverGetVersion", version}, {"cuDeviceGetCount", count},
    {"cuDeviceGet", device}, {"cuDeviceGetName", name}, {"cuDeviceTotalMem", total},
    {"cuDeviceGetAttribute", attribute},
    {"cuDevicePrimaryCtxRetain", retain}, {"cuCtxGetCurrent", get_current}, {"cuCtxSetCurrent", set_current},
    {"cuCtxSetLimit", limit}, {"cuGetErrorString", string}, {"cuStreamCreate", make}, {"cuEventCreate", make},
    {"cuEventElapsedTime", elapsed}, {"cuMemPoolCreate", pool_create}, {"cuMemPoolSetAttribute", pool_set},
    {"cuMemPoolGetAttribute", pool_get}, {"cuMemPoolSetAccess", pool_access},
    {"cuMemAllocFromPoolAsync", pool_alloc}, {"cuMemFreeAsync", free_async}, {"cuMemHostAlloc", host_alloc},
    {"cuMemFreeHost", host_free}, {"cuMemGetInfo", info}, {"cuMemcpyHtoDAsync", upload},
    {"cuMemcpyDtoHAsync", download}, {"cuMemsetD8Async", fill}, {"cuModuleLoadDataEx", load},
    {"cuModuleGetFunction", function}, {"cuFuncGetAttribute", function_get},
    {"cuFuncSetAttribute", function_set}, {"cuFuncGetParamInfo", parameter}, {"cuLaunchKernelEx", launch},
    {"cuOccupancyMaxActiveClusters", occupancy},
    {"cuStreamIsCapturing", capturing},
    {"cuGraphCreate", make}, {"cuGraphAddKernelNode", kernel_node}, {"cuGraphAddMemsetNode", memset_node},
    {"cuGraphAddMemcpyNode", memcpy_node}, {"cuGraphKernelNodeSetAttribute", node_attribute},
    {"cuGraphAddDependencies", dependencies}, {"cuGraphInstantiate", instantiate},
    {"cuGraphInstantiateWithFlags", instantiate}, {"cuGraphExecKernelNodeSetParams", set_kernel},
    {"cuGraphExecMemsetNodeSetParams", set_memset}, {"cuGraphExecMemcpyNodeSetParams", set_memcpy},
    {"cuTensorMapEncodeTiled", encode}, {"cuGetProcAddress", cuGetProcAddress_v2},
    {"cuGetProcAddress_v2", cuGetProcAddress_v2},
};

int cuGetProcAddress_v2(const char *symbol, void **out, int version, u64 flags, int *status)
{
    const char *without = getenv("STUB_WITHOUT");
    if (status) *status = 0;
    if (without && !strcmp(without, symbol)) return *out = NULL, 0;
    *out = succeed;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].symbol, symbol)) *out = functions[i].function;
    return 0;
}

int cuGetProcAddress(const char *symbol, void **out, int version, u64 flags)
{
    return cuGetProcAddress_v2(symbol, out, version, flags, NULL);
}
