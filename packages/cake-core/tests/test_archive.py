"""Compiled libraries that travel: the archive, what an import refuses, and caches that are only read."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cake.core import build, cache, config, loader, toolchain
from cake.core._archive import ArchiveError, export_archive, import_archive, read_archive
from cake.core.cli import main
from cake.core.errors import BuildError, NoBuildError, ToolchainError
from cake.core.testing import installed_distribution, write_distribution
from cake.core.testing.toolchain import write_package

ARCH = "sm_90a"
SPEC = """
from cake.core.spec import KernelPackage, OpSpec
SPEC = OpSpec("box", "cake-box", kernel_packages=(KernelPackage("box", "cake_box"),))
"""
BUILD = {
    "schema": 1,
    "records": [
        {"library": name, "arch": ARCH, "sources": [f"{name}.cu"], "functions": ["answer"]}
        for name in ("box_in", "box_out")
    ],
}
FILES = {
    "cake_box/__init__.py": "",
    "cake_box/spec.py": SPEC,
    "cake_box/csrc/build.json": json.dumps(BUILD),
    "cake_box/csrc/box_in.cu": "// in\n",
    "cake_box/csrc/box_out.cu": "// out\n",
}
OPS = {"box": "cake_box.spec:SPEC"}


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "the cache"))
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: None)
    monkeypatch.setattr(toolchain, "_wheel_nvccs", list)
    yield
    loader.release()


@pytest.fixture
def box(tmp_path):
    """The op "box", installed, with two libraries."""
    with installed_distribution(tmp_path / "site", "cake-box", ops=OPS, files=FILES) as site:
        yield site


@pytest.fixture
def archive(kit, box, tmp_path, monkeypatch):
    """What a machine with a compiler exported; the cache is empty again."""
    assert main(["prebuild", "box", "--arch", "9.0"]) == 0
    export_archive(tmp_path / "box.zip", [ARCH], ["box"])
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "another cache"))
    loader.release()
    return tmp_path / "box.zip"


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """Takes nvcc and g++ away, and every other program."""

    def take() -> None:
        (tmp_path / "nothing").mkdir()
        monkeypatch.delenv("CAKE_NVCC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
        with pytest.raises(ToolchainError, match="no nvcc"):
            toolchain.find_nvcc()
        with pytest.raises(ToolchainError, match="PATH has none"):
            toolchain.host_compiler()

    return take


def names():
    """What is published, checked; whatever is half there fails the test."""
    listed = cache.entries()
    assert [why for _, _, why in listed] == [""] * len(listed)
    assert not (cache.folder() / "tmp").exists() or list((cache.folder() / "tmp").iterdir()) == []
    return sorted(entry.meta["library"] for _, entry, _ in listed)


def rewrite(path, change, index=None):
    """Change an archive's members: ``change(name -> bytes)`` in place; ``index`` changes the index."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    if index is not None:
        listing = json.loads(members["index.json"])
        index(listing)
        members["index.json"] = json.dumps(listing).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def listed(data):
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


# ---- the way it is meant


def test_a_machine_without_compilers_runs_what_another_built(archive, kit, no_compiler, capsys):
    no_compiler()
    with pytest.raises(ToolchainError, match="box_in for sm_90a is not in the cache"):
        loader.load("box", "box_in", arch=ARCH)
    assert main(["cache", "import", str(archive)]) == 0
    assert f"2 libraries are new in {cache.folder()}, 0 were there" in capsys.readouterr().out
    assert names() == ["box_in", "box_out"]
    for library in ("box_in", "box_out"):
        assert loader.load("box", library, arch=ARCH).answer() == 42
    assert main(["prebuild", "box", "--arch", ARCH]) == 0
    assert len(kit.compiles) == 2
    assert main(["cache", "import", str(archive)]) == 0
    assert "0 libraries are new" in capsys.readouterr().out


def test_the_same_entries_make_the_same_bytes(archive, kit, tmp_path):
    import_archive(archive)
    again = export_archive(tmp_path / "again.zip", ["9.0a", ARCH], ["box"])
    assert again.path.read_bytes() == archive.read_bytes()
    assert again.sha256 == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert again.size == archive.stat().st_size
    assert len(kit.compiles) == 2


def test_export_of_what_is_not_built_builds_nothing(kit, box, tmp_path, capsys):
    assert main(["cache", "export", "--arch", ARCH, str(tmp_path / "box.zip"), "box"]) == 1
    text = capsys.readouterr().err
    assert "box_in of box for sm_90a, box_out of box for sm_90a" in text
    assert "`cake prebuild box --arch sm_90a`" in text
    assert not (tmp_path / "box.zip").exists()
    assert kit.compiles == []
    assert main(["prebuild", "box", "--arch", ARCH]) == 0
    assert main(["cache", "export", "--arch", ARCH, str(tmp_path / "box.zip"), "box"]) == 0
    digest = hashlib.sha256((tmp_path / "box.zip").read_bytes()).hexdigest()
    assert f"sha256 {digest}" in capsys.readouterr().out


def test_export_refuses_what_it_cannot_serve(kit, box, tmp_path, capsys):
    with pytest.raises(NotImplementedError, match="box has no kernels for sm_100a; it has them for sm_90a"):
        export_archive(tmp_path / "box.zip", ["10.0"], ["box"])
    assert main(["cache", "export", "--arch", "hopper", str(tmp_path / "box.zip"), "box"]) == 2
    assert "hopper" in capsys.readouterr().err
    main(["prebuild", "box", "--arch", ARCH])
    with pytest.raises(ArchiveError, match="can't be written"):
        export_archive(tmp_path / "no such folder" / "box.zip", [ARCH], ["box"])


def test_an_older_archive_is_replaced_whole(archive, box, tmp_path):
    import_archive(archive)
    other = tmp_path / "other.zip"
    other.write_text("an older one")
    export_archive(other, [ARCH], ["box"])
    assert other.read_bytes() == archive.read_bytes()
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_the_hash_of_the_whole_can_be_insisted_on(archive):
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(ArchiveError, match=f"its sha256 is {digest}, expected 0000"):
        import_archive(archive, sha256="0" * 64)
    assert names() == []
    assert len(import_archive(archive, sha256=f" {digest.upper()} ").new) == 2


def test_a_damaged_entry_is_replaced_and_a_whole_one_kept(archive):
    import_archive(archive)
    (damaged, whole) = [entry for _, entry, _ in cache.entries()]
    damaged.library.write_bytes(damaged.library.read_bytes()[:-1])
    inode = whole.library.stat().st_ino
    done = import_archive(archive)
    assert done.new == (damaged.path.name,)
    assert names() == ["box_in", "box_out"]
    assert whole.library.stat().st_ino == inode


def test_an_archive_of_other_sources_is_told(archive, box, no_compiler, capsys):
    (box / "cake_box/csrc/box_out.cu").write_text("// newer\n")
    no_compiler()
    assert main(["cache", "import", str(archive)]) == 1
    assert "the installed ops still lack box_out of box for sm_90a" in capsys.readouterr().err
    assert loader.load("box", "box_in", arch=ARCH).answer() == 42


# ---- what is refused, with the cache as it was


def test_every_truncation_is_refused(archive, tmp_path):
    data = archive.read_bytes()
    short = tmp_path / "short.zip"
    for length in [0, 1, 21, 22, *range(23, len(data), 997), len(data) - 1]:
        short.write_bytes(data[:length])
        with pytest.raises(ArchiveError):
            import_archive(short)
    assert names() == []


def test_every_doctored_byte_is_refused_or_changes_nothing(archive, tmp_path):
    """Of what the zip format itself says (times, flags) some bits don't matter; of contents each one does."""
    data = archive.read_bytes()
    with zipfile.ZipFile(archive) as original:
        wanted = {name: original.read(name) for name in original.namelist()}
    doctored = tmp_path / "doctored.zip"
    refused = 0
    for place in range(0, len(data), 61):
        doctored.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        try:
            _, contents = read_archive(doctored)
        except ArchiveError:
            refused += 1
            continue
        held = {f"libraries/{n}/{f}": d for n, files in contents.items() for f, d in files.items()}
        assert held == {name: text for name, text in wanted.items() if name != "index.json"}
    assert refused > 0.8 * len(range(0, len(data), 61))


def some(members, end):
    return next(name for name in sorted(members) if name.endswith(end))


def change_byte(members):
    name = some(members, "box_in.so")
    members[name] = members[name][:-1] + b"?"


def change_source(members):
    members[some(members, "box_in.cu")] = b"// IN\n"


def drop(members):
    del members[some(members, "box_out.so")]


def add(members):
    members[some(members, "box_out.so") + ".more"] = b"more"


def no_index(members):
    del members["index.json"]


def no_json(members):
    members["index.json"] = b"{"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (change_byte, r"box_in\.so' is not what its index says"),
        (change_source, r"box_in\.cu' is not what its index says"),
        (drop, r"box_out\.so' is missing"),
        (add, r"box_out\.so\.more', which its index does not list"),
        (no_index, "it has no index.json"),
        (no_json, "index.json is not JSON"),
    ],
)
def test_changed_members_are_refused(archive, change, why):
    rewrite(archive, change)
    with pytest.raises(ArchiveError, match=why):
        import_archive(archive)
    assert names() == []


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_another_schema_is_refused(archive, schema):
    rewrite(archive, lambda members: None, lambda index: index.update(schema=schema))
    with pytest.raises(ArchiveError, match=f"schema {schema!r} and this cake-core reads 1"):
        import_archive(archive)
    assert names() == []


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "something else"},
        {"files": {}},
        {"files": []},
        {"ops": "box"},
        {"archs": [9.0]},
        {"files": {"libraries/x": 3}},
    ],
    ids=str,
)
def test_a_wrong_index_is_refused(archive, change):
    rewrite(archive, lambda members: None, lambda index: index.update(change))
    with pytest.raises(ArchiveError):
        import_archive(archive)
    assert names() == []


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/evil",
        "libraries/../../evil",
        "libraries/box_in-0123456789abcdef/../../evil",
        "libraries/box_in-0123456789abcdef/./evil",
        "libraries/box_in-0123456789abcdef//evil",
        "libraries/box_in-0123456789abcdef/..\\evil",
        "libraries/box_in/evil",
        "libraries/BOX-0123456789abcdef/evil",
        "locks/box_in-0123456789abcdef/evil",
        "libraries/evil",
    ],
)
def test_a_member_that_leads_elsewhere_is_refused(archive, tmp_path, name):
    """Also where the index lists it, with the right hash."""
    before = sorted(tmp_path.rglob("*"))
    rewrite(
        archive,
        lambda members: members.update({name: b"evil"}),
        lambda index: index["files"].update({name: listed(b"evil")}),
    )
    with pytest.raises(ArchiveError, match="is no file of a library"):
        import_archive(archive)
    assert names() == []
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == []


def test_a_member_that_is_there_twice_is_refused(archive):
    with zipfile.ZipFile(archive, "a") as more, pytest.warns(UserWarning, match="Duplicate"):
        more.writestr("index.json", more.read("index.json"))
    with pytest.raises(ArchiveError, match=r"'index\.json' is there twice"):
        import_archive(archive)


def doctor_meta(archive, file, **changes):
    """Change an entry's meta.json and the index with it, as somebody would who knows the format."""
    new = {}

    def members(all_):
        name = some(all_, file)
        new[name] = json.dumps({**json.loads(all_[name]), **changes}).encode()
        all_.update(new)

    def index(index_):
        index_["files"].update({name: listed(data) for name, data in new.items()})

    with zipfile.ZipFile(archive) as there:
        assert any(name.endswith(file) for name in there.namelist())
    rewrite(archive, members, index)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"library_sha256": "0" * 64}, r"box_in\.so is not the one that meta\.json describes"),
        ({"library_size": 3}, r"box_in\.so is not the one that meta\.json describes"),
        ({"build_key": "f" * 64}, r"meta\.json is that of box_in-ffffffffffffffff"),
        ({"library": "../../box_in"}, "is missing"),
        ({"arch": "sm_80"}, "it is for sm_80, and the archive for sm_90a"),
        ({"nvcc": None}, "can't be read"),
    ],
    ids=str,
)
def test_an_entry_that_contradicts_itself_is_refused(archive, changes, why):
    doctor_meta(archive, "meta.json", **changes)
    with pytest.raises(ArchiveError, match=why):
        import_archive(archive)
    assert names() == []


@pytest.mark.parametrize("what", ["text", "folder", "nothing", "another zip"])
def test_what_is_no_archive_is_refused(tmp_path, what, capsys):
    path = tmp_path / "x.zip"
    if what == "text":
        path.write_text("hello")
    elif what == "folder":
        path.mkdir()
    elif what == "another zip":
        with zipfile.ZipFile(path, "w") as other:
            other.writestr("a wheel's file", "x")
    assert main(["cache", "import", str(path)]) == 1
    assert f"cake: error: {path}" in capsys.readouterr().err
    assert names() == []


@pytest.mark.parametrize(
    ("number", "kind", "why"),
    [(28, BuildError, "no space left in the cache"), (13, cache.ReadOnlyError, "cannot be written to")],
)
def test_trouble_in_the_middle_publishes_nothing(archive, monkeypatch, number, kind, why):
    write, done = cache._write, []

    def fail(path, data):
        done.append(path)
        if len(done) == 4:  # in the second entry
            raise OSError(number, os.strerror(number))
        write(path, data)

    monkeypatch.setattr(cache, "_write", fail)
    with pytest.raises(kind, match=why):
        import_archive(archive)
    assert len({path.relative_to(cache.folder() / "tmp").parts[0] for path in done}) == 2
    monkeypatch.undo()


# ---- caches that are only read


def tree(root):
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in sorted(root.rglob("*"))}


def test_readonly_folders_are_searched_in_order_and_left_alone(
    archive, kit, monkeypatch, tmp_path, no_compiler
):
    shared = tmp_path / "shared"
    monkeypatch.setenv("CAKE_CACHE_DIR", str(shared))
    import_archive(archive)
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("CAKE_CACHE_READONLY_DIRS", f"{tmp_path / 'gone'}:{shared}: ")
    before = tree(shared)
    assert cache.folders() == (tmp_path / "own", tmp_path / "gone", shared)
    module = loader.load("box", "box_in", arch=ARCH)  # this nvcc's own build, found before it is made
    assert module.answer() == 42
    assert loader.loaded()[0].path.is_relative_to(shared)
    loader.release()
    no_compiler()
    assert loader.load("box", "box_out", arch=ARCH).answer() == 42
    assert not (tmp_path / "own").exists()
    cache.clear()
    assert tree(shared) == before
    assert len(kit.compiles) == 2


def test_ones_own_cache_comes_first(archive, monkeypatch, tmp_path):
    import_archive(archive)
    monkeypatch.setenv("CAKE_CACHE_READONLY_DIRS", str(tmp_path / "the cache"))
    loader.load("box", "box_in", arch=ARCH)
    assert loader.loaded()[0].path.is_relative_to(tmp_path / "another cache")


def test_a_damaged_readonly_entry_is_passed_over_and_named(kit, box, monkeypatch, tmp_path):
    main(["prebuild", "box", "--arch", ARCH])
    shared = tmp_path / "the cache"
    for path in shared.glob("libraries/box_in-*/box_in.so"):
        path.write_bytes(b"short")
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("CAKE_CACHE_READONLY_DIRS", str(shared))
    loader.release()
    with loader.no_build(), pytest.raises(NoBuildError) as caught:
        loader.load("box", "box_in", arch=ARCH)
    text = str(caught.value)
    assert f"not in the cache {tmp_path / 'own'} nor in the read-only {shared}" in text
    assert "the library has 5 bytes" in text
    assert loader.load("box", "box_in", arch=ARCH).answer() == 42
    assert loader.loaded()[0].path.is_relative_to(tmp_path / "own")
    assert len(kit.compiles) == 3


def test_the_setting_is_read_from_configure(archive, tmp_path):
    config.configure({"cake_cache_readonly_dirs": str(tmp_path / "the cache")})
    with loader.no_build():
        assert loader.load("box", "box_in", arch=ARCH).answer() == 42


def test_info_lists_readonly_folders(archive, monkeypatch, tmp_path, capsys):
    shared = tmp_path / "the cache"
    monkeypatch.setenv("CAKE_CACHE_READONLY_DIRS", str(shared))
    assert main(["cache", "info"]) == 0
    own, of_shared = capsys.readouterr().out.split(f"{shared} (read-only)\n")
    assert own == f"{tmp_path / 'another cache'}\nempty\n"
    assert [of_shared.count(f"{name}-") for name in ("box_in", "box_out")] == [1, 1]
    assert main(["cache", "info", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["readonly_folders"] == [str(shared)]
    assert {row["folder"] for row in listing["libraries"]} == {str(shared)}


def test_doctor_names_a_readonly_folder_that_is_gone(monkeypatch, tmp_path):
    from cake.core._report import collect

    monkeypatch.setenv("CAKE_CACHE_READONLY_DIRS", str(tmp_path / "gone"))
    report = collect()
    assert ("read-only folders", str(tmp_path / "gone")) in report.sections["Cache"]
    assert any(f"read-only cache {tmp_path / 'gone'} does not exist" in f.text for f in report.findings)


def test_another_process_without_a_path_imports_and_runs(kit, box, tmp_path):
    """A fresh process whose PATH is empty and whose home holds nothing: the archive is all it has."""
    assert main(["prebuild", "box", "--arch", ARCH]) == 0
    export_archive(tmp_path / "box.zip", [ARCH], ["box"])
    site = write_distribution(tmp_path / "site", "cake-box", ops=OPS, files=FILES)
    code = (
        "import sys\n"
        "from cake.core import loader, toolchain\n"
        "from cake.core.cli import main\n"
        "toolchain._wheel_nvccs = list\n"
        f"assert main(['cache', 'import', {str(tmp_path / 'box.zip')!r}]) == 0\n"
        "with loader.no_build():\n"
        "    print(sum(loader.load('box', name, arch='9.0').answer() for name in ('box_in', 'box_out')))\n"
    )
    environment = {"PATH": "", "HOME": str(tmp_path / "home"), "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "84"
    assert Path(tmp_path / "home").is_dir()  # where the libraries are now
    assert len(kit.compiles) == 2


def test_a_package_of_no_op_is_found_in_a_readonly_folder(kit, monkeypatch, tmp_path):
    root = write_package(tmp_path / "my op")
    package = build.read_package(root)
    loader.ensure(package, package.records[0])
    monkeypatch.setenv("CAKE_CACHE_READONLY_DIRS", str(tmp_path / "the cache"))
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "own"))
    kit.plan(version="13.1.0")  # another compiler: its own build, into one's own cache
    entry = loader.ensure(package, package.records[0])
    assert entry.path.is_relative_to(tmp_path / "own")
    assert len(kit.compiles) == 2
