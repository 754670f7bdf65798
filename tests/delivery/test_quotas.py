"""How much may wait, to the byte and to the file."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restante.delivery.rules import (
    Quota,
    Usage,
    check_can_ever_fit,
    fits,
    server_full,
    workspace_full,
)
from restante.errors import QuotaTooSmall

counts = st.integers(0, 50)
quotas = st.builds(Quota, st.integers(1, 50), st.integers(1, 50))


@given(st.builds(Usage, counts, counts, counts, counts), counts, counts, quotas)
def test_it_fits_if_neither_bytes_nor_files_pass_the_quota(
    usage: Usage, extra_bytes: int, extra_files: int, quota: Quota
):
    total_bytes = usage.waiting_bytes + usage.reserved_bytes + extra_bytes
    total_files = usage.waiting_files + usage.reserved_files + extra_files

    assert fits(usage, extra_bytes=extra_bytes, extra_files=extra_files, quota=quota) == (
        total_bytes <= quota.max_bytes and total_files <= quota.max_files
    )


@given(counts, counts, quotas)
def test_what_does_not_fit_an_empty_place_never_fits(
    extra_bytes: int, extra_files: int, quota: Quota
):
    if fits(Usage(0, 0), extra_bytes=extra_bytes, extra_files=extra_files, quota=quota):
        check_can_ever_fit(extra_bytes=extra_bytes, extra_files=extra_files, quota=quota)
    else:
        with pytest.raises(QuotaTooSmall) as refused:
            check_can_ever_fit(extra_bytes=extra_bytes, extra_files=extra_files, quota=quota)
        assert refused.value.facts == {"size": extra_bytes, "max": quota.max_bytes}


def test_a_refusal_says_what_how_much_and_until_when():
    usage, quota = Usage(10, 2, 5, 1), Quota(16, 4)
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)

    for refuse in (workspace_full, server_full):
        refusal = refuse(usage, quota, noon, now=noon - timedelta(seconds=90))
        assert refusal.facts == {
            "waiting_bytes": 15,
            "waiting_files": 3,
            "max_bytes": 16,
            "max_files": 4,
            "frees_at": "2026-03-01T12:00:00+00:00",
            "retry_after_seconds": 90,
        }
    assert "frees_at" not in workspace_full(usage, quota, None, now=noon).facts
