// Operations over the rows of matrices [M, K]: a few passes over a row, each reducing it or writing it.
//
// An operation is written once as steps over an abstract vector; ORIENT says what that vector is:
//   ITEM   one work item a row (ROWS rows one after the other), W neighbours along K, remainder by scalars;
//   COLS   one work item for W neighbouring rows, one K at a time: nothing to reduce across lanes;
//   GROUP  L work items a row, each NV vectors of W along K, reduced through local memory; ROWS rows a group.
// With KEEP a work item keeps its rows in private memory (GROUP: in registers) between passes, so that each element is
// read and written once whatever the layout: KEPT(x) declares the store, A(put)(x, v) fills it, and A(get)(x, from
// memory) reads it back, or evaluates its second argument where nothing is kept.
//
// A step is a macro STEP(T, LD, LDK, ST, A): T the vector type, LD(X) loads X[i, j], LDK(G) loads G[j], ST(Y, v) stores
// Y[i, j], A(sum) names this vector's part of accumulator `sum` and A(exp) its function. LDM and STM move values of the
// row, of type ROW_T.

#define ITEM 0
#define COLS 1
#define GROUP 2
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

#if W == 1
#define VEC float
#define LOADV(A) A##_AT
#define HADD(v) (v)
#define HMAX(v) (v)
#else
#define VEC CAT(float, W)
#define LOADV(A) CAT(A##_LOAD, W)
#define HADD(v) CAT(lanesum, W)(v)
#define HMAX(v) CAT(lanemax, W)(v)
#endif

// Not fmax, which PoCL 3.0 calls as a function. A NaN is passed over here and shows in the sum of exponentials.
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
static float lanesum2(float2 v) { return v.x + v.y; }
static float lanesum4(float4 v) { return lanesum2(v.lo + v.hi); }
static float lanesum8(float8 v) { return lanesum4(v.lo + v.hi); }
static float lanesum16(float16 v) { return lanesum8(v.lo + v.hi); }
static float lanemax2(float2 v) { return LARGER(v.x, v.y); }
static float lanemax4(float4 v) { return lanemax2(LARGER(v.lo, v.hi)); }
static float lanemax8(float8 v) { return lanemax4(LARGER(v.lo, v.hi)); }
static float lanemax16(float16 v) { return lanemax8(LARGER(v.lo, v.hi)); }

#define V_ST(A, v) CAT(A##_STORE, W)(v, i, j)
#define V_LD(A) LOADV(A)(i, j)
#if W == 1
#define exp_v exp_s
#endif
#define V_ACC(a) a##_v
#if KEEP
#if ORIENT == COLS
#define SLOT j
#define KEPT(x) VEC x##_kept[K];
#elif ORIENT == ITEM
#define SLOT j / W
#define KEPT(x) VEC x##_kept[(K + W - 1) / W];
#else
#define SLOT nth
#define KEPT(x) VEC x##_kept[NV]; float x##_left;
#endif
#define put_v(x, v) x##_kept[SLOT] = (v);
#define get_v(x, other) x##_kept[SLOT]
#if ORIENT == GROUP
#define put_s(x, v) x##_left = (v);
#define get_s(x, other) x##_left
#else
#define put_s(x, v) ((float *)x##_kept)[j] = (v);
#define get_s(x, other) ((float *)x##_kept)[j]
#endif
#else
#define KEPT(x)
#define put_v(x, v)
#define get_v(x, other) (other)
#define put_s(x, v)
#define get_s(x, other) (other)
#endif
#define S_LD(A) A##_AT(i, j)
#define S_LDK(A) A##_AT(j)
#define S_ST(A, v) A##_STORE1(v, i, j)
#define S_ACC(a) a##_s

#if ORIENT == COLS
#define ROW_T VEC
#define V_LDK(A) A##_AT(j)
#define LDM(A) LOADV(A)(i)
#define STM(A, v) CAT(A##_STORE, W)(v, i)
#define OVER_K(STEP) for (int j = 0; j < K; ++j) { STEP(VEC, V_LD, V_LDK, V_ST, V_ACC) }
#define ACCUMULATOR(a, start) VEC a##_v = (VEC)(start);
#define SUM_OF(a) const VEC a = a##_v;
#define MAX_OF(a) const VEC a = a##_v;
#define ROWS_BEGIN { const int i = FIRST + (int)get_global_id(0) * W; if (i + W > LAST) return;
#define ROWS_END }

#else
#define ROW_T float
#define V_LDK(A) LOADV(A)(j)
#define LDM(A) A##_AT(i)
#define ACCUMULATOR(a, start) VEC a##_v = (VEC)(start); float a##_s = start;
#if ORIENT == ITEM
#define STM(A, v) A##_STORE1(v, i)
#if W == 1
#define OVER_K(STEP) for (int j = 0; j < K; ++j) { STEP(float, S_LD, S_LDK, S_ST, S_ACC) }
#else
#define OVER_K(STEP) \
    for (int j = 0; j + W <= K; j += W) { STEP(VEC, V_LD, V_LDK, V_ST, V_ACC) } \
    for (int j = K / W * W; j < K; ++j) { STEP(float, S_LD, S_LDK, S_ST, S_ACC) }
#endif
#define SUM_OF(a) const float a = HADD(a##_v) + a##_s;
#define MAX_OF(a) const float a = LARGER(HMAX(a##_v), a##_s);
#define ROWS_BEGIN for (int q = 0; q < ROWS; ++q) { const int i = (int)get_group_id(0) * ROWS + q; if (i >= M) break;
#define ROWS_END }
#define AFTER_STORES
#define STM_AT_TARGET(v) DX_STORE1(v, i, target)

#else
#define STM(A, v) if (lane == 0 && live) A##_STORE1(v, i)
#define LEFT(STEP) if (W > 1) { const int j = K / W * W + lane; if (j < end) { STEP(float, S_LD, S_LDK, S_ST, S_ACC) } }
#if KEEP
// Written out, so that what is kept lies in registers whether or not a compiler unrolls.
#define NTH(n, STEP) \
    { const int nth = n, j = (nth * L + lane) * W; if (j + W <= end) { STEP(VEC, V_LD, V_LDK, V_ST, V_ACC) } }
#define NTH_1(STEP) NTH(0, STEP)
#define NTH_2(STEP) NTH_1(STEP) NTH(1, STEP)
#define NTH_3(STEP) NTH_2(STEP) NTH(2, STEP)
#define NTH_4(STEP) NTH_3(STEP) NTH(3, STEP)
#define NTH_5(STEP) NTH_4(STEP) NTH(4, STEP)
#define NTH_6(STEP) NTH_5(STEP) NTH(5, STEP)
#define NTH_7(STEP) NTH_6(STEP) NTH(6, STEP)
#define NTH_8(STEP) NTH_7(STEP) NTH(7, STEP)
#define OVER_K(STEP) CAT(NTH_, NV)(STEP) LEFT(STEP)
#else
#define OVER_K(STEP) \
    for (int j = lane * W; j + W <= end; j += L * W) { STEP(VEC, V_LD, V_LDK, V_ST, V_ACC) } \
    LEFT(STEP)
#endif
#define TURN part + turn * (ROWS * PLACES)
#define SUM_OF(a) const float a = across(TURN, lane, HADD(a##_v) + a##_s, 0); turn ^= 1;
#define MAX_OF(a) const float a = across(TURN, lane, LARGER(HMAX(a##_v), a##_s), 1); turn ^= 1;
// OpenCL C declares local memory at a kernel's outermost scope: no braces here. Two places by turns: who is ahead in one
// reduction must not overwrite what another still reads of the one before.
#define ROWS_BEGIN \
    __local float4 places[2][ROWS][PLACES / 4]; \
    const int lane = get_local_id(0) % L, slot = (int)get_group_id(0) * ROWS + (int)get_local_id(0) / L; \
    __local float *const part = (__local float *)places[0][get_local_id(0) / L]; \
    const int live = slot < M, i = live ? slot : M - 1, end = live ? K : 0; \
    int turn = 0;
#define ROWS_END
#define AFTER_STORES barrier(CLK_GLOBAL_MEM_FENCE);
#define STM_AT_TARGET(v) if (lane == 0 && live) DX_STORE1(v, i, target)

// The sum or maximum over a row's items, the same for each of them. All read all, which takes fewer barriers than a
// tree; where they are many, eight at a time are put together first.
#if L <= 64
#define PLACES L
#else
#define PLACES (L + L / 8)
#endif
static float joined(__local const float *x, int count, int maximum)
{
    float4 all = *(__local const float4 *)x;
    for (int n = 4; n < count; n += 4) {
        const float4 more = *(__local const float4 *)(x + n);
        all = maximum ? LARGER(all, more) : all + more;
    }
    return maximum ? lanemax4(all) : lanesum4(all);
}

static float across(__local float *part, int lane, float x, int maximum)
{
    part[lane] = x;
    barrier(CLK_LOCAL_MEM_FENCE);
#if L <= 64
    return joined(part, L, maximum);
#else
    if (lane < L / 8) part[L + lane] = joined(part + lane * 8, 8, maximum);
    barrier(CLK_LOCAL_MEM_FENCE);
    return joined(part + L, L / 8, maximum);
#endif
}
#endif
#endif

#if ORIENT == GROUP
#define ENTRY __attribute__((reqd_work_group_size(ROWS * L, 1, 1)))
#else
#define ENTRY __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
#endif

#define PEAK(T, LD, LDK, ST, A) const T x = LD(X); A(put)(x, x) A(peak) = LARGER(A(peak), x);
#define EXP_SUM(T, LD, LDK, ST, A) A(sum) += A(exp)(A(get)(x, LD(X)) - peak);
// The row's largest value `peak`, and the `sum` of its exponentials from there, which STEP adds up.
#define EXPONENTIALS(STEP) \
    KEPT(x) \
    ACCUMULATOR(peak, -INFINITY) \
    OVER_K(PEAK) \
    MAX_OF(peak) \
    ACCUMULATOR(sum, 0.0f) \
    OVER_K(STEP) \
    SUM_OF(sum)
// Where exponentials are counted from: of infinity less infinity there is none.
#define ORIGIN(T, peak) LARGER(peak, (T)(-FLT_MAX))
#if ORIENT == GROUP && !KEEP
// The same where nothing but the sum is wanted, reading each element once: every lane of every item has a peak and a sum
// of its own. AT_ONCE loads do not wait for each other, nor for the exponential that a new peak costs.
#define AT_ONCE 4
#define LOG_SUM(origin_of) \
    VEC top = (VEC)(-INFINITY), mass = (VEC)(0.0f); \
    float top_s = -INFINITY, mass_s = 0.0f; \
    int j = lane * W; \
    for (; j + (AT_ONCE - 1) * L * W + W <= end; j += AT_ONCE * L * W) { \
        VEC x[AT_ONCE]; \
        VEC now = top; \
        for (int n = 0; n < AT_ONCE; ++n) x[n] = LOADV(X)(i, j + n * L * W); \
        for (int n = 0; n < AT_ONCE; ++n) now = LARGER(now, x[n]); \
        const VEC from = ORIGIN(VEC, now); \
        mass *= exp_v(top - from); \
        for (int n = 0; n < AT_ONCE; ++n) mass += exp_v(x[n] - from); \
        top = now; \
    } \
    for (; j + W <= end; j += L * W) { \
        const VEC x = LOADV(X)(i, j), now = LARGER(top, x), from = ORIGIN(VEC, now); \
        mass = mass * exp_v(top - from) + exp_v(x - from); \
        top = now; \
    } \
    if (W > 1 && K / W * W + lane < end) { top_s = X_AT(i, K / W * W + lane); mass_s = exp_s(top_s - ORIGIN(float, top_s)); } \
    const float peak = across(part, lane, LARGER(HMAX(top), top_s), 1), from = origin_of(float, peak); \
    const float mine = HADD(mass * exp_v(top - from)) + mass_s * exp_s(top_s - from); \
    const float sum = across(part + ROWS * PLACES, lane, mine, 0);
#define ITSELF(T, peak) (peak)
#endif

#ifdef OP_softmax
#if KEEP
#define EXP_Y(T, LD, LDK, ST, A) const T e = A(exp)(A(get)(x, 0) - peak); A(sum) += e; A(put)(x, e)
#define SCALE_Y(T, LD, LDK, ST, A) const T e = A(get)(x, 0) * scale; ST(Y, e);
#else
#define EXP_Y(T, LD, LDK, ST, A) const T e = A(exp)(LD(X) - peak); A(sum) += e; ST(Y, e);
#define SCALE_Y(T, LD, LDK, ST, A) const T e = LD(Y) * scale; ST(Y, e);
#endif
__kernel ENTRY void softmax(X_ARG, Y_ARG)
{
    ROWS_BEGIN
        EXPONENTIALS(EXP_Y)
        const ROW_T scale = 1.0f / sum;
        OVER_K(SCALE_Y)
    ROWS_END
}
#endif

#ifdef OP_softmax_grad
#define DOT(T, LD, LDK, ST, A) \
    const T dy = LD(DY), y = LD(Y); A(put)(dy, dy) A(put)(y, y) A(dot_) += dy * y;
#define DX_(T, LD, LDK, ST, A) const T d = A(get)(y, LD(Y)) * (A(get)(dy, LD(DY)) - dot_); ST(DX, d);
__kernel ENTRY void softmax_grad(DY_ARG, Y_ARG, DX_ARG)
{
    ROWS_BEGIN
        KEPT(dy) KEPT(y)
        ACCUMULATOR(dot_, 0.0f)
        OVER_K(DOT)
        SUM_OF(dot_)
        OVER_K(DX_)
    ROWS_END
}
#endif

#ifdef OP_log_softmax
#define LOG_Y(T, LD, LDK, ST, A) const T e = A(get)(x, LD(X)) - lse; ST(Y, e);
__kernel ENTRY void log_softmax(X_ARG, Y_ARG)
{
    ROWS_BEGIN
#ifdef LOG_SUM
        LOG_SUM(ITSELF)
#else
        EXPONENTIALS(EXP_SUM)
#endif
        const ROW_T lse = peak + log(sum);
        OVER_K(LOG_Y)
    ROWS_END
}
#endif

#ifdef OP_log_softmax_grad
#define DY_SUM(T, LD, LDK, ST, A) const T dy = LD(DY); A(put)(dy, dy) A(sum) += dy;
#define DX_(T, LD, LDK, ST, A) const T d = A(get)(dy, LD(DY)) - A(exp)(LD(Y)) * sum; ST(DX, d);
__kernel ENTRY void log_softmax_grad(DY_ARG, Y_ARG, DX_ARG)
{
    ROWS_BEGIN
        KEPT(dy)
        ACCUMULATOR(sum, 0.0f)
        OVER_K(DY_SUM)
        SUM_OF(sum)
        OVER_K(DX_)
    ROWS_END
}
#endif

#ifdef OP_layer_norm
#define X_SUM(T, LD, LDK, ST, A) const T x = LD(X); A(put)(x, x) A(sum) += x;
// Deviations from the mean, in a pass of their own: the difference of two large sums would cancel.
#define SQUARES(T, LD, LDK, ST, A) const T d = A(get)(x, LD(X)) - mean; A(square) += d * d;
#define NORMAL_Y(T, LD, LDK, ST, A) const T y = (A(get)(x, LD(X)) - mean) * rstd * LDK(G) + LDK(B); ST(Y, y);
__kernel ENTRY void layer_norm(X_ARG, G_ARG, B_ARG, Y_ARG, MEAN_ARG, RSTD_ARG)
{
    ROWS_BEGIN
        KEPT(x)
        ACCUMULATOR(sum, 0.0f)
        OVER_K(X_SUM)
        SUM_OF(sum)
        const ROW_T mean = sum / (float)K;
        ACCUMULATOR(square, 0.0f)
        OVER_K(SQUARES)
        SUM_OF(square)
        const ROW_T rstd = 1.0f / sqrt(square / (float)K + EPS);
        OVER_K(NORMAL_Y)
        STM(MEAN, mean);
        STM(RSTD, rstd);
    ROWS_END
}
#endif

#ifdef OP_layer_norm_grad
#define TWO_SUMS(T, LD, LDK, ST, A) \
    const T g = LD(DY) * LDK(G), n = (LD(X) - mean) * rstd; \
    A(put)(g, g) A(put)(n, n) A(sum) += g; A(sum_n) += g * n;
#define DX_(T, LD, LDK, ST, A) \
    const T g = A(get)(g, LD(DY) * LDK(G)), n = A(get)(n, (LD(X) - mean) * rstd); \
    const T d = rstd * (g - mean_g - n * mean_gn); ST(DX, d);
__kernel ENTRY void layer_norm_grad(DY_ARG, X_ARG, MEAN_ARG, RSTD_ARG, G_ARG, DX_ARG)
{
    ROWS_BEGIN
        KEPT(g) KEPT(n)
        const ROW_T mean = LDM(MEAN), rstd = LDM(RSTD);
        ACCUMULATOR(sum, 0.0f)
        ACCUMULATOR(sum_n, 0.0f)
        OVER_K(TWO_SUMS)
        SUM_OF(sum)
        SUM_OF(sum_n)
        const ROW_T mean_g = sum / (float)K, mean_gn = sum_n / (float)K;
        OVER_K(DX_)
    ROWS_END
}
#endif

#ifdef OP_cross_entropy
__kernel ENTRY void cross_entropy(X_ARG, TARGET_ARG, LSE_ARG, EACH_ARG)
{
    ROWS_BEGIN
#ifdef LOG_SUM
        LOG_SUM(ITSELF)
#else
        EXPONENTIALS(EXP_SUM)
#endif
        const float lse = peak + log(sum);
        const int target = TARGET_AT(i);
        STM(LSE, lse);
        STM(EACH, target == IGNORE ? 0.0f : lse - X_AT(i, target));
    ROWS_END
}
#endif

#ifdef OP_lse_part
// The maximum of a part of a row and the sum of its exponentials from there. A part that is all -infinity (masked classes)
// sums to zero, where a whole row would be NaN; a NaN stays one.
#define PART_SUM(T, LD, LDK, ST, A) A(sum) += A(exp)(A(get)(x, LD(X)) - origin);
__kernel ENTRY void lse_part(X_ARG, TOP_ARG, MASS_ARG)
{
    ROWS_BEGIN
#ifdef LOG_SUM
        LOG_SUM(ORIGIN)
#else
        KEPT(x)
        ACCUMULATOR(peak, -INFINITY)
        OVER_K(PEAK)
        MAX_OF(peak)
        const float origin = ORIGIN(float, peak);
        ACCUMULATOR(sum, 0.0f)
        OVER_K(PART_SUM)
        SUM_OF(sum)
#endif
        STM(TOP, peak);
        STM(MASS, sum);
    ROWS_END
}
#endif

#ifdef OP_cross_entropy_grad
#define DX_(T, LD, LDK, ST, A) const T d = counted ? A(exp)(LD(X) - lse) * scale : (T)(0.0f); ST(DX, d);
__kernel ENTRY void cross_entropy_grad(DLOSS_ARG, X_ARG, TARGET_ARG, LSE_ARG, WEIGHT_ARG, DX_ARG)
{
    ROWS_BEGIN
        const int target = TARGET_AT(i), counted = target != IGNORE;
        const float lse = LDM(LSE), scale = DLOSS_AT() / WEIGHT_AT();
        OVER_K(DX_)
#ifndef PART
        AFTER_STORES
        if (counted) STM_AT_TARGET(DX_AT(i, target) - scale); // not from X, which DX may have taken the place of
#endif
    ROWS_END
}
#endif

#ifdef OP_nll_loss_grad
#define ZEROS(T, LD, LDK, ST, A) const T d = (T)(0.0f); ST(DX, d);
__kernel ENTRY void nll_loss_grad(DLOSS_ARG, TARGET_ARG, WEIGHT_ARG, DX_ARG)
{
    ROWS_BEGIN
        const int target = TARGET_AT(i);
        OVER_K(ZEROS)
        AFTER_STORES
        if (target != IGNORE) STM_AT_TARGET(-DLOSS_AT() / WEIGHT_AT());
    ROWS_END
}
#endif
