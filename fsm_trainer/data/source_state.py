"""What a prompt source must remember between two runs, and its form in a checkpoint. Knows nothing of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

FORMAT = 1
"""Raised when a state written before could not be read any more."""


@dataclass(frozen=True)
class Group:
    """Prompts that are served together."""

    epoch: int
    members: tuple[int, ...]
    attempts: int
    """How often they have been served."""

    def with_attempt(self) -> Group:
        """The same, served once more."""
        return replace(self, attempts=self.attempts + 1)

    def without_attempt(self) -> Group:
        """The same, the last time not counted."""
        return replace(self, attempts=self.attempts - 1)

    def split(self, size: int) -> Iterator[Group]:
        """Parts of at most `size` prompts, in order."""
        for start in range(0, len(self.members), size):
            yield replace(self, members=self.members[start : start + size])


@dataclass(frozen=True)
class SourceState:
    """The state of a prompt source; members of groups are rows of the dataset."""

    seed: int
    shuffle: bool
    rows: int
    fingerprint: str
    """Of the usable prompts' numbers and tokens."""
    epoch: int
    position: int
    """Prompts of this epoch that have been served at least once."""
    returned: list[Group]
    """In the order they will be served; their attempts are those already made."""
    given_up: dict[str, int]
    settled: int

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"format": FORMAT, **asdict(self), "returned": [_to_dict(group) for group in self.returned]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SourceState:
        """The inverse of `to_dict`. ValueError for anything that is no such state."""
        found = values.get("format")
        if found != FORMAT:
            raise ValueError(f"the prompt source's state has format {found!r}, this version reads {FORMAT}")
        missing = sorted({field.name for field in fields(cls)} - values.keys())
        if missing:
            raise ValueError(f"the prompt source's state lacks {', '.join(missing)}; the checkpoint is damaged")
        known = {field.name: values[field.name] for field in fields(cls)}
        groups = [Group(g["epoch"], tuple(g["rows"]), g["attempts"]) for g in values["returned"]]
        return cls(**{**known, "returned": groups})

    def check_same(self, *, seed: int, shuffle: bool, rows: int, fingerprint: str) -> None:
        """ValueError unless the state is of this dataset in this order: it would repeat and skip prompts."""
        if self.seed != seed:
            raise ValueError(
                f"the checkpoint's prompts were shuffled with --seed {self.seed}, got {seed}; give that one"
            )
        if self.shuffle != shuffle:
            spelled = "--shuffle" if self.shuffle else "--no-shuffle"
            raise ValueError(f"the checkpoint's prompts were served with {spelled}; give the same")
        if self.rows != rows:
            raise ValueError(
                f"the checkpoint's dataset had {self.rows} rows, this one has {rows}; give the same dataset"
            )
        if self.fingerprint != fingerprint:
            raise ValueError(
                "the checkpoint's prompts differ from these though there are as many rows: give the same dataset, "
                "tokenizer, --max-prompt-tokens and --disable-thinking"
            )


def _to_dict(group: Group) -> dict[str, Any]:
    return {"epoch": group.epoch, "rows": list(group.members), "attempts": group.attempts}
