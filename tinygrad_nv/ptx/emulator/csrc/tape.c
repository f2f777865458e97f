/* Tapes: what the warps of chosen clusters executed, in each warp's order, for the timing model (ptx/timing/).
 *
 * A step is one PTX instruction: its number in the low 20 bits, the passes through shared memory that it took
 * in the next 11, and whether notes belong to it in the last. Its notes are the warp's next ones, up to the one
 * without MORE. What a blocked instruction noted before it could go on is forgotten. */

#include <math.h>

#include "core.h"

enum { KIND_BITS = 8, SOURCE_BITS = 20, PASSES_BITS = 11, NOTED = 1u << 31, MORE_NOTES = 1u << 31 };

/* What a note says, in the low bits of its kind (above them is its instruction); ptx/timing/tape.py has the same list.
 *
 *    WAITED     key: an mbarrier or barrier; a: its phase, which has ended
 *    FAILED     a try_wait said no
 *    ARRIVED    key, a: the mbarrier and its phase under way; count: arrivals; b: bytes announced
 *    LOADS      key, a: mbarrier and phase that the copy reports to; count: rank of the CTA it goes to; b: bytes
 *    READS      key: address; count: bytes of a row; a: rows; b: bytes from row to row, of global memory
 *    WRITES     the same
 *    SECTORS    key: lowest address; count: sectors of 32 bytes; a: bytes up to the highest; b: 1 for a write, 2 for an atomic
 *    MEETS      key, a: a named barrier and its phase; count: threads it is for; b: 1 for one that waits
 *    JOINS      key, a: a cluster's barrier and its phase; b: 1 for the wait
 *    FOLLOWS    key, a: mbarrier and phase that hear of the copies before; count: arrivals
 *    DRAWN      key: what a counter of work tiles had; a: what was added
 *    REDUCED    as WRITES, of reductions */
enum { NAMED_KEYS = 1 << 30 };  /* of named barriers, beside the offsets of mbarriers */
enum { WAITED = 1, FAILED, ARRIVED, LOADS, READS, WRITES, SECTORS, MEETS, JOINS, FOLLOWS, DRAWN, REDUCED };

typedef struct { u32 kind, count; u64 key, a, b; } Note;

struct Tape {
    u32 *steps;
    Note *notes;
    u64 step_count, note_count, step_room, note_room;
    u64 noted, passes;  /* notes at the end of the last step; passes since */
    i32 cluster, rank, cta, warp, brief;  /* brief: no steps, and only notes of reads */
    u64 random;         /* of add_random_sums */
};

static void tape_start(Machine *m, Warp *w) {
    if (!m->launch.taped) return;
    if (m->tape_count == m->tape_room) {
        m->tape_room = 2 * m->tape_room + 64;
        m->tapes = take_more(m->tapes, sizeof *m->tapes * (size_t)m->tape_room);
    }
    Tape *t = take_zeros(1, sizeof *t);
    t->cluster = (i32)w->cta->cluster->number, t->rank = w->cta->rank;
    t->cta = cta_number(m, w->cta), t->warp = w->id, t->brief = w->cta->cluster->most > 0;
    t->random = ((u64)t->cta << 6 | (u64)t->warp) << 32;    /* warps differ: one may rescale where another does not */
    m->tapes[m->tape_count++] = w->tape = t;
}

void tape_note(const Warp *w, u32 kind, u32 count, u64 key, u64 a, u64 b) {
    Tape *t = w->tape;
    if (!t || (t->brief && kind != READS && (kind != SECTORS || b))) return;
    if (t->note_count == t->note_room) {
        t->note_room = 2 * t->note_room + 256;
        t->notes = take_more(t->notes, sizeof *t->notes * t->note_room);
    }
    Note *last = t->note_count > t->noted ? &t->notes[t->note_count - 1] : NULL;
    bool again = last && (last->kind & ~MORE_NOTES) == kind && last->key == key && last->a == a;
    if (again && kind <= ARRIVED) last->count += count, last->b += b;  /* other lanes' */
    else t->notes[t->note_count++] = (Note){kind | MORE_NOTES, count, key, a, b};
}

static void tape_step(Tape *t, u32 source) {
    u32 most = (1u << PASSES_BITS) - 1, passes = t->passes < most ? (u32)t->passes : most;
    if (t->step_count == t->step_room) {
        t->step_room = 2 * t->step_room + 4096;
        t->steps = take_more(t->steps, sizeof *t->steps * t->step_room);
    }
    bool noted = t->note_count > t->noted;
    for (u64 i = t->noted; i < t->note_count; i++) t->notes[i].kind |= source << KIND_BITS;
    if (noted) t->notes[t->note_count - 1].kind &= ~MORE_NOTES;
    t->noted = t->note_count, t->passes = 0;
    if (t->brief) return;
    t->steps[t->step_count++] = source | passes << SOURCE_BITS | (noted ? NOTED : 0);
}

static void tapes_free(Machine *m) {
    for (i32 i = 0; i < m->tape_count; i++) {
        Tape *t = m->tapes[i];
        give(t->steps), give(t->notes), give(t);
    }
    give(m->tapes);
}

/* Adds to [rows][n] sums, where tensor cores are idle, what k products of random normal numbers add up to: were all
 * scores equal, no softmax would ever find a new maximum, nor rescale. splitmix64; four bytes are nearly normal. */
void add_random_sums(Warp *w, int rows, int n, int k, f32 *c, int ldc) {
    Tape *t = w->tape;
    if (!t || t->brief) return;
    f32 unit = sqrtf((f32)k) / 147.8f;  /* 510 and 147.8: mean and standard deviation of the sum of four bytes */
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < n; j++) {
            u64 z = t->random += 0x9e3779b97f4a7c15ull;
            z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
            z = (z ^ z >> 27) * 0x94d049bb133111ebull;
            c[i * ldc + j] += unit * (f32)((i32)((z >> 56) + (z >> 48 & 255) + (z >> 40 & 255) + (z >> 32 & 255)) - 510);
        }
}

/* Bytes of steps and notes that are kept: brief tapes have no steps. */
u64 machine_taped_bytes(const Machine *m) {
    u64 bytes = 0;
    for (i32 i = 0; i < m->tape_count; i++)
        bytes += m->tapes[i]->step_count * sizeof(u32) + m->tapes[i]->note_count * sizeof(Note);
    return bytes;
}

i32 machine_tape_count(const Machine *m) { return m->tape_count; }
i32 machine_draws(const Machine *m) { return m->draws; }
const Tape *machine_tape(const Machine *m, i32 number) { return m->tapes[number]; }

/* An mbarrier, by CTA and place. */
static inline u64 barrier_key(const Machine *m, const Cta *c, u64 offset) {
    return (u64)cta_number(m, c) << 32 | offset;
}
