"""Releases of the distributions, each with a version of its own: see RELEASING.md.

python3 tools/release.py prepare cake-gdn 0.2.0    version and changelog, to be looked at and committed
python3 tools/release.py check cake-gdn            what would stop the release of HEAD
python3 tools/release.py cut cake-gdn              build twice, compare, tag, record, commit the record
python3 tools/release.py build cake-gdn 0.1.0 -o dist   the files of a release, from its sources
python3 tools/release.py verify                    build every release again and compare its bytes
python3 tools/release.py list                      what is released, and where its sources can be had

Needs hatchling (the version that tools/release_build.py names) and packaging.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

from release_build import HATCHLING, Built, build_commit, build_release, builder, metadata, set_version
from release_checks import fold, troubles, version_at
from release_record import (
    FILE,
    Records,
    Release,
    ReleaseError,
    git,
    has_object,
    packages,
    read,
    sdist_path,
    tag_of,
    write,
)


def prepare(repo: Path, distribution: str, version: str, date: datetime.date) -> None:
    """Write version and changelog into the working tree."""
    folder = _folder(repo, distribution)
    names = fold(folder, version, date)
    set_version(folder / "pyproject.toml", version)
    print(f"packages/{distribution}: version {version}, {len(names)} fragments folded into CHANGELOG.md")
    print(f"look at it, then: git add -A packages/{distribution}; git commit; release.py cut {distribution}")


def check(repo: Path, distribution: str, commit: str) -> int:
    """Print what would stop a release; 1 where something does."""
    found = troubles(repo, distribution, commit, read(repo))
    for trouble in found:
        print(trouble)
    if not found:
        print(f"{distribution} {version_at(repo, distribution, commit)} can be released from {commit}")
    return 1 if found else 0


def cut(repo: Path, distributions: list[str], revision: str, *, commit_record: bool) -> None:
    """Release what a commit holds: the distributions in the order given, which is that of their bounds.

    Raises:
        ReleaseError: something disagrees, or two builds differ. What was cut before it stays cut.
    """
    commit = git(repo, "rev-parse", "--verify", f"{revision}^{{commit}}")
    if builder() != f"hatchling {HATCHLING}":
        raise ReleaseError(f"releases are built by hatchling {HATCHLING}, here is {builder()}")
    _refuse_dirty(repo, distributions, revision)
    for distribution in distributions:
        records = read(repo)
        found = troubles(repo, distribution, commit, records)
        if found:
            raise ReleaseError("\n".join(found))
        version = version_at(repo, distribution, commit)
        _cut_one(repo, distribution, version, commit, records, commit_record)


def _cut_one(
    repo: Path, distribution: str, version: str, commit: str, records: Records, commit_record: bool
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        first = build_commit(repo, distribution, commit, Path(scratch, "first"))
        second = build_commit(repo, distribution, commit, Path(scratch, "second", "elsewhere"))
        if first.hashes() != second.hashes():
            raise ReleaseError(
                f"{distribution} {version}: two builds of {commit[:12]} differ, so it is not released"
            )
        _refuse_foreign(first, distribution, version)
        sdist, wheel = first.hashes()
        release = Release(
            commit=commit,
            tree=git(repo, "rev-parse", f"{commit}:packages/{distribution}"),
            epoch=int(git(repo, "show", "-s", "--format=%ct", commit)),
            builder=builder(),
            sdist=sdist,
            wheel=wheel,
        )
        data = first.sdist.read_bytes()
    tag = tag_of(distribution, version)
    git(repo, "tag", "-a", tag, "-m", f"{distribution} {version}", commit)
    kept = sdist_path(repo, distribution, version)
    records.setdefault(distribution, {})[version] = release
    try:
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(data)
        write(repo, records)
        if commit_record:
            paths = [FILE, str(kept.relative_to(repo))]
            git(repo, "add", "--", *paths)
            git(
                repo,
                "commit",
                "-q",
                "-m",
                f"[repo] Record the release of {distribution} {version}",
                "--",
                *paths,
            )
    except (OSError, ReleaseError):
        git(repo, "tag", "-d", tag)
        kept.unlink(missing_ok=True)
        del records[distribution][version]
        write(repo, records)
        raise
    print(f"{distribution} {version} is released: tag {tag} at {commit[:12]}, sdist {kept.relative_to(repo)}")
    print(f"  wheel {wheel}\n  sdist {sdist}")


def _refuse_dirty(repo: Path, distributions: list[str], revision: str) -> None:
    if revision != "HEAD":
        return
    paths = [FILE, *(f"packages/{name}" for name in distributions)]
    changed = git(repo, "status", "--porcelain", "--", *paths)
    if changed:
        raise ReleaseError(f"not committed, so not in the release:\n{changed}")


def _refuse_foreign(built: Built, distribution: str, version: str) -> None:
    fields = metadata(built.wheel)
    if (fields["Name"], fields["Version"]) != ([distribution], [version]):
        raise ReleaseError(
            f"the wheel calls itself {fields['Name']} {fields['Version']}, expected {distribution} {version}"
        )


def build(repo: Path, distribution: str, version: str, out: Path) -> None:
    """Build the files of a release."""
    release = read(repo).get(distribution, {}).get(version)
    if release is None:
        raise ReleaseError(f"{FILE} has no {distribution} {version}; it has: {_known(read(repo))}")
    built, origin = build_release(repo, distribution, version, release, out)
    print(f"from its {origin}: {built.sdist} {built.wheel}")


def verify(repo: Path) -> int:
    """Build every release again; 1 where one can't be, or gives other bytes."""
    bad = 0
    for distribution, versions in read(repo).items():
        for version, release in versions.items():
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    built, origin = build_release(repo, distribution, version, release, Path(scratch))
                except ReleaseError as error:
                    bad += 1
                    print(f"FAILED  {error}")
                    continue
                same = built.hashes() == (release.sdist, release.wheel)
            how = (
                "same bytes" if same else f"builds; its bytes are those of {release.builder}, not {builder()}"
            )
            print(f"ok      {distribution} {version} from its {origin}: {how}")
    return 1 if bad else 0


def listing(repo: Path) -> None:
    """Print what is released, and what this clone holds of it."""
    records = read(repo)
    if not records:
        print("nothing is released yet")
    for distribution, versions in records.items():
        for version, release in versions.items():
            tag = tag_of(distribution, version)
            here = {
                "commit": has_object(repo, f"{release.commit}^{{commit}}"),
                "tag": has_object(repo, f"refs/tags/{tag}"),
                "tree": has_object(repo, f"{release.tree}^{{tree}}"),
                "sdist": sdist_path(repo, distribution, version).is_file(),
            }
            words = ", ".join(f"{name} {'here' if there else 'missing'}" for name, there in here.items())
            print(f"{distribution} {version} {release.commit[:12]}: {words}")


def _folder(repo: Path, distribution: str) -> Path:
    if distribution not in packages(repo):
        raise ReleaseError(f"no distribution {distribution!r} here; there are: {', '.join(packages(repo))}")
    return repo / "packages" / distribution


def _known(records: Records) -> str:
    return (
        ", ".join(f"{name} {version}" for name, versions in records.items() for version in versions) or "none"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--repo", type=Path, default=Path(__file__).resolve().parents[1], help=argparse.SUPPRESS
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare", help="write version and changelog, to be looked at and committed")
    one.add_argument("distribution")
    one.add_argument("version")
    one.add_argument("--date", type=datetime.date.fromisoformat, help="of the changelog's section; today")
    two = commands.add_parser("check", help="say what would stop a release")
    two.add_argument("distribution")
    two.add_argument("--commit", default="HEAD")
    three = commands.add_parser("cut", help="build, tag and record what a commit holds")
    three.add_argument(
        "distribution", nargs="+", help="several in the order of their bounds: cake-core first"
    )
    three.add_argument("--commit", default="HEAD")
    three.add_argument("--no-commit", action="store_true", help="leave the record in the working tree")
    four = commands.add_parser("build", help="build the files of a release from its sources")
    four.add_argument("distribution")
    four.add_argument("version")
    four.add_argument("-o", "--out", type=Path, default=Path("dist"))
    commands.add_parser("verify", help="build every release again and compare")
    commands.add_parser("list", help="what is released, and where its sources can be had")
    args = parser.parse_args(argv)
    try:
        if args.command == "prepare":
            today = datetime.datetime.now(datetime.timezone.utc).date()
            prepare(args.repo, args.distribution, args.version, args.date or today)
        elif args.command == "check":
            return check(args.repo, args.distribution, args.commit)
        elif args.command == "cut":
            cut(args.repo, args.distribution, args.commit, commit_record=not args.no_commit)
        elif args.command == "build":
            build(args.repo, args.distribution, args.version, args.out)
        elif args.command == "verify":
            return verify(args.repo)
        else:
            listing(args.repo)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
