
int cl_predict_with(const float *image, float *out, float *work)
{
    return ${name}_predict_with(image, out, work);
}

int cl_predict(const float *image, float *out)
{
    return ${name}_predict(image, out);
}
