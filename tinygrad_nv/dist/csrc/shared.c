/* Ranks of one machine over memory that they share.
 *
 * Protocol. Each rank has a line of flags, two slots of `slot_bytes`, and two slots for what it has reduced.
 * A collective is cut into steps that fit a slot. In step s (counted by every rank) a rank copies its part
 * into its slot s % 2, writes what it calls beside, and publishes `arrived = s`; then it waits until all
 * others have arrived, compares what they call, and reads. A slot is written again in step s + 2: no rank is
 * then still reading what it had in step s, as all have arrived in step s + 1, each after it had read step s.
 * So no rank waits for readers, and one wait a step is enough. Large reductions are done in two phases: each
 * rank reduces its share of the elements into its second slot and publishes `reduced = s`; then each copies
 * the shares of the others. The same argument holds for that slot: to arrive in step s + 1 a rank has read
 * all shares of step s.
 *
 * Messages between two ranks go through two slots of the pair; `written` and `read` count. What calls SEND is beside
 * each, and has to be what calls RECV.
 *
 * Waiting: `looks` looks at a word, about 40 ns each, then sleeps in the system (futex) until the word is written, or for
 * NAP_NS at most: there may be more ranks than cores, and a rank may wait for the next request. Who writes a word wakes
 * sleepers, if there are any. `abort` of the memory holds 1 + the rank that gave up, and ends all others.
 */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define REST() __builtin_ia32_pause()
#else
#define REST() __asm__ volatile("yield")
#endif

typedef struct { volatile u64 value; volatile u32 sleepers; } Word;

typedef struct {
  Word arrived __attribute__((aligned(128)));
  Word reduced;
  Call calls[2];
} Line;

typedef struct {
  Word written __attribute__((aligned(128))), read __attribute__((aligned(128)));
  Call calls[2];              /* what sent each message */
} Pair;

typedef struct {
  volatile u64 abort __attribute__((aligned(128)));
  Line lines[MOST_RANKS];
  Pair pairs[];               /* [from * size + to] */
} Shared;

enum { NAP_NS = 2000000, TWO_PHASES = 32 << 10, MESSAGE = 64 << 10 };

u64 now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (u64)t.tv_sec * 1000000000ull + t.tv_nsec;
}

static u64 up(u64 x) { return (x + 4095) & ~4095ull; }
static u64 head_bytes(u64 size) { return up(sizeof(Shared) + size * size * sizeof(Pair)); }

/* Bytes of the memory that a group of so many ranks shares. */
u64 shared_bytes(u64 size, u64 slot_bytes) {
  return head_bytes(size) + 4 * size * slot_bytes + 2 * size * size * MESSAGE;
}

static u8 *slot(Group *g, u64 rank, u64 which) {
  return (u8 *)g->shared + head_bytes(g->size) + (4 * rank + which) * g->slot_bytes;
}

static u8 *message(Group *g, u64 from, u64 to, u64 which) {
  return (u8 *)g->shared + head_bytes(g->size) + 4 * g->size * g->slot_bytes
    + (2 * (from * g->size + to) + which) * MESSAGE;
}

static int gives_up(Group *g, int status, u64 culprit) {
  Shared *all = g->shared;
  u64 none = 0;
  __atomic_compare_exchange_n(&all->abort, &none, g->rank + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  g->culprit = culprit;
  return status;
}

static void publish(Word *word, u64 value) {
  __atomic_store_n(&word->value, value, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&word->sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &word->value, FUTEX_WAKE, MOST_RANKS, NULL, NULL, 0);
}

/* Until the word is another, or for NAP_NS. The futex is its lower half. */
static void sleep_on(Word *word, u64 seen) {
  struct timespec nap = {0, NAP_NS};
  __atomic_fetch_add(&word->sleepers, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &word->value, FUTEX_WAIT, (u32)seen, &nap, NULL, 0);
  __atomic_fetch_sub(&word->sleepers, 1, __ATOMIC_SEQ_CST);
}

static int wait_for(Group *g, Word *word, u64 value, u64 rank) {
  Shared *all = g->shared;
  u64 began = 0, seen;
  for (u64 looks = 0; (seen = __atomic_load_n(&word->value, __ATOMIC_ACQUIRE)) < value; looks++) {
    if (looks < g->looks) { REST(); continue; }
    if (g->abort) return gives_up(g, ABORTED, g->rank);
    if (all->abort) { g->culprit = all->abort - 1; return ABORTED; }
    u64 now = now_ns();
    if (!began) began = now;
    if (now - began > g->timeout_ns) return gives_up(g, LATE, rank);
    sleep_on(word, seen);
  }
  return OK;
}

static int same(const Call *a, const Call *b) {
  return a->kind == b->kind && a->count == b->count && a->type == b->type && a->op == b->op && a->peer == b->peer;
}

/* Publishes that this rank is in the next step, and waits for all others. */
static int arrive(Group *g, const Call *call) {
  Shared *all = g->shared;
  u64 step = ++g->phase;
  Line *own = &all->lines[g->rank];
  own->calls[step % 2] = *call;
  publish(&own->arrived, step);
  for (u64 r = 0; r < g->size; r++) {
    if (r == g->rank) continue;
    int status = wait_for(g, &all->lines[r].arrived, step, r);
    if (status) return status;
    const Call *theirs = &all->lines[r].calls[step % 2];
    if (!same(call, theirs)) { g->theirs = *theirs; return gives_up(g, MISMATCH, r); }
  }
  return OK;
}

static int wait_reduced(Group *g, u64 rank) {
  return wait_for(g, &((Shared *)g->shared)->lines[rank].reduced, g->phase, rank);
}

/* One step of ALL_REDUCE, on elements that fit a slot. */
static int reduce_step(Group *g, const Call *call, u8 *out, const u8 *in, u64 count) {
  u64 width = SIZES[call->type], now = (g->phase + 1) % 2;
  const void *from[MOST_RANKS];
  memcpy(slot(g, g->rank, now), in, count * width);
  int status = arrive(g, call);
  if (status) return status;
  int two = count * width > TWO_PHASES;
  u64 begin = two ? count * g->rank / g->size : 0, end = two ? count * (g->rank + 1) / g->size : count;
  for (u64 r = 0; r < g->size; r++) from[r] = (r == g->rank ? in : slot(g, r, now)) + begin * width;
  reduce(out + begin * width, from, g->size, end - begin, call->type, call->op);
  if (!two) return OK;
  memcpy(slot(g, g->rank, 2 + now), out + begin * width, (end - begin) * width);
  publish(&((Shared *)g->shared)->lines[g->rank].reduced, g->phase);
  for (u64 i = 1; i < g->size; i++) {
    u64 r = (g->rank + i) % g->size, first = count * r / g->size, last = count * (r + 1) / g->size;
    if ((status = wait_reduced(g, r))) return status;
    memcpy(out + first * width, slot(g, r, 2 + now), (last - first) * width);
  }
  return OK;
}

static int all_reduce(Group *g, const Call *call, u8 *out, const u8 *in) {
  u64 width = SIZES[call->type], most = g->slot_bytes / width;
  for (u64 done = 0; done < call->count; done += most) {
    u64 count = call->count - done < most ? call->count - done : most;
    int status = reduce_step(g, call, out + done * width, in + done * width, count);
    if (status) return status;
  }
  return OK;
}

/* Elements for each rank are cut into steps: `count` of each rank fit a slot together. */
static int reduce_scatter(Group *g, const Call *call, u8 *out, const u8 *in) {
  u64 width = SIZES[call->type], most = g->slot_bytes / width / g->size;
  const void *from[MOST_RANKS];
  for (u64 done = 0; done < call->count; done += most) {
    u64 count = call->count - done < most ? call->count - done : most, now = (g->phase + 1) % 2;
    for (u64 r = 0; r < g->size; r++)
      if (r != g->rank)
        memcpy(slot(g, g->rank, now) + r * count * width, in + (r * call->count + done) * width, count * width);
    int status = arrive(g, call);
    if (status) return status;
    for (u64 r = 0; r < g->size; r++)
      from[r] = r == g->rank ? in + (r * call->count + done) * width : slot(g, r, now) + g->rank * count * width;
    reduce(out + done * width, from, g->size, count, call->type, call->op);
  }
  return OK;
}

static int all_gather(Group *g, const Call *call, u8 *out, const u8 *in) {
  u64 width = SIZES[call->type], most = g->slot_bytes / width;
  for (u64 done = 0; done < call->count; done += most) {
    u64 count = call->count - done < most ? call->count - done : most, now = (g->phase + 1) % 2;
    memcpy(slot(g, g->rank, now), in + done * width, count * width);
    int status = arrive(g, call);
    if (status) return status;
    for (u64 r = 0; r < g->size; r++)
      memcpy(out + (r * call->count + done) * width, r == g->rank ? in + done * width : slot(g, r, now), count * width);
  }
  return OK;
}

static int all_to_all(Group *g, const Call *call, u8 *out, const u8 *in) {
  u64 width = SIZES[call->type], most = g->slot_bytes / width / g->size;
  for (u64 done = 0; done < call->count; done += most) {
    u64 count = call->count - done < most ? call->count - done : most, now = (g->phase + 1) % 2;
    for (u64 r = 0; r < g->size; r++)
      memcpy(slot(g, g->rank, now) + r * count * width, in + (r * call->count + done) * width, count * width);
    int status = arrive(g, call);
    if (status) return status;
    for (u64 r = 0; r < g->size; r++)
      memcpy(out + (r * call->count + done) * width, slot(g, r, now) + g->rank * count * width, count * width);
  }
  return OK;
}

static int broadcast(Group *g, const Call *call, u8 *out, const u8 *in) {
  u64 width = SIZES[call->type], most = g->slot_bytes / width, mine = g->rank == call->peer;
  for (u64 done = 0; done < call->count; done += most) {
    u64 count = call->count - done < most ? call->count - done : most, now = (g->phase + 1) % 2;
    if (mine) memcpy(slot(g, g->rank, now), in + done * width, count * width);
    int status = arrive(g, call);
    if (status) return status;
    memmove(out + done * width, mine ? in + done * width : slot(g, call->peer, now), count * width);
  }
  return OK;
}

static int pass_message(Group *g, const Call *call, u8 *to, const u8 *from, int sends) {
  u64 other = call->peer, bytes = call->count * SIZES[call->type];
  u64 a = sends ? g->rank : other, b = sends ? other : g->rank;
  Pair *pair = &((Shared *)g->shared)->pairs[a * g->size + b];
  u64 *passed = sends ? &g->sent[other] : &g->received[other];
  for (u64 done = 0; done < bytes; done += MESSAGE) {
    u64 size = bytes - done < MESSAGE ? bytes - done : MESSAGE, number = ++*passed;
    u8 *room = message(g, a, b, number % 2);
    int status = sends ? (number > 2 ? wait_for(g, &pair->read, number - 2, other) : OK)
                       : wait_for(g, &pair->written, number, other);
    if (status) return status;
    Call *sent = &pair->calls[number % 2];
    if (sends) *sent = *call;
    else if (sent->count != call->count || sent->type != call->type) {
      g->theirs = *sent;
      return gives_up(g, MISMATCH, other);
    }
    if (sends) memcpy(room, from + done, size); else memcpy(to + done, room, size);
    publish(sends ? &pair->written : &pair->read, number);
  }
  return OK;
}

int shared_run(Group *g, const Call *call, void *out, const void *in) {
  switch (call->kind) {
    case ALL_REDUCE: return all_reduce(g, call, out, in);
    case REDUCE_SCATTER: return reduce_scatter(g, call, out, in);
    case ALL_GATHER: return all_gather(g, call, out, in);
    case ALL_TO_ALL: return all_to_all(g, call, out, in);
    case BROADCAST: return broadcast(g, call, out, in);
    case SEND: return pass_message(g, call, NULL, in, 1);
    case RECV: return pass_message(g, call, out, NULL, 0);
  }
  return FAILED;
}
