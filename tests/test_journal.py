"""The write-ahead log: what is read back is what was written, up to the first byte that is not."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringfence_sandbox.calls.journal import Journal
from ringfence_sandbox.disk.records import Deed, Identity, Json


@contextmanager
def opened(path: Path) -> Iterator[Journal]:
    journal = Journal(str(path))
    try:
        yield journal
    finally:
        journal.close()


def written(path: Path, *records: tuple[Mapping[str, Json] | str, bytes]) -> None:
    with opened(path) as journal:
        for values, blob in records:
            journal.append(values, blob=blob)


def read(path: Path) -> list[tuple[dict[str, object], bytes]]:
    with opened(path) as journal:
        return [(dict(record.values), record.blob) for record in journal.records]


THREE: list[tuple[dict[str, Json], bytes]] = [
    ({"begin": "one"}, b""),
    ({"path": "caf\udce9 \n \0"}, bytes(range(256))),
    ({"end": "one"}, b""),
]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written(tmp_path / "j", *THREE)
    assert read(tmp_path / "j") == THREE
    written(tmp_path / "j", ({"more": 1}, b""))
    assert read(tmp_path / "j") == [*THREE, ({"more": 1}, b"")]


def whole_size(path: Path) -> int:
    return len(path.read_bytes().rstrip(b"\0"))


def test_a_journal_cut_at_any_byte_has_the_records_before(tmp_path: Path) -> None:
    written(tmp_path / "j", *THREE)
    content = (tmp_path / "j").read_bytes().rstrip(b"\0")
    counts: set[int] = set()
    for size in range(len(content)):
        (tmp_path / "torn").write_bytes(content[:size])
        found = read(tmp_path / "torn")
        assert found == THREE[: len(found)]
        counts.add(len(found))
        assert read(tmp_path / "torn") == found
    assert counts == {0, 1, 2}


def test_of_a_damaged_journal_all_whole_records_are_read_and_a_copy_is_kept(tmp_path: Path) -> None:
    written(tmp_path / "j", *THREE)
    content = (tmp_path / "j").read_bytes().rstrip(b"\0")
    for place in range(36, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x41
        (tmp_path / "damaged").write_bytes(damaged)
        with opened(tmp_path / "damaged") as journal:
            found = [(dict(record.values), record.blob) for record in journal.records if "damaged" not in record.values]
            assert found == [one for one in THREE if one in found]
            assert len(found) == 2
            assert journal.cut is not None
            if found[-1] == THREE[-1] or " is kept at " in journal.cut:  # else it is as one that a crash has cut short
                assert Path(journal.cut.rpartition(" is kept at ")[2]).read_bytes() == damaged
            journal.append({"after": "it"})
        assert read(tmp_path / "damaged")[-1] == ({"after": "it"}, b"")


def test_what_an_earlier_journal_left_behind_is_no_record(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append({"n": 1})
        old = (tmp_path / "j").read_bytes()
        journal.reset()
        new = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(new.rstrip(b"\0")[:36] + old[36:])
    assert read(tmp_path / "j") == []


def test_records_do_not_count_at_another_place(tmp_path: Path) -> None:
    written(tmp_path / "j", ({"n": 1}, b""), ({"n": 2}, b""))
    content = (tmp_path / "j").read_bytes().rstrip(b"\0")
    size = (len(content) - 36) // 2
    (tmp_path / "j").write_bytes(content[:36] + content[36 + size :])
    assert read(tmp_path / "j") == []


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("somebody's notes, and more of them")
    with pytest.raises(ValueError, match="move it away"):
        Journal(str(tmp_path / "j"))
    assert (tmp_path / "j").read_text() == "somebody's notes, and more of them"


def test_it_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    written(tmp_path / "j", *THREE)
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", tmp_path / "j")
    with pytest.raises(OSError, match="symbolic"):
        Journal(str(tmp_path / "j"))


texts = st.binary(max_size=12).map(os.fsdecode)  # as a path is: it never has both halves of a surrogate pair
identities = st.one_of(
    st.none(), st.builds(Identity, texts, st.integers(0, 2**63), st.integers(0, 2**63), st.integers(), texts)
)
deeds = st.builds(
    Deed,
    st.sampled_from(["put", "take", "swap", "move", "mkdir", "rmdir", "mode", "times"]),
    texts,
    texts,
    st.integers(-1, 9),
    identities,
    identities,
    st.integers(0, 0o7777),
    st.integers(0, 0o7777),
    st.integers(),
    st.integers(),
    st.integers(0, 99),
)


@example(deeds=[Deed("times", "d", mtime_ns=-1)])
@given(deeds=st.lists(deeds, max_size=5))
def test_deeds_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, deeds: list[Deed]) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    written(path, *((deed.to_json(), b"") for deed in deeds))
    assert [Deed.from_json(values) for values, _ in read(path)] == deeds


@given(deed=deeds)
def test_taking_back_what_takes_back_is_the_deed_itself(deed: Deed) -> None:
    twice = deed.inverse().inverse()
    assert (twice.kind, twice.path, twice.new) == (deed.kind, deed.path, deed.new)
