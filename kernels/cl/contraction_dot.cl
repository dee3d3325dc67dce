// Z[b,r,c] = ALPHA * sum over k of X[b,r,k] * Y[b,k,c], vectors along k: MR x NR/Q vectors of partial sums, each added up across
// its lanes at the end. A vector of Y is KV steps of k in each of Q columns: Q is 1 (dot), or more where Y lies in R-Tiles whose
// KV x Q block is one vector (tile); X's KV steps are then repeated Q times. XLOAD and YLOAD read a vector in the pieces that
// are contiguous. KT is a multiple of KV, and inside KT a vector is XKS or YKS elements after the one before. What is left of K
// is added one by one. Tiles at the border clamp the rows and columns they load and predicate what they store.
// With an epilogue FINISH (ZU sums of each of ZG rows) and FINISH1 run it and store its results; ROLLED: in a loop, for it is
// long.

#ifndef EPILOGUE
#define MORE_ARGS
#define MORE
#endif

inline void tile(X_ARG, Y_ARG, Z_ARG MORE_ARGS, const int b, const int r0, const int c0, const int edge) {
    VT acc[MR][NR / Q];
    int xo[MR], yo[NR / Q];
#pragma unroll
    for (int r = 0; r < MR; ++r) xo[r] = XI(b, edge ? min(r0 + r, RN - 1) : r0 + r, 0);
#pragma unroll
    for (int c = 0; c < NR / Q; ++c) yo[c] = YI(b, 0, edge ? min(c0 + c * Q, (CN - 1) / Q * Q) : c0 + c * Q);
#if XSEP
#define XOFF(r) (edge ? xo[r] : xo[0] + XI(0, r, 0) - XI(0, 0, 0))
#else
#define XOFF(r) xo[r]
#endif
#if YSEP
#define YOFF(c) (edge ? yo[c] : yo[0] + YI(0, 0, (c)*Q) - YI(0, 0, 0))
#else
#define YOFF(c) yo[c]
#endif
#pragma unroll
    for (int r = 0; r < MR; ++r)
#pragma unroll
        for (int c = 0; c < NR / Q; ++c) acc[r][c] = (VT)(0.0f);

#ifdef EPILOGUE
    float out[MR * NR];
#endif
#define STEP(xk, yk) \
    do { \
        VT y[NR / Q]; \
        _Pragma("unroll") for (int c = 0; c < NR / Q; ++c) y[c] = YLOAD(Y + YOFF(c) + (yk)); \
        _Pragma("unroll") for (int r = 0; r < MR; ++r) { \
            const VT x = XLOAD(X + XOFF(r) + (xk)); \
            _Pragma("unroll") for (int c = 0; c < NR / Q; ++c) acc[r][c] += x * y[c]; \
        } \
    } while (0)

    for (int k0 = 0; k0 < KMAIN; k0 += KT) {
        const int xk = XI(0, 0, k0) - XI(0, 0, 0), yk = YI(0, k0, 0) - YI(0, 0, 0);
#pragma unroll KU
        for (int k = 0; k < KT / KV; ++k) STEP(xk + k * XKS, yk + k * YKS);
    }
#if KMAIN + KV <= KN
    {
        const int xk = XI(0, 0, KMAIN) - XI(0, 0, 0), yk = YI(0, KMAIN, 0) - YI(0, 0, 0);
        for (int k = 0; k < (KN - KMAIN) / KV; ++k) STEP(xk + k * XKS, yk + k * YKS);
    }
#endif
#pragma unroll
    for (int r = 0; r < MR; ++r) {
        float sum[NR];
#if Q > 1
#pragma unroll
        for (int c = 0; c < NR / Q; ++c) VSTORE(SUMQ(acc[r][c]), sum + c * Q);
#else
#pragma unroll
        for (int c = 0; c + 4 <= NR; c += 4) {
            const float4 s = SUM4(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3]);
            sum[c] = s.s0, sum[c + 1] = s.s1, sum[c + 2] = s.s2, sum[c + 3] = s.s3;
        }
#pragma unroll
        for (int c = NR / 4 * 4; c < NR; ++c) sum[c] = SUM1(acc[r][c]);
#endif
#if KN % KV
        for (int k = KN / KV * KV; k < KN; ++k) {
            const float x = X_READ(XOFF(r) + XI(0, 0, k) - XI(0, 0, 0));
#pragma unroll
            for (int c = 0; c < NR; ++c) sum[c] += x * Y_READ(YOFF(c / Q) + YI(0, k, c % Q) - YI(0, 0, 0));
        }
#endif
#ifdef EPILOGUE
#pragma unroll
        for (int c = 0; c < NR; ++c) out[r * NR + c] = sum[c];
#else
        if (edge && r0 + r >= RN) continue;
#if ZU == 4
        if (!edge || c0 + NR <= CN) {
#pragma unroll
            for (int c = 0; c < NR; c += 4) {
                const float4 z = (float4)(sum[c], sum[c + 1], sum[c + 2], sum[c + 3]) * ALPHA;
                STORE_Z(z, b, r0 + r, c0 + c);
            }
            continue;
        }
#endif
#pragma unroll
        for (int c = 0; c < NR; ++c)
            if (!edge || c0 + c < CN) Z_STORE1(sum[c] * ALPHA, b, r0 + r, c0 + c);
#endif
    }
#ifdef EPILOGUE
#if ROLLED
#define TURN _Pragma("unroll 1")
#else
#define TURN _Pragma("unroll")
#endif
    if (!edge) {
        TURN for (int r = 0; r < MR; r += ZG) {
            TURN for (int c = 0; c < NR; c += ZU) FINISH(SUMS(r, c) * ALPHA, b, r0 + r, c0 + c);
        }
        return;
    }
    // Value by value, in a loop that stays a loop: unrolled and predicated it would be most of the program.
    const int rows = min(MR, RN - r0), columns = min(NR, CN - c0);
#pragma unroll 1
    for (int r = 0; r < rows; ++r)
#pragma unroll 1
        for (int c = 0; c < columns; ++c) FINISH1(out[r * NR + c] * ALPHA, b, r0 + r, c0 + c);
#endif
}

__kernel void contraction_dot(X_ARG, Y_ARG, Z_ARG MORE_ARGS) {
    const int b = get_global_id(2);
    for (int s = 0; s < CT; ++s) {
        const int c0 = (get_global_id(C_DIM) * CT + s) * NR;
        for (int t = 0; t < RT; ++t) {
            const int r0 = (get_global_id(R_DIM) * RT + t) * MR;
            if (r0 >= RN || c0 >= CN) break;
#if RN % MR == 0 && CN % NR == 0
            tile(X, Y, Z MORE, b, r0, c0, 0);
#else
            if (r0 + MR <= RN && c0 + NR <= CN)
                tile(X, Y, Z MORE, b, r0, c0, 0);
            else
                tile(X, Y, Z MORE, b, r0, c0, 1);
#endif
        }
    }
}
