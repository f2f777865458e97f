/* Ranks of MPI. Its functions and handles are found at run time: nothing here is linked against an MPI.
 *
 * Protocol: Python fills `mpi` with addresses of functions, the communicator, datatypes and operations.
 * Handles are integers of 32 bits (MPICH) or pointers (Open MPI): both are passed in a register of 64. 16-bit
 * floats, which MPI has no arithmetic for, are gathered, or scattered where there are many, and added here
 * (reduce.c): all ranks have the same bits, rounded once.
 */
enum {
  M_ALLREDUCE, M_REDUCE_SCATTER, M_ALLGATHER, M_ALLTOALL, M_BCAST, M_SEND, M_RECV, M_COMM, M_STATUS_IGNORE, M_BYTE,
  M_TYPES = 16, M_OPS = 32
};
enum { GATHERED = 16 << 10, MPI_TAG = 1, IN_ONE = 0x7fffffff };

static int call_mpi(u64 function, const u64 *a) {
  return ((int (*)(u64, u64, u64, u64, u64, u64, u64))function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
}

static void *room_of(Group *g, u64 bytes) {
  if (bytes > g->room_bytes) {
    __builtin_free(g->room);
    g->room = __builtin_malloc(bytes);
    g->room_bytes = g->room ? bytes : 0;
  }
  return g->room;
}

static int adds(u64 type) { return type != BF16 && type != F16; }

static int mpi_all_reduce(Group *g, const Call *c, u8 *out, const u8 *in) {
  u64 *m = g->mpi, n = g->size, width = SIZES[c->type], bytes = c->count * width;
  const void *from[MOST_RANKS];
  if (adds(c->type))
    return call_mpi(m[M_ALLREDUCE], (u64[7]){(u64)in, (u64)out, c->count, m[M_TYPES + c->type], m[M_OPS + c->op],
                                             m[M_COMM]});
  if (bytes <= GATHERED) {
    u8 *all = room_of(g, n * bytes);
    if (!all) return 1;
    int wrong = call_mpi(m[M_ALLGATHER], (u64[7]){(u64)in, bytes, m[M_BYTE], (u64)all, bytes, m[M_BYTE], m[M_COMM]});
    for (u64 r = 0; r < n; r++) from[r] = all + r * bytes;
    if (!wrong) reduce(out, from, n, c->count, c->type, c->op);
    return wrong;
  }
  u64 share = (c->count + n - 1) / n, part = share * width;
  u8 *room = room_of(g, (2 * n + 1) * part), *all = room + n * part, *own = all + n * part;
  if (!room) return 1;
  memcpy(room, in, bytes);
  memset(room + bytes, 0, n * part - bytes);
  int wrong = call_mpi(m[M_ALLTOALL], (u64[7]){(u64)room, part, m[M_BYTE], (u64)all, part, m[M_BYTE], m[M_COMM]});
  if (wrong) return wrong;
  for (u64 r = 0; r < n; r++) from[r] = all + r * part;
  reduce(own, from, n, share, c->type, c->op);
  wrong = call_mpi(m[M_ALLGATHER], (u64[7]){(u64)own, part, m[M_BYTE], (u64)room, part, m[M_BYTE], m[M_COMM]});
  if (!wrong) memcpy(out, room, bytes);
  return wrong;
}

static int mpi_reduce_scatter(Group *g, const Call *c, u8 *out, const u8 *in) {
  u64 *m = g->mpi, n = g->size, part = c->count * SIZES[c->type];
  const void *from[MOST_RANKS];
  if (adds(c->type))
    return call_mpi(m[M_REDUCE_SCATTER], (u64[7]){(u64)in, (u64)out, c->count, m[M_TYPES + c->type],
                                                  m[M_OPS + c->op], m[M_COMM]});
  u8 *all = room_of(g, n * part);
  if (!all) return 1;
  int wrong = call_mpi(m[M_ALLTOALL], (u64[7]){(u64)in, part, m[M_BYTE], (u64)all, part, m[M_BYTE], m[M_COMM]});
  for (u64 r = 0; r < n; r++) from[r] = all + r * part;
  if (!wrong) reduce(out, from, n, c->count, c->type, c->op);
  return wrong;
}

static int mpi_call(Group *g, const Call *c, u8 *out, const u8 *in) {
  u64 *m = g->mpi, bytes = c->count * SIZES[c->type];
  switch (c->kind) {
    case ALL_REDUCE: return mpi_all_reduce(g, c, out, in);
    case REDUCE_SCATTER: return mpi_reduce_scatter(g, c, out, in);
    case ALL_GATHER:
      return call_mpi(m[M_ALLGATHER], (u64[7]){(u64)in, bytes, m[M_BYTE], (u64)out, bytes, m[M_BYTE], m[M_COMM]});
    case ALL_TO_ALL:
      return call_mpi(m[M_ALLTOALL], (u64[7]){(u64)in, bytes, m[M_BYTE], (u64)out, bytes, m[M_BYTE], m[M_COMM]});
    case BROADCAST:
      if (g->rank == c->peer && out != in) memcpy(out, in, bytes);
      return call_mpi(m[M_BCAST], (u64[7]){(u64)out, bytes, m[M_BYTE], c->peer, m[M_COMM]});
    case SEND: return call_mpi(m[M_SEND], (u64[7]){(u64)in, bytes, m[M_BYTE], c->peer, MPI_TAG, m[M_COMM]});
    case RECV:
      return call_mpi(m[M_RECV], (u64[7]){(u64)out, bytes, m[M_BYTE], c->peer, MPI_TAG, m[M_COMM], m[M_STATUS_IGNORE]});
  }
  return 1;
}

/* MPI counts in 31 bits (transports/mpi.py: check_size). */
int mpi_run(Group *g, const Call *c, void *out, const void *in) {
  if (!c->count) return OK;
  int native = (c->kind == ALL_REDUCE || c->kind == REDUCE_SCATTER) && adds(c->type);
  if (c->count * (native ? 1 : SIZES[c->type]) > IN_ONE) return FAILED;
  return mpi_call(g, c, out, in) ? FAILED : OK;
}
