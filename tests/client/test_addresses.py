"""Which server addresses are valid, which proxy they use, and when a token is exposed."""

import pytest
from hypothesis import example, given, strategies as st
from yarl import URL

from restante.client.addresses import is_exposed, is_here, proxy_for, server_url
from restante.errors import BadRequest


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("  https://restante.example.org/  ", "https://restante.example.org"),
        ("HTTPS://Restante.Example.ORG", "https://restante.example.org"),
        ("https://example.org/behind/a/proxy/", "https://example.org/behind/a/proxy"),
        ("localhost:8080", "http://localhost:8080"),
        ("laptop_2.local", "http://laptop_2.local"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("http://[::1]", "http://[::1]"),
        ("http://bücher.example", "http://bücher.example"),
    ],
)
def test_an_address_is_normalized(given: str, url: str):
    """A folder compares the address with the stored one."""
    assert server_url(given) == url


@pytest.mark.parametrize(
    "given",
    [
        "",
        " ",
        "http://",
        "http:///path",
        "ftp://example.org",
        "file:///etc/passwd",
        "http://example.org:99999",
        "http://example.org:port",
        "http://example.org:0",
        "http://[::1",
        "http://[not-an-address]",
        "http://a..b",
        "http://" + "x" * 64,
        "http://two words",
        "http://back\\slash",
        "http://nul\0",
        "http://half\ud800",
        "http://example.org/\x1b[2J",
        "http://%41",
        "http://a,b",
    ],
)
def test_an_invalid_address_is_refused_and_quoted(given: str):
    """As BadRequest, before anything is registered or stored."""
    with pytest.raises(BadRequest) as caught:
        server_url(given)

    assert repr(given) in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        "http://user@example.org",
        "http://user:secret@example.org",
        "http://example.org?token=secret",
        "http://example.org/#secret",
    ],
)
def test_an_address_with_a_secret_is_refused_without_repeating_it(given: str):
    """Error messages end up in logs."""
    with pytest.raises(BadRequest) as caught:
        server_url(given)

    assert "secret" not in str(caught.value)


@given(st.text() | st.text(max_size=30).map(lambda text: "http://" + text))
@example("http://\u2100")
@example("http://a:\u0661")
def test_any_text_is_a_usable_address_or_is_refused(text: str):
    try:
        url = server_url(text)
    except BadRequest:
        return

    assert server_url(url) == url
    assert URL(url + "/health").host


@pytest.mark.parametrize(
    ("url", "exposed"),
    [
        ("http://127.0.0.1:8080", False),
        ("http://127.8.9.1", False),
        ("http://[::1]:8080", False),
        ("http://localhost", False),
        ("https://example.org", False),
        ("http://example.org", True),
        ("http://10.0.0.1", True),
        ("http://localhost.example.org", True),
        ("http://0.0.0.0", True),
    ],
)
def test_a_token_is_exposed_on_plain_http_except_on_loopback(url: str, exposed: bool):
    assert is_exposed(url) is exposed


def test_the_scheme_does_not_matter_for_loopback():
    assert is_here("https://127.0.0.1")
    assert not is_here("https://example.org")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without proxy variables."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


def test_the_proxy_depends_on_the_scheme(environment: pytest.MonkeyPatch):
    """In many companies a proxy is the only way out."""
    environment.setenv("http_proxy", "http://plain.invalid:3128")
    environment.setenv("HTTPS_PROXY", "http://secret.invalid:3128")

    assert proxy_for("http://example.org") == "http://plain.invalid:3128"
    assert proxy_for("https://example.org:8443/x") == "http://secret.invalid:3128"


def test_no_proxy_is_respected(environment: pytest.MonkeyPatch):
    environment.setenv("http_proxy", "http://plain.invalid:3128")
    environment.setenv("no_proxy", "127.0.0.1,.local")

    assert proxy_for("http://127.0.0.1:8080") is None
    assert proxy_for("http://laptop.local:8080") is None
    assert proxy_for("http://example.org") == "http://plain.invalid:3128"


def test_without_variables_there_is_no_proxy(environment: pytest.MonkeyPatch):
    assert proxy_for("http://example.org") is None
