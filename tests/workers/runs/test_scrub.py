"""Texts of a bundle without what is secret."""

import pytest

from stageline.workers.runs.scrub import GONE, Scrub, argument, is_secret_name, passwords_in

TOKEN = "hf_" + "aBcD1234" * 4
LINE = "tcp://desk:7000#k1.7ohqCA0ZHvDlPRcK0AN8jVLDrsB-0N4YUmRHVboFaBE:G8GHAWMsPbgOaG4oFIz6QA"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("redis://anna:hunter2@desk:6379/0 is away", "hunter2"),
        ("redis://:hunter2@desk:6379/0", "hunter2"),
        ("redis://anna:p@ss@desk:6379/0 is away", "ss@"),
        ("redis://anna:hunt'er2@desk/0 is away", "hunt'er2"),
        ("redis://o'hara:hunter2@desk/0", "hunter2"),
        ("redis://anna:hun/ter2@desk/0 is away", "ter2"),
        ("export AWS_SECRET_ACCESS_KEY=abc/def123", "abc/def123"),
        ("calls train --password hunter2 --json", "hunter2"),
        ("calls train --hub-token 'correct horse'", "horse"),
        ("https://desk/a?X-Amz-Signature=0f1e2d3c&b=1", "0f1e2d3c"),
        ("https://desk/a?X-Amz-Credential=KEY/2026&b=1", "KEY/2026"),
        ("https://desk/a?b=1&sig=0f1e2d3c%3D", "0f1e2d3c"),
        ("Authorization: Basic YW5uYTpw", "YW5uYTpw"),
        ("password=hunt'er2 and more", "er2"),
        ('password="hunter2', "hunter2"),
        (f"worker --join '{LINE}'", "7ohqCA0ZHvDlPRcK0AN8jVLDrsB"),
        (f"worker --join '{LINE}'", "G8GHAWMsPbgOaG4oFIz6QA"),
        ("k1-secret.9fJd2abcdefghijklmnop", "9fJd2abcdefghijklmnop"),
        ('{"password": "correct horse battery"}', "horse"),
        ("> Cookie: theme=dark; session=0f1e2d3c4b", "0f1e2d3c4b"),
        ("> Cookie: theme=dark;session=0f1e2d3c4b; last=9a8b7c", "9a8b7c"),
        ("Set-Cookie: id=1; Path=/; HttpOnly; session=0f1e2d3c4b", "0f1e2d3c4b"),
        ("headers {'Cookie': 'theme=dark; session=0f1e2d3c4b', 'Host': 'desk'}", "0f1e2d3c4b"),
        ('> Cookie: theme="dark mode"; session="0f1e 2d3c"', "2d3c"),
        ("curl -H 'cookie: theme=dark; session=0f1e2d3c4b' desk", "0f1e2d3c4b"),
        ("api_key=0123456789 and more", "0123456789"),
        ("Authorization: Bearer abc.def.ghi", "abc.def.ghi"),
        (f"loaded with {TOKEN}", TOKEN),
        ("AKIAIOSFODNN7EXAMPLE is no name", "AKIAIOSFODNN7EXAMPLE"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\nabc", "MIIE"),
        ("stage 1 failed: ValueError: could not convert string to float: 'Anna Karenina'", "Karenina"),
        ("ValueError: rows [0.25, 17.5] are not finite", "17.5"),
        ('data.CsvError: bad cell "42;Anna"', "Anna"),
        ("the value that is known: s3cr3t-value.", "s3cr3t-value"),
    ],
)
def test_a_secret_is_left_out_and_the_rest_stays(text: str, secret: str) -> None:
    assert secret in text
    found = Scrub(["s3cr3t-value", "a"]).text(text)
    assert secret not in found
    assert found != text
    assert found[:3] == text[:3] or found.startswith(GONE)


@pytest.mark.parametrize(
    "text",
    [
        "stage 1 waits for the gradient of step 118 microbatch 5 from stage 2 (worker-2, generation 1)",
        "weights_sha256 0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a69788796a5b4c3d2e1f0",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "the plan's data.source = \"data.py:batches\" draws 'rows'",
        "redis://desk:6379/0 is away",
        "worker-1 was ended by signal 9; the design=1f1b, sigma=0.5",
        "tokens: 512, max_tokens=128, tokens_per_second=900, tokenizer: gpt2, tokenization=bytes",
        "a cookie; then worker 1 was lost; loss=0.25",
        "train --no-password --json; the token is asked of the store",
    ],
)
def test_what_tells_of_a_fault_stays(text: str) -> None:
    assert Scrub(["s3cr3t-value"]).text(text) == text


def test_of_a_cookie_in_a_line_the_rest_of_the_line_stays() -> None:
    said = Scrub().text("a request with Cookie: theme=dark; session=0f1e2d3c4b was refused; worker 1 waits")
    assert said == f"a request with Cookie: {GONE} was refused; worker 1 waits"


def test_facts_keep_their_form_and_what_has_the_name_of_a_secret_is_left_out() -> None:
    facts = {
        "run": "a",
        "queues": {"url": "redis://anna:hunter2@desk/0"},
        "api_token": "plain",
        "steps": [1, 2.5, None, True],
        "empty": {"password": ""},
    }
    assert Scrub().facts(facts) == {
        "run": "a",
        "queues": {"url": "redis://anna@desk/0"},
        "api_token": GONE,
        "steps": [1, 2.5, None, True],
        "empty": {"password": ""},
    }


def test_of_an_argument_of_the_users_code_numbers_and_functions_are_told() -> None:
    given = {"lr": 0.1, "table": ["Anna", 3], "loss": "loss.py:focal", "path": "/home/anna/rows.csv"}
    told = {"lr": 0.1, "table": ["<text of 4 characters>", 3], "loss": "loss.py:focal"}
    assert argument(given) == {**told, "path": "<text of 19 characters>"}


def test_names_of_secrets_and_passwords_of_addresses_are_known() -> None:
    assert all(map(is_secret_name, ("WANDB_API_KEY", "HF_TOKEN", "PGPASSWORD", "sig", "aws_secret_access_key")))
    assert not any(map(is_secret_name, ("PATH", "steps", "passed", "microbatches", "STAGELINE_RUN__STEPS")))
    assert passwords_in("redis://a:p%40ss@h and tcp://h:1") == {"p%40ss", "p@ss"}
    assert passwords_in("redis://a:p@s's@h/0") == {"p@s's"}


def test_a_long_text_is_cleaned_in_time_that_grows_as_its_length_does() -> None:
    """Each of many beginnings could have been looked at to the end of the text: that would take hours."""
    for text in (
        "cookie=a" * 20_000,
        "cookie: a=b" + "; a=b" * 20_000,
        "://a:" * 20_000,
        "token" * 20_000,
        "--" * 50_000,
        "a" * 250_000,
    ):
        assert Scrub().text(text)
