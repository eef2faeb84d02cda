"""The text of a C program: helper functions by name, the header, the source. ASCII only.

Every helper is written once for the types of the weights: ``_f`` for float, ``_d`` for double, ``_i`` for
int8_t and ``_s`` for int16_t, both with a scale for each row. A program gets those that it calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# In the order in which they may call each other. $W: type of the weights, $R: of sums.
_TEMPLATES = {
    "dot": """
/* The dot product; eight sums, so that a compiler may keep them in one vector. */
static $R dot$s(const $W *w, const float *x, int32_t n)
{
    $R sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    $R total;
    int32_t i = 0, k;
    for (; i + 8 <= n; i += 8)
        for (k = 0; k < 8; k++)
            sums[k] += ($R)w[i + k] * ($R)x[i + k];
    for (k = 0; k < 4; k++)
        sums[k] += sums[k + 4];
    total = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    for (; i < n; i++)
        total += ($R)w[i] * ($R)x[i];
    return total;
}
""",
    "times": """
/* y = W x, row after row. */
static void times$s(const $W *w, $S const float *x, float *y, int32_t rows, int32_t columns)
{
    int32_t r;
    for (r = 0; r < rows; r++, w += columns)
        y[r] = $T(dot$s(w, x, columns));
}
""",
    "times_runs": """
/* y = W x for the stretches of W that are not zero: so many in a row, start and length of each. */
static void times_runs$s(const $W *w, $S const uint16_t *runs, const uint16_t *places,
                         const float *x, float *y, int32_t rows)
{
    int32_t r, k;
    for (r = 0; r < rows; r++) {
        $R total = 0;
        for (k = 0; k < runs[r]; k++, places += 2) {
            total += dot$s(w, x + places[0], places[1]);
            w += places[1];
        }
        y[r] = $T(total);
    }
}
""",
    "form": """
/* x' Q x from the diagonal of Q and the rows right of it. */
static double form$s(const $D *diagonal, const $W *w, $S const float *x, int32_t n)
{
    double total = 0;
    int32_t r;
    for (r = 0; r < n; r++) {
        const $R rest = $T(dot$s(w, x + r + 1, n - 1 - r));
        total += (double)(($R)x[r] * (diagonal[r] * ($R)x[r] + 2 * rest));
        w += n - 1 - r;
    }
    return total;
}
""",
    "form_runs": """
/* x' Q x from the diagonal of Q and the stretches right of it that are not zero. */
static double form_runs$s(const $D *diagonal, const $W *w, $S const uint16_t *runs,
                          const uint16_t *places, const float *x, int32_t n)
{
    double total = 0;
    int32_t r, k;
    for (r = 0; r < n; r++) {
        $R rest = 0;
        for (k = 0; k < runs[r]; k++, places += 2) {
            rest += dot$s(w, x + places[0], places[1]);
            w += places[1];
        }
        rest = $T(rest);
        total += (double)(($R)x[r] * (diagonal[r] * ($R)x[r] + 2 * rest));
    }
    return total;
}
""",
    "convolve": """
/* A convolution over three axes. g: channels in and out, groups; then for the axes the sizes in and
   out, the kernel, the stride, the dilation, and the zeros before the image. */
static void convolve$s(const $W *w, $S const float *x, float *y, const int32_t *g)
{
    const int32_t channels = g[0] / g[2], share = g[1] / g[2];
    const int32_t *in = g + 3, *to = g + 6, *size = g + 9;
    const int32_t *step = g + 12, *gap = g + 15, *pad = g + 18;
    int32_t o, p, q, c, i, j, k, n;
    for (o = 0; o < g[1]; o++, w += channels * size[0] * size[1] * size[2]) {
        const float *image = x + (o / share) * channels * in[0] * in[1] * in[2];
        for (p = 0; p < to[0]; p++)
            for (q = 0; q < to[1]; q++, y += to[2]) {
                const $W *row = w;
                for (n = 0; n < to[2]; n++)
                    y[n] = 0;
                for (c = 0; c < channels; c++)
                    for (i = 0; i < size[0]; i++)
                        for (j = 0; j < size[1]; j++, row += size[2]) {
                            const int32_t a = p * step[0] + i * gap[0] - pad[0];
                            const int32_t b = q * step[1] + j * gap[1] - pad[1];
                            const float *line;
                            if (a < 0 || a >= in[0] || b < 0 || b >= in[1])
                                continue;
                            line = image + ((c * in[0] + a) * in[1] + b) * in[2];
                            for (k = 0; k < size[2]; k++) {
                                const int32_t shift = k * gap[2] - pad[2], room = in[2] - 1 - shift;
                                const int32_t last = room < 0 ? -1 : room / step[2];
                                const float weight = (float)row[k];
                                n = shift < 0 ? (step[2] - 1 - shift) / step[2] : 0;
                                for (; n < to[2] && n <= last; n++)
                                    y[n] += weight * line[n * step[2] + shift];
                            }
                        }
$E            }
    }
}
""",
}
_SCALE_ROW = """                for (n = 0; n < to[2]; n++)
                    y[n] *= scale[o];
"""
_TYPES = {
    "_f": {"$W": "float", "$R": "float", "$D": "float", "$S ": "", "$T": "", "$E": ""},
    "_i": {"$W": "int8_t", "$R": "float", "$D": "float", "$S ": "const float *scale, "},
    "_s": {"$W": "int16_t", "$R": "float", "$D": "float", "$S ": "const float *scale, "},
    "_d": {"$W": "double", "$R": "double", "$D": "double", "$S ": "", "$T": "", "$E": ""},
}
SUFFIX = {"float": "_f", "int8_t": "_i", "int16_t": "_s", "double": "_d"}

_PLAIN = {
    "peak": """
/* The largest magnitude; 1 where all are 0. */
static float peak(const float *x, int32_t n)
{
    float found = 0;
    int32_t i;
    for (i = 0; i < n; i++) {
        const float size = x[i] < 0 ? -x[i] : x[i];
        found = size > found ? size : found;
    }
    return found == 0 ? 1 : found;
}
""",
    "divide": """
static void divide(const float *x, float by, float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        y[i] = x[i] / by;
}
""",
    "multiply": """
static void multiply(const float *x, float by, float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        y[i] = x[i] * by;
}
""",
    "add": """
static void add(float *y, const float *more, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        y[i] += more[i];
}
""",
    "subtract": """
static void subtract(const float *x, const float *less, float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        y[i] = x[i] - less[i];
}
""",
    "relu": """
static void relu(const float *x, float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        y[i] = x[i] < 0 ? 0 : x[i]; /* NaN stays */
}
""",
    "copy": """
static void copy(const float *x, float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        y[i] = x[i];
}
""",
    "norm": """
/* The length of x, whatever its scale: no square of a float leaves the range of double. */
static double norm(const float *x, int32_t n)
{
    double total = 0;
    int32_t i;
    for (i = 0; i < n; i++)
        total += (double)x[i] * (double)x[i];
    return sqrt(total);
}
""",
    "ratio": """
/* n / t, and 0 for t = 0: an image of zeros has no energy. */
static double ratio(double n, double t)
{
    return t == 0 ? 0 : n / t;
}
""",
    "growth_projective": """
static double growth_projective(double q)
{
    return 1 + q;
}
""",
    "growth_gnomonic": """
static double growth_gnomonic(double q)
{
    return sqrt(1 + q);
}
""",
    "growth_radial_tanh": """
static double growth_radial_tanh(double q)
{
    const double u = sqrt(q);
    return q < 1e-4 ? 1 + q / 3 - q * q / 45 : u / tanh(u);
}
""",
    "pairing": """
static double pairing(const double *a, const double *b, int32_t n)
{
    double total = 0;
    int32_t i;
    for (i = 0; i < n; i++)
        total += a[i] * b[i];
    return total;
}
""",
    "gram": """
static double gram(const double *c, const double *products, int32_t n)
{
    double total = 0;
    int32_t i;
    for (i = 0; i < n; i++)
        total += c[i] * pairing(products + i * n, c, n);
    return total;
}
""",
    "over": """
/* c divided by the growths of some activations, one by one. */
static double over(double c, const double *growth, int32_t first, int32_t last)
{
    for (; first < last; first++)
        c /= growth[first];
    return c;
}
""",
    "grown": """
/* t times the growths of some activations; beyond the limit every point is at 0. */
static double grown(double t, const double *growth, int32_t first, int32_t last)
{
    for (; first < last; first++) {
        t *= growth[first];
        t = t > 1e300 ? 1e300 : t;
    }
    return t;
}
""",
}
_FRAME = """
static int has_nan(const float *x, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        if (x[i] != x[i])
            return 1;
    return 0;
}

/* Fill the outputs with NaN. */
static int no_answer(float *out, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        out[i] = NAN;
    return -1;
}

static int largest(const float *x, int32_t n)
{
    int32_t i, best = 0;
    for (i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return (int)best;
}
"""


def helpers(names: Iterable[str]) -> str:
    """Return the functions that a program calls, and those that they call."""
    wanted = set(names)
    for name in list(wanted):
        if name[-2:] in _TYPES and not name.startswith("convolve"):
            wanted.add(f"dot{name[-2:]}")
    found = []
    for name, text in _TEMPLATES.items():
        for suffix in _TYPES:
            if f"{name}{suffix}" in wanted:
                found.append(_typed(text, suffix))
    found += [text for name, text in _PLAIN.items() if name in wanted]
    return "".join([*found, _FRAME])


def _typed(text: str, suffix: str) -> str:
    words = dict(_TYPES[suffix])
    if "$T" not in words:
        words["$T"] = "scale[r] * "
        words["$E"] = _SCALE_ROW
    for word, value in words.items():
        text = text.replace(word, value)
    return text.replace("$s", suffix)


def comment(lines: Sequence[str]) -> str:
    """Return a block comment; nothing in it can end it early."""
    safe = [line.encode("ascii", "replace").decode().replace("*/", "* /") for line in lines]
    body = "\n".join(f" * {line}".rstrip() for line in safe)
    return f"/*\n{body}\n */\n"


HEADER = """\
{about}
#ifndef {macro}_H
#define {macro}_H

#define {macro}_INPUT_SIZE {inputs}
#define {macro}_INPUT_SHAPE {{{input_shape}}}
#define {macro}_OUTPUT_SIZE {outputs}
#define {macro}_OUTPUT_SHAPE {{{output_shape}}}
#define {macro}_WORK_SIZE {work} /* floats */
#define {macro}_VERSION "{version}" /* of conformallayers */
/* The fingerprint of the weights that were folded. */
#define {macro}_ORIGIN "{origin}"
{proof}/* The source that belongs to this header has the same. */
#define {macro}_ID {id}

#ifdef __cplusplus
extern "C" {{
#endif

/*
 * Run one image of {macro}_INPUT_SIZE floats, the last axis running fastest. Fills
 * {macro}_OUTPUT_SIZE outputs and returns the index of the largest, the first of equal
 * ones. With a NaN in the image or in an output, all outputs are NaN and the result is -1.
 *
 * work: {macro}_WORK_SIZE floats that are overwritten. The three arrays must not overlap. Calls
 * with different work may run at the same time.
 */
int {name}_predict_with(const float *image, float *out, float *work);

/*
 * The same with {work_bytes} bytes of static work memory: one call at a time, and none from
 * an interrupt.
 */
int {name}_predict(const float *image, float *out);
{aliases}
#ifdef __cplusplus
}}
#endif

#endif
"""
ALIASES = """
/* The default name has these as well. */
#define CL_INPUT_SIZE {macro}_INPUT_SIZE
#define CL_OUTPUT_SIZE {macro}_OUTPUT_SIZE
#define CL_WORK_SIZE {macro}_WORK_SIZE
int cl_predict_with(const float *image, float *out, float *work);
int cl_predict(const float *image, float *out);
"""
SOURCE = """\
{about}
#include <math.h>
#include <stdint.h>

#include "{name}.h"

#if {macro}_ID != {id}
#error "{name}.h and {name}.c come from different exports"
#endif
#ifdef __FAST_MATH__
#error "compile without -ffast-math: it takes NaN and the order of sums away"
#endif

{constants}{helpers}
int {name}_predict_with(const float *image, float *out, float *work)
{{
    if (has_nan(image, {macro}_INPUT_SIZE))
        return no_answer(out, {macro}_OUTPUT_SIZE);
{body}
    if (has_nan(out, {macro}_OUTPUT_SIZE))
        return no_answer(out, {macro}_OUTPUT_SIZE);
    return largest(out, {macro}_OUTPUT_SIZE);
}}

int {name}_predict(const float *image, float *out)
{{
    static float work[{macro}_WORK_SIZE];
    return {name}_predict_with(image, out, work);
}}
{aliases}"""
SOURCE_ALIASES = """
int cl_predict_with(const float *image, float *out, float *work)
{{
    return {name}_predict_with(image, out, work);
}}

int cl_predict(const float *image, float *out)
{{
    return {name}_predict(image, out);
}}
"""
