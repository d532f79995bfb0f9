/* Show a folder as a shared file system shows it: each operation takes a time, and one server serves all nodes.

       shared SOURCE MOUNTPOINT STATE SECONDS

   Each node has a mount of its own, by a process of its own, and with it caches of its own, as for NFS: attributes and
   names are kept for some seconds, data until a file has changed. STATE is a file that all of them map: its first
   three numbers (of 64 bits) are the nanoseconds of an operation, the operations per second and the bytes per second
   that the server does for all (0 for any number), the next two belong to the server, and from the sixth on stand how
   often each kind of operation came, as in the enumeration below. SOURCE may be what MOUNTPOINT hides. */
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum kind { GETATTR, OPEN, READ, BYTES, READDIR, READLINK, OTHER, KINDS };
enum { THREADS = 64, LARGEST = 1 << 20 };

static struct state {
    _Atomic int64_t latency_ns, operations_per_s, bytes_per_s, free_at_ns, line_free_at_ns, counts[KINDS];
} *state;
static int root;
static double kept_s;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Take the next part of the server's time that is free, and return when it ends. */
static int64_t booked(_Atomic int64_t *free_at, int64_t takes) {
    int64_t begin, before = atomic_load(free_at);
    do begin = before > now() ? before : now();
    while (!atomic_compare_exchange_weak(free_at, &before, begin + takes));
    return begin + takes;
}

static void serve(enum kind kind, int64_t bytes) {
    int64_t rate = state->operations_per_s, line = state->bytes_per_s, until = now() + state->latency_ns, at;
    atomic_fetch_add(&state->counts[kind], 1);
    if (bytes) atomic_fetch_add(&state->counts[BYTES], bytes);
    if (rate && (at = booked(&state->free_at_ns, 1000000000 / rate) + state->latency_ns) > until) until = at;
    if (line && bytes && (at = booked(&state->line_free_at_ns, bytes * 1000000000.0 / line) + state->latency_ns) > until)
        until = at;
    struct timespec t = {until / 1000000000, until % 1000000000};
    while (until > now() && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {}
}

static const char *in(const char *path) { return path[1] ? path + 1 : "."; }
static int outcome(int result) { return result < 0 ? -errno : 0; }

static int fs_getattr(const char *path, struct stat *found, struct fuse_file_info *file) {
    serve(GETATTR, 0);
    return outcome(file ? fstat(file->fh, found) : fstatat(root, in(path), found, AT_SYMLINK_NOFOLLOW));
}

static int fs_readlink(const char *path, char *text, size_t size) {
    serve(READLINK, 0);
    ssize_t length = readlinkat(root, in(path), text, size - 1);
    if (length < 0) return -errno;
    text[length] = 0;
    return 0;
}

static int fs_open(const char *path, struct fuse_file_info *file) {
    serve(OPEN, 0);
    int opened = openat(root, in(path), file->flags & ~(O_NOFOLLOW | O_DIRECT));  // the server's disk is its own affair
    file->fh = opened;
    return outcome(opened);
}

static int fs_create(const char *path, mode_t mode, struct fuse_file_info *file) {
    serve(OTHER, 0);
    int opened = openat(root, in(path), file->flags | O_CREAT, mode);
    file->fh = opened;
    return outcome(opened);
}

static int fs_read(const char *path, char *data, size_t size, off_t at, struct fuse_file_info *file) {
    ssize_t length = pread(file->fh, data, size, at);
    int problem = errno;
    serve(READ, length > 0 ? length : 0);
    return length < 0 ? -problem : length;
}

static int fs_write(const char *path, const char *data, size_t size, off_t at, struct fuse_file_info *file) {
    serve(OTHER, size);
    ssize_t length = pwrite(file->fh, data, size, at);
    return length < 0 ? -errno : length;
}

static int fs_release(const char *path, struct fuse_file_info *file) { return outcome(close(file->fh)); }

static int fs_opendir(const char *path, struct fuse_file_info *file) {
    int opened = openat(root, in(path), O_RDONLY | O_DIRECTORY);
    if (opened < 0) return -errno;
    file->fh = (uintptr_t)fdopendir(opened);
    return 0;
}

static int fs_readdir(const char *path, void *buffer, fuse_fill_dir_t fill, off_t from, struct fuse_file_info *file,
                      enum fuse_readdir_flags flags) {
    DIR *folder = (DIR *)(uintptr_t)file->fh;
    serve(READDIR, 0);
    rewinddir(folder);
    for (struct dirent *one; (one = readdir(folder));) {
        struct stat about = {.st_ino = one->d_ino, .st_mode = DTTOIF(one->d_type)};
        if (fill(buffer, one->d_name, &about, 0, 0)) break;
    }
    return 0;
}

static int fs_releasedir(const char *path, struct fuse_file_info *file) {
    return outcome(closedir((DIR *)(uintptr_t)file->fh));
}

static int fs_statfs(const char *path, struct statvfs *found) {
    serve(OTHER, 0);
    return outcome(fstatvfs(root, found));
}

static int fs_mkdir(const char *path, mode_t mode) { serve(OTHER, 0); return outcome(mkdirat(root, in(path), mode)); }
static int fs_unlink(const char *path) { serve(OTHER, 0); return outcome(unlinkat(root, in(path), 0)); }
static int fs_rmdir(const char *path) { serve(OTHER, 0); return outcome(unlinkat(root, in(path), AT_REMOVEDIR)); }

static int fs_rename(const char *from, const char *to, unsigned int flags) {
    serve(OTHER, 0);
    return outcome(renameat2(root, in(from), root, in(to), flags));
}

static int fs_chmod(const char *path, mode_t mode, struct fuse_file_info *file) {
    serve(OTHER, 0);
    return outcome(fchmodat(root, in(path), mode, 0));
}

static int fs_truncate(const char *path, off_t size, struct fuse_file_info *file) {
    serve(OTHER, 0);
    int opened = file ? (int)file->fh : openat(root, in(path), O_WRONLY), result = ftruncate(opened, size);
    int problem = errno;
    if (!file) close(opened);
    return result < 0 ? -problem : 0;
}

static int fs_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *file) {
    serve(OTHER, 0);
    return outcome(utimensat(root, in(path), times, AT_SYMLINK_NOFOLLOW));
}

static void *fs_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    config->use_ino = config->auto_cache = 1;
    config->attr_timeout = config->entry_timeout = kept_s;
    config->nullpath_ok = 0;
    connection->want |= FUSE_CAP_PARALLEL_DIROPS;  // several names of a folder are looked for at a time, as in NFS
    connection->max_background = connection->congestion_threshold = THREADS;
    connection->max_write = connection->max_read = LARGEST;
    return NULL;
}

static const struct fuse_operations operations = {
    .getattr = fs_getattr, .readlink = fs_readlink, .open = fs_open, .create = fs_create, .read = fs_read,
    .write = fs_write, .release = fs_release, .opendir = fs_opendir, .readdir = fs_readdir,
    .releasedir = fs_releasedir, .statfs = fs_statfs, .mkdir = fs_mkdir, .unlink = fs_unlink, .rmdir = fs_rmdir,
    .rename = fs_rename, .chmod = fs_chmod, .truncate = fs_truncate, .utimens = fs_utimens, .init = fs_init,
};

int main(int count, char **words) {
    if (count != 5) return 2;
    kept_s = atof(words[4]);
    prctl(PR_SET_PDEATHSIG, 0);
    int opened = open(words[3], O_RDWR);
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    root = open(words[1], O_PATH | O_DIRECTORY);
    if (opened < 0 || state == MAP_FAILED || root < 0) { perror(words[1]); return 1; }
    char limit[64];
    snprintf(limit, sizeof limit, "fsname=server,subtype=shared,allow_other,max_read=%d", LARGEST);
    char *options[] = {words[0], "-o", limit, NULL};
    struct fuse_args arguments = FUSE_ARGS_INIT(3, options);
    struct fuse *fuse = fuse_new(&arguments, &operations, sizeof operations, NULL);
    struct fuse_loop_config *loop = fuse_loop_cfg_create();
    if (!fuse || !loop || fuse_mount(fuse, words[2])) return 1;
    fuse_set_signal_handlers(fuse_get_session(fuse));
    fuse_loop_cfg_set_max_threads(loop, THREADS);
    fuse_loop_cfg_set_idle_threads(loop, THREADS);
    int result = fuse_loop_mt(fuse, loop);
    fuse_unmount(fuse);
    return result ? 1 : 0;
}
