"""`cake vendor self` and `check`, on small checkouts made here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cake.core import vendor
from cake.core.cli import main
from cake.core.vendor import VendorError

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


def git(repo, *words):
    identity = [
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "core.autocrlf=false",
        "-c",
        "commit.gpgsign=false",
    ]
    done = subprocess.run(
        ["git", "-C", str(repo), *identity, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(repo, **files):
    for name, text in files.items():
        write(repo / name, text)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "change")
    return git(repo, "rev-parse", "HEAD")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


@pytest.fixture
def repo(tmp_path):
    repo = tmp_path / "a checkout"
    repo.mkdir()
    git(repo, "init", "-q")
    commit(repo, **FILES)
    return repo


@pytest.fixture
def folder(repo):
    return repo / "packages/cake-toy/src/cake/toy/_vendor"


def files_of(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def table(folder):
    return json.loads((folder / "VENDORED.json").read_text())["packages"]


def test_blob_ids_are_gits(repo):
    for name in ("kernels/include/cake/tile.cuh", "kernels/state_chain/merge.cuh"):
        assert vendor.blob_id((repo / name).read_bytes()) == git(repo, "rev-parse", f"HEAD:{name}")


def test_copy_and_check(repo, folder):
    copied = vendor.vendor_self("toy", repo)
    assert copied.changed
    assert files_of(folder) == [
        "NOTICE",
        "VENDORED.json",
        "cake/include/cake/ptx.cuh",
        "cake/include/cake/tile.cuh",
    ]
    assert (folder / "cake/include/cake/tile.cuh").read_bytes() == FILES[
        "kernels/include/cake/tile.cuh"
    ].encode()
    assert table(folder) == {
        "cake": {
            "source": "self",
            "commit": git(repo, "rev-parse", "HEAD"),
            "path": "kernels",
            "files": {
                f"include/cake/{name}": git(repo, "rev-parse", f"HEAD:kernels/include/cake/{name}")
                for name in ("ptx.cuh", "tile.cuh")
            },
        }
    }
    assert vendor.check([], repo) == {"toy": []}
    assert list(folder.parent.glob(".*")) == []


def test_packages_share_one_commit(repo, folder):
    vendor.vendor_self("toy", repo)
    newer = commit(repo, **{"kernels/include/cake/ptx.cuh": "// newer\n"})
    vendor.vendor_self("toy", repo, packages=["state_chain"])
    assert {name: package["commit"] for name, package in table(folder).items()} == dict.fromkeys(
        ("cake", "state_chain"), newer
    )
    assert sorted(table(folder)["state_chain"]["files"]) == ["build.json", "merge.cu", "merge.cuh"]
    assert (folder / "cake/include/cake/ptx.cuh").read_text() == "// newer\n"
    newest = commit(repo, **{"kernels/state_chain/merge.cuh": "// newest\n"})
    assert vendor.vendor_self("toy", repo).packages == ("cake", "state_chain")  # what is carried comes along
    assert table(folder)["cake"]["commit"] == table(folder)["state_chain"]["commit"] == newest
    assert vendor.check(["toy"], repo) == {"toy": []}


def test_copying_twice_changes_nothing(repo, folder):
    first = vendor.vendor_self("toy", repo)
    before = (folder / "VENDORED.json").read_bytes()
    commit(repo, **{"packages/cake-toy/src/cake/toy/api.py": ""})
    second = vendor.vendor_self("toy", repo)
    assert (second.changed, second.commit) == (False, first.commit)
    assert (folder / "VENDORED.json").read_bytes() == before
    write(folder / "cake/include/cake/ptx.cuh", "// edited here\n")
    vendor.vendor_self("toy", repo)  # an edited copy is made good
    assert vendor.check([], repo) == {"toy": []}


def test_a_file_that_left_the_source_leaves_the_copy(repo, folder):
    vendor.vendor_self("toy", repo)
    git(repo, "rm", "-q", "kernels/include/cake/tile.cuh")
    commit(repo)
    vendor.vendor_self("toy", repo)
    assert files_of(folder) == ["NOTICE", "VENDORED.json", "cake/include/cake/ptx.cuh"]


def test_an_older_commit_by_name(repo, folder):
    old = git(repo, "rev-parse", "HEAD")
    commit(repo, **{"kernels/include/cake/ptx.cuh": "// newer\n"})
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


def test_links_are_refused(repo):
    (repo / "kernels/include/cake/link.cuh").symlink_to("ptx.cuh")
    commit(repo)
    with pytest.raises(VendorError, match=r"link\.cuh is a link or submodule"):
        vendor.vendor_self("toy", repo)


def test_packages_of_other_sources_stay(repo, folder):
    vendor.vendor_self("toy", repo)
    data = json.loads((folder / "VENDORED.json").read_text())
    write(folder / "other/x.cu", "// other\n")
    other = {
        "source": "fi",
        "commit": "0" * 40,
        "path": "a/b",
        "files": {"x.cu": vendor.blob_id(b"// other\n")},
    }
    data["packages"]["other"] = other
    write(folder / "VENDORED.json", json.dumps(data))
    assert vendor.check([], repo) == {"toy": []}
    commit(repo, **{"kernels/include/cake/ptx.cuh": "// newer\n"})
    vendor.vendor_self("toy", repo)
    assert table(folder)["other"] == other
    assert vendor.check([], repo) == {"toy": []}
    with pytest.raises(VendorError, match="package 'other' of toy comes from 'fi'"):
        vendor.vendor_self("toy", repo, packages=["other"])


@pytest.mark.parametrize("failing", [1, 2])
def test_all_or_nothing(repo, folder, monkeypatch, failing):
    vendor.vendor_self("toy", repo)
    before = {name: (folder / name).read_bytes() for name in files_of(folder)}
    commit(repo, **{"kernels/include/cake/ptx.cuh": "// newer\n"})
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


# ---- check


def spoil(folder, how):
    """Spoil the copy; returns the name that the complaint must give."""
    ptx = folder / "cake/include/cake/ptx.cuh"
    if how == "changed":
        write(ptx, "// ptX\n")
    elif how == "line ends":
        write(ptx, "// ptx\r\n")
    elif how == "missing":
        ptx.unlink()
    elif how == "extra":
        ptx = folder / "cake/include/cake/extra.cuh"
        write(ptx, "")
    elif how == "extra beside":
        ptx = folder / "stray.txt"
        write(ptx, "")
    elif how == "link":
        ptx.unlink()
        ptx.symlink_to("tile.cuh")
    elif how == "notice":
        ptx = folder / "NOTICE"
        ptx.unlink()
    elif how == "no table":
        ptx = folder / "VENDORED.json"
        ptx.unlink()
    elif how in ("not json", "schema", "short commit", "short blob", "climbing", "no files", "field"):
        ptx = folder / "VENDORED.json"
        data = json.loads(ptx.read_text())
        package = data["packages"]["cake"]
        if how == "schema":
            data["schema"] = 0
        elif how == "short commit":
            package["commit"] = "abc123"
        elif how == "short blob":
            package["files"]["include/cake/ptx.cuh"] = "abc"
        elif how == "climbing":
            package["files"] = {"../../api.py": "0" * 40}
        elif how == "no files":
            package["files"] = {}
        elif how == "field":
            package["extra"] = 1
        write(ptx, "{" if how == "not json" else json.dumps(data))
    return str(ptx)


SPOILED = [
    *(
        "changed",
        "line ends",
        "missing",
        "extra",
        "extra beside",
        "link",
        "notice",
        "no table",
        "not json",
        "schema",
    ),
    *("short commit", "short blob", "climbing", "no files", "field"),
]


@pytest.mark.parametrize("how", SPOILED)
def test_check_names_what_is_wrong_without_git(repo, folder, monkeypatch, capsys, how):
    vendor.vendor_self("toy", repo)
    monkeypatch.setattr(vendor, "_git", None)
    assert main(["vendor", "check", "--repo", str(repo)]) == 0
    assert capsys.readouterr().out == "toy: ok\n"
    name = spoil(folder, how)
    assert main(["vendor", "check", "toy", "--repo", str(repo)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"toy: {name}")


def test_check_wants_one_commit_per_source(repo, folder):
    vendor.vendor_self("toy", repo, packages=["state_chain"])
    path = folder / "VENDORED.json"
    data = json.loads(path.read_text())
    data["packages"]["cake"]["commit"] = "1" * 40
    write(path, json.dumps(data))
    (wrong,) = vendor.check([], repo)["toy"]
    assert "source 'self' comes from 2 commits" in wrong


def test_check_reads_each_build_json(repo, folder):
    git(repo, "rm", "-q", "kernels/state_chain/merge.cuh")
    commit(repo)
    vendor.vendor_self("toy", repo, packages=["state_chain"])
    (wrong,) = vendor.check([], repo)["toy"]
    assert "merge.cu:1: #include" in wrong


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
    source = str(Path(vendor.__file__).parents[2])
    command = [sys.executable, "-S", "-c", code, source, "vendor", "self", "toy", "--repo", str(repo)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
    command[6:] = ["check", "--repo", str(repo)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
