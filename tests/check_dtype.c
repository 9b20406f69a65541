/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares the conversions of core/dtype.h with a second method: ldexp computes the value of every
 * code of a narrow format, and rounding looks up the two codes around a number. Midpoints of
 * neighbouring codes are exact in double, so the lookup is exact.
 *
 *     check_dtype          about 10^7 floats: every exponent, every rounding boundary, random ones
 *     check_dtype --all    all 2^32 floats
 */
#include <fenv.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "core/dtype.h"
#include "tests/tap.h"
#include "tools/judge/random.h"

/* -------------------------------------------------------------------------------------------------
 * A source of random words
 * ---------------------------------------------------------------------------------------------- */

static uint64_t random_word(void)
{
    static draw_rng rng = {20240229};
    return draw_bits(&rng);
}

static double double_of(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* -------------------------------------------------------------------------------------------------
 * The formats and the second method
 * ---------------------------------------------------------------------------------------------- */

static uint32_t f16_from_f32(float x) { return fattn_f16_from_f32(x); }
static uint32_t f16_from_f64(double x) { return fattn_f16_from_f64(x); }
static float f16_to_f32(uint32_t code) { return fattn_f16_to_f32((uint16_t)code); }
static uint32_t bf16_from_f32(float x) { return fattn_bf16_from_f32(x); }
static uint32_t bf16_from_f64(double x) { return fattn_bf16_from_f64(x); }
static float bf16_to_f32(uint32_t code) { return fattn_bf16_to_f32((uint16_t)code); }
static uint32_t e4m3_from_f32(float x) { return fattn_e4m3_from_f32(x); }
static uint32_t e4m3_from_f64(double x) { return fattn_e4m3_from_f64(x); }
static float e4m3_to_f32(uint32_t code) { return fattn_e4m3_to_f32((uint8_t)code); }

typedef struct format {
    const char *name;
    int bits, mant, bias;
    uint32_t overflow; /* code of everything too large; every smaller code is finite */
    uint32_t infinity; /* code of infinity where there is one, else UINT32_MAX */
    uint32_t nan;      /* quiet, no payload */
    uint32_t payload;  /* bits of a NaN that f32 keeps, and those that it adds */
    uint32_t nan_adds;
    uint32_t (*from_f32)(float);
    uint32_t (*from_f64)(double);
    float (*to_f32)(uint32_t);
    double *value;    /* [overflow + 1]; the last one as if the exponent range continued */
    double *midpoint; /* [overflow]: between codes c and c + 1 */
    uint32_t *edge;   /* [2 * overflow]: the floats equal to those values and midpoints */
} format;

/* clang-format off */
static format formats[] = {
    {.name = "f16", .bits = 16, .mant = 10, .bias = 15,
     .overflow = 0x7c00, .infinity = 0x7c00, .nan = 0x7e00, .payload = 0x3ff, .nan_adds = 0x400000,
     .from_f32 = f16_from_f32, .from_f64 = f16_from_f64, .to_f32 = f16_to_f32},
    {.name = "bf16", .bits = 16, .mant = 7, .bias = 127,
     .overflow = 0x7f80, .infinity = 0x7f80, .nan = 0x7fc0, .payload = 0x7f, .nan_adds = 0,
     .from_f32 = bf16_from_f32, .from_f64 = bf16_from_f64, .to_f32 = bf16_to_f32},
    {.name = "e4m3", .bits = 8, .mant = 3, .bias = 7,
     .overflow = 0x7e, .infinity = UINT32_MAX, .nan = 0x7f, .payload = 0, .nan_adds = 0x400000,
     .from_f32 = e4m3_from_f32, .from_f64 = e4m3_from_f64, .to_f32 = e4m3_to_f32},
};
/* clang-format on */
#define FORMATS ((int)(sizeof formats / sizeof formats[0]))

static void format_tabulate(format *f)
{
    const uint32_t normal = 1u << f->mant;

    f->value = malloc((f->overflow + 1) * sizeof *f->value);
    f->midpoint = malloc(f->overflow * sizeof *f->midpoint);
    f->edge = malloc(2 * f->overflow * sizeof *f->edge);
    if (!f->value || !f->midpoint || !f->edge) {
        tap_bail("out of memory");
    }
    for (uint32_t code = 0; code <= f->overflow; code++) {
        const uint32_t exponent = code >> f->mant, fraction = code % normal;
        f->value[code] = exponent == 0
                             ? ldexp(fraction, 1 - f->bias - f->mant)
                             : ldexp(normal + fraction, (int)exponent - f->bias - f->mant);
    }
    for (uint32_t code = 0; code < f->overflow; code++) {
        f->midpoint[code] = (f->value[code] + f->value[code + 1]) / 2;
        f->edge[2 * code] = fattn_f32_bits((float)f->value[code]); /* both exact */
        f->edge[2 * code + 1] = fattn_f32_bits((float)f->midpoint[code]);
    }
}

/* True when magnitude rounds to a code above `code`: past the midpoint, or on it and code odd. */
static int rounds_above(const format *f, uint32_t code, double magnitude)
{
    return magnitude > f->midpoint[code] || (magnitude == f->midpoint[code] && code % 2 == 1);
}

/* x must not be a NaN. */
static uint32_t expected_code(const format *f, double x)
{
    const uint32_t sign = signbit(x) ? 1u << (f->bits - 1) : 0;
    uint32_t low = 0, high = f->overflow; /* the code is in low .. high */

    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (rounds_above(f, middle, fabs(x))) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return sign | low;
}

/* A NaN with this sign whose mantissa, as a fraction of its format's, is payload / 2^52. */
static uint32_t expected_nan(const format *f, int sign, uint64_t payload)
{
    return (uint32_t)sign << (f->bits - 1) | f->nan | (uint32_t)(payload >> (52 - f->mant));
}

/* -------------------------------------------------------------------------------------------------
 * f32 -> narrow
 * ---------------------------------------------------------------------------------------------- */

typedef struct tally {
    const format *f;
    int64_t tried, wrong;
} tally;

static void compare(tally *t, const char *source, uint64_t pattern, uint32_t got, uint32_t want)
{
    t->tried++;
    if (got != want && t->wrong++ < 5) {
        printf("# %s %0*" PRIx64 " -> %s %0*" PRIx32 ", want %0*" PRIx32 "\n", source,
               source[1] == '3' ? 8 : 16, pattern, t->f->name, t->f->bits / 4, got, t->f->bits / 4,
               want);
    }
}

static void compare_f32(void *context, uint32_t pattern)
{
    tally *t = context;
    const float x = fattn_f32_from_bits(pattern);
    const uint32_t want =
        isnan(x) ? expected_nan(t->f, pattern >> 31, (uint64_t)(pattern & 0x7fffffu) << 29)
                 : expected_code(t->f, x);
    compare(t, "f32", pattern, t->f->from_f32(x), want);
}

/* Calls visit for floats of both signs: every exponent with mantissas near powers of two, the
 * neighbourhood of every value and midpoint of the format, and `randoms` random patterns. */
static void visit_floats(const format *f, int randoms, void (*visit)(void *, uint32_t),
                         void *context)
{
    for (uint32_t exponent = 0; exponent < 512; exponent++) { /* sign and exponent */
        for (int k = 0; k <= 23; k++) {
            for (uint32_t d = 0; d < 8; d++) {
                visit(context, exponent << 23 | (((1u << k) - 4 + d) & 0x7fffffu));
            }
        }
    }
    for (uint32_t n = 0; n < 2 * f->overflow; n++) {
        for (uint32_t d = 0; d <= 6; d++) {
            visit(context, (f->edge[n] + d - 3) & 0x7fffffffu);
            visit(context, (f->edge[n] + d - 3) | 0x80000000u);
        }
    }
    for (int n = 0; n < randoms; n++) {
        const uint64_t word = random_word();
        visit(context, (uint32_t)word);
        /* and one whose exponent lies in the range of f16 and e4m3, or just outside */
        visit(context, ((uint32_t)(word >> 32) & 0x807fffffu) | (96 + word % 64) << 23);
    }
}

/* Every float. The code can only grow with the magnitude, so the lookup proceeds linearly. */
static void compare_all_floats(tally *t)
{
    const format *const f = t->f;
    const uint32_t sign = 1u << (f->bits - 1);
    uint32_t want = 0;

    for (uint32_t pattern = 0; pattern <= 0x7f800000u; pattern++) {
        const float x = fattn_f32_from_bits(pattern);
        while (want < f->overflow && rounds_above(f, want, x)) want++;
        compare(t, "f32", pattern, f->from_f32(x), want);
        compare(t, "f32", pattern | 0x80000000u, f->from_f32(-x), want | sign);
    }
    for (uint32_t pattern = 0x7f800001u; pattern <= 0x7fffffffu; pattern++) {
        compare_f32(t, pattern);
        compare_f32(t, pattern | 0x80000000u);
    }
}

static void check_from_f32(const format *f, int all)
{
    tally t = {f, 0, 0};

    if (all) {
        compare_all_floats(&t);
    } else {
        visit_floats(f, 1000000, compare_f32, &t);
    }
    tap_check(t.wrong == 0 && (!all || t.tried == INT64_C(1) << 32),
              "f32 -> %s: nearest, ties to even, %" PRId64 " floats", f->name, t.tried);
}

/* -------------------------------------------------------------------------------------------------
 * f64 -> narrow
 * ---------------------------------------------------------------------------------------------- */

static void compare_f64(tally *t, uint64_t pattern)
{
    const double x = double_of(pattern);
    const uint32_t want =
        isnan(x) ? expected_nan(t->f, (int)(pattern >> 63), pattern & (UINT64_MAX >> 12))
                 : expected_code(t->f, x);
    compare(t, "f64", pattern, t->f->from_f64(x), want);
}

/* A double of either sign whose exponent lies in the range of f32, or just outside. */
static uint64_t random_f32_range(void)
{
    return (random_word() & UINT64_C(0x800fffffffffffff)) | (uint64_t)(868 + random_word() % 290)
                                                                << 52;
}

static void check_from_f64(const format *f)
{
    tally t = {f, 0, 0};
    int64_t twice = 0; /* doubles that rounding via f32 would round wrongly */

    for (uint32_t code = 0; code < f->overflow; code++) {
        const double centres[] = {f->value[code], f->midpoint[code]};
        for (int n = 0; n < 2; n++) {
            const uint64_t centre = fattn_f64_bits(centres[n]);
            for (uint64_t d = 0; d <= 4; d++) {
                const uint64_t pattern = (centre + d - 2) & INT64_MAX;
                compare_f64(&t, pattern);
                compare_f64(&t, pattern | UINT64_C(1) << 63);
                twice += f->from_f32((float)double_of(pattern)) != f->from_f64(double_of(pattern));
            }
        }
    }
    for (uint64_t exponent = 0; exponent < 4096; exponent++) {
        for (int k = 0; k <= 52; k++) {
            compare_f64(&t, exponent << 52 | ((UINT64_C(1) << k) - (k > 0)));
        }
    }
    for (int n = 0; n < 1000000; n++) {
        compare_f64(&t, random_word());
        compare_f64(&t, random_f32_range());
    }
    tap_check(t.wrong == 0 && twice > 0, "f64 -> %s: rounded once, %" PRId64 " doubles", f->name,
              t.tried);
}

/* Compares with the processor's rounding of double to f32. */
static void check_f32_from_f64(void)
{
    int64_t wrong = 0;
    for (int n = 0; n < 4000000; n++) {
        const uint64_t word = random_word();
        /* any double; one in f32's range; a midpoint of two floats or a neighbour of one */
        const uint64_t midpoint =
            fattn_f64_bits((double)fattn_f32_from_bits((uint32_t)word)) + (UINT64_C(1) << 28);
        const uint64_t patterns[] = {word, random_f32_range(), midpoint + (word >> 32) % 3 - 1};
        for (int k = 0; k < 3; k++) {
            const double x = double_of(patterns[k]);
            const uint32_t got = fattn_f32_bits(fattn_f32_from_f64(x));
            const uint32_t want = fattn_f32_bits((float)x);
            if (got != want && wrong++ < 5) {
                printf("# f64 %016" PRIx64 " -> f32 %08" PRIx32 ", want %08" PRIx32 "\n",
                       patterns[k], got, want);
            }
        }
    }
    tap_check(wrong == 0, "f64 -> f32: as the processor rounds");
}

/* -------------------------------------------------------------------------------------------------
 * narrow -> f32
 * ---------------------------------------------------------------------------------------------- */

static void check_to_f32(const format *f)
{
    const uint32_t sign = 1u << (f->bits - 1);
    int64_t wrong = 0;

    for (uint32_t code = 0; code < 2 * sign; code++) {
        const uint32_t magnitude = code & (sign - 1);
        const float x = f->to_f32(code);
        const int finite = magnitude <= f->overflow && magnitude != f->infinity;
        int right;
        if (finite || magnitude == f->infinity) {
            right = fabs((double)x) == (finite ? f->value[magnitude] : (double)INFINITY);
        } else {
            const uint32_t mantissa = (magnitude & f->payload) << (23 - f->mant) | f->nan_adds;
            right = isnan(x) && (fattn_f32_bits(x) & 0x7fffffu) == mantissa;
        }
        right = right && !signbit(x) == !(code & sign);
        if (!right && wrong++ < 5) {
            printf("# %s %0*" PRIx32 " -> f32 %08" PRIx32 "\n", f->name, f->bits / 4, code,
                   fattn_f32_bits(x));
        }
    }
    tap_check(wrong == 0, "%s -> f32: exact for all %" PRIu32 " codes", f->name, 2 * sign);
}

/* -------------------------------------------------------------------------------------------------
 * A third method for f16, where the compiler has the type
 * ---------------------------------------------------------------------------------------------- */

#if defined(__FLT16_MANT_DIG__)
__extension__ typedef _Float16 half;

static void compare_compiler_f16(void *context, uint32_t pattern)
{
    int64_t *const wrong = context;
    const float x = fattn_f32_from_bits(pattern);
    const half h = (half)x;
    uint16_t want;
    memcpy(&want, &h, sizeof want);
    *wrong += !isnan(x) && fattn_f16_from_f32(x) != want;
}

static void check_compiler_f16(void)
{
    int64_t wrong = 0;
    for (uint32_t code = 0; code < 0x10000; code++) {
        const uint16_t bits = (uint16_t)code;
        half h;
        memcpy(&h, &bits, sizeof h);
        const float got = fattn_f16_to_f32(bits), want = (float)h;
        wrong += isnan(want) ? !isnan(got) : fattn_f32_bits(got) != fattn_f32_bits(want);
    }
    visit_floats(&formats[0], 100000, compare_compiler_f16, &wrong);
    tap_check(wrong == 0, "f16: as the compiler's _Float16");
}
#else
static void check_compiler_f16(void)
{
    tap_check(1, "f16: as the compiler's _Float16 # SKIP the compiler has no _Float16");
}
#endif

/* -------------------------------------------------------------------------------------------------
 * The environment must not matter
 * ---------------------------------------------------------------------------------------------- */

typedef struct digest {
    const format *f;
    uint64_t hash;
} digest;

static void digest_add(digest *d, uint32_t word)
{
    d->hash = (d->hash ^ word) * UINT64_C(0x100000001b3); /* FNV-1a over words */
}

static void digest_float(void *context, uint32_t pattern)
{
    digest *d = context;
    digest_add(d, d->f->from_f32(fattn_f32_from_bits(pattern)));
    /* a double with the same exponent, and bits past those of a float */
    const double x = double_of(((uint64_t)pattern << 29) | (pattern * 2654435761u & 0x1fffffffu));
    digest_add(d, d->f->from_f64(x));
    digest_add(d, fattn_f32_bits(fattn_f32_from_f64(x)));
}

static uint64_t digest_of_everything(void)
{
    digest d = {NULL, UINT64_C(0xcbf29ce484222325)};
    for (int n = 0; n < FORMATS; n++) {
        d.f = &formats[n];
        visit_floats(d.f, 0, digest_float, &d);
        for (uint32_t code = 0; code < 1u << d.f->bits; code++) {
            digest_add(&d, fattn_f32_bits(d.f->to_f32(code)));
        }
    }
    return d.hash;
}

static void check_environment(void)
{
    const uint64_t want = digest_of_everything();
    const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    int same = 1;

    for (int n = 0; n < 3; n++) {
        fesetround(modes[n]);
        same &= digest_of_everything() == want;
    }
    fesetround(FE_TONEAREST);
    tap_check(same, "no rounding mode changes a result");

#if defined(__SSE2__)
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040); /* flush-to-zero, denormals-are-zero */
    same = digest_of_everything() == want;
    _mm_setcsr(control);
    tap_check(same, "flush-to-zero changes no result");
#else
    tap_check(1, "flush-to-zero changes no result # SKIP no portable way to set it");
#endif
}

/* -------------------------------------------------------------------------------------------------
 * Names, sizes, arrays
 * ---------------------------------------------------------------------------------------------- */

static void check_names(void)
{
    static const struct {
        fattn_dtype dtype;
        const char *name;
        int64_t size;
    } rows[] = {{FATTN_F32, "f32", 4},
                {FATTN_F16, "f16", 2},
                {FATTN_BF16, "bf16", 2},
                {FATTN_F64, "f64", 8},
                {FATTN_E4M3, "e4m3", 1}};
    int right = 1;

    for (int n = 0; n < 5; n++) {
        right &= fattn_dtype_size(rows[n].dtype) == rows[n].size;
        right &= strcmp(fattn_dtype_name(rows[n].dtype), rows[n].name) == 0;
    }
    tap_check(right, "every type has its name and size");

    static const int unknown[] = {0, 6, -1, 1000};
    right = 1;
    for (int n = 0; n < 4; n++) {
        right &= fattn_dtype_size((fattn_dtype)unknown[n]) == 0;
        right &= strcmp(fattn_dtype_name((fattn_dtype)unknown[n]), "unknown") == 0;
    }
    tap_check(right, "what is no type has neither");
}

static void check_arrays(void)
{
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16, FATTN_F64, FATTN_E4M3};
    static const double stored[] = {-0x1.fp-3, 0x1.23456789abcdp0};
    static const double read[5][2] = {{-0x1.fp-3, 0x1.234568p0},
                                      {-0x1.fp-3, 0x1.234p0},
                                      {-0x1.fp-3, 0x1.24p0},
                                      {-0x1.fp-3, 0x1.23456789abcdp0},
                                      {-0x1.0p-2, 0x1.2p0}};
    int right = 1;

    for (int n = 0; n < 5; n++) {
        const size_t size = (size_t)fattn_dtype_size(dtypes[n]);
        double storage[4];
        unsigned char *const bytes = (unsigned char *)storage;
        memset(storage, 0xa5, sizeof storage);
        fattn_dtype_store(dtypes[n], storage, 1, stored[0]);
        fattn_dtype_store(dtypes[n], storage, 2, stored[1]);
        right &= fattn_dtype_load(dtypes[n], storage, 1) == read[n][0];
        right &= fattn_dtype_load(dtypes[n], storage, 2) == read[n][1];
        for (size_t k = 0; k < size; k++) {
            right &= bytes[k] == 0xa5 && bytes[3 * size + k] == 0xa5;
        }
    }
    tap_check(right, "elements of arrays of every type are stored rounded and loaded exactly");
}

int main(int argc, char **argv)
{
    const int all = argc == 2 && strcmp(argv[1], "--all") == 0;
    if (argc > 1 && !all) {
        fprintf(stderr, "usage: %s [--all]\n", argv[0]);
        return 2;
    }
    for (int n = 0; n < FORMATS; n++) format_tabulate(&formats[n]);

    check_names();
    check_arrays();
    for (int n = 0; n < FORMATS; n++) check_to_f32(&formats[n]);
    for (int n = 0; n < FORMATS; n++) check_from_f32(&formats[n], all);
    for (int n = 0; n < FORMATS; n++) check_from_f64(&formats[n]);
    check_f32_from_f64();
    check_compiler_f16();
    check_environment();

    for (int n = 0; n < FORMATS; n++) {
        free(formats[n].value);
        free(formats[n].midpoint);
        free(formats[n].edge);
    }
    return tap_done();
}
