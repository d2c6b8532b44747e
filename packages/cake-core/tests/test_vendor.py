"""`cake vendor self` and `remove`, on small checkouts made here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cake.core import vendor
from cake.core.cli import main
from cake.core.testing.checkouts import Checkout, write_files
from cake.core.vendor import VendorError

RECORD = {"library": "toy", "arch": "sm_90a", "sources": ["toy.cu"]}
FILES = {
    "kernels/include/cake/ptx.cuh": "// ptx\n",
    "kernels/include/cake/tile.cuh": "// tile\r\nwith a carriage return\n",
    "kernels/tests/test_ptx.cu": "// a test\n",
    "kernels/state_chain/merge.cu": '#include "merge.cuh"\n',
    "kernels/state_chain/merge.cuh": "",
    "kernels/state_chain/build.json": json.dumps(
        {"schema": 1, "records": [{"library": "merge", "arch": "sm_90a", "sources": ["merge.cu"]}]}
    ),
    "packages/cake-core/src/cake/core/env.py": "",
    "packages/cake-toy/src/cake/toy/spec.py": "",
    "packages/cake-toy/src/cake/toy/csrc/toy.cu": "",
}


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path / "a checkout")
    checkout.commit(FILES)
    return checkout


@pytest.fixture
def repo(checkout):
    return checkout.root


@pytest.fixture
def folder(repo):
    return repo / "packages/cake-toy/src/cake/toy/_vendor"


def write(path, text):
    write_files(path.parent, {path.name: text})


def files_of(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def table(folder):
    return json.loads((folder / "VENDORED.json").read_text())["packages"]


def test_blob_ids_are_gits(checkout, repo):
    for name in ("kernels/include/cake/tile.cuh", "kernels/state_chain/merge.cuh"):
        assert vendor.blob_id((repo / name).read_bytes()) == checkout.git("rev-parse", f"HEAD:{name}")


def test_copy_and_check(checkout, repo, folder):
    copied = vendor.vendor_self("toy", repo)
    assert copied.changed
    assert files_of(folder) == [
        "NOTICE",
        "VENDORED.json",
        "cake/VENDORED.txt",
        "cake/include/cake/ptx.cuh",
        "cake/include/cake/tile.cuh",
    ]
    assert (folder / "cake/include/cake/tile.cuh").read_bytes() == FILES[
        "kernels/include/cake/tile.cuh"
    ].encode()
    head = checkout.git("rev-parse", "HEAD")
    notice = (folder / "cake/VENDORED.txt").read_bytes()
    assert f"source: self\npath:   kernels\ncommit: {head}\n" in notice.decode()
    assert table(folder) == {
        "cake": {
            "source": "self",
            "commit": head,
            "path": "kernels",
            "files": {
                "VENDORED.txt": vendor.blob_id(notice),
                **{
                    f"include/cake/{name}": checkout.git("rev-parse", f"HEAD:kernels/include/cake/{name}")
                    for name in ("ptx.cuh", "tile.cuh")
                },
            },
        }
    }
    assert vendor.check([], repo) == {"toy": []}
    assert list(folder.parent.glob(".*")) == []


def test_packages_share_one_commit(checkout, repo, folder):
    vendor.vendor_self("toy", repo)
    newer = checkout.commit({"kernels/include/cake/ptx.cuh": "// newer\n"})
    vendor.vendor_self("toy", repo, packages=["state_chain"])
    assert {name: package["commit"] for name, package in table(folder).items()} == dict.fromkeys(
        ("cake", "state_chain"), newer
    )
    assert sorted(table(folder)["state_chain"]["files"]) == [
        "VENDORED.txt",
        "build.json",
        "merge.cu",
        "merge.cuh",
    ]
    assert (folder / "cake/include/cake/ptx.cuh").read_text() == "// newer\n"
    newest = checkout.commit({"kernels/state_chain/merge.cuh": "// newest\n"})
    assert vendor.vendor_self("toy", repo).packages == ("cake", "state_chain")  # what is carried comes along
    assert table(folder)["cake"]["commit"] == table(folder)["state_chain"]["commit"] == newest
    assert vendor.check(["toy"], repo) == {"toy": []}


def test_copying_twice_changes_nothing(checkout, repo, folder):
    first = vendor.vendor_self("toy", repo)
    before = (folder / "VENDORED.json").read_bytes()
    checkout.commit({"packages/cake-toy/src/cake/toy/api.py": ""})
    second = vendor.vendor_self("toy", repo)
    assert (second.changed, second.commit) == (False, first.commit)
    assert (folder / "VENDORED.json").read_bytes() == before
    write(folder / "cake/include/cake/ptx.cuh", "// edited here\n")
    vendor.vendor_self("toy", repo)  # an edited copy is made good
    assert vendor.check([], repo) == {"toy": []}


def test_a_file_that_left_the_source_leaves_the_copy(checkout, repo, folder):
    vendor.vendor_self("toy", repo)
    checkout.git("rm", "-q", "kernels/include/cake/tile.cuh")
    checkout.commit()
    vendor.vendor_self("toy", repo)
    assert files_of(folder) == ["NOTICE", "VENDORED.json", "cake/VENDORED.txt", "cake/include/cake/ptx.cuh"]


def test_an_older_commit_by_name(checkout, repo, folder):
    old = checkout.git("rev-parse", "HEAD")
    checkout.commit({"kernels/include/cake/ptx.cuh": "// newer\n"})
    write(repo / "kernels/include/cake/ptx.cuh", "// not committed\n")
    assert vendor.vendor_self("toy", repo, commit="HEAD~1").commit == old
    assert (folder / "cake/include/cake/ptx.cuh").read_text() == "// ptx\n"


def test_uncommitted_sources_are_refused(repo, folder):
    write(repo / "kernels/tests/test_ptx.cu", "// not what is copied\n")
    vendor.vendor_self("toy", repo)
    write(repo / "kernels/include/cake/new.cuh", "")
    with pytest.raises(
        VendorError, match=r"no commit holds these changes: \?\? kernels/include/cake/new\.cuh; commit them"
    ):
        vendor.vendor_self("toy", repo)
    assert vendor.check([], repo) == {"toy": []}


@pytest.mark.parametrize(
    ("op", "arguments", "why"),
    [
        ("gone", {}, "has no op 'gone' .*it has: toy"),
        ("toy", {"commit": "nonsense"}, "rev-parse .*nonsense"),
        ("toy", {"commit": "--all"}, "rev-parse .*--all"),
        ("toy", {"packages": ["gone"]}, r"commit \w{12} has no files in kernels/gone"),
        ("toy", {"packages": ["../x"]}, "lower-case identifier, got '../x'"),
    ],
)
def test_what_cannot_be_copied(repo, folder, op, arguments, why):
    vendor.vendor_self("toy", repo)
    before = {name: (folder / name).read_bytes() for name in files_of(folder)}
    with pytest.raises(VendorError, match=why):
        vendor.vendor_self(op, repo, **arguments)
    assert {name: (folder / name).read_bytes() for name in files_of(folder)} == before


def test_links_are_refused(checkout, repo):
    (repo / "kernels/include/cake/link.cuh").symlink_to("ptx.cuh")
    checkout.commit()
    with pytest.raises(VendorError, match=r"link\.cuh is a link or submodule"):
        vendor.vendor_self("toy", repo)


def test_packages_of_other_sources_stay(checkout, repo, folder, tmp_path):
    vendor.vendor_self("toy", repo)
    upstream = Checkout(tmp_path / "upstream")
    upstream.commit({"flashinfer/experimental/other/x.cuh": "// other\n"})
    vendor.vendor_fi("toy", repo, upstream.root, {"other": None})
    other = table(folder)["other"]
    checkout.commit({"kernels/include/cake/ptx.cuh": "// newer\n"})
    vendor.vendor_self("toy", repo)
    assert table(folder)["other"] == other
    assert (folder / "other/x.cuh").read_text() == "// other\n"
    assert vendor.check([], repo) == {"toy": []}
    with pytest.raises(VendorError, match="package 'other' of toy comes from 'fi'"):
        vendor.vendor_self("toy", repo, packages=["other"])


def test_copies_of_an_older_cake_have_no_notice_and_get_one(checkout, repo, folder):
    vendor.vendor_self("toy", repo)
    (folder / "cake/VENDORED.txt").unlink()
    data = json.loads((folder / "VENDORED.json").read_text())
    del data["packages"]["cake"]["files"]["VENDORED.txt"]
    write(folder / "VENDORED.json", json.dumps(data))
    assert vendor.check([], repo) == {"toy": []}
    assert vendor.vendor_self("toy", repo).changed
    assert (folder / "cake/VENDORED.txt").exists()


def test_a_copy_that_check_would_refuse_is_not_made(checkout, repo, folder):
    vendor.vendor_self("toy", repo)
    before = {name: (folder / name).read_bytes() for name in files_of(folder)}
    checkout.git("rm", "-q", "kernels/state_chain/merge.cuh")
    checkout.commit()
    with pytest.raises(VendorError, match=r"so everything is as it was:\n.*merge\.cu:1: #include"):
        vendor.vendor_self("toy", repo, packages=["state_chain"])
    assert {name: (folder / name).read_bytes() for name in files_of(folder)} == before
    assert list(folder.parent.glob(".*")) == []


def test_a_copy_that_was_killed_between_its_renames_is_mended(checkout, repo, folder, capsys):
    vendor.vendor_self("toy", repo)
    before = {name: (folder / name).read_bytes() for name in files_of(folder)}
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom cake.core import vendor\n"
        "rename = Path.rename\n"
        "def once(self, target):\n    rename(self, target)\n    os._exit(9)\n"
        "Path.rename = once\nvendor.vendor_self('toy', Path(sys.argv[1]))\n"
    )
    checkout.commit({"kernels/include/cake/ptx.cuh": "// newer\n"})
    killed = subprocess.run([sys.executable, "-c", code, str(repo)], check=False)
    assert killed.returncode == 9
    assert not folder.exists()
    assert main(["vendor", "check", "--repo", str(repo)]) == 1
    assert f"toy: {folder} is missing, and {folder.parent}/._vendor-old-" in capsys.readouterr().out
    (left,) = folder.parent.glob("._vendor-old-*")
    assert {name: (left / name).read_bytes() for name in files_of(left)} == before
    assert vendor.vendor_self("toy", repo).changed
    assert (folder / "cake/include/cake/ptx.cuh").read_text() == "// newer\n"
    assert list(folder.parent.glob(".*")) == []
    assert vendor.check([], repo) == {"toy": []}


# ---- remove


def test_remove(repo, folder, capsys):
    vendor.vendor_self("toy", repo, packages=["state_chain"])
    assert main(["vendor", "remove", "toy", "state_chain", "--repo", str(repo)]) == 0
    assert "removed state_chain from" in capsys.readouterr().out
    assert sorted(table(folder)) == ["cake"]
    assert not (folder / "state_chain").exists()
    assert vendor.check([], repo) == {"toy": []}
    vendor.remove("toy", repo, ["cake"])
    assert not folder.exists()
    assert vendor.check([], repo) == {"toy": []}
    assert list(folder.parent.glob(".*")) == []


def test_what_is_needed_is_not_removed(repo, folder):
    vendor.vendor_self("toy", repo)
    write(folder.parent / "csrc/toy.cu", '#include <cake/ptx.cuh>\n#include "cake/ptx.cuh"\n')
    build = {"schema": 1, "include": ["../_vendor/cake/include"], "records": [RECORD]}
    write(folder.parent / "csrc/build.json", json.dumps(build))
    assert vendor.check([], repo) == {"toy": []}
    before = {name: (folder / name).read_bytes() for name in files_of(folder)}
    with pytest.raises(VendorError, match=r"csrc/toy\.cu:2: #include \"cake/ptx\.cuh\" is not a file"):
        vendor.remove("toy", repo, ["cake"])
    with pytest.raises(VendorError, match="toy carries no package 'gone'; it carries: cake"):
        vendor.remove("toy", repo, ["cake", "gone"])
    assert {name: (folder / name).read_bytes() for name in files_of(folder)} == before


@pytest.mark.parametrize("failing", [1, 2])
def test_all_or_nothing(checkout, repo, folder, monkeypatch, failing):
    vendor.vendor_self("toy", repo)
    before = {name: (folder / name).read_bytes() for name in files_of(folder)}
    checkout.commit({"kernels/include/cake/ptx.cuh": "// newer\n"})
    rename, calls = Path.rename, []

    def fail(self, target):
        calls.append(target)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(
        VendorError, match=r"could not be replaced \(No space left on device\); it is as it was"
    ):
        vendor.vendor_self("toy", repo)
    assert {name: (folder / name).read_bytes() for name in files_of(folder)} == before
    assert list(folder.parent.glob(".*")) == []


def test_an_op_without_copies_is_fine(repo):
    assert vendor.check([], repo) == {"toy": []}


def test_python_caches_are_no_extra_files(repo, folder):
    vendor.vendor_self("toy", repo)
    write(folder / "cake/__pycache__/x.pyc", "")
    assert vendor.check([], repo) == {"toy": []}


def test_the_command_finds_the_checkout_around_it(repo, folder, monkeypatch, capsys):
    monkeypatch.chdir(repo / "packages/cake-toy/src")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as inside a hook
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    assert main(["vendor", "self", "toy"]) == 0
    assert "copied cake at" in capsys.readouterr().out
    assert main(["vendor", "self", "toy"]) == 0
    assert "up to date: cake at" in capsys.readouterr().out
    assert main(["vendor", "check"]) == 0
    assert main(["vendor", "self", "gone"]) == 1
    assert "has no op 'gone'" in capsys.readouterr().err
    monkeypatch.chdir("/")
    assert main(["vendor", "self", "toy"]) == 2


def test_vendoring_needs_nothing_installed(repo):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from cake.core.cli import main; sys.exit(main(sys.argv[2:]))"
    )
    source = str(Path(vendor.__file__).parents[3])
    command = [sys.executable, "-S", "-c", code, source, "vendor", "self", "toy", "--repo", str(repo)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
    command[6:] = ["check", "--repo", str(repo)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
