// Z[b,r,c] = ALPHA * sum over k of X[b,r,k] * Y[b,k,c], staged through local memory: a work group of ITEMS items makes BM x BN
// of Z in steps of BK along k. Each step's panels of X and Y are loaded into registers while the step before is computed, then
// laid down k-major in the other half of local memory, so that one barrier a step is enough and the inner loop never sees a
// layout. Vectors are loaded along whichever axis is contiguous (X_ALONG_K, Y_ALONG_K) and turned on the way.
//
// An item owns TM x TN of the output in chunks of 4 x 4 that lie BM/TM*4 (BN/TN*4) apart; 8 x 4 neighbouring items read 8 vectors
// of Y and 4 of X. What lies beyond the operands is never loaded and counts as zero, so that padding cannot matter.
// With SLICES = 2 there are twice as many items, and each half adds up one half of every panel: more to hide latencies with.
// With SPLIT > 1 a group adds up one of SPLIT ranges of k, KS long, and writes to scratch; contraction_sum.cl adds those.

// With an epilogue FINISH and FINISH1 run it on four sums and on one, and store its results.
// QUANTISED: Y is rows of WORDS and SCALES along k (layoutopt/quantize.py), YW numbers a word, unpacked when a panel is loaded.
// Codes behind the last number meet zeros of X.

#ifndef EPILOGUE
#define MORE_ARGS
#define FINISH1(v, b, r, c) Z_STORE1(v, b, r, c)
#define FINISH(v, b, r, c) Z_STORE4(v, b, r, c)
#endif
#define XS (BM + 4)
#define YS (BN + 4)
#define X_ROW(v) (X_ALONG_K ? (v) / (BK / XW) : (v) % (BM / XW) * XW)
#define X_STEP(v) (X_ALONG_K ? (v) % (BK / XW) * XW : (v) / (BM / XW))
#define Y_COL(v) (Y_ALONG_K ? (v) / (BK / YW) : (v) % (BN / YW) * YW)
#define Y_STEP(v) (Y_ALONG_K ? (v) % (BK / YW) * YW : (v) / (BN / YW))
#define IN_R(r) (RN % BM == 0 || (r) < RN)
#define IN_C(c) (CN % BN == 0 || (c) < CN)
#define IN_K(k) (KN % BK == 0 || (k) < KN)

#if XW == 4
#define X_GET(r, k) X_LOAD4(b, r, k)
#define XT float4
#else
#define X_GET(r, k) X_AT(b, r, k)
#define XT float
#endif
#ifdef QUANTISED
#define Y_GET(k, c) (UNPACK(WORDS_AT(c, (k) / YW)) * SCALES_AT(c, (k) / GROUP))
#if YW == 4
#define YT float4
#else
#define YT float8
#endif
#elif YW == 4
#define Y_GET(k, c) Y_LOAD4(b, k, c)
#define YT float4
#else
#define Y_GET(k, c) Y_AT(b, k, c)
#define YT float
#endif

#define FETCH(k0) \
    do { \
        _Pragma("unroll") for (int i = 0; i < XL; ++i) { \
            const int r = r0 + X_ROW(l + i * ITEMS), k = (k0) + X_STEP(l + i * ITEMS); \
            px[i] = IN_R(r) && IN_K(k) ? X_GET(r, k) : (XT)(0.0f); \
        } \
        _Pragma("unroll") for (int i = 0; i < YL; ++i) { \
            const int c = c0 + Y_COL(l + i * ITEMS), k = (k0) + Y_STEP(l + i * ITEMS); \
            py[i] = IN_C(c) && IN_K(k) ? Y_GET(k, c) : (YT)(0.0f); \
        } \
    } while (0)

#if XW == 4 && X_ALONG_K
#define X_PUT(p, v) ((p)[0] = (v).x, (p)[XS] = (v).y, (p)[2 * XS] = (v).z, (p)[3 * XS] = (v).w)
#elif XW == 4
#define X_PUT(p, v) (*(__local float4 *)(p) = (v))
#else
#define X_PUT(p, v) (*(p) = (v))
#endif
#if YW == 8
#define Y_PUT(p, v) \
    ((p)[0] = (v).s0, (p)[YS] = (v).s1, (p)[2 * YS] = (v).s2, (p)[3 * YS] = (v).s3, (p)[4 * YS] = (v).s4, (p)[5 * YS] = (v).s5, \
     (p)[6 * YS] = (v).s6, (p)[7 * YS] = (v).s7)
#elif YW == 4 && Y_ALONG_K
#define Y_PUT(p, v) ((p)[0] = (v).x, (p)[YS] = (v).y, (p)[2 * YS] = (v).z, (p)[3 * YS] = (v).w)
#elif YW == 4
#define Y_PUT(p, v) (*(__local float4 *)(p) = (v))
#else
#define Y_PUT(p, v) (*(p) = (v))
#endif

#define STASH(half) \
    do { \
        _Pragma("unroll") for (int i = 0; i < XL; ++i) { \
            __local float *p = xs + (half) * (BK * XS) + X_STEP(l + i * ITEMS) * XS + X_ROW(l + i * ITEMS); \
            X_PUT(p, px[i]); \
        } \
        _Pragma("unroll") for (int i = 0; i < YL; ++i) { \
            __local float *p = ys + (half) * (BK * YS) + Y_STEP(l + i * ITEMS) * YS + Y_COL(l + i * ITEMS); \
            Y_PUT(p, py[i]); \
        } \
    } while (0)

#define ACROSS (BN / TN / 8)

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void contraction_staged(X_ARG, Y_ARG, Z_ARG MORE_ARGS) {
    __local __attribute__((aligned(16))) float stage[2 * BK * (XS + YS)];
    __local float *const xs = stage, *const ys = stage + 2 * BK * XS;
    const int l = get_local_id(0), o = l % (ITEMS / SLICES), slice = l / (ITEMS / SLICES);
    const int r0 = get_group_id(1) * BM, c0 = get_group_id(0) * BN;
    const int b = get_group_id(2) / SPLIT, q = get_group_id(2) % SPLIT;
    const int begin = q * KS, end = SPLIT > 1 ? min(begin + KS, KN) : KN;
    const int ri = o % 32 / 8 * 4 + o / 32 / ACROSS * 16, ci = o % 8 * 4 + o / 32 % ACROSS * 32;
#ifdef LEVELS_START
    LEVELS_START
#endif
    XT px[XL];
    YT py[YL];
    float4 acc[TM][TN / 4];
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN / 4; ++j) acc[i][j] = (float4)(0.0f);

    FETCH(begin);
    STASH(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    int half_ = 0;
    for (int k0 = begin;; k0 += BK) {
        const int more = k0 + BK < end;
        if (more) FETCH(k0 + BK);
        const __local float *xp = xs + (half_ * BK + slice * (BK / SLICES)) * XS + ri;
        const __local float *yp = ys + (half_ * BK + slice * (BK / SLICES)) * YS + ci;
#pragma unroll
        for (int k = 0; k < BK / SLICES; ++k) {
            float4 x[TM / 4], y[TN / 4];
#pragma unroll
            for (int i = 0; i < TM / 4; ++i) x[i] = *(const __local float4 *)(xp + k * XS + i * (BM / TM * 4));
#pragma unroll
            for (int j = 0; j < TN / 4; ++j) y[j] = *(const __local float4 *)(yp + k * YS + j * (BN / TN * 4));
#pragma unroll
            for (int i = 0; i < TM / 4; ++i)
#pragma unroll
                for (int j = 0; j < TN / 4; ++j) {
                    acc[i * 4][j] += x[i].x * y[j];
                    acc[i * 4 + 1][j] += x[i].y * y[j];
                    acc[i * 4 + 2][j] += x[i].z * y[j];
                    acc[i * 4 + 3][j] += x[i].w * y[j];
                }
        }
        if (!more) break;
        half_ ^= 1;
        STASH(half_);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
#if SLICES == 2
    {  // the second half of the items hands its sums to the first and is done
        __local float4 *sums = (__local float4 *)stage;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (slice)
#pragma unroll
            for (int i = 0; i < TM * TN / 4; ++i) sums[i * (ITEMS / 2) + o] = acc[i / (TN / 4)][i % (TN / 4)];
        barrier(CLK_LOCAL_MEM_FENCE);
        if (slice) return;
#pragma unroll
        for (int i = 0; i < TM * TN / 4; ++i) acc[i / (TN / 4)][i % (TN / 4)] += sums[i * (ITEMS / 2) + o];
    }
#endif

#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int r = r0 + i / 4 * (BM / TM * 4) + ri + i % 4;
        if (!IN_R(r)) continue;
#pragma unroll
        for (int j = 0; j < TN / 4; ++j) {
            const int c = c0 + j * (BN / TN * 4) + ci;
            if (!IN_C(c)) continue;
#if SPLIT > 1
            Z_STORE4(acc[i][j], q, b, r, c);
#else
#if ZW == 4
            if (CN % 4 == 0 || c + 4 <= CN) {
                FINISH(acc[i][j] * ALPHA, b, r, c);
                continue;
            }
#endif
#if ZW != 4 || CN % 4
            FINISH1(acc[i][j].x * ALPHA, b, r, c);
            if (IN_C(c + 1)) FINISH1(acc[i][j].y * ALPHA, b, r, c + 1);
            if (IN_C(c + 2)) FINISH1(acc[i][j].z * ALPHA, b, r, c + 2);
            if (IN_C(c + 3)) FINISH1(acc[i][j].w * ALPHA, b, r, c + 3);
#endif
#endif
        }
    }
}
