/*
 * Run the self-test of $name on any computer, no board is needed:
 *
 *   make -f $name.mk test
 */
#include <stdio.h>

#include "$name.h"

int main(void)
{
    const int failed = ${name}_self_test();
    printf("flash %d bytes of constants, RAM %d bytes of work memory\n", ${macro}_FLASH_BYTES,
           ${macro}_ARENA_BYTES);
    puts(failed ? "self-test failed" : "self-test passed");
    return failed;
}
