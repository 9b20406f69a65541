/* SPDX-License-Identifier: Apache-2.0 */
/* FNV-1a, over bytes or over words: hash = fattn_hash_step(hash, x) for each, from the beginning.
 * A step is a bijection of the hash, and of x. Lower bits do not depend on higher bits of words. */
#ifndef FATTN_CORE_HASH_H
#define FATTN_CORE_HASH_H

#include <stdint.h>

#define FATTN_HASH_BEGIN UINT64_C(0xcbf29ce484222325)

static inline uint64_t fattn_hash_step(uint64_t hash, uint64_t x)
{
    return (hash ^ x) * UINT64_C(0x100000001b3);
}

#endif
