"""Requests to the page of a command, by the address that it prints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen


def asked(address: str, path: str, given: Mapping[str, str] | None = None) -> tuple[int, str]:
    place, _, token = address.strip().partition("#token=")
    body = None if given is None else urlencode(given).encode()
    try:
        request = Request(f"{place}{path}", body, {"authorization": f"Bearer {token}"})
        with urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def until(address: str, path: str, text: str) -> str:
    end = time.monotonic() + 30
    while text not in (found := asked(address, path)[1]):
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found
