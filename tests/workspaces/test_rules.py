"""A workspace after a registration or a change, and which token matches it."""

from dataclasses import fields, replace
from uuid import uuid4

import pytest
from hypothesis import given, strategies as st
from msgspec import UNSET

from restante.errors import BadRequest
from restante.ids import WorkspaceId
from restante.workspaces.rules import (
    Changes,
    Details,
    Workspace,
    check_url,
    clean_label,
    details_of,
    new_token,
    token_hash,
    token_matches,
)

modes = st.sampled_from(["poll", "push"])
urls = st.sampled_from(["http://a.example", "https://b.example:8443/path"])
labels = st.text("abc", max_size=3)
cards = st.sampled_from(['{"name":"a"}', '{"name":"b"}'])
changes = st.builds(
    Changes,
    name=st.none() | labels,
    delivery_mode=st.none() | modes,
    url=st.none() | urls,
    agent_card=st.none() | cards,
    parent_id=st.just(UNSET) | st.none() | st.uuids(),
)
details = st.builds(
    Details,
    name=labels,
    delivery_mode=modes,
    url=st.none() | urls,
    agent_card=st.none(),
    parent_id=st.none() | st.uuids(),
)


def workspace(given: Details, token: str | None = None) -> Workspace:
    return Workspace(
        id=WorkspaceId(uuid4()),
        name=given.name,
        delivery_mode=given.delivery_mode,
        url=given.url,
        parent_id=given.parent_id,
        status="active",
        token_hash=token_hash(token) if token else None,
        inbound_secret="s",
    )


@given(st.none() | details, changes)
def test_what_is_sent_counts_and_what_is_not_stays(stored: Details | None, sent: Changes):
    before = stored or Details(name="", delivery_mode="push", url=None, agent_card="{}")
    expected = {
        field.name: (
            getattr(before, field.name)
            if getattr(sent, field.name) is (UNSET if field.name == "parent_id" else None)
            else getattr(sent, field.name)
        )
        for field in fields(Details)
    }
    current = workspace(stored) if stored else None

    if expected["delivery_mode"] == "push" and expected["url"] is None:
        with pytest.raises(BadRequest, match="url"):
            details_of(current, sent)
    else:
        assert details_of(current, sent) == Details(**expected)


@given(details.filter(lambda said: said.delivery_mode == "poll" or said.url is not None))
def test_sending_nothing_changes_nothing(said: Details):
    assert details_of(workspace(said), Changes()) == said


@given(st.none() | details, changes)
def test_a_push_workspace_always_has_an_address(stored: Details | None, sent: Changes):
    try:
        after = details_of(workspace(stored) if stored else None, sent)
    except BadRequest:
        return

    assert after.delivery_mode == "poll" or after.url


@given(st.text(max_size=50) | st.text("htps:/@.[]:0123456789ab#?% ", max_size=50))
def test_any_text_is_an_address_or_is_refused(text: str):
    try:
        check_url(text)
    except BadRequest:
        return

    assert text.lower().startswith(("http://", "https://"))
    assert text.isprintable()
    assert " " not in text


@pytest.mark.parametrize(
    "url",
    ["", "x", "//x", "http://", "ftp://x", "http://u@x", "http://u:p@x", "http://x:0", "http://[x",
     "http://x:99999", "http://x y", "http://x\n", "javascript:alert(1)", "http://" + "x" * 2048],
)  # fmt: skip
def test_odd_addresses_are_refused(url: str):
    with pytest.raises(BadRequest, match="url"):
        check_url(url)


@pytest.mark.parametrize("url", ["http://x", "https://x:8443/a?b=c", "http://[::1]:80", "HTTP://X"])
def test_plain_addresses_are_accepted(url: str):
    check_url(url)


@given(st.text(st.characters(), max_size=1500))
def test_a_label_is_one_printable_line(text: str):
    clean = clean_label(text)

    assert clean.isprintable()
    assert len(clean) == min(len(text), 1000)
    assert clean.encode().decode() == clean
    assert clean_label(clean) == clean


@given(st.text(max_size=60))
def test_only_its_own_token_matches_a_workspace(guess: str):
    token = new_token()
    said = Details("a", "poll", None, "{}")

    assert token_matches(workspace(said, token), token)
    assert not token_matches(workspace(said, token), guess)
    assert not token_matches(workspace(said), guess)
    assert not token_matches(replace(workspace(said, token), status="removed"), token)


def test_tokens_are_long_and_never_the_same():
    tokens = {new_token() for _ in range(100)}

    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 43
