"""The parser of forms: the same events however a body is cut into pieces."""

import time
from itertools import pairwise

import pytest
from callers import BOUNDARY, Part, form
from hypothesis import example, given, strategies as st

from restante.delivery.forms import Event, FormParser, PartHead
from restante.errors import TooManyFiles, UploadMalformed

# Everything that a boundary and its neighbours are made of.
fragments = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b"-", b"--", BOUNDARY.encode(), BOUNDARY[:5].encode(), b"x", b" "]
)
contents = st.lists(fragments, max_size=12).map(b"".join)
cuts = st.lists(st.integers(0, 400), max_size=12)


def parsed(body: bytes, at: list[int], *, max_parts: int = 9) -> list[tuple[PartHead, bytes]]:
    """The parts of a body that arrives in pieces."""
    parser, events = FormParser(BOUNDARY.encode(), max_parts=max_parts), list[Event]()
    for start, end in pairwise(sorted({0, *at, len(body)})):
        events += parser.feed(body[start:end])
    parser.close()
    parts: list[tuple[PartHead, bytes]] = []
    for event in events:
        if isinstance(event, PartHead):
            parts.append((event, b""))
        elif event:
            head, content = parts.pop()
            parts.append((head, content + event))
    assert events.count(None) == len(parts)
    return parts


def holds_a_boundary(content: bytes, line_end: bytes) -> bool:
    return line_end + b"--" + BOUNDARY.encode() in line_end + content + line_end


@given(st.lists(contents, min_size=1, max_size=3), cuts, st.sampled_from([b"\r\n", b"\n"]))
@example([b""], [], b"\r\n")
@example([b"\r\n"], list(range(200)), b"\r\n")
def test_contents_arrive_whole_however_they_are_cut(
    sent: list[bytes], at: list[int], line_end: bytes
):
    sent = [b"" if holds_a_boundary(content, line_end) else content for content in sent]
    marked = [b"<%d>" % number for number in range(len(sent))]
    body = form(*(Part(mark) for mark in marked)).replace(b"\r\n", line_end)
    for mark, content in zip(marked, sent, strict=True):
        body = body.replace(mark, content)

    found = parsed(body, at)

    assert [content for _, content in found] == sent
    assert {head for head, _ in found} == {PartHead("files", "a.txt", "text/plain")}


@given(st.binary(max_size=200) | contents, cuts)
def test_any_body_is_parsed_or_refused_the_same_way(tail: bytes, at: list[int]):
    body = form(Part(b"x"), closed=False) + b"--" + BOUNDARY.encode() + tail

    outcomes: list[object] = []
    for pieces in ([], at, list(range(len(body)))):
        try:
            outcomes.append(parsed(body, [cut for cut in pieces if cut < len(body)]))
        except UploadMalformed as refusal:
            outcomes.append(str(refusal))

    assert outcomes[0] == outcomes[1] == outcomes[2]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_any_name_arrives_as_it_was_quoted(name: str):
    name = name.replace("\r", "").replace("\n", "").replace("%", "")
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')

    ((head, _),) = parsed(form(Part(name=quoted)), [])

    assert head.filename == name


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80))
def test_any_extended_name_arrives_as_it_was_encoded(name: str):
    encoded = "".join(f"%{byte:02x}" for byte in name.encode())
    line = f"Content-Disposition: form-data; name=files; filename*=UTF-8''{encoded}"

    ((head, _),) = parsed(form(Part(headers=[line.encode()])), [])

    assert head.filename == name


def test_a_header_may_continue_on_the_next_line():
    lines = [b'Content-Disposition: form-data;\r\n name="files";\n\tfilename="a b"']

    ((head, _),) = parsed(form(Part(headers=lines)), [])

    assert (head.field, head.filename) == ("files", "a b")


def test_an_empty_part_needs_no_line_of_its_own():
    dashed = b"--" + BOUNDARY.encode()
    body = dashed + b"\r\nContent-Disposition: form-data; name=x\r\n\r\n" + dashed + b"--"

    assert parsed(body, []) == [(PartHead("x", None, ""), b"")]


HEAD = form(Part(b"", field="x"), closed=False)[:-2]


def processor_seconds(body: bytes) -> float:
    """How long the parser works on an unfinished body, in pieces as they come from a socket."""
    parser, began_at = FormParser(BOUNDARY.encode(), max_parts=9), time.process_time()
    for at in range(0, len(body), 16_384):
        for _ in parser.feed(body[at : at + 16_384]):
            pass
    return time.process_time() - began_at


@pytest.mark.parametrize(
    ("start", "unit"),
    [
        (b"", b"\n--" + BOUNDARY.encode() + b"x"),
        (HEAD, b"\r\n--" + BOUNDARY.encode() + b"x"),
        (HEAD, b"\r\n--" + BOUNDARY[:-1].encode()),
        (HEAD, b"\r\n--"),
        (HEAD, b"\r"),
    ],
)
def test_what_almost_is_a_boundary_takes_linear_time(start: bytes, unit: bytes):
    short, long = (start + unit * (size // len(unit)) for size in (1 << 18, 1 << 21))

    once = min(processor_seconds(short) for _ in range(3))

    assert min(processor_seconds(long) for _ in range(3)) < 24 * once  # quadratic: 64


def test_the_number_of_parts_and_the_size_of_a_head_are_bounded():
    with pytest.raises(TooManyFiles):
        parsed(form(*[Part()] * 10), [])
    with pytest.raises(UploadMalformed, match="too long"):
        parsed(form(Part(headers=[b"X: y"] * 4000)), [])
    with pytest.raises(UploadMalformed, match="too long"):
        list(
            FormParser(BOUNDARY.encode(), max_parts=1).feed(
                b"--" + BOUNDARY.encode() + b"\n" + b"x" * 17_000
            )
        )
