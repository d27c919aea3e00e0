"""API keys: a file of hashes with a limit each, read again when it changes."""

import asyncio
import hashlib
import hmac
import logging
import math
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BeforeValidator, Field, field_validator

from service.config import ConfigError, parse, read_yaml
from service.errors import ApiError
from service.pools import Count, Settings

RELOAD_PERIOD_S = 1.0

logger = logging.getLogger("ray.serve")


def _is_hash(value: object) -> object:
    # What came may be the key itself, and is not said.
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError(
            "expected 64 hexadecimal digits, the SHA-256 of a key; got something else; print it with "
            "`python -m service key NAME`"
        )
    return value


class KeyConfig(Settings):
    """One key and what it may do; a limit that is null does not exist."""

    name: str = Field(min_length=1, description="Whose key it is; the name that logs use.")
    sha256: Annotated[str, BeforeValidator(_is_hash)] = Field(
        description="SHA-256 of the key, as `python -m service key` prints it."
    )
    requests_per_minute: Count | None = Field(default=None, description="Requests a minute.")
    concurrent_requests: Count | None = Field(default=None, description="Requests at a time.")
    tokens_per_minute: Count | None = Field(
        default=None, description="Tokens a minute, prompts and answers together."
    )


class KeysConfig(Settings):
    """The file that `keys_file` names."""

    keys: tuple[KeyConfig, ...] = Field(description="The keys.", strict=False)

    @field_validator("keys")
    @classmethod
    def _distinct(cls, keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
        for what in ("name", "sha256"):
            values = [getattr(key, what) for key in keys]
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"expected every {what} once; got {value!r} again; remove one")
        if not keys:
            raise ValueError("expected a key; got none; make one with `python -m service key NAME`")
        return keys


def load_keys(path: Path) -> KeysConfig:
    """Read a file of keys. Raises ConfigError."""
    return parse(KeysConfig, read_yaml(path), str(path))


def new_key() -> tuple[str, str]:
    """A key and its hash. 256 random bits cannot be guessed, so a fast hash is enough."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, _hash(key)


def yaml_entry(name: str, sha256: str) -> str:
    """A key's entry in the list of a file, as YAML. Raises ConfigError for a name that no entry can have."""
    checked = parse(KeyConfig, {"name": name, "sha256": sha256}, "key")
    listed: str = yaml.safe_dump([{"name": checked.name, "sha256": checked.sha256}], sort_keys=False)
    return "".join(f"  {line}\n" for line in listed.splitlines())


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Bucket:
    """What is left of an allowance that refills evenly, `per_minute` a minute and no further than that."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = time.monotonic()

    def wait_s(self, amount: float) -> int:
        """Whole seconds until `amount` is there; 0 when it is."""
        self._refill()
        return max(0, math.ceil((amount - self._left) * 60 / self.per_minute))

    def take(self, amount: float) -> None:
        """What is taken beyond what is left is owed."""
        self._refill()
        self._left -= amount

    def _refill(self) -> None:
        now_s = time.monotonic()
        self._left = min(self.per_minute, self._left + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s


@dataclass(eq=False)
class Lease:
    """One request of a key while it runs."""

    tokens: int = 0
    """Tokens it has taken so far, prompt included once it is known."""


class Key:
    """A key and what is left of its limits. Each of several ingresses grants its share, rounded up."""

    def __init__(self, config: KeyConfig, ingresses: int) -> None:
        self._ingresses = ingresses
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._running = 0
        self.limit(config)

    def limit(self, config: KeyConfig) -> None:
        """Set the limits. What runs and what is owed stays."""
        self.config = config
        self._requests = self._bucket(self._requests, config.requests_per_minute)
        self._tokens = self._bucket(self._tokens, config.tokens_per_minute)
        self._most_at_once = self._share(config.concurrent_requests)

    def _share(self, limit: int | None) -> float:
        return math.inf if limit is None else math.ceil(limit / self._ingresses)

    def _bucket(self, before: Bucket | None, limit: int | None) -> Bucket | None:
        if limit is None:
            return None
        bucket = before or Bucket(self._share(limit))
        bucket.per_minute = self._share(limit)
        return bucket

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Hold a place for a request and charge its tokens when it ends. Raises ApiError 429."""
        if self._running >= self._most_at_once:
            raise self._refusal("concurrent_requests", "requests at a time", 1)
        if self._requests and (wait_s := self._requests.wait_s(1)):
            raise self._refusal("requests_per_minute", "requests a minute", wait_s)
        # What a request takes is known at its end, so one may start while anything is left.
        if self._tokens and (wait_s := self._tokens.wait_s(1)):
            raise self._refusal("tokens_per_minute", "tokens a minute", wait_s)
        if self._requests:
            self._requests.take(1)
        lease = Lease()
        self._running += 1
        try:
            yield lease
        finally:
            self._running -= 1
            if self._tokens:
                self._tokens.take(lease.tokens)

    def _refusal(self, limit: str, what: str, wait_s: int) -> ApiError:
        most = getattr(self.config, limit)
        return ApiError(
            429,
            f"expected at most {most} {what} with this key; got more; "
            "send it again after the time in Retry-After",
            code=f"key_{limit}",
            retry_after_s=wait_s,
        )


class KeyRing:
    """The keys of a file, as they are now."""

    def __init__(self, path: Path, ingresses: int) -> None:
        self._path, self._ingresses = path, ingresses
        self._seen = self._stamp()
        self._keys = [Key(config, ingresses) for config in load_keys(path).keys]

    def find(self, presented: str) -> Key | None:
        """The key that was presented. Takes the same time whichever it is, and if it is none."""
        digest, found = _hash(presented), None
        for key in self._keys:
            if hmac.compare_digest(digest, key.config.sha256):
                found = key
        return found

    async def watch(self) -> None:
        """Read the file again whenever it changes, for ever. One that is wrong changes nothing."""
        while True:
            await asyncio.sleep(RELOAD_PERIOD_S)
            try:
                self.reload_if_changed()
            except Exception:
                logger.exception("The keys stay as they were.")

    def reload_if_changed(self) -> None:
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            configs = load_keys(self._path).keys
        except ConfigError as error:
            logger.error("The keys stay as they were: %s", error)
            return
        known = {key.config.sha256: key for key in self._keys}
        self._keys = [known.get(config.sha256) or Key(config, self._ingresses) for config in configs]
        for key, config in zip(self._keys, configs, strict=True):
            key.limit(config)
        logger.info("%d keys read.", len(self._keys))

    def _stamp(self) -> tuple[int, ...]:
        try:
            stat = self._path.stat()
        except OSError:
            return ()
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
