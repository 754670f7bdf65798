"""What the settings mean for each part: the policies, limits and quotas that follow from them."""

from datetime import timedelta
from typing import Any

import structlog

from restante import wire
from restante.delivery.rules import MAX_FILES_PER_REQUEST, Pace, Quota, ReceivePolicy
from restante.errors import SettingsInvalid
from restante.feed.rules import WriteLimits
from restante.http.networks import AddressRanges
from restante.oplog import peers
from restante.oplog.trimming.limits import Limits, Policy
from restante.retention.store import RetentionSettings
from restante.settings import Settings, variable

log = structlog.get_logger()

_ANSWERS_KEPT = timedelta(days=1)
_LEAST_STORED_BYTES = 256 * 1024 * 1024


def retention_settings(settings: Settings) -> RetentionSettings:
    """How long acknowledged files and feed rows are kept."""
    return RetentionSettings(
        ack=timedelta(seconds=settings.ack_retention_seconds),
        feed=timedelta(days=settings.feed_retention_days),
    )


def ack_retention(settings: Settings) -> timedelta:
    """How long an acknowledged file can be reopened."""
    return max(retention_settings(settings).ack, timedelta(0))


def log_limits(settings: Settings) -> Limits:
    """How long ops are kept, and how much they may take."""
    dormant_days = settings.dormant_ops_threshold_days if settings.dormant_ops_cleanup else None
    return Limits(
        Policy(
            _days(settings.ops_retention_days),
            _days(settings.ops_cap_days),
            settings.ops_cap_bytes,
        ),
        timedelta(seconds=settings.ops_cursor_margin_seconds),
        _days(dormant_days),
    )


def settings_of(limits: Limits) -> dict[str, Any]:
    """The settings that mean these limits."""
    policy, day = limits.policy, timedelta(days=1)
    dormant = limits.dormant_after
    return {
        "ops_retention_days": None if policy.retention is None else policy.retention / day,
        "ops_cap_days": None if policy.cap_age is None else policy.cap_age / day,
        "ops_cap_bytes": policy.cap_bytes,
        "ops_cursor_margin_seconds": limits.margin.total_seconds(),
        "dormant_ops_cleanup": dormant is not None,
    } | ({} if dormant is None else {"dormant_ops_threshold_days": dormant / day})


def _days(count: float | None) -> timedelta | None:
    return None if count is None else timedelta(days=count)


def upload_limits(settings: Settings) -> wire.UploadLimits:
    """What one file and one request can have: a quota may be smaller than the limit."""
    room = min(_quotas(settings).values())
    return wire.UploadLimits(
        per_file_bytes=min(settings.max_file_bytes, room),
        per_request_bytes=min(settings.max_request_bytes, room),
        max_attachments_per_message=MAX_FILES_PER_REQUEST,
    )


def _quotas(settings: Settings) -> dict[str, int]:
    """The quotas that a single file takes room in."""
    return {
        "workspace_max_bytes": settings.workspace_max_bytes,
        "workspace_max_written_bytes": settings.workspace_max_written_bytes,
        "server_max_bytes": settings.server_max_bytes,
        "server_max_stored_bytes": _max_stored_bytes(settings),
    }


def warn_of_small_quotas(settings: Settings) -> None:
    """Tell the operator of files that the limit allows and a quota does not."""
    for name, quota in _quotas(settings).items():
        if quota < settings.max_file_bytes:
            log.warning(
                "file_limit_above_quota",
                reason=f"A file of {variable('max_file_bytes')} never fits: "
                f"{variable(name)} is smaller.",
                limit=settings.max_file_bytes,
                quota=quota,
            )


def receive_policy(settings: Settings) -> ReceivePolicy:
    """The limits and quotas of uploads."""
    return ReceivePolicy(
        ttl=timedelta(seconds=settings.upload_ttl_seconds),
        ttl_min=timedelta(seconds=settings.upload_ttl_min_seconds),
        ttl_max=timedelta(seconds=settings.upload_ttl_max_seconds),
        quota=Quota(settings.workspace_max_bytes, settings.workspace_max_files),
        server_quota=Quota(settings.server_max_bytes, settings.server_max_files),
        server_max_stored_bytes=_max_stored_bytes(settings),
        answers_kept=_ANSWERS_KEPT,
        pace=Pace(
            settings.upload_grace_seconds,
            settings.upload_min_bytes_per_second,
            settings.upload_idle_seconds,
        ),
        max_file_bytes=settings.max_file_bytes,
        max_request_bytes=settings.max_request_bytes,
    )


def _max_stored_bytes(settings: Settings) -> int:
    """Unless set, as much again as may wait; empty partitions have a few pages too."""
    default = max(2 * settings.server_max_bytes, _LEAST_STORED_BYTES)
    return settings.server_max_stored_bytes or default


def write_limits(settings: Settings) -> WriteLimits:
    """What a workspace may have written, and have in its feed."""
    return WriteLimits(
        max_written_bytes=settings.workspace_max_written_bytes,
        max_feed_bytes=settings.workspace_max_feed_bytes,
        feed_retention=retention_settings(settings).feed,
    )


def own_url(settings: Settings) -> str | None:
    """The address under which peers know this node, in its one spelling."""
    return None if settings.self_url is None else peers.normalised(settings.self_url)


def ops_open_to(settings: Settings) -> AddressRanges:
    """Who may read the op log without a token; raises SettingsInvalid."""
    return AddressRanges.parsed(settings.ops_open_to, name=variable("ops_open_to"))


def trusted_proxies(settings: Settings) -> AddressRanges:
    """The proxies that are believed about their clients; raises SettingsInvalid."""
    name = variable("trusted_proxies")
    proxies = AddressRanges.parsed(settings.trusted_proxies, name=name)
    for network in proxies.networks:
        if network.prefixlen == 0:
            raise SettingsInvalid(
                f"{name} is wrong: with {network} anybody could choose the address that counts as "
                "theirs. List the addresses of your proxies."
            )
    return proxies
