// exp, erf and tanh over any vector type, in straight-line arithmetic that vectorises everywhere: the built-in ones are
// scalar calls on some CPU drivers. Worst relative error against float64: exp 0.8e-7, erf 3.5e-7, tanh 4e-7.
// exp: Cephes' expf (range reduction by ln 2 in two parts, degree 5), scaled by 2^n in two steps so that results overflow
// to infinity and underflow gradually. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. erf, tanh:
// the rational approximations of XLA and Eigen. NaN stays NaN: clamps compare, and comparisons with NaN are false.
// Operators only: PoCL 3.0 does not inline even fmax, select or rint.
// rand(seed, stream, index): uniform in [0, 1), a hash of its arguments; see random_uniform in layoutopt/expr.py, which
// gives the same bits.
// round16(x, seed): one of the float16 numbers beside x, at random; see round16 in layoutopt/expr.py: the same bits.
// MATH(float16, int16, uint16, _v) defines exp_v, erf_v, tanh_v, rand_v and round16_v.

#define CLAMPED(x, bound) ((x) < -(bound) ? -(bound) : (x) > (bound) ? (bound) : (x))
#define MATH(F, I, U, S) \
static F exp##S(F x) \
{ \
    x = x < (F)(-110.0f) ? (F)(-110.0f) : x > (F)(89.5f) ? (F)(89.5f) : x; \
    const F shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f; \
    const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f; \
    F p = r * 1.9875691500e-4f + 1.3981999507e-3f; \
    p = p * r + 8.3334519073e-3f; \
    p = p * r + 4.1665795894e-2f; \
    p = p * r + 1.6666665459e-1f; \
    p = p * r + 5.0000001201e-1f; \
    p = p * (r * r) + r + 1.0f; \
    const I whole = AS_INT##S(shifted) - 0x4B400000, part = whole >> 1; \
    return p * AS_FLOAT##S((part + 127) << 23) * AS_FLOAT##S((whole - part + 127) << 23); \
} \
static F erf##S(F x) \
{ \
    x = CLAMPED(x, (F)(3.8325069f)); \
    const F w = x * x; \
    F p = w * 0.00022905065861350646f + 0.0034082910107109506f; \
    p = p * w + 0.050955695062380861f; \
    p = p * w + 0.18520832239976145f; \
    p = p * w + 1.128379143519084f; \
    F q = w * -1.1791602954361697e-7f + 0.000023547966471313185f; \
    q = q * w + 0.0010179625278914885f; \
    q = q * w + 0.014070470171167667f; \
    q = q * w + 0.11098505178285362f; \
    q = q * w + 0.49746925110067538f; \
    q = q * w + 1.0f; \
    const F y = x * p / q; \
    return CLAMPED(y, (F)(1.0f)); \
} \
static F tanh##S(F x) \
{ \
    const F c = CLAMPED(x, (F)(7.9053111f)), w = c * c; \
    F p = w * -2.76076847742355e-16f + 2.00018790482477e-13f; \
    p = p * w + -8.60467152213735e-11f; \
    p = p * w + 5.12229709037114e-08f; \
    p = p * w + 1.48572235717979e-05f; \
    p = p * w + 6.37261928875436e-04f; \
    p = p * w + 4.89352455891786e-03f; \
    F q = w * 1.19825839466702e-06f + 1.18534705686654e-04f; \
    q = q * w + 2.26843463243900e-03f; \
    q = q * w + 4.89352518554385e-03f; \
    return (x < (F)(4.0e-4f) & x > (F)(-4.0e-4f)) ? x : c * p / q; \
} \
static U mix##S(U x) \
{ \
    x = (x ^ (x >> 16)) * 0x7FEB352Du; \
    x = (x ^ (x >> 15)) * 0x846CA68Bu; \
    return x ^ (x >> 16); \
} \
static F rand##S(I seed, I stream, I index) \
{ \
    const U s = AS_UINT##S(seed), key = mix##S(s + AS_UINT##S(stream) * 0x9E3779B9u); \
    const U bits = mix##S(mix##S(AS_UINT##S(index) + key) + mix##S(key ^ s)); \
    return AS_REAL##S(bits >> 8) * 5.9604644775390625e-8f; \
} \
static F round16##S(F x, I seed) \
{ \
    const U bits = AS_UINT##S(x), noise = mix##S(bits ^ mix##S(AS_UINT##S(seed))) >> 19; \
    const F normal = AS_FLOAT##S((bits + noise) & 0xFFFFE000u), size = AS_FLOAT##S(bits & 0x7FFFFFFFu); \
    const F small = size < (F)(6.103515625e-5f) ? size : (F)(0.0f); \
    const F steps = AS_REAL##S(AS_WHOLE##S(small * 16777216.0f + AS_REAL##S(noise) * 1.220703125e-4f)); \
    const F tiny = AS_FLOAT##S(AS_UINT##S(steps * 5.9604644775390625e-8f) | (bits & 0x80000000u)); \
    const F found = size < (F)(6.103515625e-5f) ? tiny : normal; \
    return CLAMPED(found, (F)(65504.0f)); \
}
#define AS_INT_s(x) as_int(x)
#define AS_FLOAT_s(x) as_float(x)
#define AS_UINT_s(x) as_uint(x)
#define AS_REAL_s(x) convert_float(x)
#define AS_WHOLE_s(x) convert_uint_rtz(x)
MATH(float, int, uint, _s)
#if MATH_WIDTH > 1
#define MATH_CAT_(a, b) a##b
#define MATH_CAT(a, b) MATH_CAT_(a, b)
#define AS_INT_v(x) MATH_CAT(as_int, MATH_WIDTH)(x)
#define AS_FLOAT_v(x) MATH_CAT(as_float, MATH_WIDTH)(x)
#define AS_UINT_v(x) MATH_CAT(as_uint, MATH_WIDTH)(x)
#define AS_REAL_v(x) MATH_CAT(convert_float, MATH_WIDTH)(x)
#define AS_WHOLE_v(x) MATH_CAT(MATH_CAT(convert_uint, MATH_WIDTH), _rtz)(x)
MATH(MATH_CAT(float, MATH_WIDTH), MATH_CAT(int, MATH_WIDTH), MATH_CAT(uint, MATH_WIDTH), _v)
#endif
