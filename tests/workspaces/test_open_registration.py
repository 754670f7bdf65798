"""A server on loopback lets programs register without a token, and no web page."""

import json
from uuid import uuid4

import pytest
from callers import ADMIN, Answer, ask, bearer, register, registered, until_refused
from sites import Site, SiteFactory

from restante.errors import OriginRefused
from restante.workspaces.rules import Sender, refuse_web_pages

pytestmark = pytest.mark.anyio

JSON = "application/json"
PAGE = "https://page.example"


async def posted(site: Site, workspace_id: str = "", **headers: str) -> Answer:
    """A registration with exactly these headers."""
    body = {
        "id": workspace_id or str(uuid4()),
        "delivery_mode": "poll",
        "agent_card": {"name": "w"},
    }
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await ask(
        site,
        "POST",
        "/registry/register",
        data=json.dumps(body).encode(),
        headers=named,
        skip_auto_headers=["Content-Type"],
    )


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Origin": PAGE, "Content_Type": "text/plain"}, 403, "origin_refused"),
        ({"Origin": PAGE, "Content_Type": JSON}, 403, "origin_refused"),
        ({"Origin": "null", "Content_Type": JSON}, 403, "origin_refused"),
        ({"Host": "page.example", "Content_Type": JSON}, 403, "origin_refused"),
        (
            {"Host": "page.example:8080", "Origin": "http://page.example:8080"},
            403,
            "origin_refused",
        ),
        ({"Content_Type": "text/plain"}, 415, "not_json"),
        ({"Content_Type": "text/plain;application/json"}, 415, "not_json"),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415, "not_json"),
        ({}, 415, "not_json"),
    ],
    ids=str,
)
async def test_a_web_page_gets_no_token(
    shared_site: Site, headers: dict[str, str], status: int, code: str
):
    """A browser on the machine sends such requests for any page, without asking us first."""
    answer = await posted(shared_site, **headers)

    assert (answer.status, answer.json["code"]) == (status, code)
    assert "auth_token" not in answer.json


async def test_a_page_does_not_learn_which_ids_are_taken(shared_site: Site):
    """A page that made its name resolve to loopback can read the answers, and send any header."""
    taken = await registered(shared_site)
    page = {"Host": "page.example", "Content_Type": JSON}

    for token in ({}, bearer("guessed")):
        answers = [await posted(shared_site, chosen, **page, **token) for chosen in ("", taken.id)]
        assert [answer.status for answer in answers] == [403, 403]
        assert answers[0].json == answers[1].json


async def test_programs_register_as_before(shared_site: Site):
    port = shared_site.url.rpartition(":")[2]
    own = {f"http://{host}:{port}": f"{host}:{port}" for host in ("localhost", "127.0.0.1")}

    for origin, host in own.items():
        assert (await posted(shared_site, Host=host, Content_Type=JSON)).status == 200
        assert (
            await posted(
                shared_site, Host=host, Origin=origin, Content_Type=JSON + "; charset=utf-8"
            )
        ).status == 200


async def test_with_a_token_no_header_matters(run_site: SiteFactory):
    """Programs in the field declare JSON as a form, or not at all."""
    odd = {"Host": "r", "Origin": PAGE, "Content_Type": "application/x-www-form-urlencoded"}
    async with run_site(registration_token="open-sesame-open-sesame") as site:
        first = await posted(site, **odd, **bearer("open-sesame-open-sesame"))
    async with run_site() as site:
        workspace = await registered(site)
        second = await posted(site, **odd, **ADMIN)
        again = await posted(site, workspace.id, **odd, **bearer(workspace.token))

    assert (first.status, second.status, again.status) == (200, 200, 200)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.9.9.9:80", "[::1]:8080", None])
def test_a_loopback_address_is_this_machine(host: str | None):
    refuse_web_pages(Sender(host=host, content_type=JSON))


@pytest.mark.parametrize(
    "host", ["", "localhost.page.example", "127.0.0.1.page.example", "10.0.0.1", "[::", "0.0.0.0"]
)
def test_any_other_name_is_not(host: str):
    with pytest.raises(OriginRefused):
        refuse_web_pages(Sender(host=host, content_type=JSON))


async def test_registrations_without_a_token_are_limited_in_bytes_per_minute(site: Site):
    """They are kept, so they could fill the disk; with a token there is somebody to ask."""
    card = {"name": "w", "text": "x" * 60_000}
    answers = await until_refused(register(site, agent_card=card) for _ in range(1000))

    assert answers[0].status == 200
    assert (answers[-1].status, answers[-1].json["code"]) == (429, "too_many_messages")
    assert (await register(site, agent_card=card, headers=ADMIN)).status == 200
