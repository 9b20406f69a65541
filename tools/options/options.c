/* SPDX-License-Identifier: Apache-2.0 */
/* The option parser; see options.h. */
#include "tools/options/options.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/terminal/terminal.h"

enum { TABLE_MAX = 96 };

/* The option's name without its value, as arguments for %.*s. */
#define NAME(o) (int)strcspn((o)->name, " "), (o)->name

static const char *const switch_words[] = {"0", "1", NULL};

/* -------------------------------------------------------------------------------------------------
 * Single values. Each reads all of text, or returns false with the reason reported.
 * ---------------------------------------------------------------------------------------------- */

static bool refuse(const option_set *set, const option *o, const char *text, const char *what)
{
    tool_usage(set->command, "--%.*s: \"%s\" is not %s", NAME(o), text, what);
    return false;
}

/* strtoll and similar functions skip blanks; here a number begins with its first character. */
static bool blank(const char *text) { return *text == '\0' || isspace((unsigned char)*text); }

static bool read_integer(const option_set *set, const option *o, const char *text, int64_t *value)
{
    const bool bounded = o->min || o->max;
    const int64_t low = bounded ? o->min : INT64_MIN, high = bounded ? o->max : INT64_MAX;
    char *end;
    errno = 0;
    const long long number = strtoll(text, &end, 10);
    if (blank(text) || *end != '\0') {
        return refuse(set, o, text, "an integer");
    }
    if (errno == ERANGE || number < low || number > high) {
        char what[80];
        snprintf(what, sizeof what, "between %" PRId64 " and %" PRId64, low, high);
        return refuse(set, o, text, what);
    }
    *value = number;
    return true;
}

static bool read_unsigned(const option_set *set, const option *o, const char *text, uint64_t *value)
{
    char *end;
    errno = 0;
    const unsigned long long number = strtoull(text, &end, 10);
    if (blank(text) || *text == '-' || *end != '\0' || errno == ERANGE) {
        return refuse(set, o, text, "an integer between 0 and 2^64 - 1");
    }
    *value = number;
    return true;
}

static bool read_real(const option_set *set, const option *o, const char *text, double *value)
{
    char *end;
    const double number = strtod(text, &end);
    if (blank(text) || *end != '\0') {
        return refuse(set, o, text, "a number");
    }
    *value = number;
    return true;
}

static bool read_choice(const option_set *set, const option *o, const char *text, int *value)
{
    const char *const *const words = o->kind == OPTION_SWITCHES ? switch_words : o->words;
    char what[256] = "one of";
    for (int i = 0; words[i]; i++) {
        if (strcmp(text, words[i]) == 0) {
            *value = i;
            return true;
        }
        const size_t used = strlen(what);
        snprintf(what + used, sizeof what - used, "%s %s", i ? "," : "", words[i]);
    }
    return refuse(set, o, text, what);
}

static bool read_word(const option_set *set, const option *o, const char *text, char *value)
{
    if (*text == '\0') {
        return refuse(set, o, text, "a name");
    }
    memcpy(value, text, strlen(text) + 1); /* fits: each_of cuts words of OPTION_WORD_MAX */
    return true;
}

/* -------------------------------------------------------------------------------------------------
 * Values of an option
 * ---------------------------------------------------------------------------------------------- */

static bool read_item(const option_set *set, const option *o, const char *text, int i)
{
    switch (o->kind) {
    case OPTION_PAIRS:
    case OPTION_INTEGERS: return read_integer(set, o, text, &((option_integers *)o->value)->at[i]);
    case OPTION_REALS: return read_real(set, o, text, &((option_reals *)o->value)->at[i]);
    case OPTION_WORDS: return read_word(set, o, text, ((option_words *)o->value)->at[i]);
    default: return read_choice(set, o, text, &((option_choices *)o->value)->at[i]);
    }
}

static void set_count(const option *o, int count)
{
    switch (o->kind) {
    case OPTION_PAIRS:
    case OPTION_INTEGERS: ((option_integers *)o->value)->count = count; break;
    case OPTION_REALS: ((option_reals *)o->value)->count = count; break;
    case OPTION_WORDS: ((option_words *)o->value)->count = count; break;
    default: ((option_choices *)o->value)->count = count; break;
    }
}

static bool read_list(const option_set *set, const option *o, const char *text)
{
    int count = 0;
    for (const char *item = text;; count++) {
        const size_t length = strcspn(item, ",");
        char word[OPTION_WORD_MAX];
        if (count == OPTION_LIST_MAX || length >= sizeof word) {
            tool_usage(set->command, "--%.*s: a list has at most %d values of %d characters",
                       NAME(o), OPTION_LIST_MAX, OPTION_WORD_MAX - 1);
            return false;
        }
        memcpy(word, item, length);
        word[length] = '\0';
        if (!read_item(set, o, word, count)) {
            return false;
        }
        if (item[length] == '\0') {
            break;
        }
        item += length + 1;
    }
    count++;
    if (o->length && count != o->length) {
        tool_usage(set->command, "--%.*s: \"%s\" has %d values where %d are needed", NAME(o), text,
                   count, o->length);
        return false;
    }
    if (o->kind == OPTION_PAIRS && count % 2) {
        tool_usage(set->command, "--%.*s: \"%s\" is not pairs, as in --%s", NAME(o), text, o->name);
        return false;
    }
    set_count(o, count);
    return true;
}

static bool read_value(const option_set *set, const option *o, const char *text)
{
    switch (o->kind) {
    case OPTION_SWITCH: *(bool *)o->value = true; return true;
    case OPTION_TEXT: *(const char **)o->value = text; return true;
    case OPTION_INTEGER: return read_integer(set, o, text, o->value);
    case OPTION_UNSIGNED: return read_unsigned(set, o, text, o->value);
    case OPTION_REAL: return read_real(set, o, text, o->value);
    case OPTION_CHOICE: return read_choice(set, o, text, o->value);
    default: return read_list(set, o, text);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Help
 * ---------------------------------------------------------------------------------------------- */

/* "--dir fwd|bwd,..." A name such as "link B[,S]" says itself how many values there are. */
static void print_usage_of(const option *o, char *text, size_t size)
{
    const bool more_fit = o->kind >= OPTION_INTEGERS && !o->length && !strchr(o->name, '[');
    const char *const more = more_fit ? ",..." : "";
    size_t used = (size_t)snprintf(text, size, "--%s", o->name);
    for (int i = 0; o->words && o->words[i] && used < size; i++) {
        used += (size_t)snprintf(text + used, size - used, "%c%s", i ? '|' : ' ', o->words[i]);
    }
    if (used < size) {
        const bool switches = o->kind == OPTION_SWITCHES;
        snprintf(text + used, size - used, "%s",
                 !switches   ? more
                 : o->length ? "[=0|1]"
                             : "[=0,1]");
    }
}

static void print_help(const option_set *set)
{
    enum { COLUMN = 32 };
    printf("Usage: fattn %s [OPTION ...]\n\n%s\n\nOptions:\n", set->command, set->summary);
    for (const option *o = set->table; o->name; o++) {
        if (!o->name[0]) {
            continue;
        }
        char usage[128];
        print_usage_of(o, usage, sizeof usage);
        if (strlen(usage) > COLUMN - 4) {
            printf("  %s\n%*s", usage, COLUMN, "");
        } else {
            printf("  %-*s", COLUMN - 2, usage);
        }
        for (const char *c = o->help; *c; c++) {
            if (*c == '\n') {
                printf("\n%*s", COLUMN, "");
            } else {
                putchar(*c);
            }
        }
        putchar('\n');
    }
    printf("  %-*sthis text\n", COLUMN - 2, "--help");
    if (set->notes) {
        printf("\n%s\n", set->notes);
    }
    puts("\nExit status: 0 success, 1 a check or a benchmark found a failure, 2 wrong options,\n"
         "variables or files, 3 the device or the library failed, or lacks what was asked");
}

/* -------------------------------------------------------------------------------------------------
 * Parsing
 * ---------------------------------------------------------------------------------------------- */

static const option *find(const option_set *set, const char *name, size_t length)
{
    for (const option *o = set->table; o->name; o++) {
        if (o->name[0] && strcspn(o->name, " ") == length && memcmp(o->name, name, length) == 0) {
            return o;
        }
    }
    return NULL;
}

/* The value of the option in argv[*i]: the text after '=' or the next argument. "" for switches.
 * NULL if a value is missing, which is reported. */
static const char *value_of(const option_set *set, const option *o, const char *equals, int argc,
                            char **argv, int *i)
{
    if (o->kind == OPTION_SWITCH && equals) {
        tool_usage(set->command, "--%.*s takes no value", NAME(o));
        return NULL;
    }
    if (equals) {
        return equals + 1;
    }
    if (o->kind == OPTION_SWITCH) {
        return "";
    }
    if (o->kind == OPTION_SWITCHES) {
        return "1";
    }
    /* "--o --lse" lacks a value. A value that begins with "--" can be given after '='. */
    if (*i + 1 >= argc || strncmp(argv[*i + 1], "--", 2) == 0) {
        tool_usage(set->command, "--%.*s needs a value", NAME(o));
        return NULL;
    }
    return argv[++*i];
}

int options_parse(const option_set *set, int argc, char **argv)
{
    bool seen[TABLE_MAX] = {false};

    for (int i = 1; i < argc; i++) {
        const char *const word = argv[i];
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            print_help(set);
            return 1;
        }
        const bool dashes = strncmp(word, "--", 2) == 0;
        const char *const name = word + (dashes ? 2 : 0);
        const size_t length = strcspn(name, "=");
        const option *const o = dashes ? find(set, name, length) : NULL;
        if (!o) {
            tool_usage(set->command, "unknown %s \"%s\"; fattn %s --help lists the options",
                       dashes ? "option" : "argument", word, set->command);
            return -1;
        }
        assert(o - set->table < TABLE_MAX);
        if (seen[o - set->table]) {
            tool_usage(set->command, "--%.*s is given twice", NAME(o));
            return -1;
        }
        seen[o - set->table] = true;

        const char *const equals = name[length] == '=' ? name + length : NULL;
        const char *const text = value_of(set, o, equals, argc, argv, &i);
        if (!text || !read_value(set, o, text)) {
            return -1;
        }
        if (o->given) {
            *o->given = true;
        }
    }
    return 0;
}
