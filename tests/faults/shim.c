/* A library to preload (LD_PRELOAD) that counts the file operations below one folder and makes one of them fail, or
   records the operations that change files.

   Nothing is counted before `faults_arm`. Operations that the C library makes by itself, such as the writes of a FILE,
   do not pass through here; `fopen` does. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
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

enum kind { COUNT, ERROR, SHORT, RECORD };

static char folder[PATH_MAX];
static enum kind kind;
static int error_number, log_fd = -1;
static long fail_at;
static const char *fail_operations;
static atomic_long calls;
static atomic_int fired;
static pthread_mutex_t order = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

/* Count the operations below `root`. The first of `operations`, a list such as ",read,write,", from number `at` on fails
   with errno `error` (kind 1) or moves fewer bytes (2). Writes a line for each operation to `log`, and one for the fault.
   Kind 3 records what changes files instead: for each operation, a line "NAME PATH OTHER OFFSET LENGTH" and, of a write,
   the bytes. The operations then take turns, so that the log has their order. */
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

static int is_inside(const char *path) {
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (!path[length] || path[length] == '/');
}

/* What to do with this operation. COUNT: nothing. */
static enum kind decide(const char *operation, const char *path) {
    if (kind == RECORD || !is_inside(path)) return COUNT;
    long number = atomic_fetch_add(&calls, 1) + 1;
    note(operation, path);
    char name[64];
    snprintf(name, sizeof name, ",%s,", operation);
    if (kind == COUNT || number < fail_at || !strstr(fail_operations, name) || atomic_exchange(&fired, 1)) return COUNT;
    note("FAULT", path);
    if (kind == ERROR) errno = error_number;
    return kind;
}

/* The absolute form of `path`, in `full`; an empty text if nothing is counted or there is none. */
static const char *absolute(int directory, const char *path, char *full) {
    char link[64];
    full[0] = 0;
    if (!folder[0]) return full;
    if (path[0] != '/') {
        snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, full, PATH_MAX - 1);
        full[length < 0 ? 0 : length] = 0;
        strcat(full, "/");
    }
    return strncat(full, path, PATH_MAX - 1);
}

static const char *path_of(int fd, char *full) {
    char link[64];
    full[0] = 0;
    if (!folder[0] || fd < 0 || fd == log_fd) return full;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, full, PATH_MAX - 1);
    full[length < 0 ? 0 : length] = 0;
    return full;
}

static enum kind decide_at(const char *operation, int directory, const char *path) {
    char full[2 * PATH_MAX];
    return decide(operation, absolute(directory, path, full));
}

static enum kind decide_fd(const char *operation, int fd) {
    char full[PATH_MAX];
    return decide(operation, path_of(fd, full));
}

static void begin(void) {
    if (kind == RECORD) pthread_mutex_lock(&order);
}

/* Record an operation that `succeeded`, and let the next one begin. */
static void end(int succeeded, const char *operation, const char *path, const char *other, long offset,
                const void *data, size_t length) {
    if (kind != RECORD) return;
    int error = errno;
    if (succeeded && is_inside(path)) {
        char line[4 * PATH_MAX + 64];
        int count = snprintf(line, sizeof line, "%s %s %s %ld %zu\n", operation, path, other, offset, length);
        syscall(SYS_write, log_fd, line, count);
        if (data) syscall(SYS_write, log_fd, data, length);
    }
    errno = error;
    pthread_mutex_unlock(&order);
}

static void end_fd(int succeeded, const char *operation, int fd, long offset, const void *data, size_t length) {
    char full[PATH_MAX];
    if (kind == RECORD) end(succeeded, operation, path_of(fd, full), "-", offset, data, length);
}

static void end_at(int succeeded, const char *operation, int directory, const char *path) {
    char full[2 * PATH_MAX];
    if (kind == RECORD) end(succeeded, operation, absolute(directory, path, full), "-", 0, NULL, 0);
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

#define END_OPEN(flags, fd, directory) \
    end_at(fd >= 0 && (flags) & (O_CREAT | O_TRUNC), (flags) & O_TRUNC ? "empty" : "create", directory, path)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...) \
        MODE(flags, flags) \
        if (decide_at(OPENED(flags), AT_FDCWD, path) == ERROR) return -1; \
        begin(); \
        int fd = real(path, flags, mode); \
        END_OPEN(flags, fd, AT_FDCWD); \
        return fd; \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int directory, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...) \
        MODE(flags, flags) \
        if (decide_at(OPENED(flags), directory, path) == ERROR) return -1; \
        begin(); \
        int fd = real(directory, path, flags, mode); \
        END_OPEN(flags, fd, directory); \
        return fd; \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(FILE *, name, const char *, const char *) \
        if (decide_at(mode[0] == 'r' ? "open" : "create", AT_FDCWD, path) == ERROR) return NULL; \
        begin(); \
        FILE *file = real(path, mode); \
        end_at(file && mode[0] != 'r', mode[0] == 'w' ? "empty" : "create", AT_FDCWD, path); \
        return file; \
    }
FOPEN(fopen)
FOPEN(fopen64)

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *)
    return decide_at("list", AT_FDCWD, path) == ERROR ? NULL : real(path);
}

static size_t fewer(enum kind what, size_t count) { return what == SHORT ? (count + 1) / 2 : count; }

/* The first buffer alone, which is allowed; cut in half if it is the only one. */
static struct iovec first(enum kind what, const struct iovec *vector, int count) {
    struct iovec one = vector[0];
    if (count == 1) one.iov_len = fewer(what, one.iov_len);
    return one;
}

#define IS_WRITE(operation) (operation[0] == 'w')

#define MOVE(name, operation, buffer_type) \
    ssize_t name(int fd, buffer_type buffer, size_t count) { \
        REAL(ssize_t, name, int, buffer_type, size_t) \
        enum kind what = decide_fd(operation, fd); \
        if (what == ERROR) return -1; \
        if (!IS_WRITE(operation) || fd == log_fd) return real(fd, buffer, fewer(what, count)); \
        begin(); \
        ssize_t moved = real(fd, buffer, fewer(what, count)); \
        end_fd(moved > 0, operation, fd, lseek(fd, 0, SEEK_CUR) - moved, buffer, moved); \
        return moved; \
    }
MOVE(read, "read", void *)
MOVE(write, "write", const void *)

#define MOVE_AT(name, operation, buffer_type) \
    ssize_t name(int fd, buffer_type buffer, size_t count, off_t offset) { \
        REAL(ssize_t, name, int, buffer_type, size_t, off_t) \
        enum kind what = decide_fd(operation, fd); \
        if (what == ERROR) return -1; \
        if (!IS_WRITE(operation)) return real(fd, buffer, fewer(what, count), offset); \
        begin(); \
        ssize_t moved = real(fd, buffer, fewer(what, count), offset); \
        end_fd(moved > 0, operation, fd, offset, buffer, moved); \
        return moved; \
    }
MOVE_AT(pread, "read", void *)
MOVE_AT(pread64, "read", void *)
MOVE_AT(pwrite, "write", const void *)
MOVE_AT(pwrite64, "write", const void *)

ssize_t readv(int fd, const struct iovec *vector, int count) {
    struct iovec one = first(COUNT, vector, count);
    return read(fd, one.iov_base, one.iov_len);
}

ssize_t writev(int fd, const struct iovec *vector, int count) {
    struct iovec one = first(COUNT, vector, count);
    return write(fd, one.iov_base, one.iov_len);
}

#define VECTOR_AT(name, single) \
    ssize_t name(int fd, const struct iovec *vector, int count, off_t offset) { \
        struct iovec one = first(COUNT, vector, count); \
        return single(fd, one.iov_base, one.iov_len, offset); \
    }
VECTOR_AT(preadv, pread)
VECTOR_AT(preadv64, pread)
VECTOR_AT(pwritev, pwrite)
VECTOR_AT(pwritev64, pwrite)

#define VECTOR_2(name, operation) \
    ssize_t name(int fd, const struct iovec *vector, int count, off_t offset, int flags) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off_t, int) \
        enum kind what = decide_fd(operation, fd); \
        if (what == ERROR) return -1; \
        struct iovec one = first(what, vector, count); \
        if (what == COUNT && !IS_WRITE(operation)) return real(fd, vector, count, offset, flags); \
        begin(); \
        ssize_t moved = real(fd, &one, 1, offset, flags); \
        end_fd(moved > 0 && IS_WRITE(operation), operation, fd, offset, one.iov_base, moved); \
        return moved; \
    }
VECTOR_2(preadv2, "read")
VECTOR_2(preadv64v2, "read")
VECTOR_2(pwritev2, "write")
VECTOR_2(pwritev64v2, "write")

#define SEND(name) /* not supported while the operations are recorded: the caller reads and writes instead */ \
    ssize_t name(int target, int source, off_t *offset, size_t count) { \
        REAL(ssize_t, name, int, int, off_t *, size_t) \
        enum kind what = decide_fd("write", target); \
        if (kind == RECORD) errno = EINVAL; \
        return what == ERROR || kind == RECORD ? -1 : real(target, source, offset, fewer(what, count)); \
    }
SEND(sendfile)
SEND(sendfile64)

ssize_t copy_file_range(int source, off_t *from, int target, off_t *to, size_t count, unsigned int flags) {
    REAL(ssize_t, copy_file_range, int, off_t *, int, off_t *, size_t, unsigned int)
    enum kind what = decide_fd("write", target);
    if (kind == RECORD) errno = EINVAL;
    return what == ERROR || kind == RECORD ? -1 : real(source, from, target, to, fewer(what, count), flags);
}

#define FLUSH(name) \
    int name(int fd) { \
        REAL(int, name, int) \
        if (decide_fd("fsync", fd) == ERROR) return -1; \
        begin(); \
        int failed = real(fd); \
        end_fd(!failed, "fsync", fd, 0, NULL, 0); \
        return failed; \
    }
FLUSH(fsync)
FLUSH(fdatasync)

#define TRUNCATE(name) \
    int name(int fd, off_t length) { \
        REAL(int, name, int, off_t) \
        if (decide_fd("truncate", fd) == ERROR) return -1; \
        begin(); \
        int failed = real(fd, length); \
        end_fd(!failed, "truncate", fd, length, NULL, 0); \
        return failed; \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define RESERVE(name) /* returns the error, and does not set errno */ \
    int name(int fd, off_t offset, off_t length) { \
        REAL(int, name, int, off_t, off_t) \
        if (decide_fd("truncate", fd) == ERROR) return error_number; \
        begin(); \
        int error = real(fd, offset, length); \
        end_fd(!error, "allocate", fd, offset + length, NULL, 0); \
        return error; \
    }
RESERVE(posix_fallocate)
RESERVE(posix_fallocate64)

#define MAP(name) \
    void *name(void *at, size_t length, int protection, int flags, int fd, off_t offset) { \
        REAL(void *, name, void *, size_t, int, int, int, off_t) \
        int anonymous = flags & MAP_ANONYMOUS; \
        if (!anonymous && decide_fd("mmap", fd) == ERROR) return MAP_FAILED; \
        return real(at, length, protection, flags, fd, offset); \
    }
MAP(mmap)
MAP(mmap64)

#define RENAMED(from_directory, to_directory, call) \
    char source[2 * PATH_MAX], target[2 * PATH_MAX]; \
    if (decide("rename", absolute(to_directory, to, target)) == ERROR) return -1; \
    begin(); \
    int failed = call; \
    end(!failed, "rename", absolute(from_directory, from, source), target, 0, NULL, 0); \
    return failed;

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *)
    RENAMED(AT_FDCWD, AT_FDCWD, real(from, to))
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *)
    RENAMED(from_directory, to_directory, real(from_directory, from, to_directory, to))
}

#define CHANGED(operation, directory, call) \
    if (decide_at(operation, directory, path) == ERROR) return -1; \
    begin(); \
    int failed = call; \
    end_at(!failed, operation, directory, path); \
    return failed;

#define REMOVE(name) \
    int name(const char *path) { \
        REAL(int, name, const char *) \
        CHANGED("unlink", AT_FDCWD, real(path)) \
    }
REMOVE(unlink)
REMOVE(rmdir)
REMOVE(remove)

int unlinkat(int directory, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int)
    CHANGED("unlink", directory, real(directory, path, flags))
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t)
    CHANGED("mkdir", AT_FDCWD, real(path, mode))
}

int mkdirat(int directory, const char *path, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t)
    CHANGED("mkdir", directory, real(directory, path, mode))
}
