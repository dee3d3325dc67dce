#ifdef OP_join
// Rows whose parts were reduced one by one: the log-sum-exp of row i from the maxima and the masses of its PARTS parts.
__kernel __attribute__((reqd_work_group_size(L, 1, 1)))
void join_parts(X_ARG, TARGET_ARG, LSE_ARG, EACH_ARG, TOP_ARG, MASS_ARG)
{
    const int i = get_global_id(0);
    if (i >= N) return;
    float peak = -INFINITY, sum = 0.0f;
    for (int p = 0; p < PARTS; ++p) {
        const float top = TOP_AT(i, p);
        peak = top > peak ? top : peak;
    }
    for (int p = 0; p < PARTS; ++p) sum += MASS_AT(i, p) * exp_s(TOP_AT(i, p) - peak);
    const float lse = peak + log(sum);
    const int target = TARGET_AT(i);
    LSE_STORE1(lse, i);
    EACH_STORE1(target == IGNORE ? 0.0f : lse - X_AT(i, target), i);
}

#elif defined(OP_target)
// What a row's gradient lacks at its target, once its parts are written (perhaps over X).
__kernel __attribute__((reqd_work_group_size(L, 1, 1)))
void at_targets(DLOSS_ARG, TARGET_ARG, WEIGHT_ARG, DX_ARG)
{
    const int i = get_global_id(0);
    if (i >= N) return;
    const int target = TARGET_AT(i);
    if (target == IGNORE) return;
    DX_STORE1(DX_AT(i, target) - DLOSS_AT() / WEIGHT_AT(), i, target);
}

#else
// The mean of what each counted row loses, by one work group of L items: every item adds up rows L apart, in blocks so
// that rounding does not grow with the number of rows, and the items' sums are joined in a fixed order. With no counted
// row the mean is 0/0: NaN, as in torch.

#ifdef OP_nll
#define PARAMS LOGP_ARG, TARGET_ARG
#define LOSS_OF(i, t) (-LOGP_AT(i, t))
#else
#define PARAMS EACH_ARG, TARGET_ARG
#define LOSS_OF(i, t) EACH_AT(i)
#endif
#define BLOCK 64

__kernel __attribute__((reqd_work_group_size(L, 1, 1)))
void mean_loss(PARAMS, LOSS_ARG, WEIGHT_ARG)
{
    __local float sums[L], counts[L];
    const int lane = get_local_id(0);
    float sum = 0.0f, count = 0.0f;
    for (int first = 0; first < N; first += L * BLOCK) {
        float part = 0.0f;
        for (int i = first + lane; i < min(first + L * BLOCK, N); i += L) {
            const int t = TARGET_AT(i);
            if (t != IGNORE) { part += LOSS_OF(i, t); count += 1.0f; }
        }
        sum += part;
    }
    sums[lane] = sum;
    counts[lane] = count;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int half_ = L / 2; half_ > 0; half_ /= 2) {
        if (lane < half_) { sums[lane] += sums[lane + half_]; counts[lane] += counts[lane + half_]; }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (lane == 0) { LOSS_STORE1(sums[0] / counts[0]); WEIGHT_STORE1(counts[0]); }
}
#endif
