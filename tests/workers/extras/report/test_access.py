"""Who may read a dashboard, decided before anything else looks at a request."""

import pytest

from stageline.workers.extras.report.access import ReaderRules, new_token

ADMISSION = ReaderRules("t0ken", ("127.0.0.1", "localhost", "[::1]", "desk"), "stageline-80")
COOKIE = {"cookie": "other=1; stageline-80=t0ken"}


def status(method: str = "GET", path: str = "/", query: str = "", **headers: str) -> int:
    found = ADMISSION.refusal(method, path, query, {"host": "127.0.0.1:80", **headers})
    return 200 if found is None else found.status


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "localhost:65535", "LOCALHOST", "[::1]:80", "desk:80"])
def test_its_own_names_are_answered_at_any_port(host: str) -> None:
    assert status(**COOKIE | {"host": host}) == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1:80:80",
        "127.0.0.1@evil",
        "[::1",
        "desk.",
        "desk:",
        " desk",
        "desk\n",
        "127.0.0.2",
        "0",
    ],
)
def test_other_names_are_refused_whatever_the_token(host: str) -> None:
    assert status(query="token=t0ken", **COOKIE | {"host": host}) == 421


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get"])
def test_nothing_but_reading_is_allowed(method: str) -> None:
    found = ADMISSION.refusal(method, "/", "token=t0ken", {"host": "desk", **COOKIE})
    assert found is not None
    assert (found.status, [*found.headers]) == (405, [("allow", "GET")])


def test_a_link_gives_a_cookie_that_no_script_and_no_other_site_has() -> None:
    found = ADMISSION.refusal("GET", "/", "a=1&token=t0ken", {"host": "desk"})
    assert found is not None
    headers = dict(found.headers)
    assert (found.status, headers["location"]) == (303, "/")
    assert headers["set-cookie"] == "stageline-80=t0ken; Path=/; HttpOnly; SameSite=Lax"


@pytest.mark.parametrize("path", ["/", "/events", "/other"])
@pytest.mark.parametrize(
    ("query", "cookie"),
    [
        ("", ""),
        ("token=", "stageline-80="),
        ("token=t0ken2", "stageline-80=t0ke"),
        ("Token=t0ken", "stageline-81=t0ken"),
        ("token=wrong&token=t0ken", "="),
        ("token=%FF%FE", "stageline-80=\xff"),
        ("x" * 3000 + "&token=t0ken", "x" * 17_000 + "; stageline-80=t0ken"),
        ("", "xstageline-80=t0ken"),
        ("", "other=stageline-80=t0ken"),
    ],
)
def test_without_the_token_nothing_is_told(path: str, query: str, cookie: str) -> None:
    assert status("GET", path, query, cookie=cookie) == 403


def test_the_token_counts_in_the_link_of_the_page_alone() -> None:
    assert status(path="/events", query="token=t0ken") == 403
    assert status(path="/events", **COOKIE) == 200


@pytest.mark.parametrize(
    "beside",
    [
        'foo={"a": 1}; %s',
        "a[b]=1; %s",
        "bad; %s",
        "%s; =; ;",
        "x" * 2100 + "; %s",
        "stageline-80=old; %s",
        "\xff=\xfe;%s",
    ],
)
def test_the_cookies_of_other_servers_of_this_machine_are_no_obstacle(beside: str) -> None:
    assert status(cookie=beside.replace("%s", "stageline-80=t0ken")) == 200


def test_tokens_are_long_and_differ() -> None:
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) >= 32
