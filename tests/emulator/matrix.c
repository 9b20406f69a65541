/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/emulator/machine.h"
static const emu_row rows[] = {{"none", "*", 0, EMU_MATRIX, 0, 0, 0, HALF_ALONE}};
const emu_table emu_matrix_table = {rows, 1};
