"""`cake vendor fi`: packages of another repository, byte for byte, and what their sources may not do."""

import json

import pytest

from cake.core import build, vendor
from cake.core.cli import main
from cake.core.testing.checkouts import Checkout, write_files
from cake.core.vendor import VendorError, Wanted

AT = "flashinfer/experimental"
BUILD = json.dumps({"schema": 1, "records": [{"library": "a", "arch": "sm_100a", "sources": ["csrc/a.cu"]}]})
UPSTREAM = {
    "flashinfer/__init__.py": "",
    f"{AT}/__init__.py": "",
    f"{AT}/alpha/__init__.py": "",
    f"{AT}/alpha/host.py": "import torch\r\n\r\nfrom ..common import util\r\n",
    f"{AT}/alpha/build.json": BUILD,
    f"{AT}/alpha/csrc/a.cu": '#include "a.cuh"\n',
    f"{AT}/alpha/csrc/a.cuh": "// a\n",
    f"{AT}/common/__init__.py": "",
    f"{AT}/common/util.py": "import os\n",
    "include/utils/first.h": "// first\n",
    "include/utils/second.h": "// second\n",
    "include/other.h": "// other\n",
}
SPEC = """
SPEC = OpSpec(kernel_packages=(KernelPackage("alpha", "cake.toy", "_vendor/alpha"),))
"""


@pytest.fixture
def upstream(tmp_path):
    upstream = Checkout(tmp_path / "up stream")
    upstream.commit(UPSTREAM)
    return upstream


@pytest.fixture
def repo(tmp_path):
    """A checkout without kernels/ of its own, and no git at all."""
    return write_files(tmp_path / "ops", {"packages/cake-toy/src/cake/toy/spec.py": SPEC})


@pytest.fixture
def folder(repo):
    return repo / "packages/cake-toy/src/cake/toy/_vendor"


@pytest.fixture
def fi(repo, upstream):
    """fi(packages…, **wanted): vendor into toy from upstream's HEAD."""

    def run(*packages, commit=None, **wanted):
        named = dict(word.partition("=")[::2] for word in packages)
        return vendor.vendor_fi(
            "toy", repo, upstream.root, {n: Wanted(p, **wanted) for n, p in named.items()}, commit
        )

    return run


def files_of(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def table(folder):
    return json.loads((folder / "VENDORED.json").read_text())["packages"]


def test_byte_for_byte(fi, upstream, repo, folder):
    copied = fi("alpha", "common")
    assert (copied.packages, copied.changed) == (("alpha", "common"), True)
    assert files_of(folder / "alpha") == [
        "VENDORED.txt",
        "__init__.py",
        "build.json",
        "csrc/a.cu",
        "csrc/a.cuh",
        "host.py",
    ]
    for name in ("host.py", "csrc/a.cu", "build.json"):
        data = (folder / "alpha" / name).read_bytes()
        assert data == UPSTREAM[f"{AT}/alpha/{name}"].encode()
        blob = upstream.git("rev-parse", f"HEAD:{AT}/alpha/{name}")
        assert table(folder)["alpha"]["files"][name] == blob
    entry = table(folder)["alpha"]
    assert (entry["source"], entry["path"]) == ("fi", f"{AT}/alpha")
    assert entry["commit"] == copied.commit == upstream.git("rev-parse", "HEAD")
    assert entry["module"] == "flashinfer.experimental.alpha"
    assert not {"added", "allow", "options"} & set(entry)
    assert copied.commit in (folder / "alpha/VENDORED.txt").read_text()
    assert vendor.check([], repo) == {"toy": []}
    assert build.read_package(folder / "alpha").record("a", "sm_100a") is not None


def test_twice_changes_nothing(fi, upstream, folder):
    first = fi("alpha", "common")
    upstream.commit({"README": "elsewhere\n"})
    again = fi("alpha")
    assert (again.changed, again.commit) == (False, first.commit)


def test_an_upgrade_takes_all_of_the_source_along(fi, upstream, repo, folder):
    fi("alpha", "common")
    newer = upstream.commit({f"{AT}/common/util.py": "X = 1\n", f"{AT}/alpha/csrc/a.cuh": None})
    upstream.commit({f"{AT}/alpha/csrc/a.cu": "// alone\n"})
    before = files_of(folder)
    with pytest.raises(VendorError, match=r"everything is as it was:\n.*a\.cu:1: #include"):
        fi("alpha", commit=newer)
    assert files_of(folder) == before
    fi()
    assert {package["commit"] for package in table(folder).values()} == {upstream.git("rev-parse", "HEAD")}
    assert (folder / "common/util.py").read_text() == "X = 1\n"
    assert "alpha/csrc/a.cuh" not in files_of(folder)
    assert vendor.check([], repo) == {"toy": []}


def test_another_folder_and_some_of_its_files(fi, upstream, repo, folder):
    fi("headers=include", include=("utils/*", "*.hpp", "other.h")[:1], exclude=("*/second.h",))
    assert files_of(folder / "headers") == ["VENDORED.txt", "utils/first.h"]
    assert table(folder)["headers"]["options"] == {"include": ["utils/*"], "exclude": ["*/second.h"]}
    upstream.commit({"include/utils/third.h": "// third\n"})
    fi()  # by what was recorded
    assert files_of(folder / "headers") == ["VENDORED.txt", "utils/first.h", "utils/third.h"]
    assert vendor.check([], repo) == {"toy": []}


def test_a_build_json_for_a_package_without(fi, upstream, repo, folder):
    upstream.commit({f"{AT}/alpha/build.json": None})
    with pytest.raises(VendorError, match=r"alpha at \w{12} has CUDA sources and no build\.json"):
        fi("alpha", "common")
    assert not folder.exists()
    fi("common")
    fi("alpha", build_json=BUILD.encode())
    assert table(folder)["alpha"]["added"] == ["build.json"]
    assert "not from there: build.json" in (folder / "alpha/VENDORED.txt").read_text()
    upstream.commit({f"{AT}/alpha/csrc/a.cuh": "// newer\n"})
    fi()
    assert (folder / "alpha/build.json").read_text() == BUILD  # kept over an upgrade
    theirs = BUILD.replace("sm_100a", "sm_103a")
    upstream.commit({f"{AT}/alpha/build.json": theirs})
    with pytest.raises(VendorError, match=r"has its own build\.json, which stays as it is"):
        fi("alpha", build_json=BUILD.encode())
    fi()
    assert (folder / "alpha/build.json").read_text() == theirs
    assert "added" not in table(folder)["alpha"]
    assert vendor.check([], repo) == {"toy": []}


def test_uncommitted_changes_are_refused(fi, upstream, folder):
    write_files(upstream.root, {f"{AT}/common/new.py": "", "include/other.h": "// not what is copied\n"})
    with pytest.raises(VendorError, match=r"no commit holds these changes: \?\? .*common/new\.py"):
        fi("common")
    assert not folder.exists()
    fi("common", commit="HEAD")
    assert "new.py" not in table(folder)["common"]["files"]


@pytest.mark.parametrize(
    ("files", "packages", "why"),
    [
        ({}, ["gone"], r"commit \w{12} has no files of package gone in flashinfer/experimental/gone"),
        ({}, ["Alpha"], "lower-case identifier, got 'Alpha'"),
        ({}, ["cake"], "package 'cake' is this repository's kernels/include; take another name"),
        ({}, ["a=../x"], r"must be relative to the checkout and plain, got '\.\./x'"),
        ({f"{AT}/nest/_vendor/x.cuh": ""}, ["nest"], r"nest/_vendor/x\.cuh is a copy inside a copy"),
        ({f"{AT}/nest/VENDORED.json": "{}"}, ["nest"], r"nest/VENDORED\.json is a copy inside a copy"),
        ({f"{AT}/nest/VENDORED.txt": "{}"}, ["nest"], "has the name of cake's own notice"),
        ({f"{AT}/bad/build.json": "{}"}, ["bad"], r"as it was:\n.*bad/build\.json: .*schema must be 1"),
    ],
)
def test_what_is_refused(fi, upstream, folder, files, packages, why):
    upstream.commit(files)
    fi("common")
    before = files_of(folder)
    with pytest.raises(VendorError, match=why):
        fi(*packages)
    assert files_of(folder) == before
    assert sorted(table(folder)) == ["common"]


def test_patterns_must_match(fi, folder):
    with pytest.raises(VendorError, match=r"'\*\.hpp' matches no file of include"):
        fi("headers=include", exclude=("*.hpp",))
    with pytest.raises(VendorError, match="has no files of package headers"):
        fi("headers=include", exclude=("*",))
    assert not folder.exists()


def test_links_are_refused(fi, upstream, folder):
    (upstream.root / AT / "common/link.py").symlink_to("util.py")
    upstream.commit()
    with pytest.raises(VendorError, match=r"common/link\.py is a link or submodule"):
        fi("common")


def test_kernels_that_nothing_declares_are_refused(fi, upstream, repo, folder):
    write_files(repo, {"packages/cake-toy/src/cake/toy/spec.py": SPEC.replace("_vendor/alpha", "csrc")})
    with pytest.raises(VendorError, match=r"_vendor/alpha has kernels that .*spec\.py doesn't declare: Kern"):
        fi("alpha", "common")
    fi("common")


# ---- what sources may not do

READS = {
    "import os\nX = os.environ['X']\n": (2, r"os\.environ"),
    "import os as o\n\n\ndef f():\n    return o.getenv('X')\n": (5, r"o\.getenv"),
    "from os import environ\n": (1, "environ"),
    "def f():\n    from os import getenv as g\n    return g('X')\n": (2, "getenv"),
    "import os.path\nX = os.environb\n": (2, r"os\.environb"),
    "import posix\nX = posix.environ\n": (2, r"posix\.environ"),
    "from os import *\n": (1, r"\*"),
}


@pytest.mark.parametrize("source", READS)
def test_reading_the_environment_is_refused_unless_listed(fi, upstream, repo, folder, source):
    line, what = READS[source]
    fi("common")
    upstream.commit({f"{AT}/common/util.py": source})
    why = rf"common/util\.py:{line}: reads the environment \({what}\)"
    with pytest.raises(VendorError, match=why):
        fi()
    fi("common", allow={"environment": ["util.py"], "imports": []})
    assert table(folder)["common"]["allow"] == {"environment": ["util.py"]}
    upstream.commit({f"{AT}/common/more.py": "import os\nX = os.getenv('X')\n"})
    with pytest.raises(VendorError, match=r"common/more\.py:2: reads the environment"):
        fi()  # the file that was listed is, the other isn't
    fi("common", allow={"environment": ["more.py"]})
    assert table(folder)["common"]["allow"] == {"environment": ["more.py", "util.py"]}
    assert vendor.check([], repo) == {"toy": []}


def test_cuda_sources_may_not_read_it_either(fi, upstream, folder):
    text = '// getenv("X")\n/* std::getenv("X") */\nconst char* s = "getenv(";\nauto x = std::getenv ("X");\n'
    upstream.commit({f"{AT}/alpha/csrc/a.cuh": text})
    with pytest.raises(VendorError, match=r"alpha/csrc/a\.cuh:4: reads the environment \(getenv\)"):
        fi("alpha", "common")
    fi("alpha", "common", allow={"environment": ["csrc/a.cuh"]})


IMPORTS = {
    "import flashinfer.jit\n": r"common/util\.py:1: imports flashinfer\.jit, which is no package that toy",
    "\nfrom ...jit import env\n": r"common/util\.py:2: imports env from flashinfer\.jit, which is no package",
    "from ..alpha import host\n": r"common/util\.py:1: imports host from flashinfer\.experimental\.alpha",
    "from . import missing\n": None,
    "from .missing import x\n": r"common/util\.py:1: imports flashinfer\.experimental\.common\.missing, but",
    "import importlib\nimportlib.import_module('x')\n": r"common/util\.py:2: imports by computed names",
    "from importlib import import_module\n": r"common/util\.py:1: imports by computed names",
    "__import__('x')\n": r"common/util\.py:1: imports by computed names \(__import__\)",
    "import cake.other\n": r"common/util\.py:1: imports cake\.other, which is no package that toy carries",
    "def f(:\n": r"common/util\.py:1: isn't Python that can be read",
}


@pytest.mark.parametrize("source", [source for source, why in IMPORTS.items() if why])
def test_undeclared_imports_are_refused(fi, upstream, repo, folder, source, capsys):
    fi("common")
    upstream.commit({f"{AT}/common/util.py": source})
    with pytest.raises(VendorError, match=IMPORTS[source]):
        fi()
    assert (folder / "common/util.py").read_text() == "import os\n"
    # and check says the same of a copy that got there by hand
    data = json.loads((folder / "VENDORED.json").read_text())
    data["packages"]["common"]["files"]["util.py"] = vendor.blob_id(source.encode())
    write_files(folder, {"common/util.py": source, "VENDORED.json": json.dumps(data)})
    assert main(["vendor", "check", "toy", "--repo", str(repo)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"toy: {folder / 'common/util.py'}:")


def test_flashinfer_may_be_listed(fi, upstream, repo, folder):
    upstream.commit({f"{AT}/common/util.py": "from ...jit import env\nimport flashinfer.utils\n"})
    fi("common", allow={"imports": ["flashinfer"]})
    assert table(folder)["common"]["allow"] == {"imports": ["flashinfer"]}
    assert vendor.check([], repo) == {"toy": []}
    upstream.commit({f"{AT}/third/host.py": "import flashinfer\n"})
    with pytest.raises(VendorError, match=r"third/host\.py:1: imports flashinfer"):
        fi("third")  # it is common that may, and nobody else


def test_a_needed_sibling_is_not_removed(fi, repo, folder):
    fi("alpha", "common")
    with pytest.raises(VendorError, match=r"alpha/host\.py:3: imports util from flashinfer\.exp.*common"):
        vendor.remove("toy", repo, ["common"])
    vendor.remove("toy", repo, ["common", "alpha"])
    assert not folder.exists()


def test_the_command(upstream, repo, folder, capsys, tmp_path):
    build_json = write_files(tmp_path, {"our build.json": BUILD}) / "our build.json"
    source = "import flashinfer, os; os.environ\n"
    upstream.commit({f"{AT}/alpha/build.json": None, f"{AT}/common/util.py": source})

    def fi(names, *options):
        return main(
            ["vendor", "fi", "toy", *names, "--repo", str(repo), "--from", str(upstream.root), *options]
        )

    assert fi(["common"]) == 1
    assert "imports flashinfer" in capsys.readouterr().err
    assert fi(["common"], "--allow-import", "flashinfer", "--allow-environment", "util.py") == 0
    assert fi([f"alpha={AT}/alpha/"], "--build-json", str(build_json), "--commit", "main") == 0
    assert fi(["headers=include"], "--include", "*.h", "--exclude", "utils/*") == 0
    assert "copied alpha, common, headers at" in capsys.readouterr().out
    assert fi([]) == 0
    assert "up to date: alpha, common, headers at" in capsys.readouterr().out
    assert main(["vendor", "check", "--repo", str(repo)]) == 0
    assert main(["vendor", "remove", "toy", "headers", "--repo", str(repo)]) == 0
    assert sorted(table(folder)) == ["alpha", "common"]
