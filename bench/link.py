#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Two processes in network namespaces of their own, with a link whose bandwidth `tc` sets: how well transfers pass beside
computation, and how close the forecast of `fattn explain --ranks` comes.

    link.py FATTN [--repeat N] [--schemes SCHEME ...]

Needs root, ip and tc, PyTorch with gloo, and two cores: PYTHONPATH and LD_LIBRARY_PATH lead to fattn. Where the kernel
has netem the link also has a delay of 1 ms.

The link is measured by itself first. Then its bandwidth is set so that a step's transfer takes 1/4, 1/2, 1, 2 and 4 times
as long as its computation: of the step with the largest messages, which of heads are an exchange of a turn. A step lasts from the start of its messages on both ranks until they have come and its kernels are
done; its bound is the larger of the time that kernels took then and there, which other load on the machine lengthens too,
and of the time that its bytes take on the link. Medians, of which the worst step's is shown. Exit status 1: a step above 1.08 of its
bound, or a whole run off its forecast by more than 15 %.
"""

import argparse
import ctypes
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from datetime import timedelta

import fattn.torch
import torch
import torch.distributed as dist
from fattn.torch import _process_group as engines
from fattn.torch import context_parallel

NAMES, ADDRESSES = ("fattn-a", "fattn-b"), ("10.77.99.1", "10.77.99.2")
RATIOS = (0.25, 0.5, 1, 2, 4)
ROWS, DIM = 1536, 64  # of a rank; f32
HEADS = {"ring": 4, "heads": 8}
STEP_MAX, FORECAST_MAX = 1.08, 0.15


# --- The link -------------------------------------------------------------------------------------


def sh(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, text=True)


class Link:
    def __enter__(self):
        self.__exit__()
        for name in NAMES:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", "fattn-va", "type", "veth", "peer", "name", "fattn-vb")
        for name, device, address in zip(NAMES, ("fattn-va", "fattn-vb"), ADDRESSES):
            sh("ip", "link", "set", device, "netns", name)
            sh("ip", "-n", name, "addr", "add", address + "/24", "dev", device)
            sh("ip", "-n", name, "link", "set", device, "mtu", "9000", "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")
        self.netem = sh("tc", "-n", NAMES[0], "qdisc", "add", "dev", "fattn-va", "root", "netem", "delay", "1ms",
                        check=False).returncode == 0
        return self

    def __exit__(self, *_):
        for name in NAMES:
            sh("ip", "netns", "del", name, check=False)

    def limit(self, bits):
        for name, device in zip(NAMES, ("fattn-va", "fattn-vb")):
            how = (["netem", "rate", f"{bits:.0f}", "delay", "1ms", "limit", "100000"] if self.netem else
                   ["tbf", "rate", f"{bits:.0f}", "burst", "128kb", "latency", "2s"])
            sh("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *how)


# --- A rank ---------------------------------------------------------------------------------------


class Steps:
    """Notes for each group of messages: bytes each way, and when it was started, waited for and done."""

    def __init__(self):
        self.noted = []
        start, wait, self.now = engines.ProcessGroup._start, engines.ProcessGroup._wait, None

        def started(engine, user, messages, count):
            sent = sum(m.bytes for m in messages[:count] if not m.receive)
            got = sum(m.bytes for m in messages[:count] if m.receive)
            self.now = [max(sent, got), time.perf_counter()]
            return start(engine, user, messages, count)

        def waited(engine, user, messages, count, seconds):
            self.now.append(time.perf_counter())
            status = wait(engine, user, messages, count, seconds)
            self.noted.append((*self.now, time.perf_counter()))
            return status

        engines.ProcessGroup._start, engines.ProcessGroup._wait = started, waited


def measure_link(rank, size):
    """(bandwidth, latency) with both directions in use."""
    def exchange(bytes_):
        out, into = torch.zeros(bytes_, dtype=torch.uint8), torch.zeros(bytes_, dtype=torch.uint8)
        dist.barrier()
        begin = time.perf_counter()
        for work in (dist.irecv(into, 1 - rank, tag=1), dist.isend(out, 1 - rank, tag=1)):
            work.wait()
        return time.perf_counter() - begin
    small = statistics.median(exchange(64) for _ in range(9))
    # tbf lets 128 kB pass at once after a rest. Messages of a run follow each other, and have no such rest.
    once, four = (statistics.median(exchange(n * size) for _ in range(3)) for n in (1, 4))
    return 3 * size / max(four - once, 1e-9), small


def measure(steps, scheme, backward, repeat):
    """Each run: its begin and end, and of each group of messages (bytes, started, waited for, done)."""
    over = fattn.torch.context_parallel(scheme=scheme, split="contiguous")
    q, k, v = (torch.randn(1, ROWS, HEADS[scheme], DIM, requires_grad=backward) for _ in "qkv")
    runs = []
    for n in range(repeat + 1):
        if backward:
            o = over.attention(q, k, v)
        dist.barrier()
        steps.noted.clear()
        begin = time.perf_counter()
        if backward:
            torch.autograd.grad(o.sum(), (q, k, v))
        else:
            over.attention(q, k, v)
        if n:  # the first one plans
            runs.append((begin, time.perf_counter(), list(steps.noted)))
    return runs


def be_rank(rank, commands, answers):
    with open(f"/run/netns/{NAMES[rank]}", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "fattn-v" + "ab"[rank]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29711", rank=rank, world_size=2,
                            timeout=timedelta(seconds=300))
    steps = Steps()
    for line in commands:
        what = json.loads(line)
        told = (measure_link(rank, what["size"]) if what["do"] == "link" else
                measure(steps, what["scheme"], what["backward"], what["repeat"]))
        answers.write(json.dumps(told) + "\n")
        answers.flush()


class Ranks:
    def __init__(self):
        self.pipes, self.pids = [], []
        for rank in range(2):
            to_child, to_parent = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.close(to_child[1])
                    be_rank(rank, os.fdopen(to_child[0]), os.fdopen(to_parent[1], "w"))
                finally:
                    os._exit(0)
            os.close(to_child[0])
            os.close(to_parent[1])
            self.pids.append(pid)
            self.pipes.append((os.fdopen(to_child[1], "w"), os.fdopen(to_parent[0])))

    def do(self, **what):
        for to, _ in self.pipes:
            to.write(json.dumps(what) + "\n")
            to.flush()
        return [json.loads(back.readline()) for _, back in self.pipes]

    def end(self):
        for pid in self.pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


# --- The act --------------------------------------------------------------------------------------


def judge(told, link):
    """Medians over runs on both ranks, whose clock is one: (the worst step over its bound, seconds, seconds of
    computing, seconds of transfers)."""
    seconds, busy, transfers, worst = [], [], [], []
    for pair in zip(*told):
        seconds.append(max(end for _, end, _ in pair) - max(begin for begin, *_ in pair))
        busy.append(max(end - begin - sum(done - waited for *_, waited, done in noted) for begin, end, noted in pair))
        ratios, moved = [], 0
        for both in zip(*(noted for *_, noted in pair)):
            begin, end = max(started for _, started, *_ in both), max(done for *_, done in both)
            transfer = both[0][0] / link[0] + link[1]
            ratios.append((end - begin) / max(transfer, *(waited - started for _, started, waited, _ in both)))
            moved += transfer
        transfers.append(moved)
        worst.append(ratios)
    worst = max(statistics.median(step) for step in zip(*worst))
    return worst, *map(statistics.median, (seconds, busy, transfers))


def forecast(fattn_program, scheme, backward, rate, link):
    words = [fattn_program, "explain", "--dir", "bwd" if backward else "fwd", "--sq", 2 * ROWS, "--sk", 2 * ROWS,
             "--hq", HEADS[scheme], "--d", DIM, "--ranks", 2, "--split", "contiguous", "--scheme", scheme, "--rate", f"{rate:g}",
             "--link", f"{link[0]:g},{link[1]:g}"]
    said = sh(*map(str, words)).stdout
    return float(re.search(r"forecast +([\d.e+-]+) s", said)[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("fattn")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--schemes", nargs="*", default=["ring", "heads"])
    options = parser.parse_args()
    if os.geteuid():
        sys.exit("link.py: needs root")
    assert context_parallel  # imported before there are processes
    bad = False
    with Link() as link:
        link.limit(4e9)
        ranks = Ranks()
        print(f"a link set by tc ({'netem, 1 ms' if link.netem else 'tbf; no netem here, so no delay'}), gloo, f32, "
              f"{ROWS} rows a rank, {HEADS['ring']} heads of {DIM} in a ring and {HEADS['heads']} exchanged")
        print(f"{'':22} {'link':>10} {'transfer/':>9} {'step/':>7} {'whole':>9} {'larger of':>9} {'forecast':>9}")
        print(f"{'':22} {'MB/s':>10} {'computing':>9} {'bound':>7} {'ms':>9} {'both, ms':>9} {'off by':>9}")
        for scheme, backward in ((s, b) for s in options.schemes for b in (False, True)):
            flops = 4 * DIM * HEADS[scheme] * ROWS * 2 * ROWS * (2.5 if backward else 1)
            free = ranks.do(do="run", scheme=scheme, backward=backward, repeat=options.repeat)
            size = max(group[0] for group in free[0][0][2])
            # What is beside those bytes; of a ring's backward nothing is beside gradients that go home.
            computing = max(statistics.median(w - s for run in free[0] for n, s, w, _ in run[2] if n == size),
                            judge(free, (4e9 / 8, 1e-3))[2] / 4)
            for ratio in RATIOS:
                link.limit(8 * size / (ratio * computing))
                speed = ranks.do(do="link", size=size)[0]
                told = ranks.do(do="run", scheme=scheme, backward=backward, repeat=options.repeat)
                worst, seconds, busy, transfers = judge(told, speed)
                off = seconds / forecast(options.fattn, scheme, backward, flops / busy, speed) - 1
                bad |= worst > STEP_MAX or abs(off) > FORECAST_MAX
                print(f"{scheme + (', backward' if backward else ', forward'):22} {speed[0] / 1e6:10.1f} "
                      f"{(size / speed[0] + speed[1]) / computing:9.2f} {worst:7.3f} {1e3 * seconds:9.1f} "
                      f"{1e3 * max(busy, transfers):9.1f} {100 * off:+8.1f}%", flush=True)
        ranks.end()
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
