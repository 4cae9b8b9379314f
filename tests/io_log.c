/* Logs the file operations of a process under a folder: each call that changes names or bytes, and each sync, in order.
 *
 * cc -shared -fPIC -O1 -o io_log.so io_log.c -ldl; LD_PRELOAD=./io_log.so. Logging begins with io_log_start.
 * A record: "OP OFFSET LENGTH PATH\0OTHER\0\n" and LENGTH bytes.
 *
 * io_log_fault injects a fault at the n-th of these calls: the process is killed before it, or the call fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int out = -1;
static char prefix[PATH_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void io_log_start(const char *log, const char *folder) {
    strcpy(prefix, folder);
    out = REAL(open)(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
}

enum { KILL = 1, FULL_ONCE, BROKEN_ONCE, FULL_FROM_NOW, HALF };
static long points, fault_at = -1;
static int fault;

void io_log_fault(long at, int kind) { fault_at = at, fault = kind; }
long io_log_points(void) { return points; }

/* Counts a call under the folder; returns the error to report, or 0. `grows` means that the call needs space. */
static int point(int grows) {
    points++;
    if (fault_at < 0 || points < fault_at) return 0;
    if (points > fault_at) return (fault == FULL_FROM_NOW || fault == HALF) && grows ? ENOSPC : 0;
    if (fault == KILL) kill(getpid(), SIGKILL);
    if (fault == FULL_FROM_NOW || fault == HALF) return grows ? ENOSPC : 0;
    return fault == BROKEN_ONCE ? EIO : ENOSPC;
}

static size_t half(size_t count) { return fault == HALF && points == fault_at ? count / 2 : 0; }

static void put(const void *bytes, size_t count) {
    while (count > 0) {
        ssize_t done = REAL(write)(out, bytes, count);
        if (done <= 0) abort();
        bytes = (const char *)bytes + done, count -= done;
    }
}

static int of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, prefix, strlen(prefix)) == 0 && strstr(path, " (deleted)") == NULL;
}

static int of_name(int folder, const char *name, char *path) {
    char start[PATH_MAX] = "";
    if (name[0] == '/') start[0] = 0;
    else if (folder == AT_FDCWD) { if (!getcwd(start, sizeof start)) return 0; }
    else of_fd(folder, start);
    if (strlen(start) + strlen(name) + 2 > PATH_MAX) abort();
    strcpy(path, start);
    if (name[0] != '/') strcat(path, "/");
    strcat(path, name);
    return strncmp(path, prefix, strlen(prefix)) == 0;
}

static void record(const char *op, long offset, const char *path, const char *other, const void *data, size_t length) {
    char head[128];
    snprintf(head, sizeof head, "%s %ld %zu ", op, offset, length);
    put(head, strlen(head));
    put(path, strlen(path) + 1);
    put(other, strlen(other) + 1);
    put("\n", 1);
    put(data, length);
}

#define BEGIN int kept; char path[PATH_MAX], other[PATH_MAX]; int logged = 0; (void)other; \
    if (out >= 0) pthread_mutex_lock(&lock)
#define END kept = errno; if (out >= 0) pthread_mutex_unlock(&lock); errno = kept

static int opened(int folder, const char *name, int flags, mode_t mode) {
    BEGIN;
    struct stat before;
    if (out >= 0 && (flags & (O_CREAT | O_TRUNC))) logged = of_name(folder, name, path);
    int there = logged && fstatat(folder, name, &before, AT_SYMLINK_NOFOLLOW) == 0;
    int failed = logged ? point(!there) : 0;
    int fd = failed ? (errno = failed, -1) : REAL(openat)(folder, name, flags, mode);
    if (fd >= 0 && logged && !there && (flags & O_CREAT)) record("create", 0, path, "", "", 0);
    if (fd >= 0 && logged && there && (flags & O_TRUNC)) record("size", 0, path, "", "", 0);
    END;
    return fd;
}
#define MODE mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); }
int open(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE return opened(folder, name, flags, mode); }

ssize_t write(int fd, const void *data, size_t count) {
    BEGIN;
    long offset = 0;
    if (out >= 0 && (logged = of_fd(fd, path))) {
        struct stat now;
        fstat(fd, &now);
        offset = (fcntl(fd, F_GETFL) & O_APPEND) ? now.st_size : lseek(fd, 0, SEEK_CUR);
    }
    int failed = logged ? point(1) : 0;
    if (failed && half(count)) failed = 0, count = half(count);
    ssize_t done = failed ? (errno = failed, -1) : REAL(write)(fd, data, count);
    if (logged && done > 0) record("data", offset, path, "", data, done);
    END;
    return done;
}

static ssize_t written(int fd, const void *data, size_t count, off_t offset) {
    BEGIN;
    if (out >= 0) logged = of_fd(fd, path);
    int failed = logged ? point(1) : 0;
    if (failed && half(count)) failed = 0, count = half(count);
    ssize_t done = failed ? (errno = failed, -1) : REAL(pwrite)(fd, data, count, offset);
    if (logged && done > 0) record("data", offset, path, "", data, done);
    END;
    return done;
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) { return written(fd, data, count, offset); }
ssize_t pwrite64(int fd, const void *data, size_t count, off_t offset) { return written(fd, data, count, offset); }

static int sized(int fd, off_t size) {
    BEGIN;
    if (out >= 0) logged = of_fd(fd, path);
    int failed = logged ? point(1) : 0;
    int code = failed ? (errno = failed, -1) : REAL(ftruncate)(fd, size);
    if (logged && code == 0) record("size", size, path, "", "", 0);
    END;
    return code;
}
int ftruncate(int fd, off_t size) { return sized(fd, size); }
int ftruncate64(int fd, off_t size) { return sized(fd, size); }

#define SYNC(name) int name(int fd) { BEGIN; if (out >= 0) logged = of_fd(fd, path); int failed = logged ? point(0) : 0; \
    int code = failed ? (errno = failed, -1) : REAL(name)(fd); \
    if (logged && code == 0) record("sync", 0, path, "", "", 0); END; return code; }
SYNC(fsync)
SYNC(fdatasync)

#define ONE(signature, folder, name, op, call) int signature { BEGIN; if (out >= 0) logged = of_name(folder, name, path); \
    int failed = logged ? point(op[0] == 'f') : 0; int code = failed ? (errno = failed, -1) : call; \
    if (logged && code == 0) record(op, 0, path, "", "", 0); END; return code; }
ONE(unlink(const char *name), AT_FDCWD, name, "remove", REAL(unlink)(name))
ONE(remove(const char *name), AT_FDCWD, name, "remove", REAL(remove)(name))
ONE(rmdir(const char *name), AT_FDCWD, name, "remove", REAL(rmdir)(name))
ONE(unlinkat(int folder, const char *name, int flags), folder, name, "remove", REAL(unlinkat)(folder, name, flags))
ONE(mkdir(const char *name, mode_t mode), AT_FDCWD, name, "folder", REAL(mkdir)(name, mode))
ONE(mkdirat(int folder, const char *name, mode_t mode), folder, name, "folder", REAL(mkdirat)(folder, name, mode))

#define TWO(signature, from, name, to, target, op, call) int signature { BEGIN; \
    if (out >= 0) { logged = of_name(from, name, path); logged = of_name(to, target, other) || logged; } \
    int failed = logged ? point(1) : 0; int code = failed ? (errno = failed, -1) : call; \
    if (logged && code == 0) record(op, 0, path, other, "", 0); END; return code; }
TWO(rename(const char *name, const char *target), AT_FDCWD, name, AT_FDCWD, target, "rename", REAL(rename)(name, target))
TWO(renameat(int from, const char *name, int to, const char *target), from, name, to, target, "rename",
    REAL(renameat)(from, name, to, target))
TWO(link(const char *name, const char *target), AT_FDCWD, name, AT_FDCWD, target, "link", REAL(link)(name, target))
TWO(linkat(int from, const char *name, int to, const char *target, int flags), from, name, to, target, "link",
    REAL(linkat)(from, name, to, target, flags))
