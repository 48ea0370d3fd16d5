"""Files of tasks: what they may say, and that all that is wrong in them is named at once."""

from __future__ import annotations

import gzip
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from dulwich.repo import Repo

from ringfence_batch import BatchTask, TaskFileError, check_tasks, read_tasks

TASK = {"id": "a", "workspace": "repo", "task": "Mend it.", "model": "script:model.jsonl"}


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def problems(path: Path) -> tuple[str, ...]:
    with pytest.raises(TaskFileError) as raised:
        read_tasks(path)
    return raised.value.problems


def test_a_line_is_a_task_with_paths_from_the_directory_of_its_file(tmp_path: Path) -> None:
    own = {"sections": ["own.py:tools", "module:tools"], "policies": ["deny:*.py", "rules.toml", "own.py:rule"]}
    (task,) = read_tasks(write_lines(tmp_path / "t.jsonl", TASK | own))
    assert task.workspace == str(tmp_path / "repo")
    assert task.model == f"script:{tmp_path / 'model.jsonl'}"
    assert task.sections == (f"{tmp_path / 'own.py'}:tools", "module:tools")
    assert task.policies == ("deny:*.py", f"{tmp_path / 'rules.toml'}", f"{tmp_path / 'own.py'}:rule")


def test_a_url_stays_as_it_is(tmp_path: Path) -> None:
    (task,) = read_tasks(write_lines(tmp_path / "t.jsonl", TASK | {"workspace": "memory://bucket/repo.zip"}))
    assert task.workspace == "memory://bucket/repo.zip"


def test_a_directory_has_a_task_in_each_file_with_the_name_of_the_file(tmp_path: Path) -> None:
    text = 'workspace = "repo"\ntask = "Mend it."\nmodel = "openai:m"\n[limits]\nseconds = 60\n'
    (tmp_path / "one.toml").write_text(text)
    (tmp_path / "two.json").write_text(json.dumps({name: TASK[name] for name in ("workspace", "task", "model")}))
    write_lines(tmp_path / "more.jsonl", TASK)
    (tmp_path / "README.md").write_text("no task")
    tasks = read_tasks(tmp_path)
    assert [task.id for task in tasks] == ["a", "one", "two"]
    assert tasks[1].limits.seconds == 60


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": ".."},
        {"id": "a/b"},
        {"id": "-rf"},
        {"id": "--all"},
        {"id": "x" * 101},
        {"task": " "},
        {"unknown": 1},
        {"kind": "cloud"},
        {"limits": {"seconds": 0}},
        {"limits": {"second": 1}},
        {"image": "debian"},
        {"checks": ["pytest"]},
        {"score": "pytest"},
        {"kind": "podman", "candidates": 2},
        {"kind": "podman", "candidates": 0, "score": "pytest"},
        {"task": 5},
    ],
)
def test_a_wrong_task_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (problem,) = problems(write_lines(tmp_path / "t.jsonl", TASK | wrong))
    assert problem.startswith(f"{tmp_path / 't.jsonl'}:1: ")


def test_all_wrong_lines_among_ten_thousand_are_named(tmp_path: Path) -> None:
    lines: list[object] = [TASK | {"id": f"task-{number}"} for number in range(10_000)]
    lines[17], lines[4_000], lines[9_999] = "{", TASK | {"id": "TASK-5"}, "[]"
    found = problems(write_lines(tmp_path / "t.jsonl", *lines))
    assert [problem.split(": ")[0].rpartition(":")[2] for problem in found] == ["18", "4001", "10000"]
    assert found[1].endswith(f"the id 'TASK-5' is that of {tmp_path / 't.jsonl'}:6, too")


def test_a_huge_line_is_named_and_those_after_it_are_read(tmp_path: Path) -> None:
    (problem,) = problems(write_lines(tmp_path / "t.jsonl", TASK, "x" * 3_000_000, TASK | {"id": "b"}))
    assert problem.startswith(f"{tmp_path / 't.jsonl'}:2: ")


def test_no_tasks_are_an_error(tmp_path: Path) -> None:
    assert "no tasks" in problems(write_lines(tmp_path / "t.jsonl"))[0]
    assert ".jsonl" in problems(write_lines(tmp_path / "t.txt", TASK))[0]


def test_the_hash_tells_tasks_apart() -> None:
    task = BatchTask("a", "/repo", "Mend it.", "openai:m")
    assert task.hash == BatchTask("a", "/repo", "Mend it.", "openai:m").hash
    assert task.hash != BatchTask("a", "/repo", "Mend that.", "openai:m").hash


def test_what_a_task_names_and_is_not_there_is_told_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("NO_SECRET", raising=False)
    (tmp_path / "repo").mkdir()
    (tmp_path / "model.jsonl").write_text('{"text": "Done."}\n')
    good = TASK | {"workspace": str(tmp_path / "repo"), "model": f"script:{tmp_path / 'model.jsonl'}"}
    (tmp_path / "half.tgz").write_bytes(gzip.compress(os.urandom(5000))[:2000])
    (tmp_path / "half.zip").write_bytes(b"PK\x05\x06")
    with zipfile.ZipFile(tmp_path / "flipped.zip", "w") as zipped:
        zipped.writestr("a.txt", "one one one")
    flipped = (tmp_path / "flipped.zip").read_bytes().replace(b"one one", b"one two")
    (tmp_path / "flipped.zip").write_bytes(flipped)
    (tmp_path / "no.rar").write_text("")
    Repo.init(tmp_path / "git", mkdir=True).close()
    wrong: list[dict[str, Any]] = [
        *({"workspace": name} for name in ("half.tgz", "half.zip", "flipped.zip", "no.rar")),
        {"workspace": "git", "revision": "v9"},
        {"workspace": "repo", "revision": "HEAD"},
        {"workspace": "nowhere"},
        {"model": "opnai:gpt"},
        {"model": "openai:gpt"},
        {"policies": ["nonsense"]},
        {"sections": [f"{tmp_path}/own.py:tools"]},
        {"kind": "podman", "secrets": ["NO_SECRET"]},
    ]
    records = [good, *(good | {"id": f"wrong-{number}"} | more for number, more in enumerate(wrong))]
    with pytest.raises(TaskFileError) as raised:
        check_tasks(read_tasks(write_lines(tmp_path / "t.jsonl", *records)))
    assert [problem.partition(":")[0] for problem in raised.value.problems] == [f"wrong-{n}" for n in range(len(wrong))]
