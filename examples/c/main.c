/*
 * Classify images with an exported network. Raw floats on standard input, one image after the
 * other; one line for each on standard output: the likeliest class, by its name if the header has
 * names and by its index if not, then all outputs.
 *
 *   python -c 'import conformallayers as cl; cl.export_c(cl.load("net.safetensors"), ".")'
 *   cc -std=c99 -O2 -I. main.c cl_model.c -lm -o classify
 *   ./classify < images.f32
 */
#include <stdio.h>

#include "cl_model.h"

int main(void)
{
#ifdef CL_MODEL_LABELS
    static const char *const names[] = CL_MODEL_LABELS;
#endif
    static float image[CL_INPUT_SIZE], out[CL_OUTPUT_SIZE];
    while (fread(image, sizeof image, 1, stdin) == 1) {
        const int best = cl_predict(image, out);
        int i;
        if (best < 0) {
            puts("-1 (NaN in the image or in an output)");
            continue;
        }
#ifdef CL_MODEL_LABELS
        printf("%s", names[best]);
#else
        printf("%d", best);
#endif
        for (i = 0; i < CL_OUTPUT_SIZE; i++)
            printf(" %g", (double)out[i]);
        putchar('\n');
    }
    return ferror(stdin) ? 1 : 0;
}
