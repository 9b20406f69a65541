/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `fattn io`: slow-memory traffic, counted. Runs the published algorithms of
 * backends/reference/tiled.h on one head. Prints their reads and writes next to the prediction of
 * core/io_model.h, the law N^2 d^2 / M, standard attention and the lower bound. --paper compares
 * the counts for one problem with the paper's measurements.
 */
#include <stdio.h>
#include <string.h>

#include "backends/reference/tiled.h"
#include "core/dtype.h"
#include "core/memory.h"
#include "core/problem.h"
#include "tools/commands.h"
#include "tools/judge/random_case.h"
#include "tools/options/options.h"
#include "tools/plot/io_plot.h"
#include "tools/terminal/terminal.h"

/* -------------------------------------------------------------------------------------------------
 * One head
 * ---------------------------------------------------------------------------------------------- */

/* The parameters of one row of the report. */
typedef struct setting {
    fattn_io_schedule schedule;
    fattn_op op;
    fattn_dtype dtype;
    int64_t n, d, m; /* m: elements of fast memory */
    uint64_t features;
    double dropout;
    double density;   /* of the block mask; 1: no mask */
    int64_t block[2]; /* queries and keys of a block */
} setting;

typedef struct head {
    fattn_problem problem; /* normalised */
    fattn_buffers buffers;
    fattn_tile tile;
    uint8_t *block_mask;
    double density; /* actual density of the block mask */
    void *tensors, *workspace;
} head;

static const char *dir_name(fattn_op op) { return op == FATTN_FORWARD ? "fwd" : "bwd"; }

static void head_free(head *a)
{
    fattn_memory_free_aligned(a->workspace);
    fattn_memory_free_aligned(a->tensors);
    fattn_memory_free(a->block_mask);
    *a = (head){.tensors = NULL};
}

/* Number of mask blocks along the queries (0) or the keys (1). */
static int64_t blocks(const setting *s, int axis)
{
    return (s->n + s->block[axis] - 1) / s->block[axis];
}

/* Keeps blocks at random, the same ones for every schedule. */
static fattn_status draw_block_mask(const setting *s, head *a)
{
    const int64_t count = blocks(s, 0) * blocks(s, 1);
    draw_rng rng = draw_stream(1, s->n, (uint64_t)s->block[0]);
    int64_t kept = 0;
    a->block_mask = fattn_memory_alloc((size_t)count);
    if (!a->block_mask) {
        return fattn_fail_memory(count, "a block mask");
    }
    for (int64_t n = 0; n < count; n++) {
        a->block_mask[n] = draw_unit(&rng) < s->density;
        kept += a->block_mask[n];
    }
    a->density = (double)kept / (double)count;
    a->buffers.block_mask = a->block_mask;
    return FATTN_OK;
}

static fattn_status head_create(const setting *s, head *a)
{
    *a = (head){.density = 1};
    fattn_problem *const p = &a->problem;
    fattn_problem_init(p);
    fattn_buffers_init(&a->buffers);
    p->op = s->op;
    p->dtype = s->dtype;
    p->seqlen_q = p->seqlen_k = s->n;
    p->dim = p->dim_v = s->d;
    p->features = s->features;
    p->dropout_p = s->dropout;
    p->outputs = s->op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE : 0;
    if (s->density < 1) {
        p->features |= FATTN_BLOCK_MASK;
        p->block_m = s->block[0];
        p->block_n = s->block[1];
        p->block_mask_stride[2] = blocks(s, 1);
        p->block_mask_stride[3] = 1;
    }
    fattn_status status = fattn_problem_normalise(p, p);
    if (status == FATTN_OK && s->density < 1) {
        status = draw_block_mask(s, a);
    }
    if (status == FATTN_OK) {
        a->tile = fattn_io_paper_tile(p, s->m);
        if (s->schedule == FATTN_IO_FLASH2) {
            a->tile.br = a->tile.bc; /* its forward reads all keys once per block of queries */
        }
    }
    return status;
}

/* Allocates q k v o dout dq dk dv in the problem's dtype and lse in f32, and fills the inputs. */
static fattn_status head_fill(head *a)
{
    const fattn_problem *const p = &a->problem;
    const int64_t count = p->seqlen_q * p->dim, size = fattn_dtype_size(p->dtype);
    const int64_t bytes = 8 * count * size + p->seqlen_q * 4;
    const int64_t work = fattn_tiled_workspace(p, FATTN_IO_STANDARD, a->tile);
    char *at = fattn_memory_alloc_aligned((size_t)bytes);
    a->tensors = at;
    a->workspace = work < 0 ? NULL : fattn_memory_alloc_aligned((size_t)work);
    if (!a->tensors || !a->workspace) {
        return fattn_fail_memory(a->tensors ? work : bytes, "a head");
    }
    void *const inputs[] = {at, at + count * size, at + 2 * count * size, at + 3 * count * size};
    draw_rng rng = draw_stream(2, p->seqlen_q, (uint64_t)p->dim);
    for (int t = 0; t < 4; t++) {
        for (int64_t n = 0; n < count; n++) {
            fattn_dtype_store(p->dtype, inputs[t], n, draw_normal(&rng));
        }
    }
    fattn_buffers *const b = &a->buffers;
    b->q = inputs[0], b->k = inputs[1], b->v = inputs[2], b->dout = inputs[3];
    b->o = at + 4 * count * size;
    b->dq = at + 5 * count * size, b->dk = at + 6 * count * size, b->dv = at + 7 * count * size;
    b->lse = at + 8 * count * size;
    return FATTN_OK;
}

/* Runs the algorithm with its arithmetic. A backward first runs the forward that it needs, whose
 * accesses are not counted. */
static fattn_status execute(head *a, const fattn_tiled_options *options, fattn_io_counts *counts)
{
    fattn_status status = head_fill(a);
    if (status == FATTN_OK && a->problem.op == FATTN_BACKWARD) {
        fattn_problem forward = a->problem;
        fattn_io_counts nowhere = {0};
        forward.op = FATTN_FORWARD;
        forward.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
        fattn_tiled_run(&forward, &a->buffers, options, a->workspace, &nowhere);
    }
    if (status == FATTN_OK) {
        fattn_tiled_run(&a->problem, &a->buffers, options, a->workspace, counts);
    }
    return status;
}

/* Counts and predicts the traffic of a setting. Free *a even after a failure. */
static fattn_status measure(const setting *s, bool arithmetic, head *a, fattn_io_counts *counts,
                            fattn_io_counts *predicted)
{
    fattn_status status = head_create(s, a);
    if (status != FATTN_OK) {
        return status;
    }
    const fattn_tiled_options options = {
        .schedule = s->schedule, .tile = a->tile, .count_only = !arithmetic};
    *counts = (fattn_io_counts){0};
    if (arithmetic) {
        status = execute(a, &options, counts);
    } else {
        fattn_tiled_run(&a->problem, &a->buffers, &options, NULL, counts);
    }
    fattn_io_predict(&a->problem, &a->buffers, s->schedule, a->tile, predicted);
    return status;
}

static double sum_of(const fattn_io_counts *counts)
{
    const fattn_io total = fattn_io_total(counts);
    return total.reads + total.writes;
}

/* -------------------------------------------------------------------------------------------------
 * The sweep
 * ---------------------------------------------------------------------------------------------- */

static const char *const schedule_words[] = {"standard", "flash1", "flash2", NULL};
static const char *const dir_words[] = {"fwd", "bwd", NULL};

typedef struct request {
    option_choices schedules, dirs;
    option_integers n, d, m;
    option_reals density;
    option_integers block;
    bool causal, execute, json, paper;
    const char *plot; /* the file, or NULL */
} request;

/* Prints one value, in JSON with its name. */
static void print_number(bool json, bool first, const char *name, double value)
{
    if (json) {
        printf("%s\"%s\": %.17g", first ? "" : ", ", name, value);
    } else {
        printf("%s%.10g", first ? "" : "\t", value);
    }
}

/* In elements: all operands are f32. */
static double lower_bound_of(const head *a) { return fattn_io_lower_bound_bytes(&a->problem) / 4; }

/* The constants c of the leading terms of forward and backward: c N^2 for standard attention, else
 * c N^2 d^2 / M. */
static const double law_constants[FATTN_IO_SCHEDULES][2] = {
    [FATTN_IO_STANDARD] = {4, 7}, [FATTN_IO_FLASH1] = {12, 20}, [FATTN_IO_FLASH2] = {8, 16}};

/* The leading term of the traffic for Bc = M / (4 d), or the lower bound where that is larger.
 * FlashAttention passes over the queries once for each of the 4 d N / M blocks of keys: forward
 * reads Q and reads and writes O; backward reads Q, O and dO, and reads and writes dQ.
 * FlashAttention-2 forward passes over K and V once for each block of queries; its backward passes
 * over Q, dO and (read and written) dQ once for each block of keys. Standard attention passes over
 * all pairs. */
static double law_of(const setting *s, const head *a)
{
    const int backward = s->op == FATTN_BACKWARD;
    const double n = (double)s->n, nd = n * (double)s->d,
                 share = s->features & FATTN_CAUSAL ? 0.5 : 1;
    const double c = law_constants[s->schedule][backward];
    const double law = s->schedule == FATTN_IO_STANDARD
                           ? c * n * n
                           : c * nd * nd / (double)s->m * a->density * share;
    const double bound = lower_bound_of(a);
    return law > bound ? law : bound;
}

static void print_row(const request *r, const setting *s, const head *a,
                      const fattn_io_counts *counts, const fattn_io_counts *predicted)
{
    fattn_io_counts standard;
    fattn_io_predict(&a->problem, &a->buffers, FATTN_IO_STANDARD, a->tile, &standard);
    const fattn_io total = fattn_io_total(counts);
    const struct {
        const char *name;
        double value;
    } columns[] = {
        {"n", (double)s->n},
        {"d", (double)s->d},
        {"m", (double)s->m},
        {"br", (double)a->tile.br},
        {"bc", s->schedule == FATTN_IO_STANDARD ? (double)s->n : (double)a->tile.bc},
        {"density", a->density},
        {"reads", total.reads},
        {"writes", total.writes},
        {"total", sum_of(counts)},
        {"predicted", sum_of(predicted)},
        {"law", law_of(s, a)},
        {"standard", sum_of(&standard)},
        {"lower_bound", lower_bound_of(a)},
    };
    const char *const schedule = fattn_io_schedule_name(s->schedule);
    if (r->json) {
        printf("{\"schedule\": \"%s\", \"dir\": \"%s\", ", schedule, dir_name(s->op));
    } else {
        printf("%s\t%s\t", schedule, dir_name(s->op));
    }
    for (size_t n = 0; n < sizeof columns / sizeof columns[0]; n++) {
        print_number(r->json, n == 0, columns[n].name, columns[n].value);
    }
    printf(r->json ? "}\n" : "\n");
    fflush(stdout); /* the next row may take minutes */
}

/* Measures and prints a row. *point becomes the row as a point of the plot. */
static int report_row(const request *r, const setting *s, io_plot_row *point)
{
    head a;
    fattn_io_counts counts, predicted;
    const fattn_status status = measure(s, r->execute, &a, &counts, &predicted);
    int code = TOOL_OK;
    tool_progress_clear();
    if (status == FATTN_OK) {
        print_row(r, s, &a, &counts, &predicted);
        *point = (io_plot_row){
            s->schedule,     s->op,         {(double)s->n, (double)s->m, (double)s->d, s->density},
            sum_of(&counts), law_of(s, &a), lower_bound_of(&a)};
        if (memcmp(&counts, &predicted, sizeof counts) != 0) {
            fprintf(stderr, "fattn io: the last row differs from its prediction\n");
            code = TOOL_FAILED;
        }
    } else {
        code = tool_failure(status);
    }
    head_free(&a);
    return code;
}

/* Counts every combination of the lists; the last list varies fastest. */
static int sweep_rows(const request *r, const int lengths[6], int rows, io_plot_row *points)
{
    int worst = TOOL_OK;
    if (!r->json) {
        printf("schedule\tdir\tn\td\tm\tbr\tbc\tdensity\treads\twrites\ttotal\tpredicted\tlaw\t"
               "standard\tlower_bound\n");
    }
    for (int row = 0; row < rows && worst <= TOOL_FAILED; row++) {
        int at[6], rest = row;
        for (int axis = 5; axis >= 0; axis--) {
            at[axis] = rest % lengths[axis];
            rest /= lengths[axis];
        }
        const setting s = {
            .op = r->dirs.at[at[0]] == 0 ? FATTN_FORWARD : FATTN_BACKWARD,
            .schedule = (fattn_io_schedule)r->schedules.at[at[1]],
            .dtype = FATTN_F32,
            .d = r->d.at[at[2]],
            .n = r->n.at[at[3]],
            .density = r->density.at[at[4]],
            .m = r->m.at[at[5]],
            .features = r->causal ? FATTN_CAUSAL : 0,
            .block = {r->block.at[0], r->block.at[1]},
        };
        tool_progress(row, rows);
        const int code = report_row(r, &s, points + row);
        worst = code > worst ? code : worst;
    }
    return worst;
}

static int report_sweep(const request *r)
{
    const int lengths[] = {r->dirs.count, r->schedules.count, r->d.count,
                           r->n.count,    r->density.count,   r->m.count};
    int rows = 1;
    for (int axis = 0; axis < 6; axis++) {
        rows *= lengths[axis];
    }
    if (r->plot && !io_plot_open(r->plot)) {
        return TOOL_USAGE;
    }
    io_plot_row *const points = fattn_memory_alloc((size_t)rows * sizeof *points);
    if (!points) {
        return tool_failure(fattn_fail_memory(rows * (int64_t)sizeof *points, "the rows"));
    }
    int code = sweep_rows(r, lengths, rows, points);
    if (r->plot && code == TOOL_OK && !io_plot_draw(r->plot, points, rows)) {
        code = TOOL_LIBRARY;
    }
    fattn_memory_free(points);
    return code;
}

/* -------------------------------------------------------------------------------------------------
 * The paper's table
 * ---------------------------------------------------------------------------------------------- */

/* "FlashAttention", figure 2: GPT-2 medium on an A100, forward + backward, f16, mask and dropout.
 * An A100 has 192 KiB of fast memory per multiprocessor. */
enum { PAPER_N = 1024, PAPER_D = 64, PAPER_HEADS = 16, PAPER_BATCH = 64, PAPER_M = 192 * 1024 / 2 };
static const double paper_dropout = 0.1;
static const double paper_gigabytes[FATTN_IO_SCHEDULES] = {
    40.3, 4.4, 0}; /* the paper predates FlashAttention-2 */

typedef struct paper_table {
    double gigabytes[FATTN_IO_SCHEDULES][2][FATTN_IO_TENSORS]; /* forward, backward */
    bool predicted;
} paper_table;

static fattn_status fill_paper_table(paper_table *t)
{
    t->predicted = true;
    for (int n = 0; n < FATTN_IO_SCHEDULES * 2; n++) {
        const int schedule = n / 2, dir = n % 2;
        const setting s = {.schedule = (fattn_io_schedule)schedule,
                           .op = dir == 0 ? FATTN_FORWARD : FATTN_BACKWARD,
                           .dtype = FATTN_F16,
                           .n = PAPER_N,
                           .d = PAPER_D,
                           .m = PAPER_M,
                           .features = FATTN_CAUSAL | FATTN_DROPOUT,
                           .dropout = paper_dropout,
                           .density = 1};
        head a;
        fattn_io_counts counts, predicted;
        tool_progress(n, FATTN_IO_SCHEDULES * 2);
        const fattn_status status = measure(&s, true, &a, &counts, &predicted);
        tool_progress_clear();
        for (int i = 0; i < FATTN_IO_TENSORS && status == FATTN_OK; i++) {
            const double bytes = fattn_io_element_bytes(&a.problem, (fattn_io_tensor)i);
            t->gigabytes[schedule][dir][i] = (counts.tensor[i].reads + counts.tensor[i].writes) *
                                             bytes * PAPER_HEADS * PAPER_BATCH / 1e9;
        }
        head_free(&a);
        if (status != FATTN_OK) {
            return status;
        }
        t->predicted = t->predicted && memcmp(&counts, &predicted, sizeof counts) == 0;
    }
    return FATTN_OK;
}

static double column_sum(const double *column)
{
    double sum = 0;
    for (int i = 0; i < FATTN_IO_TENSORS; i++) {
        sum += column[i];
    }
    return sum;
}

static void print_cell(double gigabytes)
{
    if (gigabytes != 0) {
        printf(" %9.3f", gigabytes);
    } else {
        printf(" %9s", "");
    }
}

static void print_paper_text(const paper_table *t)
{
    printf("N %d, d %d, %d heads, batch %d, f16, causal mask, dropout %.1f, forward + backward.\n"
           "Counts of one head times %d; M = %d elements (192 KiB). In GB:\n\n",
           PAPER_N, PAPER_D, PAPER_HEADS, PAPER_BATCH, paper_dropout, PAPER_HEADS * PAPER_BATCH,
           PAPER_M);
    printf("%-10s", "");
    for (int n = 0; n < FATTN_IO_SCHEDULES * 2; n++) {
        printf(" %9s", n % 2 ? "" : schedule_words[n / 2]);
    }
    printf("\n%-10s", "");
    for (int n = 0; n < FATTN_IO_SCHEDULES * 2; n++) {
        printf(" %9s", dir_words[n % 2]);
    }
    printf("\n");
    for (int i = 0; i < FATTN_IO_TENSORS; i++) {
        double any = 0;
        for (int n = 0; n < FATTN_IO_SCHEDULES * 2; n++) {
            any += t->gigabytes[n / 2][n % 2][i];
        }
        if (any == 0) {
            continue;
        }
        printf("%-10s", fattn_io_tensor_name((fattn_io_tensor)i));
        for (int n = 0; n < FATTN_IO_SCHEDULES * 2; n++) {
            print_cell(t->gigabytes[n / 2][n % 2][i]);
        }
        printf("\n");
    }
    printf("%-10s", "sum");
    for (int n = 0; n < FATTN_IO_SCHEDULES * 2; n++) {
        print_cell(column_sum(t->gigabytes[n / 2][n % 2]));
    }
    printf("\n\n");
    for (int s = 0; s < FATTN_IO_SCHEDULES; s++) {
        printf("%-10s %9.2f GB", schedule_words[s],
               column_sum(t->gigabytes[s][0]) + column_sum(t->gigabytes[s][1]));
        if (paper_gigabytes[s] != 0) {
            printf("   measured in the paper: %.1f GB", paper_gigabytes[s]);
        }
        printf("\n");
    }
}

static void print_paper_json(const paper_table *t)
{
    for (int n = 0; n < FATTN_IO_SCHEDULES * 2 * FATTN_IO_TENSORS; n++) {
        const int s = n / (2 * FATTN_IO_TENSORS), dir = n / FATTN_IO_TENSORS % 2;
        const int i = n % FATTN_IO_TENSORS;
        if (t->gigabytes[s][dir][i] != 0) {
            printf("{\"schedule\": \"%s\", \"dir\": \"%s\", \"tensor\": \"%s\", \"gb\": %.17g}\n",
                   schedule_words[s], dir_words[dir], fattn_io_tensor_name((fattn_io_tensor)i),
                   t->gigabytes[s][dir][i]);
        }
    }
    for (int s = 0; s < FATTN_IO_SCHEDULES; s++) {
        printf("{\"schedule\": \"%s\", \"gb\": %.17g", schedule_words[s],
               column_sum(t->gigabytes[s][0]) + column_sum(t->gigabytes[s][1]));
        if (paper_gigabytes[s] != 0) {
            printf(", \"paper_gb\": %.1f", paper_gigabytes[s]);
        }
        printf("}\n");
    }
}

static int report_paper(bool json)
{
    paper_table table = {.predicted = false};
    const fattn_status status = fill_paper_table(&table);
    if (status != FATTN_OK) {
        return tool_failure(status);
    }
    (json ? print_paper_json : print_paper_text)(&table);
    if (!table.predicted) {
        fprintf(stderr, "fattn io: the counts differ from their prediction\n");
    }
    return table.predicted ? TOOL_OK : TOOL_FAILED;
}

/* -------------------------------------------------------------------------------------------------
 * The command
 * ---------------------------------------------------------------------------------------------- */

/* Without a sweep of the user's own, --plot sweeps M for one length. */
static void plot_defaults(request *r, bool has_n, bool has_m)
{
    if (!has_n) {
        r->n = (option_integers){1, {4096}};
    }
    for (int i = 0; !has_n && !has_m && i < 9; i++) {
        r->m.at[i] = INT64_C(4096) << i;
        r->m.count = i + 1;
    }
}

static bool given_value(const option *table, const bool *given, const void *value)
{
    int n = 0;
    while (table[n].value != value) {
        n++;
    }
    return given[n];
}

/* Refuses a density outside of 0..1, and options that would have no effect. */
static bool consistent(const request *r, const option *table, const bool *given)
{
    bool sparse = false;
    for (int n = 0; n < r->density.count; n++) {
        const double density = r->density.at[n];
        if (!(density >= 0 && density <= 1)) {
            tool_usage("io", "--density: %g is not in 0..1", density);
            return false;
        }
        sparse = sparse || density < 1;
    }
    if (!sparse && given_value(table, given, &r->block)) {
        tool_usage("io", "--block-size needs a --density below 1");
        return false;
    }
    for (int n = 0; r->paper && table[n].name; n++) {
        if (given[n] && table[n].value != &r->paper && table[n].value != &r->json) {
            tool_usage("io", "--paper is one fixed problem and takes no --%.*s",
                       (int)strcspn(table[n].name, " "), table[n].name);
            return false;
        }
    }
    return true;
}

int fattn_tool_io(int argc, char **argv)
{
    request r = {
        .schedules = {3, {FATTN_IO_STANDARD, FATTN_IO_FLASH1, FATTN_IO_FLASH2}},
        .dirs = {2, {0, 1}},
        .n = {3, {1024, 2048, 4096}},
        .d = {1, {64}},
        .m = {2, {16384, 98304}},
        .density = {1, {1}},
        .block = {2, {64, 64}},
    };
    option table[] = {
        {"schedule", "algorithms; default: all", OPTION_CHOICES, .value = &r.schedules,
         .words = schedule_words},
        {"dir", "forward, backward; default: both", OPTION_CHOICES, .value = &r.dirs,
         .words = dir_words},
        {"sq N", "number of queries and of keys; default 1024,2048,4096,\nwith --plot 4096",
         OPTION_INTEGERS, .value = &r.n, .min = 1, .max = 1 << 20},
        {"d D", "head dimensions; default 64", OPTION_INTEGERS, .value = &r.d, .min = 1,
         .max = 576},
        {"m M", "elements of fast memory; default 16384,98304,\nwith --plot alone 4096 to 1048576",
         OPTION_INTEGERS, .value = &r.m, .min = 1, .max = INT64_C(1) << 40},
        {"density P", "share of blocks that a block mask keeps; default 1, no mask", OPTION_REALS,
         .value = &r.density},
        {"block-size M,N", "queries and keys of a block of the mask; default 64,64", OPTION_PAIRS,
         .value = &r.block, .min = 1, .max = 1 << 20, .length = 2},
        {"causal", "hide the keys after each query", OPTION_SWITCH, .value = &r.causal},
        {"execute", "also do the arithmetic, on random numbers", OPTION_SWITCH,
         .value = &r.execute},
        {"json", "JSON lines instead of tab-separated columns", OPTION_SWITCH, .value = &r.json},
        {"plot FILE", "also plot the rows with gnuplot; FILE ends in .png or .svg", OPTION_TEXT,
         .value = &r.plot},
        {"paper", "only the problem of the paper's figure 2, tensor by tensor", OPTION_SWITCH,
         .value = &r.paper},
        {.name = NULL},
    };
    enum { ROWS = sizeof table / sizeof table[0] };
    bool given[ROWS] = {false};
    for (int n = 0; n < ROWS; n++) {
        table[n].given = &given[n];
    }
    const option_set set = {
        .command = "io",
        .summary =
            "Counts the elements that one head of attention moves between slow and fast memory:\n"
            "standard attention op by op, FlashAttention (flash1) and FlashAttention-2 (flash2),\n"
            "by running them on a simulated machine with two memories.",
        .table = table,
        .notes = "Columns: reads, writes and their total are counted; predicted is the total by\n"
                 "formula; law is the leading term of the schedule, c N^2 d^2 / M, or lower_bound\n"
                 "where that is larger; standard and lower_bound are for the same problem.\n"
                 "Tiles are those of FlashAttention's Algorithm 1 for M; flash2 has br = bc.",
    };
    const int parsed = options_parse(&set, argc, argv);
    if (parsed != 0) {
        return parsed > 0 ? TOOL_OK : TOOL_USAGE;
    }
    if (!consistent(&r, table, given)) {
        return TOOL_USAGE;
    }
    if (r.plot) {
        plot_defaults(&r, given_value(table, given, &r.n), given_value(table, given, &r.m));
    }
    return r.paper ? report_paper(r.json) : report_sweep(&r);
}
