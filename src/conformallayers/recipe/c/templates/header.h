/*
 * $name.h: a folded network. Do not edit: export it again.
 *
 * written by:  conformallayers $version
 * input:       $input_shape
 * output:      $output_shape
 * weights:     $dtype, $flash_bytes bytes of constants
 * work memory: $work_bytes bytes
 * work:        $multiply_adds multiply-adds per image
 * strategy:    $strategy
 * origin:      $origin
 */
#ifndef ${macro}_H
#define ${macro}_H

#include <stdint.h>

#define ${macro}_INPUT_SIZE $inputs
#define ${macro}_INPUT_SHAPE {$input_shape}
#define ${macro}_OUTPUT_SIZE $outputs
#define ${macro}_OUTPUT_SHAPE {$output_shape}
$labels#define ${macro}_WORK_SIZE $work /* floats */
/* Bytes of constants; code comes on top. */
#define ${macro}_FLASH_BYTES $flash_bytes
#define ${macro}_ARENA_BYTES $work_bytes
#define ${macro}_VERSION "$version" /* of conformallayers */
/* The fingerprint of the weights that were folded. */
#define ${macro}_ORIGIN "$origin"
/* The source that belongs to this header has the same. */
#define ${macro}_ID $id

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Run one image of ${macro}_INPUT_SIZE floats, the last axis running fastest. Fills
 * ${macro}_OUTPUT_SIZE outputs and returns the index of the largest, the first of equal
 * ones. $nan
 *
 * work: ${macro}_WORK_SIZE floats that are overwritten. The three arrays must not overlap. Calls
 * with different work may run at the same time.
 */
int ${name}_predict_with(const float *image, float *out, float *work);

/*
 * The same with $work_bytes bytes of static work memory: one call at a time, and none from
 * an interrupt.
 */
int ${name}_predict(const float *image, float *out);
$bytes$aliases
#ifdef ${macro}_SELF_TEST
/* Run an image whose outputs are known, in static memory. Returns 0 if they come out, else 1. */
int ${name}_self_test(void);
#endif

#ifdef __cplusplus
}
#endif

#endif
