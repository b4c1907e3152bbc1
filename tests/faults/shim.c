/* A library to preload (LD_PRELOAD) that counts the file operations below one folder and makes one of them fail.

   Nothing is counted before `faults_arm`. A process forked afterwards starts from the counts of its parent. Operations
   that the C library makes by itself, such as the writes of a FILE, do not pass through here; `fopen` does. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { COUNT, ERROR, SHORT, KILL };

static char folder[PATH_MAX];
static enum kind kind;
static int error_number, log_fd = -1;
static long fail_at;
static const char *fail_operations;
static atomic_long calls;
static atomic_int fired;

/* Count the operations below `root`. The first of `operations`, a list such as ",read,write,", from number `at` on fails
   with errno `error` (kind 1), moves fewer bytes (2), or kills the process before it (3). Writes a line for each
   operation to `log`, and one for the fault. */
void faults_arm(const char *root, enum kind what, int error, long at, const char *operations, int log) {
    strncpy(folder, root, sizeof folder - 1);
    fail_operations = strdup(operations);
    error_number = error;
    fail_at = at;
    kind = what;
    log_fd = log;
    calls = 0;
    fired = 0;
}

static void note(const char *operation, const char *path) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %s\n", operation, path);
    if (log_fd >= 0) syscall(SYS_write, log_fd, line, length < (int)sizeof line ? length : (int)sizeof line - 1);
}

/* What to do with this operation. COUNT: nothing. */
static enum kind decide(const char *operation, const char *path) {
    size_t length = strlen(folder);
    if (!length || strncmp(path, folder, length) || (path[length] && path[length] != '/')) return COUNT;
    long number = atomic_fetch_add(&calls, 1) + 1;
    note(operation, path);
    char name[64];
    snprintf(name, sizeof name, ",%s,", operation);
    if (kind == COUNT || number < fail_at || !strstr(fail_operations, name) || atomic_exchange(&fired, 1)) return COUNT;
    note("FAULT", path);
    if (kind == KILL) raise(SIGKILL);
    if (kind == ERROR) errno = error_number;
    return kind;
}

static enum kind decide_at(const char *operation, int directory, const char *path) {
    char full[2 * PATH_MAX], link[64];
    if (!folder[0]) return COUNT;
    if (path[0] == '/') return decide(operation, path);
    if (directory == AT_FDCWD) {
        if (!getcwd(full, PATH_MAX)) return COUNT;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, full, PATH_MAX - 1);
        if (length < 0) return COUNT;
        full[length] = 0;
    }
    strcat(full, "/");
    strncat(full, path, PATH_MAX - 1);
    return decide(operation, full);
}

static enum kind decide_fd(const char *operation, int fd) {
    char path[PATH_MAX], link[64];
    if (!folder[0] || fd < 0 || fd == log_fd) return COUNT;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return COUNT;
    path[length] = 0;
    return decide(operation, path);
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name);

#define MODE(flags, last) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list list; \
        va_start(list, last); \
        mode = va_arg(list, mode_t); \
        va_end(list); \
    }
#define OPENED(flags) ((flags) & O_CREAT ? "create" : "open")

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...) \
        MODE(flags, flags) \
        return decide_at(OPENED(flags), AT_FDCWD, path) == ERROR ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int directory, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...) \
        MODE(flags, flags) \
        return decide_at(OPENED(flags), directory, path) == ERROR ? -1 : real(directory, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(FILE *, name, const char *, const char *) \
        return decide_at(mode[0] == 'r' ? "open" : "create", AT_FDCWD, path) == ERROR ? NULL : real(path, mode); \
    }
FOPEN(fopen)
FOPEN(fopen64)

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *)
    return decide_at("list", AT_FDCWD, path) == ERROR ? NULL : real(path);
}

static size_t fewer(enum kind what, size_t count) { return what == SHORT ? (count + 1) / 2 : count; }

/* The first buffer alone, cut in half if it is the only one. */
static struct iovec first(const struct iovec *vector, int count) {
    struct iovec one = vector[0];
    if (count == 1) one.iov_len = fewer(SHORT, one.iov_len);
    return one;
}

#define MOVE(name, operation, buffer_type) \
    ssize_t name(int fd, buffer_type buffer, size_t count) { \
        REAL(ssize_t, name, int, buffer_type, size_t) \
        enum kind what = decide_fd(operation, fd); \
        return what == ERROR ? -1 : real(fd, buffer, fewer(what, count)); \
    }
MOVE(read, "read", void *)
MOVE(write, "write", const void *)

#define MOVE_AT(name, operation, buffer_type) \
    ssize_t name(int fd, buffer_type buffer, size_t count, off_t offset) { \
        REAL(ssize_t, name, int, buffer_type, size_t, off_t) \
        enum kind what = decide_fd(operation, fd); \
        return what == ERROR ? -1 : real(fd, buffer, fewer(what, count), offset); \
    }
MOVE_AT(pread, "read", void *)
MOVE_AT(pread64, "read", void *)
MOVE_AT(pwrite, "write", const void *)
MOVE_AT(pwrite64, "write", const void *)

#define VECTOR(name, operation) \
    ssize_t name(int fd, const struct iovec *vector, int count) { \
        REAL(ssize_t, name, int, const struct iovec *, int) \
        enum kind what = decide_fd(operation, fd); \
        if (what == ERROR) return -1; \
        struct iovec one = first(vector, count); \
        return what == SHORT ? real(fd, &one, 1) : real(fd, vector, count); \
    }
VECTOR(readv, "read")
VECTOR(writev, "write")

#define VECTOR_AT(name, operation) \
    ssize_t name(int fd, const struct iovec *vector, int count, off_t offset) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off_t) \
        enum kind what = decide_fd(operation, fd); \
        if (what == ERROR) return -1; \
        struct iovec one = first(vector, count); \
        return what == SHORT ? real(fd, &one, 1, offset) : real(fd, vector, count, offset); \
    }
VECTOR_AT(preadv, "read")
VECTOR_AT(preadv64, "read")
VECTOR_AT(pwritev, "write")
VECTOR_AT(pwritev64, "write")

#define VECTOR_2(name, operation) \
    ssize_t name(int fd, const struct iovec *vector, int count, off_t offset, int flags) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off_t, int) \
        enum kind what = decide_fd(operation, fd); \
        if (what == ERROR) return -1; \
        struct iovec one = first(vector, count); \
        return what == SHORT ? real(fd, &one, 1, offset, flags) : real(fd, vector, count, offset, flags); \
    }
VECTOR_2(preadv2, "read")
VECTOR_2(preadv64v2, "read")
VECTOR_2(pwritev2, "write")
VECTOR_2(pwritev64v2, "write")

#define SEND(name) \
    ssize_t name(int target, int source, off_t *offset, size_t count) { \
        REAL(ssize_t, name, int, int, off_t *, size_t) \
        enum kind what = decide_fd("write", target); \
        return what == ERROR ? -1 : real(target, source, offset, fewer(what, count)); \
    }
SEND(sendfile)
SEND(sendfile64)

#define FLUSH(name) \
    int name(int fd) { \
        REAL(int, name, int) \
        return decide_fd("fsync", fd) == ERROR ? -1 : real(fd); \
    }
FLUSH(fsync)
FLUSH(fdatasync)

#define TRUNCATE(name) \
    int name(int fd, off_t length) { \
        REAL(int, name, int, off_t) \
        return decide_fd("truncate", fd) == ERROR ? -1 : real(fd, length); \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define RESERVE(name) /* returns the error, and does not set errno */ \
    int name(int fd, off_t offset, off_t length) { \
        REAL(int, name, int, off_t, off_t) \
        return decide_fd("truncate", fd) == ERROR ? error_number : real(fd, offset, length); \
    }
RESERVE(posix_fallocate)
RESERVE(posix_fallocate64)

#define ALLOCATE(name) \
    int name(int fd, int mode, off_t offset, off_t length) { \
        REAL(int, name, int, int, off_t, off_t) \
        return decide_fd("truncate", fd) == ERROR ? -1 : real(fd, mode, offset, length); \
    }
ALLOCATE(fallocate)
ALLOCATE(fallocate64)

#define MAP(name) \
    void *name(void *at, size_t length, int protection, int flags, int fd, off_t offset) { \
        REAL(void *, name, void *, size_t, int, int, int, off_t) \
        int anonymous = flags & MAP_ANONYMOUS; \
        if (!anonymous && decide_fd("mmap", fd) == ERROR) return MAP_FAILED; \
        return real(at, length, protection, flags, fd, offset); \
    }
MAP(mmap)
MAP(mmap64)

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *)
    return decide_at("rename", AT_FDCWD, to) == ERROR ? -1 : real(from, to);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *)
    return decide_at("rename", to_directory, to) == ERROR ? -1 : real(from_directory, from, to_directory, to);
}

int renameat2(int from_directory, const char *from, int to_directory, const char *to, unsigned int flags) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned int)
    return decide_at("rename", to_directory, to) == ERROR ? -1 : real(from_directory, from, to_directory, to, flags);
}

#define REMOVE(name) \
    int name(const char *path) { \
        REAL(int, name, const char *) \
        return decide_at("unlink", AT_FDCWD, path) == ERROR ? -1 : real(path); \
    }
REMOVE(unlink)
REMOVE(rmdir)
REMOVE(remove)

int unlinkat(int directory, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int)
    return decide_at("unlink", directory, path) == ERROR ? -1 : real(directory, path, flags);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t)
    return decide_at("mkdir", AT_FDCWD, path) == ERROR ? -1 : real(path, mode);
}

int mkdirat(int directory, const char *path, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t)
    return decide_at("mkdir", directory, path) == ERROR ? -1 : real(directory, path, mode);
}
