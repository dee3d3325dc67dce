// Rows of a table, read and added to by id. ROWS rows one after the other, RL of them at once in a work group, LANES work
// items across a row, each a vector of W. The table's gradient is summed without atomics, in the order of the rows, so
// that it is the same in every run.

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#if W == 1
#define LOADV(A) A##_AT
#define STOREV(A, v, i, j) A##_AT(i, j) = (v)
#else
#define LOADV(A) CAT(A##_LOAD, W)
#define STOREV(A, v, i, j) CAT(A##_STORE, W)(v, i, j)
#endif
#define ENTRY __kernel __attribute__((reqd_work_group_size(RL * LANES, 1, 1)))
#define EACH_VECTOR for (int j = lane * W; j + W <= D; j += LANES * W)
#define EACH_LEFT if (W > 1) for (int j = D / W * W + lane; j < D; j += LANES)

#ifdef OP_gather
ENTRY void gather(TABLE_ARG, IDS_ARG, Y_ARG)
{
    const int lane = (int)get_local_id(0) % LANES;
    for (int q = 0; q < ROWS; ++q) {
        const int i = ((int)get_group_id(0) * ROWS + q) * RL + (int)get_local_id(0) / LANES;
        if (i >= N) break;
        const int id = IDS_AT(i);
        EACH_VECTOR { STOREV(Y, LOADV(TABLE)(id, j), i, j); }
        EACH_LEFT { Y_AT(i, j) = TABLE_AT(id, j); }
    }
}
#endif

#ifdef OP_columns
// A work item owns BLOCK columns of the whole table and walks the rows in order. The table was zeroed before.
__kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void columns(DY_ARG, IDS_ARG, GRAD_ARG)
{
    const int begin = (int)get_global_id(0) * BLOCK, end = min(begin + BLOCK, D);
    for (int i = 0; i < N; ++i) {
        const int id = IDS_AT(i);
        if (id == PADDING) continue;
        int j = begin;
        for (; j + W <= end; j += W) STOREV(GRAD, LOADV(GRAD)(id, j) + LOADV(DY)(i, j), id, j);
        if (W > 1) for (; j < end; ++j) GRAD_AT(id, j) += DY_AT(i, j);
    }
}
#endif

#ifdef OP_owner
// The first row with an id owns that table row: it adds up all later rows with the same id. The table was zeroed before.
ENTRY void owner(DY_ARG, IDS_ARG, GRAD_ARG)
{
    const int lane = (int)get_local_id(0) % LANES;
    for (int q = 0; q < ROWS; ++q) {
        const int i = ((int)get_group_id(0) * ROWS + q) * RL + (int)get_local_id(0) / LANES;
        if (i >= N) break;
        const int id = IDS_AT(i);
        int taken = id == PADDING;
        for (int p = 0; p < i; ++p) taken |= IDS_AT(p) == id;
        if (taken) continue;
        EACH_VECTOR { STOREV(GRAD, LOADV(DY)(i, j), id, j); }
        EACH_LEFT { GRAD_AT(id, j) = DY_AT(i, j); }
        for (int p = i + 1; p < N; ++p) {
            if (IDS_AT(p) != id) continue;
            EACH_VECTOR { STOREV(GRAD, LOADV(GRAD)(id, j) + LOADV(DY)(p, j), id, j); }
            EACH_LEFT { GRAD_AT(id, j) += DY_AT(p, j); }
        }
    }
}
#endif
