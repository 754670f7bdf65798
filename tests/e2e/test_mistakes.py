"""Every mistake of an operator ends in one sentence and exit code 1, never in a traceback."""

import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import dsn_of
from processes import Outcome, Server, restante

PASSWORD = "correct-horse-battery-staple"


def serve(*words: str | Path) -> Outcome:
    return restante("serve", "--port", "0", *words)


def assert_one_sentence(outcome: Outcome, pattern: str) -> None:
    """Standard error is exactly one line, a sentence."""
    assert outcome.code == 1, outcome
    assert outcome.stderr.count("\n") == 1, outcome.stderr
    assert re.fullmatch(rf"restante: {pattern}", outcome.stderr.strip()), outcome.stderr
    assert outcome.stderr.strip().endswith((".", "?"))
    assert PASSWORD not in outcome.stderr + outcome.stdout
    assert "ready" not in outcome.stdout


def test_a_port_that_is_in_use_is_one_sentence(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        outcome = restante("serve", "--port", port, "--data-dir", tmp_path / "data")

    assert_one_sentence(
        outcome, rf"Restante cannot listen on 127\.0\.0\.1 port {port}: Address already in use\. .*"
    )
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_one_sentence(tmp_path: Path, host: str):
    outcome = serve("--host", host, "--data-dir", tmp_path / "data")

    assert_one_sentence(outcome, rf"Restante cannot listen on {re.escape(host)} port 0: .*")


def refused_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as momentary:
        return momentary.getsockname()[1]


UNREACHABLE = {
    "nobody listens": "postgresql://restante:{password}@127.0.0.1:{port}/restante",
    "an unknown host": "postgresql://restante:{password}@nohost.invalid/restante",
    "another scheme": "mysql://restante:{password}@127.0.0.1/restante",
    "no scheme": "127.0.0.1:{port}/{password}",
    "a port that is no number": "postgresql://restante:{password}@127.0.0.1:many/restante",
    "a port that cannot be": "postgresql://restante:{password}@127.0.0.1:99999/restante",
    "no socket": "postgresql://restante:{password}@/restante?host=/nonexistent",
    "an unknown option": "postgresql://restante:{password}@127.0.0.1:{port}/restante?sslmode=maybe",
    "half an address": "postgresql://restante:{password}@[::1/restante",
}


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("migrate", UNREACHABLE["nobody listens"]),
        *(("serve", url) for url in UNREACHABLE.values()),
    ],
    ids=["migrate", *UNREACHABLE],
)
def test_a_database_that_cannot_be_reached_is_one_sentence(tmp_path: Path, url: str, command: str):
    url = url.format(password=PASSWORD, port=refused_port())

    outcome = restante(command, "--data-dir", tmp_path, "--database-url", url)

    assert_one_sentence(
        outcome, r"The database cannot be reached: \S.*\. Check RESTANTE_DATABASE_URL\."
    )


def test_a_database_that_does_not_exist_is_one_sentence(cluster: str, tmp_path: Path):
    outcome = serve("--data-dir", tmp_path, "--database-url", dsn_of(cluster, "no_such_database"))

    assert_one_sentence(
        outcome,
        r'The database cannot be reached: database "no_such_database" does not exist\. .*',
    )


def test_a_database_user_that_is_refused_is_one_sentence(cluster: str, tmp_path: Path):
    stranger = cluster.replace("://restante@", f"://stranger:{PASSWORD}@")
    assert stranger != cluster

    outcome = serve("--data-dir", tmp_path, "--database-url", stranger)

    assert_one_sentence(outcome, r"The database cannot be reached: .*\. Check .*")


@contextmanager
def old_postgres(version: str) -> Iterator[str]:
    """A server that speaks enough of the protocol of Postgres to send its version."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_answer, args=(listening, version), daemon=True).start()
        yield f"postgresql://restante@127.0.0.1:{listening.getsockname()[1]}/restante"


def _answer(listening: socket.socket, version: str) -> None:
    try:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_converse, args=(connection, version), daemon=True).start()
    except OSError:
        return


def _converse(connection: socket.socket, version: str) -> None:
    with connection:
        request = connection.recv(4096)
        if request[4:8] == struct.pack("!i", 80877103):  # a request for TLS
            connection.sendall(b"N")
            connection.recv(4096)
        connection.sendall(
            _message(b"R", struct.pack("!i", 0))
            + _message(b"S", b"server_version\0" + version.encode() + b"\0")
            + _message(b"S", b"client_encoding\0UTF8\0")
            + _message(b"K", struct.pack("!ii", 1, 1))
            + _message(b"Z", b"I")
        )
        while connection.recv(4096):
            continue


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


@pytest.mark.parametrize("command", ["serve", "migrate"])
def test_a_postgres_that_is_too_old_is_one_sentence(tmp_path: Path, command: str):
    with old_postgres("14.9") as url:
        outcome = restante(command, "--data-dir", tmp_path, "--database-url", url)

    assert_one_sentence(outcome, r"The database is Postgres 14\.9; Restante needs 15 or newer\.")


def test_a_server_that_is_no_postgres_is_one_sentence(tmp_path: Path):
    """A web server on that port, for instance."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"postgresql://restante@127.0.0.1:{listening.getsockname()[1]}/restante"

        outcome = serve("--data-dir", tmp_path, "--database-url", url)

    assert_one_sentence(outcome, r"The database cannot be reached: .*\. Check .*")


@pytest.mark.parametrize("command", ["serve", "migrate"])
def test_an_unknown_setting_is_one_sentence_with_a_suggestion(command: str):
    outcome = restante(command, RESTANTE_DATABASE_ULR="postgresql://x")

    assert_one_sentence(
        outcome,
        r"RESTANTE_DATABASE_ULR is not a setting of Restante\. "
        r"Did you mean RESTANTE_DATABASE_URL\?",
    )


def test_an_invalid_value_of_a_setting_is_one_sentence():
    outcome = restante("serve", RESTANTE_PORT="http")

    assert_one_sentence(outcome, r"RESTANTE_PORT is wrong: expected int.*")


def test_an_admin_token_that_is_too_short_is_refused_and_not_printed():
    outcome = restante("serve", RESTANTE_ADMIN_TOKEN="hunter2")

    assert_one_sentence(outcome, r"RESTANTE_ADMIN_TOKEN is too short: .*")
    assert "hunter2" not in outcome.stderr


@pytest.mark.parametrize("command", ["serve", "migrate"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_data_directory_that_is_a_file_is_one_sentence(
    tmp_path: Path, command: str, inside: bool
):
    file = tmp_path / "data"
    file.write_text("precious")

    outcome = restante(command, "--data-dir", file / "deeper" if inside else file)

    assert_one_sentence(outcome, rf"The data directory {file}.* cannot be used: .*directory.*")
    assert file.read_text() == "precious"


@pytest.mark.parametrize("command", ["serve", "migrate"])
def test_a_data_directory_that_cannot_be_created_is_one_sentence(command: str):
    """Not even root can write there."""
    outcome = restante(command, "--data-dir", "/proc/restante")

    assert_one_sentence(
        outcome, r"The data directory /proc/restante cannot be used: .*--data-dir\."
    )


def test_a_data_directory_of_another_user_is_one_sentence(tmp_path: Path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)

    outcome = serve("--data-dir", sealed)

    assert_one_sentence(outcome, r"The data directory .* this user may not write in it\. .*")


def test_a_data_directory_that_another_server_uses_is_one_sentence(server: Server):
    server.start()

    outcome = serve("--data-dir", server.data_dir)

    assert_one_sentence(
        outcome,
        rf"Another Restante \(process {server.pid}\) is using {server.data_dir}\. "
        r"Stop it, or choose another --data-dir\.",
    )
    assert server.get("/ready")[0] == 200


def test_missing_programs_of_postgres_are_one_sentence(tmp_path: Path):
    outcome = serve("--data-dir", tmp_path / "data", "--postgres-bin", tmp_path)

    assert_one_sentence(outcome, rf"There is no postgres and no initdb in {tmp_path}.*")


def test_a_missing_account_for_postgres_is_one_sentence(tmp_path: Path):
    outcome = serve("--data-dir", tmp_path / "data", "--postgres-account", "no-such-account")

    assert_one_sentence(outcome, r".*account no-such-account.*")
