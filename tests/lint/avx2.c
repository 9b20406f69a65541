/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One addition of eight integers. Compiled for AVX2 it has to die on a processor without it:
 * tools/test shows with it that its emulated baseline processor really is one.
 */
typedef int vector __attribute__((vector_size(32)));

int main(void)
{
    volatile vector sum = {0};
    sum = sum + 1;
    return sum[7] - 1;
}
