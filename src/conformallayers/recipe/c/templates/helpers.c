/*
 * The functions that programs call; a program gets those it needs. A line "//: name" begins each. Functions use
 * only those before them. Suffixes $s: f for float, b for int8_t, the type $V. Of "pool", $N is the name, $T the
 * type of sums; $I begins a sum, $E takes an entry v, $R is the result.
 */

//: EACH
/* A loop over the channels of a block: one step of a machine with vectors, else written out. */
#if defined(__GNUC__) && !defined(__clang__) && \
    (defined(__SSE2__) || defined(__ARM_NEON) || defined(__ALTIVEC__))
#define EACH(count) _Pragma("GCC unroll 1") for (n = 0; n < (count); n++)
#elif defined(__GNUC__) && !defined(__clang__)
#define EACH(count) _Pragma("GCC unroll 8") for (n = 0; n < (count); n++)
#else
#define EACH(count) for (n = 0; n < (count); n++)
#endif

//: ADD
/* Add products to the sums of a block, rounding once where the machine does that as fast. */
#ifdef FP_FAST_FMAF
#define ADD(count, sums, weights, value) \
    EACH(count) (sums)[n] = fmaf((weights)[n], value, (sums)[n])
#else
#define ADD(count, sums, weights, value) EACH(count) (sums)[n] += (weights)[n] * (value)
#endif

//: copy_rows
/* Copy the rows that windows read, with zeros at both ends and instead of rows outside of the map.
   Of planes and of rows: the first, how many, the distance, those of the map, entries apart. */
static void copy_rows(const float *x, float *to, int32_t plane, int32_t planes, int32_t over,
                      int32_t depth, int32_t plane_step, int32_t row, int32_t rows, int32_t down,
                      int32_t height, int32_t row_step, int32_t before, int32_t count,
                      int32_t after)
{
    const int32_t width = before + count + after;
    int32_t i, j;
    for (i = 0; i < planes; i++)
        for (j = 0; j < rows; j++, to += width) {
            const int32_t a = plane + i * over, b = row + j * down;
            memset(to, 0, (size_t)width * sizeof *to);
            if (a >= 0 && a < depth && b >= 0 && b < height)
                memcpy(to + before, x + a * plane_step + b * row_step, (size_t)count * sizeof *to);
        }
}

//: dot
/* The dot product: eight sums, so that a compiler may keep them in one vector, of 1,024 numbers. */
static float dot(const float *w, const float *x, int32_t n)
{
    double total = 0;
    int32_t i = 0, k;
    while (i + 8 <= n) {
        float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        const int32_t stop = n - i < 1024 ? n : i + 1024;
        for (; i + 8 <= stop; i += 8)
            for (k = 0; k < 8; k++)
                sums[k] += w[i + k] * x[i + k];
        for (k = 0; k < 4; k++)
            sums[k] += sums[k + 4];
        total += (double)((sums[0] + sums[2]) + (sums[1] + sums[3]));
    }
    for (; i < n; i++)
        total += (double)(w[i] * x[i]);
    return (float)total;
}

//: times
/* y = W x + b for some vectors x. */
static void times(const float *w, const float *x, const float *b, float *y, int32_t rows,
                  int32_t columns, int32_t count)
{
    int32_t i, r;
    for (i = 0; i < count; i++, x += columns, y += rows)
        for (r = 0; r < rows; r++)
            y[r] = dot(w + r * columns, x, columns) + b[r];
}

//: times_runs
/* y = W x + b for the runs of W that are not zero: how many a row has, start and length of each. */
static void times_runs(const float *w, const uint16_t *runs, const uint16_t *places,
                       const float *x, const float *b, float *y, int32_t rows)
{
    int32_t r, k;
    for (r = 0; r < rows; r++) {
        float total = b[r];
        for (k = 0; k < runs[r]; k++, places += 2) {
            total += dot(w, x + places[0], places[1]);
            w += places[1];
        }
        y[r] = total;
    }
}

//: pool
/* Reduce windows over three axes of a map with channels last. g: channels, entries between
   positions of x and of y; for the axes the sizes in and out, and the steps from one entry of a
   window to the next; then, axis by axis, the first entries of all windows and where these end. */
static void $name(const $V *x, $V *y,
        const int32_t *g$P)
{
    const int32_t channels = g[0], *in = g + 3, *to = g + 6, *step = g + 9;
    const int32_t *a = g + 12, *b = a + 2 * to[0], *d = b + 2 * to[1];
    int32_t p, q, r, c, i, j, k, n;
    for (p = 0; p < to[0]; p++)
        for (q = 0; q < to[1]; q++)
            for (r = 0; r < to[2]; r++, y += g[2])
                for (c = 0; c < channels; c += 8) {
                    const int32_t block = channels - c < 8 ? channels - c : 8;
                    $T sums[8];
                    EACH(8) sums[n] = $I;
                    for (i = a[p]; i < a[to[0] + p]; i += step[0])
                        for (j = b[q]; j < b[to[1] + q]; j += step[1])
                            for (k = d[r]; k < d[to[2] + r]; k += step[2]) {
                                const $V *v = x + ((i * in[1] + j) * in[2] + k) * g[1] + c;
                                EACH(8) sums[n] = $E;
                            }
                    for (n = 0; n < block; n++)
                        y[c + n] =
                            $R;
                }
}

//: window_size
/* The entries of a window; a, b and d hold where the windows of each axis begin and end. */
static int32_t window_size(const int32_t *g, int32_t p, int32_t q, int32_t r)
{
    const int32_t *to = g + 6, *a = g + 12, *b = a + 2 * to[0], *d = b + 2 * to[1];
    return (a[to[0] + p] - a[p]) * (b[to[1] + q] - b[q]) * (d[to[2] + r] - d[r]);
}

//: gather
/* y[i, j, ...] = x[table[i] + table[j] + ...] with a table for each axis; where an entry is
   negative, the fill value. g: the sizes of the axes, then the tables. */
static void gather$s(const $V *x, $V *y, const int32_t *g, int32_t axes, $V fill)
{
    const int32_t *columns = g + axes;
    const int32_t last = g[axes - 1];
    int32_t rows = 1, r, k, i;
    for (k = 0; k < axes - 1; k++) {
        rows *= g[k];
        columns += g[k];
    }
    for (r = 0; r < rows; r++, y += last) {
        const int32_t *table = columns;
        int32_t rest = r, start = 0, outside = 0;
        for (k = axes - 2; k >= 0; k--) {
            int32_t place;
            table -= g[k];
            place = table[rest % g[k]];
            rest /= g[k];
            outside |= place < 0;
            start += outside ? 0 : place;
        }
        for (i = 0; i < last; i++)
            y[i] = outside || columns[i] < 0 ? fill : x[start + columns[i]];
    }
}

//: softmax
/* Softmax of entries that are some step apart, or its logarithm. */
static void softmax(const float *x, float *y, int32_t count, int32_t step, int32_t logarithm)
{
    float most = x[0];
    double total = 0;
    int32_t i;
    for (i = 1; i < count; i++)
        most = x[i * step] > most ? x[i * step] : most;
    for (i = 0; i < count; i++)
        total += exp((double)(x[i * step] - most));
    for (i = 0; i < count; i++) {
        const double v = (double)(x[i * step] - most);
        y[i * step] = (float)(logarithm ? v - log(total) : exp(v) / total);
    }
}

//: squares
/* The sum of squares: none of a float leaves the range of double. */
static double squares(const float *x, int32_t count)
{
    double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    const int32_t whole = count - count % 8;
    int32_t i, n;
    for (i = 0; i < whole; i += 8)
        EACH(8) sums[n] += (double)x[i + n] * (double)x[i + n];
    for (i = whole; i < count; i++)
        sums[0] += (double)x[i] * (double)x[i];
    for (n = 0; n < 4; n++)
        sums[n] += sums[n + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

//: ratio
/* n / t, and 0 for t = 0: an image of zeros has no energy. */
static double ratio(double n, double t)
{
    return t == 0 ? 0 : n / t;
}

//: limited
/* Beyond the limit the published rule has sent every point to 0. */
static double limited(double t)
{
    return t > 1.7e308 ? 1.7e308 : t;
}

//: has_nan
static int has_nan(const float *x, int32_t count)
{
    int32_t i;
    for (i = 0; i < count; i++)
        if (x[i] != x[i])
            return 1;
    return 0;
}

//: fill_nan
/* Fill the outputs with NaN. */
static int fill_nan(float *out, int32_t count)
{
    int32_t i;
    for (i = 0; i < count; i++)
        out[i] = NAN;
    return -1;
}

//: largest
static int largest(const float *x, int32_t count)
{
    int32_t i, best = 0;
    for (i = 1; i < count; i++)
        best = x[i] > x[best] ? i : best;
    return (int)best;
}
