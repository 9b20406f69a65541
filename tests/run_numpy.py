#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`fattn run` against NumPy in float64, as a TAP program.

    run_numpy.py FATTN [DEVICE ...]

NumPy writes the inputs, the tool runs, and NumPy evaluates the formulas of docs/MATH.md and compares
the results. Every case runs on every device that is present, unless devices are named.
"""

import json
import os
import subprocess
import sys
import tempfile

import checks
from checks import ok

try:
    import numpy as np
except ImportError:
    sys.exit(checks.skip_all("NumPy is not installed"))

# Tolerances relative to the result's largest magnitude (at least 1), by dtype of the computation.
TOLERANCE = {"f64": 1e-12, "f32": 1e-6, "f16": 2e-3, "bf16": 1.6e-2}
# A gradient is a sum over rows or keys of products of such numbers.
GRADIENT = 4

# --------------------------------------------------------------------------------------------------
# Attention of one sequence in NumPy: q (Hq, Sq, D), k (Hk, Sk, D), v (Hk, Sk, Dv)
# --------------------------------------------------------------------------------------------------


def kept(sq, sk, off, causal, window):
    i, j = np.arange(sq)[:, None], np.arange(sk)[None, :]
    left, right = window
    keep = np.ones((sq, sk), bool)
    if causal:
        right = 0
    if left >= 0:
        keep &= j - (i + off) >= -left
    if right >= 0:
        keep &= j - (i + off) <= right
    return keep


def attend(q, k, v, *, off, causal=False, window=(-1, -1), scale=None, softcap=None, bias=0.0, mask=True,
           slopes=None, alibi_bias=False, sink=None, z=1.0, do=None, dlse=None):
    """o (Hq, Sq, Dv), lse (Hq, Sq) and, by name, scores, probabilities and, given do, the gradients."""
    group = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    sq, sk = q.shape[1], k.shape[1]
    scale = 1 / np.sqrt(q.shape[2]) if scale is None else scale

    x = scale * q @ k.swapaxes(1, 2)
    slope_of_cap = 1.0
    if softcap:
        x = softcap * np.tanh(x / softcap)
        slope_of_cap = 1 - (x / softcap) ** 2
    if alibi_bias:
        hidden = np.isneginf(bias)
        bias = np.where(hidden, -np.inf, slopes[:, None, None] * np.where(hidden, 0, bias))
    x = x + bias
    if slopes is not None and not alibi_bias:
        distance = abs(np.arange(sq)[:, None] + off - np.arange(sk)[None, :])
        x = x - slopes[:, None, None] * distance
    x = np.where(kept(sq, sk, off, causal, window) & mask, x, -np.inf)

    tail = np.full((q.shape[0], sq, 1), -np.inf) if sink is None else \
        np.broadcast_to(sink[:, None, None], (q.shape[0], sq, 1))
    whole = np.concatenate([x, tail], 2)
    m = whole.max(2, keepdims=True)
    m = np.where(np.isneginf(m), 0, m)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(np.exp(whole - m).sum(2, keepdims=True)))[..., 0]
    safe = np.where(np.isneginf(lse), 0, lse)[..., None]
    p = np.exp(x - safe)
    o = (z * p) @ v
    pairs = {"scores": x, "probabilities": p}
    if do is None:
        return o, lse, pairs

    delta = (do * o).sum(2) - (0 if dlse is None else dlse)
    ds = p * (z * (do @ v.swapaxes(1, 2)) - delta[..., None])
    inner = ds * slope_of_cap
    summed = lambda g: g.reshape(g.shape[0] // group, group, *g.shape[1:]).sum(1)
    grads = {"dq": scale * inner @ k, "dk": summed(scale * inner.swapaxes(1, 2) @ q),
             "dv": summed((p * z).swapaxes(1, 2) @ do), "dbias": slopes[:, None, None] * ds if alibi_bias else ds}
    if sink is not None:
        grads["dsink"] = -(np.exp(sink[:, None] - safe[..., 0]) * delta).sum(1)
    return o, lse, grads | pairs


def philox(counter, key):
    """Philox4x32-10 on arrays of counters (..., 4) of uint64 below 2^32."""
    c = [counter[..., n].copy() for n in range(4)]
    low = np.uint64(0xFFFFFFFF)
    k0, k1 = key
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), b & low,
             (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def dropout(p, seed, offset, batch, heads, sq, sk, q_offset=0, k_offset=0):
    """The multipliers Z (B, Hq, Sq, Sk)."""
    t = int(np.floor(p * 65536 + 0.5))
    first = np.array([offset & 0xFFFFFFFF, offset >> 32, 0, 0], np.uint64)
    key = [int(w) for w in philox(first, (seed & 0xFFFFFFFF, seed >> 32))[:2]]
    b, h, i, j = np.meshgrid(np.arange(batch), np.arange(heads), np.arange(sq) + q_offset,
                             np.arange(sk) + k_offset, indexing="ij")
    counter = np.stack([(i >> 4) * 8 + (i & 7), (j >> 4) * 4 + ((j & 7) >> 1), b, h], -1)
    words = np.stack(philox(counter.astype(np.uint64), key), -1)
    which = 2 * ((i >> 3) & 1) + ((j >> 3) & 1)
    word = np.take_along_axis(words, which[..., None], -1)[..., 0]
    bits = np.where(j % 2 == 0, word & np.uint64(0xFFFF), word >> np.uint64(16))
    return np.where(bits < t, 0.0, 65536 / (65536 - t))


# --------------------------------------------------------------------------------------------------
# A case: arrays and options for the tool, and the same for attend()
# --------------------------------------------------------------------------------------------------


class Case:
    """Dense by default. Tensors are (B, S, H, channel), or (total, H, channel) with lengths."""

    def __init__(self, name, b=2, hq=4, hk=4, sq=37, sk=53, d=24, dv=24, dtype="f32", backward=False,
                 lengths_q=None, lengths_k=None, used_q=None, used_k=None, page=None, layout="bshd", **features):
        self.name, self.dtype, self.layout, self.backward = name, dtype, layout, backward
        self.features, self.page = features, page
        self.rng = rng = np.random.default_rng(list(name.encode()))
        self.lengths_q = lengths_q if lengths_q is not None else [sq] * b
        self.lengths_k = lengths_k if lengths_k is not None else [sk] * b
        self.used_q = used_q or self.lengths_q
        self.used_k = used_k or self.lengths_k
        self.packed_q, self.packed_k = lengths_q is not None, lengths_k is not None
        self.b, self.hq, self.hk = len(self.lengths_q), hq, hk
        self.sq, self.sk = max(self.lengths_q, default=0), max(self.lengths_k, default=0)
        kv = features.get("dtype_kv", dtype)
        self.types = {"q": dtype, "k": kv, "v": features.get("dtype_v", kv), "do": dtype, "o": features.get("dtype_o", dtype)}
        self.types |= {"dq": dtype, "dk": kv, "dv": self.types["v"]}
        draw = lambda name, lengths, h, c: [self.round(rng.standard_normal((n, h, c)), name) for n in lengths]
        self.q, self.k = draw("q", self.lengths_q, hq, d), draw("k", self.lengths_k, hk, d)
        self.v, self.do = draw("v", self.lengths_k, hk, dv), draw("do", self.lengths_q, hq, dv)
        self.dlse = [rng.standard_normal((hq, n)).astype(np.float32) for n in self.lengths_q]

    def round(self, x, name):
        """x rounded to this tensor's type, as float64."""
        stored = self.stored(x, name)
        if self.types[name] == "bf16":
            return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return E4M3[stored] if self.types[name] == "e4m3" else stored.astype(np.float64)

    def stored(self, x, name):
        if self.types[name] == "bf16":
            return bf16_bits(x)
        if self.types[name] == "e4m3":
            return e4m3_codes(x)
        return x.astype({"f64": np.float64, "f32": np.float32, "f16": np.float16}[self.types[name]])

    def joined(self, parts, packed):
        """The array of a tensor, in the file's layout."""
        whole = np.concatenate(parts) if packed else np.stack(parts)
        if self.layout == "bhsd":
            whole = whole.swapaxes(-3, -2)
        return whole

    def split(self, whole, lengths, packed):
        if self.layout == "bhsd":
            whole = whole.swapaxes(-3, -2)
        return np.split(whole, np.cumsum(lengths)[:-1]) if packed else list(whole)

    # -- what the tool gets ---------------------------------------------------------------------

    def pages(self, rng, parts):
        """k or v in pages, in the order of self.table."""
        pool = np.full((self.table.max() + 2, self.page) + parts[0].shape[1:], np.nan)
        for b, part in enumerate(parts):
            for n in range(-(-part.shape[0] // self.page)):
                piece = part[n * self.page:(n + 1) * self.page]
                pool[self.table[b, n], :len(piece)] = piece
        return pool.swapaxes(1, 2) if self.layout == "bhsd" else pool

    def arrays(self):
        """Inputs by option."""
        rng, f = self.rng, self.features
        files = {"q": self.stored(self.joined(self.q, self.packed_q), "q")}
        if self.page:
            columns = -(-self.sk // self.page)
            self.table = rng.permutation(self.b * columns).reshape(self.b, columns)
            files["k"] = self.stored(self.pages(rng, self.k), "k")
            files["v"] = self.stored(self.pages(rng, self.v), "v")
            files["block-table"] = self.table.astype(np.int32)
        else:
            files["k"] = self.stored(self.joined(self.k, self.packed_k), "k")
            files["v"] = self.stored(self.joined(self.v, self.packed_k), "v")
        if self.packed_q:
            files["cu-seqlens-q"] = np.cumsum([0] + self.lengths_q).astype(np.int64)
        if self.packed_k:
            files["cu-seqlens-k"] = np.cumsum([0] + self.lengths_k).astype(np.int32)
        if self.used_q is not self.lengths_q:
            files["seqused-q"] = np.array(self.used_q, np.int64)
        if self.used_k is not self.lengths_k:
            files["seqused-k"] = np.array(self.used_k, np.int32)
        for name in ("bias", "mask", "block-mask", "sink", "alibi", "q-offsets", "k-offsets", "wholes-q", "wholes-k",
                     "seqstart-k", "k-descale", "v-descale"):
            if name.replace("-", "_") in f:
                files[name] = f.get("bits", {}).get(name, f[name.replace("-", "_")])
        if self.backward:
            files["do"] = self.stored(self.joined(self.do, self.packed_q), "do")
            files["dlse"] = np.concatenate(self.dlse, 1) if self.packed_q else np.stack(self.dlse)
        return files

    def options(self):
        f, words = self.features, ["--layout", self.layout, "--dtype", self.dtype]
        if f.get("causal"):
            words.append("--causal")
        words += ["--" + name.replace("_", "-") for name in ("deterministic", "batch_invariant", "checked", "alibi_bias")
                  if f.get(name)]
        for name in ("anchor", "scale", "softcap", "dropout", "seed", "offset", "q_offset", "k_offset", "whole_q",
                     "whole_k", "batch_offset", "head_offset", "dtype_o", "dtype_kv", "dtype_v", "dtype_bias",
                     "pointer_alignment"):
            if name in f:
                words += ["--" + name.replace("_", "-"), str(f[name])]
        for name in ("window", "block_size"):
            if name in f:
                words.append("--%s=%d,%d" % (name.replace("_", "-"), *f[name]))
        return words

    def outputs(self):
        if not self.backward:
            return ["o", "lse", "scores", "probabilities"]
        return ["o", "lse", "scores", "probabilities", "dq", "dk", "dv"] + ["dbias"] * ("bias" in self.features) + \
            ["dsink"] * ("sink" in self.features)

    # -- what it must give ----------------------------------------------------------------------

    def pairs(self, name, b, sq, sk):
        """Bias or mask of sequence b as (Hq, sq, sk)."""
        whole = np.broadcast_to(self.features[name], (self.b, self.hq, self.sq, self.sk))
        return whole[b, :, :sq, :sk].astype(np.float64 if name == "bias" else bool)

    def expected(self):
        f, results = self.features, {name: [] for name in self.outputs()}
        ahead, above = f.get("batch_offset", 0), f.get("head_offset", 0)
        z = dropout(f["dropout"], f.get("seed", 0), f.get("offset", 0), ahead + self.b, above + self.hq, self.sq, self.sk,
                    f.get("q_offset", 0), f.get("k_offset", 0))[ahead:, above:] if "dropout" in f else None
        place = lambda array, scalar, b, preset: f[array][b] if array in f else f.get(scalar, preset)
        for b in range(self.b):
            sq, sk = self.used_q[b], self.used_k[b]
            corner = place("wholes_k", "whole_k", b, sk) - place("wholes_q", "whole_q", b, sq)
            off = (0 if f.get("anchor") == "top-left" else corner) + \
                place("q_offsets", "q_offset", b, 0) - place("k_offsets", "k_offset", b, 0)
            heads = lambda x, n: x[b][:n].swapaxes(0, 1)
            mask = self.pairs("mask", b, sq, sk) if "mask" in f else True
            if "block_mask" in f:
                m, n = f["block_size"]
                i, j = np.arange(sq) // m, np.arange(sk) // n
                blocks = np.broadcast_to(f["block_mask"], (self.b, self.hq, -(-self.sq // m), -(-self.sk // n)))
                mask = mask & (blocks[b][:, i][:, :, j] != 0)
            if "seqstart_k" in f:
                mask = mask & (np.arange(sk) >= f["seqstart_k"][b])
            slopes = np.broadcast_to(f["alibi"], (self.b, self.hq))[b] if "alibi" in f else None
            descaled = lambda x, name: x * np.broadcast_to(f.get(name, 1.0), (self.b, self.hk))[b, :, None, None]
            o, lse, grads = attend(
                heads(self.q, sq), descaled(heads(self.k, sk), "k_descale"), descaled(heads(self.v, sk), "v_descale"), off=off, causal=f.get("causal", False),
                window=f.get("window", (-1, -1)), scale=f.get("scale"), softcap=f.get("softcap"),
                bias=self.pairs("bias", b, sq, sk) if "bias" in f else 0.0, mask=mask, slopes=slopes,
                alibi_bias=f.get("alibi_bias", False), sink=f.get("sink"), z=1.0 if z is None else z[b, :, :sq, :sk],
                do=heads(self.do, sq) if self.backward else None,
                dlse=self.dlse[b][:, :sq].astype(np.float64) if self.backward else None)
            grads.update(o=o, lse=lse)
            for name in results:
                results[name].append(grads[name])
        return results

    def whole(self, name, parts):
        """The parts of an expected output as one array like the file's, with 0 elsewhere."""
        if name == "dsink":
            return sum(parts)
        if name in ("dbias", "scores", "probabilities"):
            keys = -(-self.sk // self.page) * self.page if self.page and not self.packed_k else self.sk
            full = np.zeros((self.b, self.hq, self.sq, keys))
            for b, part in enumerate(parts):
                start = self.features["seqstart_k"][b] if "seqstart_k" in self.features else 0
                full[b, :, :part.shape[1], start:part.shape[2]] = part[:, :, start:]
            if name != "dbias":
                return full
            shape = self.features["bias"].shape
            lead = (1,) * (4 - len(shape)) + shape
            axes = tuple(n for n in range(4) if lead[n] == 1)
            return full.sum(axes, keepdims=True).reshape(shape)
        lengths = self.lengths_k if name in ("dk", "dv") else self.lengths_q
        packed = self.packed_k if name in ("dk", "dv") else self.packed_q
        padded = []
        for part, n in zip(parts, lengths):
            room = np.zeros((part.shape[0], n) + part.shape[2:])
            room[:, :part.shape[1]] = part
            padded.append(room)
        if name == "lse":
            return np.concatenate(padded, 1) if packed else np.stack(padded)
        return self.joined([p.swapaxes(0, 1) for p in padded], packed)


def bf16_bits(x):
    """Rounds to nearest even; only padding contains NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


# The number of each code of e4m3: 4 bits of exponent, 3 of fraction, no infinity.
E4M3 = np.array([(1 - code // 128 * 2) * (code % 8 / 8 + (code // 8 % 16 > 0)) * 2.0 ** (max(code // 8 % 16, 1) - 7)
                 if code % 128 < 127 else np.nan for code in range(256)])


def e4m3_codes(x):
    """The nearest, of two the even one; only padding contains NaN."""
    size = np.where(np.isnan(x), 0, abs(x))
    above = np.searchsorted(E4M3[:127], size).clip(1, 126)
    low, high = size - E4M3[above - 1], E4M3[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return np.where(np.isnan(x), 127, code + 128 * np.signbit(x)).astype(np.uint8)


def read_back(path, types, name):
    """The array as float64; None where it has another type than it should."""
    array = np.load(path)
    kinds = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": np.uint16}
    if array.dtype != kinds[types.get(name, "f64" if types["q"] == "f64" else "f32")]:
        return None
    if types.get(name) == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def close(ours, theirs, tolerance):
    """The largest error relative to its tolerance; infinities must agree."""
    if ours is None or ours.shape != theirs.shape:
        return np.inf
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite]):
        return np.inf
    if not finite.any():
        return 0.0
    bound = tolerance * max(1.0, abs(theirs[finite]).max())
    error = abs(ours[finite] - theirs[finite]).max()
    return error / bound if error == error else np.inf


def run(tool, folder, case, device):
    path = lambda name: os.path.join(folder, name + ".npy")
    words = [tool, "run", "--device", device, *case.options()]
    for name, array in case.arrays().items():
        np.save(path(name), array)
        words += ["--" + name, path(name)]
    if case.backward:
        words.append("--backward")
    for name in case.outputs():
        words += ["--" + name, path("out-" + name)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        print("#", " ".join(words))
        print("# exit", ran.returncode, ran.stderr.strip())
        return False
    fine = True
    expected = case.expected()
    for name in case.outputs():
        mixed = len({case.types[tensor] for tensor in "qkv"}) > 1  # computed as f32
        tolerance = TOLERANCE[case.types.get(name, "f32") if mixed else case.dtype] * (1 if name in ("o", "lse", "scores", "probabilities") else GRADIENT)
        worst = close(read_back(path("out-" + name), case.types, name), case.whole(name, expected[name]), tolerance)
        if not worst <= 1:
            print(f"# {name}: error is {worst:.3g} times what is allowed")
            fine = False
        os.remove(path("out-" + name))
    return fine


def cases():
    rng = np.random.default_rng(1)
    real = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    some = lambda *shape: rng.random(shape) < 0.7
    plain = [
        ("MHA", {}),
        ("GQA", dict(hq=6, hk=2)),
        ("MQA", dict(hq=5, hk=1)),
        ("Dv above D", dict(d=16, dv=40)),
        ("Dv below D", dict(d=40, dv=1)),
        ("causal, bottom-right, Sq < Sk", dict(causal=True)),
        ("causal, bottom-right, Sq > Sk: empty rows", dict(causal=True, sq=53, sk=20)),
        ("causal, top-left", dict(causal=True, anchor="top-left")),
        ("window", dict(window=(5, 3))),
        ("window to the left, top-left", dict(window=(4, -1), anchor="top-left")),
        ("window with causal", dict(window=(7, 9), causal=True)),
        ("scale", dict(scale=-0.3)),
        ("softcap", dict(softcap=1.5, scale=0.7)),
        ("bias of all axes", dict(bias=real(2, 4, 37, 53))),
        ("bias without leading axes", dict(bias=real(37, 53))),
        ("bias with axes of length 1", dict(bias=real(2, 1, 1, 53))),
        ("bias of a scalar", dict(bias=real())),
        ("bias in f64", dict(bias=real(4, 1, 53).astype(np.float64))),
        ("mask of all axes, bool", dict(mask=some(2, 4, 37, 53))),
        ("mask of keys, u8", dict(mask=some(2, 1, 1, 53).astype(np.uint8) * 7)),
        ("block mask", dict(block_mask=some(4, 5, 4), block_size=(8, 16))),
        ("sink", dict(sink=real(4))),
        ("ALiBi", dict(alibi=abs(real(4)))),
        ("ALiBi per batch entry, causal", dict(alibi=abs(real(2, 4)), causal=True)),
        ("slopes times a bias", dict(alibi=real(4), bias=np.where(some(37, 53), real(37, 53), -np.inf), alibi_bias=True)),
        ("padded on the left", dict(seqstart_k=np.array([7, 30], np.int32), causal=True, bias=real(2, 1, 37, 53))),
        ("dropout", dict(dropout=0.3, seed=12345678901234, offset=2 ** 33 + 5)),
        ("positions", dict(causal=True, q_offset=3, k_offset=16, dropout=0.5, seed=4)),
        ("a shard of a longer sequence", dict(causal=True, q_offset=30, k_offset=16, whole_q=90, whole_k=110)),
        ("shards of their own", dict(window=(9, 4), q_offsets=np.array([4, 11]), k_offsets=np.array([0, 7], np.int32),
                                     wholes_q=np.array([60, 48], np.uint8), wholes_k=np.array([70, 66]))),
        ("dropout of a shard", dict(dropout=0.4, seed=7, batch_offset=3, head_offset=2)),
        ("checked lengths", dict(used_k=[9, 53], checked=True)),
        ("pointers of little alignment", dict(pointer_alignment=4, causal=True)),
        ("bhsd", dict(layout="bhsd", hq=6, hk=3, dv=8)),
        ("everything", dict(causal=True, window=(30, -1), softcap=2.0, bias=real(4, 1, 53), mask=some(2, 1, 37, 53),
                            sink=real(4), alibi=abs(real(4)), dropout=0.25, hk=2, dv=17)),
        ("varlen", dict(lengths_q=[5, 0, 33, 1], lengths_k=[9, 4, 64, 0], hq=4, hk=2)),
        ("varlen, causal, bhsd", dict(lengths_q=[5, 17, 33], lengths_k=[9, 40, 20], causal=True, layout="bhsd")),
        ("varlen queries, dense keys", dict(lengths_q=[5, 17], sk=30)),
        ("varlen with seqused and bias", dict(lengths_q=[8, 17], lengths_k=[9, 40], used_q=[6, 0], used_k=[9, 13],
                                              bias=real(1, 4, 17, 40))),
        ("seqused", dict(used_q=[37, 11], used_k=[3, 53], causal=True)),
        ("one row and one key", dict(sq=1, sk=1)),
        ("no keys", dict(sk=0)),
        ("no rows", dict(sq=0)),
    ]
    for name, settings in plain:
        yield Case(name, **settings)
        yield Case(name + ", backward", backward=True, **settings)
    for name, settings in [("paged", dict(page=16, used_k=[53, 20])), ("paged, bhsd", dict(page=7, layout="bhsd", hk=2, sk=49)),
                           ("paged, lengths of varlen", dict(page=16, lengths_q=[5, 17], lengths_k=[9, 40], causal=True,
                                                             mask=some(2, 1, 17, 40)))]:
        yield Case(name, **settings)
    bias = bf16_bits(real(37, 53))
    mixed = [("f32 with a bf16 cache", dict(dtype_kv="bf16", hk=2, causal=True)),
             ("f16 with values in f32", dict(dtype="f16", dtype_v="f32")),
             ("three types", dict(dtype_kv="f16", dtype_v="bf16", page=16, used_k=[53, 20]))]
    mixed += [("a cache in e4m3", dict(dtype_kv="e4m3", hk=2, causal=True)),
              ("f16 with values in e4m3", dict(dtype="f16", dtype_v="e4m3")),
              ("a paged cache in e4m3 with factors of heads", dict(
                  dtype_kv="e4m3", hk=2, page=16, used_k=[53, 20], k_descale=np.array([0.3, 2], np.float32),
                  v_descale=np.array([-1.5, 0.7]))),
              ("with factors of sequences and heads", dict(
                  dtype="bf16", dtype_kv="e4m3", k_descale=np.linspace(0.1, 1, 8, dtype=np.float32).reshape(2, 4),
                  v_descale=np.linspace(2, -1, 8, dtype=np.float32).reshape(2, 4))),
              ("with one factor each", dict(k_descale=np.float32(0.25), v_descale=np.float32(3)))]
    for name, settings in mixed:
        yield Case(name, **settings)
    yield Case("f32 with a bias of bf16 bits", bias=(bias.astype(np.uint32) << 16).view(np.float32), bits=dict(bias=bias),
               dtype_bias="bf16")
    yield Case("batch invariant", batch_invariant=True)
    yield Case("deterministic", deterministic=True, backward=True)
    for dtype in ("f16", "bf16"):
        yield Case(dtype + ", o in f32", dtype=dtype, dtype_o="f32")
        yield Case(dtype + ", o in f32, backward", dtype=dtype, dtype_o="f32", backward=True)
        yield Case(dtype, dtype=dtype, hk=2, causal=True)
        yield Case(dtype + ", backward", dtype=dtype, hk=2, causal=True, backward=True)


def test_conversions(tool, folder):
    """Files of any floating-point kind, byte order and storage order give the same result."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 9, 2, 8)).astype(np.float16) for _ in range(3))
    results = []
    for change in (lambda x: x, lambda x: x.astype(np.float64), lambda x: x.astype(">f4"), np.asfortranarray):
        for name, array in (("q", q), ("k", k), ("v", v)):
            np.save(os.path.join(folder, name + ".npy"), change(array))
        subprocess.run([tool, "run", "--dtype", "f32", "--device", "reference", "--o", "o.npy", "--q", "q.npy",
                        "--k", "k.npy", "--v", "v.npy"], cwd=folder, check=True)
        results.append(np.load(os.path.join(folder, "o.npy")))
    ok(all(np.array_equal(r, results[0]) and r.dtype == np.float32 for r in results),
       "f16, f64, big-endian and Fortran-order files give the same o")


def test_accumulate(tool, folder):
    """Gradients are added to the contents of their files, in f32."""
    rng = np.random.default_rng(4)
    for name in ("q", "k", "v", "do"):
        np.save(os.path.join(folder, name + ".npy"), rng.standard_normal((1, 9, 2, 8)).astype(np.float16))
    line = [tool, "run", "--device", "cpu", "--backward"]
    line += [word for name in ("q", "k", "v", "do", "dq", "dk") for word in ("--" + name, name + ".npy")]
    load = lambda name: np.load(os.path.join(folder, name + ".npy"))
    subprocess.run(line, cwd=folder, check=True)
    plain = {name: load(name) for name in ("dq", "dk")}
    before = {name: rng.standard_normal((1, 9, 2, 8)).astype(np.float32) for name in plain}
    for name, array in before.items():
        np.save(os.path.join(folder, name + ".npy"), array)
    subprocess.run(line + ["--accumulate"], cwd=folder, check=True)
    ok(all(load(name).dtype == np.float32 and np.allclose(load(name), before[name] + plain[name], atol=2e-3)
           and not np.allclose(load(name), before[name], atol=0.1) for name in plain), "gradients are added up")


def test_lse_alone(tool, folder):
    """lse may be all that is wanted."""
    ran = subprocess.run([tool, "run", "--device", "cpu", *"--q q.npy --k k.npy --v v.npy --lse lse.npy".split()],
                         cwd=folder, check=False)
    ok(ran.returncode == 0 and np.isfinite(np.load(os.path.join(folder, "lse.npy"))).all(), "lse without o")


def main():
    tool = os.path.abspath(sys.argv[1])
    devices = sys.argv[2:]
    if not devices:
        about = json.loads(subprocess.run([tool, "info", "--json"], capture_output=True, check=True).stdout)
        devices = [f"{b['name']}:{d['ordinal']}" for b in about["backends"] for d in b["devices"]]
    with tempfile.TemporaryDirectory() as folder:
        for device in devices:
            for case in cases():
                ok(run(tool, folder, case, device), f"{device}: {case.name}")
        ok(run(tool, folder, Case("three types, backward", dtype_kv="f16", dtype_v="bf16", backward=True), "reference"),
           "reference: three types, backward")
        ok(run(tool, folder, Case("f64", dtype="f64", causal=True, backward=True), "reference"), "reference: f64")
        test_conversions(tool, folder)
        test_accumulate(tool, folder)
        test_lse_alone(tool, folder)
    return checks.done()


if __name__ == "__main__":
    sys.exit(main())
