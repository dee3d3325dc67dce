// Z[b,r,c] = ALPHA * sum over k of X[b,r,k] * Y[b,k,c] over any layouts: MR x NR scalar sums a work item, every element by its
// own index expression. The last resort, and the judge of the others.

#ifndef EPILOGUE
#define MORE_ARGS
#define FINISH1(v, b, r, c) Z_STORE1(v, b, r, c)
#endif

__kernel void contraction_any(X_ARG, Y_ARG, Z_ARG MORE_ARGS) {
    const int b = get_global_id(2);
    const int r0 = get_global_id(R_DIM) * MR, c0 = get_global_id(C_DIM) * NR;
    if (r0 >= RN || c0 >= CN) return;
    float acc[MR][NR];
#pragma unroll
    for (int r = 0; r < MR; ++r)
#pragma unroll
        for (int c = 0; c < NR; ++c) acc[r][c] = 0.0f;
    for (int k = 0; k < KN; ++k) {
        float y[NR];
#pragma unroll
        for (int c = 0; c < NR; ++c) y[c] = Y_READ(YI(b, k, min(c0 + c, CN - 1)));
#pragma unroll
        for (int r = 0; r < MR; ++r) {
            const float x = X_READ(XI(b, min(r0 + r, RN - 1), k));
#pragma unroll
            for (int c = 0; c < NR; ++c) acc[r][c] += x * y[c];
        }
    }
    float out[MR * NR];
#pragma unroll
    for (int r = 0; r < MR; ++r)
#pragma unroll
        for (int c = 0; c < NR; ++c) out[r * NR + c] = acc[r][c] * ALPHA;
    const int rows = min(MR, RN - r0), columns = min(NR, CN - c0);
#pragma unroll 1
    for (int r = 0; r < rows; ++r)
#pragma unroll 1
        for (int c = 0; c < columns; ++c) FINISH1(out[r * NR + c], b, r0 + r, c0 + c);
}
