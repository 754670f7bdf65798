"""The programs that read what is in `deploy/` accept it, and it names nothing that is missing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from restante.postgres import binaries
from restante.secret_files import FILE_VARIABLES
from restante.settings import CLIENT_VARIABLES, Settings, variable

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "restante.service").read_text()
RESTANTE = Path(sys.executable).with_name("restante")

# Of 100: the network, the file system and Unix sockets are what a server needs.
MAX_EXPOSURE = 20

needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed"
)


def run(*words: str | Path) -> str:
    done = subprocess.run(
        words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with the command where it is on this machine."""
    assert "ExecStart=/opt/restante/bin/restante serve\n" in UNIT
    here = tmp_path / "restante.service"
    here.write_text(UNIT.replace("/opt/restante/bin/restante", str(RESTANTE)))
    return here


@needs_systemd
def test_systemd_understands_the_unit(unit: Path):
    assert run("systemd-analyze", "verify", "--man=no", unit) == ""


@needs_systemd
def test_the_unit_is_locked_down(unit: Path):
    run("systemd-analyze", "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", unit)


def test_the_unit_waits_for_what_the_server_tells():
    assert "Type=notify" in UNIT
    assert 'systemd.notify("READY=1")' in (ROOT / "src/restante/cli/serve.py").read_text()


def test_the_dockerfile_is_clean():
    hadolint = shutil.which("hadolint", path=str(RESTANTE.parent)) or shutil.which("hadolint")
    if not hadolint:
        pytest.skip("hadolint is not installed")

    assert run(hadolint, DEPLOY / "Dockerfile") == ""


@pytest.mark.skipif(not shutil.which("caddy"), reason="caddy is not installed")
def test_caddy_understands_its_file():
    run("caddy", "validate", "--adapter", "caddyfile", "--config", DEPLOY / "Caddyfile")


def test_the_image_is_built_from_files_that_exist():
    """And from nothing that the list of ignored files keeps out of the build."""
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.M)
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M)

    files = {file for line in copied for file in line.split()}

    assert files == set(kept)
    assert all((ROOT / file).exists() for file in files)


def test_the_compose_file_names_only_what_it_defines():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())

    for service in compose["services"].values():
        assert set(service["secrets"]) <= set(compose["secrets"])
        assert set(service["networks"]) <= set(compose["networks"])
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(
            compose["volumes"]
        )
    build = compose["services"]["restante"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.iterdir() if path.is_file()))
def test_only_settings_that_exist_are_set(name: str):
    known = {variable(field) for field in Settings.__struct_fields__} | FILE_VARIABLES
    known |= CLIENT_VARIABLES  # a check of the release sends something

    written = set(re.findall(r"\bRESTANTE_[A-Z_]+\b", (DEPLOY / name).read_text()))

    assert written - {"RESTANTE_"} <= known


def test_the_compose_file_has_a_supported_postgres():
    image = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["postgres"]["image"]

    assert int(image.partition(":")[2]) >= binaries.OLDEST_MAJOR
