/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The version of fattn. This is the only place where it is written; the build reads it from here.
 */
#ifndef FATTN_VERSION_H
#define FATTN_VERSION_H

#define FATTN_VERSION_MAJOR 0 /* 0: the interface may still change */
#define FATTN_VERSION_MINOR 1 /* larger when something is new */
#define FATTN_VERSION_PATCH 0 /* larger when something was mended */

/* Of the header: "major.minor.patch". fattn_version() says that of the library. */
#define FATTN_VERSION_STRING "0.1.0"

#endif
