/* SPDX-License-Identifier: Apache-2.0 */
/* main() of a fuzz target that is compiled with -DFATTN_FUZZ_REPLAY: runs each file, or each file
 * of each folder, that it is given, and prints TAP. */
#ifndef FATTN_TESTS_FUZZ_REPLAY_H
#define FATTN_TESTS_FUZZ_REPLAY_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

#ifdef FATTN_FUZZ_REPLAY

#include <dirent.h>

static int replayed;

static void replay_file(const char *path)
{
    static uint8_t bytes[1 << 20];
    FILE *const file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(2);
    }
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    if (ferror(file) || fgetc(file) != EOF) {
        printf("Bail out! %s cannot be read, or has more than %zu bytes\n", path, sizeof bytes);
        exit(2);
    }
    fclose(file);
    LLVMFuzzerTestOneInput(bytes, size);
    printf("ok %d - %s\n", ++replayed, path);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        DIR *const dir = opendir(argv[i]);
        if (!dir) {
            replay_file(argv[i]);
            continue;
        }
        for (struct dirent *entry; (entry = readdir(dir));) {
            char path[4096];
            if (entry->d_name[0] == '.') continue;
            snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            replay_file(path);
        }
        closedir(dir);
    }
    printf("1..%d\n", replayed);
    return replayed == 0;
}

#endif
#endif
