/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Code objects: the ELF file, its kernels' descriptors and metadata, its disassembly. Kernels are
 * decoded on first use.
 */
#define _POSIX_C_SOURCE 200809L
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/emulator/machine.h"

enum { MAX_ARGUMENTS = 64, MAX_WHY = 400 };

struct emu_kernel {
    emu_object *object;
    char name[256];
    emu_kernel_info info;
    emu_argument argument[MAX_ARGUMENTS];
    uint64_t descriptor, entry, size; /* addresses in the image */
    emu_instr *code;                  /* [length + 1]: the last one tells that it was reached */
    int length;
    bool tried;
    char why[MAX_WHY];
};

struct emu_object {
    char arch[16];
    int wave, major;
    uint8_t *file; /* the ELF file */
    size_t file_size;
    uint8_t *image; /* as it is loaded: address 0 of the file lies at image */
    size_t image_size;
    char *text; /* the disassembly, lines ended by '\0' */
    size_t text_size;
    emu_kernel *kernel;
    int kernels;
    const emu_row **index;
    int rows;
};

static bool fail(char *why, size_t why_size, const char *what)
{
    snprintf(why, why_size, "%s", what);
    return false;
}

/* ---- the file -------------------------------------------------------------------------------- */

static const struct {
    uint32_t mach; /* of e_flags */
    const char *arch;
    int wave, major;
} targets[] = {
    {0x2f, "gfx906", 64, 9},   {0x30, "gfx908", 64, 9},   {0x3f, "gfx90a", 64, 9},
    {0x4c, "gfx942", 64, 9},   {0x4f, "gfx950", 64, 9},   {0x36, "gfx1030", 32, 10},
    {0x41, "gfx1100", 32, 11}, {0x46, "gfx1101", 32, 11}, {0x47, "gfx1102", 32, 11},
    {0x44, "gfx1103", 32, 11}, {0x43, "gfx1150", 32, 11}, {0x4a, "gfx1151", 32, 11},
    {0x48, "gfx1200", 32, 12}, {0x4e, "gfx1201", 32, 12},
};

static bool inside(const emu_object *o, uint64_t offset, uint64_t size)
{
    return offset <= o->file_size && size <= o->file_size - offset;
}

static const Elf64_Ehdr *header_of(const emu_object *o) { return (const void *)o->file; }

static const Elf64_Shdr *sections_of(const emu_object *o, int *count)
{
    const Elf64_Ehdr *const header = header_of(o);
    *count = inside(o, header->e_shoff, (uint64_t)header->e_shnum * sizeof(Elf64_Shdr))
                 ? header->e_shnum
                 : 0;
    return (const void *)(o->file + header->e_shoff);
}

static bool read_target(emu_object *o, char *why, size_t why_size)
{
    if (o->file_size < sizeof(Elf64_Ehdr) || memcmp(o->file, ELFMAG, SELFMAG) != 0)
        return fail(why, why_size, "not an ELF file");
    const Elf64_Ehdr *const header = header_of(o);
    if (header->e_machine != 224 || header->e_phentsize != sizeof(Elf64_Phdr))
        return fail(why, why_size, "not a code object of an AMD GPU");
    for (size_t n = 0; n < sizeof targets / sizeof *targets; n++)
        if (targets[n].mach == (header->e_flags & 0xff)) {
            snprintf(o->arch, sizeof o->arch, "%s", targets[n].arch);
            o->wave = targets[n].wave;
            o->major = targets[n].major;
            return true;
        }
    snprintf(why, why_size, "an architecture that is not emulated (e_flags %#x)", header->e_flags);
    return false;
}

static bool load_image(emu_object *o, char *why, size_t why_size)
{
    const Elf64_Ehdr *const header = header_of(o);
    if (!inside(o, header->e_phoff, (uint64_t)header->e_phnum * sizeof(Elf64_Phdr)))
        return fail(why, why_size, "program headers lie outside of the file");
    const Elf64_Phdr *const segment = (const void *)(o->file + header->e_phoff);
    for (int n = 0; n < header->e_phnum; n++)
        if (segment[n].p_type == PT_LOAD && segment[n].p_vaddr + segment[n].p_memsz > o->image_size)
            o->image_size = segment[n].p_vaddr + segment[n].p_memsz;
    if (o->image_size == 0 || o->image_size > UINT32_MAX)
        return fail(why, why_size, "no segments, or absurdly large ones");
    o->image = calloc(1, o->image_size);
    if (o->image == NULL) return fail(why, why_size, "no memory for the image");
    for (int n = 0; n < header->e_phnum; n++) {
        if (segment[n].p_type != PT_LOAD) continue;
        if (!inside(o, segment[n].p_offset, segment[n].p_filesz) ||
            segment[n].p_filesz > segment[n].p_memsz)
            return fail(why, why_size, "a segment lies outside of the file");
        memcpy(o->image + segment[n].p_vaddr, o->file + segment[n].p_offset, segment[n].p_filesz);
    }
    return true;
}

/* Calls visit for each symbol of the symbol table, else of the dynamic one. */
typedef bool symbol_visitor(emu_object *o, const char *name, const Elf64_Sym *symbol,
                            void *context);

static void each_symbol(emu_object *o, uint32_t type, symbol_visitor *visit, void *context)
{
    int count;
    const Elf64_Shdr *const section = sections_of(o, &count);
    for (int n = 0; n < count; n++) {
        const Elf64_Shdr *const table = &section[n];
        if (table->sh_type != type || table->sh_link >= (uint32_t)count) continue;
        const Elf64_Shdr *const strings = &section[table->sh_link];
        if (!inside(o, table->sh_offset, table->sh_size) ||
            !inside(o, strings->sh_offset, strings->sh_size))
            continue;
        const Elf64_Sym *const symbols = (const void *)(o->file + table->sh_offset);
        for (uint64_t k = 0; k < table->sh_size / sizeof *symbols; k++)
            if (symbols[k].st_name < strings->sh_size &&
                !visit(o, (const char *)o->file + strings->sh_offset + symbols[k].st_name,
                       &symbols[k], context))
                return;
    }
}

typedef struct wanted_symbol {
    const char *name;
    Elf64_Sym symbol;
    bool found;
} wanted_symbol;

static bool match_symbol(emu_object *o, const char *name, const Elf64_Sym *symbol, void *context)
{
    wanted_symbol *const wanted = context;
    if (strcmp(name, wanted->name) != 0 || symbol->st_value + symbol->st_size > o->image_size)
        return true;
    wanted->symbol = *symbol;
    wanted->found = true;
    return false;
}

static bool find_symbol(emu_object *o, const char *name, Elf64_Sym *symbol)
{
    wanted_symbol wanted = {.name = name};
    each_symbol(o, SHT_SYMTAB, match_symbol, &wanted);
    if (!wanted.found) each_symbol(o, SHT_DYNSYM, match_symbol, &wanted);
    *symbol = wanted.symbol;
    return wanted.found;
}

/* Pointers in the image: to a symbol, or relative to the image itself. */
static bool relocate(emu_object *o, char *why, size_t why_size)
{
    enum { ABS64 = 3, RELATIVE64 = 13 };
    int count;
    const Elf64_Shdr *const section = sections_of(o, &count);
    for (int n = 0; n < count; n++) {
        const Elf64_Shdr *const table = &section[n];
        if (table->sh_type != SHT_RELA || table->sh_link >= (uint32_t)count) continue;
        const Elf64_Sym *const symbols =
            (const void *)(o->file + section[table->sh_link].sh_offset);
        const Elf64_Rela *const list = (const void *)(o->file + table->sh_offset);
        for (uint64_t k = 0; k < table->sh_size / sizeof *list; k++) {
            const uint32_t type = (uint32_t)ELF64_R_TYPE(list[k].r_info);
            if ((type != ABS64 && type != RELATIVE64) || list[k].r_offset + 8 > o->image_size)
                return fail(why, why_size, "a relocation that is not known");
            uint64_t value = (uintptr_t)o->image + (uint64_t)list[k].r_addend;
            if (type == ABS64) value += symbols[ELF64_R_SYM(list[k].r_info)].st_value;
            memcpy(o->image + list[k].r_offset, &value, sizeof value);
        }
    }
    return true;
}

/* ---- metadata -------------------------------------------------------------------------------- */

/* The subset of MessagePack that the metadata uses. */
typedef struct reader {
    const uint8_t *at, *end;
    bool bad;
} reader;

typedef enum item_kind { ITEM_NUMBER, ITEM_STRING, ITEM_LIST, ITEM_MAP } item_kind;

typedef struct item {
    item_kind kind;
    uint64_t number; /* or the number of elements that follow */
    const char *string;
} item;

static uint64_t big_endian(reader *r, int bytes)
{
    uint64_t x = 0;
    if (r->end - r->at < bytes) {
        r->bad = true;
        return 0;
    }
    for (int n = 0; n < bytes; n++) x = x << 8 | *r->at++;
    return x;
}

static item string_item(reader *r, uint64_t length)
{
    const item result = {ITEM_STRING, length, (const char *)r->at};
    if ((uint64_t)(r->end - r->at) < length) {
        r->bad = true;
        return (item){ITEM_STRING, 0, ""};
    }
    r->at += length;
    return result;
}

static item read_item(reader *r)
{
    const int tag = (int)big_endian(r, 1);
    if (r->bad) return (item){ITEM_NUMBER, 0, NULL};
    if (tag < 0x80 || tag >= 0xe0) return (item){ITEM_NUMBER, (uint64_t)tag, NULL};
    if (tag < 0x90) return (item){ITEM_MAP, (uint64_t)(tag & 15), NULL};
    if (tag < 0xa0) return (item){ITEM_LIST, (uint64_t)(tag & 15), NULL};
    if (tag < 0xc0) return string_item(r, (uint64_t)(tag & 31));
    switch (tag) {
    case 0xc0:
    case 0xc2: return (item){ITEM_NUMBER, 0, NULL};
    case 0xc3: return (item){ITEM_NUMBER, 1, NULL};
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf: return (item){ITEM_NUMBER, big_endian(r, 1 << (tag - 0xcc)), NULL};
    case 0xd9:
    case 0xda:
    case 0xdb: return string_item(r, big_endian(r, 1 << (tag - 0xd9)));
    case 0xdc:
    case 0xdd: return (item){ITEM_LIST, big_endian(r, 2 << (tag - 0xdc)), NULL};
    case 0xde:
    case 0xdf: return (item){ITEM_MAP, big_endian(r, 2 << (tag - 0xde)), NULL};
    default: r->bad = true; return (item){ITEM_NUMBER, 0, NULL};
    }
}

static void skip_item(reader *r)
{
    const item i = read_item(r);
    const uint64_t parts = i.kind == ITEM_LIST ? i.number : i.kind == ITEM_MAP ? 2 * i.number : 0;
    for (uint64_t n = 0; n < parts && !r->bad; n++) skip_item(r);
}

static bool is(const item *key, const char *name)
{
    return key->kind == ITEM_STRING && key->number == strlen(name) &&
           memcmp(key->string, name, key->number) == 0;
}

static void read_string(reader *r, char *to, size_t size)
{
    const item i = read_item(r);
    snprintf(to, size, "%.*s", i.kind == ITEM_STRING ? (int)i.number : 0,
             i.string == NULL ? "" : i.string);
}

static void read_argument(reader *r, emu_argument *a)
{
    const item map = read_item(r);
    for (uint64_t n = 0; n < map.number && !r->bad; n++) {
        const item key = read_item(r);
        if (is(&key, ".offset"))
            a->offset = (int)read_item(r).number;
        else if (is(&key, ".size"))
            a->size = (int)read_item(r).number;
        else if (is(&key, ".value_kind"))
            read_string(r, a->kind, sizeof a->kind);
        else
            skip_item(r);
    }
    a->hidden = strncmp(a->kind, "hidden_", 7) == 0;
}

static void read_arguments(reader *r, emu_kernel *k)
{
    const item list = read_item(r);
    for (uint64_t n = 0; n < list.number && !r->bad; n++) {
        if (k->info.arguments == MAX_ARGUMENTS)
            r->bad = true;
        else
            read_argument(r, &k->argument[k->info.arguments++]);
    }
}

static void read_kernel(reader *r, emu_kernel *k)
{
    const struct {
        const char *key;
        int *number;
    } numbers[] = {
        {".kernarg_segment_size", &k->info.kernarg_size},
        {".group_segment_fixed_size", &k->info.lds_size},
        {".private_segment_fixed_size", &k->info.scratch_size},
        {".vgpr_count", &k->info.vgprs},
        {".agpr_count", &k->info.agprs},
        {".sgpr_count", &k->info.sgprs},
        {".vgpr_spill_count", &k->info.vgpr_spills},
        {".sgpr_spill_count", &k->info.sgpr_spills},
        {".max_flat_workgroup_size", &k->info.max_threads},
    };
    const item map = read_item(r);
    for (uint64_t n = 0; n < map.number && !r->bad; n++) {
        const item key = read_item(r);
        size_t which = 0;
        while (which < sizeof numbers / sizeof *numbers && !is(&key, numbers[which].key)) which++;
        if (which < sizeof numbers / sizeof *numbers)
            *numbers[which].number = (int)read_item(r).number;
        else if (is(&key, ".name"))
            read_string(r, k->name, sizeof k->name);
        else if (is(&key, ".args"))
            read_arguments(r, k);
        else
            skip_item(r);
    }
    k->info.name = k->name;
    k->info.argument = k->argument;
}

static bool read_kernels(emu_object *o, reader *r)
{
    const item map = read_item(r);
    for (uint64_t n = 0; n < map.number && !r->bad; n++) {
        const item key = read_item(r);
        if (!is(&key, "amdhsa.kernels")) {
            skip_item(r);
            continue;
        }
        const item list = read_item(r);
        if (list.kind != ITEM_LIST || list.number > 65536) return false;
        o->kernel = calloc(list.number + 1, sizeof *o->kernel);
        if (o->kernel == NULL) return false;
        for (uint64_t k = 0; k < list.number && !r->bad; k++) {
            o->kernel[k].object = o;
            read_kernel(r, &o->kernel[k]);
            o->kernels++;
        }
    }
    return !r->bad;
}

static bool read_metadata(emu_object *o, char *why, size_t why_size)
{
    enum { NT_AMDGPU_METADATA = 32 };
    int count;
    const Elf64_Shdr *const section = sections_of(o, &count);
    for (int n = 0; n < count; n++) {
        if (section[n].sh_type != SHT_NOTE || !inside(o, section[n].sh_offset, section[n].sh_size))
            continue;
        const uint8_t *at = o->file + section[n].sh_offset, *const end = at + section[n].sh_size;
        while (end - at >= (ptrdiff_t)sizeof(Elf64_Nhdr)) {
            Elf64_Nhdr note;
            memcpy(&note, at, sizeof note);
            const uint64_t name = (note.n_namesz + 3u) & ~3u, size = (note.n_descsz + 3u) & ~3u;
            if ((uint64_t)(end - at) < sizeof note + name + size) break;
            at += sizeof note + name;
            reader r = {at, at + note.n_descsz, false};
            if (note.n_type == NT_AMDGPU_METADATA && !read_kernels(o, &r))
                return fail(why, why_size, "metadata that is not understood");
            at += size;
        }
    }
    return true;
}

/* ---- disassembly ----------------------------------------------------------------------------- */

/* The output of a command, ended by '\0'; NULL if it fails. */
static char *output_of(const char *command, size_t *size)
{
    FILE *const pipe = popen(command, "r");
    if (pipe == NULL) return NULL;
    char *text = NULL;
    size_t room = 0;
    *size = 0;
    for (;;) {
        if (room - *size < 65536) {
            room = room == 0 ? 1 << 20 : 2 * room;
            char *const grown = realloc(text, room);
            if (grown == NULL) break;
            text = grown;
        }
        const size_t got = fread(text + *size, 1, room - *size - 1, pipe);
        *size += got;
        if (got == 0) break;
    }
    if (text != NULL) text[*size] = '\0';
    if (pclose(pipe) == 0) return text;
    free(text);
    return NULL;
}

static bool disassemble(emu_object *o, const char *objdump, char *why, size_t why_size)
{
    char path[] = "/tmp/fattn-emulator-XXXXXX", command[1024];
    const int file = mkstemp(path);
    if (file < 0) return fail(why, why_size, "no temporary file for the disassembler");
    const bool written = write(file, o->file, o->file_size) == (ssize_t)o->file_size;
    close(file);
    snprintf(command, sizeof command, "'%s' -d '%s' 2>/dev/null", objdump, path);
    o->text = written ? output_of(command, &o->text_size) : NULL;
    unlink(path);
    if (o->text == NULL || strstr(o->text, "amdgpu") == NULL) {
        snprintf(why, why_size, "%s does not disassemble it", objdump);
        return false;
    }
    for (char *at = o->text; (at = strchr(at, '\n')) != NULL;) *at++ = '\0';
    return true;
}

/* The first line behind the label of a symbol. */
static const char *lines_of(const emu_object *o, const char *name)
{
    char label[300];
    const int length = snprintf(label, sizeof label, " <%s>:", name);
    const char *const end = o->text + o->text_size;
    for (const char *line = o->text; line < end; line += strlen(line) + 1) {
        const size_t size = strlen(line);
        if (line[0] != '\t' && size > (size_t)length &&
            strcmp(line + size - (size_t)length, label) == 0)
            return line + size + 1;
    }
    return NULL;
}

/* ---- kernels --------------------------------------------------------------------------------- */

static void run_past_end(emu_wave *w, const emu_instr *in)
{
    emu_fault(w, in, "runs past its end");
}

/* Adds a reason, once. */
static void add_why(emu_kernel *k, const char *reason)
{
    if (strstr(k->why, reason) != NULL) return;
    const size_t used = strlen(k->why);
    snprintf(k->why + used, sizeof k->why - used, "%s%s", used == 0 ? "" : "; ", reason);
}

/* Decodes the lines; lengthens the code as needed. */
static bool decode_lines(emu_kernel *k)
{
    const emu_object *const o = k->object;
    const char *const end = o->text + o->text_size;
    const char *line = lines_of(o, k->name);
    if (line == NULL) {
        add_why(k, "it is not in the disassembly");
        return false;
    }
    int room = 0;
    for (; line < end && line[0] == '\t'; line += strlen(line) + 1) {
        const char *const comment = strstr(line, "//");
        const uint64_t address = comment == NULL ? 0 : strtoull(comment + 2, NULL, 16);
        if (address >= k->entry + k->size) break;
        if (k->length + 1 >= room) {
            room = room == 0 ? 1024 : 2 * room;
            emu_instr *const grown = realloc(k->code, (size_t)room * sizeof *grown);
            if (grown == NULL) {
                add_why(k, "no memory");
                return false;
            }
            k->code = grown;
        }
        char reason[256];
        emu_instr *const in = &k->code[k->length++];
        if (!emu_decode_line(line, o->major, o->index, o->rows, in, reason, sizeof reason))
            add_why(k, reason);
        in->address = (uint32_t)address;
        in->text = line;
        if (in->second != NULL) {
            in->second->address = in->address;
            in->second->text = line;
        }
    }
    if (k->length == 0) {
        add_why(k, "it has no code");
        return false;
    }
    k->code[k->length] =
        (emu_instr){.run = run_past_end, .text = "", .address = k->code[k->length - 1].address + 4};
    return k->why[0] == '\0';
}

static int index_of_address(const emu_kernel *k, uint64_t address)
{
    int low = 0, high = k->length;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (k->code[middle].address < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < k->length && k->code[low].address == address ? low : -1;
}

/* Branches hold a distance in dwords from the next instruction. */
static bool resolve_branches(emu_kernel *k)
{
    for (int n = 0; n < k->length; n++) {
        emu_instr *const in = &k->code[n];
        if (in->row->class != EMU_BRANCH || in->src[0].kind != NUMBER) continue;
        const int64_t target = (int64_t)in->address + 4 + 4 * (int64_t)(int16_t)in->src[0].bits;
        in->target = index_of_address(k, (uint64_t)target);
        if (in->target < 0) {
            add_why(k, "a branch leaves the kernel");
            return false;
        }
    }
    return true;
}

static bool find_entry(emu_kernel *k)
{
    char name[300];
    Elf64_Sym symbol;
    snprintf(name, sizeof name, "%s.kd", k->name);
    if (!find_symbol(k->object, name, &symbol) || symbol.st_size < 64) {
        add_why(k, "it has no descriptor");
        return false;
    }
    k->descriptor = symbol.st_value;
    if (!find_symbol(k->object, k->name, &symbol)) {
        add_why(k, "it has no symbol");
        return false;
    }
    k->entry = symbol.st_value;
    k->size = symbol.st_size;
    int64_t offset;
    memcpy(&offset, k->object->image + k->descriptor + 16, sizeof offset);
    if ((uint64_t)((int64_t)k->descriptor + offset) == k->entry) return true;
    add_why(k, "its descriptor points elsewhere");
    return false;
}

/* Whether scratch has its own instructions, which need no register setup. */
static bool has_scratch(const emu_object *o)
{
    return o->major >= 11 || strcmp(o->arch, "gfx942") == 0 || strcmp(o->arch, "gfx950") == 0;
}

bool emu_kernel_decode(emu_kernel *k, char *why, size_t why_size)
{
    if (!k->tried) {
        k->tried = true;
        if (find_entry(k) && decode_lines(k)) resolve_branches(k);
        if (k->info.scratch_size != 0 && !has_scratch(k->object))
            add_why(k, "scratch is not emulated where it has no instructions of its own");
    }
    if (k->why[0] != '\0') snprintf(why, why_size, "%s: %s", k->name, k->why);
    return k->why[0] == '\0';
}

const emu_instr *emu_kernel_code(emu_kernel *k, int *length)
{
    *length = k->length;
    return k->code;
}

const emu_object *emu_kernel_object(const emu_kernel *k) { return k->object; }
const emu_kernel_info *emu_kernel_describe(const emu_kernel *k) { return &k->info; }
const uint8_t *emu_kernel_descriptor(const emu_kernel *k)
{
    return k->object->image + k->descriptor;
}

/* ---- objects --------------------------------------------------------------------------------- */

emu_object *emu_object_load(const void *bytes, size_t size, const char *objdump, char *why,
                            size_t why_size)
{
    emu_object *const o = calloc(1, sizeof *o);
    if (o == NULL || (o->file = malloc(size + 1)) == NULL) {
        fail(why, why_size, "no memory for a code object");
        free(o);
        return NULL;
    }
    memcpy(o->file, bytes, size);
    o->file_size = size;
    o->index = emu_index_create(&o->rows);
    if (o->index != NULL && read_target(o, why, why_size) && load_image(o, why, why_size) &&
        relocate(o, why, why_size) && read_metadata(o, why, why_size) &&
        disassemble(o, objdump, why, why_size))
        return o;
    if (o->index == NULL) fail(why, why_size, "no memory for the instructions' index");
    emu_object_unload(o);
    return NULL;
}

void emu_object_unload(emu_object *o)
{
    if (o == NULL) return;
    for (int n = 0; n < o->kernels; n++) {
        for (int k = 0; k < o->kernel[n].length; k++) emu_instr_release(&o->kernel[n].code[k]);
        free(o->kernel[n].code);
    }
    free(o->kernel);
    free(o->index);
    free(o->text);
    free(o->image);
    free(o->file);
    free(o);
}

const char *emu_object_arch(const emu_object *o) { return o->arch; }
int emu_object_wave(const emu_object *o) { return o->wave; }
int emu_object_kernels(const emu_object *o) { return o->kernels; }
emu_kernel *emu_object_kernel(emu_object *o, int index) { return &o->kernel[index]; }

emu_kernel *emu_object_find(emu_object *o, const char *name)
{
    for (int n = 0; n < o->kernels; n++)
        if (strcmp(o->kernel[n].name, name) == 0) return &o->kernel[n];
    return NULL;
}

void *emu_object_image(const emu_object *o, size_t *size)
{
    *size = o->image_size;
    return o->image;
}

void *emu_object_variable(emu_object *o, const char *name, size_t *size)
{
    Elf64_Sym symbol;
    if (!find_symbol(o, name, &symbol) || ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT) return NULL;
    *size = symbol.st_size;
    return o->image + symbol.st_value;
}

/* ---- bundles --------------------------------------------------------------------------------- */

static uint64_t number_at(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* Whether "hipv4-amdgcn-amd-amdhsa--gfx942:sramecc+" names the architecture. */
static bool names_arch(const uint8_t *triple, uint64_t length, const char *arch)
{
    const size_t size = strlen(arch);
    for (uint64_t n = 0; n + size <= length; n++)
        if (memcmp(triple + n, arch, size) == 0 &&
            (n + size == length || triple[n + size] == ':') && (n == 0 || triple[n - 1] == '-'))
            return true;
    return false;
}

const void *emu_bundle_find(const void *bytes, size_t size, const char *arch, size_t *entry_size)
{
    static const char magic[] = "__CLANG_OFFLOAD_BUNDLE__";
    enum { MAGIC = sizeof magic - 1 };
    const uint8_t *const b = bytes;
    if (size > sizeof(Elf64_Ehdr) && memcmp(b, ELFMAG, SELFMAG) == 0) {
        const uint32_t mach = ((const Elf64_Ehdr *)bytes)->e_flags & 0xff;
        for (size_t n = 0; n < sizeof targets / sizeof *targets; n++)
            if (targets[n].mach == mach && strcmp(targets[n].arch, arch) == 0) {
                *entry_size = size;
                return bytes;
            }
        return NULL;
    }
    if (size < MAGIC + 8 || memcmp(b, magic, MAGIC) != 0) return NULL;
    uint64_t at = MAGIC + 8;
    for (uint64_t n = number_at(b + MAGIC); n > 0 && at + 24 <= size; n--) {
        const uint64_t offset = number_at(b + at), bytes_of = number_at(b + at + 8);
        const uint64_t length = number_at(b + at + 16);
        at += 24 + length;
        if (length > size || at > size || offset > size || bytes_of > size - offset) return NULL;
        if (!names_arch(b + at - length, length, arch)) continue;
        *entry_size = bytes_of;
        return b + offset;
    }
    return NULL;
}
