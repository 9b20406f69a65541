/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The .npy reader and writer, as a TAP program:
 *
 *     check_npy CORPUS              runs the tests; CORPUS is tests/npy_corpus
 *     check_npy seeds CORPUS        writes npy_specimens.h as files: the fuzzer's seeds
 *     check_npy cat [--bf16] IN OUT reads IN and writes OUT; for the comparison with NumPy
 */
#define _XOPEN_SOURCE 700
#define _DEFAULT_SOURCE /* usleep */
#undef _FORTIFY_SOURCE  /* otherwise read() is inline and cannot be replaced here */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/memory.h"
#include "core/status.h"
#include "tests/folder.h"
#include "tests/npy_specimens.h"
#include "tests/tap.h"
#include "tools/npy/npy.h"

/* Ends the program because of a problem of the machine, not of the reader. */
static void need(int works, const char *what)
{
    if (works) return;
    printf("Bail out! %s: %s\n", what, strerror(errno));
    exit(1);
}

/* -------------------------------------------------------------------------------------------------
 * Files and the folder that they live in
 * ---------------------------------------------------------------------------------------------- */

static char folder[FOLDER_PATH];

/* A path in the folder; it lives as long as the program. */
static const char *in_folder(const char *name)
{
    static char paths[64][1024];
    static int used;
    char path[sizeof paths[0]];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    for (int i = 0; i < used; i++) {
        if (!strcmp(paths[i], path)) return paths[i];
    }
    need(used < 64, "more than 64 paths");
    return strcpy(paths[used++], path);
}

static void put_file(const char *path, const void *bytes, size_t size)
{
    /* A new file, because ext4 syncs a truncated and rewritten file when it is closed. */
    remove(path);
    FILE *const file = fopen(path, "wb");
    need(file && fwrite(bytes, 1, size, file) == size && fclose(file) == 0, path);
}

/* Bytes of the file, at most room of them into bytes; -1 without the file. */
static long get_file(const char *path, void *bytes, size_t room)
{
    FILE *const file = fopen(path, "rb");
    if (!file) return -1;
    const size_t size = fread(bytes, 1, room, file);
    fclose(file);
    return (long)size;
}

/* Counts the entries of a folder; removes them if clear is set. */
static int entries_in(const char *place, int clear)
{
    int count = 0;
    DIR *const dir = opendir(place);
    need(dir != NULL, place);
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        count++;
        if (clear && unlinkat(dirfd(dir), entry->d_name, 0)) {
            unlinkat(dirfd(dir), entry->d_name, AT_REMOVEDIR);
        }
    }
    closedir(dir);
    return count;
}

static int entries(int clear) { return entries_in(folder, clear); }

/* -------------------------------------------------------------------------------------------------
 * Specimens
 * ---------------------------------------------------------------------------------------------- */

/* A refusal is one printable line that begins with the path, leaks nothing and leaves *out
 * alone. */
static int refused(const char *path, npy_kind as, const char *reason)
{
    npy_array out, before;
    char why[2048];
    memset(&out, 0x5a, sizeof out);
    before = out;
    const int64_t alive = fattn_memory_alive();
    fattn_memory_fail_at(1);
    const int failed = npy_read(path, as, &out, why, sizeof why);
    const int took_memory = fattn_memory_fail_at(0);
    if (!failed) npy_free(&out);
    const int fine = failed && !took_memory && !memcmp(&out, &before, sizeof out) &&
                     !strncmp(why, path, strlen(path)) && strstr(why, reason) &&
                     !strpbrk(why, "\n\r\t") && fattn_memory_alive() == alive;
    if (!fine) printf("# %s\n", failed ? why : "was read");
    return fine;
}

static void test_specimens(const char *corpus)
{
    static unsigned char file[FILE_MAX], stored[FILE_MAX];
    for (int i = 0; i < SPECIMENS; i++) {
        const specimen *const s = &specimens[i];
        char path[1024], why[2048];
        const size_t size = specimen_make(s, file);
        specimen_path(s, corpus, path);
        tap_check(get_file(path, stored, sizeof stored) == (long)size &&
                      !memcmp(file, stored, size),
                  "%s is in the corpus", s->name);
        if (s->reason) {
            tap_check(refused(path, s->as, s->reason), "%s: %s", s->name, s->reason);
            continue;
        }
        npy_array array;
        const int failed = npy_read(path, s->as, &array, why, sizeof why);
        tap_check(!failed && array.count * (int64_t)array.item == s->data, "%s is read %s", s->name,
                  failed ? why : "");
        if (!failed) npy_free(&array);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Elements
 * ---------------------------------------------------------------------------------------------- */

static const struct {
    const char *code;
    npy_kind kind;
    size_t item;
    npy_kind as;
} dtypes[] = {
    {"f2", NPY_F16, 2, 0},         {"f4", NPY_F32, 4, 0},         {"f8", NPY_F64, 8, 0},
    {"b1", NPY_BOOL, 1, 0},        {"i1", NPY_I8, 1, 0},          {"i2", NPY_I16, 2, 0},
    {"i4", NPY_I32, 4, 0},         {"i8", NPY_I64, 8, 0},         {"u1", NPY_U8, 1, 0},
    {"u2", NPY_U16, 2, 0},         {"u4", NPY_U32, 4, 0},         {"u8", NPY_U64, 8, 0},
    {"u2", NPY_BF16, 2, NPY_BF16}, {"V2", NPY_BF16, 2, NPY_BF16}, {"f4", NPY_F32, 4, NPY_BF16},
    {"u1", NPY_U8, 1, NPY_BF16},   {"u1", NPY_E4M3, 1, NPY_E4M3}, {"V1", NPY_E4M3, 1, NPY_E4M3},
    {"u2", NPY_U16, 2, NPY_E4M3},
};

static const struct {
    int rank;
    int64_t shape[NPY_RANK_MAX];
    const char *text;
} shapes[] = {
    {0, {0}, "()"},
    {1, {5}, "(5,)"},
    {1, {0}, "(0,)"},
    {2, {3, 5}, "(3, 5)"},
    {2, {7, 0}, "(7, 0)"},
    {3, {4, 1, 3}, "(4, 1, 3)"},
    {4, {2, 3, 4, 5}, "(2, 3, 4, 5)"},
    {8, {2, 1, 3, 2, 1, 2, 2, 3}, "(2, 1, 3, 2, 1, 2, 2, 3)"},
    {2, {211, 101}, "(211, 101)"}, /* of f8 more than two of the reader's chunks */
};

enum { DTYPES = sizeof dtypes / sizeof *dtypes, SHAPES = sizeof shapes / sizeof *shapes };

/* The bit pattern of element i in C order; the bytes of an item all differ. */
static uint64_t pattern(int64_t i)
{
    return (uint64_t)i * UINT64_C(0x9e3779b97f4a7c15) + UINT64_C(0x0123456789abcdef);
}

static uint64_t element(const npy_array *array, int64_t i)
{
    const unsigned char *const at = (const unsigned char *)array->data + (size_t)i * array->item;
    uint8_t u1;
    uint16_t u2;
    uint32_t u4;
    uint64_t u8;
    switch (array->item) {
    case 1: return memcpy(&u1, at, 1), u1;
    case 2: return memcpy(&u2, at, 2), u2;
    case 4: return memcpy(&u4, at, 4), u4;
    default: return memcpy(&u8, at, 8), u8;
    }
}

static int holds_pattern(const npy_array *array)
{
    const uint64_t mask = UINT64_MAX >> (64 - 8 * array->item);
    for (int64_t i = 0; i < array->count; i++) {
        if (element(array, i) != (pattern(i) & mask)) return 0;
    }
    return 1;
}

/* Index in C order of the element stored at index `at` in Fortran order. */
static int64_t place_of_fortran(int shape, int64_t at)
{
    int64_t index[NPY_RANK_MAX], place = 0;
    for (int axis = 0; axis < shapes[shape].rank; axis++) {
        index[axis] = at % shapes[shape].shape[axis];
        at /= shapes[shape].shape[axis];
    }
    for (int axis = 0; axis < shapes[shape].rank; axis++) {
        place = place * shapes[shape].shape[axis] + index[axis];
    }
    return place;
}

static int64_t count_of(int shape)
{
    int64_t count = 1;
    for (int axis = 0; axis < shapes[shape].rank; axis++) count *= shapes[shape].shape[axis];
    return count;
}

/* Writes a file as the format defines it and reads its elements back. */
static int reads_pattern(int dtype, int shape, int version, int big, int fortran)
{
    static unsigned char file[1 << 18];
    const size_t item = dtypes[dtype].item;
    const int64_t count = count_of(shape);
    const size_t start = version < 2 ? 10 : 12;
    const int text =
        sprintf((char *)file + start, "{'descr': '%c%s', 'fortran_order': %s, 'shape': %s, }\n",
                item == 1 ? '|' : "<>"[big], dtypes[dtype].code, fortran ? "True" : "False",
                shapes[shape].text);
    memcpy(file, "\x93NUMPY", 6);
    file[6] = (unsigned char)version, file[7] = 0;
    for (size_t i = 8; i < start; i++) file[i] = (unsigned char)(text >> 8 * (i - 8));
    size_t size = start + (size_t)text;
    for (int64_t at = 0; at < count; at++) {
        const uint64_t bits = pattern(fortran ? place_of_fortran(shape, at) : at);
        for (size_t i = 0; i < item; i++) {
            file[size++] = (unsigned char)(bits >> 8 * (big ? item - 1 - i : i));
        }
    }
    const char *const path = in_folder("in.npy");
    put_file(path, file, size);

    npy_array array;
    char why[2048];
    if (npy_read(path, dtypes[dtype].as, &array, why, sizeof why)) {
        printf("# %s\n", why);
        return 0;
    }
    const int fine = array.kind == dtypes[dtype].kind && array.rank == shapes[shape].rank &&
                     array.item == item && array.count == count && !array.data == !count &&
                     !memcmp(array.shape, shapes[shape].shape, sizeof array.shape) &&
                     holds_pattern(&array);
    npy_free(&array);
    return fine && !array.data;
}

static void test_elements(void)
{
    for (int dtype = 0; dtype < DTYPES; dtype++) {
        for (int form = 0; form < 12; form++) {
            const int version = form / 4 + 1, big = form / 2 % 2, fortran = form % 2;
            int fine = 1;
            for (int shape = 0; shape < SHAPES; shape++) {
                if (reads_pattern(dtype, shape, version, big, fortran)) continue;
                printf("# shape %s\n", shapes[shape].text);
                fine = 0;
            }
            tap_check(fine, "%c%s%s, version %d, %s order", "<>"[big], dtypes[dtype].code,
                      dtypes[dtype].as ? " as a pattern" : "", version, fortran ? "Fortran" : "C");
        }
    }
    entries(1);
}

/* -------------------------------------------------------------------------------------------------
 * Damage: every cut, every extension, every changed byte of a header
 * ---------------------------------------------------------------------------------------------- */

static void test_damage(void)
{
    static unsigned char file[FILE_MAX];
    const specimen good = {"", NULL, SHAPE("(2, 3)"), .data = 24};
    const size_t size = specimen_make(&good, file), header = size - 24;
    const char *const path = in_folder("damaged.npy");
    npy_array array;
    char why[2048];

    int fine = 1;
    for (size_t cut = 0; cut < size; cut++) {
        put_file(path, file, cut);
        fine &= refused(path, 0, "");
    }
    tap_check(fine, "every file cut short is refused");

    fine = 1;
    for (size_t more = 1; more < 70; more++) {
        put_file(path, file, size + more);
        snprintf(why, sizeof why, ": trailing bytes after the data of shape (2, 3) of f32: %zu",
                 more);
        fine &= refused(path, 0, why);
    }
    tap_check(fine, "every file with bytes after its data is refused");

    int read = 0;
    fine = 1;
    for (size_t at = 0; at < header; at++) {
        const unsigned char was = file[at];
        for (int byte = 0; byte < 256; byte += was & 1 ? 1 : 3) {
            file[at] = (unsigned char)byte;
            put_file(path, file, size);
            if (npy_read(path, 0, &array, why, sizeof why)) {
                fine &= !strncmp(why, path, strlen(path)) && !strpbrk(why, "\n\r\t");
                continue;
            }
            /* What is still read still has 24 bytes of data. */
            fine &= array.count * (int64_t)array.item == 24;
            npy_free(&array);
            read++;
        }
        file[at] = was;
    }
    tap_check(fine && read > 0, "a header with one byte changed is read or refused (%d read)",
              read);

    const int announced = 65535;
    memcpy(file, "\x93NUMPY\1\0\xff\xff", 10);
    memset(file + 10, ' ', (size_t)announced);
    memcpy(file + 10, good.header, strlen(good.header));
    put_file(path, file, 10 + (size_t)announced + 24);
    tap_check(!npy_read(path, 0, &array, why, sizeof why), "a header of 65535 bytes is read");
    npy_free(&array);
    entries(1);
}

/* -------------------------------------------------------------------------------------------------
 * Things that are not files
 * ---------------------------------------------------------------------------------------------- */

static void test_paths(void)
{
    const char *const fifo = in_folder("fifo");
    need(mkfifo(fifo, 0600) == 0, fifo);
    alarm(20); /* kills a reader that waits for the other end of the FIFO */
    tap_check(refused(fifo, 0, "not a regular file"), "a FIFO is refused at once");
    alarm(0);
    tap_check(refused(folder, 0, "not a regular file"), "a directory is refused");
    tap_check(refused("/dev/zero", 0, "not a regular file"), "a device is refused");
    tap_check(refused(in_folder("absent.npy"), 0, "cannot be opened: No such file"),
              "an absent file is refused");
    tap_check(refused("", 0, "cannot be opened"), "an empty path is refused");

    char why[64];
    npy_array array;
    const char *const hostile = in_folder("two\nlines\x1b.npy");
    tap_check(npy_read(hostile, 0, &array, why, sizeof why) && !strpbrk(why, "\n\x1b"),
              "a path of two lines gives a reason of one");
    int fine = 1;
    for (size_t size = 0; size < sizeof why; size++) {
        memset(why, '#', sizeof why);
        fine &= npy_read(fifo, 0, &array, why, size) && (!size || memchr(why, '\0', size)) &&
                why[size] == '#';
    }
    tap_check(fine, "a reason is cut to its room");
    entries(1);
}

/* -------------------------------------------------------------------------------------------------
 * Writing
 * ---------------------------------------------------------------------------------------------- */

static void make_pattern(npy_array *array, npy_kind kind, int shape)
{
    char why[256];
    need(!npy_create("test", kind, shapes[shape].rank, shapes[shape].shape, array, why, sizeof why),
         why);
    for (int64_t i = 0; i < array->count; i++) {
        const uint64_t bits = pattern(i);
        const uint8_t u1 = (uint8_t)bits;
        const uint16_t u2 = (uint16_t)bits;
        const uint32_t u4 = (uint32_t)bits;
        const void *const from = array->item == 1   ? (const void *)&u1
                                 : array->item == 2 ? (const void *)&u2
                                 : array->item == 4 ? (const void *)&u4
                                                    : (const void *)&bits;
        memcpy((char *)array->data + (size_t)i * array->item, from, array->item);
    }
}

static void test_round_trips(void)
{
    for (npy_kind kind = 0; kind < NPY_KINDS; kind++) {
        int fine = 1;
        for (int shape = 0; shape < SHAPES; shape++) {
            npy_array array, back;
            char why[2048];
            unsigned char start[512];
            const char *const path = in_folder("out.npy");
            make_pattern(&array, kind, shape);
            int good = !npy_write(path, &array, why, sizeof why) &&
                       !npy_read(path, kind, &back, why, sizeof why);
            if (good) {
                const long got = get_file(path, start, sizeof start);
                const long data = 10 + start[8] + 256 * start[9];
                good = back.kind == kind && back.rank == array.rank && back.count == array.count &&
                       !memcmp(back.shape, array.shape, sizeof back.shape) &&
                       holds_pattern(&back) && got >= data && data % 64 == 0 &&
                       !memcmp(start, "\x93NUMPY\1\0", 8) && start[data - 1] == '\n' &&
                       entries(0) == 1;
                npy_free(&back);
            } else {
                printf("# %s\n", why);
            }
            npy_free(&array);
            fine &= good;
        }
        tap_check(fine, "%s: what is written is read again", npy_kind_name(kind));
    }
    entries(1);

    npy_array array;
    char why[256];
    const int64_t bad[2] = {3, -4}, big[2] = {INT64_C(1) << 40, INT64_C(1) << 40};
    tap_check(npy_create("o", NPY_F32, 2, bad, &array, why, sizeof why) &&
                  !strcmp(why, "o: axis 1 of the shape is negative: -4"),
              "no array of a negative size is made");
    tap_check(npy_create("o", NPY_F32, 2, big, &array, why, sizeof why) &&
                  strstr(why, "too many bytes"),
              "no array of 2^82 bytes is made");
}

/* Expects a write to fail and to leave as many entries as before. */
static int write_refused(const char *path, const char *reason)
{
    npy_array array;
    char why[8192];
    make_pattern(&array, NPY_F64, SHAPES - 1);
    const int before = entries(0);
    const int64_t alive = fattn_memory_alive();
    const int failed = npy_write(path, &array, why, sizeof why);
    const int fine = failed && strstr(why, reason) && !strncmp(why, path, strlen(path)) &&
                     entries(0) == before && fattn_memory_alive() == alive;
    if (!fine) printf("# %s\n", failed ? why : "was written");
    npy_free(&array);
    return fine;
}

static int has_old(const char *path)
{
    char text[8];
    return get_file(path, text, sizeof text) == 3 && !memcmp(text, "old", 3);
}

/* A pipe has a path in /proc or /dev/fd, which leads to no file that could be replaced. */
static void test_unnamed(void)
{
    int ends[2];
    char path[32];
    need(pipe(ends) == 0, "pipe");
    snprintf(path, sizeof path, "/dev/fd/%d", ends[1]);
    if (access(path, F_OK)) {
        tap_skip("a pipe is not replaced", "there is no /dev/fd");
    } else {
        tap_check(write_refused(path, "is not a regular file with a name"),
                  "a pipe is not replaced");
    }
    close(ends[0]);
    close(ends[1]);
}

/* A file that may not be written to is not replaced, although its folder may be; nor does
 * replacement_check() take its path. Root may write to all files, so a child becomes nobody. */
static void test_permissions(void)
{
    const char *const mine = in_folder("mine.npy"), *const inside = in_folder("closed/o.npy");
    put_file(mine, "old", 3);
    need(!chmod(mine, 0444) && !chmod(folder, 0777) && !mkdir(in_folder("closed"), 0555), mine);
    fflush(stdout);
    const pid_t child = fork();
    need(child >= 0, "fork");
    if (child == 0) {
        char why[2048] = "";
        const complaint to[] = {{mine, why, sizeof why}, {inside, why, sizeof why}};
        if (geteuid() == 0 && (setgid(65534) || setuid(65534))) _exit(3);
        const int early = replacement_check(&to[0]) && strstr(why, "mine.npy: cannot be written");
        const int place = replacement_check(&to[1]) && strstr(why, "Permission denied");
        _exit(!(early && place && write_refused(mine, "cannot be written: Permission denied")));
    }
    int status;
    need(waitpid(child, &status, 0) == child, "waitpid");
    if (WIFEXITED(status) && WEXITSTATUS(status) == 3) {
        tap_skip("a file that may not be written to", "root cannot become another user");
    } else {
        tap_check(status == 0 && has_old(mine),
                  "a file that may not be written to is not replaced");
    }
    need(!chmod(folder, 0700) && !remove(mine) && !rmdir(in_folder("closed")), "remove");
}

static void test_write_failures(void)
{
    static char long_path[5000], long_name[400];
    const char *const old = in_folder("old.npy"), *const fresh = in_folder("fresh.npy");
    put_file(old, "old", 3);

    struct rlimit before, tight;
    need(getrlimit(RLIMIT_FSIZE, &before) == 0, "getrlimit");
    signal(SIGXFSZ, SIG_IGN);
    const rlim_t limits[] = {0, 100, 100000}; /* within the header, the data, at a chunk's middle */
    for (int i = 0; i < 3; i++) {
        tight = (struct rlimit){limits[i], before.rlim_max};
        fflush(stdout); /* stdout may be a file, to which the limit must not apply */
        need(setrlimit(RLIMIT_FSIZE, &tight) == 0, "setrlimit");
        const int on_old = write_refused(old, "cannot be written: File too large");
        const int on_fresh = write_refused(fresh, "cannot be written: File too large");
        need(setrlimit(RLIMIT_FSIZE, &before) == 0, "setrlimit");
        tap_check(on_old && has_old(old) && on_fresh && access(fresh, F_OK),
                  "nothing appears where files are limited to %d bytes", (int)limits[i]);
    }

    need(mkdir(in_folder("directory"), 0700) == 0, "mkdir");
    tap_check(write_refused(in_folder("directory"), "exists and is not a regular file"),
              "a directory is not replaced");
    tap_check(write_refused("/dev/full", "exists and is not a regular file"),
              "a device is not replaced");
    test_unnamed();
    test_permissions();
    tap_check(
        write_refused(in_folder("absent/o.npy"), "its directory cannot be used: No such file"),
        "an absent directory is named");
    tap_check(write_refused(in_folder("old.npy/o.npy"), "Not a directory"),
              "a file is no directory");
    tap_check(write_refused(in_folder("absent/"), "it names no file"), "a path must name a file");
    tap_check(write_refused("", "it names no file"), "an empty path is refused");
    tap_check(!symlink("nowhere", in_folder("dangling")) &&
                  write_refused(in_folder("dangling"), "is a link to a file that does not exist"),
              "a link to nothing is refused");
    tap_check(!symlink("loop", in_folder("loop")) &&
                  write_refused(in_folder("loop"), strerror(ELOOP)),
              "a loop of links is refused");
    memset(long_name, 'n', 300);
    tap_check(write_refused(in_folder(long_name), strerror(ENAMETOOLONG)),
              "a name of 300 bytes is refused");
    memset(long_path, 'p', sizeof long_path - 1);
    tap_check(write_refused(long_path, strerror(ENAMETOOLONG)), "a path of 4999 bytes is refused");
    for (size_t i = 1; i < sizeof long_path - 1; i += 2) long_path[i] = '/';
    tap_check(write_refused(long_path, strerror(ENAMETOOLONG)), "a deep path is refused");
    tap_check(write_refused("/proc/o.npy", "cannot be written"),
              "a folder without place is refused");
    tap_check(has_old(old), "the old output has outlived all that");
    entries(1);
}

/* -------------------------------------------------------------------------------------------------
 * Faults of the file system: these definitions come before the C library's
 * ---------------------------------------------------------------------------------------------- */

typedef enum fault { INTERRUPTED, SHORT, BROKEN, ENDED } fault;

static fault fault_kind;
static int reads_until_fault, writes_until_fault; /* 1: the next call; 0: none */

ssize_t read(int file, void *bytes, size_t size)
{
    struct iovec part = {bytes, size};
    if (reads_until_fault && --reads_until_fault == 0) {
        if (fault_kind == ENDED) return 0;
        if (fault_kind == SHORT)
            part.iov_len = 1;
        else
            return errno = fault_kind == BROKEN ? EIO : EINTR, -1;
    }
    return readv(file, &part, 1);
}

ssize_t write(int file, const void *bytes, size_t size)
{
    struct iovec part = {(void *)bytes, size};
    if (writes_until_fault && --writes_until_fault == 0) {
        if (fault_kind == SHORT)
            part.iov_len = 1;
        else
            return errno = fault_kind == BROKEN ? ENOSPC : EINTR, -1;
    }
    return writev(file, &part, 1);
}

/* Calls that change names; the process is killed before one of them. */
static int changes_until_kill; /* 1: the next; 0: never */

static void change(void)
{
    if (changes_until_kill && --changes_until_kill == 0) kill(getpid(), SIGKILL);
}

int rename(const char *from, const char *to)
{
    change();
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}

int link(const char *from, const char *to)
{
    change();
    return linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}

int unlink(const char *path)
{
    change();
    return unlinkat(AT_FDCWD, path, 0);
}

int fsync(int file)
{
    change();
    return fdatasync(file);
}

/* Reads or writes a file while its n-th system call fails, n = 1.. until none does. */
static void check_fault(fault kind, const char *name, int reading, int fortran)
{
    const char *const path = in_folder("in.npy"), *const written = in_folder("out.npy");
    const int survives = kind == INTERRUPTED || kind == SHORT;
    const int64_t alive = fattn_memory_alive();
    int *const until = reading ? &reads_until_fault : &writes_until_fault;
    npy_array array;
    char why[2048];
    need(reads_pattern(2, SHAPES - 1, 1, 0, fortran), path);
    fault_kind = kind;
    int fine = 1, n = 1;
    for (int reached = 1; reached && n < 100; n++) {
        *until = reading ? n : 0;
        int failed = npy_read(path, 0, &array, why, sizeof why);
        if (!reading) {
            *until = n;
            failed = npy_write(written, &array, why, sizeof why);
        }
        reached = *until == 0;
        *until = 0;
        fine &= failed == (reached && !survives ? -1 : 0);
        fine &= failed ? strstr(why, reading ? "cannot be read: " : "cannot be written: ") ||
                             strstr(why, " of its ")
                       : holds_pattern(&array);
        if (!failed || !reading) npy_free(&array);
        fine &= entries(0) == 1 + (!reading && !failed);
        if (!reading && !failed) {
            fine &= !npy_read(written, 0, &array, why, sizeof why) && holds_pattern(&array);
            npy_free(&array);
            remove(written);
        }
        fine &= fattn_memory_alive() == alive;
    }
    tap_check(fine && n > 2 && n < 100, "%s %s %s order: each of %d calls",
              reading ? "reading" : "writing", name, fortran ? "in Fortran" : "in C", n - 2);
    entries(1);
}

/* The place at which a file ends, in the message of a reader of some of its rows. */
static void check_end(void)
{
    const fattn_run runs[] = {{.first = 1, .count = 2, .stride = 1}, {6, 1, 1}};
    const npy_rows rows = {.axis = 0, .count = 2, .runs = runs};
    const int64_t shape[] = {8, 100};
    const char *const path = in_folder("in.npy");
    npy_array array, part;
    char why[2048] = "";
    need(!npy_create(path, NPY_F32, 2, shape, &array, why, sizeof why), why);
    memset(array.data, 0, 8 * 400);
    need(!npy_write(path, &array, why, sizeof why), why);
    npy_free(&array);
    struct stat status;
    need(!stat(path, &status), path);
    const long long header = (long long)status.st_size - 8 * 400;
    int fine = 1;
    for (int run = 0; run < 2; run++) {
        char expected[80];
        snprintf(expected, sizeof expected, "ends after %lld of its %lld bytes",
                 header + 400 * (long long)runs[run].first, header + 8 * 400);
        int found = 0;
        fault_kind = ENDED;
        for (int n = 1; n < 10; n++) {
            reads_until_fault = n;
            const int failed = npy_read_rows(path, 0, &rows, &part, why, sizeof why);
            if (!failed)
                npy_free(&part);
            else
                found |= strstr(why, expected) != NULL;
            fine &= failed == 0 || failed == -1;
        }
        reads_until_fault = 0;
        fine &= found;
    }
    tap_check(fine, "a file that shrinks between rows: where it ends");
    entries(1);
}

static void test_faults(void)
{
    check_end();
    for (int fortran = 0; fortran < 2; fortran++) {
        check_fault(INTERRUPTED, "interrupted", 1, fortran);
        check_fault(SHORT, "in parts", 1, fortran);
        check_fault(BROKEN, "a broken disk", 1, fortran);
        check_fault(ENDED, "a file that shrinks", 1, fortran);
    }
    check_fault(INTERRUPTED, "interrupted", 0, 0);
    check_fault(SHORT, "in parts", 0, 0);
    check_fault(BROKEN, "on a full disk", 0, 0);
}

/* -------------------------------------------------------------------------------------------------
 * Several outputs
 * ---------------------------------------------------------------------------------------------- */

enum { TOGETHER = 3 };

static const char *const together[TOGETHER] = {"a.npy", "b.npy", "c.npy"};
static const char *const apart[TOGETHER] = {"a.npy", "sub/b.npy", "c.npy"};

static int stage_all(const char *const names[TOGETHER], replacement staged[TOGETHER])
{
    int failed = 0;
    char why[2048];
    for (int i = 0; i < TOGETHER; i++) {
        npy_array array;
        make_pattern(&array, NPY_F32, 3);
        failed |= npy_stage(in_folder(names[i]), &array, &staged[i], why, sizeof why);
        if (failed) printf("# %s\n", why);
        npy_free(&array);
    }
    return failed;
}

/* State of the three files as digits: 2 for an array, 1 for "old", 0 for absent. */
static int state_of(const char *const names[TOGETHER])
{
    int digits = 0;
    for (int i = 0; i < TOGETHER; i++) {
        unsigned char byte[1];
        const long got = get_file(in_folder(names[i]), byte, 1);
        digits = 10 * digits + (got < 1 ? 0 : *byte == 'o' ? 1 : 2);
    }
    return digits;
}

static int state(void) { return state_of(together); }

static void test_together(void)
{
    replacement staged[TOGETHER] = {{0}};
    char why[2048], text[8];

    tap_check(!stage_all(together, staged) && state() == 0 && entries(0) == 3,
              "staged outputs are not there yet");
    replacement_abandon(staged, TOGETHER);
    tap_check(entries(0) == 0 && !staged[0].target, "abandoned outputs leave nothing");
    replacement_abandon(staged, TOGETHER);

    put_file(in_folder("b.npy"), "old", 3);
    tap_check(!stage_all(together, staged) &&
                  !replacement_commit(staged, TOGETHER, why, sizeof why) && state() == 222 &&
                  entries(0) == 3 && !staged[2].target,
              "outputs appear together and replace what was there");
    entries(1);

    /* A directory that takes an output's place after staging cannot be replaced. */
    for (int blocked = 0; blocked < TOGETHER; blocked++) {
        put_file(in_folder("a.npy"), "old", 3);
        int expected = 100;
        const int staged_fine = !stage_all(together, staged);
        remove(in_folder(together[blocked]));
        if (blocked == 0) expected = 0;
        need(mkdir(in_folder(together[blocked]), 0700) == 0, "mkdir");
        tap_check(staged_fine && replacement_commit(staged, TOGETHER, why, sizeof why) &&
                      strstr(why, "exists and is not a regular file") && state() == expected &&
                      entries(0) == 1 + (blocked != 0),
                  "when output %d fails, all files are as before", blocked);
        entries(1);
    }

    /* A temporary file that has vanished makes the renaming itself fail. */
    for (int lost = 0; lost < TOGETHER; lost++) {
        for (int i = 0; i < TOGETHER; i++) put_file(in_folder(together[i]), "old", 3);
        tap_check(!stage_all(together, staged) && !unlink(staged[lost].temporary) &&
                      replacement_commit(staged, TOGETHER, why, sizeof why) &&
                      strstr(why, "cannot be written") && state() == 111 && entries(0) == 3,
                  "when output %d cannot be renamed, all files are as before", lost);
        entries(1);
    }

    /* A directory in the way makes setting the old file aside fail. */
    put_file(in_folder("a.npy"), "old", 3);
    const int staged_all = !stage_all(together, staged);
    need(mkdir(staged[0].aside, 0700) == 0, "mkdir");
    tap_check(staged_all && replacement_commit(staged, TOGETHER, why, sizeof why) &&
                  strstr(why, "cannot be replaced") && state() == 100 && entries(0) == 2,
              "when an old file cannot be set aside, all files are as before");
    entries(1);

    char dotted[600];
    snprintf(dotted, sizeof dotted, "..%s/./a.npy", strrchr(folder, '/'));
    const char *const twice[TOGETHER] = {"a.npy", "b.npy", dotted};
    tap_check(!stage_all(twice, staged) && replacement_commit(staged, TOGETHER, why, sizeof why) &&
                  strstr(why, "two outputs cannot be the same file") && entries(0) == 0,
              "two outputs cannot have one name");

    npy_array array;
    make_pattern(&array, NPY_F32, 3);
    put_file(in_folder("real.npy"), "old", 3);
    struct stat link_status;
    tap_check(!symlink("real.npy", in_folder("link.npy")) &&
                  !npy_write(in_folder("link.npy"), &array, why, sizeof why) &&
                  get_file(in_folder("real.npy"), text, sizeof text) == 8 &&
                  !lstat(in_folder("link.npy"), &link_status) && S_ISLNK(link_status.st_mode),
              "a link is followed, not replaced");

    struct stat file_status;
    const mode_t mask = umask(027);
    tap_check(!npy_write(in_folder("mode.npy"), &array, why, sizeof why) &&
                  !stat(in_folder("mode.npy"), &file_status) &&
                  (file_status.st_mode & 0777) == 0640,
              "outputs have the permissions that the umask leaves");
    tap_check(!chmod(in_folder("mode.npy"), 0604) &&
                  !npy_write(in_folder("mode.npy"), &array, why, sizeof why) &&
                  !stat(in_folder("mode.npy"), &file_status) &&
                  (file_status.st_mode & 0777) == 0604,
              "and those of the file that they replace");
    umask(mask);

    char name[256] = {0};
    memset(name, 'n', 255);
    tap_check(!npy_write(in_folder(name), &array, why, sizeof why),
              "a name of 255 bytes is written");
    npy_free(&array);
    entries(1);
}

/* Commits the three over old files, with b in another folder, in a process that is killed before
 * its n-th change. Returns whether it was killed. */
static int killed_at(int n)
{
    for (int i = 0; i < TOGETHER; i++) put_file(in_folder(apart[i]), "old", 3);
    fflush(stdout);
    const pid_t child = fork();
    need(child >= 0, "fork");
    if (child == 0) {
        replacement staged[TOGETHER] = {{0}};
        char why[2048];
        changes_until_kill = n;
        _exit(stage_all(apart, staged) || replacement_commit(staged, TOGETHER, why, sizeof why));
    }
    int status = 0;
    need(waitpid(child, &status, 0) == child, "waitpid");
    need(WIFSIGNALED(status) || WEXITSTATUS(status) == 0, "a commit");
    return WIFSIGNALED(status);
}

/* Number of files besides the outputs themselves. */
static int left_behind(void)
{
    const int all = entries(0) + entries_in(in_folder("sub"), 0);
    return all - 1 - TOGETHER;
}

static void test_killed(void)
{
    static const char *const from[] = {"x.npy", "sub/x.npy"};
    need(mkdir(in_folder("sub"), 0700) == 0, "mkdir");
    for (int way = 0; way < 2; way++) {
        int n = 1, mixed = 0, fine = 1, states[2] = {0};
        for (; n < 200 && killed_at(n); n++) {
            const int before = state_of(apart);
            mixed += before != 111 && before != 222;
            replacement_recover(in_folder(from[way]));
            const int after = state_of(apart);
            fine &= (after == 111 || after == 222) && (before == 222 ? after == 222 : 1);
            states[after == 222]++;
            replacement_recover(in_folder(from[!way]));
            fine &= state_of(apart) == after && left_behind() == 0;
        }
        tap_check(fine && mixed > 0 && states[0] > 2 && states[1] > 2 && n < 200,
                  "killed before each of %d changes, %d times between two outputs: all or none, by "
                  "the next run in folder %d",
                  n - 1, mixed, way);
    }

    /* The files of a live process are left alone. */
    replacement staged[TOGETHER] = {{0}};
    char why[2048];
    const int open = !stage_all(apart, staged);
    replacement_recover(in_folder("x.npy"));
    replacement_recover(in_folder("sub/x.npy"));
    tap_check(open && left_behind() == TOGETHER &&
                  !replacement_commit(staged, TOGETHER, why, sizeof why) &&
                  state_of(apart) == 222 && left_behind() == 0,
              "recovery leaves the files of a live process alone");

    /* Kill the process at ever later changes of a name until some outputs are new and others old.
     * Then rewrite one of the old ones. */
    int n = 1;
    while (killed_at(n) && (state_of(apart) == 111 || state_of(apart) == 222)) {
        replacement_recover(in_folder("x.npy"));
        replacement_recover(in_folder("sub/x.npy"));
        n++;
    }
    const int mixed = state_of(apart);
    usleep(50000);
    put_file(in_folder("c.npy"), "own", 3);
    replacement_recover(in_folder("x.npy"));
    tap_check(mixed == 211 && state_of(apart) == 221 && left_behind() == 0,
              "a file that was written since a kill stays");

    /* A plan of another user, or an invalid one, changes nothing. */
    put_file(in_folder("bait"), "bait", 4);
    put_file(in_folder(".fattn-1-1.plan"), "relative\0names\0are\0none", 24);
    put_file(in_folder(".fattn-1-2.tmp"), "left", 4);
    replacement_recover(in_folder("x.npy"));
    tap_check(access(in_folder("bait"), F_OK) == 0 && left_behind() == 1,
              "a plan that is none is removed");
    remove(in_folder("sub/b.npy"));
    remove(in_folder("sub"));
    entries(1);
}

/* -------------------------------------------------------------------------------------------------
 * Memory
 * ---------------------------------------------------------------------------------------------- */

/* One of the calls that allocate; true on success. */
static int call(int which, const char *path, const npy_array *array)
{
    char why[2048] = "";
    npy_array out;
    int failed;
    if (which == 0) {
        failed = npy_create("o", array->kind, array->rank, array->shape, &out, why, sizeof why);
    } else if (which == 1) {
        failed = npy_read(path, 0, &out, why, sizeof why);
    } else {
        failed = npy_write(in_folder("written.npy"), array, why, sizeof why);
    }
    if (!failed && which < 2) npy_free(&out);
    if (failed && !strstr(why, "out of memory")) printf("# %s\n", why);
    return !failed;
}

static void test_memory(void)
{
    static const char *const names[] = {"create", "read", "write"};
    const char *const path = in_folder("in.npy");
    npy_array array;
    char why[2048];
    make_pattern(&array, NPY_F32, 6);
    need(!npy_write(path, &array, why, sizeof why), why);
    for (int which = 0; which < 3; which++) {
        int64_t n = 1;
        int fine = 1;
        const int64_t alive = fattn_memory_alive();
        for (;; n++) {
            fattn_memory_fail_at(n);
            const int success = call(which, path, &array);
            const int failed_one = fattn_memory_fail_at(0);
            fine &= success == !failed_one && fattn_memory_alive() == alive;
            if (success || n > 100) break;
            fine &= entries(0) == 1;
        }
        tap_check(fine && n > 1 && n < 100, "%s survives each of its %d allocations failing",
                  names[which], (int)n - 1);
    }
    npy_free(&array);
    entries(1);
}

/* -------------------------------------------------------------------------------------------------
 * Commands
 * ---------------------------------------------------------------------------------------------- */

/* The descriptor that the next open() will return. */
static int next_descriptor(void)
{
    const int file = dup(STDOUT_FILENO);
    close(file);
    return file;
}

static int run_tests(const char *corpus)
{
    const int descriptor = next_descriptor();
    need(folder_make(folder, "check_npy"), folder);
    test_specimens(corpus);
    test_elements();
    test_damage();
    test_paths();
    test_round_trips();
    test_write_failures();
    test_faults();
    test_together();
    test_killed();
    test_memory();
    tap_check(fattn_memory_alive() == 0, "no memory is left alive");
    tap_check(next_descriptor() == descriptor, "no file is left open");
    tap_check(rmdir(folder) == 0, "no file is left behind");
    return tap_done();
}

static int write_seeds(const char *corpus)
{
    static unsigned char file[FILE_MAX];
    for (int i = 0; i < SPECIMENS; i++) {
        char path[1024];
        specimen_path(&specimens[i], corpus, path);
        put_file(path, file, specimen_make(&specimens[i], file));
    }
    return 0;
}

static int cat(npy_kind as, const char *in, const char *out)
{
    npy_array array;
    char why[2048];
    if (npy_read(in, as, &array, why, sizeof why)) {
        fprintf(stderr, "%s\n", why);
        return 2;
    }
    const int failed = npy_write(out, &array, why, sizeof why);
    if (failed) fprintf(stderr, "%s\n", why);
    npy_free(&array);
    return failed ? 2 : 0;
}

int main(int argc, char **argv)
{
    if (argc == 2) return run_tests(argv[1]);
    if (argc == 3 && !strcmp(argv[1], "seeds")) return write_seeds(argv[2]);
    if (argc == 4 && !strcmp(argv[1], "cat")) return cat(0, argv[2], argv[3]);
    if (argc == 5 && !strcmp(argv[1], "cat") && !strcmp(argv[2], "--bf16")) {
        return cat(NPY_BF16, argv[3], argv[4]);
    }
    if (argc == 5 && !strcmp(argv[1], "cat") && !strcmp(argv[2], "--e4m3")) {
        return cat(NPY_E4M3, argv[3], argv[4]);
    }
    fprintf(stderr, "usage: check_npy CORPUS | seeds CORPUS | cat [--bf16 | --e4m3] IN OUT\n");
    return 2;
}
