"""The merge driver of VENDORED.json: by itself, and in the hands of git."""

import json
import sys
from pathlib import Path

import pytest

from cake.core import vendor
from cake.core.cli import main
from cake.core.testing.checkouts import Checkout
from cake.core.vendor import VendorError

A, B, C = "a" * 40, "b" * 40, "c" * 40
SOURCE = str(Path(vendor.__file__).parents[3])
TOOL = (
    f"import sys\nsys.path.insert(0, {SOURCE!r})\n"
    "from cake.core.cli import main\nsys.exit(main(['vendor', *sys.argv[1:]]))\n"
)


def package(commit=A, source="fi", **files):
    files = {name.replace("_", "."): blob for name, blob in (files or {"x_cu": "0" * 40}).items()}
    return {"source": source, "commit": commit, "path": "p", "files": {"VENDORED.txt": "1" * 40, **files}}


def text(**packages):
    return json.dumps({"schema": 1, "packages": {k: v for k, v in packages.items() if v is not None}})


@pytest.fixture
def merge(tmp_path):
    """merge(base, ours, theirs): (merged packages, conflicts)."""

    def run(base, ours, theirs):
        paths = [tmp_path / name for name in ("base", "ours", "theirs")]
        for path, content in zip(paths, (base, ours, theirs), strict=True):
            path.write_text(content)
        conflicts = vendor.merge(*paths, "x/_vendor/VENDORED.json")
        return json.loads(paths[1].read_text())["packages"], conflicts

    return run


def test_each_side_gives_what_it_alone_changed(merge):
    old, new, other = package(A, "self"), package(B, "self"), package(C, "miles-pr")
    merged, conflicts = merge(text(a=old, gone=other), text(a=new, gone=other), text(a=old, added=other))
    assert (merged, conflicts) == ({"a": new, "added": other}, [])
    merged, conflicts = merge(text(a=old), text(a=new), text(a=new))
    assert (merged, conflicts) == ({"a": new}, [])
    merged, conflicts = merge("", text(a=old), text(b=other))  # both sides brought the file
    assert (merged, conflicts) == ({"a": old, "b": other}, [])
    merged, conflicts = merge(text(a=old), text(), text(a=old))
    assert (merged, conflicts) == ({}, [])


def test_what_both_changed_is_a_conflict(merge):
    merged, conflicts = merge(text(a=package(A)), text(a=package(B)), text(a=package(C)))
    assert merged == {"a": package(B)}
    (conflict,) = conflicts
    assert conflict.startswith(
        "x/_vendor/VENDORED.json: both sides changed package 'a': ours has it from fi at "
        f"{B[:12]}, theirs has it from fi at {C[:12]}"
    )
    merged, (conflict,) = merge(text(a=package(A)), text(), text(a=package(C)))
    assert merged == {}
    assert "ours removed it, theirs has it from fi" in conflict


def test_two_commits_of_one_source_are_a_conflict(merge):
    """Ours upgraded what there was, theirs added a package from the old commit."""
    merged, conflicts = merge(
        text(a=package(A)), text(a=package(B)), text(a=package(A), b=package(A, y_cu="2" * 40))
    )
    assert set(merged) == {"a", "b"}
    (conflict,) = conflicts
    assert f"source 'fi' would come from 2 commits ('b' from {A[:12]}, 'a' from {B[:12]})" in conflict


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_side_that_cannot_be_read(merge, tmp_path, broken, capsys):
    sides = [text(a=package(A))] * 3
    sides[broken] = "<<<<<<< ours\n"
    who = ("the common ancestor", "our side", "their side")[broken]
    with pytest.raises(VendorError, match=rf"VENDORED\.json \({who}\) can't be read"):
        merge(*sides)
    assert (tmp_path / "ours").read_text() == sides[1]
    words = [str(tmp_path / name) for name in ("base", "ours", "theirs")]
    assert main(["vendor", "merge", *words, "VENDORED.json"]) == 1
    assert f"({who}) can't be read" in capsys.readouterr().err
    assert main(["vendor", "merge", words[0]]) == 2


# ---- git

OWN = {
    "packages/cake-toy/src/cake/toy/api.py": "",
    "tools/vendor_cake.py": TOOL,
    ".gitattributes": "* text=auto\n",
}
TABLE = "packages/cake-toy/src/cake/toy/_vendor/VENDORED.json"


@pytest.fixture
def upstream(tmp_path):
    """Two commits of three packages of headers."""
    upstream = Checkout(tmp_path / "upstream")
    names = [f"flashinfer/experimental/{name}/x.cuh" for name in "abc"]
    upstream.commit({name: f"// {name}\n// two lines\n" for name in names})
    upstream.commit({name: f"// {name}\n// newer\n" for name in names})
    return upstream


@pytest.fixture
def own(tmp_path, monkeypatch):
    own = Checkout(tmp_path / "own")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    own.commit(OWN)
    assert main(["vendor", "merge", "--install", "--repo", str(own.root)]) == 0
    own.commit()
    return own


def fi(own, upstream, *names, commit="main"):
    vendor.vendor_fi("toy", own.root, upstream.root, dict.fromkeys(names), commit)
    own.commit()


def packages(own):
    return json.loads((own.root / TABLE).read_text())["packages"]


def test_installing_is_one_command(own, capsys):
    attributes = (own.root / ".gitattributes").read_text()
    assert attributes.startswith("* text=auto\n")
    assert own.git("check-attr", "merge", "--", TABLE).endswith(": merge: cake-vendored")
    assert own.git("check-attr", "merge", "--", TABLE.replace("VENDORED.json", "a/x.cu")).endswith(": unset")
    driver = own.git("config", "merge.cake-vendored.driver")
    assert driver == "python3 tools/vendor_cake.py merge %O %A %B %P"
    assert main(["vendor", "merge", "--install", "--repo", str(own.root)]) == 0
    assert (own.root / ".gitattributes").read_text() == attributes
    (own.root / "tools/vendor_cake.py").unlink()
    vendor.install_merge(own.root)
    assert own.git("config", "merge.cake-vendored.driver") == "cake vendor merge %O %A %B %P"


def test_branches_that_add_packages_merge(own, upstream):
    fi(own, upstream, "a")
    own.git("checkout", "-q", "-b", "side")
    fi(own, upstream, "b")
    own.git("checkout", "-q", "main")
    fi(own, upstream, "c")
    own.git("merge", "-q", "-m", "merge", "side")
    assert set(packages(own)) == {"a", "b", "c"}
    assert own.git("status", "--porcelain") == ""
    assert vendor.check([], own.root) == {"toy": []}


def test_branches_with_two_commits_conflict(own, upstream):
    fi(own, upstream, "a", commit="main~1")
    own.git("checkout", "-q", "-b", "side")
    fi(own, upstream, "b", commit="main~1")
    own.git("checkout", "-q", "main")
    fi(own, upstream, "a")
    said = own.git("merge", "-q", "-m", "merge", "side", status=1)
    assert "VENDORED.json" in said
    assert own.git("diff", "--name-only", "--diff-filter=U") == TABLE
    (wrong,) = vendor.check([], own.root)["toy"]
    assert "source 'fi' comes from 2 commits" in wrong
    vendor.vendor_fi("toy", own.root, upstream.root, {}, "main")  # what the message says to do
    own.commit()
    assert vendor.check([], own.root) == {"toy": []}


def test_no_file_is_mixed_from_two_sides(own, upstream):
    """Lines that would merge textually make a file that no upstream has."""
    fi(own, upstream, "a", commit="main~1")
    own.git("checkout", "-q", "-b", "side")
    fi(own, upstream, "a")
    own.git("checkout", "-q", "main")
    name = "flashinfer/experimental/a/x.cuh"
    upstream.git("checkout", "-q", "main~1")
    upstream.commit({name: "// another first line\n// two lines\n"})
    fi(own, upstream, "a", commit="HEAD")
    own.git("merge", "-q", "-m", "merge", "side", status=1)
    unmerged = own.git("diff", "--name-only", "--diff-filter=U").splitlines()
    assert [Path(name).name for name in unmerged] == ["VENDORED.json", "VENDORED.txt", "x.cuh"]
    assert "<<<<" not in (own.root / Path(TABLE).parent / "a/x.cuh").read_text()


def test_without_the_driver_git_merges_lines_and_check_sees_it(own, upstream):
    own.git("config", "--remove-section", "merge.cake-vendored")
    fi(own, upstream, "a", commit="main~1")
    own.git("checkout", "-q", "-b", "side")
    fi(own, upstream, "b", commit="main~1")
    own.git("checkout", "-q", "main")
    fi(own, upstream, "a")
    own.git("merge", "-q", "-m", "merge", "side")  # a clean merge, of lines
    (wrong,) = vendor.check([], own.root)["toy"]
    assert "source 'fi' comes from 2 commits" in wrong
