/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Public structs grow at their end. A caller built against an older header passes a smaller struct,
 * whose missing tail reads as zeros; one built against a newer header passes a larger struct, which
 * is accepted as long as the tail that this library does not know is zero.
 */
#ifndef FATTN_CORE_ABI_H
#define FATTN_CORE_ABI_H

#include <stddef.h>

#include "fattn/fattn.h"

/* Reads the caller's struct *from, whose first member is its size_t struct_size, into *to of size
 * bytes; `name` is for the reason. */
fattn_status fattn_abi_read(void *to, size_t size, const void *from, const char *name);

/* Writes *from of size bytes into the caller's struct *to, as far as it goes, and zeros its
 * tail. */
fattn_status fattn_abi_write(void *to, const void *from, size_t size, const char *name);

#endif
