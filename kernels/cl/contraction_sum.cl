// Z[b,r,c] = ALPHA * sum over q of P[q,b,r,c]: what contraction_staged's ranges of k add up to, in a fixed order.
// With an epilogue FINISH and FINISH1 run it on four sums and on one, and store its results.

#ifndef EPILOGUE
#define MORE_ARGS
#define FINISH1(v, b, r, c) Z_STORE1(v, b, r, c)
#define FINISH(v, b, r, c) Z_STORE4(v, b, r, c)
#endif

__kernel void contraction_sum(P_ARG, Z_ARG MORE_ARGS) {
    const int c = get_global_id(0) * 4, r = get_global_id(1), b = get_global_id(2);
    if (c >= CN || r >= RN) return;
    float4 sum = P_LOAD4(0, b, r, c);
#pragma unroll
    for (int q = 1; q < SPLIT; ++q) sum += P_LOAD4(q, b, r, c);
    sum *= ALPHA;
#if ZW == 4
    if (CN % 4 == 0 || c + 4 <= CN) {
        FINISH(sum, b, r, c);
        return;
    }
#endif
#if ZW != 4 || CN % 4
    FINISH1(sum.x, b, r, c);
    if (c + 1 < CN) FINISH1(sum.y, b, r, c + 1);
    if (c + 2 < CN) FINISH1(sum.z, b, r, c + 2);
    if (c + 3 < CN) FINISH1(sum.w, b, r, c + 3);
#endif
}
