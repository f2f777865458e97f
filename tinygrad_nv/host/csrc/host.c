/* What the dynamic linker loads into a program as an auditor (LD_AUDIT), so that its CUDA calls reach
 * tinygrad_nv (server.py).
 *
 * Protocol: `names` are the functions of the CUDA API, sorted. Wherever a mapped object defines one of them (the
 * stub libraries of library.py, NVIDIA's runtime, or a program that it is linked into statically), its first
 * bytes become a jump to the trampoline of that name, before any code of the object runs. A trampoline sends
 * the number of the function and its argument words to the server, and does what this asks for until it gives
 * the result: bytes of the program's memory are read and written here, device memory is a file both have.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

enum { NAMES = 0
#define NAME(name) +1
#include "names.h"
#undef NAME
};
static const char *const names[] = {
#define NAME(name) #name,
#include "names.h"
};

typedef struct { uint64_t function, thread, words[6], stack[12]; } Call;
typedef struct { uint64_t order, a, b, n; } Order;
enum { RESULT, READ, WRITE, IN, OUT, MAP, UNMAP, CALL };

/* Offset i of the file is at device address base + i. `print`: printf of the program's C library. */
static struct { int socket, file; pid_t owner; uint64_t base, size, print; } link_;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static void die(const char *what) {
    fprintf(stderr, "tinygrad-nv ptx run: %s: %s\n", what, strerror(errno));
    _exit(2);
}

/* **** the connection **** */

static void send_all(const void *from, size_t n) {
    for (const char *at = from; n;) {
        ssize_t done = send(link_.socket, at, n, MSG_NOSIGNAL);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && errno == EFAULT) raise(SIGSEGV);
        if (done <= 0) die("the emulated GPU has gone");
        at += done, n -= (size_t)done;
    }
}

static void receive(void *into, size_t n) {
    for (char *at = into; n;) {
        ssize_t done = recv(link_.socket, at, n, 0);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && errno == EFAULT) raise(SIGSEGV);
        if (done <= 0) die("the emulated GPU has gone");
        at += done, n -= (size_t)done;
    }
}

extern const char trampolines[] __attribute__((visibility("hidden")));

/* Says where the trampolines and printf are; gets the file, and where it is in the address space. Nothing of the program
 * may lie there: the addresses are taken, without access. */
static void connect_server(void) {
    const char *path = getenv("TINYGRAD_NV_HOST");
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    if (!path || strlen(path) >= sizeof name.sun_path) die("TINYGRAD_NV_HOST");
    strcpy(name.sun_path, path);
    if (link_.owner) close(link_.socket), close(link_.file);    /* the parent's */
    link_.socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(link_.socket, (struct sockaddr *)&name, sizeof name)) die(path);
    uint64_t hello[3] = {(uint64_t)getpid(), (uint64_t)trampolines, link_.print};
    send_all(hello, sizeof hello);
    uint64_t place[2];
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control;
    struct iovec bytes = {place, sizeof place};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = &control,
                             .msg_controllen = sizeof control};
    if (recvmsg(link_.socket, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) != sizeof place) die("no answer");
    memcpy(&link_.file, CMSG_DATA(&control.header), sizeof(int));
    link_.base = place[0], link_.size = place[1];
    if (!link_.owner && mmap((void *)link_.base, link_.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS |
                             MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0) != (void *)link_.base)
        die("addresses of device memory");
    link_.owner = getpid();
}

/* Between the program's memory and the file; 0, or errno. */
static uint64_t copy(const Order *order) {
    char *host = (char *)order->a;
    off_t at = (off_t)(order->b - link_.base);
    for (size_t n = order->n; n;) {
        ssize_t done = order->order == IN ? pwrite(link_.file, host, n, at) : pread(link_.file, host, n, at);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done ? (uint64_t)errno : EIO;
        host += done, at += done, n -= (size_t)done;
    }
    return 0;
}

/* Device memory that the host may touch, at its own address. */
static uint64_t map(const Order *order) {
    int access = order->order == MAP ? PROT_READ | PROT_WRITE : PROT_NONE;
    void *made = order->order == MAP
        ? mmap((void *)order->a, order->n, access, MAP_SHARED | MAP_FIXED, link_.file,
               (off_t)(order->a - link_.base))
        : mmap((void *)order->a, order->n, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return made == MAP_FAILED ? (uint64_t)errno : 0;
}

/* One order of the server; true when it was the last. */
static int obey(const Order *order) {
    uint64_t answer;
    switch (order->order) {
    case RESULT: return 1;
    case READ: send_all((const void *)order->a, order->n); return 0;
    case WRITE: receive((void *)order->a, order->n); return 0;
    case IN: case OUT: answer = copy(order); break;
    case MAP: case UNMAP: answer = map(order); break;
    case CALL:
        ((void (*)(uint64_t, uint64_t, uint64_t))order->a)(order->b, order->n, 0);
        answer = 0;
        break;
    default: die("an order that is not known");
    }
    send_all(&answer, sizeof answer);
    return 0;
}

/* What trampolines call: the number of the function, its argument words in registers, those on the stack. */
__attribute__((used, visibility("hidden")))
uint64_t host_call(uint64_t function, const uint64_t *words, const uint64_t *stack) {
    int before = errno;
    pthread_mutex_lock(&turn);
    if (link_.owner != getpid()) connect_server();
    Call call = {.function = function, .thread = (uint64_t)syscall(SYS_gettid)};
    memcpy(call.words, words, sizeof call.words);
    memcpy(call.stack, stack, sizeof call.stack);
    send_all(&call, sizeof call);
    Order order;
    do receive(&order, sizeof order); while (!obey(&order));
    pthread_mutex_unlock(&turn);
    errno = before;
    return order.a;
}

/* 16 bytes for each function. Frame: the words in registers lie below the saved frame pointer, those on the
 * stack above the return address. */
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
__asm__(
    ".text\n.balign 16\n.hidden trampolines\n.globl trampolines\ntrampolines:\n"
    ".set number, 0\n"
    ".rept " TEXT(NAME_COUNT) "\n"
    "  .balign 16\n  movl $number, %eax\n  jmp common_\n  .set number, number + 1\n"
    ".endr\n"
    "common_:\n"
    "  push %rbp\n  mov %rsp, %rbp\n"
    "  push %r9\n  push %r8\n  push %rcx\n  push %rdx\n  push %rsi\n  push %rdi\n"
    "  mov %eax, %edi\n  mov %rsp, %rsi\n  lea 16(%rbp), %rdx\n"
    "  and $-16, %rsp\n  call host_call\n"
    "  leave\n  ret\n");

/* **** redirection **** */

/* The number of a function of the API, or -1. */
static int number_of(const char *name) {
    if (strncmp(name, "cu", 2) && strncmp(name, "__cuda", 6)) return -1;
    int low = 0, high = NAMES - 1;
    while (low <= high) {
        int middle = (low + high) / 2, order = strcmp(name, names[middle]);
        if (!order) return middle;
        if (order < 0) high = middle - 1;
        else low = middle + 1;
    }
    return -1;
}

static void redirect(char *function, int number) {
    unsigned char jump[14] = {0xff, 0x25};      /* jmp *0(%rip), and the address */
    uint64_t target = (uint64_t)trampolines + 16 * (uint64_t)number;
    memcpy(jump + 6, &target, sizeof target);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *from = (char *)((uint64_t)function & ~(page - 1));
    size_t size = (size_t)(function + sizeof jump - from);
    if (mprotect(from, size, PROT_READ | PROT_WRITE)) die("code cannot be written");
    memcpy(function, jump, sizeof jump);
    if (mprotect(from, size, PROT_READ | PROT_EXEC)) die("code cannot be executed again");
}

static int inside(uint64_t offset, uint64_t size, uint64_t all) { return offset <= all && size <= all - offset; }

static void redirect_symbols(const char *file, size_t bytes, const Elf64_Shdr *table, const Elf64_Shdr *strings,
                             char *base) {
    if (!inside(table->sh_offset, table->sh_size, bytes) || !inside(strings->sh_offset, strings->sh_size, bytes))
        return;
    const Elf64_Sym *symbols = (const Elf64_Sym *)(file + table->sh_offset);
    for (size_t i = 0; i < table->sh_size / sizeof *symbols; i++) {
        const Elf64_Sym *each = &symbols[i];
        if (ELF64_ST_TYPE(each->st_info) != STT_FUNC || each->st_shndx == SHN_UNDEF) continue;
        if (each->st_name >= strings->sh_size) continue;
        const char *name = file + strings->sh_offset + each->st_name;
        int number = number_of(name);
        if (number >= 0) redirect(base + each->st_value, number);
        if (!link_.print && !strcmp(name, "printf")) link_.print = (uint64_t)(base + each->st_value);
    }
}

/* All functions of the API that an object defines, also those that it keeps for itself. */
static void redirect_object(const char *path, char *base) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file < 0) return;                       /* such as the kernel's own object */
    if (fstat(file, &status)) die(path);
    size_t bytes = (size_t)status.st_size;
    char *data = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (data == MAP_FAILED) die(path);
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)data;
    if (bytes > sizeof *header && inside(header->e_shoff, header->e_shnum * sizeof(Elf64_Shdr), bytes)) {
        const Elf64_Shdr *sections = (const Elf64_Shdr *)(data + header->e_shoff);
        for (int i = 0; i < header->e_shnum; i++)
            if ((sections[i].sh_type == SHT_SYMTAB || sections[i].sh_type == SHT_DYNSYM) &&
                sections[i].sh_link < header->e_shnum)
                redirect_symbols(data, bytes, &sections[i], &sections[sections[i].sh_link], base);
    }
    munmap(data, bytes);
}

/* What the dynamic linker calls: with its version, and for each object that it maps. */
unsigned la_version(unsigned version) { return version < LAV_CURRENT ? version : LAV_CURRENT; }

unsigned la_objopen(struct link_map *map, Lmid_t space, uintptr_t *cookie) {
    (void)cookie;
    if (space == LM_ID_BASE)
        redirect_object(map->l_name && *map->l_name ? map->l_name : "/proc/self/exe", (char *)map->l_addr);
    return 0;
}
