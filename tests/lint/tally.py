# SPDX-License-Identifier: Apache-2.0
"""Counts the results in Meson's test logs, subtest by subtest, and shows what failed.

usage: tally.py TESTLOG.json    prints failing output, then a last line "PASSED FAILED SKIPPED"

Stricter than `meson test`: a program that printed no result at all has failed, not been skipped, and
so has a test that is marked TODO.
"""

import json
import re
import sys

LINES_SHOWN = 60


def count(record):
    """(passed, failed, skipped) of one program."""
    lines = re.findall(r"^(not ok|ok)\b(.*)", record.get("stdout") or "", flags=re.M)
    failed = sum(verdict == "not ok" for verdict, _ in lines)
    skipped = sum(verdict == "ok" and re.search(r"#\s*skip", rest, flags=re.I) is not None
                  for verdict, rest in lines)
    passed = len(lines) - failed - skipped
    if lines:
        # Killed, timed out, or with a status that its lines do not explain.
        unexplained = record["result"] not in ("OK", "SKIP") and failed == 0
        return passed, failed + unexplained, skipped
    if record["result"] == "SKIP" and re.search(r"^1\.\.0\b", record.get("stdout") or "", flags=re.M):
        return 0, 0, 1
    return (1, 0, 0) if record["result"] == "OK" else (0, 1, 0)


def failing_output(record):
    """What a reader needs to see of a failure: the failing lines with the remarks that follow them, or
    with all remarks where none follows; the end of an output without failing lines; what went to stderr.
    """
    out = (record.get("stdout") or "").splitlines()
    failing = []
    keep = False
    for line in out:
        if re.match(r"(not )?ok\b", line):
            keep = line.startswith("not ok")
        if keep or line.startswith("Bail out!"):
            failing.append(line)
    if all(re.match(r"not ok\b|1\.\.", line) for line in failing):
        failing += [line for line in out if line.startswith("#")]
    shown = failing[:LINES_SHOWN] or out[-LINES_SHOWN:]
    return shown + (record.get("stderr") or "").splitlines()[-LINES_SHOWN:]


def tally(records):
    """Totals over programs, and text about those that failed."""
    totals = [0, 0, 0]
    text = []
    for record in records:
        counts = count(record)
        totals = [a + b for a, b in zip(totals, counts)]
        if counts[1]:
            text.append(f"---- {record['name']}: {record['result']}, exit status {record.get('returncode')}")
            text += failing_output(record)
    return totals, text


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as LOG:
        TOTALS, TEXT = tally(json.loads(LINE) for LINE in LOG)
    print("\n".join(TEXT + [" ".join(map(str, TOTALS))]))
