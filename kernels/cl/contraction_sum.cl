// Z[b,r,c] = ALPHA * sum over q of P[q,b,r,c]: what contraction_staged's ranges of k add up to, in a fixed order.

__kernel void contraction_sum(P_ARG, Z_ARG) {
    const int c = get_global_id(0) * 4, r = get_global_id(1), b = get_global_id(2);
    if (c >= CN || r >= RN) return;
    float4 sum = P_LOAD4(0, b, r, c);
#pragma unroll
    for (int q = 1; q < SPLIT; ++q) sum += P_LOAD4(q, b, r, c);
    sum *= ALPHA;
#if ZW == 4
    Z_STORE4(sum, b, r, c);
#else
    Z_AT(b, r, c) = sum.x;
    if (c + 1 < CN) Z_AT(b, r, c + 1) = sum.y;
    if (c + 2 < CN) Z_AT(b, r, c + 2) = sum.z;
    if (c + 3 < CN) Z_AT(b, r, c + 3) = sum.w;
#endif
}
