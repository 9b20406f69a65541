# SPDX-License-Identifier: Apache-2.0
"""Runs pytest over this folder and tells its results in TAP.

usage: pytest_tap.py PACKAGE LIBRARY [FILE]...

PACKAGE is the folder that holds `fattn`, LIBRARY those that hold its libraries, with colons between. What a
test imports and this Python lacks is a skipped test.
"""

import os
import sys

try:
    import numpy  # noqa: F401
    import pytest
except ImportError as error:
    print(f"1..0 # SKIP {error.name} is not installed")
    sys.exit(0)

HERE = os.path.dirname(os.path.abspath(__file__))


class Tap:
    """A plugin that prints a line for each test."""

    def __init__(self, out):
        self.out, self.count = out, 0

    def line(self, ok, title, rest=""):
        self.count += 1
        title = title.encode("unicode_escape").decode().replace("#", "\\#")
        print(f"{'ok' if ok else 'not ok'} {self.count} - {title}{rest}", file=self.out, flush=True)

    def pytest_runtest_logreport(self, report):
        title = report.nodeid.split("/")[-1]
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            self.line(True, title, f" # SKIP {reason.removeprefix('Skipped: ')}")
        elif report.failed or report.when == "call":
            self.line(report.passed, title)
            for text in str(report.longrepr or "").splitlines():
                print(f"# {text}", file=self.out)

    def pytest_collectreport(self, report):
        if report.failed:
            self.line(False, report.nodeid)
            for text in str(report.longrepr).splitlines():
                print(f"# {text}", file=self.out)
        elif report.skipped:
            self.line(True, report.nodeid, f" # SKIP {report.longrepr[2].removeprefix('Skipped: ')}")


def main(package, library, *files):
    wanted = {"PYTHONPATH": package, "LD_LIBRARY_PATH": library}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # The loader reads its path when a program begins.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tap = Tap(out)
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", HERE,
                          *([os.path.join(HERE, f) for f in files] or [HERE])], plugins=[tap])
    print(f"1..{tap.count}", file=out, flush=True)
    # A file that is skipped as a whole has no tests.
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
