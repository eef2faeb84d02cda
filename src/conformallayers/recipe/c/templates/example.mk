# make -f $name.mk          the network as an object file
# make -f $name.mk test     compile and run its self-test on this computer
# make -f $name.mk size     code and constants (text), static memory (bss)
#
# For a Cortex-M4:
# make -f $name.mk size CC=arm-none-eabi-gcc SIZE=arm-none-eabi-size \
#     CFLAGS="-O2 -mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16"
CFLAGS = -O2
WARNINGS = -std=c99 -Wall -Wextra -Werror
SIZE = size

$name.o: $name.c $name.h
	$$(CC) $$(CFLAGS) $$(WARNINGS) -c $name.c -o $$@

${name}_example: ${name}_example.c $name.c $name.h
	$$(CC) $$(CFLAGS) $$(WARNINGS) -D${macro}_SELF_TEST ${name}_example.c $name.c -lm -o $$@

.PHONY: test size clean
test: ${name}_example
	./${name}_example

size: $name.o
	$$(SIZE) $name.o

clean:
	rm -f $name.o ${name}_example
