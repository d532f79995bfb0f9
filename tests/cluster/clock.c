/* Preloaded: on the host WRONG_CLOCK_HOST the time of day is WRONG_CLOCK_S seconds later than it is.

   Absolute deadlines by that clock are as much earlier for the kernel, so that waiting takes as long as ever. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
static int64_t offset_ns;

__attribute__((constructor)) static void begin(void) {
    const char *host = getenv("WRONG_CLOCK_HOST"), *seconds = getenv("WRONG_CLOCK_S");
    char here[256] = "";
    gethostname(here, sizeof here - 1);
    if (host && seconds && strcmp(host, here) == 0)
        offset_ns = llround(atof(seconds) * 1e9);
}

static struct timespec moved(const struct timespec *from, int64_t by_ns) {
    int64_t ns = from->tv_sec * 1000000000LL + from->tv_nsec + by_ns;
    return (struct timespec){ns / 1000000000LL, ns % 1000000000LL};
}

int clock_gettime(clockid_t clock, struct timespec *to) {
    static __typeof__(&clock_gettime) next;
    if (!next)
        next = NEXT(clock_gettime);
    int status = next ? next(clock, to) : (int)syscall(SYS_clock_gettime, clock, to);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *to = moved(to, offset_ns);
    return status;
}

int gettimeofday(struct timeval *restrict to, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *to = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to)
        *to = now.tv_sec;
    return now.tv_sec;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec real = moved(until, -offset_ns);
    return NEXT(sem_timedwait)(semaphore, &real);
}
