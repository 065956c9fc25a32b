// Lets the clock of a process go wrong: `gcc -shared -fPIC -o shifted_clock.so shifted_clock.c`, then
// `LD_PRELOAD=shifted_clock.so CLOCK_SHIFT=3600 program` shows the program the time of day an hour ahead.
// Clocks that only measure durations, and the times of files, which the kernel writes, stay right.
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    static long seconds;
    static int is_read;
    if (!is_read) {
        const char *said = getenv("CLOCK_SHIFT");
        seconds = said ? atol(said) : 0;
        is_read = 1;
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += shift();
    return failed;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
