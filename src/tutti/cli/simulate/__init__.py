"""`tutti simulate`: a recipe on simulated workers; one module for each of its commands."""

import typer

from tutti.cli.simulate.clusters import clusters
from tutti.cli.simulate.group import DEFAULT, RecipeOrCommand, Unnamed
from tutti.cli.simulate.run import run
from tutti.cli.simulate.scaling import scaling

app = typer.Typer(
    help="Train a recipe on a simulated cluster: real gradients, virtual time.",
    cls=RecipeOrCommand,
    no_args_is_help=True,
    subcommand_metavar="| COMMAND [ARGS]...",
)
app.command(DEFAULT, cls=Unnamed, hidden=True)(run)
app.command("scaling")(scaling)
app.command("clusters")(clusters)
