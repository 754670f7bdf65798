"""The Python programs in the documents run as they are written, and type checkers accept them."""

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sites import Site

ROOT = Path(__file__).parents[2]
SAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "docs/library.md"]
IN_LIBRARY = SAMPLE.findall((ROOT / "docs/library.md").read_text())
# What each sample of the library prints at least, in their order.
SAID = [
    "received ",
    "Good morning.\nHow are you?",
    "bytes",
    "'uri': 'workspace:",
    "It is noon.",
    "token",
]
# Mistakes that the types must refuse, and what they must narrow.
MISTAKES = """\
from pathlib import Path
from restante.client import AsyncClient, BlockingFile, Bytes, Client
def mistakes(client: Client, name: str) -> None:
    client.send_files(name, name)  # refused
    client.send_files(name, Path(name))  # refused
    client.send_files(name, Bytes("a", b"x"))  # refused
    client.send_files(name, [open(name)])  # refused
    client.send_message(name, "hello", files=name)  # refused
    client.send_message(name, "hello", files=[name])
    for item in client.inbox():
        item.save("incoming")  # refused
        if item.kind == "message":
            item.save("incoming")  # refused
        else:
            print(item.text)  # refused
    for item in client.inbox():
        if isinstance(item, BlockingFile):
            item.save("incoming")
        else:
            print(item.text)
async def narrowed(client: AsyncClient) -> None:
    async for item in client.inbox():
        if item.kind == "file":
            await item.save("incoming")
        else:
            await item.reply("Thank you.")
"""


def test_each_sample_of_the_library_is_run():
    assert len(IN_LIBRARY) == len(SAID)


@pytest.fixture
def readers_shell(shared_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a file, the server's address, and something on standard input."""
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESTANTE_URL", shared_site.url)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Dear diary.")))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("program", "said"),
    list(zip(IN_LIBRARY, SAID, strict=True)),
    ids=["send_and_receive", "asyncio", "streams", "files", "answers", "errors"],
)
@pytest.mark.usefixtures("readers_shell")
async def test_a_sample_runs_as_it_is_written(
    program: str, said: str, capsys: pytest.CaptureFixture[str]
):
    """A reader pastes it."""
    await asyncio.to_thread(exec, program, {"__name__": "__main__"})

    assert said in capsys.readouterr().out


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every sample for users of the library, and with mistakes."""
    directory = tmp_path_factory.mktemp("samples")
    for page in PAGES:
        for number, program in enumerate(SAMPLE.findall(page.read_text()), 1):
            (directory / f"{page.stem}_{number}.py").write_text(program)
    (directory / "mistakes.py").write_text(MISTAKES)
    # Nothing of what the library is built on is in its types.
    (directory / "mypy.ini").write_text("[mypy]\n[mypy-aiohttp.*,yarl.*]\nfollow_imports = skip\n")
    return directory


def complaints_of_mypy(directory: Path) -> list[tuple[str, int]]:
    done = run(directory, "mypy", "--strict", "--no-incremental", "--output", "json", ".")
    found = [json.loads(line) for line in done.splitlines()]
    return [(Path(one["file"]).name, one["line"]) for one in found if one["severity"] == "error"]


def complaints_of_pyright(directory: Path) -> list[tuple[str, int]]:
    (directory / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    done: dict[str, Any] = json.loads(
        run(directory, "basedpyright", "--outputjson", "--pythonpath", sys.executable)
    )
    return [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in done["generalDiagnostics"]
        if one["severity"] == "error"
    ]


def run(directory: Path, tool: str, *words: str) -> str:
    done = subprocess.run(
        [Path(sys.executable).parent / tool, *words],
        cwd=directory,
        env={**os.environ, "MYPYPATH": str(ROOT / "src"), "MYPY_CACHE_DIR": os.devnull},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("complaints", [complaints_of_mypy, complaints_of_pyright])
def test_type_checkers_accept_every_sample_and_refuse_mistakes(written: Path, complaints: Any):
    """Strictly, as careful users check their own programs."""
    lines = enumerate(MISTAKES.splitlines(), 1)
    refused = {("mistakes.py", number) for number, line in lines if line.endswith("# refused")}

    assert set(complaints(written)) == refused
