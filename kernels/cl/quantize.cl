// Rows of numbers as codes and scales, and back (see layoutopt/quantize.py). The grid gives an item its rows i, UNITS of them in
// a work group, and its groups g of a row; LANES items share a group of GROUP numbers, word by word.

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define VEC CAT(float, CODES)
#define LARGER(a, b) ((a) > (b) ? (a) : (b))

#if CODES == 4
#define SUM_OF(v) ((v).x + (v).y + ((v).z + (v).w))
#define TOP_OF(v) LARGER(LARGER((v).x, (v).y), LARGER((v).z, (v).w))
#else
#define SUM_OF(v) SUM4((v).lo + (v).hi)
#define SUM4(v) ((v).x + (v).y + ((v).z + (v).w))
#define TOP_OF(v) TOP4(LARGER((v).lo, (v).hi))
#define TOP4(v) LARGER(LARGER((v).x, (v).y), LARGER((v).z, (v).w))
#endif

#ifdef OP_quantize
static VEC numbers(X_ARG, const int i, const int j) {
    if (j + CODES <= K) return CAT(X_LOAD, CODES)(i, j);
    float some[CODES];
    for (int c = 0; c < CODES; ++c) some[c] = 0.0f;
    for (int c = 0; j + c < K; ++c) some[c] = X_AT(i, j + c);
    return CAT(vload, CODES)(0, some);
}

// A group that holds a number that is none gets a scale that is none: who reads it sees it.
__kernel __attribute__((reqd_work_group_size(UNITS * LANES, 1, 1))) void quantize(X_ARG, WORDS_ARG, SCALES_ARG) {
    DECODE
#if LANES > 1
    __local float tops[UNITS][LANES], odd[UNITS][LANES];
#endif
    for (int q = 0; q < ROWS; ++q) {
        const int i = (r * ROWS + q) * UNITS + u, live = i < M;
        for (int n = 0; n < GROUPS; ++n) {
            const int g = first * GROUPS + n, from = g * GROUP_WORDS;
            const int end = live ? min(GROUP_WORDS, WORDS_N1 - from) : 0;
            VEC top_v = (VEC)(0.0f), odd_v = (VEC)(0.0f);
            for (int w = t; w < end; w += LANES) {
                const VEC x = numbers(X, i, (from + w) * CODES), size = fabs(x);
                top_v = LARGER(size, top_v);
                odd_v += x * 0.0f;
            }
            float top = TOP_OF(top_v), none = SUM_OF(odd_v);
#if LANES > 1
            tops[u][t] = top, odd[u][t] = none;
            barrier(CLK_LOCAL_MEM_FENCE);
            for (int l = 0; l < LANES; ++l) top = LARGER(tops[u][l], top), none += odd[u][l];
#endif
            float scale = top / PEAK;
            if (scale < FLT_MIN) scale = 0.0f;
            scale += none * 0.0f;
            const float divisor = scale > 0.0f ? scale : INFINITY;
            for (int w = t; w < end; w += LANES) {
                const int j = (from + w) * CODES;
                WORDS_STORE1(pack(numbers(X, i, j) / divisor, K - j), i, from + w);
            }
            if (t == 0 && live) SCALES_STORE1(scale, i, g);
        }
    }
}
#else

#ifdef OP_quantized_gather
#define MORE_ARGS , IDS_ARG
#define MORE , IDS
#define ROW(i) IDS_AT(i)
#else
#define MORE_ARGS
#define MORE
#define ROW(i) (i)
#endif
inline void values(WORDS_ARG, SCALES_ARG MORE_ARGS, Y_ARG, const int i, const int g, const int t) {
    const int row = ROW(i), from = g * GROUP_WORDS, end = min(GROUP_WORDS, WORDS_N1 - from);
    const float scale = SCALES_AT(row, g);
    for (int w = t; w < end; w += LANES) {
        const int j = (from + w) * CODES;
        const VEC y = unpack(WORDS_AT(row, from + w)) * scale;
        if (j + CODES <= K) {
            CAT(Y_STORE, CODES)(y, i, j);
        } else {
            float some[CODES];
            CAT(vstore, CODES)(y, 0, some);
            for (int c = 0; j + c < K; ++c) Y_STORE1(some[c], i, j + c);
        }
    }
}

#define EACH \
    for (int q = 0; q < ROWS; ++q) { \
        const int i = (r * ROWS + q) * UNITS + u; \
        if (i >= M) break; \
        for (int n = 0; n < GROUPS; ++n) values(WORDS, SCALES MORE, Y, i, first * GROUPS + n, t); \
    }
#ifdef OP_dequantize
__kernel __attribute__((reqd_work_group_size(UNITS * LANES, 1, 1))) void dequantize(WORDS_ARG, SCALES_ARG, Y_ARG) {
    DECODE
    EACH
}
#else
__kernel __attribute__((reqd_work_group_size(UNITS * LANES, 1, 1)))
void quantized_gather(WORDS_ARG, SCALES_ARG, IDS_ARG, Y_ARG) {
    DECODE
    EACH
}
#endif
#endif
