// D[d0,d1,d2,d3,d4] = VALUE, an element of S, or 0 where that lies outside S: copies with borders, flips and panels.
// A work item goes over blocks of two axes, the inner one E being contiguous in D. With STAGED the block is read along F,
// in which S is contiguous, into private memory, and then written along E: lines of both sides are touched once.
// The header names the coordinates d0..d4, decodes those of the grid (DECODE), and says for which values of the axis read
// innermost the source exists (LOW, HIGH) and whether it does by the other coordinates (INSIDE).

#ifdef FILL
#define PARAMS D_ARG
#else
#define PARAMS S_ARG, D_ARG
#endif

// Within a block both sides have constant strides as a rule: D_STEP and S_STEP; 0 where they do not.
#if D_STEP
#define TO(first) __global float *to; { const int E = first; to = &D_AT(d0, d1, d2, d3, d4); }
#define PUT(first) to[(E - (first)) * D_STEP]
#else
#define TO(first)
#define PUT(first) D_AT(d0, d1, d2, d3, d4)
#endif
#if S_STEP
#define FROM(X) __global const float *from; { const int X = low; from = &VALUE; }
#define GET(X) from[(X - low) * S_STEP]
#else
#define FROM(X)
#define GET(X) VALUE
#endif

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void convolution_pack(PARAMS)
{
    DECODE
    const int e_first = E_FIRST, e_last = min(e_first + E_BLOCK, E_EXTENT);
    const int f_first = F_FIRST, f_last = min(f_first + F_BLOCK, F_EXTENT);
#if STAGED
    float block[F_BLOCK * E_BLOCK];
    for (int E = e_first; E < e_last; ++E) {
        const int inside = INSIDE;
        const int low = inside ? clamp(LOW, f_first, f_last) : f_last, high = inside ? clamp(HIGH, low, f_last) : f_last;
        FROM(F)
        for (int F = f_first; F < low; ++F) block[(F - f_first) * E_BLOCK + E - e_first] = 0.0f;
        for (int F = low; F < high; ++F) block[(F - f_first) * E_BLOCK + E - e_first] = GET(F);
        for (int F = high; F < f_last; ++F) block[(F - f_first) * E_BLOCK + E - e_first] = 0.0f;
    }
    for (int F = f_first; F < f_last; ++F) {
        TO(e_first)
        for (int E = e_first; E < e_last; ++E) PUT(e_first) = block[(F - f_first) * E_BLOCK + E - e_first];
    }
#else
    if (e_first >= e_last) return;
    for (int F = f_first; F < f_last; ++F) {
        const int inside = INSIDE;
        const int low = inside ? clamp(LOW, e_first, e_last) : e_last, high = inside ? clamp(HIGH, low, e_last) : e_last;
        TO(e_first)
        for (int E = e_first; E < low; ++E) PUT(e_first) = 0.0f;
#ifndef FILL
        FROM(E)
        for (int E = low; E < high; ++E) PUT(e_first) = GET(E);
#endif
        for (int E = high; E < e_last; ++E) PUT(e_first) = 0.0f;
    }
#endif
}
