/* A file system in user space that shows one folder, and fails as it is told.
 *
 *     gcc -o faulty faulty.c $(pkg-config --cflags --libs fuse3)
 *     ./faulty FOLDER CONTROL -f MOUNT
 *
 * Every call first looks into CONTROL for files with these names:
 *
 *     hang     no call returns while it is there
 *     EIO      every call fails
 *     ENOSPC   calls that write fail, so do these:
 *     EROFS
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdio.h>
#include <unistd.h>

static int folder, control;

static int is_told(const char *name) { return faccessat(control, name, F_OK, 0) == 0; }

static int trouble(int writes)
{
    while (is_told("hang"))
        usleep(5000);
    if (is_told("EIO"))
        return -EIO;
    if (writes && is_told("ENOSPC"))
        return -ENOSPC;
    return writes && is_told("EROFS") ? -EROFS : 0;
}

#define UNLESS_TROUBLE(writes, call)           \
    do {                                       \
        int failed = trouble(writes);          \
        if (failed)                            \
            return failed;                     \
        return (call) < 0 ? -errno : 0;        \
    } while (0)

/* "/" and "/a/b" below the folder. */
static const char *below(const char *path) { return path[1] ? path + 1 : "."; }

static int f_getattr(const char *path, struct stat *status, struct fuse_file_info *file)
{
    UNLESS_TROUBLE(0, file ? fstat(file->fh, status) : fstatat(folder, below(path), status, AT_SYMLINK_NOFOLLOW));
}

static int begin(const char *path, int flags, mode_t mode, struct fuse_file_info *file)
{
    int opened = openat(folder, below(path), flags & ~(O_DIRECT | O_APPEND), mode);
    file->fh = opened;
    return opened;
}

static int f_open(const char *path, struct fuse_file_info *file)
{
    UNLESS_TROUBLE(file->flags & O_TRUNC, begin(path, file->flags, 0, file));
}

static int f_create(const char *path, mode_t mode, struct fuse_file_info *file)
{
    UNLESS_TROUBLE(1, begin(path, file->flags | O_CREAT, mode, file));
}

static int f_release(const char *path, struct fuse_file_info *file) { return close(file->fh); }

static int f_read(const char *path, char *to, size_t size, off_t at, struct fuse_file_info *file)
{
    int failed = trouble(0);
    ssize_t count = failed ? 0 : pread(file->fh, to, size, at);
    return failed ? failed : count < 0 ? -errno : (int)count;
}

static int f_write(const char *path, const char *from, size_t size, off_t at, struct fuse_file_info *file)
{
    int failed = trouble(1);
    ssize_t count = failed ? 0 : pwrite(file->fh, from, size, at);
    return failed ? failed : count < 0 ? -errno : (int)count;
}

static int f_truncate(const char *path, off_t size, struct fuse_file_info *file)
{
    int opened = file ? (int)file->fh : openat(folder, below(path), O_WRONLY);
    int failed = trouble(1);
    if (!failed && ftruncate(opened, size) < 0)
        failed = -errno;
    if (!file)
        close(opened);
    return failed;
}

static int f_fallocate(const char *path, int mode, off_t at, off_t size, struct fuse_file_info *file)
{
    UNLESS_TROUBLE(1, fallocate(file->fh, mode, at, size));
}

static int f_fsync(const char *path, int only_data, struct fuse_file_info *file) { UNLESS_TROUBLE(1, fsync(file->fh)); }

static int f_fsyncdir(const char *path, int only_data, struct fuse_file_info *file) { UNLESS_TROUBLE(1, 0); }

static int f_mkdir(const char *path, mode_t mode) { UNLESS_TROUBLE(1, mkdirat(folder, below(path), mode)); }

static int f_unlink(const char *path) { UNLESS_TROUBLE(1, unlinkat(folder, below(path), 0)); }

static int f_rmdir(const char *path) { UNLESS_TROUBLE(1, unlinkat(folder, below(path), AT_REMOVEDIR)); }

static int f_rename(const char *from, const char *to, unsigned flags)
{
    UNLESS_TROUBLE(1, renameat(folder, below(from), folder, below(to)));
}

static int f_chmod(const char *path, mode_t mode, struct fuse_file_info *file)
{
    UNLESS_TROUBLE(1, fchmodat(folder, below(path), mode, 0));
}

static int f_statfs(const char *path, struct statvfs *status) { UNLESS_TROUBLE(0, fstatvfs(folder, status)); }

static int f_readdir(const char *path, void *to, fuse_fill_dir_t add, off_t at, struct fuse_file_info *file,
                     enum fuse_readdir_flags flags)
{
    int failed = trouble(0);
    if (failed)
        return failed;
    int opened = openat(folder, below(path), O_RDONLY | O_DIRECTORY);
    DIR *entries = opened < 0 ? NULL : fdopendir(opened);
    if (!entries)
        return -errno;
    for (struct dirent *each = readdir(entries); each; each = readdir(entries))
        add(to, each->d_name, NULL, 0, 0);
    closedir(entries);
    return 0;
}

static const struct fuse_operations operations = {
    .getattr = f_getattr, .open = f_open, .create = f_create, .release = f_release, .read = f_read, .write = f_write,
    .truncate = f_truncate, .fallocate = f_fallocate, .fsync = f_fsync, .fsyncdir = f_fsyncdir, .mkdir = f_mkdir,
    .unlink = f_unlink, .rmdir = f_rmdir, .rename = f_rename, .chmod = f_chmod, .statfs = f_statfs,
    .readdir = f_readdir,
};

int main(int count, char **words)
{
    if (count < 4) {
        fprintf(stderr, "usage: %s FOLDER CONTROL [option of FUSE...] MOUNT\n", words[0]);
        return 2;
    }
    folder = open(words[1], O_PATH | O_DIRECTORY);
    control = open(words[2], O_PATH | O_DIRECTORY);
    if (folder < 0 || control < 0) {
        perror("faulty");
        return 2;
    }
    words[2] = words[0];
    return fuse_main(count - 2, words + 2, &operations, NULL);
}
