/* Run a network on one image from standard input, on this computer. MODEL_... as in board.c. */
#include <stdio.h>

#include MODEL_HEADER

int main(void)
{
    static float image[MODEL_INPUTS], out[MODEL_OUTPUTS];
    if (fread(image, sizeof image, 1, stdin) != 1)
        return 1;
    return MODEL_PREDICT(image, out) < 0;
}
