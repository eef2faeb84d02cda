$about
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
int ${name}_predict_with(const float *image, float *out, float *work)
{
$body
    if (has_nan(out, ${macro}_OUTPUT_SIZE))
        return fill_nan(out, ${macro}_OUTPUT_SIZE);
    return largest(out, ${macro}_OUTPUT_SIZE);
}

int ${name}_predict(const float *image, float *out)
{
    static float work[${macro}_WORK_SIZE];
    return ${name}_predict_with(image, out, work);
}
$aliases
