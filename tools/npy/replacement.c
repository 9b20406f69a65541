/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replacing files together; see replacement.h for the contract.
 *
 * A replacement goes through these states. A kill can leave any of them; the next run recovers:
 *
 *     .tmp                         being written: removed by the next run
 *     .tmp, .see                   not yet committed: removed by the next run
 *     .tmp, .see, .plan            committed: renamed by the next run
 *     .see, .plan, perhaps .old    renamed: removed by the next run, the plan last
 */
#define _XOPEN_SOURCE 700 /* realpath, fchmod */
#define _DEFAULT_SOURCE   /* flock */
#define _FILE_OFFSET_BITS 64

#include "tools/npy/replacement.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/memory.h"

/* -------------------------------------------------------------------------------------------------
 * Names
 * ---------------------------------------------------------------------------------------------- */

#define PREFIX ".fattn-"
enum { NAME = sizeof PREFIX "18446744073709551615-4294967295.plan" };

/* The names that a plan holds for each replacement, in this order. */
enum { TEMPORARY, ASIDE, TARGET, NOTE, NAMES };

/* Length of the folder part of a resolved path, including the last slash. */
static size_t folder_size(const char *path) { return (size_t)(strrchr(path, '/') + 1 - path); }

static bool same_folder(const char *a, const char *b)
{
    return folder_size(a) == folder_size(b) && memcmp(a, b, folder_size(a)) == 0;
}

/* rename() replaces anything, as root even a device, and asks only for the folder's permission.
 * Only regular files may be replaced, and only those that this user could write to. */
static int check_replaceable(const char *target, const complaint *to)
{
    struct stat status;
    if (lstat(target, &status) != 0) {
        return errno == ENOENT ? 0 : complaint_write(to, "cannot be written: %s", strerror(errno));
    }
    if (!S_ISREG(status.st_mode)) {
        return complaint_write(to, "exists and is not a regular file");
    }
    const int file = open(target, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) {
        return complaint_write(to, "cannot be written: %s", strerror(errno));
    }
    close(file);
    return 0;
}

/* The path without links, "." and "..", even if the file does not exist: equal for equal files. */
static int resolve(const complaint *to, char target[PATH_MAX])
{
    struct stat status;
    char directory[PATH_MAX];
    if (strlen(to->path) >= PATH_MAX) {
        return complaint_write(to, "cannot be written: %s", strerror(ENAMETOOLONG));
    }
    if (realpath(to->path, target)) {
        return check_replaceable(target, to);
    }
    if (errno != ENOENT) {
        return complaint_write(to, "cannot be written: %s", strerror(errno));
    }
    if (lstat(to->path, &status) == 0) {
        /* /dev/stdout may lead to a pipe, or to a deleted file, which have no path. */
        return complaint_write(to, stat(to->path, &status) == 0
                                       ? "is not a regular file with a name"
                                       : "is a link to a file that does not exist");
    }

    const char *const slash = strrchr(to->path, '/'), *const base = slash ? slash + 1 : to->path;
    const size_t size = (size_t)(base - to->path);
    if (*base == '\0') {
        return complaint_write(to, "cannot be written: it names no file");
    }
    memcpy(directory, size ? to->path : ".", size ? size : 1);
    directory[size ? size : 1] = '\0';
    if (!realpath(directory, target)) {
        return complaint_write(to, "its directory cannot be used: %s", strerror(errno));
    }
    const size_t used = strcmp(target, "/") ? strlen(target) : 0;
    if (used + 1 + strlen(base) >= PATH_MAX) {
        return complaint_write(to, "cannot be written: %s", strerror(ENAMETOOLONG));
    }
    target[used] = '/';
    memcpy(target + used + 1, base, strlen(base) + 1);
    return 0;
}

/* -------------------------------------------------------------------------------------------------
 * Files that are locked as long as they are open
 * ---------------------------------------------------------------------------------------------- */

/* Whether we hold the lock and the file still has a name. On file systems without locks (ENOLCK,
 * EOPNOTSUPP) the result is `without`: a writer proceeds, recovery leaves the file alone. */
static bool locked(int file, bool without)
{
    struct stat status;
    const bool held = flock(file, LOCK_EX | LOCK_NB) == 0 || (without && errno != EWOULDBLOCK);
    return held && fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink > 0;
}

/* Creates a file; -1 with errno on failure. Recovery by another process may take the file for an
 * abandoned one before it is locked; then this fails with EEXIST. */
static int create_locked(const char *path, mode_t mode)
{
    const int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (file >= 0 && !locked(file, true)) {
        close(file);
        errno = EEXIST;
        return -1;
    }
    return file;
}

/* Opens a file that a dead process of this user abandoned, -1 if it is not one. Files of other
 * users are left alone: in a folder that anyone can write to, their plan could name any file. */
static int open_left(const char *path)
{
    struct stat status;
    const int file = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file >= 0 &&
        (!locked(file, false) || fstat(file, &status) != 0 || status.st_uid != geteuid())) {
        close(file);
        return -1;
    }
    return file;
}

/* Syncs a file or a folder, if its file system supports that. */
static int sync_file(int file)
{
    return fsync(file) == 0 || errno == EINVAL || errno == ENOTSUP || errno == EROFS ? 0 : -1;
}

static void sync_folder(const char *path)
{
    char folder[PATH_MAX];
    const size_t size = folder_size(path);
    memcpy(folder, path, size);
    folder[size] = '\0';
    const int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file >= 0) {
        sync_file(file);
        close(file);
    }
}

static bool write_text(int file, const char *text, size_t size)
{
    while (size > 0) {
        const ssize_t put = write(file, text, size);
        if (put < 0 && errno != EINTR) {
            return false;
        }
        text += put > 0 ? put : 0;
        size -= put > 0 ? (size_t)put : 0;
    }
    return true;
}

/* -------------------------------------------------------------------------------------------------
 * What was left
 * ---------------------------------------------------------------------------------------------- */

static bool later(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec != b->tv_sec ? a->tv_sec > b->tv_sec : a->tv_nsec > b->tv_nsec;
}

/* Completes one replacement of a plan committed at `decided`. A target modified since then is newer
 * than the plan and stays. */
static bool finish_one(const char *const name[NAMES], const struct timespec *decided)
{
    struct stat temporary, target;
    const bool waits = lstat(name[TEMPORARY], &temporary) == 0;
    const bool exists = lstat(name[TARGET], &target) == 0;
    if (waits && exists && (later(&target.st_mtim, decided) || !S_ISREG(target.st_mode))) {
        unlink(name[TEMPORARY]);
    } else if (waits && rename(name[TEMPORARY], name[TARGET]) != 0) {
        return false;
    }
    if (waits || exists) {
        unlink(name[ASIDE]);
    }
    sync_folder(name[TARGET]);
    return true;
}

/* Splits a plan into its zero-terminated names and completes each replacement. */
static bool finish_all(const char *path, const char *text, size_t size,
                       const struct timespec *decided)
{
    bool finished = true;
    const char *const end = text + size;
    for (int pass = 0; pass < 2; pass++) {
        for (const char *at = text; finished && at < end;) {
            const char *name[NAMES];
            for (int i = 0; i < NAMES; i++) {
                const size_t length = strnlen(at, (size_t)(end - at));
                if (length == 0 || at + length == end || *at != '/') {
                    return true; /* not a valid plan: the caller removes it */
                }
                name[i] = at;
                at += length + 1;
            }
            if (pass == 0) {
                finished = finish_one(name, decided);
            } else if (strcmp(name[NOTE], path) != 0) {
                unlink(name[NOTE]);
            }
        }
    }
    return finished;
}

/* Completes a plan. False: another process is doing so, or it is not possible. */
static bool finish_plan(const char *path)
{
    struct stat status;
    const int file = open_left(path);
    if (file < 0) {
        return access(path, F_OK) != 0;
    }
    bool finished = false;
    char *text = NULL;
    if (fstat(file, &status) == 0 && (text = fattn_memory_alloc((size_t)status.st_size + 1))) {
        const ssize_t got = read(file, text, (size_t)status.st_size);
        finished = got == (ssize_t)status.st_size &&
                   finish_all(path, text, (size_t)got, &status.st_mtim) && unlink(path) == 0;
    }
    fattn_memory_free(text);
    close(file);
    return finished;
}

/* Completes the plan in another folder that a .see file names. */
static bool follow(const char *path)
{
    char plan[PATH_MAX];
    const int file = open_left(path);
    if (file < 0) {
        return access(path, F_OK) != 0;
    }
    const ssize_t got = read(file, plan, sizeof plan - 1);
    plan[got > 0 ? got : 0] = '\0';
    const bool finished = *plan != '/' || finish_plan(plan);
    if (finished) {
        unlink(path);
    }
    close(file);
    return finished;
}

static bool remove_left(const char *path)
{
    const int file = open_left(path);
    if (file >= 0) {
        unlink(path);
        close(file);
    }
    return true;
}

static bool ends_in(const char *name, const char *ending)
{
    const size_t length = strlen(name), tail = strlen(ending);
    return length > tail && strcmp(name + length - tail, ending) == 0;
}

/* Temporary files come last, and only if no unfinished plan still needs them. */
static void recover_folder(const char *folder)
{
    static const struct {
        const char *ending;
        bool (*mend)(const char *path);
    } passes[] = {{".plan", finish_plan}, {".see", follow}, {".tmp", remove_left}};
    bool mended = true, any = true;
    for (size_t pass = 0; any && mended && pass < sizeof passes / sizeof passes[0]; pass++) {
        DIR *const dir = opendir(folder);
        any = false;
        for (const struct dirent *entry; dir && (entry = readdir(dir));) {
            if (strncmp(entry->d_name, PREFIX, sizeof PREFIX - 1) != 0) {
                continue;
            }
            any = true;
            char path[PATH_MAX];
            const char *const slash = folder[strlen(folder) - 1] == '/' ? "" : "/";
            if (ends_in(entry->d_name, passes[pass].ending) &&
                snprintf(path, sizeof path, "%s%s%s", folder, slash, entry->d_name) < PATH_MAX) {
                mended = passes[pass].mend(path) && mended;
            }
        }
        if (dir) {
            closedir(dir);
        }
    }
}

void replacement_recover(const char *path)
{
    char named[PATH_MAX], folder[PATH_MAX];
    const char *const slash = strrchr(path, '/');
    const size_t size = slash ? (size_t)(slash + 1 - path) : 0;
    if (size < sizeof named) {
        memcpy(named, size ? path : ".", size ? size : 1);
        named[size ? size : 1] = '\0';
        if (realpath(named, folder)) {
            recover_folder(folder);
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Writing
 * ---------------------------------------------------------------------------------------------- */

/* Allocates the names. The temporary ones do not include the target's name, which may already have
 * the greatest length that the file system allows. */
static int take_names(replacement *one, const char *target, const complaint *to)
{
    const size_t folder = folder_size(target), target_size = strlen(target) + 1;
    const size_t other = folder + NAME;
    char *const memory = fattn_memory_alloc(target_size + 3 * other);
    if (!memory) {
        return complaint_no_memory(to, "its name");
    }
    *one = (replacement){.target = memory,
                         .temporary = memory + target_size,
                         .aside = memory + target_size + other,
                         .note = memory + target_size + 2 * other,
                         .file = -1,
                         .note_file = -1};
    memcpy(one->target, target, target_size);
    memcpy(one->temporary, target, folder);
    memcpy(one->aside, target, folder);
    memcpy(one->note, target, folder);
    return 0;
}

/* Creates the temporary file under an unused name, with the mode and owner of the file that it will
 * replace. */
static int open_temporary(replacement *one, const complaint *to)
{
    static unsigned serial;
    const unsigned long long process = (unsigned long long)getpid();
    const size_t folder = folder_size(one->target);
    struct stat old, own;
    const bool replaces = stat(one->target, &old) == 0;
    errno = EEXIST;
    for (int attempt = 0; one->file < 0 && errno == EEXIST && attempt < 1000; attempt++, serial++) {
        snprintf(one->temporary + folder, NAME, PREFIX "%llu-%u.tmp", process, serial);
        snprintf(one->aside + folder, NAME, PREFIX "%llu-%u.old", process, serial);
        one->file = create_locked(one->temporary, replaces ? 0600 : 0666);
    }
    if (one->file < 0) {
        const int error = errno;
        *one->temporary = '\0';
        return complaint_write(to, "cannot be written: %s", strerror(error));
    }
    if (replaces) {
        /* If the owner or group cannot be set, the file keeps ours; the mode matters more. */
        const bool same =
            fstat(one->file, &own) == 0 && own.st_uid == old.st_uid && own.st_gid == old.st_gid;
        const int given = same ? 0 : fchown(one->file, old.st_uid, old.st_gid);
        const mode_t mode = old.st_mode & (given == 0 ? 07777 : 0777);
        if (fchmod(one->file, mode) != 0) {
            return complaint_write(to, "its mode cannot be kept: %s", strerror(errno));
        }
    }
    return 0;
}

static void close_files(replacement *one)
{
    if (one->file >= 0) {
        close(one->file);
    }
    if (one->note_file >= 0) {
        close(one->note_file);
    }
    one->file = one->note_file = -1;
}

static void drop(replacement *one)
{
    if (!one->target) {
        return;
    }
    if (*one->temporary) {
        unlink(one->temporary);
    }
    close_files(one);
    fattn_memory_free(one->target);
    memset(one, 0, sizeof *one);
}

int replacement_check(const complaint *to)
{
    char target[PATH_MAX];
    if (resolve(to, target) != 0) {
        return -1;
    }
    target[folder_size(target)] = '\0';
    return faccessat(AT_FDCWD, target, W_OK | X_OK, AT_EACCESS) == 0
               ? 0
               : complaint_write(to, "its directory cannot be used: %s", strerror(errno));
}

int replacement_open(replacement *one, const complaint *to)
{
    char target[PATH_MAX];
    replacement_recover(to->path);
    int failed = resolve(to, target);
    failed = failed ? failed : take_names(one, target, to);
    if (failed) {
        return failed;
    }
    if (open_temporary(one, to) != 0) {
        drop(one);
        return -1;
    }
    return 0;
}

void replacement_abandon(replacement *all, int count)
{
    for (int i = 0; i < count; i++) {
        drop(&all[i]);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Plans
 * ---------------------------------------------------------------------------------------------- */

/* Without hard links, the old file has only its other name for a moment. */
static bool set_aside(const replacement *one)
{
    if (link(one->target, one->aside) == 0) {
        return true;
    }
    const bool without = errno == EPERM || errno == ENOTSUP || errno == ENOSYS || errno == EMLINK;
    return without && rename(one->target, one->aside) == 0;
}

/* Renames one file into place; an empty temporary name afterwards marks it as done. The old file is
 * kept under another name for rollback, except for the last one, whose rename completes all. */
static int replace(replacement *one, bool last, const complaint *to)
{
    if (check_replaceable(one->target, to) != 0) {
        return -1;
    }
    const bool kept = !last && set_aside(one);
    if (!last && !kept && errno != ENOENT) {
        return complaint_write(to, "cannot be replaced: %s", strerror(errno));
    }
    if (!kept) {
        *one->aside = '\0';
    }
    if (rename(one->temporary, one->target) != 0) {
        const int error = errno;
        if (*one->aside) {
            rename(one->aside, one->target);
            unlink(one->aside); /* rename does nothing if both names link to one file */
        }
        return complaint_write(to, "cannot be written: %s", strerror(error));
    }
    *one->temporary = '\0';
    return 0;
}

/* Undoes replace. */
static void restore(const replacement *one)
{
    if (*one->aside) {
        rename(one->aside, one->target);
    } else {
        unlink(one->target);
    }
}

static int check_distinct(const replacement *all, int count, char *why, size_t why_size)
{
    for (int a = 0; a < count; a++) {
        for (int b = a + 1; b < count; b++) {
            if (strcmp(all[a].target, all[b].target) == 0) {
                const complaint to = {all[a].target, why, why_size};
                return complaint_write(&to, "two outputs cannot be the same file");
            }
        }
    }
    return 0;
}

/* Whether this replacement holds the note of its folder: the first one of each folder does. */
static bool has_note(const replacement *all, int n)
{
    for (int i = 0; i < n; i++) {
        if (same_folder(all[i].target, all[n].target)) {
            return false;
        }
    }
    return true;
}

/* The temporary name with another ending. */
static void name_note(replacement *one, const char *ending)
{
    const size_t folder = folder_size(one->target);
    const size_t length = strcspn(one->temporary + folder + 1, ".") + 1;
    snprintf(one->note + folder, NAME, "%.*s%s", (int)length, one->temporary + folder, ending);
}

static bool write_plan(replacement *all, int count)
{
    bool fine = true;
    for (int i = 0; fine && i < count; i++) {
        const replacement *const one = &all[i];
        const char *const names[NAMES] = {one->temporary, one->aside, one->target, one->note};
        for (int n = 0; fine && n < NAMES; n++) {
            fine = write_text(all->note_file, names[n], strlen(names[n]) + 1);
        }
    }
    return fine && sync_file(all->note_file) == 0;
}

/* Writes every folder's note, then the plan under a temporary name, then renames the plan: from
 * here on the next run would complete the replacement. */
static int decide(replacement *all, int count, const complaint *to)
{
    for (int i = count - 1; i >= 0; i--) {
        name_note(&all[i], i ? ".see" : ".plan");
    }
    const char *const plan = all[0].note;
    for (int i = 1; i < count; i++) {
        if (!has_note(all, i)) {
            continue;
        }
        all[i].note_file = create_locked(all[i].note, 0600);
        if (all[i].note_file < 0 || !write_text(all[i].note_file, plan, strlen(plan)) ||
            sync_file(all[i].note_file) != 0) {
            return complaint_write(to, "cannot be written: %s", strerror(errno));
        }
        sync_folder(all[i].note);
    }
    char draft[PATH_MAX + NAME];
    snprintf(draft, sizeof draft, "%.*s-%s", (int)(strlen(plan) - strlen(".plan")), plan,
             "plan.tmp");
    all[0].note_file = create_locked(draft, 0600);
    if (all[0].note_file < 0 || !write_plan(all, count) || rename(draft, plan) != 0) {
        const int error = errno;
        unlink(draft);
        return complaint_write(to, "cannot be written: %s", strerror(error));
    }
    sync_folder(plan);
    return 0;
}

/* Removes the plan last: while it exists, the next run would complete the replacement. */
static void forget(replacement *all, int count)
{
    for (int i = count - 1; i >= 0; i--) {
        if (all[i].note_file >= 0) {
            unlink(all[i].note);
        }
    }
}

static int send_to_disk(const replacement *one, const complaint *to)
{
    return sync_file(one->file) == 0
               ? 0
               : complaint_write(to, "cannot be written: %s", strerror(errno));
}

int replacement_commit(replacement *all, int count, char *why, size_t why_size)
{
    int done = 0, failed = check_distinct(all, count, why, why_size);
    for (int i = 0; !failed && i < count; i++) {
        const complaint to = {all[i].target, why, why_size};
        failed = send_to_disk(&all[i], &to);
    }
    if (!failed && count > 1) {
        const complaint to = {all[0].target, why, why_size};
        failed = decide(all, count, &to);
    }
    while (!failed && done < count) {
        const complaint to = {all[done].target, why, why_size};
        failed = replace(&all[done], done == count - 1, &to);
        done += !failed;
    }
    for (int i = done - 1; i >= 0; i--) {
        if (failed) {
            restore(&all[i]);
        } else if (*all[i].aside) {
            unlink(all[i].aside);
        }
    }
    for (int i = 0; i < done; i++) {
        if (has_note(all, i)) {
            sync_folder(all[i].target);
        }
    }
    forget(all, count);
    replacement_abandon(all, count);
    return failed;
}
