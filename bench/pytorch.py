#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fattn compared with PyTorch's scaled_dot_product_attention on one device, in one process, taking turns.

Prints a table of tab-separated values: for each shape the median rate of fattn and of each of
PyTorch's backends (flash is FlashAttention-2 on a GPU), in TFLOP/s of the products that the formula
has, and fattn's ratio to each; then the geometric mean of the ratios of each direction. With --plot,
also a picture per head dimension and direction. Inputs are normal random numbers; all contenders take
turns, `--repeats` times. The exit status is 1 if an error, the largest difference from the first peer, is
larger than the rounding of both sides explains, so that no wrong result is timed.

    bench/pytorch.py --library build/libfattn.so.0 --dim 64 128 --dir fwd bwd
    OMP_NUM_THREADS=16 bench/pytorch.py --device cpu --dtype f32 --tokens 0 --heads 8

On a CPU both have OMP_NUM_THREADS threads, each its own: a contender runs once before its clock
starts, while the threads of the other one go to sleep.
"""
import argparse
import ctypes
import math
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

I64, F64, U64, PTR = ctypes.c_int64, ctypes.c_double, ctypes.c_uint64, ctypes.c_void_p


class Strides(ctypes.Structure):
    _fields_ = [(name, I64) for name in "batch seq head".split()]


class Problem(ctypes.Structure):
    """fattn_problem of include/fattn/fattn.h."""
    _fields_ = (
        [("struct_size", ctypes.c_size_t)]
        + [(name, ctypes.c_int) for name in "op dtype dtype_o dtype_bias layout anchor".split()]
        + [("features", U64), ("outputs", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]
        + [(name, I64) for name in """batch heads_q heads_k seqlen_q seqlen_k dim dim_v total_q
            total_k page_size num_pages max_pages block_table_stride""".split()]
        + [(name, Strides) for name in "q k v o dout dq dk dv".split()]
        + [(name, F64) for name in "scale softcap dropout_p".split()]
        + [(name, I64) for name in "window_left window_right".split()]
        + [(name, I64 * 4) for name in """bias_stride mask_stride block_mask_stride
            dbias_stride""".split()]
        + [(name, I64) for name in """block_m block_n alibi_batch_stride batch_offset head_offset
            pointer_alignment""".split()])


class Buffers(ctypes.Structure):
    """fattn_buffers."""
    _fields_ = (
        [("struct_size", ctypes.c_size_t)]
        + [(name, PTR) for name in """q k v o lse dout dlse dq dk dv dbias dsink bias mask block_mask
            alibi_slopes sink cu_seqlens_q cu_seqlens_k seqused_q seqused_k block_table""".split()]
        + [(name, I64) for name in "q_offset k_offset whole_q whole_k".split()]
        + [(name, PTR) for name in "q_offsets k_offsets wholes_q wholes_k".split()]
        + [("seed", U64), ("offset", U64), ("seed_ptr", PTR), ("offset_ptr", PTR)])


class PlanInfo(ctypes.Structure):
    """fattn_plan_info."""
    _fields_ = (
        [("struct_size", ctypes.c_size_t), ("kernel", ctypes.c_char * 64)]
        + [(name, I64) for name in "br bc splits work_items workspace_bytes".split()]
        + [(name, F64) for name in """predicted_bytes standard_bytes lower_bound_bytes flops
            effective_dropout""".split()])


def made(kind, init):
    """A struct with the library's defaults, in memory that suffices for a newer library's, which may have more fields."""
    struct = kind.from_buffer(bytearray(4096))
    init(ctypes.byref(struct))
    struct.struct_size = ctypes.sizeof(kind)
    return struct


CAUSAL, SOFTCAP, BIAS, ALIBI, MASK, DROPOUT = 1 << 0, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 9
DETERMINISTIC = 1 << 18
OUT_O, OUT_LSE, OUT_GRADIENTS, OUT_DBIAS = 1, 2, 4 | 8 | 16, 32
BHSD, TOP_LEFT = 2, 2
DTYPES = {"f32": (torch.float32, 1), "f16": (torch.float16, 2), "bf16": (torch.bfloat16, 3)}
# The largest difference that the rounding of both sides may cause, relative to the largest magnitude of a result (at
# least 1).
TOLERANCE = {"f32": 1e-4, "f16": 4e-3, "bf16": 3.2e-2}
GRADIENT = 4  # times as much: a sum over rows or keys of products of such numbers
MASKS = ["mask", "triangle", "documents"]
FEATURES = ["plain", "bias", "dbias", *MASKS, "alibi", "softcap", "dropout", "deterministic"]
PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def mask_of(name, lengths, device):
    """Random pairs, a causal mask, or a causal one for each of four documents of equal length."""
    if name == "mask":
        return torch.rand(*lengths, device=device) < 0.9
    i, j = (torch.arange(n, device=device) for n in lengths)
    causal = j <= i[:, None] + lengths[1] - lengths[0]
    documents = 4 if name == "documents" else 1
    return causal & (i[:, None] * documents // lengths[0] == j * documents // lengths[1])


class Feature:
    """An option of a run, for fattn and for PyTorch; peers without this option are skipped."""

    def __init__(self, name, q, k):
        heads, lengths, device = q.shape[1], (q.shape[2], k.shape[2]), q.device
        self.name, self.tensor, self.arguments, self.bits = name, None, {}, 0
        self.gradient = None
        if name in ("bias", "dbias"):
            self.bits = BIAS
            self.tensor = torch.randn(1, heads, *lengths, device=device, dtype=q.dtype,
                                      requires_grad=name == "dbias")
            self.arguments = dict(attn_mask=self.tensor)
        elif name in MASKS:
            self.bits = MASK
            self.tensor = mask_of(name, lengths, device)[None, None]
            self.arguments = dict(attn_mask=self.tensor)
        elif name == "alibi":
            self.bits = ALIBI
            self.tensor = torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)
            distance = (torch.arange(lengths[0], device=device)[:, None] -
                        torch.arange(lengths[1], device=device)).abs()
            self.arguments = dict(attn_mask=(-self.tensor[:, None, None] * distance)
                                  .to(q.dtype)[None])
        elif name == "softcap":
            self.bits = SOFTCAP
        elif name == "dropout":
            self.bits = DROPOUT
            self.arguments = dict(dropout_p=0.1)
        elif name == "deterministic":
            self.bits = DETERMINISTIC
        torch.use_deterministic_algorithms(name == "deterministic")
        torch.utils.deterministic.fill_uninitialized_memory = False

    def peers(self, names):
        return [] if self.name == "softcap" else names

    def set(self, problem, buffers):
        problem.features |= self.bits
        if self.name in ("bias", "dbias"):
            problem.dtype_bias = dtype_number(self.tensor)
            problem.bias_stride = (0, *self.tensor.stride()[1:])
            buffers.bias = self.tensor.data_ptr()
            if self.name == "dbias" and problem.op == 2:  # the gradients, and this one
                self.gradient = torch.empty_like(self.tensor, dtype=torch.float32)
                problem.outputs = OUT_GRADIENTS | OUT_DBIAS
                problem.dbias_stride = problem.bias_stride
                buffers.dbias = self.gradient.data_ptr()
        elif self.name in MASKS:
            problem.mask_stride = (0, 0, *self.tensor.stride()[2:])
            buffers.mask = self.tensor.data_ptr()
        elif self.name == "alibi":
            buffers.alibi_slopes = self.tensor.data_ptr()
        elif self.name == "softcap":
            problem.softcap = 30.0
        elif self.name == "dropout":
            problem.dropout_p = 0.1
            buffers.seed = 1


def dtype_number(tensor):
    return next(number for kind, number in DTYPES.values() if kind == tensor.dtype)


class Fattn:
    """A forward and a backward plan of one shape, on PyTorch's tensors and stream."""

    def __init__(self, library, q, k, v, causal, dout, feature):
        self.lib = library
        self.stream = PTR(torch.cuda.current_stream().cuda_stream if q.is_cuda else None)
        self.tensors = dict(q=q, k=k, v=v, dout=dout, o=torch.empty_like(dout),
                            lse=torch.empty(q.shape[:3], device=q.device),
                            dq=torch.empty_like(q), dk=torch.empty_like(k),
                            dv=torch.empty_like(v))
        self.buffers = made(Buffers, library.fattn_buffers_init)
        for name, tensor in self.tensors.items():
            setattr(self.buffers, name, tensor.data_ptr())
        self.plans = {}
        self.causal, self.feature = causal, feature

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.fattn_last_reason().decode())

    def plan(self, direction):
        q, k, v = (self.tensors[name] for name in "qkv")
        p = made(Problem, self.lib.fattn_problem_init)
        p.op = 2 if direction == "bwd" else 1
        p.dtype = dtype_number(q)
        p.layout = BHSD
        p.features = CAUSAL if self.causal else 0
        p.anchor = TOP_LEFT
        p.outputs = OUT_O | OUT_LSE if direction == "fwd" else 0
        p.batch, p.heads_q, p.seqlen_q, p.dim = q.shape
        p.heads_k, p.seqlen_k, p.dim_v = v.shape[1:]
        self.feature.set(p, self.buffers)
        plan, info = PTR(), PlanInfo(struct_size=ctypes.sizeof(PlanInfo))
        self.check(self.lib.fattn_plan_create(self.lib.device, ctypes.byref(p),
                                              ctypes.byref(plan)))
        self.check(self.lib.fattn_plan_get_info(plan, ctypes.byref(info)))
        workspace = torch.empty(info.workspace_bytes + 256, dtype=torch.uint8, device=q.device)
        self.plans[direction] = plan, workspace, info
        return info

    def run(self, direction):
        plan, workspace, _ = self.plans[direction]
        self.check(self.lib.fattn_execute(plan, ctypes.byref(self.buffers),
                                          PTR((workspace.data_ptr() + 255) // 256 * 256),
                                          self.stream))

    def close(self):
        for plan, _, _ in self.plans.values():
            self.lib.fattn_plan_destroy(plan)


def load(path, device):
    library = ctypes.CDLL(path)
    library.fattn_last_reason.restype = ctypes.c_char_p
    library.fattn_plan_destroy.argtypes = [PTR]
    library.device = PTR()
    if library.fattn_device_open(device.encode(), ctypes.byref(library.device)):
        sys.exit(library.fattn_last_reason().decode())
    return library


def contenders(fattn, direction, q, k, v, dout, causal, feature, peers):
    """Maps names to functions that do one run, without backends that refuse the shape."""
    found = {"fattn": lambda: fattn.run(direction)}
    for name in feature.peers(peers):
        backend = PEERS[name]

        def forward(backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1],
                    **feature.arguments)
        try:
            o = forward()
        except RuntimeError:
            continue
        if direction == "fwd":
            found[name] = lambda forward=forward: forward()
        else:
            wanted = (q, k, v, feature.tensor) if feature.name == "dbias" else (q, k, v)
            found[name] = lambda o=o: torch.autograd.grad(o, wanted, dout, retain_graph=True)
    return found


def seconds(run, count, cuda):
    if not cuda:
        run()
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) / count
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / count


def measure(runs, repeats, cuda):
    """Median seconds of each, interleaved; each sample lasts about ten milliseconds."""
    counts, samples = {}, {name: [] for name in runs}
    for name, run in runs.items():
        seconds(run, 2, cuda)
        counts[name] = max(1, int(0.01 / seconds(run, 3, cuda)))
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(seconds(run, counts[name], cuda))
    return {name: statistics.median(values) for name, values in samples.items()}


def shapes(options):
    for direction in options.dir:
        for dim in options.dim:
            for causal in options.mask:
                for length in options.length:
                    heads = options.heads or options.width // dim
                    batch = max(1, options.tokens // length)
                    for feature in options.feature:
                        yield direction, dim, causal == "causal", length, batch, heads, feature


def means(rows, peers):
    """A line for each direction and peer: the geometric mean of the ratios, and their range."""
    for direction in dict.fromkeys(row["dir"] for row in rows):
        for name in peers:
            ratios = [row["rates"]["fattn"] / row["rates"][name] for row in rows
                      if row["dir"] == direction and name in row["rates"]]
            if ratios:
                mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
                yield (f"# {direction}: {mean:.2f} times {name} over {len(ratios)} rows, "
                       f"{min(ratios):.2f} to {max(ratios):.2f}")


def draw(path, ylabel, panels, log=False):
    """A picture of panels side by side, over N: panels[title][name] are the points of a curve."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plot
    figure, axes = plot.subplots(1, len(panels), figsize=(4 * len(panels), 3.5), squeeze=False)
    for axis, (title, curves) in zip(axes[0], panels.items()):
        for name, points in curves.items():
            axis.plot(*zip(*points), marker="o", label=name)
        axis.set_xscale("log", base=2)
        if log:
            axis.set_yscale("log", base=2)
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(title)
        axis.set_xlabel("N")
        axis.set_ylabel(ylabel)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def draw_rates(path, rows):
    panels = {}
    for row in sorted(rows, key=lambda row: (row["dir"], row["d"], row["mask"], row["feature"])):
        title = f"{row['dir']}, d = {row['d']}, {row['mask']}, {row['feature']}"
        for name, rate in row["rates"].items():
            panels.setdefault(title, {}).setdefault(name, []).append((row["N"], rate))
    draw(path, "TFLOP/s", panels)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default="libfattn.so.0")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dir", nargs="+", default=["fwd"], choices=["fwd", "bwd"])
    parser.add_argument("--dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--mask", nargs="+", default=["full", "causal"],
                        choices=["full", "causal"])
    parser.add_argument("--feature", nargs="+", default=["plain"], choices=FEATURES)
    parser.add_argument("--length", nargs="+", type=int,
                        default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length")
    parser.add_argument("--width", type=int, default=2048, help="heads * dim, without --heads")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--heads-k", type=int)
    parser.add_argument("--peers", nargs="+", choices=PEERS,
                        help="default flash, on a GPU also cudnn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()

    library = load(options.library, options.device)
    cuda = options.device == "cuda"
    options.peers = options.peers or (["flash", "cudnn"] if cuda else ["flash"])
    rows, wrong = [], 0
    print("dir", "dtype", "d", "mask", "feature", "N", "B", "H", "kernel", "fattn", *options.peers,
          *("/" + name for name in options.peers), "error", sep="\t")
    for direction, dim, causal, length, batch, heads, name in shapes(options):
        kind = DTYPES[options.dtype][0]

        def normal(heads):
            return torch.randn(batch, heads, length, dim, device=options.device, dtype=kind,
                               requires_grad=direction == "bwd")
        q, k, v = normal(heads), normal(options.heads_k or heads), normal(options.heads_k or heads)
        dout = torch.randn_like(q)
        feature = Feature(name, q, k)
        fattn = Fattn(library, q, k, v, causal, dout, feature)
        info = fattn.plan("fwd")
        fattn.run("fwd")
        if direction == "bwd":
            info = fattn.plan("bwd")
        runs = contenders(fattn, direction, q, k, v, dout, causal, feature, options.peers)
        median = measure(runs, options.repeats, cuda)
        flops = 4 * batch * heads * length * length * dim / (2 if causal else 1)
        flops *= 2.5 if direction == "bwd" else 1
        rates = {name: flops / value / 1e12 for name, value in median.items()}
        error, fine = difference(fattn, runs, direction, options.dtype,
                                 [] if name == "dropout" else options.peers)
        wrong += not fine
        rows.append(dict(dir=direction, d=dim, mask="causal" if causal else "full", feature=name,
                         N=length, rates=rates))
        print(direction, options.dtype, dim, "causal" if causal else "full", name, length, batch,
              heads,
              info.kernel.decode(), f"{rates['fattn']:#.4g}",
              *(f"{rates[n]:#.4g}" if n in rates else "-" for n in options.peers),
              *(f"{rates['fattn'] / rates[n]:.3f}" if n in rates else "-" for n in options.peers),
              "-" if error is None else f"{error:.1e}" + ("" if fine else "!"), sep="\t", flush=True)
        fattn.close()
    for line in means(rows, options.peers):
        print(line)
    if options.plot:
        draw_rates(options.plot, rows)
    if wrong:
        print(f"{wrong} of {len(rows)} rows are wrong: their errors are marked", file=sys.stderr)
    return 1 if wrong else 0


def judge(pairs, dtype, gradient):
    """The largest difference between pairs of tensors, ours and theirs (NaN if there is one), and whether all are within
    the tolerance."""
    differences, fine = [], True
    for ours, theirs in pairs:
        theirs = theirs.float()
        differences.append((ours.float() - theirs).abs().max().item())
        bound = TOLERANCE[dtype] * (GRADIENT if gradient else 1) * max(1, theirs.abs().max().item())
        fine = fine and differences[-1] <= bound
    return math.nan if any(map(math.isnan, differences)) else max(differences), fine


def difference(fattn, runs, direction, dtype, peers):
    """judge() of fattn's outputs and the first peer's; None, True without a peer."""
    peer = next((name for name in peers if name in runs), None)
    if not peer:
        return None, True
    theirs = runs[peer]()
    ours = [fattn.tensors[name] for name in (["o"] if direction == "fwd" else ["dq", "dk", "dv"])]
    ours += [fattn.feature.gradient] if fattn.feature.gradient is not None else []
    theirs = [theirs] if direction == "fwd" else theirs
    return judge(zip(ours, theirs), dtype, direction == "bwd")


if __name__ == "__main__":
    sys.exit(main())
