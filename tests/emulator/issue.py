# SPDX-License-Identifier: Apache-2.0
"""How far the issue of instructions lets a loop keep matrix units busy: a model of one SIMD of a compute
unit, on which the waves that fit replay a loop's instructions. It has not been compared with silicon: its result
is an upper bound.

The model.

* A wave issues in order, at most one instruction at a time, and waits for the registers that an instruction
  reads or overwrites. Each turn (4 cycles on CDNA, 1 on RDNA), one wave may issue a vector or matrix
  instruction, one a scalar, one an LDS, one a memory instruction, and one a branch; the oldest comes first.
* CDNA: a vector instruction takes the vector unit for a turn, a transcendental or 32-bit integer product for
  4. A matrix instruction takes it for a turn and the matrix unit for its passes, in which vector
  instructions of any wave may issue. Its sums can be added to at once, and otherwise be read 4 turns later.
* RDNA: a matrix instruction takes the vector unit itself, for all its cycles; nothing of it overlaps.
  Transcendentals have a unit of their own, for 4 cycles.
* LDS moves 128 bytes a cycle (gfx950: reads of 16 bytes a lane, 256) and serves all SIMDs in turn, so each
  has its share; accesses take their bank conflicts longer that the emulator counted. Data come LDS_DELAY
  cycles later, those of memory MEMORY_DELAY, and of scalar loads, which caches serve, SCALAR_DELAY, however
  many are asked for. s_waitcnt waits for them as it says.
* s_barrier waits for the waves of the same work-group, of which each SIMD has an equal share.
"""

import re
from dataclasses import dataclass, field

LDS_DELAY = 64
SCALAR_DELAY = 100
MEMORY_DELAY = 500


@dataclass
class Processor:
    """Per SIMD."""
    turn: int            # cycles
    lanes: int
    simds: int           # that share an LDS
    registers: int       # vector registers of a lane
    granule: int
    waves: int           # at most
    local: int           # bytes of LDS of the SIMDs that share it
    apart: bool          # matrix instructions run beside vector instructions
    result: int          # cycles from a vector instruction to one that reads its result
    matrix: dict         # side x side x k: cycles

    def resident(self, registers, local, threads):
        """Waves on a SIMD, of work-groups so large."""
        own = -(-threads // self.lanes)
        fit = [self.registers // (-(-max(1, registers) // self.granule) * self.granule), self.waves]
        groups = self.simds * min(fit) // own
        if local:
            groups = min(groups, self.local // local)
        return max(1, groups * own // self.simds), max(1, own // self.simds)


CDNA = {"turn": 4, "lanes": 64, "simds": 4, "registers": 512, "granule": 8, "waves": 8, "local": 65536,
        "apart": True, "result": 4}
RDNA = {"turn": 1, "lanes": 32, "simds": 2, "registers": 1536, "granule": 24, "waves": 16, "local": 65536,
        "apart": False, "result": 5}
# 2048 16-bit products and sums a compute unit and cycle are 512 a SIMD: 16x16x16 takes 16 cycles.
PROCESSORS = {
    "gfx90a": Processor(**CDNA, matrix={"16x16x16": 32, "32x32x8": 64}),
    "gfx942": Processor(**CDNA, matrix={"16x16x16": 16, "32x32x8": 32}),
    "gfx950": Processor(**{**CDNA, "local": 163840},
                        matrix={"16x16x16": 16, "32x32x8": 32, "16x16x32": 16, "32x32x16": 32}),
    "gfx1100": Processor(**RDNA, matrix={"16x16x16": 32}),
    "gfx1200": Processor(**RDNA, matrix={"16x16x16": 16}),
}

MATRIX = re.compile(r"v_(?:mfma|wmma)_f32_(\d+x\d+x\d+)_?b?f16")
SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(lo|hi)_[ui]32|v_mad_[ui]64_[ui]32")
PRODUCT = re.compile(r"v_mul_|v_mad_")
WIDTH = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16,
         "f32": 4, "u32": 4}


@dataclass
class Instruction:
    text: str
    name: str
    kind: str                     # vector, slow, matrix, scalar, lds, memory, branch, wait, barrier, nop
    reads: frozenset = frozenset()
    writes: frozenset = frozenset()
    cycles: int = 0               # of the unit
    counter: str = ""             # what waits for it: "lds" or "memory"
    waits: dict = field(default_factory=dict)
    sums: bool = False            # adds to what it overwrites


def registers(operand):
    """{"v3", "v4"} of "v[3:4]"; scalar registers likewise."""
    found = set()
    for file, single, low, high in re.findall(r"(?<![a-z0-9_])([vas])(?:(\d+)|\[(\d+):(\d+)\])", operand):
        numbers = range(int(low), int(high) + 1) if low else [int(single)]
        found |= {f"{file}{n}" for n in numbers}
    return found | set(re.findall(r"\b(?:vcc|exec|m0|scc)", operand))


def waits(text):
    """Counters and how many may be left, of any processor's wait."""
    limits = {}
    for word, number in re.findall(r"(vmcnt|lgkmcnt|loadcnt|dscnt|kmcnt|storecnt)(?:_dscnt)?\(?\s*(0x[0-9a-f]+|\d+)", text):
        limits["lds" if word in ("lgkmcnt", "dscnt", "kmcnt") else "memory"] = int(number, 0)
    if "loadcnt_dscnt" in text:   # both in one number
        number = int(text.split()[-1], 0)
        limits = {"memory": number >> 8, "lds": number & 63}
    return {k: v for k, v in limits.items() if not text.startswith("s_wait_storecnt")}


def decode(text, processor, wide_lds):
    """An Instruction of a line of disassembly."""
    name, _, rest = text.partition(" ")
    operands = [o.strip() for o in re.split(r",(?![^\[]*\])", rest)]
    make = lambda kind, **more: Instruction(text, name, kind, **more)
    if name.startswith("s_"):
        if re.match(r"s_wait(cnt)?", name) and "alu" not in name and "idle" not in name:
            return make("wait", waits=waits(text))
        if name in ("s_barrier", "s_barrier_wait"):
            return make("barrier")
        if "branch" in name:
            return make("branch", reads=frozenset({"scc", "vcc", "exec"} & registers(rest) | {"scc"}))
        if name == "s_nop":
            return make("nop", cycles=int(operands[0], 0) + 1)
        if re.match(r"s_(load|buffer_load)", name):
            return make("scalar", writes=frozenset(registers(operands[0])), reads=frozenset(registers(rest)), counter="lds")
        if re.match(r"s_(setprio|delay_alu|clause|wait|sleep|barrier_signal|sched|inst_pref|set_inst)", name):
            return make("hint")
        writes = set() if name.startswith(("s_cmp", "s_bitcmp")) else registers(operands[0])
        writes |= {"exec", "scc"} if "saveexec" in name else {"scc"}
        return make("scalar", reads=frozenset(registers(rest)), writes=frozenset(writes), cycles=1)
    if name.startswith("ds_"):
        loads = re.match(r"ds_(read|load|bpermute|permute|swizzle)", name) or "rtn" in name
        match = re.search(r"(2addr_|2st64_|2_|stride64_)?([ubif]\d+)", name.replace("ds_read2", "ds_read_2").replace("ds_write2", "ds_write_2"))
        size = WIDTH.get(match.group(2), 4) * (2 if "2addr" in name or re.match(r"ds_(read|write)2", name) else 1) if match else 4
        rate = 256 if wide_lds and loads and size == 16 else 128
        return make("lds", writes=frozenset(registers(operands[0]) if loads else ()), counter="lds",
                    reads=frozenset(registers(", ".join(operands[1:]) if loads else rest)),
                    cycles=max(1, size * processor.lanes // rate))
    if re.match(r"(global|buffer|flat|scratch|tbuffer)_", name):
        loads = "_load" in name and "lds" not in name
        return make("memory", writes=frozenset(registers(operands[0]) if loads else ()), counter="memory",
                    reads=frozenset(registers(", ".join(operands[1:]) if loads else rest)), cycles=processor.turn)
    shape = MATRIX.match(name)
    if shape:
        return make("matrix", writes=frozenset(registers(operands[0])), reads=frozenset(registers(", ".join(operands[1:]))),
                    cycles=processor.matrix[shape.group(1)], sums=operands[0] == operands[-1].split(" ")[0])
    writes, reads = set(), set()
    for half in rest.split("::"):  # of a dual issue
        own = re.sub(r"^\s*v_dual_\w+\s+", "", half)
        first, _, others = own.partition(",")
        writes |= registers(first)
        reads |= registers(others)
        if re.search(r"fmac|swap|permlane", name + half):
            reads |= registers(first)
    if re.search(r"swap", name):
        writes |= registers(operands[1])
    if re.match(r"v_\w*(add|sub)\w*_co_", name):
        writes |= registers(operands[1])
    if name.startswith("v_cmpx"):
        writes |= {"exec"}
    slow = SLOW.match(name)
    own_unit = slow and not processor.apart and not PRODUCT.match(name)
    return make("slow" if own_unit else "vector", reads=frozenset(reads), writes=frozenset(writes),
                cycles=4 * processor.turn if slow else processor.turn)


class Wave:
    def __init__(self, program, group, start):
        self.program, self.group, self.at, self.free = program, group, 0, start
        self.ready = {}                     # register: cycle from which it can be read
        self.sums = {}                      # the same for a matrix instruction that adds to it
        self.pending = {"lds": [], "memory": []}
        self.waiting = False                # at a barrier
        self.rounds = []                    # cycle of each start of the loop

    def next(self):
        return self.program[self.at]


class Simd:
    def __init__(self, processor, conflicts):
        self.p, self.conflicts = processor, conflicts
        self.free = dict.fromkeys(("vector", "matrix", "slow", "lds", "memory"), 0)
        self.matrix_cycles = []             # (start, cycles)

    def blocked(self, wave, i, now):
        """Whether the wave has to wait with the instruction."""
        if wave.waiting or wave.free > now:
            return True
        if i.kind == "wait":
            return any(len([t for t in wave.pending[c] if t > now]) > n for c, n in i.waits.items())
        for register in i.reads | i.writes:
            early = i.kind == "matrix" and i.sums and register in i.writes and register in wave.sums
            if (wave.sums if early else wave.ready).get(register, 0) > now:
                return True
        units = {"vector": ["vector"], "matrix": ["vector", "matrix"], "slow": ["slow"], "lds": ["lds"],
                 "memory": ["memory"]}.get(i.kind, [])
        return any(self.free[u] > now for u in units)

    def issue(self, wave, i, now):
        p = self.p
        wave.free = now + p.turn
        done = now + (p.turn if i.kind == "scalar" else max(p.result, i.cycles))
        if i.kind == "nop":
            wave.free = now + p.turn * i.cycles
        elif i.kind in ("vector", "slow", "memory"):
            self.free[i.kind] = now + i.cycles
        elif i.kind == "matrix":
            self.free["vector"] = now + (p.turn if p.apart else i.cycles)
            self.free["matrix"] = now + i.cycles
            self.matrix_cycles.append((now, i.cycles))
            done = now + i.cycles + 4 * p.turn
        elif i.kind == "lds":
            self.free["lds"] = now + i.cycles * p.simds * self.conflicts
            done = self.free["lds"] + LDS_DELAY
        if i.counter:
            done = done if i.kind == "lds" else now + (SCALAR_DELAY if i.kind == "scalar" else MEMORY_DELAY)
            wave.pending[i.counter] = [t for t in wave.pending[i.counter] if t > now] + [done]
        for register in i.writes:
            wave.ready[register] = done
            wave.sums.pop(register, None)
            if i.kind == "matrix":
                wave.sums[register] = now + i.cycles
        wave.at += 1
        if wave.at == len(wave.program):
            wave.at = 0
            wave.rounds.append(now)


def replay(program, processor, waves, share, conflicts, rounds=8):
    """The share of cycles in which the matrix unit works, once the loop is under way."""
    simd = Simd(processor, conflicts)
    crew = [Wave(program, n // share, 37 * processor.turn * (n // share)) for n in range(waves)]
    now = 0
    while min(len(w.rounds) for w in crew) < rounds or crew[0].rounds[-1] <= max(w.rounds[1] for w in crew):
        taken = set()
        for wave in sorted(crew, key=lambda w: w.free):
            i = wave.next()
            port = {"matrix": "vector", "slow": "vector", "hint": id(wave), "wait": id(wave), "nop": id(wave)}.get(i.kind, i.kind)
            if port in taken or simd.blocked(wave, i, now):
                continue
            taken.add(port)
            if i.kind == "barrier":
                wave.waiting = True
            simd.issue(wave, i, now)
        for group in {w.group for w in crew}:
            own = [w for w in crew if w.group == group]
            if all(w.waiting for w in own):
                for wave in own:
                    wave.waiting = False
        now += processor.turn
    under_way = [t for t in crew[0].rounds if t >= max(w.rounds[1] for w in crew)]
    begin, end = under_way[0], under_way[-1]
    busy = sum(min(t + c, end) - max(t, begin) for t, c in simd.matrix_cycles if t + c > begin and t < end)
    return busy / (end - begin)


@dataclass
class Estimate:
    """Of a loop: cycles a wave and round."""
    matrix: int       # cycles of matrix instructions
    matrices: int     # how many
    vector: int       # of vector instructions, the issue of matrix instructions included
    slow: int         # of those, or beside them, transcendentals and integer products
    lds: float        # of a SIMD's share of LDS, conflicts included
    counts: dict
    waves: int
    ideal: float      # the larger of matrix and vector cycles is all there is
    modelled: float


def estimate(texts, processor, registers_used, local, threads, conflicts=1.0):
    """Of the instructions that a wave runs in a round of its loop."""
    p = processor
    program = [decode(t, p, p.local > 65536) for t in texts]
    cycles = lambda *kinds: sum(i.cycles for i in program if i.kind in kinds)
    matrices = [i for i in program if i.kind == "matrix"]
    slow = sum(i.cycles for i in program if SLOW.match(i.name))
    vector = cycles("vector") + (p.turn * len(matrices) if p.apart else cycles("matrix"))
    lds = cycles("lds") * p.simds * conflicts
    waves, share = p.resident(registers_used, local, threads)
    counts = {k: sum(i.kind == k for i in program) for k in ("matrix", "vector", "slow", "lds", "memory", "scalar", "barrier")}
    matrix = cycles("matrix")
    ideal = matrix / max(1, matrix, vector, cycles("slow"))
    modelled = min(ideal, replay(program, p, waves, share, conflicts)) if matrices else 0.0
    return Estimate(matrix, len(matrices), vector, slow, lds, counts, waves, ideal, modelled)
