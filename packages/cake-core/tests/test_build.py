"""build.json, the include closure, the content keys, and what ptxas says."""

import json
import os
import shutil
from pathlib import Path

import pytest

from cake.core import build, ptxas
from cake.core.errors import BuildError
from cake.core.testing.toolchain import write_package
from cake.core.toolchain import Nvcc

RECORD = {"library": "tiny", "arch": "sm_90a", "sources": ["tiny.cu"]}
FILES = {
    "csrc/tiny.cu": '#include <cuda_runtime.h>\n#include "tiny.cuh"\n#include "cake/ptx.cuh"\n',
    "csrc/tiny.cuh": "#pragma once\n",
    "csrc/unused.cuh": "// nobody includes this\n",
    "_vendor/cake/include/cake/ptx.cuh": '#include "frag.cuh"\n#include <cake/pipe.cuh>\n',
    "_vendor/cake/include/cake/frag.cuh": "",
    "_vendor/cake/include/cake/pipe.cuh": "",
}
INCLUDE = ["../_vendor/cake/include"]


def keys(root):
    package = build.read_package(root)
    record = package.records[0]
    return build.source_key(package, record, build.source_files(package, record))


@pytest.fixture
def package(tmp_path):
    return write_package(tmp_path / "my op", [RECORD], FILES, INCLUDE)


# ---- build.json


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": 2}, "schema must be 1, got 2"),
        ({"recrods": []}, "unknown fields"),
        ({"records": []}, "at least one object"),
        ({"records": ["tiny"]}, "must be an object"),
        ({"include": ["../../elsewhere"]}, "leaves"),
        ({"include": ["/usr/include"]}, "leaves"),
        ({"include": "inc"}, "must be a list of strings"),
        ({"records": [{**RECORD, "library": "Tiny"}]}, "lower-case identifier, got 'Tiny'"),
        ({"records": [{**RECORD, "library": "../x"}]}, "lower-case identifier"),
        ({"records": [{**RECORD, "arch": "9.0"}]}, "spelled like 'sm_90a', got '9.0'"),
        ({"records": [{**RECORD, "arch": "sm_90"}]}, "spelled like 'sm_90a'"),
        ({"records": [{**RECORD, "sources": []}]}, "at least one file"),
        ({"records": [{**RECORD, "sources": ["../tiny.cu"]}]}, "plain path inside"),
        ({"records": [{**RECORD, "sources": ["a/x.cu", "b/x.cu"]}]}, "each with its own name"),
        ({"records": [{**RECORD, "functions": ["no-name"]}]}, "identifiers"),
        ({"records": [{**RECORD, "allow": ["spills"]}]}, "allow must be an object"),
        ({"records": [{**RECORD, "link": ["cublas"]}]}, "link may name cuda alone"),
        ({"records": [{**RECORD, "fast": True}]}, "unknown fields"),
        ({"records": [RECORD, RECORD]}, "two records of library 'tiny' for sm_90a"),
        *(
            ({"records": [{**RECORD, "flags": [flag]}]}, "a record can't have it")
            for flag in (
                "-I",
                "-Iinc",
                "-o",
                "-arch=sm_90",
                "-gencode",
                "-ccbin",
                "-lcublas",
                "--keep",
                "-DX=/tmp",
            )
        ),
    ],
)
def test_a_wrong_build_json_is_refused(package, change, why):
    path = package / "build.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BuildError, match=why) as caught:
        build.read_package(package)
    assert caught.value.source == str(path)


def test_build_json_that_is_missing_or_no_json(package):
    (package / "build.json").write_text("{")
    with pytest.raises(BuildError, match="is not JSON"):
        build.read_package(package)
    (package / "build.json").unlink()
    with pytest.raises(BuildError, match=r"cannot be read \(No such file or directory\)"):
        build.read_package(package)


def test_useful_flags_are_accepted(package):
    path = package / "build.json"
    flags = ["-O3", "-lineinfo", "-DCHECK=1", "--ftz=false", "-maxrregcount=128", "-Xptxas", "-O3"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "records": [{**RECORD, "flags": flags}]}))
    assert list(build.read_package(package).records[0].flags) == flags


# ---- the include closure


def test_the_closure_is_what_the_compile_reads(package):
    found = build.read_package(package)
    assert sorted(build.source_files(found, found.records[0])) == [
        "_vendor/cake/include/cake/frag.cuh",
        "_vendor/cake/include/cake/pipe.cuh",
        "_vendor/cake/include/cake/ptx.cuh",
        "csrc/tiny.cu",
        "csrc/tiny.cuh",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('// #include "gone.cuh"\n', True),
        ('/* \n#include "gone.cuh"\n*/\n', True),
        ('const char* s = "/*";\n#include "tiny.cuh"\n', True),
        ('#include "tiny.cuh"  // why\n', True),
        ('#  include   "tiny.cuh"\n', True),
        ('#include \\\n  "tiny.cuh"\n', True),
        ("#include <vector>\n", True),
        ('#include "dlpack/dlpack.h"\n#include "tvm/ffi/error.h"\n', True),  # tvm-ffi's own
        ('#include "gone.cuh"\n', False),
        ('#if 0\n#include "gone.cuh"\n#endif\n', False),
        ("#include HEADER\n", False),
        ('#include_next "tiny.cuh"\n', False),
        ('#include "/etc/hostname"\n', False),
        ('#include "../../outside.cuh"\n', False),
        ('#include "../neighbour.cuh"\n', False),
    ],
)
def test_includes_are_resolved_inside_or_refused(package, text, found):
    (package.parent.parent / "outside.cuh").write_text("")
    (package.parent / "neighbour.cuh").write_text("")
    (package / "tiny.cu").write_text("\n" + text)
    read = build.read_package(package)
    if found:
        assert "csrc/tiny.cu" in build.source_files(read, read.records[0])
    else:
        with pytest.raises(
            BuildError, match=r"tiny: csrc/tiny\.cu:\d+: #include.* is not a file of the package"
        ):
            build.source_files(read, read.records[0])


def test_an_include_error_names_its_line(package):
    (package / "tiny.cuh").write_text('/* a\n b */ int x; // c\n#include "gone.cuh"\n')
    read = build.read_package(package)
    with pytest.raises(BuildError, match=r'csrc/tiny\.cuh:3: #include "gone\.cuh"') as caught:
        build.source_files(read, read.records[0])
    assert caught.value.source == str(package / "tiny.cuh")


def test_a_missing_source(package):
    (package / "tiny.cu").unlink()
    read = build.read_package(package)
    with pytest.raises(BuildError, match=r"source csrc/tiny\.cu does not exist"):
        build.source_files(read, read.records[0])


def test_headers_that_include_each_other_end(package):
    (package / "tiny.cuh").write_text('#include "tiny.cuh"\n#include "cake/ptx.cuh"\n')
    read = build.read_package(package)
    assert len(build.source_files(read, read.records[0])) == 5


# ---- keys


def test_the_key_is_of_content_not_of_paths_or_times(package, tmp_path):
    key = keys(package)
    copy = tmp_path / "else where" / "other"
    shutil.copytree(package.parent, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    assert keys(copy / "csrc") == key
    assert build.content_hash(copy / "csrc") == build.content_hash(package)


@pytest.mark.parametrize(
    "name", ["csrc/tiny.cu", "csrc/tiny.cuh", *(name for name in FILES if name.startswith("_vendor"))]
)
def test_every_byte_that_the_compile_reads_is_in_the_key(package, name):
    key, content = keys(package), build.content_hash(package)
    path = package.parent / name
    before = path.stat()
    path.write_text(path.read_text() + "\n")
    os.utime(path, (before.st_atime, before.st_mtime))  # an old time stamp hides nothing
    assert keys(package) != key
    assert build.content_hash(package) != content


def test_what_the_compile_does_not_read_is_not_in_the_key(package):
    key, content = keys(package), build.content_hash(package)
    (package / "unused.cuh").write_text("changed\n")
    (package / "NOTES.md").write_text("new\n")
    assert (keys(package), build.content_hash(package)) == (key, content)


@pytest.mark.parametrize(
    "change",
    [
        {"flags": ["-O2"]},
        {"arch": "sm_100a"},
        {"library": "tinier"},
        {"functions": ["f"]},
        {"allow": {"spills": ["k"]}},
        {"link": ["cuda"]},
    ],
)
def test_every_field_of_the_record_is_in_the_key(package, change):
    key = keys(package)
    path = package / "build.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "records": [{**RECORD, **change}]}))
    assert keys(package) != key


def test_versions_are_in_the_key(package, monkeypatch):
    source = keys(package)
    one = Nvcc(package, "13.0.88", "PATH", "release 13.0, V13.0.88")
    two = Nvcc(package, "13.0.96", "PATH", "release 13.0, V13.0.96")
    moved = Nvcc(package.parent, "13.0.88", "CUDA_HOME", "release 13.0, V13.0.88")
    assert build.build_key(source, one) != build.build_key(source, two)
    assert build.build_key(source, one) == build.build_key(source, moved)
    monkeypatch.setattr(build, "tvm_ffi_version", lambda: "0.1.99")
    assert keys(package) != source


def test_the_command_names_no_path_but_the_compilers(package):
    read = build.read_package(package)
    command = build.command(read, read.records[0], package / "nvcc", package / "g++")
    assert [part for part in command if Path(part).is_absolute()] == [
        str(package / "nvcc"),
        str(package / "g++"),
    ]
    joined = " ".join(command)
    assert "-gencode arch=compute_90a,code=sm_90a" in joined
    assert "-I csrc -I _vendor/cake/include -I tvm_ffi/include" in joined
    assert "fast_math" not in joined
    assert "-warn-spills" in joined


def test_host_modules_are_in_the_content_hash_and_not_in_the_key(package):
    """They decide what is launched, so a run is bound to them; they aren't compiled."""
    key, content = keys(package), build.content_hash(package)
    (package / "host.py").write_text("X = 1\n")
    assert keys(package) == key
    assert build.content_hash(package) != content


def test_undefined_symbols_fail_the_link_unless_they_may_be_the_drivers(package):
    read = build.read_package(package)
    assert build.command(read, read.records[0], package, package).count("-z,defs") == 1
    path = package / "build.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "records": [{**RECORD, "link": ["cuda"]}]}))
    read = build.read_package(package)
    assert "-z,defs" not in build.command(read, read.records[0], package, package)


# ---- ptxas

LOG = """\
ptxas info    : 3 bytes gmem
ptxas info    : Compiling entry function '_Z10scan_state5Param' for 'sm_90a'
ptxas info    : Function properties for _Z10scan_state5Param
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 1024 bytes smem, 24 bytes cmem[0]
ptxas info    : Compiling entry function '_Z4prep5Param' for 'sm_90a'
ptxas info    : Function properties for _Z4prep5Param
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
SPILL = LOG.replace(
    "8 bytes stack frame, 0 bytes spill stores, 0 ", "8 bytes stack frame, 12 bytes spill stores, 16 "
)
REMARK = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "non wgmma instructions defining accumulator registers of a wgmma in function '_Z10scan_state5Param'\n"
)
IGNORED = (
    "ptxas info    : (C7507) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register "
    "requirements.\n"
)


def test_ptxas_report():
    kernels, remarks = ptxas.parse(LOG)
    assert [k.as_dict() for k in kernels] == [
        {
            "name": "_Z10scan_state5Param",
            "registers": 168,
            "stack": 8,
            "spill_stores": 0,
            "spill_loads": 0,
            "smem": 1024,
        },
        {
            "name": "_Z4prep5Param",
            "registers": 40,
            "stack": 0,
            "spill_stores": 0,
            "spill_loads": 0,
            "smem": 0,
        },
    ]
    assert remarks == []


@pytest.mark.parametrize(
    ("log", "kind", "allow"),
    [
        (SPILL, "spills", {"spills": ("scan_state",)}),
        (REMARK + LOG, "C7510", {"C7510": ("scan_state",)}),
        (REMARK + LOG, "C7510", {"serialized": ("scan_state",)}),
        (IGNORED + LOG, "C7507", {"C7507": ("*",)}),
    ],
)
def test_spills_and_remarks_are_complaints_unless_allowed_by_name(log, kind, allow):
    _, remarks = ptxas.parse(log)
    assert [remark[0] for remark in remarks] == [kind]
    (complaint,) = ptxas.complaints(remarks, {})
    assert "ptxas" not in complaint
    assert ("_Z10scan_state5Param" in complaint) == (kind != "C7507")
    assert ptxas.complaints(remarks, allow) == []
    assert ptxas.complaints(remarks, dict.fromkeys(allow, ("another_kernel",))) == [complaint]
