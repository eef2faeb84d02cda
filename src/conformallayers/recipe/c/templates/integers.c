/*
 * The functions of programs in integers; see helpers.c. Their loops have no floats but where an image is
 * read and where outputs are written.
 */

//: apart
/* A product by itself: no compiler may merge it with a sum, which would round otherwise. */
static double apart(double x)
{
    volatile double y = x;
    return y;
}

//: rounded
/* p / 2^shift, rounded to the nearest integer, ties to even. */
static inline int64_t rounded(int64_t p, int32_t shift)
{
    const int64_t half = shift > 0 ? ((int64_t)1 << (shift - 1)) - 1 + ((p >> shift) & 1) : 0;
    return (p + half) >> shift;
}

//: clipped
static inline int8_t clipped(int32_t q, int32_t low)
{
    return (int8_t)(q > 127 ? 127 : q < low ? low : q);
}

//: feature
/* A feature from p / 2^shift, which has 32 bits. */
static inline int8_t feature(int64_t p, int32_t shift, int32_t low)
{
    return clipped((int32_t)rounded(p, shift), low);
}

//: feature_of_parts
/* A feature from p / 2^shift, which counts parts of it, times a factor of the sample (-1: none),
   and an addend. */
static inline int8_t feature_of_parts(int64_t p, int32_t shift, int32_t factor, int32_t addend,
                                      int32_t low)
{
    int32_t parts = (int32_t)rounded(p, shift);
    if (factor >= 0)
        parts = (int32_t)rounded((int64_t)parts * factor, 23);
    parts += addend;
    return clipped((parts + 31 + ((parts >> 6) & 1)) >> 6, low);
}

//: feature_of_large
/* The same for more than 32 bits, where there are no parts or no factor. */
static inline int8_t feature_of_large(int64_t p, int32_t shift, int32_t parts, int32_t addend,
                                      int32_t low)
{
    const int64_t found = rounded(p, shift), q = parts ? rounded(found + addend, 6) : found;
    return (int8_t)(q > 127 ? 127 : q < low ? low : q);
}

//: factor_of
/* A number / tau as an integer of 24 bits. */
static int32_t factor_of(double number, double tau)
{
    const double found = rint(number / tau);
    return found >= 16777215.0 ? 16777215 : (int32_t)found;
}

//: pixel
/* A number of the image: one of floats, or a byte / 255. Not a number counts as 0. */
static inline float pixel(const float *image, const uint8_t *levels, int32_t i, float shift)
{
    const float v = (levels == NULL ? image[i] : (float)levels[i] / 255.0f) + shift;
    return v == v ? v : 0.0f;
}

//: peak
/* The larger magnitude. */
static inline float peak(float found, float v)
{
    const float size = v < 0 ? -v : v;
    return size > found ? size : found;
}

//: quantized
/* A number as a feature. Adding 1.5 * 2^23 rounds it, ties to even. */
static inline int8_t quantized(float v)
{
    const float near = v + 12582912.0f, whole = near - 12582912.0f;
    return (int8_t)(v >= 127 ? 127 : v <= -127 ? -127 : (int32_t)whole);
}

//: squared
/* The sum of squares. */
static double squared(const int8_t *x, int32_t n)
{
    double total = 0;
    int32_t i = 0;
    while (i < n) {
        const int32_t stop = n - i < 65536 ? n : i + 65536;
        int32_t sum = 0;
        for (; i < stop; i++)
            sum += x[i] * x[i];
        total += (double)sum;
    }
    return total;
}

//: length_of
/* The root of the sum of squares times unit, and share^2; 1 instead of 0. */
static double length_of(double squares, double unit, double share)
{
    const double found = sqrt(apart(squares * unit) + apart(share * share));
    return found == 0 ? 1 : found;
}

//: even_bytes
#if defined(__ARM_FEATURE_DSP) && defined(__GNUC__)
#include <arm_acle.h>
/* The first and the third byte of a word as 16-bit numbers, and the others. */
static inline uint32_t even_bytes(uint32_t v)
{
    return (uint32_t)__sxtb16((int8x4_t)v);
}
static inline uint32_t odd_bytes(uint32_t v)
{
    uint32_t found;
    __asm__("sxtb16 %0, %1, ror #8" : "=r"(found) : "r"(v));
    return found;
}
#endif

//: widen
/* Features as 16-bit numbers, in memory of another type. */
#ifdef __GNUC__
typedef int16_t __attribute__((may_alias)) wide_t;
#else
typedef int16_t wide_t;
#endif
#if defined(__ARM_FEATURE_DSP) && defined(__GNUC__)
/* Copies four at a time; up to three more are read and written, for which memory has room. */
static wide_t *widen(const int8_t *x, wide_t *to, int32_t n)
{
    wide_t *const end = to + n;
    for (; to < end; x += 4, to += 4) {
        uint32_t v, even, odd, pair;
        memcpy(&v, x, sizeof v);
        even = even_bytes(v);
        odd = odd_bytes(v);
        __asm__("pkhbt %0, %1, %2, lsl #16" : "=r"(pair) : "r"(even), "r"(odd));
        memcpy(to, &pair, sizeof pair);
        __asm__("pkhtb %0, %1, %2, asr #16" : "=r"(pair) : "r"(odd), "r"(even));
        memcpy(to + 2, &pair, sizeof pair);
    }
    return end;
}
#else
static wide_t *widen(const int8_t *x, wide_t *to, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        to[i] = x[i];
    return to + n;
}
#endif

//: blank
static wide_t *blank(wide_t *to, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        to[i] = 0;
    return to + n;
}

//: dots
/* The products of two rows of weights, in groups of four, with two columns. */
#if defined(__ARM_FEATURE_DSP) && defined(__GNUC__)
#define LOAD_PAIRS(first, second, from) \
    __asm__("ldrd %0, %1, [%2], #8" : "=r"(first), "=r"(second), "+r"(from) : : "memory")
#define ADD_ROW(weights, first, second) \
    memcpy(&word, weights, sizeof word); \
    weights += 4; \
    even = even_bytes(word); \
    first = __smlad((int16x2_t)even, (int16x2_t)x0, first); \
    second = __smlad((int16x2_t)even, (int16x2_t)y0, second); \
    word = odd_bytes(word); \
    first = __smlad((int16x2_t)word, (int16x2_t)x1, first); \
    second = __smlad((int16x2_t)word, (int16x2_t)y1, second); \
    /* One row after the other, or registers do not suffice. */ \
    __asm__ volatile("" : "+r"(first), "+r"(second) : : "memory")
#define ADD_FOUR() \
    do { \
        uint32_t x0, x1, y0, y1, word, even; \
        LOAD_PAIRS(x0, x1, p); \
        LOAD_PAIRS(y0, y1, q); \
        ADD_ROW(u, a, b); \
        ADD_ROW(v, c, d); \
    } while (0)
__attribute__((noinline)) static void dots(const int8_t *u, const int8_t *v, const wide_t *p,
                                           const wide_t *q, int32_t n, int32_t *sums)
{
    const wide_t *const stop = p + n;
    int32_t a = 0, b = 0, c = 0, d = 0;
    if (n % 8 != 0)
        ADD_FOUR();
    while (p < stop) {
        ADD_FOUR();
        ADD_FOUR();
    }
    sums[0] = a;
    sums[1] = c;
    sums[2] = b;
    sums[3] = d;
}
#else
static inline void dots(const int8_t *u, const int8_t *v, const wide_t *p, const wide_t *q,
                        int32_t n, int32_t *sums)
{
    int32_t a = 0, b = 0, c = 0, d = 0, i;
    for (i = 0; i < n; i++) {
        a += u[i] * p[i];
        b += u[i] * q[i];
        c += v[i] * p[i];
        d += v[i] * q[i];
    }
    sums[0] = a;
    sums[1] = c;
    sums[2] = b;
    sums[3] = d;
}
#endif

//: root
/* The square root, rounded down: Newton's method from a power of two above it. */
static uint32_t root(uint32_t n)
{
    uint32_t found, next;
    int32_t bits = 0, step;
    if (n == 0)
        return 0;
    for (step = 8; step > 0; step /= 2)
        if (n >> (2 * bits) >> (2 * step) != 0)
            bits += step;
    next = (uint32_t)2 << bits;
    do {
        found = next;
        next = (found + n / found) / 2;
    } while (next < found);
    return found;
}

//: window
/* Copy the window of a position as 16-bit numbers, with zeros outside of the map. For g see
   "products", which compilers simplify where its numbers are known. */
#ifdef __GNUC__
__attribute__((always_inline))
#endif
static inline void window(const int8_t *x, wide_t *to, const int32_t *g, int32_t p, int32_t q,
                          int32_t r)
{
    const int32_t *in = g + 6, *taps = g + 12, *stride = g + 15, *pad = g + 18, *gap = g + 21;
    const int32_t channels = g[2], pitch = g[4], start = r * stride[2] - pad[2];
    wide_t *const end = to + g[3];
    int32_t i, j, k;
    for (i = 0; i < taps[0]; i++)
        for (j = 0; j < taps[1]; j++) {
            const int32_t a = p * stride[0] - pad[0] + i * gap[0];
            const int32_t b = q * stride[1] - pad[1] + j * gap[1];
            const int32_t line = (a * in[1] + b) * in[2] + start;
            if (a < 0 || a >= in[0] || b < 0 || b >= in[1])
                to = blank(to, taps[2] * channels);
            else if (gap[2] == 1 && pitch == channels && start >= 0 && start + taps[2] <= in[2])
                to = widen(x + line * pitch, to, taps[2] * channels);
            else
                for (k = 0; k < taps[2] * gap[2]; k += gap[2])
                    if (start + k < 0 || start + k >= in[2])
                        to = blank(to, channels);
                    else
                        to = widen(x + (line + k) * pitch, to, channels);
        }
    blank(to, (int32_t)(end - to));
}

//: products
/* $A in int8.
   Two windows are multiplied by two rows of weights at a time. g: groups; outputs, channels and
   entries of a window in each; entries between positions of x, of y; for three axes the sizes of
   x and y, the taps of a window, the steps of windows, the pads, the steps of taps. */
static void $name(const int8_t *x, const int8_t *w, $T *y, wide_t *columns,
        $P)
{
    static const int32_t g[] = {
        $G};
    const int32_t outputs = g[1], entries = g[3], step = g[5], *to = g + 9;
    int32_t group, p, q, r, o, n;
    for (group = 0; group < g[0]; group++) {
        $T *at = y + group * outputs;
        int32_t t = 0;
        for (p = 0; p < to[0]; p++)
            for (q = 0; q < to[1]; q++)
                for (r = 0; r < to[2]; r++) {
                    window(x + group * g[2], columns + t % 2 * entries, g, p, q, r);
                    if (++t % 2 != 0 && t < to[0] * to[1] * to[2])
                        continue;
                    const wide_t *const second = columns + (t > 1) * entries;
                    for (o = 0; o < outputs; o += 2) {
                        const int8_t *const u = w + (group * outputs + o) * entries;
                        const int8_t *const v = o + 1 < outputs ? u + entries : u;
                        int32_t sums[4]; /* two of each position */
                        dots(u, v, columns, second, entries, sums);
                        EACH(4) {
                            const int32_t c = group * outputs + o + n % 2;
                            if (n == 2 && t % 2 != 0)
                                break;
                            if (o + n % 2 < outputs)
                                at[n / 2 * step + o + n % 2] =
                                    $R;
                        }
                    }
                    at += 2 * step;
                }
    }
}

//: ADD_FOUR_PRODUCTS
/* Add the products of four features with four weights to four sums. */
#if defined(__ARM_FEATURE_DSP) && defined(__GNUC__)
#define ADD_FOUR_PRODUCTS(sums, x, w) \
    do { \
        uint32_t u, v; \
        memcpy(&u, x, sizeof u); \
        memcpy(&v, w, sizeof v); \
        sums[0] = __smlabb((int32_t)even_bytes(u), (int32_t)even_bytes(v), sums[0]); \
        sums[2] = __smlatt((int32_t)even_bytes(u), (int32_t)even_bytes(v), sums[2]); \
        sums[1] = __smlabb((int32_t)odd_bytes(u), (int32_t)odd_bytes(v), sums[1]); \
        sums[3] = __smlatt((int32_t)odd_bytes(u), (int32_t)odd_bytes(v), sums[3]); \
    } while (0)
#else
#define ADD_FOUR_PRODUCTS(sums, x, w) EACH(4) sums[n] += (x)[n] * (w)[n]
#endif

//: depthwise
/* $A in int8.
   Every channel has a kernel of its own. Four channels are summed at a time; their
   weights lie side by side. Windows beside the map read zeros. For g see "products". */
static void $name(const int8_t *x, const int8_t *w, $T *y, int8_t *zeros,
        $P)
{
    static const int32_t g[] = {
        $G};
    const int32_t *in = g + 6, *to = g + 9, *taps = g + 12, *stride = g + 15, *pad = g + 18;
    const int32_t channels = g[0], *gap = g + 21;
    const int8_t *at[$N];
    int32_t p, q, r, i, j, k, n, o, t;
    memset(zeros, 0, (size_t)channels + 3);
    for (p = 0; p < to[0]; p++)
        for (q = 0; q < to[1]; q++)
            for (r = 0; r < to[2]; r++, y += g[5]) {
                const int8_t *weights = w;
                t = 0;
                for (i = p * stride[0] - pad[0]; t < $N; i += gap[0])
                    for (j = 0; j < taps[1]; j++)
                        for (k = 0; k < taps[2]; k++) {
                            const int32_t b = q * stride[1] - pad[1] + j * gap[1];
                            const int32_t c = r * stride[2] - pad[2] + k * gap[2];
                            const int inside = i >= 0 && i < in[0] && b >= 0 && b < in[1] &&
                                               c >= 0 && c < in[2];
                            at[t++] = inside ? x + ((i * in[1] + b) * in[2] + c) * g[4] : zeros;
                        }
                for (o = 0; o < channels; o += 4) {
                    int32_t sums[4] = {0, 0, 0, 0};
                    for (t = 0; t < $N; t++, weights += 4)
                        ADD_FOUR_PRODUCTS(sums, at[t] + o, weights);
                    EACH(4) {
                        const int32_t c = o + n;
                        if (c < channels)
                            y[c] = $R;
                    }
                }
            }
}
