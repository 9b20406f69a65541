/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading and writing .npy files; see npy.h for the contract.
 *
 * A file is, byte after byte: the magic string, a major and a minor version, the length of the
 * header (little-endian, 2 bytes in version 1 and 4 in versions 2 and 3), the header, the data. The
 * header is a Python dictionary literal with exactly the keys descr, fortran_order and shape,
 * padded with blanks:
 *
 *     {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
 *
 * Source: the format specification in NumPy's reference manual (numpy.lib.format). NumPy evaluates
 * the literal; this reader accepts only the literals that NumPy writes, in any spacing and order.
 * It refuses some files that NumPy reads: a duplicate key, a negative size, a dtype without a byte
 * order, bytes after the data.
 */
#define _XOPEN_SOURCE 700 /* open, read, write */
#define _FILE_OFFSET_BITS 64

#include "tools/npy/npy.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/memory.h"
#include "tools/npy/complaint.h"

enum {
    HEADER_MAX = 65535, /* the most that version 1 can express; NumPy's default limit is 10000 */
    SHAPE_TEXT = 192,   /* "(a, b, ..., h)": at most 8 * (19 + 2) + 2 characters and the end */
    CHUNK = 1 << 16,    /* bytes converted at a time; a multiple of every item size */
    QUOTE = 40          /* characters of a header quoted in a reason */
};

static const char magic[6] = {'\x93', 'N', 'U', 'M', 'P', 'Y'};

static const struct {
    const char *name;
    const char *code; /* descr without its byte order */
    size_t item;
} kinds[NPY_KINDS] = {
    [NPY_F16] = {"f16", "f2", 2},   [NPY_F32] = {"f32", "f4", 4}, [NPY_F64] = {"f64", "f8", 8},
    [NPY_BOOL] = {"bool", "b1", 1}, [NPY_I8] = {"i8", "i1", 1},   [NPY_I16] = {"i16", "i2", 2},
    [NPY_I32] = {"i32", "i4", 4},   [NPY_I64] = {"i64", "i8", 8}, [NPY_U8] = {"u8", "u1", 1},
    [NPY_U16] = {"u16", "u2", 2},   [NPY_U32] = {"u32", "u4", 4}, [NPY_U64] = {"u64", "u8", 8},
    [NPY_BF16] = {"bf16", "u2", 2}, /* this and the next only on request: NPY_U16 */
    [NPY_E4M3] = {"e4m3", "u1", 1}, /* and NPY_U8 come first */
};

const char *npy_kind_name(npy_kind kind) { return kinds[kind].name; }

/* --- Reasons, shapes, byte order -------------------------------------------------------------- */

/* Writes the shape as Python does: (), (3,), (3, 4). */
static void shape_print(const npy_array *array, char text[SHAPE_TEXT])
{
    size_t used = (size_t)snprintf(text, SHAPE_TEXT, "(");
    for (int axis = 0; axis < array->rank; axis++) {
        used += (size_t)snprintf(text + used, SHAPE_TEXT - used, "%s%lld", axis ? ", " : "",
                                 (long long)array->shape[axis]);
    }
    snprintf(text + used, SHAPE_TEXT - used, array->rank == 1 ? ",)" : ")");
}

static int64_t bytes_of(const npy_array *array)
{
    return array->count * (int64_t)array->item; /* cannot overflow: checked by shape_set */
}

/* Sets everything but the data. Even if an axis is empty, the product of the others is bounded, so
 * that strides computed from the shape do not overflow. */
static int shape_set(npy_array *array, npy_kind kind, int rank, const int64_t *shape,
                     const complaint *to)
{
    assert(kind < NPY_KINDS && rank >= 0 && rank <= NPY_RANK_MAX);
    npy_array set = {.kind = kind, .rank = rank, .item = kinds[kind].item};
    int64_t bytes = (int64_t)set.item;
    int empty = 0;
    for (int axis = 0; axis < rank; axis++) {
        const int64_t size = set.shape[axis] = shape[axis];
        if (size < 0) {
            return complaint_write(to, "axis %d of the shape is negative: %lld", axis,
                                   (long long)size);
        }
        empty |= size == 0;
    }
    for (int axis = 0; axis < rank; axis++) {
        const int64_t size = shape[axis] ? shape[axis] : 1;
        if (bytes > PTRDIFF_MAX / size) {
            char text[SHAPE_TEXT];
            shape_print(&set, text);
            return complaint_write(to, "shape %s of %s has too many bytes to count", text,
                                   kinds[kind].name);
        }
        bytes *= size;
    }
    set.count = empty ? 0 : bytes / (int64_t)set.item;
    *array = set;
    return 0;
}

static int data_alloc(npy_array *array, const complaint *to)
{
    if (array->count == 0) {
        return 0;
    }
    array->data = fattn_memory_alloc_aligned((size_t)bytes_of(array));
    if (array->data) {
        return 0;
    }
    char bytes[32];
    snprintf(bytes, sizeof bytes, "%lld bytes", (long long)bytes_of(array));
    return complaint_no_memory(to, bytes);
}

static int host_is_little(void)
{
    const uint16_t one = 1;
    unsigned char first;
    memcpy(&first, &one, 1);
    return first;
}

static void swap_bytes(unsigned char *data, int64_t count, size_t item)
{
    for (int64_t i = 0; i < count; i++, data += item) {
        for (size_t low = 0, high = item - 1; low < high; low++, high--) {
            const unsigned char byte = data[low];
            data[low] = data[high];
            data[high] = byte;
        }
    }
}

/* --- The header ------------------------------------------------------------------------------- */

/* The contents of a header. */
typedef struct header {
    npy_kind kind;
    int little;  /* byte order of the data; irrelevant for one-byte items */
    int fortran; /* the first axis is adjacent */
    int rank;
    int64_t shape[NPY_RANK_MAX];
} header;

typedef struct cursor {
    const char *text, *at, *end;
    int python2; /* versions 1 and 2: long integers may end in L */
    npy_kind as;
    const complaint *to;
} cursor;

typedef struct token {
    const char *text;
    size_t size;
} token;

static int expected(const cursor *c, const char *what)
{
    int rest = (int)(c->end - c->at);
    while (rest > 0 && memchr(" \t\r\n", c->at[rest - 1], 4)) {
        rest--;
    }
    if (rest == 0) {
        return complaint_write(c->to, "the header ends where %s should follow", what);
    }
    return complaint_write(c->to, "the header has \"%.*s\" at byte %d where %s should follow",
                           rest < QUOTE ? rest : QUOTE, c->at, (int)(c->at - c->text), what);
}

static void skip_blanks(cursor *c)
{
    while (c->at < c->end && memchr(" \t\r\n", *c->at, 4)) {
        c->at++;
    }
}

static int take(cursor *c, char mark)
{
    skip_blanks(c);
    if (c->at == c->end || *c->at != mark) {
        return 0;
    }
    c->at++;
    return 1;
}

static int take_word(cursor *c, const char *word)
{
    const size_t size = strlen(word);
    skip_blanks(c);
    if ((size_t)(c->end - c->at) < size || memcmp(c->at, word, size)) {
        return 0;
    }
    c->at += size;
    return 1;
}

/* A string literal without escapes. The caller has skipped leading blanks. */
static int take_string(cursor *c, token *string)
{
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"')) {
        return 0;
    }
    const char *end = c->at + 1;
    while (end < c->end && *end != *c->at && *end != '\\' && *end != '\n') {
        end++;
    }
    if (end == c->end || *end != *c->at) {
        return 0;
    }
    *string = (token){c->at + 1, (size_t)(end - c->at - 1)};
    c->at = end + 1;
    return 1;
}

static int token_is(token string, const char *text)
{
    return string.size == strlen(text) && memcmp(string.text, text, string.size) == 0;
}

static int parse_descr(cursor *c, header *h)
{
    token descr;
    skip_blanks(c);
    if (c->at < c->end && *c->at == '[') {
        return complaint_write(c->to,
                               "the dtype is structured, and only plain numbers can be read");
    }
    if (!take_string(c, &descr)) {
        return expected(c, "the string of a dtype");
    }

    const int quoted = (int)(descr.size < QUOTE ? descr.size : QUOTE);
    const char order = descr.size ? descr.text[0] : '\0';
    const token code = {descr.text + 1, descr.size ? descr.size - 1 : 0};
    const int raw = token_is(code, "V1") || token_is(code, "V2");
    const npy_kind raw_kind = token_is(code, "V1") ? NPY_E4M3 : NPY_BF16;
    npy_kind kind = NPY_F16;
    while (kind < NPY_KINDS && !token_is(code, kinds[kind].code)) {
        kind++;
    }

    if (raw && raw_kind != c->as) {
        return complaint_write(c->to, "dtype '%.*s' is raw bytes, readable only as %s", quoted,
                               descr.text, kinds[raw_kind].name);
    }
    if (raw || (kind == NPY_U16 && c->as == NPY_BF16) || (kind == NPY_U8 && c->as == NPY_E4M3)) {
        kind = c->as;
    }
    if (kind == NPY_KINDS || order == '\0' || !strchr("<>|", order)) {
        return complaint_write(
            c->to, "dtype '%.*s' is not one of f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 b1 after < > or |",
            quoted, descr.text);
    }
    if (order == '|' && kinds[kind].item > 1 && !raw) {
        return complaint_write(c->to, "dtype '%.*s' has no byte order", quoted, descr.text);
    }
    h->kind = kind;
    h->little = order != '>';
    return 0;
}

static int parse_fortran_order(cursor *c, header *h)
{
    h->fortran = take_word(c, "True");
    return h->fortran || take_word(c, "False") ? 0 : expected(c, "True or False");
}

static int parse_size(cursor *c, int axis, int64_t *size)
{
    const int negative = take(c, '-');
    const char *const start = c->at;
    int64_t value = 0;
    for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++) {
        const int digit = *c->at - '0';
        if (value > (INT64_MAX - digit) / 10) {
            return complaint_write(c->to, "axis %d of the shape does not fit in 63 bits", axis);
        }
        value = 10 * value + digit;
    }
    /* A leading zero means octal in old Python literals and is an error in new ones. */
    if (c->at == start || (*start == '0' && c->at - start > 1)) {
        c->at = start;
        return expected(c, "the size of an axis");
    }
    if (negative) {
        return complaint_write(c->to, "axis %d of the shape is negative: -%lld", axis,
                               (long long)value);
    }
    if (c->python2 && c->at < c->end && *c->at == 'L') {
        c->at++;
    }
    *size = value;
    return 0;
}

static int parse_shape(cursor *c, header *h)
{
    if (!take(c, '(')) {
        return expected(c, "the tuple of a shape");
    }
    for (h->rank = 0; !take(c, ')');) {
        if (h->rank == NPY_RANK_MAX) {
            return complaint_write(c->to, "the shape has more than %d axes", NPY_RANK_MAX);
        }
        if (parse_size(c, h->rank, &h->shape[h->rank])) {
            return -1;
        }
        h->rank++;
        if (take(c, ',')) {
            continue;
        }
        if (h->rank > 1 && take(c, ')')) {
            break;
        } /* (3) is no tuple */
        return expected(c, "a comma");
    }
    return 0;
}

static const struct {
    const char *key;
    int (*parse)(cursor *, header *);
} keys[] = {{"descr", parse_descr}, {"fortran_order", parse_fortran_order}, {"shape", parse_shape}};

enum { KEYS = sizeof keys / sizeof *keys };

static int parse_entry(cursor *c, header *h, unsigned *seen)
{
    token name;
    if (!take_string(c, &name)) {
        return expected(c, "a key");
    }
    int key = 0;
    while (key < KEYS && !token_is(name, keys[key].key)) {
        key++;
    }
    if (key == KEYS) {
        return complaint_write(c->to, "the header has the unknown key '%.*s'",
                               (int)(name.size < QUOTE ? name.size : QUOTE), name.text);
    }
    if (*seen & 1u << key) {
        return complaint_write(c->to, "the header has '%s' twice", keys[key].key);
    }
    *seen |= 1u << key;
    return take(c, ':') ? keys[key].parse(c, h) : expected(c, "a colon");
}

static int parse_header(cursor *c, header *h)
{
    for (const char *at = c->text; at < c->end; at++) {
        if ((*at < ' ' || *at > '~') && !memchr("\t\r\n", *at, 3)) {
            return complaint_write(c->to, "byte %d of the header is 0x%02x, not printable ASCII",
                                   (int)(at - c->text), (unsigned char)*at);
        }
    }
    unsigned seen = 0;
    if (!take(c, '{')) {
        return expected(c, "a dictionary");
    }
    while (!take(c, '}')) {
        if (parse_entry(c, h, &seen)) {
            return -1;
        }
        if (take(c, ',')) {
            continue;
        }
        if (take(c, '}')) {
            break;
        }
        return expected(c, "a comma or the end of the dictionary");
    }
    for (int key = 0; key < KEYS; key++) {
        if (!(seen & 1u << key)) {
            return complaint_write(c->to, "the header has no '%s'", keys[key].key);
        }
    }
    skip_blanks(c);
    return c->at == c->end ? 0 : expected(c, "nothing but blanks");
}

/* --- Reading ---------------------------------------------------------------------------------- */

typedef struct source {
    int file;
    int64_t size, at; /* bytes of the file, and which of them is read next */
    const complaint *to;
} source;

/* Opens a regular file. O_NONBLOCK, because opening a FIFO would wait for its other end. */
static int source_open(source *s, const complaint *to)
{
    struct stat status;
    const int file = open(to->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (file < 0) {
        return complaint_write(to, "cannot be opened: %s", strerror(errno));
    }
    if (fstat(file, &status) || !S_ISREG(status.st_mode)) {
        close(file);
        return complaint_write(to, "not a regular file");
    }
    *s = (source){file, status.st_size, 0, to};
    return 0;
}

static int source_read(source *s, void *buffer, int64_t bytes)
{
    for (int64_t done = 0; done < bytes;) {
        const ssize_t got = read(s->file, (char *)buffer + done, (size_t)(bytes - done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return complaint_write(s->to, "cannot be read: %s", strerror(errno));
        }
        if (got == 0) {
            return complaint_write(s->to, "ends after %lld of its %lld bytes",
                                   (long long)(s->at + done), (long long)s->size);
        }
        done += got;
    }
    s->at += bytes;
    return 0;
}

static int read_header(source *s, npy_kind as, header *h)
{
    unsigned char start[10],
        more[2] = {0}; /* magic, major, minor, length; upper half of the length */
    if (s->size < 12) {
        return complaint_write(s->to, "%lld bytes are too few for an .npy file",
                               (long long)s->size);
    }
    if (source_read(s, start, sizeof start)) {
        return -1;
    }
    if (memcmp(start, magic, sizeof magic)) {
        return complaint_write(s->to, "not an .npy file");
    }
    const int major = start[6], minor = start[7];
    if (major < 1 || major > 3 || minor != 0) {
        return complaint_write(s->to, "format version %d.%d is not 1.0, 2.0 or 3.0", major, minor);
    }
    if (major > 1 && source_read(s, more, sizeof more)) {
        return -1;
    }

    const int64_t length =
        start[8] | (int64_t)start[9] << 8 | (int64_t)more[0] << 16 | (int64_t)more[1] << 24;
    if (length > HEADER_MAX) {
        return complaint_write(s->to, "a header of %lld bytes exceeds the limit of %d",
                               (long long)length, HEADER_MAX);
    }
    if (length > s->size - s->at) {
        return complaint_write(s->to,
                               "a header of %lld bytes is announced where %lld bytes are left",
                               (long long)length, (long long)(s->size - s->at));
    }
    char text[HEADER_MAX];
    if (source_read(s, text, length)) {
        return -1;
    }
    cursor c = {text, text, text + length, major < 3, as, s->to};
    return parse_header(&c, h);
}

/* Reads elements in Fortran order and stores them in C order. */
static int read_fortran(source *s, npy_array *array)
{
    int64_t stride[NPY_RANK_MAX], index[NPY_RANK_MAX] = {0}, to = 0;
    for (int64_t axis = array->rank - 1, step = 1; axis >= 0; axis--) {
        stride[axis] = step;
        step *= array->shape[axis];
    }
    unsigned char chunk[CHUNK];
    const int64_t chunk_count = CHUNK / (int64_t)array->item;
    for (int64_t left = array->count; left > 0;) {
        const int64_t count = left < chunk_count ? left : chunk_count;
        if (source_read(s, chunk, count * (int64_t)array->item)) {
            return -1;
        }
        for (int64_t from = 0; from < count; from++) {
            memcpy((char *)array->data + (size_t)to * array->item,
                   chunk + (size_t)from * array->item, array->item);
            for (int axis = 0; axis < array->rank; axis++) {
                to += stride[axis];
                if (++index[axis] < array->shape[axis]) {
                    break;
                }
                to -= stride[axis] * array->shape[axis];
                index[axis] = 0;
            }
        }
        left -= count;
    }
    return 0;
}

/* Whether the file ends with the array's data. */
static int check_size(const source *s, const npy_array *array)
{
    const int64_t bytes = bytes_of(array), held = s->size - s->at;
    char shape[SHAPE_TEXT];
    shape_print(array, shape);
    if (held < bytes) {
        return complaint_write(s->to,
                               "shape %s of %s needs %lld bytes of data and the file has %lld",
                               shape, kinds[array->kind].name, (long long)bytes, (long long)held);
    }
    if (held > bytes) {
        return complaint_write(s->to, "trailing bytes after the data of shape %s of %s: %lld",
                               shape, kinds[array->kind].name, (long long)(held - bytes));
    }
    return 0;
}

static int read_data(source *s, const header *h, npy_array *array)
{
    const int64_t bytes = bytes_of(array);
    int failed = check_size(s, array);
    failed = failed ? failed : data_alloc(array, s->to);
    if (failed) {
        return failed;
    }
    if (h->fortran ? read_fortran(s, array) : source_read(s, array->data, bytes)) {
        npy_free(array);
        return -1;
    }
    if (h->little != host_is_little()) {
        swap_bytes(array->data, array->count, array->item);
    }
    return 0;
}

/* Reads the shape, and with `whole` the elements; without, only checks that the file has them. */
static int read_file(const complaint *to, npy_kind as, int whole, npy_array *out)
{
    source s;
    header h;
    npy_array array;
    if (source_open(&s, to)) {
        return -1;
    }
    int failed = read_header(&s, as, &h);
    failed = failed ? failed : shape_set(&array, h.kind, h.rank, h.shape, to);
    failed = failed ? failed : whole ? read_data(&s, &h, &array) : check_size(&s, &array);
    close(s.file);
    if (!failed) {
        *out = array;
    }
    return failed;
}

int npy_read(const char *path, npy_kind as, npy_array *out, char *why, size_t why_size)
{
    return read_file(&(complaint){path, why, why_size}, as, 1, out);
}

int npy_read_shape(const char *path, npy_kind as, npy_array *out, char *why, size_t why_size)
{
    return read_file(&(complaint){path, why, why_size}, as, 0, out);
}

typedef int (*stretch)(void *context, int64_t at, void *data, int64_t bytes);

/* Calls act() for each stretch of neighbouring rows, with its offset in the file after the header,
 * and its place in memory. */
static int each_stretch(const npy_array *whole, const npy_rows *rows, char *data, stretch act,
                        void *context)
{
    int64_t outer = 1, inner = (int64_t)whole->item;
    for (int axis = 0; axis < whole->rank; axis++) {
        outer *= axis < rows->axis ? whole->shape[axis] : 1;
        inner *= axis > rows->axis ? whole->shape[axis] : 1;
    }
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t n = 0; n < rows->count; n++) {
            const fattn_run run = rows->runs[n];
            const int64_t together = run.stride == 1 ? run.count : 1;
            for (int64_t i = 0; i < run.count; i += together) {
                const int64_t row = o * whole->shape[rows->axis] + run.first + i * run.stride;
                if (act(context, row * inner, data, together * inner)) {
                    return -1;
                }
                data += together * inner;
            }
        }
    }
    return 0;
}

/* Gives *part the type and shape of an array with these rows of `whole`. */
static int part_of(const npy_array *whole, const npy_rows *rows, npy_array *part,
                   const complaint *to)
{
    int64_t shape[NPY_RANK_MAX];
    memcpy(shape, whole->shape, sizeof shape);
    assert(rows->axis < whole->rank);
    shape[rows->axis] = 0;
    for (int64_t n = 0; n < rows->count; n++) {
        const fattn_run run = rows->runs[n];
        assert(run.count == 0 ||
               run.first + (run.count - 1) * run.stride < whole->shape[rows->axis]);
        shape[rows->axis] += run.count;
    }
    return shape_set(part, whole->kind, whole->rank, shape, to);
}

typedef struct place {
    source source;
    int64_t begin; /* of the data */
} place;

static int read_stretch(void *context, int64_t at, void *data, int64_t bytes)
{
    place *const p = context;
    if (lseek(p->source.file, (off_t)(p->begin + at), SEEK_SET) < 0) {
        return complaint_write(p->source.to, "cannot be read: %s", strerror(errno));
    }
    p->source.at = p->begin + at;
    return source_read(&p->source, data, bytes);
}

int npy_read_rows(const char *path, npy_kind as, const npy_rows *rows, npy_array *out, char *why,
                  size_t why_size)
{
    const complaint to = {path, why, why_size};
    place p;
    header h;
    npy_array whole, part;
    if (source_open(&p.source, &to)) {
        return -1;
    }
    int failed = read_header(&p.source, as, &h);
    failed = failed ? failed : shape_set(&whole, h.kind, h.rank, h.shape, &to);
    failed = failed ? failed : check_size(&p.source, &whole);
    if (!failed && h.fortran) {
        failed = complaint_write(&to, "rows of an array in Fortran order are not read");
    }
    failed = failed ? failed : part_of(&whole, rows, &part, &to);
    failed = failed ? failed : data_alloc(&part, &to);
    if (!failed) {
        p.begin = p.source.at;
        failed = each_stretch(&whole, rows, part.data, read_stretch, &p);
        if (failed) {
            npy_free(&part);
        }
    }
    close(p.source.file);
    if (failed) {
        return failed;
    }
    if (h.little != host_is_little()) {
        swap_bytes(part.data, part.count, part.item);
    }
    *out = part;
    return 0;
}

int npy_create(const char *name, npy_kind kind, int rank, const int64_t *shape, npy_array *out,
               char *why, size_t why_size)
{
    const complaint to = {name, why, why_size};
    npy_array array;
    int failed = shape_set(&array, kind, rank, shape, &to);
    failed = failed ? failed : data_alloc(&array, &to);
    if (!failed) {
        *out = array;
    }
    return failed;
}

void npy_free(npy_array *array)
{
    fattn_memory_free_aligned(array->data);
    memset(array, 0, sizeof *array);
}

/* --- Writing ---------------------------------------------------------------------------------- */

static int emit(int file, const void *bytes, size_t size, const complaint *to)
{
    for (size_t done = 0; done < size;) {
        const ssize_t put = write(file, (const char *)bytes + done, size - done);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put < 0) {
            return complaint_write(to, "cannot be written: %s", strerror(errno));
        }
        done += (size_t)put;
    }
    return 0;
}

static int emit_header(int file, const npy_array *array, const complaint *to)
{
    char shape[SHAPE_TEXT];
    shape_print(array, shape);
    char text[6 * 64]; /* 10 + 60 + SHAPE_TEXT, rounded up to 64, have room */
    char *const dict = text + 10;
    const size_t room = sizeof text - 10;
    const int dict_size =
        snprintf(dict, room, "{'descr': '%c%s', 'fortran_order': False, 'shape': %s, }",
                 array->item == 1 ? '|' : '<', kinds[array->kind].code, shape);

    /* The data begins at a multiple of 64 bytes, after a line feed. */
    const size_t size = (10 + (size_t)dict_size + 1 + 63) / 64 * 64, length = size - 10;
    memset(dict + dict_size, ' ', length - (size_t)dict_size);
    text[size - 1] = '\n';
    memcpy(text, magic, sizeof magic);
    text[6] = 1, text[7] = 0;
    text[8] = (char)(length & 255), text[9] = (char)(length >> 8);
    return emit(file, text, size, to);
}

static int emit_data(int file, const npy_array *array, const complaint *to)
{
    unsigned char chunk[CHUNK];
    const int64_t chunk_count = CHUNK / (int64_t)array->item;
    for (int64_t from = 0; from < array->count; from += chunk_count) {
        const int64_t left = array->count - from, count = left < chunk_count ? left : chunk_count;
        const size_t bytes = (size_t)count * array->item;
        memcpy(chunk, (const char *)array->data + (size_t)from * array->item, bytes);
        if (!host_is_little()) {
            swap_bytes(chunk, count, array->item);
        }
        if (emit(file, chunk, bytes, to)) {
            return -1;
        }
    }
    return 0;
}

int npy_stage(const char *path, const npy_array *array, replacement *staged, char *why,
              size_t why_size)
{
    const complaint to = {path, why, why_size};
    npy_array shape;
    replacement one;
    if (shape_set(&shape, array->kind, array->rank, array->shape, &to)) {
        return -1;
    }
    assert(shape.count == array->count && shape.item == array->item);
    assert(array->data || array->count == 0);
    const int failed = replacement_open(&one, &to);
    if (failed) {
        return failed;
    }
    if (emit_header(one.file, array, &to) || emit_data(one.file, array, &to)) {
        replacement_abandon(&one, 1);
        return -1;
    }
    *staged = one;
    return 0;
}

int npy_stage_zeros(const char *path, const npy_array *array, replacement *staged, char *why,
                    size_t why_size)
{
    const complaint to = {path, why, why_size};
    replacement one;
    int failed = replacement_open(&one, &to);
    if (failed) {
        return failed;
    }
    failed = emit_header(one.file, array, &to);
    const off_t begin = failed ? 0 : lseek(one.file, 0, SEEK_CUR);
    if (!failed && (begin < 0 || ftruncate(one.file, begin + (off_t)bytes_of(array)))) {
        failed = complaint_write(&to, "cannot be written: %s", strerror(errno));
    }
    if (failed) {
        replacement_abandon(&one, 1);
        return -1;
    }
    *staged = one;
    return 0;
}

typedef struct sink {
    int file;
    int64_t begin;
    size_t item;
    const complaint *to;
} sink;

static int write_stretch(void *context, int64_t at, void *data, int64_t bytes)
{
    const sink *const s = context;
    unsigned char chunk[CHUNK];
    if (lseek(s->file, (off_t)(s->begin + at), SEEK_SET) < 0) {
        return complaint_write(s->to, "cannot be written: %s", strerror(errno));
    }
    for (int64_t from = 0; from < bytes; from += CHUNK) {
        const int64_t size = bytes - from < CHUNK ? bytes - from : CHUNK;
        memcpy(chunk, (const char *)data + from, (size_t)size);
        if (!host_is_little()) {
            swap_bytes(chunk, size / (int64_t)s->item, s->item);
        }
        if (emit(s->file, chunk, (size_t)size, s->to)) {
            return -1;
        }
    }
    return 0;
}

int npy_write_rows(const char *temporary, const npy_rows *rows, const npy_array *array, char *why,
                   size_t why_size)
{
    const complaint to = {temporary, why, why_size};
    source s;
    header h;
    npy_array whole;
    if (source_open(&s, &to)) {
        return -1;
    }
    int failed = read_header(&s, array->kind, &h);
    failed = failed ? failed : shape_set(&whole, h.kind, h.rank, h.shape, &to);
    close(s.file);
    sink into = {-1, s.at, array->item, &to};
    if (!failed && array->count > 0) {
        into.file = open(temporary, O_WRONLY | O_CLOEXEC);
        failed = into.file < 0 ? complaint_write(&to, "cannot be opened: %s", strerror(errno))
                               : each_stretch(&whole, rows, array->data, write_stretch, &into);
    }
    if (into.file >= 0 && close(into.file) && !failed) {
        failed = complaint_write(&to, "cannot be written: %s", strerror(errno));
    }
    return failed;
}

int npy_write(const char *path, const npy_array *array, char *why, size_t why_size)
{
    replacement staged;
    if (npy_stage(path, array, &staged, why, why_size)) {
        return -1;
    }
    return replacement_commit(&staged, 1, why, why_size);
}
