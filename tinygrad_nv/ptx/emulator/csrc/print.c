/* printf of kernels: text that the host prints when the launch is done. */
#include <ctype.h>
#include <stdio.h>

#include "core.h"

enum { MOST_PRINTED = 1 << 20,  /* bytes of a launch, as CUDA's buffer holds by default; what comes after is dropped */
       MOST_FORMAT = 1024, MOST_SPEC = 32, MOST_WIDTH = 2 * MOST_FORMAT };

/* The arguments of one lane, which lie one after the other, each aligned to its size. */
typedef struct { Machine *m; Warp *w; const Op *op; int lane; u64 at; i32 count; } Arguments;

static u64 argument(Arguments *a, u32 size) {
    Region *r;
    u64 offset, value = 0;
    a->at = (a->at + size - 1) & ~(u64)(size - 1);
    const u8 *from = locate(a->m, a->w, a->op, a->lane, GENERIC, a->at, size, 1, &r, &offset);
    if (from) memcpy(&value, from, size);
    a->at += size, a->count++;
    return value;
}

static void print_text(Machine *m, const char *text, size_t n) {
    if (n > MOST_PRINTED - m->printed_count) n = MOST_PRINTED - m->printed_count;
    if (!m->printed) m->printed = take(MOST_PRINTED + 1);
    memcpy(m->printed + m->printed_count, text, n);
    m->printed_count += n;
}

/* Prints one conversion: `spec` without its length and letter, and these. */
static void convert_one(Arguments *a, const char *spec, bool wide, char letter) {
    char form[MOST_SPEC + 8], text[MOST_FORMAT];
    int n = 0;
    if (strchr("di", letter)) {
        u64 value = argument(a, wide ? 8 : 4);
        snprintf(form, sizeof form, "%slld", spec);
        n = snprintf(text, sizeof text, form, wide ? (long long)value : (long long)(i32)value);
    } else if (strchr("ouxX", letter)) {
        snprintf(form, sizeof form, "%sll%c", spec, letter);
        n = snprintf(text, sizeof text, form, (unsigned long long)argument(a, wide ? 8 : 4));
    } else if (strchr("fFeEgGaA", letter)) {
        snprintf(form, sizeof form, "%s%c", spec, letter);
        n = snprintf(text, sizeof text, form, as_f64(argument(a, 8)));
    } else if (letter == 'c') {
        snprintf(form, sizeof form, "%sc", spec);
        n = snprintf(text, sizeof text, form, (int)argument(a, 4));
    } else if (letter == 'p') {
        n = snprintf(text, sizeof text, "0x%llx", (unsigned long long)argument(a, 8));
    } else if (letter == 's') {
        char said[MOST_FORMAT / 2];
        read_text(a->m, a->w, a->op, a->lane, argument(a, 8), said, sizeof said);
        snprintf(form, sizeof form, "%ss", spec);
        n = snprintf(text, sizeof text, form, said);
    }
    print_text(a->m, text, n < 0 ? 0 : (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
}

/* From behind a %: flags, width and precision, of which a star is an argument; then the conversion. */
static const char *print_spec(Arguments *a, const char *at) {
    char spec[MOST_SPEC] = "%";
    int n = 1;
    bool wide = false;
    while (*at && strchr("-+ #0123456789.*", *at) && n < MOST_SPEC - 12) {
        if (*at != '*' && !(isdigit(*at) && *at != '0')) { spec[n++] = *at++; continue; }
        i64 number = *at == '*' ? (i32)argument(a, 4) : 0;  /* bounded: what is shown ends before */
        if (*at == '*') at++;
        else for (; isdigit(*at); at++) if (number <= MOST_WIDTH) number = 10 * number + (*at - '0');
        number = number > MOST_WIDTH ? MOST_WIDTH : number < -MOST_WIDTH ? -MOST_WIDTH : number;
        n += sprintf(spec + n, "%d", (int)number);
    }
    spec[n] = 0;
    for (const char *size = at; *at && strchr("hlzjtL", *at); at++) {
        wide |= *at != 'h';
        if (at == size + 1 && *size == 'h' && *at == 'h') a->count--;   /* not of CUDA's, which does not count it */
    }
    if (*at == '%') print_text(a->m, "%", 1);
    else if (*at) convert_one(a, spec, wide, *at);
    return *at ? at + 1 : at;
}

/* vprintf: the list has the places in local memory of its result, or -1, and of its parameters: the format,
 * and where the arguments are. */
HANDLER(vprintf) {
    const i32 *list = m->launch.lists + op->list;
    ACTIVE {
        u8 *local = w->local + (size_t)l * m->launch.local_bytes;
        u64 where[2];
        char format[MOST_FORMAT];
        for (int i = 0; i < 2; i++) memcpy(&where[i], local + list[1 + i], 8);
        read_text(m, w, op, l, where[0], format, sizeof format);
        Arguments a = {m, w, op, l, where[1], 0};
        for (const char *at = format; *at;) {
            size_t n = strcspn(at, "%");
            print_text(m, at, n);
            at += n;
            if (*at) at = print_spec(&a, at + 1);
        }
        if (list[0] >= 0) memcpy(local + list[0], &a.count, 4);
    }
    return NEXT;
}

const char *machine_printed(Machine *m) {
    if (!m->printed) return "";
    m->printed[m->printed_count] = 0;
    return m->printed;
}
