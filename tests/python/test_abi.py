# SPDX-License-Identifier: Apache-2.0
"""The structs and numbers of fattn._c are those of fattn.h and distributed.h, as a C compiler reads it."""

import ctypes
import os
import re
import shutil
import subprocess

import pytest

from fattn import _c, _groups

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
HEADER = os.path.join(ROOT, "include", "fattn", "fattn.h")

STRUCTS = {"fattn_strides": _c.Strides, "fattn_problem": _c.Problem, "fattn_buffers": _c.Buffers,
           "fattn_device_info": _c.DeviceInfo, "fattn_device_options": _c.DeviceOptions,
           "fattn_plan_info": _c.PlanInfo, "fattn_merge_args": _c.MergeArgs,
           "fattn_dropout_args": _c.DropoutArgs, "fattn_inspect_args": _c.InspectArgs,
           "fattn_run": _groups.Run, "fattn_message": _groups.Message,
           "fattn_transport": _groups.Transport, "fattn_group": _groups.Group}
NUMBERS = ["FORWARD", "BACKWARD", "F32", "F16", "BF16", "F64", "E4M3", "STRIDED", "BOTTOM_RIGHT", "TOP_LEFT",
           "CAUSAL", "WINDOW", "SCALE", "SOFTCAP", "BIAS", "ALIBI", "MASK", "BLOCK_MASK", "SINK",
           "DROPOUT", "CU_SEQLENS_Q", "CU_SEQLENS_K", "SEQUSED_Q", "SEQUSED_K", "PAGED", "POSITIONS",
           "DLSE", "ACCUMULATE", "DETERMINISTIC", "BATCH_INVARIANT", "CHECKED", "SEQSTART_K",
           "ALIBI_BIAS", "CHUNK", "DESCALE", "SCORES", "PROBABILITIES", "OUT_O", "OUT_LSE",
           "OUT_DQ", "OUT_DK", "OUT_DV", "OUT_DBIAS", "OUT_DSINK"]
WORDS = [f"{prefix}_{word.upper()}" for prefix, words in (("SPLIT", _groups.SPLITS),
                                                          ("SCHEME", _groups.SCHEMES)) for word in words]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    lines = []
    for name, struct in STRUCTS.items():
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));'
                  for field, *_ in struct._fields_]
    lines += [f'printf("{name} %zu\\n", sizeof({name}));' for name in STRUCTS]
    lines += [f'printf("{name} %llu\\n", (unsigned long long)FATTN_{name});' for name in NUMBERS + WORDS]
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "abi.c"
    source.write_text('#include <fattn/distributed.h>\n#include <stdio.h>\nint main(void) {\n' +
                      "\n".join(lines) + "\nreturn 0; }\n")
    subprocess.run([compiler, "-I", os.path.join(ROOT, "include"), "-o", folder / "abi", source],
                   check=True)
    told = subprocess.run([folder / "abi"], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in (line.split() for line in told.splitlines())}


def test_fields(compiled):
    for name, struct in STRUCTS.items():
        for field, *_ in struct._fields_:
            assert getattr(struct, field).offset == compiled[f"{name}.{field}"], (name, field)
        assert ctypes.sizeof(struct) == compiled[name], name


def test_numbers(compiled):
    for name in NUMBERS:
        assert getattr(_c, name) == compiled[name], name


def test_functions_are_declared():
    """Those that the package calls."""
    folder = os.path.join(ROOT, "python", "fattn")
    called = set()
    for where, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(where, name), encoding="utf-8") as file:
                    called |= set(re.findall(r"\b_c\.lib\.(fattn_\w+)", file.read()))
    assert called and not {name for name in called if getattr(_c.lib, name).argtypes is None}


def test_words(compiled):
    for prefix, words in (("SPLIT", _groups.SPLITS), ("SCHEME", _groups.SCHEMES)):
        for word, number in words.items():
            assert compiled[f"{prefix}_{word.upper()}"] == number, word


def test_each_status_has_its_exception():
    import fattn
    with open(HEADER, encoding="utf-8") as file:
        body = re.search(r"typedef enum fattn_status \{(.*?)\} fattn_status;", file.read(), re.S)[1]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    numbers = {int(value): name for name, value in re.findall(r"FATTN_(\w+)\s*=\s*(\d+)", body)}
    del numbers[0]
    from fattn._errors import BY_STATUS
    assert {status: kind.__name__ for status, kind in BY_STATUS.items()} == {
        status: "".join(word.capitalize() for word in name.split("_"))
        for status, name in numbers.items()}
    assert all(getattr(fattn, kind.__name__) is kind for kind in BY_STATUS.values())


def test_versions_agree():
    with open(os.path.join(ROOT, "include", "fattn", "version.h"), encoding="utf-8") as file:
        version = re.search(r'FATTN_VERSION_STRING\s+"([^"]+)"', file.read())[1]
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        assert f'\nversion = "{version}"\n' in file.read()
    assert _c.VERSION == version == _c.lib.fattn_version().decode()


def test_rooms_are_large_enough():
    assert all(ctypes.sizeof(struct) < _c._ROOM for struct in STRUCTS.values())


def test_library_of_another_folder_is_found(tmp_path, monkeypatch):
    """Fedora has packages in lib and what belongs to a processor in lib64."""
    folder = tmp_path / ".fattn.mesonpy.libs"
    folder.mkdir()
    (folder / "libelsewhere.so.0.1").touch()
    assert _c.find("libelsewhere.so.0") == "libelsewhere.so.0"
    monkeypatch.syspath_prepend(tmp_path)
    assert _c.find("libelsewhere.so.0") == str(folder / "libelsewhere.so.0.1")
