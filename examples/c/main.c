/*
 * Classify images with an exported network. Raw floats on standard input, one image after the
 * other; one line for each on standard output: the index of the largest output, then all outputs.
 *
 *   python -c 'import conformallayers as cl; cl.export_c(cl.load("net.safetensors"), ".")'
 *   cc -std=c99 -O2 -I. main.c cl_model.c -lm -o classify
 *   ./classify < images.f32
 */
#include <stdio.h>

#include "cl_model.h"

int main(void)
{
    static float image[CL_INPUT_SIZE], out[CL_OUTPUT_SIZE];
    while (fread(image, sizeof image, 1, stdin) == 1) {
        const int best = cl_predict(image, out);
        int i;
        if (best < 0) {
            puts("-1 (NaN in the image or in an output)");
            continue;
        }
        printf("%d", best);
        for (i = 0; i < CL_OUTPUT_SIZE; i++)
            printf(" %g", (double)out[i]);
        putchar('\n');
    }
    return ferror(stdin) ? 1 : 0;
}
