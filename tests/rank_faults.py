#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A rank fails, and the others return an error in time: as a TAP program.

    rank_faults.py TRIALS PACKAGE LIBRARY FAULT_THREADS [FAULT_MPI MPIEXEC]

Three ranks, of which the last is killed, stopped, cut off from the next one, cannot compute, or has another problem: at
every group of messages of a forward and of a backward. The transports are threads, MPI where it can start processes that
outlive each other (Open MPI), and gloo where PyTorch is installed. All survivors have to return within the timeout, with
an error, or with right results where they needed nothing more of that rank. A rank that cannot compute has to return
itself, long before the timeout.
"""

import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

import checks
from checks import ok
from mpi_ranks import ENVIRONMENT

RANKS, GROUPS, TIMEOUT = 3, 6, 0.5
SLACK = 3  # of a busy machine
PATIENCE = 30  # where no rank falls silent, so that a busy machine does not look like one
AT_ONCE = 10  # of a busy machine, where nobody waits
OUTCOME = re.compile(r"rank (\d) status (\d+) after ([\d.]+) (\w+): (.*)")
DISAGREE = 62


def survivors(kind):
    """How many ranks have to return, the first ones."""
    return RANKS if kind == "compute" else RANKS - 1


def outcomes(kind, text):
    """What survivors said: {rank: (status, seconds, word, reason)}."""
    return {int(rank): (int(status), float(seconds), word, reason)
            for rank, status, seconds, word, reason in OUTCOME.findall(text) if int(rank) < survivors(kind)}


def fails_early(kind, group, backward):
    """Whether the last rank fails before all of its messages are done: two groups compare plans; a forward then has two
    more, a backward four."""
    return kind != "other" and group < (6 if backward else 4)


def timeout_of(kind, group, backward):
    return TIMEOUT if kind != "compute" and fails_early(kind, group, backward) else PATIENCE


def read_until_told(kind, pipe, seconds):
    """Lines, until all survivors have told, the end of the file, or of time."""
    text, end = b"", time.monotonic() + seconds
    while len(outcomes(kind, text.decode())) < survivors(kind) and time.monotonic() < end:
        if select.select([pipe], [], [], end - time.monotonic())[0]:
            got = os.read(pipe, 65536)
            if not got:
                break
            text += got
    return text.decode()


def kill(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Program:
    """A transport that is a program of its own."""

    def __init__(self, command, kinds, environment):
        self.command, self.kinds, self.environment = command, kinds, {**os.environ, **environment}

    def run(self, kind, group, backward):
        words = [*self.command, kind, str(group), str(timeout_of(kind, group, backward)), str(int(backward))]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              env=self.environment) as process:
            text = read_until_told(kind, process.stdout.fileno(), 2 * PATIENCE)
            kill([int(pid) for pid in re.findall(r"rank \d pid (\d+)", text)])
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        return text


class Gloo:
    """Forked processes: PyTorch is imported once."""

    kinds = ("die", "stop", "cut", "other")

    def __init__(self, package):
        sys.path.insert(0, package)
        import torch
        import torch.distributed
        import fattn.torch
        self.torch, self.attention = torch, fattn.torch.attention
        self.transport = __import__("fattn.torch._process_group", fromlist=["x"])
        self.over = fattn.torch.context_parallel  # imported before there are processes
        if not torch.distributed.is_gloo_available():
            raise ImportError("no gloo")

    def run(self, kind, group, backward):
        with tempfile.TemporaryDirectory() as folder:
            return self.run_ranks(os.path.join(folder, "meet"), kind, group, backward)

    def run_ranks(self, meet, *fault):
        here, there = os.pipe()
        pids = []
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                os.dup2(there, 1)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                try:
                    self.run_rank(rank, meet, *fault)
                finally:
                    os._exit(0)
            pids.append(pid)
        os.close(there)
        text = read_until_told(fault[0], here, 2 * PATIENCE)
        os.close(here)
        kill(pids)
        for pid in pids:
            os.waitpid(pid, 0)
        return text

    def run_rank(self, rank, meet, kind, group, backward):
        from datetime import timedelta
        torch, dist = self.torch, self.torch.distributed
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS,
                                timeout=timedelta(seconds=PATIENCE))
        torch.manual_seed(1)
        whole = [torch.randn(1, 12, 2, 8, requires_grad=True) for _ in "qkv"]
        o = self.attention(*whole, causal=True)
        o.sum().backward()
        timeout = timeout_of(kind, group, backward)
        over = self.over(timeout=timeout)
        shares = [over.shard(t.detach(), 1).requires_grad_() for t in whole]
        scale = None
        if backward and kind != "other":
            over.timeout = PATIENCE  # this forward is no part of the trial
            made = over.attention(*shares, causal=True)
            over.timeout = timeout
        dist.barrier()
        if rank == RANKS - 1 and kind == "other":
            scale = 0.77
        elif rank == RANKS - 1:
            self.break_transport(over, kind, group)
        begin, status, right, text = time.monotonic(), 0, True, ""
        try:
            if backward and kind != "other":
                made.sum().backward()
                right = all(torch.allclose(a.grad, over.shard(b.grad, 1), 1e-4, 1e-5) for a, b in zip(shares, whole))
            else:
                made = over.attention(*shares, causal=True, scale=scale)
                right = torch.allclose(made, over.shard(o, 1), 1e-4, 1e-5)
        except Exception as error:
            status, text = getattr(error, "status", -1), str(error)
        seconds = time.monotonic() - begin
        os.write(1, f"rank {rank} status {status} after {seconds:.3f} {'fine' if right else 'WRONG'}: {text}\n".encode())
        time.sleep(60)

    def break_transport(self, over, kind, group):
        """The last rank's transport, from its group-th group of messages on."""
        transport = over._transport(self.torch.device("cpu"))
        begin, finish, finished = transport._begin, transport.finish, [0]

        class Never:
            @staticmethod
            def wait(seconds):
                time.sleep(seconds.total_seconds())
                raise RuntimeError("Timed out")

        def begin_or_break(message, whom, data):
            if finished[0] == group and kind != "cut":
                os.kill(os.getpid(), signal.SIGKILL if kind == "die" else signal.SIGSTOP)
            if finished[0] >= group and message.peer == (transport.rank + 1) % RANKS:
                return Never()
            return begin(message, whom, data)

        def finish_and_count(works, seconds):
            finish(works, seconds)
            finished[0] += 1

        transport._begin, transport.finish = begin_or_break, finish_and_count


def judge(kind, group, backward, text):
    """What is wrong with what survivors said; None if nothing is."""
    told = outcomes(kind, text)
    most = AT_ONCE if kind == "compute" else timeout_of(kind, group, backward) + SLACK
    for rank in range(survivors(kind)):
        if rank not in told:
            return f"rank {rank} hangs or died"
        status, seconds, word, reason = told[rank]
        if word != "fine":
            return f"rank {rank} has wrong results"
        if seconds > most:
            return f"rank {rank} took {seconds} s"
        if kind == "other" and status != DISAGREE:
            return f"rank {rank} does not see that problems differ: {status} {reason}"
        if status not in (0, 60, 61, 62):
            return f"rank {rank} has status {status}: {reason}"
    expected = kind == "other" or fails_early(kind, group, backward)
    return None if expected == any(status for status, *_ in told.values()) else f"errors: {told}"


def mpi_survives(mpiexec):
    """Whether processes outlive each other: with Open MPI's --enable-recovery."""
    try:
        version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False)
        started = subprocess.run([mpiexec, "--enable-recovery", "-n", "3", "true"], capture_output=True, timeout=60,
                                 env={**os.environ, **ENVIRONMENT}, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return re.search("Open MPI|OpenRTE", version.stdout) is not None and started.returncode == 0


def main(trials, package, library, fault_threads, fault_mpi=None, mpiexec=None):
    if os.environ.get("LD_LIBRARY_PATH") != library:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_LIBRARY_PATH": library})
    transports = {"threads": Program([fault_threads], ("stop", "cut", "compute", "other"), {})}
    if fault_mpi and mpi_survives(mpiexec):
        transports["MPI"] = Program([mpiexec, "--enable-recovery", "-n", str(RANKS), fault_mpi],
                                 ("die", "stop", "cut", "compute", "other"), ENVIRONMENT)
    try:
        transports["gloo"] = Gloo(package)
    except ImportError as error:
        print(f"# no gloo: {error}")
    cases = [(name, kind, group, backward) for name, transport in transports.items() for kind in transport.kinds
             for group in range(GROUPS) for backward in (False, True) if kind != "other" or group == 0]
    random.Random(1).shuffle(cases)
    cases = [cases[n % len(cases)] for n in range(int(trials))]
    for name in transports:
        bad, count, failed, slowest = [], 0, 0, 0.0
        for transport, kind, group, backward in cases:
            if transport != name:
                continue
            text = transports[name].run(kind, group, backward)
            told = outcomes(kind, text).values()
            wrong = judge(kind, group, backward, text)
            count += 1
            failed += any(status for status, *_ in told)
            slowest = max([slowest] + [seconds for _, seconds, *_ in told])
            if wrong:
                bad.append((kind, group, backward, wrong))
                print("#", name, kind, group, "backward" if backward else "forward", wrong)
        ok(not bad and failed > 0, f"{name}: {count - len(bad)} of {count} trials, {failed} of them with errors, "
                                   f"the slowest after {slowest:.2f} s")
    return checks.done()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
