"""Records of peers of the older protocol get our column names and whole values, and back."""

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec import Raw

from restante.oplog import translate


@dataclass(frozen=True, slots=True)
class Column:
    """A column as a tracked table has it."""

    name: str
    type: str
    is_nullable: bool = True
    is_generated: bool = False


COLUMNS = (
    Column("id", "text", is_nullable=False),
    Column("size", "bigint", is_nullable=False),
    Column("is_ready", "boolean"),
    Column("transcode_results", "jsonb"),
)
KEY_MAP = {"results": "transcode_results"}


def from_peer(record: bytes, columns: tuple[Column, ...] = COLUMNS) -> bytes:
    return bytes(translate.record_from_peer(Raw(record), columns, ["id"], KEY_MAP))


def test_json_names_become_columns_and_the_values_stay_as_they_are():
    """An object in a value is not taken apart, and no key in it is renamed."""
    found = from_peer(b'{"id":"a","size":7,"is_ready":true,"results":{"320":"x","results":1}}')

    assert found == (
        b'{"id":"a","size":7,"is_ready":true,"transcode_results":{"320":"x","results":1}}'
    )


def test_an_omitted_key_is_the_zero_value():
    """The other program leaves out what is empty; a row of ours is always whole."""
    assert from_peer(b'{"id":"a"}') == (
        b'{"id":"a","size":0,"is_ready":false,"transcode_results":null}'
    )


def test_null_in_a_column_that_takes_none_is_the_zero_value():
    """Go writes null for an empty list or pointer."""
    assert from_peer(b'{"id":null,"size":null,"is_ready":null}') == (
        b'{"id":"","size":0,"is_ready":null,"transcode_results":null}'
    )


def test_keys_that_are_no_column_are_dropped():
    """Its own name for a mapped column does not count: the JSON name does."""
    found = from_peer(b'{"id":"a","size":1,"is_ready":true,"transcode_results":5,"x; drop":1}')

    assert found == b'{"id":"a","size":1,"is_ready":true,"transcode_results":null}'


def test_generated_columns_are_left_to_postgres():
    """A value for one would be refused."""
    columns = (Column("id", "text"), Column("twice", "integer", is_generated=True))

    assert from_peer(b'{"id":"a","twice":4}', columns) == b'{"id":"a"}'


@pytest.mark.parametrize(
    ("kind", "nullable", "zero"),
    [
        ("character varying(20)", True, b'""'),
        ("numeric(10,2)", True, b"0"),
        ("timestamp with time zone", True, b"null"),
        ("timestamp with time zone", False, None),
        ("text[]", True, b"null"),
        ("text[]", False, b"[]"),
        ("jsonb", False, None),
    ],
)
def test_zero_values_by_type(kind: str, nullable: bool, zero: bytes | None):
    """A type without a zero value is null, or missing where null is not allowed."""
    found = translate.zero_value(Column("c", kind, is_nullable=nullable))

    assert (None if found is None else bytes(found)) == zero


def test_a_delete_names_its_key_in_the_words_of_the_peer():
    """The peer sends a whole record; the key is enough."""
    found = translate.key_from_peer(Raw(b'{"name":"a","size":3}'), COLUMNS, ["id"], {"name": "id"})

    assert bytes(found) == b'{"id":"a"}'


def test_a_part_of_a_key_may_be_zero_but_not_all_of_it():
    """A record without a key is refused later; an invented one would hit somebody else's."""
    keys = ["id", "size"]

    partly = translate.key_from_peer(Raw(b'{"id":"a"}'), COLUMNS, keys, {})
    nothing = translate.key_from_peer(Raw(b'{"is_ready":true}'), COLUMNS, keys, {})

    assert bytes(partly) == b'{"id":"a","size":0}'
    assert bytes(nothing) == b"{}"


@pytest.mark.parametrize("record", [b"[]", b"7", b'"x"', b"null", b"{"])
def test_what_is_no_object_is_refused(record: bytes):
    """The caller counts it as refused."""
    with pytest.raises(msgspec.DecodeError):
        from_peer(record)


@given(st.integers(), st.text())
def test_digits_and_texts_survive_both_ways(number: int, text: str):
    """A number of any length is never a float on its way."""
    columns = (Column("n", "numeric"), Column("t", "text"))
    digits = f"{number}.{'1' * 40}".encode()
    record = b'{"N":' + digits + b',"T":' + msgspec.json.encode(text) + b"}"
    key_map = {"N": "n", "T": "t"}

    ours = translate.record_from_peer(Raw(record), columns, ["n"], key_map)

    assert translate.decoded(ours)["n"] == Raw(digits)
    assert bytes(translate.record_to_peer(ours, key_map)) == record
