"""`tutti simulate`: training on a simulated cluster. One module per command."""

import typer

from tutti.cli.simulate.clusters import clusters
from tutti.cli.simulate.default_command import DEFAULT, DefaultCommand, DefaultCommandGroup
from tutti.cli.simulate.run import run
from tutti.cli.simulate.scaling import scaling

app = typer.Typer(
    help="Train a recipe on a simulated cluster, with real gradients in virtual time.",
    cls=DefaultCommandGroup,
    no_args_is_help=True,
    subcommand_metavar="| COMMAND [ARGS]...",
)
app.command(DEFAULT, cls=DefaultCommand, hidden=True)(run)
app.command("scaling")(scaling)
app.command("clusters")(clusters)
