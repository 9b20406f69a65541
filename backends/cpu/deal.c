/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/cpu/deal.h"

#include "core/integer.h"

void fattn_cpu_deal_out(fattn_cpu_deal *deal, int64_t count, int workers, fattn_cpu_share share)
{
    const int64_t most = fattn_min64(workers, FATTN_CPU_HANDS);
    const bool few = count > 0 && count <= (int64_t)workers * (int)share;
    deal->count = count;
    deal->hands = few ? (int)fattn_min64(count, most) : 1;
    for (int h = 0; h < deal->hands; h++) {
        atomic_init(&deal->hand[h].taken, 0);
    }
}

fattn_cpu_items fattn_cpu_items_of(fattn_cpu_deal *deal, int worker)
{
    return (fattn_cpu_items){.deal = deal, .hand = worker % deal->hands, .left = deal->hands};
}

static int64_t item_of(const fattn_cpu_items *items, int64_t taken)
{
    return items->hand + taken * items->deal->hands;
}

int64_t fattn_cpu_upcoming(const fattn_cpu_items *items)
{
    const fattn_cpu_deal *const deal = items->deal;
    const int64_t item =
        item_of(items, atomic_load_explicit(&deal->hand[items->hand].taken, memory_order_relaxed));
    return item < deal->count ? item : deal->count;
}

/* Hands are never refilled. An empty hand is only read: writing to its counter would take its cache
 * line away from the other workers that look at it. */
bool fattn_cpu_take(fattn_cpu_items *items, int64_t *item)
{
    fattn_cpu_deal *const deal = items->deal;
    for (; items->left > 0; items->left--) {
        if (fattn_cpu_upcoming(items) < deal->count) {
            *item = item_of(items, atomic_fetch_add_explicit(&deal->hand[items->hand].taken, 1,
                                                             memory_order_relaxed));
            if (*item < deal->count) {
                return true;
            }
        }
        items->hand = (items->hand + 1) % deal->hands;
    }
    return false;
}
