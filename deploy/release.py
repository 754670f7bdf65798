"""
Builds what is released from the last commit, and checks it in clean environments.

Nothing of the working tree is used, so that anybody with the commit gets the same bytes.  Nothing
is published: that is up to whoever runs this.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUMS = "SHA256SUMS"


class NotReleasable(Exception):
    """Something is wrong with what would be released; the message says what."""


def main() -> None:
    """Build, check, and print the checksums."""
    parser = argparse.ArgumentParser(description="Build the packages and the image of a release.")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="where they are put")
    parser.add_argument("--base", help="the base of the image, instead of the Dockerfile's")
    parser.add_argument("--without-image", action="store_true", help="build no image")
    chosen = parser.parse_args()
    try:
        release(chosen.into, base=chosen.base, with_image=not chosen.without_image)
    except NotReleasable as problem:
        sys.exit(f"release: {problem}")


def release(into: Path, *, base: str | None, with_image: bool) -> None:
    """Put what is released into a directory, once it has passed every check."""
    refuse_changes(ROOT)
    with tempfile.TemporaryDirectory(prefix="restante-release-") as name:
        work = Path(name)
        work.chmod(0o711)  # run by root, Postgres has an account that must get through
        tree = work / "tree"
        version = exported(tree)
        built = build(tree, work / "built")
        say("two builds are the same bytes")
        same_bytes(built, build(tree, work / "again"))
        check_source_archive(built, version, work)
        check_commands(built, version, work)
        if with_image:
            build_image(tree, f"localhost/restante:{version}", base)
        into.mkdir(exist_ok=True)
        for path in built:
            shutil.copy(path, into)
        (into / SUMS).write_text(checksums(built))
    print(f"\nIn {into}:\n{(into / SUMS).read_text()}", end="")


def say(step: str) -> None:
    print(f"release: {step}", flush=True)


def run(*words: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a program; raises NotReleasable with what it said if it fails."""
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=clean_environment() | environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise NotReleasable(f"`{' '.join(map(str, words))}` failed:\n{done.stdout}")
    return done.stdout


def clean_environment() -> dict[str, str]:
    """The environment without what would make the result depend on who runs this."""
    dropped = ("RESTANTE_", "PYTHON", "VIRTUAL_ENV", "SOURCE_DATE_EPOCH")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def git(*words: str, tree: Path = ROOT) -> str:
    return run("git", "-C", tree, *words).strip()


def refuse_changes(tree: Path) -> None:
    """Raises NotReleasable if the tree is not what was committed."""
    if changed := git("status", "--porcelain", tree=tree):
        raise NotReleasable(f"commit or remove these first; a release is a commit:\n{changed}")


def exported(tree: Path) -> str:
    """Export the last commit; returns its version."""
    tree.mkdir()
    run("sh", "-c", f"git -C '{ROOT}' archive HEAD | tar -x -C '{tree}'")
    version = version_of(tree)
    say(f"{version}, from commit {git('rev-parse', '--short', 'HEAD')}{rehearsed(tree, version)}")
    return version


def version_of(tree: Path) -> str:
    """The version; raises NotReleasable if the changelog begins with another one."""
    source = (tree / "src/restante/__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    newest = re.search(r"^## (.+)$", (tree / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not found or not newest or found[1] not in re.split(r"[\s:]+", newest[1]):
        first = newest[1] if newest else "nothing"
        raise NotReleasable(
            f"the version is {found[1] if found else 'missing'}, and the changelog begins with "
            f"{first}."
        )
    return found[1]


def rehearsed(tree: Path, version: str) -> str:
    """What is missing before this is more than a rehearsal."""
    missing = ["a date in the changelog"] if _is_unreleased(tree) else []
    if f"v{version}" not in git("tag", "--points-at", "HEAD").split():
        missing.append(f"the tag v{version}")
    return f" (a rehearsal: there is not yet {' and '.join(missing)})" if missing else ""


def _is_unreleased(tree: Path) -> bool:
    return "\n## Unreleased" in (tree / "CHANGELOG.md").read_text()


def commit_time() -> dict[str, str]:
    """The time that everything built from the commit has."""
    return {"SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct")}


def build(tree: Path, into: Path) -> list[Path]:
    """Build the source archive and the wheel."""
    run(sys.executable, "-m", "hatchling", "build", "-d", into, cwd=tree, **commit_time())
    return sorted(into.iterdir())


def same_bytes(one: list[Path], two: list[Path]) -> None:
    """Raises NotReleasable if two builds differ."""
    if checksums(one) != checksums(two):
        raise NotReleasable(f"two builds differ:\n{checksums(one)}{checksums(two)}")


def wheels(built: list[Path]) -> list[Path]:
    return [path for path in built if path.suffix == ".whl"]


def checksums(paths: list[Path]) -> str:
    """One line per file, as sha256sum reads them."""
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths
    )


def check_source_archive(built: list[Path], version: str, work: Path) -> None:
    """What is built from the archive is what was built from the commit."""
    say("the source archive builds the same wheel, and can be installed")
    (archive,) = (path for path in built if path.name.endswith(".tar.gz"))
    with tarfile.open(archive) as opened:
        opened.extractall(work / "source", filter="data")
    again = build(work / "source" / f"restante-{version}", work / "from-source")
    same_bytes(wheels(built), wheels(again))
    installed = Environment(work / "env-source", str(archive))
    installed.says_its_version(version)


class Environment:
    """A clean virtual environment with something installed into it."""

    def __init__(self, directory: Path, wanted: str) -> None:
        self.bin = directory / "bin"
        venv.create(directory, with_pip=True)
        run(self.bin / "python", "-m", "pip", "install", "--quiet", wanted)

    def says_its_version(self, version: str) -> None:
        said = run(self.bin / "restante", "--version").strip()
        if said != version:
            raise NotReleasable(f"the installed command says that it is {said}, not {version}")


def check_commands(built: list[Path], version: str, work: Path) -> None:
    """A server and a client, each from the wheel, exchange a file."""
    (wheel,) = wheels(built)
    say("the wheel installs a client, without what only a server needs")
    client = Environment(work / "env-client", str(wheel))
    client.says_its_version(version)
    _refuses_to_serve(client)
    say("the wheel installs a server, and a file goes through it")
    server = Environment(work / "env-server", f"{wheel}[server]")
    with _serving(server, work / "data") as address:
        _exchange(client, address, work)


def _refuses_to_serve(client: Environment) -> None:
    try:
        run(client.bin / "restante", "serve")
    except NotReleasable as refusal:
        if "restante[server]" in str(refusal):
            return
        raise
    raise NotReleasable("a client's environment has a server")


@contextmanager
def _serving(server: Environment, data: Path) -> Iterator[str]:
    quiet = ["--log-level", "warning"]
    command = [server.bin / "restante", "serve", "--port", "0", "--data-dir", data, *quiet]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=clean_environment()
    ) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            ready = process.stdout.readline()
            if " ready at " not in ready:
                raise NotReleasable("the server does not start")
            yield ready.rpartition(" ")[2].strip()
        finally:
            process.terminate()
    if process.returncode:
        raise NotReleasable(f"the server ended with {process.returncode}")


def _exchange(client: Environment, address: str, work: Path) -> None:
    inbox, file = work / "inbox", work / "file.txt"
    file.write_text("released")
    connect = [client.bin / "restante", "connect", address, "--into", inbox, "--once"]
    token = (work / "data" / "admin-token").read_text().strip()
    run(*connect, "--name", "laptop")
    send = [client.bin / "restante", "send", "laptop", file]
    run(*send, RESTANTE_URL=address, RESTANTE_TOKEN=token)
    run(*connect)
    if (inbox / "file.txt").read_text() != "released":
        raise NotReleasable("the file that arrived is another one")


def build_image(tree: Path, name: str, base: str | None) -> None:
    """Build the image, if buildah is installed."""
    if not shutil.which("buildah"):
        say("no image: buildah is not installed")
        return
    time = commit_time()["SOURCE_DATE_EPOCH"]
    words = ["--format=docker", f"--timestamp={time}", f"--build-arg=SOURCE_DATE_EPOCH={time}"]
    if base:
        words.append(f"--build-arg=BASE={base}")
    run("buildah", "build", *words, f"--tag={name}", "--file", tree / "deploy/Dockerfile", tree)
    image = run("buildah", "images", "--format={{.Digest}}", name).strip()
    say(f"the image {name} is {image}")


if __name__ == "__main__":
    main()
