"""Plans, passes and the space account as they are shown: over HTTP and by `--json` alike."""

from restante import wire
from restante.retention.account import Space, States, WorkspaceSpace
from restante.retention.rules import Held, Plan, Step
from restante.retention.sweep import Report


def plan_view(plan: Plan) -> wire.RetentionPlan:
    """The plan of a sweep."""
    return wire.RetentionPlan(
        steps=[_step(step) for step in plan.steps],
        held=[_held(held) for held in plan.held],
        bytes_to_come_back=plan.bytes_to_come_back,
    )


def report_view(report: Report) -> wire.SweepReport:
    """What a sweep did."""
    return wire.SweepReport(
        acked=report.swept.acked,
        expired=report.swept.expired,
        bytes_back=report.bytes_back,
        seconds=round(report.seconds, 3),
        done=[_step(step) for step in report.done],
        postponed=[wire.PostponedStep(_step(step), why) for step, why in report.postponed],
    )


def _step(step: Step) -> wire.PlanStep:
    name = step.leaf.name if step.leaf else None
    return wire.PlanStep(step.kind, name, step.rows, step.bytes, step.why)


def _held(held: Held) -> wire.HeldSpace:
    if held.by is None:
        return wire.HeldSpace(held.leaf, held.bytes, held.why)
    by = held.by
    return wire.HeldSpace(
        held.leaf, held.bytes, held.why, by.workspace_id, by.bytes, by.since, by.until
    )


def space_view(space: Space) -> wire.SpaceView:
    """The space account."""
    return wire.SpaceView(
        total_bytes=space.total_bytes,
        live_bytes=space.live_bytes,
        dead_bytes=space.dead_bytes,
        growth_bytes_per_day=space.growth_bytes_per_day,
        free_bytes=space.free_bytes,
        days_until_full=space.days_until_full,
        lead_seconds=space.lead_seconds,
        tables=[
            wire.TableSpaceView(table.name, table.bytes, table.dead_rows, table.leaves)
            for table in space.tables
        ],
        leaves=[
            wire.LeafSpaceView(leaf.name, leaf.bytes, leaf.live_bytes, leaf.dead_bytes)
            for leaf in space.leaves
        ],
        uploads=_states(space.states),
        workspaces_active=space.workspaces_active,
        workspaces=[_workspace(one) for one in space.workspaces],
        lags=[wire.LagView(lag.workspace_id, lag.behind) for lag in space.lags],
        pins=[
            wire.PinView(pin.who, pin.what, pin.way_out, pin.bytes, pin.seconds)
            for pin in space.pins
        ],
    )


def _states(states: States) -> wire.UploadStates:
    return wire.UploadStates(states.never_fetched, states.fetched, states.acked, states.expired)


def _workspace(one: WorkspaceSpace) -> wire.WorkspaceSpaceView:
    return wire.WorkspaceSpaceView(
        one.workspace_id, _states(one.states), one.waiting_bytes, one.waiting_since
    )
