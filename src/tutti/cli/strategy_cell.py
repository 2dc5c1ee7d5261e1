"""A table cell with the name of a strategy, which breaks into lines only between its options."""

import re
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text


@dataclass(frozen=True)
class StrategyCell:
    """A strategy's name. In a narrow column it breaks after a colon or comma, or before a plus sign."""

    name: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for part in self._parts():
            if lines[-1] and len(lines[-1]) + len(part) > options.max_width:
                lines.append("")
            lines[-1] += part
        # A part that is longer than the column is folded, so that nothing of the name is lost.
        yield Text("\n".join(lines), overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        # At least the longest part, which must not be broken; at most the whole name on one line.
        return Measurement(max(map(len, self._parts()), default=0), len(self.name))

    def _parts(self) -> list[str]:
        # The pattern also matches the empty text at the end, which is dropped.
        return re.findall(r"\+?[^:,+]*[:,]?", self.name)[:-1]
