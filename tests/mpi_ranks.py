#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a TAP program on several ranks of MPI, as a TAP program.

    mpi_ranks.py MPIEXEC RANKS[,RANKS ...] SECONDS PROGRAM [ARGUMENT ...]

The program is ended after so many seconds on each number of ranks. Ranks may share processors. Skipped where MPIEXEC
cannot start processes: many sandboxes and containers do not let it.
"""

import os
import signal
import subprocess
import sys
import tempfile

import checks
from checks import ok

# Of this test alone: Open MPI fails where two launches make its folder under /tmp at the same time.
FOLDER = tempfile.TemporaryDirectory(prefix="mpi")  # pylint: disable=consider-using-with

# Without these, Open MPI refuses to run as root or with more ranks than processors, and it reads the memory of
# other processes, which containers forbid. MPICH ignores them.
ENVIRONMENT = {
    "OMPI_MCA_orte_tmpdir_base": FOLDER.name,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMP_NUM_THREADS": "1",
}


def launch(command, seconds):
    """Exit status, or None when the time is over, and output."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, **ENVIRONMENT}, start_new_session=True, text=True) as process:
        try:
            output = process.communicate(timeout=seconds)[0]
            return process.returncode, output
        except subprocess.TimeoutExpired:
            process.terminate()  # ends the ranks too
        try:
            return None, process.communicate(timeout=10)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]


def main(mpiexec, counts, seconds, *command):
    for ranks in counts.split(","):
        status, output = launch([mpiexec, "-n", ranks, "true"], 30)
        if status != 0:
            lines = [line.strip() for line in output.splitlines() if line.strip(" -\t")]
            why = lines[0] if lines else "exit status %s" % status if status is not None else "no end in 30 s"
            return checks.skip_all(f"{mpiexec} cannot start {ranks} processes here: {why}")
    for ranks in counts.split(","):
        status, output = launch([mpiexec, "-n", ranks, *command], float(seconds))
        for line in output.splitlines():
            print("#", line)
        passed = sum(line.startswith("ok ") for line in output.splitlines())
        ok(status == 0 and passed > 0, f"{ranks} ranks: {passed} checks, exit status {status}")
    return checks.done()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
