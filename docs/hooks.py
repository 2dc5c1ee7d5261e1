"""Hooks of the documentation site: the reports of `reproductions/`, and the command line's help as a page."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "reproductions"


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add every reproduction's report with its figures, and the page of commands."""
    from mkdocs.structure.files import File

    for path in sorted(REPORTS.rglob("*")):
        if path.name == "report.md" or path.suffix == ".png":
            uri = f"reproductions/{path.relative_to(REPORTS).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, "reference/cli.md", content=command_page()))
    return files


def on_page_markdown(markdown: str, page: "Page", **_: object) -> str:
    """Fill in the table of compatibility; let links of reports, which are right in a checkout, lead to the site."""
    if page.file.src_uri == "compatibility.md":
        return markdown.replace("<!-- table -->", compatibility_table())
    return markdown.replace("](../../docs/", "](../../") if page.file.src_uri.startswith("reproductions/") else markdown


def compatibility_table() -> str:
    """Every technique of training under one strategy of every family, as Markdown, and notes on what adapts."""
    from tutti.job.compatibility import COLUMNS
    from tutti.strategies.compatibility import TECHNIQUES

    rows = ["| technique | " + " | ".join(COLUMNS) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    notes: list[str] = []
    for name, technique in TECHNIQUES.items():
        cells = []
        for column in COLUMNS.values():
            support = column.support(name)
            if support.text and support.text not in notes:
                notes.append(support.text)
            number = f" ({notes.index(support.text) + 1})" if support.text else ""
            cells.append(support.outcome + number)
        rows.append(f"| {technique.title} | " + " | ".join(cells) + " |")
    listed = "\n".join(f"{number}. {_sentence(note)}" for number, note in enumerate(notes, 1))
    return "\n".join(rows) + "\n\n" + listed


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def command_page() -> str:
    """The help of every command, as Markdown."""
    from tutti.cli import app

    # typer's own classes are not always click's, so attributes are read and no class is asked for.
    return "# Command line\n\nEvery command prints this with `--help`.\n" + _section(
        typer.main.get_command(app), "tutti"
    )


def _section(command: Any, path: str) -> str:
    commands = {name: each for name, each in getattr(command, "commands", {}).items() if not each.hidden}
    default = getattr(command, "default_command", None)  # What a group runs where no command is named.
    rows = [f"| {_name(each)} | {_help(each)} |" for each in (default or command).params if not each.hidden]
    text = f"\n## `{path}`\n\n{inspect.cleandoc((default or command).help or '')}\n"
    if rows:
        text += "\n| argument or option | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    return text + "".join(_section(inner, f"{path} {name}") for name, inner in commands.items())


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`".replace("|", "\\|")
    return ", ".join(f"`{name}`" for name in parameter.opts)


def _help(parameter: Any) -> str:
    text = (parameter.help or "").replace("\n", " ").replace("|", "\\|")
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    shown = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return f"{text} Default: `{default}`." if shown else text
