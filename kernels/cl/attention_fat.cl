// Attention by fat work items (CPUs): keys in blocks of BN, against one row block of a head forward, all its rows backward.
//
// What is read is packed into private memory first, so that the loops below see one layout: by rows where vectors run along the
// features, by columns where they run along the keys; what lies beyond the operands counts as zero there. Register tiles are MR
// by NV vectors of W. Forward: scores, the program SCORE, the online softmax (what a row has so far is scaled down when a larger
// score comes) and the product with V. Backward: the probabilities anew, from the rows' maxima and sums.
// With SKIP a tile whose scores are all masked is left out where its rows have seen real ones: exp() of it would be 0.

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define VEC CAT(float, W)
#define IVEC CAT(int, W)
// Private arrays are read and written as whole vectors: PoCL's vstore16 stores four pieces, and a load of what was just stored
// in pieces waits for all of them.
#define ALIGNED __attribute__((aligned(4 * W)))
#define VLOAD(p) (*(const VEC *)(p))
#define VSTORE(v, p) (*(VEC *)(p) = (v))
#define UNROLL _Pragma("unroll")
// Not fmax, which PoCL 3.0 calls as a function. A NaN is passed over here and shows in the sum of exponentials.
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define MASKED -1e37f
#define REAL -1e36f

static float lanemax2(float2 v) { return LARGER(v.x, v.y); }
static float lanemax4(float4 v) { return lanemax2(LARGER(v.lo, v.hi)); }
static float lanemax8(float8 v) { return lanemax4(LARGER(v.lo, v.hi)); }
static float lanemax16(float16 v) { return lanemax8(LARGER(v.lo, v.hi)); }
static float lanesum2(float2 v) { return v.x + v.y; }
static float lanesum4(float4 v) { return lanesum2(v.lo + v.hi); }
static float lanesum8(float8 v) { return lanesum4(v.lo + v.hi); }
static float lanesum16(float16 v) { return lanesum8(v.lo + v.hi); }
static int laneand2(int2 v) { return v.x & v.y; }
static int laneand4(int4 v) { return laneand2(v.lo & v.hi); }
static int laneand8(int8 v) { return laneand4(v.lo & v.hi); }
static int laneand16(int16 v) { return laneand8(v.lo & v.hi); }
#define HMAX(v) CAT(lanemax, W)(v)
#define HSUM(v) CAT(lanesum, W)(v)
#define ALL(v) CAT(laneand, W)(v)

// The largest lane of each of MR vectors (MR <= W), pairs of lanes at a time.
#define RVEC CAT(float, MR)
#define RLOAD(p) (*(const RVEC *)(p))
#define RSTORE(v, p) (*(RVEC *)(p) = (v))
static VEC fold(VEC a, VEC b)
{
    const VEC even = (VEC)(a.even, b.even), odd = (VEC)(a.odd, b.odd);
    return LARGER(even, odd);
}
#define HALF(v) LARGER((v).even, (v).odd)
static RVEC row_peaks(const VEC *m)
{
#if MR == 8
    const VEC f = fold(fold(fold(m[0], m[1]), fold(m[2], m[3])), fold(fold(m[4], m[5]), fold(m[6], m[7])));
#else
    const VEC f = fold(fold(m[0], m[1]), fold(m[2], m[3]));
#endif
#if W == MR
    return f;
#elif W == 2 * MR
    return HALF(f);
#else
    const CAT(float, 8) h = HALF(f);
    return HALF(h);
#endif
}
#if W == MR
#define WIDE(v) (v)
#elif W == 2 * MR
#define WIDE(v) ((VEC)(v, v))
#else
#define WIDE(v) ((VEC)(v, v, v, v))
#endif

// Calls DO(i, f, count along the vector's axis, offset of its element u) for vectors and rests of [0, rows) x [0, NF).
#define OVER(X, rows, NF, VECTOR, SINGLE) \
    do { \
        const int most_i = X##_AXIS == 1 ? (rows) / X##_W * X##_W : (rows); \
        const int most_f = X##_AXIS == 2 ? (NF) / X##_W * X##_W : (NF); \
        for (int i = 0; i < most_i; i += X##_AXIS == 1 ? X##_W : 1) { \
            for (int f = 0; f < most_f; f += X##_AXIS == 2 ? X##_W : 1) { VECTOR; } \
            for (int f = most_f; f < (NF); ++f) { SINGLE; } \
        } \
        for (int i = most_i; i < (rows); ++i) \
            for (int f = 0; f < (NF); ++f) { SINGLE; } \
    } while (0)

// dst[i * STRIDE + f] = X[b, r0 + i, f] for i < rows, zero for the other i < full and for NF <= f < STRIDE.
#define PACK_ROWS(X, b, r0, rows, full, dst, STRIDE, NF) \
    do { \
        ALIGNED float t_[X##_W]; \
        OVER(X, rows, NF, \
            if (X##_AXIS == 2) { X##_PUT(X##_GET(b, (r0) + i, f), (dst) + i * (STRIDE) + f); } \
            else { \
                X##_PUT(X##_GET(b, (r0) + i, f), t_); \
                UNROLL for (int u = 0; u < X##_W; ++u) (dst)[(i + u) * (STRIDE) + f] = t_[u]; \
            }, \
            (dst)[i * (STRIDE) + f] = X##_AT(b, (r0) + i, f)); \
        for (int i = 0; i < (full); ++i) \
            for (int f = i < (rows) ? (NF) : 0; f < (STRIDE); ++f) (dst)[i * (STRIDE) + f] = 0.0f; \
    } while (0)

// The same turned round: dst[f * STRIDE + i], f < NF. Squares of W x W are turned in registers, by perfect shuffles.
#define PACK_COLUMNS(X, b, r0, rows, full, dst, STRIDE, NF) \
    do { \
        ALIGNED float t_[X##_W]; \
        const int squares_i = X##_AXIS == 2 && X##_W == W ? (rows) / W * W : 0, squares_f = (NF) / W * W; \
        for (int i = 0; i < squares_i; i += W) { \
            for (int f = 0; f < squares_f; f += W) { \
                VEC a_[W], s_[W]; \
                UNROLL for (int u = 0; u < W; ++u) a_[u] = X##_VECTOR(b, (r0) + i + u, f); \
                UNROLL for (int stage = 1; stage < W; stage *= 2) { \
                    UNROLL for (int u = 0; u < W / 2; ++u) { \
                        s_[2 * u].even = a_[u].lo; s_[2 * u].odd = a_[u + W / 2].lo; \
                        s_[2 * u + 1].even = a_[u].hi; s_[2 * u + 1].odd = a_[u + W / 2].hi; \
                    } \
                    UNROLL for (int u = 0; u < W; ++u) a_[u] = s_[u]; \
                } \
                UNROLL for (int u = 0; u < W; ++u) VSTORE(a_[u], (dst) + (f + u) * (STRIDE) + i); \
            } \
            for (int u = 0; u < W; ++u) \
                for (int f = squares_f; f < (NF); ++f) (dst)[f * (STRIDE) + i + u] = X##_AT(b, (r0) + i + u, f); \
        } \
        if (squares_i < (rows)) { \
            OVER(X, (rows) - squares_i, NF, \
                if (X##_AXIS == 1) { X##_PUT(X##_GET(b, (r0) + i, f), (dst) + f * (STRIDE) + i); } \
                else { \
                    X##_PUT(X##_GET(b, (r0) + squares_i + i, f), t_); \
                    UNROLL for (int u = 0; u < X##_W; ++u) (dst)[(f + u) * (STRIDE) + squares_i + i] = t_[u]; \
                }, \
                (dst)[f * (STRIDE) + squares_i + i] = X##_AT(b, (r0) + squares_i + i, f)); \
        } \
        if ((rows) < (full)) \
            for (int f = 0; f < (NF); ++f) \
                for (int i = (rows); i < (full); ++i) (dst)[f * (STRIDE) + i] = 0.0f; \
    } while (0)

// X[b, r0 + i, f] = src[i * STRIDE + f] * SCALE.
#define UNPACK(X, b, r0, rows, src, STRIDE, NF, SCALE) \
    do { \
        ALIGNED float t_[X##_W]; \
        OVER(X, rows, NF, \
            UNROLL for (int u = 0; u < X##_W; ++u) \
                t_[u] = (src)[(i + (X##_AXIS == 1 ? u : 0)) * (STRIDE) + f + (X##_AXIS == 2 ? u : 0)] * (SCALE); \
            X##_SET(X##_TAKE(t_), b, (r0) + i, f), \
            X##_STORE1((src)[i * (STRIDE) + f] * (SCALE), b, (r0) + i, f)); \
    } while (0)

// acc[r][v] += sum over k < NK of A[r * AR + k * AK] * B[k * BS + v * W].
#define TILE(acc, NJ, A, AR, AK, B, BS, NK) \
    for (int k = 0; k < (NK); ++k) { \
        VEC y_[NJ]; \
        UNROLL for (int v = 0; v < (NJ); ++v) y_[v] = VLOAD((B) + k * (BS) + v * W); \
        UNROLL for (int r = 0; r < MR; ++r) { \
            const VEC x_ = (VEC)((A)[r * (AR) + k * (AK)]); \
            UNROLL for (int v = 0; v < (NJ); ++v) acc[r][v] += x_ * y_[v]; \
        } \
    }
#define EACH(NJ) UNROLL for (int r = 0; r < MR; ++r) UNROLL for (int v = 0; v < (NJ); ++v)

// out = FN(in...) at [row, key] and the W - 1 keys behind it; `beyond` for what is past the last key.
#define PAST(key) (NN % W != 0 || NN % BN != 0) && (key) + W > NN
#define KEPT(key, x, beyond) ((key) + LANES < (IVEC)(NN) ? (x) : (VEC)(beyond))
#define APPLY(FN, out, in, row, key, beyond) \
    do { \
        if (PAST(key)) { \
            FN##_P(out, in, b, row, key); \
            out = KEPT(key, out, beyond); \
        } else { \
            FN##_V(out, in, b, row, key); \
        } \
    } while (0)

// Whether all scores of a tile are masked and none of its rows has seen only such.
#if SKIP
#define IDLE(idle, r0, n0, PEAK_OF) \
    do { \
        IVEC all_ = (IVEC)(-1); \
        int ready_ = 1; \
        for (int r = 0; r < MR; ++r) { \
            const int row_ = min((r0) + r, MM - 1); \
            ready_ &= PEAK_OF(r) > REAL; \
            for (int v = 0; v < BN; v += W) { \
                VEC t_; \
                APPLY(MASK, t_, t_, row_, (n0) + v, -INFINITY); \
                all_ &= t_ <= (VEC)(MASKED); \
            } \
        } \
        idle = ready_ && ALL(all_); \
    } while (0)
#else
#define IDLE(idle, r0, n0, PEAK_OF) (idle = 0)
#endif

#ifdef FORWARD
#define PEAK_OF(r) (i + (r) < rows ? peak[i + (r)] : 0.0f)
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void attention_fat(Q_ARG, K_ARG, U_ARG MORE_ARGS, O_ARG, PEAK_ARG, MASS_ARG) {
    const int b = get_group_id(1), m0 = get_group_id(0) * BM, rows = min(BM, MM - m0);
    ALIGNED float q[BM * DP], kt[DN * BN], val[BN * EP], o[BM * EP], p[MR * BN], peak[BM], mass[BM * W];
    PACK_ROWS(Q, b, m0, rows, BM, q, DP, DN);
    for (int i = 0; i < BM; ++i) {
        peak[i] = -INFINITY;
        VSTORE((VEC)(0.0f), mass + i * W);
        for (int e = 0; e < EP; e += W) VSTORE((VEC)(0.0f), o + i * EP + e);
    }
    for (int n0 = 0; n0 < NN; n0 += BN) {
        const int keys = min(BN, NN - n0);
        PACK_COLUMNS(K, b, n0, keys, BN, kt, BN, DN);
        PACK_ROWS(U, b, n0, keys, keys, val, EP, EN);
        for (int i = 0; i < rows; i += MR) {
            int idle;
            IDLE(idle, m0 + i, n0, PEAK_OF);
            if (idle) continue;
            for (int j = 0; j < BN; j += NV * W) {
                VEC acc[MR][NV];
                EACH(NV) acc[r][v] = (VEC)(0.0f);
                TILE(acc, NV, q + i * DP, DP, 1, kt + j, BN, DN);
                EACH(NV) VSTORE(acc[r][v] * ALPHA, p + r * BN + j + v * W);
            }
            VEC most[MR];
            for (int r = 0; r < MR; ++r) {
                const int row = min(m0 + i + r, MM - 1);
                most[r] = (VEC)(-INFINITY);
                for (int j = 0; j < BN; j += W) {
                    VEC t = VLOAD(p + r * BN + j);
                    APPLY(SCORE, t, t, row, n0 + j, -INFINITY);
                    most[r] = LARGER(t, most[r]);
                    VSTORE(t, p + r * BN + j);
                }
            }
            ALIGNED float scale[W], from[W];
            {
                const RVEC before = RLOAD(peak + i), top = row_peaks(most), now = LARGER(top, before);
                const RVEC origin = now == (RVEC)(-INFINITY) ? (RVEC)(0.0f) : now;
                RSTORE(now, peak + i);
                RSTORE(origin, from);
                VSTORE(exp_v(WIDE(before - origin)), scale);
            }
            for (int r = 0; r < MR; ++r) {
                const int row = min(m0 + i + r, MM - 1);
                VEC sum = VLOAD(mass + (i + r) * W) * scale[r];
                for (int j = 0; j < BN; j += W) {
                    VEC e = exp_v(VLOAD(p + r * BN + j) - from[r]);
                    sum += e;
#ifdef DROPS
                    APPLY(DROP, e, e, row, n0 + j, 0.0f);
#endif
                    VSTORE(e, p + r * BN + j);
                }
                VSTORE(sum, mass + (i + r) * W);
            }
            for (int e = 0; e < EP; e += NE * W) {
                VEC out[MR][NE];
                EACH(NE) out[r][v] = VLOAD(o + (i + r) * EP + e + v * W) * scale[r];
                TILE(out, NE, p, BN, 1, val + e, EP, keys);
                EACH(NE) VSTORE(out[r][v], o + (i + r) * EP + e + v * W);
            }
        }
    }
    for (int i = 0; i < rows; ++i) {
        const float sum = HSUM(VLOAD(mass + i * W)), share = 1.0f / sum;
        PEAK_STORE1(peak[i], b, m0 + i);
        MASS_STORE1(sum, b, m0 + i);
        for (int e = 0; e < EP; e += W) VSTORE(VLOAD(o + i * EP + e) * share, o + i * EP + e);
    }
    UNPACK(O, b, m0, rows, o, EP, EN, 1.0f);
}
#endif

#ifdef GRADIENT
#define PEAK_OF(r) (i + (r) < rows ? peak[i + (r)] : 0.0f)
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void attention_fat_grad(
    Q_ARG, K_ARG, U_ARG, O_ARG, PEAK_ARG, MASS_ARG, G_ARG MORE_ARGS, DQ_ARG, DK_ARG, DU_ARG, SUM_ARG, DELTA_ARG) {
    const int b = get_group_id(0);
    // The head's rows are packed anew for each block of keys, K and V (U) once: both by columns, K by rows too.
    ALIGNED float q[BM * MP], g[BM * EP], kt[DN * BN], vt[EN * BN], kr[BN * DP], dk[BN * DP], dv[BN * EP];
    ALIGNED float p[BM * BN], s[BM * BN], peak[BM], share[BM], delta[BM];
    for (int m0 = 0; m0 < MM; m0 += BM) {
        const int rows = min(BM, MM - m0);
        PACK_ROWS(O, b, m0, rows, rows, q, EP, EN);
        PACK_ROWS(G, b, m0, rows, rows, g, EP, EN);
        for (int i = 0; i < rows; ++i) {
            VEC sum = (VEC)(0.0f);
            for (int e = 0; e < EP; e += W) sum += VLOAD(q + i * EP + e) * VLOAD(g + i * EP + e);
            DELTA_STORE1(HSUM(sum) * BETA, b, m0 + i);
        }
    }
    for (int n0 = 0; n0 < NN; n0 += BN) {
        const int keys = min(BN, NN - n0);
        PACK_COLUMNS(K, b, n0, keys, BN, kt, BN, DN);
        PACK_COLUMNS(U, b, n0, keys, BN, vt, BN, EN);
        PACK_ROWS(K, b, n0, keys, keys, kr, DP, DN);
        for (int i = 0; i < BN * DP; i += W) VSTORE((VEC)(0.0f), dk + i);
        for (int i = 0; i < BN * EP; i += W) VSTORE((VEC)(0.0f), dv + i);
        for (int m0 = 0; m0 < MM; m0 += BM) {
            const int rows = min(BM, MM - m0);
            int live = 0;
            for (int i = 0; i < rows; ++i) {
                peak[i] = PEAK_AT(b, m0 + i);
                share[i] = 1.0f / MASS_AT(b, m0 + i);
                delta[i] = DELTA_AT(b, m0 + i);
            }
            PACK_ROWS(Q, b, m0, rows, BM, q, DP, DN);
            PACK_ROWS(G, b, m0, rows, BM, g, EP, EN);
            for (int i = 0; i < rows; i += MR) {
                int idle;
                IDLE(idle, m0 + i, n0, PEAK_OF);
                if (idle) {
                    for (int j = 0; j < MR * BN; j += W) {
                        VSTORE((VEC)(0.0f), p + i * BN + j);
                        VSTORE((VEC)(0.0f), s + i * BN + j);
                    }
                } else {
                    live = 1;
                    for (int j = 0; j < BN; j += NV * W) {
                        VEC acc[MR][NV];
                        EACH(NV) acc[r][v] = (VEC)(0.0f);
                        TILE(acc, NV, q + i * DP, DP, 1, kt + j, BN, DN);
                        EACH(NV) VSTORE(acc[r][v] * ALPHA, s + (i + r) * BN + j + v * W);
                        EACH(NV) acc[r][v] = (VEC)(0.0f);
                        TILE(acc, NV, g + i * EP, EP, 1, vt + j, BN, EN);
                        EACH(NV) VSTORE(acc[r][v] * BETA, p + (i + r) * BN + j + v * W);
                    }
                    for (int r = i; r < min(i + MR, rows); ++r) {
                        const int row = m0 + r;
                        for (int j = 0; j < BN; j += W) {
                            const VEC raw = VLOAD(s + r * BN + j);
                            VEC t, w, d = VLOAD(p + r * BN + j);
                            APPLY(SCORE, t, raw, row, n0 + j, -INFINITY);
                            const VEC e = exp_v(t - peak[r]) * share[r];
                            w = e;
#ifdef DROPS
                            APPLY(DROP, w, w, row, n0 + j, 0.0f);
                            APPLY(DROP, d, d, row, n0 + j, 0.0f);
#endif
                            d = e * (d - delta[r]);
#ifdef GRADED
                            if (PAST(n0 + j)) {
                                GRAD_P(d, d, raw, b, row, n0 + j);
                                d = KEPT(n0 + j, d, 0.0f);
                            } else {
                                GRAD_V(d, d, raw, b, row, n0 + j);
                            }
#endif
                            VSTORE(w, p + r * BN + j);
                            VSTORE(d, s + r * BN + j);
                        }
                    }
                }
                if (idle && n0 > 0) continue;
                for (int d = 0; d < DP; d += ND * W) {
                    VEC acc[MR][ND];
                    EACH(ND) acc[r][v] = (VEC)(0.0f);
                    if (n0 > 0) EACH(ND) acc[r][v] = SUM_VECTOR(b, min(m0 + i + r, MM - 1), d + v * W);
                    if (!idle) TILE(acc, ND, s + i * BN, BN, 1, kr + d, DP, keys);
                    EACH(ND) if (i + r < rows) SUM_SET(acc[r][v], b, m0 + i + r, d + v * W);
                }
            }
            if (!live) continue;
            for (int j = 0; j < keys; j += MR) {
                for (int e = 0; e < EP; e += NE * W) {
                    VEC acc[MR][NE];
                    EACH(NE) acc[r][v] = VLOAD(dv + (j + r) * EP + e + v * W);
                    TILE(acc, NE, p + j, 1, BN, g + e, EP, rows);
                    EACH(NE) VSTORE(acc[r][v], dv + (j + r) * EP + e + v * W);
                }
                for (int d = 0; d < DP; d += ND * W) {
                    VEC acc[MR][ND];
                    EACH(ND) acc[r][v] = VLOAD(dk + (j + r) * DP + d + v * W);
                    TILE(acc, ND, s + j, 1, BN, q + d, DP, rows);
                    EACH(ND) VSTORE(acc[r][v], dk + (j + r) * DP + d + v * W);
                }
            }
        }
        UNPACK(DK, b, n0, keys, dk, DP, DN, ALPHA);
        UNPACK(DU, b, n0, keys, dv, EP, EN, BETA);
    }
    for (int m0 = 0; m0 < MM; m0 += BM) {
        const int rows = min(BM, MM - m0);
        for (int i = 0; i < rows; ++i)
            for (int d = 0; d < DP; d += W) VSTORE(SUM_VECTOR(b, m0 + i, d), q + i * DP + d);
        UNPACK(DQ, b, m0, rows, q, DP, DN, ALPHA);
    }
}
#endif
