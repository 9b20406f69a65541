/* SPDX-License-Identifier: Apache-2.0 */
/* FNV-1a, over bytes or over 64-bit words: start with FATTN_HASH_BEGIN, and hash =
 * fattn_hash_step(hash, x) for each x. A step is a bijection of the hash, and of x. The lower bits
 * of the hash do not depend on the higher bits of the words. */
#ifndef FATTN_CORE_HASH_H
#define FATTN_CORE_HASH_H

#include <stdint.h>

#define FATTN_HASH_BEGIN UINT64_C(0xcbf29ce484222325)

static inline uint64_t fattn_hash_step(uint64_t hash, uint64_t x)
{
    return (hash ^ x) * UINT64_C(0x100000001b3);
}

#endif
