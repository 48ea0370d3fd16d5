from __future__ import annotations

import os
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from dulwich.objects import RawObjectID
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.filesystem.paths import is_dotgit
from ringfence_sandbox.steps.text_merge import merged
from ringfence_sandbox.steps.undo_plan import TreeNow as Workspace
from ringfence_sandbox.steps.undo_plan import plan_undo
from ringfence_sandbox.store.commit_messages import CommitInfo, format_message, parse_message
from ringfence_sandbox.store.commit_records import PreparedStep
from ringfence_sandbox.store.compression import LEVEL, by_zlib, deflated
from ringfence_sandbox.store.deltas import Before, applied, delta
from ringfence_sandbox.store.entries import Entry, Meta, Pending, decode_lines, encode_line
from ringfence_sandbox.store.git_names import escaped, unescaped
from ringfence_sandbox.store.history_gc import gc
from ringfence_sandbox.store.object_ids import BLOB, object_id
from ringfence_sandbox.store.object_log import pack_entry
from ringfence_sandbox.store.packs import open_packs, write_pack
from ringfence_sandbox.store.rows import Rows
from ringfence_sandbox.store.store import SEAL_BYTES, Store

NOW = datetime(2026, 11, 22, 10, 30, 0, 123456, tzinfo=UTC)
DIRECTORY = Pending("directory", Meta(0o755, 1000, 1000, 1_700_000_000_123_456_789))


def file(content: bytes, mode: int = 0o644, link: int = 0) -> Pending:
    return Pending("file", Meta(mode, 1000, 1000, 1_700_000_000_000_000_001, link), content)


def info(kind: str = "step", tool: str = "write_file") -> CommitInfo:
    assert kind in ("baseline", "step", "external", "aborted")
    return CommitInfo(kind, NOW, tool, "call-1", "session-1", "receipt-1")


def step(store: Store, changes: dict[str, Entry | Pending | None], kind: str = "step") -> PreparedStep:
    prepared = store.prepare(changes, info(kind))
    store.publish(prepared)
    return prepared


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as store:
        step(store, {"": DIRECTORY, "a.txt": file(b"one\n"), "d": DIRECTORY, "d/b.txt": file(b"b\n")}, "baseline")
        yield store


def contents(store: Store, commit: str) -> dict[str, bytes]:
    return {
        path: store.states.content(entry.oid)
        for path, entry in store.states.files(commit).items()
        if entry.oid is not None
    }


def test_steps_are_numbered_from_1_and_say_who_made_them(store: Store) -> None:
    step(store, {"a.txt": file(b"two\n")})
    step(store, {"x.txt": file(b"theirs\n")}, "external")
    second = step(store, {"d/b.txt": None, "c.txt": file(b"c\n")})
    first, last = store.steps()
    assert (first.number, first.paths) == (1, ("a.txt",))
    assert (last.number, last.tool, last.call_id, last.session_id) == (2, "write_file", "call-1", "session-1")
    assert (last.created_at, last.paths, last.commit) == (NOW, ("c.txt", "d/b.txt"), second.commit)


def test_every_commit_reads_back_as_it_was(store: Store) -> None:
    first = store.tip
    step(store, {"a.txt": file(b"two\n"), "d": None})
    assert first is not None
    assert store.tip is not None
    assert contents(store, first) == {"a.txt": b"one\n", "d/b.txt": b"b\n"}
    assert contents(store, store.tip) == {"a.txt": b"two\n"}
    assert store.states.read(first, "d/b.txt") == b"b\n"
    with pytest.raises(FileNotFoundError, match=r"d/b\.txt"):
        store.states.read(store.tip, "d/b.txt")
    with pytest.raises(IsADirectoryError):
        store.states.read(first, "d")


def test_an_empty_directory_is_kept_and_told_from_none(store: Store) -> None:
    made = step(store, {"d/b.txt": None, "e": DIRECTORY})
    files = store.states.files(made.commit)
    assert [path for path in files if files[path].kind == "directory"] == ["", "d", "e"]
    assert store.states.entry(made.commit, "e") == Entry("directory", DIRECTORY.meta)
    assert store.states.entry(made.commit, "nowhere/at/all") is None


def test_what_git_cannot_hold_is_kept(store: Store) -> None:
    odd = Meta(0o4750, 12, 34, -5, link=77)
    made = step(store, {"odd\n\\name \udcff": Pending("file", odd, b"x"), "d": Pending("directory", odd)})
    store.close()
    with Store.open(store.folder) as again:
        assert again.states.files(made.commit)["odd\n\\name \udcff"].meta == odd
        assert again.states.files(made.commit)["d"].meta == odd


def test_a_directory_becomes_a_file_and_back(store: Store) -> None:
    one = step(store, {"d": file(b"now a file")})
    two = step(store, {"d": DIRECTORY, "d/x": file(b"x")})
    assert contents(store, one.commit) == {"a.txt": b"one\n", "d": b"now a file"}
    assert contents(store, two.commit) == {"a.txt": b"one\n", "d/x": b"x"}


def test_a_reader_gives_the_bytes(store: Store) -> None:
    made = step(store, {"a.txt": Pending("file", file(b"").meta, lambda: b"read late")})
    assert store.states.read(made.commit, "a.txt") == b"read late"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no/where": file(b"")}, "'no' is no directory before this step"),
        ({"d": None, "d/new": file(b"")}, "'d' is no directory after this step"),
        ({"d": file(b""), "d/new": file(b"")}, "'d' is no directory after this step"),
        ({"a.txt/below": file(b"")}, r"'a\.txt' is no directory before this step"),
    ],
)
def test_changes_that_do_not_fit_are_refused_and_leave_nothing(
    store: Store, changes: dict[str, Entry | Pending | None], words: str
) -> None:
    tip, size = store.tip, store.objects.log.size
    with pytest.raises(ValueError, match=words):
        store.prepare(changes, info())
    assert (store.tip, store.objects.log.size) == (tip, size)
    step(store, {"a.txt": file(b"two\n")})


def test_a_step_is_not_made_of_bytes_that_the_store_does_not_have(store: Store) -> None:
    with pytest.raises(LookupError, match="add it again"):
        store.prepare({"a.txt": Entry("file", DIRECTORY.meta, "12" * 20)}, info())


def test_the_first_step_needs_the_root(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store, pytest.raises(ValueError, match="the root itself"):
        store.prepare({"a": file(b"")}, info("baseline"))


def test_what_was_prepared_is_no_history_until_it_is_published(store: Store) -> None:
    tip = store.tip
    prepared = store.prepare({"a.txt": file(b"two\n")}, info())
    assert store.tip == tip
    store.close()
    with Store.open(store.folder) as again:
        assert again.tip == tip
    # A journal that has the commit makes it the newest: the crash came between the two.
    with Store.open(store.folder, tip=prepared.commit) as again:
        assert again.states.read(prepared.commit, "a.txt") == b"two\n"
        assert [found.number for found in again.steps()] == [1]
    with Store.open(store.folder) as again:
        assert again.tip == prepared.commit


def test_a_tip_that_the_store_does_not_have_is_an_error(store: Store) -> None:
    store.close()
    with pytest.raises(LookupError, match="no commit"):
        Store.open(store.folder, tip="12" * 20)


def test_what_a_journal_has_is_made_the_newest_once(store: Store) -> None:
    one = store.prepare({"a.txt": file(b"1")}, info())
    two = store.prepare({"a.txt": file(b"2")}, info(), after=one)
    assert [store.advance(commit) for commit in (one.commit, two.commit, one.commit, two.commit)] == [
        True,
        True,
        False,
        False,
    ]
    assert store.tip == two.commit
    assert step(store, {"a.txt": file(b"3")}).number == 3
    with pytest.raises(LookupError):
        store.advance("12" * 20)


def test_publishing_does_not_fail_for_want_of_space(store: Store) -> None:
    prepared = store.prepare({"a.txt": file(b"two\n")}, info())
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.objects.log.size, most))
    try:
        store.publish(prepared)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert store.tip == prepared.commit
    store.close()
    assert history(store.folder)[0] == prepared.commit


def test_numbers_go_on_over_what_was_prepared_on_each_other(store: Store) -> None:
    first = store.prepare({"a.txt": file(b"1")}, info())
    external = store.prepare({"x": file(b"theirs")}, info("external"), after=first)
    second = store.prepare({"a.txt": file(b"2")}, info(), after=external)
    assert [first.number, external.number, second.number] == [1, None, 2]
    store.publish(second)
    assert step(store, {"a.txt": file(b"3")}).number == 3


def test_one_prepared_on_another_is_published_with_it(store: Store) -> None:
    external = store.prepare({"x": file(b"theirs")}, info("external"))
    mine = store.prepare({"a.txt": file(b"two\n")}, info(), after=external)
    store.publish(mine)
    assert [(record.message.info.kind, record.number) for record in store.commits()] == [
        ("step", 1),
        ("external", None),
        ("baseline", 0),
    ]


def test_what_was_prepared_on_an_older_tip_cannot_be_published(store: Store) -> None:
    late = store.prepare({"a.txt": file(b"late\n")}, info())
    step(store, {"a.txt": file(b"two\n")})
    with pytest.raises(ValueError, match="prepare this one again"):
        store.publish(late)


def test_a_diff_has_only_what_differs(store: Store) -> None:
    before = store.tip
    made = step(store, {"a.txt": file(b"one\n", 0o755), "d/l": Pending("symlink", DIRECTORY.meta, b"../a.txt")})
    mode, link = store.states.changes(before, made.commit)
    assert (mode.path, mode.before.mode if mode.before else 0, mode.after.mode if mode.after else 0) == (
        "a.txt",
        0o644,
        0o755,
    )
    assert (link.path, link.kind, link.after.target if link.after else "") == ("d/l", "created", "../a.txt")


def test_other_times_are_no_change_but_a_difference(store: Store) -> None:
    before = store.tip
    later = Entry("file", Meta(0o644, 1000, 1000, 5), store.add_blob(b"one\n"))
    made = step(store, {"a.txt": later})
    assert store.states.changes(before, made.commit) == []
    assert made.changed == ()
    assert [(path, new) for path, _, new in store.states.differences(before, made.commit)] == [("a.txt", later)]


def test_a_step_of_one_file_among_many_directories_writes_few_objects(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        many: dict[str, Entry | Pending | None] = {"": DIRECTORY}
        for n in range(200):
            many |= {f"d{n}": DIRECTORY, f"d{n}/f": file(b"%d" % n)}
        first = step(store, many, "baseline")
        second = step(store, {"d7/f": file(b"changed")})
        written = len(store.objects.log.objects)
        third = step(store, {"d7/f": file(b"again")})
        assert len(store.objects.log.objects) - written == 5  # the file, two directories, the step's tree, the commit
        assert [change.path for change in store.states.changes(second.commit, third.commit)] == ["d7/f"]
        assert len(store.states.changes(None, first.commit)) == 401


def test_a_step_costs_little_however_large_its_directory_is(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        many: dict[str, Entry | Pending | None] = {"": DIRECTORY}
        many |= {f"file{n}": file(b"%d" % n) for n in range(1000)}
        step(store, many, "baseline")
        before = store.objects.log.size
        for n in range(100):
            step(store, {f"file{n}": file(b"edit %d" % n)})
        assert (store.objects.log.size - before) / 100 < 4.5 * 1024


# The log of objects.


def history(folder: Path) -> list[str]:
    with Store.open(folder, writable=False) as store:
        for record in store.commits():
            contents(store, record.commit)
        return [record.commit for record in store.commits()]


def test_a_log_cut_anywhere_opens_to_an_earlier_state(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    step(store, {"": DIRECTORY, "a": file(b"0")}, "baseline")
    for n in range(4):
        step(store, {"a": file(b"%d" % n), "b": file(b"x" * n)})
    whole = history(store.folder)
    assert len(whole) == 5
    data = store.objects.log.path.read_bytes()
    states: set[int] = set()
    cut = tmp_path / "cut"
    shutil.copytree(store.folder, cut)
    for end in {*range(0, len(data), 5), *range(len(data) - 300, len(data))}:
        (cut / store.objects.log.path.name).write_bytes(data[:end])
        found = history(cut)
        assert found == whole[len(whole) - len(found) :]
        states.add(len(found))
        if end % 300 == 0:
            goes_on = tmp_path / f"cut at {end}"
            shutil.copytree(cut, goes_on)
            with Store.open(goes_on) as again:
                made = step(again, {"": DIRECTORY, "new": file(b"goes on")})
                assert again.states.read(made.commit, "new") == b"goes on"
            assert history(goes_on) == [made.commit, *found]
    assert states == {0, 1, 2, 3, 4}
    store.close()


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\xff" * 100, b"O" * 9], ids=["zeros", "ones", "short"])
def test_rubbish_at_the_end_of_the_log_is_cut_off_and_reported(store: Store, tail: bytes) -> None:
    step(store, {"a.txt": file(b"two\n")})
    whole = history(store.folder)
    with open(store.objects.log.path, "ab") as log:
        log.write(tail)
    assert history(store.folder) == whole
    with Store.open(store.folder) as again:
        assert again.damaged_bytes == len(tail)
    assert history(store.folder) == whole


def test_a_flipped_bit_ends_the_history_before_it(store: Store) -> None:
    baseline = history(store.folder)
    at = store.objects.log.size + 60
    step(store, {"a.txt": file(b"two\n")})
    data = bytearray(store.objects.log.path.read_bytes())
    data[at] ^= 1
    store.objects.log.path.write_bytes(bytes(data))
    assert history(store.folder) == baseline


def test_a_reader_without_the_lock_sees_what_is_published_and_what_is_sealed_meanwhile(store: Store) -> None:
    with Store.open(store.folder, writable=False) as reader:
        tip = step(store, {"a.txt": file(b"two\n")}).commit
        assert history(store.folder)[0] == tip
        assert reader.tip != tip
        store.seal()
        gc(store, 0)
        assert reader.tip is not None
        assert contents(reader, reader.tip)["a.txt"] == b"one\n"
    assert history(store.folder)[0] == tip


def test_a_reader_that_opens_while_gc_drops_what_it_knows_of_knows_what_is_left(store: Store) -> None:
    store.keep("named", step(store, {"a.txt": file(b"two\n")}).commit)
    store.seal()
    refs = store.folder / "packed-refs"
    old = refs.read_bytes()
    refs.unlink()
    os.mkfifo(refs)
    with ThreadPoolExecutor() as threads:
        opening = threads.submit(Store.open, store.folder, writable=False)
        with open(refs, "wb") as meanwhile:  # the reader has it open, too, and waits
            store.unkeep("named")
            tip = step(store, {"a.txt": file(b"three\n")}).commit
            gc(store, 0)
            meanwhile.write(old)
        with opening.result() as reader:
            assert (reader.tip, reader.kept()) == (tip, {})
            assert contents(reader, tip)["a.txt"] == b"three\n"


def test_a_pack_that_is_deleted_while_it_is_opened_is_said_to_be_missing(store: Store) -> None:
    store.seal()
    [pack] = (store.folder / "objects/pack").glob("*.pack")
    pack.unlink()
    with pytest.raises(FileNotFoundError, match="deleted meanwhile"):
        open_packs(pack.parent)


@pytest.mark.parametrize("number", [100, 40_000])
def test_a_pack_says_of_every_id_whether_it_has_it(tmp_path: Path, number: int) -> None:
    ids = {b"\7\7" + b"\1" * 18, b"\7\7" + b"\2" * 18, *(object_id(BLOB, b"%d" % one) for one in range(number))}
    across = b"\7" + b"\1" * 18 + b"\7"  # the end of the first and the beginning of the second

    def entries(take: Callable[[bytes, bytes], None]) -> None:
        for oid in ids:
            take(oid, pack_entry(BLOB, b""))

    write_pack(tmp_path, len(ids), entries)
    others = [bytes(20), b"\xff" * 20, across, *(object_id(BLOB, b"no %d" % one) for one in range(number))]
    with closing(open_packs(tmp_path)[0]) as pack:
        assert all(RawObjectID(oid) in pack for oid in ids)
        assert not any(RawObjectID(oid) in pack for oid in others)


def test_two_logs_after_a_crash_in_sealing_are_no_harm(store: Store) -> None:
    step(store, {"a.txt": file(b"two\n")})
    whole, log = history(store.folder), store.objects.log.path
    data = log.read_bytes()
    store.seal()
    log.write_bytes(data)
    (store.folder / "objects" / "pack" / "tmp_pack_new").write_bytes(b"half")
    assert history(store.folder) == whole
    with Store.open(store.folder) as again:
        assert [record.commit for record in again.commits()] == whole
    assert not log.exists()
    assert not (store.folder / "objects" / "pack" / "tmp_pack_new").exists()


def test_a_full_disk_leaves_the_history_as_it_was(store: Store) -> None:
    tip, size = store.tip, store.objects.log.size
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    # In the middle of the first record: a part of it is written.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, most))
    try:
        with pytest.raises(OSError):
            store.prepare({"a.txt": file(os.urandom(10_000))}, info())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert (store.tip, store.objects.log.path.stat().st_size) == (tip, size)
    step(store, {"a.txt": file(b"two\n")})
    assert len(history(store.folder)) == 2
    store.close()
    assert len(history(store.folder)) == 2


def test_a_step_is_published_though_it_cannot_be_sealed(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        prepared = store.prepare({"": DIRECTORY, "large": file(os.urandom(SEAL_BYTES + 1))}, info("baseline"))
        obstacle = store.folder / "objects" / "pack" / "tmp_pack_new"
        obstacle.mkdir()
        store.publish(prepared)
        assert history(store.folder) == [prepared.commit]
        with pytest.raises(OSError):
            store.seal()
        obstacle.rmdir()
        store.seal()
        assert store.objects.log.objects == {}
        assert history(store.folder) == [prepared.commit]


def test_a_step_is_published_though_a_pack_was_damaged_meanwhile(store: Store) -> None:
    step(store, {"a.txt": file(b"one\n")})
    store.seal()
    prepared = store.prepare({"large": file(os.urandom(SEAL_BYTES + 1))}, info())
    (pack,) = (store.folder / "objects" / "pack").glob("*.pack")
    whole = pack.read_bytes()
    pack.chmod(0o600)
    pack.write_bytes(b"damaged")
    store.publish(prepared)
    assert store.tip == prepared.commit
    pack.write_bytes(whole)


def test_many_sealings_leave_few_files(store: Store) -> None:
    for n in range(30):
        step(store, {"a.txt": file(b"%d\n" % n)})
        store.seal()
    assert sum(1 for path in store.folder.rglob("*") if path.is_file()) < 40
    assert len(history(store.folder)) == 31


# Making it small.


def test_gc_keeps_the_newest_steps_and_what_they_are_undone_to(store: Store) -> None:
    big = [os.urandom(50_000) for _ in range(6)]
    made = [step(store, {"a.txt": file(content)}).commit for content in big]
    assert gc(store, 2) > 150_000
    store.close()
    with Store.open(store.folder) as again:
        assert [record.commit for record in again.commits()] == [made[5], made[4], made[3]]
        assert again.states.read(made[3], "a.txt") == big[3]
        assert again.step_of(again.record(5)).paths == ("a.txt",)
        with pytest.raises(LookupError, match="no step 3"):
            again.record(3)
        assert step(again, {"a.txt": file(b"on")}).number == 7


def test_gc_never_drops_what_is_kept_or_protected(store: Store) -> None:
    named, target, lost = (step(store, {"a.txt": file(b"%d" % n)}).commit for n in range(3))
    aside = store.prepare({"a.txt": file(b"taken back")}, info("aborted"))
    step(store, {"a.txt": file(b"newer")})
    step(store, {"a.txt": file(b"newest")})
    store.keep("release/one", named)
    store.keep("aborted.call-1", aside.commit)
    gc(store, 0, protect=[target])
    store.close()
    with Store.open(store.folder) as again:
        assert again.states.read(named, "a.txt") == b"0"
        assert again.states.read(target, "a.txt") == b"1"
        assert again.states.read(aside.commit, "a.txt") == b"taken back"
        assert again.kept() == {"release/one": named, "aborted.call-1": aside.commit}
        with pytest.raises(LookupError):
            again.commit(lost)
        again.unkeep("release/one")
        gc(again, 0)
        with pytest.raises(LookupError):
            again.commit(named)


@pytest.mark.parametrize("name", ["", "a b", "../x", "a..b", "x.lock", "-x", "a/", "a//b", "a\n"])
def test_a_name_that_git_cannot_have_is_refused(store: Store, name: str) -> None:
    assert store.tip is not None
    with pytest.raises(ValueError, match="cannot be a name"):
        store.keep(name, store.tip)


def test_gc_refuses_a_number_of_steps_below_none(store: Store) -> None:
    with pytest.raises(ValueError, match="cannot be -1"):
        gc(store, -1)


# Names, lines, messages, deltas.


@pytest.mark.parametrize(
    "name",
    [
        b".git",
        b".GIT",
        b".Git ",
        b".git. .",
        b"git~1",
        b"GIT~1 ",
        b".git::$INDEX",
        b"x\\.git",
        b".git\\x",
        ".g\u200cit".encode(),
        b".git\xff",
    ],
)
def test_what_git_takes_for_its_own_is_escaped(name: bytes) -> None:
    assert is_dotgit(name)
    assert not is_dotgit(escaped(name))
    assert unescaped(escaped(name)) == name


@given(st.binary(min_size=1, max_size=12) | st.text("~rf.git%5C\\", min_size=1).map(str.encode))
def test_different_names_stay_different(name: bytes) -> None:
    assert unescaped(escaped(name)) == name
    assert escaped(escaped(name)) != escaped(name) or escaped(name) == name


@given(
    st.binary(min_size=1).filter(lambda name: b"\0" not in name),
    st.builds(Meta, st.integers(0, 0o7777), st.integers(0), st.integers(0), st.integers(), st.integers(0)),
)
def test_a_line_of_meta_reads_back(name: bytes, meta: Meta) -> None:
    assert decode_lines(encode_line(name, meta)) == [(name, meta)]


@given(st.text(), st.text(), st.lists(st.tuples(st.text(min_size=1), st.just("modified")), max_size=4))
def test_a_message_reads_back_whatever_the_names_are(tool: str, call: str, changed: list[tuple[str, str]]) -> None:
    written = CommitInfo("step", NOW, tool, call, "s", "r", tool)
    message = format_message(written, 3, changed)
    assert b"\0" not in message
    parsed = parse_message(message)
    assert (parsed.info, parsed.number, parsed.paths) == (written, 3, tuple(path for path, _ in changed))


@given(
    st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=300) | st.none()), max_size=10),
    st.integers(0, 70_000),
)
def test_a_delta_makes_the_new_of_the_old(parts: list[tuple[bytes, bytes | None]], much: int) -> None:
    """What a part becomes stands beside it; None for one that stays."""
    old = new = bytes(much)
    pieces: list[tuple[int, int, bytes]] = []
    for part, becomes in parts:
        if becomes is not None:
            pieces.append((len(old), len(part), becomes))
        old, new = old + part, new + (part if becomes is None else becomes)
    change = delta(Before(b"", len(old), pieces), len(new))
    assert applied(old, change) == new
    assert len(change) <= 50 + sum(12 + 2 * len(piece) for _, _, piece in pieces)


@given(
    st.dictionaries(st.binary(min_size=1, max_size=2), st.binary(min_size=1, max_size=5), max_size=40),
    st.dictionaries(st.binary(min_size=1, max_size=2), st.binary(min_size=1, max_size=5) | st.none(), max_size=40),
    st.binary(max_size=9),
)
def test_what_rows_are_edited_by_makes_a_delta(
    known: dict[bytes, bytes], edits: dict[bytes, bytes | None], header: bytes
) -> None:
    rows = Rows.of(sorted(known), [known[key] for key in sorted(known)])
    edited = rows.edited(edits, len(header))
    now = {key: item for key, item in (known | edits).items() if item is not None}
    assert [*zip(edited.rows.keys, edited.rows.items, strict=True)] == sorted(now.items())
    assert all(edited.rows.get(key) == now.get(key) for key in known | edits)
    old, new = header + rows.joined, header + edited.rows.joined
    assert applied(old, delta(Before(b"", len(old), edited.pieces), len(new))) == new


@pytest.mark.parametrize("size", [0, 1, 200, 201, 1 << 10, 5_000, 1 << 13, 100_000])
def test_what_is_compressed_is_a_stream_that_zlib_reads(size: int) -> None:
    raw = (b"def work(self) -> None:\n    self.done()\n" * 3_000)[:size]
    assert zlib.decompress(deflated(raw)) == raw
    assert zlib.decompress(by_zlib(raw, LEVEL)) == raw
    assert len(deflated(raw)) <= max(size, 1) + 16


# Merging and undoing.


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (b"A\nb\nc\nd\n", b"a\nb\nc\nD\n", b"A\nb\nc\nD\n"),
        (b"a\nb\nc\nd\ne\n", b"x\na\nb\nc\nd\n", b"x\na\nb\nc\nd\ne\n"),
        (b"a\nd\n", b"a\nb\nc\nd\n", b"a\nd\n"),
        (b"A\nb\nc\nd\n", b"A\nb\nc\nd\n", b"A\nb\nc\nd\n"),
        (b"A\nb\nc\nd\n", b"A\nb\nc\nD\n", b"A\nb\nc\nD\n"),
        (b"A\nb\nc\nd\n", b"X\nb\nc\nd\n", None),
        (b"a\nB\nc\nd\n", b"a\nb\nC\nd\n", None),
        (b"a\nc\nd\n", b"a\nB\nc\nd\n", None),
        (b"a\0b\n", b"a\nb\nc\nD\n", None),
        (b"a\nb\nc\nd", b"A\nb\nc\nd\n", b"A\nb\nc\nd"),
    ],
)
def test_texts_are_merged_where_it_is_clear_how(one: bytes, other: bytes, both: bytes | None) -> None:
    assert merged(b"a\nb\nc\nd\n", one, other) == both
    assert merged(b"a\nb\nc\nd\n", other, one) == both


@given(*(st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"d\n"]), max_size=8).map(b"".join) for _ in range(2)))
def test_a_merge_with_what_did_not_change_is_the_other(origin: bytes, other: bytes) -> None:
    assert merged(origin, origin, other) == other
    assert merged(origin, other, origin) == other


def undone(
    store: Store, numbers: list[int], later: Set[str] = frozenset()
) -> tuple[dict[str, str], dict[str, bytes | None]]:
    tip = store.tip
    assert tip is not None
    now = store.states.files(tip)

    def names(path: str) -> list[str]:
        return [known.rpartition("/")[2] for known in now if known and known.rpartition("/")[0] == path]

    steps = [store.states.differences(record.parent, record.commit) for record in map(store.record, numbers)]
    plan = plan_undo(
        steps, Workspace(now.get, names, store.states.content), lambda path: "step 9" if path in later else None
    )
    states: dict[str, bytes | None] = {}
    for path, state in plan.states.items():
        if state is None or state.oid is None:
            states[path] = None if state is None else b"directory"
        else:
            states[path] = plan.contents.get(state.oid) or store.states.content(state.oid)
    return dict(plan.outcomes), states


LINES = b"1\n2\n3\n4\n5\n"


def test_undo_brings_back_what_steps_changed(store: Store) -> None:
    step(store, {"a.txt": file(b"two\n"), "new": file(b"n"), "d/b.txt": None})
    step(store, {"a.txt": file(b"three\n"), "new": file(b"m")})
    assert undone(store, [2, 1]) == (
        {"a.txt": "restored", "new": "removed", "d/b.txt": "restored"},
        {"a.txt": b"one\n", "new": None, "d/b.txt": b"b\n"},
    )
    assert undone(store, [2])[1] == {"a.txt": b"two\n", "new": b"n"}


def test_undo_keeps_what_somebody_else_changed_since(store: Store) -> None:
    step(store, {"a.txt": file(b"two\n"), "d/b.txt": file(b"B\n")})
    step(store, {"a.txt": file(b"theirs\n")}, "external")
    assert undone(store, [1]) == ({"a.txt": "conflict", "d/b.txt": "restored"}, {"d/b.txt": b"b\n"})
    assert undone(store, [1], {"a.txt"})[0]["a.txt"] == "conflict"


def test_undo_leaves_a_later_edit_of_another_line(store: Store) -> None:
    step(store, {"a.txt": file(LINES)})
    step(store, {"a.txt": file(LINES.replace(b"2", b"two"))})
    step(store, {"a.txt": file(LINES.replace(b"2", b"two").replace(b"5", b"mine"), 0o755)}, "external")
    outcomes, states = undone(store, [2])
    assert (outcomes, states) == ({"a.txt": "restored"}, {"a.txt": LINES.replace(b"5", b"mine")})


def test_undo_of_several_steps_leaves_an_edit_made_between_them(store: Store) -> None:
    step(store, {"a.txt": file(LINES)})
    step(store, {"a.txt": file(LINES.replace(b"1", b"one"))})
    step(store, {"a.txt": file(LINES.replace(b"1", b"one").replace(b"3", b"mine"))}, "external")
    step(store, {"a.txt": file(LINES.replace(b"1", b"one").replace(b"3", b"mine").replace(b"5", b"five"))})
    assert undone(store, [3, 2])[1] == {"a.txt": LINES.replace(b"3", b"mine")}


def test_undo_keeps_a_new_directory_with_somebody_elses_file_in_it(store: Store) -> None:
    step(store, {"n": DIRECTORY, "n/mine": file(b"")})
    step(store, {"n/theirs": file(b"")}, "external")
    assert undone(store, [1]) == ({"n": "kept", "n/mine": "removed"}, {"n/mine": None})


def test_undo_writes_nothing_where_the_directory_is_gone(store: Store) -> None:
    step(store, {"d/b.txt": file(b"B\n")})
    step(store, {"d/b.txt": None})
    step(store, {"d": None}, "external")
    assert undone(store, [2]) == ({"d/b.txt": "conflict"}, {})


def test_undo_of_a_directory_made_a_file_brings_all_of_it_back(store: Store) -> None:
    step(store, {"d": file(b"flat")})
    assert undone(store, [1])[1] == {"d": b"directory", "d/b.txt": b"b\n"}


def test_undo_of_an_undo_is_where_it_was(store: Store) -> None:
    step(store, {"a.txt": file(b"two\n")})
    step(store, {"a.txt": file(b"one\n")})
    assert undone(store, [2])[1] == {"a.txt": b"two\n"}
    assert undone(store, [2, 1]) == ({"a.txt": "kept"}, {})


paths = st.sampled_from(["a", "b", "d/a", "d/e/a", "d/e/b"])
edits = st.lists(st.dictionaries(paths, st.none() | st.sampled_from([b"1", b"2", b"3"]), min_size=1), max_size=5)


@settings(max_examples=60, deadline=None)
@given(edits)
def test_states_follow_a_plain_model_and_undo_of_all_is_the_beginning(
    tmp_path_factory: pytest.TempPathFactory, edits: list[dict[str, bytes | None]]
) -> None:
    with Store.open(tmp_path_factory.mktemp("model") / "store") as store:
        step(store, {"": DIRECTORY, "d": DIRECTORY, "d/e": DIRECTORY}, "baseline")
        model: dict[str, bytes] = {}
        for edit in edits:
            for path, content in edit.items():
                model.pop(path, None)
                if content is not None:
                    model[path] = content
            made = step(store, {path: None if content is None else file(content) for path, content in edit.items()})
            assert contents(store, made.commit) == model
        outcomes, states = undone(store, list(range(len(edits), 0, -1)))
        assert {path for path, outcome in outcomes.items() if outcome == "removed"} == model.keys()
        assert set(outcomes.values()) <= {"removed", "kept"}
        assert states == dict.fromkeys(model)
