/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The machine inside the emulator: registers of a wave, a work-group and its LDS, a decoded
 * instruction, and the table row that says how its mnemonic is decoded and run. Private to the
 * emulator's files.
 *
 * Definedness. Every value has a record of whether a lane or the host ever wrote it: a bit for each
 * bit of a scalar register, a bit for each lane and half of a vector register, a byte for each byte
 * of LDS and of fresh memory. Compilers may copy undefined values, so a copy propagates the record
 * silently; an undefined value is reported when it reaches memory, an address, a branch or EXEC.
 */
#ifndef FATTN_TESTS_EMULATOR_MACHINE_H
#define FATTN_TESTS_EMULATOR_MACHINE_H

#include "tests/emulator/emulator.h"

enum {
    LANES = 64,  /* stride of a vector register; waves of 32 use the first half */
    AGPR0 = 256, /* accumulation registers follow the others */
    VGPRS = 512, /* both */
    MAX_WAVES = 32,
    MAX_SRC = 4,
    MAX_DST = 2,
};

/* Scalar registers by number. Those after EXEC are read as sources only. */
enum {
    S_VCC = 106,
    S_TTMP = 108,
    S_M0 = 124,
    S_NULL = 125,
    S_EXEC = 126,
    S_SCC = 128,
    S_VCCZ,
    S_EXECZ,
    S_FLAT_SCRATCH = 132,
    S_XNACK = 134,
    S_SHARED_BASE = 136,
    S_SHARED_LIMIT = 138,
    S_PRIVATE_BASE = 140,
    S_PRIVATE_LIMIT = 142,
    SGPRS = 144,
};

typedef struct emu_wave emu_wave;
typedef struct emu_group emu_group;
typedef struct emu_machine emu_machine;
typedef struct emu_instr emu_instr;
typedef struct emu_row emu_row;

/* ---- instructions ---------------------------------------------------------------------------- */

typedef enum operand_kind {
    NO_OPERAND,
    VECTOR, /* reg: 0..255 v, AGPR0.. a */
    SCALAR,
    NUMBER, /* bits, as the type asks */
    OFF,
} operand_kind;

/* A part of a register: SDWA's selections; v0.l and v0.h are WORD_0 and WORD_1. */
typedef enum operand_part { WHOLE, WORD_0, WORD_1, BYTE_0, BYTE_1, BYTE_2, BYTE_3 } operand_part;

typedef struct emu_operand {
    uint8_t kind, part;
    bool neg, abs, sext;
    bool plain;         /* no selection or modifier changes the value read */
    bool registers;     /* and that is a vector register as it is */
    int16_t reg, count; /* first register, registers */
    char type;          /* of the form, see emu_row */
    uint64_t bits;      /* of a NUMBER */
} emu_operand;

/* What follows the operands. */
typedef struct emu_modifiers {
    int32_t offset, offset0, offset1;
    /* Bit i is of source i, bit 3 of op_sel of the result. */
    uint8_t op_sel, op_sel_hi, neg_lo, neg_hi;
    uint8_t row_mask, bank_mask; /* of DPP */
    uint8_t bitop3;              /* truth table of three bits */
    uint8_t cbsz, abid, blgp;    /* of MFMA */
    bool clamp, returns, offen, idxen, lds, bound_ctrl, fetch_inactive;
    bool has_op_sel, has_op_sel_hi;
    operand_part dst_sel;
    bool dst_preserve, dst_sext, sdwa;
    int8_t *dpp; /* [LANES]: the lane to read, or -1 */
} emu_modifiers;

struct emu_instr {
    void (*run)(emu_wave *wave, const emu_instr *instr);
    const emu_row *row;
    emu_operand dst[MAX_DST], src[MAX_SRC];
    int sources;
    emu_modifiers mod;
    uint32_t address;  /* in the object */
    int32_t target;    /* of a branch: index of an instruction */
    emu_instr *second; /* of a dual issue */
    const char *text;  /* the line of the disassembly */
    int arch_major;    /* 9 .. 12 */
};

/* Lanes of one operation: d and e are results, a b c sources, each [n], those of 64 bits with their
 * high words LANES further. Never overlapping. A fourth source comes in e. */
typedef void emu_lane_op(uint32_t *restrict d, uint32_t *restrict e, const uint32_t *restrict a,
                         const uint32_t *restrict b, const uint32_t *restrict c, int n);
/* scc is read and written in place. */
typedef uint64_t emu_scalar_op(uint64_t a, uint64_t b, uint32_t *scc);

/* The other half of a register that gets 16 bits. */
typedef enum half_rule {
    HALF_ALONE, /* cleared on gfx9, kept later */
    HALF_KEEPS, /* kept on gfx9 too */
    HALF_HIGH,  /* kept; the result goes to the high half */
} half_rule;

/*
 * A mnemonic. `form` lists its operands: results, '=', sources, one letter each:
 *   f u   32 bits, float and other        h w   16 bits, float and other
 *   d q   64 bits, float and other        p i   two halves, float and other
 *   k     two f32                         x     f16 or f32 as op_sel_hi says (mixed precision)
 *   m     a bit for each lane             s     a scalar register
 *   r     registers of any number, a number or "off"
 * '+' is a source that repeats the first result (v_fmac), '~' an unwritten VCC. '|' separates forms
 * with different numbers of operands. A row whose form is "*" has operands without effect here.
 */
struct emu_row {
    const char *name, *form;
    void (*run)(emu_wave *wave, const emu_instr *instr);
    emu_class class;
    emu_lane_op *lanes;
    emu_scalar_op *scalar;
    int64_t data; /* defined by the family */
    half_rule half;
};

typedef struct emu_table {
    const emu_row *row;
    int rows;
} emu_table;

extern const emu_table emu_scalar_table, emu_control_table, emu_vector_table, emu_lanes_table,
    emu_compare_table, emu_memory_table, emu_lds_table, emu_matrix_table;

/* ---- state ----------------------------------------------------------------------------------- */

typedef enum wave_state { RUNNING, AT_BARRIER, ENDED, FAULTED } wave_state;

struct emu_wave {
    emu_group *group;
    int lanes; /* 32 or 64 */
    int index; /* in the work-group */
    wave_state state;
    bool signalled; /* has signalled a two-part barrier */
    const emu_instr *next;
    uint64_t steps;

    uint32_t s[SGPRS], s_def[SGPRS]; /* values; bits that are defined */
    uint64_t exec_expanded;          /* the EXEC that exec_lane expands */
    uint32_t exec_lane[LANES];       /* ~0 for active lanes, else 0 */

    uint32_t (*v)[LANES]; /* [VGPRS][LANES] */
    uint64_t (*v_def)[2]; /* [VGPRS][half]: a bit for each lane */
    uint8_t *scratch;     /* [scratch_size][lanes]: lane after lane */
    uint8_t *scratch_def;
};

/* Accesses to a dword of LDS since the last barrier. */
typedef struct lds_touch {
    uint32_t write_epoch, read_epoch; /* barrier intervals */
    uint16_t writer;                  /* a wave, or LDS_MIXED: several, each its own bytes */
    uint8_t written;                  /* bytes, as bits */
    uint32_t readers;                 /* waves, as bits */
    uint32_t store;                   /* number of the last store that wrote it */
    uint8_t stored;                   /* bytes, as bits */
} lds_touch;

enum { LDS_MIXED = 0xffff };

struct emu_group {
    emu_machine *machine;
    uint32_t id[3];
    uint32_t epoch;  /* never repeats within a machine */
    uint32_t stores; /* so far */
    uint8_t *lds, *lds_def;
    lds_touch *touch; /* [lds_size / 4] */
    uint32_t lds_size;
    emu_wave wave[MAX_WAVES];
    int waves;
};

struct emu_machine {
    const emu_launch *launch;
    emu_kernel *kernel;
    emu_memory *memory;
    emu_report *report;
    const emu_instr *code; /* [length] */
    int length;
    uint64_t *count; /* [length]: executions */
    uint64_t base;   /* host address of the object's address 0 */
    int lds_banks;
    bool flushes_halves; /* matrix instructions treat 16-bit subnormals as zeros */
    int scratch_size;    /* bytes per lane */
    emu_group group;
};

/* ---- helpers --------------------------------------------------------------------------------- */

static inline uint64_t pair(const uint32_t *s) { return s[0] | (uint64_t)s[1] << 32; }

static inline uint64_t exec_mask(const emu_wave *w) { return pair(w->s + S_EXEC); }

static inline uint64_t all_lanes(const emu_wave *w)
{
    return w->lanes == 64 ? ~UINT64_C(0) : UINT32_MAX;
}

static inline bool lane_in(uint64_t mask, int lane) { return mask >> lane & 1; }

#define EACH(lane, mask)                                 \
    for (uint64_t rest_ = (mask); rest_ != 0; rest_ = 0) \
        for (int lane = 0; lane < LANES; lane++)         \
            if (rest_ >> lane & 1)

#if defined(__GNUC__)
#define EMU_PRINTF(n) __attribute__((format(printf, n, n + 1)))
#else
#define EMU_PRINTF(n)
#endif

/* machine.c. The first fault stops the launch; findings are counted, and the first of each is
 * described. */
void emu_fault(emu_wave *w, const emu_instr *in, const char *format, ...) EMU_PRINTF(3);
void emu_undefined(emu_wave *w, const emu_instr *in, const char *format, ...) EMU_PRINTF(3);
void emu_race(emu_wave *w, const emu_instr *in, const char *format, ...) EMU_PRINTF(3);

/* A scalar source of one or two registers, its defined bits in *def. */
uint64_t emu_scalar_read(const emu_wave *w, const emu_operand *o, uint64_t *def);
/* Writes a scalar destination; reports undefined bits that enter EXEC. */
void emu_scalar_write(emu_wave *w, const emu_instr *in, const emu_operand *o, uint64_t value,
                      uint64_t def);
/* A lane mask in a scalar register, as wide as the wave. */
uint64_t emu_mask_read(const emu_wave *w, const emu_operand *o, uint64_t *def);

/* EXEC as lanes of ~0 and 0. */
const uint32_t *emu_exec_lanes(emu_wave *w);

/* vector.c: one source as lanes: a register itself, or its values in room[2 * LANES]. */
typedef struct emu_view {
    const uint32_t *v;
    uint64_t def[2]; /* lanes whose low and high half is defined; of 64 bits, their registers */
} emu_view;

emu_view emu_vector_read(const emu_wave *w, const emu_instr *in, int source, uint32_t *room);
/* Writes d[n] to register `reg` in the lanes of mask, with their definedness. */
void emu_vector_write(emu_wave *w, int reg, const uint32_t *d, uint64_t mask, uint64_t def_lo,
                      uint64_t def_hi);
/* Prepares what is computed once, at decoding. Returns false with the reason in why. */
bool emu_vector_prepare(emu_instr *in, char *why, size_t why_size);

/* memory.c: the bytes at a device address, or NULL; whether each is defined, or NULL: all are. */
uint8_t *emu_memory_at(emu_memory *memory, uint64_t address, size_t size, uint8_t **def);
/* "3 bytes after a region of 64 bytes" */
void emu_memory_explain(const emu_memory *memory, uint64_t address, char *text, size_t size);

/* text.c: decodes one line of the disassembly. False with the reason in why. */
bool emu_decode_line(const char *line, int arch_major, const emu_row *const *index, int rows,
                     emu_instr *in, char *why, size_t why_size);
/* All rows by name; to be freed. */
const emu_row **emu_index_create(int *rows);
void emu_instr_release(emu_instr *in);

/* object.c */
const emu_instr *emu_kernel_code(emu_kernel *kernel, int *length);
const emu_object *emu_kernel_object(const emu_kernel *kernel);
/* The descriptor's bytes. */
const uint8_t *emu_kernel_descriptor(const emu_kernel *kernel);
void *emu_object_image(const emu_object *object, size_t *size);

#endif
