"""A group of commands one of which needs no name."""

import copy
from typing import Any

from typer.core import TyperGroup

DEFAULT = "run"
"""Where a first word goes that names no command."""


class RecipeOrCommand(TyperGroup):
    """`tutti simulate digits` is `tutti simulate run digits`, and the group's help is that of `run`, with the rest."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        whole = copy.copy(self)
        whole.params, whole.help = self.commands[DEFAULT].params, self.commands[DEFAULT].help
        TyperGroup.format_help(whole, ctx, formatter)
