"""The model's snapshots: one node makes its table equal to another's, page by page."""

from dataclasses import dataclass

from oplog.model_log import Logs
from oplog.model_node import NOWHERE, Entry, Node, Taking

from restante.oplog import rules
from restante.oplog.rules import Newest, Outcome

# How long a peer that has just taken a snapshot is not evicted.
_GRACE_SECONDS = 1500


@dataclass(frozen=True, slots=True)
class _Theirs:
    """What the server has of a key."""

    newest: Entry | None
    record: int | None
    change: int | None


class Snapshots(Logs):
    """Nodes that can take snapshots of each other."""

    def begin_snapshot(self, node: Node, server: Node) -> None:
        if server.is_paused:
            return
        start = min(server.horizon - 1, server.head)
        is_unread = node.number in server.new_from and self.laws.reads_new_tables_first
        node.takings[server.number] = Taking(
            start=start,
            server_cursor=None if is_unread else server.cursors.get(node.number),
            floor=server.floor,
            has_unlogged=node.cursors.get(server.number, NOWHERE) < server.unlogged,
        )
        server.pins[node.number] = start
        self.counts["snapshot"] += 1

    def take_page(self, node: Node, server: Node) -> None:
        if server.is_paused:
            return
        taking = node.takings[server.number]
        if server.pins.get(node.number) != taking.start:
            del node.takings[server.number]  # the server has forgotten it: it begins again
            return
        phases = (
            self._deletes_of(server) if self.laws.sends_deletes else [],
            server.rows,
            self._deletes_of(node) - server.rows.keys(),
            node.rows.keys() - server.rows.keys(),
        )
        keys = sorted(key for key in phases[taking.phase] if key > taking.after)[:2]
        if node.is_paused or any(node.is_locked(key) for key in keys):
            return
        for key in keys:
            self._take_key(node, server, taking, key)
        taking.floor = max(taking.floor, server.floor)
        node.raise_clock(server.floor)
        if keys:
            taking.after = keys[-1]
        else:
            taking.phase, taking.after = taking.phase + 1, ""
        if taking.phase == len(phases):
            self._end_snapshot(node, server, taking)

    @staticmethod
    def _deletes_of(node: Node) -> set[str]:
        return {key for key in node.of_key if (op := node.newest_op(key)) and op.is_delete}

    def _end_snapshot(self, node: Node, server: Node, taking: Taking) -> None:
        del node.takings[server.number]
        node.new_from.discard(server.number)
        server.pins.pop(node.number, None)
        node.cursors[server.number] = taking.start
        node.has_taken = True
        for key in server.state.keys() - server.rows.keys() - node.rows.keys():
            self.ledger.merge(server.state[key], node.state.get(key))
        node.floor = max(node.floor, taking.floor)
        if taking.start >= server.trimmed:
            server.evicted.discard(node.number)
            server.spared_until[node.number] = self.now + _GRACE_SECONDS
            server.forget(node.number)
            server.confirmed[node.number] = taking.start
            server.pending[node.number] = (taking.start, node.head)

    def _take_key(self, node: Node, server: Node, taking: Taking, key: str) -> None:
        theirs = _Theirs(server.newest(key), server.rows.get(key), server.state.get(key))
        if theirs.record is None and not self.laws.sends_deletes:
            theirs = _Theirs(None, None, theirs.change)
        pair = self._pair(node, taking, key, theirs)
        read = taking.server_cursor if taking.server_cursor is not None else NOWHERE
        is_unread = read < (node.unlogged if self.laws.first_is_per_table else 0)
        verdict = self.laws.judge_snapshot(
            pair,
            rules.SnapshotSides(
                server=server.host,
                taker=node.host,
                server_floor=server.floor,
                own_floor=node.floor,
                is_first=is_unread,
                has_read_us=taking.server_cursor is not None and read >= node.trimmed,
                has_unlogged=taking.has_unlogged,
            ),
        )
        self.counts[f"snapshot {verdict.outcome}{' reported' * verdict.reports}"] += 1
        match verdict.outcome:
            case Outcome.KEEP:
                if verdict.reports:
                    self.ledger.report(theirs.change)
            case Outcome.TAKE:
                self._take(node, key, theirs, verdict)
            case Outcome.KEEP_UNDER:
                self._keep_under(node, key, theirs, verdict)
            case Outcome.REISSUE:
                if verdict.reports:
                    self._report_absence(server, key)
                self._reissue(node, key, verdict)

    def _pair(self, node: Node, taking: Taking, key: str, theirs: _Theirs) -> rules.SnapshotPair:
        read = taking.server_cursor if taking.server_cursor is not None else NOWHERE
        unsent = [e for e in node.of_key.get(key, []) if e.place > read]
        first = min(unsent, key=lambda entry: entry.place, default=None)
        return rules.SnapshotPair(
            server=theirs.newest.op if theirs.newest else None,
            own=node.newest_op(key),
            server_has_record=theirs.record is not None,
            own_has_record=key in node.rows,
            is_same=node.rows.get(key) == theirs.record,
            has_unsent=bool(unsent),
            is_unsent_on_server_record=first is not None and first.old == theirs.record,
        )

    def _take(self, node: Node, key: str, theirs: _Theirs, verdict: rules.SnapshotVerdict) -> None:
        have, held = node.rows.get(key), node.state.get(key)
        record, change = theirs.record, theirs.change
        if verdict.reports and held != change:
            self.ledger.report(held)
        if have is not None and record is None and not self.ledger.was_deleted(key):
            self.removals.append(f"{node.host} has removed {key!r}, which nobody has deleted")
        node.put(key, record)
        if verdict.version is None:
            self._hold(node, key, change)
            return
        if change is None:
            change = self.ledger.nothing(key).number
        if have == record:
            self.ledger.merge(held, change)
        self._hold(node, key, change)
        if theirs.newest is not None or self.laws.logs_snapshots:
            op = Newest(verdict.version, record is None, verdict.is_approximate)
            node.append(
                Entry(node.next_place(), key, op, record, change, self.clock_of(node), have)
            )
        self._purge(node, key, verdict.version)

    def _keep_under(
        self, node: Node, key: str, theirs: _Theirs, verdict: rules.SnapshotVerdict
    ) -> None:
        assert verdict.version is not None
        record = node.rows.get(key)
        change = node.state.get(key, theirs.change)
        if change is None:
            change = self.ledger.nothing(key).number
        self.ledger.merge(theirs.change, change)
        node.state[key] = change
        op = Newest(verdict.version, record is None, verdict.is_approximate)
        node.append(Entry(node.next_place(), key, op, record, change, self.clock_of(node), record))

    def _report_absence(self, server: Node, key: str) -> None:
        """A record that the server does not have, or never had, comes back."""
        if key not in server.state:
            server.state[key] = self.ledger.nothing(key).number
        self.ledger.report(server.state[key])

    def _reissue(self, node: Node, key: str, verdict: rules.SnapshotVerdict) -> None:
        assert verdict.version is not None
        record = node.rows.get(key)
        again = node.state.get(key)
        if record is not None and again is not None and self.ledger.is_outdated(again):
            self.counts["revived"] += 1
        change = self.ledger.note(key, verdict.version, is_delete=record is None, again=again)
        op = Newest(verdict.version, record is None)
        self._store(
            node,
            Entry(node.next_place(), key, op, record, change.number, self.clock_of(node), record),
        )
