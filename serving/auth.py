"""Who is calling: API keys, and the tenant, cache salt, urgency and rights that a key stands for.

Keys are kept as SHA-256 only. A key is a long random string, so a plain hash is enough: there is nothing to guess.
"""

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pagedjax.errors import UserError, check
from serving.errors import Refusal

VARIABLE = "PAGEDJAX_API_KEYS"  # the same JSON as in a file
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
NAME = "up to 64 letters, digits, dots, dashes and underscores"  # in words
MOST_URGENT, LEAST_URGENT = -100, 100


@dataclass(frozen=True)
class Key:
    """One entry of the file: an object with these names."""

    name: str
    sha256: str  # of the key, in hexadecimal
    tenant: str  # "*": whoever holds it may name any tenant, as a gateway must
    priority: int = 0  # the most urgent that its requests may be, and what they are unless they ask for less
    admin: bool = False  # may drain, flush, profile, trace, and see what the cache holds
    salt: str | None = None  # of the cache; None: the tenant's name, so that no tenant can tell what another has asked

    def __post_init__(self):
        kinds = {"name": str, "sha256": str, "tenant": str, "priority": int, "admin": bool, "salt": str | None}
        for name, kind in kinds.items():
            value = getattr(self, name)
            right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            check(right, f"{name} of an API key must be {getattr(kind, '__name__', kind)}; got {value!r}")
        check(TENANT.fullmatch(self.name) is not None, f"a key's name must be {NAME}; got {self.name!r}")
        check(re.fullmatch("[0-9a-f]{64}", self.sha256) is not None, f"sha256 of key {self.name!r} must be 64 hexadecimal digits")
        check(
            self.tenant == "*" or TENANT.fullmatch(self.tenant) is not None,
            f"tenant of key {self.name!r} must be * or {NAME}; got {self.tenant!r}",
        )
        check(
            MOST_URGENT <= self.priority <= LEAST_URGENT,
            f"priority of key {self.name!r} must be between {MOST_URGENT} and {LEAST_URGENT}; got {self.priority}",
        )


@dataclass(frozen=True)
class Caller:
    """Who a request comes from. Without keys: anybody, who may do anything."""

    name: str = ""  # of the key
    tenant: str = ""
    salt: str = ""
    priority: int = 0
    admin: bool = True


@dataclass(frozen=True)
class Keys:
    """All keys; none: everybody is let in."""

    entries: tuple[Key, ...] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.entries)

    def find(self, secret: str) -> Key | None:
        """The entry of a key. All are compared, each in constant time."""
        digest, found = hashlib.sha256(secret.encode()).hexdigest(), None
        for entry in self.entries:
            if hmac.compare_digest(digest, entry.sha256):
                found = entry
        return found


def read_keys(file: str) -> Keys:
    """Of a file, or of the environment's PAGEDJAX_API_KEYS where `file` is ""; both hold a JSON list of objects with the fields of
    Key. UserError for what cannot be read."""
    where = file or f"${VARIABLE}"
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8") if file else os.environ.get(VARIABLE, "[]")
        value: Any = json.loads(text)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"API keys must be a JSON list; got {where}: {reason}") from None  # its text must not be shown
    check(
        isinstance(value, list) and all(isinstance(e, dict) for e in value), f"API keys must be a JSON list of objects in {where}"
    )
    check(bool(value) or not file, f"a file of API keys must hold one at least; got none in {where}")
    return Keys(tuple(_key(entry, where) for entry in value))


def _key(entry: Mapping[str, Any], where: str) -> Key:
    known = [f.name for f in fields(Key)]
    unknown, missing = sorted(set(entry) - set(known)), sorted({"name", "sha256", "tenant"} - set(entry))
    check(not unknown, f"an API key may have {', '.join(known)}; got {', '.join(unknown)} in {where}")
    check(not missing, f"an API key must have name, sha256 and tenant; {', '.join(missing)} is missing in {where}")
    return Key(**entry)


def authenticate(keys: Keys, credentials: Sequence[str], tenant: str = "", priority: str = "") -> Caller:
    """The caller that these credentials ("Bearer …" or a bare key, as the headers had them) stand for. `tenant` and `priority` are
    what the request says of itself, "" where it says nothing. Refusal where it may not."""
    if tenant and not TENANT.fullmatch(tenant):
        raise Refusal("invalid_argument", f"a tenant is {NAME}; got {tenant[:80]!r}", param="x-tenant")
    if not keys:
        return Caller(tenant=tenant, salt=tenant, priority=_priority(priority, MOST_URGENT))
    given = [secret for secret in map(_secret, credentials) if secret]
    if not given:
        raise Refusal("unauthenticated", "an API key is needed: authorization: Bearer KEY")
    key = keys.find(given[0])
    if key is None:
        raise Refusal("unauthenticated", "the API key is not known")
    if tenant and key.tenant not in ("*", tenant):
        raise Refusal("permission_denied", f"this key is not of tenant {tenant!r}", param="x-tenant")
    whose = (tenant or key.name) if key.tenant == "*" else key.tenant
    urgency = _priority(priority, key.priority) if priority else key.priority
    return Caller(key.name, whose, whose if key.salt is None else key.salt, urgency, key.admin)


def _secret(credential: str) -> str:
    words = credential.split()
    return " ".join(words[1:] if words and words[0].lower() == "bearer" else words)


def _priority(text: str, most_urgent: int) -> int:
    if not text:
        return 0
    try:
        value = int(text)
    except ValueError:
        raise Refusal("invalid_argument", f"a priority is an integer; got {text[:80]!r}", param="x-priority") from None
    if not MOST_URGENT <= value <= LEAST_URGENT:
        raise Refusal(
            "invalid_argument", f"a priority is between {MOST_URGENT} and {LEAST_URGENT}; got {value}", param="x-priority"
        )
    if value < most_urgent:
        raise Refusal("permission_denied", f"this key's requests may have priority {most_urgent}; got {value}", param="x-priority")
    return value


def require_admin(caller: Caller) -> None:
    if not caller.admin:
        raise Refusal("permission_denied", f"key {caller.name!r} has no admin rights")
