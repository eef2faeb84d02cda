
/* The same for an image of bytes, each of which stands for byte / 255: no float of it is stored. */
int ${name}_predict_u8_with(const uint8_t *image, float *out, float *work);
int ${name}_predict_u8(const uint8_t *image, float *out);
