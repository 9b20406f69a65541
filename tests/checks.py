# SPDX-License-Identifier: Apache-2.0
"""What tests in Python print: TAP, a line for each check, then the count."""

count = failures = 0


def ok(passed, name):
    """A check, and whether it passed."""
    global count, failures
    count += 1
    failures += not passed
    print("ok" if passed else "not ok", count, "-", name, flush=True)


def skip(name, why):
    """A check that cannot be made here."""
    global count
    count += 1
    print("ok", count, "-", name, "# SKIP", why, flush=True)


def skip_all(why):
    """In place of all checks; returns the exit status."""
    print("1..0 # SKIP", why)
    return 0


def done():
    """The exit status: 0 if every check passed. A test without checks fails."""
    print(f"1..{count}")
    return failures != 0 or count == 0
