/* SPDX-License-Identifier: Apache-2.0 */
/* Pictures of slow-memory traffic; see io_plot.h. */
#define _POSIX_C_SOURCE 200809L /* popen */
#include "tools/plot/io_plot.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/terminal/terminal.h"

/* The axes of a plot. */
static const struct {
    const char *letter, *label, *scale; /* scale: in gnuplot's words */
} axes[IO_PLOT_AXES] = {
    {"N", "N: queries and keys", "set logscale x 2; set format x '%.0f'"},
    {"M", "M: elements of fast memory", "set logscale x 2; set format x '%.0f'"},
    {"d", "d: head dimension", "set logscale x 2; set format x '%.0f'"},
    {"density", "share of blocks kept by the mask", "unset logscale x; set format x '%g'"},
};

/* Curves: the counts of a schedule, the laws and the bound. Both panels share one legend: the label
 * of a law holds the constant of forward and, in brackets, that of backward (law_constants in
 * tools/io.c). */
enum { LAW1 = FATTN_IO_SCHEDULES, LAW2, LOWER_BOUND, CURVES };
static const struct {
    const char *name, *style;
    bool varies[IO_PLOT_AXES]; /* whether the value depends on N, M, d, density */
} curves[CURVES] = {
    [FATTN_IO_STANDARD] = {"standard", "linespoints lw 2 lc rgb '#c0392b'", {1, 0, 1, 1}},
    [FATTN_IO_FLASH1] = {"flash1", "linespoints lw 2 lc rgb '#2471a3'", {1, 1, 1, 1}},
    [FATTN_IO_FLASH2] = {"flash2", "linespoints lw 2 lc rgb '#1e8449'", {1, 1, 1, 1}},
    [LAW1] = {"12 (20) N^2 d^2 / M", "lines lw 1.5 lc rgb '#2471a3'", {1, 1, 1, 1}},
    [LAW2] = {"8 (16) N^2 d^2 / M", "lines lw 1.5 lc rgb '#1e8449'", {1, 1, 1, 1}},
    [LOWER_BOUND] = {"lower bound", "lines lw 1.5 lc rgb 'black'", {1, 0, 1, 1}},
};

static bool ends_in(const char *file, const char *ending)
{
    const size_t length = strlen(file), tail = strlen(ending);
    return length > tail && strcmp(file + length - tail, ending) == 0;
}

bool io_plot_open(const char *file)
{
    if (!ends_in(file, ".png") && !ends_in(file, ".svg")) {
        tool_usage("io", "--plot: %s ends neither in .png nor in .svg", file);
        return false;
    }
    if (system("command -v gnuplot >/dev/null 2>&1") != 0) {
        tool_usage("io", "--plot: gnuplot is not installed");
        return false;
    }
    FILE *const target = fopen(file, "wb");
    if (!target || fclose(target) != 0) {
        tool_usage("io", "--plot: %s: %s", file, strerror(errno));
        return false;
    }
    return true;
}

static bool same(const io_plot_row *a, const io_plot_row *b, int axis)
{
    return !(a->axis[axis] < b->axis[axis]) && !(a->axis[axis] > b->axis[axis]);
}

/* The axis with the most distinct values; the first one in a tie. */
static int longest_axis(const io_plot_row *rows, int count)
{
    int best = 0, most = 0;
    for (int axis = 0; axis < IO_PLOT_AXES; axis++) {
        int values = 0;
        for (int n = 0; n < count; n++) {
            int first = 0;
            while (!same(rows + first, rows + n, axis)) {
                first++;
            }
            values += first == n;
        }
        if (values > most) {
            best = axis, most = values;
        }
    }
    return best;
}

static bool on_curve(const io_plot_row *row, int curve, fattn_op op)
{
    static const fattn_io_schedule of[CURVES] = {FATTN_IO_STANDARD, FATTN_IO_FLASH1,
                                                 FATTN_IO_FLASH2, FATTN_IO_FLASH1, FATTN_IO_FLASH2};
    return row->op == op && (curve == LOWER_BOUND || row->schedule == of[curve]);
}

static double value_of(const io_plot_row *row, int curve)
{
    return curve == LAW1 || curve == LAW2 ? row->law
           : curve == LOWER_BOUND         ? row->lower_bound
                                          : row->total;
}

/* Whether two rows are points of one line: apart from `along`, they differ only in values on which
 * the curve does not depend. */
static bool same_line(const io_plot_row *a, const io_plot_row *b, int curve, int along)
{
    for (int axis = 0; axis < IO_PLOT_AXES; axis++) {
        if (axis != along && curves[curve].varies[axis] && !same(a, b, axis)) {
            return false;
        }
    }
    return true;
}

static bool has_several(const io_plot_row *rows, int count, int axis)
{
    int n = 0;
    while (n < count && same(rows, rows + n, axis)) {
        n++;
    }
    return n < count;
}

/* The label of a line: the curve's name, then the values of other axes that vary. */
static void print_name(FILE *out, const io_plot_row *rows, int count, const io_plot_row *row,
                       int curve, int along)
{
    fprintf(out, " title '%s", curves[curve].name);
    for (int axis = 0; axis < IO_PLOT_AXES; axis++) {
        if (axis != along && curves[curve].varies[axis] && has_several(rows, count, axis)) {
            fprintf(out, ", %s %g", axes[axis].letter, row->axis[axis]);
        }
    }
    fprintf(out, "'");
}

/* The lines of a curve. Pass 0 writes their data, pass 1 their part of the plot command. The number
 * of the line selects its point marker. */
static void print_curve(FILE *out, const io_plot_row *rows, int count, int curve, fattn_op op,
                        int along, int pass)
{
    int line = 0;
    for (int n = 0; n < count; n++) {
        int first = 0;
        while (first < n && !(on_curve(rows + first, curve, op) &&
                              same_line(rows + first, rows + n, curve, along))) {
            first++;
        }
        if (first < n || !on_curve(rows + n, curve, op)) {
            continue;
        }
        if (pass == 0) {
            fprintf(out, "$c%d_%d << EOD\n", curve, line);
            for (int i = n; i < count; i++) {
                if (on_curve(rows + i, curve, op) && same_line(rows + n, rows + i, curve, along)) {
                    fprintf(out, "%.17g %.17g\n", rows[i].axis[along], value_of(rows + i, curve));
                }
            }
            fprintf(out, "EOD\n");
        } else {
            fprintf(out, ", $c%d_%d smooth unique with %s", curve, line, curves[curve].style);
            fprintf(out, curve < FATTN_IO_SCHEDULES ? " pt %d" : " dt %d",
                    curve < FATTN_IO_SCHEDULES ? 5 + 2 * (line % 5) : 2 + line % 4);
            print_name(out, rows, count, rows + n, curve, along);
        }
        line++;
    }
}

static void print_panel(FILE *out, const io_plot_row *rows, int count, fattn_op op, int along,
                        bool last)
{
    fprintf(out, "set title '%s", op == FATTN_FORWARD ? "forward" : "backward");
    for (int axis = 0; axis < IO_PLOT_AXES; axis++) {
        if (axis != along && !has_several(rows, count, axis)) {
            fprintf(out, ", %s %g", axes[axis].letter, rows->axis[axis]);
        }
    }
    fprintf(out, "'\n");
    fprintf(out, last ? "set key at screen 0.985, 0.9 right top Left reverse spacing 1.3\n"
                      : "unset key\n");
    for (int pass = 0; pass < 2; pass++) {
        fputs(pass == 1 ? "plot NaN notitle" : "", out);
        for (int curve = 0; curve < CURVES; curve++) {
            print_curve(out, rows, count, curve, op, along, pass);
        }
    }
    fprintf(out, "\nunset ylabel\n");
}

/* gnuplot takes text in single quotes literally, except for single quotes. */
static void print_quoted(FILE *out, const char *text)
{
    fputc('\'', out);
    for (; *text; text++) {
        fprintf(out, *text == '\'' ? "''" : "%c", *text);
    }
    fputc('\'', out);
}

static void print_script(FILE *out, const char *file, const io_plot_row *rows, int count)
{
    const int along = longest_axis(rows, count);
    bool has[2] = {false};
    for (int n = 0; n < count; n++) {
        has[rows[n].op == FATTN_BACKWARD] = true;
    }
    const int panels = has[0] + has[1];
    double low = rows->lower_bound, high = rows->total;
    for (int n = 0; n < count; n++) {
        low = fmin(low, rows[n].lower_bound);
        high = fmax(high, fmax(rows[n].total, rows[n].law));
    }
    fprintf(out, "set terminal %s size %d,560 font 'sans,11' background rgb 'white'\nset output ",
            ends_in(file, ".png") ? "pngcairo" : "svg", panels == 2 ? 1320 : 840);
    print_quoted(out, file);
    fprintf(out,
            "\n%s\nset xlabel '%s'\nset logscale y\nset yrange [%.17g:%.17g]\n"
            "set format y '%%.0s%%c'\n"
            "set ylabel 'elements moved between slow and fast memory'\n"
            "set grid\nset xtics rotate by -35\n"
            "set multiplot layout 1,%d margins screen %g,%g,0.16,0.92 spacing screen 0.06\n",
            axes[along].scale, axes[along].label, low / 1.5, high * 1.5, panels,
            panels == 2 ? 0.07 : 0.11, panels == 2 ? 0.76 : 0.64);
    for (int dir = 0; dir < 2; dir++) {
        if (has[dir]) {
            print_panel(out, rows, count, dir == 0 ? FATTN_FORWARD : FATTN_BACKWARD, along,
                        dir == 1 || !has[1]);
        }
    }
    fprintf(out, "unset multiplot\n");
}

bool io_plot_draw(const char *file, const io_plot_row *rows, int count)
{
    void (*const before)(int) = signal(SIGPIPE, SIG_IGN); /* gnuplot may exit early */
    FILE *const gnuplot = popen("gnuplot", "w");
    if (gnuplot) {
        print_script(gnuplot, file, rows, count);
    }
    const bool drawn = gnuplot && pclose(gnuplot) == 0;
    signal(SIGPIPE, before);
    if (!drawn) {
        remove(file);
        fprintf(stderr, "fattn io: gnuplot did not draw %s\n", file);
    }
    return drawn;
}
