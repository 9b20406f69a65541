#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Measures two processes in network namespaces of their own, over a link of limited bandwidth with some delay: how well
transfers overlap with computation, and how accurate the forecast of `fattn explain --ranks` is.

    link.py FATTN [--repeat N] [--rows N] [--delay SECONDS] [--causal] [--schemes SCHEME ...] [--splits SPLIT ...]

Needs root, ip, tc, PyTorch with gloo, and two cores. PYTHONPATH and LD_LIBRARY_PATH must lead to fattn. `tc` sets the
bandwidth. A process that carries packets from one namespace to the other adds the delay, because many kernels have no
netem.

The link is measured by itself first. Then its bandwidth is set so that the transfer of the step with the largest
messages takes 1/4, 1/2, 1, 2 and 4 times as long as its computation. (Where ranks exchange heads, a step is a turn.)

A step lasts from the start of its messages on both ranks until they have come and its kernels are done. Its bound is the
larger of two times: that of its kernels in the same run, which other load on the machine lengthens too, and that of its
bytes on the link. Times are medians; the table shows the worst step. Exit status 1: a step takes more than 1.08 times its
bound, or a whole run is off its forecast by more than 15 %.
"""

import argparse
import collections
import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import re
import select
import statistics
import struct
import subprocess
import sys
import time
from datetime import timedelta

import fattn.torch
import torch
import torch.distributed as dist
from fattn.torch import _process_group
from fattn.torch import context_parallel

NAMES, DEVICES = ("fattn-a", "fattn-b"), ("fattn-ta", "fattn-tb")
ADDRESSES = ("10.77.99.1", "10.77.99.2")
RATIOS = (0.25, 0.5, 1, 2, 4)
DIM = 64  # f32
HEADS = {"ring": 4, "heads": 8}
STEP_MAX, FORECAST_MAX = 1.08, 0.15


# --- The link -------------------------------------------------------------------------------------


def sh(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, text=True)


def enter(name):
    """Moves this process into a network namespace."""
    with open(f"/run/netns/{name}", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def open_end(name, device):
    """A network device of a namespace whose packets this process reads and writes."""
    enter(name)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    iff_tun, iff_no_pi, tunsetiff = 1, 0x1000, 0x400454ca
    fcntl.ioctl(end, tunsetiff, struct.pack("16sH22x", device.encode(), iff_tun | iff_no_pi))
    return end


def carry(ends, delay):
    """Passes packets from each end to the other, `delay` seconds after they arrived."""
    under_way = {end: collections.deque() for end in ends}
    to = dict(zip(ends, reversed(ends)))
    while True:
        due = [packets[0][0] for packets in under_way.values() if packets]
        for end in select.select(ends, [], [], max(min(due) - time.monotonic(), 0) if due else None)[0]:
            under_way[end].append((time.monotonic() + delay, os.read(end, 65536)))
        now = time.monotonic()
        for end, packets in under_way.items():
            while packets and packets[0][0] <= now:
                with contextlib.suppress(OSError):  # the other end is not up yet
                    os.write(to[end], packets.popleft()[1])


class Link:
    def __init__(self, delay):
        self.delay, self.pid = delay, 0

    def __enter__(self):
        self.__exit__()
        for name in NAMES:
            sh("ip", "netns", "add", name)
        here, there = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ends = [open_end(*which) for which in zip(NAMES, DEVICES)]
                os.write(there, b".")
                carry(ends, self.delay)
            finally:
                os._exit(1)
        os.close(there)
        if not os.read(here, 1):
            sys.exit("link.py: no tun devices")
        for name, device, address in zip(NAMES, DEVICES, ADDRESSES):
            sh("ip", "-n", name, "addr", "add", address + "/24", "dev", device)
            sh("ip", "-n", name, "link", "set", device, "mtu", "32000", "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_):
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        for name in NAMES:
            sh("ip", "netns", "del", name, check=False)

    def limit(self, bits):
        for name, device in zip(NAMES, DEVICES):
            sh("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{bits:.0f}",
               "burst", "128kb", "latency", "2s")


# --- A rank ---------------------------------------------------------------------------------------


class Steps:
    """Records for each group of messages its bytes each way, and when it was started, waited for and done."""

    def __init__(self):
        self.noted = []
        start, wait, self.now = _process_group.ProcessGroup._start, _process_group.ProcessGroup._wait, None

        def started(transport, user, messages, count):
            sent = sum(m.bytes for m in messages[:count] if not m.receive)
            got = sum(m.bytes for m in messages[:count] if m.receive)
            self.now = [max(sent, got), time.perf_counter()]
            return start(transport, user, messages, count)

        def waited(transport, user, messages, count, seconds):
            self.now.append(time.perf_counter())
            status = wait(transport, user, messages, count, seconds)
            self.noted.append((*self.now, time.perf_counter()))
            return status

        _process_group.ProcessGroup._start, _process_group.ProcessGroup._wait = started, waited


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


def measure(steps, scheme, split, causal, backward, rows, repeat):
    """For each run its begin and end, and for each group of messages (bytes, started, waited for, done)."""
    over = fattn.torch.context_parallel(scheme=scheme, split=split)
    q, k, v = (torch.randn(1, rows, HEADS[scheme], DIM, requires_grad=backward) for _ in "qkv")
    runs = []
    for n in range(repeat + 1):
        if backward:
            o = over.attention(q, k, v, causal=causal)
        dist.barrier()
        steps.noted.clear()
        begin = time.perf_counter()
        if backward:
            torch.autograd.grad(o.sum(), (q, k, v))
        else:
            over.attention(q, k, v, causal=causal)
        if n:  # the first one plans
            runs.append((begin, time.perf_counter(), list(steps.noted)))
    return runs


def be_rank(rank, commands, answers):
    enter(NAMES[rank])
    with open("/proc/sys/net/ipv4/tcp_slow_start_after_idle", "w", encoding="ascii") as setting:
        setting.write("0")  # the ranks' connections stay as fast as they were while kernels run
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICES[rank]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29711", rank=rank, world_size=2,
                            timeout=timedelta(seconds=300))
    steps = Steps()
    for line in commands:
        what = json.loads(line)
        told = measure_link(rank, **what["link"]) if "link" in what else measure(steps, **what["run"])
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
    """Medians over runs on both ranks, which share a clock: (the worst step divided by its bound, seconds, seconds of
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


def beside_largest(told, size):
    """Seconds of the kernels that run during the largest messages, on the slower rank."""
    steps = collections.defaultdict(list)
    for pair in zip(*told):
        for n, both in enumerate(zip(*(noted for *_, noted in pair))):
            if both[0][0] == size:
                steps[n].append(max(waited - started for _, started, waited, _ in both))
    return max(map(statistics.median, steps.values()))


def most_flops(scheme, split, causal, backward, rows, **_):
    """The value of the rank with most work."""
    part = rows // 2
    runs = {"contiguous": [(r * rows, rows, 1) for r in range(2)], "striped": [(r, rows, 2) for r in range(2)]}
    pairs = [sum(first + stride * n + 1 for n in range(count)) for first, count, stride in runs.get(split, ())]
    pairs = pairs or [sum(first + n + 1 for first in (r * part, (3 - r) * part) for n in range(part)) for r in range(2)]
    if scheme == "heads":
        pairs = [sum(pairs) / 2]
    return 4 * DIM * HEADS[scheme] * (max(pairs) if causal else 2 * rows * rows) * (2.5 if backward else 1)


def forecast(fattn_program, link, rate, scheme, split, causal, backward, rows, **_):
    words = [fattn_program, "explain", "--dir", "bwd" if backward else "fwd", "--sq", 2 * rows, "--sk", 2 * rows,
             "--hq", HEADS[scheme], "--d", DIM, "--ranks", 2, "--split", split, "--scheme", scheme, "--rate", f"{rate:g}",
             "--link", f"{link[0]:g},{link[1]:g}"] + ["--causal"] * causal + ["--saves"] * backward
    said = sh(*map(str, words)).stdout
    return float(re.search(r"forecast +([\d.e+-]+) s", said)[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("fattn")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--rows", type=int, default=1536, help="of a rank")
    parser.add_argument("--delay", type=float, default=1e-3)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--schemes", nargs="*", default=["ring", "heads"])
    parser.add_argument("--splits", nargs="*", default=["contiguous"])
    options = parser.parse_args()
    if os.geteuid():
        sys.exit("link.py: needs root")
    assert context_parallel  # imported before there are processes
    bad = False
    with Link(options.delay) as link:
        link.limit(4e9)
        ranks = Ranks()
        print(f"bandwidth set by tc, {1e3 * options.delay:g} ms of delay each way, gloo, f32, {options.rows} rows a rank, "
              f"{'causal, ' * options.causal}{HEADS['ring']} heads of {DIM} in a ring and {HEADS['heads']} exchanged")
        print(f"{'':28} {'link':>10} {'latency':>7} {'transfer/':>9} {'step/':>7} {'whole':>9} {'larger of':>9} {'forecast':>9}")
        print(f"{'':28} {'MB/s':>10} {'ms':>7} {'computing':>9} {'bound':>7} {'ms':>9} {'both, ms':>9} {'off by':>9}")
        for scheme, split, backward in itertools.product(options.schemes, options.splits, (False, True)):
            what = dict(scheme=scheme, split=split, causal=options.causal, backward=backward, rows=options.rows,
                        repeat=options.repeat)
            free = ranks.do(run=what)
            size = max(group[0] for group in free[0][0][2])
            computing = beside_largest(free, size)
            for ratio in RATIOS:
                link.limit(8 * size / (ratio * computing))
                speed = ranks.do(link={"size": size})[0]
                worst, seconds, busy, transfers = judge(ranks.do(run=what), speed)
                off = seconds / forecast(options.fattn, speed, most_flops(**what) / busy, **what) - 1
                bad |= worst > STEP_MAX or abs(off) > FORECAST_MAX
                name = f"{scheme}, {split}, {'backward' if backward else 'forward'}"
                print(f"{name:28} {speed[0] / 1e6:10.1f} {1e3 * speed[1]:7.2f} "
                      f"{(size / speed[0] + speed[1]) / computing:9.2f} {worst:7.3f} {1e3 * seconds:9.1f} "
                      f"{1e3 * max(busy, transfers):9.1f} {100 * off:+8.1f}%", flush=True)
        ranks.end()
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
