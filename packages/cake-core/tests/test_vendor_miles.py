"""`cake vendor miles-pr`: generated sources, a build.json made of their registry, a host shim of ours."""

import json

import pytest

from cake.core import build, vendor
from cake.core.cli import main
from cake.core.testing.checkouts import Checkout, write_files
from cake.core.vendor import Generated, VendorError, Wanted

AT = "miles/kernels/chain"
REGISTRY = {
    "version": 3,
    "programs": {
        "chain_fwd": {
            "kernel": "kernel_fwd",
            "sources": ["chain/fwd_kernel.cu", "chain/fwd_binding.cu"],
            "arches": ["sm_100a", "sm_103a"],
            "compile_flags": ["--use_fast_math"],
            "ffi_entry": "go",
            "launch": {"block": [256, 1, 1]},
        },
        "chain_bwd": {"sources": ["chain/bwd_kernel.cu", "chain/bwd_binding.cu"], "arch": "sm_103a"},
        "chain_split": {
            "arches": ["sm_100a", "sm_107a"],
            "sources": {"sm_100a": ["chain/old.cu"], "sm_107a": "csrc/chain/new.cu"},
        },
    },
}
UPSTREAM = {
    f"{AT}/registry.json": json.dumps(REGISTRY),
    f"{AT}/csrc/chain/fwd_kernel.cu": '#include "chain/common.cuh"\n',
    f"{AT}/csrc/chain/fwd_binding.cu": '#include "miles_utils.h"\n',
    f"{AT}/csrc/chain/bwd_kernel.cu": '#include "common.cuh"\n',
    f"{AT}/csrc/chain/bwd_binding.cu": '#include "miles_utils.h"\n',
    f"{AT}/csrc/chain/old.cu": "",
    f"{AT}/csrc/chain/new.cu": "",
    f"{AT}/csrc/chain/common.cuh": "// common\n",
    f"{AT}/LICENSE": "theirs\n",
    f"{AT}/python/loader.py": "import miles\n",
    "README.md": "",
}
SHIM = "// @package@: @program@ calls @kernel@ as @entry@; bra @p1;\nvoid @entry@() { @kernel@(); }\n"
TEMPLATE = "packages/cake-toy/shim.cu.in"
SPEC = 'SPEC = OpSpec(kernel_packages=(KernelPackage("chain", "cake.toy", path="_vendor/chain"),))\n'
BINDINGS = {"host_shim": {"*_binding.cu": TEMPLATE}}


@pytest.fixture
def upstream(tmp_path):
    upstream = Checkout(tmp_path / "miles")
    upstream.commit(UPSTREAM)
    return upstream


@pytest.fixture
def repo(tmp_path):
    files = {"packages/cake-toy/src/cake/toy/spec.py": SPEC, TEMPLATE: SHIM}
    return write_files(tmp_path / "ops", files)


@pytest.fixture
def folder(repo):
    return repo / "packages/cake-toy/src/cake/toy/_vendor"


@pytest.fixture
def miles(repo, upstream):
    """miles(**Generated's fields, include_files=, exclude=): vendor "chain" into toy from HEAD."""

    def run(path=AT, include_files=(), exclude=(), **made):
        wanted = Generated(Wanted(path, include_files, exclude), **made)
        return vendor.vendor_miles_pr("toy", repo, upstream.root, {"chain": wanted})

    return run


def records(folder):
    return {(r.library, r.arch): r for r in build.read_package(folder / "chain").records}


def table(folder):
    return json.loads((folder / "VENDORED.json").read_text())["packages"]


def test_sources_shims_and_a_build_json(miles, upstream, repo, folder):
    miles(**BINDINGS)
    chain = folder / "chain"
    files = sorted(p.relative_to(chain).as_posix() for p in chain.rglob("*") if p.is_file())
    assert files == sorted(
        ["LICENSE", "VENDORED.txt", "build.json", "registry.json"]
        + [f"csrc/chain/{n}" for n in ("bwd_binding.cu", "bwd_kernel.cu", "common.cuh", "fwd_binding.cu")]
        + [f"csrc/chain/{n}" for n in ("fwd_kernel.cu", "new.cu", "old.cu")]
    )
    assert (chain / "csrc/chain/fwd_binding.cu").read_text() == (
        "// chain: chain_fwd calls kernel_fwd as go; bra @p1;\nvoid go() { kernel_fwd(); }\n"
    )
    assert "void run() { kernel_chain_bwd(); }" in (chain / "csrc/chain/bwd_binding.cu").read_text()
    assert (chain / "csrc/chain/fwd_kernel.cu").read_text() == UPSTREAM[f"{AT}/csrc/chain/fwd_kernel.cu"]
    found = records(folder)
    assert set(found) == {
        ("chain_fwd", "sm_100a"),
        ("chain_fwd", "sm_103a"),
        ("chain_bwd", "sm_103a"),
        ("chain_split", "sm_100a"),
        ("chain_split", "sm_107a"),
    }
    forward = found["chain_fwd", "sm_103a"]
    assert forward.sources == ("csrc/chain/fwd_kernel.cu", "csrc/chain/fwd_binding.cu")
    assert (forward.flags, forward.functions) == (("--use_fast_math",), ("go",))
    assert found["chain_split", "sm_107a"].sources == ("csrc/chain/new.cu",)
    entry = table(folder)["chain"]
    assert entry["added"] == ["build.json", "csrc/chain/bwd_binding.cu", "csrc/chain/fwd_binding.cu"]
    assert entry["options"] == {"host_shim": {"*_binding.cu": TEMPLATE}}
    assert vendor.check([], repo) == {"toy": []}


def test_include_exclude_and_what_every_record_gets(miles, folder):
    miles(
        include_files=("csrc/chain/fwd*", "*.cuh"),
        exclude=("*/fwd_binding.cu",),
        host_shim={"*/fwd_binding.cu": TEMPLATE},
        include=("../cake/include",),
        link=("cuda",),
        allow=("spills",),
    )
    found = records(folder)
    assert set(found) == {("chain_fwd", "sm_100a"), ("chain_fwd", "sm_103a")}
    record = found["chain_fwd", "sm_100a"]
    assert record.link == ("cuda",)
    assert record.allow == {"spills": ("*",)}
    assert build.read_package(folder / "chain").include == ("chain/csrc", "cake/include")
    assert not (folder / "chain/csrc/chain/old.cu").exists()


def test_arch_from(miles, folder):
    miles(**BINDINGS, arch_from={"sm_107a": "sm_103a"})
    found = records(folder)
    assert {name for name, arch in found if arch == "sm_107a"} == {"chain_fwd", "chain_bwd", "chain_split"}
    assert found["chain_fwd", "sm_107a"].sources == found["chain_fwd", "sm_103a"].sources
    assert found["chain_split", "sm_107a"].sources == ("csrc/chain/new.cu",)  # the registry's own
    assert [arch for name, arch in found if name == "chain_bwd"] == ["sm_103a", "sm_107a"]


def test_an_upgrade_does_what_was_recorded(miles, upstream, repo, folder):
    options = {"arch_from": {"sm_107a": "sm_103a"}, "link": ("cuda",), "allow": ("spills", "C7519")}
    miles(**BINDINGS, **options, exclude=("*/old.cu",))
    before = table(folder)["chain"]
    changed = upstream.commit({f"{AT}/csrc/chain/common.cuh": "// newer\n"})
    copied = vendor.vendor_miles_pr("toy", repo, upstream.root, {})
    after = table(folder)["chain"]
    assert copied.commit == after["commit"] == changed
    assert after["options"] == before["options"]
    assert [name for name in after["files"] if after["files"][name] != before["files"][name]] == [
        "VENDORED.txt",
        "csrc/chain/common.cuh",
    ]
    write_files(repo, {TEMPLATE: SHIM + "// and more\n"})
    again = vendor.vendor_miles_pr("toy", repo, upstream.root, {"chain": None})
    assert again.changed
    assert (folder / "chain/csrc/chain/bwd_binding.cu").read_text().endswith("// and more\n")


def test_a_shim_header_that_several_programs_share(miles, upstream, repo, folder):
    upstream.commit({f"{AT}/csrc/host.cuh": "// theirs\n"})
    write_files(repo, {TEMPLATE: "// of @package@\n", "bind.in": ""})
    shims = {"csrc/host.cuh": TEMPLATE, "*_binding.cu": "bind.in"}
    miles(host_shim=shims)
    assert (folder / "chain/csrc/host.cuh").read_text() == "// of chain\n"
    write_files(repo, {TEMPLATE: "// @kernel@\n"})
    with pytest.raises(VendorError, match=r"@kernel@ has no value, since 0 programs list that file"):
        miles(host_shim=shims)
    write_files(repo, {TEMPLATE: "// @knl@\n"})
    with pytest.raises(VendorError, match=r"put in place of csrc/host\.cuh: @knl@ is unknown"):
        miles(host_shim=shims)


def change(**fields):
    program = {**REGISTRY["programs"]["chain_bwd"], **fields}
    return json.dumps({"programs": {"chain_bwd": {k: v for k, v in program.items() if v is not None}}})


@pytest.mark.parametrize(
    ("registry", "why"),
    [
        (None, "has no registry.json"),
        ("{", r"registry\.json isn't JSON"),
        ("[]", "at least one of programs"),
        ('{"programs": {}}', "at least one of programs"),
        ('{"programs": {"Big": {}}}', "program 'Big' must be a lower-case identifier"),
        ('{"programs": {"a": 1}}', "program 'a' must be an object"),
        (change(arch=None), "program 'chain_bwd' must have arches"),
        (change(arch="103"), "must have arches like"),
        (change(compile_flags="-O3"), "a list of texts for compile_flags"),
        (change(ffi_entry=1), "texts for ffi_entry"),
        (change(sources=[]), "plain paths for its sources of sm_103a"),
        (change(sources=["../x.cu"]), "plain paths for its sources of sm_103a"),
        (change(sources=["chain/gone.cu"]), r"lists the source 'chain/gone\.cu', which miles/kernels/chain"),
        (change(compile_flags=["-I/usr"]), r"flag '-I/usr' names a path"),
    ],
)
def test_a_registry_that_cannot_be_read(miles, upstream, folder, registry, why):
    upstream.commit({f"{AT}/registry.json": registry})
    with pytest.raises(VendorError, match=why):
        miles(**BINDINGS)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"path": ""}, "package chain is new, so say where it is: chain=FOLDER"),
        ({"path": "miles/gone"}, "miles/gone at .* has no registry.json"),
        ({"exclude": ("*.hpp",)}, r"'\*\.hpp' matches no file"),
        ({"exclude": ("csrc/*",)}, "no program has all its sources among the files that are copied"),
        ({"host_shim": {"*.gone": TEMPLATE}}, r"'\*\.gone' \(--host-shim\) matches no file"),
        ({"host_shim": {"*_binding.cu": "gone.in"}}, r"template must be a file inside .*'gone\.in'"),
        ({"host_shim": {"*_binding.cu": "../x"}}, r"template must be a file inside .*'\.\./x'"),
        ({**BINDINGS, "arch_from": {"107": "sm_103a"}}, "must be like sm_107a=sm_103a, got 107=sm_103a"),
        ({**BINDINGS, "arch_from": {"sm_120a": "sm_90a"}}, "no program for sm_120a comes of --arch-from"),
        ({**BINDINGS, "link": ("m",)}, "link may name cuda alone"),
        ({**BINDINGS, "include": ("../../csrc",)}, r"include folder '\.\./\.\./csrc' leaves _vendor"),
        ({}, r"everything is as it was:\n.*"),
    ],
)
def test_what_is_refused(miles, folder, wanted, why):
    if not wanted:  # their binding includes a header of theirs that isn't there
        why += r'fwd_binding\.cu:1: #include "miles_utils\.h" is not a file|bwd_binding'
    with pytest.raises(VendorError, match=why):
        miles(**wanted)
    assert not folder.exists()


def test_one_commit_per_op_and_source(miles, upstream, repo, folder):
    miles(**BINDINGS)
    upstream.commit({f"{AT}2/{name[len(AT) + 1 :]}": text for name, text in UPSTREAM.items() if AT in name})
    spec = SPEC.replace("),)", "), KernelPackage('second', 'cake.toy', '_vendor/second'))")
    write_files(repo, {"packages/cake-toy/src/cake/toy/spec.py": spec})
    wanted = {"second": Generated(Wanted(f"{AT}2"), **BINDINGS)}
    vendor.vendor_miles_pr("toy", repo, upstream.root, wanted)
    assert len({package["commit"] for package in table(folder).values()}) == 1
    assert vendor.check([], repo) == {"toy": []}


def test_the_command(upstream, repo, folder, capsys):
    command = ["vendor", "miles-pr", "toy", f"chain={AT}", "--repo", str(repo), "--from", str(upstream.root)]
    words = ["--host-shim", f"*_binding.cu={TEMPLATE}", "--arch-from", "sm_107a=sm_103a", "--link", "cuda"]
    more = ["--include-folder", "../cake/include", "--allow-remark", "spills", "--exclude", "*/old.cu"]
    assert main([*command, *words, *more]) == 0
    assert "copied chain at" in capsys.readouterr().out
    assert records(folder)["chain_bwd", "sm_107a"].link == ("cuda",)
    assert main(["vendor", "check", "--repo", str(repo)]) == 0
    with pytest.raises(SystemExit):
        main([*command, "--arch-from", "sm_107a"])
    assert "must be two words joined by '='" in capsys.readouterr().err
