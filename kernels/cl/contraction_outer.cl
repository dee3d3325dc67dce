// Z[b,r,c] = ALPHA * sum over k of X[b,r,k] * Y[b,k,c], vectors along c: an outer product of MR values of X and NV vectors
// of Y per step. (outer.n: X = A, Y = B; outer.m: X = B and Y = A, both transposed, so that c is the product's m.)
//
// The header gives XI, YI, ZI (element offsets by (b,r,k), (b,k,c), (b,r,c)); a step along k inside a tile of KT is XKS or YKS
// elements, so that the inner loop's strides are constants whatever the layout. LOAD_Y reads a row of vectors in the pieces
// that are contiguous. Tiles at the border read rows and pieces that exist instead of those that don't (a piece across the
// border is moved back to end there, or ends in its tile's padding) and store value by value; k is never overrun.
// With an epilogue FINISH and FINISH1 run it on sums and store its results; ROLLED: in a loop, for it is long. AHEAD asks for
// what the epilogue will read of a row: one row in each tile of KT, since caches take few requests at once.

#ifdef __clang__  // whose OpenCL libraries for CPUs leave prefetch() empty
#define ASK(p) __builtin_prefetch(p)
#else
#define ASK(p) prefetch(p, 1)
#endif

#ifndef EPILOGUE
#define MORE_ARGS
#define MORE
#define FINISH1(v, b, r, c) Z_STORE1(v, b, r, c)
#endif

inline void tile(X_ARG, Y_ARG, Z_ARG MORE_ARGS, const int b, const int r0, const int c0, const int edge) {
    VT acc[MR][NV], y[NV];
    int xo[MR], yo[YP];
#pragma unroll
    for (int r = 0; r < MR; ++r) xo[r] = XI(b, edge ? min(r0 + r, RN - 1) : r0 + r, 0);
#pragma unroll
    for (int p = 0; p < YP; ++p) yo[p] = YI(b, 0, edge ? min(c0 + p * YU, YLAST) : c0 + p * YU);
#if XSEP
#define XOFF(r) (edge ? xo[r] : xo[0] + XI(0, r, 0) - XI(0, 0, 0))
#else
#define XOFF(r) xo[r]
#endif
#pragma unroll
    for (int r = 0; r < MR; ++r)
#pragma unroll
        for (int j = 0; j < NV; ++j) acc[r][j] = (VT)(0.0f);

#define LOAD(o) \
    do { \
        if (edge) { \
            LOAD_Y_EDGE(o); \
        } else { \
            LOAD_Y(o); \
        } \
    } while (0)
#define STEP(xk, yk) \
    do { \
        LOAD(yk); \
        _Pragma("unroll") for (int r = 0; r < MR; ++r) { \
            const VT x = (VT)(X_READ(XOFF(r) + (xk))); \
            _Pragma("unroll") for (int j = 0; j < NV; ++j) acc[r][j] += x * y[j]; \
        } \
    } while (0)

    for (int k0 = 0; k0 < KMAIN; k0 += KT) {
        const int xk = XI(0, 0, k0) - XI(0, 0, 0), yk = YI(0, k0, 0) - YI(0, 0, 0);
#ifdef AHEAD
        if (!edge && k0 < MR * KT) AHEAD(b, r0 + k0 / KT, c0);
#endif
#if XV == 1
#pragma unroll KU
        for (int k = 0; k < KT; ++k) STEP(xk + k * XKS, yk + k * YKS);
#else
        for (int k = 0; k + XV <= KT; k += XV) {
            float x[MR][XV];
#pragma unroll
            for (int i = 0; i < MR; ++i) LOAD_X(x, i, xk + k * XKS);
#pragma unroll
            for (int i = 0; i < XV; ++i) {
                LOAD(yk + (k + i) * YKS);
#pragma unroll
                for (int r = 0; r < MR; ++r)
#pragma unroll
                    for (int j = 0; j < NV; ++j) acc[r][j] += (VT)(x[r][i]) * y[j];
            }
        }
#if KT % XV
        for (int k = KT / XV * XV; k < KT; ++k) STEP(xk + k * XKS, yk + k * YKS);
#endif
#endif
    }
#if KMAIN < KN
    {
        const int xk = XI(0, 0, KMAIN) - XI(0, 0, 0), yk = YI(0, KMAIN, 0) - YI(0, 0, 0);
        for (int k = 0; k < KN - KMAIN; ++k) STEP(xk + k * XKS, yk + k * YKS);
    }
#endif

#if defined(EPILOGUE) && !ROLLED
    if (!edge) {
#pragma unroll
        for (int r = 0; r < MR; ++r)
#pragma unroll
            for (int j = 0; j < NV; ++j) FINISH(acc[r][j] * ALPHA, b, r0 + r, c0 + j * V);
        return;
    }
#elif ZU > 1 && !defined(EPILOGUE)
    if (!edge) {
#pragma unroll
        for (int r = 0; r < MR; ++r)
#pragma unroll
            for (int j = 0; j < NV; ++j) STORE_Z(acc[r][j] * ALPHA, b, r0 + r, c0 + j * V);
        return;
    }
#endif
    float out[MR * NV * V];
#pragma unroll
    for (int r = 0; r < MR; ++r)
#pragma unroll
        for (int j = 0; j < NV; ++j) VSTORE(acc[r][j] * ALPHA, out + (r * NV + j) * V);
#if defined(EPILOGUE) && ROLLED
    if (!edge) {
#pragma unroll 1
        for (int r = 0; r < MR; ++r)
#pragma unroll 1
            for (int j = 0; j < NV; ++j) FINISH(VLOAD(out + (r * NV + j) * V), b, r0 + r, c0 + j * V);
        return;
    }
#endif
    // Value by value, in a loop that stays a loop: unrolled and predicated it would be most of the program.
    const int rows = min(MR, RN - r0), columns = min(NV * V, CN - c0);
#pragma unroll 1
    for (int r = 0; r < rows; ++r)
#pragma unroll 1
        for (int c = 0; c < columns; ++c) {
            const int moved = edge ? c / YU * YU + c0 - min(c / YU * YU + c0, YLAST) : 0;
            FINISH1(out[r * NV * V + c + moved], b, r0 + r, c0 + c);
        }
}

__kernel void contraction_outer(X_ARG, Y_ARG, Z_ARG MORE_ARGS) {
    const int b = get_global_id(2);
    for (int s = 0; s < CT; ++s) {
        const int c0 = (get_global_id(C_DIM) * CT + s) * (NV * V);
        for (int t = 0; t < RT; ++t) {
            const int r0 = (get_global_id(R_DIM) * RT + t) * MR;
            if (r0 >= RN || c0 >= CN) break;
#if RN % MR == 0 && CN % (NV * V) == 0
            tile(X, Y, Z MORE, b, r0, c0, 0);
#else
            if (r0 + MR <= RN && c0 + NV * V <= CN)
                tile(X, Y, Z MORE, b, r0, c0, 0);
            else
                tile(X, Y, Z MORE, b, r0, c0, 1);
#endif
        }
    }
}
