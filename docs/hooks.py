"""Hooks of the documentation site: the reports of `reproductions/`, and the command line's help as a page."""

from pathlib import Path

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "reproductions"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every reproduction's report with its figures, and the page of commands."""
    for path in sorted(REPORTS.rglob("*")):
        if path.name == "report.md" or path.suffix == ".png":
            uri = f"reproductions/{path.relative_to(REPORTS).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, "reference/cli.md", content=command_page()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links of reports, which are right in a checkout, lead to the pages of the site."""
    return markdown.replace("](../../docs/", "](../../") if page.file.src_uri.startswith("reproductions/") else markdown


def command_page() -> str:
    """The help of every command, as Markdown."""
    from tutti.cli import app

    command = typer.main.get_command(app)
    with click.Context(command, info_name="tutti") as context:
        return "# Command line\n\nEvery command prints this with `--help`.\n" + _section(command, context)


def _section(command: click.Command, context: click.Context) -> str:
    rows = [
        f"| {_name(parameter)} | {_help(parameter)} |"
        for parameter in command.get_params(context)
        if not getattr(parameter, "hidden", False) and parameter.name != "help"
    ]
    text = f"\n## `{context.command_path}`\n\n{(command.help or '').strip()}\n"
    if rows:
        text += "\n| argument or option | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                with click.Context(inner, info_name=name, parent=context) as own:
                    text += _section(inner, own)
    return text


def _name(parameter: click.Parameter) -> str:
    names = parameter.opts if isinstance(parameter, click.Option) else [(parameter.name or "").upper()]
    return ", ".join(f"`{name}`" for name in names)


def _help(parameter: click.Parameter) -> str:
    text = (getattr(parameter, "help", None) or "").replace("\n", " ").replace("|", "\\|")
    default = parameter.default
    shown = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return f"{text} Default: `{default}`." if shown else text
