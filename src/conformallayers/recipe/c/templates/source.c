/* $name.c: see $name.h. Compile as C99 or C++17 and link with -lm. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "$name.h"

#if ${macro}_ID != $id
#error "$name.h and $name.c come from different exports"
#endif
#ifdef __FAST_MATH__
#error "compile without -ffast-math: it takes NaN and the order of sums away"
#endif

$constants
$helpers
static int run(const float *image, ${levels}float *out, float *work)
{
$body
    if (has_nan(out, ${macro}_OUTPUT_SIZE))
        return fill_nan(out, ${macro}_OUTPUT_SIZE);
    return largest(out, ${macro}_OUTPUT_SIZE);
}

static float memory[${macro}_WORK_SIZE];

int ${name}_predict_with(const float *image, float *out, float *work)
{
    return run(image, ${none}out, work);
}

int ${name}_predict(const float *image, float *out)
{
    return run(image, ${none}out, memory);
}
$bytes$aliases
