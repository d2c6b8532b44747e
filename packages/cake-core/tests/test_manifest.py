"""The manifest says what a run's bits depend on, and configure(require=…) refuses others."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from cake.core import cli, config, manifest, provenance, registry
from cake.core.errors import ConfigError, UnknownOpError
from cake.core.spec import KernelPackage, OpSpec
from cake.core.testing import installed_distribution


def kernels(op: Any) -> str:
    """The op's content hash, which an op with kernels has."""
    found = provenance.kernel_hash(registry.op_spec(op.name))
    assert found is not None
    return found


def test_the_manifest_is_json_and_names_everything(op: Any) -> None:
    config.configure(op.args(recompute_state=True, cake_workspace_pool_bytes="1KiB"))
    found = json.loads(json.dumps(manifest()))
    for key in ("python", "torch", "apache-tvm-ffi", "nvcc", "device", "configured", "deterministic", "ops"):
        assert key in found
    assert found["cake-core"] == version("cake-core")
    assert found["configured"] is True
    assert found["workspace_pool_bytes"] == 1024
    entry = found["ops"][op.name]
    spec = registry.op_spec(op.name)
    assert entry["version"] == version(spec.distribution)
    assert entry["variant"] == "fast"
    assert entry["options"]["recompute_state"] is True
    assert set(entry["kernel_packages"]) == {package.name for package in spec.kernel_packages}
    assert entry["kernels"] == provenance.kernel_hash(spec)


def test_the_variant_is_the_one_that_would_run(op: Any) -> None:
    assert manifest()["ops"][op.name]["variant"] == "det"
    config.configure(op.args(deterministic_mode=True))
    found = manifest()
    assert found["deterministic"] is True
    assert found["ops"][op.name]["variant"] == "det"
    assert found["ops"][op.name]["variant_source"] == "deterministic mode"


def test_the_hash_follows_the_bytes_of_the_kernels_and_nothing_else(toy: Any, tmp_path: Path) -> None:
    before = kernels(toy)
    assert before.startswith("sha256:")
    assert len(before) == len("sha256:") + 64
    root = registry.op_spec("toy").kernel_packages[0].root()
    (root / "README").write_text("not a kernel")
    assert kernels(toy) == before
    source = root / "toy.cu"
    text = source.read_text()
    source.write_text(text + " ")
    assert kernels(toy) != before
    source.write_text(text)
    assert kernels(toy) == before
    build = root / "build.json"
    build.write_text(build.read_text().replace('"functions"', '"flags": ["-O3"], "functions"'))
    assert kernels(toy) != before


def test_an_op_with_several_packages_has_one_hash_of_all(toy: Any, tmp_path: Path) -> None:
    first = registry.op_spec("toy").kernel_packages[0]
    with installed_distribution(
        tmp_path / "other",
        "cake-second",
        files={
            "cake/second/__init__.py": "",
            "cake/second/csrc/build.json": (first.root() / "build.json").read_text(),
            "cake/second/csrc/toy.cu": "// other bytes\n",
        },
    ):
        second = KernelPackage("second", "cake.second")
        both = provenance.kernel_hash(OpSpec("x", "cake-x", kernel_packages=(first, second)))
        assert both == provenance.kernel_hash(OpSpec("x", "cake-x", kernel_packages=(second, first)))
        alone = {provenance.kernel_hash(OpSpec("x", "cake-x", kernel_packages=(p,))) for p in (first, second)}
    assert both is not None
    assert len({both, *alone}) == 3


def test_what_cannot_be_told_is_none_with_the_reason(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (registry.op_spec("toy").kernel_packages[0].root() / "toy.cu").unlink()
    monkeypatch.setenv("CAKE_NVCC", "/nowhere/nvcc")
    found = manifest()
    assert found["ops"]["toy"]["kernels"] is None
    assert "toy.cu" in found["ops"]["toy"]["kernel_packages"]["toy"]["error"]
    assert found["nvcc"]["path"] is None
    assert "/nowhere/nvcc" in found["nvcc"]["error"]


def test_the_record_of_vendored_copies_is_shown(toy: Any) -> None:
    root = registry.op_spec("toy").kernel_packages[0].root()
    record = {"packages": {"cake": {"source": "self", "commit": "c0ffee", "files": {"x.cuh": "f00d"}}}}
    file = root.parent / "_vendor" / "cake" / "x.cuh"
    file.parent.mkdir(parents=True)
    file.write_text("// x")
    (root.parent / "_vendor" / "VENDORED.json").write_text(json.dumps(record))
    before = manifest()["ops"]["toy"]["vendored"]["cake"]
    assert (before["source"], before["commit"]) == ("self", "c0ffee")
    assert before["content_hash"].startswith("sha256:")
    file.write_text("// y")
    assert manifest()["ops"]["toy"]["vendored"]["cake"]["content_hash"] != before["content_hash"]
    file.unlink()
    assert manifest()["ops"]["toy"]["vendored"]["cake"]["content_hash"] is None


def test_what_was_loaded_is_listed_with_its_compiler(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cake.core import loader

    assert manifest()["loaded"] == []
    item = loader.Loaded("toy", "toy", "sm_90a", "toy", "0" * 64, "13.0.88", Path("/cache/toy.so"))
    monkeypatch.setattr(loader, "loaded", lambda: (item,))
    row = {"op": "toy", "package": "toy", "library": "toy", "arch": "sm_90a", "nvcc": "13.0.88"}
    assert manifest()["loaded"] == [{**row, "source_key": "0" * 64}]


def test_a_process_that_only_asks_for_the_manifest_loads_no_torch(toy_folder: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(toy_folder)!r})\n"
        "import cake.core\n"
        "assert cake.core.manifest()['ops']['toy']['kernels']\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_prints_it(op: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["manifest"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["manifest", "--compact"]) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert json.loads(text) == json.loads(line)
    assert op.name in json.loads(line)["ops"]


# ---- require


def test_versions_that_are_met(op: Any) -> None:
    found = version(registry.op_spec(op.name).distribution)
    for specifier in (f"=={found}", ">=0.0.1", f"<={found},>0", "!=99"):
        config.configure(op.args(), require={op.name: specifier})
        assert manifest()["require"] == {op.name: specifier}
    config.configure(op.args())
    assert manifest()["require"] == {}


@pytest.mark.parametrize("specifier", ["==99.0", "<0.0.1", ">=0.0.1,!=0.*,!=1.0"])
def test_a_version_that_is_not_met_names_both(op: Any, specifier: str) -> None:
    distribution = registry.op_spec(op.name).distribution
    with pytest.raises(ConfigError) as caught:
        config.configure(op.args(), require={op.name: specifier})
    assert f"{distribution}{specifier}" in str(caught.value)
    assert f"got {distribution} {version(distribution)}" in str(caught.value)
    assert not config.configured()


def test_a_hash_that_is_met_in_every_spelling(op: Any) -> None:
    whole = kernels(op)
    digits = whole.removeprefix("sha256:")
    for spelling in (whole, digits, digits.upper(), digits[:12], f"sha256:{digits[:20]}", f" {whole} "):
        config.configure(op.args(), require={op.name: spelling})


def test_another_hash_names_both(op: Any) -> None:
    whole = kernels(op)
    other = "".join("0" if c != "0" else "1" for c in whole.removeprefix("sha256:"))
    alike = whole.removeprefix("sha256:")[:11] + other[11]  # eleven of twelve digits
    for demand in (other, other[:12], alike, whole.removeprefix("sha256:")[1:]):
        with pytest.raises(ConfigError) as caught:
            config.configure(op.args(), require={op.name: demand})
        assert demand in str(caught.value)
        assert whole in str(caught.value)
        assert registry.op_spec(op.name).distribution in str(caught.value)


def test_edited_kernels_are_refused(toy: Any) -> None:
    demand = {"toy": kernels(toy)}
    config.configure(toy.args(), require=demand)
    source = registry.op_spec("toy").kernel_packages[0].root() / "toy.cu"
    source.write_text(source.read_text() + "// another kernel\n")
    with pytest.raises(ConfigError, match="must have kernels sha256:"):
        config.configure(toy.args(), require=demand)


@pytest.mark.parametrize("demand", ["0.1.0", "", "  ", "latest", "deadbeef", "sha256:xyz", 1, None, ["==1"]])
def test_a_demand_that_is_neither_is_refused(op: Any, demand: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        config.configure(op.args(), require={op.name: demand})
    assert f"require[{op.name!r}]" in str(caught.value)
    assert repr(demand) in str(caught.value)


def test_an_op_that_is_not_installed_is_refused(toy: Any) -> None:
    with pytest.raises(UnknownOpError, match=r"'toi'.*toy"):
        config.configure(require={"toi": ">=1"})


def test_an_op_without_kernels_or_with_broken_ones_has_no_hash(toy: Any) -> None:
    with pytest.raises(ConfigError, match="it has no kernel packages"):
        config.configure(require={"loose": "0" * 64})
    (registry.op_spec("toy").kernel_packages[0].root() / "build.json").unlink()
    with pytest.raises(ConfigError, match=r"can't be told: build\.json"):
        config.configure(require={"toy": "0" * 64})


def test_a_version_of_an_op_that_no_distribution_has_cannot_be_told(tmp_path: Path) -> None:
    text = "from cake.core.spec import OpSpec\nSPEC = OpSpec('pear', 'not-the-one')\n"
    with installed_distribution(
        tmp_path, "cake-pear", ops={"pear": "cake_pear:SPEC"}, files={"cake_pear.py": text}
    ):
        with pytest.raises(ConfigError, match="not-the-one isn't installed as a distribution"):
            config.configure(require={"pear": ">=1"})
        assert manifest()["ops"]["pear"]["version"] is None


def test_requirements_are_not_about_ops_that_are_selected(toy: Any) -> None:
    config.configure({toy.option: "other"}, require={"toy": "==1.0"})
    with pytest.raises(ConfigError, match=r"cake-toy==2\.0"):
        config.configure({toy.option: "other"}, require={"toy": "==2.0"})


# ---- a run that goes on


@pytest.fixture
def saved(toy: Any, tmp_path: Path) -> Path:
    """The manifest that a run logged at its start, with the kernels it had."""
    spec = registry.op_spec("toy")
    path = tmp_path / "run.json"
    path.write_text(json.dumps(manifest()))
    assert set(json.loads(path.read_text())["ops"]["toy"]["kernel_packages"]) == {
        package.name for package in spec.kernel_packages
    }
    return path


def test_a_run_goes_on_with_the_kernels_it_had(
    toy: Any, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require = json.loads(saved.read_text())["ops"]
    config.configure(toy.args(), require=require)
    required = manifest()["require"]["toy"]
    assert required == {"kernel_packages": {"toy": {"content_hash": kernels(toy)}}}
    assert cli.main(["doctor"]) in (0, 1)
    assert "the kernels of a saved manifest" in capsys.readouterr().out
    config.configure(toy.args(), require={"toy": require["toy"]["kernels"]})
    assert cli.main(["manifest", "--require", str(saved)]) == 0


def test_a_run_is_not_resumed_on_other_kernels(
    toy: Any, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require = json.loads(saved.read_text())["ops"]
    then = require["toy"]["kernel_packages"]["toy"]["content_hash"]
    source = registry.op_spec("toy").kernel_packages[0].root() / "toy.cu"
    source.write_text(source.read_text() + "// one more line\n")
    now = kernels(toy)
    assert now != then
    with pytest.raises(ConfigError, match=rf"package 'toy' must be {then}, got {now}"):
        config.configure(toy.args(), require=require)
    with pytest.raises(ConfigError, match=rf"op 'toy' must have kernels {then}, got {now}"):
        config.configure(toy.args(), require={"toy": then})
    assert not config.configured()
    assert cli.main(["manifest", "--require", str(saved)]) == 1
    said = capsys.readouterr()
    assert then in said.err
    assert now in said.err
    assert "cake-toy 1.0 then, 1.0 now" in said.err
    assert said.out == ""
    source.unlink()
    with pytest.raises(ConfigError, match=rf"must be {then}, got can't be told \(toy: source csrc/toy\.cu"):
        config.configure(toy.args(), require=require)


def test_a_package_that_came_or_went_is_named(toy: Any, saved: Path) -> None:
    entry = json.loads(saved.read_text())["ops"]["toy"]
    packages = entry["kernel_packages"]
    more = {**packages, "more": {"content_hash": "sha256:" + "1" * 64}}
    with pytest.raises(ConfigError, match=f"package 'more' must be sha256:{'1' * 64}, got absent"):
        config.configure(require={"toy": {**entry, "kernel_packages": more}})
    with pytest.raises(ConfigError, match="package 'toy' must be absent, got sha256:"):
        config.configure(require={"toy": {**entry, "kernel_packages": {}}})
    unknown = {"toy": {"content_hash": None}}
    with pytest.raises(ConfigError, match="package 'toy' must be known, but was not, got sha256:"):
        config.configure(require={"toy": {**entry, "kernel_packages": unknown}})
    for wrong in ({"version": "1.0"}, {"kernel_packages": {"toy": "sha256:1"}}):
        with pytest.raises(ConfigError, match=r"or the op's entry of a saved manifest"):
            config.configure(require={"toy": wrong})


@pytest.mark.parametrize("text", ["", "[]", "{}", "3"])
def test_a_file_that_is_no_manifest(
    toy: Any, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(text)
    assert cli.main(["manifest", "--require", str(tmp_path / "x.json")]) == 1
    assert "x.json can't be read as a saved manifest" in capsys.readouterr().err
