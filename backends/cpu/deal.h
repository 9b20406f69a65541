/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the items of a phase are dealt to its workers.
 *
 * Where items are few, each worker has some of its own, the same in every run of a plan, and begins
 * with those: when a run reads the same memory as the last, as decoding does, the core has it in
 * its cache. Then the worker helps those that have not come, or are slower. Otherwise all take from
 * one hand, in ascending order: of items that take differently long, those that take longest come
 * first; and a worker that waits for a lower item waits for one that some thread has begun.
 */
#ifndef FATTN_CPU_DEAL_H
#define FATTN_CPU_DEAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define FATTN_CPU_HANDS 32 /* at most; more workers share them */

/* How many items of its own a worker may have: none where items wait for lower ones, one where they
 * take differently long, several where they are alike. */
typedef enum fattn_cpu_share {
    FATTN_CPU_NONE = 0,
    FATTN_CPU_ONE = 1,
    FATTN_CPU_SEVERAL = 8,
} fattn_cpu_share;

typedef struct fattn_cpu_hand {
    _Alignas(16) atomic_int_least64_t taken; /* of its items; a cache line has four */
} fattn_cpu_hand;

/* Item n is in hand n % hands. */
typedef struct fattn_cpu_deal {
    int64_t count; /* items 0 .. count - 1 */
    int hands;
    fattn_cpu_hand hand[FATTN_CPU_HANDS];
} fattn_cpu_deal;

/* What a worker knows: the hand that it takes from, and how many, with that, it has not yet found
 * empty. */
typedef struct fattn_cpu_items {
    fattn_cpu_deal *deal;
    int hand, left;
} fattn_cpu_items;

/* Deals a hand to each worker where that gives none of them more than its share. Otherwise all
 * items go to one hand. */
void fattn_cpu_deal_out(fattn_cpu_deal *deal, int64_t count, int workers, fattn_cpu_share share);

/* The items as worker number `worker` takes them. */
fattn_cpu_items fattn_cpu_items_of(fattn_cpu_deal *deal, int worker);

/* The next item; false when there are none left. */
bool fattn_cpu_take(fattn_cpu_items *items, int64_t *item);

/* The item that would be taken now, or one past the last: a hint what to prefetch. */
int64_t fattn_cpu_upcoming(const fattn_cpu_items *items);

#endif
