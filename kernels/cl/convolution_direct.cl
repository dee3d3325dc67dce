// Convolutions straight from their definition, over any layouts: B neighbouring results a work item (ALONG_W: pixels of a row,
// else channels), every element by its own index expression. For depthwise convolutions, and where no matrix product fits.
// The header gives each operand's element (X_ELEM, …) over the variables of the loops below.

#ifdef OP_correlate
// Y = sum over channels c and taps (t, u) of X * W; what lies outside X is zero.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void correlate(X_ARG, W_ARG, Y_ARG)
{
    DECODE
    const int count = min(B, LANES - (L_FIRST));
    float acc[B];
#pragma unroll
    for (int l = 0; l < B; ++l) acc[l] = 0.0f;
    for (int c = 0; c < CHANNELS; ++c)
        for (int t = 0; t < TAPS_H; ++t) {
            const int h = X_H;
            if (h < 0 || h >= X_N2) continue;
            for (int u = 0; u < TAPS_W; ++u) {
#if ALONG_W
                // Lanes whose pixel lies inside the image: STEP*(first + l) + off in [0, X_N3).
                const int off = STEP * (L_FIRST) + u * TAP + AT;
                const int low = off < 0 ? (STEP - 1 - off) / STEP : 0;
                const int high = off < X_N3 ? min(count, (X_N3 - 1 - off) / STEP + 1) : 0;
                if (low >= high) continue;
                const float w = W_ELEM;
#define TERM w * X_ELEM
#else
                const int low = 0, high = count, column = X_W;
                if (column < 0 || column >= X_N3) continue;
#define TERM W_ELEM * X_ELEM
#endif
                if (low == 0 && high == B) {
#pragma unroll
                    for (int l = 0; l < B; ++l) acc[l] += TERM;
                } else {
                    for (int l = low; l < high; ++l) acc[l] += TERM;
                }
            }
        }
    for (int l = 0; l < count; ++l) Y_ELEM = acc[l];
}
#endif

#ifdef OP_weight_rows
// DW = sum over images n and pixels (p, q) of DY * X: rows one by one, so that rounding does not grow with the image.
#define PARTS 16
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void weight_rows(DY_ARG, X_ARG, DW_ARG)
{
    DECODE
    if (L_FIRST >= LANES) return;
    float sum = 0.0f;
    // Pixels q whose image column q*STEP + off lies inside.
    const int off = s * TAP + AT;
    const int low = off < 0 ? (STEP - 1 - off) / STEP : 0;
    const int high = off < X_N3 ? min(DY_N3, (X_N3 - 1 - off) / STEP + 1) : 0;
    for (int n = 0; n < DY_N0; ++n)
        for (int p = 0; p < DY_N2; ++p) {
            const int h = X_H;
            if (h < 0 || h >= X_N2) continue;
            float part[PARTS], row = 0.0f;
#pragma unroll
            for (int l = 0; l < PARTS; ++l) part[l] = 0.0f;
            int first = low;
            for (; first + PARTS <= high; first += PARTS)
#pragma unroll
                for (int l = 0; l < PARTS; ++l) {
                    const int q = first + l;
                    part[l] += DY_ELEM * X_ELEM;
                }
            for (int q = first; q < high; ++q) row += DY_ELEM * X_ELEM;
#pragma unroll
            for (int l = 0; l < PARTS; ++l) row += part[l];
            sum += row;
        }
    DW_ELEM = sum;
}
#endif

#ifdef OP_weight_channels
// The same for B neighbouring channels.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void weight_channels(DY_ARG, X_ARG, DW_ARG)
{
    DECODE
    const int count = min(B, LANES - (L_FIRST));
    float sum[B];
#pragma unroll
    for (int l = 0; l < B; ++l) sum[l] = 0.0f;
    for (int n = 0; n < DY_N0; ++n)
        for (int p = 0; p < DY_N2; ++p) {
            const int h = X_H;
            if (h < 0 || h >= X_N2) continue;
            float row[B];
#pragma unroll
            for (int l = 0; l < B; ++l) row[l] = 0.0f;
            for (int q = 0; q < DY_N3; ++q) {
                const int column = X_W;
                if (column < 0 || column >= X_N3) continue;
#if DY_ONCE
                const float dy = DY_ELEM;
#define TERM dy * X_ELEM
#else
#define TERM DY_ELEM * X_ELEM
#endif
                if (count == B) {
#pragma unroll
                    for (int l = 0; l < B; ++l) row[l] += TERM;
                } else {
                    for (int l = 0; l < count; ++l) row[l] += TERM;
                }
            }
#pragma unroll
            for (int l = 0; l < B; ++l) sum[l] += row[l];
        }
    for (int l = 0; l < count; ++l) DW_ELEM = sum[l];
}
#endif
