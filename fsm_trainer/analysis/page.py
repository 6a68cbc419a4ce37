"""The tables of columns in docs/analysis.md. `python -m fsm_trainer.analysis.page` renews them, as `make docs` does."""

from __future__ import annotations

from pathlib import Path

from fsm_trainer.analysis.columns import COLUMNS

BEGIN, END = "<!-- columns: made by `make docs` -->", "<!-- end of columns -->"
DOCS = Path(__file__).parents[2] / "docs" / "analysis.md"


def tables() -> str:
    """All columns as Markdown."""
    sections = []
    for frame, columns in COLUMNS.items():
        lines = [f"### `{frame}`", "", "| column | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in columns.items()]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def with_tables(page: str) -> str:
    """The page, with today's tables between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}"


if __name__ == "__main__":
    DOCS.write_text(with_tables(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
