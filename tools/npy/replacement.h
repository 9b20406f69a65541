/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replaces several files together: all of them or none, even if the process is killed in between.
 *
 * Each new file is written next to its target under a temporary name and synced; then all are
 * renamed. If there are several, a plan is written first: a file next to the first target that
 * lists the names. The plan appears by a rename of its own, which commits the replacement. Recovery
 * (replacement_recover) completes the renames of a plan whose process has died, and removes
 * temporary files that have no plan. So between a kill and the next recovery some targets may be
 * new and others old; after recovery all are new or all are old.
 *
 * A process locks (flock) its unfinished files, so that recovery by another process leaves them
 * alone. On file systems without such locks nothing is recovered. Files are named
 * `.fattn-<process>-<number>` plus an ending: .tmp for a new file, .old for the previous one until
 * all are renamed, .plan for the plan, and .see for the path of the plan in every other folder.
 */
#ifndef FATTN_TOOLS_REPLACEMENT_H
#define FATTN_TOOLS_REPLACEMENT_H

#include <stddef.h>

#include "tools/npy/complaint.h"

typedef struct replacement {
    char *target;    /* resolved path; owns the memory of the other names */
    char *temporary; /* the new file, in the same folder; empty once it is renamed */
    char *aside;     /* the previous file's name until all are renamed */
    char *note;      /* the .plan or .see file in this folder, if this entry made one */
    int file;        /* the new file, open for writing and locked */
    int note_file;   /* -1: none */
} replacement;

/* Whether replacement_open() would take this path, as far as that can be known without creating a
 * file. Returns 0, or -1 with the reason in *to. */
int replacement_check(const complaint *to);

/* Opens a temporary file for the path, which names no file, or a regular one that this user may
 * write to, or a link to one. A file that is replaced leaves its mode, and where this is allowed
 * its owner, to the new one. Recovers the folder first. Returns 0, or -1 with the reason in *to. */
int replacement_open(replacement *one, const complaint *to);

/* Renames all. If one cannot be renamed, files replaced so far are put back. Afterwards all are
 * closed. Returns 0, or -1 with a reason. */
int replacement_commit(replacement *all, int count, char *why, size_t why_size);

/* Removes temporary files that are not renamed yet. Entries of zero bytes are skipped. */
void replacement_abandon(replacement *all, int count);

/* Completes or removes what killed processes left in the folder of this path. Call it before
 * reading a file that may be such a process's output. What cannot be completed is left as it is. */
void replacement_recover(const char *path);

#endif
