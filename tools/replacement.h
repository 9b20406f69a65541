/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files that are replaced together: all of them or none, also when the process is killed between
 * two of them.
 *
 * Each new file is written beside its target under a temporary name and sent to the disk; then all
 * are renamed. Several are preceded by a plan, a file beside the first target that says which names
 * belong together. It appears by a rename of its own, which is the moment of decision: whoever
 * finds a plan whose process has gone (replacement_recover) does the renamings that are left, and
 * whoever finds temporary files without one removes them. So between a kill and the next recovery
 * some targets may be new and others old; afterwards all are new or all are old.
 *
 * A process holds a lock (flock) on what it has not finished, so that nobody takes its files for
 * left ones; where a file system has no such locks nothing is recovered. Files are named
 * `.fattn-<process>-<number>` with an ending: .tmp a new file, .old the previous one while there is
 * a way back, .plan what belongs together, .see in every other folder the path of the plan.
 */
#ifndef FATTN_TOOLS_REPLACEMENT_H
#define FATTN_TOOLS_REPLACEMENT_H

#include <stddef.h>

#include "tools/complaint.h"

typedef struct replacement {
    char *target;    /* resolved path; owns the memory of the other names */
    char *temporary; /* the new file, in the same folder; empty: renamed already */
    char *aside;     /* where the file that was at target waits until all are renamed */
    char *note;      /* .plan or .see, where this one's folder has its own */
    int file;        /* the new file, open for writing and locked */
    int note_file;   /* -1: none */
} replacement;

/* Opens a temporary file for the path, which names no file, a regular one, or a link to one. A file
 * that is replaced leaves its mode, and where this is allowed its owner, to the new one. Recovers
 * the folder first. Returns 0, or -1 with the reason in *to. */
int replacement_open(replacement *one, const complaint *to);

/* Renames all. When one cannot be renamed, files replaced so far are put back. Afterwards all are
 * closed, whether it returns 0, or -1 with a reason. */
int replacement_commit(replacement *all, int count, char *why, size_t why_size);

/* Removes temporary files that are not renamed yet. Entries of zero bytes are skipped. */
void replacement_abandon(replacement *all, int count);

/* Finishes or removes what killed processes left in the folder of this path. It is called before a
 * file is read that may be such a process's output. What cannot be mended is left as it is. */
void replacement_recover(const char *path);

#endif
