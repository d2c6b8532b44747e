"""Host modules of vendored packages: each op's own copies, by upstream's names, and nothing undeclared."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from cake.core import cache, hosts, loader, toolchain, vendor
from cake.core.errors import BuildError, UnknownOpError
from cake.core.testing import installed_distribution
from cake.core.testing.checkouts import Checkout, write_files
from cake.core.testing.toolchain import FakeToolkit

AT = "flashinfer/experimental"
RECORD = {"library": "alpha", "arch": "sm_90a", "sources": ["csrc/alpha.cu"], "functions": ["answer"]}
UPSTREAM = {
    "flashinfer/__init__.py": "raise RuntimeError('upstream itself was imported')\n",
    f"{AT}/__init__.py": "",
    f"{AT}/alpha/__init__.py": "from .host import answer\n",
    f"{AT}/alpha/host.py": (
        "from cake.core import hosts\n"
        "from ..common.util import NUMBER\n\n\n"
        "def answer(arch):\n"
        "    return hosts.library(__name__, 'alpha', arch=arch).answer() + NUMBER\n"
    ),
    f"{AT}/alpha/build.json": json.dumps({"schema": 1, "records": [RECORD]}),
    f"{AT}/alpha/csrc/alpha.cu": "// alpha\n",
    f"{AT}/common/__init__.py": "",
    f"{AT}/common/util.py": "NUMBER = 1\n",
    f"{AT}/common/deep/tool.py": "NAME = 'deep'\n",
}
SPEC = """
from cake.core.spec import KernelPackage, OpSpec

SPEC = OpSpec(
    name="{op}",
    distribution="cake-{op}",
    kernel_packages=(
        KernelPackage("alpha", "cake.{op}", path="_vendor/alpha"),
        KernelPackage("{op}", "cake.{op}", path="csrc"),
    ),
)
"""
OWN = {"schema": 1, "records": [{**RECORD, "sources": ["own.cu"]}]}


@pytest.fixture
def upstream(tmp_path):
    upstream = Checkout(tmp_path / "upstream")
    upstream.commit(UPSTREAM)
    return upstream


def op_files(op):
    return {
        f"cake/{op}/__init__.py": "",
        f"cake/{op}/spec.py": SPEC.format(op=op),
        f"cake/{op}/csrc/build.json": json.dumps(OWN),
        f"cake/{op}/csrc/own.cu": "// own\n",
    }


@pytest.fixture
def install(tmp_path):
    """install(op, upstream): a checkout of cake-<op> with alpha and common vendored, on sys.path."""
    opened = []

    def make(op, upstream, packages=("alpha", "common"), **wanted):
        repo = tmp_path / op
        source = repo / f"packages/cake-{op}/src"
        write_files(source, op_files(op))
        named = {name: vendor.Wanted("", **wanted) for name in packages}
        vendor.vendor_fi(op, repo, upstream.root, named)
        context = installed_distribution(source, f"cake-{op}", ops={op: f"cake.{op}.spec:SPEC"})
        context.__enter__()
        opened.append(context)
        return source / "cake" / op

    yield make
    for context in reversed(opened):
        context.__exit__(None, None, None)
    loader.release()


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    toolkit = FakeToolkit(tmp_path / "cuda")
    monkeypatch.setenv("CAKE_NVCC", str(toolkit.nvcc))
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: None)
    return toolkit


def test_a_host_module_runs_its_packages_library_by_upstreams_names(install, upstream, toolkit):
    install("toy", upstream)
    host = hosts.module("toy", "alpha.host")
    assert host.__name__ == "cake.toy._vendor.alpha.host"
    assert host.answer("sm_90a") == 43
    assert hosts.module("toy", "alpha").answer is host.answer
    (loaded,) = loader.loaded()
    assert (loaded.op, loaded.package, loaded.library) == ("toy", "alpha", "alpha")
    assert "flashinfer" not in sys.modules


def test_two_ops_with_a_package_of_one_name(install, upstream, toolkit):
    install("toy", upstream)
    upstream.commit({f"{AT}/common/util.py": "NUMBER = 100\n", f"{AT}/alpha/csrc/alpha.cu": "// newer\n"})
    install("other", upstream)
    toy, other = hosts.module("toy", "alpha.host"), hosts.module("other", "alpha.host")
    assert toy is not other
    assert (toy.answer("sm_90a"), other.answer("sm_90a")) == (43, 142)
    assert {(e.op, e.package) for e in loader.loaded()} == {("toy", "alpha"), ("other", "alpha")}
    assert len({e.path for e in loader.loaded()}) == 2
    assert len(toolkit.compiles) == 2


def test_libraries_of_one_name_are_told_apart_by_their_package(install, upstream, toolkit):
    install("toy", upstream)
    with pytest.raises(BuildError, match=r"two kernel packages have a library 'alpha' .*say which"):
        loader.load("toy", "alpha", arch="sm_90a")
    a = loader.load("toy", "alpha", arch="sm_90a", package="alpha")
    b = loader.load("toy", "alpha", arch="sm_90a", package="toy")
    assert a is not b
    assert loader.load("toy", "alpha", arch="9.0", package="alpha") is a
    assert len(cache.entries()) == 2
    with pytest.raises(ValueError, match="toy declares no kernel package 'gone'; it declares: alpha, toy"):
        loader.load("toy", "alpha", arch="sm_90a", package="gone")


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("from ..common import util\nX = util.NUMBER\n", 1),
        ("from ..common.util import *\nX = NUMBER\n", 1),
        ("from .. import common\nfrom ..common import util\nX = common.util.NUMBER\n", 1),
        ("from .. import common as c\nX = c.__name__\n", "cake.toy._vendor.common"),
        ("from flashinfer.experimental.common import util as u\nX = u.NUMBER\n", 1),
        ("import flashinfer.experimental.common.util\nX = flashinfer.experimental.common.util.NUMBER\n", 1),
        ("import flashinfer.experimental.common.util as u\nX = u.NUMBER\n", 1),
        ("import common.util\nX = common.util.NUMBER\n", 1),
        ("import common\nX = common.__name__\n", "cake.toy._vendor.common"),
        ("from common.deep.tool import NAME as X\n", "deep"),
        ("def late():\n    from ..common.util import NUMBER\n    return NUMBER\nX = late()\n", 1),
        ("class A:\n    from ..common.util import NUMBER\nX = A.NUMBER\n", 1),
        ("from . import sibling\nX = sibling.Y\n", 2),
        ("import math, json as j\nfrom math import pi\nX = j.loads('7')\n", 7),
        ("import cake.toy.csrc_name as n\nX = n.Z\n", 3),
        ("from cake.core.spec import VARIANTS\nX = len(VARIANTS)\n", 2),
    ],
)
def test_what_imports_mean(install, upstream, source, value):
    upstream.commit({f"{AT}/alpha/case.py": source, f"{AT}/alpha/sibling.py": "Y = 2\n"})
    module = install("toy", upstream)
    write_files(module, {"csrc_name.py": "Z = 3\n"})
    assert vendor.check_module(module) == []
    assert value == hosts.module("toy", "alpha.case").X
    assert not {"common", "flashinfer", "flashinfer.experimental"} & set(sys.modules)


REFUSED = {
    "import flashinfer\n": "imports flashinfer, which is no package that toy carries",
    "from flashinfer.jit import env\n": "imports env from flashinfer.jit, which is no package",
    "from ...jit.core import x\n": "imports x from flashinfer.jit.core, which is no package",
    "from ..missing import x\n": "imports x from flashinfer.experimental.missing, which is no package",
    "from .. import common, missing\n": "imports missing from flashinfer.experimental, which is no package",
    "from ..... import x\n": "which leads out of its upstream",
    "import numpy.linalg\n": r"imports numpy\.linalg, which is no package",
    "import cake.other.api\n": r"imports cake\.other\.api, which is no package that toy carries",
    "from cake.toy._vendor.missing import x\n": "imports x from cake.toy._vendor.missing, which",
    "def late():\n    import requests\nlate()\n": "imports requests, which is no package that toy carries",
}


@pytest.mark.parametrize("source", REFUSED)
def test_what_check_refuses_is_not_imported_either(install, upstream, source):
    why = REFUSED[source]
    module = install("toy", upstream)
    write_files(module, {"_vendor/alpha/case.py": source})  # by hand, past `cake vendor`
    with pytest.raises(ImportError, match=why):
        hosts.module("toy", "alpha.case")
    upstream.commit({f"{AT}/alpha/case.py": source})
    with pytest.raises(vendor.VendorError, match=rf"alpha/case\.py:\d+: .*{why}"):
        vendor.vendor_fi("toy", module.parents[4], upstream.root, {})


def test_an_allowed_module_is_imported(install, upstream, tmp_path, monkeypatch):
    write_files(tmp_path / "site2", {"extra/__init__.py": "", "extra/part.py": "X = 5\n"})
    monkeypatch.syspath_prepend(str(tmp_path / "site2"))
    upstream.commit({f"{AT}/alpha/case.py": "import extra.part\nfrom extra.part import X\n"})
    install("toy", upstream, allow={"imports": ["extra"]})
    case = hosts.module("toy", "alpha.case")
    assert case.X == 5
    assert case.extra is importlib.import_module("extra")


def test_what_is_not_there(install, upstream):
    install("toy", upstream)
    with pytest.raises(UnknownOpError, match="gone"):
        hosts.module("gone", "alpha")
    with pytest.raises(ValueError, match="op 'toy' carries no package 'gone'; it carries: alpha, common"):
        hosts.module("toy", "gone.host")
    with pytest.raises(ModuleNotFoundError, match=r"alpha\.gone"):
        hosts.module("toy", "alpha.gone")
    with pytest.raises(ModuleNotFoundError, match=r"common\.gone"):
        importlib.import_module("cake.toy._vendor.common.gone")
    for name in ("alpha.host", "cake.toy.api", "cake.gone._vendor.alpha.host", "__main__"):
        with pytest.raises(ValueError, match="must be the __name__ of a vendored host module"):
            hosts.library(name, "alpha", arch="sm_90a")


def test_a_package_that_the_declaration_does_not_name_has_no_libraries(install, upstream):
    record = json.dumps({"schema": 1, "records": [{**RECORD, "sources": ["beta.cu"]}]})
    host = "from cake.core import hosts\nhosts.library(__name__, 'alpha', arch='sm_90a')\n"
    upstream.commit({f"{AT}/alpha/host.py": UPSTREAM[f"{AT}/alpha/host.py"]})
    module = install("toy", upstream)
    beta = {"beta/__init__.py": host, "beta/build.json": record, "beta/beta.cu": "// beta\n"}
    upstream.commit({f"{AT}/{name}": text for name, text in beta.items()})
    with pytest.raises(vendor.VendorError, match=r"_vendor/beta has kernels that .*spec\.py doesn't declare"):
        vendor.vendor_fi("toy", module.parents[4], upstream.root, {"beta": None})
    table = json.loads((module / "_vendor/VENDORED.json").read_text())
    table["packages"]["beta"] = {**table["packages"]["alpha"], "path": f"{AT}/beta"}
    write_files(module / "_vendor", {**beta, "VENDORED.json": json.dumps(table)})
    with pytest.raises(ValueError, match="toy declares no kernel package 'beta'; it declares: alpha, toy"):
        hosts.module("toy", "beta")


def test_hosts_are_found_without_torch(install, upstream):
    module = install("toy", upstream)
    code = (
        "import sys\nfrom cake.core import hosts\n"
        "assert hosts.module('toy', 'alpha.host').NUMBER == 1\nassert 'torch' not in sys.modules\n"
    )
    path = os.pathsep.join([str(module.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
