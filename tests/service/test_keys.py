"""API keys: which file is taken, who gets in, and what a limit lets through."""

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from service import keys
from service.config import ConfigError
from service.errors import ApiError
from service.keys import Bucket, Key, KeyConfig, KeyRing, load_keys, new_key, yaml_entry

SECRET = "sk-one"
SHA256 = hashlib.sha256(SECRET.encode()).hexdigest()


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"keys": list(entries)}))
    return path


def entry(**limits: int) -> dict[str, Any]:
    return {"name": "one", "sha256": SHA256, **limits}


class Clock:
    """Time that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


@pytest.mark.parametrize("name", ["anna", "a: b # x", "yes", "- 1", "ä"])
def test_a_printed_entry_can_be_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + yaml_entry(name, new_key()[1]) + yaml_entry("other", new_key()[1]))
    assert [key.name for key in load_keys(path).keys] == [name, "other"]


def test_a_key_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="key: name: "):
        yaml_entry("", new_key()[1])


def test_a_new_key_is_found_by_its_hash(tmp_path: Path) -> None:
    secret, sha256 = new_key()
    path = write(tmp_path / "keys.yaml", entry(), {"name": "two", "sha256": sha256})
    assert secret not in path.read_text()
    ring = KeyRing(path, 1)
    found = ring.find(secret)
    assert found
    assert found.config.name == "two"
    assert ring.find(secret + "x") is None
    assert ring.find("") is None
    assert ring.find(sha256) is None, "the hash is no key"


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ([], "expected a key; got none"),
        ([{"name": "one", "sha256": SECRET}], r"keys\[0\].sha256: expected 64 hexadecimal digits"),
        ([{"name": "one"}], r"keys\[0\].sha256: expected a value; got nothing"),
        ([entry(), entry()], "expected every name once; got 'one' again"),
        ([entry(), entry() | {"name": "two"}], "expected every sha256 once"),
        ([entry(requests=5)], "expected one of name, sha256, requests_per_minute"),
        ([entry(requests_per_minute=0)], "greater than or equal to 1"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, entries: list[dict[str, Any]], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        load_keys(write(tmp_path / "keys.yaml", *entries))
    assert SECRET not in str(refused.value)


def test_a_line_that_is_no_yaml_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  - name: one\n    sha256: [{SECRET}\n")
    with pytest.raises(ConfigError, match=r"in line \d") as refused:
        load_keys(path)
    assert SECRET not in str(refused.value)


def refusal(key: Key) -> tuple[str | None, int | None]:
    with pytest.raises(ApiError) as refused, key.lease():
        pass
    assert refused.value.status == 429
    return refused.value.code, refused.value.retry_after_s


def test_requests_at_a_time() -> None:
    key = Key(KeyConfig(**entry(concurrent_requests=2)), 1)
    with key.lease(), key.lease():
        assert refusal(key) == ("key_concurrent_requests", 1)
    with key.lease():
        pass


def test_requests_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, key = Clock(monkeypatch), Key(KeyConfig(**entry(requests_per_minute=2)), 1)
    for _ in range(2):
        with key.lease():
            pass
    assert refusal(key) == ("key_requests_per_minute", 30)
    clock.now_s += 29
    assert refusal(key) == ("key_requests_per_minute", 1)
    clock.now_s += 1
    with key.lease():
        pass


def test_tokens_are_charged_when_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, key = Clock(monkeypatch), Key(KeyConfig(**entry(tokens_per_minute=60)), 1)
    with key.lease() as lease:
        lease.tokens = 90
    # 30 are owed and one has to be there, at one a second.
    assert refusal(key) == ("key_tokens_per_minute", 31)
    clock.now_s += 31
    with key.lease():
        pass


def test_a_request_that_fails_gives_its_place_back() -> None:
    key = Key(KeyConfig(**entry(concurrent_requests=1)), 1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), key.lease():
            raise ZeroDivisionError


def test_several_ingresses_share_a_limit() -> None:
    key = Key(KeyConfig(**entry(concurrent_requests=3)), 2)
    with key.lease(), key.lease():
        assert refusal(key)[0] == "key_concurrent_requests"


def test_an_allowance_does_not_grow_beyond_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, bucket = Clock(monkeypatch), Bucket(60)
    clock.now_s += 3600
    bucket.take(60)
    assert bucket.wait_s(1) == 1


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml", entry(concurrent_requests=1))
    ring = KeyRing(path, 1)
    first = ring.find(SECRET)
    assert first
    other, sha256 = new_key()
    with first.lease():
        write(path, entry(concurrent_requests=1), {"name": "two", "sha256": sha256})
        ring.reload_if_changed()
        assert ring.find(other)
        same = ring.find(SECRET)
        assert same
        assert refusal(same)[0] == "key_concurrent_requests", "what runs is still counted"
        write(path, entry(concurrent_requests=1, requests_per_minute=9), {"name": "two", "sha256": sha256})
        ring.reload_if_changed()
        assert refusal(same)[0] == "key_concurrent_requests", "and when another limit changes"
        assert same.config.requests_per_minute == 9
    write(path, {"name": "two", "sha256": sha256})
    ring.reload_if_changed()
    assert ring.find(SECRET) is None


@pytest.mark.parametrize(
    "text",
    ["keys: [", "keys: []", None, "keys: 2026-02-30", "[" * 5000],
    ids=["not YAML", "no keys", "gone", "no date", "deep"],
)
def test_a_file_that_is_wrong_changes_nothing(tmp_path: Path, text: str | None) -> None:
    path = write(tmp_path / "keys.yaml", entry())
    ring = KeyRing(path, 1)
    path.unlink() if text is None else path.write_text(text)
    ring.reload_if_changed()
    assert ring.find(SECRET)


@pytest.mark.asyncio
async def test_the_watch_reads_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "RELOAD_PERIOD_S", 0.01)
    path = write(tmp_path / "keys.yaml", entry())
    ring = KeyRing(path, 1)
    watching = asyncio.create_task(ring.watch())
    other, sha256 = new_key()
    write(path, {"name": "two", "sha256": sha256})
    async with asyncio.timeout(10):
        while ring.find(other) is None:
            await asyncio.sleep(0.01)
    watching.cancel()
