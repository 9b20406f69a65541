/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Specimens of .npy files, one of each kind, valid or not: a header, what is special about the
 * file, and part of the expected refusal. tests/npy_corpus holds them as files, which seed the
 * fuzzer.
 */
#ifndef FATTN_TESTS_NPY_SPECIMENS_H
#define FATTN_TESTS_NPY_SPECIMENS_H

#include <stdio.h>
#include <string.h>

#include "tools/npy/npy.h"

enum { FILE_MAX = 1 << 17 };

typedef struct specimen {
    const char *name;
    const char *reason; /* part of the refusal; NULL for a valid file */
    const char *header;
    int data;    /* bytes after the header: 1, 2, 3 ... */
    int version; /* 0 means 1 */
    int minor;
    int announce; /* header length to announce, if not the true one */
    int keep;     /* bytes of the file to keep, if not all */
    const char *magic;
    npy_kind as;
} specimen;

#define SHAPE(shape) "{'descr': '<f4', 'fortran_order': False, 'shape': " shape ", }          \n"
#define DESCR(descr) "{'descr': " descr ", 'fortran_order': False, 'shape': (2,), }           \n"

static const specimen specimens[] = {
    {"f2", NULL, DESCR("'<f2'"), .data = 4},
    {"f4", NULL, DESCR("'<f4'"), .data = 8},
    {"f8-big", NULL, DESCR("'>f8'"), .data = 16},
    {"bool", NULL, DESCR("'|b1'"), .data = 2},
    {"i1", NULL, DESCR("'|i1'"), .data = 2},
    {"u1", NULL, DESCR("'|u1'"), .data = 2},
    {"i2-big", NULL, DESCR("'>i2'"), .data = 4},
    {"i4", NULL, DESCR("'<i4'"), .data = 8},
    {"i8", NULL, DESCR("'<i8'"), .data = 16},
    {"u2", NULL, DESCR("'<u2'"), .data = 4},
    {"u4-big", NULL, DESCR("'>u4'"), .data = 8},
    {"u8", NULL, DESCR("'<u8'"), .data = 16},
    {"bf16-u2", NULL, DESCR("'<u2'"), .data = 4, .as = NPY_BF16},
    {"bf16-v2", NULL, DESCR("'|V2'"), .data = 4, .as = NPY_BF16},
    {"e4m3-u1", NULL, DESCR("'|u1'"), .data = 2, .as = NPY_E4M3},
    {"e4m3-v1", NULL, DESCR("'|V1'"), .data = 2, .as = NPY_E4M3},
    {"scalar", NULL, SHAPE("()"), .data = 4},
    {"empty", NULL, SHAPE("(3, 0, 5)"), .data = 0},
    {"rank-8", NULL, SHAPE("(1, 2, 1, 1, 2, 1, 1, 1)"), .data = 16},
    {"version-2", NULL, SHAPE("(2, 2)"), .data = 16, .version = 2},
    {"version-3", NULL, SHAPE("(2, 2)"), .data = 16, .version = 3},
    {"fortran", NULL, "{'descr': '>f4', 'fortran_order': True, 'shape': (2, 3), }\n", .data = 24},
    {"long-integers", NULL, SHAPE("(2L, 1L)"), .data = 8},
    {"other-spelling", NULL, "{\"shape\":(1,2),\"fortran_order\":False,\"descr\":\"<f4\"}",
     .data = 8},

    {"nothing", "0 bytes are too few", "", .keep = -1},
    {"magic-alone", "6 bytes are too few", "", .keep = 6},
    {"magic-wrong", "not an .npy file", SHAPE("(2,)"), .data = 8, .magic = "\x93NUMPX"},
    {"zip", "not an .npy file", SHAPE("(2,)"), .data = 8, .magic = "PK\3\4\0\0"},
    {"version-0", "version 0.0 is not", SHAPE("(2,)"), .data = 8, .version = -1},
    {"version-4", "version 4.0 is not", SHAPE("(2,)"), .data = 8, .version = 4},
    {"version-1.1", "version 1.1 is not", SHAPE("(2,)"), .data = 8, .minor = 1},
    {"header-too-long", "a header of 65536 bytes exceeds the limit of 65535", SHAPE("(2,)"),
     .data = 8, .version = 2, .announce = 65536},
    {"header-4-gib", "a header of 2147483647 bytes exceeds", SHAPE("(2,)"), .data = 8, .version = 2,
     .announce = 0x7fffffff},
    {"header-past-end", "a header of 5000 bytes is announced where", SHAPE("(2,)"), .data = 8,
     .announce = 5000},
    {"header-short", "the header ends where a colon", SHAPE("(2,)"), .data = 8, .announce = 8},
    {"header-eats-data", "byte 68 of the header is 0x01, not printable ASCII", SHAPE("(2,)"),
     .data = 8, .announce = 70},
    {"header-empty", "the header ends where a dictionary", "", .data = 8},
    {"header-blank", "the header ends where a dictionary", "        \n", .data = 8},
    {"header-list", "has \"[]\" at byte 0 where a dictionary", "[]", .data = 8},
    {"header-open", "the header ends where a key", "{'descr': '<f4', ", .data = 8},
    {"header-open-shape", "the header ends where the size of an axis", "{'shape': (3, ", .data = 8},
    {"header-open-string", "where a key should", "{'descr: ", .data = 8},
    {"trailing-garbage", "has \"x\" at byte 66 where nothing but blanks",
     "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }         x", .data = 8},
    {"two-dictionaries", "has \"{}\" at byte 57 where nothing",
     "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }{}", .data = 8},
    {"non-ascii", "byte 2 of the header is 0xc3, not printable ASCII", "{'\xc3\xa9': 1}", .data = 8,
     .version = 3},
    {"escape", "where a key should follow", "{'de\\x73cr': '<f4'}", .data = 8},
    {"no-descr", "the header has no 'descr'", "{'fortran_order': False, 'shape': (2,), }",
     .data = 8},
    {"no-order", "the header has no 'fortran_order'", "{'descr': '<f4', 'shape': (2,), }",
     .data = 8},
    {"no-shape", "the header has no 'shape'", "{'descr': '<f4', 'fortran_order': False}",
     .data = 8},
    {"no-keys", "the header has no 'descr'", "{}", .data = 8},
    {"descr-twice", "the header has 'descr' twice", "{'descr': '<f4', 'descr': '<f4', }",
     .data = 8},
    {"shape-twice", "the header has 'shape' twice", "{'shape': (2,), 'shape': (2,), }", .data = 8},
    {"unknown-key", "the header has the unknown key 'strides'", "{'strides': (1,)}", .data = 8},
    {"number-key", "where a key should", "{3: 4}", .data = 8},
    {"no-colon", "where a colon should", "{'descr' '<f4'}", .data = 8},
    {"no-comma", "where a comma or the end", "{'descr': '<f4' 'shape': (2,)}", .data = 8},
    {"comma-alone", "where a key should", "{,}", .data = 8},

    {"object", "dtype '|O' is not one of", DESCR("'|O'"), .data = 8},
    {"structured", "the dtype is structured", DESCR("[('x', '<f4'), ('y', '<i4')]"), .data = 16},
    {"sub-array", "where the string of a dtype", DESCR("('<f4', (2,))"), .data = 16},
    {"descr-number", "where the string of a dtype", DESCR("4"), .data = 8},
    {"descr-empty", "dtype '' is not one of", DESCR("''"), .data = 8},
    {"descr-order-alone", "dtype '<' is not one of", DESCR("'<'"), .data = 8},
    {"complex", "dtype '<c8' is not one of", DESCR("'<c8'"), .data = 16},
    {"long-double", "dtype '<f16' is not one of", DESCR("'<f16'"), .data = 32},
    {"datetime", "dtype '<M8[ns]' is not one of", DESCR("'<M8[ns]'"), .data = 16},
    {"unicode", "dtype '<U1' is not one of", DESCR("'<U1'"), .data = 8},
    {"no-order-mark", "dtype 'f4' is not one of", DESCR("'f4'"), .data = 8},
    {"native-order", "dtype '=f4' is not one of", DESCR("'=f4'"), .data = 8},
    {"order-unknown", "dtype '|f4' has no byte order", DESCR("'|f4'"), .data = 8},
    {"raw-bytes", "dtype '|V2' is raw bytes, readable only as bf16", DESCR("'|V2'"), .data = 4},
    {"raw-bytes-1", "dtype '|V1' is raw bytes, readable only as e4m3", DESCR("'|V1'"), .data = 2},
    {"raw-bytes-4", "dtype '|V4' is not one of", DESCR("'|V4'"), .data = 8, .as = NPY_BF16},

    {"order-number", "where True or False", "{'fortran_order': 1}", .data = 8},
    {"order-string", "where True or False", "{'fortran_order': 'True'}", .data = 8},
    {"order-longer", "where a comma or the end", "{'fortran_order': Falsehood}", .data = 8},
    {"order-cut", "where True or False", "{'fortran_order': Fal", .data = 8},

    {"shape-list", "where the tuple of a shape", SHAPE("[2]"), .data = 8},
    {"shape-number", "where the tuple of a shape", SHAPE("2"), .data = 8},
    {"shape-no-tuple", "where a comma should", SHAPE("(2)"), .data = 8},
    {"shape-comma", "where the size of an axis", SHAPE("(,)"), .data = 8},
    {"shape-commas", "where the size of an axis", SHAPE("(2,,)"), .data = 8},
    {"shape-nested", "has \"(2,),), }\" at byte 51 where the size of an axis", SHAPE("((2,),)"),
     .data = 8},
    {"shape-deep", "where the size of an axis", SHAPE("((((((((((((((((((((((((2,)"), .data = 8},
    {"shape-float", "where a comma should", SHAPE("(2.0,)"), .data = 8},
    {"shape-exponent", "where a comma should", SHAPE("(2e1,)"), .data = 8},
    {"shape-hex", "where a comma should", SHAPE("(0x2,)"), .data = 8},
    {"shape-octal", "has \"02,), }\" at byte 51 where the size of an axis", SHAPE("(02,)"),
     .data = 8},
    {"shape-plus", "where the size of an axis", SHAPE("(+2,)"), .data = 8},
    {"shape-word", "where the size of an axis", SHAPE("(True,)"), .data = 8},
    {"shape-spaced", "where a comma should", SHAPE("(1 2,)"), .data = 8},
    {"shape-long-3", "where a comma should", SHAPE("(2L,)"), .data = 8, .version = 3},
    {"shape-negative", "axis 1 of the shape is negative: -3", SHAPE("(2, -3)"), .data = 8},
    {"shape-minus", "where the size of an axis", SHAPE("(-,)"), .data = 8},
    {"shape-rank-9", "the shape has more than 8 axes", SHAPE("(1, 1, 1, 1, 1, 1, 1, 1, 1)"),
     .data = 4},
    {"shape-2-63", "axis 0 of the shape does not fit in 63 bits", SHAPE("(9223372036854775808,)"),
     .data = 8},
    {"shape-digits", "axis 1 of the shape does not fit in 63 bits",
     SHAPE("(2, 99999999999999999999999999999999999999999999999)"), .data = 8},
    {"shape-max", "(9223372036854775807,) of f32 has too many bytes to count",
     SHAPE("(9223372036854775807,)"), .data = 8},
    {"shape-product", "(4294967296, 4294967296) of f32 has too many bytes",
     SHAPE("(4294967296, 4294967296)"), .data = 8},
    {"shape-product-0", "(0, 4294967296, 4294967296) of f32 has too many bytes",
     SHAPE("(0, 4294967296, 4294967296)"), .data = 0},
    {"shape-large", "(1099511627776,) of f32 needs 4398046511104 bytes of data and the file has 8",
     SHAPE("(1099511627776,)"), .data = 8},
    {"data-missing", "(2,) of f32 needs 8 bytes of data and the file has 0", SHAPE("(2,)"),
     .data = 0},
    {"data-cut", "(2,) of f32 needs 8 bytes of data and the file has 7", SHAPE("(2,)"), .data = 7},
    {"data-trailing", "trailing bytes after the data of shape (2,) of f32: 1", SHAPE("(2,)"),
     .data = 9},
    {"data-of-empty", "trailing bytes after the data of shape (0,) of f32: 4", SHAPE("(0,)"),
     .data = 4},
};

enum { SPECIMENS = sizeof specimens / sizeof *specimens };

/* Writes the specimen into file and returns its size. */
static size_t specimen_make(const specimen *s, unsigned char file[FILE_MAX])
{
    const size_t text = strlen(s->header);
    const int version = s->version < 0 ? 0 : s->version ? s->version : 1;
    const size_t announced = s->announce ? (size_t)s->announce : text;
    const size_t start = version < 2 ? 10 : 12;
    memcpy(file, s->magic ? s->magic : "\x93NUMPY", 6);
    file[6] = (unsigned char)version, file[7] = (unsigned char)s->minor;
    for (size_t i = 8; i < start; i++) file[i] = (unsigned char)(announced >> 8 * (i - 8));
    memcpy(file + start, s->header, text);
    size_t size = start + text;
    for (int i = 0; i < s->data; i++) file[size++] = (unsigned char)(i + 1);
    return s->keep ? (size_t)(s->keep > 0 ? s->keep : 0) : size;
}

static void specimen_path(const specimen *s, const char *corpus, char path[1024])
{
    snprintf(path, 1024, "%s/%s-%s%s.npy", corpus, s->reason ? "hostile" : "valid", s->name,
             s->as == NPY_BF16   ? ".bf16"
             : s->as == NPY_E4M3 ? ".e4m3"
                                 : "");
}

#endif
