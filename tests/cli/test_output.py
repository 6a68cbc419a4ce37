"""What `fsm-replay` writes is whole or not there, and never takes the place of what a run keeps."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsm_trainer.cli.output import whole_file
from fsm_trainer.cli.replay import main
from fsm_trainer.core.config import SchedulerConfig
from tests.replay.virtual_run import log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=40)
WRITERS = {
    "report": ["report", "-o", "{out}/report.html"],
    "timeline": ["timeline", "-o", "{out}/trace.json"],
    "timeline, compressed": ["timeline", "-o", "{out}/trace.json.gz"],
    "staleness": ["staleness", "--plot", "{out}/plot.png"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return log_of(tmp_path_factory.mktemp("runs") / "run", virtual_run(CONFIG), CONFIG)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: to a writer the same as a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("before", [None, "an earlier one"])
def test_a_full_disk_leaves_what_was_there(
    writer: str, before: str | None, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, option, path = WRITERS[writer]
    target = Path(path.format(out=tmp_path))
    if before is not None:
        target.write_text(before, encoding="utf-8")
    with full_disk(500):
        assert main([command, str(run), option, str(target)]) == 2
    assert f"{target} cannot be written: File too large" in capsys.readouterr().err
    assert [(p.name, p.read_text(encoding="utf-8")) for p in tmp_path.iterdir()] == (
        [] if before is None else [(target.name, before)]
    )
    assert main([command, str(run), option, str(target)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
@pytest.mark.parametrize("form", ["csv", "parquet", "tensorboard"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_full_disk_leaves_no_half_export(
    form: str, existing: bool, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    if existing:
        folder.mkdir()
        (folder / "mine.txt").write_text("mine", encoding="utf-8")
    with full_disk(1000):
        assert main(["export", str(run), "--to", form, "-o", str(folder)]) == 2
    assert f"{folder} cannot be written: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == (["out", "mine.txt"] if existing else [])
    assert main(["export", str(run), "--to", form, "-o", str(folder)]) == 0


@pytest.mark.parametrize("given", ["", "{tmp}/file"])
def test_an_export_needs_a_folder(given: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert main(["export", str(run), "--to", "csv", "-o", given.format(tmp=tmp_path)]) == 2
    assert "expected a folder to write to" in capsys.readouterr().err


@pytest.mark.parametrize("kept", ["events.arrows", "config.json", "checkpoints/step-000002/model.safetensors"])
def test_a_run_s_own_files_are_not_written_over(
    kept: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = log_of(tmp_path / "other", virtual_run(CONFIG), CONFIG)
    path = other / kept
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept", encoding="utf-8")
    before = path.read_bytes()
    for command, option, _ in WRITERS.values():
        if command != "staleness":  # it takes pictures only
            assert main([command, str(run), option, str(path)]) == 2
            assert "exists in a run's folder and is not written over" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_what_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with whole_file(tmp_path / "trace.json") as file:
            file.write_text("half", encoding="utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with whole_file(tmp_path / "link") as file:
        file.write_text("whole", encoding="utf-8")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text(encoding="utf-8") == "whole"
