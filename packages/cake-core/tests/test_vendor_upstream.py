"""`cake vendor check --upstream`: tables against the trees of the commits that they record."""

import json

import pytest

from cake.core import vendor
from cake.core.cli import main
from cake.core.testing.checkouts import Checkout, write_files
from cake.core.vendor import Generated, VendorError, Wanted

BUILD = json.dumps({"schema": 1, "records": [{"library": "a", "arch": "sm_100a", "sources": ["a.cu"]}]})
OWN = {
    "kernels/include/cake/ptx.cuh": "// ptx\n",
    "kernels/extra/x.cuh": "// x\n",
    "packages/cake-toy/src/cake/toy/api.py": "",
    "shim.in": "// shim\n",
}
FI = {
    "flashinfer/experimental/alpha/a.cu": "// a\n",
    "flashinfer/experimental/alpha/skipped.cu": "// skipped\n",
}
MILES = {
    "gen/registry.json": json.dumps({"programs": {"p": {"sources": ["p.cu", "b.cu"], "arch": "sm_103a"}}}),
    "gen/csrc/p.cu": "// p\n",
    "gen/csrc/b.cu": "// b\n",
    "gen/python.py": "",
}


@pytest.fixture
def own(tmp_path):
    own = Checkout(tmp_path / "own")
    own.commit(OWN)
    vendor.vendor_self("toy", own.root, packages=["extra"])
    return own


@pytest.fixture
def others(tmp_path, own):
    """source -> its checkout, with a package of each vendored into toy."""
    fi, miles = Checkout(tmp_path / "fi"), Checkout(tmp_path / "miles")
    fi.commit(FI)
    miles.commit(MILES)
    alpha = Wanted("", exclude=("skipped*",), build_json=BUILD.encode())
    vendor.vendor_fi("toy", own.root, fi.root, {"alpha": alpha})
    gen = Generated(Wanted("gen"), host_shim={"*/b.cu": "shim.in"})
    vendor.vendor_miles_pr("toy", own.root, miles.root, {"gen": gen})
    own.commit()
    return {"fi": fi, "miles-pr": miles}


@pytest.fixture
def check(own, capsys):
    def run(*words, status):
        assert main(["vendor", "check", "--upstream", "--repo", str(own.root), *words]) == status
        return capsys.readouterr().out.splitlines()

    return run


def edit(own, package, **fields):
    folder = own.root / "packages/cake-toy/src/cake/toy/_vendor"
    data = json.loads((folder / "VENDORED.json").read_text())
    data["packages"][package].update(fields)
    write_files(folder, {"VENDORED.json": json.dumps(data)})
    return folder / "VENDORED.json"


def test_every_source(check, own, others):
    words = [w for source, checkout in others.items() for w in ("--from", f"{source}={checkout.root}")]
    assert check(*words, status=0) == ["toy: ok"]
    for checkout in (own, *others.values()):  # later commits don't matter
        checkout.commit({"later.txt": "", "gen/csrc/p.cu": "// newer\n"})
    assert check(*words, status=0) == ["toy: ok"]
    lines = check("--from", f"fi={others['fi'].root}", status=1)
    assert len(lines) == 1
    assert "package gen comes from miles-pr; say where that is: --from miles-pr=CHECKOUT" in lines[0]
    assert main(["vendor", "check", "--upstream", "--repo", str(own.root), "--from", "elsewhere=x"]) == 2


def test_a_stale_commit(check, own):
    """The files are those of a later commit than the one on record."""
    first = own.git("rev-parse", "HEAD")
    own.commit({"kernels/include/cake/ptx.cuh": "// newer\n", "kernels/include/cake/more.cuh": ""})
    vendor.vendor_self("toy", own.root)
    assert check(status=0) == ["toy: ok"]
    table = edit(own, "cake", commit=first)
    edit(own, "extra", commit=first)
    lines = [line for line in check(status=1) if "VENDORED.txt" not in line]
    assert lines == [
        f"toy: {table}: package cake: commit {first[:12]} has no kernels/include/cake/more.cuh",
        f"toy: {table}: package cake: kernels/include/cake/ptx.cuh is "
        f"{vendor.blob_id(OWN['kernels/include/cake/ptx.cuh'].encode())} in commit {first[:12]}, "
        f"recorded is {vendor.blob_id(b'// newer' + bytes([10]))}",
    ]


def test_a_file_that_was_not_taken(check, own, others):
    edit(own, "alpha", options={})
    lines = check(
        "--from", f"fi={others['fi'].root}", "--from", f"miles-pr={others['miles-pr'].root}", status=1
    )
    assert len(lines) == 1
    assert "alpha/skipped.cu, which isn't recorded" in lines[0]


def test_a_rebase_of_our_own_history(check, own):
    old = own.git("rev-parse", "HEAD")
    tree = own.git("rev-parse", "HEAD^{tree}")
    new = own.git("commit-tree", tree, "-m", "the same, squashed")
    own.git("reset", "-q", "--hard", new)
    own.commit({"kernels/include/cake/ptx.cuh": "// newer\n"})
    own.git("reflog", "expire", "--expire=now", "--all")
    own.git("gc", "-q", "--prune=now")
    notes = check(status=0)
    assert notes[-1] == "toy: ok"
    assert f"package cake: commit {old[:12]} is gone, and {new[:12]} has the same files" in notes[0]
    assert f"package extra: commit {old[:12]} is gone, and {new[:12]} has the same files" in notes[1]
    own.git("reset", "-q", "--hard", own.git("commit-tree", own.git("rev-parse", "HEAD^{tree}"), "-m", "x"))
    own.git("reflog", "expire", "--expire=now", "--all")
    own.git("gc", "-q", "--prune=now")
    (line,) = [line for line in check(status=1) if not line.startswith("note: ")]
    assert f"package cake comes from commit {old}, which {own.root} doesn't have, nor one with" in line


def test_a_commit_that_the_other_checkout_lacks(check, own, others, tmp_path):
    elsewhere = Checkout(tmp_path / "elsewhere")
    elsewhere.commit({"x": ""})
    words = ["--from", f"fi={elsewhere.root}", "--from", f"miles-pr={others['miles-pr'].root}"]
    (line,) = check(*words, status=1)
    assert f"package alpha comes from commit {others['fi'].git('rev-parse', 'HEAD')}" in line
    assert f"which {elsewhere.root} doesn't have; fetch it there" in line
    (line,) = check("--from", f"fi={tmp_path / 'nowhere'}", *words[2:], status=1)
    assert "alpha" in line


def test_upstream_needs_the_checkout_with_the_ops(monkeypatch, capsys):
    monkeypatch.chdir("/")
    assert main(["vendor", "check", "--upstream"]) == 2
    assert "needs the checkout" in capsys.readouterr().err


def test_a_table_that_cannot_be_read(own):
    folder = own.root / "packages/cake-toy/src/cake/toy/_vendor"
    write_files(folder, {"VENDORED.json": "{"})
    with pytest.raises(VendorError, match=r"VENDORED\.json can't be read"):
        vendor.check_upstream([], own.root, {})
