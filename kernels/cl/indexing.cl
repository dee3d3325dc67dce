// Rows of a table, read and added to by id. The table's gradient is summed without atomic additions, in a fixed order, so
// that it is the same in every run.

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#if W == 1
#define VEC float
#define LOADV(A) A##_AT
#else
#define VEC CAT(float, W)
#define LOADV(A) CAT(A##_LOAD, W)
#endif
#define STORE2(A, v, i, j) CAT(A##_STORE, W)(v, i, j)
#define STORE3(A, v, h, i, j) CAT(A##_STORE, W)(v, h, i, j)
#define ENTRY __attribute__((reqd_work_group_size(ROWS_AT_ONCE * LANES, 1, 1)))

#ifdef OP_gather
// ROWS rows one after the other, ROWS_AT_ONCE of them at once in a work group, LANES work items across a row.
__kernel ENTRY void gather(TABLE_ARG, IDS_ARG, Y_ARG)
{
    const int lane = (int)get_local_id(0) % LANES;
    for (int q = 0; q < ROWS; ++q) {
        const int i = ((int)get_group_id(0) * ROWS + q) * ROWS_AT_ONCE + (int)get_local_id(0) / LANES;
        if (i >= N) break;
        const int id = IDS_AT(i);
        for (int j = lane * W; j + W <= D; j += LANES * W) { STORE2(Y, LOADV(TABLE)(id, j), i, j); }
        if (W > 1) for (int j = D / W * W + lane; j < D; j += LANES) Y_STORE1(TABLE_AT(id, j), i, j);
    }
}
#endif

#ifdef OP_columns
// A work item owns BLOCK columns of the whole table and walks the rows in order. The table was zeroed before.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void columns(DY_ARG, IDS_ARG, GRAD_ARG)
{
    const int begin = (int)get_group_id(0) * BLOCK, end = min(begin + BLOCK, D);
    for (int i = 0; i < N; ++i) {
        const int id = IDS_AT(i);
        if (id == PADDING) continue;
        int j = begin;
        for (; j + W <= end; j += W) STORE2(GRAD, LOADV(GRAD)(id, j) + LOADV(DY)(i, j), id, j);
        if (W > 1) for (; j < end; ++j) GRAD_STORE1(GRAD_AT(id, j) + DY_AT(i, j), id, j);
    }
}
#endif

#ifdef OP_block
// A work item owns BLOCK rows of the table: it zeroes them, then adds to them whatever has their ids.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void block(DY_ARG, IDS_ARG, GRAD_ARG)
{
    const int begin = (int)get_group_id(0) * BLOCK, end = min(begin + BLOCK, TARGETS);
    for (int id = begin; id < end; ++id) {
        int j = 0;
        for (; j + W <= D; j += W) STORE2(GRAD, (VEC)(0.0f), id, j);
        if (W > 1) for (; j < D; ++j) GRAD_STORE1(0.0f, id, j);
    }
    for (int i = 0; i < N; ++i) {
        const int id = IDS_AT(i);
        if (id < begin || id >= end || id == PADDING) continue;
        int j = 0;
        for (; j + W <= D; j += W) STORE2(GRAD, LOADV(GRAD)(id, j) + LOADV(DY)(i, j), id, j);
        if (W > 1) for (; j < D; ++j) GRAD_STORE1(GRAD_AT(id, j) + DY_AT(i, j), id, j);
    }
}
#endif

#ifdef OP_rows
// A work group owns BLOCK rows of the table. It looks through all ids, 1024 at a time, and notes in two levels of bits
// where those of its rows are; then LANES work items across a row, ROWS_AT_ONCE rows at once, add them up in order and
// write each row once, also where nothing has its id.

#if N > 1024
#define SO_FAR(LD, i, j) (first > 0 ? LD(i, j) : 0.0f)
#else
#define SO_FAR(LD, i, j) 0.0f
#endif
#define LOWEST(bits) (31 - (int)clz((bits) & -(bits)))
// The position of the next hit, or -1. Whole words of 32 without hits are skipped.
#define NEXT(p) \
    if (!bits && words) { word = LOWEST(words); words &= words - 1; bits = hits[r][word]; } \
    p = bits ? first + word * 32 + LOWEST(bits) : -1; \
    bits &= bits - 1;
// Four loads at a time: each takes long, and they do not wait for each other.
#define ADD_HITS(T, LD, sum, j) \
    { \
        uint words = some[r], bits = 0; \
        int word = 0; \
        while (bits | words) { \
            int p, q, s, t; \
            NEXT(p) NEXT(q) NEXT(s) NEXT(t) \
            const T a = LD(p, j), b = LD(q < 0 ? p : q, j), c = LD(s < 0 ? p : s, j), d = LD(t < 0 ? p : t, j); \
            sum += a; \
            if (q >= 0) sum += b; \
            if (s >= 0) sum += c; \
            if (t >= 0) sum += d; \
        } \
    }

__kernel ENTRY void rows(DY_ARG, IDS_ARG, GRAD_ARG)
{
    __local uint hits[BLOCK][32], some[BLOCK];
    const int item = get_local_id(0), lane = item % LANES, base = (int)get_group_id(0) * BLOCK;
    for (int first = 0; first < N; first += 1024) {
        for (int k = item; k < BLOCK * 32; k += ROWS_AT_ONCE * LANES) hits[k / 32][k % 32] = 0;
        for (int k = item; k < BLOCK; k += ROWS_AT_ONCE * LANES) some[k] = 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int p = item; p < min(1024, N - first); p += ROWS_AT_ONCE * LANES) {
            const int id = IDS_AT(first + p), r = id - base;
            if (r >= 0 && r < BLOCK && id != PADDING) {
                atomic_or(&hits[r][p / 32], 1u << (p % 32));
                atomic_or(&some[r], 1u << (p / 32));
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int r = item / LANES; r < BLOCK; r += ROWS_AT_ONCE) {
            const int id = base + r;
            if (id >= TARGETS || (first > 0 && !some[r])) continue;
            int j = lane * W;
            for (; j + W <= D; j += LANES * W) {
                VEC sum = SO_FAR(LOADV(GRAD), id, j);
                ADD_HITS(VEC, LOADV(DY), sum, j)
                STORE2(GRAD, sum, id, j);
            }
            for (; j < D; ++j) {
                float sum = SO_FAR(GRAD_AT, id, j);
                ADD_HITS(float, DY_AT, sum, j)
                GRAD_STORE1(sum, id, j);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
#endif

#ifdef OP_parts
// Few targets: LANES work items across a stretch of columns, ROWS_AT_ONCE rows at once, each row lane with sums of its
// own for every target, which are joined in order. Of SPLIT > 1 groups of rows each leaves its part for join_parts.
#if SPLIT == 1
#define OUT_ARG GRAD_ARG
#define PUT(v, t, j) STORE2(GRAD, v, t, j);
#define PUT1(v, t, j) GRAD_STORE1(v, t, j);
#else
#define OUT_ARG PART_ARG
#define PUT(v, t, j) STORE3(PART, v, s, t, j);
#define PUT1(v, t, j) PART_STORE1(v, s, t, j);
#endif
__kernel ENTRY void parts(DY_ARG, IDS_ARG, OUT_ARG)
{
    __local VEC sums[ROWS_AT_ONCE][TARGETS][LANES];
    const int lane = (int)get_local_id(0) % LANES, at = (int)get_local_id(0) / LANES;
    const int s = (int)get_group_id(0) / STRETCHES, begin = (int)get_group_id(0) % STRETCHES * (LANES * W);
    const int j = begin + lane * W, end = min((s + 1) * CHUNK, N);
    for (int t = 0; t < TARGETS; ++t) sums[at][t][lane] = (VEC)(0.0f);
    int i = s * CHUNK + at;
    if (j + W <= D) {
        for (; i + 3 * ROWS_AT_ONCE < end; i += 4 * ROWS_AT_ONCE) {
            int id[4];
            VEC x[4];
            for (int n = 0; n < 4; ++n) {
                id[n] = IDS_AT(i + n * ROWS_AT_ONCE);
                x[n] = LOADV(DY)(i + n * ROWS_AT_ONCE, j);
            }
            for (int n = 0; n < 4; ++n)
                if (id[n] != PADDING) sums[at][id[n]][lane] += x[n];
        }
        for (; i < end; i += ROWS_AT_ONCE) {
            const int id = IDS_AT(i);
            if (id != PADDING) sums[at][id][lane] += LOADV(DY)(i, j);
        }
    } else if (j < D) {
        for (; i < end; i += ROWS_AT_ONCE) {
            const int id = IDS_AT(i);
            if (id == PADDING) continue;
            for (int k = j; k < D; ++k) ((__local float *)&sums[at][id][lane])[k - j] += DY_AT(i, k);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int t = at; t < TARGETS; t += ROWS_AT_ONCE) {
        if (j >= D) continue;
        VEC sum = sums[0][t][lane];
        for (int y = 1; y < ROWS_AT_ONCE; ++y) sum += sums[y][t][lane];
        if (j + W <= D) { PUT(sum, t, j) }
        else for (int k = j; k < D; ++k) { PUT1(((float *)&sum)[k - j], t, k) }
    }
}
#endif

#ifdef OP_join
__kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void join_parts(PART_ARG, GRAD_ARG)
{
    const int t = (int)get_group_id(0) / STRETCHES;
    int j = ((int)get_group_id(0) % STRETCHES * LANES + (int)get_local_id(0)) * W;
    if (j + W <= D) {
        VEC sum = LOADV(PART)(0, t, j);
#pragma unroll 8
        for (int s = 1; s < SPLIT; ++s) sum += LOADV(PART)(s, t, j);
        STORE2(GRAD, sum, t, j);
    } else {
        for (; j < D; ++j) {
            float sum = PART_AT(0, t, j);
            for (int s = 1; s < SPLIT; ++s) sum += PART_AT(s, t, j);
            GRAD_STORE1(sum, t, j);
        }
    }
}
#endif
