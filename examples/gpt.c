/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small GPT that learns to write like a text file, character by character, to show fattn in
 * training: attention goes through the public API, forward and backward, on whatever device
 * FATTN_BACKEND names; all the rest is plain C. With --materialised the attention is written out
 * with its matrix of probabilities instead, and everything else, random numbers included, stays as
 * it is: the losses agree.
 *
 * The model is that of GPT-2 without biases: characters and positions are embedded, each layer adds
 * attention and then an MLP to what it is given, both of its normalised input, and a last product
 * gives the logits of the next character. Letters: B sequences of T characters, R = B T rows, C
 * channels, H heads of D = C / H channels, V characters in the vocabulary.
 *
 * Order: options, random numbers, products, operations and their derivatives, attention, the model,
 * the optimiser, the text, checkpoints, sampling, main.
 */
#include <errno.h>
#include <fattn/fattn.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WRONG_INPUT = 2, FAILED = 3, MAX_LAYERS = 64 };

/* Ends the program with one line on stderr. */
static void quit(int status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("gpt: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(status);
}

static void *allocate(int64_t count, size_t size)
{
    void *const memory = calloc(count ? (size_t)count : 1, size);
    if (!memory) {
        quit(FAILED, "no memory for %.1f MB", (double)count * (double)size / 1e6);
    }
    return memory;
}

static float *floats(int64_t count) { return allocate(count, sizeof(float)); }

static double seconds(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* -------------------------------------------------------------------------------------------------
 * Options
 * ---------------------------------------------------------------------------------------------- */

typedef struct shape {
    int64_t layers, heads, width, context, vocabulary; /* width: C; context: the longest T */
} shape;

typedef struct settings {
    shape shape;
    int64_t steps, batch, seed, every, sample;
    double rate;
    bool materialised;
    const char *text, *save, *load;
} settings;

static const char usage[] =
    "usage: gpt [OPTION ...] TEXT\n"
    "       gpt --load FILE [OPTION ...]\n\n"
    "Trains a small GPT on the characters of a text file, then writes some text of its own.\n\n"
    "  --steps N       train up to this step; default 200\n"
    "  --batch N       sequences a step; default 16\n"
    "  --context N     characters a sequence; default 128\n"
    "  --layers N      default 4\n"
    "  --heads N       default 4\n"
    "  --width N       channels; default 128\n"
    "  --rate R        learning rate; default 0.002\n"
    "  --seed N        of weights, sequences and samples; default 1\n"
    "  --every N       steps a line of the report; default 10\n"
    "  --materialised  attention written out here instead of fattn's\n"
    "  --save FILE     write a checkpoint after training\n"
    "  --load FILE     go on from a checkpoint; without TEXT only to sample\n"
    "  --sample N      characters to write at the end; default 300\n"
    "  --help          this text\n\n"
    "exit status: 0 done, 2 wrong option, text or checkpoint, 3 fattn or memory failed\n";

static void check_heads(const char *where, const shape *s)
{
    if (s->width % s->heads != 0 || s->width / s->heads > 256) {
        quit(WRONG_INPUT, "%s: %lld channels cannot be cut into %lld heads of 1 to 256", where,
             (long long)s->width, (long long)s->heads);
    }
}

static double number(const char *name, const char *text, double low, double high, bool whole)
{
    char *end = NULL;
    const double value = text ? strtod(text, &end) : 0;
    if (!text || end == text || *end || !(value >= low && value <= high) ||
        (whole && value != floor(value))) {
        quit(WRONG_INPUT, "%s needs %s between %g and %g", name, whole ? "an integer" : "a number",
             low, high);
    }
    return value;
}

static settings parse(int argc, char **argv)
{
    settings s = {
        .steps = 200,
        .batch = 16,
        .seed = 1,
        .every = 10,
        .sample = 300,
        .rate = 0.002,
    };
    const struct {
        const char *name;
        int64_t *value;
        double low, high;
    } integers[] = {
        {"--steps", &s.steps, 0, 1e9},
        {"--batch", &s.batch, 1, 4096},
        {"--context", &s.shape.context, 1, 8192},
        {"--layers", &s.shape.layers, 1, MAX_LAYERS},
        {"--heads", &s.shape.heads, 1, 256},
        {"--width", &s.shape.width, 1, 4096},
        {"--seed", &s.seed, 0, 1e15},
        {"--every", &s.every, 1, 1e9},
        {"--sample", &s.sample, 0, 1e9},
    };
    const struct {
        const char *name, **value;
    } words[] = {{"--save", &s.save}, {"--load", &s.load}};
    for (int i = 1; i < argc; i++) {
        const char *const name = argv[i];
        bool known = false;
        for (size_t n = 0; n < sizeof integers / sizeof integers[0] && !known; n++) {
            if ((known = strcmp(name, integers[n].name) == 0)) {
                *integers[n].value =
                    (int64_t)number(name, argv[++i], integers[n].low, integers[n].high, true);
            }
        }
        for (size_t n = 0; n < sizeof words / sizeof words[0] && !known; n++) {
            if ((known = strcmp(name, words[n].name) == 0) && !(*words[n].value = argv[++i])) {
                quit(WRONG_INPUT, "%s needs the name of a file", name);
            }
        }
        if (known) {
            continue;
        }
        if (strcmp(name, "--help") == 0) {
            fputs(usage, stdout);
            exit(0);
        } else if (strcmp(name, "--rate") == 0) {
            s.rate = number(name, argv[++i], 1e-9, 1, false);
        } else if (strcmp(name, "--materialised") == 0) {
            s.materialised = true;
        } else if (name[0] == '-' || s.text) {
            quit(WRONG_INPUT, "unknown argument \"%s\"; gpt --help lists the options", name);
        } else {
            s.text = name;
        }
    }
    if (!s.text && !s.load) {
        quit(WRONG_INPUT, "needs the name of a text file; gpt --help lists the options");
    }
    shape *const a = &s.shape;
    if (s.load && (a->layers || a->heads || a->width || a->context)) {
        quit(WRONG_INPUT, "--layers, --heads, --width and --context come from the checkpoint");
    }
    a->layers = a->layers ? a->layers : 4;
    a->heads = a->heads ? a->heads : 4;
    a->width = a->width ? a->width : 128;
    a->context = a->context ? a->context : 128;
    check_heads("options", a);
    return s;
}

/* -------------------------------------------------------------------------------------------------
 * Random numbers: Steele, Lea and Flood's SplitMix64
 * ---------------------------------------------------------------------------------------------- */

static uint64_t random_bits(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* In [0, 1). */
static double random_unit(uint64_t *state) { return (double)(random_bits(state) >> 11) * 0x1p-53; }

static double random_normal(uint64_t *state)
{
    const double radius = sqrt(-2 * log(1 - random_unit(state)));
    return radius * cos(6.283185307179586 * random_unit(state));
}

/* -------------------------------------------------------------------------------------------------
 * Matrix products
 * ---------------------------------------------------------------------------------------------- */

/* Entry (i, j) of a matrix is at[i * row + j * column]: a transpose is an exchange of strides. */
typedef struct view {
    float *at;
    int64_t row, column;
} view;

static view rows_of(float *at, int64_t row) { return (view){at, row, 1}; }
static view transposed(view a) { return (view){a.at, a.column, a.row}; }

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

/* A panel of b fits in a first-level cache: 32 KiB. */
enum { DEPTH = 128, COLUMNS = 64, ROWS = 64 };

/* c[j] += sum over p of x[p] b[p][j]. Eight rows at a time, so that c is loaded and stored once for
 * sixteen operations; a compiler makes vectors of the loop over j. */
static void add_rows(int64_t n, const float x[DEPTH], float b[DEPTH][COLUMNS], float *restrict c)
{
    for (int p = 0; p < DEPTH; p += 8) {
        const float *const y = x + p, *const r = b[p];
        for (int64_t j = 0; j < n; j++) {
            c[j] += ((y[0] * r[j] + y[1] * r[COLUMNS + j]) +
                     (y[2] * r[2 * COLUMNS + j] + y[3] * r[3 * COLUMNS + j])) +
                    ((y[4] * r[4 * COLUMNS + j] + y[5] * r[5 * COLUMNS + j]) +
                     (y[6] * r[6 * COLUMNS + j] + y[7] * r[7 * COLUMNS + j]));
        }
    }
}

/* The block of c = a b, or c += a b, that begins at row i0 and column j0. */
static void multiply_block(int64_t i0, int64_t j0, int64_t m, int64_t n, int64_t k, view a, view b,
                           view c, bool add)
{
    float panel[DEPTH][COLUMNS], x[DEPTH];
    const int64_t height = min(m - i0, ROWS), width = min(n - j0, COLUMNS);
    for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
        const int64_t depth = min(k - k0, DEPTH);
        for (int64_t p = 0; p < DEPTH; p++) {
            for (int64_t j = 0; j < width; j++) {
                panel[p][j] = p < depth ? b.at[(k0 + p) * b.row + (j0 + j) * b.column] : 0;
            }
        }
        for (int64_t i = i0; i < i0 + height; i++) {
            float *const to = c.at + i * c.row + j0;
            for (int64_t p = 0; p < DEPTH; p++) {
                x[p] = p < depth ? a.at[i * a.row + (k0 + p) * a.column] : 0;
            }
            if (k0 == 0 && !add) {
                memset(to, 0, (size_t)width * sizeof *to);
            }
            add_rows(width, x, panel, to);
        }
    }
}

/* c = a b, or c += a b: m x n, by way of k. The columns of c lie side by side. Each entry is summed
 * by one thread in one order, so results do not depend on the number of threads. */
static void multiply(int64_t m, int64_t n, int64_t k, view a, view b, view c, bool add)
{
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t i0 = 0; i0 < m; i0 += ROWS) {
        for (int64_t j0 = 0; j0 < n; j0 += COLUMNS) {
            multiply_block(i0, j0, m, n, k, a, b, c, add);
        }
    }
}

/* y (R, out) = x (R, in) w (in, out) */
static void linear_forward(int64_t rows, int64_t in, int64_t out, float *x, float *w, float *y)
{
    multiply(rows, out, in, rows_of(x, in), rows_of(w, out), rows_of(y, out), false);
}

/* Of y = x w: dw += x^T dy, dx = dy w^T. */
static void linear_backward(int64_t rows, int64_t in, int64_t out, float *x, float *w, float *dy,
                            float *dx, float *dw)
{
    multiply(in, out, rows, transposed(rows_of(x, in)), rows_of(dy, out), rows_of(dw, out), true);
    multiply(rows, in, out, rows_of(dy, out), transposed(rows_of(w, out)), rows_of(dx, in), false);
}

/* -------------------------------------------------------------------------------------------------
 * Operations on rows
 * ---------------------------------------------------------------------------------------------- */

/* y = gain (x - mean) / deviation; stats (R, 2) keeps the mean and 1 / deviation. */
static void norm_forward(int64_t rows, int64_t width, const float *x, const float *gain, float *y,
                         float *stats)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const float *const in = x + r * width;
        float sum = 0, squares = 0;
        for (int64_t c = 0; c < width; c++) {
            sum += in[c];
        }
        const float mean = sum / (float)width;
        for (int64_t c = 0; c < width; c++) {
            squares += (in[c] - mean) * (in[c] - mean);
        }
        const float scale = 1 / sqrtf(squares / (float)width + 1e-5f);
        for (int64_t c = 0; c < width; c++) {
            y[r * width + c] = gain[c] * ((in[c] - mean) * scale);
        }
        stats[2 * r] = mean;
        stats[2 * r + 1] = scale;
    }
}

/* Of y = gain n, n = (x - mean) scale: with dn = gain dy,
 * dx += scale (dn - mean of dn - n (mean of n dn)); dgain += n dy, summed in the order of rows. */
static void norm_backward(int64_t rows, int64_t width, const float *x, const float *gain,
                          const float *stats, const float *dy, float *dx, float *dgain)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const float *const in = x + r * width, *const dout = dy + r * width;
        const float mean = stats[2 * r], scale = stats[2 * r + 1];
        float first = 0, second = 0;
        for (int64_t c = 0; c < width; c++) {
            const float dn = gain[c] * dout[c];
            first += dn;
            second += dn * ((in[c] - mean) * scale);
        }
        for (int64_t c = 0; c < width; c++) {
            const float n = (in[c] - mean) * scale;
            dx[r * width + c] += scale * (gain[c] * dout[c] - (first + n * second) / (float)width);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < width; c++) {
            const float n = (x[r * width + c] - stats[2 * r]) * stats[2 * r + 1];
            dgain[c] += n * dy[r * width + c];
        }
    }
}

/* GELU in the form with tanh: y = x (1 + tanh(u)) / 2 with u = a (x + b x^3). x becomes dy / dx. */
static void gelu_forward(int64_t count, float *x, float *y)
{
    const float a = 0.7978845608f, b = 0.044715f;
#pragma omp parallel for
    for (int64_t n = 0; n < count; n++) {
        const float z = x[n], t = tanhf(a * (z + b * z * z * z));
        y[n] = 0.5f * z * (1 + t);
        x[n] = 0.5f * (1 + t) + 0.5f * z * (1 - t * t) * a * (1 + 3 * b * z * z);
    }
}

static void gelu_backward(int64_t count, const float *slope, float *dy)
{
    for (int64_t n = 0; n < count; n++) {
        dy[n] *= slope[n];
    }
}

/* Mean over the rows of -ln softmax(logits)[target]. The logits become their own gradient. */
static double cross_entropy(int64_t rows, int64_t vocabulary, float *logits, const uint8_t *targets)
{
    double loss = 0;
    for (int64_t r = 0; r < rows; r++) {
        float *const x = logits + r * vocabulary, largest = x[0], sum = 0;
        for (int64_t v = 1; v < vocabulary; v++) {
            largest = fmaxf(largest, x[v]);
        }
        loss -= x[targets[r]] - largest;
        for (int64_t v = 0; v < vocabulary; v++) {
            sum += x[v] = expf(x[v] - largest);
        }
        loss += log(sum);
        for (int64_t v = 0; v < vocabulary; v++) {
            x[v] = (x[v] / sum - (v == targets[r])) / (float)rows;
        }
    }
    return loss / (double)rows;
}

/* -------------------------------------------------------------------------------------------------
 * Attention: qkv (B, T, 3, H, D) -> out (B, T, H, D), causal
 * ---------------------------------------------------------------------------------------------- */

typedef struct attention {
    fattn_device *device; /* NULL: materialised */
    int64_t batch, length, heads, dim;
} attention;

static void check(fattn_status status)
{
    if (status != FATTN_OK) {
        quit(FAILED, "%s: %s", fattn_status_string(status), fattn_last_reason());
    }
}

/* q, k and v are slices of one tensor, and so are their gradients: only strides say so. */
static fattn_problem attention_problem(const attention *a, fattn_op op)
{
    const int64_t width = a->heads * a->dim;
    const fattn_strides packed = {.batch = a->length * 3 * width, .seq = 3 * width, .head = a->dim};
    const fattn_strides plain = {.batch = a->length * width, .seq = width, .head = a->dim};
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = op;
    p.layout = FATTN_STRIDED;
    p.features = FATTN_CAUSAL;
    p.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE
                                    : FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    p.batch = a->batch;
    p.heads_q = p.heads_k = a->heads;
    p.seqlen_q = p.seqlen_k = a->length;
    p.dim = p.dim_v = a->dim;
    p.q = p.k = p.v = p.dq = p.dk = p.dv = packed;
    p.o = p.dout = plain;
    return p;
}

static void fused_forward(const attention *a, float *qkv, float *out, float *lse)
{
    const int64_t width = a->heads * a->dim;
    const fattn_problem problem = attention_problem(a, FATTN_FORWARD);
    fattn_buffers b;
    fattn_buffers_init(&b);
    b.q = qkv, b.k = qkv + width, b.v = qkv + 2 * width;
    b.o = out, b.lse = lse;
    check(fattn_attention(a->device, &problem, &b, NULL));
}

static void fused_backward(const attention *a, const float *qkv, float *out, float *lse,
                           const float *dout, float *dqkv)
{
    const int64_t width = a->heads * a->dim;
    const fattn_problem problem = attention_problem(a, FATTN_BACKWARD);
    fattn_buffers b;
    fattn_buffers_init(&b);
    b.q = qkv, b.k = qkv + width, b.v = qkv + 2 * width;
    b.o = out, b.lse = lse, b.dout = dout;
    b.dq = dqkv, b.dk = dqkv + width, b.dv = dqkv + 2 * width;
    check(fattn_attention(a->device, &problem, &b, NULL));
}

/* The same with its T x T matrices: P = softmax(scale Q K^T), out = P V. probabilities (B, H, T,
 * T). */
static void written_out_forward(const attention *a, float *qkv, float *out, float *probabilities)
{
    const int64_t length = a->length, dim = a->dim, width = a->heads * dim;
    const float scale = 1 / sqrtf((float)dim);
#pragma omp parallel for
    for (int64_t n = 0; n < a->batch * a->heads; n++) {
        const int64_t b = n / a->heads, h = n % a->heads;
        float *const head = qkv + b * length * 3 * width + h * dim;
        float *const p = probabilities + n * length * length;
        multiply(length, length, dim, rows_of(head, 3 * width),
                 transposed(rows_of(head + width, 3 * width)), rows_of(p, length), false);
        for (int64_t i = 0; i < length; i++) {
            float *const x = p + i * length, largest = -INFINITY, sum = 0;
            for (int64_t j = 0; j <= i; j++) {
                largest = fmaxf(largest, x[j] *= scale);
            }
            for (int64_t j = 0; j <= i; j++) {
                sum += x[j] = expf(x[j] - largest);
            }
            for (int64_t j = 0; j < length; j++) {
                x[j] = j <= i ? x[j] / sum : 0;
            }
        }
        multiply(length, dim, length, rows_of(p, length), rows_of(head + 2 * width, 3 * width),
                 rows_of(out + b * length * width + h * dim, width), false);
    }
}

/* dP = dO V^T, dS = scale P (dP - rowsum(P dP)), dQ = dS K, dK = dS^T Q, dV = P^T dO. scores holds
 * dP and then dS, (B, H, T, T). */
static void written_out_backward(const attention *a, float *qkv, float *probabilities, float *dout,
                                 float *dqkv, float *scores)
{
    const int64_t length = a->length, dim = a->dim, width = a->heads * dim;
    const float scale = 1 / sqrtf((float)dim);
#pragma omp parallel for
    for (int64_t n = 0; n < a->batch * a->heads; n++) {
        const int64_t b = n / a->heads, h = n % a->heads;
        const int64_t at = b * length * 3 * width + h * dim;
        const view q = rows_of(qkv + at, 3 * width), k = rows_of(qkv + at + width, 3 * width);
        const view v = rows_of(qkv + at + 2 * width, 3 * width);
        const view dq = rows_of(dqkv + at, 3 * width), dk = rows_of(dqkv + at + width, 3 * width);
        const view dv = rows_of(dqkv + at + 2 * width, 3 * width);
        const view d_o = rows_of(dout + b * length * width + h * dim, width);
        const view p = rows_of(probabilities + n * length * length, length);
        const view s = rows_of(scores + n * length * length, length);
        multiply(length, length, dim, d_o, transposed(v), s, false);
        for (int64_t i = 0; i < length; i++) {
            float *const ds = s.at + i * length, sum = 0;
            const float *const prow = p.at + i * length;
            for (int64_t j = 0; j < length; j++) {
                sum += prow[j] * ds[j];
            }
            for (int64_t j = 0; j < length; j++) {
                ds[j] = scale * prow[j] * (ds[j] - sum);
            }
        }
        multiply(length, dim, length, s, k, dq, false);
        multiply(length, dim, length, transposed(s), q, dk, false);
        multiply(length, dim, length, transposed(p), d_o, dv, false);
    }
}

/* -------------------------------------------------------------------------------------------------
 * The model
 * ---------------------------------------------------------------------------------------------- */

/* Weights, their gradients or their moments, as pointers into one array that begins with the
 * gains. */
typedef struct weights {
    float *all;
    float *norm, *norm1[MAX_LAYERS], *norm2[MAX_LAYERS]; /* gains: (C) */
    float *token, *position;                             /* (V, C), (context, C) */
    float *qkv[MAX_LAYERS], *project[MAX_LAYERS];        /* (C, 3 C), (C, C) */
    float *up[MAX_LAYERS], *down[MAX_LAYERS];            /* (C, 4 C), (4 C, C) */
    float *head;                                         /* (C, V) */
} weights;

typedef struct model {
    shape shape;
    int64_t count, gains;  /* of all weights, of those that are gains */
    weights w, dw, m1, m2; /* m1, m2: moving averages of the gradients and of their squares */
    uint8_t vocabulary[256];
    uint64_t rng;
    int64_t step;
} model;

/* What forward leaves for backward of a layer. */
typedef struct layer_state {
    float *in, *stats1, *norm1;     /* (R, C), (R, 2), (R, C) */
    float *qkv, *out;               /* (R, 3 C), (R, C) */
    float *kept;                    /* lse (B, H, T), or probabilities (B, H, T, T) */
    float *middle, *stats2, *norm2; /* (R, C), (R, 2), (R, C) */
    float *up, *gelu;               /* (R, 4 C) */
} layer_state;

typedef struct state {
    attention attention; /* length: the longest */
    bool materialised;
    layer_state layer[MAX_LAYERS];
    float *end, *stats, *norm, *logits; /* (R, C), (R, 2), (R, C), (R, V) */
    float *dx, *dnorm, *dwide, *scores; /* (R, C), (R, C), (R, 4 C), (B, H, T, T) or NULL */
} state;

/* The gains come first. */
static int64_t gains_of(const shape *s) { return (1 + 2 * s->layers) * s->width; }

static int64_t weights_of(const shape *s)
{
    const int64_t c = s->width;
    return gains_of(s) + (2 * s->vocabulary + s->context) * c + 12 * s->layers * c * c;
}

static weights weights_create(const model *m)
{
    const shape *const s = &m->shape;
    const int64_t c = s->width;
    weights w = {.all = floats(m->count)};
    float *at = w.all;
    w.norm = at, at += c;
    for (int64_t l = 0; l < s->layers; l++) {
        w.norm1[l] = at, at += c;
        w.norm2[l] = at, at += c;
    }
    w.token = at, at += s->vocabulary * c;
    w.position = at, at += s->context * c;
    for (int64_t l = 0; l < s->layers; l++) {
        w.qkv[l] = at, at += 3 * c * c;
        w.project[l] = at, at += c * c;
        w.up[l] = at, at += 4 * c * c;
        w.down[l] = at, at += 4 * c * c;
    }
    w.head = at;
    return w;
}

static void model_create(model *m, const shape *s)
{
    m->shape = *s;
    m->gains = gains_of(s);
    m->count = weights_of(s);
    m->w = weights_create(m), m->dw = weights_create(m);
    m->m1 = weights_create(m), m->m2 = weights_create(m);
}

/* Gains are 1, the rest normal with deviation 0.02, less for what is added to the residual. */
static void model_draw(model *m, uint64_t seed)
{
    const shape *const s = &m->shape;
    const int64_t c = s->width;
    m->rng = seed;
    for (int64_t n = 0; n < m->count; n++) {
        m->w.all[n] = n < m->gains ? 1 : 0.02f * (float)random_normal(&m->rng);
    }
    const float less = 1 / sqrtf(2 * (float)s->layers);
    for (int64_t l = 0; l < s->layers; l++) {
        for (int64_t n = 0; n < c * c; n++) {
            m->w.project[l][n] *= less;
        }
        for (int64_t n = 0; n < 4 * c * c; n++) {
            m->w.down[l][n] *= less;
        }
    }
}

static void state_create(state *a, const model *m, int64_t batch, bool materialised,
                         fattn_device *device)
{
    const shape *const s = &m->shape;
    const int64_t c = s->width, rows = batch * s->context, heads = batch * s->heads * s->context;
    a->attention = (attention){device, batch, s->context, s->heads, c / s->heads};
    a->materialised = materialised;
    for (int64_t l = 0; l < s->layers; l++) {
        layer_state *const t = &a->layer[l];
        t->in = floats(rows * c), t->stats1 = floats(rows * 2), t->norm1 = floats(rows * c);
        t->qkv = floats(rows * 3 * c), t->out = floats(rows * c);
        t->kept = floats(materialised ? heads * s->context : heads);
        t->middle = floats(rows * c), t->stats2 = floats(rows * 2), t->norm2 = floats(rows * c);
        t->up = floats(rows * 4 * c), t->gelu = floats(rows * 4 * c);
    }
    a->end = floats(rows * c), a->stats = floats(rows * 2), a->norm = floats(rows * c);
    a->logits = floats(rows * s->vocabulary);
    a->dx = floats(rows * c), a->dnorm = floats(rows * c), a->dwide = floats(rows * 4 * c);
    a->scores = materialised ? floats(heads * s->context) : NULL;
}

/* Bytes that exist for attention's sake: what is kept for backward, and what backward needs
 * besides. */
static double attention_bytes(const state *a, int64_t layers)
{
    const attention *const t = &a->attention;
    const double heads = (double)(t->batch * t->heads * t->length) * sizeof(float);
    if (a->materialised) {
        return heads * (double)t->length * (double)(layers + 1);
    }
    int64_t workspace = 0;
    for (int op = FATTN_FORWARD; op <= FATTN_BACKWARD; op++) {
        const fattn_problem problem = attention_problem(t, (fattn_op)op);
        fattn_plan_info info = {.struct_size = sizeof info};
        fattn_plan *plan;
        check(fattn_plan_create(t->device, &problem, &plan));
        check(fattn_plan_get_info(plan, &info));
        fattn_plan_destroy(plan);
        workspace = info.workspace_bytes > workspace ? info.workspace_bytes : workspace;
    }
    return heads * (double)layers + (double)workspace;
}

/* out = a + b */
static void add(int64_t count, const float *a, const float *b, float *out)
{
    for (int64_t n = 0; n < count; n++) {
        out[n] = a[n] + b[n];
    }
}

/* Logits of the character after each of batch sequences of length characters. */
static void forward(const model *m, state *a, int64_t batch, int64_t length, const uint8_t *tokens)
{
    const shape *const s = &m->shape;
    const weights *const w = &m->w;
    const int64_t c = s->width, rows = batch * length;
    attention heads = a->attention;
    heads.batch = batch, heads.length = length;
    for (int64_t r = 0; r < rows; r++) {
        add(c, w->token + tokens[r] * c, w->position + r % length * c, a->layer[0].in + r * c);
    }
    for (int64_t l = 0; l < s->layers; l++) {
        const layer_state *const t = &a->layer[l];
        float *const next = l + 1 < s->layers ? t[1].in : a->end;
        norm_forward(rows, c, t->in, w->norm1[l], t->norm1, t->stats1);
        linear_forward(rows, c, 3 * c, t->norm1, w->qkv[l], t->qkv);
        (a->materialised ? written_out_forward : fused_forward)(&heads, t->qkv, t->out, t->kept);
        linear_forward(rows, c, c, t->out, w->project[l], t->middle);
        add(rows * c, t->in, t->middle, t->middle);
        norm_forward(rows, c, t->middle, w->norm2[l], t->norm2, t->stats2);
        linear_forward(rows, c, 4 * c, t->norm2, w->up[l], t->up);
        gelu_forward(rows * 4 * c, t->up, t->gelu);
        linear_forward(rows, 4 * c, c, t->gelu, w->down[l], next);
        add(rows * c, t->middle, next, next);
    }
    norm_forward(rows, c, a->end, w->norm, a->norm, a->stats);
    linear_forward(rows, c, s->vocabulary, a->norm, w->head, a->logits);
}

/* Gradients of all weights, from those of the logits. dx is the gradient of the residual stream. */
static void backward(const model *m, state *a, const uint8_t *tokens)
{
    const shape *const s = &m->shape;
    const weights *const w = &m->w, *const d = &m->dw;
    const attention *const heads = &a->attention;
    const int64_t c = s->width, rows = heads->batch * heads->length;
    memset(d->all, 0, (size_t)m->count * sizeof(float));
    memset(a->dx, 0, (size_t)(rows * c) * sizeof(float));
    linear_backward(rows, c, s->vocabulary, a->norm, w->head, a->logits, a->dnorm, d->head);
    norm_backward(rows, c, a->end, w->norm, a->stats, a->dnorm, a->dx, d->norm);
    for (int64_t l = s->layers - 1; l >= 0; l--) {
        const layer_state *const t = &a->layer[l];
        linear_backward(rows, 4 * c, c, t->gelu, w->down[l], a->dx, a->dwide, d->down[l]);
        gelu_backward(rows * 4 * c, t->up, a->dwide);
        linear_backward(rows, c, 4 * c, t->norm2, w->up[l], a->dwide, a->dnorm, d->up[l]);
        norm_backward(rows, c, t->middle, w->norm2[l], t->stats2, a->dnorm, a->dx, d->norm2[l]);
        linear_backward(rows, c, c, t->out, w->project[l], a->dx, a->dnorm, d->project[l]);
        if (a->materialised) {
            written_out_backward(heads, t->qkv, t->kept, a->dnorm, a->dwide, a->scores);
        } else {
            fused_backward(heads, t->qkv, t->out, t->kept, a->dnorm, a->dwide);
        }
        linear_backward(rows, c, 3 * c, t->norm1, w->qkv[l], a->dwide, a->dnorm, d->qkv[l]);
        norm_backward(rows, c, t->in, w->norm1[l], t->stats1, a->dnorm, a->dx, d->norm1[l]);
    }
    for (int64_t r = 0; r < rows; r++) {
        float *const token = d->token + tokens[r] * c;
        float *const position = d->position + r % heads->length * c;
        add(c, token, a->dx + r * c, token);
        add(c, position, a->dx + r * c, position);
    }
}

/* AdamW, with a warm-up of 20 steps, gradients clipped to length 1, and decay of all but the
 * gains. */
static void update(model *m, double rate)
{
    const float beta1 = 0.9f, beta2 = 0.99f, decay = 0.1f;
    double squares = 0;
    for (int64_t n = 0; n < m->count; n++) {
        squares += (double)m->dw.all[n] * (double)m->dw.all[n];
    }
    const double t = (double)++m->step;
    const float clip = squares > 1 ? (float)(1 / sqrt(squares)) : 1;
    const float size = (float)(rate * fmin(1, t / 20));
    const float fix1 = (float)(1 - pow(beta1, t)), fix2 = (float)(1 - pow(beta2, t));
#pragma omp parallel for
    for (int64_t n = 0; n < m->count; n++) {
        const float g = clip * m->dw.all[n];
        float *const w = m->w.all + n, *const m1 = m->m1.all + n, *const m2 = m->m2.all + n;
        *m1 = beta1 * *m1 + (1 - beta1) * g;
        *m2 = beta2 * *m2 + (1 - beta2) * g * g;
        *w -= size * (*m1 / fix1 / (sqrtf(*m2 / fix2) + 1e-8f) + (n < m->gains ? 0 : decay * *w));
    }
}

/* -------------------------------------------------------------------------------------------------
 * The text
 * ---------------------------------------------------------------------------------------------- */

typedef struct text {
    uint8_t *tokens; /* bytes of the file; then places in the vocabulary */
    int64_t length;
} text;

/* Control characters that text files hold: tab, line feed, form feed, carriage return. */
static bool is_text(uint8_t byte)
{
    return byte >= 32 ? byte != 127 : byte == 9 || byte == 10 || byte == 12 || byte == 13;
}

static text text_read(const char *name)
{
    FILE *const file = fopen(name, "rb");
    if (!file) {
        quit(WRONG_INPUT, "%s: %s", name, strerror(errno));
    }
    text t = {.tokens = NULL};
    for (int64_t room = 0, got = 1; got > 0; t.length += got) {
        if (t.length == room) {
            room = 2 * room + (1 << 16);
            t.tokens = realloc(t.tokens, (size_t)room);
            if (!t.tokens) {
                quit(FAILED, "%s: no memory for %lld bytes", name, (long long)room);
            }
        }
        got = (int64_t)fread(t.tokens + t.length, 1, (size_t)(room - t.length), file);
    }
    if (ferror(file)) {
        quit(WRONG_INPUT, "%s: %s", name, strerror(errno));
    }
    fclose(file);
    for (int64_t n = 0; n < t.length; n++) {
        if (!is_text(t.tokens[n])) {
            quit(WRONG_INPUT, "%s: byte %lld is 0x%02x: this is not a text file", name,
                 (long long)n, t.tokens[n]);
        }
    }
    return t;
}

/* The characters that occur, ascending; returns how many. */
static int64_t vocabulary_of(const text *t, uint8_t vocabulary[256])
{
    bool seen[256] = {false};
    int64_t count = 0;
    for (int64_t n = 0; n < t->length; n++) {
        seen[t->tokens[n]] = true;
    }
    for (int byte = 0; byte < 256; byte++) {
        if (seen[byte]) {
            vocabulary[count++] = (uint8_t)byte;
        }
    }
    return count;
}

/* Bytes become places in the vocabulary. */
static void text_encode(text *t, const model *m, const char *name)
{
    int place[256];
    memset(place, -1, sizeof place);
    for (int v = 0; v < m->shape.vocabulary; v++) {
        place[m->vocabulary[v]] = v;
    }
    for (int64_t n = 0; n < t->length; n++) {
        if (place[t->tokens[n]] < 0) {
            quit(WRONG_INPUT, "%s: byte %lld is 0x%02x, which the checkpoint's text did not hold",
                 name, (long long)n, t->tokens[n]);
        }
        t->tokens[n] = (uint8_t)place[t->tokens[n]];
    }
}

/* -------------------------------------------------------------------------------------------------
 * Checkpoints: a header, the vocabulary, weights and moments, and a sum over all of it, in little
 * endian. Training goes on from one as if it had not been interrupted.
 * ---------------------------------------------------------------------------------------------- */

static const char magic[8] = "fattngpt";
enum { CHECKPOINT_VERSION = 1, HEADER_FIELDS = 8 };

typedef struct checkpoint {
    FILE *file;
    const char *name;
    uint64_t sum; /* FNV-1a of the bytes so far */
    bool loading;
} checkpoint;

/* Writes or reads size bytes. */
static void pass(checkpoint *k, uint8_t *bytes, size_t size)
{
    errno = 0;
    if ((k->loading ? fread(bytes, 1, size, k->file) : fwrite(bytes, 1, size, k->file)) != size) {
        if (k->loading && feof(k->file)) {
            quit(WRONG_INPUT, "%s: this checkpoint is cut short", k->name);
        }
        quit(k->loading ? WRONG_INPUT : FAILED, "%s: %s", k->name, strerror(errno));
    }
    for (size_t n = 0; n < size; n++) {
        k->sum = (k->sum ^ bytes[n]) * UINT64_C(0x100000001b3);
    }
}

static uint64_t pass_integer(checkpoint *k, uint64_t value, int size)
{
    uint8_t bytes[8];
    for (int n = 0; n < size; n++) {
        bytes[n] = (uint8_t)(value >> 8 * n);
    }
    pass(k, bytes, (size_t)size);
    value = 0;
    for (int n = 0; n < size; n++) {
        value |= (uint64_t)bytes[n] << 8 * n;
    }
    return value;
}

static void pass_floats(checkpoint *k, float *values, int64_t count, float low)
{
    for (int64_t n = 0; n < count; n++) {
        uint32_t bits;
        memcpy(&bits, values + n, sizeof bits);
        bits = (uint32_t)pass_integer(k, bits, 4);
        memcpy(values + n, &bits, sizeof bits);
        if (!(values[n] >= low && values[n] <= FLT_MAX)) {
            quit(k->loading ? WRONG_INPUT : FAILED, "%s: weight %lld or its moment is %g", k->name,
                 (long long)n, values[n]);
        }
    }
}

/* All that is behind the header. */
static void pass_body(checkpoint *k, model *m)
{
    pass(k, m->vocabulary, (size_t)m->shape.vocabulary);
    pass_floats(k, m->w.all, m->count, -FLT_MAX);
    pass_floats(k, m->m1.all, m->count, -FLT_MAX);
    pass_floats(k, m->m2.all, m->count, 0);
    const uint64_t sum = k->sum;
    if (pass_integer(k, sum, 8) != sum) {
        quit(WRONG_INPUT, "%s: this checkpoint is damaged: its sum differs", k->name);
    }
}

/* By way of a second name: a checkpoint is whole or not there. */
static void checkpoint_save(const char *name, model *m)
{
    const size_t length = strlen(name);
    char *const part = allocate((int64_t)length + 6, 1);
    memcpy(part, name, length);
    memcpy(part + length, ".part", 6);
    checkpoint k = {.file = fopen(part, "wb"), .name = part};
    if (!k.file) {
        quit(WRONG_INPUT, "%s: %s", part, strerror(errno));
    }
    const shape *const s = &m->shape;
    const uint64_t fields[HEADER_FIELDS] = {
        CHECKPOINT_VERSION,   (uint64_t)s->layers,     (uint64_t)s->heads, (uint64_t)s->width,
        (uint64_t)s->context, (uint64_t)s->vocabulary, (uint64_t)m->step,  m->rng};
    uint8_t start[sizeof magic];
    memcpy(start, magic, sizeof magic);
    pass(&k, start, sizeof start);
    for (int n = 0; n < HEADER_FIELDS; n++) {
        pass_integer(&k, fields[n], 8);
    }
    pass_body(&k, m);
    if (fclose(k.file) != 0 || rename(part, name) != 0) {
        quit(FAILED, "%s: %s", name, strerror(errno));
    }
    free(part);
}

/* A file of another size than its header asks for is refused before memory is. */
static void check_size(const checkpoint *k, const shape *s)
{
    const int64_t size =
        (int64_t)sizeof magic + 8 * HEADER_FIELDS + s->vocabulary + 12 * weights_of(s) + 8;
    const long here = ftell(k->file);
    if (here < 0 || fseek(k->file, 0, SEEK_END) != 0 || ftell(k->file) != size ||
        fseek(k->file, here, SEEK_SET) != 0) {
        quit(WRONG_INPUT, "%s: this checkpoint should have %lld bytes", k->name, (long long)size);
    }
}

/* Nothing in a checkpoint is believed. */
static void checkpoint_load(const char *name, model *m)
{
    static const struct {
        const char *name;
        uint64_t low, high;
    } bounds[HEADER_FIELDS] = {
        {"version", CHECKPOINT_VERSION, CHECKPOINT_VERSION},
        {"layers", 1, MAX_LAYERS},
        {"heads", 1, 256},
        {"width", 1, 4096},
        {"context", 1, 8192},
        {"vocabulary", 1, 256},
        {"step", 0, 1000000000},
        {"rng", 0, UINT64_MAX},
    };
    checkpoint k = {.file = fopen(name, "rb"), .name = name, .loading = true};
    if (!k.file) {
        quit(WRONG_INPUT, "%s: %s", name, strerror(errno));
    }
    uint8_t start[sizeof magic] = {0};
    pass(&k, start, sizeof start);
    if (memcmp(start, magic, sizeof magic) != 0) {
        quit(WRONG_INPUT, "%s: this is not a checkpoint of gpt", name);
    }
    uint64_t fields[HEADER_FIELDS];
    for (int n = 0; n < HEADER_FIELDS; n++) {
        fields[n] = pass_integer(&k, 0, 8);
        if (fields[n] < bounds[n].low || fields[n] > bounds[n].high) {
            quit(WRONG_INPUT, "%s: %s is %llu", name, bounds[n].name,
                 (unsigned long long)fields[n]);
        }
    }
    const shape s = {.layers = (int64_t)fields[1],
                     .heads = (int64_t)fields[2],
                     .width = (int64_t)fields[3],
                     .context = (int64_t)fields[4],
                     .vocabulary = (int64_t)fields[5]};
    check_heads(name, &s);
    check_size(&k, &s);
    model_create(m, &s);
    m->step = (int64_t)fields[6];
    m->rng = fields[7];
    pass_body(&k, m);
    fclose(k.file);
    for (int64_t v = 0; v < s.vocabulary; v++) {
        if (!is_text(m->vocabulary[v]) || (v > 0 && m->vocabulary[v - 1] >= m->vocabulary[v])) {
            quit(WRONG_INPUT, "%s: the vocabulary is not made of characters, ascending", name);
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Training and sampling
 * ---------------------------------------------------------------------------------------------- */

/* Sequences from random places of the text; the targets are one character further on. */
static void draw_batch(model *m, const text *t, int64_t batch, uint8_t *tokens, uint8_t *targets)
{
    const int64_t length = m->shape.context;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t places = t->length - length;
        const int64_t at = (int64_t)(random_unit(&m->rng) * (double)places);
        memcpy(tokens + b * length, t->tokens + at, (size_t)length);
        memcpy(targets + b * length, t->tokens + at + 1, (size_t)length);
    }
}

static void train(model *m, state *a, const text *t, const settings *s)
{
    const int64_t rows = s->batch * m->shape.context, first = m->step;
    const double memory = attention_bytes(a, m->shape.layers) / 1e6, start = seconds();
    uint8_t *const tokens = allocate(2 * rows, 1), *const targets = tokens + rows;
    double sum = 0, since = start;
    int64_t summed = 0;
    printf("%6s %10s %10s %18s\n", "step", "loss", "tokens/s", "attention memory");
    while (m->step < s->steps) {
        draw_batch(m, t, s->batch, tokens, targets);
        forward(m, a, s->batch, m->shape.context, tokens);
        const double loss = cross_entropy(rows, m->shape.vocabulary, a->logits, targets);
        if (!isfinite(loss)) {
            quit(FAILED, "the loss of step %lld is %g", (long long)m->step + 1, loss);
        }
        backward(m, a, tokens);
        update(m, s->rate);
        sum += loss;
        summed++;
        if (m->step % s->every == 0 || m->step == s->steps) {
            const double now = seconds();
            printf("%6lld %10.6f %10.0f %15.2f MB\n", (long long)m->step, sum / (double)summed,
                   (double)(summed * rows) / (now - since), memory);
            fflush(stdout);
            sum = 0, summed = 0, since = now;
        }
    }
    printf("%lld steps of %lld characters in %.1f s\n", (long long)(m->step - first),
           (long long)rows, seconds() - start);
    free(tokens);
}

/* Draws from softmax(logits / temperature). */
static uint8_t draw_token(const float *logits, int64_t vocabulary, uint64_t *rng)
{
    const double temperature = 0.8;
    double chance[256], sum = 0, largest = -INFINITY;
    for (int64_t v = 0; v < vocabulary; v++) {
        largest = logits[v] > largest ? logits[v] : largest; /* gcc 12 fails over fmax on Arm */
    }
    for (int64_t v = 0; v < vocabulary; v++) {
        sum += chance[v] = exp((logits[v] - largest) / temperature);
    }
    double left = random_unit(rng) * sum;
    int64_t v = 0;
    while (v < vocabulary - 1 && (left -= chance[v]) >= 0) {
        v++;
    }
    return (uint8_t)v;
}

/* Writes characters one after the other, each from the window before it; the full window is
 * halved. */
static void sample(const model *m, state *a, int64_t count, uint64_t seed)
{
    const int64_t context = m->shape.context, vocabulary = m->shape.vocabulary;
    uint8_t *const window = allocate(context, 1);
    const uint8_t *const feed = memchr(m->vocabulary, '\n', (size_t)vocabulary);
    int64_t length = 1;
    window[0] = (uint8_t)(feed ? feed - m->vocabulary : 0);
    for (int64_t n = 0; n < count; n++) {
        forward(m, a, 1, length, window);
        const uint8_t token = draw_token(a->logits + (length - 1) * vocabulary, vocabulary, &seed);
        putchar(m->vocabulary[token]);
        if (length == context) {
            length = context / 2;
            memmove(window, window + context - length, (size_t)length);
        }
        window[length++] = token;
    }
    putchar('\n');
    free(window);
}

static void describe(const model *m, const state *a)
{
    const shape *const s = &m->shape;
    printf(
        "model: %lld layers, %lld heads, width %lld, context %lld, %lld characters, %.2f million "
        "weights\n",
        (long long)s->layers, (long long)s->heads, (long long)s->width, (long long)s->context,
        (long long)s->vocabulary, (double)m->count / 1e6);
    fattn_device_info info = {.struct_size = sizeof info};
    if (a->materialised) {
        puts("attention: written out");
    } else {
        check(fattn_device_get_info(a->attention.device, &info));
        printf("attention: fattn on %s, %s\n", info.backend, info.isa);
    }
}

int main(int argc, char **argv)
{
    settings s = parse(argc, argv);
    static model m; /* large for a stack */
    static state a;
    text t = {.tokens = NULL};
    if (s.load) {
        checkpoint_load(s.load, &m);
    }
    if (s.text) {
        t = text_read(s.text);
        const int64_t context = s.load ? m.shape.context : s.shape.context;
        if (t.length <= context) {
            quit(WRONG_INPUT, "%s: %lld characters are too few for a context of %lld", s.text,
                 (long long)t.length, (long long)context);
        }
        if (!s.load) {
            s.shape.vocabulary = vocabulary_of(&t, m.vocabulary);
            model_create(&m, &s.shape);
            model_draw(&m, (uint64_t)s.seed);
        }
        text_encode(&t, &m, s.text);
    }
    fattn_device *device = NULL;
    if (!s.materialised) {
        check(fattn_device_open(NULL, &device));
    }
    state_create(&a, &m, s.text ? s.batch : 1, s.materialised, device);
    describe(&m, &a);
    if (s.text) {
        train(&m, &a, &t, &s);
    }
    if (s.save) {
        checkpoint_save(s.save, &m);
    }
    sample(&m, &a, s.sample, (uint64_t)s.seed);
    fattn_device_close(device);
    fattn_cache_clear();
    if (fflush(stdout) != 0 || ferror(stdout)) {
        quit(FAILED, "standard output cannot be written");
    }
    return 0;
}
