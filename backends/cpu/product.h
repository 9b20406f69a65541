/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The matrix products, all of one shape: a register tile of FV_NK rows by up to FV_NQ vectors, to
 * which each step adds a broadcast factor times a row of vectors. Rows are given by pointers, so
 * the same code serves keys in pages, keys at any stride, and keys past the end, which point to a
 * row of zeros or whose results nobody reads. Numbers of rows are multiples of FV_NK unless stated
 * otherwise. A tile is summed from zero and then added to what C holds, if anything: rounding
 * errors grow with the length of a tile, not with that of the sequence.
 *
 *     product_rows      C_k  (+)= times sum_r A_k[r] B[r]         A_k contiguous along the sum
 *     product_columns   C[m]  =  C[m] alpha + sum_r A_r[m] B[r]   A_r contiguous along m
 *     product_values    the same, with a factor for each row instead of each column
 *     product_results   C[m]  =  factor sum_r A_r[m] B[r], rounded to the type of a tensor
 *
 * A and B consist of words: floats, or pairs of bf16 that are neighbours along the sum
 * (product_pairs.h, with _pairs after every name). depth counts words.
 */
#ifndef FATTN_CPU_PRODUCT_H
#define FATTN_CPU_PRODUCT_H

#include "backends/cpu/product_tmpl.h"

#endif
