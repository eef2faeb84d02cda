/*
 * Run a network on an emulated Cortex-M4: images come from a file of the host by semihosting, classes,
 * ticks of a timer and outputs go to another one. MODEL_... come from the command line.
 */
#include <stdint.h>

#include MODEL_HEADER

#define OPEN 0x01
#define CLOSE 0x02
#define WRITE 0x05
#define READ 0x06
#define EXIT 0x20
#define STOPPED 0x20026 /* as an application does */
#define PAINT 0xa5a5a5a5u
#define STACK 16384 /* bytes that are painted */
#define FPU (*(volatile uint32_t *)0xe000ed88u)
#define TIMER ((volatile uint32_t *)0x40000000u) /* control, value, reload */

extern uint32_t data_begin[], data_end[], data_stored[], bss_begin[], bss_end[], stack_end[];
void start(void);

static int host(int operation, const void *arguments)
{
    register int r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = arguments;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}

static void stop(int code)
{
    const uint32_t arguments[2] = {STOPPED, (uint32_t)code};
    host(EXIT, arguments);
    for (;;)
        continue;
}

static void fault(void)
{
    stop(70);
}

__attribute__((section(".vectors"), used)) static void (*const vectors[16])(void) = {
    (void (*)(void))stack_end, start, fault, fault, fault, fault, fault,
};

static int open_file(const char *name, uint32_t length, uint32_t mode)
{
    const uint32_t arguments[3] = {(uint32_t)name, mode, length};
    const int file = host(OPEN, arguments);
    if (file < 0)
        stop(71);
    return file;
}

/* Return the bytes that were not read or written. */
static uint32_t transfer(int operation, int file, void *data, uint32_t bytes)
{
    const uint32_t arguments[3] = {(uint32_t)file, (uint32_t)data, bytes};
    return (uint32_t)host(operation, arguments);
}

static void run(void)
{
    static float image[MODEL_INPUTS], out[MODEL_OUTPUTS];
    const int images = open_file("images.bin", 10, 1), results = open_file("results.bin", 11, 5);
    uint32_t *const base = (uint32_t *)__builtin_frame_address(0), *const lowest = base - STACK / 4;
    uint32_t *place, record[2] = {0, 0};
    for (place = lowest; place < base - 64; place++)
        *place = PAINT;
    TIMER[2] = TIMER[1] = 0xffffffffu;
    TIMER[0] = 1;
    while (transfer(READ, images, image, sizeof image) == 0) {
        const uint32_t before = TIMER[1];
        record[0] = (uint32_t)MODEL_PREDICT(image, out);
        record[1] = before - TIMER[1];
        if (transfer(WRITE, results, record, sizeof record) != 0 ||
            transfer(WRITE, results, out, sizeof out) != 0)
            stop(72);
    }
    for (place = lowest; place < base && *place == PAINT;)
        place++;
    record[0] = (uint32_t)((base - place) * 4);
    if (transfer(WRITE, results, record, sizeof *record) != 0)
        stop(72);
    host(CLOSE, &results);
#ifdef MODEL_SELF_TEST
    stop(MODEL_SELF_TEST());
#else
    stop(0);
#endif
}

void start(void)
{
    uint32_t *to, *from = data_stored;
    FPU |= 0xf00000u;
    __asm__ volatile("dsb\n\tisb");
    for (to = data_begin; to < data_end;)
        *to++ = *from++;
    for (to = bss_begin; to < bss_end;)
        *to++ = 0;
    run();
}
