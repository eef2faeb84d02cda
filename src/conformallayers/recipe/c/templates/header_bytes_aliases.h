int cl_predict_u8(const uint8_t *image, float *out);
