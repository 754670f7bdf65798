"""A request as one line on a terminal: it fits, whatever the request was."""

import re
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len

from restante.server.request_lines import MAX_COLUMNS, MIN_COLUMNS, request_line

WORKSPACE = "5f0c6a52-3d1e-4b7a-9c1d-2e8f4a6b7c90"
EVENT: dict[str, Any] = {
    "event": "request",
    "timestamp": "09:41:07",
    "status": 200,
    "method": "POST",
    "path": f"/workspaces/{WORKSPACE}/chat/uploads",
    "name": "laptop",
    "bytes_in": 10 * 1024 * 1024,
    "bytes_out": 300,
    "seconds": 0.0841,
}


def shown(width: int = 100, **changes: Any) -> str:
    return request_line(EVENT | changes, width=width, colors=False)


def test_it_has_what_a_person_looks_for():
    line = shown()

    assert len(line) == 100
    assert re.sub(" +", " ", line) == (
        "09:41:07 200 POST /workspaces/5f0c6a52…/chat/uploads laptop 10.0 MiB 84 ms"
    )


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_columns_stand_below_each_other(width: int):
    lines = [shown(width), shown(width, name="", path="/", bytes_in=0, bytes_out=0, seconds=25)]

    assert [len(line) for line in lines] == [width, width]
    assert lines[0].index("laptop") == len(lines[0].split("laptop")[0])
    assert lines[1].endswith(" 25 s")


def test_a_long_path_loses_its_middle():
    path = f"/workspaces/{WORKSPACE}/pending-uploads/{WORKSPACE}/content"

    assert "/workspaces/…/pending-uploads/…/content " in shown(100, path=path)
    assert "…/pending-uploads/…/content " in shown(80, path=path)
    assert " …/pendi…content " in shown(60, path=path)


@given(
    width=st.integers(MIN_COLUMNS, MAX_COLUMNS),
    sent=st.fixed_dictionaries(
        {
            "path": st.text(st.characters(max_codepoint=255), max_size=256),
            "name": st.text(max_size=100),
            "method": st.sampled_from(["GET", "OPTIONS", "other"]),
            "bytes_in": st.integers(0, 2**40),
            "seconds": st.floats(0, 10**6),
        }
    ),
)
def test_nothing_makes_it_wrap_or_moves_the_cursor(width: int, sent: dict[str, Any]):
    """Paths and names are whatever somebody has sent."""
    line = shown(width, **sent)

    assert line.isprintable()
    assert cell_len(line) == width


@pytest.mark.parametrize(("status", "color"), [(200, 32), (307, 32), (404, 33), (503, 31)])
def test_the_status_is_coloured(status: int, color: int):
    line = request_line(EVENT | {"status": status}, width=100, colors=True)

    assert f"09:41:07 \x1b[{color}m{status}\x1b[0m POST" in line
