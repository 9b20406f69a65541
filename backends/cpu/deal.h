/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the items of a phase are distributed among its workers.
 *
 * If there are few items, each worker has a queue of its own, its hand, with the same items in
 * every run of a plan. It begins with those: a run that reads the same memory as the run before it,
 * as in decoding, then finds that memory in the core's cache. A worker whose hand is empty takes
 * items from the hands of others, which have not come or are slower. If there are many items, all
 * workers take from one hand, in ascending order. Of items that take differently long, those that
 * take longest come first then; and a worker that waits for a lower item waits for one that some
 * thread has begun.
 */
#ifndef FATTN_CPU_DEAL_H
#define FATTN_CPU_DEAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define FATTN_CPU_HANDS 32 /* the most hands of a phase; further workers share them */

/* How many items a worker may have in a hand of its own: none where items wait for lower ones, one
 * where they take differently long, several where they are alike. */
typedef enum fattn_cpu_share {
    FATTN_CPU_NONE = 0,
    FATTN_CPU_ONE = 1,
    FATTN_CPU_SEVERAL = 8,
} fattn_cpu_share;

typedef struct fattn_cpu_hand {
    /* How many of its items are taken; a cache line holds four such counters. */
    _Alignas(16) atomic_int_least64_t taken;
} fattn_cpu_hand;

/* Item n is in hand n % hands. */
typedef struct fattn_cpu_deal {
    int64_t count; /* items 0 .. count - 1 */
    int hands;
    fattn_cpu_hand hand[FATTN_CPU_HANDS];
} fattn_cpu_deal;

/* A worker's position: the hand that it takes from, and how many hands, including that one, it has
 * not yet found empty. */
typedef struct fattn_cpu_items {
    fattn_cpu_deal *deal;
    int hand, left;
} fattn_cpu_items;

/* Gives each worker a hand if that leaves none with more items than `share`. Otherwise all items go
 * to one hand. */
void fattn_cpu_deal_out(fattn_cpu_deal *deal, int64_t count, int workers, fattn_cpu_share share);

/* The items as seen by worker number `worker`. */
fattn_cpu_items fattn_cpu_items_of(fattn_cpu_deal *deal, int worker);

/* Takes the next item. Returns false if none is left. */
bool fattn_cpu_take(fattn_cpu_items *items, int64_t *item);

/* The item that would be taken now, or `count` if there is none: a hint for prefetching. */
int64_t fattn_cpu_upcoming(const fattn_cpu_items *items);

#endif
