"""A command group with a default command: `tutti simulate digits` runs `tutti simulate run digits`."""

import copy
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tutti.errors import UnknownName
from tutti.recipes import OWN_RECIPE, RECIPES

DEFAULT = "run"
"""The command that runs if the first argument names no command."""


class DefaultCommandGroup(TyperGroup):
    """Runs the default command where the first argument names no command. Its help is that of the default command."""

    @property
    def default_command(self) -> Any:
        """The command that runs if the first argument names no command."""
        return self.commands[DEFAULT]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            _check_first_argument(args[0], [name for name, command in self.commands.items() if not command.hidden])
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        merged = copy.copy(self)
        # A shallow copy: the group itself must keep its own parameters for parsing.
        merged.params, merged.help = self.default_command.params, self.default_command.help
        TyperGroup.format_help(merged, ctx, formatter)


class _GroupContext(typer.Context):
    """The context of a command that is shown under the name of its group."""

    @property
    def command_path(self) -> str:
        assert self.parent is not None
        return self.parent.command_path


class DefaultCommand(TyperCommand):
    """The default command: its usage line does not contain its name."""

    context_class = _GroupContext


def _check_first_argument(word: str, commands: list[str]) -> None:
    """Refuse a first argument that is no option and no recipe: it may be a misspelt command."""
    if not word.startswith("-") and ":" not in word and word not in RECIPES:
        error = UnknownName("recipe or command", word, [*RECIPES, *commands])
        error.add_note(OWN_RECIPE)
        raise error
