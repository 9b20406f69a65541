/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Versions of public structs. A public struct may get new fields at its end. A caller that was
 * compiled with an older header passes a smaller struct, whose missing fields read as their
 * defaults. A caller with a newer header passes a larger one, which is accepted if the fields that
 * this library does not know are zero. Any other size is refused: no version of the struct ended
 * there, and reading it would split a field.
 */
#ifndef FATTN_CORE_ABI_H
#define FATTN_CORE_ABI_H

#include <stdbool.h>
#include <stddef.h>

#include "fattn/fattn.h"

#define FATTN_ABI_VERSIONS 8

/* Offset of the end of a member. */
#define FATTN_ABI_END(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))

/* The sizes that a struct has had. */
typedef struct fattn_abi {
    const char *name;
    size_t sizes[FATTN_ABI_VERSIONS]; /* sizeof in each version, ascending, then 0; the last is this
                                       * library's */
    void (*init)(void *to);           /* writes the defaults of all fields */
} fattn_abi;

/* Reads the caller's struct *from, whose first member is its size_t struct_size, into *to. */
fattn_status fattn_abi_read_grown(void *to, const fattn_abi *abi, const void *from);

/* The same for a struct that has had one version, of size bytes; `name` is for the reason. */
fattn_status fattn_abi_read(void *to, size_t size, const void *from, const char *name);

/* Writes *from of size bytes, a struct that has had one version, into the caller's struct *to, and
 * zeros what follows there. */
fattn_status fattn_abi_write(void *to, const void *from, size_t size, const char *name);

#endif
