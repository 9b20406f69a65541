/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of `fattn io` as a picture that gnuplot draws: a panel for forward, one for backward. */
#ifndef FATTN_TOOLS_IO_PLOT_H
#define FATTN_TOOLS_IO_PLOT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/io_model.h"

enum { IO_PLOT_AXES = 4 };

/* A row: the counted total, and what it is compared with, in elements. */
typedef struct io_plot_row {
    fattn_io_schedule schedule;
    fattn_op op;
    double axis[IO_PLOT_AXES]; /* N, M, d, density */
    double total, law, lower_bound;
} io_plot_row;

/* Checks that the file ends in .png or .svg and can be written, and that gnuplot is installed; if
 * not, prints why on stderr and returns false. Creates the file, empty. */
bool io_plot_open(const char *file);

/* Draws along the axis with the most values. false: gnuplot failed and said why on stderr; the file
 * is gone. */
bool io_plot_draw(const char *file, const io_plot_row *rows, int count);

#endif
