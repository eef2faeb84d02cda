/*
 * The functions of programs with whole numbers; see helpers.c. There are no floats in their loops but where
 * an image is read and where outputs are written. Of an entry of SUMS, $V is the type of y, $P are the
 * parameters, $I the parameters from a channel on, and $E the result of the sum p of a channel c.
 */

//: apart
/* A product by itself: no compiler may merge it with a sum, which would round otherwise. */
static double apart(double x)
{
    volatile double y = x;
    return y;
}

//: shifted
/* p / 2^shift, rounded to the nearest whole number, to the even one of two. */
static int64_t shifted(int64_t p, int32_t shift)
{
    const uint64_t size = p < 0 ? (uint64_t)(-p) : (uint64_t)p;
    const uint64_t one = (uint64_t)1 << shift, rest = 2 * (size & (one - 1));
    uint64_t found = size >> shift;
    found += rest > one || (rest == one && (found & 1) != 0);
    return p < 0 ? -(int64_t)found : (int64_t)found;
}

//: clipped
static int8_t clipped(int64_t q, int32_t low)
{
    return (int8_t)(q > 127 ? 127 : q < low ? low : q);
}

//: feature
/* A feature from p / 2^shift. With a factor of the sample (-1: none) or an addend, that is
   parts of it. */
static int8_t feature(int64_t p, int32_t shift, int32_t factor, const int32_t *addend, int32_t low)
{
    int64_t parts = shifted(p, shift);
    if (factor < 0 && addend == NULL)
        return clipped(parts, low);
    if (factor >= 0)
        parts = shifted(parts * factor, 23);
    if (addend != NULL)
        parts += *addend;
    return clipped(shifted(parts, 6), low);
}

//: factor_of
/* 2^23 / tau as a whole number of 24 bits. */
static int32_t factor_of(double tau)
{
    const double found = rint(8388608.0 / tau);
    return found >= 16777215.0 ? 16777215 : (int32_t)found;
}

//: shifted_peak
/* The largest magnitude of x + c / 2^e, between two others. Each number of c meets inner values. */
static float shifted_peak(const float *x, const int8_t *c, float unit, int32_t n, int32_t inner,
                          int32_t length, float least, float most)
{
    float found = least;
    int32_t i = 0, j, k;
    while (i < n)
        for (j = 0; j < length; j++) {
            const float shift = c == NULL ? 0.0f : unit * (float)c[j];
            for (k = 0; k < inner; k++, i++) {
                const float v = x[i] + shift, size = v < 0 ? -v : v;
                found = size > found ? size : found;
            }
        }
    return found > most ? most : found;
}

//: quantize
/* The image as features: (x + c / 2^e) * factor, rounded and clipped, 0 for NaN. */
static void quantize(const float *x, const int8_t *c, float unit, int8_t *y, int32_t n,
                     int32_t inner, int32_t length, float factor)
{
    int32_t i = 0, j, k;
    while (i < n)
        for (j = 0; j < length; j++) {
            const float shift = c == NULL ? 0.0f : unit * (float)c[j];
            for (k = 0; k < inner; k++, i++) {
                const float sum = x[i] + shift, v = sum * factor;
                y[i] = (int8_t)(v >= 127 ? 127 : v <= -127 ? -127 : v == v ? rintf(v) : 0);
            }
        }
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

//: dots
/* The products of up to four rows of w with x. */
#if defined(__ARM_FEATURE_DSP) && defined(__GNUC__)
/* Four features at once, as two pairs of 16 bits. */
#define PAIRS(v, even, odd) \
    do { \
        __asm__("sxtb16 %0, %1" : "=r"(even) : "r"(v)); \
        __asm__("sxtb16 %0, %1, ror #8" : "=r"(odd) : "r"(v)); \
    } while (0)
#define ADD_PAIRS(sum, a, b) __asm__("smlad %0, %1, %2, %0" : "+r"(sum) : "r"(a), "r"(b))
#define ADD_ROW(sum, row) \
    do { \
        memcpy(&v, row, sizeof v); \
        PAIRS(v, even, odd); \
        ADD_PAIRS(sum, even, even_x); \
        ADD_PAIRS(sum, odd, odd_x); \
    } while (0)
static void dots(const int8_t *w, const int8_t *x, int32_t n, int32_t rows, int32_t *sums)
{
    const int8_t *a = w, *b = rows > 1 ? a + n : a, *c = rows > 2 ? b + n : a;
    const int8_t *d = rows > 3 ? c + n : a, *const stop = x + (n - n % 4), *const end = x + n;
    int32_t p = 0, q = 0, r = 0, s = 0;
    uint32_t v, even, odd, even_x, odd_x;
    for (; x < stop; x += 4, a += 4, b += 4, c += 4, d += 4) {
        memcpy(&v, x, sizeof v);
        PAIRS(v, even_x, odd_x);
        ADD_ROW(p, a);
        ADD_ROW(q, b);
        ADD_ROW(r, c);
        ADD_ROW(s, d);
    }
    for (; x < end; x++) {
        p += *a++ * *x;
        q += *b++ * *x;
        r += *c++ * *x;
        s += *d++ * *x;
    }
    sums[0] = p;
    sums[1] = q;
    sums[2] = r;
    sums[3] = s;
}
#else
static void dots(const int8_t *w, const int8_t *x, int32_t n, int32_t rows, int32_t *sums)
{
    const int8_t *a = w, *b = rows > 1 ? a + n : a, *c = rows > 2 ? b + n : a;
    const int8_t *d = rows > 3 ? c + n : a;
    int32_t p = 0, q = 0, r = 0, s = 0, i;
    if (rows == 1) {
        for (i = 0; i < n; i++)
            p += a[i] * x[i];
    } else {
        for (i = 0; i < n; i++) {
            const int32_t v = x[i];
            p += a[i] * v;
            q += b[i] * v;
            r += c[i] * v;
            s += d[i] * v;
        }
    }
    sums[0] = p;
    sums[1] = q;
    sums[2] = r;
    sums[3] = s;
}
#endif

//: numeric
/* A number of the output from the sum p. */
static float numeric(int64_t p, double scale, double tau, const double *addend)
{
    const double v = (double)p * scale / tau;
    return (float)(addend == NULL ? v : v + *addend);
}

//: times_sums
/* W x, one every step entries of y: features, or the numbers of the last of all products. */
static void times$s(const int8_t *w, const int32_t *bias,
    $P,
    const int8_t *x, $V *y, int32_t rows, int32_t columns, int32_t step)
{
    int32_t r, k, sums[4];
    for (r = 0; r < rows; r += 4) {
        const int32_t count = rows - r < 4 ? rows - r : 4;
        dots(w + r * columns, x, columns, count, sums);
        for (k = 0; k < count; k++) {
            const int32_t c = r + k;
            const int64_t p = sums[k] + (bias == NULL ? 0 : bias[c]);
            y[c * step] =
                $E;
        }
    }
}

//: patch
/* The window of a convolution at one place, for the channels of one group; zeros outside. g: see
   convolve. */
static void patch(const int8_t *x, int8_t *to, const int32_t *g, int32_t p, int32_t q, int32_t r)
{
    const int32_t channels = g[0] / g[2];
    const int32_t *in = g + 3, *size = g + 9, *step = g + 12, *gap = g + 15, *pad = g + 18;
    const int32_t start = r * step[2] - pad[2];
    const int whole = gap[2] == 1 && start >= 0 && start + size[2] <= in[2];
    int32_t c, i, j, k;
    for (c = 0; c < channels; c++)
        for (i = 0; i < size[0]; i++)
            for (j = 0; j < size[1]; j++, to += size[2]) {
                const int32_t a = p * step[0] + i * gap[0] - pad[0];
                const int32_t b = q * step[1] + j * gap[1] - pad[1];
                const int outside = a < 0 || a >= in[0] || b < 0 || b >= in[1];
                const int8_t *line = outside ? x : x + ((c * in[0] + a) * in[1] + b) * in[2];
                for (k = 0; k < size[2]; k++) {
                    const int32_t place = start + k * gap[2];
                    if (outside || (!whole && (place < 0 || place >= in[2])))
                        to[k] = 0;
                    else
                        to[k] = line[place];
                }
            }
}

//: convolve_sums
/* A convolution of features: each window is copied to memory of its own, and multiplied by all
   kernels. */
static void convolve$s(const int8_t *w, const int32_t *bias,
    $P,
    const int8_t *x, $V *y, const int32_t *g, int8_t *window)
{
    const int32_t channels = g[0] / g[2], share = g[1] / g[2], *in = g + 3, *to = g + 6;
    const int32_t taps = channels * g[9] * g[10] * g[11], places = to[0] * to[1] * to[2];
    const int32_t sizes = in[0] * in[1] * in[2];
    int32_t n, p, q, r;
    for (n = 0; n < g[2]; n++)
        for (p = 0; p < to[0]; p++)
            for (q = 0; q < to[1]; q++)
                for (r = 0; r < to[2]; r++) {
                    const int32_t at = n * share, place = (p * to[1] + q) * to[2] + r;
                    patch(x + n * channels * sizes, window, g, p, q, r);
                    times$s(w + at * taps, bias == NULL ? NULL : bias + at,
                        $I,
                        window, y + at * places + place, share, taps, places);
                }
}

//: root
/* The square root, rounded down. */
static uint32_t root(uint32_t n)
{
    uint32_t found = 0, bit = (uint32_t)1 << 30;
    while (bit > n)
        bit >>= 2;
    for (; bit != 0; bit >>= 2) {
        const uint32_t next = found + bit;
        found >>= 1;
        if (n >= next) {
            n -= next;
            found += bit;
        }
    }
    return found;
}

//: pool_whole
/* Sums of windows, or their norms with some bits behind the point (-1: sums), times multiplier /
   2^shift. g: see pool. */
static void pool_whole(const int8_t *x, int8_t *y, const int32_t *g, int32_t bits,
                       int32_t multiplier, int32_t shift)
{
    const int32_t *in = g + 1, *to = g + 4;
    const int32_t *a = g + 11, *b = a + 2 * to[0], *d = b + 2 * to[1];
    int32_t c, p, q, r, i, j, k, n = 0;
    for (c = 0; c < g[0]; c++, x += in[0] * in[1] * in[2])
        for (p = 0; p < to[0]; p++)
            for (q = 0; q < to[1]; q++)
                for (r = 0; r < to[2]; r++, n++) {
                    int32_t sum = 0;
                    for (i = a[p]; i < a[to[0] + p]; i++)
                        for (j = b[q]; j < b[to[1] + q]; j++) {
                            const int8_t *line = x + (i * in[1] + j) * in[2];
                            for (k = d[r]; k < d[to[2] + r]; k++)
                                sum += bits < 0 ? line[k] : line[k] * line[k];
                        }
                    if (bits >= 0)
                        sum = (int32_t)root((uint32_t)sum << (2 * bits));
                    y[n] = clipped(shifted((int64_t)sum * multiplier, shift), -127);
                }
}

//: requantize
/* Sums of features times their multipliers, in another scale. Each number of addend meets inner
   features. */
static void requantize(const int8_t *const *x, const int32_t *multipliers, int32_t count,
                       const int32_t *addend, int32_t inner, int32_t length, int32_t shift,
                       int32_t low, int32_t factor, int8_t *y, int32_t n)
{
    int32_t i = 0, j, k, m;
    while (i < n)
        for (j = 0; j < length; j++) {
            const int32_t *more = addend == NULL ? NULL : addend + j;
            for (k = 0; k < inner; k++, i++) {
                int64_t sum = 0;
                for (m = 0; m < count; m++)
                    sum += (int64_t)x[m][i] * multipliers[m];
                y[i] = feature(sum, shift, factor, more, low);
            }
        }
}

//: dequantize
static void dequantize(const int8_t *x, double scale, double tau, float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        y[i] = (float)(x[i] * scale / tau);
}

