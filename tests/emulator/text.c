/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding: from a line of the disassembly to an instruction. The text is what llvm-objdump prints:
 * a mnemonic, operands between commas, modifiers between spaces, the address in a comment.
 * The row of the mnemonic says what the operands must be. Anything unknown is an error that names
 * it.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/machine.h"
#include "tests/emulator/number.h"

enum { MAX_PIECES = 8, PIECE = 160 };

typedef struct pieces {
    char mnemonic[64];
    char operand[MAX_PIECES][PIECE];
    int operands;
    char modifiers[512];
} pieces;

static bool fail(char *why, size_t why_size, const char *what, const char *text)
{
    snprintf(why, why_size, "%s: %s", what, text);
    return false;
}

/* ---- splitting ------------------------------------------------------------------------------- */

static int depth_after(int depth, char c)
{
    return depth + (c == '[' || c == '(') - (c == ']' || c == ')');
}

/* The first of `separators` outside brackets, or the end. */
static const char *find_outside(const char *text, const char *separators)
{
    int depth = 0;
    for (; *text != '\0'; text++) {
        depth = depth_after(depth, *text);
        if (depth == 0 && strchr(separators, *text) != NULL) break;
    }
    return text;
}

static const char *skip_space(const char *text)
{
    while (*text == ' ' || *text == '\t') text++;
    return text;
}

static bool copy(char *to, size_t size, const char *from, const char *end)
{
    while (end > from && isspace((unsigned char)end[-1])) end--;
    const size_t length = (size_t)(end - from);
    if (length >= size) return false;
    memcpy(to, from, length);
    to[length] = '\0';
    return true;
}

static bool split(const char *text, pieces *p)
{
    memset(p, 0, sizeof *p);
    text = skip_space(text);
    const char *end = find_outside(text, " \t");
    if (!copy(p->mnemonic, sizeof p->mnemonic, text, end)) return false;
    text = skip_space(end);
    while (*text != '\0') {
        if (p->operands == MAX_PIECES) return false;
        const char *comma = find_outside(text, ",");
        const char *space = find_outside(text, " ,");
        if (!copy(p->operand[p->operands++], PIECE, text, space)) return false;
        if (*comma == '\0') return copy(p->modifiers, sizeof p->modifiers, space, comma);
        if (space != comma) return false;
        text = skip_space(comma + 1);
    }
    return true;
}

/* ---- operands -------------------------------------------------------------------------------- */

typedef struct named_register {
    const char *name;
    int16_t reg, count;
} named_register;

static const named_register named[] = {
    {"vcc", S_VCC, 2},
    {"vcc_lo", S_VCC, 1},
    {"vcc_hi", S_VCC + 1, 1},
    {"exec", S_EXEC, 2},
    {"exec_lo", S_EXEC, 1},
    {"exec_hi", S_EXEC + 1, 1},
    {"m0", S_M0, 1},
    {"null", S_NULL, 1},
    {"scc", S_SCC, 1},
    {"src_scc", S_SCC, 1},
    {"vccz", S_VCCZ, 1},
    {"src_vccz", S_VCCZ, 1},
    {"execz", S_EXECZ, 1},
    {"src_execz", S_EXECZ, 1},
    {"flat_scratch", S_FLAT_SCRATCH, 2},
    {"flat_scratch_lo", S_FLAT_SCRATCH, 1},
    {"flat_scratch_hi", S_FLAT_SCRATCH + 1, 1},
    {"xnack_mask", S_XNACK, 2},
    {"src_shared_base", S_SHARED_BASE, 2},
    {"src_shared_limit", S_SHARED_LIMIT, 2},
    {"src_private_base", S_PRIVATE_BASE, 2},
    {"src_private_limit", S_PRIVATE_LIMIT, 2},
};

/* "[4:7]" or "4" after the letters of a register file: first and count. */
static bool register_range(const char *text, int *first, int *count)
{
    char tail = '\0';
    int last;
    if (sscanf(text, "[%d:%d%c", first, &last, &tail) == 3 && tail == ']') {
        *count = last - *first + 1;
        return *count > 0;
    }
    *count = 1;
    return sscanf(text, "%d%c", first, &tail) == 1;
}

static bool register_operand(const char *text, emu_operand *o)
{
    for (size_t n = 0; n < sizeof named / sizeof *named; n++)
        if (strcmp(text, named[n].name) == 0) {
            o->kind = SCALAR;
            o->reg = named[n].reg;
            o->count = named[n].count;
            return true;
        }
    static const struct {
        const char *letters;
        uint8_t kind;
        int16_t base, size;
    } files[] = {
        {"ttmp", SCALAR, S_TTMP, 16},
        {"v", VECTOR, 0, 256},
        {"a", VECTOR, AGPR0, 256},
        {"s", SCALAR, 0, S_VCC},
    };
    for (size_t n = 0; n < sizeof files / sizeof *files; n++) {
        const size_t letters = strlen(files[n].letters);
        if (strncmp(text, files[n].letters, letters) != 0) continue;
        char body[PIECE];
        if (!copy(body, sizeof body, text + letters, text + strlen(text))) continue;
        char *const dot = strchr(body, '.');
        if (dot != NULL) {
            if (strcmp(dot, ".l") != 0 && strcmp(dot, ".h") != 0) continue;
            o->part = dot[1] == 'l' ? WORD_0 : WORD_1;
            *dot = '\0';
        }
        int first, count;
        if (!register_range(body, &first, &count) || first + count > files[n].size) continue;
        o->kind = files[n].kind;
        o->reg = (int16_t)(files[n].base + first);
        o->count = (int16_t)count;
        return true;
    }
    return false;
}

/* A constant as an instruction of this type sees it. */
static bool number_operand(const char *text, char type, emu_operand *o)
{
    char *end;
    const bool hex = strncmp(text, "0x", 2) == 0;
    if (!hex && strchr(text, '.') != NULL) {
        const double x = strtod(text, &end);
        if (*end != '\0') return false;
        /* 1/(2 pi) has too few digits in print. */
        const double full = x > 0.159 && x < 0.160 ? 0.15915494309189532 : x;
        uint64_t bits64;
        memcpy(&bits64, &full, sizeof bits64);
        const uint32_t bits32 = bits_of((float)full);
        if (strchr("hp", type) != NULL)
            o->bits = half_from_float((float)full);
        else if (strchr("dq", type) != NULL)
            o->bits = bits64;
        else if (type == 'k')
            o->bits = bits32 | (uint64_t)bits32 << 32;
        else
            o->bits = bits32;
    } else {
        const long long x = strtoll(text, &end, 0);
        if (end == text || *end != '\0') return false;
        o->bits = hex && type == 'd' ? (uint64_t)x << 32 : (uint64_t)x;
        if (type == 'k') o->bits = (uint32_t)x | (uint64_t)x << 32;
    }
    o->kind = NUMBER;
    return true;
}

/* Strips "name(" ... ")" or "|" ... "|" in place. */
static bool unwrap(char *text, const char *open, char close)
{
    const size_t head = strlen(open), length = strlen(text);
    if (strncmp(text, open, head) != 0 || length < head + 1 || text[length - 1] != close)
        return false;
    memmove(text, text + head, length - head - 1);
    text[length - head - 1] = '\0';
    return true;
}

static bool operand(const char *given, char type, emu_operand *o)
{
    memset(o, 0, sizeof *o);
    o->type = type;
    char text[PIECE];
    if (!copy(text, sizeof text, given, given + strlen(given))) return false;
    if (strcmp(text, "off") == 0) {
        o->kind = OFF;
        return true;
    }
    unwrap(text, "lit(", ')'); /* a literal where a shorter constant would do */
    if (unwrap(text, "neg(", ')')) o->neg = true;
    if (unwrap(text, "sext(", ')')) o->sext = true;
    if (text[0] == '-' && !isdigit((unsigned char)text[1])) {
        o->neg = true;
        memmove(text, text + 1, strlen(text));
    }
    if (unwrap(text, "|", '|') || unwrap(text, "abs(", ')')) o->abs = true;
    return register_operand(text, o) || number_operand(text, type, o);
}

/* ---- modifiers ------------------------------------------------------------------------------- */

/* "[0,1,0]" as bits; with digits above 1 as a list of them in `list`. */
static bool bit_list(const char *text, uint8_t *bits)
{
    *bits = 0;
    int n = 0;
    if (*text != '[') return false;
    for (text++; *text != ']'; text++) {
        if (*text == ',') continue;
        if (*text != '0' && *text != '1') return false;
        *bits |= (uint8_t)((*text - '0') << n++);
    }
    return true;
}

static operand_part part_of(const char *text)
{
    static const char *const names[] = {"DWORD",  "WORD_0", "WORD_1", "BYTE_0",
                                        "BYTE_1", "BYTE_2", "BYTE_3"};
    for (int n = 0; n < 7; n++)
        if (strcmp(text, names[n]) == 0) return (operand_part)n;
    return WHOLE;
}

/* The lane that each lane reads, or -1; false for a control that is not known. The controls are
 * those of the ISA manuals' DPP tables; a row is 16 lanes. */
static bool dpp_control(const char *key, const char *value, int8_t *from)
{
    int list[8] = {0}, digits = 0;
    for (const char *t = value; *t != '\0' && digits < 8; t++)
        if (isdigit((unsigned char)*t)) {
            list[digits++] = (int)strtol(t, (char **)&t, 10);
            if (*t == '\0') break;
        }
    const int amount = list[0];
    for (int lane = 0; lane < LANES; lane++) {
        const int row = lane & ~15, in_row = lane & 15;
        int source;
        if (strcmp(key, "quad_perm") == 0)
            source = (lane & ~3) | list[lane & 3];
        else if (strcmp(key, "dpp8") == 0)
            source = (lane & ~7) | list[lane & 7];
        else if (strcmp(key, "row_shl") == 0)
            source = in_row + amount < 16 ? lane + amount : -1;
        else if (strcmp(key, "row_shr") == 0)
            source = in_row >= amount ? lane - amount : -1;
        else if (strcmp(key, "row_ror") == 0)
            source = row | ((in_row - amount) & 15);
        else if (strcmp(key, "row_mirror") == 0)
            source = row | (15 - in_row);
        else if (strcmp(key, "row_half_mirror") == 0)
            source = (lane & ~7) | (7 - (lane & 7));
        else if (strcmp(key, "row_share") == 0 || strcmp(key, "row_newbcast") == 0)
            source = row | amount;
        else if (strcmp(key, "row_xmask") == 0)
            source = row | (in_row ^ amount);
        else if (strcmp(key, "row_bcast") == 0) /* the last lane of a row, or of the half, onward */
            source = amount == 15 ? (row >= 16 ? row - 1 : -1) : (lane >= 32 ? 31 : -1);
        else if (strcmp(key, "wave_shr") == 0)
            source = lane - 1;
        else if (strcmp(key, "wave_ror") == 0)
            source = (lane - 1) & 63;
        else if (strcmp(key, "wave_shl") == 0)
            source = lane + 1 < LANES ? lane + 1 : -1;
        else if (strcmp(key, "wave_rol") == 0)
            source = (lane + 1) & 63;
        else
            return false;
        from[lane] = (int8_t)source;
    }
    return true;
}

/* offset:swizzle(...) of ds_swizzle_b32, back to the number that the instruction holds. */
static bool swizzle_offset(const char *text, int32_t *offset)
{
    int a, b, c, d;
    char bits[8];
    if (sscanf(text, "swizzle(QUAD_PERM,%d,%d,%d,%d)", &a, &b, &c, &d) == 4)
        *offset = 0x8000 | a | b << 2 | c << 4 | d << 6;
    else if (sscanf(text, "swizzle(SWAP,%d)", &a) == 1)
        *offset = a << 10 | 0x1f;
    else if (sscanf(text, "swizzle(REVERSE,%d)", &a) == 1)
        *offset = (a - 1) << 10 | 0x1f;
    else if (sscanf(text, "swizzle(BROADCAST,%d,%d)", &a, &b) == 2)
        *offset = b << 5 | (0x20 - a);
    else if (sscanf(text, "swizzle(BITMASK_PERM,\"%5[01pi]\")", bits) == 1 && strlen(bits) == 5) {
        int and_mask = 0, or_mask = 0, xor_mask = 0;
        for (int n = 0; n < 5; n++) {
            const int bit = 16 >> n;
            and_mask |= bits[n] == 'p' || bits[n] == 'i' ? bit : 0;
            or_mask |= bits[n] == '1' ? bit : 0;
            xor_mask |= bits[n] == 'i' ? bit : 0;
        }
        *offset = and_mask | or_mask << 5 | xor_mask << 10;
    } else {
        char *end;
        *offset = (int32_t)strtol(text, &end, 0);
        return end != text && *end == '\0';
    }
    return true;
}

/* Words about caches or scheduling, which change no result here. */
static bool without_effect(const char *key)
{
    static const char *const keys[] = {"glc", "slc", "dlc",   "scc", "sc0",
                                       "sc1", "nt",  "scope", "th",  "nv"};
    for (size_t n = 0; n < sizeof keys / sizeof *keys; n++)
        if (strcmp(key, keys[n]) == 0) return true;
    return false;
}

typedef struct flag_word {
    const char *key;
    size_t place;
} flag_word;

/* true: bool members; a number follows the others. */
static bool set_flag(const char *key, emu_modifiers *m)
{
    static const flag_word flags[] = {
        {"clamp", offsetof(emu_modifiers, clamp)},
        {"offen", offsetof(emu_modifiers, offen)},
        {"idxen", offsetof(emu_modifiers, idxen)},
        {"lds", offsetof(emu_modifiers, lds)},
    };
    for (size_t n = 0; n < sizeof flags / sizeof *flags; n++)
        if (strcmp(key, flags[n].key) == 0) {
            *(bool *)((char *)m + flags[n].place) = true;
            return true;
        }
    return false;
}

static bool set_number(const char *key, const char *value, emu_modifiers *m)
{
    static const flag_word bytes[] = {
        {"row_mask", offsetof(emu_modifiers, row_mask)},
        {"bank_mask", offsetof(emu_modifiers, bank_mask)},
        {"cbsz", offsetof(emu_modifiers, cbsz)},
        {"abid", offsetof(emu_modifiers, abid)},
        {"blgp", offsetof(emu_modifiers, blgp)},
        {"bitop3", offsetof(emu_modifiers, bitop3)},
    };
    static const flag_word lists[] = {
        {"op_sel", offsetof(emu_modifiers, op_sel)},
        {"op_sel_hi", offsetof(emu_modifiers, op_sel_hi)},
        {"neg_lo", offsetof(emu_modifiers, neg_lo)},
        {"neg_hi", offsetof(emu_modifiers, neg_hi)},
        {"neg", offsetof(emu_modifiers, blgp)}, /* of f64 MFMA */
    };
    const int number = (int)strtol(value, NULL, 0);
    for (size_t n = 0; n < sizeof bytes / sizeof *bytes; n++)
        if (strcmp(key, bytes[n].key) == 0) {
            *((uint8_t *)m + bytes[n].place) = (uint8_t)number;
            return true;
        }
    for (size_t n = 0; n < sizeof lists / sizeof *lists; n++)
        if (strcmp(key, lists[n].key) == 0) {
            m->has_op_sel |= strcmp(key, "op_sel") == 0;
            m->has_op_sel_hi |= strcmp(key, "op_sel_hi") == 0;
            return bit_list(value, (uint8_t *)m + lists[n].place);
        }
    if (strcmp(key, "offset") == 0) return swizzle_offset(value, &m->offset);
    if (strcmp(key, "offset0") == 0)
        m->offset0 = number;
    else if (strcmp(key, "offset1") == 0)
        m->offset1 = number;
    else if (strcmp(key, "bound_ctrl") == 0)
        m->bound_ctrl = true;
    else if (strcmp(key, "fi") == 0)
        m->fetch_inactive = number != 0;
    else if (strcmp(key, "dst_sel") == 0)
        m->dst_sel = part_of(value), m->sdwa = true;
    else if (strcmp(key, "dst_unused") == 0) {
        m->dst_preserve = strcmp(value, "UNUSED_PRESERVE") == 0;
        m->dst_sext = strcmp(value, "UNUSED_SEXT") == 0;
    } else
        return false;
    return true;
}

static bool modifier(const char *word, emu_instr *in)
{
    char key[64], value[128] = "";
    const char *colon = find_outside(word, ":");
    if (!copy(key, sizeof key, word, colon)) return false;
    if (*colon == ':' && !copy(value, sizeof value, colon + 1, word + strlen(word))) return false;
    emu_modifiers *const m = &in->mod;
    if (strcmp(key, "glc") == 0 || strcmp(key, "sc0") == 0 ||
        (strcmp(key, "th") == 0 && strstr(value, "ATOMIC_RETURN") != NULL))
        m->returns = true;
    if (without_effect(key) || set_flag(key, m) || set_number(key, value, m)) return true;
    if (strcmp(key, "src0_sel") == 0 || strcmp(key, "src1_sel") == 0) {
        in->src[key[3] - '0'].part = (uint8_t)part_of(value);
        return true;
    }
    int8_t from[LANES];
    if (!dpp_control(key, value, from)) return false;
    if (m->dpp != NULL) return false;
    m->dpp = malloc(sizeof from);
    if (m->dpp == NULL) return false;
    memcpy(m->dpp, from, sizeof from);
    return true;
}

static bool modifiers(const char *text, emu_instr *in, char *why, size_t why_size)
{
    in->mod.row_mask = in->mod.bank_mask = 15;
    in->mod.op_sel_hi = 15;
    for (text = skip_space(text); *text != '\0';) {
        const char *end = find_outside(text, " ");
        char word[192];
        if (!copy(word, sizeof word, text, end)) return fail(why, why_size, "long modifier", text);
        if (!modifier(word, in)) return fail(why, why_size, "unknown modifier", word);
        text = skip_space(end);
    }
    return true;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const emu_row *const *)a)->name, (*(const emu_row *const *)b)->name);
}

const emu_row **emu_index_create(int *rows)
{
    static const emu_table *const tables[] = {
        &emu_scalar_table,  &emu_control_table, &emu_vector_table, &emu_lanes_table,
        &emu_compare_table, &emu_memory_table,  &emu_lds_table,    &emu_matrix_table,
    };
    *rows = 0;
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++) *rows += tables[t]->rows;
    const emu_row **const index = malloc((size_t)*rows * sizeof *index);
    if (index == NULL) return NULL;
    int n = 0;
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (int r = 0; r < tables[t]->rows; r++) index[n++] = &tables[t]->row[r];
    qsort(index, (size_t)n, sizeof *index, by_name);
    return index;
}

static const emu_row *find_row(const emu_row *const *index, int rows, const char *name)
{
    const emu_row key = {.name = name}, *const wanted = &key;
    const emu_row *const *const found =
        bsearch(&wanted, index, (size_t)rows, sizeof *index, by_name);
    return found == NULL ? NULL : *found;
}

/* The mnemonic without suffixes that only select an encoding. */
static void strip_encoding(char *mnemonic)
{
    static const char *const endings[] = {"_e64_dpp", "_e32", "_e64", "_dpp", "_sdwa"};
    const size_t length = strlen(mnemonic);
    for (size_t n = 0; n < sizeof endings / sizeof *endings; n++) {
        const size_t tail = strlen(endings[n]);
        if (length > tail && strcmp(mnemonic + length - tail, endings[n]) == 0) {
            mnemonic[length - tail] = '\0';
            return;
        }
    }
}

/* Operands that an alternative of a form asks for in print; *end is set behind it. */
static int form_operands(const char *form, const char **end)
{
    int n = 0;
    for (; *form != '\0' && *form != '|'; form++) n += strchr("=+~", *form) == NULL;
    *end = form;
    return n;
}

/* Matches the pieces with the letters of the form's alternative that has as many. */
static bool match(const pieces *p, const char *line, const char *form, emu_instr *in, char *why,
                  size_t why_size)
{
    int n = 0, dsts = 0, srcs = 0;
    bool after = false;
    const char *end;
    while (form_operands(form, &end) != p->operands) {
        if (*end == '\0') return fail(why, why_size, "number of operands", line);
        form = end + 1;
    }
    for (const char *f = form; f != end; f++) {
        if (*f == '=') {
            after = true;
            continue;
        }
        emu_operand *const o = after ? &in->src[srcs++] : &in->dst[dsts++];
        if (*f == '+') { /* the result is a source too */
            *o = in->dst[0];
            continue;
        }
        if (*f == '~') {
            *o = (emu_operand){.kind = SCALAR, .reg = S_VCC, .count = 2, .type = 'm'};
            continue;
        }
        if (!operand(p->operand[n++], *f, o))
            return fail(why, why_size, "operand not understood", line);
    }
    return true;
}

static bool decode_one(const char *text, int arch_major, const emu_row *const *index, int rows,
                       emu_instr *in, char *why, size_t why_size)
{
    pieces p;
    in->arch_major = arch_major;
    if (!split(text, &p)) return fail(why, why_size, "line not understood", text);
    if (strncmp(p.mnemonic, "v_dual_", 7) == 0)
        memmove(p.mnemonic + 2, p.mnemonic + 7, strlen(p.mnemonic) - 6);
    strip_encoding(p.mnemonic);
    in->row = find_row(index, rows, p.mnemonic);
    if (in->row == NULL) return fail(why, why_size, "unknown instruction", p.mnemonic);
    in->run = in->row->run;
    if (strcmp(in->row->form, "*") == 0) return true; /* operands say nothing to us */
    /* Modifiers first name parts of sources, which the operands would clear. */
    emu_instr parts = {0};
    if (!match(&p, text, in->row->form, in, why, why_size)) return false;
    if (!modifiers(p.modifiers, &parts, why, why_size)) {
        free(parts.mod.dpp);
        return false;
    }
    in->mod = parts.mod;
    for (int s = 0; s < MAX_SRC; s++)
        if (parts.src[s].part != WHOLE) in->src[s].part = parts.src[s].part;
    return emu_vector_prepare(in, why, why_size);
}

bool emu_decode_line(const char *line, int arch_major, const emu_row *const *index, int rows,
                     emu_instr *in, char *why, size_t why_size)
{
    memset(in, 0, sizeof *in);
    char text[1024];
    const char *const comment = strstr(line, "//");
    const char *const end = comment == NULL ? line + strlen(line) : comment;
    if (!copy(text, sizeof text, line, end)) return fail(why, why_size, "long line", line);
    char *const pair_mark = strstr(text, " :: ");
    if (pair_mark != NULL) {
        *pair_mark = '\0';
        in->second = calloc(1, sizeof *in->second);
        if (in->second == NULL) return fail(why, why_size, "no memory", text);
        if (!decode_one(pair_mark + 4, arch_major, index, rows, in->second, why, why_size))
            return false;
    }
    return decode_one(text, arch_major, index, rows, in, why, why_size);
}

void emu_instr_release(emu_instr *in)
{
    if (in->second != NULL) emu_instr_release(in->second);
    free(in->second);
    free(in->mod.dpp);
}
