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
    if (lane == 0) { LOSS_AT() = sums[0] / counts[0]; WEIGHT_AT() = counts[0]; }
}
