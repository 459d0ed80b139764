/* System calls that fail when told to, for LD_PRELOAD: a network file system that has a bad day at a chosen moment.
 *
 * flce_fault_arm(n, error, sticky) makes the calling thread's nth call from then on (0 is the next) fail with errno = error, and all later
 * ones too if sticky; flce_fault_disarm() ends that and says how many calls there were. Calls of other threads and of the C library itself
 * are left alone; those of the C++ library (std::filesystem) are not.
 *
 * flce_fault_before(end, act) has the calling thread do something else before its next mkdir, rename or link of a path that ends so ("to:"
 * before the end: rename to such a path; "open:": open of one): `act` stands for another process at the worst moment. In a program that is
 * only run, files whose path ends in $FLCE_FAULT_VANISH are gone once lstat has seen them, and all calls of the function $FLCE_FAULT_STALE
 * are answered with ESTALE. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

static __thread int armed, calls, at, failure, stays;
static __thread const char* remote;
static __thread int locks;

__attribute__((visibility("default"))) void flce_fault_arm(int nth, int error, int sticky) {
    armed = 1;
    calls = 0;
    at = nth;
    failure = error;
    stays = sticky;
}

__attribute__((visibility("default"))) int flce_fault_disarm(void) {
    armed = 0;
    return calls;
}

/* Makes everything below the directory `below` lie on NFS from now on; null: nothing does. Returns the number of locks that were asked for
 * since the last call: of files on NFS where there were any, else of all. */
__attribute__((visibility("default"))) int flce_fault_nfs(const char* below) {
    const int asked = locks;
    remote = below;
    locks = 0;
    return asked;
}

static int is_remote(int file) {
    if (remote == NULL) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
    const ssize_t size = readlink(link, path, sizeof(path) - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return strncmp(path, remote, strlen(remote)) == 0;
}

static __thread const char* awaited;
static __thread void (*act)(void);

__attribute__((visibility("default"))) void flce_fault_before(const char* end, void (*then)(void)) {
    awaited = end;
    act = then;
}

static int ends_with(const char* path, const char* end) {
    const size_t size = strlen(path), last = strlen(end);
    return size >= last && strcmp(path + size - last, end) == 0;
}

static void about_to(const char* how, const char* path) {
    if (awaited == NULL || strncmp(awaited, how, strlen(how)) != 0 || !ends_with(path, awaited + strlen(how))) return;
    awaited = NULL;
    act();
}

static int fails(const char* function) {
    const char* const stale = getenv("FLCE_FAULT_STALE");
    if (stale != NULL && strcmp(stale, function) == 0) {
        errno = ESTALE;
        return 1;
    }
    if (!armed) return 0;
    const int number = calls++;
    if (number != at && !(stays && number > at)) return 0;
    errno = failure;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define SHIM_ALL(before, failed, result, name, parameters, arguments) \
    __attribute__((visibility("default"))) result name parameters {   \
        before;                                                       \
        if (fails(#name)) return failed;                              \
        return REAL(name) arguments;                                  \
    }
#define SHIM_AFTER(before, result, name, parameters, arguments) SHIM_ALL(before, -1, result, name, parameters, arguments)
#define SHIM(result, name, parameters, arguments) SHIM_ALL((void)0, -1, result, name, parameters, arguments)
#define SHIM_POINTER(result, name, parameters, arguments) SHIM_ALL((void)0, NULL, result, name, parameters, arguments)

SHIM(ssize_t, read, (int file, void* to, size_t size), (file, to, size))
SHIM(ssize_t, pread, (int file, void* to, size_t size, off_t offset), (file, to, size, offset))
SHIM(ssize_t, write, (int file, const void* from, size_t size), (file, from, size))
SHIM(ssize_t, pwrite, (int file, const void* from, size_t size, off_t offset), (file, from, size, offset))
SHIM_AFTER((about_to("", from), about_to("to:", to)), int, rename, (const char* from, const char* to), (from, to))
SHIM_AFTER(about_to("", from), int, link, (const char* from, const char* to), (from, to))
SHIM(int, unlink, (const char* path), (path))
SHIM(int, fsync, (int file), (file))
SHIM_AFTER(about_to("", path), int, mkdir, (const char* path, mode_t mode), (path, mode))
SHIM(int, mkostemp, (char* pattern, int flags), (pattern, flags))
SHIM_POINTER(char*, mkdtemp, (char* pattern), (pattern))
SHIM(int, rmdir, (const char* path), (path))
SHIM(int, remove, (const char* path), (path))
SHIM(int, unlinkat, (int folder, const char* path, int flags), (folder, path, flags))
SHIM(int, futimens, (int file, const struct timespec times[2]), (file, times))
SHIM(int, utimensat, (int folder, const char* path, const struct timespec times[2], int flags), (folder, path, times, flags))
SHIM_POINTER(DIR*, opendir, (const char* path), (path))
SHIM_POINTER(DIR*, fdopendir, (int folder), (folder))
SHIM_POINTER(struct dirent*, readdir, (DIR * folder), (folder))
SHIM(int, stat, (const char* path, struct stat* status), (path, status))
SHIM(int, fstat, (int file, struct stat* status), (file, status))
SHIM(int, access, (const char* path, int mode), (path, mode))

__attribute__((visibility("default"))) int open(const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    about_to("open:", path);
    if (fails("open")) return -1;
    return REAL(open)(path, flags, mode);
}

__attribute__((visibility("default"))) int openat(int folder, const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (fails("openat")) return -1;
    return REAL(openat)(folder, path, flags, mode);
}

__attribute__((visibility("default"))) int lstat(const char* path, struct stat* status) {
    if (fails("lstat")) return -1;
    const int result = REAL(lstat)(path, status);
    const char* const vanishes = getenv("FLCE_FAULT_VANISH");
    if (result == 0 && vanishes != NULL && ends_with(path, vanishes)) REAL(unlink)(path);
    return result;
}

/* The file is closed all the same: Linux does so, and NFS reports failed writes here. */
__attribute__((visibility("default"))) int close(int file) {
    const int result = REAL(close)(file);
    return fails("close") ? -1 : result;
}

__attribute__((visibility("default"))) int flock(int file, int operation) {
    if (remote == NULL || is_remote(file)) ++locks;
    return fails("flock") ? -1 : REAL(flock)(file, operation);
}

__attribute__((visibility("default"))) int fstatfs(int file, struct statfs* status) {
    if (fails("fstatfs")) return -1;
    const int result = REAL(fstatfs)(file, status);
    if (result == 0 && is_remote(file)) status->f_type = 0x6969; /* NFS_SUPER_MAGIC */
    return result;
}
