
int cl_predict_u8(const uint8_t *image, float *out)
{
    return ${name}_predict_u8(image, out);
}
