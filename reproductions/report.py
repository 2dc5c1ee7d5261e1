"""The common form of the reports: source, machine, links, time, claims, sections, limits, and how to run it again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

QUICK_NOTE = (
    "**This is the quick form (`--quick`). It shows that the reproduction runs; it is too small for conclusions.**"
)


@dataclass(frozen=True)
class PaperClaim:
    """A statement of the source, and what was found here."""

    statement: str
    """What the source says, in one phrase."""
    published: str
    """The source's number; "no number" where it gives none."""
    measured: str
    """The corresponding number of this reproduction."""
    agrees: bool | None
    """None where the measurements allow no conclusion."""
    reason: str = ""
    """Why it differs, or under which condition it agrees."""

    def row(self) -> tuple[str, str, str, str]:
        """Return the cells of the claims table."""
        result = {True: "agrees", False: "**differs**", None: "undecided"}[self.agrees]
        return self.statement, self.published, self.measured, f"{result}: {self.reason}" if self.reason else result


@dataclass(frozen=True)
class Section:
    """A titled part of a report: Markdown blocks, separated by blank lines."""

    title: str
    blocks: Sequence[str]

    def markdown(self) -> str:
        """Return heading and blocks; empty blocks are left out."""
        return "\n\n".join([f"## {self.title}", *(block for block in self.blocks if block)])


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a report says; `markdown` puts it into the common form."""

    name: str
    """Name of the reproduction for `tutti reproduce`."""
    title: str
    source: str
    """Full reference of the reproduced work, and which of its material was available."""
    machine: str
    """Machine on which everything was measured or simulated."""
    links: str
    """Network links behind the numbers."""
    time: str
    """Whether times are wall-clock or virtual, and what is assumed about them."""
    quick: bool
    introduction: Sequence[str]
    """Paragraphs: what the source did, and what was done here."""
    criteria: str
    """The thresholds by which a claim agrees or differs."""
    claims: Sequence[PaperClaim]
    sections: Sequence[Section] = field(default=())
    limits: Sequence[str] = field(default=())
    """Paragraphs: what the reproduction cannot show."""

    def markdown(self) -> str:
        """Return the whole report."""
        facts = [("Source", self.source), ("Machine", self.machine), ("Links", self.links), ("Time", self.time)]
        run = f"`tutti reproduce {self.name}`; `--quick` runs a small form"
        facts.append(("Run it", f"{run}; `--report-only` rewrites this report from `results.json`"))
        blocks = [
            f"# {self.title}",
            table(("", ""), [(f"**{label}**", text) for label, text in facts]),
            *([QUICK_NOTE] if self.quick else []),
            *map(prose, self.introduction),
            "## Claims",
            prose(self.criteria),
            table(("claim", "published", "here", "result"), [claim.row() for claim in self.claims]),
            *(section.markdown() for section in self.sections),
        ]
        if self.limits:
            blocks.append(Section("Limits", [prose(text) for text in self.limits]).markdown())
        return "\n\n".join(blocks) + "\n"

    def write(self, folder: Path) -> str:
        """Write `report.md` into the folder, beside its figures; return the text."""
        text = self.markdown()
        (folder / "report.md").write_text(text)
        return text


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], num_text_columns: int | None = None) -> str:
    """Return a Markdown table: the first `num_text_columns` are aligned left, the others right; by default all left."""
    num_left = len(headers) if num_text_columns is None else num_text_columns
    rule = ["---" if column < num_left else "---:" for column in range(len(headers))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, rule, *rows))


def figure(description: str, file: str) -> str:
    """Return a reference to a figure beside the report."""
    return f"![{description}]({file})"


def prose(text: str) -> str:
    """Return a paragraph on one line, so that source code may wrap it anywhere."""
    return " ".join(text.split())


def bullets(items: Iterable[str]) -> str:
    """Return a Markdown list."""
    return "\n".join(f"- {prose(item)}" for item in items)


def value_range(values: Sequence[float], form: str) -> str:
    """Return the smallest and the largest of the values in a number format, or one if they look the same."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def plural(number: int, noun: str) -> str:
    """Return "1 epoch" or "3 epochs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
