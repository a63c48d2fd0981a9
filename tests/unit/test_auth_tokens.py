"""Tokens and cookies: what is made fits, and nothing else; secrets take turns."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tokens import COOKIE_S, Tokens

NOW = 1_800_000_000.0
IDS = st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True)


def token(tokens: Tokens, session_id: str) -> bytes:
    made = tokens.for_session(session_id)
    assert made is not None
    return made.encode()


def test_without_an_admin_token_there_are_none() -> None:
    for tokens in (Tokens(()), Tokens((), ["a-secret-alone"])):
        assert not tokens.are_needed
        assert tokens.for_session("s") is None
        assert not tokens.is_admin(b"")
        assert not tokens.is_admin(hashlib.sha256(b"").digest())
        assert tokens.session_of(b"tls.s." + b"A" * 43) is None
        assert not tokens.is_signed_in(b"2000000000." + b"A" * 43, NOW)


def test_the_admin_token_is_compared_whole_and_bytewise() -> None:
    tokens = Tokens(["grüße-und-mehr"])
    assert tokens.is_admin("grüße-und-mehr".encode())
    for other in ("grüße-und-meh", "grüße-und-mehr ", "Grüße-und-mehr", "", "grüße-und-mehr\0"):
        assert not tokens.is_admin(other.encode())
    assert not tokens.is_admin("grüße-und-mehr".encode("latin-1"))
    assert not tokens.is_admin(b"\xff\xfe")


@given(IDS)
def test_a_session_token_names_its_session_and_is_the_same_each_time(session_id: str) -> None:
    tokens = Tokens(["admin"])
    made = token(tokens, session_id)
    assert made == token(Tokens(["admin"]), session_id)
    assert made.startswith(b"tls." + session_id.encode() + b".")
    assert tokens.session_of(made) == session_id
    assert len(made.rpartition(b".")[2]) == 43


@pytest.mark.threat("forged session token")
@given(IDS, st.data())
def test_no_other_token_fits(session_id: str, data: st.DataObject) -> None:
    tokens = Tokens(["admin"], ["secret"])
    made = token(tokens, session_id)
    at = data.draw(st.integers(0, len(made) - 1))
    by = data.draw(st.integers(1, 255))
    changed = made[:at] + bytes([made[at] ^ by]) + made[at + 1 :]
    assert tokens.session_of(changed) is None
    for cut in (made[:-1], made + b"A", made + b"=", made[1:], made.replace(b"tls.", b"", 1)):
        assert tokens.session_of(cut) is None


@pytest.mark.threat("forged session token")
def test_every_character_counts() -> None:
    tokens = Tokens(["admin"], ["secret"])
    made = token(tokens, "a" * 128)
    for at in range(len(made)):
        assert tokens.session_of(made[:at] + b"b" + made[at + 1 :]) is None or made[at : at + 1] == b"b"


@pytest.mark.threat("forged session token")
def test_a_token_for_one_session_is_none_for_another() -> None:
    tokens = Tokens(["admin"])
    mac = token(tokens, "a").rpartition(b".")[2]
    for other in (b"b", b"a.a", b"", b"A", b"a:x"):
        assert tokens.session_of(b"tls." + other + b"." + mac) is None
    assert tokens.session_of(token(tokens, "a.b")) == "a.b"


@pytest.mark.threat("forged session token")
@given(IDS, st.integers(0, 2**63 - 1), st.data())
def test_a_runs_token_names_its_run_and_number_and_no_other_fits(run: str, number: int, data: st.DataObject) -> None:
    tokens = Tokens(["admin"], ["secret", "before"])
    made = tokens.for_run(run, number).encode()
    assert tokens.run_of(made) == (run, number)
    assert tokens.run_of(Tokens(["admin"], ["before"]).for_run(run, number).encode()) == (run, number)
    assert tokens.session_of(made) is tokens.session_of(made.replace(b"tlr.", b"tls.", 1)) is None
    at, by = data.draw(st.integers(0, len(made) - 1)), data.draw(st.integers(1, 255))
    assert tokens.run_of(made[:at] + bytes([made[at] ^ by]) + made[at + 1 :]) is None
    other = f"{run}.{number}"
    assert tokens.run_of(token(tokens, other).replace(b"tls.", b"tlr.", 1)) is None


@pytest.mark.threat("token of the wrong kind")
def test_each_use_has_a_key_of_its_own() -> None:
    secret = b"shared-by-all"
    tokens = Tokens([secret.decode()])
    cookie = tokens.cookie_for(secret, NOW)
    assert cookie is not None
    expiry, _, mac = cookie.partition(".")
    assert tokens.session_of(f"tls.{expiry}.{mac}".encode()) is None
    own = token(tokens, expiry).rpartition(b".")[2]
    assert not tokens.is_signed_in(expiry.encode() + b"." + own, NOW)
    plain = base64.urlsafe_b64encode(hmac.digest(secret, b"turnlog session v1\0s", "sha256")).rstrip(b"=")
    assert tokens.session_of(b"tls.s." + plain) is None


@pytest.mark.threat("leaked token stays valid")
def test_admin_tokens_rotate() -> None:
    old, both, new = Tokens(["old"]), Tokens(["new", "old"]), Tokens(["new"])
    assert [tokens.is_admin(b"old") for tokens in (old, both, new)] == [True, True, False]
    assert [tokens.is_admin(b"new") for tokens in (old, both, new)] == [False, True, True]
    before, meanwhile = token(old, "s"), token(both, "s")
    assert [tokens.session_of(before) for tokens in (old, both, new)] == ["s", "s", None]
    assert [tokens.session_of(meanwhile) for tokens in (old, both, new)] == [None, "s", "s"]


@pytest.mark.threat("leaked token stays valid")
def test_session_secrets_rotate_without_the_admin_token() -> None:
    old, both, new = (Tokens(["admin"], secrets) for secrets in (["old"], ["new", "old"], ["new"]))
    before, meanwhile = token(old, "s"), token(both, "s")
    assert [tokens.session_of(before) for tokens in (old, both, new)] == ["s", "s", None]
    assert [tokens.session_of(meanwhile) for tokens in (old, both, new)] == [None, "s", "s"]
    assert token(Tokens(["another"], ["old"]), "s") == before


@pytest.mark.threat("endless browser session")
def test_a_cookie_ends_with_its_time_and_with_its_token() -> None:
    both = Tokens(["new", "old"])
    made = {name: (both.cookie_for(name, NOW) or "").encode() for name in (b"new", b"old")}
    assert both.cookie_for(b"neither", NOW) is None
    assert both.cookie_for(b"", NOW) is None
    for cookie in made.values():
        assert both.is_signed_in(cookie, NOW)
        assert both.is_signed_in(cookie, NOW + COOKIE_S - 1)
        assert not both.is_signed_in(cookie, NOW + COOKIE_S)
    later = b"%d" % (NOW + 10 * COOKIE_S) + made[b"new"][made[b"new"].index(b".") :]
    assert not both.is_signed_in(later, NOW)
    rotated = Tokens(["new"])
    assert rotated.is_signed_in(made[b"new"], NOW)
    assert not rotated.is_signed_in(made[b"old"], NOW)


@pytest.mark.parametrize(
    "cookie", [b"", b".", b"x.", b"9999999999", b"9999999999.", b"9999999999.\xff", b"-1." + b"A" * 43]
)
def test_what_is_no_cookie_is_none(cookie: bytes) -> None:
    assert not Tokens(["admin"]).is_signed_in(cookie, NOW)


@pytest.mark.threat("timing attack on tokens")
def test_what_is_compared_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every secret is looked at whichever fits, and only by `hmac.compare_digest`."""
    asked: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def watched(one: bytes, other: bytes) -> bool:
        asked.append((one, other))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    tokens = Tokens(["first-token", "second", "third"], ["one", "two"])
    for given_token, fits in ((b"first-token", True), (b"third", True), (b"x", False), (b"first-tokem", False)):
        asked.clear()
        assert tokens.is_admin(given_token) is fits
        assert [len(one) == len(other) == 32 for one, other in asked] == [True] * 3
    made = token(tokens, "s")
    for given_token in (made, made[:-1] + b"!"):
        asked.clear()
        tokens.session_of(given_token)
        assert len(asked) == 2
    asked.clear()
    tokens.is_signed_in(b"1." + b"A" * 43, NOW)
    assert len(asked) == 3
