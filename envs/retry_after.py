"""What a server's Retry-After header asks for."""

from __future__ import annotations

import contextlib
import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


def retry_after_s(header: str | None) -> float | None:
    """A Retry-After header, seconds or a date, as seconds from now, at least 0; None where it says nothing readable."""
    if header is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(header)) if math.isfinite(float(header)) else None
    try:
        when = parsedate_to_datetime(header)
    except (ValueError, TypeError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
