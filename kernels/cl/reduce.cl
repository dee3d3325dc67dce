// Sums and maxima over one axis of a matrix. `kept` runs over the axis that stays, `red` over the one that goes; OP says
// which of the matrix' axes they are. Four orientations:
//   reduce_across  vectors of W along the kept axis, NV of them a work item: no reduction across lanes;
//   reduce_block   the same for a work group: LANES vectors, and ROWS of the reduced axis at once, joined in local memory;
//   reduce_along   vectors of W along the reduced axis, ROWS kept values a work item;
//   reduce_group   the same, ROWS kept values a group, each over L work items, joined through local memory.
// The reduced axis may be cut into SPLIT chunks whose results go to scratch; reduce_final then joins them. All is joined
// in a fixed order, so that the result does not depend on timing.

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#if W == 1
#define VEC ELEM
#define LOADV(A) A##_AT
#else
#define VEC CAT(ELEM, W)
#define LOADV(A) CAT(A##_LOAD, W)
#endif
#define STORE1(A, v, i) CAT(A##_STORE, W)(v, i)
#define STORE2(A, v, i, j) CAT(A##_STORE, W)(v, i, j)

#ifdef MAXIMUM
// NaN wins, as in numpy and torch.
static ELEM join1(ELEM a, ELEM b) { return (a >= b || a != a) ? a : b; }
#if W == 1
#define joinv join1
#else
static VEC joinv(VEC a, VEC b) { return (a >= b) | (a != a) ? a : b; }
#endif
#else
#define join1(a, b) ((a) + (b))
#define joinv(a, b) ((a) + (b))
#endif

#if W == 1
#define LANES_OF(v) (v)
#else
static ELEM lanes_(const ELEM *x)
{
    ELEM part[W];
    for (int n = 0; n < W; ++n) part[n] = x[n];
    for (int half_ = W / 2; half_ > 0; half_ /= 2)
        for (int n = 0; n < half_; ++n) part[n] = join1(part[n], part[n + half_]);
    return part[0];
}
#define LANES_OF(v) lanes_((const ELEM *)&(v))
#endif

#ifdef OP_reduce
#define V_LD(A) LOADV(A)(kept, red)
#define S_LD(A) A##_AT(kept, red)
#define PARAMS_IN X_ARG
#define STEP(T, LD, LDR, JOIN, a, b) a = JOIN(a, LD(X));
#define HOLD
#define TWO 0
#define PARAMS_OUT Y_ARG
#define OUT0 Y
#define OUT1 Y
#endif

#ifdef OP_affine
#define V_LD(A) LOADV(A)(red, kept)
#define S_LD(A) A##_AT(red, kept)
#define PARAMS_IN DY_ARG, X_ARG, MEAN_ARG, RSTD_ARG
#define STEP(T, LD, LDR, JOIN, a, b) { const T d = LD(DY); a += d * ((LD(X) - LDR(MEAN)) * LDR(RSTD)); b += d; }
#define HOLD const float MEAN_held = MEAN_AT(red), RSTD_held = RSTD_AT(red);
#define TWO 1
#define PARAMS_OUT DG_ARG, DB_ARG
#define OUT0 DG
#define OUT1 DB
#endif

#define R_SCALAR(A) A##_AT(red)
#define R_VECTOR(A) LOADV(A)(red)
#define R_HELD(A) A##_held

#if SPLIT == 1
#define PARAMS PARAMS_IN, PARAMS_OUT
#define PUT_S(a, b) { PUT_(OUT0, (a) * SCALE, kept); if (TWO) PUT_(OUT1, b, kept); }
#define PUT_V(a, b) { PUT_V_(OUT0, (a) * SCALE) if (TWO) { PUT_V_(OUT1, b) } }
#define PUT_V_(A, v) PUT_V__(A, v)
#define PUT_V__(A, v) STORE1(A, v, kept);
#else
#if TWO
#define PARAMS PARAMS_IN, P_ARG, Q_ARG
#define FINAL_PARAMS P_ARG, Q_ARG, PARAMS_OUT
#else
#define PARAMS PARAMS_IN, P_ARG
#define FINAL_PARAMS P_ARG, PARAMS_OUT
#define Q_AT P_AT
#define Q_STORE1 P_STORE1
#define Q_STORE2 P_STORE2
#define Q_STORE4 P_STORE4
#define Q_STORE8 P_STORE8
#define Q_STORE16 P_STORE16
#endif
#define PUT_S(a, b) { P_STORE1(a, s, kept); if (TWO) Q_STORE1(b, s, kept); }
#define PUT_V(a, b) { STORE2(P, a, s, kept); if (TWO) { STORE2(Q, b, s, kept); } }
#endif
#define PUT_(A, v, i) PUT__(A, v, i)
#define PUT__(A, v, i) A##_STORE1(v, i)

#ifdef ENTRY_across
#define COLUMN(T, LD, JOIN, PUT) \
    { T a = (T)(START), b = (T)(START); \
      for (int red = first; red < last; ++red) { STEP(T, LD, R_SCALAR, JOIN, a, b) } \
      PUT(a, b) }
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void reduce_across(PARAMS)
{
    const int s = (int)get_group_id(0) / GROUPS, g = (int)get_group_id(0) % GROUPS;
    const int first = s * CHUNK, last = min(first + CHUNK, RED);
    const int begin = (g * ITEMS + (int)get_local_id(0)) * (W * NV);
    if (begin + W * NV <= KEPT) {
        VEC a[NV], b[NV];
        for (int n = 0; n < NV; ++n) a[n] = b[n] = (VEC)(START);
        for (int red = first; red < last; ++red) {
            HOLD
#pragma unroll
            for (int n = 0; n < NV; ++n) {
                const int kept = begin + n * W;
                STEP(VEC, V_LD, R_HELD, joinv, a[n], b[n])
            }
        }
        for (int n = 0; n < NV; ++n) {
            const int kept = begin + n * W;
            PUT_V(a[n], b[n])
        }
    } else {
        int kept = begin;
        for (; kept + W <= KEPT; kept += W) COLUMN(VEC, V_LD, joinv, PUT_V)
        for (; kept < KEPT; ++kept) COLUMN(ELEM, S_LD, join1, PUT_S)
    }
}
#endif

#ifdef ENTRY_along
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void reduce_along(PARAMS)
{
    const int s = (int)get_group_id(0) / GROUPS, g = (int)get_group_id(0) % GROUPS;
    const int first = s * CHUNK, last = min(first + CHUNK, RED);
    for (int q = 0; q < ROWS; ++q) {
        const int kept = g * ROWS + q;
        if (kept >= KEPT) break;
        VEC a = (VEC)(START), b = (VEC)(START);
        ELEM a1 = START, b1 = START;
        int red = first;
        for (; red + W <= last; red += W) { STEP(VEC, V_LD, R_VECTOR, joinv, a, b) }
        for (; red < last; ++red) { STEP(ELEM, S_LD, R_SCALAR, join1, a1, b1) }
        a1 = join1(a1, LANES_OF(a));
        b1 = join1(b1, LANES_OF(b));
        PUT_S(a1, b1)
    }
}
#endif

#ifdef ENTRY_block
__kernel __attribute__((reqd_work_group_size(LANES * ROWS, 1, 1)))
void reduce_block(PARAMS)
{
    __local VEC part[TWO + 1][ROWS][LANES];
    const int s = (int)get_group_id(0) / GROUPS, g = (int)get_group_id(0) % GROUPS;
    const int lane = (int)get_local_id(0) % LANES, row = (int)get_local_id(0) / LANES;
    const int first = s * CHUNK + row, last = min((s + 1) * CHUNK, RED), begin = (g * LANES + lane) * W;
    VEC a = (VEC)(START), b = (VEC)(START);
    if (begin + W <= KEPT) {
        const int kept = begin;
        // Loads take long, and those of several rows do not wait for each other.
#pragma unroll 8
        for (int red = first; red < last; red += ROWS) { STEP(VEC, V_LD, R_SCALAR, joinv, a, b) }
    }
#if W > 1
    for (int n = 0; n < W && begin + W > KEPT; ++n) {
        const int kept = begin + n;
        ELEM a1 = START, b1 = START;
        for (int red = first; kept < KEPT && red < last; red += ROWS) { STEP(ELEM, S_LD, R_SCALAR, join1, a1, b1) }
        ((ELEM *)&a)[n] = a1;
        ((ELEM *)&b)[n] = b1;
    }
#endif
    part[0][row][lane] = a;
    if (TWO) part[TWO][row][lane] = b;
    for (int half_ = ROWS / 2; half_ > 0; half_ /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (row < half_)
            for (int n = 0; n <= TWO; ++n) part[n][row][lane] = joinv(part[n][row][lane], part[n][row + half_][lane]);
    }
    if (row > 0) return;
    a = part[0][0][lane];
    b = part[TWO][0][lane];
    if (begin + W <= KEPT) {
        const int kept = begin;
        PUT_V(a, b)
    } else {
        for (int kept = begin; kept < KEPT; ++kept) { PUT_S(((ELEM *)&a)[kept - begin], ((ELEM *)&b)[kept - begin]) }
    }
}
#endif

#ifdef ENTRY_group
__kernel __attribute__((reqd_work_group_size(L * ROWS, 1, 1)))
void reduce_group(PARAMS)
{
    __local ELEM parts[TWO + 1][ROWS][L];
    const int s = (int)get_group_id(0) / GROUPS, lane = (int)get_local_id(0) % L, row = (int)get_local_id(0) / L;
    const int slot = (int)get_group_id(0) % GROUPS * ROWS + row, live = slot < KEPT, kept = live ? slot : KEPT - 1;
    const int first = s * CHUNK, last = live ? min(first + CHUNK, RED) : first;
    VEC a = (VEC)(START), b = (VEC)(START);
    ELEM a1 = START, b1 = START;
#pragma unroll 4
    for (int red = first + lane * W; red + W <= last; red += L * W) { STEP(VEC, V_LD, R_VECTOR, joinv, a, b) }
    if (W > 1) {
        const int red = first + (last - first) / W * W + lane;
        if (red < last) { STEP(ELEM, S_LD, R_SCALAR, join1, a1, b1) }
    }
    parts[0][row][lane] = join1(a1, LANES_OF(a));
    if (TWO) parts[TWO][row][lane] = join1(b1, LANES_OF(b));
    for (int half_ = L / 2; half_ > 0; half_ /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_)
            for (int n = 0; n <= TWO; ++n) parts[n][row][lane] = join1(parts[n][row][lane], parts[n][row][lane + half_]);
    }
    if (lane == 0 && live) PUT_S(parts[0][row][0], parts[TWO][row][0])
}
#endif

#ifdef ENTRY_final
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void reduce_final(FINAL_PARAMS)
{
    const int begin = ((int)get_group_id(0) * ITEMS + (int)get_local_id(0)) * BLOCK;
    for (int kept = begin; kept < min(begin + BLOCK, KEPT); ++kept) {
        ELEM a = START, b = START;
#pragma unroll 8
        for (int s = 0; s < SPLIT; ++s) {
            a = join1(a, P_AT(s, kept));
            if (TWO) b = join1(b, Q_AT(s, kept));
        }
        PUT_(OUT0, a * SCALE, kept);
        if (TWO) PUT_(OUT1, b, kept);
    }
}
#endif
