// Z[0,r,c] = ALPHA * sum over k of X[0,r,k] * W[c,k], where W is what rows of WORDS and SCALES stand for (see
// layoutopt/quantize.py). k goes in blocks of KB steps: a block of W is unpacked once, into a tile that lies k-major in private
// memory (one fat item, which uses it for RT register tiles of MR rows) or in local memory (a group of GR x GC thin ones); then
// every register tile adds up an outer product of MR values of X and NV vectors of the tile per step, as contraction_outer.cl.
//
// Unpacking: items LC across take vectors of V columns, LW down the words of a segment, SK steps that share a scale. Columns
// beyond the last are anything in the tile, rows beyond the last read that one's numbers, and neither is stored. Items of
// a group that own nothing multiply as the others do: PoCL does not bear branches beside barriers in a loop.
// With an epilogue FINISH and FINISH1 run it on sums and store its results; ROLLED: in a loop, for it is long.

#ifndef EPILOGUE
#define MORE_ARGS
#define MORE
#define FINISH(v, b, r, c) STORE_Z(v, b, r, c)
#define FINISH1(v, b, r, c) Z_STORE1(v, b, r, c)
#define ROLLED 0
#endif
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define IT CAT(int, V)
#define COLS (GC * NV)
#define ITEMS (GR * GC)
#if ITEMS > 1
#define SPACE __local
#define MEET barrier(CLK_LOCAL_MEM_FENCE)
#else
#define SPACE __private
#define MEET
#endif

static IT words_at(WORDS_ARG, const int c, const int w) {
#if CN % V
    if (c + V > CN) {
        int some[V];
        for (int i = 0; i < V; ++i) some[i] = 0;
        for (int i = 0; c + i < CN; ++i) some[i] = WORDS_AT(c + i, w);
        return CAT(vload, V)(0, some);
    }
#endif
    return CAT(WORDS_LOAD, V)(c, w);
}

static VT scales_at(SCALES_ARG, const int c, const int g) {
#if CN % V
    if (c + V > CN) {
        float some[V];
        for (int i = 0; i < V; ++i) some[i] = 0.0f;
        for (int i = 0; c + i < CN; ++i) some[i] = SCALES_AT(c + i, g);
        return CAT(vload, V)(0, some);
    }
#endif
    return CAT(SCALES_LOAD, V)(c, g);
}

inline void unpack(WORDS_ARG, SCALES_ARG, SPACE VT *tile LEVELS_ARG, const int block, const int first, const int lw, const int lc) {
    for (int n = lc; n < COLS; n += LC) {
        const int c = first + n * V, left = c < CN ? WORDS_N1 - block * (KB / CODES) : 0;
        for (int s = 0; s < SEGMENTS && s * (SK / CODES) < left; ++s) {
            const int end = min(SK / CODES, left - s * (SK / CODES));
            const VT scale = scales_at(SCALES, c, (block * KB + s * SK) / GROUP);
            for (int i = lw; i < end; i += LW) {
                const int w = s * (SK / CODES) + i;
                const IT word = words_at(WORDS, c, block * (KB / CODES) + w);
                SPACE VT *to = tile + w * CODES * COLS + n;
#pragma unroll
                for (int code = 0; code < CODES; ++code) to[code * COLS] = VALUE(word, code) * scale;
            }
        }
    }
}

// By vload, because clang takes wide registers only in functions that it sees exchange wide vectors with others.
inline void multiply(
    X_ARG, SPACE const float *tile, VT (*sums)[NV], const int block, const int r0, const int edge) {
    VT acc[MR][NV], y[NV];
    int xo[MR];
#pragma unroll
    for (int r = 0; r < MR; ++r) xo[r] = X_IDX(0, edge ? min(r0 + r, RN - 1) : r0 + r, 0);
#if XSEP
#define XOFF(r) (edge ? xo[r] : xo[0] + X_IDX(0, r, 0) - X_IDX(0, 0, 0))
#else
#define XOFF(r) xo[r]
#endif
#pragma unroll
    for (int r = 0; r < MR; ++r)
#pragma unroll
        for (int j = 0; j < NV; ++j) acc[r][j] = sums[r][j];

#define LOAD(k) _Pragma("unroll") for (int j = 0; j < NV; ++j) y[j] = CAT(vload, V)((k) * COLS + j, tile)
#define ADD(x, r) _Pragma("unroll") for (int j = 0; j < NV; ++j) acc[r][j] += (VT)(x) * y[j]
#define STEP(xk, k) \
    do { \
        LOAD(k); \
        _Pragma("unroll") for (int r = 0; r < MR; ++r) { \
            const float x = X_READ(XOFF(r) + (xk)); \
            ADD(x, r); \
        } \
    } while (0)

    if (block < KN / KB) {
        for (int k0 = 0; k0 < KB; k0 += KT) {
            const int xk = X_IDX(0, 0, block * KB + k0) - X_IDX(0, 0, 0);
#if XV == 1
#pragma unroll KU
            for (int k = 0; k < KT; ++k) STEP(xk + k * XKS, k0 + k);
#else
            for (int k = 0; k < KT; k += XV) {
                float x[MR][XV];
#pragma unroll
                for (int i = 0; i < MR; ++i) LOAD_X(x, i, xk + k * XKS);
#pragma unroll
                for (int i = 0; i < XV; ++i) {
                    LOAD(k0 + k + i);
#pragma unroll
                    for (int r = 0; r < MR; ++r) ADD(x[r][i], r);
                }
            }
#endif
        }
    } else {
        for (int k = 0; k < KN % KB; ++k) STEP(X_IDX(0, 0, block * KB + k) - X_IDX(0, 0, 0), k);
    }
#pragma unroll
    for (int r = 0; r < MR; ++r)
#pragma unroll
        for (int j = 0; j < NV; ++j) sums[r][j] = acc[r][j];
}

inline void finish(Z_ARG MORE_ARGS, VT (*sums)[NV], const int r0, const int c0, const int edge) {
    const int b = 0;
#if !ROLLED
    if (!edge) {
#pragma unroll
        for (int r = 0; r < MR; ++r)
#pragma unroll
            for (int j = 0; j < NV; ++j) FINISH(sums[r][j] * ALPHA, b, r0 + r, c0 + j * V);
        return;
    }
#endif
    float out[MR * NV * V];
#pragma unroll
    for (int r = 0; r < MR; ++r)
#pragma unroll
        for (int j = 0; j < NV; ++j) CAT(vstore, V)(sums[r][j] * ALPHA, 0, out + (r * NV + j) * V);
#if ROLLED
    if (!edge) {
#pragma unroll 1
        for (int r = 0; r < MR; ++r)
#pragma unroll 1
            for (int j = 0; j < NV; ++j) FINISH(CAT(vload, V)(0, out + (r * NV + j) * V), b, r0 + r, c0 + j * V);
        return;
    }
#endif
    // Value by value, in a loop that stays a loop: unrolled and predicated it would be most of the program.
    const int rows = min(MR, RN - r0), columns = min(NV * V, CN - c0);
#pragma unroll 1
    for (int r = 0; r < rows; ++r)
#pragma unroll 1
        for (int c = 0; c < columns; ++c) FINISH1(out[r * NV * V + c], b, r0 + r, c0 + c);
}

__kernel void quantized_contraction(X_ARG, WORDS_ARG, SCALES_ARG, Z_ARG MORE_ARGS) {
#if ITEMS > 1
    __local VT tile[KB * COLS];
    const int ri = get_local_id(1), ci = get_local_id(0);
#else
    VT tile[KB * COLS];
    const int ri = 0, ci = 0;
#endif
    LEVELS_START
    const int first = (int)get_group_id(C_DIM) * (COLS * V), c0 = first + ci * (NV * V);
    const int r00 = (get_group_id(R_DIM) * GR + ri) * (RT * MR);
    VT sums[RT][MR][NV];
#if RT > 1
#pragma unroll 1
#else
#pragma unroll
#endif
    for (int t = 0; t < RT; ++t)
#pragma unroll
        for (int r = 0; r < MR; ++r)
#pragma unroll
            for (int j = 0; j < NV; ++j) sums[t][r][j] = (VT)(0.0f);
    for (int block = 0; block < (KN + KB - 1) / KB; ++block) {
        MEET;
        unpack(WORDS, SCALES, tile LEVELS_PASSED, block, first, DOWN_ITEM, ACROSS_ITEM);
        MEET;
#if RT > 1
#pragma unroll 1
#else
#pragma unroll
#endif
        for (int t = 0; t < RT; ++t) {
            const int r0 = r00 + t * MR;
#if ITEMS > 1
            multiply(X, (SPACE const float *)(tile + ci * NV), sums[t], block, r0, RN % (MR * GR) != 0);
#else
            if (r0 >= RN) break;
            if (r0 + MR <= RN)
                multiply(X, (SPACE const float *)tile, sums[t], block, r0, 0);
            else
                multiply(X, (SPACE const float *)tile, sums[t], block, r0, 1);
#endif
        }
    }
#if RT > 1
#pragma unroll 1
#else
#pragma unroll
#endif
    for (int t = 0; t < RT; ++t) {
        const int r0 = r00 + t * MR;
        if (r0 < RN && c0 < CN) {
            if (r0 + MR <= RN && c0 + NV * V <= CN)
                finish(Z MORE, sums[t], r0, c0, 0);
            else
                finish(Z MORE, sums[t], r0, c0, 1);
        }
    }
}
