"""`cake vendor check`: whatever isn't as VENDORED.json says is named, with its file and without git."""

import json
import shutil

import pytest

from cake.core import registry, vendor
from cake.core.cli import main
from cake.core.testing.checkouts import Checkout, write_files
from cake.core.vendor import _git

MERGE = {"schema": 1, "records": [{"library": "merge", "arch": "sm_90a", "sources": ["merge.cu"]}]}
FILES = {
    "kernels/include/cake/ptx.cuh": "// ptx\n",
    "kernels/include/cake/tile.cuh": "// tile\n",
    "kernels/state_chain/merge.cu": '#include "merge.cuh"\n',
    "kernels/state_chain/merge.cuh": "",
    "kernels/state_chain/build.json": json.dumps(MERGE),
    "packages/cake-toy/src/cake/toy/spec.py": "",
}


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path / "a checkout")
    checkout.commit(FILES)
    vendor.vendor_self("toy", checkout.root)
    return checkout


@pytest.fixture
def repo(checkout):
    return checkout.root


@pytest.fixture
def folder(repo):
    return repo / "packages/cake-toy/src/cake/toy/_vendor"


def write(path, text):
    write_files(path.parent, {path.name: text})


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
    elif how == "notice of a package":
        ptx = folder / "cake/VENDORED.txt"
        ptx.unlink()
    elif how == "stale commit":
        table = folder / "VENDORED.json"
        data = json.loads(table.read_text())
        data["packages"]["cake"]["commit"] = "1" * 40
        write(table, json.dumps(data))
        ptx = folder / "cake/VENDORED.txt"
    elif how == "wrong blob":
        table = folder / "VENDORED.json"
        data = json.loads(table.read_text())
        data["packages"]["cake"]["files"]["include/cake/ptx.cuh"] = "0" * 40
        write(table, json.dumps(data))
    elif how == "notice":
        ptx = folder / "NOTICE"
        ptx.unlink()
    elif how == "no table":
        ptx = folder / "VENDORED.json"
        ptx.unlink()
    elif how in ("not json", "schema", "short commit", "short blob", "climbing", "no files", "field", *MORE):
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
        elif how == "no such source":
            package["source"] = "elsewhere"
        elif how == "copy in a copy":
            package["files"]["include/_vendor/x.cuh"] = "0" * 40
        elif how == "added, not listed":
            package["added"] = ["gone.cuh"]
        elif how == "allows what there isn't":
            package["allow"] = {"everything": []}
        elif how == "module":
            package["module"] = "not a module"
        write(ptx, "{" if how == "not json" else json.dumps(data))
    return str(ptx)


MORE = (
    "no such source",
    "copy in a copy",
    "added, not listed",
    "allows what there isn't",
    "module",
)
SPOILED = [
    *("notice of a package", "stale commit", "wrong blob", *MORE),
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
    monkeypatch.setattr(_git, "git", None)
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
    notice, commits = vendor.check([], repo)["toy"]
    assert "cake/VENDORED.txt doesn't say what VENDORED.json says" in notice
    assert "source 'self' comes from 2 commits" in commits


def test_check_reads_each_build_json(repo, folder):
    vendor.vendor_self("toy", repo, packages=["state_chain"])
    (folder / "state_chain/merge.cuh").unlink()
    missing, include = vendor.check([], repo)["toy"]
    assert missing == f"{folder / 'state_chain/merge.cuh'} is missing"
    assert "merge.cu:1: #include" in include
    write(folder / "state_chain/build.json", "{")
    assert any(
        f"{folder / 'state_chain'}" in line and "not JSON" in line for line in vendor.check([], repo)["toy"]
    )


def test_check_reads_the_ops_own_build_json(repo, folder):
    own = {"schema": 1, "records": [{"library": "toy", "arch": "sm_90a", "sources": ["toy.cu"]}]}
    write(folder.parent / "csrc/build.json", json.dumps(own))
    (wrong,) = vendor.check([], repo)["toy"]
    assert "source csrc/toy.cu does not exist" in wrong


def test_history_does_not_matter_to_check(checkout, repo):
    """An sdist has none; a squash or rebase takes the recorded commit away."""
    recorded = checkout.git("rev-parse", "HEAD")
    tree = checkout.git("write-tree")
    checkout.git("reset", "-q", "--hard", checkout.git("commit-tree", tree, "-m", "all of it at once"))
    checkout.git("reflog", "expire", "--expire=now", "--all")
    checkout.git("gc", "-q", "--prune=now")
    assert not _git.has_commit(repo, recorded)
    assert vendor.check([], repo) == {"toy": []}
    (repo / ".git").rename(repo.parent / "gone")
    assert main(["vendor", "check", "--repo", str(repo)]) == 0


def test_an_installed_op_is_checked_where_it_lies(repo, folder, toy, monkeypatch, capsys):
    """As from a wheel: no checkout, no git, the declaration says where."""
    installed = registry.op_spec("toy").kernel_packages[0].root().parent
    shutil.copytree(folder, installed / "_vendor")
    monkeypatch.chdir("/")
    monkeypatch.setattr(_git, "git", None)
    assert main(["vendor", "check", "toy"]) == 0
    assert capsys.readouterr().out == "toy: ok\n"
    write(installed / "_vendor/cake/include/cake/ptx.cuh", "// ptX\n")
    assert main(["vendor", "check", "toy"]) == 1
    assert f"toy: {installed}/_vendor/cake/include/cake/ptx.cuh was changed" in capsys.readouterr().out
    assert main(["vendor", "check", "gone"]) == 1
    assert "gone" in capsys.readouterr().err
