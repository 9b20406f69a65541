/* SPDX-License-Identifier: Apache-2.0 */
/* The version of fattn. This is the only place where it is written; the build reads it from
 * here. */
#ifndef FATTN_VERSION_H
#define FATTN_VERSION_H

#define FATTN_VERSION_MAJOR 0
#define FATTN_VERSION_MINOR 1
#define FATTN_VERSION_PATCH 0
#define FATTN_VERSION_STRING "0.1.0"

#endif
