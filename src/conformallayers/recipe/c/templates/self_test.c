
#ifdef ${macro}_SELF_TEST
$arrays
int ${name}_self_test(void)
{
    static float image[${macro}_INPUT_SIZE], out[${macro}_OUTPUT_SIZE];
    const float limit = $limit;
    int32_t i;
    int best;
    for (i = 0; i < ${macro}_INPUT_SIZE; i++)
        image[i] = (float)self_test_image[i] / 255.0f;
    best = ${name}_predict(image, out);
    if (best < 0)
        return 1;
    for (i = 0; i < ${macro}_OUTPUT_SIZE; i++)
        if (!(out[i] - self_test_out[i] <= limit && self_test_out[i] - out[i] <= limit))
            return 1;
    return 0;
}
#endif
