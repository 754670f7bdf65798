"""
Records of peers of the older protocol: their JSON names against our columns, and omitted values.

Values stay the JSON text that they are, so that numbers keep their digits.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

import msgspec
from msgspec import Raw

Record = dict[str, Raw]

_DECODER = msgspec.json.Decoder(Record)
_NULL = b"null"

_TEXTS = ("text", "character varying", "character", "bpchar", "citext", "name", '"char"')
_NUMBERS = ("smallint", "integer", "bigint", "numeric", "real", "double precision")


class Column(Protocol):
    """What is asked of a column."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...  # as Postgres formats it
    @property
    def is_generated(self) -> bool: ...
    @property
    def is_nullable(self) -> bool: ...


def decoded(record: Raw | bytes) -> Record:
    """The fields of a record; raises msgspec's DecodeError if it is no JSON object."""
    return _DECODER.decode(record)


def record_from_peer(
    record: Raw, columns: Iterable[Column], key_columns: Collection[str], key_map: Mapping[str, str]
) -> Raw:
    """
    A whole record with our column names; raises msgspec's DecodeError if it is no JSON object.

    An omitted key is the zero value of the peer's language.  Keys that are no column are dropped.
    A record without any part of its primary key stays without one.
    """
    sent, names = decoded(record), json_names(key_map)
    has_key = any(names.get(name, name) in sent for name in key_columns)
    found = Record()
    for column in columns:
        if column.is_generated or (column.name in key_columns and not has_key):
            continue
        value = sent.get(names.get(column.name, column.name))
        if value is None or (not column.is_nullable and bytes(value) == _NULL):
            value = zero_value(column)
        if value is not None:
            found[column.name] = value
    return Raw(msgspec.json.encode(found))


def key_from_peer(
    record: Raw, columns: Iterable[Column], key_columns: Collection[str], key_map: Mapping[str, str]
) -> Raw:
    """The primary key of a record to delete; raises as `record_from_peer` does."""
    keys = [column for column in columns if column.name in key_columns]
    return record_from_peer(record, keys, key_columns, key_map)


def record_to_peer(record: Raw, key_map: Mapping[str, str]) -> Raw:
    """The record with the peer's JSON names."""
    if not key_map:
        return record
    names = json_names(key_map)
    renamed = {names.get(name, name): value for name, value in decoded(record).items()}
    return Raw(msgspec.json.encode(renamed))


def json_names(key_map: Mapping[str, str]) -> dict[str, str]:
    """From column to JSON name; a key map says the reverse."""
    return {column: name for name, column in key_map.items()}


def zero_value(column: Column) -> Raw | None:
    """
    What an omitted key stands for.

    None if the column's type has no zero value and null is not allowed: Postgres then refuses the
    record, which is better than an invented value.
    """
    base = column.type.partition("(")[0].strip()
    if column.type.endswith("[]"):
        return Raw(_NULL if column.is_nullable else b"[]")
    if base in _TEXTS:
        return Raw(b'""')
    if base in _NUMBERS:
        return Raw(b"0")
    if base == "boolean":
        return Raw(b"false")
    return Raw(_NULL) if column.is_nullable else None
