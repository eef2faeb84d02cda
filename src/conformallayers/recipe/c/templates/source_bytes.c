
int ${name}_predict_u8_with(const uint8_t *image, float *out, float *work)
{
    return run(NULL, image, out, work);
}

int ${name}_predict_u8(const uint8_t *image, float *out)
{
    return run(NULL, image, out, memory);
}
