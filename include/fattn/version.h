/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The version of fattn. It is written only here; the build reads it from this file.
 */
#ifndef FATTN_VERSION_H
#define FATTN_VERSION_H

#define FATTN_VERSION_MAJOR 0 /* 0: the interface may still change */
#define FATTN_VERSION_MINOR 1 /* grows with new features */
#define FATTN_VERSION_PATCH 0 /* grows with bug fixes */

/* The version of this header, "major.minor.patch"; fattn_version() returns the library's. */
#define FATTN_VERSION_STRING "0.1.0"

#endif
