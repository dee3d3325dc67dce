// D[d0,d1,d2,d3,d4] = VALUE, an element of S, or 0 where that lies outside S: copies with borders, flips and
// blocks of channels. A work item goes over a block of two axes, the inner one E being contiguous in D.
// The header names the coordinates d0..d4, decodes those of the grid (DECODE), and says for which values of E the
// source exists (E_LOW, E_HIGH) and whether it does by the other coordinates (ROW_INSIDE).

#ifdef FILL
#define PARAMS D_ARG
#else
#define PARAMS S_ARG, D_ARG
#endif

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void convolution_pack(PARAMS)
{
    DECODE
    for (int f = 0; f < F_BLOCK; ++f) {
        const int F = F_FIRST + f;
        if (F >= F_EXTENT) break;
        const int first = E_FIRST, last = min(first + E_BLOCK, E_EXTENT);
        const int inside = ROW_INSIDE;
        const int low = inside ? clamp(E_LOW, first, max(first, last)) : last;
        const int high = inside ? clamp(E_HIGH, low, max(low, last)) : last;
        for (int E = first; E < low && E < last; ++E) D_AT(d0, d1, d2, d3, d4) = 0.0f;
        for (int E = low; E < high; ++E) D_AT(d0, d1, d2, d3, d4) = VALUE;
        for (int E = high; E < last; ++E) D_AT(d0, d1, d2, d3, d4) = 0.0f;
    }
}
