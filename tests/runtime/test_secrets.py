"""Secrets are masked in what leaves a session, whatever form they have, and neither they nor masks are written."""

from __future__ import annotations

import base64
import html
import json
import logging
import re
import shlex
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus

import pytest
from command_line import ringfence_text
from hypothesis import given
from hypothesis import strategies as st
from mcp_servers import ERAS, http_server, result
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from served import ServedWorkspace, client_of, open_served

from ringfence import (
    Filesystem,
    InMemoryFilesystem,
    MarkdownSection,
    Prompt,
    Session,
    Tool,
    ToolContext,
    ToolResult,
)
from ringfence.adapters import ScriptedAdapter, ToolExecutor
from ringfence.adapters.model import ModelText
from ringfence.filesystem import HiddenFiles
from ringfence.runtime import Cancellation, MaskedStream, Receipt, Secrets, ToolCallStarted, ToolInvoked, masked_logs
from ringfence.runtime.kept_results import kept_result
from ringfence.telemetry import Telemetry
from ringfence_tools import VfsToolsSection

VALUE = "s3cret/Valü&e+7 <x>'"
TOKEN = "ghp_0123456789abcdefghijABCDEFGHIJ"


def secrets() -> Secrets:
    return Secrets({"TOKEN": TOKEN, "ODD": VALUE})


@pytest.mark.parametrize(
    "form",
    [
        VALUE,
        quote(VALUE),
        quote(VALUE, safe=""),
        quote_plus(VALUE),
        re.sub("%..", lambda found: found[0].lower(), quote(VALUE, safe="")),
        html.escape(VALUE),
        json.dumps(VALUE)[1:-1],
        json.dumps(VALUE, ensure_ascii=False)[1:-1],
        repr(VALUE)[1:-1],
    ],
)
def test_a_value_is_masked_in_every_usual_form(form: str) -> None:
    assert secrets().mask(f"a {form} b") == "a [ODD] b"
    assert secrets().mask(f"a {form} b".encode()) == b"a [ODD] b"


HARD = "a<b>&'\"/\\ $é\n\tü🎉=+%;z"
FORMS_OF_HARD = {
    "Python": repr(HARD)[1:-1],
    "Python's ascii": ascii(HARD)[1:-1],
    "bytes of Python": repr(HARD.encode())[2:-1],
    "JSON": json.dumps(HARD)[1:-1],
    "JSON in JSON": json.dumps(json.dumps(HARD))[1:-1],
    "JSON in JSON in JSON": json.dumps(json.dumps(json.dumps(HARD, ensure_ascii=False))),
    "Go's JSON": json.dumps(HARD, ensure_ascii=False)[1:-1]
    .replace("<", "\\u003c")
    .replace(">", "\\u003e")
    .replace("&", "\\u0026"),
    "Go's %q": "a<b>&'\\\"/\\\\ $é\\n\\tü🎉=+%;z",
    "Go's %+q": "a<b>&'\\\"/\\\\ $\\u00e9\\n\\t\\u00fc\\U0001f389=+%;z",
    "PHP's JSON": json.dumps(HARD)[1:-1].replace("/", "\\/"),
    "PHP's JSON for HTML": "a\\u003Cb\\u003E\\u0026\\u0027\\u0022\\/\\\\ $\\u00e9\\n\\t\\u00fc\\ud83c\\udf89=+%;z",
    "PHP's addslashes": "a<b>&\\'\\\"/\\\\ $é\n\tü🎉=+%;z",
    "JavaScript": "a\\x3Cb\\x3E\\x26\\x27\\x22\\x2F\\\\ $\\xE9\\n\\t\\xFC\\u{1F389}=+%;z",
    "HTML": html.escape(HARD),
    "HTML of PHP": html.escape(HARD).replace("&#x27;", "&#039;"),
    "HTML of jinja": html.escape(HARD).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),
    "HTML with names": html.escape(HARD).replace("é", "&eacute;").replace("ü", "&uuml;"),
    "HTML in HTML": html.escape(html.escape(HARD)),
    "XML": html.escape(HARD).replace("\n", "&#10;").replace("\t", "&#x9;").replace("&#x27;", "&apos;"),
    "HTML in JSON": json.dumps(html.escape(HARD)),
    "a shell's single quotes": shlex.quote(HARD)[1:-1],
    "set -x": HARD.replace("'", "'\\''"),
    "printf %q": "a\\<b\\>\\&\\'\\\"/\\\\\\ \\$é\\n\\tü🎉=+%\\;z",
    "$'...'": "a<b>&\\'\"/\\\\ $\\303\\251\\n\\t\\303\\274\\360\\237\\216\\211=+%;z",
    "a URL": quote(HARD, safe=""),
    "a URL in a URL": quote(quote(HARD)),
    "a form": quote_plus(HARD),
    "JavaScript's encodeURI": quote(HARD, safe="&'/$=+;"),
    "CRLF": HARD.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("form", FORMS_OF_HARD.values(), ids=FORMS_OF_HARD)
def test_a_value_is_masked_as_languages_and_formats_quote_it_also_in_a_stream(form: str) -> None:
    known = Secrets({"HARD": HARD})
    masked = known.mask(f"before {form} after")
    assert "before" in masked
    assert masked.endswith(" after")
    assert re.fullmatch(r"before [\"\\]*\[HARD\][\"\\]* after", masked)
    data = f"before {form} after".encode()
    for cut in range(0, len(data), 3):
        stream = MaskedStream(known)
        assert (stream.take(data[:cut]) + stream.take(data[cut:]) + stream.end()).decode() == masked


@pytest.mark.parametrize("value", ["p%25ss-word-of-db", "%2525%25-word", "a=1&amp;b-secret-x", "&amp;amp;&#38;secret"])
@pytest.mark.parametrize("requote", [partial(quote, safe=""), html.escape])
def test_a_value_that_is_quoted_itself_is_masked_when_it_is_quoted_again(value: str, requote: Any) -> None:
    text = value
    for _ in range(4):
        assert Secrets({"TOKEN": value}).mask(f"x {text} x") == "x [TOKEN] x"
        text = requote(text)


def test_a_mask_in_quoted_json_leaves_it_json() -> None:
    known = Secrets({"HARD": '"quoted"/<&>'})
    for depth in range(3):
        text: Any = {"a": 'x"quoted"/<&>x', "b": '\\"quoted"/<&>'}
        for _ in range(depth + 1):
            text = json.dumps(text)
        for _ in range(depth + 1):
            text = json.loads(known.mask(text))
        assert text["a"] == "x[HARD]x"
        assert text["b"] in ("[HARD]", "\\[HARD]")


@given(st.text(st.characters(codec="utf-8"), min_size=8, max_size=30), st.integers(0, 40), st.integers(0, 3))
def test_any_value_is_masked_in_json_at_any_depth_and_at_any_cut(value: str, cut: int, depth: int) -> None:
    known = Secrets({"ANY": value})
    text = value
    for _ in range(depth):
        text = json.dumps(text)[1:-1]
    data = text.encode()
    stream = MaskedStream(known)
    assert stream.take(data[:cut]) + stream.take(data[cut:]) + stream.end() == b"[ANY]"


@pytest.mark.parametrize(
    ("value", "shown", "masked"),
    [
        ("postgres://me:hunter2hunter@db/x", "PGPASSWORD=hunter2hunter psql", "PGPASSWORD=[V] psql"),
        ("postgres://me:hunter2%40hunter@db/x", "hunter2@hunter", "[V]"),
        ("redis://:hunter2hunter@cache:6379/0", "auth hunter2hunter", "auth [V]"),
        ("https://ghp_0123456789abcdef@github.com/a/b", "token ghp_0123456789abcdef", "token [V]"),
        ("postgres://readonly@db/x", "readonly", "readonly"),
        ("postgres://me:password@db/x", "password", "password"),
        ("https://a.example/x?key=0123abcd4567efgh&n=1", "0123abcd4567efgh", "[V]"),
        ("Server=db;Password=hunter2hunter;Encrypt=yes", "hunter2hunter", "[V]"),
        ("-----BEGIN KEY-----\\nMIIEvQIBADANBg\\n-----END KEY-----", "MIIEvQIBADANBg", "[V]"),
        ("short1\nshort2\nshort3", "short1\r\nshort2\r\nshort3", "[V]"),
        ("short1\nshort2\nshort3", "a: short1\\nshort2\\nshort3", "a: [V]"),
    ],
)
def test_the_secrets_inside_of_a_value_are_masked(value: str, shown: str, masked: str) -> None:
    assert Secrets({"V": value}).mask(shown) == masked


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        ("\ufeffAPI_KEY=hunter2hunter\n", "hunter2hunter"),
        ("\ufeff\r\nAPI_KEY=hunter2hunter\r\n", "hunter2hunter"),
        ('API_KEY="hunter2\\"hunter"\n', 'hunter2"hunter'),
        ('API_KEY="hunter2\\"hunter"\n', 'hunter2\\"hunter'),
        ("API_KEY='hunter2\"hunter' # why\n", 'hunter2"hunter'),
        ("API_KEY=`hunter2hunter`\n", "hunter2hunter"),
        ('API_KEY="one1\ntwo2\n"\nB=1\n', "one1\ntwo2\n"),
        ('API_KEY="one1\\ntwo2\\n"\nB=1\n', "one1\ntwo2\n"),
        ('API_KEY="-----BEGIN KEY-----\nMIIEvQIBADANBg\n-----END KEY-----"\n', "MIIEvQIBADANBg"),
        ("API_KEY='half\nB=1\nC='hunter2hunter'\n", "hunter2hunter"),
        ("API_KEY=hunter2hunter\nAPI_KEY=another2hunter\n", "hunter2hunter"),
        ("API_KEY=hunter2hunter\rB=1\r", "hunter2hunter"),
    ],
)
def test_a_setting_is_read_as_programs_read_it(content: str, secret: str) -> None:
    known = Secrets()
    known.add_settings(content.encode())
    assert known.mask(f"a {secret} b") in ("a [API_KEY] b", "a [C] b")
    assert known.mask("B=1") == "B=1"


def test_a_setting_in_utf_16_is_read() -> None:
    known = Secrets()
    known.add_settings("API_KEY=hunter2hunter\n".encode("utf-16"))
    assert known.mask("hunter2hunter") == "[API_KEY]"


def test_many_secrets_are_looked_for_at_once_in_each_piece_of_a_stream() -> None:
    """The work for a piece is a search for all beginnings, whatever the number and the length of secrets is."""
    lines = [f"{number:02}{base64.b64encode(bytes([number] * 45)).decode()}" for number in range(40)]
    known = Secrets({"PEM": "\n".join(lines), **{f"K{number}": f"{number:03}-secret-value" for number in range(100)}})
    stream = MaskedStream(known)
    shown = stream.take(b"x" * 60_000 + lines[7].encode() + b" 012-secret-value " + b"y" * 60_000) + stream.end()
    assert shown == b"x" * 60_000 + b"[PEM] [K12] " + b"y" * 60_000


@pytest.mark.parametrize("value", ["-----BEGIN-KEY", "'$-!correct-horse", r"\\\\correct-horse", r"a\"\"correct-horse"])
def test_many_backslashes_do_not_take_the_square_of_their_number(value: str) -> None:
    """It would be minutes."""
    known, row = Secrets({"TOKEN": value}), "\\" * 200_000
    for text in (row + value[:5], row + "'" + row + value[:3] + row + "x"):
        assert known.mask(text) == text
        stream = MaskedStream(known)
        assert stream.take(text.encode()) + stream.take(b"x") + stream.end() == text.encode() + b"x"
    assert known.mask(f"x{row} {row}{value}").endswith("[TOKEN]")


def test_backslashes_in_a_row_are_masked_however_they_are_quoted() -> None:
    known = Secrets({"SHARE": r"\\\\server\\correct\"horse\\"})
    text, quoted = r"\\\\server\\correct\"horse\\", [r"%5C%5C%5C%5Cserver%5C%5Ccorrect%5C%22horse%5C%5C"]
    quoted += [r"\x5c\x5c\x5c\x5cserver\x5C\x5Ccorrect\x5c\x22horse\x5c\x5c"]
    for _ in range(5):
        quoted.append(text)
        text = json.dumps(text)[1:-1]
    assert [known.mask(f"x{each}x") for each in quoted] == ["x[SHARE]x"] * len(quoted)


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes])
def test_base64_is_masked_at_every_offset_and_across_lines(encode: Any) -> None:
    around = product((b"", b"x", b"xy", b"user:", b"x" * 40, b"x" * 41, b"x" * 42), (b"", b"\n", b"and more"))
    for (before, after), (name, value) in product(around, {"TOKEN": TOKEN, "ODD": VALUE}.items()):
        encoded = encode(before + value.encode() + after).decode()
        masked = secrets().mask(encoded)
        assert f"[{name}]" in masked
        left = masked.replace(f"[{name}]", "").replace("\n", "")
        assert len(left) <= len(encoded.replace("\n", "")) - len(value) * 8 // 6 + 2


def test_a_value_of_several_lines_is_masked_line_by_line() -> None:
    known = Secrets({"KEY": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQ\n-----END PRIVATE KEY-----\n"})
    assert known.mask("1: MIIEvQIBADANBg\n2: kqhkiG9w0BAQ") == "1: [KEY]\n2: [KEY]"
    assert known.mask("-----BEGIN PRIVATE KEY-----") == "-----BEGIN PRIVATE KEY-----"


def test_the_longest_value_wins_and_a_short_one_is_not_masked() -> None:
    known = Secrets({"PASSWORD": "hunter2hunter", "URL": "db://hunter2hunter@host", "PIN": "1234567"})
    assert known.mask("db://hunter2hunter@host hunter2hunter 1234567") == "[URL] [PASSWORD] 1234567"


def test_the_settings_of_a_file_are_masked_but_for_comments_and_what_its_sample_has() -> None:
    known = Secrets()
    content = (
        "# OLD=commented-out-value\nexport A_KEY = 'quoted value # 1' # why\nTOKEN=plain-value # why\nC='it\n"
        "KEY=short\nD=in-the-sample-1234567\n"
    )
    known.add_settings(content.encode() + b"PASS=\xffbroken-bytes\n", public=b"D=in-the-sample-1234567\n")
    assert known.mask(content.encode() + b"\xffbroken-bytes") == (
        b"# OLD=commented-out-value\nexport A_KEY = '[A_KEY]' # why\nTOKEN=[TOKEN] # why\nC='it\n"
        b"KEY=short\nD=in-the-sample-1234567\n[PASS]"
    )


@pytest.mark.parametrize(
    ("setting", "is_masked"),
    [
        ("NODE_ENV=development", False),
        ("SECRET_HOST=localhost", False),
        ("DB_PASSWORD=password", False),
        ("PROJECT=my_little_project", False),
        ("LOGIN=correct-horse-battery", True),
        ("URL=http://localhost:8000/a", False),
        ("FLASK_APP=application.py", False),
        ("MODULE=mysite.settings", False),
        ("SOURCE=/workspace/src", False),
        ("REGION=eu-central-1", False),
        ("ZONE=Europe/Berlin", False),
        ("MODEL=gpt-4o-mini", False),
        ("MODEL=bert-base-uncased", False),
        ("BASE=https://api.example.com/v1", False),
        ("SINCE=2024-01-01", False),
        ("GCP_PROJECT=my-little-project", False),
        ("ADMIN_EMAIL=admin@example.com", False),
        ("ADMIN_EMAIL_PASSWORD=admin@example.com", True),
        ("DSN=abcdefgh@example.com", True),
        ("AUTHOR=Jane Smith", False),
        ("AUTHORIZATION=my-little-word", True),
        ("TOKENIZER=bert-base-uncased", False),
        ("TOKENIZER_TOKEN=correct-horse-battery", True),
        ("AUTH_USER_MODEL=accounts.User", False),
        ("PASSWORD_RESET_URL=/auth/reset", False),
        ("WEBHOOK_URL=https://hooks.example.com/T0000AB00/B1CDqXyZ", True),
        ("API_KEY_HEADER=X-Api-Key", False),
        ("JWT_PRIVATE_KEY_PATH=keys/private", False),
        ("PASSWORD_FILE=hunter2hunter", True),
        ("GOOGLE_APPLICATION_CREDENTIALS=./service/account.json", False),
        ("DB_PASSWORD=${DB_PASSWORD}", False),
        ("PASSWORD=mysite.settings", True),
        ("API_KEY=application", True),
        ("DB=postgres://me:pw@host/name", True),
        ("DB=postgres://localhost@host", True),
        ("NAME=hunter2hunter", True),
        ("NAME=!!!###$$$", True),
        ("ID=123e4567-e89b-12d3-a456-426614174000", True),
        ("STRIPE=sk_live_51H8xABCDEFG", True),
        ("SLACK=https://slack.example.com/services/T00000000/XXXXXXXXXXXXXXXXXXXX", True),
    ],
)
def test_a_setting_that_is_no_secret_stays_readable(setting: str, is_masked: bool) -> None:
    known = Secrets()
    known.add_settings(setting.encode())
    value = setting.partition("=")[2]
    assert (known.mask(value) != value) is is_masked


@dataclass(frozen=True, slots=True)
class Nested:
    text: str
    items: tuple[Mapping[str, object], ...] = ()


def test_a_value_without_secrets_is_the_same_object_and_nested_ones_are_masked() -> None:
    known = secrets()
    clean = Nested("nothing", ({"a": [b"x", 1, None]},))
    assert known.mask(clean) is clean
    assert known.mask(Nested("a", ({"k": [TOKEN, TOKEN.encode()]},))) == Nested("a", ({"k": ["[TOKEN]", b"[TOKEN]"]},))
    deep: Any = TOKEN
    for _ in range(100_000):
        deep = [deep]
    assert TOKEN not in str(known.mask(deep))


def test_a_mask_does_not_show_values_in_its_repr() -> None:
    assert TOKEN not in repr(secrets())


@given(st.data())
def test_a_stream_in_pieces_is_masked_as_the_whole_is(data: st.DataObject) -> None:
    known = Secrets({"A": "abcabcabd", "B": "abcabcabdabcabcab", "C": "xxxxabcabc"})
    pieces = ["abcabcabd", "abc", "ab", "x", "xxxxabcabc", "\n", "-", base64.b64encode(b"abcabcabdabcabcab").decode()]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=12))).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    stream = MaskedStream(known)
    shown = b"".join(stream.take(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)) + stream.end()
    assert shown == known.mask(text)


def test_a_stream_holds_back_nothing_but_what_may_be_the_beginning_of_a_secret() -> None:
    stream = MaskedStream(secrets())
    assert stream.take(b"progress 10%") == b"progress 10%"
    assert stream.take(b" ghp_0123") == b" "
    assert stream.take(b"no") == b"ghp_0123no"
    assert stream.take(TOKEN[:20].encode()) == b""
    assert stream.take(TOKEN[20:].encode()) == b"[TOKEN]"


class World:
    """The file tools over a file that has a secret in it."""

    def __init__(self, *tools: Tool[Any, Any]) -> None:
        self.files = InMemoryFilesystem()
        self.files.write("config.py", f"a = 1\nkey = '{TOKEN}'\nb = 2\n")
        self.session = Session(secrets=secrets())
        self.events: list[object] = []
        for kind in (Receipt, ToolInvoked, ToolCallStarted):
            self.session.dispatcher.subscribe(kind, self.events.append)
        section = VfsToolsSection(session=self.session, filesystem=self.files)
        more = MarkdownSection(title="More", key="more", template="More.", tools=tools)
        self.prompt = Prompt(ns="tests", key="secrets", sections=[section, more])
        self.executor = ToolExecutor(prompt=self.prompt, session=self.session)

    def call(self, name: str, **arguments: object) -> ToolResult[Any]:
        with self.prompt.resources:
            ended = self.executor.execute(name, arguments)
        left = repr((ended.text, ended.result, ended.receipt.to_json(), self.events, self.session[ToolInvoked].all()))
        assert TOKEN not in left
        return ended.result


def test_the_result_of_a_read_is_masked_and_counts_as_no_read() -> None:
    world = World()
    result = world.call("read_file", file_path="config.py")
    assert "[TOKEN]" in result.text()
    assert not world.call("write_file", file_path="config.py", content="nothing\n").success
    assert not world.call("rm", path="config.py").success
    assert world.call("read_file", file_path="config.py", offset=0, limit=1).success
    assert world.call("edit_file", file_path="config.py", old_string="a = 1", new_string="a = 9").success
    assert world.files.read("config.py").content.startswith(f"a = 9\nkey = '{TOKEN}'")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("write_file", {"file_path": "new.py", "content": "key = '[TOKEN]'\n"}),
        ("write_file", {"file_path": "new.py", "content": f"key = '{TOKEN}'\n"}),
        ("edit_file", {"file_path": "config.py", "old_string": "a = 1", "new_string": "a = '[TOKEN]'"}),
        ("edit_file", {"file_path": "config.py", "old_string": TOKEN, "new_string": "x"}),
        (
            "apply_patch",
            {"patch": "--- a/config.py\n+++ b/config.py\n@@ -1,2 +1,2 @@\n-a = 1\n+a = 2\n key = '[TOKEN]'\n"},
        ),
    ],
)
def test_neither_a_mask_nor_a_value_is_written(name: str, arguments: Mapping[str, object]) -> None:
    world = World()
    world.call("grep", pattern="key")
    world.call("read_file", file_path="config.py", limit=1)
    before = world.files.snapshot()
    result = world.call(name, **arguments)
    assert not result.success
    assert "[TOKEN]" in result.message
    assert world.files.changes(before) == []
    assert [receipt.outcome for receipt in world.session[Receipt].all()][-1] == "denied"


@dataclass(frozen=True)
class Line:
    text: str


@pytest.mark.parametrize("text", ["[TOKEN]", TOKEN, json.dumps(json.dumps(TOKEN + "&"))])
def test_a_tool_that_declares_no_writes_is_denied_when_it_has_written_with_a_mask(text: str) -> None:
    def append(params: Line, *, context: ToolContext) -> ToolResult[None]:
        """Append a line to the notes, if it is a long one."""
        if len(params.text) > 5:
            context.resources.get(Filesystem).write("notes", params.text, mode="append")
        return ToolResult("appended")

    world = World(Tool.wrap(append))
    world.call("grep", pattern="key")
    result = world.call("append", text=text)
    assert not result.success
    assert "[TOKEN] stands for a secret" in result.message
    assert not world.files.exists("notes")
    assert [receipt.outcome for receipt in world.session[Receipt].all()][-1] == "denied"
    assert world.call("append", text="another").success


def test_a_tool_that_changes_no_file_may_be_given_a_mask() -> None:
    def look_up(params: Line, *, context: ToolContext) -> ToolResult[None]:
        """Look something up."""
        return ToolResult(f"no {params.text}")

    world = World(Tool.wrap(look_up))
    world.call("grep", pattern="key")
    assert world.call("look_up", text="[TOKEN]").message.startswith("no [TOKEN]")


def test_a_name_in_brackets_is_written_while_nothing_was_masked() -> None:
    world = World()
    assert world.call("write_file", file_path="new.py", content="settings[TOKEN]\n").success


def test_grep_shows_the_mask() -> None:
    assert "[TOKEN]" in World().call("grep", pattern="key").text()


def test_errors_of_handlers_and_what_they_log_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    def fail(params: None, *, context: ToolContext) -> ToolResult[None]:
        """Fail."""
        raise KeyError(f"no {TOKEN}")

    world = World(Tool.wrap(fail))
    with caplog.at_level(logging.DEBUG), masked_logs(secrets()):
        result = world.call("fail")
    assert "[TOKEN]" in result.message
    assert TOKEN not in caplog.text
    assert all(TOKEN not in logging.Formatter().format(record) for record in caplog.records)


def test_a_handler_gets_the_files_as_they_are_and_its_message_is_masked() -> None:
    def check(params: None, *, context: ToolContext) -> ToolResult[None]:
        """Check."""
        found = context.resources.get(Filesystem).read("config.py").content
        return ToolResult(f"it is {found}", success=TOKEN in found)

    assert World(Tool.wrap(check)).call("check").message.startswith("it is a = 1\nkey = '[TOKEN]'")


@dataclass(frozen=True)
class Odd:
    text: str

    def __copy__(self) -> Odd:
        raise RuntimeError("there is one of it")


@pytest.mark.parametrize("odd", [Odd(TOKEN), Odd("nothing"), "deep"])
def test_a_value_that_cannot_be_masked_is_left_out(odd: object) -> None:
    value: list[Any] = [odd]
    for _ in range(100_000 if odd == "deep" else 1):
        value = [value, TOKEN]

    def give(params: None, *, context: ToolContext) -> ToolResult[list[object]]:
        """Give it."""
        return ToolResult.ok(value)

    world = World(Tool.wrap(give))
    with world.prompt.resources:
        ended = world.executor.execute("give", {})
    assert TOKEN not in ended.text
    assert len(world.session[Receipt].all()) == 1


@dataclass(frozen=True)
class Halves:
    """No field has the token, and its text for the model has."""

    head: str
    tail: str

    def render(self) -> str:
        return f"it is {self.head}{self.tail}"


class Pair(NamedTuple):
    name: str
    value: str


class Joined(list[str]):
    def __str__(self) -> str:
        return "".join(self)

    def render(self) -> str:
        return str(self)


class Opaque:
    """No collection and no dataclass: its repr, and what JSON it has, are its text."""

    def __repr__(self) -> str:
        return f"Opaque({TOKEN})"


class Raising:
    def render(self) -> str:
        raise ValueError(TOKEN)


RESULTS: list[Any] = [
    TOKEN,
    TOKEN.encode(),
    bytearray(TOKEN.encode()),
    memoryview(TOKEN.encode()),
    Pair("a", TOKEN),
    [Pair("a", TOKEN)],
    {TOKEN: 1},
    {"a": {TOKEN}},
    frozenset((TOKEN,)),
    deque([TOKEN]),
    MappingProxyType({"a": TOKEN}),
    OrderedDict(a=[TOKEN]),
    Path("/srv") / TOKEN,
    {Path(TOKEN): Pair("a", TOKEN)},
    Nested("a", ({"k": Pair("a", TOKEN)},)),
    Halves(TOKEN[:9], TOKEN[9:]),
    Joined((TOKEN[:9], TOKEN[9:])),
    Opaque(),
    [Opaque()],
    {"a": Opaque()},
    Raising(),
    ValueError(TOKEN),
    SimpleNamespace(a=TOKEN),
    Nested(json.dumps(TOKEN), ({"a": json.dumps({"b": TOKEN})},)),
]


@pytest.mark.parametrize("value", RESULTS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("success", [True, False])
def test_whatever_a_result_is_its_text_for_the_model_is_masked_last(value: Any, success: bool) -> None:
    def give(params: None, *, context: ToolContext) -> ToolResult[list[object]]:
        """Give it."""
        return ToolResult("given", [value], success)

    world, told = World(Tool.wrap(give)), list[str]()
    world.session.dispatcher.subscribe(ToolInvoked, lambda event: told.append(event.rendered_output))
    adapter = ScriptedAdapter([{"tool_calls": [{"name": "give", "id": "one"}]}, {"text": "Done."}])
    adapter.evaluate(world.prompt, session=world.session)
    kept = kept_result(world.session, ".ringfence/results/one") or ""
    answer = adapter.requests[-1]["messages"][-1]["content"]
    assert answer.startswith("given")
    shown = (answer, kept, *told, repr(world.session[Receipt].all()[-1].to_json()))
    assert not any(part in text for part in (TOKEN[:9], TOKEN[-9:]) for text in shown)


def test_a_text_that_was_masked_when_it_was_rendered_counts_as_no_read() -> None:
    def show(params: None, *, context: ToolContext) -> ToolResult[Halves]:
        """Show a file."""
        text = context.resources.get(Filesystem).read("config.py").content
        at = text.index(TOKEN) + 9
        return ToolResult.ok(Halves(text[:at], text[at:]))

    world = World(Tool.wrap(show))
    assert world.call("show").success
    assert not world.session[Receipt].all()[-1].read


def test_descriptions_of_tools_are_masked() -> None:
    def note(params: None, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult("noted")

    tool = Tool[None, None](name="note", description=f"Note {TOKEN}.", handler=note)
    section = MarkdownSection(title="T", key="t", template="Note.", tools=[tool])
    adapter = ScriptedAdapter([{"tool_calls": [{"name": "note"}]}, {"text": "Done."}])
    adapter.evaluate(Prompt(ns="tests", key="told", sections=[section]), session=Session(secrets=secrets()))
    assert TOKEN not in repr(adapter.requests)


def test_a_name_of_a_file_is_masked_in_the_receipt() -> None:
    def make(params: None, *, context: ToolContext) -> ToolResult[None]:
        """Make a file."""
        context.resources.get(Filesystem).write(TOKEN, "x")
        return ToolResult("made")

    world = World(Tool.wrap(make))
    assert world.call("make").success
    assert [change.path for change in world.session[Receipt].all()[-1].changes] == ["[TOKEN]"]
    assert world.files.exists(TOKEN)


def test_spans_are_masked() -> None:
    world, exporter, provider = World(), InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    Telemetry(tracer_provider=provider, capture_content=True).observe(world.session)
    turns = [
        {"text": TOKEN, "tool_calls": [{"name": "read_file", "arguments": {"file_path": "config.py"}}]},
        {"tool_calls": [{"name": "ls", "arguments": {"path": TOKEN}}, {"name": TOKEN, "arguments": TOKEN}]},
        {"text": f"Done with {TOKEN}."},
    ]
    ScriptedAdapter(turns).evaluate(world.prompt, session=world.session)
    spans = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert spans.count("[TOKEN]") >= 5
    assert TOKEN not in spans


@pytest.mark.parametrize("era", ERAS)
def test_clients_of_the_mcp_server_get_masks(tmp_path: Path, era: str) -> None:
    files = InMemoryFilesystem()
    files.write("config.py", f"key = '{TOKEN}'\n")

    def sections(session: Session, shared: bool) -> list[Any]:
        return [VfsToolsSection(session=session, filesystem=files, shared_session=shared)]

    workspace = ServedWorkspace(tmp_path, files, sections, (), lambda: None, secrets=secrets())
    with http_server(workspace) as server:
        session = server.session_of(era)
        read = server.call("read_file", session, file_path="config.py")
        assert "[TOKEN]" in json.dumps(read)
        assert "expected=" not in json.dumps(read)
        assert "[TOKEN]" in json.dumps(server.call("grep", session, pattern="key"))
        assert server.call("write_file", session, file_path="b.py", content=f"key = '{TOKEN}'\n")["isError"]
        resource = result(server.asked("resources/read", {"uri": "workspace:///config.py"}, server.session()))
        assert TOKEN not in json.dumps((read, resource))
        assert "[TOKEN]" in json.dumps(resource)


def test_what_a_model_says_is_masked_in_pieces_and_as_a_whole() -> None:
    session, heard = Session(secrets=secrets()), list[str]()
    session.dispatcher.subscribe(ModelText, lambda event: heard.append(event.text))
    prompt = Prompt(ns="tests", key="said", sections=[MarkdownSection(title="T", key="t", template=f"Use {TOKEN}.")])
    adapter = ScriptedAdapter([{"text": f"I know {TOKEN}. {TOKEN[:9]}"}])
    requests = list[object]()
    respond = adapter.respond

    def spy(request: Any) -> Any:
        requests.append(request)
        for piece in ("I know ", TOKEN[:9], TOKEN[9:], ".", f" {TOKEN[:9]}"):
            request.on_text(piece, 1)
        return respond(request)

    adapter.respond = spy
    assert adapter.evaluate(prompt, session=session).text == f"I know [TOKEN]. {TOKEN[:9]}"
    assert "".join(heard) == f"I know [TOKEN]. {TOKEN[:9]}"
    assert TOKEN not in repr(requests)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("NO_SUCH_VARIABLE", "is not set"),
        ("TOKEN=env:NO_SUCH_VARIABLE", "is not set"),
        (f"TOKEN={TOKEN}", "does not belong on a command line"),
        ("1BAD", "write NAME"),
        ("A=env:", "write NAME"),
    ],
)
@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_secret_that_cannot_be_had_is_refused_before_anything_starts(
    tmp_path: Path, command: str, spec: str, words: str
) -> None:
    more = ("--task", "x", "--model", "script:none") if command == "run" else ()
    ended = ringfence_text(command, tmp_path, "--workspace", "podman", "--secret", spec, *more)
    assert ended.returncode == 2
    assert words in " ".join(ended.stderr.replace("│", "").split())
    assert TOKEN not in ended.stderr


def test_a_secret_is_for_commands(tmp_path: Path) -> None:
    ended = ringfence_text(
        "run", tmp_path, "--secret", "HOME", "--workspace", "disk", "--task", "x", "--model", "script:n"
    )
    assert ended.returncode == 2
    assert "--workspace podman" in ended.stderr


@pytest.mark.parametrize("place", ["disk", "memory", "view"])
def test_values_of_hidden_files_are_masked_wherever_they_stand(tmp_path: Path, place: Any) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/.env").write_text(f"export API_KEY='{TOKEN}'\nMODE_KEY=as-in-the-sample\n")
    (tmp_path / "app/.env.example").write_text("API_KEY=\nMODE_KEY=as-in-the-sample\n")
    (tmp_path / "config.py").write_text(f"key = '{TOKEN}'\nmode = 'as-in-the-sample'\n")
    kind = "disk" if place == "view" else place
    served = open_served(tmp_path, kind, hide=HiddenFiles(), read_only=place == "view")
    with closing(served), closing(client_of(served)) as client:
        answer = client.call("read_file", {"file_path": "config.py"}, Cancellation()).model_dump_json()
    assert "key = '[API_KEY]'" in answer
    assert "as-in-the-sample" in answer
    assert TOKEN not in answer
