// Attention by work groups (GPUs). A group owns BO positions of one head, rows or keys, and walks the others in blocks of BX.
//
// Forward it owns rows: T = A X^T (queries by keys), the program SCORE, the online softmax, O += P Y (values). Backward, where T
// is made again and U is what reaches the probabilities: the owner of rows adds up dQ += dS X; the owner of keys has A = K,
// B = V, X = Q and Y = dO, so that T and U are the same turned round, and adds up dK += dS^T X and dV += P^T Y.
//
// Everything lies in local memory by rows of features, as it comes from layouts that are contiguous along them, and is read in
// vectors of 4 features: an item has TO x TX of T, its own positions IO apart and the others IX apart, so that neighbouring
// items read neighbouring rows. P and dS go through local memory for the second product. Features that do not fit at once
// come in CHUNKS (D: queries and keys, E: values) of CD and CE. What lies beyond an operand is zero or never looked at.
// With SKIP a block whose scores are all masked is left out where its rows have seen real ones: exp() of it would be 0.

#define LOCAL_SYNC barrier(CLK_LOCAL_MEM_FENCE)
#define UNROLL _Pragma("unroll")
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define MASKED -1e37f
#define REAL -1e36f
#define LOAD(p) (*(const __local float4 *)(p))

#define OWN(i) (og + (i) * IO)
#define OTHER(j) (xg + (j) * IX)
#define FEATURE(j) ((xg + (j) * IX) * 4)
#define EACH UNROLL for (int i = 0; i < TO; ++i) UNROLL for (int j = 0; j < TX; ++j)

// dst[r * STRIDE + f] = N[b, r0 + r, f0 + f] for ROWS x COLS, zero beyond RN and FN; lanes run along N_AXIS.
#define STAGE(N, dst, STRIDE, ROWS, COLS, r0, RN, f0, FN) \
    do { \
        if (N##_AXIS == 2) { \
            for (int r = l / N##_LANES; r < (ROWS); r += ITEMS / N##_LANES) \
                for (int f = l % N##_LANES * N##_W; f < (COLS); f += N##_LANES * N##_W) \
                    *(__local N##_T *)((dst) + r * (STRIDE) + f) = \
                        (r0) + r < (RN) && (f0) + f < (FN) ? N##_GET(b, (r0) + r, (f0) + f) : (N##_T)(0.0f); \
        } else { \
            for (int f = l / N##_LANES; f < (COLS); f += ITEMS / N##_LANES) \
                for (int r = l % N##_LANES; r < (ROWS); r += N##_LANES) \
                    (dst)[r * (STRIDE) + f] = (r0) + r < (RN) && (f0) + f < (FN) ? N##_AT(b, (r0) + r, (f0) + f) : 0.0f; \
        } \
    } while (0)

// t[i][j] += sum over f of L[own i, f] * R[other j, f].
#define PRODUCT(t, L, R, STRIDE, COLS) \
    for (int f = 0; f < (COLS); f += 4) { \
        float4 x_[TX]; \
        UNROLL for (int j = 0; j < TX; ++j) x_[j] = LOAD((R) + OTHER(j) * (STRIDE) + f); \
        UNROLL for (int i = 0; i < TO; ++i) { \
            const float4 a_ = LOAD((L) + OWN(i) * (STRIDE) + f); \
            UNROLL for (int j = 0; j < TX; ++j) { \
                t[i][j] += a_.x * x_[j].x; \
                t[i][j] += a_.y * x_[j].y; \
                t[i][j] += a_.z * x_[j].z; \
                t[i][j] += a_.w * x_[j].w; \
            } \
        } \
    }

// acc[i][j] += sum over the block's others x of V[own i, x] * R[x, features of j]. Items without features of their own double others'.
#define AT_FEATURE(R, x, STRIDE, j, COLS) LOAD((R) + (x) * (STRIDE) + (FEATURE(j) < (COLS) ? FEATURE(j) : 0))
#define ACCUMULATE(acc, FJ, V, R, STRIDE, COLS) \
    for (int x = 0; x < BX; x += 4) { \
        float4 w_[TO]; \
        UNROLL for (int i = 0; i < TO; ++i) w_[i] = LOAD((V) + OWN(i) * WS + x); \
        UNROLL for (int j = 0; j < (FJ); ++j) { \
            const float4 y0 = AT_FEATURE(R, x, STRIDE, j, COLS), y1 = AT_FEATURE(R, x + 1, STRIDE, j, COLS); \
            const float4 y2 = AT_FEATURE(R, x + 2, STRIDE, j, COLS), y3 = AT_FEATURE(R, x + 3, STRIDE, j, COLS); \
            UNROLL for (int i = 0; i < TO; ++i) { \
                acc[i][j] += w_[i].x * y0; \
                acc[i][j] += w_[i].y * y1; \
                acc[i][j] += w_[i].z * y2; \
                acc[i][j] += w_[i].w * y3; \
            } \
        } \
    }
#define CLEAR(acc, FJ) UNROLL for (int i = 0; i < TO; ++i) UNROLL for (int j = 0; j < (FJ); ++j) acc[i][j] = (float4)(0.0f)

// N[b, o0 + own i, f0 + features of j] = acc[i][j] * SCALE(i).
#define STORE(N, acc, FJ, f0, COLS, FN, ON, SCALE) \
    UNROLL for (int i = 0; i < TO; ++i) UNROLL for (int j = 0; j < (FJ); ++j) { \
        const int f = (f0) + FEATURE(j); \
        if (o0 + OWN(i) < (ON) && FEATURE(j) < (COLS) && f < (FN)) N##_PUT(acc[i][j] * SCALE(i), b, o0 + OWN(i), f, FN); \
    }
#define PUT_EACH(N, v, b, r, f, FN) \
    do { \
        const float4 v_ = (v); \
        N##_STORE1(v_.x, b, r, f); \
        if ((f) + 1 < (FN)) N##_STORE1(v_.y, b, r, (f) + 1); \
        if ((f) + 2 < (FN)) N##_STORE1(v_.z, b, r, (f) + 2); \
        if ((f) + 3 < (FN)) N##_STORE1(v_.w, b, r, (f) + 3); \
    } while (0)

// A value per own position, over the IX items that share it: by OP, in a fixed order.
#define SHARE(mine, out, OP) \
    do { \
        UNROLL for (int i = 0; i < TO; ++i) shared_[xg * BO + OWN(i)] = mine[i]; \
        LOCAL_SYNC; \
        UNROLL for (int i = 0; i < TO; ++i) { \
            float v_ = shared_[OWN(i)]; \
            for (int x = 1; x < IX; ++x) v_ = OP(v_, shared_[x * BO + OWN(i)]); \
            out[i] = v_; \
        } \
    } while (0)
#define SUM(a, b) ((a) + (b))

// alive[turn] says whether some item of the group needs the block; it is written before a barrier and read after it.
#if SKIP
#define ASK(ready) \
    do { \
        int idle_ = 1; \
        EACH { \
            float t_; \
            const int row_ = min(ROW(i, j), MM - 1), key_ = min(KEY(i, j), NN - 1); \
            MASK_V(t_, t_, b, row_, key_); \
            idle_ &= (ready) && t_ <= MASKED; \
        } \
        if (!idle_) alive[turn] = 1; \
    } while (0)
#define ANSWER(live) \
    const int live = alive[turn]; \
    if (l == 0) alive[turn ^ 1] = 0; \
    turn ^= 1
#define ALIVE \
    __local int alive[2]; \
    int turn = 0; \
    if (l < 2) alive[l] = 0; \
    LOCAL_SYNC
#else
#define ASK(ready)
#define ANSWER(live) const int live = 1
#define ALIVE
#endif

#define ITEM \
    const int l = get_local_id(0), b = get_group_id(1), o0 = get_group_id(0) * BO; \
    const int og = l % 8 + l / 32 % (IO / 8) * 8, xg = l / 8 % 4 + l / 32 / (IO / 8) * 4
#define TILE __local __attribute__((aligned(16))) float

#ifdef FORWARD
#define ROW(i, j) (o0 + OWN(i))
#define KEY(i, j) (x0 + OTHER(j))
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void attention_tile(A_ARG, X_ARG, Y_ARG MORE_ARGS, O_ARG, PEAK_ARG, MASS_ARG) {
    TILE as[BO * DS], xs[BX * (DS > ES ? DS : ES)], ws[BO * WS], shared_[IX * BO];
    ITEM;
    float peak[TO], sum[TO];
    float4 out[CHUNKS_E][TO][FE];
    UNROLL for (int c = 0; c < CHUNKS_E; ++c) CLEAR(out[c], FE);
    UNROLL for (int i = 0; i < TO; ++i) peak[i] = -INFINITY, sum[i] = 0.0f;
    if (CHUNKS_D == 1) STAGE(A, as, DS, BO, CD, o0, MM, 0, DN);
    ALIVE;
    for (int x0 = 0; x0 < NN; x0 += BX) {
        float t[TO][TX], top[TO];
        EACH t[i][j] = 0.0f;
        UNROLL for (int i = 0; i < TO; ++i) top[i] = -INFINITY;
        ASK(peak[i] > REAL || ROW(i, j) >= MM);
        int live = 1;
        for (int c = 0; c < CHUNKS_D; ++c) {
            if (CHUNKS_D > 1) STAGE(A, as, DS, BO, CD, o0, MM, c * CD, DN);
            STAGE(X, xs, DS, BX, CD, x0, NN, c * CD, DN);
            LOCAL_SYNC;
            if (c == 0) {
                ANSWER(answer);
                live = answer;
            }
            if (live) PRODUCT(t, as, xs, DS, CD);
            if (CHUNKS_D > 1) LOCAL_SYNC;
        }
        if (live) {
            UNROLL for (int i = 0; i < TO; ++i) {
                UNROLL for (int j = 0; j < TX; ++j) {
                    const int row = min(ROW(i, j), MM - 1), key = min(KEY(i, j), NN - 1);
                    SCORE_V(t[i][j], t[i][j] * ALPHA, b, row, key);
                    if (KEY(i, j) >= NN) t[i][j] = -INFINITY;
                    top[i] = LARGER(t[i][j], top[i]);
                }
            }
        }
        SHARE(top, top, LARGER);
        if (live) {
            UNROLL for (int i = 0; i < TO; ++i) {
                const float now = LARGER(top[i], peak[i]), from = now == -INFINITY ? 0.0f : now;
                const float scale = exp(peak[i] - from);
                peak[i] = now;
                sum[i] *= scale;
                UNROLL for (int c = 0; c < CHUNKS_E; ++c) UNROLL for (int j = 0; j < FE; ++j) out[c][i][j] *= scale;
                UNROLL for (int j = 0; j < TX; ++j) {
                    float e = exp(t[i][j] - from);
                    sum[i] += e;
#ifdef DROPS
                    DROP_V(e, e, b, min(ROW(i, j), MM - 1), min(KEY(i, j), NN - 1));
                    if (KEY(i, j) >= NN) e = 0.0f;
#endif
                    ws[OWN(i) * WS + OTHER(j)] = e;
                }
            }
        }
        UNROLL for (int c = 0; c < CHUNKS_E; ++c) {
            STAGE(Y, xs, ES, BX, CE, x0, NN, c * CE, EN);
            LOCAL_SYNC;
            if (live) ACCUMULATE(out[c], FE, ws, xs, ES, CE);
            LOCAL_SYNC;
        }
    }
    float total[TO];
    SHARE(sum, total, SUM);
#define INVERSE(i) (1.0f / total[i])
    UNROLL for (int c = 0; c < CHUNKS_E; ++c) STORE(O, out[c], FE, c * CE, CE, EN, MM, INVERSE);
    if (xg == 0)
        UNROLL for (int i = 0; i < TO; ++i)
            if (o0 + OWN(i) < MM) {
                PEAK_STORE1(peak[i], b, o0 + OWN(i));
                MASS_STORE1(total[i], b, o0 + OWN(i));
            }
}
#endif

// The gradients' common part: T and U of a block, then dS over T and P over U.
#if CHUNKED
#define LEFT_A(c) STAGE(A, as, DS, BO, CD, o0, ON, (c) * CD, DN)
#define LEFT_B(c) STAGE(B, bs, ES, BO, CE, o0, ON, (c) * CE, EN)
#define BETWEEN LOCAL_SYNC
#else
#define LEFT_A(c)
#define LEFT_B(c)
#define BETWEEN
#endif
#define RIGHT_X(c) STAGE(X, xs, DS, BX, CD, x0, XN, (c) * CD, DN)
#define RIGHT_Y(c) STAGE(Y, ys, ES, BX, CE, x0, XN, (c) * CE, EN)
#define PRODUCTS \
    float t[TO][TX], u[TO][TX]; \
    EACH t[i][j] = u[i][j] = 0.0f; \
    int live = 1; \
    if (!CHUNKED) RIGHT_Y(0); \
    for (int c = 0; c < CHUNKS_D; ++c) { \
        LEFT_A(c); \
        RIGHT_X(c); \
        LOCAL_SYNC; \
        if (c == 0) { \
            ANSWER(answer); \
            live = answer; \
        } \
        if (live) PRODUCT(t, as, xs, DS, CD); \
        BETWEEN; \
    } \
    for (int c = 0; c < CHUNKS_E; ++c) { \
        if (CHUNKED) { \
            LEFT_B(c); \
            RIGHT_Y(c); \
            LOCAL_SYNC; \
        } \
        if (live) PRODUCT(u, bs, ys, ES, CE); \
        BETWEEN; \
    }
#ifdef DROPS
#define DROPPED(out, in, row, key) DROP_V(out, in, b, row, key)
#else
#define DROPPED(out, in, row, key) out = (in)
#endif
#ifdef GRADED
#define GRADIENT(out, in, raw, row, key) GRAD_V(out, in, raw, b, row, key)
#else
#define GRADIENT(out, in, raw, row, key) out = (in)
#endif
#define DERIVE(PEAK_IJ, SHARE_IJ, DELTA_IJ) \
    EACH { \
        const int row = min(ROW(i, j), MM - 1), key = min(KEY(i, j), NN - 1); \
        const float raw = t[i][j] * ALPHA; \
        float score, reached; \
        SCORE_V(score, raw, b, row, key); \
        const float p = exp(score - (PEAK_IJ)) * (SHARE_IJ); \
        DROPPED(reached, u[i][j] * BETA, row, key); \
        const float d = p * (reached - (DELTA_IJ)); \
        const int inside = x0 + OTHER(j) < XN; \
        GRADIENT(t[i][j], d, raw, row, key); \
        DROPPED(u[i][j], p, row, key); \
        t[i][j] = inside ? t[i][j] : 0.0f; \
        u[i][j] = inside ? u[i][j] : 0.0f; \
    }
#define AS_ALPHA(i) ALPHA
#define AS_BETA(i) BETA

#ifdef GRAD_ROWS
#define ROW(i, j) (o0 + OWN(i))
#define KEY(i, j) (x0 + OTHER(j))
#define ON MM
#define XN NN
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void attention_tile_rows(A_ARG, X_ARG, Y_ARG, O_ARG, PEAK_ARG, MASS_ARG, B_ARG MORE_ARGS, ZD_ARG, DELTA_ARG) {
    TILE as[BO * DS], xs[BX * DS], ws[BO * WS], shared_[IX * BO];
#if CHUNKED
    __local float *const bs = as, *const ys = xs;
#else
    TILE bs[BO * ES], ys[BX * ES];
#endif
    ITEM;
    float peak[TO], share[TO], delta[TO];
    float4 acc[CHUNKS_D][TO][FD];
    UNROLL for (int c = 0; c < CHUNKS_D; ++c) CLEAR(acc[c], FD);
    UNROLL for (int i = 0; i < TO; ++i) {
        const int row = min(ROW(i, 0), MM - 1);
        peak[i] = PEAK_AT(b, row);
        share[i] = 1.0f / MASS_AT(b, row);
        delta[i] = 0.0f;
        for (int f = xg; f < EN; f += IX) delta[i] += B_AT(b, row, f) * O_AT(b, row, f);
    }
    SHARE(delta, delta, SUM);
    UNROLL for (int i = 0; i < TO; ++i) {
        delta[i] *= BETA;
        if (xg == 0 && ROW(i, 0) < MM) DELTA_STORE1(delta[i], b, ROW(i, 0));
    }
    if (!CHUNKED) {
        STAGE(A, as, DS, BO, CD, o0, MM, 0, DN);
        STAGE(B, bs, ES, BO, CE, o0, MM, 0, EN);
    }
    ALIVE;
    for (int x0 = 0; x0 < NN; x0 += BX) {
        ASK(peak[i] > REAL);
        PRODUCTS
        if (live) {
            DERIVE(peak[i], share[i], delta[i])
            EACH ws[OWN(i) * WS + OTHER(j)] = t[i][j];
        }
        LOCAL_SYNC;
        UNROLL for (int c = 0; c < CHUNKS_D; ++c) {
            if (CHUNKED) {
                RIGHT_X(c);
                LOCAL_SYNC;
            }
            if (live) ACCUMULATE(acc[c], FD, ws, xs, DS, CD);
            LOCAL_SYNC;
        }
    }
    UNROLL for (int c = 0; c < CHUNKS_D; ++c) STORE(ZD, acc[c], FD, c * CD, CD, DN, MM, AS_ALPHA);
}
#endif

#ifdef GRAD_KEYS
#define ROW(i, j) (x0 + OTHER(j))
#define KEY(i, j) (o0 + OWN(i))
#define ON NN
#define XN MM
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void attention_tile_keys(X_ARG, A_ARG, B_ARG, PEAK_ARG, MASS_ARG, Y_ARG MORE_ARGS, ZD_ARG, ZE_ARG, DELTA_ARG) {
    TILE as[BO * DS], xs[BX * DS], ws[BO * WS], ps[BO * WS];
    __local float peaks[BX], shares[BX], deltas[BX];
#if CHUNKED
    __local float *const bs = as, *const ys = xs;
#else
    TILE bs[BO * ES], ys[BX * ES];
#endif
    ITEM;
    float4 acc[CHUNKS_D][TO][FD], out[CHUNKS_E][TO][FE];
    UNROLL for (int c = 0; c < CHUNKS_D; ++c) CLEAR(acc[c], FD);
    UNROLL for (int c = 0; c < CHUNKS_E; ++c) CLEAR(out[c], FE);
    if (!CHUNKED) {
        STAGE(A, as, DS, BO, CD, o0, NN, 0, DN);
        STAGE(B, bs, ES, BO, CE, o0, NN, 0, EN);
    }
    ALIVE;
    for (int x0 = 0; x0 < MM; x0 += BX) {
        for (int x = l; x < BX; x += ITEMS) {
            const int row = min(x0 + x, MM - 1);
            peaks[x] = PEAK_AT(b, row);
            shares[x] = 1.0f / MASS_AT(b, row);
            deltas[x] = DELTA_AT(b, row);
        }
        ASK(PEAK_AT(b, row_) > REAL);
        PRODUCTS
        if (live) {
            DERIVE(peaks[OTHER(j)], shares[OTHER(j)], deltas[OTHER(j)])
            EACH {
                ws[OWN(i) * WS + OTHER(j)] = t[i][j];
                ps[OWN(i) * WS + OTHER(j)] = u[i][j];
            }
        }
        LOCAL_SYNC;
        UNROLL for (int c = 0; c < CHUNKS_D; ++c) {
            if (CHUNKED) {
                RIGHT_X(c);
                LOCAL_SYNC;
            }
            if (live) ACCUMULATE(acc[c], FD, ws, xs, DS, CD);
            BETWEEN;
        }
        UNROLL for (int c = 0; c < CHUNKS_E; ++c) {
            if (CHUNKED) {
                RIGHT_Y(c);
                LOCAL_SYNC;
            }
            if (live) ACCUMULATE(out[c], FE, ps, ys, ES, CE);
            LOCAL_SYNC;
        }
    }
    UNROLL for (int c = 0; c < CHUNKS_D; ++c) STORE(ZD, acc[c], FD, c * CD, CD, DN, NN, AS_ALPHA);
    UNROLL for (int c = 0; c < CHUNKS_E; ++c) STORE(ZE, out[c], FE, c * CE, CE, EN, NN, AS_BETA);
}
#endif
