
/* The default name has these as well. */
#define CL_INPUT_SIZE ${macro}_INPUT_SIZE
#define CL_OUTPUT_SIZE ${macro}_OUTPUT_SIZE
#define CL_WORK_SIZE ${macro}_WORK_SIZE
int cl_predict_with(const float *image, float *out, float *work);
int cl_predict(const float *image, float *out);
