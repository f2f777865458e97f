/* Randomness of a seed, and findings: each kind at a line (or a pair of lines) is entered once, and counted.
 */
#include <stdarg.h>
#include <stdio.h>

#include "core.h"

enum { MAX_FINDINGS = 256 };

u64 random_u64(Machine *m) {  /* splitmix64 */
    u64 z = m->rng += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

i32 cta_number(const Machine *m, const Cta *c) {
    return (i32)(c->id[0] + m->launch.grid[0] * (c->id[1] + m->launch.grid[1] * c->id[2]));
}

/* **** findings **** */

/* Counts a finding that has been entered; false: it is new. (Before words are made: a bug in a loop is reported
 * again and again.) */
static bool known_finding(Machine *m, int kind, i32 line, i32 other_line) {
    for (i32 i = 0; i < m->finding_count; i++) {
        Finding *f = &m->findings[i];
        if (f->kind != kind || f->line != line || f->other != other_line) continue;
        f->count += f->count < INT32_MAX;
        return true;
    }
    return m->finding_count >= (kind == NOTE ? MAX_FINDINGS / 2 : MAX_FINDINGS);  /* faults have room */
}

void report_pair(Machine *m, int kind, const Op *op, const Warp *w, int lane, int other_line, int other_cta,
                 int other_thread, const char *text) {
    if (!m->launch.check && kind != OUT_OF_BOUNDS && kind != MISALIGNED && kind != DEADLOCK
        && kind != BARRIER && kind != INSTRUCTION_LIMIT) return;
    i32 line = op ? op->line : 0;
    if (known_finding(m, kind, line, other_line)) return;
    Finding *f = &m->findings[m->finding_count++];
    *f = (Finding){kind, line, other_line, w ? cta_number(m, w->cta) : -1, other_cta,
                   w ? (i32)warp_thread(w, lane) : -1, other_thread, 1, 0, ""};
    snprintf(f->text, sizeof f->text, "%s", text);
}

void report(Machine *m, int kind, const Op *op, const Warp *w, int lane, const char *format, ...) {
    char text[256];
    va_list list;
    if (known_finding(m, kind, op ? op->line : 0, 0)) return;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    report_pair(m, kind, op, w, lane, 0, -1, -1, text);
}
