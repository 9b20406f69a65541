/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small GPT that learns to write like a text file, character by character. It shows fattn in
 * training: attention uses the public API, forward and backward, on the device that FATTN_BACKEND
 * names; everything else is plain C. With --materialised attention instead stores its matrix of
 * probabilities, and everything else, including random numbers, stays the same: the losses agree.
 *
 * The model: characters are embedded; each layer adds causal attention and then an MLP, each
 * applied to the normalised residual; a last product gives the logits of the next character.
 * Positions enter only through ALiBi: each head subtracts its own slope times the distance from the
 * scores. There are no biases and no gains, the activation is the square of ReLU, and the optimiser
 * is AdamW. Letters: B sequences of T characters, R = B T rows, C channels, H heads of D = C / H
 * channels, V characters in the vocabulary.
 *
 * With --ranks N every sequence is divided over N ranks (fattn/distributed.h): each holds a share
 * of its characters and all weights, attention exchanges keys, and the gradients of weights are
 * added up. The losses stay the same. Ranks are threads here; as processes they would add gradients
 * up by MPI_Allreduce().
 *
 * Order: options, matrix products, operations on rows, attention, the model, the text, checkpoints,
 * training and sampling.
 */
#define _POSIX_C_SOURCE 200809L /* pthread_barrier_t */
#include <errno.h>
#include <fattn/distributed.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "threads.h"

enum { WRONG_INPUT = 2, FAILED = 3 };

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

static void check(fattn_status status)
{
    if (status != FATTN_OK) {
        quit(FAILED, "%s: %s", fattn_status_string(status), fattn_last_reason());
    }
}

static void *allocate(int64_t count, size_t size)
{
    void *const memory = calloc((size_t)count, size);
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

/* SplitMix64 of Steele, Lea and Flood. In [0, 1). */
static double draw(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* -------------------------------------------------------------------------------------------------
 * Options
 * ---------------------------------------------------------------------------------------------- */

/* The first SIZES options come from the checkpoint if one is loaded. */
enum { LAYERS, HEADS, WIDTH, CONTEXT, STEPS, BATCH, RATE, SEED, EVERY, SAMPLE, RANKS, NUMBERS };
enum { SIZES = CONTEXT + 1, MAX_LAYERS = 64, MAX_HEADS = 256 };

static struct {
    const char *name, *help;
    double low, high, value;
} numbers[NUMBERS] = {
    [LAYERS] = {"--layers", "of attention and MLP", 1, MAX_LAYERS, 3},
    [HEADS] = {"--heads", "of attention", 1, MAX_HEADS, 4},
    [WIDTH] = {"--width", "channels", 1, 4096, 128},
    [CONTEXT] = {"--context", "characters a sequence", 1, 8192, 256},
    [STEPS] = {"--steps", "train up to this step", 0, 1e9, 300},
    [BATCH] = {"--batch", "sequences a step", 1, 4096, 4},
    [RATE] = {"--rate", "of learning, in millionths", 1, 1e6, 3000},
    [SEED] = {"--seed", "of weights, sequences and samples", 0, 1e15, 1},
    [EVERY] = {"--every", "steps a line of the report", 1, 1e9, 50},
    [SAMPLE] = {"--sample", "characters to write at the end", 0, 1e9, 400},
    [RANKS] = {"--ranks", "that sequences are divided over", 1, THREADS_MAX, 1},
};

typedef struct settings {
    const char *text, *save, *load;
    bool materialised;
} settings;

static int64_t number(int which) { return (int64_t)numbers[which].value; }

static void print_help(void)
{
    puts("usage: gpt [--OPTION VALUE ...] TEXT\n"
         "       gpt --load FILE [--OPTION VALUE ...]\n\n"
         "Trains a small GPT on the characters of a text file, then writes some of its own.\n");
    for (int n = 0; n < NUMBERS; n++) {
        printf("  %-15s %s; default %g\n", numbers[n].name, numbers[n].help, numbers[n].value);
    }
    puts("  --materialised  attention written out here instead of fattn's\n"
         "  --save          file: write a checkpoint after training\n"
         "  --load          file: go on from a checkpoint; without TEXT only sample\n\n"
         "exit status: 0 done, 2 wrong option, text or checkpoint, 3 fattn or memory failed");
    exit(0);
}

static void set_number(int which, const char *text)
{
    char *end;
    const double value = strtod(text, &end), low = numbers[which].low, high = numbers[which].high;
    if (end == text || *end || !(value >= low && value <= high) || value != floor(value)) {
        quit(WRONG_INPUT, "%s needs an integer between %g and %g", numbers[which].name, low, high);
    }
    numbers[which].value = value;
}

static settings parse(int argc, char **argv)
{
    settings s = {.text = NULL};
    bool sizes_given = false;
    for (int i = 1; i < argc; i++) {
        const char *const name = argv[i];
        int which = 0;
        while (which < NUMBERS && strcmp(name, numbers[which].name) != 0) {
            which++;
        }
        const char **const file = strcmp(name, "--save") == 0   ? &s.save
                                  : strcmp(name, "--load") == 0 ? &s.load
                                                                : NULL;
        if (strcmp(name, "--help") == 0) {
            print_help();
        } else if (strcmp(name, "--materialised") == 0) {
            s.materialised = true;
        } else if ((which < NUMBERS || file) && ++i == argc) {
            quit(WRONG_INPUT, "%s needs a value", name);
        } else if (which < NUMBERS) {
            set_number(which, argv[i]);
            sizes_given |= which < SIZES;
        } else if (file) {
            *file = argv[i];
        } else if (name[0] == '-' || s.text) {
            quit(WRONG_INPUT, "unknown argument \"%s\"; gpt --help lists the options", name);
        } else {
            s.text = name;
        }
    }
    if (!s.text && !s.load) {
        quit(WRONG_INPUT, "needs the name of a text file; gpt --help lists the options");
    }
    if (s.materialised && number(RANKS) > 1) {
        quit(WRONG_INPUT, "--materialised attention is not divided over ranks");
    }
    if (s.load && sizes_given) {
        quit(WRONG_INPUT, "--layers, --heads, --width and --context come from the checkpoint");
    }
    return s;
}

/* -------------------------------------------------------------------------------------------------
 * Matrix products
 * ---------------------------------------------------------------------------------------------- */

/* Entry (i, j) of a matrix is at[i * row + j * column], so a transpose only exchanges strides. */
typedef struct view {
    float *at;
    int64_t row, column;
} view;

static view rows_of(float *at, int64_t row) { return (view){at, row, 1}; }
static view transposed(view a) { return (view){a.at, a.column, a.row}; }

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

/* A panel of DEPTH x COLUMNS floats fits in the first-level cache. */
enum { DEPTH = 128, COLUMNS = 64, ROWS = 128 };

/* c[j] += sum over p of x[p] b[p][j]. Eight rows at a time, so that c is loaded and stored once per
 * sixteen operations; compilers vectorise the loop over j. */
static void add_rows(int64_t n, const float x[DEPTH], const float *b, float *restrict c)
{
    for (int p = 0; p < DEPTH; p += 8, x += 8, b += 8 * COLUMNS) {
        for (int64_t j = 0; j < n; j++) {
            c[j] += ((x[0] * b[j] + x[1] * b[COLUMNS + j]) +
                     (x[2] * b[2 * COLUMNS + j] + x[3] * b[3 * COLUMNS + j])) +
                    ((x[4] * b[4 * COLUMNS + j] + x[5] * b[5 * COLUMNS + j]) +
                     (x[6] * b[6 * COLUMNS + j] + x[7] * b[7 * COLUMNS + j]));
        }
    }
}

/* The block of c = a b, or c += a b, that begins at row i0 and column j0. */
static void multiply_block(int64_t i0, int64_t j0, int64_t m, int64_t n, int64_t k, view a, view b,
                           view c, bool add)
{
    float panel[DEPTH * COLUMNS], x[DEPTH];
    const int64_t height = min(m - i0, ROWS), width = min(n - j0, COLUMNS);
    for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
        const int64_t depth = min(k - k0, DEPTH);
        for (int64_t p = 0; p < DEPTH; p++) {
            for (int64_t j = 0; j < width; j++) {
                panel[p * COLUMNS + j] =
                    p < depth ? b.at[(k0 + p) * b.row + (j0 + j) * b.column] : 0;
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

/* c = a b, or c += a b: m x n, with inner dimension k. The columns of c are adjacent. One thread
 * sums each entry in a fixed order, so results do not depend on the number of threads. */
static void multiply(int64_t m, int64_t n, int64_t k, view a, view b, view c, bool add)
{
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t i0 = 0; i0 < m; i0 += ROWS) {
        for (int64_t j0 = 0; j0 < n; j0 += COLUMNS) {
            multiply_block(i0, j0, m, n, k, a, b, c, add);
        }
    }
}

/* A matrix of weights and its gradient. */
typedef struct matrix {
    int64_t in, out;
    float *w, *dw; /* (in, out) */
} matrix;

/* y (R, out) = x (R, in) w, or y += x w */
static void linear_forward(int64_t rows, float *x, matrix a, float *y, bool add)
{
    multiply(rows, a.out, a.in, rows_of(x, a.in), rows_of(a.w, a.out), rows_of(y, a.out), add);
}

/* Of y = x w: dw += x^T dy, dx = dy w^T. */
static void linear_backward(int64_t rows, float *x, matrix a, float *dy, float *dx)
{
    const view out = rows_of(dy, a.out), w = rows_of(a.w, a.out);
    multiply(a.in, a.out, rows, transposed(rows_of(x, a.in)), out, rows_of(a.dw, a.out), true);
    multiply(rows, a.in, a.out, out, transposed(w), rows_of(dx, a.in), false);
}

/* -------------------------------------------------------------------------------------------------
 * Operations on rows
 * ---------------------------------------------------------------------------------------------- */

typedef struct norm {
    float *y, *scale; /* (R, C), (R) */
} norm;

/* y = x scale, scale = 1 / the root of the mean of x^2. */
static void norm_forward(int64_t rows, int64_t width, const float *x, norm n)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const float *const in = x + r * width;
        float squares = 0;
        for (int64_t c = 0; c < width; c++) {
            squares += in[c] * in[c];
        }
        n.scale[r] = 1 / sqrtf(squares / (float)width + 1e-5f);
        for (int64_t c = 0; c < width; c++) {
            n.y[r * width + c] = in[c] * n.scale[r];
        }
    }
}

/* Of y = x scale: dx += scale (dy - y (mean of y dy)). */
static void norm_backward(int64_t rows, int64_t width, norm n, const float *dy, float *dx)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const float *const y = n.y + r * width, *const d = dy + r * width;
        float mean = 0;
        for (int64_t c = 0; c < width; c++) {
            mean += y[c] * d[c] / (float)width;
        }
        for (int64_t c = 0; c < width; c++) {
            dx[r * width + c] += n.scale[r] * (d[c] - y[c] * mean);
        }
    }
}

/* x = max(x, 0), y = x^2 */
static void activate_forward(int64_t count, float *x, float *y)
{
#pragma omp parallel for
    for (int64_t n = 0; n < count; n++) {
        x[n] = x[n] > 0 ? x[n] : 0;
        y[n] = x[n] * x[n];
    }
}

/* Of y = x^2: dx = 2 x dy, in place. */
static void activate_backward(int64_t count, const float *x, float *dy)
{
#pragma omp parallel for
    for (int64_t n = 0; n < count; n++) {
        dy[n] *= 2 * x[n];
    }
}

/* x becomes softmax(x); returns ln(sum of exp(x)). */
static float softmax(int64_t count, float *x)
{
    float largest = x[0], sum = 0;
    for (int64_t j = 1; j < count; j++) {
        largest = x[j] > largest ? x[j] : largest; /* gcc 12 fails over fmaxf on Arm */
    }
    for (int64_t j = 0; j < count; j++) {
        sum += x[j] = expf(x[j] - largest);
    }
    for (int64_t j = 0; j < count; j++) {
        x[j] /= sum;
    }
    return largest + logf(sum);
}

/* Mean over the rows of -ln softmax(logits)[target]. The logits are replaced by their gradient. */
static double cross_entropy(int64_t rows, int64_t all, int64_t vocabulary, float *logits,
                            const uint8_t *targets)
{
    double loss = 0;
    for (int64_t r = 0; r < rows; r++) {
        float *const x = logits + r * vocabulary, right = x[targets[r]];
        loss += softmax(vocabulary, x) - right;
        x[targets[r]] -= 1;
        for (int64_t v = 0; v < vocabulary; v++) {
            x[v] /= (float)all;
        }
    }
    return loss / (double)all;
}

/* -------------------------------------------------------------------------------------------------
 * Attention: qkv (B, T, 3, H, D) -> out (B, T, H, D), causal
 * ---------------------------------------------------------------------------------------------- */

typedef struct attention {
    fattn_device *device; /* NULL: materialised */
    int64_t batch, length, heads, dim;
    int64_t whole;              /* length of the undivided sequences */
    fattn_group_plan *plans[2]; /* forward and backward; NULL: not divided */
    float slopes[MAX_HEADS];    /* (H): subtracted from a key's score per character of distance */
} attention;

/* What forward keeps for backward, and the gradients: given for out, computed for qkv. */
typedef struct attention_data {
    float *qkv, *out, *dout, *dqkv;
    float *kept;   /* lse (B, H, T); materialised: probabilities (B, H, T, T) */
    float *scores; /* materialised: their gradient (B, H, T, T) */
} attention_data;

/* q, k and v are slices of one tensor, and so are their gradients; only strides express this. */
static fattn_problem attention_problem(const attention *a, fattn_op op)
{
    const int64_t width = a->heads * a->dim;
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = op;
    p.layout = FATTN_STRIDED;
    p.features = FATTN_CAUSAL | FATTN_ALIBI;
    p.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE : 0;
    p.batch = a->batch;
    p.heads_q = p.heads_k = a->heads;
    p.seqlen_q = p.seqlen_k = a->whole; /* the undivided length, with the strides of the share */
    p.dim = p.dim_v = a->dim;
    p.o = p.dout = (fattn_strides){.batch = a->length * width, .seq = width, .head = a->dim};
    p.q = (fattn_strides){.batch = a->length * 3 * width, .seq = 3 * width, .head = a->dim};
    p.k = p.v = p.dq = p.dk = p.dv = p.q;
    return p;
}

static void fused(const attention *a, fattn_op op, const attention_data *t)
{
    const int64_t width = a->heads * a->dim;
    fattn_group_plan *const plan = a->plans[op == FATTN_BACKWARD];
    const fattn_problem problem = attention_problem(a, op);
    fattn_buffers b;
    fattn_buffers_init(&b);
    b.q = t->qkv, b.k = t->qkv + width, b.v = t->qkv + 2 * width;
    b.o = t->out, b.lse = t->kept, b.alibi_slopes = a->slopes;
    if (op == FATTN_BACKWARD) {
        b.dout = t->dout;
        b.dq = t->dqkv, b.dk = t->dqkv + width, b.dv = t->dqkv + 2 * width;
    }
    check(plan ? fattn_group_execute(plan, &b) : fattn_attention(a->device, &problem, &b, NULL));
}

/* S = scale Q K^T - slope |i - j|, P = softmax(S), O = P V of one head. */
static void head_forward(int64_t length, int64_t dim, float slope, const view in[3], view out,
                         view p)
{
    const float scale = 1 / sqrtf((float)dim);
    multiply(length, length, dim, in[0], transposed(in[1]), p, false);
    for (int64_t i = 0; i < length; i++) {
        float *const row = p.at + i * length;
        for (int64_t j = 0; j < length; j++) {
            row[j] = j <= i ? scale * row[j] - slope * (float)(i - j) : -INFINITY;
        }
        softmax(length, row);
    }
    multiply(length, dim, length, p, in[2], out, false);
}

/* dV = P^T dO, dP = dO V^T, dS = scale P (dP - rowsum(P dP)), dQ = dS K, dK = dS^T Q. s holds dP
 * and then dS. */
static void head_backward(int64_t length, int64_t dim, const view in[3], view p, view s, view dout,
                          const view d[3])
{
    const float scale = 1 / sqrtf((float)dim);
    multiply(length, dim, length, transposed(p), dout, d[2], false);
    multiply(length, length, dim, dout, transposed(in[2]), s, false);
    for (int64_t i = 0; i < length; i++) {
        float *const ds = s.at + i * length, sum = 0;
        const float *const row = p.at + i * length;
        for (int64_t j = 0; j < length; j++) {
            sum += row[j] * ds[j];
        }
        for (int64_t j = 0; j < length; j++) {
            ds[j] = scale * row[j] * (ds[j] - sum);
        }
    }
    multiply(length, dim, length, s, in[1], d[0], false);
    multiply(length, dim, length, transposed(s), in[0], d[1], false);
}

/* The same as fused(), with the matrices stored. */
static void materialised(const attention *a, fattn_op op, const attention_data *t)
{
    const int64_t length = a->length, dim = a->dim, width = a->heads * dim;
#pragma omp parallel for
    for (int64_t n = 0; n < a->batch * a->heads; n++) {
        const int64_t first = n / a->heads * length, channel = n % a->heads * dim;
        const int64_t plain = first * width + channel, packed = first * 3 * width + channel;
        const view p = rows_of(t->kept + n * length * length, length);
        view in[3], d[3];
        for (int64_t i = 0; i < 3; i++) {
            in[i] = rows_of(t->qkv + packed + i * width, 3 * width);
            d[i] = rows_of(t->dqkv + packed + i * width, 3 * width);
        }
        if (op == FATTN_FORWARD) {
            const float slope = a->slopes[n % a->heads];
            head_forward(length, dim, slope, in, rows_of(t->out + plain, width), p);
        } else {
            const view s = rows_of(t->scores + n * length * length, length);
            head_backward(length, dim, in, p, s, rows_of(t->dout + plain, width), d);
        }
    }
}

static void attend(const attention *a, fattn_op op, const attention_data *t)
{
    (a->device ? fused : materialised)(a, op, t);
}

/* Bytes allocated for attention: kept for backward, and temporary. */
static double attention_bytes(const attention *a, int64_t layers)
{
    const double row = (double)(a->batch * a->heads * a->length * 4);
    int64_t workspace = fattn_group_plan_bytes(a->plans[0]) + fattn_group_plan_bytes(a->plans[1]);
    for (int op = FATTN_FORWARD; op <= FATTN_BACKWARD && a->device && !a->plans[0]; op++) {
        const fattn_problem problem = attention_problem(a, (fattn_op)op);
        fattn_plan_info info;
        fattn_plan *plan;
        fattn_plan_info_init(&info);
        check(fattn_plan_create(a->device, &problem, &plan));
        check(fattn_plan_get_info(plan, &info));
        fattn_plan_destroy(plan);
        workspace = info.workspace_bytes > workspace ? info.workspace_bytes : workspace;
    }
    return a->device ? row * (double)layers + (double)workspace
                     : row * (double)a->length * (double)(layers + 1);
}

/* -------------------------------------------------------------------------------------------------
 * The model
 * ---------------------------------------------------------------------------------------------- */

/* The header of a checkpoint. */
typedef struct header {
    uint64_t magic;
    int64_t layers, heads, width, context, vocabulary; /* width: C, context: T, vocabulary: V */
    int64_t step;
    uint64_t rng;
    uint8_t characters[256]; /* the first V of them */
} header;

/* Weights, and what forward keeps for backward. */
typedef struct layer {
    norm norm1, norm2;
    matrix qkv, project, up, down; /* (C, 3 C), (C, C), (C, 4 C), (4 C, C) */
    float *wide, *active;          /* (R, 4 C) */
    attention_data attention;
} layer;

typedef struct model {
    header head;
    int64_t count;           /* of weights */
    float *w, *m1, *m2, *dw; /* m1, m2: moving averages of the gradients dw and their squares */
    matrix embed, last;      /* (V, C), (C, V) */
    layer layer[MAX_LAYERS];
    norm norm;
    float *x, *dx,
        *dnorm; /* (R, C); x: the residual, dnorm: the gradient of the normalised residual */
    float *dwide, *logits; /* (R, 4 C), (R, V) */
    attention attention;
    fattn_transport transport; /* has this rank's number and the number of ranks */
} model;

/* Takes the next in * out weights. */
static matrix matrix_create(model *m, int64_t *used, int64_t in, int64_t out)
{
    const matrix a = {in, out, m->w + *used, m->dw + *used};
    *used += in * out;
    return a;
}

/* Creates all weights as 0. */
static void weights_create(model *m)
{
    const int64_t c = m->head.width, v = m->head.vocabulary;
    m->count = 2 * v * c + 12 * m->head.layers * c * c;
    m->w = floats(3 * m->count); /* with its moments, as a checkpoint has them */
    m->m1 = m->w + m->count, m->m2 = m->m1 + m->count;
    m->dw = floats(m->count);
    int64_t used = 0;
    m->embed = matrix_create(m, &used, v, c);
    m->last = matrix_create(m, &used, c, v);
    for (layer *l = m->layer; l < m->layer + m->head.layers; l++) {
        l->qkv = matrix_create(m, &used, c, 3 * c);
        l->project = matrix_create(m, &used, c, c);
        l->up = matrix_create(m, &used, c, 4 * c);
        l->down = matrix_create(m, &used, 4 * c, c);
    }
}

/* Uniform with deviation 1 / sqrt(C). */
static void matrix_draw(matrix a, model *m)
{
    const double bound = sqrt(3 / (double)m->head.width);
    for (int64_t n = 0; n < a.in * a.out; n++) {
        a.w[n] = (float)(bound * (2 * draw(&m->head.rng) - 1));
    }
}

/* Weights that add to the residual, and those of the logits, begin as 0. */
static void weights_draw(model *m)
{
    matrix_draw(m->embed, m);
    for (layer *l = m->layer; l < m->layer + m->head.layers; l++) {
        matrix_draw(l->qkv, m);
        matrix_draw(l->up, m);
    }
}

static norm norm_create(int64_t rows, int64_t width)
{
    return (norm){floats(rows * width), floats(rows)};
}

/* Allocates for the rows of a batch. device NULL: materialised. */
static void rows_create(model *m, int64_t batch, fattn_device *device)
{
    const int64_t c = m->head.width, length = m->head.context, rows = batch * length;
    const int64_t kept = rows * m->head.heads * (device ? 1 : length);
    m->x = floats(rows * c), m->dx = floats(rows * c), m->dnorm = floats(rows * c);
    m->dwide = floats(4 * rows * c), m->logits = floats(rows * m->head.vocabulary);
    m->norm = norm_create(rows, c);
    float *const scores = device ? NULL : floats(kept);
    for (layer *l = m->layer; l < m->layer + m->head.layers; l++) {
        l->norm1 = norm_create(rows, c), l->norm2 = norm_create(rows, c);
        l->wide = floats(4 * rows * c), l->active = floats(4 * rows * c);
        l->attention = (attention_data){
            floats(3 * rows * c), floats(rows * c), m->dnorm, m->dwide, floats(kept), scores};
    }
    m->attention = (attention){.device = device,
                               .batch = batch,
                               .length = length,
                               .whole = length,
                               .heads = m->head.heads,
                               .dim = c / m->head.heads};
    for (int64_t h = 0; h < m->head.heads; h++) {
        m->attention.slopes[h] = exp2f(-8 * (float)h / (float)m->head.heads);
    }
}

/* Logits of the next character at every position of `batch` sequences of `length` characters. */
static void forward(model *m, int64_t batch, int64_t length, const uint8_t *tokens)
{
    const int64_t c = m->head.width, rows = batch * length;
    m->attention.batch = batch, m->attention.length = length;
    m->attention.whole = m->attention.plans[0] ? m->head.context : length;
    for (int64_t n = 0; n < rows * c; n++) {
        m->x[n] = m->embed.w[tokens[n / c] * c + n % c];
    }
    for (layer *l = m->layer; l < m->layer + m->head.layers; l++) {
        norm_forward(rows, c, m->x, l->norm1);
        linear_forward(rows, l->norm1.y, l->qkv, l->attention.qkv, false);
        attend(&m->attention, FATTN_FORWARD, &l->attention);
        linear_forward(rows, l->attention.out, l->project, m->x, true);
        norm_forward(rows, c, m->x, l->norm2);
        linear_forward(rows, l->norm2.y, l->up, l->wide, false);
        activate_forward(4 * rows * c, l->wide, l->active);
        linear_forward(rows, l->active, l->down, m->x, true);
    }
    norm_forward(rows, c, m->x, m->norm);
    linear_forward(rows, m->norm.y, m->last, m->logits, false);
}

/* Gradients of all weights, from those of the logits. dx is the gradient of the residual. */
static void backward(model *m, const uint8_t *tokens)
{
    const int64_t c = m->head.width, rows = m->attention.batch * m->attention.length;
    memset(m->dw, 0, (size_t)m->count * sizeof(float));
    memset(m->dx, 0, (size_t)(rows * c) * sizeof(float));
    linear_backward(rows, m->norm.y, m->last, m->logits, m->dnorm);
    norm_backward(rows, c, m->norm, m->dnorm, m->dx);
    for (layer *l = m->layer + m->head.layers; l-- > m->layer;) {
        linear_backward(rows, l->active, l->down, m->dx, m->dwide);
        activate_backward(4 * rows * c, l->wide, m->dwide);
        linear_backward(rows, l->norm2.y, l->up, m->dwide, m->dnorm);
        norm_backward(rows, c, l->norm2, m->dnorm, m->dx);
        linear_backward(rows, l->attention.out, l->project, m->dx, m->dnorm);
        attend(&m->attention, FATTN_BACKWARD, &l->attention);
        linear_backward(rows, l->norm1.y, l->qkv, m->dwide, m->dnorm);
        norm_backward(rows, c, l->norm1, m->dnorm, m->dx);
    }
    for (int64_t n = 0; n < rows * c; n++) {
        m->embed.dw[tokens[n / c] * c + n % c] += m->dx[n];
    }
}

/* AdamW, with a warm-up of 20 steps and gradients clipped to length 1. */
static void update(model *m, double rate)
{
    const float beta1 = 0.9f, beta2 = 0.99f, decay = 0.1f;
    double squares = 0;
    for (int64_t n = 0; n < m->count; n++) {
        squares += (double)m->dw[n] * (double)m->dw[n];
    }
    const double t = (double)++m->head.step;
    const float clip = squares > 1 ? (float)(1 / sqrt(squares)) : 1;
    const float size = (float)(rate * fmin(1, t / 20));
    const float fix1 = (float)(1 - pow(beta1, t)), fix2 = (float)(1 - pow(beta2, t));
#pragma omp parallel for
    for (int64_t n = 0; n < m->count; n++) {
        const float g = clip * m->dw[n];
        m->m1[n] = beta1 * m->m1[n] + (1 - beta1) * g;
        m->m2[n] = beta2 * m->m2[n] + (1 - beta2) * g * g;
        m->w[n] -= size * (m->m1[n] / fix1 / (sqrtf(m->m2[n] / fix2) + 1e-8f) + decay * m->w[n]);
    }
}

/* -------------------------------------------------------------------------------------------------
 * The text
 * ---------------------------------------------------------------------------------------------- */

typedef struct text {
    uint8_t *tokens; /* bytes of the file, then indices into the vocabulary */
    int64_t length;
} text;

/* Control characters that text files may contain: tab, line feed, form feed, carriage return. */
static bool is_text(int byte)
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
    int64_t room = 0;
    for (int byte = getc(file); byte != EOF; byte = getc(file)) {
        if (t.length == room) {
            room = 2 * room + (1 << 16);
            if (!(t.tokens = realloc(t.tokens, (size_t)room))) {
                quit(FAILED, "%s: no memory for %lld bytes", name, (long long)room);
            }
        }
        if (!is_text(byte)) {
            quit(WRONG_INPUT, "%s: byte %lld is 0x%02x: this is not a text file", name,
                 (long long)t.length, (unsigned)byte);
        }
        t.tokens[t.length++] = (uint8_t)byte;
    }
    if (ferror(file)) {
        quit(WRONG_INPUT, "%s: %s", name, strerror(errno));
    }
    if (t.length == 0) {
        quit(WRONG_INPUT, "%s: this file is empty", name);
    }
    fclose(file);
    return t;
}

/* The characters that occur, ascending. */
static void find_vocabulary(const text *t, header *h)
{
    for (int byte = 0; byte < 256; byte++) {
        if (memchr(t->tokens, byte, (size_t)t->length)) {
            h->characters[h->vocabulary++] = (uint8_t)byte;
        }
    }
}

/* Replaces bytes by their indices in the vocabulary. */
static void text_encode(const text *t, const header *h, const char *name)
{
    for (int64_t n = 0; n < t->length; n++) {
        const uint8_t *const place = memchr(h->characters, t->tokens[n], (size_t)h->vocabulary);
        if (!place) {
            quit(WRONG_INPUT, "%s: byte %lld is 0x%02x, which the checkpoint's text did not hold",
                 name, (long long)n, (unsigned)t->tokens[n]);
        }
        t->tokens[n] = (uint8_t)(place - h->characters);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Checkpoints: the header, then weights and moments, as they are in memory. Training goes on from
 * one as if it had not been interrupted.
 * ---------------------------------------------------------------------------------------------- */

static const uint64_t magic = UINT64_C(0x3174706774746166); /* "fattgpt1" in little endian */

static void checkpoint_save(const char *name, model *m)
{
    const size_t count = 3 * (size_t)m->count;
    FILE *const file = fopen(name, "wb");
    if (!file) {
        quit(WRONG_INPUT, "%s: %s", name, strerror(errno));
    }
    m->head.magic = magic;
    const bool written = fwrite(&m->head, sizeof m->head, 1, file) == 1 &&
                         fwrite(m->w, sizeof(float), count, file) == count;
    if (fclose(file) != 0 || !written) {
        quit(FAILED, "%s: %s", name, strerror(errno));
    }
}

/* Every field of the header is validated. */
static void check_header(const char *where, const header *h)
{
    const int64_t sizes[SIZES] = {h->layers, h->heads, h->width, h->context};
    bool fine = h->vocabulary >= 1 && h->vocabulary <= 256 && h->step >= 0;
    for (int n = 0; n < SIZES; n++) {
        fine = fine && sizes[n] >= numbers[n].low && sizes[n] <= numbers[n].high;
    }
    if (!fine || h->width % h->heads != 0 || h->width / h->heads > 256) {
        quit(WRONG_INPUT,
             "%s: there is no model of %lld layers, %lld heads, width %lld, context %lld, "
             "%lld characters, at step %lld",
             where, (long long)h->layers, (long long)h->heads, (long long)h->width,
             (long long)h->context, (long long)h->vocabulary, (long long)h->step);
    }
}

static void checkpoint_load(const char *name, model *m)
{
    FILE *const file = fopen(name, "rb");
    if (!file) {
        quit(WRONG_INPUT, "%s: %s", name, strerror(errno));
    }
    if (fread(&m->head, sizeof m->head, 1, file) != 1 || m->head.magic != magic) {
        quit(WRONG_INPUT, "%s: this is not a checkpoint of gpt for this machine", name);
    }
    check_header(name, &m->head);
    weights_create(m);
    const size_t count = 3 * (size_t)m->count;
    if (fread(m->w, sizeof(float), count, file) != count || getc(file) != EOF) {
        quit(WRONG_INPUT, "%s: this checkpoint is not as long as it should be", name);
    }
    fclose(file);
}

/* -------------------------------------------------------------------------------------------------
 * Training and sampling
 * ---------------------------------------------------------------------------------------------- */

/* Sequences from random positions of the text; the targets are one character ahead. */
static void draw_batch(header *h, const text *t, int64_t batch, uint8_t *tokens, uint8_t *targets)
{
    for (int64_t b = 0; b < batch; b++) {
        const int64_t at = (int64_t)(draw(&h->rng) * (double)(t->length - h->context));
        memcpy(tokens + b * h->context, t->tokens + at, (size_t)h->context);
        memcpy(targets + b * h->context, t->tokens + at + 1, (size_t)h->context);
    }
}

/* What all ranks share. */
static struct crew {
    threads threads;
    pthread_barrier_t barrier;
    model *models[THREADS_MAX];
    double loss[THREADS_MAX];
    const text *text;
} crew;

/* Copies this rank's rows of every sequence: its runs, one after another. Returns how many rows a
 * sequence has. */
static int64_t take_share(const model *m, int64_t batch, const uint8_t *whole, uint8_t *share)
{
    const int64_t context = m->head.context;
    int64_t rows = 0;
    for (int64_t b = 0; b < batch; b++) {
        rows = 0;
        for (int n = 0; n < fattn_split_runs(FATTN_SPLIT_ZIGZAG); n++) {
            fattn_run run;
            check(fattn_split_get_run(FATTN_SPLIT_ZIGZAG, context, m->transport.ranks,
                                      m->transport.rank, n, &run));
            if (whole) {
                memcpy(share, whole + b * context + run.first, (size_t)run.count);
                share += run.count;
            }
            rows += run.count;
        }
    }
    return rows;
}

/* Adds up the gradients of all ranks' weights, and their losses, on every rank. */
static double add_up(model *m, double loss)
{
    const int ranks = m->transport.ranks;
    if (ranks == 1) {
        return loss;
    }
    crew.loss[m->transport.rank] = loss;
    pthread_barrier_wait(&crew.barrier);
    const int64_t from = m->count * m->transport.rank / ranks;
    const int64_t to = m->count * (m->transport.rank + 1) / ranks;
    for (int64_t n = from; n < to; n++) { /* each rank adds a part, in a fixed order of ranks */
        float sum = 0;
        for (int r = 0; r < ranks; r++) {
            sum += crew.models[r]->dw[n];
        }
        for (int r = 0; r < ranks; r++) {
            crew.models[r]->dw[n] = sum;
        }
    }
    loss = 0;
    for (int r = 0; r < ranks; r++) {
        loss += crew.loss[r];
    }
    pthread_barrier_wait(&crew.barrier);
    return loss;
}

static void plan_divided(model *m, int64_t batch, int64_t length)
{
    fattn_group group;
    fattn_group_init(&group);
    group.transport = &m->transport;
    group.device = m->attention.device;
    group.split = FATTN_SPLIT_ZIGZAG; /* equal work under a causal mask */
    m->attention.batch = batch, m->attention.length = length;
    for (int op = 0; op < 2 && m->transport.ranks > 1; op++) {
        const fattn_problem problem =
            attention_problem(&m->attention, op ? FATTN_BACKWARD : FATTN_FORWARD);
        check(fattn_group_plan_create(&group, &problem, NULL, NULL, &m->attention.plans[op]));
    }
}

static void train(model *m, const text *t, int64_t batch)
{
    const int64_t all = batch * m->head.context, first = m->head.step;
    const int64_t length = take_share(m, batch, NULL, NULL), rows = batch * length;
    plan_divided(m, batch, length);
    const bool speaks = m->transport.rank == 0;
    const double memory = attention_bytes(&m->attention, m->head.layers) / 1e6;
    const double start = seconds();
    uint8_t *const tokens = allocate(2 * (all + rows), 1), *const targets = tokens + all;
    uint8_t *const own = targets + all, *const own_targets = own + rows;
    double sum = 0, since = start;
    int64_t summed = 0;
    if (speaks) {
        printf("%6s %10s %10s %18s\n", "step", "loss", "tokens/s", "attention memory");
    }
    while (m->head.step < number(STEPS)) {
        draw_batch(&m->head, t, batch, tokens, targets);
        take_share(m, batch, tokens, own);
        take_share(m, batch, targets, own_targets);
        forward(m, batch, length, own);
        double loss = cross_entropy(rows, all, m->head.vocabulary, m->logits, own_targets);
        if (!isfinite(loss)) {
            quit(FAILED, "the loss of step %lld is %g", (long long)m->head.step + 1, loss);
        }
        backward(m, own);
        loss = add_up(m, loss);
        update(m, 1e-6 * numbers[RATE].value);
        sum += loss;
        summed++;
        if (speaks && (m->head.step % number(EVERY) == 0 || m->head.step == number(STEPS))) {
            const double now = seconds();
            printf("%6lld %10.6f %10.0f %15.2f MB\n", (long long)m->head.step, sum / (double)summed,
                   (double)(summed * all) / (now - since), memory);
            fflush(stdout);
            sum = 0, summed = 0, since = now;
        }
    }
    if (speaks) {
        printf("%lld steps of %lld characters in %.1f s\n", (long long)(m->head.step - first),
               (long long)all, seconds() - start);
    }
    free(tokens);
    for (int op = 0; op < 2; op++) {
        fattn_group_plan_destroy(m->attention.plans[op]);
        m->attention.plans[op] = NULL;
    }
}

static void *train_rank(void *context)
{
    train(context, crew.text, number(BATCH));
    return NULL;
}

/* Trains on all ranks. The first rank's model is the caller's; the others have copies, which stay
 * equal to it. */
static void train_all(model *m, const text *t)
{
    const int ranks = (int)number(RANKS);
    pthread_t thread[THREADS_MAX];
    threads_make(&crew.threads, ranks);
    crew.threads.device = m->attention.device;
    pthread_barrier_init(&crew.barrier, NULL, (unsigned)ranks);
    crew.text = t;
    for (int r = 0; r < ranks; r++) {
        model *const own = r ? allocate(1, sizeof *own) : m;
        if (r) {
            own->head = m->head;
            weights_create(own);
            memcpy(own->w, m->w, (size_t)(3 * m->count) * sizeof(float));
            rows_create(own, number(BATCH), m->attention.device);
        }
        own->transport = threads_transport(&crew.threads, r);
        crew.models[r] = own;
    }
    for (int r = 1; r < ranks; r++) {
        if (pthread_create(&thread[r], NULL, train_rank, crew.models[r])) {
            quit(FAILED, "no thread for rank %d", r);
        }
    }
    train(m, t, number(BATCH));
    for (int r = 1; r < ranks; r++) {
        pthread_join(thread[r], NULL);
    }
    pthread_barrier_destroy(&crew.barrier);
    threads_free(&crew.threads);
}

/* Draws from softmax(logits / temperature). */
static int64_t draw_token(int64_t vocabulary, float *logits, uint64_t *rng)
{
    const float temperature = 0.8f;
    for (int64_t v = 0; v < vocabulary; v++) {
        logits[v] /= temperature;
    }
    softmax(vocabulary, logits);
    double left = draw(rng);
    int64_t v = 0;
    while (v < vocabulary - 1 && (left -= logits[v]) >= 0) {
        v++;
    }
    return v;
}

/* Writes characters one by one, each from the window before it; a full window is halved. */
static void sample(model *m, int64_t count, uint64_t seed)
{
    const int64_t context = m->head.context, vocabulary = m->head.vocabulary;
    uint8_t *const window = allocate(context, 1);
    const uint8_t *const feed = memchr(m->head.characters, '\n', (size_t)vocabulary);
    int64_t length = 1;
    window[0] = (uint8_t)(feed ? feed - m->head.characters : 0);
    for (int64_t n = 0; n < count; n++) {
        forward(m, 1, length, window);
        const int64_t token = draw_token(vocabulary, m->logits + (length - 1) * vocabulary, &seed);
        putchar(m->head.characters[token]);
        if (length == context) {
            length = context / 2;
            memmove(window, window + context - length, (size_t)length);
        }
        window[length++] = (uint8_t)token;
    }
    putchar('\n');
    free(window);
}

static void describe(const header *h, const fattn_device *device)
{
    fattn_device_info info;
    fattn_device_info_init(&info);
    printf("model: %lld layers, %lld heads, width %lld, context %lld, %lld characters\n",
           (long long)h->layers, (long long)h->heads, (long long)h->width, (long long)h->context,
           (long long)h->vocabulary);
    if (device) {
        check(fattn_device_get_info(device, &info));
        printf("attention: fattn on %s, %s\n", info.backend, info.isa);
        if (number(RANKS) > 1) {
            printf("divided over %d ranks\n", (int)number(RANKS));
        }
    } else {
        puts("attention: materialised");
    }
}

/* New weights for the characters of the text. */
static void begin(model *m, const text *t)
{
    m->head = (header){.layers = number(LAYERS),
                       .heads = number(HEADS),
                       .width = number(WIDTH),
                       .context = number(CONTEXT),
                       .rng = (uint64_t)number(SEED)};
    find_vocabulary(t, &m->head);
    check_header("options", &m->head);
    weights_create(m);
    weights_draw(m);
}

int main(int argc, char **argv)
{
    static model m; /* too large for a stack */
    const settings s = parse(argc, argv);
    const text t = s.text ? text_read(s.text) : (text){.length = 0};
    if (s.load) {
        checkpoint_load(s.load, &m);
    } else {
        begin(&m, &t);
    }
    text_encode(&t, &m.head, s.text);
    if (s.text && t.length <= m.head.context) {
        quit(WRONG_INPUT, "%s: %lld characters are too few for a context of %lld", s.text,
             (long long)t.length, (long long)m.head.context);
    }
    fattn_device *device = NULL;
    if (!s.materialised) {
        check(fattn_device_open(NULL, &device));
    }
    const int64_t batch = s.text ? number(BATCH) : 1;
    rows_create(&m, batch, device);
    describe(&m.head, device);
    if (s.text) {
        train_all(&m, &t);
    }
    if (s.save) {
        checkpoint_save(s.save, &m);
    }
    sample(&m, number(SAMPLE), (uint64_t)number(SEED));
    free(t.tokens);
    fattn_device_close(device);
    fattn_cache_clear();
    if (fflush(stdout) != 0 || ferror(stdout)) {
        quit(FAILED, "standard output cannot be written");
    }
    return 0;
}
