/* A group of ranks in this process: what Python fills in and reads (transports/library.py: GroupStruct), what
 * a collective is, and what each transport answers.
 *
 * Protocol: `collective(group, call)` runs one collective on memory of the host and returns 0, or what went
 * wrong, which stays in `status`: every later call returns it at once. Ranks of a group call the same
 * collectives in the same order.
 */
#include <stdint.h>
#include <stddef.h>
#include <string.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;

enum Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, SEND, RECV, KINDS };
enum Type { F32, F64, BF16, F16, S8, U8, S16, U16, S32, U32, S64, U64, TYPES };
enum Op { SUM, MAX, MIN, OPS };
enum Status { OK, MISMATCH, LATE, ABORTED, FAILED };
enum { MOST_RANKS = 64 };

static const u64 SIZES[TYPES] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8};

/* What one call does. `count` is of elements: all of them of ALL_REDUCE, BROADCAST, SEND and RECV; those of
 * one rank otherwise. `peer` is the root, or the other rank of SEND and RECV; `tag` the number of a tensor's
 * name. */
typedef struct { u64 kind, count, type, op, peer, tag; } Call;

typedef struct Group Group;
typedef int (*Transport)(Group *, const Call *, void *out, const void *in);

struct Group {
  Transport run;
  u64 rank, size;
  /* what the watchdog reads: calls begun and ended, the last one, when it began (ns, CLOCK_MONOTONIC) */
  volatile u64 begun, ended;
  Call current;
  volatile u64 since;
  volatile u64 status, culprit;  /* the rank that differs or is missing */
  Call theirs;                   /* of MISMATCH: what the culprit calls */
  volatile u64 abort;            /* set by another thread to end what waits */
  u64 timeout_ns;
  u64 looks;                     /* at a word, before a rank sleeps */
  void *shared;                  /* of shared.c: the memory of all ranks */
  u64 slot_bytes;
  u64 sent[MOST_RANKS], received[MOST_RANKS];
  u64 phase;
  u64 mpi[64];                   /* of mpi.c: functions and handles */
  void *room;                    /* of mpi.c: memory of its own */
  u64 room_bytes;
};

u64 now_ns(void);
void reduce(void *out, const void *const *in, u64 ranks, u64 count, u64 type, u64 op);
int shared_run(Group *, const Call *, void *out, const void *in);
int mpi_run(Group *, const Call *, void *out, const void *in);
int alone_run(Group *, const Call *, void *out, const void *in);
