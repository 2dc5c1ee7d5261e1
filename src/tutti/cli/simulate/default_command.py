"""A group of commands one of which needs no name."""

import copy
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tutti.errors import UnknownName
from tutti.recipes import RECIPES

DEFAULT = "run"
"""Where a first word goes that names no command."""


class RecipeOrCommand(TyperGroup):
    """`tutti simulate digits` is `tutti simulate run digits`, and the group's help is that of `run`, with the rest."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            _check_word(args[0], [name for name, command in self.commands.items() if not command.hidden])
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        whole = copy.copy(self)
        whole.params, whole.help = self.commands[DEFAULT].params, self.commands[DEFAULT].help
        TyperGroup.format_help(whole, ctx, formatter)


class _OfTheGroup(typer.Context):
    """A command's context that goes by the name of its group."""

    @property
    def command_path(self) -> str:
        assert self.parent is not None
        return self.parent.command_path


class Unnamed(TyperCommand):
    """The command that needs no name: its usage does not mention one."""

    context_class = _OfTheGroup


def _check_word(word: str, commands: list[str]) -> None:
    """Refuse a first word that is neither an option nor a recipe: it may have been meant as a command."""
    if not word.startswith("-") and word not in RECIPES:
        raise UnknownName("recipe or command", word, [*RECIPES, *commands])
