"""JSON documents before anybody reads them: one encoding, and not nested too deeply."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from foretoken.server.errors import bad

DEEPEST = 64
"""Levels of a JSON document."""
_STEP = np.zeros(256, dtype=np.int32)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1


def checked(body: bytes) -> bytes:
    """The document as UTF-8, whatever Unicode encoding it came in.

    Raises:
        ApiError: 400, it is nested too deeply, or its bytes are no text.
    """
    encoding = json.detect_encoding(body)
    if encoding != "utf-8":
        try:
            body = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise bad("the body is no valid JSON", code="json_invalid") from None
    if deeper_than(body, DEEPEST):
        raise bad(f"the JSON document is nested more than {DEEPEST} levels deep", code="json_too_deep")
    return body


def deeper_than(body: bytes, most: int) -> bool:
    """Whether brackets outside of texts are nested more deeply, in UTF-8.

    Arrays instead of a loop or a pattern: it takes some ten milliseconds for the worst two megabytes, and every other
    request waits for that.
    """
    if body.count(b"[") + body.count(b"{") <= most:
        return False
    codes = np.frombuffer(body, dtype=np.uint8)
    steps = _STEP[codes]
    brackets = np.flatnonzero(steps)
    outside = np.searchsorted(_quotes(codes), brackets) % 2 == 0
    depths = steps[brackets[outside]].cumsum()
    return len(depths) > 0 and int(depths.max()) > most


def _quotes(codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where texts begin and end: at quotes with an even number of backslashes before them."""
    quotes = np.flatnonzero(codes == ord('"'))
    if not (codes == ord("\\")).any():
        return quotes
    places = np.arange(len(codes), dtype=np.int32)
    others = np.maximum.accumulate(np.where(codes == ord("\\"), -1, places))  # the last one that is no backslash
    before = np.concatenate([np.array([-1], dtype=np.int32), others])[quotes]
    return quotes[(quotes - 1 - before) % 2 == 0]
