"""Task folders of Harbor and Terminal-Bench become rows, which the environment `shell` plays; others are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.tiny.make_image import PROGRAMS, layer, program_files, write_image
from roll.agents.containers.container import ContainerSettings
from roll.data.terminal_needs import largest, limits_of
from roll.data.terminal_tasks import main, terminal_task
from roll.errors import BAD_INPUT, DataError, FaultCode
from tests.faults import assert_fault
from tests.unit.containers.test_shell import played
from tests.unit.environments.running import says

HARBOR = {
    "task.toml": 'version = "1.0"\n[environment]\ndocker_image = "some/image:1"\n',
    "instruction.md": "Write `hello` into /greeting.\n",
    "tests/test.sh": "#!/bin/bash\n[[ $(cat /greeting) == hello ]] && echo 0.5 > /logs/verifier/reward.txt\n",
    "tests/deep/file": "x",
}
TERMINAL_BENCH = {
    "task.yaml": "instruction: Write `hello` into /greeting.\nparser_name: pytest\n",
    "run-tests.sh": "#!/bin/bash\nbash $TEST_DIR/check.sh\n",
    "tests/check.sh": "[[ $(cat /greeting) == hello ]]\n",
    "Dockerfile": "FROM debian\n",
}


def task(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an image for the task `hello`."""
    folder = tmp_path_factory.mktemp("images")
    write_image(folder / "hello", [layer(program_files((*PROGRAMS, "bash")), {"bin": "usr/bin"})])
    return folder


@pytest.mark.parametrize(("files", "paid"), [(HARBOR, 0.5), (TERMINAL_BENCH, 1.0)])
def test_a_task_is_played(tmp_path: Path, images: Path, cache: Path, files: dict[str, str], paid: float) -> None:
    task(tmp_path / "hello", files)
    words = [str(tmp_path / "hello"), "--output", str(tmp_path / "rows.jsonl"), "--images", str(images)]
    assert main(words) == 0
    [row] = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["tag"] == "terminal" and row["messages"][0]["content"] == "Write `hello` into /greeting."
    cheat = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
    for command, reward in (("echo hello > /greeting", paid), ("echo bye > /greeting", 0.0), (cheat, 0.0)):
        _, [step] = played(ContainerSettings(cache=str(cache), warm=0), row, [says(command)], max_steps=1)
        assert step.reward == reward, command


def test_a_named_image_is_used(tmp_path: Path, images: Path) -> None:
    assert terminal_task(task(tmp_path / "other", HARBOR), images)[0]["image"] == "some/image:1"
    assert terminal_task(task(tmp_path / "hello", HARBOR), images)[0]["image"] == str(images / "hello")


@pytest.mark.parametrize(
    ("files", "place", "code", "value", "remedy"),
    [
        (TERMINAL_BENCH, "hello/Dockerfile", "not_supported", "not built", "docker build"),
        ({**HARBOR, "task.toml": ""}, "environment/Dockerfile", "not_supported", "not built", "--images"),
        (
            {**HARBOR, "environment/docker-compose.yaml": ""},
            *("docker-compose.yaml", "not_supported", "several containers", "leave"),
        ),
        ({**HARBOR, "task.toml": "["}, "task.toml", "malformed", "parsed", "correct"),
        (
            {**HARBOR, "task.toml": '[environment]\ndocker_image = "a"\nmemory = "much"\n'},
            *("task.toml", "malformed", "environment.memory is 'much'", "correct"),
        ),
        *(
            (
                {**HARBOR, "task.toml": f'{keys}\n[environment]\ndocker_image = "a"\n{more}\n'},
                place,
                "not_supported",
                value,
                "leave",
            )
            for keys, more, place, value in [
                ("[verifier.env]\nKEY = 'x'", "", "task.toml: verifier.env", "variables of its tests"),
                ("[[steps]]\nname = 'one'", "", "task.toml: steps", "several steps"),
                ("", "gpus = 1", "task.toml: environment.gpus", "GPUs"),
                ("", "[[environment.mcp_servers]]\nname = 'a'", "task.toml: environment.mcp_servers", "MCP"),
            ]
        ),
        ({**HARBOR, "instruction.md": " "}, "hello", "missing", "no instruction", "add"),
        ({"task.toml": ""}, "instruction.md", "unreadable", "instruction.md", "give folders"),
        ({"other": ""}, "task.yaml", "unreadable", "task.yaml", "give folders"),
        (
            {name: text for name, text in HARBOR.items() if name != "tests/test.sh"},
            *("hello", "missing", "tests/test.sh", "add"),
        ),
        (
            {**TERMINAL_BENCH, "task.yaml": "instruction: a\nparser_name: swebench"},
            *("task.yaml", "not_supported", "'swebench'", "leave"),
        ),
    ],
)
def test_other_folders_are_refused(
    tmp_path: Path, files: dict[str, str], place: str, code: FaultCode, value: str, remedy: str
) -> None:
    with pytest.raises(DataError) as caught:
        terminal_task(task(tmp_path / "hello", files), None)
    assert_fault(caught.value.faults, place, code, value, remedy)


def test_the_command_gives_all_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(task(tmp_path / name, TERMINAL_BENCH)) for name in ("one", "two")]
    assert main([*folders, "--output", str(tmp_path / "rows.jsonl")]) == BAD_INPUT
    assert "2 faults" in capsys.readouterr().err and not (tmp_path / "rows.jsonl").exists()


def test_limits_are_those_of_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each task's limits by the keys of an environment; the command prints the largest of all tasks."""
    harbor = (
        '[verifier]\ntimeout_sec = 600.0\nenv = {}\n[environment]\ndocker_image = "a"\ncpus = 2\n'
        "memory_mb = 3072\nstorage = '512M'\ngpus = 0\nmcp_servers = []\n"
    )
    bench = {**TERMINAL_BENCH, "task.yaml": TERMINAL_BENCH["task.yaml"] + "max_test_timeout_sec: 900\n"}
    one = terminal_task(task(tmp_path / "one", {**HARBOR, "task.toml": harbor}), None)[1]
    seconds, sizes = "environment_args.verify_seconds", {"container.memory_gib": 3.0, "container.disk_gib": 0.5}
    assert one == {seconds: 600.0, "container.cpus": 2.0, **sizes}
    assert limits_of({"environment": {"memory": "4G", "storage": "1TiB"}}) == {
        "container.memory_gib": 4.0,
        "container.disk_gib": 1024.0,
    }
    assert largest([{"a": 1.0, "b": 3.0}, {"a": 2.0}, {}]) == {"a": 2.0, "b": 3.0}
    (tmp_path / "two.tar").touch()
    folders = [str(tmp_path / "one"), str(task(tmp_path / "two", bench))]
    assert main([*folders, "--output", str(tmp_path / "rows.jsonl"), "--images", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"{seconds}: 900" in said and "container.cpus: 2" in said and "container.memory_gib: 3\n" in said


@pytest.mark.parametrize("value", [0, -1, "soon", True])
def test_a_limit_is_a_number_above_0(value: object) -> None:
    with pytest.raises(ValueError, match="verifier.timeout_sec"):
        limits_of({"verifier": {"timeout_sec": value}})
