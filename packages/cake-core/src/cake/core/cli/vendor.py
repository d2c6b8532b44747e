"""`cake vendor`: copy kernel sources into an op, check the copies, merge their tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cake.core.vendor import Copied, Generated, Wanted

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the parser of ``cake vendor``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "vendor",
        help="copy kernel sources into an op, and check the copies",
        description="Keep the frozen copies of kernel sources in an op's _vendor folder.",
    )
    forms = parser.add_subparsers(dest="form", metavar="FORM", required=True)
    own = forms.add_parser("self", help="copy this repository's kernels/ into an op of it")
    _common(own)
    own.add_argument("packages", nargs="*", help="folders of kernels/ to copy besides kernels/include")

    fi = forms.add_parser("fi", help="copy FlashInfer's Cake packages, byte for byte")
    _common(fi)
    _source(fi)
    fi.add_argument("--build-json", type=Path, help="a build.json for a package that brings none")

    miles = forms.add_parser("miles-pr", help="copy sources that a pull request generated")
    _common(miles)
    _source(miles)
    _pairs(
        miles, "--host-shim", "GLOB=FILE", "put the template FILE of this checkout in place of what matches"
    )
    _pairs(miles, "--arch-from", "NEW=OLD", "compile OLD's sources for NEW, as in sm_107a=sm_103a")
    _many(miles, "--include-folder", "DIR", "include folder of the build.json, as in ../cake/include")
    _many(miles, "--link", "NAME", "a library to link; cuda is the driver")
    _many(miles, "--allow-remark", "KIND", "accept this remark of ptxas: spills, serialized or a code")

    gone = forms.add_parser("remove", help="take packages out of an op")
    gone.add_argument("op", help="the op, as in packages/cake-<op>")
    gone.add_argument("packages", nargs="+", help="what to remove")
    _repo(gone)

    check = forms.add_parser("check", help="compare the copies with VENDORED.json; 1 where one differs")
    check.add_argument("op", nargs="*", help="which ops; all if none is named")
    check.add_argument("--upstream", action="store_true", help="compare with the recorded commits' trees too")
    _pairs(check, "--from", "SOURCE=DIR", "a checkout of a source, as in fi=../flashinfer; self is this one")
    check.add_argument(
        "--repo", type=Path, help="look in this checkout, else around here, else what is installed"
    )

    merge = forms.add_parser("merge", help="git's merge driver for VENDORED.json")
    merge.add_argument("--install", action="store_true", help="have git use it in this checkout")
    merge.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="ancestor, ours, theirs (from git)"
    )
    _repo(merge)
    return parser


def _common(form: argparse.ArgumentParser) -> None:
    form.add_argument("op", help="the op, as in packages/cake-<op>")
    form.add_argument("--commit", metavar="REV", help="copy from this commit; HEAD if not given")
    _repo(form)


def _repo(form: argparse.ArgumentParser) -> None:
    form.add_argument(
        "--repo", type=Path, help="the checkout; the one around the working directory if not given"
    )


def _source(form: argparse.ArgumentParser) -> None:
    form.add_argument(
        "packages", nargs="*", metavar="NAME[=FOLDER]", help="what to copy; what the op has already if none"
    )
    form.add_argument(
        "--from", dest="checkout", type=Path, required=True, help="the git checkout to copy from"
    )
    _many(form, "--include", "GLOB", "copy only these files of the packages named here; * crosses slashes")
    _many(form, "--exclude", "GLOB", "leave these files out")
    _many(form, "--allow-import", "MODULE", "modules that their sources may import besides the op's own")
    _many(form, "--allow-environment", "FILE", "files of theirs that may read the environment")


def _many(form: argparse.ArgumentParser, name: str, metavar: str, help: str) -> None:
    form.add_argument(name, action="append", default=[], metavar=metavar, help=help)


def _pairs(form: argparse.ArgumentParser, name: str, metavar: str, help: str) -> None:
    form.add_argument(name, action="append", default=[], type=_pair, metavar=metavar, help=help)


def _pair(text: str) -> tuple[str, str]:
    left, mark, right = text.partition("=")
    if not (left and mark and right):
        raise argparse.ArgumentTypeError(f"must be two words joined by '=', got {text!r}")
    return left, right


def run(args: argparse.Namespace) -> int:
    """Do it; 1 where a copy can't be made or isn't what the table says."""
    from cake.core import vendor

    repo = args.repo.absolute() if args.repo is not None else vendor.repository()
    if args.form == "merge" and not args.install:
        return _merge(args.files)
    if args.form == "check":
        return _check(args, repo)
    if repo is None:
        print("cake vendor: no checkout with packages/cake-*/src around here; say --repo", file=sys.stderr)
        return 2
    if args.form == "merge":
        print("\n".join(vendor.install_merge(repo)))
        return 0
    if args.form == "remove":
        removed = vendor.remove(args.op, repo, args.packages)
        print(f"removed {', '.join(removed.packages)} from {removed.folder}")
        return 0
    copied = _copy(args, repo)
    done = "copied" if copied.changed else "up to date:"
    print(f"{done} {', '.join(copied.packages)} at {copied.commit[:12]} in {copied.folder}")
    return 0


def _copy(args: argparse.Namespace, repo: Path) -> Copied:
    from cake.core import vendor

    if args.form == "self":
        return vendor.vendor_self(args.op, repo, args.commit, args.packages)
    named = dict(_name(word) for word in args.packages)
    checkout = args.checkout.absolute()
    if args.form == "fi":
        text = args.build_json.read_bytes() if args.build_json is not None else None
        wanted = {name: _wanted(args, path, text) for name, path in named.items()}
        return vendor.vendor_fi(args.op, repo, checkout, wanted, args.commit)
    made = {name: _generated(args, path) for name, path in named.items()}
    return vendor.vendor_miles_pr(args.op, repo, checkout, made, args.commit)


def _name(word: str) -> tuple[str, str]:
    name, _, path = word.partition("=")
    return name, path.rstrip("/")


def _wanted(args: argparse.Namespace, path: str, build_json: bytes | None) -> Wanted:
    from cake.core import vendor

    allow = {"imports": args.allow_import, "environment": args.allow_environment}
    return vendor.Wanted(path, tuple(args.include), tuple(args.exclude), allow, build_json)


def _generated(args: argparse.Namespace, path: str) -> Generated:
    from cake.core import vendor

    return vendor.Generated(
        _wanted(args, path, None),
        dict(args.host_shim),
        dict(args.arch_from),
        tuple(args.include_folder),
        tuple(args.link),
        tuple(args.allow_remark),
    )


def _check(args: argparse.Namespace, repo: Path | None) -> int:
    from cake.core import vendor

    wrong = vendor.check(args.op, repo)
    if args.upstream:
        if repo is None:
            print("cake vendor: --upstream needs the checkout with the ops; say --repo", file=sys.stderr)
            return 2
        checkouts = {source: Path(path).absolute() for source, path in getattr(args, "from")}
        unknown = sorted(set(checkouts) - set(vendor.SOURCES))
        if unknown:
            print(
                f"cake vendor: no source {unknown[0]!r}; there are {', '.join(vendor.SOURCES)}",
                file=sys.stderr,
            )
            return 2
        more, notes = vendor.check_upstream(args.op, repo, checkouts)
        for note in notes:
            print(f"note: {note}")
        wrong = {op: [*sentences, *more.get(op, ())] for op, sentences in wrong.items()}
    for op, sentences in wrong.items():
        for sentence in sentences:
            print(f"{op}: {sentence}")
        if not sentences:
            print(f"{op}: ok")
    return 1 if any(wrong.values()) else 0


def _merge(files: Sequence[Path]) -> int:
    from cake.core.vendor._merge import driver

    if len(files) not in (3, 4):
        print(
            "cake vendor merge: git passes ancestor, ours, theirs and the path; or say --install",
            file=sys.stderr,
        )
        return 2
    conflicts = driver(files[0], files[1], files[2], str(files[3]) if len(files) == 4 else str(files[1]))
    for conflict in conflicts:
        print(f"cake vendor merge: {conflict}", file=sys.stderr)
    return 1 if conflicts else 0
