/* A wall clock that is wrong by the number of seconds in the file $CLOCK_OFFSET (int64, mapped).
   Preloaded. Monotonic time stays correct, and deadlines in wall time are converted to the correct
   time for the kernel. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))next(#name))
#define SINCE_1970 1000000000 /* seconds; a deadline below is of monotonic time */

static void *next(const char *name) {
    /* the older versions of condition variables are another type of the same size */
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

static int64_t offset(void) {
    static const volatile int64_t *mapped;
    static const int64_t none = 0;
    if (!mapped) {
        const char *path = getenv("CLOCK_OFFSET");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *found = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        mapped = found == MAP_FAILED ? &none : found;
    }
    return *mapped;
}

static const struct timespec *true_time(const struct timespec *deadline, struct timespec *copy) {
    if (!deadline || deadline->tv_sec < SINCE_1970) return deadline;
    *copy = *deadline;
    copy->tv_sec -= offset();
    return copy;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int status = real(clock, now);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        now->tv_sec += offset();
    }
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static __typeof__(&gettimeofday) real;
    if (!real) real = REAL(gettimeofday);
    int status = real(now, zone);
    if (!status) now->tv_sec += offset();
    return status;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex,
                           const struct timespec *deadline) {
    struct timespec copy;
    return REAL(pthread_cond_timedwait)(cond, mutex, true_time(deadline, &copy));
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *deadline) {
    struct timespec copy;
    return REAL(pthread_cond_clockwait)(cond, mutex, clock, true_time(deadline, &copy));
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *deadline) {
    struct timespec copy;
    return REAL(pthread_mutex_timedlock)(mutex, true_time(deadline, &copy));
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    struct timespec copy;
    return REAL(sem_timedwait)(semaphore, true_time(deadline, &copy));
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *deadline) {
    struct timespec copy;
    return REAL(sem_clockwait)(semaphore, clock, true_time(deadline, &copy));
}

long syscall(long number, ...) {
    static __typeof__(&syscall) real;
    if (!real) real = REAL(syscall);
    va_list list;
    long a[6];
    struct timespec copy;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME)) {
        a[3] = (long)true_time((const struct timespec *)a[3], &copy);
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
