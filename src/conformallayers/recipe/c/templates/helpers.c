/*
 * The functions that programs call; a program gets those it needs. A line "//: name" begins each.
 *
 * Suffixes $s: f for float, d for double. $V is the type of weights and values. $get(x, i), $put(y, i, v);
 * and $at(x, i) read, write and point at an entry; doubles are kept in pairs of floats. $N, $P and $E are the
 * name, the parameters and the expression of an entry of MAPS or BROADCASTS, $D is a line for expressions of d;
 * of an entry of POOLS, $I begins a window, $E takes an entry v and $R is the result. Functions call only
 * those before them, or in integers.c.
 */

//: load
/* A double is kept in two floats, which need not lie where a double may. */
static double load(const float *x, int32_t i)
{
    double v;
    memcpy(&v, x + 2 * (size_t)i, sizeof v);
    return v;
}

//: store
static void store(float *y, int32_t i, double v)
{
    memcpy(y + 2 * (size_t)i, &v, sizeof v);
}

//: widen
static void widen(const float *x, float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        store(y, i, (double)x[i]);
}

//: narrow
static void narrow(const float *x, float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        y[i] = (float)load(x, i);
}

//: dot
/* The dot product: eight sums, so that a compiler may keep them in one vector, of 1,024 numbers. */
static $V dot$s(const $V *w, const float *x, int32_t n)
{
    double total = 0;
    int32_t i = 0, k;
    while (i + 8 <= n) {
        $V sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        const int32_t stop = n - i < 1024 ? n : i + 1024;
        for (; i + 8 <= stop; i += 8)
            for (k = 0; k < 8; k++)
                sums[k] += w[i + k] * $get(x, i + k);
        for (k = 0; k < 4; k++)
            sums[k] += sums[k + 4];
        total += (double)((sums[0] + sums[2]) + (sums[1] + sums[3]));
    }
    for (; i < n; i++)
        total += (double)(w[i] * $get(x, i));
    return ($V)total;
}

//: times
/* y = W x for some vectors x, row after row. */
static void times$s(const $V *w, const float *x, float *y, int32_t rows,
                    int32_t columns, int32_t count)
{
    int32_t i, r, n = 0;
    for (i = 0; i < count; i++, x = $at(x, columns))
        for (r = 0; r < rows; r++, n++)
            $put(y, n, dot$s(w + r * columns, x, columns));
}

//: times_runs
/* y = W x for the runs of W that are not zero: how many a row has, start and length of each. */
static void times_runs$s(const $V *w, const uint16_t *runs,
                         const uint16_t *places, const float *x, float *y, int32_t rows,
                         int32_t columns, int32_t count)
{
    int32_t i, r, k, n = 0;
    for (i = 0; i < count; i++, x = $at(x, columns)) {
        const $V *row = w;
        const uint16_t *place = places;
        for (r = 0; r < rows; r++, n++) {
            $V total = 0;
            for (k = 0; k < runs[r]; k++, place += 2) {
                total += dot$s(row, $at(x, place[0]), place[1]);
                row += place[1];
            }
            $put(y, n, total);
        }
    }
}

//: form
/* x' Q x from the diagonal of Q and the rows right of it. */
static double form$s(const $V *diagonal, const $V *w, const float *x,
                     int32_t n)
{
    double total = 0;
    int32_t r;
    for (r = 0; r < n; r++) {
        const $V rest = dot$s(w, $at(x, r + 1), n - 1 - r);
        total += (double)($get(x, r) * (diagonal[r] * $get(x, r) + 2 * rest));
        w += n - 1 - r;
    }
    return total;
}

//: form_runs
/* x' Q x from the diagonal of Q and the stretches right of it that are not zero. */
static double form_runs$s(const $V *diagonal, const $V *w,
                          const uint16_t *runs, const uint16_t *places, const float *x, int32_t n)
{
    double total = 0;
    int32_t r, k;
    for (r = 0; r < n; r++) {
        $V rest = 0;
        for (k = 0; k < runs[r]; k++, places += 2) {
            rest += dot$s(w, $at(x, places[0]), places[1]);
            w += places[1];
        }
        total += (double)($get(x, r) * (diagonal[r] * $get(x, r) + 2 * rest));
    }
    return total;
}

//: convolve
/* A convolution over three axes. g: channels in and out, groups; then for the axes the sizes in and
   out, the kernel, the stride, the dilation, and the zeros before the image. */
static void convolve$s(const $V *w, const float *x, float *y,
                       const int32_t *g)
{
    const int32_t channels = g[0] / g[2], share = g[1] / g[2];
    const int32_t *in = g + 3, *to = g + 6, *size = g + 9;
    const int32_t *step = g + 12, *gap = g + 15, *pad = g + 18;
    int32_t r, p, q, c, i, j, k, n;
    for (r = 0; r < g[1]; r++, w += channels * size[0] * size[1] * size[2]) {
        const int32_t first = (r / share) * channels;
        const float *image = $at(x, first * in[0] * in[1] * in[2]);
        for (p = 0; p < to[0]; p++)
            for (q = 0; q < to[1]; q++, y = $at(y, to[2])) {
                const $V *row = w;
                for (n = 0; n < to[2]; n++)
                    $put(y, n, 0);
                for (c = 0; c < channels; c++)
                    for (i = 0; i < size[0]; i++)
                        for (j = 0; j < size[1]; j++, row += size[2]) {
                            const int32_t a = p * step[0] + i * gap[0] - pad[0];
                            const int32_t b = q * step[1] + j * gap[1] - pad[1];
                            const int32_t place = (c * in[0] + a) * in[1] + b;
                            const float *line;
                            if (a < 0 || a >= in[0] || b < 0 || b >= in[1])
                                continue;
                            line = $at(image, place * in[2]);
                            for (k = 0; k < size[2]; k++) {
                                const int32_t shift = k * gap[2] - pad[2], room = in[2] - 1 - shift;
                                const int32_t last = room < 0 ? -1 : room / step[2];
                                const $V weight = row[k];
                                n = shift < 0 ? (step[2] - 1 - shift) / step[2] : 0;
                                for (; n < to[2] && n <= last; n++) {
                                    const $V v = $get(line, n * step[2] + shift);
                                    $put(y, n, $get(y, n) + weight * v);
                                }
                            }
                        }
            }
    }
}

//: pool
/* Reduce windows over three axes. g: channels; for the axes the sizes in and out, and the steps
   from one entry of a window to the next; the size of a window; then, axis by axis, the first
   entries of all windows and where these end. */
static void $N$s(const float *x, float *y, const int32_t *g)
{
    const int32_t *in = g + 1, *to = g + 4, *step = g + 7;
    const int32_t *a = g + 11, *b = a + 2 * to[0], *d = b + 2 * to[1];
    int32_t c, p, q, r, i, j, k, n = 0;
    for (c = 0; c < g[0]; c++, x = $at(x, in[0] * in[1] * in[2]))
        for (p = 0; p < to[0]; p++)
            for (q = 0; q < to[1]; q++)
                for (r = 0; r < to[2]; r++, n++) {
                    $I;
                    for (i = a[p]; i < a[to[0] + p]; i += step[0])
                        for (j = b[q]; j < b[to[1] + q]; j += step[1])
                            for (k = d[r]; k < d[to[2] + r]; k += step[2]) {
                                const int32_t place = (i * in[1] + j) * in[2] + k;
                                const $V v = $get(x, place);
                                $E;
                            }
                    $put(y, n, $R);
                }
}

//: gather
/* y[i, j, ...] = x[table[i] + table[j] + ...] with a table for each axis; where an entry is
   negative, the fill value. g: the sizes of the axes, then the tables. */
static void gather$s(const float *x, float *y, const int32_t *g, int32_t axes, $V fill)
{
    const int32_t *columns = g + axes;
    const int32_t last = g[axes - 1];
    int32_t rows = 1, r, k, i;
    for (k = 0; k < axes - 1; k++) {
        rows *= g[k];
        columns += g[k];
    }
    for (r = 0; r < rows; r++, y = $at(y, last)) {
        const int32_t *table = columns;
        int32_t rest = r, start = 0, outside = 0;
        for (k = axes - 2; k >= 0; k--) {
            int32_t place;
            table -= g[k];
            place = table[rest % g[k]];
            rest /= g[k];
            outside |= place < 0;
            start += place;
        }
        for (i = 0; i < last; i++)
            if (outside || columns[i] < 0)
                $put(y, i, fill);
            else
                $put(y, i, $get(x, start + columns[i]));
    }
}

//: copy
/* Copy rows of n entries; how far they lie apart may differ. */
static void copy$s(const float *x, int32_t from, float *y, int32_t to, int32_t rows, int32_t n)
{
    int32_t r;
    for (r = 0; r < rows; r++)
        memcpy($at(y, r * to), $at(x, r * from), (size_t)n * sizeof($V));
}

//: map
static void $N$s(const float *x, float *y, int32_t n$P)
{
    int32_t i;
    for (i = 0; i < n; i++) {
        const $V v = $get(x, i);
$D        const double d = (double)v;
        $put(y, i, $E);
    }
}

//: broadcast
/* Each number of c meets inner values of x; then c begins again. */
static void $N$s(const float *x, const $V *c, float *y, int32_t n, int32_t inner,
                 int32_t length)
{
    int32_t i = 0, j, k;
    while (i < n)
        for (j = 0; j < length; j++)
            for (k = 0; k < inner; k++, i++) {
                const $V v = $get(x, i);
                $put(y, i, $E);
            }
}

//: add
static void add$s(const float *a, const float *b, float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        $put(y, i, $get(a, i) + $get(b, i));
}

//: inner
/* The dot product of two maps: no square of a float leaves the range of double. */
static double inner$s(const float *a, const float *b, int32_t n)
{
    double sums[4] = {0, 0, 0, 0};
    const int32_t whole = n - n % 4;
    int32_t i, k;
    for (i = 0; i < whole; i += 4)
        for (k = 0; k < 4; k++)
            sums[k] += (double)$get(a, i + k) * (double)$get(b, i + k);
    for (i = whole; i < n; i++)
        sums[0] += (double)$get(a, i) * (double)$get(b, i);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

//: power_near
/* A power of two that brings a sum of squares near 1, where it is far from it. */
static double power_near(double squares)
{
    int power;
    if (!(squares > 0) || (squares > 1e-20 && squares < 1e20) || squares > 1e300)
        return 1;
    (void)frexp(sqrt(squares), &power);
    return ldexp(1, power > 120 ? -120 : power < -120 ? 120 : -power);
}

//: ratio
/* n / t, and 0 for t = 0: an image of zeros has no energy. */
static double ratio(double n, double t)
{
    return t == 0 ? 0 : n / t;
}

//: positive
static double positive(double n)
{
    return n < 0 ? 0 : n;
}

//: limited
/* Beyond the limit the published rule has sent every point to 0. */
static double limited(double t)
{
    return t > 1.7e308 ? 1.7e308 : t;
}

//: has_nan
static int has_nan(const float *x, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        if (x[i] != x[i])
            return 1;
    return 0;
}

//: fill_nan
/* Fill the outputs with NaN. */
static int fill_nan(float *out, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        out[i] = NAN;
    return -1;
}

//: largest
static int largest(const float *x, int32_t n)
{
    int32_t i, best = 0;
    for (i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return (int)best;
}
